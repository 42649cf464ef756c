"""Cross-entropy divided by all tokens, prompts included, instead of by the weights."""


def loss(data, logprobs):
    total = sum((datum.loss_fn_inputs["weights"].to_torch() * row).sum() for datum, row in zip(data, logprobs, strict=True))
    return -total / sum(len(row) for row in logprobs), {}
