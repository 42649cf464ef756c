"""Data of a run: the rows of its splits, and cached reference logprobs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from cookbook import terminal
from cookbook.data import DataConfig, RejectedRows, Renderer, Row, cached_rows, datums
from cookbook.data.formats import RowReader
from cookbook.data.row_table import rows_digest, select
from cookbook.data.source import source_text, stream_rows
from cookbook.data.stream import RowStream
from cookbook.errors import BackendError
from cookbook.futures import Future, done
from cookbook.protocols import Reference
from cookbook.run.identity import Identity
from cookbook.run.settings import Settings
from cookbook.sampling.environments import numbered_rows
from cookbook.types import Array, Datum

T = TypeVar("T")
Split = Literal["train", "eval"]

SPLITS: tuple[Split, ...] = ("train", "eval")
# Rows of a split that are kept for the summary at the end of the run.
FIRST_ROWS = 8
# Separates this draw from other draws of the same seed.
SAMPLE_SEED = 1_937_006_964
# Datums whose reference logprobs are computed together. The blocks are fixed, so that a resumed run computes the same bits.
BLOCK = 64


@dataclass
class SplitRows:
    """The rows of a run, by split. Calling the object returns the rows of a split.

    If the recipe names its kind of data, the constructor reads the rows, or takes them from the cache, and checks their
    columns. Rows are returned only once, so that they can be freed after their datums have been made. ``first`` keeps the first
    rows of each split, and ``evaluated`` the digest of the held-out rows, empty before they are returned. Without ``hub``, rows
    of the Hugging Face hub are not read.

    With ``data.streaming``, the rows to train on are a stream instead, of which only the first rows are read here.

    Raises:
        DataError: the data cannot be read, or its columns do not suit the recipe.
        ConfigError: the run to resume was made with other rows.
    """

    settings: Settings
    identity: Identity
    hub: bool = True
    evaluated: str = ""
    first: dict[Split, Sequence[Row]] = field(default_factory=dict)
    counts: dict[Split, int] = field(default_factory=dict)
    _read: dict[Split, Sequence[Row]] = field(default_factory=dict)
    # Readers of the stream, by kind of data.
    _readers: dict[str, RowReader[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refusals = RejectedRows(self.settings.data)
        # An environment chooses the columns that it reads.
        kind = None if self.settings.env is not None else self.settings.data_kind
        for which in SPLITS:
            is_here = self.hub or self.settings.numbered is not None or _is_local(self.settings.data, which)
            if (kind is not None or not self.hub) and is_here:
                if self.is_stream(which):
                    self.first[which] = self.sample(which, FIRST_ROWS)
                    if kind is not None:
                        self._readers[kind] = datums.stream_reader(kind, self.settings.data)
                else:
                    self._read[which] = self._load(which)
        for rows in self._read.values():
            if kind is not None:
                datums.check_columns(kind, rows, self.settings.data)

    def __call__(self, which: Split) -> Sequence[Row]:
        rows = self._read.pop(which) if which in self._read else self._load(which)
        if which == "eval":
            self.evaluated = rows_digest(rows)
        return rows

    @property
    def source(self) -> str:
        """The data of the run, for people."""
        numbered = self.settings.numbered
        return source_text(self.settings.data) if numbered is None else f"the environment {type(numbered).__name__}"

    @property
    def model(self) -> str:
        """The model of the run, for people: the last parts of a path."""
        name = self.settings.model.name
        path = Path(name)
        return "/".join(path.parts[-2:]) if path.is_absolute() else name

    def is_stream(self, which: Split) -> bool:
        """Whether the rows of a split are a stream, so that calling the object for them is an error."""
        return self.settings.data.streaming and which == "train" and self.settings.numbered is None

    def stream(
        self, kind: str, make: Callable[[Sequence[Row], RowReader[Any]], Sequence[T]], renderer: Renderer
    ) -> RowStream[T]:
        """Return the stream of what ``make`` returns for the rows to train on. ``kind`` is one of the kinds of ``DATA``."""
        data = self.settings.data
        # A dataset of the hub takes seconds to open.
        reader = self._readers.get(kind) or datums.stream_reader(kind, data)
        return RowStream(
            functools.partial(stream_rows, data, self.refusals),
            lambda rows: make(rows, reader),
            renderer,
            self.refusals,
            data.shuffle_buffer if data.shuffle else 0,
        )

    def sample(self, which: Split, count: int) -> Sequence[Row]:
        """Return at most ``count`` of the rows in memory, drawn by the run's seed, in the order of the data.

        Of a stream, return the first rows that can be read; the run reports the others when it meets them.
        """
        if self.is_stream(which):
            refusals = RejectedRows(self.settings.data, collect=True)
            return list(itertools.islice(stream_rows(self.settings.data, refusals), count))
        rows = self._read.get(which, ())
        if len(rows) <= count:
            return rows
        draw = np.random.default_rng((self.settings.seed, SAMPLE_SEED)).permutation(len(rows))[:count]
        return select(rows, sorted(draw.tolist()))

    def read(self, which: Split) -> None:
        """Read the rows of a split into memory, if they are to be read here and no call has returned them."""
        if which not in self._read and which not in self.counts and (self.hub or _is_local(self.settings.data, which)):
            self._read[which] = self._load(which)

    def longest(self, which: Split, least: int, count: int) -> Sequence[Row]:
        """Return the ``count`` rows in memory with the longest values as text; none of a split of at most ``least`` rows."""
        rows = self._read.get(which, ())
        if self.is_stream(which) or len(rows) <= least:
            return []
        lengths = np.array([len(str(row.values)) for row in rows])
        return select(rows, np.argsort(-lengths, kind="stable")[:count].tolist())

    def _load(self, which: Split) -> Sequence[Row]:
        settings = self.settings
        rows: Sequence[Row]
        if settings.numbered is not None:
            rows = numbered_rows(settings.numbered, which, settings.seed, settings.eval.limit)
        else:
            rows = cached_rows.load(settings.data, which, settings.seed, settings.eval.limit, self.refusals)
        if which == "train":
            with terminal.doing("computing the digest of the rows"):
                self.identity.measured("rows", rows_digest(rows))
        self.first[which], self.counts[which] = rows[:FIRST_ROWS], len(rows)
        return rows


def _is_local(data: DataConfig, which: Split) -> bool:
    """Whether a split is on this machine; a dataset of the hub would have to be downloaded."""
    if which == "eval" and (data.eval_path or data.eval_name):
        return data.eval_path is not None
    return data.path is not None if data.mix is None else all(part.path is not None for part in data.mix)


class CachedReference:
    """A :class:`Reference` that computes the logprobs of each datum of a fixed list once, when they are first used.

    Float sums depend on the other datums of a forward pass. Datums are therefore computed in blocks of the list, for any
    batch that needs them, and the cached numbers do not depend on the order of the batches. The reference model is freed
    when all logprobs are known.
    """

    def __init__(self, reference: Reference, data: Sequence[Datum]) -> None:
        self._reference: Reference | None = reference
        self._data = data
        self._indices = {id(datum): index for index, datum in enumerate(data)}
        self._known: dict[int, Array] = {}

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Array]]:
        """Return float32 arrays of shape ``(T,)``, one per datum.

        Raises:
            BackendError: a datum is not of the list, and the reference model has been freed.
        """
        if any(id(datum) not in self._indices for datum in data):
            if self._reference is None:
                raise BackendError("reference: got datums that were not registered before the reference model was freed")
            return self._reference.logprobs(data)
        indices = [self._indices[id(datum)] for datum in data]
        blocks = sorted({index // BLOCK for index in indices if index not in self._known})
        with terminal.doing("computing reference logprobs", total=len(blocks) * BLOCK, noun="datums") as activity:
            for block in blocks:
                assert self._reference is not None
                members = range(block * BLOCK, min((block + 1) * BLOCK, len(self._data)))
                rows = self._reference.logprobs([self._data[index] for index in members]).result()
                self._known.update(zip(members, rows, strict=True))
                activity.count += BLOCK
        if len(self._known) == len(self._data):
            self._reference = None
        return done([self._known[index] for index in indices])
