"""What a chat template makes of a conversation, and which characters of it the model is to write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cookbook.data.formats import Chat
from cookbook.data.messages import Message
from cookbook.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = (Message("user", "question"), Message("assistant", "answer"))


class Span(NamedTuple):
    """Characters ``[start, end)`` of the rendered text, trained with ``weight``."""

    start: int
    end: int
    weight: float


class ChatTemplate:
    """The template of a tokenizer.

    Raises:
        DataError: the tokenizer has none, or it refuses a conversation; the message names the row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prompt(self, chat: Chat) -> str:
        """The messages before ``start``, and the header of the answer to come."""
        return self._render(chat, chat.messages[: chat.start], header=True)[0]

    def conversation(self, chat: Chat, train_on: str) -> tuple[str, list[Span]]:
        """All messages as text, and the answers in it. The end of the turn may lie within a span or right behind it.

        With ``{% generation %}`` blocks the template itself says what the model writes. Otherwise an answer is what the
        text gains over the prompt it would be sampled with.
        """
        wanted = _weights(chat, train_on)
        text, blocks = self._render(chat, chat.messages, header=False)
        answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if len(blocks) == len(answers):
            found = {index: block for index, block in zip(answers, blocks, strict=True) if index in wanted}
        else:
            found = {index: self._answer(chat, index, text) for index in wanted}
        for index, (start, end) in found.items():
            if _squeezed(chat.messages[index].content) not in _squeezed(text[start:end]):
                raise DataError(
                    f"{chat.where}: the chat template drops text of message {index}, which would go untrained; "
                    "give one that keeps it as model.chat_template"
                )
        spans = [Span(*place, wanted[index]) for index, place in found.items()]
        return text, spans

    @cached_property
    def end_of_turn(self) -> str:
        """What the template writes behind an answer; empty when it refuses a plain question and answer."""
        try:
            text, _ = self._render(Chat("", PROBE), PROBE, header=False)
        except DataError:
            return ""
        return text.rpartition(PROBE[1].content)[2]

    @cached_property
    def _last_word(self) -> str:
        """The end-of-text token, where the template ends every text with it after something else has closed the answer."""
        closed, end, _ = self.end_of_turn.rpartition(self._tokenizer.eos_token or "\0")
        return end if closed.strip() else ""

    def _answer(self, chat: Chat, index: int, text: str) -> tuple[int, int]:
        """Where in ``text`` message ``index`` stands, checked against what the model sees when it writes it."""
        if index == 0:
            raise DataError(f"{chat.where}: the conversation begins with an answer; begin it with a user message")
        before, _ = self._render(chat, chat.messages[:index], header=True)
        until = text
        if index < len(chat.messages) - 1:
            until, _ = self._render(chat, chat.messages[: index + 1], header=False)
            until = until.removesuffix(self._last_word)
        if not until.startswith(before):
            raise DataError(
                f"{chat.where}: the chat template shows message {index} otherwise than it begins the answer to sample; "
                "give a template with {% generation %} blocks as model.chat_template"
            )
        if not text.startswith(until):
            raise DataError(
                f"{chat.where}: the chat template rewrites message {index} once the conversation goes on, so one sequence "
                "cannot train it as it is sampled; set data.train_on=each_assistant (a sequence per answer) or last_assistant"
            )
        return len(before), len(until)

    def _render(self, chat: Chat, messages: Sequence[Message], header: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character ranges of its ``{% generation %}`` blocks."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = list(chat.tools) if chat.tools else None
        template = self._source(tools)
        try:
            texts, blocks = render_jinja_template(
                conversations=[[message.to_dict() for message in messages]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=not header and GENERATION_BLOCK.search(template) is not None,
                add_generation_prompt=header,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(f"{chat.where}: the chat template refuses the row: {reason}; mend or remove it") from error
        return texts[0], blocks[0] if blocks else []

    def _source(self, tools: list[Any] | None) -> str:
        if not self._tokenizer.chat_template:
            name = self._tokenizer.name_or_path or "the model"
            raise DataError(
                f"model.chat_template: the tokenizer of {name} has no chat template, and the data are conversations; "
                "give a Jinja file, or plain text columns with data.chat=false"
            )
        return str(self._tokenizer.get_chat_template(tools=tools))

    @cached_property
    def _variables(self) -> Mapping[str, Any]:
        return dict(self._tokenizer.special_tokens_map)


def _weights(chat: Chat, train_on: str) -> dict[int, float]:
    """Weight by message index, of the answers that are treated otherwise than the text around them."""
    answers = {index: message.weight for index, message in enumerate(chat.messages) if message.role == "assistant"}
    if train_on == "all":
        return {index: weight for index, weight in answers.items() if weight != 1}
    first = max(answers, default=0) if train_on == "last_assistant" else chat.start
    return {index: weight for index, weight in answers.items() if index >= first and weight != 0}


def _squeezed(text: str) -> str:
    """``text`` without white space, which templates may trim."""
    return "".join(text.split())
