"""What a chat template makes of a conversation, and which characters of it the model is to write."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cookbook.data.formats import Chat
from cookbook.data.messages import Message
from cookbook.data.printed import PrintedFields
from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Rendering = tuple[list[str], list[Any]]  # texts, and the generation blocks of each
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
        self._arguments_as_text = False
        self._fields = PrintedFields(lambda chat, header: self._render(chat, chat.messages, header)[0])

    @property
    def unused_fields(self) -> Sequence[str]:
        """The fields of messages seen so far that the template does not print, and that say nothing to the model."""
        return list(self._fields.unused)

    def prompt(self, chat: Chat) -> str:
        """The messages before ``start``, and the header of the answer to come."""
        asked = replace(chat, messages=chat.messages[: chat.start])
        text, _ = self._render(asked, asked.messages, header=True)
        self._fields.check(asked, text, header=True)
        self._check_texts(asked, {}, text)
        return text

    def conversation(self, chat: Chat, train_on: str) -> tuple[str, list[Span]]:
        """All messages as text, and the answers in it. The end of the turn may lie within a span or right behind it.

        With ``{% generation %}`` blocks the template itself says what the model writes. Otherwise an answer is what the
        text gains over the prompt it would be sampled with.
        """
        wanted = _weights(chat, train_on)
        text, blocks = self._render(chat, chat.messages, header=False)
        self._fields.check(chat, text, header=False)
        answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if len(blocks) == len(answers):
            found = {index: block for index, block in zip(answers, blocks, strict=True) if index in wanted}
        else:
            found = {index: self._answer(chat, index, text) for index in wanted}
        shown = dict.fromkeys(range(len(chat.messages)), text) if train_on == "all" else {}
        self._check_texts(chat, shown | {index: text[start:end] for index, (start, end) in found.items()}, text)
        spans = [Span(*place, wanted[index]) for index, place in found.items()]
        return text, spans

    def _check_texts(self, chat: Chat, trained: Mapping[int, str], text: str) -> None:
        """Compare the trained messages with what the template prints of each; of the others only the tool calls.

        Of the answers before the last, many templates leave out the reasoning on purpose, when sampling too.

        Raises:
            DataError: the template drops some of a message's text.
        """
        for index, message in enumerate(chat.messages):
            said = message.texts() if index in trained else message.call_texts()
            if field := _missing(said, trained.get(index, text)):
                raise DataError(
                    f"{chat.where}: the chat template drops text of message {index} ({field}), which would go untrained; "
                    "give one that keeps it as model.chat_template"
                )

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
        dicts = [message.to_dict() for message in messages]

        def render(as_text: bool) -> Rendering:
            found: Rendering = render_jinja_template(
                conversations=[_arguments_as_text(dicts) if as_text else dicts],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=not header and GENERATION_BLOCK.search(template) is not None,
                add_generation_prompt=header,
                **self._variables,
            )
            return found

        try:
            texts, blocks = self._with_arguments(render, dicts)
        except (TemplateError, TypeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(f"{chat.where}: the chat template refuses the row: {reason}; mend or remove it") from error
        return texts[0], blocks[0] if blocks else []

    def _with_arguments(self, render: Callable[[bool], Rendering], messages: Sequence[Mapping[str, Any]]) -> Rendering:
        """Render with the arguments of tool calls as objects, or as JSON text if the template only takes that.

        DeepSeek-V3's adds them to a text; others print an object as Python does.
        """
        calls = [call.get("function", call) for one in messages for call in one.get("tool_calls", ())]
        if not calls or self._arguments_as_text:
            return render(bool(calls))
        try:
            texts, blocks = render(False)
            if not any(call.get("arguments") and repr(call["arguments"]) in texts[0] for call in calls):
                return texts, blocks
        except TypeError:
            pass
        texts, blocks = render(True)
        self._arguments_as_text = True
        return texts, blocks

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
    """Weight by message index, of the answers that are treated otherwise than the text around them.

    Raises:
        EmptyRowError: an answer that would be trained is empty.
        DataError: a message other than an answer has weight 0, and every token is to be trained.
    """
    answers = {index: message.weight for index, message in enumerate(chat.messages) if message.role == "assistant"}
    first = chat.start
    if train_on == "last_assistant":
        first = max(answers, default=0)
    for index, message in enumerate(chat.messages):
        if train_on == "all" and message.weight == 0 and index not in answers:
            raise DataError(
                f"{chat.where}: message {index} ({message.role}) is not to be trained, and data.train_on=all trains it; "
                "set data.train_on=assistant, or remove the message's weight"
            )
        if message.is_empty and answers.get(index) and (index >= first or train_on == "all"):
            raise EmptyRowError(
                f"{chat.where}: message {index} is an empty answer, which would teach the model to say nothing; "
                'give it "train": false, remove the row or set data.on_empty=skip'
            )
    if train_on == "all":
        return {index: weight for index, weight in answers.items() if weight != 1}
    return {index: weight for index, weight in answers.items() if index >= first and weight != 0}


def _arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their tool calls as JSON text."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        arguments = call.get("arguments")
        return {**call, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}

    calls = [{"tool_calls": [changed(call) for call in one["tool_calls"]]} if "tool_calls" in one else {} for one in messages]
    return [{**one, **more} for one, more in zip(messages, calls, strict=True)]


def _missing(said: Iterable[tuple[str, str]], printed: str) -> str:
    """The field of the first text that is not in ``printed`` as often as it is said; empty if there is none.

    White space does not count, for templates may trim it. A text may be printed as JSON has it.
    """
    squeezed = ""
    for (field, text), times in Counter(said).items():
        squeezed = squeezed or "".join(printed.split())
        forms = {text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}
        if max(squeezed.count("".join(form.split())) for form in forms) < times:
            return field
    return ""
