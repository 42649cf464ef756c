"""Readers of rows in TRL's column conventions, strict, with one format for all rows of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from cookbook.data import comparisons
from cookbook.data.messages import CALLS, ROLES, ChatMessage, as_text, is_prefill, usual_role
from cookbook.data.row_view import REMEDY, RowView
from cookbook.data.rows import Columns, DataConfig, EmptyRowError, Row
from cookbook.errors import ConfigError, DataError
from cookbook.types import JsonObject
from cookbook.utils.template_options import TEMPLATE_OPTIONS

T = TypeVar("T")
NEEDS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "prompt": ("prompt",),
}
# Optional columns of a format.
OPTIONAL = {"messages": ("label",), "prompt_completion": ("label",), "alpaca": ("input", "label")}

# The shipped recipe that reads a format, for rows that the chosen one does not read.
RECIPES = {
    "preference": "recipe=dpo or recipe=orpo",
    "messages": "recipe=sft",
    "prompt_completion": "recipe=sft",
    "alpaca": "recipe=sft",
}


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages before ``start`` are the prompt and never trained. ``options``: of the chat template.

    ``prefill``: the text with which the message ``start``, an answer, begins in the prompt.
    """

    where: str
    messages: tuple[ChatMessage, ...]
    start: int = 0
    tools: tuple[object, ...] | None = None
    options: JsonObject = field(default_factory=dict)
    prefill: str = ""

    @property
    def question(self) -> str:
        """The text of the last message that is not an answer."""
        return next((message.content for message in reversed(self.messages) if message.role != "assistant"), "")

    @property
    def prompt_messages(self) -> list[JsonObject]:
        """The messages as ``role`` and ``content``."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


@dataclass(frozen=True)
class Plain:
    """Text without a chat template: ``response`` follows ``prompt``, which may be empty."""

    where: str
    prompt: str
    response: str = ""

    @property
    def question(self) -> str:
        return self.prompt

    @property
    def prompt_messages(self) -> list[JsonObject]:
        return [{"role": "user", "content": self.prompt}]


Example = Chat | Plain


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True)
class Labelled:
    """An answer, and whether it is desirable."""

    example: Example
    desirable: bool


@dataclass(frozen=True)
class RowFormat(Generic[T]):
    """A format of rows. ``roles`` are the columns that it reads; None: rewards read all columns."""

    read: Callable[[RowView], T]
    roles: tuple[str, ...] | None


class RowReader(Generic[T]):
    """Reader of a dataset whose rows have one format; in a mixture, of one format for each source, that of its first row.

    Args:
        choose: returns the format that begins with a row.
        first: the first row.
    """

    def __init__(self, choose: Callable[[Row, DataConfig], RowFormat[T]], first: Row, config: DataConfig) -> None:
        self._choose = choose
        self._config = config
        self._formats: dict[str, RowFormat[T]] = {}
        self._format(first)

    def __call__(self, row: Row) -> T:
        chosen, cells = self._format(row), RowView(row, self._config)
        cells.check_columns()
        if chosen.roles is not None:
            cells.check_answer(chosen.roles)
        return chosen.read(cells)

    def unused(self, row: Row) -> Iterable[str]:
        """Return the row's non-empty columns that are not read."""
        roles = self._format(row).roles
        return () if roles is None else RowView(row, self._config).unused(roles)

    def add_formats(self, other: RowReader[T]) -> None:
        """Add the formats of the sources that another reader of the same dataset has seen."""
        self._formats |= other._formats

    def _format(self, row: Row) -> RowFormat[T]:
        key = "" if row.source is None else row.source.key
        if key not in self._formats:
            self._formats[key] = self._choose(row, self._config if row.source is None else row.source.config)
        return self._formats[key]


def conversation_reader(first: Row, config: DataConfig) -> RowReader[Sequence[Example]]:
    """Return the reader for a supervised dataset that begins with ``first``: one example per row, or two of a comparison."""
    return RowReader(_conversation_format, first, config)


def label_reader(first: Row, config: DataConfig) -> RowReader[Sequence[Labelled]]:
    """Return the reader for a dataset of labelled answers that begins with ``first``; a pair is two of them."""
    return RowReader(_label_format, first, config)


def preference_reader(first: Row, config: DataConfig) -> RowReader[Preference]:
    """Return the reader for a preference dataset that begins with ``first``."""
    return RowReader(_preference_format, first, config)


def prompt_reader(first: Row, config: DataConfig) -> RowReader[Example]:
    """Return the reader for the prompts of a dataset that begins with ``first``; answers in it are left out."""
    return RowReader(_prompt_format, first, config)


def _conversation_format(first: Row, config: DataConfig) -> RowFormat[Sequence[Example]]:
    if config.format == "comparisons":
        pairs = _preference_format(first, replace(config, format="preference"))
        return RowFormat(lambda cells: _compared(pairs.read(cells)), pairs.roles)
    name = detect(first, config, ("messages", "prompt_completion", "text", "alpaca"))
    read: Mapping[str, Callable[[RowView], Example]] = {
        "messages": _messages,
        "prompt_completion": lambda cells: _answered(cells, "completion"),
        "text": _text,
        "alpaca": lambda cells: _instructed(cells, "output"),
    }
    optional = OPTIONAL.get(name, ())
    chosen = _desirable(read[name]) if "label" in optional else read[name]
    return RowFormat(lambda cells: [chosen(cells)], NEEDS[name] + optional)


def _preference_format(first: Row, config: DataConfig) -> RowFormat[Preference]:
    name = detect(first, config, ("preference",))
    cells = RowView(first, config)
    before: tuple[str, ...] = ("prompt",)
    if not cells.has("prompt"):
        before = ("instruction", "input") if cells.has("instruction") else ("messages",) if cells.has("messages") else before
    return RowFormat(_preference, (*NEEDS[name], *before))


def _label_format(first: Row, config: DataConfig) -> RowFormat[Sequence[Labelled]]:
    needs = {name: (*NEEDS[name], "label") for name in ("prompt_completion", "messages", "alpaca")}
    name = detect(first, config, ("preference", *needs), {**NEEDS, **needs})
    if name == "preference":
        pairs = _preference_format(first, config)

        def both(cells: RowView) -> Sequence[Labelled]:
            pair = pairs.read(cells)
            return Labelled(pair.chosen, True), Labelled(pair.rejected, False)

        return RowFormat(both, pairs.roles)
    read: Mapping[str, Callable[[RowView], Example]] = {
        "messages": _last_answer,
        "prompt_completion": lambda cells: _answered(cells, "completion"),
        "alpaca": lambda cells: _instructed(cells, "output"),
    }
    return RowFormat(lambda cells: [Labelled(read[name](cells), cells.desirable())], (*needs[name], *OPTIONAL[name]))


def _prompt_format(first: Row, config: DataConfig) -> RowFormat[Example]:
    if config.format == "prompt_completion":
        config = replace(config, format="prompt")
    # A row to sample from needs no answer.
    name = detect(first, config, ("prompt", "messages", "preference", "alpaca"), {**NEEDS, "alpaca": ("instruction",)})
    read: Mapping[str, Callable[[RowView], Example]] = {
        "prompt": _prompt,
        "messages": _prompt_of_messages,
        "preference": lambda cells: _preference(cells).chosen,
        "alpaca": _instructed,
    }
    return RowFormat(read[name], None)


def _desirable(read: Callable[[RowView], Example]) -> Callable[[RowView], Example]:
    """Return a function that reads a row, unless the row is one of KTO with an undesirable answer."""

    def checked(cells: RowView) -> Example:
        cells.check_label()
        return read(cells)

    return checked


def detect(row: Row, config: DataConfig, accepted: Sequence[str], needs: Mapping[str, tuple[str, ...]] = NEEDS) -> str:
    """Return the row's format: ``data.format``, or the first of ``accepted`` whose columns, ``needs``, the row has.

    Raises:
        DataError: the row has the columns of no accepted format, or lacks a column that the configuration names.
        ConfigError: ``data.format`` is not accepted here.
    """
    cells = RowView(row, config)
    for role in {role: None for name in accepted for role in (*needs[name], *OPTIONAL.get(name, ()))}:
        named = getattr(config.columns, role) != getattr(Columns, role)
        # The user named the column, so it must exist. An optional one may be empty.
        if named and (any(role in needs[name] for name in accepted) or cells.column(role) not in row.values):
            cells.value(role)
    if config.format != "auto":
        if config.format not in accepted:
            raise ConfigError(f"{cells.key}.format={config.format} does not suit this recipe; it reads {', '.join(accepted)}")
        return config.format
    for name in accepted:
        if all(cells.has(role) for role in needs[name]):
            return name
    columns = " or ".join("+".join(needs[name]) for name in accepted)
    raise DataError(
        f"{row.where}: the columns are {', '.join(row.values) or 'none'}, and this recipe reads {columns}; "
        f"{_remedy(row, cells, accepted, needs)}"
    )


def _remedy(row: Row, cells: RowView, accepted: Sequence[str], needs: Mapping[str, tuple[str, ...]]) -> str:
    """Return the remedy: a recipe that reads the row's columns, or keys that name the columns."""
    name = next((name for name in RECIPES if name not in accepted and all(map(cells.has, NEEDS[name]))), None)
    if name and cells.has_label():
        label = f'"{cells.column("label")}" is that of KTO'
        return f"{label}: recipe=kto, or train on the answers with true or 1: {RECIPES[name]} data.on_empty=skip"
    other = f"choose {RECIPES[name]}, or " if name else ""
    missing = {name: [role for role in needs[name] if not cells.has(role)] for name in accepted}
    likely = "prompt_completion" if "prompt_completion" in accepted and len(row.values) > 1 else accepted[0]
    # Rows of SFT given to KTO lack the label only.
    likely = next((name for name in accepted if missing[name] == ["label"]), likely)
    keys = " ".join(f"{cells.key}.columns.{role}=<column>" for role in missing[likely])
    return f"{other}name yours, e.g. {keys}"


def question_of(example: Example, num_messages: int | None) -> str:
    """Return the question of a sequence that has the first ``num_messages`` messages; None: all."""
    if isinstance(example, Plain) or num_messages is None or num_messages == len(example.messages):
        return example.question
    return replace(example, messages=example.messages[:num_messages]).question


def comparison(where: str, conversation: Sequence[JsonObject], answers: Sequence[str], better: int, *, chat: bool) -> Example:
    """Return the question which of two ``answers`` is better, answered by the letter of ``answers[better]``.

    ``chat``: as a conversation of one turn; else as plain text.
    """
    text, letter = comparisons.question(conversation, *answers), comparisons.LETTERS[better]
    if not chat:
        return Plain(where, text + comparisons.TEXT_ENDS_WITH, f" {letter}")
    return Chat(where, (ChatMessage("user", text), ChatMessage("assistant", letter)), 1)


def _compared(pair: Preference) -> Sequence[Example]:
    """Return a pair as two comparisons: the better answer first, then second."""
    chosen, rejected = pair.chosen, pair.rejected
    sides = [_said(side) for side in (chosen, rejected)]
    prompt = chosen.prompt_messages if isinstance(chosen, Plain) else chosen.prompt_messages[: chosen.start]
    chat = isinstance(chosen, Chat)
    return [comparison(chosen.where, prompt, order, better, chat=chat) for better, order in enumerate((sides, sides[::-1]))]


def _said(side: Example) -> str:
    """Return an answer as text.

    Raises:
        DataError: a message of it has more than text, such as a call of a tool.
    """
    if isinstance(side, Plain):
        return side.response
    if calls := next((name for message in side.messages for name in message.said if name in CALLS), None):
        raise DataError(f'{side.where}: "{calls}" is not text, and a comparison shows the text of both answers; remove the row')
    return comparisons.answer_text(side.prompt_messages[side.start :])


def separate_answers(chat: Example) -> list[Example]:
    """Return one conversation per answer, cut off after that answer, so that each has the context it is sampled in."""
    if isinstance(chat, Plain):
        return [chat]
    return [
        replace(chat, messages=chat.messages[: index + 1], start=index, prefill=chat.prefill if index == chat.start else "")
        for index, message in enumerate(chat.messages)
        if index >= chat.start and message.role == "assistant" and message.weight
    ]


def _messages(cells: RowView) -> Chat:
    messages = cells.messages("messages")
    if cells.config.train_on != "all" and not any(message.role == "assistant" for message in messages):
        unusual = dict.fromkeys(message.role for message in messages if message.role not in ROLES)
        what = f'"{cells.column("messages")}" has no assistant turn' + (f", but {', '.join(unusual)}" if unusual else "")
        raise EmptyRowError(f"{cells.where}: {what}, so nothing would be trained on; {REMEDY}")
    return _with_system(Chat(cells.where, messages, tools=cells.tools()), cells)


def _last_answer(cells: RowView) -> Chat:
    """Read a conversation whose last message is the answer, and all before it the prompt."""
    chat = _messages(cells)
    if chat.messages[-1].role != "assistant":
        raise EmptyRowError(f'{cells.where}: "{cells.column("messages")}" does not end with an answer; {REMEDY}')
    return replace(chat, start=len(chat.messages) - 1)


def _text(cells: RowView) -> Plain:
    if cells.config.chat:
        raise ConfigError(f"{cells.key}.chat: a text column has no separate prompt and answer; set {cells.key}.chat=false")
    return _plain(cells, "", cells.text("text"))


def _instructed(cells: RowView, role: str | None = None) -> Example:
    """Read the columns of Alpaca, and the answer in the column of ``role``; without one, the prompt alone.

    A conversation has one question: the instruction, and the input below it. Plain text has the sentences of Alpaca.

    Source: Taori et al. 2023, ``PROMPT_DICT`` in ``train.py`` of Stanford Alpaca, with a line end after its last line.
    """
    if cells.row.values.get("history"):
        raise DataError(f'{cells.where}: "history" is not read with an instruction; write the row as messages')
    instruction = cells.text("instruction")
    context = cells.text("input") if cells.row.values.get(cells.column("input")) not in (None, "") else ""
    answer = cells.text(role) if role else ""
    if cells.config.chat:
        question = f"{instruction}\n\n{context}" if context else instruction
        messages = (ChatMessage("user", question), *([ChatMessage("assistant", answer)] if role else []))
        return _with_system(Chat(cells.where, messages, 1, cells.tools()), cells)
    paired = ", paired with an input that provides further context" if context else ""
    prompt = (
        f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"
    )
    return _plain(cells, prompt, answer)


def _prompt(cells: RowView) -> Example:
    cells.check_context()
    if cells.is_text("prompt") and not cells.config.chat:
        return _plain(cells, cells.text("prompt"), "")
    messages = cells.messages("prompt")
    return _with_system(Chat(cells.where, messages, len(messages), cells.tools()), cells)


def _prompt_of_messages(cells: RowView) -> Chat:
    messages = cells.messages("messages")
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise EmptyRowError(f'{cells.where}: "{cells.column("messages")}" has no message before the answer; {REMEDY}')
    return _with_system(Chat(cells.where, messages, len(messages), cells.tools()), cells)


def _preference(cells: RowView) -> Preference:
    chosen, rejected = cells.value("chosen"), cells.value("rejected")
    if chosen == rejected:
        raise EmptyRowError(f"{cells.where}: chosen and rejected are the same, so neither is preferred; {REMEDY}")
    if _holds_prompt(chosen) and _holds_prompt(rejected):
        return _implicit(cells)
    if not cells.has("prompt") and cells.has("instruction"):
        return Preference(_instructed(cells, "chosen"), _instructed(cells, "rejected"))
    if not cells.has("prompt") and cells.has("messages"):
        # LLaMA-Factory has pairs in this form, each answer as one message.
        return Preference(_answered(cells, "chosen", "messages"), _answered(cells, "rejected", "messages"))
    if not cells.has("prompt"):
        raise DataError(
            f"{cells.where}: chosen and rejected need a prompt; name its column with {cells.key}.columns.prompt, "
            "or give both as whole conversations"
        )
    return Preference(_answered(cells, "chosen"), _answered(cells, "rejected"))


def _holds_prompt(answer: object) -> bool:
    """Whether the column of an answer holds the whole conversation: messages that do not begin with the answer."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or not answer or not isinstance(answer[0], dict):
        return False
    return usual_role(str(answer[0].get("role") or answer[0].get("from"))) != "assistant"


def _implicit(cells: RowView) -> Preference:
    """Read a pair of whole conversations. The prompt is the messages that both begin with, never a part of an answer."""
    sides = [Chat(cells.where, cells.messages(role), tools=cells.tools()) for role in ("chosen", "rejected")]
    start = _shared(*(side.messages for side in sides))
    if start == 0:
        raise DataError(
            f"{cells.where}: chosen and rejected do not begin with the same messages; "
            f"give the prompt in a column of its own ({cells.key}.columns.prompt)"
        )
    if cells.has("prompt") and not _is_prompt(cells, sides[0].messages[:start]):
        raise DataError(
            f'{cells.where}: "{cells.column("prompt")}" is not the prompt that chosen and rejected begin with; '
            "keep one of the two"
        )
    chosen, rejected = (_with_system(_continued(replace(side, start=start)), cells) for side in sides)
    return Preference(chosen, rejected)


def _is_prompt(cells: RowView, shared: tuple[ChatMessage, ...]) -> bool:
    """Whether the column ``prompt`` agrees with ``shared``: as the text of one message, or as the first messages."""
    if cells.is_text("prompt"):
        return cells.text("prompt") in [message.content for message in shared]
    prompt = cells.messages("prompt")
    return prompt == shared[: len(prompt)]


def _shared(chosen: tuple[ChatMessage, ...], rejected: tuple[ChatMessage, ...]) -> int:
    """Return the number of messages of the prompt: equal messages, up to where both sides continue with an answer."""
    for start in range(min(len(chosen), len(rejected)) - 1, 0, -1):
        if chosen[:start] == rejected[:start] and chosen[start].role == rejected[start].role == "assistant":
            return start
    return 0


def _answered(cells: RowView, role: str, prompt: str = "prompt") -> Example:
    """The prompt and one answer to it, each text or messages."""
    cells.check_context()
    if cells.is_text(prompt) and cells.is_text(role) and not cells.config.chat:
        return _plain(cells, as_text(cells.value(prompt), f'{cells.where}: "{cells.column(prompt)}"'), cells.text(role))
    before, after = cells.messages(prompt), cells.messages(role, speaker="assistant")
    if after[0].role != "assistant":
        what = f'"{cells.column(role)}" begins with a {after[0].role} message'
        raise DataError(f"{cells.where}: {what}; begin it with the assistant's")
    return _with_system(_continued(Chat(cells.where, before + after, len(before), cells.tools())), cells)


def _continued(chat: Chat) -> Chat:
    """Join an answer with the start of the answer at the end of the prompt, which the answer continues."""
    if not is_prefill(chat.messages[: chat.start]) or chat.messages[chat.start].role != "assistant":
        return chat
    begun, answer = chat.messages[chat.start - 1], chat.messages[chat.start]
    whole = replace(answer, content=begun.content + answer.content, extra={**begun.extra, **answer.extra})
    messages = (*chat.messages[: chat.start - 1], whole, *chat.messages[chat.start + 1 :])
    return replace(chat, messages=messages, start=chat.start - 1, prefill=begun.content)


def _plain(cells: RowView, prompt: str, response: str) -> Plain:
    if cells.config.system is not None:
        raise ConfigError(
            f"{cells.key}.system needs a conversation, and {cells.where} is plain text; set {cells.key}.chat=true"
        )
    parts = {"tools": cells.has_tools(), "system": cells.system(), TEMPLATE_OPTIONS: cells.template_options()}
    unfit = next((name for name, has in parts.items() if has), None)
    if unfit:
        raise DataError(f'{cells.where}: "{unfit}" needs a conversation, and the row is plain text; set {cells.key}.chat=true')
    return Plain(cells.where, prompt, response)


def _with_system(chat: Chat, cells: RowView) -> Chat:
    """Add the text of the column ``system``, or ``data.system``, in front, unless the row has a system message.

    Also add the options of the chat template that the row has.
    """
    if options := cells.template_options():
        chat = replace(chat, options=options)
    system = cells.system()
    if chat.messages[0].role == "system":
        if system != cells.config.system and system != chat.messages[0].content:
            raise DataError(f'{cells.where}: "system" is not the system message of the conversation; keep one of the two')
        return chat
    if system is None:
        return chat
    start = chat.start + 1 if chat.start else 0
    return replace(chat, messages=(ChatMessage("system", system), *chat.messages), start=start)
