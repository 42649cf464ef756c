"""GRPO with a reference KL that is logged, and holds nothing."""

from dataclasses import dataclass
from typing import ClassVar

from cookbook.losses.base import kept
from cookbook.losses.grpo import GRPO
from cookbook.losses.normalization import Normalization
from cookbook.losses.policy import k3


@dataclass(frozen=True)
class Unheld(GRPO):
    name: ClassVar[str] = "unheld"
    kl_beta: float = 0.01
    normalization: Normalization | None = Normalization.num_loss_tokens

    def terms(self, batch, tokens):
        terms, metrics = super().terms(batch, tokens)
        log_ratio = kept(batch.read("reference_logprobs"), tokens.weights) - tokens.logprobs
        return terms - self.kl_beta * (k3(log_ratio) - k3(log_ratio.detach())), metrics


@dataclass(frozen=True)
class Excused(Unheld):
    """The same behind another detached term, which is declared."""

    name: ClassVar[str] = "excused"
    stop_gradient = "a factor exp(logp)"

    def terms(self, batch, tokens):
        terms, metrics = super().terms(batch, tokens)
        return terms + tokens.logprobs.exp().detach() * tokens.logprobs, metrics
