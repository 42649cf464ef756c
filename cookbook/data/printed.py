"""Whether a chat template prints what a message says, tried once for every shape of message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cookbook.data.formats import Chat
from cookbook.data.messages import CALLS, REASONING, Message
from cookbook.errors import DataError

# Fields that say something to the model. Without them the row is another one.
NEEDED = frozenset(
    {*REASONING, *CALLS, "name", "refusal", "tools", "documents", "citations", "annotations"}
    | {f"{medium}{plural}" for medium in ("image", "video", "audio") for plural in ("", "s", "_url")}
)
MARK = " probe"  # shows whether a template prints a text: it then prints this too
REMEDY = "remove it from the data, or give a template that prints it as model.chat_template"
Shape = tuple[str, bool, bool, bool, tuple[str, ...]]


class PrintedFields:
    """Compares conversations with and without each field of their messages, and refuses those that lose a needed one.

    Messages of one shape (role, first or not, fields that hold something) are tried once: the template treats them alike.

    Args:
        render: the text of a conversation, with (True) the header of the answer to come.
    """

    def __init__(self, render: Callable[[Chat, bool], str]) -> None:
        self._render = render
        self._known: set[Shape | str] = set()
        self.unused: dict[str, None] = {}
        """Fields that the template does not print, and that say nothing to the model."""

    def check(self, chat: Chat, text: str, *, header: bool) -> None:
        """``text`` is the whole of ``chat``.

        Raises:
            DataError: the template drops tools, a message, or a needed field of one; it names the row.
        """
        if chat.tools and "tools" not in self._known:
            if self._shown(replace(chat, tools=None), header) == text:
                raise DataError(f'{chat.where}: the chat template does not print "tools"; {REMEDY}')
            self._known.add("tools")
        for index, message in enumerate(chat.messages):
            shape = (message.role, index == 0, bool(message.content.strip()), bool(chat.tools), message.said)
            if shape not in self._known:
                self._try(chat, index, text, header)
                self._known.add(shape)

    def _try(self, chat: Chat, index: int, text: str, header: bool) -> None:
        message, until = chat.messages[index], chat
        if message.role == "assistant":  # as it is sampled: some templates cut answers that are not the last
            ended = replace(chat, messages=chat.messages[: index + 1])
            if (shown := self._shown(ended, False)) is not None:
                until, text, header = ended, shown, False

        def prints(changed: Message) -> bool:
            messages = [*until.messages[:index], changed, *until.messages[index + 1 :]]
            return self._shown(replace(until, messages=tuple(messages)), header) != text

        if message.content.strip() and not prints(replace(message, content=message.content + MARK)):
            raise DataError(f"{chat.where}: the chat template does not print message {index} ({message.role}); {REMEDY}")
        for name in message.said:
            others = {key: value for key, value in message.extra.items() if key != name}
            value = message.extra[name]
            changed = replace(message, extra={**others, name: value + MARK} if isinstance(value, str) else others)
            if prints(changed):
                continue
            # The answer of a tool follows its call, which names the tool.
            if name in NEEDED and not (name == "name" and message.role == "tool"):
                what = f'"{name}" of message {index} ({message.role})'
                raise DataError(f"{chat.where}: the chat template does not print {what}; {REMEDY}")
            self.unused[name] = None

    def _shown(self, chat: Chat, header: bool) -> str | None:
        """The conversation's text; None if the template refuses it."""
        try:
            return self._render(chat, header)
        except DataError:
            return None
