"""``cookbook calibrate``: planted cases, each with its finding, and the estimate of hours."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtools import BRIEF, here, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.config.optim import OptimConfig
from cookbook.data import Curriculum, DataConfig
from cookbook.run.calibration import Calibration, StepSize
from cookbook.sampling.evaluation import EvalConfig
from cookbook.sampling.rollouts import RolloutConfig

GRPO = ["calibrate", "recipe=grpo", "data.limit=40", "eval.limit=4", "--prompts", "6", "--completions", "4", *BRIEF]
REWARD = ["reward.workers=0", "reward.timeout_s=null"]


def recipe(**changes: Any) -> Any:
    from cookbook.config import recipe as recipes

    return recipes.load("grpo").Config(**{"steps": 100, "prompts_per_step": 4, "group_size": 2, **changes})


def measured(**changes: Any) -> Calibration:
    """Two prompts with four completions each, a quarter of them solved: one second of sampling, a half of training."""
    typed = SimpleNamespace(
        recipe=recipe(),
        eval=EvalConfig(every=None),
        data=DataConfig(),
        rollout=RolloutConfig(max_tokens=10),
        optim=OptimConfig(lr=1e-5),
        loss=SimpleNamespace(needs_reference=False),
    )
    values: dict[str, Any] = {
        "typed": typed,
        "num_prompts": 2,
        "rewards": [1.0, 0.0, 0.0, 0.0] * 2,
        "lengths": [4] * 8,
        "finished": [4] * 8,
        "spread": 1.0,
        "env_errors": 0,
        "sampling_s": 1.0,
        "reward_s": 0.5,
        "step": StepSize(0.001, 0.0, 0.5, 0.25),
        "num_held_out": 16,
    }
    return Calibration(**{**values, **changes})


def test_hours_are_those_of_the_steps_and_evaluations():
    one = measured()
    # A step has as many completions as the sample: 1 + 0.5 + 0.5 s. Two evaluations of 16 completions take 3 s each.
    assert one.hours * 3600 == pytest.approx(100 * 2.0 + 2 * 3.0)
    assert one.tokens_per_s == 32.0 and one.pass_rate == 0.25 and one.findings() == []
    # Half of the groups are not trained; a reference and old logprobs need a pass each; two updates need half of the batches.
    assert replace(one, spread=0.5).hours * 3600 == pytest.approx(100 * 1.75 + 6.0)
    one.typed.recipe = recipe(updates=2)
    one.typed.loss = SimpleNamespace(needs_reference=True)
    assert one.hours * 3600 == pytest.approx(50 * (1.5 + 0.5 + 2 * 0.25) + 6.0)
    one.typed.eval = EvalConfig(every=20)
    assert one.hours * 3600 == pytest.approx(50 * 2.5 + 7 * 3.0)
    # Two of three groups without spread: refill samples three times the groups, of which as many as before have spread.
    one.typed.rollout = RolloutConfig(max_tokens=10, refill=4.0)
    assert replace(one, spread=1 / 3).hours * 3600 == pytest.approx(50 * 3 * (1.5 + (0.5 + 2 * 0.25) / 3) + 7 * 3.0)
    assert replace(one, spread=0.0).hours * 3600 == pytest.approx(50 * 4 * 1.5 + 7 * 3.0)
    assert "rollout.ahead" not in dict(one.lines())["hours"]
    one.typed.rollout = RolloutConfig(max_tokens=10, ahead=1)
    assert "without the overlap of rollout.ahead=1" in dict(one.lines())["hours"]
    one.typed.data = DataConfig(curriculum=Curriculum(solved_reward=0.5))
    half = replace(one, rewards=[0.5, 0.0, 0.0, 0.0] * 2)
    assert half.pass_rate == 0.25 and "a reward of 0.5 or more" in dict(half.lines())["pass rate"]
    assert ("cost", f"{one.hours * 2:.2f}, with a price of 2 per hour") in one.lines(price=2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rewards": [1.0] * 8, "spread": 0.0}, ["100% of the completions are solved already", "data.curriculum={}"]),
        ({"rewards": [0.0] * 8, "spread": 0.0}, ["every completion has the reward 0", "recipe=sft first"]),
        ({"rewards": [0.0] * 7 + [0.5], "spread": 0.1}, ["no completion is solved, and 10% of the groups", "partial rewards"]),
        ({"spread": 0.2}, ["only 20% of the groups have different rewards", "rollout.refill=2"]),
        ({"finished": [4] * 6}, ["25% of the completions are cut off", "the longest that ended has 4 tokens", "now 10"]),
        ({"finished": []}, ["100% of the completions are cut off", "raise rollout.max_tokens"]),
        ({"step": StepSize(0.5, 0.9, 1, 1)}, ["one step with optim.lr=1e-05 moves the model by 0.5 nats", "optim.lr=1e-06"]),
        ({"env_errors": 3}, ["the environment ended 3 episodes by an error", "cookbook check env"]),
    ],
)
def test_every_problem_names_its_remedy(changes, words):
    [finding] = measured(**changes).findings()
    text = f"{finding.problem}: {finding.remedy}"
    assert all(word in text for word in words), text


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_planted_cases_are_found(capsys):
    """The shipped model with its own learning rate, and with one problem each; seeds are fixed, so the numbers repeat."""
    write(
        "planted.py",
        "def solved(completion):\n    return 1.0\n\n\ndef never(completion):\n    return 0.0\n",
    )
    cases: dict[str, list[str]] = {
        "nothing to change": [],
        "100% of the completions are solved already": ["reward=planted.py:solved", *REWARD],
        "every completion has the reward 0": ["reward=planted.py:never", *REWARD],
        "100% of the completions are cut off": ["rollout.max_tokens=1"],
        "one step with optim.lr=0.005 moves the model by": ["optim.lr=5e-3"],
    }
    for expected, words in cases.items():
        assert run([*GRPO, *words]) == 0
        out = capsys.readouterr().out
        assert expected in out and ("nothing to change" in out) == (expected == "nothing to change"), out
        assert "hours " in out and "tokens/s" in out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["calibrate", "recipe=sft"], "calibrate: recipe=sft does not learn from rewards; choose recipe=grpo"),
        (["calibrate", "recipe=grpo", "--completions", "1"], "calibrate: expected at least 1 prompt and 2 completions"),
        (["calibrate", "recipe=grpo", "--price", "-1"], "calibrate: --price must be at least 0, got -1.0"),
    ],
)
def test_mistakes_are_one_line(words, line, capsys):
    assert run(words) == 2
    assert line in capsys.readouterr().err
