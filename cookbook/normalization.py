"""What a loss returns, and what the accumulated gradient is then divided by.

The two belong together: a sum over tokens wants ``num_loss_tokens``; a mean wants nothing, and dividing it again would
shrink the learning rate by the batch size. A loss states its :class:`Reduction` as a fact; :func:`check` refuses a
contradiction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

_warned: set[str] = set()  # names of losses


class Reduction(StrEnum):
    """What a loss returns for a batch, measured by repeating it: a mean stays, a sum doubles."""

    mean = "mean"
    token_sum = "token_sum"
    sequence_sum = "sequence_sum"  # of one number per sequence that does not grow with its length


class Normalization(StrEnum):
    """What ``optim_step`` divides the accumulated gradient by, once, before clipping."""

    num_loss_tokens = "num_loss_tokens"
    num_sequences = "num_sequences"


def as_normalization(value: Normalization | str | None) -> Normalization | None:
    """``None`` and ``"none"`` are no division.

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
    """Refuses to divide a mean again, and to divide by tokens what has already lost its length.

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
    """Refuses a mean among several calls: each would weigh the same, whatever its number of tokens. None is undeclared.

    Raises:
        ConfigError: ``loss``, or one of the ``earlier`` calls since the last step, returned a mean.
    """
    declared = [one for one in (reduction, *earlier) if one is not None]
    if reduction is not None and len(declared) > 1 and Reduction.mean in declared:
        raise ConfigError(
            f"forward_backward: {loss} returns a mean, and means of several calls do not add up to a mean; "
            "pass the whole batch in one call (backend.micro_batch_tokens bounds its memory)"
        )


def warn_undeclared(losses: Iterable[str], normalization: Normalization | None) -> None:
    """Warns, once for each loss, if a division meets a loss that does not say what it returns."""
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
    """What the accumulated gradient is made of: the tokens whose gradient is not zero, and the sequences that hold
    one."""

    num_loss_tokens: int = 0
    num_sequences: int = 0

    def add(self, num_loss_tokens: int, num_sequences: int) -> None:
        self.num_loss_tokens += num_loss_tokens
        self.num_sequences += num_sequences

    def divisor(self, normalization: Normalization | None) -> float:
        """1.0 when nothing is divided, and when there is nothing to divide."""
        return 1.0 if normalization is None else float(max(getattr(self, normalization), 1))
