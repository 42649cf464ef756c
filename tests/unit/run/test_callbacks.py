"""Trackers and hooks that raise: a tracker is switched off, a hook ends the run after its state is saved."""

import sys
from pathlib import Path

import pytest
from marks import rest_slow
from runtools import SMALL, here, rows, timeless, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.run import hooks
from cookbook.run.hooks import Hook, HookCalls

pytestmark = pytest.mark.usefixtures("here")
ORPO = [*SMALL["orpo"], "out=run"]
TRACKER = """
class Mine:
    def start(self, config, out, name, step):
        {start}
    def log(self, step, metrics):
        print("log", step)
        {log}
    def end(self, state):
        print("end", state)
        {end}
"""


def tracker(**bodies: str) -> list[str]:
    """The words that add a tracker of the user's with these bodies."""
    write("tracking.py", TRACKER.format(**{"start": "pass", "log": "pass", "end": "pass", **bodies}))
    return ["+tracker.mine._target_=tracking.Mine"]


def hook(moment: str, body: str = "1 / 0") -> list[str]:
    """The words that add a hook of the user's which does ``body`` at one moment."""
    head = f"import os\nfrom cookbook import Hook\n\n\nclass Mine(Hook):\n    def {moment}(self, run, *rest):\n"
    write("hooking.py", head + "".join(f"        {line}\n" for line in body.splitlines()))
    return ["+hook.mine._target_=hooking.Mine"]


def fix_hook() -> None:
    write("hooking.py", "from cookbook import Hook\n\n\nclass Mine(Hook):\n    pass\n")
    del sys.modules["hooking"]


# Trackers


@pytest.mark.parametrize(
    ("moment", "line", "logged"),
    rest_slow([("start", 4, []), ("log", 7, ["log 0"]), ("end", 10, ["log 0", "log 2", "end finished"])]),
)
def test_a_tracker_that_raises_is_switched_off(moment, line, logged, capsys):
    body = "import json; json.loads('{')"
    words = tracker(**{moment: body})
    assert train(*ORPO, *words, "recipe.steps=2", "eval.every=null") == 0
    out, err = capsys.readouterr()
    raised = "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    result = "its last values may be missing" if moment == "end" else "the tracker is off, the run continues"
    place = f"(tracking.py:{line}); {result}"
    assert err == f"WARNING: tracker Mine: {moment} raised {raised} {place}\n"
    assert [text for text in out.splitlines() if text.startswith(("log", "end")) and text != "log 1"] == logged
    log = Path("run/log.txt").read_text()
    assert "Traceback" in log and body in log and log.endswith("INFO finished\n")
    assert [row["step"] for row in rows("run")] == [0, 1, 2]


@pytest.mark.slow
def test_a_failed_tracker_leaves_the_others_on(capsys):
    words = tracker(log="raise OSError('no network')")
    write("other.py", TRACKER.format(start="pass", log="print('other', step)", end="pass"))
    assert train(*ORPO, *words, "+tracker.other._target_=other.Mine", "recipe.steps=1") == 0
    out = capsys.readouterr().out
    assert "other 0\n" in out and "other 1\n" in out and out.count("end finished\n") == 1


@pytest.mark.slow
def test_a_tracker_may_refuse_to_start(capsys):
    words = tracker(start="from cookbook.errors import ConfigError; raise ConfigError('tracker.mine: log in first')")
    assert train(*ORPO, *words) == 2
    assert capsys.readouterr().err == "error: tracker.mine: log in first\n"
    assert not Path("run").exists()


@pytest.mark.slow
def test_an_exit_in_a_tracker_switches_the_tracker_off(capsys):
    """A library's login may call sys.exit; the run's state must not go with it."""
    assert train(*ORPO, *tracker(log="raise SystemExit('log in')"), "recipe.steps=1", "eval.every=null") == 0
    assert "WARNING: tracker Mine: log raised SystemExit: log in (tracking.py:7); " in capsys.readouterr().err


@pytest.mark.slow
def test_an_exit_in_a_hook_saves_the_state(capsys):
    words = [*ORPO, "checkpoint.final=false", "checkpoint.every=null", "eval.every=null"]
    assert train(*words, *hook("on_step", "raise SystemExit(3)")) == 2
    assert "hook Mine: on_step raised SystemExit: 3 (hooking.py:7); step 1 is saved" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_in_a_tracker_is_ctrl_c():
    assert train(*ORPO, *tracker(log="raise KeyboardInterrupt")) == 130


# Hooks


@pytest.mark.parametrize(
    ("moment", "body", "saved"),
    [
        ("on_step", "if rest[0] == 2:\n    1 / 0", 2),
        pytest.param("on_eval", "if rest[0] == 2:\n    1 / 0", 2, marks=pytest.mark.slow),
        pytest.param("on_weight_sync", "if rest[0].step == 1:\n    1 / 0", 2, marks=pytest.mark.slow),
        pytest.param("on_checkpoint", "if rest[0].step == 2:\n    1 / 0", 2, marks=pytest.mark.slow),
        pytest.param("on_step", "if rest[0] == 3:\n    1 / 0", 3, marks=pytest.mark.slow),
        pytest.param("on_end", "1\n1 / 0", 3, marks=pytest.mark.slow),
    ],
)
def test_a_hook_that_raises_ends_the_run_saved(moment, body, saved, capsys):
    recipe = "grpo" if moment == "on_weight_sync" else "orpo"
    words = [*SMALL[recipe], "checkpoint.final=false", "checkpoint.every=null", "out=run"]
    if moment in ("on_checkpoint", "on_end"):
        words[-3:] = ["checkpoint.every=1", "out=run"]
    assert train(*words, *hook(moment, body)) == 2
    err = capsys.readouterr().err
    assert err == (
        f"error: hook Mine: {moment} raised ZeroDivisionError: division by zero (hooking.py:8); step {saved} is saved; "
        "fix the hook, then resume with: cookbook train --config run/config.yaml out=run\n"
    )
    told = hooks.read_status(Path("run"))
    assert told is not None and err == f"error: {told['error']}\n"
    assert (told["state"], told["step"], told["saved_step"]) == ("failed", saved, saved)
    log = Path("run/log.txt").read_text()
    assert log.count("    1 / 0\n") == 1 and log.endswith("INFO ended by HookError\n")
    fix_hook()
    assert run(["train", "--config", "run/config.yaml", "out=run"]) == 0
    assert train(*SMALL[recipe], "out=straight") == 0
    assert timeless("run") == timeless("straight")


@pytest.mark.slow
def test_a_hook_that_raises_before_the_first_step(capsys):
    for moment in ("on_start", "on_eval"):
        sys.modules.pop("hooking", None)
        assert train(*SMALL["orpo"], "recipe.steps=1", f"out={moment}", *hook(moment)) == 2
        assert f"hook Mine: {moment} raised ZeroDivisionError: division by zero (hooking.py:7); no step is saved yet; fix " in (
            capsys.readouterr().err
        )
        assert "ZeroDivisionError" in Path(f"{moment}/log.txt").read_text()
        assert hooks.read_status(Path(moment))["state"] == "failed"
        fix_hook()
        assert run(["train", "--config", f"{moment}/config.yaml", f"out={moment}"]) == 0
        assert [row["step"] for row in rows(moment)] == [0, 1]


@pytest.mark.slow
def test_ctrl_c_in_a_hook_is_ctrl_c():
    assert train(*ORPO, *hook("on_step", "raise KeyboardInterrupt")) == 130


class Recorder(Hook):
    def __init__(self, seen: list[str], fails: bool = False) -> None:
        self.seen, self.fails = seen, fails

    def on_step(self, run, step, metrics):
        self.seen.append("step")
        if self.fails:
            raise ValueError("x")

    def on_end(self, run, state):
        self.seen.append(state)
        if self.fails:
            raise ValueError("y")


def test_other_hooks_are_called_after_one_has_failed(caplog: pytest.LogCaptureFixture):
    seen: list[str] = []
    calls = HookCalls([Recorder(seen, fails=True), Recorder(seen)])
    calls.start(None)
    for _ in range(2):
        calls.call("on_step", None, 1, {})
    assert seen == ["step", "step", "step"]  # the failed one is not called a second time
    calls.end(None, "failed")
    assert seen[3:] == ["failed", "failed"]
    assert "hook Recorder: on_end raised ValueError: y" in caplog.text  # the first error stays the reason
    assert str(calls.failure).startswith("hook Recorder: on_step raised ValueError: x (test_callbacks.py:")
