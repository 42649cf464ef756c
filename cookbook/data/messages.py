"""Chat messages, in the OpenAI shape (``role``, ``content``) or ShareGPT's (``from``, ``value``)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError
from cookbook.types import JsonObject

# Roles that all chat templates know, and other usual names of them, in lower case. Data of ShareGPT, Gemma, Cohere and others
# have these names.
ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "person", "customer", "prompter", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatbot", "chatgpt", "ai", "agent", "llm", "answer", "response"), "assistant"),
    **dict.fromkeys(("system_prompt", "sys"), "system"),
    **dict.fromkeys(("tool_result", "tool_response", "tool_output", "function_response", "function_result"), "tool"),
}
# Roles that some chat templates name. A template that does not gets the other role.
ROLE_WITHOUT_NAME = {"developer": "system", "function": "tool", "observation": "tool", "ipython": "tool"}
SHAREGPT_ROLES = {**ALIASES, "function": "tool", "observation": "tool"}
# ShareGPT's names of "role" and "content", and the author of calls in LLaMA-Factory's data.
SHAREGPT = ("from", "value")
CALLER = "function_call"
# Roles of the result of a tool.
RESULTS = ("tool", "function", "observation", "ipython")
# Names of the number from 0 to 1 in OpenAI's, Mistral's and Tinker's formats, and in ms-swift, which also takes true and false.
WEIGHTS = ("weight", "loss")
# Names of the flag in axolotl (the first two) and in Tinker.
TRAIN = ("train", "training", "trainable")
FLAGS = frozenset({*WEIGHTS, *TRAIN, "train_detail"})
REASONING = ("reasoning_content", "thinking", "reasoning")
CALLS = ("tool_calls", "function_call")
# Fields of a message in OpenAI's Harmony, and the channels of gpt-oss.
CHANNEL, RECIPIENT, CHANNELS = "channel", "recipient", ("analysis", "commentary", "final")
# Types of the parts of a content that are text: of chat completions, and of OpenAI's Responses.
TEXT_PARTS = ("text", "input_text", "output_text")
LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{.*\}\s*\]\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation.

    ``weight`` scales an answer's loss; ``extra`` holds further fields that a chat template may read, such as ``tool_calls``.
    """

    role: str
    content: str
    weight: float = 1.0
    extra: JsonObject = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The message in the shape that chat templates read."""
        return {"role": self.role, "content": self.content, **self.extra}

    @property
    def said(self) -> tuple[str, ...]:
        """Names of the further fields that are not empty."""
        return tuple(name for name, value in self.extra.items() if value not in ("", [], {})) if self.extra else ()

    @property
    def is_empty(self) -> bool:
        """Whether the message has neither text nor reasoning nor a tool call."""
        return not self.content.strip() and not set(self.said) & {*REASONING, *CALLS}

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield each text of an answer with the name of its field; of a tool call, its name and its arguments."""
        yield "content", self.content
        yield from ((name, text) for name in REASONING if isinstance(text := self.extra.get(name), str))
        yield from self.call_texts()

    def call_texts(self) -> Iterator[tuple[str, str]]:
        """Yield the texts of the message's tool calls."""
        for call in self.extra.get("tool_calls") or ():
            function = call.get("function", call)
            yield from (("tool_calls", text) for text in _strings([function.get("name"), function.get("arguments")]))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(part)


def parse_messages(value: object, where: str, column: str) -> tuple[ChatMessage, ...]:
    """The messages of one column.

    Raises:
        EmptyRowError: the column has no messages.
        DataError: the values are not messages; the error names the row, the column and the place.
    """
    if isinstance(value, Mapping) and {"messages", "role", "from"} & value.keys():
        value = _of_object(value, f'{where}: "{column}"')
    if not isinstance(value, Sequence) or isinstance(value, str):
        got = "text that is not the JSON of one" if isinstance(value, str) else type(value).__name__
        raise DataError(f'{where}: "{column}" must be a list of messages, got {got}')
    if not value:
        raise EmptyRowError(
            f'{where}: "{column}" has no messages, so nothing would be trained on; remove the row or set data.on_empty=skip'
        )
    messages = [_plain_message(item) or _message(item, f'{where}: "{column}"[{index}]') for index, item in enumerate(value)]
    if any(message.extra and CHANNEL in message.extra for message in messages):
        messages = _without_channels(messages, f'{where}: "{column}"')
    return tuple(messages)


def _of_object(value: Mapping[str, Any], place: str) -> object:
    """Return the messages of an object: itself, as an answer of LLaMA-Factory's pairs, or its list, as OpenAI's ``input``."""
    if "messages" not in value:
        return [value]
    if others := [key for key, one in value.items() if key != "messages" and one not in (None, "", [], {}, True, False)]:
        raise DataError(f'{place} has "{others[0]}" beside its messages, which is not read; make it a column of the row')
    return value["messages"]


def _without_channels(messages: Sequence[ChatMessage], place: str) -> list[ChatMessage]:
    """Return messages of gpt-oss, each in a channel, in the usual fields: reasoning and calls belong to the answer.

    A message in the channel ``analysis`` is the reasoning of the next message of the assistant, and one with a recipient is a
    call of a tool.

    Raises:
        DataError: a channel is unknown, or reasoning and its answer have different weights.
    """
    found: list[ChatMessage] = []
    thoughts: list[ChatMessage] = []

    def add_thoughts(message: ChatMessage) -> None:
        if thoughts and any(one.weight != message.weight for one in thoughts):
            raise DataError(f"{place} has reasoning and an answer of different weights; give both the same")
        texts = [one.content for one in thoughts]
        thoughts.clear()
        extra = {**message.extra, "reasoning_content": "\n".join(texts)} if texts else message.extra
        found.append(replace(message, extra=extra))

    for index, message in enumerate(messages):
        channel, recipient = message.extra.get(CHANNEL), message.extra.get(RECIPIENT)
        message = replace(message, extra=_without(_without(message.extra, CHANNEL), RECIPIENT))
        if message.role != "assistant":
            if thoughts:
                add_thoughts(replace(thoughts[-1], content="", extra={}))
            found.append(message)
        elif channel not in (None, *CHANNELS):
            raise DataError(f"{place}[{index}] has the channel {channel!r}; expected one of {', '.join(CHANNELS)}")
        elif isinstance(recipient, str) and recipient not in ("", "all"):
            function = {"name": recipient.removeprefix("functions."), "arguments": message.content}
            calls = _tool_calls([{"type": "function", "function": function}], f"{place}[{index}]")
            add_thoughts(replace(message, content="", extra={**message.extra, "tool_calls": calls}))
        elif channel == "analysis":
            thoughts.append(message)
        else:
            add_thoughts(message)
    if thoughts:
        add_thoughts(replace(thoughts[-1], content="", extra={}))
    return found


def is_prefill(messages: Sequence[ChatMessage]) -> bool:
    """Whether a prompt ends with the start of an answer, which sampling continues. An answer that calls tools is complete."""
    return bool(messages) and messages[-1].role == "assistant" and not any(messages[-1].extra.get(name) for name in CALLS)


def messages_in_text(value: object) -> object:
    """Return the list of messages that a text is the JSON of, or Python's notation of; any other value unchanged.

    CSV and some Parquet files have lists as text.
    """
    if not isinstance(value, str) or not LIST_OF_OBJECTS.match(value):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        try:
            parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    named = isinstance(parsed, list) and all(
        isinstance(message, dict) and ("role" in message or "from" in message) for message in parsed
    )
    return parsed if named else value


def usual_role(role: str) -> str:
    """Return the role that a chat template knows for a usual name of it, such as ``Assistant`` or ``model``."""
    name = role.strip().lower()
    return ALIASES.get(name, name if name in ROLE_WITHOUT_NAME else role)


def as_text(value: object, place: str) -> str:
    """Return ``value`` as the text that the dataset's author sees. A whole number has one spelling, so it counts as text.

    Raises:
        DataError: the value is not text. The spelling of a fraction such as 1.50 is already lost.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | bool):
        raise DataError(f"{place} must be text, got the {type(value).__name__} {value}; write it in quotes")
    raise DataError(f"{place} must be text, got {'none' if value is None else type(value).__name__}")


def _plain_message(item: object) -> ChatMessage | None:
    """Return a message that has a role and text and nothing else; None for any other value. Most messages are plain."""
    if type(item) is dict and len(item) == 2:
        role, content = item.get("role"), item.get("content")
        if type(role) is str and type(content) is str:
            return ChatMessage(role if role in ROLES else usual_role(role), content)
    return None


def _message(item: object, place: str) -> ChatMessage:
    # The test of an abstract class is slow.
    if type(item) is not dict and not isinstance(item, Mapping):
        raise DataError(f'{place} must be an object with "role" and "content", got {type(item).__name__}')
    # Arrow fills absent keys with None. An empty list of calls counts as absent, because some templates fail on it.
    values = {key: value for key, value in item.items() if value is not None and value != [] and value != {}}
    if not values.keys().isdisjoint(SHAREGPT):
        values = _from_sharegpt(values, place)
    role = values.pop("role", None)
    content = values.pop("content", "" if set(values) & {*CALLS, *REASONING} else None)
    if not isinstance(role, str):
        raise DataError(f'{place} has no "role"; give system, user, assistant or tool')
    role = usual_role(role)
    weight = _weight(values, role, place)
    if "tool_calls" in values:
        values["tool_calls"] = _tool_calls(values["tool_calls"], place)
    if role in RESULTS and _is_data(content):
        content = json.dumps(content, ensure_ascii=False)
    if role == "assistant" and isinstance(content, list):
        content = _without_thoughts(content, values, place)
    return ChatMessage(role, _content(content, place), weight, values)


def _without_thoughts(parts: list[Any], values: dict[str, Any], place: str) -> list[Any]:
    """Move the parts of an answer that are reasoning, as in Magistral's data, into its field ``reasoning_content``."""
    thoughts = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "thinking"]
    if not thoughts:
        return parts
    if set(values) & set(REASONING):
        raise DataError(f"{place} has reasoning in a field and in its content; keep one of the two")
    texts = [_content(part.get("thinking"), f'{place} "thinking"') for part in thoughts]
    values["reasoning_content"] = "\n".join(texts)
    return [part for part in parts if part not in thoughts]


def _is_data(content: Any) -> bool:
    """Whether the result of a tool is an object, or a list that has something other than the parts of a content."""
    if isinstance(content, Mapping):
        return True
    parts = isinstance(content, Sequence) and not isinstance(content, str)
    return parts and not all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part, f'{place} "content"[{index}]') for index, part in enumerate(content))
    if content is None or isinstance(content, Mapping):
        description = "none" if content is None else "an object"
        raise DataError(f'{place} needs "content" that is text, got {description}; cookbook trains text only')
    return as_text(content, f'{place} "content"')


def _part(part: object, place: str) -> str:
    """The text of one content part, ``{"type": "text", "text": ...}``."""
    if not isinstance(part, Mapping):
        raise DataError(f'{place} must be an object with "type" and "text", got {type(part).__name__}')
    kind = part.get("type", "text" if "text" in part else None)
    others = [key for key, value in part.items() if key not in ("type", "text") and value not in (None, "", [], {})]
    if kind not in TEXT_PARTS or others:
        description = f'"type" {kind!r}' if kind not in TEXT_PARTS else f'"{others[0]}"'
        raise DataError(f"{place} has {description}; cookbook trains text only, so fix or remove the row")
    return as_text(part.get("text"), f'{place} "text"')


def _from_sharegpt(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message with "role" and "content" in place of ShareGPT's "from" and "value". Data may mix both names.

    A message from ``function_call`` has the JSON of its calls as text, as in LLaMA-Factory.
    """
    for names in (("role", "from"), ("content", "value")):
        if names[0] in values and names[1] in values:
            raise DataError(f'{place} has "{names[0]}" and "{names[1]}"; keep one of the two')
    content = values.pop("value", values.get("content"))
    if "from" in values:
        speaker = values.pop("from")
        name = speaker.strip().lower() if isinstance(speaker, str) else None
        if name == CALLER and content is not None:
            return {**_without(values, "content"), "role": "assistant", "tool_calls": content}
        role = SHAREGPT_ROLES.get(name or "")
        if role is None:
            raise DataError(f'{place} is "from" {speaker!r}; expected one of {", ".join((*SHAREGPT_ROLES, CALLER))}')
        values = {"role": role, **values}
    return values if content is None else {**values, "content": content}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _weight(values: dict[str, Any], role: str, place: str) -> float:
    """Remove the weight, and flags of the same meaning, from a message's fields."""
    if FLAGS.isdisjoint(values):
        return 1.0
    if "train_detail" in values:
        raise DataError(f'{place} has "train_detail", and cookbook trains a message whole or not at all; give "train" instead')
    marks = {name: values.pop(name) for name in (*WEIGHTS, *TRAIN) if name in values}
    for name, value in marks.items():
        right = isinstance(value, bool) if name in TRAIN else isinstance(value, int | float) and 0 <= value <= 1
        if not right:
            expected = "true or false" if name in TRAIN else "a number from 0 (not trained) to 1"
            raise DataError(f'{place} has "{name}" {value!r}; give {expected}')
        if value and role != "assistant":
            stated = json.dumps(value)
            raise DataError(f'{place} has "{name}" {stated} on a {role} message; only assistant messages are trained')
    if len(set(map(bool, marks.values()))) > 1 or len({marks[name] for name in WEIGHTS if name in marks}) > 1:
        stated = ", ".join(f'"{name}" {json.dumps(value)}' for name, value in marks.items())
        raise DataError(f"{place} contradicts itself with {stated}; keep one of them")
    return float(next(iter(marks.values()), 1.0))


def _tool_calls(calls: object, place: str) -> list[Mapping[str, object]]:
    """Return calls with their arguments as objects, which chat templates print as JSON; they would print text in quotes.

    The calls may be JSON text. Data sets have it to keep arguments of different types in one column.
    """
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except ValueError as error:
            raise DataError(f'{place} "tool_calls" is broken JSON: {error}; fix or remove the row') from None
        calls = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f'{place} "tool_calls" must be a list of objects with "function", got {type(calls).__name__}')
    return [_with_object(call, f'{place} "tool_calls"[{index}]') for index, call in enumerate(calls)]


def _with_object(call: Mapping[str, object], place: str) -> Mapping[str, object]:
    if call.get("function") is not None:
        if not isinstance(call["function"], Mapping):
            raise DataError(f'{place} "function" must be an object with "name" and "arguments", got {call["function"]!r}')
        return {**call, "function": _with_object(call["function"], place)}
    arguments = call.get("arguments")
    if arguments is None:
        # A call without arguments.
        return {**call, "arguments": {}} if isinstance(call.get("name"), str) else call
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise DataError(f'{place} has "arguments" that are broken JSON: {error}; fix or remove the row') from None
    return {**call, "arguments": parsed}


def with_calls(message: ChatMessage) -> ChatMessage:
    """Return a message whose ``function_call``, of an older version of OpenAI's API, is its only entry of ``tool_calls``."""
    call = message.extra.get("function_call")
    if not isinstance(call, Mapping) or "tool_calls" in message.extra:
        return message
    calls = [{"type": "function", "function": _with_object(call, '"function_call"')}]
    return replace(message, extra={**_without(message.extra, "function_call"), "tool_calls": calls})


def standard_schema(tool: Any) -> Any:
    """Return the schema of a tool in the object ``function``. Data of LLaMA-Factory and others have it without."""
    if not isinstance(tool, Mapping) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    return {"type": "function", "function": _without(tool, "type")}


def standard_calls(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return messages whose calls have the object ``function`` and an identifier of nine letters and digits.

    Templates of Mistral refuse others. The results of a message's calls have the same identifiers, in the order of the calls
    if they do not name a call.
    """
    number, names, waiting = 0, dict[object, str](), list[str]()
    changed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            standard, waiting = [], []
            for call in calls:
                name = f"call{number:05d}"
                number += 1
                names[call.get("id")] = name
                waiting.append(name)
                function = call.get("function") or {key: value for key, value in call.items() if key not in ("id", "type")}
                standard.append({**call, "type": "function", "id": name, "function": function})
            message = {**message, "tool_calls": standard}
        elif message["role"] == "tool":
            stated = names.get(message.get("tool_call_id")) if message.get("tool_call_id") is not None else None
            name = stated or next(iter(waiting), "")
            waiting = [call_name for call_name in waiting if call_name != name]
            message = {**message, "tool_call_id": name} if name else message
        changed.append(message)
    return changed
