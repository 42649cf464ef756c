"""``impl=torch_compile``: one matrix product for the logits of a chunk of rows, and one compiled kernel for all that follows.

The kernels are compiled with ``dynamic=True``, once for all numbers of rows and vocabularies; a single row, and each
combination of bias, soft cap and temperature, are compiled separately. The backward pass recomputes the logits of each chunk.

Measured by benchmarks/head.py on a CPU (one thread, float32, forward and backward, N=1024, V=32000, H=512): 1.05 times the
time of ``pytorch``, whose tiles stay in the cache, and 1.31 times if the loss is a sum over tokens. Not measured on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cookbook.engine.fast_path import FastPathError
from cookbook.engine.head.linear_logprobs.scan import add_product, buffer_view, device_limit, product

# Float32 logits of a chunk, bytes.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
LEAST_ROWS = 16
T = TypeVar("T")


def compiled_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: Tensor | None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropy and top-1 hit, ``(N,)`` each, as described in :class:`TargetLogprobs`.

    Raises:
        FastPathError: there are several targets per token, the dtype has no kernels, or the compiler is missing or fails.
    """
    if targets.ndim != 1:
        raise FastPathError("it supports only one target per token")
    if hidden.device.type == "cpu" and hidden.dtype not in (torch.float32, torch.float64):
        raise FastPathError(f"on a CPU it needs float32 or float64, and the model is in {hidden.dtype}")
    work = torch.promote_types(weight.dtype, torch.float32)
    rows = chunk_size or max(LEAST_ROWS, device_limit(CHUNK_BYTES, weight.device) // (work.itemsize * len(weight)))
    chunk_temperature = None if temperature is None else temperature.detach().to(weight.device, work)
    scores: tuple[Tensor, Tensor, Tensor]
    scores = _Chunked.apply(hidden, weight, bias, targets, chunk_temperature, scale, softcap, rows)  # type: ignore[no-untyped-call]
    return scores


class _Chunked(torch.autograd.Function):
    """Scores chunk by chunk. Saves one number per row for the backward pass: the log-sum-exp of its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        scale: float,
        softcap: float | None,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = torch.promote_types(weight.dtype, torch.float32)
        count, vocabulary = len(targets), len(weight)
        # Chunks of equal size, because a last chunk of a single row would need its own compilation.
        size = -(-count // max(1, -(-count // chunk_rows)))
        ctx.chunks = [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]
        ctx.scale, ctx.softcap = scale, softcap
        buffer = hidden.new_empty(size * vocabulary, dtype=work)
        logprobs, entropy, normalizer = (hidden.new_empty(count, dtype=work) for _ in range(3))
        hit = hidden.new_empty(count, dtype=torch.bool)
        score = _kernels()[0]
        for rows in ctx.chunks:
            products = product(hidden[rows], weight.T, buffer_view(buffer, (rows.stop - rows.start, vocabulary)))
            chunk_temperature = None if temperature is None else temperature[rows]
            results = _call(score, products, targets[rows], bias, chunk_temperature, scale, softcap)
            for out, values in zip((logprobs, normalizer, entropy, hit), results, strict=True):
                out[rows] = values
        ctx.mark_non_differentiable(entropy, hit)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normalizer)
        return logprobs, entropy, hit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, normalizer = ctx.saved_tensors
        hidden_grad, weight_grad, bias_grad = (
            torch.zeros_like(operand, dtype=normalizer.dtype) if need else None
            for operand, need in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        longest = max((rows.stop - rows.start for rows in ctx.chunks), default=0)
        buffer = normalizer.new_empty(longest * len(weight))
        gradient = _kernels()[1]
        for rows in ctx.chunks:
            products = product(hidden[rows], weight.T, buffer_view(buffer, (rows.stop - rows.start, len(weight))))
            chunk_temperature = None if temperature is None else temperature[rows]
            arguments = (products, targets[rows], normalizer[rows], upstream[rows], bias, chunk_temperature)
            exact = _call(gradient, *arguments, ctx.scale, ctx.softcap)
            values = exact.to(weight.dtype)
            if hidden_grad is not None:
                product(values, weight, hidden_grad[rows])
            if weight_grad is not None:
                add_product(values.T, hidden[rows], weight_grad)
            if bias_grad is not None:
                bias_grad += exact.sum(0)
        results = zip((hidden_grad, weight_grad, bias_grad), (hidden, weight, bias), strict=True)
        return (*(None if gradient is None else gradient.to(like.dtype) for gradient, like in results), *[None] * 5)


@functools.cache
def _kernels() -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]:
    return torch.compile(_score, dynamic=True), torch.compile(_product_gradient, dynamic=True)


def _call(kernel: Callable[..., T], *arguments: Tensor | float | None) -> T:
    # Imported here: the import is slow, and torch.compile has done it by now.
    from torch._dynamo.exc import TorchDynamoException

    try:
        # Contiguous, because views and expanded tensors have other strides and would be compiled separately.
        return kernel(*(argument.detach().contiguous() if isinstance(argument, Tensor) else argument for argument in arguments))
    except TorchDynamoException as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FastPathError(f"torch.compile fails: {reason}") from error


def _logits(products: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Return the logits before the division by the temperature."""
    logits = scale * (products if bias is None else products + bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _score(
    products: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, log-sum-exp, entropy and hit, ``(M,)`` each, from the products ``(M, V)``."""
    logits = _logits(products, bias, scale, softcap)
    if temperature is not None:
        logits = logits / temperature[:, None]
    largest = logits.amax(1)
    exponentials = torch.exp(logits - largest[:, None])
    total = exponentials.sum(1)
    normalizer = largest + total.log()
    target = logits.gather(1, targets[:, None])[:, 0]
    return target - normalizer, normalizer, normalizer - (exponentials * logits).sum(1) / total, target >= largest


def _product_gradient(
    products: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    upstream: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the products ``(M, V)`` from dL/dlogprob, ``upstream`` ``(M,)``."""
    capped = _logits(products, bias, scale, softcap)
    logits = capped if temperature is None else capped / temperature[:, None]
    is_target = torch.arange(products.shape[1], device=products.device) == targets[:, None]
    values = (is_target.to(logits.dtype) - torch.exp(logits - normalizer[:, None])) * (scale * upstream)[:, None]
    if temperature is not None:
        values = values / temperature[:, None]
    return values if softcap is None else values * (1 - (capped / softcap) ** 2)
