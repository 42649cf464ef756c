"""Calls of tools in a completion, read from its tokens by the package renderers, or from its text."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cookbook.data.channels import FUNCTIONS, channel_messages, json_or_text
from cookbook.errors import described
from cookbook.sampling.environments import call_forms
from cookbook.sampling.environments.call_forms import Schemas, ToolCall, json_value
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CallReader", "Calls", "ToolCall", "described_tools", "parse_calls", "text_before_calls", "token_reader"]

log = logging.getLogger("cookbook")

# Name and arguments of each call; a text instead says why it cannot be read. JSON-compatible: worker processes get it.
Calls = Sequence[tuple[str, Mapping[str, object]] | str]
# Reads a completion from the tokens of its prompt and its own tokens.
CallReader = Callable[[Sequence[int], Sequence[int]], Calls]


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
    values = json_value(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
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
    ``[TOOL_CALLS]name[ARGS]{...}``), of Llama (JSON objects alone, or Python's ``[name(x=1)]``), of DeepSeek (a name and JSON
    between its marks, from V3.2 on ``<invoke name=...>`` as MiniMax), of Kimi (``<|tool_call_begin|>functions.name:0``) and of
    gpt-oss (``to=functions.name<|channel|>commentary<|message|>{...}``). Reasoning has no calls.

    Args:
        tools: schemas of the tools. They give the types of values that a form writes without quotes. A form without marks, such
            as a JSON object alone, is a call only if its name is that of a tool: any answer may be JSON.
    """
    return _read(text, Schemas(tools))[0]


def text_before_calls(text: str, tools: Sequence[JsonObject] = ()) -> str:
    """Return the text before the first call of a completion for which :func:`parse_calls` returns calls."""
    return text[: _read(text, Schemas(tools))[1]].strip()


def _read(text: str, schemas: Schemas) -> tuple[list[ToolCall | str], int]:
    """Return the calls, and where the first begins in the text."""
    if called := [one for one in channel_messages(text) if one.recipient]:
        names = [one.recipient.removeprefix(FUNCTIONS) for one in called]
        return [_of_channel(name, one.text) for name, one in zip(names, called, strict=True)], 0
    return call_forms.read(text, schemas)


def _of_channel(name: str, text: str) -> ToolCall | str:
    """Return a call of gpt-oss, whose message has the arguments."""
    arguments = json_or_text(text) if text.strip() else {}
    return ToolCall(name, arguments) if isinstance(arguments, dict) else f"the arguments of {name} are not a JSON object"
