"""What an architecture can do, found by trying it on a few tokens: a model that silently computes something else must not be
used that way. Each question costs some forward passes of about ten tokens, once a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.engine.sampler import Request, decode
from cookbook.types import SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

# Far above rounding, far below what a wrong mask, position or cache does. Logprobs differ by nats then.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.3}


@torch.no_grad()
def packs(model: LanguageModel) -> bool:
    """Whether sequences may share a row, told apart by positions that start again at 0.

    Layers that carry a state along the row mix them, and so do attention layers that build their own mask.
    """
    model.network.eval()
    first, second = _tokens(model, 0, 5), _tokens(model, 5, 7)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(model.device)
    row = torch.cat([first, second], 1)
    together = model.network(input_ids=row, position_ids=positions, use_cache=False).logits[:, 5:]
    return _close(model, together, model.network(input_ids=second, use_cache=False).logits)


@torch.no_grad()
def decodes(model: LanguageModel) -> bool:
    """Whether the sampler's logprobs, with its cache and its padding, are those of a plain forward pass."""
    model.network.eval()
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    requests = [Request(_tokens(model, start, 3 + start)[0].tolist(), 2, params, seed=0) for start in (0, 2)]
    for request, samples in zip(requests, decode(model, requests, step=0, max_batch_tokens=1000), strict=True):
        for sample in samples:
            text = torch.tensor([request.prompt + sample.tokens], device=model.device)
            logprobs = model.network(input_ids=text[:, :-1], use_cache=False).logits[0, -3:].float().log_softmax(-1)
            if not _close(model, logprobs.gather(-1, text[0, -3:, None])[:, 0], torch.tensor(sample.logprobs)):
                return False
    return True


def _tokens(model: LanguageModel, start: int, count: int) -> Tensor:
    """``(1, count)`` different tokens of the vocabulary."""
    vocabulary = int(model.network.config.get_text_config().vocab_size)
    return (torch.arange(start, start + count, device=model.device)[None] * 7 + 3) % vocabulary


def _close(model: LanguageModel, found: Any, expected: Any) -> bool:
    tolerance = TOLERANCE[expected.dtype if model.network.dtype not in TOLERANCE else model.network.dtype]
    difference = (found.float().log_softmax(-1) if found.ndim > 1 else found) - (
        expected.float().log_softmax(-1) if expected.ndim > 1 else expected.to(found)
    )
    return bool(difference.abs().max() <= tolerance)
