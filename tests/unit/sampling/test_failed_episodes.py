"""Episodes that an environment ends by an error: they are left out of groups, gradients and evaluations, and counted."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tiny
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import done
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import group_advantages
from cookbook.sampling.environments import AgentEnvironment, EnvironmentRunner, PythonEnvironment
from cookbook.sampling.episodes import Retrier
from cookbook.sampling.evaluation import EvalConfig, Evaluator
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import Sample, SampleResponse

pytestmark = pytest.mark.usefixtures("here")

# Every answer earns 1; an answer that contains an "x" loses its connection.
FLAKY = """
class Flaky:
    def reset(self, bad=""):
        self.bad = bad
        if bad == "reset":
            raise TimeoutError("no container")
        return "question"

    def step(self, text):
        if "x" in text or self.bad == "step":
            raise ConnectionError("the sandbox is gone")
        return None

    def get_reward(self):
        if self.bad == "reward":
            raise ConnectionError("the grader is gone")
        return 1.0
"""


class Alternating:
    """Sampler whose completions are "a", "x", "a", "x", ... Every second episode fails."""

    step = 0

    def __init__(self, texts="ax"):
        self.tokenizer, self.texts = tiny.tokenizer(), texts

    def sample(self, prompt, num_samples=1, sampling_params=None):
        texts = [self.texts[number % len(self.texts)] for number in range(num_samples)]
        tokens = [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id] for text in texts]
        return done(SampleResponse([Sample(one, [-0.5] * len(one), "stop") for one in tokens]))


def flaky(**options):
    write("flaky.py", FLAKY)
    return PythonEnvironment(target="flaky.py:Flaky", **{"workers": 0, "timeout_s": None, **options})


def prompts(*values):
    found = [Row(f"here:{number}", one) for number, one in enumerate(values)]
    return [RenderedPrompt([], row, "", "", Chat(row.where, ())) for row in found]


def sampled(config, values=({}, {}), texts="ax", size=4):
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        renderer = Renderer(tiny.tokenizer(), 256)
        options = RolloutConfig(max_tokens=8)
        return rollouts.sample_groups(
            Alternating(texts), prompts(*values), size, options, renderer, 3, retrier=Retrier(0, 4), environment=environment
        )


@pytest.mark.parametrize(("on_error", "std", "size"), [("drop", 0.0, 2), ("end", 0.5773502691896257, 4)])
def test_lost_connections_are_no_signal(on_error, std, size):
    step = sampled(flaky(on_error=on_error))
    metrics = step.metrics()
    assert metrics["env/errors"] == 4.0 and metrics["reward/group_std"] == std
    assert [len(group.trajectories) for group in step.groups] == [size] * 2 == [len(group.rewards) for group in step.groups]
    advantages = group_advantages([group.rewards for group in step.groups])
    data = rollouts.datums(step.groups, advantages.tolist())
    # The right gradient is 0. With end, the failures are what the model learns from.
    assert (data == []) == (on_error == "drop")
    # Sampled tokens are counted in both cases.
    assert metrics["rollout/tokens"] == 16.0 and metrics["rollout/turns_mean"] == 1.0


@pytest.mark.parametrize("bad", ["reset", "step", "reward"])
def test_a_prompt_all_of_whose_episodes_fail_is_left_out(bad):
    step = sampled(flaky(), [{}, {"bad": bad}, {}], texts="a")
    assert [group.prompt.row.where for group in step.groups] == ["here:0", "here:2"]
    assert step.metrics()["env/errors"] == 4.0 and step.metrics()["reward/mean"] == 1.0


def test_a_warning_names_a_loss_of_more_than_a_tenth_and_a_total_loss_ends_the_run(caplog):
    sampled(flaky(), [{}] * 9 + [{"bad": "step"}], texts="a")
    assert "have ended by an error and are left out" not in caplog.text
    sampled(flaky(), [{}] * 8 + [{"bad": "step"}], texts="a")
    assert caplog.text.count("env: 4 of 36 episodes of the step have ended by an error and are left out") == 1
    with pytest.raises(RolloutError, match="env: all 8 episodes of the step have ended by an error"):
        sampled(flaky(), [{"bad": "step"}, {"bad": "reset"}], texts="a")


def test_refill_replaces_a_prompt_whose_episodes_fail():
    # Rewards of 1 never differ, so that every prompt is replaced; the lost one too.
    taken = []

    def further(count):
        taken.append(count)
        return prompts(*[{}] * count)

    with contextlib.closing(EnvironmentRunner(flaky())) as environment:
        found = rollouts.sample_groups(
            Alternating("a"),
            prompts({}, {"bad": "step"}),
            2,
            RolloutConfig(max_tokens=8, refill=2.0),
            Renderer(tiny.tokenizer(), 256),
            3,
            environment=environment,
            further=further,
        )
    assert taken == [2] and len(found.groups) == 3 and found.metrics()["env/errors"] == 2.0


def test_groups_of_different_sizes_have_the_advantages_of_each_group():
    rewards = [[1.0, 0.0, 1.0], [0.5], [0.25, 0.75]]
    found = group_advantages(rewards)
    assert [one.tolist() for one in found] == [
        group_advantages(rewards[0]).tolist(),
        [0.0],
        group_advantages(rewards[2]).tolist(),
    ]
    # Independent numbers: (r - mean) / (s + 1e-6) with divisor n - 1.
    assert found[0] == pytest.approx([0.57734927, -1.15469854, 0.57734927], abs=1e-7)
    assert [one.tolist() for one in group_advantages(rewards, "centered")] == [
        (np.array(group) - np.mean(group)).tolist() for group in rewards
    ]
    for wrong in ([[1.0], []], [[1.0], "ab"], [[float("nan")], [1.0, 2.0]]):
        with pytest.raises(RolloutError, match="rewards: "):
            group_advantages(wrong)


def evaluated(config, values, num_samples, texts):
    options = EvalConfig(max_tokens=8, pass_at=[1, 2] if num_samples else [], num_samples=num_samples)
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        renderer = Renderer(tiny.tokenizer(), 256)
        evaluator = Evaluator(options, renderer, Retrier(0, 4), None, (), 0, environment=environment)
        return evaluator.rewards(Alternating(texts), prompts(*values))


def test_errors_are_no_wrong_answers_of_an_evaluation():
    values = [{}, {"bad": "step"}, {}, {}]
    found = evaluated(flaky(), values, None, "a").metrics
    assert found["eval/accuracy"] == 1.0 and found["eval/env_errors"] == 1.0 and found["eval/answers"] == 3.0
    found = evaluated(flaky(on_error="end"), values, None, "a").metrics
    assert found["eval/accuracy"] == 0.75 and found["eval/env_errors"] == 1.0 and found["eval/answers"] == 4.0
    # Of four draws two fail; the others are right. The third row has lost its greedy episode only in the second case.
    found = evaluated(flaky(), [{}, {}], 4, "ax").metrics
    assert found["eval/pass@1"] == found["eval/pass@2"] == 1.0 and found["eval/env_errors"] == 4.0
    # One draw of each row remains, which is too few for pass@2.
    found = evaluated(flaky(), [{}, {}], 2, "ax").metrics
    assert found["eval/pass@1"] == 1.0 and "eval/pass@2" not in found
    with pytest.raises(RolloutError, match="env: all 2 episodes of the evaluation have ended by an error"):
        evaluated(flaky(), [{"bad": "step"}] * 2, None, "a")


def test_a_reward_of_errors_needs_errors_that_end_an_episode(capsys):
    write("flaky.py", FLAKY)
    for on_error in ("drop", "fail"):
        with pytest.raises(ConfigError, match=f"env.error_reward=-1 has no effect with env.on_error={on_error}"):
            flaky(on_error=on_error, error_reward=-1.0)
    assert flaky(on_error="end", error_reward=-1.0).error_reward == -1.0
    # A program whose calls were refused may end by an error of the model's doing.
    assert AgentEnvironment(command="true", error_reward=-1.0).error_reward == -1.0
    assert run(["check", "config", "recipe=grpo", "env=flaky.py:Flaky", "env.on_error=ignore"]) == 2
    assert "env.on_error" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_counts_the_errors_of_its_environment(capsys):
    # The first sampled character decides.
    write("half.py", FLAKY.replace('"x" in text', "sum(map(ord, text)) % 2").replace('bad=""', "seed, bad=''"))
    words = ["env=half.py:Flaky", "env.workers=0", "env.timeout_s=null", "rollout.max_tokens=4", "eval.max_tokens=4"]
    assert train(*SMALL["grpo"], "out=run", *words) == 2
    assert "every reward was 1" in capsys.readouterr().err
    found = rows("run")
    assert found[-1]["env/errors"] > 0 and found[-1]["reward/std"] == 0.0 == found[-1]["optim/grad_norm"]
    assert all(
        row["eval/accuracy"] == 1.0 and row["eval/env_errors"] + row["eval/answers"] == 4.0
        for row in found
        if "eval/accuracy" in row
    )
