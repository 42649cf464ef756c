"""The channels of gpt-oss: one completion has several messages, each with a channel or a recipient.

A completion such as ``<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.`` has
reasoning in the channel ``analysis`` and its answer in the channel ``final``. A call of a tool names its recipient:
``<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 2}<|call|>``.

Source: the format "harmony" in the documentation of gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

MESSAGE_MARK, CHANNEL_MARK = "<|message|>", "<|channel|>"
END = re.compile(r"<\|(?:end|return|call|start)\|>")
RECIPIENT = re.compile(r"\bto=([\w.-]+)")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."


@dataclass(frozen=True)
class ChannelMessage:
    """One message of a completion. ``recipient``: the tool that it calls; empty without a call."""

    channel: str
    recipient: str
    text: str


@dataclass(frozen=True)
class ChannelTexts:
    """The texts of a completion: its reasoning, its answer, and the name and JSON text of each call."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


def names_channels(template: str) -> bool:
    """Whether a chat template prints channels."""
    return CHANNEL_MARK in template and MESSAGE_MARK in template


def channel_messages(text: str) -> Iterator[ChannelMessage]:
    """Yield the messages of a completion, whose text has its special tokens. The header of the last may be incomplete."""
    place = 0
    while (mark := text.find(MESSAGE_MARK, place)) >= 0:
        header = text[place:mark]
        start = mark + len(MESSAGE_MARK)
        end = END.search(text, start)
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        yield ChannelMessage(
            channel[1] if channel else "final",
            recipient[1] if recipient else "",
            text[start : end.start()] if end else text[start:],
        )
        place = end.end() if end else len(text)


def channel_texts(text: str) -> ChannelTexts | None:
    """Return the texts of a completion; None if it has no channel, so that all of it is text.

    Text of the channel ``commentary`` without a recipient is for the user, as that of ``final``.
    """
    if CHANNEL_MARK not in text and MESSAGE_MARK not in text:
        return None
    messages = list(channel_messages(text))
    said = [message.text for message in messages if not message.recipient and message.channel != "analysis"]
    return ChannelTexts(
        "\n".join(message.text for message in messages if not message.recipient and message.channel == "analysis"),
        "\n".join(said),
        tuple((message.recipient.removeprefix(FUNCTIONS), message.text) for message in messages if message.recipient),
    )


def json_or_text(text: str) -> object:
    """Return the object that a text is the JSON of; any other text unchanged."""
    try:
        value = json.loads(text, strict=False)
    # Deeply nested text raises RecursionError.
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
