"""Calls of tools in a completion, read from its tokens by the package renderers, or from its text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cookbook.errors import described
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("cookbook")

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(.*)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Llama 3 puts this mark before a call.
PYTHON_TAG = "<|python_tag|>"
CALL_BEGINS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<function=")

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

    def read(prompt: Sequence[int], completion: Sequence[int]) -> Calls:
        # The package takes the schema of a function without the object around it.
        functions = [tool["function"] for tool in tools]
        parsed = family.parse_response(list(completion), tools=functions, prompt_ids=list(prompt))
        return [_of_family(one.name, one.arguments, str(one.status)) for one in parsed.tool_calls]

    return read


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


def parse_calls(text: str) -> list[ToolCall | str]:
    """Return the calls of tools in a completion, in order; a text instead of a call says why it cannot be read.

    Read are the forms of Qwen and Hermes (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``), of Qwen3-Coder
    (``<function=name><parameter=x>...``), of Mistral (``[TOOL_CALLS][...]``), and of Llama (a JSON object alone).
    """
    if tagged := TAGGED.findall(text):
        return [call for inner in tagged for call in (_functions(inner) or _of_json(inner))]
    if functions := _functions(text):
        return functions
    if match := MISTRAL.search(text):
        return _of_json(match[1])
    bare = text.strip().removeprefix(PYTHON_TAG).strip()
    return _of_json(bare) if re.match(r'\[?\s*\{\s*"(name|type|function)"', bare) else []


def text_before_calls(text: str) -> str:
    """Return the text before the first call of a completion for which :func:`parse_calls` returns calls."""
    begins = CALL_BEGINS.search(text)
    return text[: begins.start()].strip() if begins else ""


def _functions(text: str) -> list[ToolCall | str]:
    return [
        ToolCall(name, {key: _value(value) for key, value in PARAMETER.findall(body)}) for name, body in FUNCTION.findall(text)
    ]


def _value(text: str) -> object:
    try:
        return json.loads(text)
    # Deeply nested text raises RecursionError.
    except (ValueError, RecursionError):
        return text


def _of_json(text: str) -> list[ToolCall | str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [f"not valid JSON: {error}"]
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _call(value: object) -> ToolCall | str:
    if not isinstance(value, dict):
        return f"expected an object with name and arguments, got {type(value).__name__}"
    inner = value.get("function", value)
    inner = inner if isinstance(inner, dict) else value
    arguments = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(inner.get("name"), str) or not isinstance(arguments, dict):
        return "expected an object with a name and an object of arguments"
    return ToolCall(inner["name"], arguments)
