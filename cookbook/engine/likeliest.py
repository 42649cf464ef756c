"""The likeliest tokens at every position of a text: what a teacher tells a student."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.engine import Engine
from cookbook.types import Array

ROWS = 256  # of logits at once


@torch.no_grad()
def likeliest(engine: Engine, tokens: list[int], k: int) -> tuple[Array, Array]:
    """Ids, int32, and logprobs, float32, of the ``k`` likeliest tokens after each but the last, best first: ``(T-1, k)``.

    The logprobs are those at temperature 1. ``k`` is at most the size of the vocabulary.
    """
    if len(tokens) < 2:
        return np.zeros((0, k), dtype=np.int32), np.zeros((0, k), dtype=np.float32)
    head = engine.passes.head
    engine.model.network.eval()
    hidden, _ = head.hidden_states(input_ids=torch.tensor([tokens[:-1]], device=engine.model.device))
    parts = [_best(head, rows, k) for rows in torch.split(hidden[0], ROWS)]
    ids, logprobs = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    return ids.to(torch.int32).numpy(), logprobs.numpy()


def _best(head: Any, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits = hidden if head.finish is None else head.finish(head.layer(hidden))
    found = logits.float().log_softmax(-1).topk(k)
    return found.indices, found.values
