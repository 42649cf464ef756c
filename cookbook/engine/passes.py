"""One forward pass after the other, over the micro-batches of a call, and what they find."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cookbook.engine.batching import MicroBatch, collate
from cookbook.engine.head import OutputHead
from cookbook.engine.model import LanguageModel
from cookbook.engine.offload import offloading
from cookbook.engine.router_loss import RouterLoad, router_load
from cookbook.engine.saved import SavedBytes
from cookbook.types import Datum


@dataclass(frozen=True)
class Wanted:
    """What a call needs of every token besides its logprob."""

    metrics: bool = True  # entropy and hit, as numbers
    entropy: bool = False  # entropy, with its graph
    router: bool = False  # how tokens were routed, with its graph


@dataclass
class Found:
    """What one pass found, with its graph: ``logprobs`` ``(N,)`` or ``(N, K)``, ``entropy`` ``(N,)``."""

    logprobs: Tensor
    entropy: Tensor | None
    router: RouterLoad | None


@dataclass
class Scores:
    """What the passes of a call found, per datum, on the CPU, without graphs."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    hit: dict[int, Tensor] = field(default_factory=dict)
    router: RouterLoad | None = None

    def part(self, indices: Sequence[int], *, entropy: bool) -> tuple[dict[int, Tensor], dict[int, Tensor] | None]:
        """The logprobs of some datums, and their entropies when wanted."""
        return {index: self.logprobs[index] for index in indices}, (
            {index: self.entropy[index] for index in indices} if entropy else None
        )

    def ordered(self) -> list[Tensor]:
        return [self.logprobs[index] for index in range(len(self.logprobs))]


class Passes:
    """Runs a model over micro-batches."""

    def __init__(self, model: LanguageModel, *, offload: bool) -> None:
        self.model = model
        self.head = OutputHead(model)
        self.count = 0  # since the start: what a loss costs, countable
        self.bytes_per_token = 0.0  # kept for the backward pass, as the first one showed
        self._offload = offload

    def run(
        self, data: Sequence[Datum], batch: MicroBatch, scores: Scores, wanted: Wanted, *, training: bool, seed: int
    ) -> Found:
        """One pass. Files what it found under ``scores``; returns it, with its graph, in the order of ``batch.indices``."""
        device = self.model.device
        inputs = collate(data, batch, device)
        rows = [data[index] for index in batch.indices]
        targets = torch.cat([_targets(datum) for datum in rows]).to(device)
        arguments: dict[str, Any] = {"input_ids": inputs.input_ids}
        if inputs.position_ids is not None:
            arguments["position_ids"] = inputs.position_ids
        if wanted.router:
            arguments["output_router_logits"] = True
        self.count += 1
        self.model.network.train(training)
        with self._randomness(training, seed), self._keeping(batch.num_tokens):
            hidden, router_logits = self.head.hidden_states(**arguments)
            hidden = hidden.reshape(-1, hidden.shape[-1])[inputs.places]
            found = self.head.scores(
                hidden, targets, _temperatures(rows, device), metrics=wanted.metrics, entropy=wanted.entropy
            )
            router = router_load(router_logits, inputs.places, self._top_k) if wanted.router else None
        lengths = [datum.model_input.length for datum in rows]
        for store, values in ((scores.logprobs, found.logprobs), (scores.entropy, found.entropy), (scores.hit, found.hit)):
            if values is not None:
                store.update(zip(batch.indices, torch.split(values.detach().cpu(), lengths), strict=True))
        if router is not None:
            scores.router = router.detached() if scores.router is None else scores.router + router.detached()
        return Found(found.logprobs, found.entropy if wanted.entropy else None, router)

    @property
    def _top_k(self) -> int:
        return int(self.model.network.config.get_text_config().num_experts_per_tok)

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

    @contextlib.contextmanager
    def _keeping(self, num_tokens: int) -> Iterator[None]:
        """Around a pass with a graph: takes what it saves away, or measures it once."""
        parameters = self.model.network.parameters()
        if not torch.is_grad_enabled():
            yield
        elif self._offload:
            with offloading(parameters, self.model.device):
                yield
        elif self.bytes_per_token:
            yield
        else:
            saved = SavedBytes(parameters)
            with saved.counted():
                yield
            self.bytes_per_token = saved.total / num_tokens


def _targets(datum: Datum) -> Tensor:
    return torch.from_numpy(datum.loss_fn_inputs["target_tokens"].array).long()


def _temperatures(rows: Sequence[Datum], device: torch.device) -> Tensor | None:
    """What each token's logits are divided by, ``(N,)``; None: nothing."""
    if not any("temperature" in datum.loss_fn_inputs for datum in rows):
        return None
    ones = torch.ones(())
    values = [
        datum.loss_fn_inputs["temperature"].to_torch() if "temperature" in datum.loss_fn_inputs else ones for datum in rows
    ]
    lengths = torch.tensor([datum.model_input.length for datum in rows])
    return torch.repeat_interleave(torch.stack([value.double() for value in values]), lengths).to(device)
