"""From a row to what a recipe trains: TRL's column conventions, read strictly, and the same way in every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from cookbook.data.cells import REMEDY, Cells
from cookbook.data.config import Columns, DataConfig
from cookbook.data.messages import Message, as_text
from cookbook.data.rows import EmptyRowError, Row
from cookbook.errors import ConfigError, DataError

T = TypeVar("T")
NEEDS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "text": ("text",),
    "prompt": ("prompt",),
}

# The shipped recipe that reads a format, for rows that the chosen one does not read.
RECIPES = {"preference": "recipe=dpo or recipe=orpo", "messages": "recipe=sft", "prompt_completion": "recipe=sft"}


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages before ``start`` are the prompt and never trained."""

    where: str
    messages: tuple[Message, ...]
    start: int = 0
    tools: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Plain:
    """Text without a chat template: ``response`` follows ``prompt``, which may be empty."""

    where: str
    prompt: str
    response: str = ""


Example = Chat | Plain


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True)
class RowReader(Generic[T]):
    """Reads every row of a dataset in one format. ``roles`` are the columns that it reads; None: rewards read them all."""

    read: Callable[[Cells], T]
    config: DataConfig
    roles: tuple[str, ...] | None

    def __call__(self, row: Row) -> T:
        cells = Cells(row, self.config)
        cells.check_columns()
        if self.roles is not None:
            cells.check_answer(self.roles)
        return self.read(cells)

    def unused(self, row: Row) -> Iterable[str]:
        """The row's columns that hold something and are not read."""
        return () if self.roles is None else Cells(row, self.config).unused(self.roles)


def conversation_reader(first: Row, config: DataConfig) -> RowReader[Example]:
    """Return the reader for a supervised dataset that begins with ``first``."""
    name = detect(first, config, ("messages", "prompt_completion", "text"))
    read = {"messages": _messages, "prompt_completion": _prompt_completion, "text": _text}[name]
    return RowReader(read, config, NEEDS[name])


def preference_reader(first: Row, config: DataConfig) -> RowReader[Preference]:
    """Return the reader for a preference dataset that begins with ``first``."""
    detect(first, config, ("preference",))
    return RowReader(_preference, config, ("prompt", *NEEDS["preference"]))


def prompt_reader(first: Row, config: DataConfig) -> RowReader[Example]:
    """Return the reader for the prompts of a dataset that begins with ``first``; answers in it are left out."""
    if config.format == "prompt_completion":
        config = replace(config, format="prompt")
    name = detect(first, config, ("prompt", "messages", "preference"))
    read = {"prompt": _prompt, "messages": _prompt_of_messages, "preference": _prompt_of_preference}[name]
    return RowReader(read, config, None)


def detect(row: Row, config: DataConfig, accepted: Sequence[str]) -> str:
    """The row's format: ``data.format``, or the first of ``accepted`` whose columns it has.

    Raises:
        DataError: it has none of them, or not a column that the configuration names.
        ConfigError: ``data.format`` is not accepted here.
    """
    cells = Cells(row, config)
    for role in {role: None for name in accepted for role in NEEDS[name]}:
        if getattr(config.columns, role) != getattr(Columns, role):
            cells.value(role)  # named by the user, so it has to be there
    if config.format != "auto":
        if config.format not in accepted:
            raise ConfigError(f"data.format={config.format} does not suit this recipe; it reads {', '.join(accepted)}")
        return config.format
    for name in accepted:
        if all(cells.has(role) for role in NEEDS[name]):
            return name
    wanted = " or ".join("+".join(NEEDS[name]) for name in accepted)
    raise DataError(
        f"{row.where}: the columns are {', '.join(row.values) or 'none'}, and this recipe reads {wanted}; "
        f"{_remedy(row, cells, accepted)}"
    )


def _remedy(row: Row, cells: Cells, accepted: Sequence[str]) -> str:
    """The recipe that reads the row's columns, or the keys that name them."""
    recipe = next((RECIPES[name] for name in RECIPES if name not in accepted and all(map(cells.has, NEEDS[name]))), None)
    other = f"choose {recipe}, or " if recipe else ""
    likely = "prompt_completion" if "prompt_completion" in accepted and len(row.values) > 1 else accepted[0]
    keys = " ".join(f"data.columns.{role}=<column>" for role in NEEDS[likely] if not cells.has(role))
    return f"{other}name yours, e.g. {keys}"


def question(example: Example) -> str:
    """What is asked, for people to read: the last message that is not an answer, or the plain prompt."""
    if isinstance(example, Plain):
        return example.prompt
    return next((message.content for message in reversed(example.messages) if message.role != "assistant"), "")


def separate_answers(chat: Chat) -> list[Chat]:
    """One conversation per answer, ended by it: each is then seen as it was when the model had to give it."""
    return [
        replace(chat, messages=chat.messages[: index + 1], start=index)
        for index, message in enumerate(chat.messages)
        if index >= chat.start and message.role == "assistant" and message.weight
    ]


def _messages(cells: Cells) -> Chat:
    messages = cells.messages("messages")
    if cells.config.train_on != "all" and not any(message.role == "assistant" for message in messages):
        what = f'"{cells.column("messages")}" has no assistant turn'
        raise EmptyRowError(f"{cells.where}: {what}, so nothing would be trained on; {REMEDY}")
    return _with_system(Chat(cells.where, messages, tools=cells.tools()), cells.config)


def _prompt_completion(cells: Cells) -> Example:
    return _answered(cells, "completion")


def _text(cells: Cells) -> Plain:
    if cells.config.chat:
        raise ConfigError("data.chat: a text column has no prompt and answer to tell apart; set data.chat=false")
    return _plain(cells, "", cells.text("text"))


def _prompt(cells: Cells) -> Example:
    if cells.is_text("prompt") and not cells.config.chat:
        return _plain(cells, cells.text("prompt"), "")
    messages = cells.messages("prompt")
    return _with_system(Chat(cells.where, messages, len(messages), cells.tools()), cells.config)


def _prompt_of_messages(cells: Cells) -> Chat:
    messages = cells.messages("messages")
    if messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise EmptyRowError(f'{cells.where}: "{cells.column("messages")}" has no message before the answer; {REMEDY}')
    return _with_system(Chat(cells.where, messages, len(messages), cells.tools()), cells.config)


def _prompt_of_preference(cells: Cells) -> Example:
    return _preference(cells).chosen


def _preference(cells: Cells) -> Preference:
    chosen, rejected = cells.value("chosen"), cells.value("rejected")
    if chosen == rejected:
        raise EmptyRowError(f"{cells.where}: chosen and rejected are the same, so neither is preferred; {REMEDY}")
    if _holds_prompt(chosen) and _holds_prompt(rejected):
        return _implicit(cells)
    if not cells.has("prompt"):
        raise DataError(
            f"{cells.where}: chosen and rejected need a prompt; name its column with data.columns.prompt, "
            "or give both as whole conversations"
        )
    return Preference(_answered(cells, "chosen"), _answered(cells, "rejected"))


def _holds_prompt(answer: Any) -> bool:
    """Whether the column of an answer holds the whole conversation: messages that do not begin with the answer."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or not answer or not isinstance(answer[0], dict):
        return False
    return (answer[0].get("role") or answer[0].get("from")) not in ("assistant", "gpt")


def _implicit(cells: Cells) -> Preference:
    """The prompt is the messages both sides begin with; equal tokens at the start of two answers stay answers."""
    sides = [Chat(cells.where, cells.messages(role), tools=cells.tools()) for role in ("chosen", "rejected")]
    start = _shared(*(side.messages for side in sides))
    if start == 0:
        raise DataError(
            f"{cells.where}: chosen and rejected do not begin with the same messages; "
            "give the prompt in a column of its own (data.columns.prompt)"
        )
    if cells.has("prompt") and not _is_prompt(cells, sides[0].messages[:start]):
        raise DataError(
            f'{cells.where}: "{cells.column("prompt")}" is not the prompt that chosen and rejected begin with; '
            "keep one of the two"
        )
    chosen, rejected = (_with_system(replace(side, start=start), cells.config) for side in sides)
    return Preference(chosen, rejected)


def _is_prompt(cells: Cells, shared: tuple[Message, ...]) -> bool:
    """Whether the column ``prompt`` agrees with ``shared``: as the text of one message, or as the first messages."""
    if cells.is_text("prompt"):
        return cells.text("prompt") in [message.content for message in shared]
    prompt = cells.messages("prompt")
    return prompt == shared[: len(prompt)]


def _shared(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """How many messages the prompt has: the equal ones, back to where both sides go on with an answer."""
    equal = 0
    while equal < min(len(chosen), len(rejected)) and chosen[equal] == rejected[equal]:
        equal += 1
    for start in range(equal, 0, -1):
        if all(start < len(side) and side[start].role == "assistant" for side in (chosen, rejected)):
            return start
    return 0


def _answered(cells: Cells, role: str) -> Example:
    """The prompt and one answer to it, each text or messages."""
    if cells.is_text("prompt") and cells.is_text(role) and not cells.config.chat:
        return _plain(cells, as_text(cells.value("prompt"), f'{cells.where}: "{cells.column("prompt")}"'), cells.text(role))
    before, after = cells.messages("prompt"), cells.messages(role, speaker="assistant")
    if after[0].role != "assistant":
        what = f'"{cells.column(role)}" begins with a {after[0].role} message'
        raise DataError(f"{cells.where}: {what}; begin it with the assistant's")
    return _with_system(Chat(cells.where, before + after, len(before), cells.tools()), cells.config)


def _plain(cells: Cells, prompt: str, response: str) -> Plain:
    if cells.config.system is not None:
        raise ConfigError(f"data.system needs a conversation, and {cells.where} is plain text; set data.chat=true")
    if cells.has_tools():
        raise DataError(f'{cells.where}: "tools" needs a conversation, and the row is plain text; set data.chat=true')
    return Plain(cells.where, prompt, response)


def _with_system(chat: Chat, config: DataConfig) -> Chat:
    """A system message of the row's own stays."""
    if config.system is None or chat.messages[0].role == "system":
        return chat
    start = chat.start + 1 if chat.start else 0
    return replace(chat, messages=(Message("system", config.system), *chat.messages), start=start)
