"""Checks that a run makes before it loads a model. ``cookbook check config`` makes the same ones, and reads no hub."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cookbook import terminal
from cookbook.backends.copies import tokenizer_digests
from cookbook.backends.local import LocalConfig
from cookbook.check.rows import survey
from cookbook.data import DataConfig, Refusals, Renderer, Row, load_rows
from cookbook.data.answers import with_answer
from cookbook.data.batches import Batches
from cookbook.data.datums import check_columns
from cookbook.engine.shape import shape_of
from cookbook.errors import BadRowError, RolloutError
from cookbook.identity import Identity, rows_digest
from cookbook.protocols import Preflight
from cookbook.rewards import Judge
from cookbook.rewards.limits import Limits
from cookbook.run import Split, check_steps

if TYPE_CHECKING:
    from cookbook.session import Settings

SPLITS: tuple[Split, ...] = ("train", "eval")
FIRST_ROWS = 8  # of a split, kept for the end of the run
RENDERED_ROWS = 5000  # rows of a split that check config renders; a larger split is sampled: 5,000 long chats take seconds
SAMPLE_SEED = 1_937_006_964  # keeps this draw apart from others of the same seed


def check_parts(typed: Settings) -> None:
    """Refuse parts that cannot work here or together: a package is missing, a device is absent, a backend does not suit.

    Raises:
        CookbookError: the first of them.
    """
    parts = [typed.backend, typed.deployment, *typed.trackers, *typed.hooks]
    for part in parts:
        if isinstance(part, Preflight):
            part.preflight(typed.model, typed.backend)


@dataclass
class Rows:
    """The rows of a run, by split. If the recipe says what it learns from, they are read and their columns checked at once.

    Calling it hands a split's rows out. They are handed out from memory once, so that they can be freed when they have become
    datums. ``first`` keeps the first rows of each split. Without ``hub``, rows of the Hugging Face hub are not read.

    Raises:
        DataError: the data cannot be read, or their columns do not suit the recipe.
        ConfigError: the run to resume was made with other rows.
    """

    typed: Settings
    identity: Identity
    refusals: Refusals
    hub: bool = True
    first: dict[Split, list[Row]] = field(default_factory=dict)
    counts: dict[Split, int] = field(default_factory=dict)
    _read: dict[Split, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = getattr(self.typed.module, "DATA", None)
        for which in SPLITS:
            if (kind is not None or not self.hub) and (self.hub or _is_local(self.typed.data, which)):
                self._read[which] = self._load(which)
        for rows in self._read.values():
            if kind is not None:
                check_columns(kind, rows, self.typed.data)

    def __call__(self, which: Split) -> list[Row]:
        return self._read.pop(which) if which in self._read else self._load(which)

    def sample(self, which: Split, count: int) -> list[Row]:
        """At most ``count`` of the rows in memory, drawn by the run's seed, in the order of the data."""
        rows = self._read.get(which, [])
        if len(rows) <= count:
            return rows
        draw = np.random.default_rng((self.typed.seed, SAMPLE_SEED)).permutation(len(rows))[:count]
        return [rows[index] for index in sorted(draw.tolist())]

    def _load(self, which: Split) -> list[Row]:
        typed = self.typed
        rows = load_rows(typed.data, which, typed.seed, typed.eval.limit, self.refusals)
        if which == "train":
            with terminal.doing("computing the digest of the rows"):
                self.identity.measured("rows", rows_digest(rows))
        self.first[which], self.counts[which] = rows[:FIRST_ROWS], len(rows)
        return rows


def _is_local(data: DataConfig, which: Split) -> bool:
    """Whether a split is on this machine; a dataset of the hub would have to be downloaded."""
    if which == "eval" and (data.eval_path or data.eval_name):
        return data.eval_path is not None
    return data.path is not None


@dataclass(frozen=True)
class Examined:
    """Result of :func:`examine`. ``renderer`` is None if the model is on a server, or on the hub and not in its cache here."""

    rows: Rows
    renderer: Renderer | None


def examine(typed: Settings, identity: Identity, folder: Path, done: int) -> Examined:
    """Refuse what a run would refuse after its folder is open and before its first step, without loading weights.

    Args:
        folder: of the run.
        done: finished steps of the checkpoint to resume from.

    Raises:
        CookbookError: the first problem, as the run would report it.
    """
    kind = getattr(typed.module, "DATA", None)
    refusals = Refusals(typed.data)
    rows = Rows(typed, identity, refusals, hub=False)
    shape, renderer = None, None
    if isinstance(typed.backend, LocalConfig):  # a server may have models and tokenizers that are not here
        shape = shape_of(typed.model, recompute=bool(typed.backend.recomputes))
    if shape is not None:
        for subject, digest in tokenizer_digests(shape.tokenizer).items():
            identity.measured(subject, digest)
        renderer = Renderer(shape.tokenizer, shape.max_length)
    if typed.reward is not None:
        _check_reward(typed, rows)
    if kind is not None and renderer is not None:
        for which, room in room_of(typed).items():
            survey(kind, rows.sample(which, RENDERED_ROWS), renderer, typed.data, room, refusals)
    if refusals.found:
        refusals.warn(sum(rows.counts.values()) + len(refusals.found))
    if (steps := planned_steps(typed, rows.counts.get("train"))) is not None:
        check_steps(folder, done, steps)
    return Examined(rows, renderer)


def room_of(typed: Settings) -> dict[Split, int]:
    """Tokens that completions of each split's prompts need; the held-out split first, as the shipped recipes read it first."""
    return {"eval": typed.eval.max_tokens, "train": typed.rollout.max_tokens}


def planned_steps(typed: Settings, num_rows: int | None) -> int | None:
    """Optimizer steps, by the keys that the shipped recipes have; None if they do not say.

    Raises:
        ConfigError: a batch size or a number of epochs below 1.
    """
    recipe = asdict(typed.recipe)
    size, epochs, steps = batch_size(recipe), recipe.get("epochs", 1), recipe.get("steps")
    if num_rows and size is not None and epochs is not None:
        batches = Batches(range(num_rows), size, epochs, typed.seed)
        return len(batches) if steps is None and "epochs" in recipe else steps
    return steps


def batch_size(recipe: Mapping[str, Any]) -> int | None:
    """Rows of one step, by the keys that the shipped recipes have."""
    size: int | None = recipe.get("batch_size", recipe.get("prompts_per_step"))
    return size


def _check_reward(typed: Settings, rows: Rows) -> None:
    """Refuse a reward that cannot be made, or that finds the first row at fault whatever the completion.

    A reward with processes of its own is not called: it may be slow, or ask a model.
    """
    assert typed.reward is not None
    with contextlib.closing(Judge(typed.reward)) as judge:
        slow = isinstance(typed.reward, Limits) and typed.reward.workers > 0
        first = rows.first.get("eval") or rows.first.get("train")
        if slow or not first or typed.data.on_bad_row == "skip":
            return
        try:
            judge.submit("", with_answer(first[0], typed.data))()
        except BadRowError:
            raise
        except RolloutError:  # the reward may reject an empty completion, which the run need not sample
            return
