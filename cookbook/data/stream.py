"""Streams: rows that are read, rendered and tokenized when a step needs them, in a seeded order, in little memory.

A shuffle buffer holds rows that are not rendered yet, so the order of a stream depends on the seed, the epoch and the number of
rows alone, and a batch is a pure function of its index. To resume, the rows before a position are read again, and only
the rows of the buffer are kept: the position is a few numbers.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic, NoReturn, TypeVar

import numpy as np

from cookbook import terminal
from cookbook.data.datum_table import Batches, check_size
from cookbook.data.render import Renderer
from cookbook.data.rows import RejectedRows, Row
from cookbook.errors import ConfigError, DataError
from cookbook.types import JsonObject

T = TypeVar("T")
# Places of the shuffle buffer that are drawn together.
DRAWS = 1024
NOT_COUNTED = "data.streaming=true reads rows without counting them"


def shuffled(rows: Iterator[T], size: int, draw: np.random.Generator) -> Iterator[T]:
    """Yield the rows in an order that ``draw`` decides, with ``size`` rows in memory.

    Each row takes the place of a row drawn from the buffer, so a row may come at most ``size`` places early, and any number of
    places late. The rows that are left at the end are shuffled.

    Source: ``datasets.IterableDataset.shuffle`` and ``tf.data.Dataset.shuffle``.
    """
    buffer = list(islice(rows, size))
    places: Iterator[int] = iter(())
    for row in rows:
        # A draw of many places takes a fortieth of the time of single draws.
        if (place := next(places, None)) is None:
            places = iter(draw.integers(size, size=DRAWS).tolist())
            place = next(places)
        item, buffer[place] = buffer[place], row
        yield item
    yield from (buffer[place] for place in draw.permutation(len(buffer)).tolist())


@dataclass(frozen=True)
class StreamPosition:
    """Place of a batch in a stream, JSON-compatible.

    ``drawn`` rows of the epoch are used up. ``open`` rows come next: ``used`` of their datums are in earlier batches, others
    are not. ``read`` rows of the epoch were read, more than were drawn by those in the buffer; ``crc32`` is their checksum.
    ``renderer`` is the renderer's state before the open rows.
    """

    batch: int = 0
    epoch: int = 0
    drawn: int = 0
    open: int = 0
    used: int = 0
    read: int = 0
    crc32: int = 0
    renderer: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class StreamResume:
    """Where a stream resumes. ``compare`` gets two texts about the rows before ``position``: of the checkpoint, and now.

    ``compare`` raises ConfigError if the run must not resume with other rows.
    """

    position: StreamPosition
    compare: Callable[[str, str], None]


@dataclass(frozen=True, eq=False)
class RowStream(Sequence[T], Generic[T]):
    """The datums or prompts of a stream. Only ``run.batches`` takes them: their number is unknown, and they are used in order.

    Args:
        read: opens the data, and returns its rows in their order.
        make: returns the datums or prompts of a few rows.
        renderer: the renderer that ``make`` uses.
        refusals: the rows that are left out.
        buffer: rows of the shuffle buffer; 0: the order of the data.
    """

    read: Callable[[], Iterator[Row]]
    make: Callable[[Sequence[Row]], Sequence[T]]
    renderer: Renderer
    refusals: RejectedRows
    buffer: int

    def __len__(self) -> NoReturn:
        raise ConfigError(f"data.streaming: {NOT_COUNTED}, and this recipe asks for their number; set data.streaming=false")

    def __getitem__(self, index: object) -> NoReturn:
        raise ConfigError("data.streaming: this recipe takes single rows out of the data; set data.streaming=false")


class StreamedBatches(Batches[T]):
    """Batches of a stream, ``size`` datums or prompts at a time. ``batches[i]`` is a pure function, fast if ``i`` grows by 1.

    An epoch's last batch may be smaller. Every epoch reads the data again and has an order of its own.
    """

    def __init__(
        self,
        stream: RowStream[T],
        size: int,
        seed: int,
        resume: StreamResume | None = None,
        key: str = "recipe.batch_size",
    ) -> None:
        check_size(size, key)
        # The number is unknown: no step is known to be in a later epoch.
        self.per_epoch = sys.maxsize
        self._stream = stream
        self._size = size
        self._seed = seed
        self._resume = resume
        # The rows that are left of the epoch; None before the first batch.
        self._source: Iterator[Row] | None = None
        # Datums of the open rows that are not used yet.
        self._left: list[T] = []
        # Whether the epoch has given a datum.
        self._has_datums = False
        # Rows that had been left out before the epoch.
        self._since = 0
        self._num_read = self._crc32 = 0
        self._position = StreamPosition() if resume is None else resume.position

    @property
    def position(self) -> StreamPosition:
        """The position of the next batch."""
        return self._position

    def __len__(self) -> NoReturn:
        raise ConfigError(f"recipe.steps: missing, and {NOT_COUNTED}; set recipe.steps to the number of optimizer steps")

    def __getitem__(self, index: int) -> list[T]:
        if index < self._position.batch:
            self._seek(StreamPosition())
        elif self._source is None:
            self._seek(self._position)
        with terminal.doing("reading the data", detail=lambda: f"{self._num_read:,} rows of epoch {self._position.epoch + 1}"):
            while self._position.batch < index:
                self._next()
            return self._next()

    def _next(self) -> list[T]:
        """Return the batch at the position, and move the position past it.

        Raises:
            DataError: a row stops the run, or every row of the epoch was left out.
        """
        batch = self._filled()
        while not batch:
            if not self._has_datums:
                refusals = self._stream.refusals
                refusals.check_left(self._since, len(refusals.found) - self._since, 0)
                raise DataError("data: the rows have changed while the run reads them, and none is left; restore the data")
            self._begin(self._position.epoch + 1)
            batch = self._filled()
        # Exactly the rows of this batch have been drawn, so that a resumed run meets bad rows at the same steps.
        self._position = replace(self._position, batch=self._position.batch + 1, read=self._num_read, crc32=self._crc32)
        return batch

    def _filled(self) -> list[T]:
        """Return the next datums; fewer than a batch at the end of the epoch, and none after it."""
        now = self._position
        batch, self._left = self._left[: self._size], self._left[self._size :]
        used = now.used + len(batch)
        while len(batch) < self._size and (rows := self._drawn(self._size - len(batch))):
            renderer = self._stream.renderer.state()
            made = self._stream.make(rows)
            used = min(len(made), self._size - len(batch))
            batch += made[:used]
            self._left = list(made[used:])
            self._has_datums = self._has_datums or bool(made)
            # The rows that were open before are used up.
            now = replace(now, drawn=now.drawn + now.open, open=len(rows), renderer=renderer)
        if self._left:
            self._position = replace(now, used=used)
        else:
            self._position = replace(now, drawn=now.drawn + now.open, open=0, used=0, renderer=self._stream.renderer.state())
        return batch

    def _drawn(self, count: int) -> list[Row]:
        assert self._source is not None
        return list(islice(self._source, count))

    def _begin(self, epoch: int) -> None:
        """Open the data for an epoch."""
        self._num_read = self._crc32 = 0
        self._left, self._has_datums, self._since = [], False, len(self._stream.refusals.found)
        rows, size = self._counted(), self._stream.buffer
        draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        self._source = shuffled(rows, size, draw) if size else rows
        self._position = StreamPosition(self._position.batch, epoch)

    def _counted(self) -> Iterator[Row]:
        """Yield the rows of the data in their order, and compute the checksum of their values."""
        for row in self._stream.read():
            self._num_read += 1
            self._crc32 = zlib.crc32(repr(row.values).encode(), self._crc32)
            yield row

    def _seek(self, position: StreamPosition) -> None:
        """Read the rows before a position again, without rendering them; render the open rows."""
        began = time.monotonic()
        self._begin(position.epoch)
        with terminal.doing("reading up to the place of the run", total=position.read, noun="rows") as activity:
            for start in range(0, position.drawn, DRAWS):
                self._drawn(min(DRAWS, position.drawn - start))
                activity.count = self._num_read
            rows = self._drawn(position.open)
        before, now = (
            f"{number:,} rows with checksum {crc32:08x}"
            for number, crc32 in ((position.read, position.crc32), (self._num_read, self._crc32))
        )
        if self._resume is not None and before != now:
            self._resume.compare(before, now)
        if position.renderer:
            self._stream.renderer.restore(**position.renderer)
        self._left = list(self._stream.make(rows)[position.used :]) if rows else []
        self._has_datums = position.batch > 0
        self._position = position
        if position.read:
            terminal.say(f"data: read {position.read:,} rows again in {time.monotonic() - began:.1f} s to resume the stream")
