"""Completions with the channels of gpt-oss: reasoning, answer and calls, in texts, episodes and responses of the endpoint."""

import pytest
from tokenizers import AddedToken
from tokentools import base_model_tokenizer

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.channels import channel_texts
from cookbook.data.formats import Chat
from cookbook.data.messages import parse_messages
from cookbook.data.reasoning import without_reasoning
from cookbook.engine.decoding.requests import TokenChunk
from cookbook.sampling.environments.conversation import Conversation
from cookbook.sampling.environments.tool_calls import ToolCall, parse_calls
from cookbook.server.wire import openai, openai_results
from cookbook.server.wire.openai import ChatBody
from cookbook.types import Sample

# The structure of the template of gpt-oss.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>{% elif m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}"
    "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ tools | tojson if tools and loop.first }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four."
CALL = " to=functions.add<|channel|>commentary json<|message|>"
CALLED = f'<|channel|>analysis<|message|>I add.<|end|><|start|>assistant{CALL}{{"a": 2}}<|call|>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def render():
    tokenizer = base_model_tokenizer(TEMPLATE)
    marks = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.eos_token = "<|return|>"
    return Renderer(tokenizer)


def sample(render: Renderer, text: str, reason: str = "stop") -> Sample:
    tokens = render.encode(text)
    return Sample(tokens, [0.0] * len(tokens), reason)


def test_the_texts_of_a_completion(render):
    assert channel_texts("plain") is None
    tokens = render.encode(THOUGHT + "<|return|>")
    assert render.text(tokens) == THOUGHT
    texts = channel_texts(render.text(tokens))
    assert (texts.reasoning, texts.content, texts.calls) == ("Two and two.", "Four.", ())
    assert without_reasoning(render.text(tokens)) == "Four."
    # The channel is cut off.
    cut = channel_texts("<|channel|>analysis<|message|>Two")
    assert (cut.reasoning, cut.content) == ("Two", "")
    assert channel_texts("<|channel|>fin").content == ""
    assert channel_texts(CALLED).calls == (("add", '{"a": 2}'),)


def test_calls_are_read_in_both_orders_of_the_header():
    newer = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}'
    for text in (CALLED, newer, newer + "<|call|>"):
        assert parse_calls(text, TOOLS) == [ToolCall("add", {"a": 2})]
    assert parse_calls(CALL + '{"a": ', TOOLS) == ["the arguments of add are not a JSON object"]
    assert parse_calls(THOUGHT, TOOLS) == []


def test_an_episode_shows_the_template_its_reasoning_answer_and_calls(render):
    question = Chat("row", parse_messages([{"role": "user", "content": "2+2?"}], "row", "messages"), 1)
    conversation = Conversation(render, RenderedPrompt([], Row("row", {}), "", "", question), None, TOOLS)
    before = list(conversation.tokens)
    turn = conversation.add(sample(render, CALLED))
    conversation.observe([{"role": "tool", "name": "add", "content": "4"}])
    # The next prompt begins with the tokens that were sampled, so there is one branch.
    assert len(conversation.branches) == 1
    assert conversation.tokens[: len(before) + len(turn.tokens)] == before + turn.tokens
    result = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    assert render.printed(conversation.tokens).endswith(f'{{"a": 2}}<|call|>{result}')
    conversation.add(sample(render, THOUGHT + "<|return|>"))
    conversation.observe("And 3+3?")
    text = render.printed(conversation.tokens)
    assert text.endswith("<|message|>Four.<|end|><|start|>user<|message|>And 3+3?<|end|><|start|>assistant")
    assert "Two and two." in text


def chat(**more) -> ChatBody:
    return openai.parse(ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}').model_copy(update=more)


def responses(render: Renderer, text: str, fields: ChatBody) -> tuple[dict, dict]:
    """Return the message and finish reason of a response, and those that a stream of single tokens adds up to."""
    one = sample(render, text)
    answer = openai_results.Answer([65], [one])
    [whole] = openai_results.chat(render, fields, openai_results.Head("a", "b", "m", "f"), answer)["choices"]
    parts, streamed = openai_results.ChatParts(render, fields, [65]), {}
    for place, token in enumerate(one.tokens):
        reason = "stop" if place == len(one.tokens) - 1 else None
        part = parts.next(0, TokenChunk(0, [token], [0.0], reason))
        for name, value in part["delta"].items() if part else ():
            streamed[name] = value if streamed.get(name) is None else streamed[name] + (value or "")
    said = {name: value for name, value in whole["message"].items() if name not in ("role", "refusal")}
    return said, streamed


def test_the_endpoint_separates_reasoning_and_answer(render):
    expected = {"reasoning_content": "Two and two.", "content": "Four."}
    assert responses(render, THOUGHT + "<|return|>", chat()) == (expected, expected)
    for text, content in (("<|channel|>final<|message|>Four.<|return|>", "Four."), ("Four.", "Four."), ("<|channel|>fin", "")):
        assert responses(render, text, chat()) == ({"content": content}, {"content": content})
    # A response that is sent back is the context of the next one.
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Four."}, {"role": "user", "content": "b"}]
    assert "<|channel|>final<|message|>Four.<|end|>" in render.printed(render.prompt_tokens(said))


def test_the_endpoint_returns_calls(render):
    for fields in (chat(tools=TOOLS), chat(tools=TOOLS, stream=True)):
        said, streamed = responses(render, CALLED, fields)
        for message in (said, streamed):
            assert message["reasoning_content"] == "I add."
            assert message["content"] is None
            assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 2}'}]
    # Calls that cannot be read, or without tools, are text.
    broken = CALL + '{"a": '
    assert responses(render, broken, chat(tools=TOOLS))[0] == {"content": broken}
    assert responses(render, CALLED, chat())[0] == {"content": CALLED.removesuffix("<|call|>")}
