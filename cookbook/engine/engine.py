"""Gradients of any loss of log-probabilities, and the optimizer step.

There is one gradient path: logprobs -> loss -> g = dL/dlogprob -> backward of sum(g * logprob). By the chain rule this is
plain autograd; it lets the loss run apart from the model, on the whole batch, on the CPU, while the model computes
micro-batch by micro-batch. Graphs are kept between the two halves, so a custom loss costs what a built-in one costs; graphs
that exceed ``retain_bytes`` are computed a second time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.datum_check import check_datum
from cookbook.engine.gradients import Gradients
from cookbook.engine.loss_gradient import LossFunction, LossGradient, loss_gradient
from cookbook.engine.model import LanguageModel, deprecations_hidden
from cookbook.engine.optimizer import Optimizer
from cookbook.engine.passes import Found, Passes, Scores, Wanted
from cookbook.engine.planning import CPU_PASS_TOKENS, Layouts, MicroBatch, plan
from cookbook.engine.router_loss import router_coefficient
from cookbook.errors import BackendError, ConfigError, DataError
from cookbook.losses.base import Loss, Scope
from cookbook.normalization import GradientCounts, Normalization, Reduction, check
from cookbook.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput, TensorData

log = logging.getLogger("cookbook")


@dataclass(frozen=True)
class EngineOptions:
    """Memory and speed; no field changes a result beyond float rounding."""

    micro_batch_tokens: int = 8192
    packing: str = "auto"  # auto | padded | packed
    shared_prompts: bool = True
    retain_bytes: int = 4 << 30
    activation_checkpointing: bool = False
    activation_offloading: bool = False
    token_metrics: bool = True  # tokens/accuracy and tokens/entropy with every pass
    all_logprobs: bool = True  # False: not those of tokens of weight 0, where the loss ignores them; NaN stands for them
    seed: int = 0


@dataclass
class _Pass:
    """One micro-batch after its forward pass. ``found`` carries the graph, or is None when the graph was not kept."""

    batch: MicroBatch
    found: Found | None
    seed: int


@dataclass
class Retained:
    """A call's forward passes that wait for a gradient: good for one, and only of the weights they were computed with.

    ``num_bytes``: about what the graphs hold in memory, until this object is dropped or used.
    """

    data: Sequence[Datum]
    passes: list[_Pass]
    scores: Scores
    version: int
    num_bytes: int

    def is_of(self, data: Sequence[Datum]) -> bool:
        """Whether ``data`` has the same tokens, targets and temperatures; what a loss reads besides may differ."""
        return len(data) == len(self.data) and all(_same_pass(*pair) for pair in zip(data, self.data, strict=True))


class Engine:
    """A model in training. Synchronous; one caller at a time."""

    def __init__(self, model: LanguageModel, options: EngineOptions) -> None:
        self.model = model
        self.options = options
        self.passes = Passes(model, offload=options.activation_offloading)
        self.gradients = Gradients([parameter for _, parameter in model.trainable()])
        self.router_coefficient = router_coefficient(model.network, model.config.router_aux_loss_coef)
        self.step = 0  # finished optimizer steps
        self.version = 0  # changes whenever the weights do
        self.counts = GradientCounts()
        self.accumulated: list[Reduction | None] = []  # what each call since the last step returned
        self.seeds = 0  # drawn since the last step
        self.layouts = self._layouts()
        self._told: set[str] = set()  # layouts that the log has explained
        if options.activation_checkpointing:
            with deprecations_hidden():
                model.network.gradient_checkpointing_enable({"use_reentrant": False})

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """Made when first used: a frozen model needs none."""
        return Optimizer(self.model, self.gradients)

    # ---- the calls -----------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss: LossFunction | None = None, *, adapter: bool = True
    ) -> ForwardBackwardOutput:
        """Logprobs of every target, and the loss's value and metrics when one is given. Touches no gradient.

        ``adapter=False`` computes with the base model under a LoRA adapter.
        """
        scores = Scores()
        batches = self._plan(data)
        _check_data(data, loss)
        wanted = self._wanted(loss, training=False)
        with torch.no_grad(), self._adapter(adapter):
            for batch in batches:
                self.passes.run(data, batch, scores, wanted, training=False, seed=0)
            value, metrics = loss(data, *_columns(scores, wanted)) if loss else (None, {})
        return self._output(data, scores, value, metrics)

    def forward_backward(
        self, data: Sequence[Datum], loss: LossFunction, retained: Retained | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of ``loss`` to what has accumulated since the last step.

        ``retained``: a forward of the same tokens and targets to go on from; one that does not fit, or not any more, is
        passed over, and the forward computed anew.

        Raises:
            DataError: a datum lacks what the model or the loss needs.
            BackendError: the loss is not a finite scalar, or does not depend on the logprobs.
            ConfigError: a second call with a mean before a step.
        """
        self._may_accumulate(loss)
        batches = self._plan(data)
        _check_data(data, loss)
        wanted = self._wanted(loss, training=True)
        if retained and self._goes_on(retained, data, wanted):
            passes, retained.passes = retained.passes, []
            return self._from_passes(data, passes, loss, retained.scores, wanted)
        scores = Scores()
        # Terms of one datum each need no other micro-batch: nothing is kept. Every other loss sees the whole batch at once.
        if isinstance(loss, Loss) and loss.scope in (Scope.token, Scope.sequence) and not wanted.router:
            for batch in batches:
                self._forward_backward_apart(data, batch, loss, scores, wanted)
            with torch.no_grad():
                value, metrics = loss(data, *_columns(scores, wanted))
            return self._output(data, scores, value, metrics)
        return self._from_passes(data, self._forward_all(data, batches, scores, wanted), loss, scores, wanted)

    def forward_retained(
        self, data: Sequence[Datum], loss: LossFunction | None = None
    ) -> tuple[Retained, ForwardBackwardOutput]:
        """As :meth:`forward`, with the graphs that :meth:`forward_backward` can go on from, for a loss computed elsewhere.

        Graphs beyond ``retain_bytes`` are not kept, and computed again. In training mode: where a model drops out, a
        forward that is to be compared with others is none of these.
        """
        batches = self._plan(data)
        _check_data(data, loss)
        scores, wanted = Scores(), self._wanted(None, training=True)
        passes = self._forward_all(data, batches, scores, wanted)
        kept = sum(one.batch.num_tokens for one in passes if one.found)
        retained = Retained(data, passes, scores, self.version, int(kept * self._bytes_per_token()))
        with torch.no_grad():
            value, metrics = loss(data, *_columns(scores, wanted)) if loss else (None, {})
        return retained, self._output(data, scores, value, metrics)

    def _goes_on(self, retained: Retained, data: Sequence[Datum], wanted: Wanted) -> bool:
        """Fused optimizers change weights behind autograd's back, so their version is compared here."""
        fresh = retained.version == self.version and bool(retained.passes)
        return fresh and not (wanted.entropy or wanted.router) and retained.is_of(data)

    def _from_passes(
        self, data: Sequence[Datum], passes: list[_Pass], loss: LossFunction, scores: Scores, wanted: Wanted
    ) -> ForwardBackwardOutput:
        """The loss of the whole batch, and the way back through its passes."""
        slopes = loss_gradient(loss, data, *scores.part(range(len(data)), entropy=wanted.entropy))
        self._backward_all(data, passes, slopes, wanted, self._router_slope(loss, slopes, scores))
        return self._output(data, scores, slopes.value, slopes.metrics, self._router_weight(loss, slopes))

    def optim_step(self, adam: AdamParams, normalization: Normalization | None) -> OptimStepOutput:
        """Divides what has accumulated, once; clips; steps; clears.

        Where no token carries a gradient nothing moves, neither by momentum nor by weight decay; the step still counts.

        Raises:
            BackendError: the gradient is not finite. The weights are untouched and the gradient is dropped.
            ConfigError: a mean would be divided again.
        """
        for reduction in self.accumulated:
            if reduction is not None:
                check("optim_step: the accumulated loss", reduction, normalization)
        divisor = self.counts.divisor(normalization)
        norm = self.gradients.norm() / divisor
        if not norm < float("inf"):
            self.discard_gradient()
            raise BackendError(
                f"optim_step: the gradient norm is {norm} after {self.step} steps; lower optim.lr or look at the data"
            )
        clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
        counts = self.counts
        if counts.num_loss_tokens:
            self.optimizer.step(adam, clip / divisor)
        self.discard_gradient()
        self.step += 1
        self.version += 1
        return OptimStepOutput(
            {
                "optim/lr": adam.learning_rate,
                "optim/grad_norm": norm,
                "optim/clipped": float(clip < 1.0),
                "optim/num_loss_tokens": float(counts.num_loss_tokens),
                "optim/num_sequences": float(counts.num_sequences),
                "optim/divisor": divisor,
            }
        )

    def discard_gradient(self) -> None:
        """Forgets what has accumulated since the last step."""
        self.gradients.clear()
        self.counts = GradientCounts()
        self.accumulated = []
        self.seeds = 0

    # ---- the two halves ------------------------------------------------------------------------------------------

    def _forward_backward_apart(
        self, data: Sequence[Datum], batch: MicroBatch, loss: Loss, scores: Scores, wanted: Wanted
    ) -> None:
        """The gradient of one micro-batch's own terms."""
        if not self.passes.folds(batch, wanted):
            passes = self._forward_all(data, [batch], scores, wanted)
            indices = sorted(batch.indices)
            slopes = loss_gradient(loss, [data[index] for index in indices], *scores.part(indices, entropy=wanted.entropy))
            self._backward_all(data, passes, slopes, wanted, None)
            return

        def slopes_of(logprobs: dict[int, Tensor]) -> dict[int, Tensor]:
            with torch.enable_grad():
                found = loss_gradient(loss, [data[index] for index in logprobs], logprobs)
            self.counts.add(*found.active())
            return found.logprobs

        self.passes.run_folded(data, batch, scores, wanted, slopes_of, seed=self._next_seed()).backward()  # type: ignore[no-untyped-call]

    def _forward_all(self, data: Sequence[Datum], batches: list[MicroBatch], scores: Scores, wanted: Wanted) -> list[_Pass]:
        """Runs every pass; keeps the first graph and those that fit beside it, and of the rest only what they found."""
        room = float(self.options.retain_bytes)
        kept = 0
        passes = []
        for batch in batches:
            seed = self._next_seed()
            need = batch.num_tokens * self._bytes_per_token()
            keep = batch is batches[0] or need <= room
            with contextlib.nullcontext() if keep else torch.no_grad():
                found = self.passes.run(data, batch, scores, wanted, training=True, seed=seed)
            if keep:
                room -= batch.num_tokens * self._bytes_per_token()
                kept += 1
            passes.append(_Pass(batch, found if keep else None, seed))
        if kept < len(passes):
            log.info("kept the graphs of %d of %d micro-batches; the rest is computed twice", kept, len(passes))
        return passes

    def _backward_all(
        self, data: Sequence[Datum], passes: list[_Pass], slopes: LossGradient, wanted: Wanted, router: Tensor | None
    ) -> None:
        """The second half of the chain rule, pass by pass; passes through which nothing flows are left out."""
        self.counts.add(*slopes.active())
        columns = [slopes.logprobs] if slopes.entropy is None else [slopes.logprobs, slopes.entropy]
        for one in passes:
            if router is not None or any(column[index].any() for column in columns for index in one.batch.indices):
                found = one.found or self.passes.run(data, one.batch, Scores(), wanted, training=True, seed=one.seed)
                self._backward(found, columns, router)
                del found
            one.found = None  # frees the graph before the next pass

    @staticmethod
    def _backward(found: Found, columns: Sequence[Mapping[int, Tensor]], router: Tensor | None) -> None:
        roots = [found.logprobs] if found.entropy is None else [found.logprobs, found.entropy]
        gradients = [found.tokens.gathered(column) for column in columns]
        if found.router is not None and router is not None and found.router.probability.requires_grad:
            roots, gradients = [*roots, found.router.probability], [*gradients, router]
        torch.autograd.backward(roots, [gradient.to(root) for root, gradient in zip(roots, gradients, strict=True)])

    def _router_weight(self, loss: LossFunction, slopes: LossGradient) -> float:
        """What the router's loss is multiplied by, so that it is a mean or a sum just as the loss beside it."""
        tokens, sequences = slopes.active()
        times = {Reduction.token_sum: tokens, Reduction.sequence_sum: sequences}
        return self.router_coefficient * (times.get(loss.reduction, 1) if isinstance(loss, Loss) else 1)

    def _router_slope(self, loss: LossFunction, slopes: LossGradient, scores: Scores) -> Tensor | None:
        """The slope of the router's loss with respect to each pass's sum of probabilities, ``(E,)``."""
        return None if scores.router is None else self._router_weight(loss, slopes) * scores.router.gradient()

    # ---- what surrounds a pass -----------------------------------------------------------------------------------

    def _plan(self, data: Sequence[Datum]) -> list[MicroBatch]:
        if not data:
            raise DataError("forward_backward: got no datums; pass at least one")
        vocabulary = self.model.network.config.get_text_config().vocab_size
        for index, datum in enumerate(data):
            check_datum(datum, index, vocabulary, self.model.max_length)
        budget = self.options.micro_batch_tokens
        made = plan(data, min(budget, CPU_PASS_TOKENS) if self.model.device.type == "cpu" else budget, self.layouts)
        if made.layout not in self._told:
            self._told.add(made.layout)
            log.info("sequences are %s: %s", made.layout, made.reason)
        return made.batches

    def _layouts(self) -> Layouts:
        """What the options leave of what the architecture can do."""
        if self.options.packing == "padded":
            return Layouts(packed=False, shared=False)
        can = self.model.layouts
        # A shared beginning would be dropped out of once for all.
        shared = can.shared and self.options.shared_prompts and not self.passes.drops_out
        return Layouts(can.packed, shared, can.reason)

    def _bytes_per_token(self) -> float:
        """What a kept graph costs: as measured on the first, or with activations recomputed or taken away, their inputs."""
        if not (self.options.activation_checkpointing or self.options.activation_offloading):
            return self.passes.bytes_per_token
        config = self.model.network.config.get_text_config()
        return float(8 * config.hidden_size * config.num_hidden_layers * next(self.model.network.parameters()).element_size())

    def _may_accumulate(self, loss: LossFunction) -> None:
        """Means do not add up to a mean: two calls would weigh every call the same, whatever its number of tokens."""
        reduction = loss.reduction if isinstance(loss, Loss) and not loss.prepares else None
        declared = [one for one in (reduction, *self.accumulated) if one is not None]
        if reduction is not None and len(declared) > 1 and Reduction.mean in declared:
            raise ConfigError(
                f"forward_backward: {type(loss).__name__} returns a mean, and means of several calls do not add up to a mean; "
                "pass the whole batch in one call (backend.micro_batch_tokens bounds its memory)"
            )
        self.accumulated.append(reduction)

    def _next_seed(self) -> int:
        self.seeds += 1
        return (self.options.seed * 1_000_003 + self.step * 10_007 + self.seeds) % (1 << 62)

    def _wanted(self, loss: LossFunction | None, *, training: bool) -> Wanted:
        return Wanted(
            metrics=self.options.token_metrics and (loss is not None or training),
            entropy=isinstance(loss, Loss) and loss.needs_entropy,
            router=bool(self.router_coefficient) and loss is not None,
            weighted_only=isinstance(loss, Loss) and loss.ignores_masked and training and not self.options.all_logprobs,
        )

    def _adapter(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if enabled else self.model.network.disable_adapter()

    def _output(
        self,
        data: Sequence[Datum],
        scores: Scores,
        value: Tensor | None,
        metrics: Mapping[str, float],
        router_weight: float = 0.0,
    ) -> ForwardBackwardOutput:
        for index, mask in scores.left_out.items():
            scores.logprobs[index] = scores.logprobs[index].masked_fill(_like(mask, scores.logprobs[index]), float("nan"))
        outputs = [{"logprobs": TensorData.from_torch(logprobs)} for logprobs in scores.ordered()]
        found = {**metrics, **_token_metrics(data, scores)}
        if value is not None:
            total = float(value)
            if scores.router is not None:
                found["loss/router"] = float(scores.router.loss())
                total += router_weight * found["loss/router"]
            found = {"loss": total, "loss:sum": total, **found}
        return ForwardBackwardOutput(outputs, found)


def _same_pass(one: Datum, other: Datum) -> bool:
    """Whether the model makes the same logprobs of both."""
    keys = ("target_tokens", "temperature")
    pairs = [(one.loss_fn_inputs.get(key), other.loss_fn_inputs.get(key)) for key in keys]
    return one.model_input.tokens == other.model_input.tokens and all(
        a is b or (a is not None and b is not None and np.array_equal(a.array, b.array)) for a, b in pairs
    )


def _check_data(data: Sequence[Datum], loss: LossFunction | None) -> None:
    if isinstance(loss, Loss):
        loss.check_data(data)


def _columns(scores: Scores, wanted: Wanted) -> list[list[Tensor]]:
    """What a loss is called with besides the datums."""
    entropy = [scores.entropy[index] for index in range(len(scores.entropy))]
    return [scores.ordered(), entropy] if wanted.entropy else [scores.ordered()]


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """``(T,)`` as it fits beside ``(T,)`` or ``(T, K)``."""
    return mask if values.ndim == 1 else mask[:, None]


def _token_metrics(data: Sequence[Datum], scores: Scores) -> dict[str, float]:
    """Means over the tokens whose weight is not zero: every token where a datum has no weights."""
    if not scores.hit:
        return {}
    entropy, hit, count = 0.0, 0.0, 0
    for index, datum in enumerate(data):
        mask: Any = slice(None)
        if "weights" in datum.loss_fn_inputs:
            weights = datum.loss_fn_inputs["weights"].array
            mask = torch.from_numpy(weights.reshape(len(weights), -1).any(-1)) if weights.ndim else slice(None)
        kept = scores.hit[index][mask]
        entropy += float(scores.entropy[index][mask].double().sum())
        hit += float(kept.sum())
        count += kept.numel()
    if not count:
        return {}
    return {"tokens/accuracy": hit / count, "tokens/entropy": entropy / count, "tokens/trained": float(count)}
