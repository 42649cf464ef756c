"""``checkpoint.best`` and ``eval.patience``: the best checkpoint is kept, and a run that no longer improves stops."""

import math
from pathlib import Path

import pytest
from runtools import SMALL, here, rows, train  # noqa: F401

from cookbook.backends.model_source import sampling_target
from cookbook.cli.app import run
from cookbook.errors import CheckpointError, ConfigError
from cookbook.run.best_step import BestStep


def test_the_best_value_is_the_lowest_loss_or_the_highest_accuracy():
    loss, accuracy = BestStep("eval/loss", patience=2), BestStep("eval/accuracy")
    values = [0.1, math.nan, 3.0, 2.0, 2.0, math.nan]
    better = [
        (loss.observe(step, {"eval/loss": value}), accuracy.observe(step, {"eval/accuracy": value}))
        for step, value in enumerate(values)
    ]
    # The weights before the first step have no checkpoint.
    assert better == [(False, False), (False, False), (True, True), (True, False), (False, False), (False, False)]
    assert (loss.step, loss.value, loss.stale, loss.is_exhausted) == (3, 2.0, 2, True)
    assert (accuracy.step, accuracy.value, accuracy.is_exhausted) == (2, 3.0, False)
    assert BestStep.restored("eval/loss", 3, loss.state()) == BestStep("eval/loss", 3, 3, 2.0, 2)
    assert BestStep.restored("eval/accuracy", 3, loss.state()) == BestStep("eval/accuracy", 3)
    assert not BestStep(None).observe(1, {})


def test_an_early_stop_without_a_number_names_no_best_step():
    best = BestStep("eval/loss", patience=2)
    for step in range(3):
        best.observe(step, {"eval/loss": math.nan})
    early = "no better value in 2 evaluations up to step 2 (eval.patience=2); "
    assert best.is_exhausted and best.early_stop(2) == f"{early}eval/loss was NaN in each of them"
    best.observe(3, {"eval/loss": 2.0})
    assert best.early_stop(3).endswith("the best is eval/loss 2 after step 3")


def test_a_metric_that_is_not_measured_or_has_no_better_direction_is_refused():
    with pytest.raises(ConfigError, match=r"has no eval/los; choose one of these: eval/loss$"):
        BestStep("eval/los").observe(0, {"eval/loss": 1.0, "eval/rows": 3.0})
    with pytest.raises(ConfigError, match=r"set data\.eval_path or data\.eval_fraction"):
        BestStep("eval/loss").observe(0, {})
    with pytest.raises(ConfigError, match="no value of eval/rows is known to be better"):
        BestStep("eval/rows").observe(0, {"eval/rows": 3.0})


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_that_no_longer_improves_stops_and_keeps_its_best_checkpoint(capsys):
    # Without a learning rate no evaluation is better than the first.
    words = [*SMALL["sft"], "recipe.steps=9", "eval.every=1", "optim.lr=1e-30", "checkpoint.best=eval/loss"]
    words += ["eval.patience=2", "checkpoint.keep=1", "eval.answers=false", "eval.limit=2", "out=a"]
    assert train(*words) == 0
    out = capsys.readouterr().out
    value = f"{rows('a')[1]['eval/loss']:.6g}"
    early = f"no better value in 2 evaluations up to step 3 (eval.patience=2); the best is eval/loss {value} after step 1"
    assert f"stopped early: {early}\n" in out and f"best: eval/loss {value} after step 1; a@best\n" in out
    assert [path.name for path in sorted(Path("a/checkpoints").iterdir())] == ["step-000001", "step-000003"]
    assert sampling_target("a@best") == "a/checkpoints/step-000001" and "next: cookbook sample a@best " in out
    assert train(*words) == 0
    assert f"nothing to do: {early}; raise eval.patience to resume\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval.patience=2", "eval.patience=2: no metric says which evaluation is better; add checkpoint.best=eval/loss"),
        ("eval.patience=0", "eval.patience must be at least 1, got 0; null never stops a run early"),
        (
            "checkpoint.best=loss",
            "checkpoint.best: expected a metric of the evaluation, such as eval/loss or eval/accuracy, got",
        ),
        ("checkpoint.best=eval/loss eval.every=null", "checkpoint.best=eval/loss: eval.every=null evaluates only before and"),
    ],
)
def test_settings_without_a_meaning_are_refused(words, message, capsys):
    assert run(["train", "recipe=sft", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.usefixtures("here")
def test_a_misspelled_run_is_not_searched_on_the_hub(capsys):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text("seed: 0\n")
    for command in (["eval", "runs/mien"], ["train", "recipe=sft", "model=runs/mien"]):
        assert run(command) == 2
        error = "runs/mien: no such run, checkpoint or model; Did you mean 'mine'? choose a run of runs: mine\n"
        assert capsys.readouterr().err.endswith(error)
    assert run(["chat", "runs/mien"]) == 2
    assert "no folder and no model is called 'runs/mien'" in capsys.readouterr().err
    assert run(["eval", "runs/mine@best"]) == 2
    assert "runs/mine: has no best checkpoint; train with checkpoint.best=eval/loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("here_are", "remedy"),
    [
        ("runs", "runs holds no runs yet; train one with out=runs/mine"),
        ("other", "the folder runs does not exist in {here}; go to the folder of the run, or train one with out=runs/mine"),
    ],
)
def test_a_run_without_other_runs_gets_a_remedy(here_are, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(here_are).mkdir()
    with pytest.raises(CheckpointError) as caught:
        sampling_target("runs/mine")
    assert str(caught.value) == f"runs/mine: no such run, checkpoint or model; {remedy.format(here=tmp_path)}"
