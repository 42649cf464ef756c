"""Calls of tools in a completion, read from its tokens by the package renderers, or from its text."""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cookbook.data.channels import FUNCTIONS, channel_messages, json_or_text
from cookbook.data.reasoning import without_reasoning
from cookbook.errors import described
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("cookbook")

# Marks of calls. A block that is not closed ends at the next mark, or at the end of the text.
TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=\s*([^>\s]+)\s*>(.*?)(</function>|(?=<function=)|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=\s*([^>\s]+)\s*>(.*?)(</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
# GLM writes the name, then pairs of keys and values.
KEYS = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
# Mistral's newer form: a name, possibly an identifier, and the arguments.
MISTRAL_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
# Llama 3 puts this mark before a call.
PYTHON_TAG = "<|python_tag|>"
CALL_BEGINS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<function=|<\|python_tag\|>")
# A whole answer in a fence.
FENCED = re.compile(r"\A```\w*\s*\n(.*?)\n?```\Z", re.DOTALL)
NAMED_BARE = re.compile(r"\A([\w.-]+)\s*(?=\{)")
DECODER = json.JSONDecoder(strict=False)

# Name and arguments of each call; a text instead says why it cannot be read. JSON-compatible: worker processes get it.
Calls = Sequence[tuple[str, Mapping[str, object]] | str]
# Reads a completion from the tokens of its prompt and its own tokens.
CallReader = Callable[[Sequence[int], Sequence[int]], Calls]


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object]


def token_reader(tokenizer: PreTrainedTokenizerBase, tools: Sequence[JsonObject]) -> CallReader | None:
    """Return the reader of the model's family in the package renderers; None without the package, or for an unknown model.

    The package knows a model by its name, such as Qwen/Qwen3-8B; a folder is unknown. It reads special tokens, which a text
    does not have, and it ignores calls in unfinished reasoning.

    Source: renderers 0.1.12 of Prime Intellect, ``Renderer.parse_response``.
    """
    family = _family(tokenizer)
    if family is None:
        return None

    def read(prompt: Sequence[int], completion: Sequence[int]) -> Calls:
        # The package takes the schema of a function without the object around it.
        functions = [tool["function"] for tool in tools]
        parsed = family.parse_response(list(completion), tools=functions, prompt_ids=list(prompt))
        return [_of_family(one.name, one.arguments, str(one.status)) for one in parsed.tool_calls]

    return read


@functools.lru_cache(maxsize=4)
def _family(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the renderer of the model's family; None without the package, or for an unknown model."""
    if find_spec("renderers") is None:
        return None
    try:
        from renderers.base import MODEL_RENDERER_MAP, create_renderer

        if tokenizer.name_or_path not in MODEL_RENDERER_MAP:
            return None
        family = create_renderer(tokenizer)
    # A broken installation, or a tokenizer without a token of the family.
    except Exception as error:  # noqa: BLE001 - the package has no error class of its own
        log.warning(
            "env: the package renderers cannot read the calls of %s (%s); they are read from the text",
            tokenizer.name_or_path,
            described(error),
        )
        return None
    name = MODEL_RENDERER_MAP[tokenizer.name_or_path]
    log.info("env: calls of tools are read by the package renderers, in the form of %s", name)
    return family


def _of_family(name: str | None, arguments: object, status: str) -> tuple[str, Mapping[str, object]] | str:
    values = _value(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    # A tool that does not exist is answered with the names of those that do.
    if name is None or status not in ("ok", "unknown_tool"):
        return status.replace("_", " ")
    return (name, values) if isinstance(values, dict) else "expected an object of arguments"


def described_tools(tools: Sequence[object]) -> str:
    """Return the tools as text, for a chat template that does not print them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = '<tool_call>{"name": "NAME", "arguments": {}}</tool_call>'
    return f"You can call these tools:\n{lines}\nTo call one, answer with its name and arguments: {form}"


def parse_calls(text: str, tools: Sequence[JsonObject] = ()) -> list[ToolCall | str]:
    """Return the calls of tools in a completion, in order; a text instead of a call says why it cannot be read.

    Read are the forms of Qwen and Hermes (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``), of Qwen3-Coder
    (``<function=name><parameter=x>...``), of GLM (``<tool_call>name<arg_key>...``), of Mistral (``[TOOL_CALLS][...]``,
    ``[TOOL_CALLS]name[ARGS]{...}``), of Llama (JSON objects alone, or Python's ``[name(x=1)]``) and of gpt-oss
    (``to=functions.name<|channel|>commentary<|message|>{...}``). Reasoning has no calls.

    Args:
        tools: schemas of the tools. They give the types of values that a form writes without quotes. A form without marks, such
            as a JSON object alone, is a call only if its name is that of a tool: any answer may be JSON.
    """
    return _read(text, _Schemas(tools))[0]


def text_before_calls(text: str, tools: Sequence[JsonObject] = ()) -> str:
    """Return the text before the first call of a completion for which :func:`parse_calls` returns calls."""
    return text[: _read(text, _Schemas(tools))[1]].strip()


class _Schemas:
    """The tools by name. ``properties`` are the schemas of a tool's arguments."""

    def __init__(self, tools: Sequence[JsonObject]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._by_name = {one["name"]: one for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)}

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def typed(self, name: str, key: str, text: str) -> object:
        """Return the value that a text stands for, by the schema of the argument; without a schema, JSON or the text."""
        parameters = self._by_name.get(name, {}).get("parameters") or {}
        schema = (parameters.get("properties") or {}).get(key)
        types = _types(schema) if isinstance(schema, dict) else None
        if types == {"string"}:
            return text
        value = _value(text.strip())
        if not types:
            return value
        if value == text.strip() and text.strip() in PYTHON_VALUES and types & {"boolean", "null"}:
            value = PYTHON_VALUES[text.strip()]
        if _fits(value, types):
            return value
        return text if "string" in types else value


# Models write these in place of JSON's words.
PYTHON_VALUES = {"True": True, "False": False, "None": None}
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


def _read(text: str, schemas: _Schemas) -> tuple[list[ToolCall | str], int]:
    """Return the calls, and where the first begins in the text."""
    if called := [one for one in channel_messages(text) if one.recipient]:
        names = [one.recipient.removeprefix(FUNCTIONS) for one in called]
        return [_of_channel(name, one.text) for name, one in zip(names, called, strict=True)], 0
    answer = without_reasoning(text)
    if answer is None:
        return [], len(text)
    start = max(text.rfind(answer), 0)
    if begins := CALL_BEGINS.search(answer):
        start += begins.start()
        marked = answer[begins.start() :]
        if begins[0] == MISTRAL:
            return _of_mistral(marked, schemas), start
        if begins[0] == PYTHON_TAG:
            return _objects(marked.replace(PYTHON_TAG, ";"), schemas), start
        if begins[0] == "<tool_call>":
            return [call for inner in TAGGED.findall(marked) for call in _tagged(inner.strip(), schemas)], start
        return _functions(marked, schemas), start
    return _bare(answer.strip(), schemas), start


def _of_channel(name: str, text: str) -> ToolCall | str:
    """Return a call of gpt-oss, whose message has the arguments."""
    arguments = json_or_text(text) if text.strip() else {}
    return ToolCall(name, arguments) if isinstance(arguments, dict) else f"the arguments of {name} are not a JSON object"


def _tagged(inner: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls inside of a tag."""
    if "<function=" in inner:
        return _functions(inner, schemas)
    if fence := FENCED.match(inner):
        inner = fence[1].strip()
    name = inner.partition("<arg_key>")[0].strip()
    if "<arg_key>" in inner or (name in schemas and not inner.startswith("{")):
        pairs = ((key, value.strip("\n")) for key, value in KEYS.findall(inner))
        return [ToolCall(name, {key: schemas.typed(name, key, value) for key, value in pairs})]
    return _objects(inner, schemas)


def _functions(text: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls in the form of Qwen3-Coder. A call that is not closed was cut off."""
    found: list[ToolCall | str] = []
    for name, body, end in FUNCTION.findall(text):
        if not end and "</tool_call>" not in body:
            found.append(f"the call of {name} is not closed by </function>")
            continue
        values = {}
        for key, value, _ in PARAMETER.findall(body.partition("</tool_call>")[0]):
            # The form has a line break on each side of a value.
            values[key] = schemas.typed(name, key, value.removeprefix("\n").removesuffix("\n"))
        found.append(ToolCall(name, values))
    return found or ["<function= without a name"]


def _of_mistral(text: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls after Mistral's mark: a list of objects, or names with arguments."""
    found: list[ToolCall | str] = []
    for part in text.split(MISTRAL)[1:]:
        rest = part
        while (named := MISTRAL_CALL.match(rest)) is not None:
            try:
                arguments, end = DECODER.raw_decode(rest, named.end())
            except (ValueError, RecursionError) as error:
                found.append(f"not valid JSON: {error}")
                rest = ""
                break
            found.append(_call({"name": named[1], "arguments": arguments}))
            rest = rest[end:]
        if rest.strip() and rest == part:
            found += _objects(rest.strip(), schemas)
    return found


def _bare(answer: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls of an answer without marks: it consists of calls of known tools, or has none."""
    if fence := FENCED.match(answer):
        answer = fence[1].strip()
    if (named := NAMED_BARE.match(answer)) is not None and named[1] in schemas:
        # Mistral's form, whose marks are special tokens.
        answer = json.dumps({"name": named[1]})[:-1] + ', "arguments": ' + answer[named.end() :] + "}"
    if answer[:1] in ("{", "["):
        found = _pythonic(answer, schemas) or _objects(answer, schemas)
        is_call = all(isinstance(one, ToolCall) and one.name in schemas for one in found)
        # Cut-off or broken calls of known tools are answered, so that the model can correct them.
        is_broken = answer.startswith("{") and _names_tool(answer, schemas)
        return found if is_call or is_broken else []
    return []


def _names_tool(text: str, schemas: _Schemas) -> bool:
    named = re.match(
        r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"',
        text,
    )
    return named is not None and named[1] in schemas


def _pythonic(text: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls of a list such as ``[f(x=1), g()]``, with literal arguments; none if it is something else."""
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", text):
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [
            ToolCall(ast.unparse(one.func), {str(word.arg): ast.literal_eval(word.value) for word in one.keywords})
            for one in calls
            if isinstance(one, ast.Call) and not one.args
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _value(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    # Deeply nested text raises RecursionError.
    except (ValueError, RecursionError):
        return text


def _objects(text: str, schemas: _Schemas) -> list[ToolCall | str]:
    """Return the calls of JSON objects, or lists of them, that follow one another, possibly with semicolons between."""
    found: list[ToolCall | str] = []
    place = 0
    while place < len(text):
        if text[place].isspace() or text[place] in ";,":
            place += 1
            continue
        try:
            # Line breaks inside of texts are accepted.
            value, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            return [*found, f"not valid JSON: {error}"]
        found += [_call(one) for one in (value if isinstance(value, list) else [value])]
    return found or ["no JSON object"]


def _call(value: object) -> ToolCall | str:
    if not isinstance(value, dict):
        return f"expected an object with name and arguments, got {type(value).__name__}"
    inner = value.get("function", value)
    inner = inner if isinstance(inner, dict) else value
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(inner.get("name"), str) or not isinstance(arguments, dict):
        return "expected an object with a name and an object of arguments"
    return ToolCall(inner["name"], arguments)
