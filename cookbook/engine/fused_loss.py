"""The causal language model's loss without its logits, for any trainer.

::

    loss_function = LinearCrossEntropyLoss(model.get_output_embeddings())
    loss = loss_function(model.model(input_ids), labels)  # the model without its head
    loss.backward()
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cookbook.engine.linear_logprobs import linear_logprobs_with_gradient, low_rank_of
from cookbook.engine.linear_logprobs.implementations import TargetLogprobs, implementation
from cookbook.errors import ConfigError

IGNORE_INDEX = -100
CHUNK_TOKENS = 512  # of a layer that has to be run itself


@runtime_checkable
class FusedOutputLoss(Protocol):
    """What a trainer needs of an output head that is fused with its loss; anybody may write one."""

    def __call__(self, hidden_states: Any, labels: Tensor) -> Tensor:
        """The mean loss, a scalar with its graph; ``labels`` ``(B, T)``, not shifted, -100 where there is nothing to learn."""
        ...

    def forward_logits(self, hidden_states: Any) -> Tensor:
        """The logits ``(B, T, V)``, for inference."""
        ...


class LinearCrossEntropyLoss:
    """Cross-entropy of a linear output layer. ``[tokens, vocabulary]`` is never in memory, forward or backward.

    ``output_embeddings`` is what a Hugging Face model's ``get_output_embeddings()`` returns: a linear layer, perhaps with a
    LoRA adapter by PEFT. Its parameters are read at every call, so tying, ``.to()`` and new weights after construction are
    seen. Any other layer (quantized, with dropout) is run as it is, ``chunk_size`` tokens at a time, and again in the backward
    pass. ``impl``: ``auto``, ``pytorch``, ``torch_compile``, ``cce``, or a function of your own. ``chunk_size``: tokens whose
    logits exist at once; None fits it to the vocabulary. ``scale`` and ``softcap``: what the model does to its logits (Granite
    and Cohere; Gemma).

    Raises:
        ConfigError: no such ``impl``; a ``chunk_size`` below 1.
    """

    def __init__(
        self,
        output_embeddings: Any,
        impl: str | TargetLogprobs = "auto",
        chunk_size: int | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ConfigError(f"chunk_size: must be at least 1 token, or None, got {chunk_size}")
        self.output_embeddings = output_embeddings
        self.logprobs_of = implementation(impl)
        self.chunk_size = chunk_size
        self.scale = scale
        self.softcap = softcap

    def __call__(self, hidden_states: Any, labels: Tensor) -> Tensor:
        """The mean over tokens whose next label is not -100; zero, with its graph, when there is none.

        Raises:
            ConfigError: (a ValueError) ``hidden_states`` is of a type that holds none, or does not match ``labels``.
        """
        hidden = hidden_states_of(hidden_states)
        if hidden.shape[:-1] != labels.shape:
            raise ConfigError(
                f"labels: must have the hidden states' shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}; pass them "
                "unshifted"
            )
        following = labels[..., 1:].to(hidden.device)
        learned = following != IGNORE_INDEX
        rows, targets = hidden[..., :-1, :][learned], following[learned]
        return self._mean(rows, targets)

    def forward_logits(self, hidden_states: Any) -> Tensor:
        """``(B, T, V)``: all of them in memory, scaled and capped as the model does."""
        return self._logits(hidden_states_of(hidden_states))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output_embeddings(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _mean(self, rows: Tensor, targets: Tensor) -> Tensor:
        count = max(1, len(targets))
        layer = low_rank_of(self.output_embeddings)
        if layer is None:
            return self._sum_by_layer(rows, targets) / count
        weight, bias, low_rank = layer
        if self.logprobs_of is not None and low_rank is None:
            options: dict[str, Any] = {"bias": bias, "scale": self.scale, "softcap": self.softcap, "temperature": None}
            logprobs = self.logprobs_of(rows, weight, targets, **options)
            if logprobs is not None:
                return -logprobs.sum() / count
        return linear_logprobs_with_gradient(
            rows,
            weight,
            targets,
            lambda _, logprobs: torch.full_like(logprobs, -1 / count),
            bias=bias,
            low_rank=low_rank,
            scale=self.scale,
            softcap=self.softcap,
            chunk_rows=self.chunk_size,
        ).surrogate

    def _sum_by_layer(self, rows: Tensor, targets: Tensor) -> Tensor:
        size = self.chunk_size or CHUNK_TOKENS
        parts = zip(torch.split(rows, size), torch.split(targets, size), strict=True)
        return torch.stack([checkpoint(self._chunk_sum, *part, use_reentrant=False) for part in parts]).sum()

    def _chunk_sum(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(rows)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


def hidden_states_of(output: Any) -> Tensor:
    """The last hidden states ``(B, T, H)`` of what a model without its head returned.

    That is a tensor, an output with ``last_hidden_state`` or ``hidden_states`` (of all layers), or a tuple that begins with one
    of these.

    Raises:
        ConfigError: (a ValueError) anything else.
    """
    found = output
    if isinstance(found, tuple) and not hasattr(found, "_fields"):
        found = found[0] if found else None
    if not isinstance(found, Tensor):
        found = getattr(found, "last_hidden_state", None)
    if not isinstance(found, Tensor):
        layers = getattr(output, "hidden_states", None)
        found = layers[-1] if isinstance(layers, tuple | list) and layers else layers
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"hidden_states: must be a tensor, an output with last_hidden_state or hidden_states, or a tuple of these, got a "
            f"{type(output).__name__}"
        )
    return found
