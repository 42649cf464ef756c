"""Reduction of a loss, and the divisor of the accumulated gradient that fits it.

A sum over tokens is divided by ``num_loss_tokens``; a mean is not divided, because a second division would shrink the
learning rate by the batch size. A loss declares its :class:`Reduction`; :func:`check` raises an error for a divisor that
contradicts it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

# Names of losses.
_warned: set[str] = set()


class Reduction(StrEnum):
    """Kind of value that a loss returns for a batch. If the batch is repeated, a mean stays the same and a sum doubles."""

    mean = "mean"
    token_sum = "token_sum"
    # A sum of one number per sequence that does not grow with the sequence's length.
    sequence_sum = "sequence_sum"


class Normalization(StrEnum):
    """Count by which ``optim_step`` divides the accumulated gradient, once, before clipping."""

    num_loss_tokens = "num_loss_tokens"
    num_sequences = "num_sequences"


def as_normalization(value: Normalization | str | None) -> Normalization | None:
    """Return the normalization; ``None`` and ``"none"`` mean no division.

    Raises:
        ConfigError: an unknown name.
    """
    if value is None or value == "none":
        return None
    try:
        return Normalization(value)
    except ValueError:
        choices = ", ".join(Normalization)
        raise ConfigError(f"grad_accumulation_normalization: expected null, {choices}, got {value!r}") from None


def check(where: str, reduction: Reduction, normalization: Normalization | None) -> None:
    """Refuse a divisor that contradicts the reduction.

    Raises:
        ConfigError: ``reduction`` is a mean and ``normalization`` divides; or a sum over sequences would be divided by
        tokens.
    """
    if reduction is Reduction.mean and normalization is not None:
        raise ConfigError(
            f"{where} already returns a mean; normalization={normalization} would divide twice. Use normalization=null"
        )
    if reduction is Reduction.sequence_sum and normalization is Normalization.num_loss_tokens:
        raise ConfigError(
            f"{where} returns a sum over sequences; normalization={normalization} would weigh it by their lengths. "
            f"Use normalization={Normalization.num_sequences}"
        )


def check_accumulation(loss: str, reduction: Reduction | None, earlier: Sequence[Reduction | None]) -> None:
    """Refuse a mean if a step has several calls: all calls would weigh the same, however many tokens they have.

    Raises:
        ConfigError: ``loss``, or one of the ``earlier`` calls since the last step, returned a mean.
    """
    declared = [kind for kind in (reduction, *earlier) if kind is not None]
    if reduction is not None and len(declared) > 1 and Reduction.mean in declared:
        raise ConfigError(
            f"forward_backward: {loss} returns a mean, and means of several calls do not add up to a mean; "
            "pass the whole batch in one call (backend.micro_batch_tokens bounds its memory)"
        )


def warn_undeclared(losses: Iterable[str], normalization: Normalization | None) -> None:
    """Warn, once for each loss, if the gradient of a loss without a declared reduction is divided."""
    if normalization is None:
        return
    for name in losses:
        if name not in _warned:
            _warned.add(name)
            log.warning(
                "loss %s: does not declare what it returns, and optim_step divides by %s, which would divide a mean twice; put "
                '@cookbook.losses.returns("token_sum"), or "mean" or "sequence_sum", above the function',
                name,
                normalization,
            )


@dataclass
class GradientCounts:
    """Counts of the accumulated gradient: the tokens whose gradient is not zero, and the sequences with such a
    token."""

    num_loss_tokens: int = 0
    num_sequences: int = 0

    def add(self, num_loss_tokens: int, num_sequences: int) -> None:
        self.num_loss_tokens += num_loss_tokens
        self.num_sequences += num_sequences

    def divisor(self, normalization: Normalization | None) -> float:
        """Return the divisor; 1.0 without a normalization, and for a count of 0."""
        return 1.0 if normalization is None else float(max(getattr(self, normalization), 1))
