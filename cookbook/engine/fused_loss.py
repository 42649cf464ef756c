"""The causal language model's loss without its logits, for any trainer.

::

    loss_function = LinearCrossEntropyLoss(model.get_output_embeddings())
    loss = loss_function(model.model(input_ids), labels)  # the model without its head
    loss.backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cookbook.engine.linear_logprobs import HeadImpl, linear_logprobs, linear_logprobs_with_gradient, low_rank_of
from cookbook.engine.linear_logprobs.implementations import TORCH_COMPILE, implementation
from cookbook.errors import ConfigError
from cookbook.protocols import FusedOutputLoss

__all__ = ["FusedOutputLoss", "LinearCrossEntropyLoss", "hidden_states_of", "without_logits"]

IGNORE_INDEX = -100
CHUNK_TOKENS = 512  # of a layer that has to be run itself


class LinearCrossEntropyLoss:
    """Cross-entropy of a linear output layer. ``[tokens, vocabulary]`` is never in memory, forward or backward.

    ``output_embeddings`` is what a Hugging Face model's ``get_output_embeddings()`` returns: a linear layer, perhaps with a
    LoRA adapter by PEFT. Its parameters are read at every call, so tying, ``.to()`` and new weights after construction are
    seen. Any other layer (quantized, with dropout) is run as it is, ``chunk_size`` tokens at a time, and again in the backward
    pass. ``impl``: ``auto``, ``pytorch``, ``torch_compile``, ``cce``, or a :class:`~cookbook.protocols.TargetLogprobs` of your
    own. ``chunk_size``: tokens whose logits exist at once; None fits it to the vocabulary (``cce`` has no chunks). ``scale``
    and ``softcap``: what the model does to its logits (Granite and Cohere; Gemma). ``options`` are keyword arguments of the
    implementation: ``filter_eps`` of ``cce``.

    The object is a ``compute_loss_func`` of ``transformers.Trainer``; :func:`without_logits` keeps the model from computing
    logits there.

    Raises:
        ConfigError: the ``impl`` or one of its options is unknown; a ``chunk_size`` below 1.
    """

    def __init__(
        self,
        output_embeddings: Any,
        impl: HeadImpl = "auto",
        chunk_size: int | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        **options: Any,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ConfigError(f"chunk_size: must be at least 1 token, or None, got {chunk_size}")
        self.output_embeddings = output_embeddings
        chunked = {"chunk_size": chunk_size} if impl == TORCH_COMPILE else {}
        self.given = implementation(impl, output_embeddings, options=options | chunked)
        self.chunk_size = chunk_size
        self.scale = scale
        self.softcap = softcap

    @property
    def weight(self) -> Tensor:
        """The output layer's weight ``(V, H)``, as it is now."""
        weight: Tensor = self.output_embeddings.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The output layer's bias ``(V,)``, as it is now."""
        bias: Tensor | None = getattr(self.output_embeddings, "bias", None)
        return bias

    def __call__(self, hidden_states: Any, labels: Tensor | None, num_items_in_batch: Tensor | float | None = None) -> Tensor:
        """Mean over the tokens whose next label is not -100; zero, with its graph, if all labels are -100.

        ``hidden_states``: see :func:`hidden_states_of`; ``labels`` ``(B, T)`` are not shifted. With ``num_items_in_batch``, the
        sum divided by that number: the tokens of all micro-batches of one optimizer step, as ``transformers.Trainer`` counts.

        Raises:
            ConfigError: (a ValueError) ``hidden_states`` is of a type that holds none or does not match ``labels``; a label is
                outside the vocabulary.
        """
        hidden = hidden_states_of(hidden_states)
        if labels is None:
            raise ConfigError("labels: missing; add the column labels to the batch")
        if hidden.shape[:-1] != labels.shape:
            raise ConfigError(
                f"labels: must have the hidden states' shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}; pass them "
                "unshifted"
            )
        places, targets = self._learned(labels.to(hidden.device))
        return self._mean(hidden.reshape(-1, hidden.shape[-1])[places], targets, num_items_in_batch)

    def forward_logits(self, hidden_states: Any) -> Tensor:
        """``(B, T, V)``: all of them in memory, scaled and capped as the model does."""
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
        """Logprobs, entropy and top-1 hit, for a trainer that passes its weights: see :class:`FusedOutputLoss`."""
        finish: dict[str, Any] = {"scale": scale, "softcap": softcap}
        found = None
        if self.given is not None:
            found = self.given.scores(hidden, (weight, bias, None), targets, temperature=temperature, **finish)
        if found is None:
            heat = 1.0 if temperature is None else temperature
            found = linear_logprobs(hidden, weight, targets, bias=bias, temperature=heat, entropy=True, hit=True, **finish)
        return found.logprobs, found.entropy, found.hit

    def _learned(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Flat positions of the hidden states that predict a label, and these labels, both ``(N,)``.

        The GPU is waited for twice: for the number of labels, and for whether they are valid.
        """
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ConfigError(f"labels: must be whole numbers, got {labels.dtype}")
        vocabulary, labels = self._vocabulary(), labels.long()
        following = F.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
        places = (following != IGNORE_INDEX).nonzero()[:, 0]
        invalid = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocabulary))
        if bool(invalid.any()):
            place = tuple(invalid.nonzero()[0].tolist())
            raise ConfigError(
                f"labels[{', '.join(map(str, place))}]: must be a token of the vocabulary, in [0, {vocabulary}), or the "
                f"ignore index {IGNORE_INDEX}, got {int(labels[place])}; pass {IGNORE_INDEX} at tokens to ignore"
            )
        return places, following[places]

    def _vocabulary(self) -> int:
        """Number of tokens; the weight of a quantized layer may have another shape."""
        layer = low_rank_of(self.output_embeddings)
        weight = self.weight if layer is None else layer[0]
        return len(weight) if layer is not None else int(getattr(self.output_embeddings, "out_features", len(weight)))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output_embeddings(hidden)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _mean(self, rows: Tensor, targets: Tensor, num_items: Tensor | float | None) -> Tensor:
        count: Tensor | float = len(targets) if num_items is None else num_items
        count = count.to(rows.device).clamp(min=1) if isinstance(count, Tensor) else max(1, count)  # 0: nothing is learned
        layer = low_rank_of(self.output_embeddings)
        if layer is None:
            return self._sum_by_layer(rows, targets) / count
        rows = rows.to(layer[0].dtype)  # mixed precision: hidden states in half precision, the output layer in float32
        finish: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        found = None if self.given is None else self.given.scores(rows, layer, targets, temperature=None, **finish)
        if found is not None:
            return -found.logprobs.sum() / count
        weight, bias, low_rank = layer
        return linear_logprobs_with_gradient(
            rows,
            weight,
            targets,
            lambda _, logprobs: torch.ones_like(logprobs) * (-1 / count),
            bias=bias,
            low_rank=low_rank,
            chunk_rows=self.chunk_size,
            **finish,
        ).surrogate

    def _sum_by_layer(self, rows: Tensor, targets: Tensor) -> Tensor:
        size = self.chunk_size or CHUNK_TOKENS
        parts = zip(torch.split(rows, size), torch.split(targets, size), strict=True)
        return torch.stack([checkpoint(self._chunk_sum, *part, use_reentrant=False) for part in parts]).sum()

    def _chunk_sum(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(rows)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


@contextlib.contextmanager
def without_logits(model: Any) -> Iterator[None]:
    """Inside the context, a Hugging Face model returns the output layer's input as ``hidden_states``, and no ``[B, T, V]``.

    The output layer runs on the last position only, so ``logits`` are ``(B, 1, V)``. ::

        loss = LinearCrossEntropyLoss(model.get_output_embeddings())
        with without_logits(model):
            Trainer(model, compute_loss_func=loss, ...).train()
    """
    kept: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(args[0])
        return (args[0][:, -1:], *args[1:])

    def attach(_: Any, __: Any, output: Any) -> Any:
        output.hidden_states = (kept.pop(),)
        return output

    with model.get_output_embeddings().register_forward_pre_hook(keep), model.register_forward_hook(attach):
        yield


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
