"""Rows of templates whose conversations differ from their generation prompts: trained after the prompt that is sampled.

The templates are small and have the structure of published ones, which are named.
"""

import logging

import numpy as np
import pytest
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cookbook.data import DataConfig, RejectedRows, Renderer, Row, conversation_datums, preference_datums, prompts
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages
from cookbook.errors import ConfigError, DataError
from cookbook.sampling.environments.conversation import Conversation
from cookbook.server.wire import openai
from cookbook.types import Sample
from cookbook.utils.template_options import TEMPLATE_OPTIONS

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
# Nemotron 3: a line end after the tag that opens the reasoning, and none in an answer without reasoning.
NEMOTRON = (
    HEAD
    + "{% if m.role == 'assistant' and '<think>' not in m.content %}<think></think>{% endif %}{{ m.content }}"
    + TAIL
    + "<think>\n{% endif %}"
)
# DeepSeek-R1: reasoning is opened by the prompt, and dropped from every answer.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% elif m.content is none %}[A]"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments + '' }}</call>"
    "{% endfor %}<|im_end|>"
    "{% elif m.role == 'tool' %}[T]{{ m.content }}{% else %}[A]{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[A]<think>\n{% endif %}"
)
# Qwen3.5: an answer without reasoning has an empty block; the prompt opens it, or closes it without enable_thinking.
QWEN = (
    HEAD + "{% if m.role == 'assistant' %}{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{{ m.content }}"
    + TAIL
    + "{% if enable_thinking | default(true) %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Qwen3: only the last answer has the empty block, which the prompt lacks unless enable_thinking is false.
QWEN3 = (
    HEAD
    + "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    + TAIL
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# gpt-oss: reasoning of calls is dropped as soon as a final answer follows, and the end of the last answer is another token.
GPT_OSS = (
    "{% set ns = namespace(final=false) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = true %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}:"
    "{% if m.tool_calls %}{% if m.thinking and not ns.final %}({{ m.thinking }}){% endif %}"
    "call {{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' if loop.last and "
    "not add_generation_prompt else '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
# GLM-4: nothing closes an answer but the token of the next turn.
OPEN = (
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|endoftext|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>{% endif %}"
)
LEADING_LINE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' if m.role == 'assistant' else ' ' }}{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

ASK, FOUR = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MORE, SIX = {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo.\n</think>\n\n4"}
TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def renderer(template: str, **options: object) -> Renderer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if options:
        tokenizer.init_kwargs[TEMPLATE_OPTIONS] = options
    return Renderer(tokenizer)


def wide_renderer(template: str) -> Renderer:
    """With a token for two line ends, as large vocabularies have, and one for each tag."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ĊĊ"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tags = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=tags)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def chat(*messages: dict[str, object], **more: object) -> Chat:
    return Chat("row", parse_messages(messages, "row", "messages"), **more)


def pieces(render: Renderer, *messages: dict[str, object], **more: object) -> list[tuple[str, str]]:
    """Return the text before the trained tokens of each sequence, and that of the trained tokens, which are one run."""
    found = []
    for one in render.sequences([chat(*messages, **more)])[0]:
        places = np.flatnonzero(one.weights)
        assert places[-1] - places[0] == len(places) - 1
        decode = render.tokenizer.decode
        found.append((decode(one.tokens[: places[0]]), decode(one.tokens[places[0] : places[-1] + 1])))
    return found


def sampled(render: Renderer, *messages: dict[str, object]) -> list[int]:
    return render.prompt_tokens(list(messages))


def test_an_answer_follows_the_header_that_is_sampled():
    render = renderer(NEMOTRON)
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert pieces(render, ASK, FOUR) == [(before, "</think>4<|im_end|>")]
    assert pieces(render, ASK, THOUGHT) == [(before, "Two.\n</think>\n\n4<|im_end|>")]
    assert sum("the generation prompt ends with '\\n'" in sentence for sentence in render.notes) == 1
    assert "'</think>'" in render.notes[0]


def test_an_answer_before_another_has_the_header_too():
    """The text of the whole conversation does not show the header that the first answer is sampled after."""
    render = renderer(NEMOTRON)
    first, second = render.sequences([chat(ASK, FOUR, MORE, SIX)])[0]
    assert first.tokens[: len(sampled(render, ASK))] == sampled(render, ASK)
    assert second.tokens[: len(sampled(render, ASK, FOUR, MORE))] == sampled(render, ASK, FOUR, MORE)


def test_reasoning_that_the_prompt_opens_and_the_template_drops_is_trained():
    render = renderer(DEEPSEEK)
    assert pieces(render, ASK, FOUR) == [("[U]2+2?[A]<think>\n", "4<|im_end|>")]
    assert pieces(render, ASK, THOUGHT) == [("[U]2+2?[A]<think>\n", "Two.\n</think>\n\n4<|im_end|>")]
    # An earlier answer has no reasoning when the later one is sampled.
    first, second = pieces(render, ASK, THOUGHT, MORE, SIX)
    assert first == ("[U]2+2?[A]<think>\n", "Two.\n</think>\n\n4<|im_end|>")
    assert second == ("[U]2+2?[A]\n\n4<|im_end|>[U]3+3?[A]<think>\n", "6<|im_end|>")
    with pytest.raises(DataError, match=r'does not print "reasoning_content"'):
        render.sequences([chat(ASK, {**FOUR, "reasoning_content": "Two."})])


def test_calls_of_a_template_that_prints_them_beside_a_null_content_only():
    call = {"role": "assistant", "tool_calls": [TOOL_CALL]}
    found = pieces(renderer(DEEPSEEK), ASK, call, {"role": "tool", "content": "4"}, FOUR)
    assert found[0] == ("[U]2+2?[A]<think>\n", '<call>add {"a": 2}</call><|im_end|>')


def test_different_tags_have_no_token_in_common():
    """The prompt continues with <think>, the row with <b>: the first character is not a part of the header."""
    assert pieces(renderer(DEEPSEEK), ASK, {"role": "assistant", "content": "<b>4</b>"})[0][1] == "<b>4</b><|im_end|>"


def test_tokens_of_the_prompt_are_those_that_are_sampled():
    """The prompt ends with a line end, and the row continues with another: one token in one text, two when sampled."""
    render = wide_renderer(QWEN)
    [one] = render.sequences([chat(ASK, FOUR)])[0]
    prompt = sampled(render, ASK)
    assert one.tokens[: len(prompt)] == prompt
    assert not one.weights[: len(prompt)].any() and one.weights[len(prompt)] == 1
    assert render.tokenizer.decode(one.tokens[len(prompt) :]) == "\n</think>\n\n4<|im_end|>\n"
    assert any("other tokens" in sentence for sentence in render.notes)
    for part, context in zip(render.sequences([chat(ASK, FOUR, MORE, SIX)])[0], ([ASK], [ASK, FOUR, MORE]), strict=True):
        assert part.tokens[: len(sampled(render, *context))] == sampled(render, *context)


def test_a_row_with_reasoning_under_a_prompt_that_closes_it_is_trained_as_printed():
    render = renderer(QWEN, enable_thinking=False)
    assert pieces(render, ASK, FOUR)[0][1] == "4<|im_end|>"
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert pieces(render, ASK, THOUGHT) == [(before, "Two.\n</think>\n\n4<|im_end|>")]
    assert any("{enable_thinking: true}" in sentence for sentence in render.notes)


def test_a_leading_line_end_is_learned_and_named():
    render = renderer(LEADING_LINE_END)
    assert pieces(render, ASK, FOUR)[0][1] == "\n4<|im_end|>"
    assert render.notes == ["answers begin with '\\n', which the generation prompt lacks, so the model learns to write it"]


def test_an_empty_block_can_stay_untrained():
    for template, expected in ((QWEN3, "4<|im_end|>"), (QWEN, "4<|im_end|>")):
        for render in (renderer(template), wide_renderer(template)):
            [[one]] = render.sequences([chat(ASK, FOUR)], empty_reasoning=False)
            assert render.tokenizer.decode([t for t, w in zip(one.tokens, one.weights, strict=True) if w]) == expected
            [[whole]] = render.sequences([chat(ASK, FOUR)])
            assert whole.tokens == one.tokens and whole.weights.sum() > one.weights.sum()


def test_as_few_sequences_as_show_every_answer_as_it_is_sampled():
    """An agent's calls of one question stay together: only the reasoning of calls before a final answer is dropped."""
    call = {"role": "assistant", "tool_calls": [TOOL_CALL], "thinking": "Two."}
    result = {"role": "tool", "content": "4"}
    render = renderer(GPT_OSS)
    found = render.sequences([chat(ASK, call, result, call, result, FOUR)])[0]
    texts = [render.tokenizer.decode([t for t, w in zip(one.tokens, one.weights, strict=True) if w]) for one in found]
    assert "".join(texts).count("(Two.)call add") == 2 and texts[-1] == "4<|im_end|>"
    last = sampled(render, ASK, call, result, call, result)
    # The context of the last answer is the one of its sampling, in which the calls still have their reasoning.
    assert found[-1].tokens[: len(last)] == last and render.tokenizer.decode(last).count("(Two.)") == 2


def test_answers_that_nothing_closes_end_with_the_token_of_the_next_turn():
    render = renderer(OPEN)
    start = render.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert start in render.stop_token_ids
    [one] = render.sequences([chat(ASK, FOUR, MORE, SIX)])[0]
    trained = [t for t, w in zip(one.tokens, one.weights, strict=True) if w]
    assert render.tokenizer.decode(trained) == "4<|im_start|>6<|im_start|>"


def test_pairs_have_one_prompt_and_one_sequence_each():
    render = renderer(QWEN3)
    rows = [Row("row", {"prompt": [ASK], "chosen": [FOUR, MORE, SIX], "rejected": [FOUR, MORE, {**SIX, "content": "7"}]})]
    chosen, rejected = preference_datums(rows, render, DataConfig())
    prompt = sampled(render, ASK, FOUR, MORE)
    for datum, answer in ((chosen, "6"), (rejected, "7")):
        tokens = [*datum.model_input.tokens, int(datum.loss_fn_inputs["target_tokens"].array[-1])]
        assert tokens[: len(prompt)] == prompt
        places = np.flatnonzero(np.concatenate([[0], datum.loss_fn_inputs["weights"].array]))
        text = render.tokenizer.decode([tokens[place] for place in places])
        assert text == f"4<|im_end|><think>\n\n</think>\n\n{answer}<|im_end|>"


def test_every_sentence_about_the_template_is_logged_once(caplog):
    rows = [Row(f"row:{index}", {"messages": [ASK, FOUR, MORE, SIX]}) for index in range(3)]
    refusals = RejectedRows(DataConfig())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(conversation_datums(rows, renderer(QWEN3), DataConfig(), refusals)) == 6
    said = [record.getMessage() for record in caplog.records]
    assert sum("falls back to one sequence per answer" in line for line in said) == 1
    assert sum("answers begin with" in line for line in said) == 1


def test_options_of_the_template_are_those_of_the_row_else_those_of_the_model():
    def prompt(render: Renderer, **values: object) -> str:
        [one] = prompts([Row("row", {"prompt": [ASK], **values})], render, DataConfig())
        return one.text.partition("assistant\n")[2]

    closed, opened = "<think>\n\n</think>\n\n", "<think>\n"
    assert prompt(renderer(QWEN)) == opened
    assert prompt(renderer(QWEN, enable_thinking=False)) == closed
    for options in ({"enable_thinking": False, "other": None}, '{"enable_thinking": false}'):
        assert prompt(renderer(QWEN), chat_template_kwargs=options) == closed
    off = renderer(QWEN, enable_thinking=False)
    assert prompt(off, chat_template_kwargs={"enable_thinking": True}) == opened
    row = {"messages": [ASK, FOUR], "chat_template_kwargs": {"enable_thinking": False}}
    [datum] = conversation_datums([Row("row", row)], renderer(QWEN), DataConfig())
    assert int(datum.loss_fn_inputs["weights"].array.sum()) == 2
    assert off.identity() != renderer(QWEN).identity()
    assert off.prompt_tokens([ASK], {"enable_thinking": True}) == renderer(QWEN).prompt_tokens([ASK])


@pytest.mark.parametrize(
    ("options", "message"),
    [("{", "broken JSON"), ([1], "expected an object"), ({"tools": []}, '"tools" is not an option of the template')],
)
def test_invalid_options_are_refused(options, message):
    from cookbook.engine.model import ModelConfig

    with pytest.raises(DataError, match=rf'^row: "chat_template_kwargs": .*{message}'):
        prompts([Row("row", {"prompt": [ASK], "chat_template_kwargs": options})], renderer(QWEN), DataConfig())
    with pytest.raises(ConfigError, match=rf"^model\.chat_template_kwargs: .*{message}"):
        ModelConfig("tiny", chat_template_kwargs=options)


def test_options_that_the_template_does_not_read_are_named():
    assert renderer(QWEN, enable_thinkin=True).notes == [
        "the chat template does not read enable_thinkin of model.chat_template_kwargs, which therefore has no effect"
    ]


def test_a_saved_tokenizer_keeps_the_options_of_its_training(tmp_path):
    from cookbook.engine.model import ModelConfig, load_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / "base")
    made = load_tokenizer(ModelConfig(str(tmp_path / "base"), chat_template_kwargs={"enable_thinking": False}))
    made.chat_template = QWEN
    made.save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(ModelConfig(str(tmp_path / "saved")))
    assert Renderer(saved).prompt_tokens([ASK]) == renderer(QWEN, enable_thinking=False).prompt_tokens([ASK])
    other = load_tokenizer(ModelConfig(str(tmp_path / "saved"), chat_template_kwargs={"enable_thinking": True}))
    assert Renderer(other).prompt_tokens([ASK]) == renderer(QWEN).prompt_tokens([ASK])


def test_requests_have_options():
    body = '{"model": "m", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": %s}'
    fields = openai.parse(openai.ChatBody, (body % '{"enable_thinking": false}').encode())
    assert fields.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(openai.InvalidField, match=r'chat_template_kwargs: .*"tools" is not an option'):
        openai.parse(openai.ChatBody, (body % '{"tools": []}').encode())


def test_a_conversation_continues_the_reasoning_that_its_prompt_opened():
    """The message has the tag that the prompt printed, so the template finds the reasoning; the tokens are the sampled ones."""
    render = renderer(QWEN)
    [prompt] = prompts([Row("row", {"prompt": [ASK]})], render, DataConfig())
    conversation = Conversation(render, prompt, None, [])
    answer = render.encode("Two.\n</think>\n\n4<|im_end|>")
    conversation.add(Sample(answer, [0.0] * len(answer), "stop"))
    sampled_so_far = list(conversation.tokens)
    conversation.observe("3+3?")
    assert conversation.tokens[: len(sampled_so_far)] == sampled_so_far
    assert len(conversation.branches) == 1
    text = render.tokenizer.decode(conversation.tokens)
    assert text.endswith("4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert text.count("<think>") == 2


def test_a_template_that_prints_the_last_answer_differently_keeps_the_tokens_of_an_episode():
    render = renderer(QWEN3, enable_thinking=False)
    [prompt] = prompts([Row("row", {"prompt": [ASK]})], renderer(QWEN3), DataConfig())
    conversation = Conversation(renderer(QWEN3), prompt, None, [])
    answer = render.encode("4<|im_end|>")
    conversation.add(Sample(answer, [0.0] * len(answer), "stop"))
    conversation.observe("3+3?")
    assert len(conversation.branches) == 1
    assert conversation.tokens == renderer(QWEN3).prompt_tokens([ASK, FOUR, MORE])


def test_an_answer_that_only_closes_the_reasoning_is_one_that_was_sampled():
    """TRL #6361: printed unchanged, the text would follow an empty block of reasoning."""
    said = {"role": "assistant", "content": "Two.\n</think>\n\n4"}
    for template in (NEMOTRON, DEEPSEEK, QWEN):
        render = renderer(template)
        assert pieces(render, ASK, said) == pieces(render, ASK, THOUGHT)
        assert sampled(render, ASK, said, MORE) == sampled(render, ASK, THOUGHT, MORE)
    # A prompt that opens nothing leaves the text unchanged.
    assert pieces(renderer(QWEN3, enable_thinking=False), ASK, said)[0][1] == "Two.\n</think>\n\n4<|im_end|>"


def test_an_answer_before_the_first_question_is_trained_where_it_is_printed():
    """THUDM/slime #1742: the template of Qwen3.5 refuses messages without a question."""
    needs_user = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('No user') }}{% endif %}"
    )
    render = renderer(needs_user + QWEN3)
    greeting = {"role": "assistant", "content": "Hello!"}
    found = pieces(render, {"role": "system", "content": "Be brief."}, greeting, ASK, {**FOUR, "train": False})
    assert found == [("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n", "Hello!<|im_end|>")]


def test_an_episode_whose_template_drops_the_reasoning_goes_into_branches():
    """PrimeIntellect-ai/verifiers #37: the next prompt lacks sampled tokens, so the earlier turn keeps its own tokens."""
    render = renderer(DEEPSEEK)
    [prompt] = prompts([Row("row", {"prompt": [ASK]})], render, DataConfig())
    conversation = Conversation(render, prompt, None, [])
    answer = render.encode("Two.\n</think>\n\n4<|im_end|>")
    conversation.add(Sample(answer, [0.0] * len(answer), "stop"))
    conversation.observe("3+3?")
    assert len(conversation.branches) == 2
    assert conversation.tokens == sampled(render, ASK, THOUGHT, MORE)


# ---- kinds of templates that are not in the zoo ----------------------------------------------------------------------------


def spaced_renderer(template: str) -> Renderer:
    """With GPT-2's division into words, which divides white space by the character that follows it."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ĊĊ", "ĠF"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("Ġ", "F")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    tags = ["<|im_start|>", "<|im_end|>", "<|close|>", "<|sep|>", "<|call|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=tags)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def test_white_space_at_the_end_of_a_prompt_has_the_tokens_that_are_sampled():
    """Two line ends are one token at the end of a prompt, and two in front of a word."""
    render = spaced_renderer(
        HEAD.replace("\n", "\n\n") + "{{ m.content }}" + TAIL.replace("assistant\n", "assistant\n\n{% endif %}")
    )
    assert len(render.encode("\n\n")) == 1 and len(render.encode("\n\nFour")) == 6
    for answer in ("Four", "4", "\tFour", "Four"):
        [one] = render.sequences([chat(ASK, {**FOUR, "content": answer})])[0]
        prompt = sampled(render, ASK)
        assert one.tokens[: len(prompt)] == prompt and one.weights[len(prompt)] == 1
    found = render.sequences([chat(ASK, FOUR, MORE, SIX)])[0]
    for one, context in zip(found, ([ASK], [ASK, FOUR, MORE]), strict=True):
        assert one.tokens[: len(sampled(render, *context))] == sampled(render, *context)


def test_a_block_behind_a_space_begins_where_sampling_begins():
    """LLaVA: the prompt ends with "ASSISTANT:", and the block begins after a space, which is a part of the first word."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: "
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    render = spaced_renderer(template)
    [one] = render.sequences([chat(ASK, {**FOUR, "content": "Four"})])[0]
    prompt = sampled(render, ASK)
    assert one.tokens == [*prompt, *render.encode(" Four"), render.tokenizer.eos_token_id]
    assert one.weights.tolist() == [0] * len(prompt) + [1] * 5
    # Other text in front of a block stays untrained, as the template says.
    render = spaced_renderer(template.replace("ASSISTANT: {%", "ASSISTANT: -{%"))
    [one] = render.sequences([chat(ASK, {**FOUR, "content": "Four"})])[0]
    assert one.weights.sum() == 5 and one.weights[len(prompt)] == 0


def test_a_token_that_closes_parts_of_an_answer_does_not_end_it():
    """Kimi-K3: <|close|> ends the reasoning, the response and the message, and another token ends the turn."""
    head = "{% for m in messages %}<|im_start|>{{ m.role }}<|sep|>"
    parts = "{% if m.role == 'assistant' %}<|close|>think<|sep|>{% endif %}{{ m.content }}<|close|>text<|sep|><|im_end|>"
    render = spaced_renderer(head + parts + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|sep|>{% endif %}")
    for eos in ("<|im_end|>", "<|call|>"):
        render.tokenizer.eos_token = eos
        made = Renderer(render.tokenizer)
        assert set(made.stop_token_ids) == set(made.tokenizer.convert_tokens_to_ids(["<|im_end|>", eos]))
        assert pieces(made, ASK, FOUR)[0][1] == "<|close|>think<|sep|>4<|close|>text<|sep|><|im_end|>"


def test_a_call_behind_a_stop_token_is_trained():
    """GigaChat 3 closes the empty text of an answer with a call, and prints the call as a turn of its own."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% for call in m.tool_calls or [] %}<|im_start|>call\n{{ call.function.name }}<|im_end|>\n{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    render = renderer(template)
    call = {"role": "assistant", "tool_calls": [TOOL_CALL]}
    [one] = render.sequences([chat(ASK, call, {"role": "tool", "content": "4"}, FOUR)])[0]
    trained = render.tokenizer.decode([t for t, w in zip(one.tokens, one.weights, strict=True) if w])
    assert trained == "<|im_end|>\n<|im_start|>call\nadd<|im_end|>4<|im_end|>"
    assert any("'<|im_end|>' inside of answers that call tools" in note for note in render.notes)


def test_an_answer_that_the_template_closes_twice_ends_once():
    """Apriel 1.5 prints the end of an answer twice in a row; and some templates always print the header to sample."""
    for behind in ("<|im_end|>\n", "\n<|im_end|>", "<|im_start|>assistant\n"):
        template = HEAD + "{{ m.content }}<|im_end|>\n{% if m.role == 'assistant' %}" + behind + "{% endif %}{% endfor %}"
        render = renderer(template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
        for messages in ((ASK, FOUR), (ASK, FOUR, MORE, SIX)):
            for one in render.sequences([chat(*messages)])[0]:
                trained = render.tokenizer.decode([t for t, w in zip(one.tokens, one.weights, strict=True) if w])
                assert trained in ("4<|im_end|>", "6<|im_end|>", "4<|im_end|>6<|im_end|>")


def test_answers_without_an_end_have_a_sequence_each():
    """Falcon and Vicuna-like templates: no token closes an answer, so only the end of a sequence teaches to stop."""
    template = (
        "{% for m in messages %}{{ 'User: ' if m.role == 'user' else 'Bot: ' }}{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Bot:{% endif %}"
    )
    render = renderer(template)
    assert pieces(render, ASK, FOUR, MORE, SIX) == [
        ("User: 2+2?\nBot:", " 4\n<|im_end|>"),
        ("User: 2+2?\nBot: 4\nUser: 3+3?\nBot:", " 6\n<|im_end|>"),
    ]
    assert any("does not close answers with a special token" in note for note in render.notes)


# DeepSeek V3.2: the prompt has an empty block, and a conversation only the last tag of it.
CLOSES = (
    HEAD
    + "{% if m.role == 'assistant' %}{{ '</think>' if PART else '<think></think>' }}{% endif %}{{ m.content }}"
    + TAIL
    + "{% if thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
# DeepSeek V3.1 drops the reasoning of answers.
DROPS = CLOSES.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize("template", [CLOSES.replace("PART", "true"), DROPS.replace("PART", "false")])
def test_an_empty_block_of_reasoning_is_not_printed_twice(template):
    start = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    render = renderer(template)
    assert pieces(render, ASK, FOUR) == [(start + "<think></think>", "4<|im_end|>")]
    # An answer with reasoning is sampled where the prompt leaves the reasoning open.
    assert pieces(render, ASK, THOUGHT) == [(start, "<think>\nTwo.\n</think>\n\n4<|im_end|>")]
    assert any("{enable_thinking: true}" in note for note in render.notes)


def test_reasoning_continues_the_tag_of_the_prompt():
    """Spark 2.5: the prompt opens the reasoning, and a conversation has only the last tag of an empty block."""
    render = renderer(CLOSES.replace("PART", "true"), thinking=True)
    before = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>"
    assert pieces(render, ASK, FOUR) == [(before, "</think>4<|im_end|>")]
    assert pieces(render, ASK, THOUGHT) == [(before, "\nTwo.\n</think>\n\n4<|im_end|>")]


def test_an_empty_block_that_the_template_prints_before_reasoning_is_named():
    """As in TRL's mask of Qwen3.8: the conversation has the prompt that is sampled, so the template decides."""
    render = renderer(CLOSES.replace("PART", "false"), thinking=True)
    assert pieces(render, ASK, THOUGHT)[0][1] == "</think><think>\nTwo.\n</think>\n\n4<|im_end|>"
    assert any("give their reasoning in the field reasoning_content" in note for note in render.notes)
    assert not any("reasoning_content" in note for note in (renderer(QWEN3), pieces(renderer(QWEN3), ASK, THOUGHT))[0].notes)


def test_a_header_with_other_white_space_is_the_same_header():
    template = (
        "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else '  BOT: ' }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}BOT:\n{% endif %}"
    )
    assert pieces(renderer(template), ASK, FOUR) == [("USER: 2+2?<|im_end|>BOT:\n", "4<|im_end|>")]
