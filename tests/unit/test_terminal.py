"""Output on a terminal while a command works, and in a file or a pipe."""

import io
import math
import sys
from pathlib import Path

import pytest
from runtools import SMALL, here, run, train  # noqa: F401 - here is a fixture

from cookbook import terminal
from cookbook.data import DataConfig, load_rows
from cookbook.terminal import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """``clock[0]`` is the time; ticks happen when the test asks for them."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(terminal, "PLAIN_AFTER_S", 2.0)
    return now


def lines_until(display: terminal._Display, clock: list[float], *times: float) -> list[str]:
    """Everything that the display has written after a tick at each of ``times``."""
    for clock[0] in times:
        display.tick()
    return display._stream.getvalue().splitlines()


def test_a_file_gets_a_line_of_what_lasts_once_for_each_kind(clock):
    display = terminal._Display(io.StringIO())
    with terminal.doing("reading a.jsonl", noun="rows") as activity:
        activity.count = 1200
        assert lines_until(display, clock, 0.5, 1.9) == []
        assert lines_until(display, clock, 2.5, 3, 4) == ["reading a.jsonl, 1,200 rows (2 s)"]
    clock[0] = 10
    with terminal.doing("reading a.jsonl", noun="rows"):
        assert len(lines_until(display, clock, 13, 40)) == 1
        assert lines_until(display, clock, 71, 100, 131)[1:] == ["reading a.jsonl, 0 rows (61 s)"]
        assert lines_until(display, clock, 133)[2:] == ["reading a.jsonl, 0 rows (123 s)"]  # at each doubling
    assert lines_until(display, clock, 200)[3:] == []


def test_a_step_writes_to_a_file_after_a_minute_only(clock):
    display = terminal._Display(io.StringIO())
    with terminal.doing("step 3 of 9", plain_after_s=terminal.LONG_S), terminal.doing("sampling", total=64, noun="prompts"):
        assert lines_until(display, clock, 3, 59) == []
        assert lines_until(display, clock, 61) == ["step 3 of 9: sampling, 0 of 64 prompts (61 s)"]
    with terminal.doing("starting", plain_after_s=terminal.NEVER_S):
        assert len(lines_until(display, clock, 1000)) == 1


def test_a_terminal_has_one_line_that_prints_and_the_end_clear(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(terminal, "TICK_S", 3600)
    with terminal.shown():
        with terminal.doing("loading a model of a long name", detail=lambda: "2 GB"):
            print("a line")
        with terminal.doing("saving"):
            terminal._display._last_draw = -math.inf
            terminal._display.tick()
        assert screen.getvalue().endswith("\rsaving\x1b[K")
    assert screen.getvalue() == "\rloading a model of \x1b[K\r\x1b[Ka line\n\rsaving\x1b[K\r\x1b[K"
    assert sys.stdout is screen


@pytest.mark.parametrize("variable", ["stdout", "stderr", "TERM"])
def test_without_a_terminal_nothing_is_redrawn(variable, monkeypatch):
    streams = {"stdout": Terminal(), "stderr": Terminal()} | {variable: io.StringIO()}
    monkeypatch.setattr(sys, "stdout", streams["stdout"])
    monkeypatch.setattr(sys, "stderr", streams["stderr"])
    monkeypatch.setenv("TERM", "dumb" if variable == "TERM" else "xterm")
    with terminal.shown(), terminal.doing("loading"):
        terminal._display.tick()
    assert streams["stderr"].getvalue() == ""


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_shows_what_it_does(monkeypatch, capsys):
    """Show every activity, as if the clock ticked when each one starts."""
    seen = []
    monkeypatch.setattr(terminal._Display, "wake", lambda self: seen.append(terminal.line()))
    assert train(*SMALL["grpo"], "loss.kl_beta=0.1", "recipe.steps=1", "out=run") == 0
    model = Path(terminal.__file__).parent.parent / "data"
    expected = [
        "starting",
        f"reading {model}/arithmetic/prompts_train.jsonl, 0 rows",
        "computing the digest of the rows",
        f"reading {model}/arithmetic/prompts_eval.jsonl, 0 rows",
        f"loading the model {model}/tiny, 2.5 MB",
        "computing the digest of the weights",
        "tokenizing, 0 of 24 rows",
        "tokenizing, 0 of 4 rows",
        "starting the deployment",
        "copying the reference weights",
        "evaluating, 0 of 4 prompts",
        "step 1 of 1",
        "step 1 of 1: sampling, 0 of 6 prompts",
        "step 1 of 1: computing reference logprobs",
        "evaluating, 0 of 4 prompts",
        "saving step 1",
    ]
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(expected))
    capsys.readouterr()
    seen.clear()
    assert run(["sample", "run", "1+1="]) == 0
    assert seen == [
        "starting",
        "verifying run/checkpoints/step-000001",
        "loading the model run/checkpoints/step-000001, 2.5 MB",
        "sampling",
    ]
    assert capsys.readouterr().out.count("\n") == 1


def test_rows_are_counted_while_they_are_read(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n' * 5)
    activities: list[terminal.Activity] = []
    probe = type("Probe", (), {"wake": lambda _: activities.append(terminal._activities[-1])})
    monkeypatch.setattr(terminal, "_display", probe())
    load_rows(DataConfig(path=str(file), eval_fraction=0.0))
    assert [one.text() for one in activities] == [f"reading {file}, 5 rows"]


def test_a_model_of_the_hub_shows_what_has_been_downloaded(tmp_path, monkeypatch):
    from huggingface_hub import constants

    from cookbook.engine.model import _size

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert _size("owner/name") == "0.0 MB so far"
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "a.incomplete").open("wb") as file:
        file.truncate(1_500_000_000)  # a hole: it takes no room
    assert _size("owner/name") == "1.50 GB so far"


def test_a_slow_run_writes_a_line_a_minute_to_a_file(clock, capsys):
    console = Console(1000, 0)
    for step in range(1, 5):
        clock[0] += 31
        console.update(step, {"loss": 0.5})
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 2/1000", "step 4/1000"]
