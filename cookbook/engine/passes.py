"""One forward pass after the other, over the micro-batches of a call, and what they find."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.attention import by_layout
from cookbook.engine.collate import collate
from cookbook.engine.head import OutputHead
from cookbook.engine.last_layer import LastLayer, worth_it
from cookbook.engine.linear_logprobs import HeadImpl
from cookbook.engine.model import LanguageModel
from cookbook.engine.offload import offloading
from cookbook.engine.planning import MicroBatch
from cookbook.engine.router_loss import RouterLoad, router_load
from cookbook.engine.saved import SavedBytes
from cookbook.engine.scored import ScoredTokens, piece_of
from cookbook.types import Datum


@dataclass(frozen=True)
class Wanted:
    """What a call needs of every token besides its logprob, and of which tokens."""

    metrics: bool = True  # entropy and hit, as numbers
    entropy: bool = False  # entropy, with its graph
    router: bool = False  # how tokens were routed, with its graph
    weighted_only: bool = False  # nothing of tokens of weight 0


@dataclass
class Found:
    """What one pass found of its scored tokens, with its graph: ``logprobs`` ``(N,)`` or ``(N, K)``, ``entropy`` ``(N,)``."""

    tokens: ScoredTokens
    logprobs: Tensor
    entropy: Tensor | None
    router: RouterLoad | None
    num_bytes: int  # kept for the backward pass, as far as autograd keeps it


@dataclass
class Scores:
    """What the passes of a call found, per datum, on the CPU, without graphs; 0 at tokens that were ``left_out``."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    hit: dict[int, Tensor] = field(default_factory=dict)
    left_out: dict[int, Tensor] = field(default_factory=dict)
    router: RouterLoad | None = None

    def add(self, tokens: ScoredTokens, logprobs: Tensor, entropy: Tensor | None, hit: Tensor | None) -> None:
        self.left_out.update(tokens.left_out())
        for column, values in ((self.logprobs, logprobs), (self.entropy, entropy), (self.hit, hit)):
            if values is not None:
                column.update(tokens.spread(values.detach().cpu()))

    def part(self, indices: Sequence[int], *, entropy: bool) -> tuple[dict[int, Tensor], dict[int, Tensor] | None]:
        """The logprobs of some datums, and their entropies when wanted."""
        return {index: self.logprobs[index] for index in indices}, (
            {index: self.entropy[index] for index in indices} if entropy else None
        )

    def ordered(self) -> list[Tensor]:
        return [self.logprobs[index] for index in range(len(self.logprobs))]


SlopesOf = Callable[[Sequence[int], Sequence[Datum], Sequence[Tensor]], Sequence[Tensor]]
"""From indices, datums (or pieces of them) and their logprobs, ``(T, ...)``, to dL/dlogprob of each."""


class Passes:
    """Runs a model over micro-batches."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        offload: bool,
        head_impl: HeadImpl = "auto",
        head_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.head = OutputHead(model, head_impl, head_options)
        self.trims_last_layer = False
        self.count = 0  # since the start: what a loss costs, countable
        self.bytes_per_token = 0.0  # the most that a pass has kept for its backward pass
        self._offload = offload

    def run(
        self, data: Sequence[Datum], batch: MicroBatch, scores: Scores, wanted: Wanted, *, training: bool, seed: int
    ) -> Found:
        """One pass. Files what it found under ``scores``; returns it, with its graph."""
        tokens = ScoredTokens.of(data, batch.indices, weighted_only=wanted.weighted_only)
        with self._surroundings(batch, training=training, seed=seed) as saved:
            targets, temperature = self._targets(data, tokens)  # before the GPU is at work: what is brought to it waits for it
            hidden, router = self._hidden(data, batch, tokens, wanted)
            found = self.head.scores(hidden, targets, temperature, metrics=wanted.metrics, entropy=wanted.entropy)
        self.bytes_per_token = max(self.bytes_per_token, saved.total / batch.num_tokens)
        scores.add(tokens, found.logprobs, found.entropy, found.hit)
        if router is not None:
            scores.router = router.detached() if scores.router is None else scores.router + router.detached()
        return Found(tokens, found.logprobs, found.entropy if wanted.entropy else None, router, saved.total)

    def folds(self, data: Sequence[Datum], batch: MicroBatch, wanted: Wanted, *, whole: bool) -> bool:
        """Whether :meth:`run_folded` is the better way for a loss of independent terms; ``whole``: only datums are."""
        self.model.network.train(True)  # an adapter's dropout makes a layer that is linear otherwise into another
        if wanted.entropy or wanted.router or not self.head.folds(batch.num_tokens):
            return False
        return not whole or not self.head.folds(max(data[index].model_input.length for index in batch.indices))

    def run_folded(
        self,
        data: Sequence[Datum],
        batch: MicroBatch,
        scores: Scores,
        wanted: Wanted,
        slopes_of: SlopesOf,
        *,
        seed: int,
        whole: bool,
    ) -> Tensor:
        """One pass in which the head computes gradients on its way forward, for a loss that is a sum over tokens or datums.

        ``slopes_of`` sees the scored tokens alone, a chunk at a time, with ``whole`` never part of a datum's. Returns a scalar
        whose backward pass goes on from there.
        """
        tokens = ScoredTokens.of(data, batch.indices, weighted_only=wanted.weighted_only)

        def gradient_of(rows: slice, logprobs: Tensor) -> Tensor:
            if not len(logprobs):
                return logprobs
            indices, positions = zip(*tokens.pieces(rows), strict=True)
            pieces = [piece_of(data[index], some) for index, some in zip(indices, positions, strict=True)]
            parts = torch.split(logprobs.cpu(), [len(some) for some in positions])
            return torch.cat(list(slopes_of(indices, pieces, parts))).to(logprobs)

        with self._surroundings(batch, training=True, seed=seed):
            targets, temperature = self._targets(data, tokens)
            hidden, _ = self._hidden(data, batch, tokens, wanted)
            cuts = tokens.cuts if whole else None
            found = self.head.fold(hidden, targets, temperature, gradient_of, cuts=cuts, metrics=wanted.metrics)
        scores.add(tokens, found.logprobs, found.entropy, found.hit)
        return found.surrogate

    def _hidden(
        self, data: Sequence[Datum], batch: MicroBatch, tokens: ScoredTokens, wanted: Wanted
    ) -> tuple[Tensor, RouterLoad | None]:
        """The hidden states of the scored tokens, ``(N, H)``, and how all tokens were routed."""
        inputs = collate(data, batch, self.model.device)
        arguments = inputs.arguments
        if wanted.router:
            arguments["output_router_logits"] = True
        self.count += 1
        places = inputs.places if len(tokens) == len(inputs.places) else inputs.places[tokens.rows()]
        narrowed = self._narrowed(places, inputs.input_ids.numel(), wanted)
        scored = places.to(self.model.device)  # before the GPU is at work, as what follows
        everywhere = inputs.places.to(self.model.device) if wanted.router else None
        with by_layout(inputs.layout is not None), narrowed:
            hidden, router_logits = self.head.hidden_states(**arguments)
        router = None if everywhere is None else router_load(router_logits, everywhere, self._top_k)
        return hidden.reshape(-1, hidden.shape[-1])[scored], router

    def _narrowed(self, places: Tensor, total: int, wanted: Wanted) -> contextlib.AbstractContextManager[None]:
        """Computes the last layer where somebody looks: at all tokens' routing, or at the scored ones' hidden states."""
        if not self.trims_last_layer or wanted.router or self.drops_out:  # what draws would draw other numbers for fewer rows
            return contextlib.nullcontext()
        rows = torch.from_numpy(np.unique(places.numpy()))  # several sequences may share a place
        return self.last_layer.only(rows.to(self.model.device)) if worth_it(len(rows), total) else contextlib.nullcontext()

    @functools.cached_property
    def last_layer(self) -> LastLayer:
        return LastLayer.of(self.model)

    def _targets(self, data: Sequence[Datum], tokens: ScoredTokens) -> tuple[Tensor, Tensor | None]:
        """Of the scored tokens, the targets and what their logits are divided by, where anything."""
        targets = tokens.gathered({index: _target_tokens(data[index]) for index in tokens.positions})
        heat = _temperatures(data, tokens)
        return targets.to(self.model.device), heat if heat is None else heat.to(self.model.device)

    @contextlib.contextmanager
    def _surroundings(self, batch: MicroBatch, *, training: bool, seed: int) -> Iterator[SavedBytes]:
        """Randomness of the pass's own, and what becomes of that which autograd keeps: taken away, or counted."""
        self.model.network.train(training)
        saved = SavedBytes(self.model.network.parameters())
        with self._randomness(training, seed):
            if self._offload and torch.is_grad_enabled():
                with offloading(self.model.network.parameters(), self.model.device):
                    yield saved
            else:
                with saved.counted():
                    yield saved

    @property
    def _top_k(self) -> int:
        return int(self.model.network.config.get_text_config().num_experts_per_tok)

    @contextlib.contextmanager
    def _randomness(self, training: bool, seed: int) -> Iterator[None]:
        """Dropout drawn from the pass's own seed, so that a pass computed twice drops the same, and a resumed run too."""
        if not (training and self.drops_out):
            yield
            return
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    @functools.cached_property
    def drops_out(self) -> bool:
        """Whether a pass in training differs from one that is not."""
        config = self.model.network.config.get_text_config().to_dict()
        heads = ("classifier", "summary")  # of models for other tasks
        configured = any(
            any(word in name for word in ("drop", "jitter", "noise"))
            and not name.startswith(heads)
            and isinstance(value, float)
            and value > 0
            for name, value in config.items()
        )
        layers = (layer for layer in self.model.network.modules() if isinstance(layer, torch.nn.Dropout))
        return configured or any(layer.p > 0 for layer in layers)


def _target_tokens(datum: Datum) -> Tensor:
    return datum.loss_fn_inputs["target_tokens"].to_torch().long()


def _temperatures(data: Sequence[Datum], tokens: ScoredTokens) -> Tensor | None:
    """Per scored token, ``(N,)``; None where no datum has a temperature."""
    inputs = [data[index].loss_fn_inputs for index in tokens.positions]
    if not any("temperature" in given for given in inputs):
        return None
    values = [float(given["temperature"].array) if "temperature" in given else 1.0 for given in inputs]
    counts = torch.tensor([len(positions) for positions in tokens.positions.values()])
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), counts)
