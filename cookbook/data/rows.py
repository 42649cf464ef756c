"""Rows of a dataset: their configuration, and the policies for rows that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from cookbook.errors import ConfigError, DataError
from cookbook.types import JsonObject

log = logging.getLogger(__name__)

Policy = Literal["on_bad_row", "on_empty", "on_long"]
Format = Literal["auto", "messages", "prompt_completion", "preference", "comparisons", "text", "prompt", "alpaca"]


@dataclass(frozen=True)
class Columns:
    """The dataset's names of the columns that cookbook reads."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    chosen: str = "chosen"
    rejected: str = "rejected"
    text: str = "text"
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    label: str = "label"


@dataclass(frozen=True)
class DataSource:
    """An entry of ``data.mix``: its keys mean what they mean in ``data``, whose values replace None.

    ``weight`` is the source's share of the rows, relative to the other weights.
    """

    path: str | Sequence[str] | None = None
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    weight: float | None = None
    format: Format | None = None
    columns: Columns | None = None
    chat: bool | None = None
    system: str | None = None


@dataclass(frozen=True)
class Curriculum:
    """Shares of the prompts of a step, by the pass rate of a prompt's last group: the share of its solved completions.

    The shares are relative to each other. ``new``: prompts without a group; ``easy``: pass rate above ``easy_above``; ``hard``:
    below ``hard_below``; ``medium``: all others. A completion whose reward is at least ``solved_reward`` is solved. A prompt
    whose last ``retire_after`` groups are all solved is not drawn again; None: no prompt is retired. ``by``: a column, such as
    the level of a question; a prompt without a group has the class of the prompts with the same value.

    Raises:
        ConfigError: a share or threshold is outside its bounds, or all shares are 0.
    """

    new: float = 0.3
    easy: float = 0.05
    medium: float = 0.55
    hard: float = 0.1
    easy_above: float = 0.9
    hard_below: float = 0.1
    solved_reward: float = 1.0
    retire_after: int | None = 1
    by: str | None = None

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The shares in the order of the class's fields."""
        return self.new, self.easy, self.medium, self.hard

    def __post_init__(self) -> None:
        for name, share in zip(("new", "easy", "medium", "hard"), self.shares, strict=True):
            if not 0 <= share < float("inf"):
                raise ConfigError(f"data.curriculum.{name} must be a share of at least 0, got {share}")
        if not any(self.shares):
            raise ConfigError("data.curriculum: all shares are 0; set at least one of new, easy, medium and hard above 0")
        if not 0 <= self.hard_below <= self.easy_above <= 1:
            raise ConfigError(
                "data.curriculum: expected 0 <= hard_below <= easy_above <= 1, "
                f"got hard_below={self.hard_below} and easy_above={self.easy_above}"
            )
        if self.retire_after is not None and self.retire_after < 1:
            raise ConfigError(f"data.curriculum.retire_after must be at least 1, or null, got {self.retire_after}")


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` group; ``conf/data/_base.yaml`` explains each key.

    Raises:
        ConfigError: a number outside its bounds, or a mixture that contradicts itself.
    """

    name: str | None = None
    path: str | Sequence[str] | None = None
    subset: str | None = None
    split: str = "train"
    mix: Sequence[DataSource] | None = None
    mix_until: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    eval_name: str | None = None
    eval_path: str | Sequence[str] | None = None
    eval_split: str | None = None
    eval_fraction: float = 0.0
    format: Format = "auto"
    columns: Columns = field(default_factory=Columns)
    chat: bool = False
    system: str | None = None
    limit: int | None = None
    shuffle: bool = True
    curriculum: Curriculum | None = None
    streaming: bool = False
    shuffle_buffer: int = 10_000
    cache: str | bool = "auto"
    max_length: int | None = None
    on_long: Literal["fail", "skip", "truncate"] = "fail"
    on_empty: Literal["fail", "skip"] = "fail"
    on_bad_row: Literal["fail", "skip"] = "fail"
    train_on: Literal["assistant", "last_assistant", "each_assistant", "all"] = "assistant"
    train_empty_reasoning: bool = True

    def __post_init__(self) -> None:
        for key, least in {"limit": 1, "max_length": 2, "shuffle_buffer": 1}.items():
            if (number := getattr(self, key)) is not None and number < least:
                unset = "" if key == "shuffle_buffer" else ", or null"
                raise ConfigError(f"data.{key} must be at least {least}{unset}, got {number}")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"data.eval_fraction must be >= 0 and < 1, got {self.eval_fraction}")
        if self.mix is not None:
            _check_mixture(self, self.mix)


def _check_mixture(config: DataConfig, mix: Sequence[DataSource]) -> None:
    default = {field_.name: field_.default for field_ in fields(DataConfig)}
    for key in ("path", "name", "subset", "split"):
        if getattr(config, key) != default[key]:
            raise ConfigError(f"data.{key}: got {getattr(config, key)!r} together with data.mix; write it in an entry")
    if not mix:
        raise ConfigError("data.mix: the list is empty; give an entry with path or name for each source")
    if config.eval_split is not None and config.eval_path is None and config.eval_name is None:
        raise ConfigError("data.eval_split: a mixture has no splits; set data.eval_path, data.eval_name or data.eval_fraction")
    weights = [part.weight for part in mix]
    if config.streaming and weights[0] is None:
        raise ConfigError(
            "data.streaming: a streamed mixture needs weights, because the rows of its sources are not counted; give every "
            "entry of data.mix a weight, or set data.streaming=false"
        )
    for index, part in enumerate(mix):
        if (part.path is None) == (part.name is None):
            number = "neither" if part.path is None else "both"
            raise ConfigError(f"data.mix[{index}]: needs path or name, got {number}; give one of them")
        if (part.weight is None) != (weights[0] is None):
            raise ConfigError(f"data.mix[{index}].weight: give every entry a weight, or none to read every row once")
        if part.weight is not None and not 0 < part.weight < float("inf"):
            raise ConfigError(f"data.mix[{index}].weight must be above 0, got {part.weight}; remove the entry to leave it out")


class EmptyRowError(DataError):
    """A row with nothing to train on, subject to ``data.on_empty``."""


@dataclass(frozen=True)
class RowSource:
    """One source of a mixture: ``key`` names its entry, ``data.mix[0]``; ``config`` has the entry's values."""

    key: str
    config: DataConfig


def sources(config: DataConfig) -> list[RowSource]:
    """Return the sources of ``data.mix``."""
    own = ("format", "columns", "chat", "system")
    return [
        RowSource(
            f"data.mix[{index}]",
            replace(
                config,
                mix=None,
                **{key: getattr(part, key) for key in ("path", "name", "subset", "split")},
                **{key: value for key in own if (value := getattr(part, key)) is not None},
            ),
        )
        for index, part in enumerate(config.mix or ())
    ]


@dataclass(frozen=True)
class Row:
    """``where`` names the row in errors and logs, the same in every run: ``file:line``, or ``name[split]:index``.

    ``source`` is the row's source in a mixture.
    """

    where: str
    values: JsonObject
    source: RowSource | None = None


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be used.

    ``reason`` begins with its place, ``where``; ``policy`` is the key of ``data`` that decides; ``fatal``: a run stops at
    the row; otherwise the run leaves it out.
    """

    where: str
    reason: str
    policy: Policy
    fatal: bool


class RejectedRows:
    """Rows that cannot be used. Raises DataError for a row if ``data.on_bad_row``, ``on_empty`` or ``on_long`` is ``fail``.

    Args:
        collect: never raise; the caller reports all rejected rows.
    """

    def __init__(self, config: DataConfig, *, collect: bool = False) -> None:
        self._config = config
        self.collects = collect
        self.found: list[RejectedRow] = []  # each row once
        self.unused: dict[str, None] = {}  # columns, and fields of messages, that are not empty and not used for training
        self.notes: dict[str, None] = {}  # what the user should know about the chat template
        self._places: set[str] = set()

    @property
    def skips_bad_rows(self) -> bool:
        """Whether reading continues after a bad row."""
        return self.collects or self._config.on_bad_row == "skip"

    def stops_at(self, policy: Policy) -> bool:
        """Whether a row of this policy raises DataError."""
        return not self.collects and getattr(self._config, policy) != "skip"

    def add(self, where: str, policy: Policy, reason: str) -> None:
        """Record a row. Raise DataError if the policy is ``fail``."""
        fatal = getattr(self._config, policy) != "skip"
        if fatal and not self.collects:
            raise DataError(reason)
        if where in self._places:
            return
        self._places.add(where)
        self.found.append(RejectedRow(where, reason, policy, fatal))

    def add_error(self, where: str, error: DataError) -> None:
        """Record an error of reading or rendering the row. Raise the error if the policy is ``fail``."""
        self.add(where, "on_empty" if isinstance(error, EmptyRowError) else "on_bad_row", str(error))

    def note_unused(self, columns: Iterable[str], fields: Iterable[str]) -> None:
        """Note the columns, and the fields of messages, that are not used. The log gets one line of them, once."""
        names = [*columns, *(f"{field} of messages" for field in fields)]
        new = [name for name in names if name not in self.unused]
        self.unused |= dict.fromkeys(new)
        if new and not self.collects:
            log.warning("data: columns not used for training: %s", ", ".join(new))

    def add_notes(self, notes: Iterable[str]) -> None:
        """Record what the user should know about the chat template. The log gets each sentence once."""
        new = [sentence for sentence in notes if sentence not in self.notes]
        self.notes |= dict.fromkeys(new)
        for sentence in new if not self.collects else ():
            log.warning("data: %s", sentence)

    def check_left(self, since: int, num_rows: int, num_left: int) -> None:
        """Raise DataError if all ``num_rows`` rows were rejected since the record had ``since`` entries."""
        if not self.collects and not num_left and len(self.found) > since:
            raise DataError(f"data: all {num_rows} rows were left out; the first: {self.found[since].reason}")

    def warn(self, num_rows: int) -> None:
        """Log how many rows are left out, for callers that do not report them."""
        if self.found:
            log.warning("data: left out %d of %d rows; the first: %s", len(self.found), num_rows, self.found[0].reason)
