"""Training with any loss on a server that supports only cross-entropy with weights.

Let ``L`` be a loss of the logprobs, and ``g = dL/dlogprob`` its gradient. By the chain rule, the parameter gradient of ``L`` is
equal to that of the linear loss ``sum(g * logprob)`` with constant ``g``, which is cross-entropy with weights ``-g``. So:

1. The server computes a forward pass.
2. The client computes ``L`` and ``g`` from the logprobs.
3. The client sends the datums with weights ``-g``, and the server computes the backward pass.

Dividing the weights by a number divides the gradient by the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cookbook.engine.loss_gradient import LossFunction, ParameterGradient, loss_gradient, loss_name
from cookbook.errors import ConfigError
from cookbook.losses.base import Loss
from cookbook.losses.normalization import GradientCounts, Normalization, Reduction, check, check_accumulation, warn_undeclared
from cookbook.types import Array, Datum, ForwardBackwardOutput, TensorData

LINEAR = "cross_entropy"
# Loss inputs that the server reads. In a forward pass, the weights select the tokens that metrics count.
KEYS = ("target_tokens", "weights", "temperature")


@dataclass(frozen=True)
class LinearizedLoss:
    """A loss, linearized at given logprobs.

    Attributes:
        data: datums of the linear loss.
        output: output of the loss itself.
        own: gradients of the loss's own parameters.
    """

    data: list[Datum]
    output: ForwardBackwardOutput
    own: list[ParameterGradient]
    num_loss_tokens: int
    num_sequences: int

    def divided(self, divisor: float) -> list[Datum]:
        """Return the datums with weights that give the gradient divided by ``divisor``."""
        if divisor == 1.0:
            return self.data
        return [datum.with_inputs(weights=datum.loss_fn_inputs["weights"].array / divisor) for datum in self.data]


def linearize(loss: LossFunction, data: Sequence[Datum], forward: ForwardBackwardOutput) -> LinearizedLoss:
    """Linearize ``loss`` at the logprobs of a forward pass.

    Raises:
        BackendError: the loss is not a finite scalar, or does not depend on the logprobs.
        ConfigError: the loss needs more than logprobs.
    """
    check_loss(loss)
    logprobs = {index: row["logprobs"].to_torch() for index, row in enumerate(forward.loss_fn_outputs)}
    gradient = loss_gradient(loss, data, logprobs)
    linear = [_linear(datum, -gradient.logprobs[index].numpy()) for index, datum in enumerate(data)]
    total = float(gradient.value)
    tokens = {key: value for key, value in forward.metrics.items() if key.startswith("tokens/")}
    output = ForwardBackwardOutput(forward.loss_fn_outputs, {"loss": total, "loss:sum": total, **gradient.metrics, **tokens})
    return LinearizedLoss(linear, output, gradient.parameter_gradients, *gradient.num_active())


def check_loss(loss: LossFunction) -> None:
    """Check that the loss depends on logprobs only. Raises ConfigError: it needs more."""
    if isinstance(loss, Loss) and loss.needs_entropy:
        raise ConfigError(
            f"loss: {type(loss).__name__} needs the policy's entropy, which this server does not return; remove the entropy "
            "term from the loss, or use a server of this version of cookbook, or backend=local"
        )


def _linear(datum: Datum, weights: Array) -> Datum:
    """Return the datum of the linear loss: cross-entropy with ``weights``."""
    inputs = {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "temperature") if key in datum.loss_fn_inputs}
    return Datum(datum.model_input, {**inputs, "weights": TensorData(weights)})


@dataclass
class PendingGradient:
    """The client's record of the gradient of the next optimizer step.

    Attributes:
        deferred: losses that are sent only with the optimizer step, because the server cannot divide a gradient.
        counts: loss tokens and sequences of the deferred losses.
        sent: whether the server has accumulated a gradient.
        reductions: reductions of all losses; None for a loss that does not declare it.
        undeclared: names of the losses that do not declare their reduction.
    """

    deferred: list[LinearizedLoss] = field(default_factory=list)
    counts: GradientCounts = field(default_factory=GradientCounts)
    sent: bool = False
    reductions: list[Reduction | None] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)

    def check_addition(self, loss: LossFunction) -> None:
        """Check that ``loss`` may be added. Raises ConfigError: it is a mean, and a sum of means is not a mean."""
        check_accumulation(type(loss).__name__, _reduction(loss), self.reductions)

    def add(self, loss: LossFunction) -> Callable[[], None]:
        """Record a call with ``loss``. Returns a function that removes the record, for a call that fails on the server."""
        reduction, names = _reduction(loss), [] if isinstance(loss, Loss) else [loss_name(loss)]
        self.reductions.append(reduction)
        self.undeclared += names

        def remove() -> None:
            self.reductions.remove(reduction)
            for name in names:
                self.undeclared.remove(name)

        return remove

    def check(self, normalization: Normalization | None) -> None:
        """Warn if a loss that does not declare its reduction may be divided twice.

        Raises:
            ConfigError: a loss that is a mean would be divided again.
        """
        for reduction in self.reductions:
            if reduction is not None:
                check("optim_step: the accumulated loss", reduction, normalization)
        warn_undeclared(self.undeclared, normalization)


def _reduction(loss: LossFunction) -> Reduction | None:
    return loss.reduction if isinstance(loss, Loss) and not loss.prepares else None
