"""Tokens of plain texts: a text that continues another, the start token once, one end of a text."""

import numpy as np
import pytest
from tokentools import LLAMA2, SPACE, base_model_tokenizer, opt_like, sentencepiece

from cookbook.data import DataConfig, RenderedPrompt, Renderer, Row
from cookbook.data.datums import conversation_datums, preference_datums
from cookbook.data.encoding import BREAK, TextEncoder
from cookbook.data.formats import Chat, Plain
from cookbook.data.messages import ChatMessage
from cookbook.data.render import TextStream, continues_text
from cookbook.sampling.environments.conversation import Conversation
from cookbook.types import Sample

SCHEMES = ("first", "always", "prepend")


def pieces(render: Renderer, tokens) -> list[str]:
    return list(render.tokenizer.convert_ids_to_tokens(list(tokens)))


def trained(render: Renderer, rendered) -> list[str]:
    return pieces(render, np.asarray(rendered.tokens)[rendered.weights != 0])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("2+2=", "4", ["4"]),
        ("2+2=", " 4", [f"{SPACE}4"]),
        ("def f(x):\n", "    return", [SPACE * 4, "return"]),
        ("a\n", "    ", [SPACE * 4]),
        ("a", "\nb", ["<0x0A>", "b"]),
    ],
)
def test_a_response_continues_its_prompt(scheme, prompt, response, expected):
    render = Renderer(sentencepiece(scheme))
    [rendered] = render.render([Plain("row", prompt, response)])
    assert trained(render, rendered) == [*expected, "</s>"]
    [(before, _)] = render.prompts([Plain("row", prompt)])
    assert rendered.tokens[: len(before)] == before == render.tokenizer(prompt).input_ids
    assert render.tokenizer.decode(rendered.tokens, skip_special_tokens=True) == prompt + response


@pytest.mark.parametrize(("scheme", "expected"), [("first", "4"), ("always", f"{SPACE}4"), ("prepend", f"{SPACE}4")])
def test_a_response_after_a_special_token_is_encoded_as_in_one_text(scheme, expected):
    render = Renderer(sentencepiece(scheme))
    [rendered] = render.render([Plain("row", "a</s>", "4")])
    assert rendered.tokens[:-1] == render.tokenizer("a</s>4").input_ids
    assert trained(render, rendered) == [expected, "</s>"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sections_after_special_tokens_of_a_continuation_are_those_of_a_whole_text(scheme):
    encoder = TextEncoder(sentencepiece(scheme))
    after = encoder.continuation("4</s><s>Hi a", [5])
    whole = encoder.raw(["x4</s><s>Hi a"], [""])[0]
    place = whole.ids.index(2)
    assert after.ids == [encoder.tokenizer.convert_tokens_to_ids("4"), *whole.ids[place:]]
    assert after.offsets[1:] == [(start - 1, end - 1) for start, end in whole.offsets[place:]]


def test_the_tokenizer_itself_is_unchanged():
    tokenizer = sentencepiece("prepend")
    before = tokenizer("2+2= 4").input_ids
    Renderer(tokenizer).render([Plain("row", "2+2=", "4")])
    assert tokenizer("2+2= 4").input_ids == before


def test_pairs_and_instructions_continue_their_prompts():
    render = Renderer(sentencepiece("first"))
    row = Row("row", {"prompt": "2+2=", "chosen": "4", "rejected": "2"})
    sides = preference_datums([row], render, DataConfig())
    assert [pieces(render, one.loss_fn_inputs["target_tokens"].to_numpy())[-2:] for one in sides] == [
        ["4", "</s>"],
        ["2", "</s>"],
    ]
    [datum] = conversation_datums([Row("row", {"instruction": "Hi", "output": "4"})], render, DataConfig())
    assert pieces(render, datum.loss_fn_inputs["target_tokens"].to_numpy())[-3:] == ["<0x0A>", "4", "</s>"]


def test_an_observation_continues_the_completion():
    render = Renderer(sentencepiece("first"))
    example = Plain("row", "2+2=")
    [(tokens, text)] = render.prompts([example])
    talk = Conversation(render, RenderedPrompt(tokens, Row("row", {}), text, "", example), None, [])
    completion = render.encode("4")
    talk.add(Sample(completion, [0.0] * len(completion), "length"))
    talk.observe("2+2=")
    assert pieces(render, talk.tokens[len(tokens) :]) == ["4", "2+2="]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_completion_keeps_the_space_at_its_start(scheme):
    render = Renderer(sentencepiece(scheme))
    for text in (" 4", "    return", "4", ""):
        tokens = [*render.encode(text), *render.answer_end]
        assert render.text(tokens, continues=True) == text
        stream = TextStream(render, (), continues=True)
        assert "".join(stream.add([token], is_last=False) for token in tokens) == text
    # An answer of a conversation begins at its start.
    assert render.text(render.encode(" 4")) == "4"
    example = Plain("row", "2+2=")
    assert continues_text(example) and not continues_text(Chat("row", (ChatMessage("user", "a"),), 1))
    assert continues_text(Chat("row", (ChatMessage("user", "a"), ChatMessage("assistant", "b")), 2))
    [(tokens, text)] = render.prompts([example])
    talk = Conversation(render, RenderedPrompt(tokens, Row("row", {}), text, "", example), None, [])
    completion = render.encode(" 4")
    assert talk.add(Sample(completion, [0.0] * len(completion), "length")).text == " 4"


# ---- the start of a text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["<s>Hi", "Hi"])
def test_a_text_begins_once(prompt):
    render = Renderer(sentencepiece("first"))
    bos = render.tokenizer.bos_token_id
    [rendered] = render.render([Plain("row", prompt, "4")])
    assert rendered.tokens.count(bos) == 1 and rendered.tokens[0] == bos
    [(tokens, _)] = render.prompts([Plain("row", prompt)])
    assert tokens.count(bos) == 1 and tokens == rendered.tokens[: len(tokens)]
    # A text without a prompt.
    [text] = render.render([Plain("row", "", prompt + " 4")])
    assert text.tokens.count(bos) == 1 and text.tokens[0] == bos
    assert text.weights.tolist() == [0.0] + [1.0] * (len(text.tokens) - 1)


def test_a_start_token_that_is_also_the_end_token_is_kept():
    """OPT begins every text with </s>, which is its end-of-text token too."""
    render = Renderer(opt_like())
    end = render.tokenizer.eos_token_id
    [rendered] = render.render([Plain("row", "a", "b")])
    assert pieces(render, rendered.tokens) == ["<|endoftext|>", "a", "b", "<|endoftext|>"]
    assert rendered.tokens == [*render.tokenizer("ab").input_ids, end]
    assert rendered.weights.tolist() == [0, 0, 1, 1]


def test_a_tokenizer_that_only_ends_texts_adds_no_start():
    from tokenizers import processors

    tokenizer = opt_like()
    ends = [("<|endoftext|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=ends)
    assert Renderer(tokenizer).prompts([Plain("row", "a")])[0][0] == tokenizer("a", add_special_tokens=False).input_ids


# ---- the end of a text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>", ""])
def test_a_text_ends_once(end):
    render = Renderer(base_model_tokenizer())
    expected = render.encode(f"b{end or '<|endoftext|>'}")
    for prompt in ("", "a"):
        [rendered] = render.render([Plain("row", prompt, f"b{end}")])
        assert rendered.tokens[len(prompt) :] == expected
        assert rendered.weights[len(prompt) :].all()


def test_a_stop_token_before_the_end_of_a_text_is_trained():
    render = Renderer(base_model_tokenizer())
    [rendered] = render.render([Plain("row", "", "a<|im_end|>\nb")])
    assert rendered.tokens == render.encode("a<|im_end|>\nb<|endoftext|>")
    assert rendered.weights.all()


# ---- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_conversations_keep_the_tokens_of_the_whole_text(scheme):
    render = Renderer(sentencepiece(scheme, LLAMA2))
    messages = (
        ChatMessage("user", "2+2="),
        ChatMessage("assistant", "4"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b"),
    )
    [rendered] = render.render([Chat("row", messages)])
    text = "<s>[INST] 2+2= [/INST] 4</s>[INST] a [/INST] b</s>"
    assert rendered.tokens == render.tokenizer(text, add_special_tokens=False).input_ids
    assert trained(render, rendered) == [f"{SPACE}4", "</s>", f"{SPACE}b", "</s>"]


def test_parts_of_a_broken_text_have_their_places():
    encoder = TextEncoder(sentencepiece("first"))
    text = f"Hi <{BREAK}/s> 4"
    [encoded] = encoder.whole([text], [""])
    assert encoder.tokenizer.eos_token_id not in encoded.ids
    assert encoder.tokenizer.decode(encoded.ids) == "Hi </s> 4"
    last = encoder.tokenizer.convert_tokens_to_ids(f"{SPACE}4")
    assert encoded.ids[-1] == last and text[slice(*encoded.offsets[-1])] == " 4"
