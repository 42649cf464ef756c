"""A conversation rendered by a chat template, and the characters of it that the model has to write."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from cookbook.data.formats import Chat
from cookbook.data.messages import CALLS, REASONING, ChatMessage
from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Texts, and the generation blocks of each.
Rendering = tuple[list[str], list[list[tuple[int, int]]]]
# Characters [start, end) of the rendered text, and the weight that they are trained with.
Span = tuple[int, int, float]
# Fields that the model should see. Without them the row has another meaning.
NEEDED = frozenset(
    {*REASONING, *CALLS, "name", "refusal", "tools", "documents", "citations", "annotations"}
    | {f"{medium}{plural}" for medium in ("image", "video", "audio") for plural in ("", "s", "_url")}
)
MARK = " probe"  # appended to a text; a template that prints the text prints the mark too
REMEDY = "remove it from the data, or give a template that prints it as model.chat_template"
Shape = tuple[str, bool, bool, bool, tuple[str, ...]]
PROBE = (ChatMessage("user", "question"), ChatMessage("assistant", "answer"))


class ChatTemplate:
    """The template of a tokenizer.

    Raises:
        DataError: the tokenizer has none, or it refuses a conversation; the message names the row.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._arguments_as_text = False
        self._variables = dict(tokenizer.special_tokens_map)
        # Shapes of messages that have been tried, and fields that the template does not print and the model does not need.
        self._known: set[Shape | str] = set()
        self._unused: dict[str, None] = {}

    @property
    def unused_fields(self) -> Sequence[str]:
        """The fields of messages seen so far that the template does not print, and that the model does not need."""
        return list(self._unused)

    @property
    def arguments_as_text(self) -> bool:
        """Whether the arguments of tool calls are passed as JSON text, because the template has rejected objects."""
        return self._arguments_as_text

    def restore(self, unused_fields: Sequence[str], arguments_as_text: bool) -> None:
        """Continue as after rows that had these unused fields, and left the arguments of tool calls in this form."""
        self._unused |= dict.fromkeys(unused_fields)
        self._arguments_as_text = arguments_as_text

    @contextlib.contextmanager
    def recording(self) -> Iterator[Mapping[str, None]]:
        """Collect the unused fields of the rows that are rendered inside the block, also those that earlier rows had."""
        known, unused = self._known, self._unused
        self._known, self._unused = set(), {}
        try:
            yield self._unused
        finally:
            self._known |= known
            self._unused = unused | self._unused

    def printed(self, chat: Chat, *, header: bool) -> str:
        """Return the text of all messages, and the header of an answer to sample."""
        return self._render(chat, header)[0]

    def prompts(self, chats: Sequence[Chat]) -> list[str]:
        """Return, for each chat, the text of the messages before ``start``, and the header of the answer to sample."""
        asked = [replace(chat, messages=chat.messages[: chat.start]) for chat in chats]
        texts = []
        for chat, (text, _) in zip(asked, self._render_all(asked, header=True), strict=True):
            self._check_fields(chat, text, header=True)
            self._check_texts(chat, {}, text)
            texts.append(text)
        return texts

    def conversations(self, chats: Sequence[Chat], train_on: str) -> list[tuple[str, list[Span]]]:
        """Return all messages of each chat as text, and the spans of the answers.

        The end of the turn is inside a span or follows it. ``{% generation %}`` blocks of the template mark the text of the
        model. Without them an answer is the text that is added to the prompt of its sampling.
        """
        wanted = [_weights(chat, train_on) for chat in chats]
        renderings = self._render_all(chats, header=False)
        return [self._conversation(*one, train_on) for one in zip(chats, wanted, renderings, strict=True)]

    def _conversation(
        self, chat: Chat, wanted: Mapping[int, float], rendering: tuple[str, list[tuple[int, int]]], train_on: str
    ) -> tuple[str, list[Span]]:
        text, blocks = rendering
        self._check_fields(chat, text, header=False)
        answers = [index for index, message in enumerate(chat.messages) if message.role == "assistant"]
        if len(blocks) == len(answers):
            found = {index: block for index, block in zip(answers, blocks, strict=True) if index in wanted}
        else:
            found = {index: self._answer(chat, index, text) for index in wanted}
        shown = dict.fromkeys(range(len(chat.messages)), text) if train_on == "all" else {}
        self._check_texts(chat, shown | {index: text[start:end] for index, (start, end) in found.items()}, text)
        return text, [(start, end, wanted[index]) for index, (start, end) in found.items()]

    def _check_texts(self, chat: Chat, trained: Mapping[int, str], text: str) -> None:
        """Check that the template prints each trained message in full, and the tool calls of all other messages.

        Reasoning may be missing from answers before the last: many templates leave it out on purpose, also when sampling.

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

    def _check_fields(self, chat: Chat, text: str, *, header: bool) -> None:
        """Compare ``text``, the whole of ``chat``, with the conversation without each field of its messages.

        Messages of one shape (role, first or not, non-empty fields) are tried once: the template treats them the same way.

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
                self._try_fields(chat, index, text, header)
                self._known.add(shape)

    def _try_fields(self, chat: Chat, index: int, text: str, header: bool) -> None:
        message, until = chat.messages[index], chat
        if message.role == "assistant":  # the context of sampling: some templates cut answers that are not the last
            ended = replace(chat, messages=chat.messages[: index + 1])
            if (shown := self._shown(ended, False)) is not None:
                until, text, header = ended, shown, False

        def prints(changed: ChatMessage) -> bool:
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
            self._unused[name] = None

    def _shown(self, chat: Chat, header: bool) -> str | None:
        """The conversation's text; None if the template refuses it."""
        try:
            return self._render(chat, header)[0]
        except DataError:
            return None

    @cached_property
    def prints_tools(self) -> bool:
        """Whether the template prints the tools of a conversation, or fails to print any, which shows with the first row."""
        tool = {"type": "function", "function": {"name": MARK, "description": MARK, "parameters": {"type": "object"}}}
        question = Chat("", PROBE[:1])
        plain = self._shown(question, header=True)
        return plain is None or self._shown(replace(question, tools=(tool,)), header=True) != plain

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after an answer; empty if it rejects a plain question and answer."""
        text = self._shown(Chat("", PROBE), header=False)
        return text.rpartition(PROBE[1].content)[2] if text else ""

    @cached_property
    def _last_word(self) -> str:
        """The end-of-text token, if the template ends every text with it after another token has closed the answer."""
        closed, end, _ = self.end_of_turn.rpartition(self._tokenizer.eos_token or "\0")
        return end if closed.strip() else ""

    def _answer(self, chat: Chat, index: int, text: str) -> tuple[int, int]:
        """Return the place of message ``index`` in ``text``, after a check against the prompt of its sampling."""
        if index == 0:
            raise DataError(f"{chat.where}: the conversation begins with an answer; begin it with a user message")
        before, _ = self._render(replace(chat, messages=chat.messages[:index]), header=True)
        until = text
        if index < len(chat.messages) - 1:
            until, _ = self._render(replace(chat, messages=chat.messages[: index + 1]), header=False)
            until = until.removesuffix(self._last_word)
        if not until.startswith(before):
            raise DataError(
                f"{chat.where}: the chat template renders message {index} differently from its generation prompt; "
                "give a template with {% generation %} blocks as model.chat_template"
            )
        if not text.startswith(until):
            raise DataError(
                f"{chat.where}: the chat template rewrites message {index} when more messages follow, so one sequence "
                "cannot train it as it is sampled; set data.train_on=each_assistant (a sequence per answer) or last_assistant"
            )
        return len(before), len(until)

    def _render_all(self, chats: Sequence[Chat], header: bool) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield the rendering of each chat as :meth:`_render`; without tools and further fields from one call, which is faster.

        Other chats are rendered when they are due, because tool calls change how later ones are rendered.
        """
        if len(chats) > 1 and not any(chat.tools or any(message.extra for message in chat.messages) for chat in chats):
            with contextlib.suppress(*_template_errors()):
                conversations = [[message.to_dict() for message in chat.messages] for chat in chats]
                texts, blocks = self._call(None, header)(conversations=conversations)
                yield from zip(texts, blocks or [[] for _ in texts], strict=True)
                return
            # One of the chats has failed, and the next line names its row.
        yield from (self._render(chat, header) for chat in chats)

    def _render(self, chat: Chat, header: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character ranges of its ``{% generation %}`` blocks."""
        render = self._call(list(chat.tools) if chat.tools else None, header)
        try:
            texts, blocks = self._with_arguments(render, [message.to_dict() for message in chat.messages])
        except _template_errors() as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(f"{chat.where}: the chat template rejects the row: {reason}; fix or remove it") from error
        return texts[0], blocks[0] if blocks else []

    def _call(self, tools: list[object] | None, header: bool) -> Callable[..., Rendering]:
        """Return the function that renders conversations."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._source(tools)
        return functools.partial(
            render_jinja_template,
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=not header and _has_blocks(template),
            add_generation_prompt=header,
            **self._variables,
        )

    def _with_arguments(self, render: Callable[..., Rendering], messages: Sequence[JsonObject]) -> Rendering:
        """Render with the arguments of tool calls as objects, or as JSON text if the template only takes that.

        DeepSeek-V3's adds them to a text; others print an object as Python does.
        """
        calls = [call.get("function", call) for one in messages for call in one.get("tool_calls", ())]
        if not calls:
            return render(conversations=[messages])
        # After a template has taken the text of one call, it gets that of every call.
        if not self._arguments_as_text:
            with contextlib.suppress(TypeError):
                texts, blocks = render(conversations=[messages])
                if not any(call.get("arguments") and repr(call["arguments"]) in texts[0] for call in calls):
                    return texts, blocks
        rendering = render(conversations=[_arguments_as_text(messages)])
        self._arguments_as_text = True
        return rendering

    def _source(self, tools: list[object] | None) -> str:
        if not self._tokenizer.chat_template:
            name = self._tokenizer.name_or_path or "the model"
            raise DataError(
                f"model.chat_template: the tokenizer of {name} has no chat template, and the data are conversations; "
                "give a Jinja file, or plain text columns with data.chat=false"
            )
        return str(self._tokenizer.get_chat_template(tools=tools))


def _template_errors() -> tuple[type[Exception], ...]:
    """Return the errors with which a chat template rejects a conversation."""
    from jinja2.exceptions import TemplateError

    return TemplateError, TypeError, ValueError


@functools.cache
def _has_blocks(template: str) -> bool:
    return GENERATION_BLOCK.search(template) is not None


def _weights(chat: Chat, train_on: str) -> dict[int, float]:
    """Return the weights, by message index, of the answers whose weight differs from that of the text around them.

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


def _arguments_as_text(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """The messages with the arguments of their tool calls as JSON text."""

    def changed(call: JsonObject) -> JsonObject:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        arguments = call.get("arguments")
        return {**call, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}

    return [{**one, "tool_calls": list(map(changed, one["tool_calls"]))} if "tool_calls" in one else one for one in messages]


def _missing(said: Iterable[tuple[str, str]], printed: str) -> str:
    """Return the field of the first text that ``printed`` contains less often than the messages; empty if it contains all.

    White space does not count, because templates may trim it. A text may be printed in JSON's spelling.
    """
    said = list(said)
    # The usual case, without a copy of the text.
    if len(said) == 1 and said[0][1] in printed:
        return ""
    squeezed = ""
    for (field, text), times in Counter(said).items():
        squeezed = squeezed or "".join(printed.split())
        forms = {text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}
        if max(squeezed.count("".join(form.split())) for form in forms) < times:
            return field
    return ""
