"""Whether a forward pass fits into memory with all that its backward pass needs, asked before the first one."""

from __future__ import annotations

import psutil
import torch

from cookbook.engine.head import OutputHead
from cookbook.engine.model import LanguageModel
from cookbook.engine.saved import SavedBytes
from cookbook.engine.update_rules import UpdateRule, state_bytes

TRIAL_TOKENS = 32
SHARE = 0.8  # of the free memory; what the backward pass makes for a moment, and other processes, get the rest


def shortage(model: LanguageModel, head: OutputHead, pass_tokens: int, rule: UpdateRule) -> str | None:
    """Why activations had better be recomputed: in words, what a pass of ``pass_tokens`` takes and there is. None: it fits."""
    trained = [parameter for _, parameter in model.trainable()]
    lasting = sum(p.numel() * 4 for p in trained) + state_bytes(rule, trained)
    return shortage_of(bytes_per_token(model, head) * pass_tokens, pass_tokens, lasting, free_bytes(model.device))


def shortage_of(kept: float, pass_tokens: int, lasting: float, free: float) -> str | None:
    """The same in bytes: what a pass keeps, what gradients and moments take, and what is free beside the weights."""
    if lasting + kept <= SHARE * free:
        return None
    needed = f"{kept / 1e9:.1f} GB of a pass of {pass_tokens:,} tokens and {lasting / 1e9:.1f} GB of gradients and moments"
    return f"{needed} do not fit into the {free / 1e9:.1f} GB that are free"


def bytes_per_token(model: LanguageModel, head: OutputHead) -> float:
    """What a token's activations take between forward and backward pass, without the output layer's; measured on a few."""
    model.network.eval()
    ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.long, device=model.device)
    saved = SavedBytes(model.network.parameters())
    with saved.counted():
        graph = head.hidden_states(input_ids=ids)
    total = saved.total
    del graph  # it was needed until here: what is freed may be counted twice
    return total / TRIAL_TOKENS


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``; on the CPU without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
