"""Any loss on a server that knows only a weighted sum of logprobs.

The gradient of a loss L is that of the linear ``sum g * logprob`` with g = dL/dlogprob held fixed, by the chain rule; and
that is cross-entropy with weights ``-g``. So one forward there gives the logprobs, the loss is computed here, and its slopes
travel back. Weights of a linear loss can also be divided before they travel, which is an exact division of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cookbook.engine.loss_gradient import LossFunction, OwnGradient, loss_gradient, loss_name
from cookbook.errors import ConfigError
from cookbook.losses.base import Loss
from cookbook.normalization import GradientCounts, Normalization, Reduction, check, check_accumulation, warn_undeclared
from cookbook.types import Datum, ForwardBackwardOutput, TensorData

LINEAR = "cross_entropy"
KEYS = (
    "target_tokens",
    "weights",
    "temperature",
)  # what the passes there read; of the forward, weights choose what metrics count


@dataclass(frozen=True)
class Slopes:
    """A loss's value and metrics, the datums whose linear loss has its gradient, and the gradient of its own parameters."""

    data: list[Datum]
    output: ForwardBackwardOutput
    own: list[OwnGradient]
    num_loss_tokens: int
    num_sequences: int

    def divided(self, divisor: float) -> list[Datum]:
        if divisor == 1.0:
            return self.data
        return [datum.with_inputs(weights=datum.loss_fn_inputs["weights"].array / divisor) for datum in self.data]


def slopes(loss: LossFunction, data: Sequence[Datum], found: ForwardBackwardOutput) -> Slopes:
    """From the logprobs of a forward pass.

    Raises:
        BackendError: the loss is not a finite scalar, or does not depend on the logprobs.
        ConfigError: it reads more than logprobs.
    """
    check_loss(loss)
    logprobs = {index: row["logprobs"].to_torch() for index, row in enumerate(found.loss_fn_outputs)}
    gradient = loss_gradient(loss, data, logprobs)
    linear = [_linear(datum, -gradient.logprobs[index].numpy()) for index, datum in enumerate(data)]
    total = float(gradient.value)
    tokens = {key: value for key, value in found.metrics.items() if key.startswith("tokens/")}
    output = ForwardBackwardOutput(found.loss_fn_outputs, {"loss": total, "loss:sum": total, **gradient.metrics, **tokens})
    return Slopes(linear, output, gradient.own, *gradient.active())


def check_loss(loss: LossFunction) -> None:
    """Raises ConfigError unless logprobs are all that the loss needs of the model."""
    if isinstance(loss, Loss) and loss.needs_entropy:
        raise ConfigError(
            f"loss: {type(loss).__name__} needs the policy's entropies, which this server does not know how to send; take the "
            "entropy out of the loss, or use cookbook serve of this version, or backend=local"
        )


def _linear(datum: Datum, weights: Any) -> Datum:
    kept = {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "temperature") if key in datum.loss_fn_inputs}
    return Datum(datum.model_input, {**kept, "weights": TensorData(weights)})


@dataclass
class Accumulated:
    """What the next optimizer step will step on, as far as this side knows.

    ``held`` are slopes that have not travelled yet, because the server cannot divide; ``travelled`` whether a gradient has
    accumulated there.
    """

    held: list[Slopes] = field(default_factory=list)
    travelled: bool = False
    reductions: list[Reduction | None] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)  # losses that do not say what they return

    def check_more(self, loss: LossFunction) -> None:
        """Raises ConfigError: means of several calls do not add up to a mean."""
        check_accumulation(type(loss).__name__, _reduction(loss), self.reductions)

    def add(self, loss: LossFunction) -> Callable[[], None]:
        """A call with ``loss``. Returns what takes the call back, for one that fails on the server."""
        reduction = _reduction(loss)
        self.reductions.append(reduction)
        if not isinstance(loss, Loss):
            self.undeclared.append(loss_name(loss))
        return lambda: self.reductions.remove(reduction)

    def counts(self) -> GradientCounts:
        found = GradientCounts()
        for one in self.held:
            found.add(one.num_loss_tokens, one.num_sequences)
        return found

    def check(self, normalization: Normalization | None) -> None:
        """Warns of losses that may be divided twice. Raises ConfigError: a mean would be divided again."""
        for reduction in self.reductions:
            if reduction is not None:
                check("optim_step: the accumulated loss", reduction, normalization)
        warn_undeclared(self.undeclared, normalization)


def _reduction(loss: LossFunction) -> Reduction | None:
    return loss.reduction if isinstance(loss, Loss) and not loss.prepares else None
