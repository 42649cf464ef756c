"""Base of all losses: declarations, a flat view of the batch, and the built-in losses by name.

A loss is a function of log-probabilities, ``loss(data, logprobs) -> (scalar, metrics)``. It sees no logits, no model,
no device and no backend, so one loss serves in process and over HTTP.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cookbook.config.typed import construct
from cookbook.errors import ConfigError, DataError
from cookbook.losses.normalization import Normalization, Reduction, as_normalization, check
from cookbook.types import Array, Datum
from cookbook.utils.suggest import did_you_mean

Metrics = dict[str, float]
Shape = tuple[int, ...]

LOGPROBS = frozenset({"sampling_logprobs", "logprobs", "old_logprobs", "reference_logprobs"})
"""Inputs that hold natural logarithms of probabilities, none of which is above 0."""

# A sampler in single precision may round a logprob of 0 up to this value.
LARGEST_LOGPROB = 1e-6

ALIASES = {"sampling_logprobs": "logprobs"}
"""Other names a field may arrive under: ``logprobs`` is what Tinker calls the logprobs a token was sampled with."""


class Scope(StrEnum):
    """How far one term of the loss reaches. Up to ``sequence``, the engine may compute a batch datum by datum."""

    # A sum of terms of one token each.
    token = "token"
    # A sum of terms of one datum each.
    sequence = "sequence"
    # A sum of terms of two adjacent datums each.
    pair = "pair"
    # Anything: the engine computes all logprobs before it calls the loss.
    batch = "batch"


class Loss:
    """Base of the built-in losses, and of users' losses that need the checks; implementations are frozen dataclasses.

    Declarations, as class attributes, or as properties if an option decides:
        name: how configs and ``forward_backward(data, name)`` call it.
        reduction: what one step returns, after :meth:`prepare`. Proven by a test, for forks too.
        scope: how far one term reaches.
        needs: the ``loss_fn_inputs`` it reads and cannot do without.
        reads: the optional ``loss_fn_inputs`` it reads.
        several_targets: whether ``target_tokens`` may be ``(T, K)``, K alternatives per position.
        prepares: whether only :meth:`prepare` makes the reduction true: ``__call__`` alone returns a weighted sum.
        may_be_flat: whether a correct loss may have no gradient for a whole batch: all advantages are 0, all ratios clipped.
        without_reference: the option that makes ``reference_logprobs`` unnecessary, for the error if they are missing.
        ignores_masked: whether tokens of weight 0 have no influence, so that the engine may skip their logprobs.
        stop_gradient: what is held constant on purpose, in words; ``cookbook check loss`` reports any other constant term.
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
        """Check the normalization; subclasses call this first, then check the ranges of their options.

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
    def required(self) -> frozenset[str]:
        """The inputs that each datum must carry: :attr:`needs`, and ``reference_logprobs`` for a loss with a reference."""
        return self.needs | {"reference_logprobs"} if self.needs_reference else self.needs

    @property
    def needs_entropy(self) -> bool:
        """Whether it is called with a third argument: per datum the entropies of the policy, ``(T,)`` nats, with gradient."""
        return False

    @property
    def stop_gradient(self) -> str | None:
        """Term that :meth:`__call__` holds constant although it depends on the logprobs; None: the gradient is the slope."""
        return None

    def prepare(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """Return the datums of one whole optimizer step, with the inputs that depend on all of them."""
        return data

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        """The loss and its metrics. If :attr:`needs_entropy` is true, ``entropies`` is a third argument."""
        raise NotImplementedError

    def call_options(self) -> dict[str, object]:
        """The ``loss_fn_config`` of this loss: its fields that the loss itself reads.

        ``optim_step`` takes the normalization, and a run leaves out truncated completions before the loss sees them.
        """
        names = [option.name for option in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name not in ("normalization", "mask_truncated")}

    def check_data(self, data: Sequence[Datum]) -> None:
        """Check that every input of the loss is present, finite, and shaped like the targets. Needs no model output.

        Raises:
            DataError: naming the datum and the field.
        """
        for index, datum in enumerate(data):
            for key in sorted(self.required):
                if not {key, ALIASES.get(key, key)} & datum.loss_fn_inputs.keys():
                    remedy = self.without_reference if key == "reference_logprobs" else ""
                    raise DataError(_missing(index, key, datum, remedy))
        shapes = [tuple(datum.loss_fn_inputs["target_tokens"].shape) for datum in data]
        _check_targets(shapes, self.several_targets)
        for key in sorted((self.required | self.reads) - {"target_tokens"}):
            if (carried := _carried(data, key)) is not None:
                _rows(data, carried, shapes, "target_tokens")


class LossBatch:
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
            DataError: only some datums have the key.
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
            DataError: the caller passed no entropies; a loss that reads them declares ``needs_entropy``.
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
    """``values * weights``, and an exact 0 with no gradient if the weight is 0, for any value.

    If ``values`` are the result of a function whose slope may be infinite, mask the function's input as well
    (:func:`kept`): the backward pass would compute 0 times infinity, which is NaN.
    """
    return kept(values, weights) * weights


def kept(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``values`` if the weight is not 0, otherwise an exact 0."""
    return torch.where(weights != 0, values, 0.0)


def weighted_mean(values: Tensor, weights: Tensor) -> float:
    """For metrics: the mean over tokens of weight != 0; 0.0 without such tokens."""
    chosen = values.detach()[weights != 0].to(weights.dtype)
    return float(chosen.mean()) if chosen.numel() else 0.0


def weights_to_mean(data: Sequence[Datum]) -> list[Datum]:
    """Return the datums of one step with weights that sum to 1: a weighted sum of token terms is then their weighted mean.

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
            "take a mean over; give the tokens to learn a weight above 0"
        )
    return [datum.with_inputs(weights=row / total) for datum, row in zip(data, weights, strict=True)]


def positive(where: str, **values: float | None) -> None:
    """Raise ConfigError unless every value is finite and > 0, or None."""
    within(where, "> 0", lambda value: value > 0, **values)


def non_negative(where: str, **values: float | None) -> None:
    """Raise ConfigError unless every value is finite and >= 0, or None."""
    within(where, ">= 0", lambda value: value >= 0, **values)


def within(where: str, what: str, fits: Callable[[float], bool], **values: float | None) -> None:
    """Raise ConfigError unless every value is None, or is finite and satisfies ``fits``; ``what`` describes the condition."""
    for key, value in values.items():
        if value is not None and not (abs(value) < float("inf") and fits(value)):
            raise ConfigError(f"{where}.{key} must be {what}, got {value}")


def choice(where: str, key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{where}.{key} must be one of {', '.join(choices)}, got {value!r}")


def named(datums: Sequence[int]) -> str:
    """Datums for a message: ``datum 3``, or ``datums 0, 1, ...``."""
    numbers = ", ".join(map(str, datums[:8])) + (", ..." if len(datums) > 8 else "")
    return f"datums {numbers}" if len(datums) > 1 else f"datum {numbers}"


def _missing(index: int, key: str, datum: Datum, remedy: str = "") -> str:
    having = ", ".join(sorted(datum.loss_fn_inputs)) or "nothing"
    instead = f", or set {remedy}" if remedy else ""
    return f"datum {index}: missing required field {key!r}, its loss_fn_inputs hold {having}; add one value per token{instead}"


def _carried(data: Sequence[Datum], key: str) -> str | None:
    """Return the name under which all datums have ``key``; None if all datums lack ``key``.

    Raises:
        DataError: only some datums have the key.
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
    """Raise DataError: a value at a token that is not masked is above 0."""
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


LOSSES = {
    "cross_entropy": "cookbook.losses.cross_entropy:CrossEntropy",
    "dft": "cookbook.losses.dft:DFT",
    "grpo": "cookbook.losses.grpo:GRPO",
    "importance_sampling": "cookbook.losses.importance_sampling:ImportanceSampling",
    "ppo": "cookbook.losses.ppo:PPO",
    "gspo": "cookbook.losses.gspo:GSPO",
    "cispo": "cookbook.losses.cispo:CISPO",
    "dro": "cookbook.losses.dro:DRO",
    "sapo": "cookbook.losses.sapo:SAPO",
    "dppo": "cookbook.losses.dppo:DPPO",
    "dpo": "cookbook.losses.dpo:DPO",
    "orpo": "cookbook.losses.orpo:ORPO",
    "kto": "cookbook.losses.kto:KTO",
}
"""Every built-in loss: name -> ``module:Class``."""


# Losses that :func:`get_loss` has made, by name and options; at most this many, as clients of a server choose the options.
MADE_LOSSES = 64
_made: dict[tuple[str, str], Loss] = {}


def loss_class(name: str) -> type[Loss]:
    """Return the class of the built-in loss ``name``.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in LOSSES:
        raise ConfigError(f"loss: unknown name {name!r}.{did_you_mean(name, LOSSES)} (there are {', '.join(LOSSES)})")
    module, _, attribute = LOSSES[name].partition(":")
    cls: type[Loss] = getattr(importlib.import_module(module), attribute)
    return cls


def get_loss(name: str, config: Mapping[str, object] | None = None) -> Loss:
    """Return the loss ``name`` with the options of ``config``; the others keep their defaults.

    Raises:
        ConfigError: an unknown name or option, or a value of the wrong type or out of range.
    """
    # Losses are immutable, and every step of a run asks for the same one.
    key = name, repr(sorted((config or {}).items()))
    if key not in _made:
        cls = loss_class(name)
        loss: Loss = construct(cls, config, "loss_fn_config") if config else cls()
        if len(_made) >= MADE_LOSSES:
            _made.clear()
        _made[key] = loss
    return _made[key]


def loss_of_call(name: str, config: Mapping[str, object] | None) -> Loss:
    """Return the loss of a call ``forward_backward(data, name, config)``.

    Raises:
        ConfigError: the conditions of :func:`get_loss`, or a normalization, which a single call cannot apply.
    """
    normalization = (config or {}).get("normalization")
    if normalization is not None:
        raise ConfigError(
            f"loss_fn_config.normalization: forward_backward divides nothing, got {normalization!r}; pass it to "
            "optim_step as grad_accumulation_normalization"
        )
    return get_loss(name, config)
