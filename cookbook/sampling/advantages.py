"""Advantages: rewards relative to those of the same group, the completions of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from cookbook.errors import ConfigError, RolloutError

Kind = Literal["zscore", "centered", "rloo", "maxrl"]
Float = npt.NDArray[np.float64]
Rewards = npt.ArrayLike | Sequence[Sequence[float]]

# Rewards that differ by at most this many rounding errors count as equal, for example 0.1 + 0.2 and 0.3.
# A sum of a hundred parts, or parts of a hundred times the sum, stay below this.
_NOISE_ULPS = 256
# Larger rewards are scaled first.
_LARGE = 1e100


def group_advantages(
    rewards: Rewards, kind: Kind = "zscore", eps: float = 1e-6, group_size: int | None = None
) -> npt.NDArray[Any]:
    """Return each reward minus its group's mean, and by default divided by the group's standard deviation.

    Args:
        rewards: ``(G,)``, one group, or ``(P, G)``, P groups of G completions each; any finite numbers. The groups may have
            different sizes, if episodes were left out.
        kind: ``zscore``: ``(r - mean) / (std + eps)`` with the sample standard deviation (divisor G - 1), so that all groups
            have equal weight, however small their spread. ``centered``: ``r - mean``, in units of the reward. ``rloo``: ``r``
            minus the mean of the other rewards, which is ``G / (G - 1)`` times the centered one, and unbiased. ``maxrl``:
            ``(r - mean) / (mean + eps)``, so that hard prompts weigh more; all rewards have to be at least 0.
        eps: added to the standard deviation, >= 0, in units of the reward.
        group_size: the number of completions that were sampled per group. If it is above 1, groups of one have lost the others,
            and get zeros even if all groups have one reward.

    Returns:
        float64, in the shape of ``rewards``; for groups of different sizes, an array of one array per group. A group without
        spread gets exact zeros: rounding in its mean is not a signal. So does a group with one reward, if others have more.

    Raises:
        ConfigError: an unknown ``kind``, a negative ``eps``, or ``zscore`` or ``rloo`` with groups of one, which have no
            deviation and no other rewards.
        RolloutError: rewards of another shape, or not finite; or a negative reward with ``maxrl``.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2; centered: Liu et al. 2025, "Understanding
    R1-Zero-Like Training", arXiv:2503.20783; rloo: Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740, equation 8;
    maxrl: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"recipe.advantage must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if not 0 <= eps < float("inf"):
        raise ConfigError(f"advantages: eps must be >= 0, got {eps}")
    if (groups := _of_different_sizes(rewards)) is not None:
        advantages = np.empty(len(groups), object)
        advantages[:] = [np.zeros(1) if len(group) == 1 else group_advantages(group, kind, eps) for group in groups]
        return advantages
    array = _rewards(rewards)
    flat = groups_without_spread(array)[..., None]
    if kind in ("zscore", "rloo") and array.shape[-1] == 1:
        if group_size is not None and group_size > 1:
            return np.zeros_like(array)
        lacks = "standard deviation" if kind == "zscore" else "other reward to compare with"
        raise ConfigError(
            f"advantages: every group has one reward, which has no {lacks}; use recipe.group_size of at least 2, or "
            "recipe.advantage=centered"
        )
    if kind == "maxrl" and (array < 0).any():
        raise RolloutError(
            f"rewards: recipe.advantage=maxrl divides by the mean, and {array.min():g} is below 0; use rewards of at least 0, "
            "or recipe.advantage=zscore"
        )
    # The squares of very large rewards would overflow.
    scale = _scale(array)
    scaled = array / scale
    centered = scaled - scaled.mean(axis=-1, keepdims=True)
    if kind == "zscore":
        centered /= np.where(flat, 1.0, scaled.std(axis=-1, ddof=1, keepdims=True) + eps / scale)
    elif kind == "maxrl":
        centered /= np.where(flat, 1.0, scaled.mean(axis=-1, keepdims=True) + eps / scale)
    else:
        centered *= scale * (array.shape[-1] / (array.shape[-1] - 1) if kind == "rloo" else 1.0)
    return np.where(flat, 0.0, centered)


def _scale(array: Float) -> Float:
    """Return a divisor for each group, ``(P, 1)``: 1, or the largest absolute reward if it is very large."""
    peaks = np.abs(array).max(axis=-1, keepdims=True)
    return np.where(peaks > _LARGE, peaks, 1.0)


def groups_without_spread(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether all rewards of a group are equal, so that it has no gradient: ``(P, G)`` -> ``(P,)``, ``(G,)`` -> ``()``.

    Raises:
        RolloutError: rewards of another shape, or not finite.
    """
    array = _rewards(rewards)
    scaled = array / _scale(array)
    spread = scaled.max(axis=-1) - scaled.min(axis=-1)
    return np.asarray(spread <= _NOISE_ULPS * np.spacing(np.abs(scaled).max(axis=-1)))


def _of_different_sizes(rewards: Rewards) -> list[Float] | None:
    """Return the groups as arrays, if their sizes differ; else None."""
    if not isinstance(rewards, Sequence) or not all(isinstance(group, Sequence | np.ndarray) for group in rewards):
        return None
    sizes = {np.size(group) for group in rewards}
    return [_rewards(group) for group in rewards] if len(sizes) > 1 and 0 not in sizes else None


def _rewards(rewards: Rewards) -> Float:
    try:
        array = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"rewards: not an array of numbers, {error}; give every group at least one number") from None
    if array.ndim not in (1, 2) or not array.size:
        raise RolloutError(f"rewards: expected shape (G,) or (P, G), got {array.shape}; pass one row per group")
    if not np.isfinite(array).all():
        index = tuple(int(number) for number in np.argwhere(~np.isfinite(array))[0])
        raise RolloutError(f"rewards: {array[index]} at {index}; every reward must be finite")
    return array
