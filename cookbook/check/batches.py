"""Random batches for the checks of a loss, and changes to a batch whose effect is known."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cookbook.losses.base import ALIASES
from cookbook.types import Array, Datum, ModelInput, TensorData

USUAL_KEYS = frozenset(
    {"weights", "advantages", "sampling_logprobs", "logprobs", "old_logprobs", "reference_logprobs", "labels"}
)
"""Inputs of the recipes' datums besides ``target_tokens``, under all names. Functions that declare nothing get all of them."""

_CANONICAL = {alias: key for key, alias in ALIASES.items()}


class RandomBatch(NamedTuple):
    """A batch: datums, and per datum float64 logprobs of its targets, ``(T,)``."""

    data: Sequence[Datum]
    logprobs: Sequence[Array]

    @property
    def masked(self) -> list[Array]:
        """Per datum, which tokens have weight 0, ``(T,)``."""
        return [datum.loss_fn_inputs["weights"].array == 0 for datum in self.data]

    def part(self, indices: Sequence[int]) -> RandomBatch:
        """The batch of the datums at ``indices``, in that order."""
        return RandomBatch([self.data[index] for index in indices], [self.logprobs[index] for index in indices])

    def with_datums(self, others: Mapping[int, Datum]) -> RandomBatch:
        """The batch with other datums at some places."""
        return RandomBatch([others.get(index, row) for index, row in enumerate(self.data)], self.logprobs)

    def mapped(self, key: str, change: Callable[[Array, Array], Array]) -> RandomBatch:
        """The batch with ``change(values, masked)`` in place of every datum's values of ``key``; ``""``: the logprobs."""
        if not key:
            logprobs = [change(row, mask) for row, mask in zip(self.logprobs, self.masked, strict=True)]
            return RandomBatch(self.data, logprobs)
        pairs = zip(self.data, self.masked, strict=True)
        data = [row.with_inputs(**{key: change(row.loss_fn_inputs[key].array, mask)}) for row, mask in pairs]
        return RandomBatch(data, self.logprobs)


def datum(length: int, **inputs: Any) -> Datum:
    """A datum of ``length`` tokens with targets and the given inputs."""
    return Datum(ModelInput.from_ints(range(length)), {"target_tokens": np.arange(length), **inputs})


def without(row: Datum, *keys: str) -> Datum:
    """The datum without some of its inputs."""
    return Datum(row.model_input, {key: value for key, value in row.loss_fn_inputs.items() if key not in keys})


def unchecked(row: Datum, **inputs: Mapping[str, Any] | Any) -> Datum:
    """The datum with other inputs, whose lengths a :class:`Datum` would refuse."""
    made = object.__new__(Datum)
    object.__setattr__(made, "model_input", row.model_input)
    object.__setattr__(made, "loss_fn_inputs", {**row.loss_fn_inputs, **inputs})
    return made


def random_batch(
    rng: np.random.Generator, keys: Collection[str] = USUAL_KEYS, sequences: int = 4, binary_weights: bool = False
) -> RandomBatch:
    """``sequences`` datums of 4 to 7 tokens: a prompt of one or two tokens of weight 0, then a response.

    The response's first token has a weight; some of its other tokens have weight 0. Advantages are one number per sequence; the
    logprobs of other policies are near the current ones; keys that mean nothing to cookbook hold normal numbers.
    """
    rows = [_random_row(rng, keys, binary_weights) for _ in range(sequences)]
    return RandomBatch([row for row, _ in rows], [logprobs for _, logprobs in rows])


def _random_row(rng: np.random.Generator, keys: Collection[str], binary_weights: bool) -> tuple[Datum, Array]:
    length, prompt = int(rng.integers(4, 8)), int(rng.integers(1, 3))
    logprobs = -rng.exponential(1.0, length) - 0.01
    weights = np.ones(length) if binary_weights else rng.uniform(0.2, 1.5, length)
    weights[rng.uniform(size=length) < 0.2] = 0.0
    weights[:prompt], weights[prompt] = 0.0, 1.0
    inputs = {"weights": weights}
    for key in sorted({_CANONICAL.get(key, key) for key in keys} - {"weights", "target_tokens"}):
        inputs[key] = _values(key, rng, logprobs)
    inputs |= {key: inputs[_CANONICAL[key]] for key in keys if key in _CANONICAL}
    inputs = {key: values for key, values in inputs.items() if key in keys or key == "weights"}
    return datum(length, **inputs), logprobs


def _values(key: str, rng: np.random.Generator, logprobs: Array) -> Array:
    length = len(logprobs)
    if key.endswith("logprobs"):
        return np.minimum(logprobs + rng.normal(0, 0.3, length), -1e-3)
    if key == "labels":
        # Without a draw, so that the other inputs do not depend on this one.
        return np.full(length, (1.0, -1.0, 0.0)[int(-1e6 * logprobs[0]) % 3])
    if key == "advantages":
        return np.full(length, rng.normal())
    if key.endswith("low_threshold"):
        return rng.uniform(0.5, 0.9, length)
    if key.endswith("high_threshold"):
        return rng.uniform(1.1, 1.5, length)
    if key.endswith("mask"):
        return rng.integers(0, 2, length).astype(np.float64)
    return rng.normal(size=length)


def repeated(batch: RandomBatch) -> RandomBatch:
    """The batch twice."""
    return RandomBatch([*batch.data, *batch.data], [*batch.logprobs, *batch.logprobs])


def stretched(batch: RandomBatch) -> RandomBatch:
    """Every sequence with its tokens twice: the same terms, in sequences of twice the length."""
    return RandomBatch(
        [_along(row, lambda values: np.concatenate([values, values])) for row in batch.data],
        [np.concatenate([row, row]) for row in batch.logprobs],
    )


def padded(batch: RandomBatch, rng: np.random.Generator) -> RandomBatch:
    """One more token of weight 0 in front of every sequence and two after it."""

    def wider(values: Array) -> Array:
        around = values[rng.integers(0, len(values), 3)]
        return np.concatenate([around[:1], values, around[1:]])

    data = []
    for row in batch.data:
        wide = _along(row, wider)
        weights = np.concatenate([[0.0], row.loss_fn_inputs["weights"].array, [0.0, 0.0]])
        data.append(wide.with_inputs(weights=weights))
    return RandomBatch(data, [wider(row) for row in batch.logprobs])


def _along(row: Datum, change: Callable[[Array], Array]) -> Datum:
    """The datum with the same change to every per-token array."""
    arrays = {key: value.array for key, value in row.loss_fn_inputs.items()}
    inputs = {key: change(values) if values.ndim else values for key, values in arrays.items()}
    return Datum(ModelInput.from_ints(change(np.asarray(row.model_input.tokens))), inputs)


class _Inputs(UserDict[str, TensorData]):
    """Mapping that notes the keys whose values are read. A test with ``in`` is not a read."""

    def __init__(self, values: Mapping[str, TensorData], read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> TensorData:
        value = super().__getitem__(key)
        self._read.add(key)
        return value


class RecordedDatum(Datum):
    """A copy of ``datum`` that adds every key that is read, also from copies by :meth:`with_inputs`, to ``read``."""

    def __init__(self, datum: Datum, read: set[str]) -> None:
        object.__setattr__(self, "model_input", datum.model_input)
        object.__setattr__(self, "loss_fn_inputs", _Inputs(datum.loss_fn_inputs, read))
        object.__setattr__(self, "read", read)

    def with_inputs(self, **inputs: Any) -> RecordedDatum:
        values = self.loss_fn_inputs.data  # type: ignore[attr-defined]
        return RecordedDatum(Datum(self.model_input, {**values, **inputs}), self.read)  # type: ignore[attr-defined]
