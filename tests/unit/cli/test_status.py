"""``status.json``: a run's folder shows the state of the run, also after a failure."""

import json
import signal
from pathlib import Path

import pytest
from runtools import SMALL, here, resume_words, rows, start, train, write  # noqa: F401 - here is a fixture
from waiting import until

from cookbook.cli.app import run
from cookbook.run import hooks
from cookbook.utils import files

pytestmark = pytest.mark.usefixtures("here")
QUIET = ["eval.every=null", "out=run"]


def told() -> dict:
    found = hooks.read_status(Path("run"))
    assert found is not None
    return found


def hook(body: str) -> list[str]:
    """A hook of the user's that does ``body`` after every step."""
    head = "import os, signal\nfrom cookbook import Hook\n\n\nclass Mine(Hook):\n"
    head += "    def on_step(self, run, step, metrics):\n"
    write("noting.py", head + "".join(f"        {line}\n" for line in body.splitlines()))
    return ["+hook.mine._target_=noting.Mine"]


@pytest.mark.slow
def test_from_the_start_to_the_end():
    note = "print(step, open('run/status.json').read().replace(chr(10), ' '), file=open('seen.txt', 'a'))"
    assert train(*SMALL["orpo"], *QUIET, "checkpoint.every=2", *hook(note)) == 0
    seen = [line.partition(" ") for line in Path("seen.txt").read_text().splitlines()]
    told_at = [(int(step), json.loads(text)) for step, _, text in seen]
    assert [(one["state"], one["saved_step"]) for _, one in told_at] == [("running", None), ("running", None), ("running", 2)]
    assert all((one["saved_step"] or 0) <= one["step"] <= step for step, one in told_at)  # as old as a second
    last = told()
    assert (last["state"], last["step"], last["saved_step"], last["error"]) == ("finished", 3, 3, None)
    assert last["resume"] == "cookbook train --config run/config.yaml out=run"
    assert last["pid"] and last["host"] and last["started"] <= last["updated"]


@pytest.mark.slow
def test_stopped_and_resumed():
    stop = hook("if step == 2 and not run.first_step:\n    os.kill(os.getpid(), signal.SIGTERM)")
    assert train(*SMALL["orpo"], *QUIET, *stop) == 143
    last = told()
    assert (last["state"], last["step"], last["saved_step"]) == ("interrupted", 2, 2)
    assert last["error"] == "Interrupted: stopped after step 2"
    assert run(resume_words("resume with: " + last["resume"])) == 0
    assert (told()["state"], told()["step"], told()["error"]) == ("finished", 3, None)
    assert "was interrupted after step 2\n" in Path("run/log.txt").read_text()


@pytest.mark.parametrize("kind", ["bug", pytest.param("mistake", marks=pytest.mark.slow)])
def test_failed(kind, capsys):
    raised = "ZeroDivisionError" if kind == "bug" else "__import__('cookbook').errors.ConfigError"
    words = fork(update=f"run.optim_step(step) if step.index < 2 else (_ for _ in ()).throw({raised}('x: y'))")
    words += [*QUIET, "checkpoint.every=1"]
    if kind == "bug":
        with pytest.raises(ZeroDivisionError):
            train(*words)
        assert told()["error"] == "ZeroDivisionError: x: y"
    else:
        assert train(*words) == 2
        assert told()["error"] == "x: y"
    assert (told()["state"], told()["step"], told()["saved_step"]) == ("failed", 2, 2)


@pytest.mark.slow
def test_killed_it_says_running_and_no_process_holds_the_lock(capsys):
    process = start([*SMALL["orpo"], *QUIET, "recipe.steps=500", "checkpoint.every=null"])
    until(Path("run/metrics.jsonl").exists)
    assert train(*SMALL["orpo"], *QUIET) == 2
    taken = f"another process (pid {process.pid}) is running in run; wait for it or choose another folder"
    assert capsys.readouterr().err == f"error: out: {taken}\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (told()["state"], told()["pid"]) == ("running", process.pid)
    step = told()["step"]
    with files.locked(Path("run")):
        pass
    assert train(*SMALL["orpo"], *QUIET) == 0
    assert (
        f"the previous process of this run (pid {process.pid}) was killed after step {step}\n"
        in Path("run/log.txt").read_text()
    )
    assert told()["state"] == "finished"


@pytest.mark.slow
def test_a_refused_resume_changes_nothing():
    assert train(*SMALL["orpo"], *QUIET) == 0
    before = Path("run/status.json").read_bytes()
    assert train(*SMALL["orpo"], *QUIET, "seed=1") == 2
    assert Path("run/status.json").read_bytes() == before


def fork(**changes: str) -> list[str]:
    """Return words that run a fork of SFT with another expression for the steps (``turns``) or for ``update``."""
    assert run(["fork", "sft", "mine"]) == 0
    code = Path("recipes/mine.py").read_text()
    whole = {"turns": "run.steps(len(batches) if cfg.steps is None else cfg.steps, evaluate)", "update": "run.optim_step(step)"}
    for what, new in changes.items():
        assert whole[what] in code
        code = code.replace(whole[what], new)
    Path("recipes/mine.py").write_text(code)
    return ["recipe=mine", *SMALL["sft"][1:]]


@pytest.mark.slow
def test_a_run_that_has_trained_nothing_has_failed(capsys):
    words = fork(turns="[]")
    assert train(*words, *QUIET) == 2
    error = "error: recipe: mine has ended without a step; train inside of `for step in run.steps(n)`\n"
    assert capsys.readouterr().err == error
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_recipe_whose_turns_are_no_steps_cannot_be_resumed_and_fails(capsys):
    words = fork(turns="run.steps(cfg.steps)", update="run.optim_step(step) if step.index else {}")
    assert train(*words, *QUIET) == 2
    error = "error: recipe: after 3 turns of run.steps the model has seen 2 optimizer steps; call run.optim_step(step) once "
    assert capsys.readouterr().err == f"{error}per turn\n"
    assert told()["state"] == "failed" and len(rows("run")) == 3
