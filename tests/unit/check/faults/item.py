"""Cross-entropy added up in Python floats, and made a tensor again."""

import torch


def loss(data, logprobs):
    total = 0.0
    for datum, row in zip(data, logprobs, strict=True):
        total -= (datum.loss_fn_inputs["weights"].to_torch() * row).sum().item()
    return torch.tensor(total, requires_grad=True), {}
