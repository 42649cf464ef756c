"""Fused linear cross entropy for any trainer: the causal language modeling loss without ``[tokens, vocabulary]`` logits.

::

    loss_function = LinearCrossEntropyLoss(model.get_output_embeddings())
    loss = loss_function(model.model(input_ids), labels)  # the model without its head
    loss.backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cookbook.engine.head.linear_logprobs import HeadImpl, linear_logprobs, linear_logprobs_with_gradient, low_rank_of
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LogitTransform, captured_input, joined
from cookbook.engine.head.linear_logprobs.implementations import TORCH_COMPILE, FusedOutputLoss, implementation
from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

__all__ = ["FusedOutputLoss", "LinearCrossEntropyLoss", "hidden_states_of", "without_logits"]

IGNORE_INDEX = -100
# Chunk of a layer that is not linear.
CHUNK_TOKENS = 512


class LinearCrossEntropyLoss:
    """Cross entropy of a linear output layer. ``[tokens, vocabulary]`` is never in memory, forward or backward.

    ``output_embeddings``: the result of a Hugging Face model's ``get_output_embeddings()``, a linear layer, optionally with a
    PEFT LoRA adapter. Its parameters are read at every call, so weight tying, ``.to()`` and new weights after construction take
    effect. Any other layer (quantized, with dropout) is called on ``chunk_size`` tokens at a time, and recomputed in the
    backward pass. ``impl``: ``auto``, ``pytorch``, ``torch_compile``, ``cce``, or your own :class:`~cookbook.TargetLogprobs`.
    ``chunk_size``: number of tokens whose logits are in memory at a time; None: chosen by the size of the vocabulary (``cce``
    has no chunks). ``scale`` and ``softcap``: the model's logit scale (Granite, Cohere) and soft cap (Gemma). ``options``:
    keyword arguments of the implementation, such as ``filter_eps`` of ``cce``.

    The object can be the ``compute_loss_func`` of ``transformers.Trainer``; with :func:`without_logits`, the model does not
    compute logits there.

    Raises:
        ConfigError: the ``impl`` or one of its options is unknown, or ``chunk_size`` is below 1.
    """

    def __init__(
        self,
        output_embeddings: Any,
        impl: HeadImpl = "auto",
        chunk_size: int | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        **options: object,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ConfigError(f"chunk_size: must be at least 1 token, or None, got {chunk_size}")
        self.output_embeddings = output_embeddings
        chunked = {"chunk_size": chunk_size} if impl == TORCH_COMPILE else {}
        self.impl = implementation(impl, output_embeddings, options=options | chunked)
        self.chunk_size = chunk_size
        self.transform = LogitTransform(scale, softcap)

    @property
    def weight(self) -> Tensor:
        """The output layer's current weight ``(V, H)``."""
        weight: Tensor = self.output_embeddings.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The output layer's current bias ``(V,)``."""
        bias: Tensor | None = getattr(self.output_embeddings, "bias", None)
        return bias

    def __call__(
        self, hidden_states: object, labels: Tensor | None, num_items_in_batch: Tensor | float | None = None
    ) -> Tensor:
        """Return the mean over the tokens whose next label is not -100; 0, with a graph, if all labels are -100.

        ``hidden_states``: see :func:`hidden_states_of`. ``labels``: ``(B, T)``, not shifted. ``num_items_in_batch``: divide the
        sum by this number instead, the number of label tokens in all micro-batches of an optimizer step
        (``transformers.Trainer`` passes it).

        Raises:
            ConfigError: (a ValueError) ``hidden_states`` contains no hidden states, or their shape does not match ``labels``; a
                label is outside the vocabulary.
        """
        hidden = hidden_states_of(hidden_states)
        if labels is None:
            raise ConfigError("labels: missing; add the column 'labels' to the batch")
        if hidden.shape[:-1] != labels.shape:
            raise ConfigError(
                f"labels: must have the hidden states' shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}; pass them "
                "unshifted"
            )
        positions, targets = self._shifted_labels(labels.to(hidden.device))
        return self._mean(hidden.reshape(-1, hidden.shape[-1])[positions], targets, num_items_in_batch)

    def forward_logits(self, hidden_states: object) -> Tensor:
        """Return all logits ``(B, T, V)``, with the model's scale and soft cap."""
        return self._logits(hidden_states_of(hidden_states))

    def target_logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logprobs, entropy and top-1 hit for the weights that a trainer passes; see :class:`FusedOutputLoss`."""
        layer = LinearLayer(weight, bias, None, LogitTransform(scale, softcap))
        scores = None if self.impl is None else self.impl.scores(hidden, layer, targets, temperature)
        if scores is None:
            scores = linear_logprobs(hidden, layer, targets, temperature, entropy=True, hit=True)
        return scores.logprobs, scores.entropy, scores.hit

    def _shifted_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the flat positions of the hidden states that predict a label, and these labels, both ``(N,)``.

        Synchronizes with the GPU twice: for the number of labels, and for their validity.
        """
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ConfigError(f"labels: must be integers, got {labels.dtype}; pass token ids of dtype int64")
        vocabulary, labels = self._vocabulary(), labels.long()
        following = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
        positions = (following != IGNORE_INDEX).nonzero()[:, 0]
        invalid = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocabulary))
        if bool(invalid.any()):
            position = tuple(invalid.nonzero()[0].tolist())
            raise ConfigError(
                f"labels[{', '.join(map(str, position))}]: must be a token of the vocabulary, in [0, {vocabulary}), or the "
                f"ignore index {IGNORE_INDEX}, got {int(labels[position])}; pass {IGNORE_INDEX} at tokens to ignore"
            )
        return positions, following[positions]

    def _vocabulary(self) -> int:
        """Return the size of the vocabulary. The weight of a quantized layer may have another shape."""
        layer = low_rank_of(self.output_embeddings)
        if layer is not None:
            return len(layer.weight)
        return int(getattr(self.output_embeddings, "out_features", len(self.weight)))

    def scores(
        self, rows: Tensor, targets: Tensor, temperature: Tensor | None = None, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of ``targets`` ``(N,)`` from hidden states ``rows`` ``(N, H)``, and the entropy or None.

        Both are ``(N,)``, differentiable, float32 (float64 for float64 weights). ``temperature`` ``(N,)`` divides the logits.
        """
        layer = low_rank_of(self.output_embeddings, self.transform)
        if layer is None:
            return self._scores_by_layer(rows, targets, temperature, entropy)
        # In mixed precision, hidden states may be bfloat16 and the output layer float32.
        rows = rows.to(layer.weight.dtype)
        result = None
        if self.impl is not None and entropy:
            result = self.impl.decline("the loss needs the gradient of the entropy")
        elif self.impl is not None:
            result = self.impl.scores(rows, layer, targets, temperature)
        if result is None:
            result = linear_logprobs(rows, layer, targets, temperature, entropy_gradient=entropy)
        return result.logprobs, result.entropy if entropy else None

    def weighted_sum(self, rows: Tensor, targets: Tensor, weights: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Return the sum of ``weights * logprobs``; ``weights`` ``(N,)`` are constants.

        With a linear layer, the forward pass also computes the gradient, so the logits are computed only once.
        """
        layer = low_rank_of(self.output_embeddings, self.transform)
        if layer is None or self.impl is not None:
            logprobs, _ = self.scores(rows, targets, temperature)
            return (weights.to(logprobs) * logprobs).sum()

        def gradient_of(part: slice, _: Tensor) -> Tensor:
            return weights[part]

        return linear_logprobs_with_gradient(
            rows.to(layer.weight.dtype), layer, targets, gradient_of, temperature, chunk_rows=self.chunk_size
        ).surrogate

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.transform(self.output_embeddings(hidden))

    def _mean(self, rows: Tensor, targets: Tensor, num_items: Tensor | float | None) -> Tensor:
        count: Tensor | float = len(targets) if num_items is None else num_items
        # At least 1, so that the loss without labels is 0 and not 0 / 0.
        count = count.to(rows.device).clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return self.weighted_sum(rows, targets, torch.ones(len(targets), dtype=dtype, device=rows.device) * (-1 / count))

    def _scores_by_layer(
        self, rows: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        size = self.chunk_size or CHUNK_TOKENS
        starts = range(0, max(len(targets), 1), size)
        parts = [
            [None if operand is None else operand[start : start + size] for operand in (rows, targets, temperature)]
            for start in starts
        ]
        logprobs, entropies = zip(
            *(checkpoint(self._chunk_scores, *part, entropy, use_reentrant=False) for part in parts), strict=True
        )
        return torch.cat(logprobs), joined(entropies)

    def _chunk_scores(
        self, rows: Tensor, targets: Tensor, temperature: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature is not None:
            logits = logits / temperature.to(logits.dtype)[:, None]
        distribution = logits.log_softmax(-1)
        logprobs = distribution.gather(-1, targets[:, None])[:, 0]
        return logprobs, -(distribution.exp() * distribution).sum(-1) if entropy else None


@contextlib.contextmanager
def without_logits(model: PreTrainedModel) -> Iterator[None]:
    """Context in which a Hugging Face model returns its last hidden states as ``hidden_states``, and no full logits.

    The output layer computes the last position only, so ``logits`` are ``(B, 1, V)``. ::

        loss = LinearCrossEntropyLoss(model.get_output_embeddings())
        with without_logits(model):
            Trainer(model, compute_loss_func=loss, ...).train()
    """
    with captured_input(model.get_output_embeddings()) as inputs:

        def attach(_: torch.nn.Module, __: object, output: ModelOutput) -> ModelOutput:
            output.hidden_states = (inputs.pop(),)
            return output

        with model.register_forward_hook(attach):
            yield


def hidden_states_of(output: object) -> Tensor:
    """Return the last hidden states ``(B, T, H)`` from the output of a model without its head.

    ``output``: a tensor, an object with ``last_hidden_state`` or ``hidden_states`` (a tensor, or a tuple with one per layer),
    or a tuple whose first element is one of these.

    Raises:
        ConfigError: (a ValueError) ``output`` is anything else.
    """
    hidden = output
    if isinstance(hidden, tuple) and not hasattr(hidden, "_fields"):
        hidden = hidden[0] if hidden else None
    if not isinstance(hidden, Tensor):
        hidden = getattr(hidden, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        layers = getattr(output, "hidden_states", None)
        hidden = layers[-1] if isinstance(layers, tuple | list) and layers else layers
    if not isinstance(hidden, Tensor):
        raise ConfigError(
            f"hidden_states: must be a tensor, an output with last_hidden_state or hidden_states, or a tuple of these, got a "
            f"{type(output).__name__}; pass the output of the model without its head"
        )
    return hidden
