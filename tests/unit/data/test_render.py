"""Rendering: the tokens are the template's, and the weights lie on what the model writes and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import byte_tokenizer
from tokenizers import pre_tokenizers, processors

from cookbook.data import Renderer
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages
from cookbook.data.render import _tokens_of
from cookbook.data.rows import EmptyRowError
from cookbook.data.template import ChatTemplate
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
    # A stop token that the answer spells is text, and one at its end is the end of the turn.
    render = renderer(PLAIN_CHATML)
    for content in ("a<|im_end|>b", "a<|im_end|>b<|im_end|>", "a<|im_end|>b<|im_end|>\n"):
        rendered = render.conversation([TURNS[1], {"role": "assistant", "content": content}])
        assert trained(render, rendered) == ["a<|im_end|>b<|im_end|>"]
        assert rendered.tokens.count(render.tokenizer.eos_token_id) == 2


def test_templates_that_rewrite_history_have_a_sequence_for_each_answer():
    render = renderer(FORGETFUL)
    parts = render.sequences([Chat("row", parse_messages(TURNS, "row", "messages"))])[0]
    assert [trained(render, one) for one in parts] == [["<think></think>Four é<|im_end|>"], ["<think></think>東京<|im_end|>"]]
    assert [one.num_messages for one in parts] == [3, 5]
    assert trained(render, render.conversation(TURNS, "last_assistant")) == ["<think></think>東京<|im_end|>"]
    assert trained(render, render.conversation(TURNS[:3])) == ["<think></think>Four é<|im_end|>"]
    # One sequence, as of a pair: the first answer as it is printed before the last.
    assert trained(render, render.conversation(TURNS)) == ["Four é<|im_end|>", "<think></think>東京<|im_end|>"]


def test_templates_that_cannot_be_trained_are_refused():
    with pytest.raises(DataError, match="drops text of message 1"):
        renderer(DROPS).conversation([TURNS[1], {"role": "assistant", "content": "<think>why</think>4"}])
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with the user\nplease') }}{% endif %}"
    with pytest.raises(DataError, match=r"^conversation: the chat template rejects the row: Begin with the user; fix"):
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


@pytest.mark.parametrize("has_first", [True, False], ids=["prints no messages", "needs a message"])
def test_a_conversation_may_begin_with_an_answer(has_first):
    """Data of characters begin with a greeting; axolotl leaves it out."""
    template = PLAIN_CHATML if has_first else "{% if messages[0].role %}{% endif %}" + PLAIN_CHATML
    render = renderer(template)
    greeting = {"role": "assistant", "content": "Welcome"}
    assert trained(render, render.conversation([greeting, *TURNS[1:3]])) == ["Welcome<|im_end|>", "Four é<|im_end|>"]
    assert trained(render, render.conversation([greeting])) == ["Welcome<|im_end|>"]


# Templates in the manner of published ones, as far as tools, calls and reasoning go.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    '<tool_call>{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_GENERATION = QWEN.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' %}{% generation %}").replace(
    "{% elif m.role == 'tool' %}", "{% endgeneration %}{% elif m.role == 'tool' %}"
)
LLAMA = (  # one call per message, without text
    "{% if tools %}[tools]{{ tools | tojson }}[/tools]{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{{ {'name': call.name, 'parameters': call.arguments} | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ADDS_TEXT = QWEN.replace("{{ call.arguments | tojson }}", "{{ '' + call.arguments }}")  # DeepSeek-V3's
PRINTS_AS_IS = QWEN.replace("{{ call.arguments | tojson }}", "{{ call.arguments }}")
FIRST_CALL_ONLY = QWEN.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
NO_TOOL_ROLE = PLAIN_CHATML.replace("{{ m.content }}", "{% if m.role != 'tool' %}{{ m.content }}{% endif %}")
NAMES = PLAIN_CHATML.replace("{{ m.role }}", "{{ m.role ~ (' ' ~ m.name if m.name else '') }}")

TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
ASK = {"role": "user", "content": "Rain in Ürümqi?"}


def call(*arguments, **more):
    calls = [{"type": "function", "function": {"name": "weather", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


CALL = call({"city": 'Ürümqi "old\ntown"'})
RESULT = {"role": "tool", "content": "dry", "tool_call_id": "call_1"}
DRY = {"role": "assistant", "content": "No."}


def chat(*messages, tools=None) -> Chat:
    return Chat("train.jsonl:7", parse_messages(messages, "train.jsonl:7", "messages"), tools=tools)


# As Mistral's: calls need the object "function" and an identifier of nine letters and digits, schemas the object "function".
STRICT_CALLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for call in m.tool_calls or [] %}{% if call.id is undefined or call.id | length != 9 %}"
    "{{ raise_exception('identifiers have nine characters') }}{% endif %}{{ call.id }}:{{ call.function.name + '' }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ m.content }}{{ m.tool_call_id }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("ids", "results", "expected"),
    [
        (("call_abc", "call_def"), ("call_def", "call_abc"), ("call00001", "call00000")),
        ((None, None), (None, None), ("call00000", "call00001")),
        (("abcdefghi", "abcdefghj"), ("abcdefghi", "abcdefghj"), ("abcdefghi", "abcdefghj")),
    ],
)
def test_calls_in_a_form_that_the_template_rejects_get_the_standard_form(ids, results, expected):
    """OpenAI's identifiers and calls without an object "function" are rejected by Mistral's templates."""
    calls = [{"id": one, "name": "weather", "arguments": {}} if one else {"name": "weather", "arguments": {}} for one in ids]
    if ids[0] == "abcdefghi":
        calls = [{"id": one["id"], "function": {"name": "weather", "arguments": {}}} for one in calls]
    said = [{"role": "tool", "content": "dry", **({"tool_call_id": one} if one else {})} for one in results]
    tools = ({"name": "weather", "parameters": {}},) if ids[0] != "abcdefghi" else TOOLS
    render = renderer(STRICT_CALLS)
    row = chat(ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *said, DRY, tools=tools)
    [found] = render.render([row])
    text = render.printed(found.tokens)
    assert [f"dry{one}<|im_end|>" in text for one in expected] == [True, True]
    assert text.index(f"dry{expected[0]}") < text.index(f"dry{expected[1]}")
    assert trained(render, found)[0].startswith(("call00000:weather", "abcdefghi:weather"))
    # The prompt of the last answer has the same identifiers.
    [(prompt, _)] = render.prompts([Chat("row", row.messages[:-1], len(row.messages) - 1, tools=tools)])
    assert found.tokens[: len(prompt)] == prompt


@pytest.mark.parametrize("result", ["function", "tool"])
def test_a_function_call_of_the_older_form_is_a_call(result):
    render = renderer(QWEN)
    older = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    row = chat(ASK, older, {"role": result, "name": "weather", "content": "dry"}, DRY, tools=TOOLS)
    newer = chat(ASK, call({"city": "Rome"}), {"role": "tool", "name": "weather", "content": "dry"}, DRY, tools=TOOLS)
    assert render.render([row])[0].tokens == render.render([newer])[0].tokens


@pytest.mark.parametrize("template", [QWEN, QWEN_GENERATION])
def test_tools_calls_and_reasoning_are_rendered_by_the_template(template):
    render = renderer(template)
    thoughtful = {**CALL, "reasoning_content": "look"}
    spelled = '{"city": "Ürümqi \\"old\\ntown\\""}'
    answers = [
        "<think>\nlook\n</think>\n\n" + f'<tool_call>{{"name": "weather", "arguments": {spelled}}}</tool_call><|im_end|>',
        "No.<|im_end|>",
    ]
    for arguments in (CALL["tool_calls"][0]["function"]["arguments"], spelled):
        messages = [ASK, {**thoughtful, "tool_calls": call(arguments)["tool_calls"]}, RESULT, DRY]
        [found] = render.render([chat(*messages, tools=TOOLS)])
        assert trained(render, found) == answers
        text = render.tokenizer.apply_chat_template([ASK, thoughtful, RESULT, DRY], tools=list(TOOLS), tokenize=False)
        assert render.tokenizer.decode(found.tokens) == text and '"parameters"' in text
    assert render.unused_fields == ["tool_call_id"]
    for name in ("thinking", "reasoning"):  # transformers passes them on under the usual name
        [found] = render.render([chat(ASK, {**DRY, name: "look"})])
        assert trained(render, found) == ["<think>\nlook\n</think>\n\nNo.<|im_end|>"]
    prompt = chat(ASK, thoughtful, RESULT, tools=TOOLS)
    [(_, text)] = render.prompts([replace(prompt, start=3)])
    assert "Ürümqi" in text and "dry" in text and '"weather"' in text


def test_generation_blocks_are_the_tokens_that_transformers_marks():
    render = renderer(QWEN_GENERATION)
    messages = [ASK, CALL, RESULT, DRY]
    marked = render.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ours = render.conversation(messages)
    assert ours.tokens == marked["input_ids"]
    behind = {
        index
        for index, (mask, weight) in enumerate(zip(marked["assistant_masks"], ours.weights, strict=True))
        if mask != weight
    }
    assert [render.tokenizer.decode([ours.tokens[index]]) for index in sorted(behind)] == [
        "<|im_end|>"
    ] * 2  # ours train it too


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (PLAIN_CHATML, [ASK, DRY], TOOLS, r'does not print "tools"; remove it from the data'),
        (PLAIN_CHATML, [ASK, CALL, RESULT, DRY], None, r'does not print "tool_calls" of message 1 \(assistant\); remove it'),
        (PLAIN_CHATML, [ASK, {**DRY, "thinking": "why"}], None, r'does not print "thinking" of message 1 \(assistant\)'),
        (PLAIN_CHATML, [ASK, {**DRY, "reasoning_content": "why"}], None, r'does not print "reasoning_content" of message 1'),
        (PLAIN_CHATML, [{**ASK, "name": "Ann"}, DRY], None, r'does not print "name" of message 0 \(user\)'),
        (PLAIN_CHATML, [{**ASK, "images": ["a.png"]}, DRY], None, r'does not print "images" of message 0 \(user\)'),
        (PLAIN_CHATML, [ASK, {**DRY, "function_call": {"name": "a"}}], None, r'does not print "function_call" of message 1'),
        (NO_TOOL_ROLE, [ASK, DRY, RESULT, DRY], None, r"does not print message 2 \(tool\)"),
        (LLAMA, [ASK, {**CALL, "content": "Let me see."}, RESULT, DRY], None, r"does not print message 1 \(assistant\)"),
        (LLAMA, [ASK, call({}, {}), RESULT, DRY], None, r"rejects the row: only single tool-calls"),
        (FIRST_CALL_ONLY, [ASK, call({"city": "Rome"}, {"city": "Rome"})], None, r"drops text of message 1 \(tool_calls\)"),
        (FIRST_CALL_ONLY, [ASK, call({"a": "x"}, {"a": "y"}, weight=0), DRY], None, r"drops text of message 1 \(tool_calls\)"),
    ],
)
def test_what_a_template_does_not_print_is_refused_by_row_and_name(template, messages, tools, message):
    render = renderer(template)
    for _ in range(2):  # what is known of a template must not hide a row that is like an earlier one
        with pytest.raises(DataError, match=rf"^train\.jsonl:7: the chat template {message}"):
            render.render([chat(*messages, tools=tools)])
    if not template.startswith(FIRST_CALL_ONLY):
        with pytest.raises(DataError, match=rf"^train\.jsonl:7: the chat template {message}"):
            render.prompts([replace(chat(*messages, tools=tools), start=len(messages))])


def test_a_template_without_text_beside_calls():
    render = renderer(LLAMA)
    [found] = render.render([chat(ASK, call({"city": "Rome"}), RESULT, DRY, tools=TOOLS)])
    assert trained(render, found) == ['{"name": "weather", "parameters": {"city": "Rome"}}<|im_end|>', "No.<|im_end|>"]
    [found] = render.render([chat(ASK, {**DRY, "tool_calls": []})])  # Arrow represents missing calls so
    assert trained(render, found) == ["No.<|im_end|>"]


@pytest.mark.parametrize("template", [ADDS_TEXT, PRINTS_AS_IS])
def test_a_template_that_takes_arguments_as_text_gets_text(template):
    render = renderer(template)
    for one in (CALL, call({"city": "Rome", "days": 2}), call('{"city": "Rome", "days": 2}')):
        [found] = render.render([chat(ASK, one, RESULT, DRY)])
    assert (
        trained(render, found)[0]
        == '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call><|im_end|>'
    )


def test_fields_that_say_nothing_to_the_model_are_named_once():
    render = renderer(PLAIN_CHATML)
    rows = [chat({**ASK, "id": 7, "lang": ""}, {**DRY, "id": 8, "at": "noon"}, {**RESULT, "name": "weather"}, DRY)] * 2
    assert len(render.render(rows)) == 2
    assert render.unused_fields == ["id", "at", "tool_call_id", "name"]
    render = renderer(NAMES)
    assert "Ann" in render.tokenizer.decode(render.render([chat({**ASK, "name": "Ann"}, DRY)])[0].tokens)
    assert render.unused_fields == []


def test_a_shape_of_message_is_tried_once(monkeypatch):
    """Known fields cost nothing: a row is rendered as often as if its fields were plain."""
    render = renderer(QWEN)
    row = chat(ASK, {**CALL, "reasoning_content": "look"}, RESULT, DRY, tools=TOOLS)
    render.render([row])
    counted = []
    whole = ChatTemplate._render
    monkeypatch.setattr(ChatTemplate, "_render", lambda self, *rest, **more: counted.append(1) or whole(self, *rest, **more))
    render.render([row] * 5)
    assert len(counted) == 5 * 4  # the row, the prompts of both answers, and the first answer as the last message


@pytest.mark.parametrize("template", [QWEN, QWEN_GENERATION])
def test_reasoning_that_a_later_turn_removes_is_trained_in_a_sequence_of_its_own(template):
    turns = [ASK, {**DRY, "reasoning_content": "look"}, ASK, DRY]
    render = renderer(template)
    parts = render.sequences([chat(*turns)])[0]
    assert [trained(render, one) for one in parts] == [["<think>\nlook\n</think>\n\nNo.<|im_end|>"], ["No.<|im_end|>"]]
    assert trained(render, render.render([chat(*turns)], "last_assistant")[0]) == ["No.<|im_end|>"]
    with pytest.raises(DataError, match=r"drops text of message 1 \(reasoning_content\)"):
        renderer(template).render([chat(*turns)], "all")


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_an_empty_answer_is_not_trained(train_on):
    render = renderer(PLAIN_CHATML)
    for content in ("", " \n"):
        with pytest.raises(EmptyRowError, match=r'^train\.jsonl:7: message 1 is an empty answer.*"train": false'):
            render.render([chat(ASK, {**DRY, "content": content})], train_on)
    [found] = render.render([chat(ASK, {**DRY, "content": "", "train": False}, ASK, DRY)], train_on)
    assert trained(render, found)[-1].endswith("No.<|im_end|>" if train_on != "all" else "<|im_end|>\n")
    [found] = render.render([replace(chat(ASK, {**DRY, "content": ""}, ASK, DRY), start=3)], "assistant")
    assert trained(render, found) == ["No.<|im_end|>"]


@pytest.mark.parametrize("template", ["", PLAIN_CHATML, QWEN_GENERATION])
def test_messages_that_are_not_to_be_trained(template):
    render = renderer(template)
    turns = [ASK, {**DRY, "content": "Yes.", "train": False}, ASK, DRY]
    assert trained(render, render.render([chat(*turns)])[0]) == ["No.<|im_end|>"]
    everything = render.render([chat(*turns)], "all")[0]
    untrained = [token for token, weight in zip(everything.tokens, everything.weights, strict=True) if weight == 0]
    assert render.tokenizer.decode(untrained) == "Yes.<|im_end|>"
    with pytest.raises(DataError, match=r"message 0 \(user\) is not to be trained, and data\.train_on=all trains it"):
        render.render([chat({**ASK, "train": False}, DRY)], "all")
