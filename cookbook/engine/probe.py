"""What an architecture can do, found by trying it on a few tokens, once a model.

Where transformers does not promise a thing for every architecture, a model may silently compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.engine import attention
from cookbook.engine.collate import collate
from cookbook.engine.planning import Layouts, MicroBatch
from cookbook.engine.prefixes import Group
from cookbook.engine.sampler import Request, decode
from cookbook.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

# Nats: far above rounding, far below what a wrong mask, position or cache does to a model that has learnt something.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3}
# Relative to what reading each other's tokens does to sequences: far above rounding, below one wrong layer.
ROW_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.2}
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def layouts(model: LanguageModel) -> Layouts:
    """What rows of this model may hold. It keeps cookbook's attention if they may hold several sequences."""
    name, asked = type(model.network).__name__, model.config.attn_implementation
    if asked not in ("auto", "sdpa"):
        return Layouts(False, False, f"model.attn_implementation={asked} reads one sequence a row, auto and sdpa several")
    if unknown := set(getattr(_text_config(model), "layer_types", None) or ()) - KNOWN_LAYERS:
        return Layouts(False, False, f"{name} has layers of {', '.join(sorted(unknown))}")
    model.network.eval()
    trial = _Trial.of(model)
    before = attention.install(model.network)
    packed = trial.knows_windows() and trial.succeeds(_PACKED)
    if not packed:
        attention.uninstall(model.network, before)
        return Layouts(False, False, f"sequences in one row of {name} would read each other")
    shared = trial.succeeds(_SHARED)
    return Layouts(True, shared, "" if shared else f"{name} cannot compute a common beginning once")


_PACKED = MicroBatch([Group((0,), 5), Group((1,), 7), Group((2,), 9)], None, 21)
_SHARED = MicroBatch([Group((0,), 5), Group((1, 2), 4)], None, 17)


@dataclass
class _Trial:
    """Three short sequences, of which two begin alike, and what a plain forward pass makes of each and of all in a row."""

    model: LanguageModel
    data: list[Datum]
    expected: Tensor
    mixed: Tensor

    @classmethod
    def of(cls, model: LanguageModel) -> _Trial:
        loner, prompt, chosen, rejected = (_tokens(model, *at) for at in ((0, 5), (5, 4), (20, 3), (30, 5)))
        rows = [loner, torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)]
        data = [Datum(ModelInput.from_ints(row[0].tolist())) for row in rows]
        return cls(model, data, torch.cat([_logprobs(model, row) for row in rows]), _logprobs(model, torch.cat(rows, 1)))

    def knows_windows(self) -> bool:
        """Whether the attention of every layer is told the sliding window that the config says: it makes the mask itself."""
        config = _text_config(self.model)
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        told: list[int | None] = []
        self._logprobs(_PACKED, told)
        return told == [window if kind == "sliding_attention" else None for kind in kinds]

    def succeeds(self, batch: MicroBatch) -> bool:
        found = self._logprobs(batch)
        if found is None:
            return False
        allowed = ROW_TOLERANCE[next(self.model.network.parameters()).dtype]
        return bool((found - self.expected).norm() <= allowed * (self.mixed - self.expected).norm())

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch, windows: list[int | None] | None = None) -> Tensor | None:
        """``(tokens, V)`` of all three, or None where the architecture does not take a layout."""
        inputs = collate(self.data, batch, self.model.device)
        if inputs.layout and windows is not None:
            inputs = replace(inputs, layout=replace(inputs.layout, windows=windows))
        try:
            with attention.by_layout(inputs.layout is not None):
                logits: Tensor = self.model.network(**inputs.arguments, use_cache=False).logits
        except TypeError:  # a forward, or an attention, that knows its arguments by name
            return None
        return logits.flatten(0, 1)[inputs.places].float().log_softmax(-1)


@torch.no_grad()
def decodes(model: LanguageModel) -> bool:
    """Whether the sampler's logprobs, with its cache and its padding, are those of a plain forward pass."""
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    requests = [Request(_tokens(model, start, start + 3)[0].tolist(), 2, params, seed=0) for start in (0, 2)]
    for request, samples in zip(requests, decode(model, requests, 0, max_batch_tokens=1000), strict=True):
        for sample in samples:
            text = torch.tensor([request.prompt + sample.tokens], device=model.device)
            expected = _logprobs(model, text[:, :-1])[-3:].gather(-1, text[0, -3:, None])[:, 0]
            if not _close(model, torch.tensor(sample.logprobs, device=model.device), expected):
                return False
    return True


def _tokens(model: LanguageModel, start: int, count: int) -> Tensor:
    """``(1, count)`` tokens of the vocabulary, no two in a row the same."""
    vocabulary = int(_text_config(model).vocab_size)
    return (torch.arange(start, start + count, device=model.device)[None] * 7 + 3) % vocabulary


@torch.no_grad()
def _logprobs(model: LanguageModel, ids: Tensor) -> Tensor:
    """``(1, T)`` -> ``(T, V)``, by a plain forward pass."""
    logits: Tensor = model.network(input_ids=ids, use_cache=False).logits
    return logits[0].float().log_softmax(-1)


def _close(model: LanguageModel, found: Tensor, expected: Tensor) -> bool:
    dtype = next(model.network.parameters()).dtype
    return bool((found - expected).abs().max() <= TOLERANCE[dtype])


def _text_config(model: LanguageModel) -> Any:
    return model.network.config.get_text_config()
