"""Log-probabilities of target tokens from hidden states, for any model.

All losses are functions of target logprobs, so only this module knows how a model computes logits. A linear output layer, the
usual case, is computed by :mod:`~cookbook.engine.head.linear_logprobs`, which never holds the full ``[N, V]`` logits. Any other
layer is called on chunks of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cookbook.engine.fast_path import FastPathError, first_working
from cookbook.engine.head.linear_logprobs import (
    LinearLogprobs,
    LogprobsWithGradient,
    linear_logits,
    linear_logprobs,
    linear_logprobs_with_gradient,
)
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LogitTransform, captured_input, joined, low_rank_of
from cookbook.engine.head.linear_logprobs.implementations import AUTO, HeadImpl, implementation
from cookbook.engine.model import LanguageModel
from cookbook.errors import BackendError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bytes of logits: kept for the backward pass of a linear layer, or in memory at a time with any other layer.
CHUNK_BYTES = 64 << 20
# Relative to the largest logit. bfloat16 rounds to 0.4%, while a wrong scale or soft cap is off by tens of percent.
PROBE_TOLERANCE = {torch.bfloat16: 3e-2}


class OutputHead:
    """Hidden states of a Hugging Face model, and its output layer applied to selected tokens.

    The whole model is called, so that wrappers (PEFT, FSDP) work. A hook on the output embedding captures the hidden states,
    and lets the layer compute a single position. The logit scale and soft cap are read from the model's config and verified on
    a probe. If they do not reproduce the model's logits, the model computes its own logits.

    ``impl`` replaces cookbook's code for a linear layer without an adapter; ``options`` are its keyword arguments. ``like``:
    the head of a model of the same architecture, whose verified transform is used.
    """

    def __init__(
        self,
        model: LanguageModel,
        impl: HeadImpl = AUTO,
        options: Mapping[str, object] | None = None,
        like: OutputHead | None = None,
    ) -> None:
        self.network = model.network
        self.layer = model.network.get_output_embeddings()
        self.impl = implementation(impl, self.layer, "backend.head_impl", options)
        candidates = [("is linear", lambda: self._verified_transform(model)), ("computes all its logits itself", lambda: None)]
        self.transform: LogitTransform | None = like.transform if like else first_working(model, "output head", candidates)

    def hidden_states(self, **arguments: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the hidden states before the output layer, ``(B, T, H)``, and each layer's router logits if requested.

        If the model computes its own logits, return these, ``(B, T, V)``, instead of the hidden states.
        """
        if self.transform is None:
            out = self.network(**arguments, use_cache=False)
            return out.logits, getattr(out, "router_logits", None) or ()
        with captured_input(self.layer) as inputs:
            out = self.network(**arguments, use_cache=False)
        return inputs[0], getattr(out, "router_logits", None) or ()

    def last_hidden(self, **arguments: object) -> tuple[Tensor, Any]:
        """Return the hidden states before the output layer, of the last token of each row, ``(B, H)``, and the output."""
        with captured_input(self.layer, one_row=True) as inputs:
            out = self.network(**arguments)
        return inputs[0][:, -1], out

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of ``hidden``, ``(N, H)`` -> ``(N, V)`` float32.

        Likely tokens are as exact as in :meth:`scores`.
        """
        layer = self._linear()
        if layer is None:
            logits = hidden if self.transform is None else self.transform(self.layer(hidden))
            return logits.float()
        return linear_logits(hidden, layer)

    def scores(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None = None, *, metrics: bool, entropy: bool = False
    ) -> LinearLogprobs:
        """Return the logprobs of ``targets``, ``(N,)`` or ``(N, K)``, from ``hidden`` ``(N, H)``.

        ``temperature`` ``(N,)`` divides the logits. ``metrics``: also return entropy and hit. ``entropy``: return an entropy
        with a graph.
        """
        layer = self._linear()
        if layer is None:
            if self.impl is not None:
                self.impl.decline("the model's logits are not those of a linear layer, scaled and soft-capped")
            return self._scores_by_layer(hidden, targets, temperature, metrics, entropy)
        own_code = functools.partial(
            linear_logprobs,
            *(hidden, layer, targets, temperature),
            entropy=metrics,
            entropy_gradient=entropy,
            hit=metrics,
            cache_bytes=CHUNK_BYTES,
        )
        result = None
        if self.impl is not None and entropy:
            result = self.impl.decline("the loss needs the gradient of the entropy")
        elif self.impl is not None:
            result = self.impl.scores(hidden, layer, targets, temperature)
        if result is None:
            return own_code()
        if not metrics or (result.entropy is not None and result.hit is not None):
            return result
        with torch.no_grad():
            own = own_code()
        return LinearLogprobs(
            result.logprobs,
            own.entropy if result.entropy is None else result.entropy,
            own.hit if result.hit is None else result.hit,
        )

    def fuses_gradient(self, num_tokens: int) -> bool:
        """Whether :meth:`scores_with_gradient`, which computes the logits only once, is faster than :meth:`scores`."""
        layer = self._linear()
        if layer is None or self.impl is not None:
            return False
        trained = layer.weight.requires_grad or (layer.low_rank is not None and layer.low_rank.b.requires_grad)
        return trained and num_tokens * len(layer.weight) * 4 > CHUNK_BYTES

    def scores_with_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        gradient_of: Callable[[slice, Tensor], Tensor],
        *,
        boundaries: list[int] | None,
        metrics: bool,
    ) -> LogprobsWithGradient:
        """Return the logprobs of ``targets``, and compute the gradient of the output layer in the same pass.

        ``gradient_of(rows, logprobs)`` returns dL/dlogprob of consecutive rows, which begin and end at ``boundaries``, if
        given.
        """
        layer = self._linear()
        assert layer is not None
        return linear_logprobs_with_gradient(
            hidden, layer, targets, gradient_of, temperature, entropy=metrics, hit=metrics, boundaries=boundaries
        )

    def _linear(self) -> LinearLayer | None:
        """Return the layer's weight, bias and adapter; None if it is not linear.

        Read for every pass, because wrappers (FSDP, PEFT) replace the weight or switch the adapter off.
        """
        return None if self.transform is None else low_rank_of(self.layer, self.transform)

    def _scores_by_layer(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, metrics: bool, entropy: bool
    ) -> LinearLogprobs:
        """Score targets with the layer itself, in chunks. With more than one chunk, the backward pass recomputes the logits."""
        vocabulary = hidden.shape[-1] if self.transform is None else self.layer.weight.shape[0]
        rows = max(1, CHUNK_BYTES // (4 * int(vocabulary)))
        temperatures = [None] * max(1, -(-len(hidden) // rows)) if temperature is None else torch.split(temperature, rows)
        slices = list(zip(torch.split(hidden, rows), torch.split(targets, rows), temperatures, strict=True))
        score: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = self._score
        if len(slices) > 1 and torch.is_grad_enabled():
            score = functools.partial(checkpoint, self._score, use_reentrant=False)
        logprobs, entropies, hits = zip(*(score(*layer_slice, metrics, entropy) for layer_slice in slices), strict=True)
        return LinearLogprobs(torch.cat(logprobs), joined(entropies), joined(hits))

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, metrics: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = hidden if self.transform is None else self.transform(self.layer(hidden))
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if temperature is not None:
            logits = logits / temperature.to(logits.dtype)[:, None]
        columns = targets if targets.ndim == 2 else targets[:, None]
        normalizer = logits.logsumexp(-1, keepdim=True)
        logprobs = logits.gather(-1, columns) - normalizer
        entropy = hit = None
        if metrics or entropy_gradient:
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                # H = logsumexp(z) - sum p z; the softmax is the only temporary of the size of the logits.
                entropy = normalizer[:, 0] - (logits.softmax(-1) * logits).sum(-1)
        if metrics:
            hit = logits.detach().argmax(-1) == columns[:, 0]
        return logprobs.reshape(targets.shape), entropy, hit

    @torch.no_grad()
    def _verified_transform(self, model: LanguageModel) -> LogitTransform:
        """Return the first transform that turns the layer's output into the model's own logits on a probe.

        Raises:
            FastPathError: no transform matches.
        """
        if self.layer is None:
            raise FastPathError("the model has no output embedding")
        config = model.network.config.get_text_config()
        # Dropout would make every candidate wrong.
        self.network.eval()
        probe = torch.arange(1, 9, device=model.device)[None] % int(config.vocab_size)
        own = self.network(input_ids=probe, use_cache=False).logits
        if not torch.isfinite(own).all():
            raise BackendError(
                f"model.name: the weights of {model.config.name} give logits that are not finite; use an undamaged model, "
                "or another model.dtype"
            )
        # hidden_states captures the layer's input only if a transform is set.
        self.transform = LogitTransform()
        raw = self.layer(self.hidden_states(input_ids=probe)[0])
        tolerance = PROBE_TOLERANCE.get(own.dtype, 1e-3) * float(own.abs().max())
        for transform in _candidates(config):
            if torch.allclose(transform(raw), own, rtol=0.0, atol=tolerance):
                return transform
        raise FastPathError("the logits are not a product with the output embedding, with a scale or soft cap from the config")


def _candidates(config: PretrainedConfig) -> list[LogitTransform]:
    """Return the logit transforms of Hugging Face models to try (Gemma, Granite, Cohere, HyperCLOVA X)."""
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scales = [getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)]
    capped = [LogitTransform(softcap=float(cap))] if cap else []
    scaled = [LogitTransform(factor) for scale in scales if scale for factor in (float(scale), 1 / float(scale))]
    return [*capped, *scaled, LogitTransform()]
