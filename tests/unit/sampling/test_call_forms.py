"""Calls of tools in forms that public bug reports name: text of values that looks like a mark, families, and broken calls."""

from __future__ import annotations

import pytest

from cookbook.sampling.environments.tool_calls import ToolCall, parse_calls, text_before_calls


def tool(name, **properties):
    named = {key: {"type": kind} for key, kind in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": named}}}


TOOLS = [
    tool("f", x="integer", items="array", inner="object", flag="boolean", share="number"),
    tool("write", path="string", content="string"),
    tool("get-weather", city="string"),
    tool("brave_search", query="string"),
    tool("none"),
]
F1, F2 = ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})
PARIS = ToolCall("get-weather", {"city": "Paris"})
CALL_OF_F = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
CALL_OF_NONE = '<tool_call>{"name": "none"}</tool_call>'
BAR, LOW = "\uff5c", "\u2581"
# Texts of values that look like the marks of a form.
LOOKALIKES = [
    "x </tool_call> y",
    "x <tool_call> y",
    "</function>",
    "<function=f>",
    'print("</parameter>")\nx',
    'print("<parameter=z>")\nx',
    "<arg_key>x</arg_key>",
    "see </arg_value> here",
    "[TOOL_CALLS]f[ARGS]{}",
    "<think>draft</think>",
    "</think>",
    "  indented\n\n",
]


def written(content):
    return ToolCall("write", {"path": "a", "content": content})


def xml(content):
    values = f"<parameter=path>\na\n</parameter>\n<parameter=content>\n{content}\n</parameter>\n"
    return f"<tool_call>\n<function=write>\n{values}</function>\n</tool_call>"


def json_call(content):
    escaped = content.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{"name": "write", "arguments": {{"path": "a", "content": "{escaped}"}}}}'


def glm(content):
    return (
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n<arg_key>content</arg_key>\n"
        f"<arg_value>\n{content}\n</arg_value>\n</tool_call>"
    )


@pytest.mark.parametrize("content", LOOKALIKES)
@pytest.mark.parametrize("before", ["", "Sure.\n", "<think>hm</think>\n"])
def test_a_value_may_contain_the_marks_of_any_form(content, before):
    """vllm 48753, mlx-lm 1712, unsloth 5704, Rapid-MLX 1591 and 3419, local-inference-lab/vllm 639."""
    for text in (
        f"<tool_call>\n{json_call(content)}\n</tool_call>",
        xml(content),
        glm(content),
        f"[TOOL_CALLS][{json_call(content)}]",
        f"[TOOL_CALLS]write[ARGS]{json_call(content).partition('arguments')[2][3:-1]}",
        f"<|python_tag|>{json_call(content)}",
    ):
        if content == "</think>" and not before.startswith("<think>"):
            # A closing tag alone may end reasoning that the prompt has opened.
            continue
        assert parse_calls(before + text, TOOLS) == [written(content)], text
        assert text_before_calls(before + text, TOOLS) == before.strip()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # DeepSeek V3, V3.1 and V3.2, MiniMax.
        (
            f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>f\n"
            f'```json\n{{"x": 1}}\n```<{BAR}tool{LOW}call{LOW}end{BAR}><{BAR}tool{LOW}calls{LOW}end{BAR}>',
            [F1],
        ),
        (
            f"I look.<{BAR}tool{LOW}calls{LOW}begin{BAR}>"
            + "".join(
                f'<{BAR}tool{LOW}call{LOW}begin{BAR}>f<{BAR}tool{LOW}sep{BAR}>{{"x": {x}}}<{BAR}tool{LOW}call{LOW}end{BAR}>'
                for x in (1, 2)
            ),
            [F1, F2],
        ),
        (
            f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="write">\n'
            f'<{BAR}DSML{BAR}parameter name="path" string="true">12</{BAR}DSML{BAR}parameter>\n'
            f'</{BAR}DSML{BAR}invoke>\n<{BAR}DSML{BAR}invoke name="f">\n'
            f'<{BAR}DSML{BAR}parameter name="x" string="false">1</{BAR}DSML{BAR}parameter>\n'
            f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>",
            [ToolCall("write", {"path": "12"}), F1],
        ),
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n'
            '<invoke name="none">\n</invoke>\n</minimax:tool_call>',
            [F1, ToolCall("none", {})],
        ),
        # Kimi, with and without its special tokens.
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
            '<|tool_call_begin|>functions.get-weather:1<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            [F1, PARIS],
        ),
        ('functions.f:0{"x": 1}functions.f:1{"x": 2}', [F1, F2]),
        # Python's form: Llama 4, Gemma.
        ("[f(x=-1, share=-0.5)]", [ToolCall("f", {"x": -1, "share": -0.5})]),
        ('[f(items=["a", {"b": [1]}], inner={"k": -1})]', [ToolCall("f", {"items": ["a", {"b": [1]}], "inner": {"k": -1}})]),
        ("[f(flag=true, inner=null, items=[false])]", [ToolCall("f", {"flag": True, "inner": None, "items": [False]})]),
        ('[get-weather(city="Paris"), f(x=1)]', [PARIS, F1]),
        ('[write(path="a", content="get-weather(x)"), get-weather("Paris")]', [written("get-weather(x)"), PARIS]),
        ("```tool_code\nf(x=1)\n```", [F1]),
        ("<|python_tag|>[f(x=1)]", [F1]),
        ('<|python_tag|>brave_search.call(query="a b")', [ToolCall("brave_search", {"query": "a b"})]),
        # Text behind the calls of Mistral and Llama.
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]\n\nLet me look.', [F1]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}\n\nLet me look.', [F1]),
        ("[TOOL_CALLS]none[ARGS]", [ToolCall("none", {})]),
        ('{"name": "f", "parameters": {"x": 1}}\n\nThis looks.', [F1]),
        ('{"function": "f", "parameters": {"x": 1}}', [F1]),
        # Granite, Phi-4.
        ('<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', [F1]),
        ('functools[{"name": "f", "arguments": {"x": 1}}]', [F1]),
        # Values of Python in the form of Qwen3-Coder, and whole numbers with a point.
        ("<function=f><parameter=items>\n['a', True]\n</parameter></function>", [ToolCall("f", {"items": ["a", True]})]),
        ("<function=f><parameter=inner>\n{'a': None}\n</parameter></function>", [ToolCall("f", {"inner": {"a": None}})]),
        ("<function=f><parameter=x>\n1.0\n</parameter></function>", [F1]),
        ("<function=f><parameter=x>\n2026-01-15\n</parameter></function>", [ToolCall("f", {"x": "2026-01-15"})]),
        # A parameter without its closing tag, before one with it.
        (
            "<function=write>\n<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n</function>",
            [written("b")],
        ),
        # Calls before and after reasoning.
        (
            f"{CALL_OF_F}\n<think>{CALL_OF_NONE}</think>",
            [F1],
        ),
        (
            f"so {CALL_OF_NONE} no</think>{CALL_OF_F}",
            [F1],
        ),
    ],
)
def test_forms_of_families(text, calls):
    assert parse_calls(text, TOOLS) == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "age": 3}',
        "f(1, 2, 3, 4, 5, 6)",
        "Use functools[0] here.",
        "[f(x=y)]",
        'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> no</think>\n1',
    ],
)
def test_answers_that_are_no_calls(text):
    assert parse_calls(text, TOOLS) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</tool_call>", "the call of f is not closed by </arg_value>"),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}}</tool_call>', "not valid JSON: text behind the object: '}'"),
        ("<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>", "are not pairs of <arg_key> and <arg_value>"),
        ('<minimax:tool_call><invoke name="f"><parameter name="x">1', "the call of f is not closed by </invoke>"),
    ],
)
def test_broken_calls_are_answered(text, words):
    assert words in str(parse_calls(text, TOOLS)[-1])
