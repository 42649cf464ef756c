"""Completions that were cut off, and long ones: loss.mask_truncated and rollout.overlong."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import tiny
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.errors import ConfigError
from cookbook.futures import done
from cookbook.losses.grpo import GRPO
from cookbook.losses.importance_sampling import ImportanceSampling
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import group_advantages
from cookbook.sampling.rewards import Python, RewardRunner
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import Sample, SampleResponse

pytestmark = pytest.mark.usefixtures("here")

LENGTHS = (4, 6, 8, 8)


class Sampler:
    """Completions of fixed lengths; one of 8 tokens has reached the limit."""

    step = 0

    def sample(self, prompt, num_samples, params):
        samples = [Sample([20 + n] * n, [-0.5] * n, "length" if n == 8 else "stop") for n in LENGTHS[:num_samples]]
        return done(SampleResponse(samples))


def sampled(*, masks_truncated=False, **options):
    write("score.py", "def score(completion, row):\n    return row['scores'].pop(0)\n")
    prompt = RenderedPrompt([1, 2], Row("here:1", {"scores": [1.0, 0.0, 0.0, 1.0]}), "q", "q")
    renderer, config = Renderer(tiny.tokenizer(), tiny.CONTEXT), RolloutConfig(max_tokens=8, **options)
    with closing(RewardRunner(Python("score.py:score", workers=0, timeout_s=None))) as judge:
        return rollouts.sample_groups(
            Sampler(), [prompt], 4, config, renderer, 7, runner=judge, masks_truncated=masks_truncated
        )


def test_truncated_completions_are_not_trained_and_count_in_their_group():
    whole, masked = sampled(), sampled(masks_truncated=True)
    assert "rollout/masked" not in whole.metrics() and masked.metrics()["rollout/masked"] == 2.0
    assert whole.metrics()["rollout/truncated_frac"] == masked.metrics()["rollout/truncated_frac"] == 0.5
    both = [rollouts.datums(one.groups, group_advantages([group.rewards for group in one.groups])) for one in (whole, masked)]
    assert [len(data) for data in both] == [4, 2]
    # The advantages are those of the whole group, and neither tokens nor sequences of the others are divided by.
    for first, second in zip(both[0][:2], both[1], strict=True):
        for key in first.loss_fn_inputs:
            np.testing.assert_array_equal(first.loss_fn_inputs[key].array, second.loss_fn_inputs[key].array)
    assert sum(datum.loss_fn_inputs["weights"].array.sum() for datum in both[1]) == 10.0


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (4, 0.0), (5, -0.25), (6, -0.5), (7, -0.75), (8, -1.0), (9, -1.0)])
def test_the_penalty_of_dapo(length, penalty):
    """Independent values: L = 8, C = 4; 0 up to 4 tokens, then a quarter less for each token."""
    assert RolloutConfig(max_tokens=8, overlong=4).length_penalty(length) == penalty
    assert RolloutConfig(max_tokens=8, overlong=4, overlong_penalty=0.5).length_penalty(length) == penalty / 2
    assert RolloutConfig(max_tokens=8).length_penalty(length) == 0.0


def test_penalties_lower_the_rewards_and_are_counted():
    found = sampled(overlong=4)
    assert found.groups[0].rewards == [1.0, -0.5, -1.0, 0.0]
    metrics = found.metrics()
    assert metrics["rollout/overlong"] == 3.0 and metrics["reward/overlong"] == -0.625 and metrics["reward/mean"] == -0.125
    assert "rollout/overlong" not in sampled().metrics()


def test_wrong_values():
    for options, message in (
        ({"overlong": 9}, "rollout.overlong must be between 1 and rollout.max_tokens=8, got 9"),
        ({"overlong": 0}, "rollout.overlong must be between 1"),
        ({"overlong_penalty": 0.0}, "rollout.overlong_penalty must be > 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            RolloutConfig(max_tokens=8, **options)


def test_a_loss_does_not_send_the_option_to_a_server():
    for loss in (GRPO(mask_truncated=True), ImportanceSampling(mask_truncated=True)):
        assert "mask_truncated" not in loss.call_options() and loss.mask_truncated


@pytest.mark.slow
def test_a_run_with_both_options(capsys):
    write("odd.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = ["reward=odd.py:odd", "reward.workers=0", "reward.timeout_s=null", "rollout.max_tokens=4", "rollout.overlong=2"]
    assert train(*SMALL["grpo"], "out=run", *words, "loss.mask_truncated=true") == 0
    last = rows("run")[-1]
    assert last["rollout/masked"] == round(last["rollout/truncated_frac"] * 24) and last["reward/overlong"] <= 0.0
