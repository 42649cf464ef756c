"""Log-probabilities of a trainer and of a plain network, and their differences."""

from __future__ import annotations

from typing import Any

import torch

from cookbook.backends.local import LocalTrainer


def logprobs(trainer: LocalTrainer, data: Any) -> list[torch.Tensor]:
    out = trainer.forward(data, "cross_entropy").result()
    return [torch.as_tensor(row["logprobs"].array) for row in out.loss_fn_outputs]


def largest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b.detach()).abs().max()) for a, b in zip(one, other, strict=True))


def logprobs_of(network, tokens):
    """A network's logprobs of every token after the first."""
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


TOKENS = [7, 100, 31, 200, 55, 8, 9, 120]
