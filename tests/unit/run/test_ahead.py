"""Sampling ahead has the bits of sampling in turn with older weights, overlaps with training, and resumes exactly."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from marks import rotating
from runtools import SMALL, TWO_TURNS, bits, checkpoint, here, rows, stop_at, timeless, train, write  # noqa: F401 - a fixture

from cookbook.backends.local import LocalTrainer
from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Row
from cookbook.data.formats import Chat
from cookbook.futures import Future
from cookbook.run import ahead
from cookbook.sampling.credit import returns
from cookbook.sampling.episodes import FailedRequests
from cookbook.sampling.prompt_queue import PromptQueue
from cookbook.sampling.rollouts import RolloutGroup, StepRollouts, advantages
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Sample

pytestmark = pytest.mark.usefixtures("here")

DICE = "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n"
IN_PROCESS = ["reward=python", "reward.target=dice.py:odd", "reward.workers=0", "reward.timeout_s=null"]
GRPO = [*SMALL["grpo"], "recipe.steps=5", "recipe.prompts_per_step=4", "optim.lr=1e-3", "rollout.max_tokens=4"]
DICED = [*GRPO, *IN_PROCESS]
QUEUE = ["rollout.refill=2", "data.curriculum={}", "recipe.group_size=2"]
TURNS = ["env=two.py:Two", "env.max_turns=2", "env.workers=0", "env.timeout_s=null"]

# The lines of the recipe that sample, as one would write them for a sampler that lags behind: the batch of a later step is
# sampled first, from a copy of the weights.
SAMPLES = """            sampler = run.sync(step.index)
            groups = run.sample_groups(sampler, batches[step.index // cfg.updates], cfg.group_size, step)
"""
BY_HAND = """            sampler = run.trainer.lagging_sampler(step.index).result()
            for index in range(step.index and step.index + LAG, min(step.index + LAG + 1, step.total)):
                sampled[index] = run._sampling.groups(sampler, batches[index], cfg.group_size, index)
            groups = sampled.pop(step.index).groups
            step.log(rollouts.metrics(groups))
"""


# Copies the run folder while the next batch is being sampled: what a kill leaves.
COPYING = """
import shutil
from cookbook import Hook


class Copy(Hook):
    def on_step(self, run, step, metrics):
        if step in (1, 3, 4):
            shutil.copytree(run.out, f"killed-{step}", ignore=shutil.ignore_patterns(".*"))
"""
WAITING = """
import builtins


class Waits:
    episodes = 0

    def reset(self):
        Waits.episodes += 1
        # Of an evaluation, and of two groups of two answers in batch 0.
        self.waits = Waits.episodes > 5
        return "1+1="

    def step(self, text):
        if self.waits and not builtins.trained_event.wait(60):
            raise RuntimeError("step 0 has not been trained")
        return None, len(text) % 2
"""


class InTurn:
    """Samples each batch immediately, in place of the thread."""

    def submit(self, call):
        future = Future()
        future.set_result(call())
        return future

    def close(self):
        pass


def prepare() -> None:
    write("dice.py", DICE)
    write("two.py", TWO_TURNS)


def same(one: str, other: str) -> None:
    assert timeless(one) == timeless(other)
    assert bits(checkpoint(one)) == bits(checkpoint(other))
    assert Path(one, "samples.jsonl").read_bytes() == Path(other, "samples.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_equals_one_whose_sampler_lags_behind(lag):
    prepare()
    assert train(*DICED, f"rollout.ahead={lag}", "out=thread") == 0
    assert run(["fork", "grpo", "by_hand"]) == 0
    recipe = Path("recipes/by_hand.py")
    assert SAMPLES in recipe.read_text()
    code = recipe.read_text().replace(SAMPLES, BY_HAND.replace("LAG", str(lag)))
    recipe.write_text(code.replace("    held_out = ", "    sampled = {}\n    held_out = "))
    assert train("recipe=by_hand", *DICED[1:], "out=by-hand") == 0
    for metric in ("reward/mean", "rollout/tokens", "loss", "loss/ratio_mean"):
        one, other = ([row.get(metric) for row in rows(out)] for out in ("thread", "by-hand"))
        assert one == other
    assert bits(checkpoint("thread")) == bits(checkpoint("by-hand"))
    assert [row["sync/version"] for row in rows("thread")[1:]] == [max(0, step - lag) for step in range(5)]


CASES = {
    "turns": [*GRPO, *TURNS, "rollout.ahead=1"],
    "credit": [*GRPO, *TURNS, "env.gamma=0.5", "rollout.ahead=1"],
    "queue": [*DICED, *QUEUE, "rollout.ahead=1"],
    "queue-2": [*DICED, *QUEUE, "rollout.ahead=2", "weight_sync.every=2"],
}


@pytest.mark.parametrize("case", rotating(CASES, 1))
def test_the_thread_changes_no_bit_and_a_kill_neither(case, monkeypatch):
    prepare()
    words = [*CASES[case], "checkpoint.every=2", "checkpoint.keep=2"]
    assert train(*words, "out=thread") == 0
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "Thread", InTurn)
        assert train(*words, "out=turn") == 0
    same("thread", "turn")

    write("copying.py", COPYING)
    assert train(*words, "+hook.copy._target_=copying.Copy", "out=copied") == 0
    for step in (1, 3, 4):
        assert train(*words, f"out=killed-{step}") == 0
        same(f"killed-{step}", "thread")


@pytest.mark.slow
def test_the_queue_sees_the_results_of_the_batch_before_last(monkeypatch):
    """Batch b chooses its prompts by the results up to batch b - N, and not by later ones that are known already."""
    seen = []
    prepare()
    observe, choose = PromptQueue.observe, PromptQueue.__getitem__

    def observed(self, groups, numbers=None):
        seen.append("results")
        observe(self, groups, numbers)

    def chosen(self, index):
        seen.append(index)
        return choose(self, index)

    monkeypatch.setattr(PromptQueue, "observe", observed)
    monkeypatch.setattr(PromptQueue, "__getitem__", chosen)
    assert train(*DICED, "data.curriculum={}", "rollout.ahead=2", "eval.every=null", "checkpoint.final=false") == 0
    assert seen == [0, 1, "results", 2, "results", 3, "results", 4]


def test_an_environment_plays_the_next_batch_while_the_trainer_trains(monkeypatch):
    """The episodes of batch 1 end only after step 0 has been trained: in turn, neither would end."""
    trained = threading.Event()
    step = LocalTrainer.optim_step

    def optim_step(self, *arguments):
        update = step(self, *arguments)
        update.add_done_callback(lambda _: trained.set())
        return update

    write("wait.py", WAITING)
    monkeypatch.setattr(LocalTrainer, "optim_step", optim_step)
    monkeypatch.setattr("builtins.trained_event", trained, raising=False)
    words = ["env=wait.py:Waits", *TURNS[1:], "recipe.prompts_per_step=2", "recipe.group_size=2", "recipe.steps=2"]
    little = ["eval.every=null", "eval.limit=1", "checkpoint.final=false", "rollout.max_tokens=2", "data.limit=4"]
    assert train("recipe=grpo", *words, *little, "rollout.ahead=1", "out=run") == 0
    assert trained.is_set()


@pytest.mark.slow
def test_stored_batches_are_those_that_a_checkpoint_needs():
    prepare()
    assert train(*DICED, "rollout.ahead=1", "checkpoint.every=2", "eval.every=null", "out=run", *stop_at(3)) == 130
    # The hook has stopped the run after step 3: batch 3 was sampled during step 2, and batch 2 belongs to checkpoint 2.
    found = [path.name for _, path in ahead.stored(Path("run/ahead"))]
    assert [path.name for path in sorted(Path("run/checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert found == ["batch-000002.json", "batch-000003.json"]
    stored = json.loads(Path("run/ahead/batch-000003.json").read_text())
    assert (stored["version"], len(stored["groups"])) == (2, 4)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipe=grpo", "rollout.ahead=1", "backend.ranks=2"], "rollout.ahead: several ranks compute one call at a time"),
        (["recipe=sft", "rollout.ahead=1"], "rollout.ahead: the recipe trains on conversations"),
        (["recipe=grpo", "rollout.ahead=-1"], "rollout.ahead must be at least 0, got -1"),
        (
            ["recipe=grpo", "rollout.ahead=1", "loss=cross_entropy"],
            "rollout.ahead: CrossEntropy does not read sampling_logprobs",
        ),
        (
            ["recipe=grpo", "rollout.ahead=2", "deployment=vllm"],
            "rollout.ahead: servers hold one version of the weights, got 2",
        ),
        (
            ["recipe=grpo", "rollout.ahead=1", "data=jsonl", "data.path=x", "data.streaming=true"],
            "rollout.ahead: sampled batches",
        ),
    ],
)
def test_what_cannot_sample_ahead_is_refused_in_one_line(words, line, capsys):
    assert run(["check", "config", *words]) == 2
    assert line in capsys.readouterr().err


def test_a_loss_without_a_correction_is_allowed_on_demand(capsys):
    assert (
        run(["check", "config", "recipe=grpo", "rollout.ahead=1", "loss=cross_entropy", "rollout.ahead_uncorrected=true"]) == 0
    )


def test_a_recipe_that_samples_other_prompts_is_refused(capsys):
    assert run(["fork", "grpo", "mine"]) == 0
    recipe = Path("recipes/mine.py")
    code = recipe.read_text()
    words = [
        "recipe=mine",
        *SMALL["grpo"][1:],
        "recipe.steps=1",
        "eval.every=null",
        "checkpoint.final=false",
        "rollout.ahead=1",
    ]
    recipe.write_text(code.replace("batches[step.index // cfg.updates], cfg", "list(batches[step.index])[:1], cfg"))
    assert train(*words, "out=one") == 2
    assert "rollout.ahead: a recipe that samples ahead calls run.sample_groups once per step" in capsys.readouterr().err
    recipe.write_text(code.replace("run.prompt_batches(", "run.batches("))
    assert train(*words, "out=two") == 2
    assert "rollout.ahead: the recipe mine has no queue of prompts; call run.prompt_batches" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_counts_the_copies_of_the_weights(capsys):
    words = ["plan", *SMALL["grpo"], "rollout.ahead=1"]
    assert run(words) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    weights, copies = (float(lines[name].split()[1]) for name in ("weights", "copies"))
    assert copies == pytest.approx(2 * weights, rel=0.02)


def test_a_stored_batch_keeps_the_credit_of_turns_and_tokens():
    prompt = RenderedPrompt([65], Row("here:0", {}), "A", "", Chat("here:0", ()))
    attempts = [Trajectory.single([65], "A", Sample([66, 67], [-0.5, -0.25], "stop"), text) for text in ("BC", "BB")]
    credit = [returns([[1.0, 0.1]]), returns([[0.0, 0.3]])]
    group = RolloutGroup(prompt, attempts, [1.1, 0.3], parts=[{}, {}], returns=credit)
    step = StepRollouts([group], FailedRequests({}, 0), sampling_s=1.0, reward_s=0.0, has_turns=False)
    [stored] = json.loads(json.dumps(ahead._as_json(ahead.SampledBatch(0, 0, [prompt], step))))["groups"]
    restored = ahead._group([prompt], stored)
    assert [one.branches for one in restored.trajectories] == [one.branches for one in attempts]
    np.testing.assert_array_equal(restored.returns, credit)
    np.testing.assert_array_equal(advantages([restored], "zscore", 2), advantages([group], "zscore", 2))
