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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.batching import MicroBatch, collate, plan
from cookbook.engine.datum_check import check_datum
from cookbook.engine.head import OutputHead
from cookbook.engine.loss_gradient import LossFunction, loss_gradient
from cookbook.engine.model import LanguageModel, deprecations_hidden
from cookbook.engine.optimizer import Optimizer
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
    retain_bytes: int = 4 << 30
    activation_checkpointing: bool = False
    activation_offloading: bool = False
    token_metrics: bool = True  # tokens/accuracy and tokens/entropy with every pass
    seed: int = 0


@dataclass
class _Pass:
    """One micro-batch after its forward pass. ``logprobs`` carries its graph, or is None when the graph was not kept."""

    batch: MicroBatch
    logprobs: Tensor | None
    seed: int


@dataclass
class _Scores:
    """What the passes of a call found, per datum, on the CPU."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    hit: dict[int, Tensor] = field(default_factory=dict)

    def ordered(self) -> list[Tensor]:
        return [self.logprobs[index] for index in range(len(self.logprobs))]


class Engine:
    """A model in training. Synchronous; one caller at a time."""

    def __init__(self, model: LanguageModel, options: EngineOptions) -> None:
        self.model = model
        self.options = options
        self.head = OutputHead(model)
        self.step = 0  # finished optimizer steps
        self.version = 0  # changes whenever the weights do
        self.counts = GradientCounts()
        self.accumulated: list[Reduction | None] = []  # what each call since the last step returned
        self.passes = 0  # forward passes of the model since the start: what a loss costs, countable
        self.seeds = 0  # drawn since the last step
        if options.activation_checkpointing:
            with deprecations_hidden():
                model.network.gradient_checkpointing_enable({"use_reentrant": False})

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """Made when first used: a frozen model needs none."""
        return Optimizer(self.model)

    # ---- the calls -----------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss: LossFunction | None = None, *, adapter: bool = True
    ) -> ForwardBackwardOutput:
        """Logprobs of every target, and the loss's value and metrics when one is given. Touches no gradient.

        ``adapter=False`` computes with the base model under a LoRA adapter.
        """
        scores = _Scores()
        batches = self._plan(data)
        if isinstance(loss, Loss):
            loss.check_data(data)
        with torch.no_grad(), self._adapter(adapter):
            for batch in batches:
                self._forward(data, batch, scores, training=False, seed=0)
            logprobs = scores.ordered()
            value, metrics = loss(data, logprobs) if loss else (None, {})
        return self._output(data, scores, value, metrics)

    def forward_backward(self, data: Sequence[Datum], loss: LossFunction) -> ForwardBackwardOutput:
        """Adds the gradient of ``loss`` to what has accumulated since the last step.

        Raises:
            DataError: a datum lacks what the model or the loss needs.
            BackendError: the loss is not a finite scalar, or does not depend on the logprobs.
            ConfigError: a second call with a mean before a step.
        """
        self._may_accumulate(loss)
        scores = _Scores()
        batches = self._plan(data)
        if isinstance(loss, Loss):
            loss.check_data(data)
        # Terms of one token each need no other micro-batch: nothing is kept. Every other loss sees the whole batch at once.
        apart = isinstance(loss, Loss) and loss.scope is Scope.token and len(batches) > 1
        for group in [[batch] for batch in batches] if apart else [batches]:
            passes = self._forward_all(data, group, scores)
            indices = sorted(index for batch in group for index in batch.indices)
            logprobs = {index: scores.logprobs[index] for index in indices}
            value, metrics, gradients = loss_gradient(loss, [data[index] for index in indices], logprobs)
            self._backward_all(data, passes, gradients)
        if apart:
            with torch.no_grad():
                value, metrics = loss(data, scores.ordered())
        return self._output(data, scores, value, metrics)

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
        norm = self.optimizer.grad_norm(divisor)
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
        for _, parameter in self.model.trainable():
            parameter.grad = None
        self.counts = GradientCounts()
        self.accumulated = []
        self.seeds = 0

    # ---- the two halves ------------------------------------------------------------------------------------------

    def _forward_all(self, data: Sequence[Datum], batches: list[MicroBatch], scores: _Scores) -> list[_Pass]:
        """Runs every pass; keeps the graphs that fit, and of the rest only the logprobs."""
        room = self.options.retain_bytes
        kept = 0
        passes = []
        for batch in batches:
            seed = self._next_seed()
            need = batch.num_tokens * self._bytes_per_token()
            keep = len(batches) == 1 or need <= room
            with contextlib.nullcontext() if keep else torch.no_grad():
                logprobs = self._forward(data, batch, scores, training=True, seed=seed)
            if keep:
                room -= need
                kept += 1
            passes.append(_Pass(batch, logprobs if keep else None, seed))
        if kept < len(passes):
            log.info("kept the graphs of %d of %d micro-batches; the rest is computed twice", kept, len(passes))
        return passes

    def _backward_all(self, data: Sequence[Datum], passes: list[_Pass], gradients: dict[int, Tensor]) -> None:
        for one in passes:
            rows = [gradients[index] for index in one.batch.indices]
            gradient = torch.cat(rows)
            if not gradient.any():
                one.logprobs = None
                continue
            logprobs = one.logprobs
            if logprobs is None:
                logprobs = self._forward(data, one.batch, _Scores(), training=True, seed=one.seed)
            torch.autograd.backward(logprobs, gradient.to(logprobs))
            one.logprobs = None  # frees the graph before the next pass
            active = [row.reshape(len(row), -1).ne(0).any(-1).sum().item() for row in rows]
            self.counts.add(int(sum(active)), sum(count > 0 for count in active))

    def _forward(self, data: Sequence[Datum], batch: MicroBatch, scores: _Scores, *, training: bool, seed: int) -> Tensor:
        """One pass. Files what it found under ``scores``; returns logprobs ``(N, ...)`` in the order of ``batch.indices``."""
        device = self.model.device
        inputs = collate(data, batch, device)
        targets = torch.cat([_targets(data[index]) for index in batch.indices]).to(device)
        arguments: dict[str, Any] = {"input_ids": inputs.input_ids}
        if inputs.position_ids is not None:
            arguments["position_ids"] = inputs.position_ids
        self.passes += 1
        self.model.network.train(training)
        with self._randomness(training, seed), self._offloading():
            hidden = self.head.hidden_states(**arguments)
            hidden = hidden.reshape(-1, hidden.shape[-1])[inputs.places]
            found = self.head.scores(hidden, targets, metrics=self.options.token_metrics)
        lengths = [data[index].model_input.length for index in batch.indices]
        for store, values in ((scores.logprobs, found.logprobs), (scores.entropy, found.entropy), (scores.hit, found.hit)):
            if values is not None:
                parts = torch.split(values.detach().cpu(), lengths)
                store.update(zip(batch.indices, parts, strict=True))
        return found.logprobs

    # ---- what surrounds a pass -----------------------------------------------------------------------------------

    def _plan(self, data: Sequence[Datum]) -> list[MicroBatch]:
        if not data:
            raise DataError("forward_backward: got no datums; pass at least one")
        vocabulary = self.model.network.config.get_text_config().vocab_size
        for index, datum in enumerate(data):
            check_datum(datum, index, vocabulary, self.model.max_length)
        by_width: dict[int, list[int]] = {}  # top-K targets of one K share a pass
        for index, datum in enumerate(data):
            shape = datum.loss_fn_inputs["target_tokens"].shape
            by_width.setdefault(shape[1] if len(shape) > 1 else 0, []).append(index)
        return [batch for indices in by_width.values() for batch in self._plan_some(data, indices)]

    def _plan_some(self, data: Sequence[Datum], indices: list[int]) -> Iterator[MicroBatch]:
        lengths = [data[index].model_input.length for index in indices]
        for batch in plan(lengths, self.options.micro_batch_tokens, self._packing()):
            yield MicroBatch([[indices[i] for i in row] for row in batch.rows], batch.width)

    def _packing(self) -> str:
        return self.options.packing if self.options.packing == "padded" or self.model.packs else "padded"

    def _bytes_per_token(self) -> int:
        """What autograd keeps per token: about 100 activations of the hidden size a layer, 8 when layers are recomputed.

        Measured on Qwen3-shaped models in float32 with saved-tensor hooks.
        """
        config = self.model.network.config.get_text_config()
        per_layer = 8 if self.options.activation_checkpointing or self.options.activation_offloading else 100
        element = next(self.model.network.parameters()).element_size()
        return int(per_layer * config.hidden_size * config.num_hidden_layers * element)

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

    @contextlib.contextmanager
    def _randomness(self, training: bool, seed: int) -> Iterator[None]:
        """Dropout drawn from the pass's own seed, so that a pass computed twice drops the same, and a resumed run too."""
        if not (training and self._drops_out):
            yield
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    @functools.cached_property
    def _drops_out(self) -> bool:
        config = self.model.network.config.get_text_config().to_dict()
        configured = any("drop" in name and isinstance(value, float) and value > 0 for name, value in config.items())
        layers = (layer for layer in self.model.network.modules() if isinstance(layer, torch.nn.Dropout))
        return configured or any(layer.p > 0 for layer in layers)

    def _offloading(self) -> contextlib.AbstractContextManager[Any]:
        if not self.options.activation_offloading or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.model.device.type == "cuda")

    def _adapter(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if enabled else self.model.network.disable_adapter()

    def _output(
        self, data: Sequence[Datum], scores: _Scores, value: Tensor | None, metrics: Mapping[str, float]
    ) -> ForwardBackwardOutput:
        outputs = [{"logprobs": TensorData.from_torch(logprobs)} for logprobs in scores.ordered()]
        found = {**metrics, **_token_metrics(data, scores)}
        if value is not None:
            found = {"loss": float(value), "loss:sum": float(value), **found}
        return ForwardBackwardOutput(outputs, found)


def _targets(datum: Datum) -> Tensor:
    return torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array).long()


def _token_metrics(data: Sequence[Datum], scores: _Scores) -> dict[str, float]:
    """Means over the tokens whose weight is not zero: every token where a datum has no weights."""
    if not scores.entropy:
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
