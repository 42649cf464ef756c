"""What every loss is made of: a passport, and a flat view of the batch.

A loss is a function of log-probabilities, ``loss(data, logprobs) -> (scalar, metrics)``. It sees no logits, no model,
no device and no backend, so one loss serves in process and over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cookbook.errors import ConfigError, DataError
from cookbook.normalization import Normalization, Reduction, as_normalization, check
from cookbook.types import Array, Datum

Metrics = dict[str, float]
Shape = tuple[int, ...]

LOGPROBS = frozenset({"sampling_logprobs", "logprobs", "old_logprobs", "reference_logprobs"})
"""Fields that hold natural logarithms of probabilities, so nothing above 0."""

LARGEST_LOGPROB = 1e-6  # rounding of a sampler in single precision

ALIASES = {"sampling_logprobs": "logprobs"}
"""Other names a field may arrive under: ``logprobs`` is what Tinker calls the logprobs a token was sampled with."""


class Scope(StrEnum):
    """How far one term of the loss reaches. Up to ``sequence``, the engine may compute a batch datum by datum."""

    token = "token"  # a sum of terms of one token each
    sequence = "sequence"  # a sum of terms of one datum each
    pair = "pair"  # made of terms of two neighbouring datums each
    batch = "batch"  # anything: the engine computes every logprob before it asks for the loss


class Loss:
    """Base of the built-in losses, and of a user's own that wants the checks; implementations are frozen dataclasses.

    The passport, class attributes except where an option decides (then a property):
        name: how configs and ``forward_backward(data, name)`` call it.
        reduction: what one step returns, after :meth:`prepare`. Proven by a test, for forks too.
        scope: how far one term reaches.
        needs: the ``loss_fn_inputs`` it reads and cannot do without.
        reads: those it reads when they are there.
        several_targets: whether ``target_tokens`` may be ``(T, K)``, K alternatives per position.
        prepares: whether :meth:`prepare` is what makes the reduction true: ``__call__`` alone is then a weighted sum.
        may_be_flat: whether a zero gradient for a whole batch is no mistake: all advantages may be 0, all ratios clipped.
        without_reference: how to do without ``reference_logprobs``, for the error that misses them.
        ignores_masked: whether tokens of weight 0 influence nothing, so that nobody need compute their logprobs.
        stop_gradient: what is held constant on purpose, in words; ``cookbook check loss`` takes any other for a mistake.
    """

    name: ClassVar[str]
    reduction: ClassVar[Reduction]
    needs: ClassVar[frozenset[str]] = frozenset({"target_tokens"})
    reads: ClassVar[frozenset[str]] = frozenset({"weights"})
    several_targets: ClassVar[bool] = False
    prepares: ClassVar[bool] = False
    ignores_masked: ClassVar[bool] = False
    may_be_flat: ClassVar[bool] = True
    without_reference: ClassVar[str] = ""
    normalization: Normalization | None = None

    def __post_init__(self) -> None:
        """Checks the normalization; children check the ranges of their options after calling this.

        Raises:
            ConfigError: no name or reduction, or a normalization that contradicts the reduction.
        """
        for fact in ("name", "reduction"):
            if not hasattr(self, fact):
                raise ConfigError(f"loss: {type(self).__name__} declares no {fact}; add it as a class attribute")
        normalization = as_normalization(self.normalization)
        object.__setattr__(self, "normalization", normalization)
        check(f"loss: {type(self).__name__}", self.reduction, normalization)

    @property
    def scope(self) -> Scope:
        return Scope.batch

    @property
    def needs_reference(self) -> bool:
        """Whether each datum must carry ``reference_logprobs``."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Whether it is called with a third argument: per datum the entropies of the policy, ``(T,)`` nats, with gradient."""
        return False

    @property
    def stop_gradient(self) -> str | None:
        """What :meth:`__call__` holds constant although it depends on the logprobs; None: the gradient is the slope."""
        return None

    def prepare(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """The datums of one whole optimizer step, made ready. The default changes nothing."""
        return data

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        """The loss and its metrics. One that :attr:`needs_entropy` takes ``entropies`` as a third argument."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The fields, by name."""
        return {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]

    def call_options(self) -> dict[str, Any]:
        """The ``loss_fn_config`` of this loss: its options without the normalization, which ``optim_step`` takes."""
        return {name: value for name, value in self.options().items() if name != "normalization"}

    def check_data(self, data: Sequence[Datum]) -> None:
        """Everything the loss reads is there, finite, and shaped as the targets: askable before any model has run.

        Raises:
            DataError: naming the datum and the field.
        """
        required = self.needs | ({"reference_logprobs"} if self.needs_reference else frozenset())
        for index, datum in enumerate(data):
            for key in sorted(required):
                if not {key, ALIASES.get(key, key)} & datum.loss_fn_inputs.keys():
                    remedy = self.without_reference if key == "reference_logprobs" else ""
                    raise DataError(_missing(index, key, datum, remedy))
        shapes = [tuple(datum.loss_fn_inputs["target_tokens"].shape) for datum in data]
        _check_targets(shapes, self.several_targets)
        for key in sorted((required | self.reads) - {"target_tokens"}):
            if (carried := _carried(data, key)) is not None:
                _rows(data, carried, shapes, "target_tokens")


class Batch:
    """A batch laid flat: every per-token array as one tensor of shape ``(N,)``, ``N`` the targets of all ``B`` datums.

    ``row``, ``(N,)``, tells which datum each belongs to. Lengths are checked whenever a key is read. Nothing is padded,
    and nothing is cut to the shorter.

    Raises:
        DataError: no datums, another number of datums than of logprobs, or several targets per position where
            ``several_targets`` does not allow them.
    """

    def __init__(
        self,
        data: Sequence[Datum],
        logprobs: Sequence[Tensor],
        entropies: Sequence[Tensor] | None = None,
        *,
        several_targets: bool = False,
    ) -> None:
        if len(data) != len(logprobs):
            raise DataError(
                f"datum {min(len(data), len(logprobs))}: a loss got {len(data)} datums and logprobs of {len(logprobs)}; "
                "pass one tensor per datum"
            )
        if not data:
            raise DataError("a loss got no datums; pass at least one")
        self.data = data
        self.shapes = [tuple(row.shape) for row in logprobs]
        _check_targets(self.shapes, several_targets)
        self.logprobs = torch.cat([row.reshape(-1) for row in logprobs])
        self._entropies = entropies
        device = self.logprobs.device
        sizes = torch.tensor([row.numel() for row in logprobs], device=device)
        self.row = torch.repeat_interleave(torch.arange(len(data), device=device), sizes)

    def __len__(self) -> int:
        return len(self.data)

    def has(self, key: str) -> bool:
        """Whether the datums carry ``key``, perhaps under its alias: all of them, or none.

        Raises:
            DataError: some do and some do not.
        """
        return _carried(self.data, key) is not None

    def read(self, key: str, default: float | None = None) -> Tensor:
        """The values of ``key``, or of its alias, as ``(N,)`` in the logprobs' dtype and on their device.

        Raises:
            DataError: the key is missing and has no default, a length is not the logprobs', or a value is not finite.
        """
        carried = _carried(self.data, key)
        if carried is None:
            if default is None:
                raise DataError(_missing(0, key, self.data[0]))
            return torch.full_like(self.logprobs, default, requires_grad=False)
        return torch.as_tensor(_rows(self.data, carried, self.shapes, "logprobs")).to(self.logprobs)

    @property
    def entropies(self) -> Tensor:
        """The policy's entropy at every token, ``(N,)`` nats.

        Raises:
            DataError: the caller gave none; a loss that reads them says so with ``needs_entropy``.
        """
        if self._entropies is None:
            raise DataError(
                f"{named(range(len(self)))}: a loss that needs entropies got none; call it as loss(data, logprobs, entropies)"
            )
        return torch.cat([row.reshape(-1) for row in self._entropies]).to(self.logprobs)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """``(N,)`` -> ``(B,)``, differentiable."""
        return values.new_zeros(len(self.data)).index_add(0, self.row, values)

    def mean_by_sequence(self, values: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean over each sequence's tokens, ``(B,)``; 0 where the weights sum to 0."""
        total = self.sum_by_sequence(weights)
        empty = total == 0
        mean = self.sum_by_sequence(masked(values, weights)) / torch.where(empty, 1.0, total)
        return torch.where(empty, 0.0, mean)

    def spread(self, values: Tensor) -> Tensor:
        """``(B,)`` -> ``(N,)``: every token gets its sequence's value."""
        return values[self.row]


def masked(values: Tensor, weights: Tensor) -> Tensor:
    """``values * weights``, and an exact 0 with no gradient where the weight is 0, whatever stands there.

    Where ``values`` come out of a function whose slope may be infinite, mask what goes in as well (:func:`kept`): 0
    times infinity is not a number, and the backward pass computes it.
    """
    return kept(values, weights) * weights


def kept(values: Tensor, weights: Tensor) -> Tensor:
    """``values`` where the weight is not 0, an exact 0 elsewhere."""
    return torch.where(weights != 0, values, 0.0)


def weighted_mean(values: Tensor, weights: Tensor) -> float:
    """For metrics: the mean over tokens of weight != 0; 0.0 when there are none."""
    chosen = values.detach()[weights != 0].to(weights.dtype)
    return float(chosen.mean()) if chosen.numel() else 0.0


def weights_to_mean(data: Sequence[Datum]) -> list[Datum]:
    """The datums of one step with weights that sum to 1, so that a weighted sum of token terms is their weighted mean.

    Weights are float64: their sum is 1 to 1e-12 however many tokens there are. Without ``weights`` every target weighs 1.

    Raises:
        DataError: a datum without ``target_tokens``, ``weights`` in some datums only, or a sum that is not above 0.
    """
    for index, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise DataError(_missing(index, "target_tokens", datum))
    if _carried(data, "weights"):
        weights = [datum.loss_fn_inputs["weights"].array.astype(np.float64) for datum in data]
    else:
        weights = [np.ones(datum.loss_fn_inputs["target_tokens"].shape) for datum in data]
    total = float(sum(row.sum() for row in weights))
    if not 0 < total < float("inf"):
        raise DataError(
            f"{named(range(len(data)))}: the weights of the step's {len(data)} datums sum to {total:g}, so there is nothing to "
            "take a mean over; give the tokens to be learnt a weight above 0"
        )
    return [datum.with_inputs(weights=row / total) for datum, row in zip(data, weights, strict=True)]


def positive(where: str, **values: float | None) -> None:
    """Raises ConfigError unless every value is finite and > 0, or None."""
    within(where, "> 0", lambda value: value > 0, **values)


def non_negative(where: str, **values: float | None) -> None:
    """Raises ConfigError unless every value is finite and >= 0, or None."""
    within(where, ">= 0", lambda value: value >= 0, **values)


def within(where: str, what: str, fits: Callable[[float], bool], **values: float | None) -> None:
    """Raises ConfigError unless every value is finite and ``fits``, which ``what`` puts in words; None is no value."""
    for key, value in values.items():
        if value is not None and not (abs(value) < float("inf") and fits(value)):
            raise ConfigError(f"{where}.{key} must be {what}, got {value}")


def choice(where: str, key: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{where}.{key} must be one of {', '.join(choices)}, got {value!r}")


def named(datums: Sequence[int]) -> str:
    """Datums for a message: ``datum 3``, or ``datums 0, 1, ...``."""
    shown = ", ".join(map(str, datums[:8])) + (", ..." if len(datums) > 8 else "")
    return f"datums {shown}" if len(datums) > 1 else f"datum {shown}"


def _missing(index: int, key: str, datum: Datum, remedy: str = "") -> str:
    having = ", ".join(sorted(datum.loss_fn_inputs)) or "nothing"
    instead = f", or set {remedy}" if remedy else ""
    return f"datum {index}: missing required field {key!r}, its loss_fn_inputs hold {having}; add one value per token{instead}"


def _carried(data: Sequence[Datum], key: str) -> str | None:
    """The name under which all datums carry ``key``; None when none does.

    Raises:
        DataError: some do and some do not.
    """
    for name in dict.fromkeys((key, ALIASES.get(key, key))):
        having = [name in datum.loss_fn_inputs for datum in data]
        if all(having):
            return name
        if any(having):
            without, having_it = having.index(False), having.index(True)
            raise DataError(f"datum {without}: missing field {name!r}, which datum {having_it} has; give it to all or to none")
    return None


def _rows(data: Sequence[Datum], key: str, shapes: Sequence[Shape], beside: str) -> Array:
    """The values of ``key`` in one flat array, after checking that each datum's are finite and shaped as ``beside``."""
    rows = [datum.loss_fn_inputs[key].array for datum in data]
    for index, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
        if row.shape != shape:
            raise DataError(
                f"datum {index}: {key} has {_size(row.shape)} and {beside} {_size(shape)}; build both from the same tokens"
            )
    flat = np.concatenate([row.reshape(-1) for row in rows])
    if not np.isfinite(flat).all():
        index = next(index for index, row in enumerate(rows) if not np.isfinite(row).all())
        place = int(np.flatnonzero(~np.isfinite(rows[index].reshape(-1)))[0])
        raise DataError(
            f"datum {index}: {key} holds {rows[index].reshape(-1)[place]} at position {place}; "
            "every value must be finite, also where the weight is 0"
        )
    if key in LOGPROBS and (flat > LARGEST_LOGPROB).any():
        _check_logprobs(data, key)
    return flat


def _check_logprobs(data: Sequence[Datum], key: str) -> None:
    """Raises DataError: a value at a token that is not masked is above 0."""
    for index, datum in enumerate(data):
        row, weights = datum.loss_fn_inputs[key].array, datum.loss_fn_inputs.get("weights")
        wrong = row > LARGEST_LOGPROB
        if weights is not None and weights.array.shape == row.shape:
            wrong &= weights.array != 0
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"datum {index}: {key} holds {row.reshape(-1)[place]:g} at position {place}, and the logarithm of a "
                "probability is at most 0; pass natural logarithms of probabilities"
            )


def _check_targets(shapes: Sequence[Shape], several_targets: bool) -> None:
    for index, shape in enumerate(shapes):
        if len(shape) != 1 and not (several_targets and len(shape) == 2):
            raise DataError(
                f"datum {index}: has logprobs of {_size(shape)}; this loss reads one target per position, shape (T,)"
                + (" or several, (T, K)" if several_targets else "")
            )


def _size(shape: Shape) -> str:
    if len(shape) == 1:
        return f"{shape[0]} values"
    return f"shape {shape}" if shape else "one value for the whole sequence"
