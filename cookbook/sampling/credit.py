"""Credit of single turns and tokens, and rewards that are normalized one by one before they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cookbook.errors import ConfigError, RolloutError
from cookbook.sampling.advantages import Kind, group_advantages

Float = npt.NDArray[np.float64]
Credit = float | list[Float]
"""Advantage of an attempt: one number, or per turn an array with one number or with one per token."""


def returns(rewards: Sequence[Sequence[float]], gamma: float = 1.0) -> list[Float]:
    """Return for each reward of an attempt the sum of itself and all later rewards: what an action at this place can change.

    Args:
        rewards: per turn a list of one number, or of one number per token.
        gamma: factor of the rewards of the next turn, and its square of the turn after it, ... Within a turn nothing is
            discounted.

    Source: the return of Sutton and Barto 2018, "Reinforcement Learning", eq. 3.8; for a policy gradient, section 13.3.
    """
    later, by_turn = 0.0, []
    for turn in reversed(rewards):
        own = np.cumsum(np.asarray(turn, np.float64)[::-1])[::-1] + gamma * later
        later = float(own[0]) if len(own) else gamma * later
        by_turn.append(own)
    return by_turn[::-1]


def places(group: Sequence[Sequence[Float]]) -> Float:
    """Return the returns of a group by place, ``(L, G)``: L is the largest number of turns or tokens of an attempt.

    An attempt with fewer places takes part in the later ones with the return at its last place.
    """
    flat = [np.concatenate(attempt) for attempt in group]
    longest = max(map(len, flat))
    return np.array([[row[min(place, len(row) - 1)] for row in flat] for place in range(longest)])


def credits_of(
    group: Sequence[Sequence[Float]], kind: Kind = "zscore", eps: float = 1e-6, group_size: int | None = None
) -> list[list[Float]]:
    """Return the advantage of every turn or token of a group's attempts.

    The return ``R_ik`` of attempt i from its k-th turn (or token) on is compared with those of the G attempts from the same
    place on, by :func:`~cookbook.sampling.advantages.group_advantages`; with ``zscore``:

        A_ik = (R_ik - mean_j R_jk) / (std_j R_jk + eps)            with R_jk the last return of j if j has fewer than k turns

    The other attempts do not depend on what attempt i does in turn k, so their mean is a baseline that changes no expected
    gradient. If only the last turn has a reward and ``gamma`` is 1, all turns have the advantage of the whole attempt.

    Source: returns from a turn on, compared within the group at the same turn: Zeng et al. 2025, "Reinforcing Multi-Turn
    Reasoning in LLM Agents via Turn-Level Reward Design", arXiv:2505.11821 (MT-GRPO, where all attempts have the same number of
    turns); rewards of steps in a group: Shao et al. 2024, arXiv:2402.03300, section 4.1.3, which pools the steps.
    """
    by_place = group_advantages(places(group), kind, eps, group_size)
    by_attempt = []
    for index, attempt in enumerate(group):
        ends = np.cumsum([len(turn) for turn in attempt])
        own = by_place[: int(ends[-1]), index]
        by_attempt.append([own[end - len(turn) : end] for turn, end in zip(attempt, ends.tolist(), strict=True)])
    return by_attempt


def normalized_each(
    parts: Sequence[Sequence[Mapping[str, float | None]]],
    weights: Mapping[str, float],
    kind: Kind = "zscore",
    eps: float = 1e-6,
    group_size: int | None = None,
) -> list[list[float]]:
    """Return the advantages of completions whose rewards are normalized one by one, as in GDPO.

    Each reward k is compared within the group of completions; the weighted sum is divided by its deviation in the batch:

        A_ik = (r_ik - mean(r_k)) / (std(r_k) + eps)      S_i = sum_k weight_k A_ik      A_i = S_i / (std of all S + eps)

    The paper also subtracts the mean of all S, which is 0: every ``A_k`` sums to 0 in its group. So completions of groups
    without spread keep an exact 0. Both deviations have the divisor n - 1. A reward that is None for a completion does not
    apply to it, and is compared within the others of the group.

    Args:
        parts: per group and completion the rewards by name, before their weights.
        weights: of the rewards that count.

    Raises:
        ConfigError: another ``kind`` than ``zscore``: the others do not normalize.
        RolloutError: a reward is missing, because an environment has given its own.

    Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv:2601.05242; TRL 1.16
    has the same formula (``multi_objective_aggregation="normalize_then_sum"``, eps 1e-4).
    """
    if kind != "zscore":
        raise ConfigError(f"reward.normalize=each divides by standard deviations, as recipe.advantage=zscore, got {kind}")
    sums = [np.zeros(len(group)) for group in parts]
    for group, total in zip(parts, sums, strict=True):
        for name, weight in weights.items():
            if any(name not in parts for parts in group):
                raise RolloutError(
                    f"reward.normalize=each: a completion has no reward {name}, because its environment gives another; remove "
                    "get_reward and the rewards of step, or reward.normalize"
                )
            applies = [index for index, parts in enumerate(group) if parts[name] is not None]
            if applies:
                values = [[float(group[index][name] or 0.0) for index in applies]]
                total[applies] += weight * group_advantages(values, kind, eps, group_size or len(group))[0]
    pooled = np.concatenate(sums) if sums else np.zeros(0)
    deviation = float(pooled.std(ddof=1)) if len(pooled) > 1 else 0.0
    return [(total / (deviation + eps)).tolist() for total in sums]
