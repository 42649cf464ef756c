"""The printed result of a run: judges, numbers of rows, ties, the cost of evaluation and the time left."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runtools import SMALL, inside, rows, train, write

from cookbook import terminal
from cookbook.cli.app import run
from cookbook.losses.dpo import DPO
from cookbook.losses.orpo import ORPO
from cookbook.run import report
from cookbook.run.report import RunSummary
from cookbook.run.run import Run
from cookbook.sampling.evaluation import EvalConfig, Evaluator
from cookbook.terminal import Console, TimeLeft, duration
from cookbook.types import Datum, ModelInput
from cookbook.utils.words import counted

BY_NUMBER = {"reward._target_": "cookbook.sampling.rewards.Number", "reward.column": "answer"}
BY_TOKENS = {"reward": None, "env": None}


# Ties


def pairs(references: list[np.ndarray]) -> list[Datum]:
    inputs = [{"target_tokens": np.zeros(len(row), dtype=np.int64), "reference_logprobs": row} for row in references]
    return [Datum(ModelInput.from_ints([0] * len(row)), one) for row, one in zip(references, inputs, strict=True)]


def test_rounding_noise_of_the_first_step_is_a_tie():
    """In float64 the policy differs from its own reference, which is stored in float32, by rounding of either sign."""
    draw = np.random.default_rng(0)
    exact = [-draw.exponential(2.0, size=50 + index) for index in range(40)]
    data, policy = pairs([row.astype(np.float32) for row in exact]), [torch.tensor(row) for row in exact]
    for variant in ("sigmoid", "ipo"):
        metrics = DPO(variant=variant)(data, policy)[1]
        assert metrics["rewards/margin"] != 0 and metrics["rewards/accuracy"] == 0.5
    # The smallest differences that training makes are not ties: 0.0005 nats per token.
    moved = [row + (0.0005 if index % 2 == 0 else 0) for index, row in enumerate(policy)]
    assert DPO()(data, moved)[1]["rewards/accuracy"] == 1.0


@pytest.mark.parametrize("loss", [ORPO(), ORPO(odds_weight=0.0), DPO(variant="simpo")])
def test_equal_answers_are_ties_without_a_reference_too(loss):
    same, better = torch.full((5,), -1.0), torch.full((4,), -0.5)
    data = pairs([np.zeros(len(row), dtype=np.float32) for row in (same, same, better, same)])
    assert loss(data, [same, same, better, same])[1]["rewards/accuracy"] == 0.75


# The lines of a result


def test_a_result_names_its_judge_and_the_number_of_rows():
    after = {"eval/accuracy": 0.95, "eval/reward": 0.975, "eval/pass@2": 1.0, "eval/answers": 200.0}
    found = [{"step": 0, "eval/accuracy": 0.175, "eval/reward": 0.2, "eval/pass@2": 0.5}, {"step": 50, **after}]
    assert list(report.headlines(found, "reward=number")) == [
        "accuracy on 200 held-out prompts, by reward=number: 17.5% after 0 steps -> 95.0% after 50 (standard error 2.7 points)",
        "reward on 200 held-out prompts, by reward=number: 0.200 after 0 steps -> 0.975 after 50",
        "pass@2 on 200 held-out prompts, by reward=number: 50.0% after 0 steps -> 100.0% after 50",
    ]
    preferences = {"eval/rewards/accuracy": 0.6, "eval/rewards/margin": 0.1, "eval/loss": 0.65, "eval/rows": 20.0}
    found = [{"step": 0, "eval/rewards/accuracy": 0.5, "eval/rewards/margin": 0.0, "eval/loss": 0.6931}]
    assert list(report.headlines([*found, {"step": 5, **preferences}], report.TOKEN_EQUALITY)) == [
        "preference accuracy on 20 held-out pairs: 50.0% after 0 steps -> 60.0% after 5 (standard error 11 points)",
        "margin on 20 held-out pairs: 0.000 after 0 steps -> 0.100 after 5",
        "loss on 20 held-out pairs: 0.6931 after 0 steps -> 0.6500 after 5",
    ]
    # KTO's rows are single answers.
    answers = [{"step": 0, "eval/rewards/margin": 0.0}, {"step": 5, "eval/rewards/margin": 0.1, "eval/rows": 20.0}]
    assert list(report.headlines(answers, "")) == ["margin on 20 held-out rows: 0.000 after 0 steps -> 0.100 after 5"]
    (line,) = report.headlines([{"step": 1, "eval/accuracy": 0.0}, {"step": 2, "eval/accuracy": 1.0}], "token equality")
    assert line == "accuracy on held-out prompts, by token equality: 0.0% after 1 step -> 100.0% after 2"


def test_the_standard_error_is_that_of_a_proportion():
    draws = np.random.default_rng(0).binomial(200, 0.3, size=20_000) / 200
    assert report.standard_error(0.3, 200) == pytest.approx(draws.std(), rel=0.02)
    for share in (0.0, 1.0):
        assert 0.02 < report.standard_error(share, 20) < 0.05
    assert report.error_of("eval/accuracy", {"eval/accuracy": 0.5, "eval/answers": 1000.0}) == ""
    assert report.error_of("eval/accuracy", {"eval/accuracy": 0.5, "eval/answers": 100.0}) == "(standard error 5.0 points)"
    assert report.error_of("eval/reward", {"eval/reward": 0.5, "eval/answers": 100.0}) == ""


@pytest.mark.parametrize(
    ("config", "judge"),
    [
        (BY_TOKENS, "token equality"),
        (BY_NUMBER, "reward=number"),
        ({"reward._target_": "cookbook.sampling.rewards.math_verify.MathVerify"}, "reward=math_verify"),
        ({"reward._target_": "cookbook.sampling.rewards.ifeval.IFEval"}, "reward=ifeval"),
        ({"reward._target_": "cookbook.sampling.rewards.Python", "reward.target": "mine.py:grade"}, "reward=mine.py:grade"),
        ({"env._target_": "cookbook.sampling.environments.Arithmetic", **BY_NUMBER}, "env=arithmetic"),
    ],
)
def test_the_judge_is_named_as_in_the_command(config, judge):
    assert report.judge(config) == judge


def summary(name: str, config: dict, *found: dict) -> RunSummary:
    return RunSummary(name, config, "finished", [{"step": step, **row} for step, row in enumerate(found)], [])


def test_results_of_two_judges_are_on_two_lines():
    supervised = summary("sft", BY_TOKENS, {"eval/accuracy": 0.0, "loss": 2.0}, {"eval/accuracy": 0.165, "loss": 1.5})
    rewarded = {"eval/accuracy": 0.35, "eval/answers": 200.0, "rollout/tokens": 9.0}
    learned = summary("grpo", BY_NUMBER, {**rewarded, "loss": 0.1}, {**rewarded, "loss": 0.3})
    assert report.outcomes([supervised, learned])[2:] == [
        ("judged completions", ["-", "200"]),
        ("eval/accuracy by token equality", ["16.5%", "-"]),
        ("  at best", ["16.5% (step 1)", "-"]),
        ("eval/accuracy by reward=number", ["-", "35.0%"]),
        ("  at best", ["-", "35.0% (step 0)"]),
        ("loss", ["1.5", "0.3"]),
        # The lowest loss of reinforcement learning is not its best.
        ("  at best", ["1.5 (step 1)", "-"]),
    ]
    assert report.outcomes([learned, learned])[-1] == ("loss", ["0.3", "0.3"])
    other = summary("other", {**BY_NUMBER, "reward.column": "gold", "reward.workers": 2}, rewarded)
    labels = [label for label, _ in report.outcomes([learned, other])]
    assert "eval/accuracy by reward=number reward.column=answer" in labels
    assert "eval/accuracy by reward=number reward.column=gold" in labels


def test_losses_of_two_kinds_are_on_two_lines():
    supervised = summary(
        "sft", {**BY_TOKENS, "loss._target_": "cookbook.losses.cross_entropy.CrossEntropy"}, {"eval/loss": 1.2}
    )
    preferring = {**BY_TOKENS, "loss._target_": "cookbook.losses.dpo.DPO", "loss.variant": "sigmoid"}
    other = summary("dpo", preferring, {"eval/loss": 0.7})
    assert report.outcomes([supervised, other])[2:] == [
        ("eval/loss by CrossEntropy", ["1.2", "-"]),
        ("  at best", ["1.2 (step 0)", "-"]),
        ("eval/loss by DPO sigmoid", ["-", "0.7"]),
        ("  at best", ["-", "0.7 (step 0)"]),
    ]


# Long answers


def test_long_answers_are_not_compared_unless_asked():
    short, long = [3, 4, 500], [3, 33, 500]
    assert EvalConfig().answers == "auto" and EvalConfig().compares(short) and not EvalConfig().compares(long)
    assert not EvalConfig().compares([])
    assert EvalConfig(answers=True).compares(long) and not EvalConfig(answers=False).compares(short)


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[list[str]]:
    """The words of a small run on conversations whose answers have 41 tokens."""
    lines = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "12" * 20}]} for n in range(12)
    ]
    with inside(tmp_path):
        write("chats.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        data = ["data=jsonl", "data.path=chats.jsonl", "data.eval_fraction=0.3", "eval.max_tokens=64"]
        yield [*SMALL["sft"], *data, "model=tiny", "recipe.steps=1", "out=run"]


def test_a_run_on_long_answers_reports_its_loss(chats, capsys):
    assert train(*chats) == 0
    out = capsys.readouterr().out
    before, after = rows("run")
    assert "eval/accuracy" not in after and after["eval/rows"] == 4 and after["time/eval_s"] > 0
    assert (
        "evaluation: samples no answers; those of the data have 41 tokens (median), too many to compare token by token "
        "(eval.answers=true does; reward=... chooses another judge)\n"
    ) in out
    lines = out.splitlines()
    change = f"{before['eval/loss']:.4f} after 0 steps -> {after['eval/loss']:.4f} after 1"
    assert lines[lines.index("") + 1] == f"loss on 4 held-out rows: {change}"
    assert run(["eval", "run"]) == 0
    shown = capsys.readouterr().out
    assert "judged by the loss only\n" in shown and "eval/accuracy" not in shown
    assert re.search(rf"^eval/loss +{after['eval/loss']:.4g}$", shown, re.MULTILINE)
    assert run(["eval", "run", "eval.answers=true"]) == 0
    assert "eval/accuracy " in capsys.readouterr().out


def test_a_comparison_ends_soon_after_the_answer(chats, monkeypatch):
    """A completion that is longer than its answer is wrong, so the rest of it is not sampled."""
    real, limits = Evaluator._draw, []

    def recording(self, *arguments):
        draw = real(self, *arguments)
        limits.append(draw.params.max_tokens)
        return draw

    monkeypatch.setattr(Evaluator, "_draw", recording)
    assert train(*chats, "eval.answers=true", "eval.max_tokens=512") == 0
    assert set(limits) == {41 + 16} and "eval/accuracy" in rows("run")[-1]


# The cost of an evaluation


def test_evaluation_longer_than_training_is_reported(caplog):
    slow = [{"step": 0, "time/eval_s": 50.0}, {"step": 1, "time/step_s": 9.0, "time/eval_s": 50.0}]
    line = "time: 2 evaluations took 100 s, and the training 9 s; to evaluate less, raise eval.every, lower eval.limit or "
    assert report.slow_evaluation(slow).startswith(line)
    assert report.slow_evaluation([{"step": 0, "time/eval_s": 9.0}]) is None
    assert report.slow_evaluation([*slow, {"step": 2, "time/step_s": 95.0}]) is None


def test_a_run_warns_of_slow_evaluation_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)
    fake = SimpleNamespace(eval=EvalConfig(every=20), _train_s=9.0, _evaluated_step=0, _has_warned=False)
    for seconds in (8.0, 50.0, 60.0):
        Run._warn_of_slow_evaluation(fake, 20, seconds)
    assert [record.getMessage() for record in caplog.records] == [
        "eval.every=20: the evaluation after step 20 took 50 s, and the 20 steps of training before it took 9 s; raise "
        "eval.every, or lower eval.limit or eval.max_tokens"
    ]


# The time left


def test_the_first_step_and_evaluations_do_not_spoil_the_estimate():
    """30 steps of 10 s; the first takes 60 s. Evaluations of 20 s before, every 10 steps and at the end."""
    left = TimeLeft(30, eval_every=10)
    left.observe(0, 25.0, 20.0)
    for step, seconds in ((1, 60.0), (2, 10.0)):
        left.observe(step, seconds, None)
        assert left.after(step) is None
    left.observe(3, 10.0, None)
    assert left.after(3) == 27 * 10 + 3 * 20
    for step in range(4, 10):
        left.observe(step, 10.0, None)
    left.observe(10, 10.0 + 20.0, 20.0)
    assert left.after(10) == 20 * 10 + 2 * 20
    assert left.after(29) == 10 + 20 and left.after(30) is None


@pytest.mark.parametrize(("every", "evaluations"), [(None, 1), (7, 4), (5, 5), (100, 1)])
def test_evaluations_to_come_are_counted(every, evaluations):
    left = TimeLeft(25, every)
    left.observe(0, 3.0, 3.0)
    for step in (1, 2, 3):
        left.observe(step, 0.0, None)
    assert left.after(3) == 3.0 * evaluations


def test_the_estimate_is_printed_from_the_third_step_on(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    console = Console(20, 0, 10)
    for step, seconds, metrics in (
        (0, 200.0, {"eval/loss": 2.0, "time/eval_s": 190.0}),
        (1, 95.0, {"loss": 2.0}),
        (2, 15.0, {"loss": 2.0}),
        (3, 17.0, {"loss": 2.0}),
    ):
        now[0] += seconds
        console.update(step, metrics)
    assert capsys.readouterr().out.splitlines() == [
        "step 0/20  eval loss 2.0000",
        "step 1/20  loss 2.0000",
        "step 2/20  loss 2.0000",
        # 17 steps of 16 s and 2 evaluations of 190 s.
        "step 3/20  loss 2.0000  10:52 left",
    ]


def test_durations_and_numbers_are_readable():
    assert [duration(seconds) for seconds in (0, 65, 3599, 3665)] == ["0:00", "1:05", "59:59", "1:01:05"]
    assert [counted(number, "row") for number in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
