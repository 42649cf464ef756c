"""PPO with one ratio per sequence, as Tinker defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cookbook.losses.base import Batch, Scope, kept
from cookbook.losses.policy import SHARED_RATIO, Rollouts, sequence_log_ratio
from cookbook.losses.ppo import PPO


@dataclass(frozen=True)
class GSPO(PPO):
    """:class:`~cookbook.losses.ppo.PPO` on the geometric mean of a sequence's ratios.

    The mean is over the tokens of weight != 0, or, where datums carry Tinker's ``sequence_ratio_mask``, over those
    where that is not 0 either. This is the loss that Tinker's clients call by this name; the preset ``loss=gspo`` is
    :class:`~cookbook.losses.grpo.GRPO` with ``ratio: sequence``, which has importance weights and a reference as well.

    Options and metrics: as PPO's.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071 (GSPO-token).
    """

    name: ClassVar[str] = "gspo"
    reads: ClassVar[frozenset[str]] = PPO.reads | {"sequence_ratio_mask"}
    stop_gradient = SHARED_RATIO

    @property
    def scope(self) -> Scope:
        return Scope.sequence

    def log_ratio(self, batch: Batch, tokens: Rollouts) -> Tensor:
        mask = kept(batch.read("sequence_ratio_mask", default=1.0), tokens.weights)
        return sequence_log_ratio(batch, super().log_ratio(batch, tokens), mask)
