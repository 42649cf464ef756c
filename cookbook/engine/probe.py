"""What an architecture can do, found by trying it on a few tokens, once a model.

Where transformers does not promise a thing for every architecture, a model may silently compute something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.engine import attention, layers
from cookbook.engine.collate import collate
from cookbook.engine.fast_path import GivenUpError, first_working, tried
from cookbook.engine.planning import Layouts, MicroBatch
from cookbook.engine.prefixes import Group
from cookbook.engine.sampler import Request, decode
from cookbook.errors import RolloutError
from cookbook.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.decoded_rows import Way
    from cookbook.engine.model import LanguageModel

# Nats: far above rounding, far below what a wrong mask, position or cache does to a model that has learnt something.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3}
# Relative to what reading each other's tokens does to sequences: far above rounding, below one wrong layer.
ROW_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.2}
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def use_working_experts(model: LanguageModel) -> None:
    """Have a mixture of experts multiply one expert after the other, if its way to multiply all at once does not run here.

    torch's grouped products do not exist for every dtype and device.
    """
    config = model.network.config
    if getattr(config, "_experts_implementation", None) in (None, "eager"):
        return
    ways: list[tuple[str, Callable[[], object]]] = [
        ("multiplies all experts at once", lambda: _runs(model)),
        ("multiplies one expert after the other", lambda: model.network.set_experts_implementation("eager")),
    ]
    first_working(model, "experts", ways)


def fuse_layers(model: LanguageModel) -> None:
    """Give the model cookbook's norms, gated MLPs and rotary embeddings, if its forward pass works with them."""
    if not layers.are_installed(model.network):
        ways: list[tuple[str, Callable[[], object]]] = [
            ("uses them", lambda: _fused(model)),
            ("keeps its own code", lambda: layers.uninstall(model.network)),
        ]
        first_working(model, "fused layers", ways)


def _fused(model: LanguageModel) -> None:
    layers.install(model.network)  # what every single layer computes has been compared
    _runs(model)  # as the model calls them, they work together


def _runs(model: LanguageModel) -> None:
    """Raise what a forward pass raises."""
    with torch.enable_grad():
        model.network(input_ids=_tokens(model, 0, 8), use_cache=False)


def layouts(model: LanguageModel) -> Layouts:
    """What rows of this model may hold. It keeps cookbook's attention if they may hold several sequences."""
    asked, before = model.config.attn_implementation, getattr(model.network.config, "_attn_implementation", None)
    if asked not in ("auto", "sdpa"):
        return Layouts(False, False, f"model.attn_implementation={asked} reads one sequence a row, auto and sdpa several")
    model.network.eval()
    found, failure = tried(lambda: _tried_layouts(model))
    if failure is None and found[0].packed:
        return found[0]
    if attention.is_installed(model.network):
        attention.uninstall(model.network, before)
    return found[0] if found else Layouts(False, False, f"{model.class_name}: {failure}")


def _tried_layouts(model: LanguageModel) -> Layouts:
    """Leaves cookbook's attention installed."""
    name = model.class_name
    if unknown := set(getattr(_text_config(model), "layer_types", None) or ()) - KNOWN_LAYERS:
        return Layouts(False, False, f"{name} has layers of {', '.join(sorted(unknown))}")
    trial = _Trial.of(model)
    attention.install(model.network)
    if not (trial.knows_windows() and trial.succeeds(_PACKED)):
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


def way_to_decode(model: LanguageModel, longest: int) -> Way:
    """The fastest way to decode rows of up to ``longest`` tokens that gives a plain forward pass's logprobs."""
    from cookbook.engine.decoded_rows import SHARED_PROMPTS, WAYS, may_share_prompts  # it imports transformers

    shares = may_share_prompts(model, longest)
    if shares not in model.ways:
        *faster, last = (SHARED_PROMPTS, *WAYS) if shares else WAYS
        ways: list[tuple[str, Callable[[], Way]]] = []
        ways += [(way.description, functools.partial(_decoding, model, way)) for way in faster]
        ways += [(last.description, lambda: last)]  # it needs nothing but a forward pass
        model.ways[shares] = first_working(model, "sampling", ways)
    return model.ways[shares]


@torch.no_grad()
def _decoding(model: LanguageModel, way: Way) -> Way:
    """Return ``way`` if the sampler's logprobs, with its cache and its padding, are those of a plain forward pass.

    Raises:
        GivenUpError: they are not.
    """
    # Eight tokens: some architectures' own caches go wrong by little, and not before the second.
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    requests = [Request(_tokens(model, start, start + 3)[0].tolist(), 2, params, seed=0) for start in (0, 2)]
    try:
        found = decode(model, requests, 0, max_batch_tokens=1000, way=way)
    except RolloutError:  # its logits are not finite: by its weights, or by padding that its own code mistakes
        if not all(_logprobs(model, torch.tensor([one.prompt], device=model.device)).isfinite().all() for one in requests):
            raise
        raise GivenUpError("its logits are then not finite") from None
    for request, samples in zip(requests, found, strict=True):
        for sample in samples:
            text = torch.tensor([request.prompt + sample.tokens], device=model.device)
            new = len(sample.tokens)
            expected = _logprobs(model, text[:, :-1])[-new:].gather(-1, text[0, -new:, None])[:, 0]
            if not _close(model, torch.tensor(sample.logprobs, device=model.device), expected):
                raise GivenUpError("its logprobs are then not those of a plain forward pass")
    return way


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
