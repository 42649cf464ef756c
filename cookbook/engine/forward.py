"""Forward passes: from micro-batches to log-probabilities of the selected tokens, with or without autograd graphs.

:class:`ForwardRunner` runs the passes in order. A :class:`PassSpec` lists the values that a call needs. A :class:`PassOutput`
holds the values of one pass with their graph. :class:`TokenScores` collects the values of all passes, by datum and without
graphs, and builds the output of the call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.attention import skip_masks
from cookbook.engine.batch.collate import TokenSelection, collate
from cookbook.engine.batch.plan import MicroBatch, PrefixGroup
from cookbook.engine.head.linear_logprobs import HeadImpl
from cookbook.engine.head.output_head import OutputHead
from cookbook.engine.layers import last_layer_parts, trimmable_parts
from cookbook.engine.layers.fused import only_rows
from cookbook.engine.loss_gradient import SavedBytes, number
from cookbook.engine.model import LanguageModel
from cookbook.engine.offload import offloading
from cookbook.engine.parallel import Ranks
from cookbook.engine.precision import DEFAULT, Precision
from cookbook.engine.ranks.commands import PerRank
from cookbook.engine.router_loss import RouterLoad, router_load
from cookbook.futures import between
from cookbook.types import Array, Datum, ForwardBackwardOutput, ModelInput, TensorData

TRIAL_TOKENS = 32
# Dummy datum of a filler pass: sharded ranks must run the same number of passes.
FILLER_DATUM = Datum(ModelInput.from_ints([0, 0]), {"target_tokens": np.zeros(2, dtype=np.int64)})
# Positions whose full logits are in memory at a time while the top-k tokens are computed.
TOP_ROWS = 256


@dataclass(frozen=True)
class PassSpec:
    """Values that a call needs besides the logprobs, and the tokens to score."""

    # Entropy and top-1 hit of every token, as metrics without a graph.
    metrics: bool = True
    # Entropy of every token, with its graph.
    entropy: bool = False
    # Router probabilities of a mixture of experts, with their graph.
    router: bool = False
    # True: score tokens with nonzero weight only; false: all tokens.
    weighted_only: bool = False


@dataclass
class PassOutput:
    """Scores of the ``N`` selected tokens of one pass, with their graph.

    ``logprobs``: ``(N,)`` or ``(N, K)``. ``entropy``: ``(N,)``. ``num_bytes``: memory that the graph holds.
    """

    tokens: TokenSelection
    logprobs: Tensor
    entropy: Tensor | None
    router: RouterLoad | None
    num_bytes: int
    # Whether the pass computes FILLER_DATUM; its gradient is zero.
    is_filler: bool = False

    def grad_outputs(self, columns: Sequence[Mapping[int, Tensor]]) -> list[Tensor]:
        """Return the gradients to backpropagate, for the pass's tokens; ``columns`` hold the gradients by datum."""
        if self.is_filler:
            return [torch.zeros_like(self.logprobs, requires_grad=False) for _ in columns]
        return [self.tokens.gather(column) for column in columns]


@dataclass
class TokenScores:
    """Scores of all tokens of a call, by datum, on the CPU, without graphs.

    ``unselected``: mask of the tokens that were not scored, for the datums that have such tokens; their scores are 0.
    """

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    hit: dict[int, Tensor] = field(default_factory=dict)
    unselected: dict[int, Tensor] = field(default_factory=dict)
    router: RouterLoad | None = None
    _gathered: bool = False

    def gather(self, ranks: Ranks) -> None:
        """Collect the scores of all ranks on the first rank, and sum the router load over all ranks."""
        columns = (self.logprobs, self.entropy, self.hit, self.unselected)
        if ranks.size == 1 or self._gathered:
            return
        self._gathered = True
        # As arrays: a tensor is pickled with its whole storage, and these are views of larger tensors.
        own = [{index: row.numpy() for index, row in column.items()} for column in columns]
        parts = ranks.gathered((own if ranks.rank else None, self.router))
        if ranks.rank == 0:
            for of_rank, _ in parts[1:]:
                for column, rows in zip(columns, of_rank or [], strict=True):
                    column.update({index: torch.from_numpy(row) for index, row in rows.items()})
        loads = [load for _, load in parts if load is not None]
        self.router = functools.reduce(operator.add, loads) if loads else None

    def add(self, tokens: TokenSelection, logprobs: Tensor, entropy: Tensor | None, hit: Tensor | None) -> None:
        self.unselected.update(tokens.unselected_masks())
        columns = (self.logprobs, self.entropy, self.hit)
        for column, values in zip(columns, _on_host([logprobs, entropy, hit]), strict=True):
            if values is not None:
                column.update(tokens.scatter(values))

    def part(self, indices: Sequence[int], *, entropy: bool) -> tuple[dict[int, Tensor], dict[int, Tensor] | None]:
        """Return the logprobs of some datums, and their entropies if ``entropy``."""
        return {index: self.logprobs[index] for index in indices}, (
            {index: self.entropy[index] for index in indices} if entropy else None
        )

    def columns(self, *, entropy: bool) -> list[list[Tensor]]:
        """Return the arguments of a loss after the datums: lists of logprobs and, if ``entropy``, of entropies, by datum."""
        columns = [self.logprobs, self.entropy] if entropy else [self.logprobs]
        return [[column[index] for index in range(len(column))] for column in columns]

    def output(
        self, data: Sequence[Datum], value: Tensor | None, metrics: Mapping[str, float | Tensor], router_weight: float = 0.0
    ) -> ForwardBackwardOutput:
        """Build the output of the call: the logprobs, NaN at tokens that were not scored, and the loss and its metrics."""
        for index, mask in self.unselected.items():
            logprobs = self.logprobs[index]
            self.logprobs[index] = logprobs.masked_fill(mask if logprobs.ndim == 1 else mask[:, None], float("nan"))
        outputs = [{"logprobs": TensorData.from_torch(self.logprobs[index])} for index in range(len(self.logprobs))]
        numbers = {key: number(key, metric) for key, metric in metrics.items()} | self._token_metrics(data)
        if value is not None:
            total = float(value)
            if self.router is not None:
                numbers["loss/router"] = float(self.router.loss())
                total += router_weight * numbers["loss/router"]
            numbers = {"loss": total, "loss:sum": total, **numbers}
        return ForwardBackwardOutput(outputs, numbers)

    def _token_metrics(self, data: Sequence[Datum]) -> dict[str, float]:
        """Average over the tokens with nonzero weight; without weights, over all tokens of the datum."""
        if not self.hit:
            return {}
        entropy, hit, count = 0.0, 0.0, 0
        for index, datum in enumerate(data):
            mask: slice | Tensor = slice(None)
            if "weights" in datum.loss_fn_inputs:
                weights = datum.loss_fn_inputs["weights"].array
                mask = torch.from_numpy(weights.reshape(len(weights), -1).any(-1)) if weights.ndim else slice(None)
            hits = self.hit[index][mask]
            entropy += float(self.entropy[index][mask].double().sum())
            hit += float(hits.sum())
            count += hits.numel()
        if not count:
            return {}
        return {"tokens/accuracy": hit / count, "tokens/entropy": entropy / count, "tokens/trained": float(count)}


def _on_host(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return detached copies on the CPU. A GPU sends all of them in one copy, because the host waits for every copy."""
    detached = [None if value is None else value.detach() for value in values]
    present = [tensor for tensor in detached if tensor is not None]
    if present[0].device.type == "cpu":
        return detached
    # Logprobs are float32 or wider, and represent the hits, which are 0 or 1, exactly.
    wide = torch.promote_types(present[0].dtype, torch.float32)
    flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in present]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in present]))
    return [None if tensor is None else next(parts).view(tensor.shape).to(tensor.dtype) for tensor in detached]


def empty_output(with_loss: bool = True) -> ForwardBackwardOutput:
    """Return the output of a call without datums. The loss is an empty sum, 0."""
    return ForwardBackwardOutput([], {"loss": 0.0, "loss:sum": 0.0} if with_loss else {})


@dataclass
class FinishedPass:
    """One micro-batch after its forward pass. ``output`` holds the graph; None: dropped, to be recomputed with ``seed``."""

    batch: MicroBatch
    output: PassOutput | None
    seed: int


@dataclass
class Retained(PerRank):
    """Forward passes of a call, kept for one later backward pass. Invalid once the weights change.

    ``num_bytes``: approximate memory of the graphs, which are freed when this object is used or dropped.
    """

    data: Sequence[Datum]
    passes: list[FinishedPass]
    scores: TokenScores
    version: int
    num_bytes: int
    entropy: bool

    def matches(self, data: Sequence[Datum]) -> bool:
        """Whether ``data`` has the same tokens, targets and temperatures; other loss inputs may differ."""
        return len(data) == len(self.data) and all(_has_same_logprobs(*pair) for pair in zip(data, self.data, strict=True))


def _has_same_logprobs(first: Datum, second: Datum) -> bool:
    """Whether the model computes the same logprobs for both datums."""
    keys = ("target_tokens", "temperature")
    pairs = [(first.loss_fn_inputs.get(key), second.loss_fn_inputs.get(key)) for key in keys]
    return first.model_input.tokens == second.model_input.tokens and all(
        a is b or (a is not None and b is not None and np.array_equal(a.array, b.array)) for a, b in pairs
    )


def _selected(flat_indices: Tensor, tokens: TokenSelection) -> Tensor:
    return flat_indices if len(tokens) == len(flat_indices) else flat_indices[tokens.rows()]


def _filler_pass(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch of :data:`FILLER_DATUM` only, in the layout of ``batch``."""
    length = FILLER_DATUM.model_input.length
    return MicroBatch([PrefixGroup((0,), length)], None if batch.width is None else length, length)


@dataclass
class PassPart:
    """The datums of one adapter in a pass that several adapters share, and their scores.

    ``runner``: the runner of the adapter's model. ``batch``: the packed layout of the datums, by their indices in ``data``.
    """

    runner: ForwardRunner
    data: Sequence[Datum]
    batch: MicroBatch
    spec: PassSpec
    scores: TokenScores = field(default_factory=TokenScores)


GradientOf = Callable[[Sequence[int], Sequence[Datum], Sequence[Tensor]], Sequence[Tensor]]
"""``gradient_of(indices, datums, logprobs) -> dL/dlogprob`` of each datum, ``(T, ...)``; a datum may be cut to some tokens."""


class ForwardRunner:
    """Runs a model on micro-batches.

    ``recomputes``: activation checkpointing is on. ``offload``: saved activations are kept in CPU memory until the backward
    pass. ``like``: the runner of a model of the same architecture, whose verified fast paths are used without a new trial.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        offload: bool,
        head_impl: HeadImpl = "auto",
        head_options: Mapping[str, object] | None = None,
        precision: Precision = DEFAULT,
        like: ForwardRunner | None = None,
    ) -> None:
        self.model = model
        self.head: OutputHead = OutputHead(model, head_impl, head_options, like.head if like else None)
        if like is not None:
            self.last_layer = last_layer_parts(model) if like.last_layer else []
        self.recomputes = False
        self.trims_last_layer = False
        # Number of passes so far.
        self.count = 0
        # Largest number of bytes per token that a pass has saved for its backward pass.
        self.bytes_per_token = 0.0
        # Tokens that this rank has computed, without filler passes.
        self.num_tokens = 0
        self.ranks = model.ranks
        # Precision of the passes, which samplers share.
        self.precision: Precision = like.precision if like else precision.tried(model)
        self.forward_precision, self.backward_precision = self.precision.contexts(model)
        self._offload = offload

    def run(
        self, data: Sequence[Datum], batch: MicroBatch, scores: TokenScores, spec: PassSpec, *, training: bool, seed: int
    ) -> PassOutput:
        """Run one pass, add its scores to ``scores``, and return them with their graph."""
        if is_filler := not batch.groups:
            data, batch, scores, spec = [FILLER_DATUM], _filler_pass(batch), TokenScores(), replace(spec, router=False)
        tokens = TokenSelection.of(data, batch.indices, weighted_only=spec.weighted_only)

        def compute() -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, RouterLoad | None, SavedBytes]:
            with self._pass_context(training=training, seed=seed) as saved:
                targets, temperature = self._targets(data, tokens)
                hidden, router = self._hidden(data, batch, tokens, spec)
                head = self.head.scores(hidden, targets, temperature, metrics=spec.metrics, entropy=spec.entropy)
            # Returned separately: FSDP2 registers its backward hooks on tensors among the results, not inside objects.
            probability = None if router is None else router.probability
            return head.logprobs, head.entropy, head.hit, probability, router, saved

        logprobs, entropies, hit, probability, router, saved = self.ranks.inside(compute)
        if router is not None and probability is not None:
            router = replace(router, probability=probability)
        self._count(batch, saved, is_filler)
        scores.add(tokens, logprobs, entropies, hit)
        if router is not None:
            scores.router = router.detached() if scores.router is None else scores.router + router.detached()
        num_bytes = saved.total + self._uncounted_bytes(batch)
        return PassOutput(tokens, logprobs, entropies if spec.entropy else None, router, num_bytes, is_filler)

    def run_parts(self, data: Sequence[Datum], batch: MicroBatch, parts: Mapping[int, PassPart]) -> list[PassOutput]:
        """Run one pass over the datums of several adapters, in training mode, and return the output of each of ``parts``.

        The caller has grouped the products of the adapters. The keys of ``parts`` are values of ``batch.parts``; the datums of
        the other values are not scored. The output layer runs for one part after the other, because some of its steps depend
        on all values of a call: so the bits of a part depend on its own values, and on the shape of the pass, only.
        """
        device = self.model.device
        tokens = {
            number: TokenSelection.of(part.data, part.batch.indices, weighted_only=part.spec.weighted_only)
            for number, part in parts.items()
        }
        # The graph is freed before the call returns, so its bytes are of no use.
        with self._pass_context(training=True, seed=0, counts=False):
            targets = {number: part.runner._targets(part.data, tokens[number]) for number, part in parts.items()}
            inputs = collate(data, batch, device)
            lengths = torch.tensor([data[index].model_input.length for index in batch.indices])
            owners = torch.tensor([batch.parts[index] for index in batch.indices]).repeat_interleave(lengths)
            rows = [_selected(inputs.flat_indices[owners == number], selection) for number, selection in tokens.items()]
            selected = torch.cat(rows).to(device)
            with skip_masks(inputs.layout is not None):
                hidden, _ = self.head.hidden_states(**inputs.arguments)
            # One selection for all parts: the gradient of each has the size of the whole pass.
            of_parts = torch.split(hidden.reshape(-1, hidden.shape[-1])[selected], [len(part_rows) for part_rows in rows])
            outputs = []
            for (number, part), states in zip(parts.items(), of_parts, strict=True):
                scores = part.runner.head.scores(states, *targets[number], metrics=part.spec.metrics, entropy=part.spec.entropy)
                part.scores.add(tokens[number], scores.logprobs, scores.entropy, scores.hit)
                entropy = scores.entropy if part.spec.entropy else None
                outputs.append(PassOutput(tokens[number], scores.logprobs, entropy, None, 0))
        self.count += 1
        self.num_tokens += batch.num_tokens
        return outputs

    def _count(self, batch: MicroBatch, saved: SavedBytes, is_filler: bool) -> None:
        if not is_filler:
            self.num_tokens += batch.num_tokens
            self.bytes_per_token = max(self.bytes_per_token, saved.total / batch.num_tokens)

    def trial_bytes_per_token(self) -> float:
        """Measure the bytes of saved activations per token, without the output layer, in a trial forward pass."""
        self.model.network.eval()
        ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.long, device=self.model.device)
        saved = SavedBytes(self.ranks.weights(self.model.network))

        def compute() -> Tensor:
            with saved.counted():
                return self.head.hidden_states(input_ids=ids)[0]

        self.ranks.inside(compute)
        return saved.total / TRIAL_TOKENS

    @torch.no_grad()
    def top_logprobs(self, tokens: list[int], k: int, temperature: float = 1.0) -> tuple[Array, Array]:
        """Return the ``k`` most likely next tokens after each token but the last, most likely first.

        Returns token ids ``(T-1, k)`` int32, and logprobs at ``temperature`` ``(T-1, k)`` float32.
        """
        if len(tokens) < 2:
            return np.zeros((0, k), dtype=np.int32), np.zeros((0, k), dtype=np.float32)
        self.model.network.eval()

        def compute() -> tuple[Tensor, Tensor]:
            with self.forward_precision():
                hidden, _ = self.head.hidden_states(input_ids=torch.tensor([tokens[:-1]], device=self.model.device))
                # In chunks, because each row of logits has the length of the vocabulary.
                logits = (self._logits(rows) / temperature for rows in torch.split(hidden[0], TOP_ROWS))
                parts = [part.log_softmax(-1).topk(k) for part in logits]
            return torch.cat([part[1] for part in parts]).cpu(), torch.cat([part[0] for part in parts]).cpu()

        ids, logprobs = self.ranks.inside(compute)
        return ids.to(torch.int32).numpy(), logprobs.numpy()

    @torch.no_grad()
    def target_logprobs(self, tokens: list[int], rows: Array, ids: Array) -> Array:
        """Return the logprobs at temperature 1 of the tokens ``ids``, each after the token at its position in ``rows``.

        ``rows`` and ``ids`` are ``(N,)``; ``rows`` holds positions from 0 to T-2. Returns ``(N,)`` float32.
        """
        self.model.network.eval()
        pairs = torch.from_numpy(np.asarray(rows)), torch.from_numpy(np.asarray(ids))

        def compute() -> Tensor:
            values = torch.zeros(len(pairs[0]))
            with self.forward_precision():
                hidden, _ = self.head.hidden_states(input_ids=torch.tensor([tokens[:-1]], device=self.model.device))
                for number, part in enumerate(torch.split(hidden[0], TOP_ROWS)):
                    places = torch.nonzero(pairs[0] // TOP_ROWS == number)[:, 0]
                    if len(places):
                        logprobs = self._logits(part).log_softmax(-1).cpu()
                        values[places] = logprobs[pairs[0][places] - number * TOP_ROWS, pairs[1][places]].float()
            return values

        return self.ranks.inside(compute).numpy()

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.head
        if self.precision.autocast:
            return head.logits(hidden)
        return (hidden if head.transform is None else head.transform(head.layer(hidden))).float()

    def run_all(
        self,
        data: Sequence[Datum],
        batches: Sequence[MicroBatch],
        scores: TokenScores,
        spec: PassSpec,
        next_seed: Callable[[], int],
        retain_bytes: int,
    ) -> list[FinishedPass]:
        """Run every pass in training mode. Keep the first graph, and the other graphs that fit into ``retain_bytes``."""
        free_bytes: float = retain_bytes
        # Largest graph of an earlier pass, in bytes per token: the estimate for the next pass.
        per_token = 0.0
        passes = []
        for batch in between(batches, holds_memory=True):
            seed = next_seed()
            fits = batch is batches[0] or batch.num_tokens * per_token <= free_bytes
            # Sharded ranks run the same passes: if one rank must recompute a pass, all ranks do.
            keep = not self.ranks.in_step([not fits])[0]
            with contextlib.nullcontext() if keep else torch.no_grad():
                output = self.run(data, batch, scores, spec, training=True, seed=seed)
            if keep:
                free_bytes -= output.num_bytes
                per_token = max(per_token, output.num_bytes / max(batch.num_tokens, 1))
            passes.append(FinishedPass(batch, output if keep else None, seed))
        if any(saved_pass.output is None for saved_pass in passes):
            note = "the graphs of some micro-batches exceed backend.retain_gb; their forward passes run twice"
            self.model.log_once("retain", note)
        return passes

    def fuses_gradient(self, data: Sequence[Datum], batch: MicroBatch, spec: PassSpec, *, per_sequence: bool) -> bool:
        """Whether :meth:`run_with_gradient` is faster for a loss with independent terms.

        ``per_sequence``: each term needs all tokens of a datum, so a chunk of the output layer must hold whole datums.
        """
        # Decide in training mode: an adapter with active dropout makes the output layer nonlinear.
        self.model.network.train(True)
        if spec.entropy or spec.router or not batch.groups or not self.head.fuses_gradient(batch.num_tokens):
            return False
        return not per_sequence or not self.head.fuses_gradient(max(data[index].model_input.length for index in batch.indices))

    def run_with_gradient(
        self,
        data: Sequence[Datum],
        batch: MicroBatch,
        scores: TokenScores,
        spec: PassSpec,
        gradient_of: GradientOf,
        *,
        seed: int,
        per_sequence: bool,
    ) -> Tensor:
        """Run one pass whose output layer computes its gradients in the forward pass, chunk by chunk.

        For a loss that is a sum over tokens or, with ``per_sequence``, over datums. ``gradient_of`` is called once per chunk of
        selected tokens; with ``per_sequence``, a chunk holds whole datums only.

        Returns:
            A scalar; its backward pass continues from the output layer's gradients into the model.
        """
        tokens = TokenSelection.of(data, batch.indices, weighted_only=spec.weighted_only)

        def gradient_of_rows(rows: slice, logprobs: Tensor) -> Tensor:
            if not len(logprobs):
                return logprobs
            indices, parts = zip(*tokens.parts(data, rows), strict=True)
            columns = torch.split(logprobs.cpu(), [part.model_input.length for part in parts])
            return torch.cat(list(gradient_of(indices, parts, columns))).to(logprobs)

        def compute() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            with self._pass_context(training=True, seed=seed):
                targets, temperature = self._targets(data, tokens)
                hidden, _ = self._hidden(data, batch, tokens, spec)
                ends = tokens.datum_ends if per_sequence else None
                head = self.head.scores_with_gradient(
                    hidden, targets, temperature, gradient_of_rows, boundaries=ends, metrics=spec.metrics
                )
            return head.surrogate, head.logprobs, head.entropy, head.hit

        surrogate, logprobs, entropies, hit = self.ranks.inside(compute)
        self.num_tokens += batch.num_tokens
        scores.add(tokens, logprobs, entropies, hit)
        return surrogate

    def _targets(self, data: Sequence[Datum], tokens: TokenSelection) -> tuple[Tensor, Tensor | None]:
        """Return the targets of the selected tokens, and their temperatures or None, on the model's device.

        Call before the network runs: a copy from pageable memory to a GPU waits for the kernels that are already queued.
        """
        temperatures = tokens.temperatures(data)
        targets = tokens.targets(data).to(self.model.device)
        return targets, None if temperatures is None else temperatures.to(self.model.device)

    def _hidden(
        self, data: Sequence[Datum], batch: MicroBatch, tokens: TokenSelection, spec: PassSpec
    ) -> tuple[Tensor, RouterLoad | None]:
        """Return the hidden states of the selected tokens, ``(N, H)``, and the router load of all tokens if needed."""
        inputs = collate(data, batch, self.model.device)
        arguments = inputs.arguments
        if spec.router:
            arguments["output_router_logits"] = True
        self.count += 1
        every = inputs.flat_indices
        selected = _selected(every, tokens)
        trimmed = self._trimmed(selected, inputs.input_ids.numel(), spec)
        # Copied before the network runs, for the reason given in _targets.
        selected = selected.to(self.model.device)
        routed = every.to(self.model.device) if spec.router else None
        with skip_masks(inputs.layout is not None), trimmed:
            hidden, router_logits = self.head.hidden_states(**arguments)
        router = None if routed is None else router_load(router_logits, routed, self._top_k)
        return hidden.reshape(-1, hidden.shape[-1])[selected], router

    def _trimmed(self, selected: Tensor, total: int, spec: PassSpec) -> contextlib.AbstractContextManager[None]:
        """Context in which the last layer computes only the selected tokens, if that is exact and saves time.

        Not exact with a router loss, which reads all tokens, or with dropout, whose random numbers depend on the shape.
        """
        if not self.trims_last_layer or spec.router or self.has_dropout:
            return contextlib.nullcontext()
        # A shared prefix token belongs to several sequences, but is computed once.
        rows = torch.from_numpy(np.unique(selected.numpy()))
        # If most rows are needed, selecting and scattering them costs more than it saves.
        if not 0 < len(rows) <= 0.9 * total:
            return contextlib.nullcontext()
        return only_rows(self.last_layer, rows.to(self.model.device))

    def verify_last_layer(self) -> None:
        """Find out now which modules of the last layer can be trimmed. This needs unsharded weights."""
        self.last_layer = trimmable_parts(self.model)

    @functools.cached_property
    def last_layer(self) -> list[torch.nn.Module]:
        """Modules of the last layer that can compute a subset of the tokens."""
        return trimmable_parts(self.model)

    @contextlib.contextmanager
    def _pass_context(self, *, training: bool, seed: int, counts: bool = True) -> Iterator[SavedBytes]:
        """Context of one pass: training mode, random seed, and saved activations that are offloaded, or counted."""
        self.model.network.train(training)
        weights = list(self.ranks.weights(self.model.network))
        saved = SavedBytes(weights)
        with self._randomness(training, seed), self.forward_precision():
            if self._offload and torch.is_grad_enabled():
                with offloading(weights, self.model.device):
                    yield saved
            else:
                with saved.counted() if counts else contextlib.nullcontext():
                    yield saved

    def _uncounted_bytes(self, batch: MicroBatch) -> int:
        """Estimate the memory of a graph that :class:`SavedBytes` does not see with activation checkpointing or offloading."""
        if not (self.recomputes or self._offload):
            return 0
        config = self.model.network.config.get_text_config()
        element: int = next(self.model.network.parameters()).element_size()
        return 8 * int(config.hidden_size) * int(config.num_hidden_layers) * element * batch.num_tokens

    @property
    def _top_k(self) -> int:
        return int(self.model.network.config.get_text_config().num_experts_per_tok)

    @contextlib.contextmanager
    def _randomness(self, training: bool, seed: int) -> Iterator[None]:
        """Context that seeds dropout per pass, so that a recomputed pass and a resumed run apply the same dropout."""
        if not (training and self.has_dropout):
            yield
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    @functools.cached_property
    def has_dropout(self) -> bool:
        """Whether a pass in training mode differs from a pass in evaluation mode."""
        layers = (layer for layer in self.model.network.modules() if isinstance(layer, torch.nn.Dropout))
        if any(layer.p > 0 for layer in layers):
            return True
        # With model.dropout set, the configuration's own probabilities are not in use.
        if self.model.config.dropout is not None:
            return self.model.config.dropout > 0
        config = self.model.network.config.get_text_config().to_dict()
        # These options belong to heads for other tasks.
        heads = ("classifier", "summary")
        return any(
            any(word in name for word in ("drop", "jitter", "noise"))
            and not name.startswith(heads)
            and isinstance(value, float)
            and value > 0
            for name, value in config.items()
        )
