"""Forward passes of a sampler, with the weights and the precision of the training passes.

A policy gradient compares the logprobs of the sampler with those of the trainer. If the sampler multiplied float32 weights and
the trainer their bfloat16 casts, a small update would change one and not the other: after one step at a learning rate of 1e-5,
logprobs of a model of 135M parameters differed by up to 0.5, and 5% to 15% of the ratios were clipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.engine.precision import DEFAULT, CastWeights, Precision, sampling_precision

if TYPE_CHECKING:
    from cookbook.engine.head.output_head import OutputHead
    from cookbook.engine.model import LanguageModel


class SamplerPass:
    """Runs ``model`` for a sampler: :meth:`context` sets the precision of a pass, and :meth:`run` returns its logits.

    ``head``: the output head of the training passes. None: the model computes its own logits, as in trials.
    """

    def __init__(self, model: LanguageModel, precision: Precision = DEFAULT, head: OutputHead | None = None) -> None:
        self.model = model
        self._precision = precision
        dtype = precision.autocast_dtype
        self._weights = None if dtype is None else CastWeights(model.network, dtype)
        # Products of bfloat16 return bfloat16 on a CPU, and a logit of 18 would be off by up to 0.06. The head of the training
        # passes computes the logits of likely tokens in float32.
        rounds = dtype is not None or model.network.dtype == torch.bfloat16
        self._head = head if rounds and head is not None and head.transform is not None else None

    @contextlib.contextmanager
    def context(self, num_tokens: int) -> Iterator[None]:
        """Context of a pass of ``num_tokens`` tokens."""
        with sampling_precision(self._precision, self.model, num_tokens):
            if self._weights is None:
                yield
            else:
                with self._weights.in_use():
                    yield

    def run(self, **arguments: Any) -> tuple[Tensor, Any]:
        """Run the network. Return the next-token logits after the last column, ``(rows, V)`` float32, and its output."""
        if self._head is not None:
            hidden, out = self._head.last_hidden(**arguments)
            return self._head.logits(hidden), out
        out = self.model.network(**arguments)
        return out.logits[:, -1].float(), out

    def drop_weights(self) -> None:
        """Free copies of the weights, because the weights change or a training pass needs the memory."""
        if self._weights is not None:
            self._weights.drop()
