"""The answer taken from behind its first token."""

import torch


def loss(data, logprobs):
    total = 0.0
    for datum, row in zip(data, logprobs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        start = int(torch.nonzero(weights)[0]) + 1
        total = total - (weights[start:] * row[start:]).sum()
    return total, {}
