"""Conversations rendered by a chat template, and checks that the template prints what the rows say."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from cookbook.data.formats import Chat
from cookbook.data.messages import CALLS, REASONING, ChatMessage, standard_calls, standard_schema
from cookbook.data.rows import EmptyRowError
from cookbook.errors import DataError
from cookbook.types import JsonObject
from cookbook.utils.template_options import TEMPLATE_OPTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# Texts, and the generation blocks of each.
Rendering = tuple[list[str], list[list[tuple[int, int]]]]
# Fields that the model should see. Without them the row has another meaning.
NEEDED = frozenset(
    {*REASONING, *CALLS, "name", "refusal", "tools", "documents", "citations", "annotations"}
    | {f"{medium}{plural}" for medium in ("image", "video", "audio") for plural in ("", "s", "_url")}
)
MARK = " probe"  # appended to a text; a template that prints the text prints the mark too
REMEDY = "remove it from the data, or give a template that prints it as model.chat_template"
# Tags around reasoning that is written inside of an answer's content.
TAGS = re.compile(r"</?think>|\[/?THINK\]")
Shape = tuple[str, bool, bool, bool, tuple[str, ...]]
PROBE = (ChatMessage("user", "question"), ChatMessage("assistant", "answer"))
PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "tool", "description": "tool", "parameters": {"type": "object", "properties": {}}},
}


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
        self._notes: dict[str, None] = {}
        # Options of the chat template that apply to all conversations.
        self.options = chat_template_options(tokenizer)
        # By the options of a chat: a question with the header of an answer and with an answer, and the header.
        self._probes: dict[str, tuple[tuple[str, str] | None, str]] = {}
        self._note_unread("model.chat_template_kwargs", self.options)

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the chat template that the user should know, from the rows seen so far."""
        return list(self._notes)

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes."""
        self._notes[sentence] = None

    def _note_unread(self, where: str, options: JsonObject) -> None:
        """Note the options that the template does not read, once."""
        if unread := self.unread(options):
            self.note(f"the chat template does not read {', '.join(unread)} of {where}, which therefore has no effect")

    def unread(self, options: JsonObject) -> list[str]:
        """Return the options that the template does not read; none if the template cannot be parsed."""
        names = _names_in(all_sources(self._tokenizer)) if options else frozenset()
        return [name for name in options if name not in names] if names else []

    @property
    def unused_fields(self) -> Sequence[str]:
        """The fields of messages seen so far that the template does not print, and that the model does not need."""
        return list(self._unused)

    @property
    def arguments_as_text(self) -> bool:
        """Whether the arguments of tool calls are passed as JSON text, because the template has rejected objects."""
        return self._arguments_as_text

    def restore(self, unused_fields: Sequence[str], arguments_as_text: bool, notes: Sequence[str] = ()) -> None:
        """Continue as after rows that had these unused fields and notes, and left the arguments of tool calls in this form."""
        self._unused |= dict.fromkeys(unused_fields)
        self._notes |= dict.fromkeys(notes)
        self._arguments_as_text = arguments_as_text

    @contextlib.contextmanager
    def recording(self) -> Iterator[tuple[Mapping[str, None], Mapping[str, None]]]:
        """Collect unused fields and notes of the rows that are rendered inside the block, even those that earlier rows had."""
        known, unused, notes = self._known, self._unused, self._notes
        self._known, self._unused, self._notes = set(), {}, {}
        try:
            yield self._unused, self._notes
        finally:
            self._known |= known
            self._unused = unused | self._unused
            self._notes = notes | self._notes

    def printed(self, chat: Chat, *, header: bool) -> str:
        """Return the text of all messages, and the header of an answer to sample."""
        return self._render(chat, header)[0]

    def prompts(self, chats: Sequence[Chat]) -> list[str]:
        """Return, for each chat, the text of the messages before ``start``, and the header of the answer to sample."""
        questions = [replace(chat, messages=chat.messages[: chat.start]) for chat in chats]
        texts = []
        for chat, (text, _) in zip(questions, self.rendered(questions, header=True), strict=True):
            self.check_fields(chat, text, header=True)
            self.check_texts(chat, {}, text)
            texts.append(text)
        return texts

    def check_texts(self, chat: Chat, trained: Mapping[int, str], text: str, without: Container[int] = ()) -> None:
        """Check that the template prints each trained message in full, and the tool calls of all other messages.

        Reasoning may be missing from answers before the last: many templates leave it out on purpose, also when sampling.

        Args:
            trained: for each trained message, the text that has to contain it.
            without: messages that are not checked.

        Raises:
            DataError: the template drops some of a message's text.
        """
        for index, message in enumerate(chat.messages):
            if index in without:
                continue
            said = message.texts() if index in trained else message.call_texts()
            if field := missing_text(said, trained.get(index, text)):
                raise dropped_text(chat, index, field)

    def check_fields(self, chat: Chat, text: str, *, header: bool) -> None:
        """Compare ``text``, the whole of ``chat``, with the conversation without each field of its messages.

        Messages of one shape (role, first or not, non-empty fields) are tried once: the template treats them the same way.

        Raises:
            DataError: the template drops tools, a message, or a needed field of one; it names the row.
        """
        if chat.options:
            self._note_unread("the column chat_template_kwargs", chat.options)
        if chat.tools and "tools" not in self._known:
            if self.shown(replace(chat, tools=None), header) == text:
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
            if (printed := self.shown(ended, False)) is not None:
                until, text, header = ended, printed, False

        def prints(changed: ChatMessage) -> bool:
            messages = [*until.messages[:index], changed, *until.messages[index + 1 :]]
            return self.shown(replace(until, messages=tuple(messages)), header) != text

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

    def shown(self, chat: Chat, header: bool) -> str | None:
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
        plain = self.shown(question, header=True)
        return plain is None or self.shown(replace(question, tools=(tool,)), header=True) != plain

    def small(self, messages: Sequence[ChatMessage], options: JsonObject | None = None) -> Chat:
        """Return a conversation of these messages with all that the template needs around a plain question and answer."""
        before, tools = self._needs
        return Chat("", (*before, *messages), tools=tools, options=options or {})

    @cached_property
    def _needs(self) -> tuple[tuple[ChatMessage, ...], tuple[object, ...] | None]:
        """A system message and tools, if the template rejects a plain question and answer without them; usually neither."""
        system, tools = (ChatMessage("system", "system"),), (PROBE_TOOL,)
        contexts: list[tuple[tuple[ChatMessage, ...], tuple[object, ...] | None]]
        contexts = [((), None), ((), tools), (system, None), (system, tools)]
        accepted = (
            context
            for context in contexts
            if self.shown(Chat("", (*context[0], *PROBE), tools=context[1]), header=False) is not None
        )
        return next(accepted, contexts[0])

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after an answer; empty if it rejects a plain question and answer."""
        text = self.shown(self.small(PROBE), header=False) or ""
        _, mark, after = text.rpartition(PROBE[1].content)
        if mark or not text:
            return after
        # The template changes the text of answers. It closes other answers in the same way.
        other = self.shown(self.small((PROBE[0], replace(PROBE[1], content="sentence"))), header=False) or ""
        pairs = enumerate(zip(reversed(text), reversed(other), strict=False))
        length = next((place for place, (first, another) in pairs if first != another), 0)
        return text[len(text) - length :]

    @cached_property
    def ends_of_calls(self) -> tuple[str, str] | None:
        """The texts after the arguments of one call, and of two calls of one answer; None if the template prints no call."""
        texts = []
        for names in (("first",), ("first", "second")):
            calls = [
                {"id": f"call0000{place}", "type": "function", "function": {"name": "tool", "arguments": {"value": name}}}
                for place, name in enumerate(names)
            ]
            called = ChatMessage("assistant", "", extra={"tool_calls": calls})
            text = self.shown(self.small((PROBE[0], called)), header=False) or ""
            texts.append(text.rpartition(names[0])[2] if names[0] in text else "")
        return (texts[0], texts[1]) if texts[0] else None

    @cached_property
    def last_word(self) -> str:
        """The end-of-text token, if the template ends every text with it after another token has closed the answer."""
        closed, end, _ = self.end_of_turn.rpartition(self._tokenizer.eos_token or "\0")
        return end if closed.strip() else ""

    @cached_property
    def next_turns(self) -> Sequence[str]:
        """Texts between an answer and the next question, and between a call and the result of the tool.

        Empty if the template closes an answer.
        """
        if self.end_of_turn.strip():
            return ()
        call = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}
        called = (*PROBE[:1], ChatMessage("assistant", "", extra={"tool_calls": [call]}))
        texts = []
        for before, after in ((PROBE, PROBE[0]), (called, ChatMessage("tool", "result"))):
            ended, text = (self.shown(self.small(messages), header=False) for messages in (before, (*before, after)))
            texts += [text[len(ended) :]] if ended and text and text.startswith(ended) else []
        return texts

    def probe(self, options: JsonObject) -> tuple[str, str] | None:
        """Return a question with the header of an answer, and the question with a plain answer; None if either is rejected."""
        return self._probed(options)[0]

    def header(self, options: JsonObject) -> str:
        """Return the header of an answer to sample; empty if the template rejects a plain question."""
        return self._probed(options)[1]

    def _probed(self, options: JsonObject) -> tuple[tuple[str, str] | None, str]:
        key = repr(options)
        if key not in self._probes:
            question = self.small(PROBE[:1], options)
            prompt, text = self.shown(question, header=True), self.shown(self.small(PROBE, options), header=False)
            context = self.shown(question, header=False)
            header = prompt.removeprefix(context) if prompt and context and prompt.startswith(context) else ""
            self._probes[key] = (None if prompt is None or text is None else (prompt, text)), header
        return self._probes[key]

    def rendered(self, chats: Sequence[Chat], header: bool) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield the rendering of each chat as :meth:`_render`. Chats of plain messages take one call, which is faster.

        Other chats are rendered when they are due, because tool calls change how later ones are rendered.
        """
        if len(chats) > 1 and not any(
            chat.tools or chat.options or any(message.extra for message in chat.messages) for chat in chats
        ):
            with contextlib.suppress(Exception):
                conversations = [[message.to_dict() for message in chat.messages] for chat in chats]
                texts, blocks = self._call(None, header, {})(conversations=conversations)
                yield from zip(texts, blocks or [[] for _ in texts], strict=True)
                return
            # One of the chats has failed, and the next line names its row.
        yield from (self._render(chat, header) for chat in chats)

    def _render(self, chat: Chat, header: bool) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character ranges of its ``{% generation %}`` blocks."""
        tools = list(chat.tools) if chat.tools else None
        messages: list[JsonObject] = [message.to_dict() for message in chat.messages]
        if any(message.extra.get("tool_calls") and not message.content for message in chat.messages):
            messages = self._without_empty_text(messages)
        render = self._call(tools, header, chat.options)
        try:
            texts, blocks = self._with_arguments(render, messages)
        except Exception as error:
            rejected = DataError(f"{chat.where}: the chat template rejects the row: {_reason(error)}; fix or remove it")
            # Templates of Mistral and gpt-oss reject calls and schemas of a form that others print.
            standard, calls = [standard_schema(tool) for tool in tools or ()] or None, standard_calls(messages)
            if (standard, calls) == (tools, messages):
                raise rejected from error
            try:
                texts, blocks = self._with_arguments(self._call(standard, header, chat.options), calls)
            except Exception as other:
                raise rejected from other
        return texts[0], blocks[0] if blocks else []

    def _call(self, tools: list[object] | None, header: bool, options: JsonObject) -> Callable[..., Rendering]:
        """Return the function that renders conversations."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._source(tools)
        return functools.partial(
            render_jinja_template,
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=not header and _has_blocks(template),
            add_generation_prompt=header,
            **{**self._variables, **self.options, **options},
        )

    def _without_empty_text(self, messages: list[JsonObject]) -> list[JsonObject]:
        """Return the messages, those with calls and without text in the shape that the template prints.

        DeepSeek-R1's prints the calls of a message only if its content is null; others fail if it is.
        """
        if not self._calls_need_null:
            return messages
        return [
            {**message, "content": None} if message.get("tool_calls") and not message["content"] else message
            for message in messages
        ]

    @cached_property
    def _calls_need_null(self) -> bool:
        """Whether the template prints a call only without a text, not beside an empty text."""
        call = {"id": "call00000", "type": "function", "function": {"name": MARK.strip(), "arguments": {}}}
        for content in ("", None):
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            render = self._call(None, False, {})
            try:
                # A shape of arguments that the template takes here is not kept for rows.
                as_text, (texts, _) = self._arguments_as_text, self._with_arguments(render, [PROBE[0].to_dict(), message])
                self._arguments_as_text = as_text
            except Exception:  # noqa: BLE001 - a template is a program, and may raise any error
                continue
            if MARK.strip() in texts[0]:
                return content is None
        return False

    def _with_arguments(self, render: Callable[..., Rendering], messages: Sequence[JsonObject]) -> Rendering:
        """Render with the arguments of tool calls as objects, or as JSON text if the template only takes that.

        DeepSeek-V3's adds them to a text; others print an object as Python does.
        """
        calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
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
        try:
            return str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError:
            names = ", ".join(template_sources(self._tokenizer))
            raise DataError(
                f"model.chat_template: the tokenizer has no chat template for this row, and none named default, got {names}; "
                "give a Jinja file"
            ) from None


def _reason(error: Exception) -> str:
    """Return the first line of a template's error. An error such as KeyError is named, because its text is only a key."""
    from jinja2.exceptions import TemplateError

    text = next(iter(str(error).splitlines()), "")
    if text and isinstance(error, TemplateError | TypeError | ValueError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@functools.cache
def _has_blocks(template: str) -> bool:
    return GENERATION_BLOCK.search(template) is not None


def answer_weights(chat: Chat, train_on: str) -> dict[int, float]:
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


def dropped_text(chat: Chat, index: int, field: str) -> DataError:
    """Return the error of a message of which the template drops a text."""
    return DataError(
        f"{chat.where}: the chat template drops text of message {index} ({field}), which would go untrained; "
        "give one that keeps it as model.chat_template"
    )


def template_sources(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the sources of a tokenizer's chat templates by name. Most have one, ``default``."""
    template = tokenizer.chat_template
    return dict(template) if isinstance(template, Mapping) else {"default": str(template)} if template else {}


def all_sources(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sources of a tokenizer's chat templates as one text; empty without a template."""
    return "\n".join(template_sources(tokenizer).values())


def chat_template_options(tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    """Return ``model.chat_template_kwargs``, which a tokenizer carries and saves."""
    return dict(tokenizer.init_kwargs.get(TEMPLATE_OPTIONS) or {})


@functools.lru_cache(maxsize=8)
def _names_in(template: str) -> frozenset[str]:
    """Return the names of variables in a chat template; empty if the template cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_MARKS.sub("", template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(node.name for node in tree.find_all(nodes.Name))


def _arguments_as_text(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """The messages with the arguments of their tool calls as JSON text."""

    def changed(call: JsonObject) -> JsonObject:
        if "function" in call:
            return {**call, "function": changed(call["function"])}
        arguments = call.get("arguments")
        return {**call, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}

    return [
        {**message, "tool_calls": list(map(changed, message["tool_calls"]))} if "tool_calls" in message else message
        for message in messages
    ]


def missing_text(said: Iterable[tuple[str, str]], printed: str) -> str:
    """Return the field of the first text that ``printed`` contains less often than the messages; empty if it contains all.

    White space does not count, because templates may trim it. A text may be printed in JSON's spelling. Reasoning inside of a
    text may be printed with other tags.
    """
    said = list(said)
    # The usual case, without a copy of the text.
    if len(said) == 1 and said[0][1] in printed:
        return ""
    squeezed = ""
    for (field, text), times in Counter(said).items():
        squeezed = squeezed or "".join(printed.split())
        forms = {text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}
        if max(squeezed.count("".join(form.split())) for form in forms) >= times:
            continue
        parts = ["".join(part.split()) for part in TAGS.split(text)]
        if len(parts) == 1 or any(squeezed.count(part) < times for part in parts if part):
            return field
    return ""
