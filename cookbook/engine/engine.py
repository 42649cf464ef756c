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
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cookbook.engine import layers, probe
from cookbook.engine.datum_check import check_datum
from cookbook.engine.gradients import Gradients
from cookbook.engine.linear_logprobs import HeadImpl
from cookbook.engine.loss_gradient import (
    LossFunction,
    LossGradient,
    OwnGradient,
    accumulate,
    loss_gradient,
    loss_name,
    no_gradient,
)
from cookbook.engine.memory import shortage
from cookbook.engine.model import LanguageModel, recompute_activations
from cookbook.engine.optimizer import Optimizer
from cookbook.engine.outputs import columns, empty_output, output, same_pass
from cookbook.engine.passes import Found, Passes, Scores, Wanted
from cookbook.engine.planning import CPU_PASS_TOKENS, PACKINGS, Layouts, MicroBatch, plan
from cookbook.engine.router_loss import router_coefficient
from cookbook.engine.update_rules import update_rule
from cookbook.errors import BackendError, ConfigError, NonFiniteError
from cookbook.losses.base import Loss, Scope, named
from cookbook.normalization import GradientCounts, Normalization, Reduction, check, check_accumulation, warn_undeclared
from cookbook.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput

log = logging.getLogger("cookbook")

# Square root of the largest float32: optimizers square the gradient, and a moment that overflowed stays infinite.
LARGEST_NORM = 1.8e19


@dataclass(frozen=True)
class EngineOptions:
    """Memory and speed; no field changes a result beyond float rounding."""

    micro_batch_tokens: int = 8192
    packing: str = "auto"  # auto | padded | packed
    shared_prompts: bool = True
    fused_layers: bool = True  # False: norms, gated MLPs and rotary embeddings by the model's own code
    trim_last_layer: bool = True  # False: it also computes tokens that nobody reads
    head_impl: HeadImpl = "auto"  # auto | pytorch | torch_compile | cce | file.py:name, or the function or class itself
    head_options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of head_impl
    retain_bytes: int = 4 << 30
    activation_checkpointing: bool | None = False  # None: where a pass would not fit into memory
    activation_offloading: bool = False
    optimizer: str = "adamw"  # a name of update_rules.RULES
    token_metrics: bool = True  # tokens/accuracy and tokens/entropy with every pass
    all_logprobs: bool = True  # False: not those of tokens of weight 0, where the loss ignores them; NaN stands for them
    seed: int = 0

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"backend.packing: expected one of {', '.join(PACKINGS)}, got {self.packing!r}")


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
    entropy: bool

    def is_of(self, data: Sequence[Datum]) -> bool:
        """Whether ``data`` has the same tokens, targets and temperatures; what a loss reads besides may differ."""
        return len(data) == len(self.data) and all(same_pass(*pair) for pair in zip(data, self.data, strict=True))


class Engine:
    """A model in training. Synchronous; one caller at a time."""

    def __init__(self, model: LanguageModel, options: EngineOptions) -> None:
        self.model = model
        self.options = options
        probe.use_working_experts(model)
        if options.fused_layers:
            probe.fuse_layers(model)
        else:
            layers.uninstall(model.network)
        self.passes = Passes(
            model, offload=options.activation_offloading, head_impl=options.head_impl, head_options=options.head_options
        )
        self.gradients = Gradients([parameter for _, parameter in model.trainable()])
        self.router_coefficient = router_coefficient(model.network, model.config.router_aux_loss_coef)
        self.step = 0  # finished optimizer steps
        self.version = 0  # changes whenever the weights do
        self.counts = GradientCounts()
        self.accumulated: list[Reduction | None] = []  # what each call since the last step returned
        self.undeclared: list[str] = []  # losses of these calls that do not say what they return
        self.seeds = 0  # drawn since the last step
        self.lost_gradient = False  # a call failed midway, and the gradient of earlier calls went with it
        self._flows = False  # the call under way has begun to add to the gradient
        self._own_gradients: list[OwnGradient] = []  # of the loss of the call under way
        self.layouts = self._layouts()
        if options.activation_checkpointing is None:
            self.options = replace(options, activation_checkpointing=self._must_recompute())  # decided for its copies too
        recomputes = bool(self.options.activation_checkpointing)
        recompute_activations(model.network, recomputes)
        self.passes.trims_last_layer = options.trim_last_layer and not recomputes  # the second time it would miss the rows

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """Made when first used: a frozen model needs none."""
        return Optimizer(self.model, self.gradients, update_rule(self.options.optimizer))

    # ---- the calls -----------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss: LossFunction | None = None, *, adapter: bool = True
    ) -> ForwardBackwardOutput:
        """Logprobs of every target, and the loss's value and metrics when one is given. Touches no gradient.

        ``adapter=False`` computes with the base model under a LoRA adapter.
        """
        if not data:
            return empty_output(loss is not None)
        scores = Scores()
        batches = self._plan(data)
        _check_data(data, loss)
        wanted = self._wanted(loss, training=False)
        with torch.no_grad(), self._adapter(adapter):
            for batch in batches:
                self.passes.run(data, batch, scores, wanted, training=False, seed=0)
        return self._scored_output(data, scores, loss, wanted)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossFunction,
        retained: Retained | None = None,
        *,
        all_logprobs: bool | None = None,
    ) -> ForwardBackwardOutput:
        """Adds the gradient of ``loss`` to what has accumulated since the last step; of no datums an empty sum, nothing.

        ``retained``: a forward of the same tokens and targets to go on from; one that does not fit, or not any more, is
        passed over, and the forward computed anew. ``all_logprobs`` takes the place of the option of that name.

        A call that fails leaves no partial gradient. The gradient of earlier calls stays, unless the call had begun to add its
        own: the two cannot be told apart, and the next :meth:`optim_step` reports the loss.

        Raises:
            DataError: a datum lacks what the model or the loss needs.
            BackendError: the loss is not a finite scalar (NonFiniteError), or does not depend on the logprobs.
            ConfigError: a second call with a mean before a step.
        """
        if not data:
            return empty_output()
        earlier = replace(self.counts), list(self.accumulated), self.seeds
        self._flows, self._own_gradients = False, []
        try:
            found = self._forward_backward(data, loss, retained, all_logprobs)
            if not math.isfinite(found.metrics["loss"]):  # micro-batches whose own are finite can add up to that
                raise NonFiniteError(
                    f"forward_backward: the loss of all datums together is {found.metrics['loss']} ({named(range(len(data)))})"
                )
        except BaseException:
            if self._flows:
                self.lose_gradient(bool(earlier[1]))
            else:
                self.counts, self.accumulated, self.seeds = earlier
            raise
        accumulate(self._own_gradients)  # of a call that fails, the loss's own parameters get nothing
        return found

    def _forward_backward(
        self, data: Sequence[Datum], loss: LossFunction, retained: Retained | None, all_logprobs: bool | None
    ) -> ForwardBackwardOutput:
        self._may_accumulate(loss)
        batches = self._plan(data)
        _check_data(data, loss)
        wanted = self._wanted(loss, training=True, all_logprobs=all_logprobs)
        if retained and self._goes_on(retained, data, wanted):
            passes, retained.passes = retained.passes, []
            return self._from_passes(data, passes, loss, retained.scores, wanted)
        scores = Scores()
        # Terms of one datum each need no other micro-batch: nothing is kept. Every other loss sees the whole batch at once.
        if isinstance(loss, Loss) and loss.scope in (Scope.token, Scope.sequence) and not wanted.router:
            before = self.counts.num_loss_tokens
            for batch in batches:
                self._forward_backward_apart(data, batch, loss, scores, wanted)
            if not loss.may_be_flat and self.counts.num_loss_tokens == before:
                raise no_gradient(loss, range(len(data)))
            return self._scored_output(data, scores, loss, wanted)
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
        # What the loss to come reads is not known: every token, but no router's loss.
        scores, wanted = Scores(), replace(self._wanted(loss, training=True), router=False, weighted_only=False)
        passes = self._forward_all(data, batches, scores, wanted)
        kept = sum(self._num_bytes(one.batch, one.found) for one in passes if one.found)
        retained = Retained(data, passes, scores, self.version, kept, wanted.entropy)
        return retained, self._scored_output(data, scores, loss, wanted)

    def _goes_on(self, retained: Retained, data: Sequence[Datum], wanted: Wanted) -> bool:
        """Fused optimizers change weights behind autograd's back, so their version is compared here.

        A retained pass has all tokens. One with fewer tokens sums in another order, so it is computed anew: its bits then
        depend on the call alone.
        """
        fresh = retained.version == self.version and bool(retained.passes)
        fits = not (wanted.router or wanted.weighted_only)
        return fresh and fits and retained.entropy >= wanted.entropy and retained.is_of(data)

    def _from_passes(
        self, data: Sequence[Datum], passes: list[_Pass], loss: LossFunction, scores: Scores, wanted: Wanted
    ) -> ForwardBackwardOutput:
        """The loss of the whole batch, and the way back through its passes."""
        slopes = self._slopes(loss, data, *scores.part(range(len(data)), entropy=wanted.entropy))
        self._backward_all(data, passes, slopes, wanted, self._router_slope(loss, slopes, scores))
        return output(data, scores, slopes.value, slopes.metrics, self._router_weight(loss, slopes))

    def _scored_output(
        self, data: Sequence[Datum], scores: Scores, loss: LossFunction | None, wanted: Wanted
    ) -> ForwardBackwardOutput:
        """The loss's value and metrics, of logprobs that are there already."""
        if loss is None:
            return output(data, scores, None, {})
        if scores.router is not None:  # its share goes by the tokens that have a gradient
            with torch.enable_grad():
                slopes = loss_gradient(loss, data, *scores.part(range(len(data)), entropy=wanted.entropy))
            return output(data, scores, slopes.value, slopes.metrics, self._router_weight(loss, slopes))
        with torch.no_grad():
            value, metrics = loss(data, *columns(scores, wanted))
        return output(data, scores, value, metrics)

    def optim_step(self, adam: AdamParams, normalization: Normalization | None) -> OptimStepOutput:
        """Divides what has accumulated, once; clips; steps; clears.

        Where no token carries a gradient nothing moves, neither by momentum nor by weight decay; the step still counts.

        Raises:
            NonFiniteError: the gradient is not finite. The weights are untouched and the gradient is dropped.
            ConfigError: a mean would be divided again.
        """
        if self.lost_gradient:
            self.discard_gradient()
            raise BackendError(
                "optim_step: a forward_backward failed midway, and the gradient of the calls before it went with it; "
                "repeat the calls of this step"
            )
        for reduction in self.accumulated:
            if reduction is not None:
                check("optim_step: the accumulated loss", reduction, normalization)
        warn_undeclared(self.undeclared, normalization)
        divisor = self.counts.divisor(normalization)
        norm = self.gradients.norm() / divisor
        clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
        # Also false for NaN, and for infinity, which no clipping makes finite.
        if not norm * clip < LARGEST_NORM:
            self.discard_gradient()
            raise NonFiniteError(
                f"optim_step: the gradient norm is {norm} after {self.step} steps; lower optim.lr or look at the data"
            )
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
        self.undeclared = []
        self.seeds = 0
        self.lost_gradient = False

    def lose_gradient(self, of_earlier_calls: bool) -> None:
        """Forgets a gradient that is worth nothing any more. The next step fails if it held that ``of_earlier_calls``."""
        lost = self.lost_gradient or of_earlier_calls
        self.discard_gradient()
        self.lost_gradient = lost

    # ---- the two halves ------------------------------------------------------------------------------------------

    def _forward_backward_apart(
        self, data: Sequence[Datum], batch: MicroBatch, loss: Loss, scores: Scores, wanted: Wanted
    ) -> None:
        """The gradient of one micro-batch's own terms."""
        whole = loss.scope is Scope.sequence
        if not self.passes.folds(data, batch, wanted, whole=whole):
            passes = self._forward_all(data, [batch], scores, wanted)
            indices = sorted(batch.indices)
            rows = [data[index] for index in indices]
            slopes = self._slopes(loss, rows, *scores.part(indices, entropy=wanted.entropy), whole=False)
            self._backward_all(data, passes, slopes, wanted, None)
            return

        active: dict[int, int] = {}

        def slopes_of(indices: Sequence[int], pieces: Sequence[Datum], logprobs: Sequence[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                found = self._slopes(loss, pieces, dict(zip(indices, logprobs, strict=True)), whole=False)
            for index, count in found.active_by_datum().items():
                active[index] = active.get(index, 0) + count
            return list(found.logprobs.values())

        seed = self._next_seed()
        root = self.passes.run_folded(data, batch, scores, wanted, slopes_of, seed=seed, whole=whole)
        self._flows = True
        torch.autograd.backward(root)
        self.counts.add(sum(active.values()), sum(count > 0 for count in active.values()))

    def _slopes(self, loss: LossFunction, *of: Any, whole: bool = True) -> LossGradient:
        """The loss's gradient; that of its own parameters waits for the end of the call."""
        found = loss_gradient(loss, *of, whole=whole)
        self._own_gradients += found.own
        return found

    def _forward_all(self, data: Sequence[Datum], batches: list[MicroBatch], scores: Scores, wanted: Wanted) -> list[_Pass]:
        """Runs every pass; keeps the first graph and those that fit beside it, and of the rest only what they found."""
        room = self.options.retain_bytes
        per_token = 0.0  # the most that a token of a pass before has kept
        passes = []
        for batch in batches:
            seed = self._next_seed()
            keep = batch is batches[0] or batch.num_tokens * per_token <= room
            with contextlib.nullcontext() if keep else torch.no_grad():
                found = self.passes.run(data, batch, scores, wanted, training=True, seed=seed)
            if keep:
                kept = self._num_bytes(batch, found)
                room -= kept
                per_token = max(per_token, kept / batch.num_tokens)
            passes.append(_Pass(batch, found if keep else None, seed))
        if any(one.found is None for one in passes):
            self.model.tell(
                "retain", "graphs of a call's micro-batches do not all fit into retain_gb; the rest is computed twice"
            )
        return passes

    def _backward_all(
        self, data: Sequence[Datum], passes: list[_Pass], slopes: LossGradient, wanted: Wanted, router: Tensor | None
    ) -> None:
        """The second half of the chain rule, pass by pass; passes through which nothing flows are left out."""
        self.counts.add(*slopes.active())
        sides = [slopes.logprobs] if slopes.entropy is None else [slopes.logprobs, slopes.entropy]
        self.model.network.train(True)  # layers that are computed again must drop as they did
        for one in passes:
            if router is not None or any(side[index].any() for side in sides for index in one.batch.indices):
                found = one.found or self.passes.run(data, one.batch, Scores(), wanted, training=True, seed=one.seed)
                self._backward(found, sides, router)
                del found
            one.found = None  # frees the graph before the next pass

    def _backward(self, found: Found, sides: Sequence[Mapping[int, Tensor]], router: Tensor | None) -> None:
        self._flows = True
        gradients = [found.tokens.gathered(side) for side in sides]
        roots = [root for root in (found.logprobs, found.entropy) if root is not None][: len(gradients)]
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
        vocabulary = self.model.network.config.get_text_config().vocab_size
        for index, datum in enumerate(data):
            check_datum(datum, index, vocabulary, self.model.max_length)
        made = plan(data, self._pass_tokens, self.layouts)
        self.model.tell(made.layout, f"sequences are {made.layout}: {made.reason}")
        return made.batches

    def _must_recompute(self) -> bool:
        """Whether activations are not to be kept, for want of memory."""
        if not (self.gradients.parameters and self.model.network.supports_gradient_checkpointing):
            return False
        rule = update_rule(self.options.optimizer)
        why = shortage(self.model, self.passes.head, self._pass_tokens, rule)
        if why:
            self.model.tell("checkpointing", f"activations are computed again in the backward pass: {why}")
        return why is not None

    @property
    def _pass_tokens(self) -> int:
        """The most tokens of a pass, but for a datum that is longer."""
        budget = self.options.micro_batch_tokens
        return min(budget, CPU_PASS_TOKENS) if self.model.device.type == "cpu" else budget

    def _layouts(self) -> Layouts:
        """What the options leave of what the architecture can do."""
        if self.options.packing == "padded":
            return Layouts(packed=False, shared=False)
        can = self.model.layouts
        if self.options.packing == "packed" and not can.packed:
            name = type(self.model.network).__name__
            raise ConfigError(f"backend.packing: {name} cannot be packed exactly: {can.reason}; set it to auto")
        # A shared beginning would be dropped out of once for all.
        shared = can.shared and self.options.shared_prompts and not self.passes.drops_out
        return Layouts(can.packed, shared, can.reason)

    def _num_bytes(self, batch: MicroBatch, found: Found) -> int:
        """What a kept graph costs: as counted, and the layers' inputs where activations are recomputed or taken away."""
        if not (self.options.activation_checkpointing or self.options.activation_offloading):
            return found.num_bytes
        config = self.model.network.config.get_text_config()
        element: int = next(self.model.network.parameters()).element_size()
        layers = 8 * int(config.hidden_size) * int(config.num_hidden_layers) * element
        return found.num_bytes + layers * batch.num_tokens

    def _may_accumulate(self, loss: LossFunction) -> None:
        """A loss that is made a mean by ``prepare`` is a sum to the engine; the router's loss beside it is not."""
        once = isinstance(loss, Loss) and (not loss.prepares or self.router_coefficient > 0)
        reduction = loss.reduction if isinstance(loss, Loss) and once else None
        check_accumulation(type(loss).__name__, reduction, self.accumulated)
        self.accumulated.append(reduction)
        if not isinstance(loss, Loss):
            self.undeclared.append(loss_name(loss))

    def _next_seed(self) -> int:
        self.seeds += 1
        return (self.options.seed * 1_000_003 + self.step * 10_007 + self.seeds) % (1 << 62)

    def _wanted(self, loss: LossFunction | None, *, training: bool, all_logprobs: bool | None = None) -> Wanted:
        everything = self.options.all_logprobs if all_logprobs is None else all_logprobs
        return Wanted(
            metrics=self.options.token_metrics and (loss is not None or training),
            entropy=isinstance(loss, Loss) and loss.needs_entropy,
            router=bool(self.router_coefficient) and loss is not None,
            weighted_only=isinstance(loss, Loss) and loss.ignores_masked and training and not everything,
        )

    def _adapter(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if enabled else self.model.network.disable_adapter()


def _check_data(data: Sequence[Datum], loss: LossFunction | None) -> None:
    if isinstance(loss, Loss):
        loss.check_data(data)
