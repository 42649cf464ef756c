"""Forward, backward and optimizer step of a model, for any loss of log-probabilities.

There is one gradient path: logprobs -> loss -> g = dL/dlogprob -> backward of sum(g * logprob). By the chain rule the result
is what plain autograd computes. The split lets the loss see the whole batch, on the CPU, while the model runs one micro-batch
at a time. The graphs of the micro-batches are kept until the loss is known, so a custom loss costs as much as a built-in loss;
graphs that exceed ``retain_bytes`` are dropped, and their forward passes run again.

The data of a call flow through these modules: :mod:`batch.plan` and :mod:`batch.collate` (datums to micro-batches to tensors),
:mod:`forward` with the output layer in :mod:`head` (tensors to logprobs), :mod:`loss_gradient` (logprobs to dL/dlogprob), and
back to this module for the backward pass. :class:`~cookbook.engine.forward.TokenScores` builds the output.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cookbook.engine import capabilities
from cookbook.engine.batch.collate import check_data
from cookbook.engine.batch.plan import CPU_PASS_TOKENS, MicroBatch, PackingSupport, plan
from cookbook.engine.decoding.sampler_pass import SamplerPass
from cookbook.engine.forward import (
    FinishedPass,
    ForwardRunner,
    PassOutput,
    PassPart,
    PassSpec,
    Retained,
    TokenScores,
    empty_output,
)
from cookbook.engine.grouped_adapters import AdapterLayers, adapter_layers
from cookbook.engine.lora_targets import EXPERT_COUNTS
from cookbook.engine.loss_gradient import (
    CallGradients,
    LossFunction,
    LossGradient,
    accumulate,
    loss_gradient,
    loss_name,
    no_gradient,
)
from cookbook.engine.memory import fitting_tokens, return_large_blocks
from cookbook.engine.model import LanguageModel, keeps_last_layer, recompute_activations
from cookbook.engine.optimizer import GradientBuffer, Optimizer, update_rule
from cookbook.engine.options import EngineOptions
from cookbook.engine.parallel import led
from cookbook.engine.ranks.commands import PerRank
from cookbook.engine.ranks.loading import MetaModel
from cookbook.engine.router_loss import router_coefficient
from cookbook.errors import BackendError, NonFiniteError
from cookbook.futures import between
from cookbook.losses.base import Loss, Scope, named
from cookbook.losses.normalization import GradientCounts, Normalization, Reduction, check, check_accumulation, warn_undeclared
from cookbook.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput
from cookbook.utils.words import counted

__all__ = ["Engine", "EngineOptions"]
log = logging.getLogger("cookbook")

# Square root of the largest float32. Optimizers square the gradient, and a second moment that overflows stays infinite.
LARGEST_NORM = 1.8e19


class Engine(PerRank):
    """A model in training. All methods are synchronous; the engine is not thread-safe."""

    def __init__(self, model: LanguageModel, options: EngineOptions) -> None:
        self.model = model
        self.ranks = model.ranks
        # Fast paths are verified on unsharded weights. A meta model gets its weights only after sharding, so a small reference
        # model of the same architecture is verified in its place, and the meta model uses the fast paths of the reference.
        meta_model = model if isinstance(model, MetaModel) and model.sources else None
        reference: Engine | None = (
            Engine(meta_model.small_reference(), replace(options, activation_checkpointing=False)) if meta_model else None
        )
        if reference is None:
            capabilities.use_fast_layers(model, fused=options.fused_layers)
        else:
            capabilities.copy_capabilities(model.network, reference.model.network)
        self.passes: ForwardRunner = ForwardRunner(
            model,
            offload=options.activation_offloading,
            head_impl=options.head_impl,
            head_options=options.head_options,
            precision=options.precision,
            like=reference.passes if reference else None,
        )
        # Samplers of this engine compute with the weights and the precision of its training passes.
        self.sampler_pass = SamplerPass(model, self.passes.precision, self.passes.head)
        self.router_coefficient: float = (
            reference.router_coefficient if reference else router_coefficient(model.network, model.config.router_aux_loss_coef)
        )
        # Number of finished optimizer steps, and of changes of the weights.
        self.step = self.version = 0
        # Since the last optimizer step: counts of tokens and sequences with a gradient, reductions of the calls' losses, names
        # of losses that declare no reduction, and the number of seeds drawn.
        self.counts = GradientCounts()
        self.accumulated: list[Reduction | None] = []
        self.undeclared: list[str] = []
        self.seeds = 0
        # Whether a call failed in the middle of its backward pass, so that the gradient of earlier calls was dropped with it.
        self.lost_gradient = False
        # Whether the current call has begun to add to the accumulated gradient.
        self._is_accumulating = False
        self._call_gradients = CallGradients(keeps_error=self.ranks.shards)
        # Token budget of a pass; a longer datum has a pass of its own.
        self.pass_tokens = min(options.micro_batch_tokens, CPU_PASS_TOKENS if model.device.type == "cpu" else 1 << 62)
        # With dropout, all members of a prefix group would get the same dropout mask for their common prefix.
        shared = options.shared_prompts and not self.passes.has_dropout
        self.packing: PackingSupport = (
            reference.packing if reference else capabilities.usable_packing(model, options.packing, shared_prompts=shared)
        )
        del reference
        if self.ranks.shards:
            # In the first pass, the other ranks would wait for a rank that has failed before the pass.
            self.ranks.together(lambda: self._shard_weights(meta_model))
            self.ranks.try_pass(model.network)
        self.gradients = GradientBuffer([parameter for _, parameter in model.trainable()], self.ranks)
        # Not after the choice by free memory: which tokens are computed, and so the last bits, must not depend on it.
        never_recomputed = options.activation_checkpointing is False or not model.network.supports_gradient_checkpointing
        self.passes.trims_last_layer = options.trim_last_layer and (never_recomputed or keeps_last_layer(model.network))
        if options.activation_checkpointing is None:
            # Stored in the options, so that copies of this engine do not decide again.
            fitting = self._fitting_tokens(options)
            options = replace(options, activation_checkpointing=fitting is not None, kept_tokens=fitting or 0)
        self.options = options
        self.passes.recomputes = recompute_activations(model.network, bool(options.activation_checkpointing))
        if self.passes.recomputes and model.device.type == "cpu":
            return_large_blocks()

    def _shard_weights(self, meta_model: MetaModel | None) -> None:
        """Shard the weights over the ranks; ``meta_model`` reads its weights from disk now."""
        self.passes.verify_last_layer()
        self.ranks.spread(self.model.network)
        if meta_model is not None:
            # Modules are in reference cycles, so only a collection frees the memory of the reference model.
            gc.collect()
            meta_model.read()

    def _fitting_tokens(self, options: EngineOptions) -> int | None:
        per_token, share = self.passes.trial_bytes_per_token, self.ranks.held_share()
        fitting = fitting_tokens(
            self.model, per_token, self.pass_tokens, options.optimizer, share, offload=options.optimizer_offload
        )
        return fitting or 0 if self.ranks.in_step([fitting is not None])[0] else None

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, created at first use, so that a model that is only evaluated has no optimizer state."""
        rule = update_rule(self.options.optimizer)
        return Optimizer(self.model, self.gradients, rule, offload=self.options.optimizer_offload)

    # ---- the calls -----------------------------------------------------------------------------------------------

    @led
    def forward(
        self, data: Sequence[Datum], loss: LossFunction | None = None, *, adapter: bool = True
    ) -> ForwardBackwardOutput:
        """Return the logprobs of all targets and, if ``loss`` is given, its value and metrics. Changes no gradient.

        ``adapter=False`` disables a LoRA adapter and computes with the base model.
        """
        if not data:
            return empty_output(loss is not None)
        batches, scores = self.ranks.together(lambda: self._plan_passes(data, loss)), TokenScores()
        spec = self._spec(loss, training=False)

        def compute() -> None:
            for batch in between(batches):
                self.passes.run(data, batch, scores, spec, training=False, seed=0)

        with torch.no_grad(), contextlib.nullcontext() if adapter else self.model.network.disable_adapter():
            self.ranks.together(compute)
        return self._evaluated(data, scores, loss, spec)

    @led
    def forward_retained(
        self, data: Sequence[Datum], loss: LossFunction | None = None
    ) -> tuple[Retained, ForwardBackwardOutput]:
        """Run the forward passes and keep their graphs for :meth:`forward_backward`, for a loss that the caller computes.

        Graphs that exceed ``retain_bytes`` are dropped and recomputed. The passes run in training mode, so with dropout the
        logprobs differ from those of :meth:`forward`.
        """
        batches, scores = self.ranks.together(lambda: self._plan_passes(data, loss)), TokenScores()
        # The later loss may read any token. The router loss needs outputs of the pass that are not kept.
        spec = replace(self._spec(loss, training=True), router=False, weighted_only=False)
        passes = self._forward_all(data, batches, scores, spec)
        num_bytes = sum(saved_pass.output.num_bytes for saved_pass in passes if saved_pass.output)
        retained = Retained(data, passes, scores, self.version, num_bytes, spec.entropy)
        return retained, self._evaluated(data, scores, loss, spec)

    @led
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossFunction,
        retained: Retained | None = None,
        *,
        all_logprobs: bool | None = None,
    ) -> ForwardBackwardOutput:
        """Accumulate the gradient of ``loss``; an empty ``data`` adds nothing.

        ``retained``: earlier forward passes of the same tokens and targets, used if they are still valid. ``all_logprobs``
        overrides the option of that name.

        A call that fails leaves no partial gradient. If it fails before its backward pass, the gradient of earlier calls stays.
        If it fails later, both gradients are dropped; if there was an earlier call, the next optimizer step raises.

        Raises:
            DataError: a datum lacks a field that the model or the loss needs.
            BackendError: the loss is not a finite scalar (NonFiniteError), or does not depend on the logprobs.
            ConfigError: the loss is a mean, and another call has accumulated a gradient since the last optimizer step.
        """
        if not data:
            return empty_output()
        with self.gradient_call():
            output = self._forward_backward(data, loss, retained, all_logprobs)
            # The sum of finite micro-batch losses can overflow.
            if not math.isfinite(output.metrics["loss"]):
                raise NonFiniteError(
                    f"forward_backward: the loss of the whole batch is {output.metrics['loss']} ({named(range(len(data)))})"
                )
        return output

    @contextlib.contextmanager
    def gradient_call(self) -> Iterator[None]:
        """Context of a call that adds a gradient. If the block fails, it has the effects that forward_backward describes."""
        self.sampler_pass.drop_weights()
        earlier = replace(self.counts), list(self.accumulated), list(self.undeclared), self.seeds
        self._is_accumulating, self._call_gradients = False, CallGradients(keeps_error=self.ranks.shards)
        try:
            yield
        except BaseException:
            if self._is_accumulating:
                self.lose_gradient(bool(earlier[1]))
            else:
                self.counts, self.accumulated, self.undeclared, self.seeds = earlier
            raise
        # Last, so that a failed call adds nothing to the gradients of the loss's own parameters.
        accumulate(self._call_gradients.parameter_gradients)

    # ---- calls that share a pass ----------------------------------------------------------------------------------

    @functools.cached_property
    def adapter_layers(self) -> AdapterLayers | None:
        """The adapted layers, for passes that several adapters share; None if the adapter does not support such passes."""
        return adapter_layers(self.model)

    @property
    def sharing_key(self) -> Hashable | None:
        """Value that is equal for engines whose calls may share a pass; None if no other engine may.

        Engines share the base weights, and adapt the same layers. With dropout, random numbers would depend on the other calls;
        in a mixture of experts, the shapes of products.
        """
        config = self.model.network.config.get_text_config()
        has_experts = any(getattr(config, name, None) for name in EXPERT_COUNTS)
        if self.ranks.size > 1 or not self.packing.packed or self.passes.has_dropout or has_experts:
            return None
        if self.adapter_layers is None:
            return None
        return id(self.model.network.get_input_embeddings().weight), tuple(self.adapter_layers)

    def shared_part(self, data: Sequence[Datum], loss: LossFunction, all_logprobs: bool | None) -> PassPart:
        """Check a call in its :meth:`gradient_call`, and return its part of a shared pass. Its datums fit into one pass."""
        [batch] = self._register_and_plan(data, loss)
        # As for a pass of its own: a resumed run continues with the same number.
        self._next_seed()
        return PassPart(self.passes, data, batch, self._spec(loss, training=True, all_logprobs=all_logprobs))

    def shared_gradient(self, part: PassPart, loss: LossFunction) -> LossGradient:
        """Return the gradient of the loss of all datums of a shared pass's part."""
        columns = part.scores.part(range(len(part.data)), entropy=part.spec.entropy)
        return self._call_gradients.of_batch(loss, part.data, *columns)

    def begin_accumulating(self) -> None:
        """Note that the backward pass adds to the gradient, so that a failure drops the gradient."""
        self._is_accumulating = True

    def shared_output(self, part: PassPart, gradient: LossGradient) -> ForwardBackwardOutput:
        """Count the gradient of a part, and return the output of its call."""
        self.counts.add(*gradient.num_active())
        return part.scores.output(part.data, gradient.value, gradient.metrics)

    # ---- the gradient path of one call ---------------------------------------------------------------------------

    def _forward_backward(
        self, data: Sequence[Datum], loss: LossFunction, retained: Retained | None, all_logprobs: bool | None
    ) -> ForwardBackwardOutput:
        batches, scores = self.ranks.together(lambda: self._register_and_plan(data, loss)), TokenScores()
        spec = self._spec(loss, training=True, all_logprobs=all_logprobs)
        if retained and self._can_use(retained, data, spec):
            passes, retained.passes = retained.passes, []
            return self._backward_of_batch(data, passes, loss, retained.scores, spec)
        # A loss of independent terms runs per micro-batch, with one graph in memory. Others need all logprobs first.
        if not (isinstance(loss, Loss) and loss.scope in (Scope.token, Scope.sequence)) or spec.router:
            passes = self._forward_all(data, batches, scores, spec)
            return self._backward_of_batch(data, passes, loss, scores, spec)
        before = replace(self.counts)
        with self.gradients.accumulation(len(batches)):
            # The other ranks accumulate their gradient even if the loss fails on this rank.
            self._is_accumulating = self.ranks.size > 1
            for batch in between(batches):
                self._micro_batch_gradient(data, batch, loss, scores, spec)
            self._call_gradients.raise_error()
        own = self.counts.num_loss_tokens - before.num_loss_tokens, self.counts.num_sequences - before.num_sequences
        added = [int(count) for count in self.ranks.totals(own)]
        self.counts = before
        self.counts.add(*added)
        if not loss.may_be_flat and not added[0]:
            raise no_gradient(loss, range(len(data)))
        return self._evaluated(data, scores, loss, spec)

    def _register_and_plan(self, data: Sequence[Datum], loss: LossFunction) -> list[MicroBatch]:
        self._register(loss)
        self.gradients.allocate()
        return self._plan_passes(data, loss)

    def _register(self, loss: LossFunction) -> None:
        """Record the reduction of ``loss`` for the next optimizer step. Raise ConfigError if a mean would be accumulated.

        ``Loss.prepare`` turns a mean into a sum with scaled weights, which may be accumulated; a router loss stays a mean.
        """
        once = isinstance(loss, Loss) and (not loss.prepares or self.router_coefficient > 0)
        reduction = loss.reduction if isinstance(loss, Loss) and once else None
        check_accumulation(type(loss).__name__, reduction, self.accumulated)
        self.accumulated.append(reduction)
        if not isinstance(loss, Loss):
            self.undeclared.append(loss_name(loss))

    def _plan_passes(self, data: Sequence[Datum], loss: LossFunction | None) -> list[MicroBatch]:
        """Check the datums, and return the micro-batches of this rank."""
        check_data(data, self.model.vocabulary_size, self.model.max_length)
        planned = plan(data, self.pass_tokens, self.packing, self.ranks.rank, self.ranks.size)
        self.model.log_once(planned.layout, f"sequences are {planned.layout}: {planned.reason}")
        if isinstance(loss, Loss):
            loss.check_data(data)
        self.choose_recomputation(planned.batches)
        filler = MicroBatch([], None if self.packing.packed else 0, 0)
        return planned.batches + [filler] * (planned.most - len(planned.batches) if self.ranks.shards else 0)

    def choose_recomputation(self, batches: Sequence[MicroBatch]) -> None:
        """Switch activation checkpointing on if a pass is too large to keep its activations, and this is left to the engine."""
        if self.options.kept_tokens:
            large = any(batch.num_tokens > self.options.kept_tokens for batch in batches)
            self.passes.recomputes = recompute_activations(self.model.network, large)

    def _spec(self, loss: LossFunction | None, *, training: bool, all_logprobs: bool | None = None) -> PassSpec:
        everything = self.options.all_logprobs if all_logprobs is None else all_logprobs
        return PassSpec(
            metrics=self.options.token_metrics and (loss is not None or training),
            entropy=isinstance(loss, Loss) and loss.needs_entropy,
            router=bool(self.router_coefficient) and loss is not None,
            weighted_only=isinstance(loss, Loss) and loss.ignores_masked and training and not everything,
        )

    def _can_use(self, retained: Retained, data: Sequence[Datum], spec: PassSpec) -> bool:
        """Whether retained forward passes can replace new ones.

        Fused optimizers bypass autograd's version counter, so the engine's version is compared. Retained passes score all
        tokens. A call that needs fewer runs new passes, so that its rounding does not depend on earlier calls.
        """
        # A rank without datums has no passes, so the answers of all ranks are gathered.
        fresh = retained.version == self.version and any(self.ranks.gathered(bool(retained.passes)))
        complete = not (spec.router or spec.weighted_only) and retained.entropy >= spec.entropy
        return fresh and complete and retained.matches(data)

    def _next_seed(self) -> int:
        self.seeds += 1
        return (self.options.seed * 1_000_003 + self.step * 10_007 + self.seeds + 1_000_033 * self.ranks.rank) % (1 << 62)

    def _forward_all(
        self, data: Sequence[Datum], batches: Sequence[MicroBatch], scores: TokenScores, spec: PassSpec
    ) -> list[FinishedPass]:
        retain_bytes = self.options.retain_bytes if self.passes.recomputes or not self.options.kept_tokens else 0
        return self.ranks.together(lambda: self.passes.run_all(data, batches, scores, spec, self._next_seed, retain_bytes))

    def _micro_batch_gradient(
        self, data: Sequence[Datum], batch: MicroBatch, loss: Loss, scores: TokenScores, spec: PassSpec
    ) -> None:
        """Forward, loss and backward of one micro-batch, for a loss with independent terms."""
        per_sequence = loss.scope is Scope.sequence
        fuses = self.passes.fuses_gradient(data, batch, spec, per_sequence=per_sequence)
        seed = self._next_seed()
        if not fuses:
            output = self.passes.run(data, batch, scores, spec, training=True, seed=seed)
            indices = sorted(batch.indices)
            columns = scores.part(indices, entropy=spec.entropy)
            grads = self._call_gradients.of_micro_batch(loss, [data[index] for index in indices], *columns)
            self._backward_all(data, [FinishedPass(batch, output, seed)], grads, spec, None)
            return

        active: dict[int, int] = {}

        def gradient_of(indices: Sequence[int], parts: Sequence[Datum], logprobs: Sequence[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                grads = self._call_gradients.of_micro_batch(loss, parts, dict(zip(indices, logprobs, strict=True)))
            for index, count in grads.num_active_by_datum().items():
                active[index] = active.get(index, 0) + count
            return list(grads.logprobs.values())

        root = self.passes.run_with_gradient(data, batch, scores, spec, gradient_of, seed=seed, per_sequence=per_sequence)
        self._is_accumulating = True
        self.gradients.next_pass()
        with self.ranks.lockstep(), self.passes.backward_precision():
            torch.autograd.backward(root)
        self.counts.add(sum(active.values()), sum(count > 0 for count in active.values()))

    def _backward_of_batch(
        self, data: Sequence[Datum], passes: list[FinishedPass], loss: LossFunction, scores: TokenScores, spec: PassSpec
    ) -> ForwardBackwardOutput:
        """Compute the loss of the whole batch, and run the backward pass of every micro-batch."""
        scores.gather(self.ranks)
        grads = self.ranks.on_first(
            lambda: self._call_gradients.of_batch(loss, data, *scores.part(range(len(data)), entropy=spec.entropy))
        )
        weight = self._router_weight(loss, grads)
        router = None if scores.router is None else weight * scores.router.gradient()
        with self.gradients.accumulation(len(passes)):
            self._backward_all(data, passes, grads, spec, router)
        return self.ranks.on_first(lambda: scores.output(data, grads.value, grads.metrics, weight), _without_outputs)

    def _router_weight(self, loss: LossFunction, grads: LossGradient) -> float:
        """Return the factor of the router loss. The router loss is a mean; for a summed loss, multiply by the count."""
        tokens, sequences = grads.num_active()
        times = {Reduction.token_sum: tokens, Reduction.sequence_sum: sequences}
        return self.router_coefficient * (times.get(loss.reduction, 1) if isinstance(loss, Loss) else 1)

    def _backward_all(
        self, data: Sequence[Datum], passes: list[FinishedPass], grads: LossGradient, spec: PassSpec, router: Tensor | None
    ) -> None:
        """Run the backward pass of every micro-batch, given dL/dlogprob; skip those with a zero gradient.

        ``router``: gradient of the router loss with respect to the summed routing probabilities, ``(E,)``.
        """
        self.counts.add(*grads.num_active())
        self._is_accumulating = self._is_accumulating or self.ranks.size > 1
        columns = [grads.logprobs] if grads.entropy is None else [grads.logprobs, grads.entropy]
        # Training mode, so that recomputed layers apply the same dropout.
        self.model.network.train(True)
        has_gradient = [
            router is not None or any(column[index].any() for column in columns for index in saved_pass.batch.indices)
            for saved_pass in passes
        ]
        running = self.ranks.in_step(has_gradient)
        self.gradients.skip_passes(running.count(False))
        for saved_pass, runs in between(zip(passes, running, strict=True), holds_memory=True):
            if runs:
                self.gradients.next_pass()
                output = saved_pass.output or self.passes.run(
                    data, saved_pass.batch, TokenScores(), spec, training=True, seed=saved_pass.seed
                )
                self._backward(output, columns, router)
                del output
            # Free the graph before the next pass.
            saved_pass.output = None

    def _backward(self, output: PassOutput, columns: Sequence[Mapping[int, Tensor]], router: Tensor | None) -> None:
        self._is_accumulating = True
        gradients = output.grad_outputs(columns)
        roots = [root for root in (output.logprobs, output.entropy) if root is not None][: len(gradients)]
        if output.router is not None and router is not None and output.router.probability.requires_grad:
            roots, gradients = [*roots, output.router.probability], [*gradients, router]
        with self.ranks.lockstep(), self.passes.backward_precision():
            torch.autograd.backward(roots, [gradient.to(root) for root, gradient in zip(roots, gradients, strict=True)])

    def _evaluated(
        self, data: Sequence[Datum], scores: TokenScores, loss: LossFunction | None, spec: PassSpec
    ) -> ForwardBackwardOutput:
        """Return the output of the call with the value and metrics of the loss. Only the first rank gets logprobs."""
        scores.gather(self.ranks)
        return self.ranks.on_first(lambda: self._output(data, scores, loss, spec), _without_outputs)

    def _output(
        self, data: Sequence[Datum], scores: TokenScores, loss: LossFunction | None, spec: PassSpec
    ) -> ForwardBackwardOutput:
        if loss is None:
            return scores.output(data, None, {})
        if scores.router is not None:
            # The weight of the router loss depends on the number of tokens with a gradient.
            with torch.enable_grad():
                grads = loss_gradient(loss, data, *scores.part(range(len(data)), entropy=spec.entropy))
            return scores.output(data, grads.value, grads.metrics, self._router_weight(loss, grads))
        with torch.no_grad():
            value, metrics = loss(data, *scores.columns(entropy=spec.entropy))
        return scores.output(data, value, metrics)

    def weights_changed(self) -> None:
        """Count a new version of the weights."""
        self.version += 1
        self.sampler_pass.drop_weights()

    # ---- the step ------------------------------------------------------------------------------------------------

    @led
    def optim_step(self, adam: AdamParams, normalization: Normalization | None) -> OptimStepOutput:
        """Divide the accumulated gradient by the normalization, clip it, update the weights, and clear the gradient.

        If no token has a gradient, the weights do not change, not even by momentum or weight decay; the step still counts.

        Raises:
            NonFiniteError: the gradient is not finite. The weights are unchanged, and the gradient is dropped.
            ConfigError: the accumulated loss is a mean, and ``normalization`` would divide it again.
            BackendError: an earlier forward_backward failed and took the accumulated gradient with it.
        """
        if self.lost_gradient:
            self.discard_gradient()
            raise BackendError(
                "optim_step: the accumulated gradient was dropped because a forward_backward failed during its backward pass; "
                "repeat all forward_backward calls of this step"
            )
        for reduction in self.accumulated:
            if reduction is not None:
                check("optim_step: the accumulated loss", reduction, normalization)
        warn_undeclared(self.undeclared, normalization)
        divisor = self.counts.divisor(normalization)
        norm = self.gradients.norm() / divisor
        clip = min(1.0, adam.grad_clip_norm / (norm + 1e-6)) if adam.grad_clip_norm > 0 else 1.0
        # ``not <``, because comparisons with NaN are false. Clipping makes neither NaN nor infinity finite.
        if not norm * clip < LARGEST_NORM:
            self.discard_gradient()
            raise NonFiniteError(
                f"optim_step: the gradient norm is {norm} after {counted(self.step, 'step')}; lower optim.lr, or inspect the "
                "batch"
            )
        counts = self.counts
        if counts.num_loss_tokens:
            if "adapters" not in self.model.lineage.logged:
                self.model.log_unused_adapters(self.gradients.all())
            self.optimizer.step(adam, clip / divisor)
        self.discard_gradient()
        self.step += 1
        self.weights_changed()
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

    @led
    def discard_gradient(self) -> None:
        """Drop the gradient accumulated since the last optimizer step."""
        self.gradients.clear()
        self.counts = GradientCounts()
        self.accumulated = []
        self.undeclared = []
        self.seeds = 0
        self.lost_gradient = False

    @led
    def adapter_is_idle(self) -> bool:
        """Whether the model has a LoRA adapter whose output is still zero."""
        return self.model.adapter_is_idle()

    @led
    def lose_gradient(self, of_earlier_calls: bool) -> None:
        """Drop an incomplete gradient. If it included a gradient ``of_earlier_calls``, the next optimizer step raises."""
        lost = self.lost_gradient or of_earlier_calls
        self.discard_gradient()
        self.lost_gradient = lost


def _without_outputs(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """Return only the metrics, for the ranks that have no caller."""
    return ForwardBackwardOutput([], output.metrics)
