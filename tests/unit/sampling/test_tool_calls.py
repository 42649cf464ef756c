"""Calls of tools in texts: the forms of each family, what is no call, and the types of values."""

from __future__ import annotations

import json

import pytest

from cookbook.sampling.environments.tool_calls import ToolCall, parse_calls, text_before_calls
from cookbook.server.wire import openai_results


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool(
        "f",
        x={"type": "integer"},
        code={"type": "string"},
        flag={"type": "boolean"},
        items={"type": "array"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"type": ["integer", "string"]},
        share={"type": "number"},
        kind={"enum": ["1", "2"]},
    ),
    tool("g"),
]
F1, G = ToolCall("f", {"x": 1}), ToolCall("g", {})


def xml(**values):
    return (
        "<function=f>" + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()) + "</function>"
    )


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Qwen and Hermes.
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [F1]),
        ('I look.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', [F1, G]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}\n{"name": "g", "arguments": {}}</tool_call>', [F1, G]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "g"}</tool_call>', [F1, G]),
        ('<tool_call>```json\n{"name": "f", "arguments": {"x": 1}}\n```</tool_call>', [F1]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}', [F1]),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', [G]),
        ('<tool_call>{"name": "g", "arguments": ""}</tool_call>', [G]),
        ('<tool_call>{"name": "g"}</tool_call>', [G]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [F1]),
        ('<tool_call>{"name": "f", "arguments": {"code": "a\nb\tc"}}</tool_call>', [ToolCall("f", {"code": "a\nb\tc"})]),
        ('<tool_call>{"name": "f", "arguments": {"code": "</tool"}}</tool_call>', [ToolCall("f", {"code": "</tool"})]),
        # Qwen3-Coder: the schema types the values.
        (f"<tool_call>\n{xml(x=1)}\n</tool_call>", [F1]),
        (xml(x=1), [F1]),
        (xml(code=12345), [ToolCall("f", {"code": "12345"})]),
        (xml(code="true"), [ToolCall("f", {"code": "true"})]),
        (xml(code='{"a": 1}'), [ToolCall("f", {"code": '{"a": 1}'})]),
        (xml(code="  indented\n\nlines  "), [ToolCall("f", {"code": "  indented\n\nlines  "})]),
        (xml(code="if a < b and c > d:\n    pass"), [ToolCall("f", {"code": "if a < b and c > d:\n    pass"})]),
        (xml(flag="True"), [ToolCall("f", {"flag": True})]),
        (xml(flag="false"), [ToolCall("f", {"flag": False})]),
        (xml(items='["a", 1]'), [ToolCall("f", {"items": ["a", 1]})]),
        (xml(maybe="null"), [ToolCall("f", {"maybe": None})]),
        (xml(maybe="12"), [ToolCall("f", {"maybe": "12"})]),
        (xml(either="12"), [ToolCall("f", {"either": 12})]),
        (xml(either="a12"), [ToolCall("f", {"either": "a12"})]),
        (xml(share="0.5"), [ToolCall("f", {"share": 0.5})]),
        (xml(share="2"), [ToolCall("f", {"share": 2})]),
        (xml(kind="1"), [ToolCall("f", {"kind": "1"})]),
        (xml(unknown="1"), [ToolCall("f", {"unknown": 1})]),
        ("<function=g></function>", [G]),
        ("<function=g>\n</function>\n<function=f><parameter=x>1</parameter></function>", [G, F1]),
        # A parameter that is not closed ends at the next one.
        ("<function=f><parameter=x>1\n<parameter=code>2</parameter></function>", [ToolCall("f", {"x": 1, "code": "2"})]),
        # GLM.
        ("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [F1]),
        ("<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [ToolCall("f", {"code": "1"})]),
        ("<tool_call>g\n</tool_call>", [G]),
        # Mistral, old and new, and with its marks lost as special tokens.
        ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', [F1, G]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', [F1]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}', [F1]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', [F1, G]),
        ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"x": 1}', [F1]),
        ('f{"x": 1}', [F1]),
        # Llama.
        ('{"name": "f", "parameters": {"x": 1}}', [F1]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [F1]),
        ('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', [F1, G]),
        ('{"name": "f", "parameters": {"x": 1}}\n{"name": "g", "parameters": null}', [F1, G]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}<|python_tag|>{"name": "g"}', [F1, G]),
        ('[{"name": "f", "parameters": {"x": 1}}]', [F1]),
        ("[f(x=1), g()]", [F1, G]),
        ('{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}', [F1]),
        ('```json\n{"name": "f", "arguments": {"x": 1}}\n```', [F1]),
        # After reasoning.
        ('<think>hm</think>\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [F1]),
        ('<think><tool_call>{"name": "g"}</tool_call></think>{"name": "f", "arguments": {"x": 1}}', [F1]),
    ],
)
def test_calls(text, calls):
    assert parse_calls(text, TOOLS) == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 30}',
        '{"name": "Alice", "arguments": {"x": 1}}',
        '[{"name": "Alice"}, {"name": "Bob"}]',
        '{"type": "circle", "radius": 2}',
        '{"function": "sin", "x": 1}',
        '```json\n{"name": "Alice"}\n```',
        'The call would be {"name": "f", "arguments": {"x": 1}}.',
        "[1, 2, 3]",
        "[h(x=1)]",
        "[f(x=1)] is a list",
        "h{1}",
        "The answer is {x}.",
        "",
        '<think><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call></think>The answer is 1.',
        '<think><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
        "<think><function=f><parameter=x>1</parameter></function></think> done",
        "[THINK]<tool_call>{}</tool_call>[/THINK] done",
    ],
)
def test_no_calls(text):
    assert parse_calls(text, TOOLS) == []
    assert openai_results.message(text, TOOLS) == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{broken</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": ', "not valid JSON"),
        ("<tool_call></tool_call>", "no JSON object"),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', "an object of arguments"),
        ("<function=f><parameter=x>1", "the call of f is not closed"),
        ("Now <function=f><parameter=x>1</parameter>", "the call of f is not closed"),
        ("<tool_call>[1]</tool_call>", "expected an object with name and arguments, got int"),
        ('[TOOL_CALLS]f[ARGS]{"x": ', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": ', "not valid JSON"),
    ],
)
def test_calls_that_cannot_be_read_are_answered(text, words):
    """Such a call neither ends the episode nor is it dropped: the model gets the reason."""
    [found] = parse_calls(text, TOOLS)
    assert isinstance(found, str) and words in found
    assert openai_results.message(text, TOOLS)["content"] == text


def test_the_endpoint_returns_what_environments_read():
    for text, before in (
        (f"I run it.\n{xml(code=12345)}", "I run it."),
        ('<think>hm</think>Now:<tool_call>{"name": "f", "arguments": {"code": "12345"}}</tool_call>', "<think>hm</think>Now:"),
        ('{"name": "f", "parameters": {"code": "12345"}}', None),
    ):
        said = openai_results.message(text, TOOLS)
        assert said["content"] == before and (text_before_calls(text, TOOLS) or None) == before
        [call] = said["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"code": "12345"}
    # A tool that the request does not have, and no tools.
    unknown = '<tool_call>{"name": "h", "arguments": {}}</tool_call>'
    assert openai_results.message(unknown, TOOLS)["content"] == unknown
    assert openai_results.message('{"name": "f", "arguments": {}}', []).get("tool_calls") is None
