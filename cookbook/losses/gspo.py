"""PPO with one ratio per sequence, as Tinker defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import LossBatch, Scope, kept
from cookbook.losses.policy import SHARED_RATIO, RolloutArrays, sequence_log_ratio
from cookbook.losses.ppo import PPO


@dataclass(frozen=True)
class GSPO(PPO):
    """``-sum w * min(s A, clip(s, low, high) A)``, with ``s = exp(mean(p - q))`` over the tokens of each sequence.

    Per token: p is the current logprob, q the logprob that the token was sampled with, A the advantage, w the weight; s is
    the geometric mean of the ratios that :class:`~cookbook.losses.ppo.PPO` clips one by one. Its gradient with respect to each
    p is that of ``exp(p - stop_gradient(p)) * stop_gradient(s)``.

    The mean is over the tokens of weight != 0; if datums carry Tinker's ``sequence_ratio_mask``, over those of them whose
    mask is not 0. This is the loss that Tinker's clients call by this name; the preset ``loss=gspo`` is
    :class:`~cookbook.losses.grpo.GRPO` with ``ratio: sequence``, which has importance weights and a reference as well.

    Options and metrics: those of PPO.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071 (GSPO-token).
    """

    name: ClassVar[str] = "gspo"
    reads: ClassVar[frozenset[str]] = PPO.reads | {"sequence_ratio_mask"}
    stop_gradient = SHARED_RATIO

    @property
    def scope(self) -> Scope:
        return Scope.sequence

    def log_ratio(self, batch: LossBatch, tokens: RolloutArrays) -> Tensor:
        mask = kept(batch.read("sequence_ratio_mask", default=1.0), tokens.weights)
        return sequence_log_ratio(batch, super().log_ratio(batch, tokens), mask)
