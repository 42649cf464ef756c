"""Direct preference optimization and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cookbook.errors import ConfigError
from cookbook.losses.base import Loss, Metrics, Scope, choice, non_negative, positive, within
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.losses.pairs import PairBatch, logprob_metrics, reward_metrics
from cookbook.types import Datum

Variant = Literal["sigmoid", "robust", "hinge", "ipo", "ipo_sum", "simpo"]
SMOOTHED_VARIANTS = ("sigmoid", "robust", "simpo")
PER_TOKEN = ("ipo", "simpo")


@dataclass(frozen=True)
class DPO(Loss):
    """The mean over pairs of a function of ``d = s_chosen - s_rejected``, where ``s = sum w (p - f)`` over a response.

    p are current, f reference logprobs; datums come in pairs, chosen before rejected. Reads ``weights`` (default ones;
    0 outside the response) and ``reference_logprobs``. With h = beta d and S the logistic function:

    ========  =====================================================================================================
    variant   loss of one pair
    ========  =====================================================================================================
    sigmoid   ``-(1 - e) log S(h) - e log S(-h)``, e = label_smoothing (above 0: conservative DPO)
    robust    ``(-(1 - e) log S(h) + e log S(-h)) / (1 - 2 e)``, unbiased when a share e of the labels is flipped
    hinge     ``max(0, 1 - h)``
    ipo       ``(d - 1 / (2 beta))^2``, s being the weighted mean over the response instead of the sum
    ipo_sum   the same with the sum, as in the paper
    simpo     as sigmoid with ``h = beta d - simpo_gamma``, s being the weighted mean of p, without a reference
    ========  =====================================================================================================

    Options:
        variant: see above.
        beta: > 0; how strongly a preference is believed, in inverse nats.
        label_smoothing: e, 0 <= e < 0.5; sigmoid, robust and simpo.
        simpo_gamma: margin the chosen response must win by, >= 0, in units of h; simpo only.
        reference_free: f = 0, no reference is needed.

    Metrics, means over pairs: ``rewards/chosen`` and ``rewards/rejected``, beta s; ``rewards/margin``, their
    difference, so beta-scaled too; ``rewards/accuracy``, the share of pairs whose margin is above 0; ``logprobs/chosen``
    and ``logprobs/rejected``, sum w p. A pair is a tie, and counts as half, if ``|d|`` is at most 2e-6 times the sum of
    ``w (1 + |p|)`` over both responses (with the variants that use means: the sum of the two means). This is the
    rounding noise of single precision, so the accuracy of the first step is 0.5.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; IPO: Azar et al. 2023, arXiv:2310.12036, eq. 17; hinge: Zhao
    et al. 2023, arXiv:2305.10425; robust: Chowdhury et al. 2024, arXiv:2403.00409; conservative: Mitchell 2023, "A note
    on DPO with noisy preferences"; SimPO: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """

    name: ClassVar[str] = "dpo"
    without_reference: ClassVar[str] = "reference_free=true"
    reduction: ClassVar[Reduction] = Reduction.mean
    scope = Scope.pair
    ignores_masked: ClassVar[bool] = True

    variant: Variant = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    reference_free: bool = False
    normalization: Normalization | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("loss", "variant", self.variant, get_args(Variant))
        positive("loss", beta=self.beta)
        non_negative("loss", simpo_gamma=self.simpo_gamma)
        within("loss", "at least 0 and below 0.5", lambda value: 0 <= value < 0.5, label_smoothing=self.label_smoothing)
        if self.label_smoothing and self.variant not in SMOOTHED_VARIANTS:
            raise ConfigError(
                f"loss: label_smoothing has no meaning for variant={self.variant}, got {self.label_smoothing}; "
                f"set it to 0 or use variant={', '.join(SMOOTHED_VARIANTS)}"
            )

    @property
    def needs_reference(self) -> bool:
        return self.variant != "simpo" and not self.reference_free

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        batch = PairBatch(data, logprobs)
        gain = batch.logprobs - batch.read("reference_logprobs") if self.needs_reference else batch.logprobs
        reduce = batch.means if self.variant in PER_TOKEN else batch.sums
        chosen, rejected = reduce(gain)
        metrics = reward_metrics(self.beta * chosen, self.beta * rejected, self.beta * batch.resolution(reduce))
        return self.pair_losses(chosen - rejected).mean(), metrics | logprob_metrics(*batch.sums(batch.logprobs))

    def pair_losses(self, margin: Tensor) -> Tensor:
        """The loss of each pair from ``d``, ``(P,)``."""
        if self.variant in ("ipo", "ipo_sum"):
            return (margin - 1 / (2 * self.beta)).square()
        scaled = self.beta * margin - (self.simpo_gamma if self.variant == "simpo" else 0.0)
        if self.variant == "hinge":
            return torch.relu(1 - scaled)
        right, flipped = -logsigmoid(scaled), -logsigmoid(-scaled)
        noise = self.label_smoothing
        if self.variant == "robust":
            return ((1 - noise) * right - noise * flipped) / (1 - 2 * noise)
        return (1 - noise) * right + noise * flipped
