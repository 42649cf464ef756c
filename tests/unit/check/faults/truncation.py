"""Importance sampling on as many tokens as both arrays have."""

import torch


def loss(data, logprobs):
    total = 0.0
    for datum, row in zip(data, logprobs, strict=True):
        inputs = {key: value.to_torch() for key, value in datum.loss_fn_inputs.items()}
        n = min(len(row), len(inputs["sampling_logprobs"]))
        weights = inputs["weights"][:n]
        log_ratio = torch.where(weights != 0, row[:n] - inputs["sampling_logprobs"][:n], 0.0)
        advantages = torch.where(weights != 0, inputs["advantages"][:n], 0.0)
        total = total - (weights * log_ratio.exp() * advantages).sum()
    return total, {}
