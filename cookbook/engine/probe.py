"""What an architecture can do, found by trying it on a few tokens, once a model.

Where transformers does not promise a thing for every architecture, a model may silently compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cookbook.engine.sampler import Request, decode
from cookbook.types import SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

# Nats: far above rounding, far below what a wrong mask, position or cache does to a model that has learnt something.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3}


@torch.no_grad()
def packs(model: LanguageModel) -> bool:
    """Whether sequences may share a row, told apart by positions that start again at 0.

    Layers that carry a state along the row mix them, and so do attention layers that build a mask of their own.
    """
    model.network.eval()
    first, second = _tokens(model, 0, 5), _tokens(model, 5, 7)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(model.device)
    together = model.network(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    expected = _logprobs(model, second)
    likeliest = expected.argmax(-1, keepdim=True)
    found = together[0, 5:].float().log_softmax(-1)
    return _close(model, found.gather(-1, likeliest), expected.gather(-1, likeliest))


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
    vocabulary = int(model.network.config.get_text_config().vocab_size)
    return (torch.arange(start, start + count, device=model.device)[None] * 7 + 3) % vocabulary


def _logprobs(model: LanguageModel, ids: Tensor) -> Tensor:
    """``(1, T)`` -> ``(T, V)``, by a plain forward pass."""
    logits: Tensor = model.network(input_ids=ids, use_cache=False).logits
    return logits[0].float().log_softmax(-1)


def _close(model: LanguageModel, found: Tensor, expected: Tensor) -> bool:
    dtype = next(model.network.parameters()).dtype
    return bool((found - expected).abs().max() <= TOLERANCE[dtype])
