"""Steps without a gradient: one warning per run, and a run that has only such steps does not end as finished."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from runtools import SMALL, here, rows, stop_at, train, write  # noqa: F401 - here is a fixture

from cookbook.errors import NoGradientError
from cookbook.run.diagnostics import Health
from cookbook.terminal import warnings_shown

pytestmark = pytest.mark.usefixtures("here")

LEARNS = {"optim/grad_norm": 0.5, "reward/mean": 0.5, "reward/std": 0.5, "reward/frac_groups_without_spread": 0.5}
TIES = {"optim/grad_norm": 0.0, "reward/mean": 0.5, "reward/std": 0.5, "reward/frac_groups_without_spread": 1.0}
ZERO = {**TIES, "reward/mean": 0.0, "reward/std": 0.0}
ONE = {**ZERO, "reward/mean": 1.0}
CUT = {**LEARNS, "rollout/truncated_frac": 0.75}
FAILS = {**ZERO, "env/errors": 8.0}
FLAT = {"optim/grad_norm": 0.0, "loss": 0.7}


def said(caplog, *steps) -> list[str]:
    caplog.clear()
    health = Health(max_tokens=16)
    with caplog.at_level(logging.WARNING, "cookbook"):
        for number, metrics in enumerate(steps, start=1):
            health.observe(number, metrics)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (TIES, "step 3: in the last 3 steps all groups tied, each prompt's completions having equal rewards, so"),
        (ZERO, "step 3: in the last 3 steps every reward was 0, and no reward of this run was above 0, so these steps taught"),
        (ONE, "step 3: in the last 3 steps every reward was 1, so these steps taught nothing; read the completions"),
        (CUT, "step 3: more than half of the completions of the last 3 steps were cut off (75% in this one)"),
        (FLAT, "step 3: the gradient of the last 3 steps was zero, so they changed nothing; check the options of the loss"),
    ],
)
def test_a_problem_of_three_steps_in_a_row_is_said_once(metrics, message, caplog):
    (line,) = said(caplog, *[metrics] * 9)
    assert line.startswith(message)
    assert not said(caplog, metrics, metrics, LEARNS, metrics, metrics, LEARNS)


def test_clipped_ratios_of_an_on_policy_step_are_said_once_in_its_step(caplog):
    clips = {**LEARNS, "sync/version_lag": 0.0, "loss/clip_frac": 0.05, "kl/sampler_trainer_k3": 0.0151}
    (line,) = said(caplog, LEARNS, clips, clips)
    assert line == (
        "step 2: 5.0% of the ratios of an on-policy update were clipped (kl/sampler_trainer_k3 is 0.015), so sampler and "
        "trainer compute different log-probabilities; give both the same weights, precision and temperature, or set "
        "loss.anchor=trainer"
    )
    assert not said(caplog, {**clips, "loss/clip_frac": 0.019}, {**clips, "sync/version_lag": 1.0})
    # A step that samples nothing updates with completions of an earlier one.
    assert not said(caplog, {key: value for key, value in clips.items() if key != "sync/version_lag"})


def test_each_problem_names_its_own_remedy(caplog):
    assert "raise rollout.max_tokens, now 16" in said(caplog, CUT, CUT, CUT)[0]
    assert "raise recipe.group_size or rollout.temperature" in said(caplog, TIES, TIES, TIES)[0]
    assert "check the reward function and how it parses" in said(caplog, ZERO, ZERO, ZERO)[0]
    (failing,) = said(caplog, FAILS, FAILS, FAILS)
    assert "every reward was 0" in failing and failing.endswith("(env/errors), and log.txt has the reasons")
    both = said(caplog, *[{**ZERO, "rollout/truncated_frac": 1.0}] * 3)
    assert ["every reward" in both[0], "cut off" in both[1], len(both)] == [True, True, 2]


def test_equal_rewards_of_other_value_each_step_are_ties(caplog):
    (line,) = said(caplog, ZERO, ONE, ZERO, ONE)
    assert "all groups tied" in line


def test_updates_without_sampling_have_the_problems_of_their_rollouts(caplog):
    """``recipe.updates=2``: every second step trains rollouts of the step before it."""
    later = {"optim/grad_norm": 0.0, "loss": 0.0}
    (line,) = said(caplog, *[TIES, later] * 3)
    # The steps of one batch are one case.
    assert line.startswith("step 5: in the last 3 batches all groups tied")
    assert not said(caplog, TIES, later, later, later)
    (line,) = said(caplog, *[CUT, {"optim/grad_norm": 0.5}] * 3)
    assert line.startswith("step 5: more than half of the completions of the last 3 batches were cut off (75% in this one)")
    health = Health()
    for number, metrics in enumerate([TIES, later, {**TIES, "reward/mean": 0.25}, later], start=1):
        health = Health.restored(json.loads(json.dumps(health.state())), 16)
        health.observe(number, metrics)
    with pytest.raises(NoGradientError, match=r"all 4 steps \(all groups tied.*raise recipe.group_size or rollout.temp"):
        health.check()
    # A step with rows of the data has no rollouts.
    assert not said(caplog, *[TIES, {"optim/grad_norm": 0.5, "data/rows_crc32": 7}] * 3)


def test_a_server_without_a_gradient_norm_is_judged_by_the_tokens_it_trained():
    health = Health()
    health.observe(1, {"loss": 0.0, "tokens/trained": 0.0})
    with pytest.raises(NoGradientError, match="zero in its only step"):
        health.check()
    health.observe(2, {"loss": 0.0, "tokens/trained": 5.0})
    health.check()
    unknown = Health()
    unknown.observe(1, {})
    unknown.check()


def test_counts_survive_a_checkpoint_as_they_were_when_it_was_saved():
    health = Health(max_tokens=16)
    health.observe(1, LEARNS)
    state = health.state()
    health.observe(2, TIES)
    assert state["streaks"]["tied"] == 0  # a copy: a checkpoint is written while training continues
    again = Health.restored(json.loads(json.dumps(state)), 16)
    again.observe(2, TIES)
    assert again == health
    Health.restored(None, 16).check()  # of the Python API, which does not count


def test_a_warning_goes_to_the_stream_that_is_standard_error_at_that_moment(monkeypatch):
    """The live display replaces the stream, to print above itself."""
    with warnings_shown():
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        logging.getLogger("cookbook").warning("in between")
    assert sys.stderr.getvalue() == "WARNING: in between\n"


# Whole runs


def same(value: float) -> list[str]:
    write("same.py", f"def same(completion, row):\n    return {value}\n")
    return [*SMALL["grpo"], "reward=python", "reward.target=same.py:same"]


class Ends:
    """A tracker that writes down how the run ended."""

    def start(self, config, out, name, step):
        self.out = out

    def log(self, step, metrics): ...

    def end(self, state):
        Path(self.out, "ended.txt").write_text(state)


@pytest.mark.slow
def test_a_run_that_never_had_a_gradient_fails_with_its_weights_saved(capsys):
    ends = f"+tracker.mine={{_target_: {__name__}.Ends}}"
    assert train(*same(0.0), "recipe.steps=4", ends, "out=run") == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["WARNING", "error"]
    assert lines[0].startswith("WARNING: step 3: in the last 3 steps every reward was 0, and no reward of this run was above 0")
    expected = "error: training: the gradient was zero in all 4 steps (every reward was 0, and no reward of this run"
    assert lines[1].startswith(expected)
    log = Path("run/log.txt").read_text()
    assert log.count("WARNING step 3: in the last 3 steps every reward was 0") == 1 and "NoGradientError" in log
    status = json.loads(Path("run/status.json").read_text())
    assert (status["state"], status["step"], status["saved_step"]) == ("failed", 4, 4)
    assert f"error: {status['error']}" == lines[1]
    assert Path("run/ended.txt").read_text() == "failed"
    assert "next:" not in out and Path("run/curves.svg").is_file() and Path("run/checkpoints/step-000004").is_dir()
    # The same command again has nothing left to do, and says the same.
    assert train("--config", "run/config.yaml", "out=run") == 2
    assert capsys.readouterr().err.endswith(lines[1] + "\n")


@pytest.mark.slow
def test_a_gradient_before_a_resume_counts(capsys):
    write(
        "once.py",
        "import os\n\ndef odd(completion, row):\n    return sum(map(ord, completion)) % 2 if os.path.exists('odd') else 1\n",
    )
    Path("odd").touch()
    words = [*SMALL["grpo"], "reward=python", "reward.target=once.py:odd", "recipe.steps=4", "checkpoint.every=1"]
    words += ["eval.every=null", "out=run"]
    assert train(*words, *stop_at(2)) == 130
    Path("odd").unlink()
    assert train(*words) == 0
    assert [row["optim/grad_norm"] > 0 for row in rows("run")[1:]] == [True, True, False, False]
    # A branch is a run of its own, and its own steps had none.
    capsys.readouterr()
    assert train(*words[:-1], "resume=run/checkpoints/step-000002", "out=branch") == 2
    assert "zero in all 2 steps (every reward was 1), so the run learned nothing; " in capsys.readouterr().err
