"""Datums and prompts, the batches drawn from them, and tables of large data: tokens in memory-mapped files.

The objects of a table are made when they are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from cookbook.data import cache
from cookbook.data.formats import Example
from cookbook.data.row_table import RaggedEnds, RowTable, text_at
from cookbook.data.row_view import with_answer
from cookbook.data.rows import DataConfig, Row
from cookbook.errors import ConfigError
from cookbook.types import Array, Datum, ModelInput, datum_from_tokens_weights

T = TypeVar("T")
BLOCK = 256
COLUMNS = {"row": "i8", "tokens": "i4", "end": "i8", "question": "u1", "question_end": "i8"}
# Further columns of datums and of prompts. -1 bytes: the number is not known.
DATUMS = {**COLUMNS, "weights": "f4", "num_bytes": "i8"}
PROMPTS = {**COLUMNS, "text": "u1", "text_end": "i8"}


@dataclass(frozen=True, eq=False, init=False)
class RowDatum(Datum):
    """A datum with the name of its row and the row's question."""

    where: str
    question: str

    def __init__(
        self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None, where: str = "", question: str = ""
    ) -> None:
        super().__init__(model_input, loss_fn_inputs)
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "question", question)

    def with_inputs(self, **inputs: Any) -> RowDatum:
        return RowDatum(self.model_input, {**self.loss_fn_inputs, **inputs}, self.where, self.question)

    def __reduce__(self) -> tuple[object, ...]:
        return RowDatum, (self.model_input, dict(self.loss_fn_inputs), self.where, self.question)


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """A prompt to sample from: its tokens, the row for the reward, the text of the tokens, the question and the example.

    If the dataset gives the answer in another form, such as a message, ``row`` also has it as text, in the column ``answer``.
    """

    tokens: list[int]
    row: Row
    text: str
    question: str
    example: Example | None = None


# Not frozen: that would triple the time to make one.
@dataclass(eq=False, slots=True)
class EncodedRow:
    """A datum (``weights``, ``(T,)``, and ``num_bytes`` if known) or a prompt (``text``) of the row with this index.

    ``tokens`` has length ``T``.
    """

    row: int
    question: str
    tokens: Sequence[int] | Array
    weights: npt.NDArray[np.float32] | None = None
    num_bytes: int = -1
    text: str = ""

    def datum(self, where: str) -> RowDatum:
        """Return the datum."""
        assert self.weights is not None
        datum = datum_from_tokens_weights(self.tokens, self.weights)
        inputs = datum.loss_fn_inputs if self.num_bytes < 0 else {**datum.loss_fn_inputs, "num_bytes": self.num_bytes}
        return RowDatum(datum.model_input, inputs, where, self.question)

    def prompt(self, row: Row, config: DataConfig, example: Example) -> RenderedPrompt:
        """Return the prompt."""
        return RenderedPrompt([*map(int, self.tokens)], with_answer(row, config), self.text, self.question, example)


class EncodedTable(Sequence[T], Generic[T]):
    """Result of ``make`` for each encoded row of a table. While a result is referenced, the table returns the same object."""

    def __init__(self, arrays: Mapping[str, Array], make: Callable[[EncodedRow], T]) -> None:
        self._arrays = arrays
        self._make = make
        # The identity of a datum is the key of its reference logprobs.
        self._in_use: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._arrays["row"])

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index = int(index) % len(self)
        if (made := self._in_use.get(index)) is None:
            made = self._in_use[index] = self._make(self._encoded(index))
        item: T = made
        return item

    def _encoded(self, index: int) -> EncodedRow:
        arrays = self._arrays
        start, end = int(arrays["end"][index - 1]) if index else 0, int(arrays["end"][index])
        question = text_at(arrays["question"], arrays["question_end"], index)
        tokens = arrays["tokens"][start:end]
        if "text" in arrays:
            text = text_at(arrays["text"], arrays["text_end"], index)
            return EncodedRow(int(arrays["row"][index]), question, tokens, text=text)
        weights, num_bytes = arrays["weights"][start:end], int(arrays["num_bytes"][index])
        return EncodedRow(int(arrays["row"][index]), question, tokens, weights, num_bytes)


class Pairs(Sequence[Sequence[T]], Generic[T]):
    """Each two consecutive items of a sequence; a pair is made when it is used."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items) // 2

    @overload
    def __getitem__(self, index: int) -> Sequence[T]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sequence[T]]: ...

    def __getitem__(self, index: int | slice) -> Sequence[T] | list[Sequence[T]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start = index % len(self) * 2
        return self._items[start : start + 2]


def write(writer: cache.TableWriter, encoded: Iterable[EncodedRow], columns: Mapping[str, str]) -> None:
    """Append the encoded rows to a table with the columns ``DATUMS`` or ``PROMPTS``."""
    ragged = RaggedEnds()
    stream = iter(encoded)
    while block := list(itertools.islice(stream, BLOCK)):
        arrays: dict[str, Array] = {
            "row": np.array([item.row for item in block]),
            "tokens": np.concatenate([np.asarray(item.tokens, np.int32) for item in block]),
            "end": ragged.ends("tokens", [len(item.tokens) for item in block]),
        }
        for name in ("question", "text"):
            if name in columns:
                texts = [getattr(item, name).encode("utf-8", "surrogatepass") for item in block]
                arrays |= ragged.texts(name, texts)
        if "weights" in columns:
            arrays["weights"] = np.concatenate([item.weights for item in block if item.weights is not None])
            arrays["num_bytes"] = np.array([item.num_bytes for item in block])
        writer.append(**arrays)


def places(rows: Sequence[Row]) -> Callable[[int], str]:
    """Return a function from the index of a row to its ``where``, which keeps no row in memory."""
    if isinstance(rows, RowTable):
        return rows.place
    return [row.where for row in rows].__getitem__


def check_size(size: int, key: str) -> None:
    """Raise ConfigError unless a step has at least one row; ``key`` is the option with their number."""
    if size < 1:
        raise ConfigError(f"{key} must be at least 1, got {size}")


class Batches(Generic[T]):
    """Rows in a seeded order, ``size`` at a time. ``batches[i]`` is a pure function, so resuming needs no iterator state.

    An epoch's last batch may be smaller; no row is dropped. Indices may exceed ``len``: every epoch has an order of its own.
    ``key`` is the option that ``size`` comes from, for errors.
    """

    def __init__(
        self, rows: Sequence[T], size: int, epochs: int, seed: int, shuffle: bool = True, key: str = "recipe.batch_size"
    ) -> None:
        if not rows:
            raise ConfigError("data: there is no row to train on; look at data.path, data.limit and data.on_empty")
        check_size(size, key)
        if epochs < 1:
            raise ConfigError(f"recipe.epochs must be at least 1, got {epochs}")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.per_epoch = -(-len(rows) // size)
        self._length = epochs * self.per_epoch
        self._order: tuple[int, npt.NDArray[np.int64] | range] = (-1, range(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[T]:
        epoch, place = divmod(index, self.per_epoch)
        return [self._rows[i] for i in self.order(epoch)[place * self._size : (place + 1) * self._size]]

    def order(self, epoch: int) -> npt.NDArray[np.int64] | range:
        """Return the indices of the rows in the order of an epoch."""
        if self._order[0] != epoch:
            draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = (epoch, draw.permutation(len(self._rows)) if self._shuffle else range(len(self._rows)))
        return self._order[1]
