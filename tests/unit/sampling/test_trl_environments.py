"""Classes written for TRL's environment_factory: their rewards, in the class or in a function that gets the environments."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import tiny
from runtools import SMALL, here, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.config.typed import construct_target
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Awaiter, done
from cookbook.run.builder import connect_reward
from cookbook.sampling.environments import EnvironmentRunner, PythonEnvironment
from cookbook.sampling.environments.config import Contract
from cookbook.sampling.rewards import Python, RewardRunner
from cookbook.sampling.rollouts import RolloutConfig, sample_groups
from cookbook.sampling.trajectory import Segment
from cookbook.types import Sample, SampleResponse

pytestmark = pytest.mark.usefixtures("here")

COUNTER = '''
class Counter:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs):
        self.reward = 0.0
        self.goal = kwargs["answer"]

    def add(self, amount: int) -> str:
        """
        Add to the reward.

        Args:
            amount: the amount
        """
        self.reward += amount
        return str(self.reward)


class Final(Counter):
    def get_reward(self, text):
        return float(self.goal in text) + self.reward


class Whole(Counter):
    def get_reward(self, trajectory):
        assert [one["role"] for one in trajectory] == ["prompt", "assistant", "environment", "assistant"]
        return {"turns": float(len(trajectory)), "answer": float(trajectory[-1]["content"] == self.goal)}


def reward_func(environments, **kwargs):
    assert kwargs["answer"] == ["five"] and len(kwargs["completions"]) == 1
    return [environment.reward for environment in environments]


def of_one(environment, completion, answer, step):
    return {"own": environment.reward, "right": float(answer in completion) + step}


def fails(environments, **kwargs):
    raise KeyError("no such reward")


class Asks:
    def reset(self, answer):
        return "question"

    def step(self, text):
        return None


def plain(completion, row):
    return 1.0
'''
CALL = '<tool_call>{"name": "add", "arguments": {"amount": 2}}</tool_call>'


class Says:
    step = 0

    def __init__(self, *turns):
        self.tokenizer, self.turns = tiny.tokenizer(), list(turns)

    def sample(self, prompt, num_samples=1, sampling_params=None):
        text = self.turns.pop(0)
        tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return done(SampleResponse([Sample(tokens, [-0.5] * len(tokens), "stop") for _ in range(num_samples)]))


def rewards(name, reward=None, workers=0):
    write("trl.py", COUNTER)
    limits = {"workers": workers, "timeout_s": None}
    prompt = RenderedPrompt([], Row("here:1", {"answer": "five"}), "", "", Chat("here:1", ()))
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(
            contextlib.closing(EnvironmentRunner(PythonEnvironment(target=f"trl.py:{name}", **limits)))
        )
        runner = None
        if reward is not None:
            runner = stack.enter_context(
                contextlib.closing(RewardRunner(Python(f"trl.py:{reward}", workers=0, timeout_s=None)))
            )
            runner.check(["answer"], has_environment=True)
        connect_reward(runner, environment)
        sampler, renderer = Says(CALL, "it is five"), Renderer(tiny.tokenizer(), 1024)
        options = RolloutConfig(max_tokens=100)
        found = sample_groups(sampler, [prompt], 1, options, renderer, 1, runner=runner, environment=environment)
        [group] = found.groups
        return group.rewards, dict(group.parts[0])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reward_function_gets_the_environments(workers):
    assert rewards("Counter", "reward_func", workers) == ([2.0], {})
    assert rewards("Counter", "of_one", workers) == ([3.0], {"own": 2.0, "right": 1.0})
    with pytest.raises(RolloutError, match="here:1: env: the reward raised KeyError: 'no such reward'"):
        rewards("Counter", "fails", workers)


def test_an_environment_sees_its_final_answer():
    assert rewards("Final") == ([3.0], {})
    assert rewards("Whole") == ([4.0], {"turns": 4.0, "answer": 0.0})
    write("other.py", COUNTER.replace("get_reward(self, text)", "get_reward(self, score)"))
    with pytest.raises(ConfigError, match=r"get_reward has the parameter 'score'; it may have text, completion, trajectory"):
        Contract.of(PythonEnvironment(target="other.py:Final").make())


@pytest.mark.parametrize("name", ["Counter", "Asks"])
def test_an_environment_without_a_reward_is_refused_before_anything_is_sampled(name, capsys):
    write("trl.py", COUNTER)
    write("rows.jsonl", '{"answer": "five"}\n' * 4)
    words = [f"env=trl.py:{name}", "env.workers=0", "env.timeout_s=null", "data=rows.jsonl", "data.eval_fraction=0.5"]
    for command in (["check", "config"], ["train"]):
        assert run([*command, *SMALL["grpo"], *words, "reward=none", "out=run"]) == 2
        assert "error: reward: the environment gives no reward and none is chosen; define get_reward" in capsys.readouterr().err
    assert run(["check", "config", *SMALL["grpo"], *words, "reward=trl.py:plain"]) == 0


def test_functions_of_environments_need_objects(capsys):
    write("trl.py", COUNTER)
    assert train(*SMALL["grpo"], "reward=[number,trl.py:reward_func]", "out=run") == 2
    assert "reward.parts.reward_func: a function of environments cannot be one of several rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("opened", "text", "seen"),
    [("<think>\n", "a</think>5", "5"), ("<think>\n", "5", ""), ("", "<think>a</think>5", "5"), ("", "5", "5")],
)
def test_answer_only_knows_the_reasoning_that_the_prompt_has_opened(opened, text, seen):
    write("seen.py", "def reward(environments, completions):\n    environments[0].append(completions[0])\n    return [1.0]\n")
    reward = Python("seen.py:reward", answer_only=True, workers=0, timeout_s=None)
    with contextlib.closing(RewardRunner(reward)) as runner:
        grader = runner.grader()
    assert grader is not None
    messages = [{"role": "prompt", "content": "2+3"}, {"role": "assistant", "content": text}]
    ended = {"text": text, "trajectory": messages, "row": {}, "step": 0, "opened": [opened]}
    texts: list[str] = []
    grade = construct_target(json.loads(grader), "reward")
    assert grade(texts, ended, Awaiter()) == (1.0, {})
    assert texts == [seen]


def test_an_episode_tells_the_grader_which_reasoning_its_prompts_have_opened():
    write("trl.py", COUNTER)
    config = PythonEnvironment(target="trl.py:Counter", workers=0, timeout_s=None)
    with contextlib.closing(EnvironmentRunner(config)) as runner:
        runner.grader = "{}"
        episode, pending = runner.begin(Row("rows:1", {"answer": "5"}))
        pending.result()
        sent: list[object] = []
        runner._pending = lambda one, method, arguments, read: sent.append(arguments)  # type: ignore[method-assign]
        sample = Sample([5], [-1.0], "stop", 0)
        episode.conversations[False] = SimpleNamespace(
            branches=[(Segment("prompt", [1], "2+3"), Segment.sampled(sample, "a</think>5", "<think>\n"))]
        )
        runner.reward(episode)
    assert sent[0][0]["opened"] == ["<think>\n"]
