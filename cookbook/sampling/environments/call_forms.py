"""The forms in which models write calls of tools as text: one reader for each mark that begins a call.

A reader gets the text and the place behind its mark, and returns the calls and the place behind them. Values may contain any
text, also the marks themselves: the end of a value is found by its form (JSON), or by what follows its closing tag.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.data.reasoning import CLOSES, OPENING, OPENS
from cookbook.types import JsonObject


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object]


Found = list[ToolCall | str]
"""Calls in order; a text instead of a call says why it cannot be read."""
Reader = Callable[[str, int, "Schemas"], tuple[Found, int]]

DECODER = json.JSONDecoder(strict=False)
SPACE = re.compile(r"\s*")
# Between the objects of one answer.
BETWEEN = re.compile(r"[\s;,]*")
FENCE = re.compile(r"\s*```\w*\s*\n?")
# A whole answer in a fence.
FENCED = re.compile(r"\A```\w*\s*\n(.*?)\n?```\Z", re.DOTALL)

# The bars and the low line in the marks of DeepSeek are not those of ASCII.
_BAR, _LOW = "\uff5c", "\u2581"
_SEPARATOR, _DSML = f"<{_BAR}tool{_LOW}sep{_BAR}>", f"{_BAR}DSML{_BAR}"
DEEPSEEK, DEEPSEEK_SECTION = f"<{_BAR}tool{_LOW}call{_LOW}begin{_BAR}>", f"<{_BAR}tool{_LOW}calls{_LOW}begin{_BAR}>"
TAG, TAG_END = "<tool_call>", "</tool_call>"
# Qwen3-Coder. A closing tag counts only if the form continues after it: any other is text of the value.
FUNCTION = re.compile(r"<function=\s*([^>\s]+)\s*>")
FUNCTION_END = "</function>"
PARAMETER = re.compile(r"<parameter=\s*([^>\s]+)\s*>")
PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))")
NEXT_PARAMETER = re.compile(r"\n<parameter=\s*([^>\s]+)\s*>")
UNCLOSED_END = re.compile(r"(?=<parameter=)|(?=</function>)|(?=</tool_call>)")
# GLM writes the name, then pairs of keys and values.
GLM_NAME = re.compile(r"\s*([^\s<{\[]+)\s*(?=<arg_key>|</tool_call>|\Z)")
ARG_KEY = re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>", re.DOTALL)
ARG_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")
MISTRAL = "[TOOL_CALLS]"
# Mistral's newer form: a name, possibly an identifier, and the arguments.
MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*|(?=\{))")
PYTHON_TAG = "<|python_tag|>"
# DeepSeek V3 names the type and puts the arguments in a fence; V3.1 has neither.
DEEPSEEK_CALL = re.compile(rf"\s*(?:function{_SEPARATOR}\s*([^\s`<{{]+)\s*```\w*|([^\s<]+)\s*{_SEPARATOR})\s*")
DEEPSEEK_END = re.compile(rf"\s*(?:```)?\s*<{_BAR}tool{_LOW}call{_LOW}end{_BAR}>")
# Kimi numbers its calls: functions.name:0.
KIMI_CALL = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")
KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")
# The same without its special tokens.
KIMI_BARE = re.compile(r"\s*(?:functions\.)?([\w.-]+?):\d+\s*(?=\{)")
# DeepSeek V3.2 and MiniMax M2.
INVOKE = re.compile(rf"\s*<(?:{_DSML})?invoke name=\"([^\"]+)\"\s*>")
INVOKE_END = re.compile(rf"\s*</(?:{_DSML})?invoke>")
INVOKE_VALUE = re.compile(rf"\s*<(?:{_DSML})?parameter name=\"([^\"]+)\"(?:\s+string=\"(true|false)\")?\s*>")
INVOKE_VALUE_END = re.compile(rf"</(?:{_DSML})?parameter>(?=\s*(?:<(?:{_DSML})?parameter name=|</(?:{_DSML})?invoke>|\Z))")
NAMED_BARE = re.compile(r"\A([\w.-]+)\s*(?=\{)")
# Fields of an object that is a call. Any other field makes it an answer in JSON.
FIELDS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})
# Models write these in place of JSON's words, and JSON's words in place of Python's.
PYTHON_VALUES = {"True": True, "False": False, "None": None}
JSON_WORDS = {"true": True, "false": False, "null": None}


class Schemas:
    """The tools by name, with the schemas of their arguments."""

    def __init__(self, tools: Sequence[JsonObject]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._by_name = {one["name"]: one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)}

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def properties(self, name: str) -> Mapping[str, Any]:
        """Return the schema of each argument of a tool, in order; empty for an unknown tool."""
        parameters = self._by_name.get(name, {}).get("parameters") or {}
        return parameters.get("properties") or {}

    def typed(self, name: str, key: str, text: str) -> object:
        """Return the value that a text stands for, by the schema of the argument; without a schema, JSON or the text."""
        schema = self.properties(name).get(key)
        types = _types(schema) if isinstance(schema, dict) else None
        if types == {"string"}:
            return text
        value = json_value(text.strip())
        if not types:
            return value
        if value == text.strip():
            # Not JSON: perhaps a value of Python.
            value = _python_value(text.strip(), types)
        if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
            value = int(value)
        if _fits(value, types):
            return value
        return text if "string" in types else value


JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
    "string": str,
}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if it does not say."""
    found: set[str] = set()
    stated = schema.get("type")
    found |= {stated} if isinstance(stated, str) else {one for one in stated if isinstance(one, str)} if stated else set()
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _types(choice) if isinstance(choice, dict) else set()
    if not found and schema.get("enum"):
        found = {"string"} if all(isinstance(one, str) for one in schema["enum"]) else set()
    return found


def _fits(value: object, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, JSON_TYPES.get(name, ())) for name in types if name not in ("boolean", "string"))


def _python_value(text: str, types: set[str]) -> object:
    if text in PYTHON_VALUES and types & {"boolean", "null"}:
        return PYTHON_VALUES[text]
    if text[:1] in ("[", "{") and types & {"array", "object"}:
        try:
            return literal(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return text
    return text


def literal(node: ast.expr) -> object:
    """Return the value of a literal of Python, which may contain JSON's true, false and null.

    Raises:
        ValueError: the expression is not a literal.
    """
    for one in ast.walk(node):
        for name, field in ast.iter_fields(one):
            if isinstance(field, ast.Name) and field.id in JSON_WORDS:
                setattr(one, name, ast.Constant(JSON_WORDS[field.id]))
            elif isinstance(field, list):
                field[:] = [
                    ast.Constant(JSON_WORDS[item.id]) if isinstance(item, ast.Name) and item.id in JSON_WORDS else item
                    for item in field
                ]
    if isinstance(node, ast.Name) and node.id in JSON_WORDS:
        return JSON_WORDS[node.id]
    return ast.literal_eval(node)


# ---- the whole text -----------------------------------------------------------------------------------------------------


def read(text: str, schemas: Schemas) -> tuple[Found, int]:
    """Return the calls outside of reasoning, and the place where the first begins; the length of the text without a call."""
    start = after_reasoning(text, 0)
    if start is None:
        return [], len(text)
    found: Found = []
    first, place = len(text), start
    while (mark := MARKS.search(text, place)) is not None:
        calls, place = READERS[mark["mark"]](text, mark.end(), schemas)
        found += calls
        first = min(first, mark.start())
        behind = after_reasoning(text, place)
        if behind is None:
            break
        place = behind
    if found:
        return found, first
    answer = text[start:].strip()
    return bare(answer, schemas), max(text.rfind(answer), 0)


def after_reasoning(text: str, place: int) -> int | None:
    """Return the place behind the reasoning that comes before the next mark of a call; None if it is unfinished.

    A tag behind the mark may be a text of the call. A closing tag alone ends reasoning that the prompt has opened.
    """
    scan, was_opened = place, False
    while True:
        mark, opening, closing = MARKS.search(text, scan), OPENS.search(text, scan), CLOSES.search(text, scan)
        if opening is not None and (closing is None or opening.start() < closing.start()):
            if mark is not None and mark.start() < opening.start():
                return place
            if closing is None:
                return None
            was_opened = True
        elif closing is None or (was_opened and mark is not None and mark.start() < closing.start()):
            return place
        elif OPENING.search(text, scan, closing.start()) is not None:
            # A tag inside of a line is a word, and its closing tag another.
            if mark is not None and mark.start() < closing.start():
                return place
            scan = closing.end()
            continue
        place = scan = closing.end()


def bare(answer: str, schemas: Schemas) -> Found:
    """Return the calls of an answer without marks: it consists of calls of known tools, or has none."""
    if fence := FENCED.match(answer):
        answer = fence[1].strip()
    found: Found = []
    place = 0
    while (kimi := KIMI_BARE.match(answer, place)) is not None and kimi[1] in schemas:
        call, place = _with_arguments(kimi[1], answer, kimi.end())
        found.append(call)
    if found:
        return found
    # Phi-4.
    answer = answer.removeprefix("functools") if answer.startswith("functools[{") else answer
    if (named := NAMED_BARE.match(answer)) is not None and named[1] in schemas:
        # Mistral's form, whose marks are special tokens.
        return [_with_arguments(named[1], answer, named.end())[0]]
    if answer.startswith("[") or any(answer.startswith(name) for name in schemas):
        found = pythonic(answer, schemas)
    if found or answer[:1] not in ("{", "["):
        return found if all(isinstance(one, ToolCall) and one.name in schemas for one in found) else []
    found, _ = objects(answer, 0, schemas)
    is_call = all(isinstance(one, ToolCall) and one.name in schemas for one in found) and _has_fields_of_calls(answer)
    # Cut-off or broken calls of known tools are answered, so that the model can correct them.
    is_broken = answer.startswith("{") and _names_tool(answer, schemas)
    return found if is_call or is_broken else []


def _has_fields_of_calls(answer: str) -> bool:
    """Whether the first object of an answer has only fields of a call."""
    value, _ = DECODER.raw_decode(answer)
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and first.keys() <= FIELDS


def _names_tool(text: str, schemas: Schemas) -> bool:
    named = re.match(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"',
        text,
    )
    return named is not None and named[1] in schemas


# ---- JSON and Python -----------------------------------------------------------------------------------------------------


def json_value(text: str) -> object:
    """Return the value of a JSON text; any other text unchanged."""
    try:
        return json.loads(text, strict=False)
    # Deeply nested text raises RecursionError.
    except (ValueError, RecursionError):
        return text


def objects(text: str, place: int, _: Schemas) -> tuple[Found, int]:
    """Read JSON objects, or lists of them, that follow one another. Text behind them is no part of a call."""
    found: Found = []
    while True:
        start = BETWEEN.match(text, place).end()  # type: ignore[union-attr]  # it matches an empty text
        if text.startswith(PYTHON_TAG, start):
            start = BETWEEN.match(text, start + len(PYTHON_TAG)).end()  # type: ignore[union-attr]
        if found and text[start : start + 1] not in ("{", "["):
            return found, place
        try:
            # Line breaks inside of texts are accepted.
            value, place = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            why = f"not valid JSON: {error}" if text[start:].strip() else "no JSON object"
            return [*found, why], len(text)
        found += [_call(one) for one in (value if isinstance(value, list) else [value])]


def _call(value: object) -> ToolCall | str:
    if not isinstance(value, dict):
        return f"expected an object with name and arguments, got {type(value).__name__}"
    inner = value.get("function", value)
    name = inner.get("name") if isinstance(inner, dict) else value.get("name", inner)
    inner = inner if isinstance(inner, dict) else value
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        arguments = json_value(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "expected an object with a name and an object of arguments"
    return ToolCall(name, arguments)


def _with_arguments(name: str, text: str, place: int) -> tuple[ToolCall | str, int]:
    """Read the arguments of a call, a JSON object; without an object, the call has none."""
    if text[place : place + 1] not in ("{", "["):
        return ToolCall(name, {}), place
    try:
        arguments, place = DECODER.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}", len(text)
    return _call({"name": name, "arguments": arguments}), place


def pythonic(text: str, schemas: Schemas) -> Found:
    """Return the calls of Python's ``[f(x=1), g()]`` or ``f(x=1)``, with literal arguments; none if it is something else."""
    if not re.match(r"(?:\[\s*)?[A-Za-z_][\w.-]*\s*\(", text):
        return []
    # A name with a hyphen is a difference in Python. Each gets a name for the parser, which texts do not have.
    renamed = {name: f"tool_{index}_of_{id(schemas)}" for index, name in enumerate(schemas) if not name.isidentifier()}
    for name, plain in renamed.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=\s*\()", plain, text)
    back = {plain: name for name, plain in renamed.items()}
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_pythonic_call(one, back, schemas) for one in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _pythonic_call(node: ast.expr, back: Mapping[str, str], schemas: Schemas) -> ToolCall:
    """Return one call. Raises ValueError: it is something else."""
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    name = back.get(name, name)
    if name not in schemas and name.removesuffix(".call") in schemas:
        # Llama's tools that are built in: brave_search.call(query="...").
        name = name.removesuffix(".call")
    keys = list(schemas.properties(name))
    if len(node.args) > len(keys):
        raise ValueError("an argument without a name")
    values = {key: literal(value) for key, value in zip(keys, node.args, strict=False)}
    values |= {str(word.arg): literal(word.value) for word in node.keywords}
    return ToolCall(name, {key: _restored(value, back) for key, value in values.items()})


def _restored(value: object, back: Mapping[str, str]) -> object:
    """Return a value with the names of tools in its texts."""
    if isinstance(value, str):
        for plain, name in back.items():
            value = value.replace(plain, name)
    return value


# ---- the readers of marks ------------------------------------------------------------------------------------------------


def _tagged(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read the content of ``<tool_call>``: JSON of Qwen and Hermes, or the forms of Qwen3-Coder and GLM."""
    start = SPACE.match(text, place).end()  # type: ignore[union-attr]
    if fence := FENCE.match(text, start):
        start = fence.end()
    if text.startswith("<function=", start):
        found: Found = []
        while text.startswith("<function=", start):
            calls, start = _functions(text, start + len("<function="), schemas)
            found += calls
            start = SPACE.match(text, start).end()  # type: ignore[union-attr]
        return found, start + len(TAG_END) * text.startswith(TAG_END, start)
    named = GLM_NAME.match(text, start)
    if named is not None and ("<arg_key>" in text[named.end() : named.end() + 9] or named[1] in schemas):
        return _glm(named[1], text, named.end(), schemas)
    return _json_of_tag(text, start, schemas)


def _json_of_tag(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read the objects of a tag, which ends at its closing tag, the next tag or the end of the text."""
    close = _first(text, place, TAG_END, TAG)
    if text[place : place + 1] not in ("{", "["):
        inner = text[place:close].strip()
        return [f"not valid JSON: {inner[:80]!r}" if inner else "no JSON object"], _behind(text, close)
    found: Found = []
    while text[place : place + 1] in ("{", "["):
        try:
            value, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            return [*found, f"not valid JSON: {error}"], _behind(text, _first(text, place, TAG_END, TAG))
        found += [_call(one) for one in (value if isinstance(value, list) else [value])]
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    if fence := FENCE.match(text, place):
        place = fence.end()
    close = _first(text, place, TAG_END, TAG)
    if rest := text[place:close].strip():
        found.append(f"not valid JSON: text behind the object: {rest[:80]!r}")
    return found, _behind(text, close)


def _first(text: str, place: int, *marks: str) -> int:
    """Return the place of the first of several marks; the length of the text without one."""
    found = [at for mark in marks if (at := text.find(mark, place)) >= 0]
    return min(found, default=len(text))


def _behind(text: str, place: int) -> int:
    return place + len(TAG_END) if text.startswith(TAG_END, place) else place


def _glm(name: str, text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    values = {}
    while (key := ARG_KEY.match(text, place)) is not None:
        end = ARG_END.search(text, key.end())
        if end is None:
            return [f"the call of {name} is not closed by </arg_value>"], len(text)
        # The form may have a line break on each side of a value.
        value = text[key.end() : end.start()].removeprefix("\n").removesuffix("\n")
        values[key[1]] = schemas.typed(name, key[1], value)
        place = end.end()
    close = _first(text, place, TAG_END, TAG)
    if text[place:close].strip():
        return [f"the arguments of {name} are not pairs of <arg_key> and <arg_value>"], _behind(text, close)
    return [ToolCall(name, values)], _behind(text, close)


def _functions(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read one call in the form of Qwen3-Coder. A call that is not closed was cut off."""
    head = FUNCTION.match(text, place - len("<function="))
    if head is None:
        return ["<function= without a name"], place
    name, place = head[1], head.end()
    values: dict[str, object] = {}
    while True:
        place = SPACE.match(text, place).end()  # type: ignore[union-attr]
        if text.startswith(FUNCTION_END, place):
            return [ToolCall(name, values)], place + len(FUNCTION_END)
        if text.startswith(TAG_END, place):
            return [ToolCall(name, values)], place
        parameter = PARAMETER.match(text, place)
        if parameter is None:
            # Text between two parameters is no part of the form.
            place = _first(text, place + 1, "<parameter=", FUNCTION_END, TAG_END)
            if place == len(text):
                return [f"the call of {name} is not closed by </function>"], place
            continue
        value, place = _parameter(name, text, parameter.end(), schemas)
        if value is None:
            return [f"the call of {name} is not closed by </function>"], place
        # The form has a line break on each side of a value.
        values[parameter[1]] = schemas.typed(name, parameter[1], value.removeprefix("\n").removesuffix("\n"))


def _parameter(name: str, text: str, place: int, schemas: Schemas) -> tuple[str | None, int]:
    """Return the text of a value and the place behind it; None if the value is cut off.

    A value that is not closed ends at the line of the next parameter of the tool.
    """
    known = schemas.properties(name)
    end = PARAMETER_END.search(text, place)
    for other in NEXT_PARAMETER.finditer(text, place, len(text) if end is None else end.start()):
        if not known or other[1] in known:
            return text[place : other.start()], other.start()
    if end is not None:
        return text[place : end.start()], end.end()
    unclosed = UNCLOSED_END.search(text, place)
    return (None, len(text)) if unclosed is None else (text[place : unclosed.start()], unclosed.start())


def _mistral(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read the calls behind Mistral's mark: a list of objects, or names with arguments."""
    found: Found = []
    while (named := MISTRAL_CALL.match(text, place)) is not None:
        call, place = _with_arguments(named[1], text, named.end())
        found.append(call)
    return (found, place) if found else objects(text, place, schemas)


def _llama(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read the calls behind Llama's mark: JSON objects, or calls of Python."""
    rest = text[place:].strip()
    if calls := pythonic(rest, schemas):
        return calls, len(text)
    return objects(text, place, schemas)


def _deepseek(text: str, place: int, _: Schemas) -> tuple[Found, int]:
    head = DEEPSEEK_CALL.match(text, place)
    if head is None:
        return ["a call without a name"], place
    call, place = _with_arguments(head[1] or head[2], text, head.end())
    end = DEEPSEEK_END.match(text, place)
    return [call], place if end is None else end.end()


def _kimi(text: str, place: int, _: Schemas) -> tuple[Found, int]:
    head = KIMI_CALL.match(text, place)
    if head is None:
        return ["a call without a name"], place
    call, place = _with_arguments(head[1], text, head.end())
    end = KIMI_END.match(text, place)
    return [call], place if end is None else end.end()


def _invoked(text: str, place: int, schemas: Schemas) -> tuple[Found, int]:
    """Read the calls of DeepSeek V3.2 and MiniMax: ``<invoke name="f"><parameter name="x">1</parameter></invoke>``."""
    found: Found = []
    while (head := INVOKE.match(text, place)) is not None:
        name, place = head[1], head.end()
        values = {}
        while (parameter := INVOKE_VALUE.match(text, place)) is not None:
            close = INVOKE_VALUE_END.search(text, parameter.end())
            if close is None:
                return [*found, f"the call of {name} is not closed by </invoke>"], len(text)
            value, place = text[parameter.end() : close.start()], close.end()
            is_text = parameter[2] == "true"
            values[parameter[1]] = value if is_text else schemas.typed(name, parameter[1], value)
        end = INVOKE_END.match(text, place)
        if end is None:
            return [*found, f"the call of {name} is not closed by </invoke>"], len(text)
        found.append(ToolCall(name, values))
        place = end.end()
    return found or ["a call without a name"], place


READERS: Mapping[str, Reader] = {
    TAG: _tagged,
    "<function=": _functions,
    MISTRAL: _mistral,
    PYTHON_TAG: _llama,
    DEEPSEEK: _deepseek,
    "<|tool_call_begin|>": _kimi,
    f"<{_DSML}function_calls>": _invoked,
    f"<{_DSML}tool_calls>": _invoked,
    "<minimax:tool_call>": _invoked,
    # Granite.
    "<|tool_call|>": objects,
}
# The marks of sections stand before the first call.
_SECTION = rf"(?:{DEEPSEEK_SECTION}\s*|<\|tool_calls?_section_begin\|>\s*)?"
MARKS = re.compile(_SECTION + "(?P<mark>" + "|".join(re.escape(mark) for mark in READERS) + ")")
