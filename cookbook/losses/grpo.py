"""Group-relative policy optimization. Its options also give DAPO, Dr. GRPO and GSPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from cookbook.errors import ConfigError
from cookbook.losses.base import LossBatch, Metrics, Scope, choice, kept, non_negative, positive, weighted_mean, within
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import (
    SHARED_RATIO,
    PolicyLoss,
    RolloutArrays,
    bounded_exp,
    clipped_surrogate,
    importance_weights,
    k3,
    sequence_log_ratio,
)

Anchor = Literal["sampler", "trainer"]
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class GRPO(PolicyLoss):
    """``sum w * ( v * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + kl_beta * k3 - entropy_coef * H ) / divisor``.

    Per token: p is the current logprob, A the advantage, w the weight. ``r = exp(p - o)`` measures how far the update has
    moved the token, ``v = min(exp(o - q), importance_cap)`` corrects the difference between the probabilities of trainer
    and sampler, and ``k3 = exp(f - p) - (f - p) - 1`` estimates KL(policy || reference), with gradient ``1 - exp(f - p)``.
    ``H`` is the policy's entropy, with its gradient: the bonus delays the collapse of the policy. Three other policies need
    three logprobs:

    * ``sampling_logprobs`` (or ``logprobs``): q, from the sampler.
    * ``old_logprobs``, optional: o, the trainer's own logprobs before the first update on these samples.
    * ``reference_logprobs``, if ``kl_beta > 0``: f.

    The loss also reads ``advantages`` and ``weights`` (default ones). A token of weight 0 influences neither the loss nor the
    ratio of its sequence. ``optim_step`` divides the sum by ``normalization``, ``divisor`` is ``length_divisor``.

    Options:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; 0 <= clip_low <= 1, clip_high >= 0.
        clip_max: dual clip, > 1: where A < 0 a term is at most ``clip_max * |A|``. null: no limit.
        kl_beta: weight of the KL to the reference, >= 0. 0: no reference is needed.
        entropy_coef: weight of the entropy bonus, >= 0, over the whole vocabulary at the sampling temperature.
        anchor: value of o if the datums have no ``old_logprobs``. ``sampler``: q; v is then 1, and the clip measures from
            the sampler to the current policy. ``trainer``: the current logprobs as constants, exact for the first update after
            sampling; r is then 1, and only v acts.
        importance_level: ``token``, or ``sequence``: v from the mean of ``o - q`` over the sequence.
        importance_cap: v's upper bound, > 0. null: none.
        icepop_threshold: t >= 1; tokens whose exp(o - q) leaves [1 / t, t] get v = 0. null: off. Level ``token`` only.
        ratio: ``token``, or ``sequence`` (GSPO): r from the mean of ``p - o`` over the sequence.
        length_divisor: every term is divided by this constant, > 0; Dr. GRPO's maximum completion length.
        normalization: what optim_step divides by.

    Metrics, over the tokens of weight != 0: ``loss/ratio_mean``; ``loss/clip_frac``, ratios outside the clip range;
    ``loss/importance_weight_mean``, ``loss/importance_capped_frac``, ``loss/importance_dropped_frac``;
    ``kl/sampler_trainer_k1`` and ``_k3``, KL(sampler || trainer); ``kl/old_policy``, k3 of KL(old || now), with
    ``old_logprobs``; ``kl/reference``, k3, with a reference.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, eq. 3 and 4; asymmetric clip: Yu et al. 2025, "DAPO",
    arXiv:2503.14476; entropy bonus: Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning",
    arXiv:1602.01783; constant divisor: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783; ratio per
    sequence: Zheng et al. 2025, "GSPO", arXiv:2507.18071.
    """

    name: ClassVar[str] = "grpo"
    without_reference: ClassVar[str] = "kl_beta=0"
    reads: ClassVar[frozenset[str]] = frozenset({"weights", "old_logprobs"})
    sampled_only: ClassVar[bool] = False

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_max: float | None = None
    kl_beta: float = 0.001
    entropy_coef: float = 0.0
    anchor: Anchor = "sampler"
    importance_level: Level = "token"
    importance_cap: float | None = 5.0
    icepop_threshold: float | None = None
    ratio: Level = "token"
    length_divisor: float = 1.0
    normalization: Normalization | None = Normalization.num_loss_tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        within("loss", "between 0 and 1", lambda value: 0 <= value <= 1, clip_low=self.clip_low)
        non_negative("loss", clip_high=self.clip_high, kl_beta=self.kl_beta, entropy_coef=self.entropy_coef)
        within("loss", "> 1", lambda value: value > 1, clip_max=self.clip_max)
        positive("loss", importance_cap=self.importance_cap, length_divisor=self.length_divisor)
        within("loss", ">= 1", lambda value: value >= 1, icepop_threshold=self.icepop_threshold)
        choice("loss", "anchor", self.anchor, get_args(Anchor))
        choice("loss", "importance_level", self.importance_level, get_args(Level))
        choice("loss", "ratio", self.ratio, get_args(Level))
        if self.icepop_threshold is not None and self.importance_level == "sequence":
            raise ConfigError("loss: icepop_threshold drops single tokens; use importance_level=token with it")

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def scope(self) -> Scope:
        return Scope.sequence if "sequence" in (self.ratio, self.importance_level) else Scope.token

    @property
    def stop_gradient(self) -> str | None:
        anchor = "the policy the ratio is measured from" if self.anchor == "trainer" else ""
        shared = SHARED_RATIO if self.ratio == "sequence" else ""
        return "; ".join(filter(None, (anchor, shared))) or None

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        old = self._old_logprobs(batch, tokens)
        log_ratio = tokens.logprobs - old
        if self.ratio == "sequence":
            log_ratio = sequence_log_ratio(batch, log_ratio, tokens.weights)
        ratio = bounded_exp(log_ratio)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        terms, outside = clipped_surrogate(ratio, tokens.advantages, low, high, self.clip_max)
        importance, metrics = self._importance(batch, old - tokens.sampling_logprobs, tokens.weights)
        terms = terms * importance
        metrics |= {
            "loss/ratio_mean": weighted_mean(ratio, tokens.weights),
            "loss/clip_frac": weighted_mean(outside, tokens.weights),
        }
        if batch.has("old_logprobs"):
            metrics["kl/old_policy"] = weighted_mean(k3(tokens.logprobs.detach() - old), tokens.weights)
        if self.needs_reference:
            penalty = k3(kept(batch.read("reference_logprobs"), tokens.weights) - tokens.logprobs)
            terms = terms + self.kl_beta * penalty
            metrics["kl/reference"] = weighted_mean(penalty, tokens.weights)
        if self.needs_entropy:
            terms = terms - self.entropy_coef * kept(batch.entropies, tokens.weights)
        return terms / self.length_divisor, metrics

    def _old_logprobs(self, batch: LossBatch, tokens: RolloutArrays) -> Tensor:
        if batch.has("old_logprobs"):
            return kept(batch.read("old_logprobs"), tokens.weights)
        return tokens.sampling_logprobs if self.anchor == "sampler" else tokens.logprobs.detach()

    def _importance(self, batch: LossBatch, log_ratio: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
        """Return v, ``(N,)``, from ``o - q``, and metrics of its capped and dropped tokens."""
        if self.importance_level == "sequence":
            log_ratio = batch.spread(batch.mean_by_sequence(log_ratio, (weights != 0).to(log_ratio)))
        importance = importance_weights(log_ratio, self.importance_cap, self.icepop_threshold)
        cap = float("inf") if self.importance_cap is None else self.importance_cap
        return importance, {
            "loss/importance_weight_mean": weighted_mean(importance, weights),
            "loss/importance_capped_frac": weighted_mean(bounded_exp(log_ratio) > cap, weights),
            "loss/importance_dropped_frac": weighted_mean(importance == 0, weights),
        }
