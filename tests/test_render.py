"""Rendering: the tokens are the template's, and the weights lie on what the model writes and nothing else."""

import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

from cookbook.data import Renderer
from cookbook.data.byte_tokenizer import byte_tokenizer
from cookbook.data.render import _tokens_of
from cookbook.errors import DataError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four é"},
    {"role": "user", "content": "日本?"},
    {"role": "assistant", "content": "東京"},
]
TEXTS = ["", " ", "plain", "é日本🙂\x00\n\t  two  spaces ", "<|im_start|>user\nhi<|im_end|>\n", "a\u0301 \ufeff"]

# Templates without generation blocks, each with a habit that real ones have.
PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # answers before the last lose the thought that the last one gets
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_OTHERWISE = PLAIN_CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
ENDS_ALL = PLAIN_CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
TRIMS = PLAIN_CHATML.replace("m.content", "m.content | trim")
DROPS = PLAIN_CHATML.replace("m.content", "m.content.split('</think>')[-1]")
ONLY_CONTENT = PLAIN_CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
)
LEFT_OPEN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def renderer(template: str | None = "") -> Renderer:
    """Of the byte tokenizer, with another template than its own or none."""
    tokenizer = byte_tokenizer()
    if template != "":
        tokenizer.chat_template = template
    if template == ENDS_ALL:
        tokenizer.eos_token = "<|endoftext|>"
    return Renderer(tokenizer)


def trained(render: Renderer, rendered) -> list[str]:
    """The runs of trained tokens, as text."""
    places = np.flatnonzero(rendered.weights)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []
    return [render.tokenizer.decode([rendered.tokens[index] for index in run]) for run in runs]


def test_byte_tokenizer_is_complete(tmp_path):
    from transformers import AutoTokenizer

    byte_tokenizer(max_length=77).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (byte_tokenizer(max_length=77), loaded):
        assert (len(tokenizer), tokenizer.model_max_length) == (259, 77)
        assert tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.eos_token == "<|im_end|>"
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("é日🙂")) == 9  # one token a byte
        assert len(tokenizer.encode("<|im_start|>x<|im_end|>")) == 3
    assert loaded.apply_chat_template(TURNS, tokenize=False) == byte_tokenizer().apply_chat_template(TURNS, tokenize=False)


@pytest.mark.parametrize("template", ["", PLAIN_CHATML, ONLY_CONTENT, TRIMS, ENDS_ALL])
def test_tokens_are_the_templates(template):
    render = renderer(template)
    tokenizer = render.tokenizer

    def spelled(turns, **options):
        return tokenizer(tokenizer.apply_chat_template(turns, tokenize=False, **options), add_special_tokens=False).input_ids

    assert render.conversation(TURNS).tokens == spelled(TURNS)
    assert render.prompt_tokens(TURNS[:2]) == spelled(TURNS[:2], add_generation_prompt=True)


@pytest.mark.parametrize("template", ["", PLAIN_CHATML, ONLY_CONTENT, ENDS_ALL])
def test_answers_are_trained_to_their_end_of_turn_and_nothing_else_is(template):
    render = renderer(template)
    assert trained(render, render.conversation(TURNS)) == ["Four é<|im_end|>", "東京<|im_end|>"]
    assert trained(render, render.conversation(TURNS, "last_assistant")) == ["東京<|im_end|>"]
    assert render.conversation(TURNS, "all").weights.tolist() == [1.0] * len(render.conversation(TURNS).tokens)


@pytest.mark.parametrize("template", ["", PLAIN_CHATML])
def test_what_is_sampled_continues_what_is_trained(template):
    render = renderer(template)
    whole = render.conversation(TURNS)
    prompt = render.prompt_tokens(TURNS[:4])
    assert whole.tokens[: len(prompt)] == prompt
    assert whole.weights[len(prompt)] == 1  # the first token of the answer counts


@pytest.mark.parametrize("template", ["", PLAIN_CHATML])
def test_message_weights_only_take_away(template):
    render = renderer(template)
    silent = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:]]
    whole, part = render.conversation(TURNS), render.conversation(silent)
    assert part.tokens == whole.tokens
    assert trained(render, part) == ["東京<|im_end|>"]
    assert render.conversation([*TURNS[:4], {**TURNS[4], "weight": 1}]).weights.tolist() == whole.weights.tolist()
    half = render.conversation([*TURNS[:4], {**TURNS[4], "weight": 0.5}])
    assert sorted(set(half.weights.tolist())) == [0.0, 0.5, 1.0]
    everything = render.conversation(silent, "all")
    untrained = [token for token, weight in zip(everything.tokens, everything.weights, strict=True) if weight == 0]
    assert render.tokenizer.decode(untrained) == "Four é<|im_end|>"


def test_trimmed_answers_and_literal_stop_tokens():
    render = renderer(TRIMS)
    assert trained(render, render.conversation([*TURNS[:4], {"role": "assistant", "content": "  x \n"}]))[-1] == "x<|im_end|>"
    # Sampling would end at the stop token in the middle, so training does.
    render = renderer(PLAIN_CHATML)
    assert trained(render, render.conversation([TURNS[1], {"role": "assistant", "content": "a<|im_end|>b"}])) == ["a<|im_end|>"]


def test_templates_that_rewrite_history_are_refused_where_it_matters():
    render = renderer(FORGETFUL)
    with pytest.raises(DataError, match=r"rewrites message 2 .*set data\.train_on=each_assistant .* or last_assistant"):
        render.conversation(TURNS)
    assert trained(render, render.conversation(TURNS, "last_assistant")) == ["<think></think>東京<|im_end|>"]
    assert trained(render, render.conversation(TURNS[:3])) == ["<think></think>Four é<|im_end|>"]


def test_templates_that_cannot_be_trained_are_refused():
    with pytest.raises(DataError, match=r"shows message 2 otherwise than it begins .*as model\.chat_template"):
        renderer(OPENS_OTHERWISE).conversation(TURNS)
    with pytest.raises(DataError, match="drops text of message 1"):
        renderer(DROPS).conversation([TURNS[1], {"role": "assistant", "content": "<think>why</think>4"}])
    with pytest.raises(DataError, match="begins with an answer"):
        renderer(PLAIN_CHATML).conversation(TURNS[2:])
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with the user\nplease') }}{% endif %}"
    with pytest.raises(DataError, match=r"^conversation: the chat template refuses the row: Begin with the user; mend"):
        renderer(alternate).conversation(TURNS)


def test_no_template_is_one_line_and_plain_text_needs_none():
    render = renderer(None)
    with pytest.raises(DataError, match=r"^model\.chat_template: the tokenizer of .* has no chat template") as error:
        render.prompt_tokens(TURNS[:2])
    assert "\n" not in str(error.value)
    assert render.text(render.prompt_tokens("plain")) == "plain"
    assert render.stop_token_ids == (render.tokenizer.eos_token_id,)


def test_an_answer_left_open_is_closed():
    render = renderer(LEFT_OPEN)
    assert trained(render, render.conversation(TURNS[1:3])) == ["Four é<|im_end|>"]


def test_stop_tokens_are_end_of_text_and_end_of_turn():
    tokenizer = byte_tokenizer()
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert Renderer(tokenizer).stop_token_ids == (turn,)
    tokenizer.eos_token = "<|endoftext|>"
    assert Renderer(tokenizer).stop_token_ids == (end, turn)
    render = Renderer(tokenizer)
    assert render.text([*tokenizer.encode("Four é"), turn]) == "Four é"
    assert render.text([*tokenizer.encode(" a "), end]) == " a "
    assert render.text(tokenizer.encode("cut off")) == "cut off"


def test_plain_text_begins_as_the_tokenizer_says_and_ends_once():
    render = renderer()
    bos, eos = render.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    render.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", bos), ("<|im_end|>", eos)]
    )
    ids = render.tokenizer("ab", add_special_tokens=False).input_ids
    assert render.prompt_tokens("ab") == [bos, *ids]  # a prompt does not end the text


def test_tokens_of_a_span_with_and_without_white_space_in_the_offsets():
    text = "A:  x y\n\nB"
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for trims in (False, True):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        assert _tokens_of(2, 7, offsets) == (2, 7)  # one token a byte
        assert _tokens_of(3, 5, offsets) == (3, 5)
    assert _tokens_of(2, 6, [(0, 2), (2, 3), (2, 3), (2, 3), (3, 7), (7, 8)]) == (1, 5)  # one character of three tokens


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match="Slow is not a fast tokenizer"):
        Renderer(Slow())
