"""From hidden states to the log-probabilities of given targets.

Every objective is a function of target logprobs, so this is the only place that knows how a model makes logits. Where its
output layer is linear, as nearly always, :mod:`~cookbook.engine.linear_logprobs` never forms all of them. Any other layer is
run as it is, on a slice of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cookbook.engine.fast_path import GivenUpError, first_working
from cookbook.engine.linear_logprobs import FoldedLogprobs, LinearLogprobs, linear_logprobs, linear_logprobs_with_gradient
from cookbook.engine.linear_logprobs.implementations import AUTO, HeadImpl, implementation
from cookbook.engine.linear_logprobs.layers import LinearLayer, low_rank_of
from cookbook.engine.model import LanguageModel
from cookbook.errors import BackendError

CHUNK_BYTES = 64 << 20  # of logits: what is kept of a linear layer's, what exists at once of another layer's
# Relative to the largest logit; a wrong scale or soft cap is off by tens of percent. Half precision rounds to 0.4%.
PROBE_TOLERANCE = {torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Finish:
    """What a model does to the output of its last layer: ``softcap * tanh(scale * z / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


class OutputHead:
    """Runs a Hugging Face model without its output layer, and that layer on the rows that are asked for.

    The whole model is called, with a hook on its output embedding that keeps the hidden states and lets one position
    through, so that wrappers (PEFT, FSDP) work as they are meant to. What the model does to its logits afterwards (scaling,
    soft-capping) is taken from its config and verified by a probe; a model that does something else keeps its own logits.

    ``impl`` replaces cookbook's own code for a linear layer without an adapter; ``options`` are its keyword arguments.
    """

    def __init__(self, model: LanguageModel, impl: HeadImpl = AUTO, options: Mapping[str, Any] | None = None) -> None:
        self.network = model.network
        self.layer = model.network.get_output_embeddings()
        self.given = implementation(impl, self.layer, "backend.head_impl", options)
        ways = [("is linear", lambda: self._verified_finish(model)), ("makes all its logits at once", lambda: None)]
        self.finish: Finish | None = first_working(model, "output head", ways)

    def hidden_states(self, **inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The input of the output layer, ``(B, T, H)``, and the router logits of every layer when they are asked for.

        When the model keeps its own logits: those instead, ``(B, T, V)``.
        """
        if self.finish is None:
            out = self.network(**inputs, use_cache=False)
            return out.logits, getattr(out, "router_logits", None) or ()
        kept: list[Tensor] = []

        def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            kept.append(args[0])
            return (args[0][:, -1:], *args[1:])

        with self.layer.register_forward_pre_hook(keep):
            out = self.network(**inputs, use_cache=False)
        return kept[0], getattr(out, "router_logits", None) or ()

    def scores(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None = None, *, metrics: bool, entropy: bool = False
    ) -> LinearLogprobs:
        """Scores ``targets``, ``(N,)`` or ``(N, K)``, given ``hidden`` ``(N, H)``. ``temperature`` ``(N,)`` divides the logits.

        ``metrics`` asks for entropy and hit, ``entropy`` for an entropy with its graph.
        """
        linear = self._linear()
        if linear is None:
            return self._scores_by_layer(hidden, targets, temperature, metrics, entropy)
        weight, options = self._operands(linear, temperature)
        given = None if entropy else self._given_scores(hidden, linear, targets, temperature)
        wanted: dict[str, Any] = {"entropy": metrics, "entropy_gradient": entropy, "hit": metrics, "cache_bytes": CHUNK_BYTES}
        if given is None:
            return linear_logprobs(hidden, weight, targets, **wanted, **options)
        if not metrics or (given.entropy is not None and given.hit is not None):
            return given
        with torch.no_grad():
            found = linear_logprobs(hidden, weight, targets, **wanted, **options)
        return LinearLogprobs(
            given.logprobs,
            found.entropy if given.entropy is None else given.entropy,
            found.hit if given.hit is None else given.hit,
        )

    def _given_scores(
        self, hidden: Tensor, linear: LinearLayer, targets: Tensor, temperature: Tensor | None
    ) -> LinearLogprobs | None:
        """Scores by the implementation that was supplied; None if there is none, or if it does not support the arguments."""
        if self.given is None or self.finish is None:
            return None
        scale, softcap = self.finish.scale, self.finish.softcap
        return self.given.scores(hidden, linear, targets, scale=scale, softcap=softcap, temperature=temperature)

    def folds(self, num_tokens: int) -> bool:
        """Whether a loss whose terms stand alone had better bring its slopes along: :meth:`fold` forms logits once."""
        linear = self._linear()
        if linear is None or self.given is not None:
            return False
        weight, _, low_rank = linear
        trained = weight.requires_grad or (low_rank is not None and low_rank.b.requires_grad)
        return trained and num_tokens * len(weight) * 4 > CHUNK_BYTES

    def fold(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        gradient_of: Callable[[slice, Tensor], Tensor],
        *,
        cuts: list[int] | None,
        metrics: bool,
    ) -> FoldedLogprobs:
        """As :meth:`scores`, of a linear layer, with the gradient computed on the way.

        ``gradient_of(rows, logprobs)`` gives dL/dlogprob of consecutive rows, which begin and end at ``cuts``, where given.
        """
        linear = self._linear()
        assert linear is not None
        weight, options = self._operands(linear, temperature)
        return linear_logprobs_with_gradient(
            hidden, weight, targets, gradient_of, cuts=cuts, entropy=metrics, hit=metrics, **options
        )

    def _linear(self) -> LinearLayer | None:
        """What the layer multiplies with, where it does nothing else. Asked anew for every pass: wrappers exchange weights."""
        return None if self.finish is None else low_rank_of(self.layer)

    def _operands(self, linear: LinearLayer, temperature: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """The weight, and what turns products with it into logits."""
        assert self.finish is not None
        weight, bias, low_rank = linear
        heat = 1.0 if temperature is None else temperature
        finish = {"scale": self.finish.scale, "softcap": self.finish.softcap}
        return weight, {"bias": bias, "low_rank": low_rank, "temperature": heat, **finish}

    def _scores_by_layer(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, metrics: bool, entropy: bool
    ) -> LinearLogprobs:
        """In slices, computed again in the backward pass when there is more than one."""
        vocabulary = hidden.shape[-1] if self.finish is None else self.layer.weight.shape[0]
        rows = max(1, CHUNK_BYTES // (4 * int(vocabulary)))
        heat = [None] * max(1, -(-len(hidden) // rows)) if temperature is None else torch.split(temperature, rows)
        slices = list(zip(torch.split(hidden, rows), torch.split(targets, rows), heat, strict=True))
        if len(slices) == 1 or not torch.is_grad_enabled():
            parts = [self._score(*one, metrics, entropy) for one in slices]
        else:
            parts = [checkpoint(self._score, *one, metrics, entropy, use_reentrant=False) for one in slices]
        logprobs, entropies, hit = (list(column) for column in zip(*parts, strict=True))
        return LinearLogprobs(
            torch.cat(logprobs),
            torch.cat(entropies) if metrics or entropy else None,
            torch.cat(hit) if metrics else None,
        )

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | None, metrics: bool, slope: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logits = hidden if self.finish is None else self.finish(self.layer(hidden))
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if temperature is not None:
            logits = logits / temperature.to(logits.dtype)[:, None]
        wanted = targets if targets.ndim == 2 else targets[:, None]
        normalizer = logits.logsumexp(-1, keepdim=True)
        logprobs = logits.gather(-1, wanted) - normalizer
        entropy = hit = None
        if metrics or slope:
            with torch.set_grad_enabled(slope and torch.is_grad_enabled()):
                # H = logsumexp(z) - sum p z; the softmax is the only temporary of the size of the logits.
                entropy = normalizer[:, 0] - (logits.softmax(-1) * logits).sum(-1)
        if metrics:
            hit = logits.detach().argmax(-1) == wanted[:, 0]
        return logprobs.reshape(targets.shape), entropy, hit

    @torch.no_grad()
    def _verified_finish(self, model: LanguageModel) -> Finish:
        """The first candidate that turns the layer's output into the model's own logits on a probe.

        Raises:
            GivenUpError: none does.
        """
        if self.layer is None:
            raise GivenUpError("it has no output embedding")
        config = model.network.config.get_text_config()
        self.network.eval()  # dropout would make every candidate wrong
        probe = torch.arange(1, 9, device=model.device)[None] % int(config.vocab_size)
        own = self.network(input_ids=probe, use_cache=False).logits
        if not torch.isfinite(own).all():
            raise BackendError(
                f"model.name: the weights of {model.config.name} make logits that are not finite; use an undamaged model, "
                "or another model.dtype"
            )
        self.finish = Finish()  # lets hidden_states take the hook's way
        raw = self.layer(self.hidden_states(input_ids=probe)[0])
        tolerance = PROBE_TOLERANCE.get(own.dtype, 1e-3) * float(own.abs().max())
        for finish in _candidates(config):
            if torch.allclose(finish(raw), own, rtol=0.0, atol=tolerance):
                return finish
        raise GivenUpError("they are not products with its output embedding, scaled or soft-capped as cookbook knows it")


def _candidates(config: Any) -> list[Finish]:
    """What Hugging Face models are known to do after their output layer (Gemma, Granite, Cohere, HyperCLOVA X)."""
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scales = [getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)]
    capped = [Finish(softcap=float(cap))] if cap else []
    scaled = [Finish(factor) for scale in scales if scale for factor in (float(scale), 1 / float(scale))]
    return [*capped, *scaled, Finish()]
