"""Edges of groups and rewards: different problems in a group, rounding, huge rewards, prompts that are printed twice."""

from __future__ import annotations

import contextlib
import json
import warnings

import numpy as np
import pytest
import tiny
from runtools import SMALL, here, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError
from cookbook.futures import done
from cookbook.sampling.advantages import group_advantages, groups_without_spread
from cookbook.sampling.environments import EnvironmentRunner, PythonEnvironment
from cookbook.sampling.rollouts import RolloutConfig, sample_groups
from cookbook.types import Sample, SampleResponse
from cookbook.utils.plot import Curve, chart

pytestmark = pytest.mark.usefixtures("here")

DRAWS = """
import itertools

NUMBERS = itertools.count()

class Draws:
    def reset(self):
        return f"problem {next(NUMBERS)}"

    def step(self, text):
        return None, 1.0


class Repeats(Draws):
    def reset(self, prompt):
        return prompt + "="
"""


class Says:
    step = 0

    def sample(self, prompt, num_samples=1, sampling_params=None):
        return done(SampleResponse([Sample([5, 6], [-0.5, -0.5], "stop") for _ in range(num_samples)]))


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_group_of_different_problems_is_refused_in_training(lockstep):
    write("draws.py", DRAWS)
    config = PythonEnvironment(target="draws.py:Draws", workers=0, timeout_s=None, lockstep=lockstep)
    prompt = RenderedPrompt([], Row("env[train]:0", {}), "", "", Chat("", ()))
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        words = (
            r"two episodes of env\[train\]:0 begin with different observations, 'problem \d+' and 'problem \d+', and a group"
        )
        with pytest.raises(ConfigError, match=words):
            sample_groups(
                Says(), [prompt], 2, RolloutConfig(max_tokens=4), Renderer(tiny.tokenizer(), 256), 1, environment=environment
            )


def test_rewards_that_differ_by_rounding_tie():
    parts = [0.1] * 7 + [0.3]
    sums = [sum(parts), sum(reversed(parts)), sum(sorted(parts)), 1.0]
    assert len(set(sums)) > 1
    # Parts that are larger than their sum leave more rounding.
    cancelled = [0.1 + 16.0 - 16.0, 0.1]
    assert cancelled[0] != cancelled[1]
    for group in (sums, cancelled):
        assert groups_without_spread(group) and not group_advantages(group).any()
    assert not groups_without_spread([1.0, 1.0 + 1e-9])


@pytest.mark.parametrize("kind", ["zscore", "centered"])
def test_huge_rewards_have_the_advantages_of_small_ones(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, large = (
            group_advantages([1.0, 0.0, 1.0, 0.0], kind, eps=0.0),
            group_advantages([1e300, 0.0, 1e300, 0.0], kind, eps=0.0),
        )
        assert np.isfinite(group_advantages([[-1e308, 1e308], [0.0, 1.0]], "zscore")).all()
    expected = small if kind == "zscore" else small * 1e300
    assert large == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("values", [[1e300, 1e300], [-1e308, 1e308], [1.0, float("inf")], [0.0, 0.0], [float("nan")] * 2])
def test_a_plot_of_any_values(values):
    drawn = chart("title", "step", [Curve("reward", list(enumerate(values)))])
    assert "nan" not in drawn.replace("title", "") and drawn.endswith("</svg>\n")


def test_check_env_reports_a_prompt_that_is_printed_twice(capsys):
    write("draws.py", DRAWS)
    write("rows.jsonl", '{"prompt": "38+43"}\n' * 3)
    words = ["env.workers=0", "env.timeout_s=null", "data=rows.jsonl"]
    assert run(["check", "env", "draws.py:Repeats", *words]) == 2
    said = capsys.readouterr()
    assert "the first observation repeats the row's prompt, '38+43'" in said.out and "1 of 7 checks: prompt" in said.err


def test_errors_of_held_out_prompts_name_the_key_of_evaluation(capsys):
    rows = [{"prompt": "1+1=", "answer": "2"}] * 4
    write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    words = [*SMALL["grpo"], "data=rows.jsonl", "reward=number", "data.eval_fraction=0.5", "out=run"]
    for key in ("rollout", "eval"):
        limits = [f"{name}.max_tokens={100_000 if name == key else 4}" for name in ("rollout", "eval")]
        assert train(*words, *limits) == 2
        assert f"lower {key}.max_tokens, shorten the prompt" in capsys.readouterr().err
