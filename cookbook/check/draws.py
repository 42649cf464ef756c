"""Random batches to examine a loss on, and changes to them whose effect is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cookbook.losses.base import ALIASES
from cookbook.types import Array, Datum, ModelInput

USUAL = frozenset({"weights", "advantages", "sampling_logprobs", "logprobs", "old_logprobs", "reference_logprobs"})
"""What the recipes' datums carry beside ``target_tokens``, under all names: what a function that declares nothing gets."""

_CANONICAL = {alias: key for key, alias in ALIASES.items()}


class Draw(NamedTuple):
    """A batch: datums, and per datum float64 logprobs of its targets, ``(T,)``."""

    data: Sequence[Datum]
    logprobs: Sequence[Array]

    @property
    def masked(self) -> list[Array]:
        """Per datum, which tokens have weight 0, ``(T,)``."""
        return [datum.loss_fn_inputs["weights"].array == 0 for datum in self.data]

    def part(self, indices: Sequence[int]) -> Draw:
        """Some of its datums, in that order."""
        return Draw([self.data[index] for index in indices], [self.logprobs[index] for index in indices])

    def mapped(self, key: str, change: Callable[[Array, Array], Array]) -> Draw:
        """With ``change(values, masked)`` instead of every datum's values of ``key``; ``""`` is the logprobs."""
        if not key:
            logprobs = [change(row, mask) for row, mask in zip(self.logprobs, self.masked, strict=True)]
            return Draw(self.data, logprobs)
        pairs = zip(self.data, self.masked, strict=True)
        data = [one.with_inputs(**{key: change(one.loss_fn_inputs[key].array, mask)}) for one, mask in pairs]
        return Draw(data, self.logprobs)


def datum(length: int, **inputs: Any) -> Datum:
    """A datum of ``length`` tokens with targets and whatever else is given."""
    return Datum(ModelInput.from_ints(range(length)), {"target_tokens": np.arange(length), **inputs})


def without(one: Datum, *keys: str) -> Datum:
    """The datum without some of its inputs."""
    return Datum(one.model_input, {key: value for key, value in one.loss_fn_inputs.items() if key not in keys})


def unchecked(one: Datum, **inputs: Mapping[str, Any] | Any) -> Datum:
    """The datum with other inputs, whose lengths a :class:`Datum` would refuse."""
    made = object.__new__(Datum)
    object.__setattr__(made, "model_input", one.model_input)
    object.__setattr__(made, "loss_fn_inputs", {**one.loss_fn_inputs, **inputs})
    return made


def random_draw(
    rng: np.random.Generator, keys: Collection[str] = USUAL, sequences: int = 4, binary_weights: bool = False
) -> Draw:
    """``sequences`` datums of 4 to 7 tokens: a prompt of one or two tokens of weight 0, then a response.

    Its first token has a weight, of the others some have none. Advantages are one number per sequence; the logprobs of
    other policies are near the current ones; keys that mean nothing to cookbook hold normal numbers.
    """
    rows = [_random_row(rng, keys, binary_weights) for _ in range(sequences)]
    return Draw([one for one, _ in rows], [logprobs for _, logprobs in rows])


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
    if key == "advantages":
        return np.full(length, rng.normal())
    if key.endswith("low_threshold"):
        return rng.uniform(0.5, 0.9, length)
    if key.endswith("high_threshold"):
        return rng.uniform(1.1, 1.5, length)
    if key.endswith("mask"):
        return rng.integers(0, 2, length).astype(np.float64)
    return rng.normal(size=length)


def repeated(draw: Draw) -> Draw:
    """The batch twice."""
    return Draw([*draw.data, *draw.data], [*draw.logprobs, *draw.logprobs])


def stretched(draw: Draw) -> Draw:
    """Every sequence with its tokens twice: the same terms, in sequences of twice the length."""
    return Draw(
        [_along(one, lambda values: np.concatenate([values, values])) for one in draw.data],
        [np.concatenate([row, row]) for row in draw.logprobs],
    )


def padded(draw: Draw, rng: np.random.Generator) -> Draw:
    """One more token of weight 0 in front of every sequence and two behind it."""

    def wider(values: Array) -> Array:
        around = values[rng.integers(0, len(values), 3)]
        return np.concatenate([around[:1], values, around[1:]])

    data = []
    for one in draw.data:
        wide = _along(one, wider)
        weights = np.concatenate([[0.0], one.loss_fn_inputs["weights"].array, [0.0, 0.0]])
        data.append(wide.with_inputs(weights=weights))
    return Draw(data, [wider(row) for row in draw.logprobs])


def _along(one: Datum, change: Callable[[Array], Array]) -> Datum:
    """The datum with every per-token array changed alike."""
    arrays = {key: value.array for key, value in one.loss_fn_inputs.items()}
    inputs = {key: change(values) if values.ndim else values for key, values in arrays.items()}
    return Datum(ModelInput.from_ints(change(np.asarray(one.model_input.tokens))), inputs)
