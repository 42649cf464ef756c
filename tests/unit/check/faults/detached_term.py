"""Cross-entropy with a confidence penalty that is logged, and holds nothing: it is detached."""


def loss(data, logprobs):
    total = 0.0
    for datum, row in zip(data, logprobs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        total = total + (weights * (-row + 0.1 * row.exp().detach())).sum()
    return total, {}
