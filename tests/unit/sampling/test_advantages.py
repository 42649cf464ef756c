"""Rewards measured against their group. The golden numbers are in test_losses_golden.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cookbook.errors import ConfigError, RolloutError
from cookbook.sampling.advantages import group_advantages, groups_without_spread


@pytest.mark.parametrize("kind", ["zscore", "centered"])
@pytest.mark.parametrize("rewards", [[0.7] * 3, [0.1] * 10, [1 / 3] * 7, [0.0] * 4, [-1e9] * 6, [0.3, 0.1 + 0.2, 0.3]])
def test_equal_rewards_get_exact_zeros(kind: str, rewards: list[float]) -> None:
    """A mean of equal numbers is off by rounding, which a tiny deviation would blow up to +-1."""
    found = group_advantages(rewards, kind, eps=0.0)  # type: ignore[arg-type]
    assert found.dtype == np.float64 and not found.any()
    assert groups_without_spread(rewards)


def test_groups_do_not_attend_to_each_other() -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 8))
    rewards[3] = 2.5
    found = group_advantages(rewards)
    assert found.shape == (5, 8)
    for row, group in zip(found, rewards, strict=True):
        assert row.tolist() == group_advantages(group).tolist()
    assert groups_without_spread(rewards).tolist() == [False, False, False, True, False]
    assert found.sum(axis=1) == pytest.approx(np.zeros(5), abs=1e-12)
    spread = found[[0, 1, 2, 4]].std(axis=1, ddof=1)
    assert spread == pytest.approx(np.ones(4), abs=1e-5)  # eps 1e-6 over deviations of about 1


def test_small_but_real_differences_count() -> None:
    assert group_advantages([1.0, 1.0 + 1e-9], eps=0.0) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-6)
    assert not groups_without_spread([1.0, 1.0 + 1e-9])


def test_a_group_of_one() -> None:
    with pytest.raises(ConfigError, match=r"one reward.*group_size.*centered"):
        group_advantages([[1.0], [2.0]])
    assert group_advantages([[1.0], [2.0]], "centered").tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("kind", ["zscore", "centered", "rloo", "maxrl"])
def test_groups_that_have_all_lost_their_other_episodes_have_no_gradient(kind: str) -> None:
    """The group size is right, and the episodes ended by errors: neither is a mistake of the configuration."""
    assert group_advantages([[1.0], [2.0]], kind, group_size=4).tolist() == [[0.0], [0.0]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([[1.0, float("nan")]], r"nan at \(0, 1\)"),
        ([[1.0, 2.0], [float("inf"), 0.0]], r"inf at \(1, 0\)"),
        ([], r"got \(0,\)"),
        (1.0, r"got \(\)"),
        ([[[1.0]]], r"got \(1, 1, 1\)"),
        ([[1.0], []], "at least one number"),
        (["good", "bad"], "not an array of numbers"),
    ],
)
def test_bad_rewards_are_refused(rewards: object, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        group_advantages(rewards)
    with pytest.raises(RolloutError, match=words):
        groups_without_spread(rewards)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.advantage must be one of zscore, centered, rloo, maxrl, got 'rank'"):
        group_advantages([1.0, 2.0], "rank")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eps must be >= 0"):
        group_advantages([1.0, 2.0], eps=-1.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # By hand, in decimals. Rewards 1, 0, 0, 3: mean 1; the means of the others are 1, 4/3, 4/3, 1/3.
        ("centered", [0.0, -1.0, -1.0, 2.0]),
        ("rloo", [0.0, -4 / 3, -4 / 3, 8 / 3]),
        ("maxrl", [0.0, -1.0, -1.0, 2.0]),
    ],
)
def test_each_kind_by_hand(kind: str, expected: list[float]) -> None:
    assert group_advantages([1.0, 0.0, 0.0, 3.0], kind, eps=0.0).tolist() == pytest.approx(expected, abs=1e-15)  # type: ignore[arg-type]


def test_rloo_and_maxrl_against_plain_python() -> None:
    rewards = [[0.25, 1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]]
    rloo, maxrl = group_advantages(rewards, "rloo"), group_advantages(rewards, "maxrl", eps=0.0)
    for row, group in enumerate(rewards):
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            assert rloo[row][place] == pytest.approx(reward - math.fsum(others) / len(others), abs=1e-15)
            mean = math.fsum(group) / len(group)
            assert maxrl[row][place] == pytest.approx((reward - mean) / mean, abs=1e-14)
    # A prompt that is solved once in five weighs more than one that is solved more often.
    assert maxrl[1][3] == pytest.approx(4.0) and group_advantages([0.0, 0.0, 0.0], "maxrl").tolist() == [0.0, 0.0, 0.0]


def test_limits_of_rloo_and_maxrl() -> None:
    with pytest.raises(ConfigError, match="one reward, which has no other reward to compare with"):
        group_advantages([[1.0], [2.0]], "rloo")
    with pytest.raises(RolloutError, match="maxrl divides by the mean, and -1 is below 0"):
        group_advantages([-1.0, 1.0], "maxrl")
