"""Functions with nothing wrong, in the ways people write them. They must pass."""

import torch


def nll(data, logprobs):
    loss = -sum((row * datum.loss_fn_inputs["weights"].to_torch()).sum() for datum, row in zip(data, logprobs))  # noqa: B905
    return loss, {"nll": float(loss)}


def in_single_precision(data, logprobs):
    total = torch.zeros(())
    for datum, row in zip(data, logprobs, strict=True):
        weights, advantages, old = (
            torch.tensor(datum.loss_fn_inputs[key].data, dtype=torch.float32)
            for key in ("weights", "advantages", "sampling_logprobs")
        )
        ratio = torch.where(weights != 0, row.float() - old, 0.0).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        total = total - torch.where(weights != 0, surrogate, 0.0).mul(weights).sum()
    return total, {"ratio": ratio.mean()}


def own_key(data, logprobs):
    rows = zip(data, logprobs, strict=True)
    terms = [one.loss_fn_inputs["weights"].to_torch() * row * one.loss_fn_inputs["rarity"].to_torch() for one, row in rows]
    weights = sum(one.loss_fn_inputs["weights"].array.sum() for one in data)
    return -sum(term.sum() for term in terms) / weights, {}


own_key.needs = {"rarity"}
