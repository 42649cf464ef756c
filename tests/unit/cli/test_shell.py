"""The shell, the terminal and the scheduler: names of files, interpolations, signals, streams that cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import cookbook
from cookbook import terminal
from cookbook.cli import app
from cookbook.cli.hydra.bridge import ComposeRequest
from cookbook.cli.hydra.bridge import run as run_job
from cookbook.errors import ConfigError
from cookbook.trackers.mlflow import _check_place
from cookbook.utils.signals import Interrupted, InterruptGuard, Stopped, exit_code, stopped_by_signals


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)


def composed(*words):
    seen = []
    run_job(ComposeRequest(["recipe=sft", "model=tiny", *words]), lambda cfg, _: seen.append(cfg))
    return seen[0]


@pytest.mark.parametrize(
    "name",
    [
        "a;b", "a&b",
        "a!b", "a^b", "a{b}", "a[b]", "[a]", "{a}", 'a"b', "a'b", "it's b", "a (2)", "a=b", "a#b", "~a", "ünï", "a,b",
        "a<b", "a|b", "a`b", "a\\b", "a:b", "a%b", "a@b", "a+b",
    ],
)  # fmt: skip
def test_a_path_may_have_any_character(name):
    Path(f"{name}.jsonl").touch()
    assert composed(f"data={name}.jsonl").data.path == f"{name}.jsonl"
    assert composed(f"data.eval_path={name}.jsonl").data.eval_path == f"{name}.jsonl"
    assert composed(f"out={name.replace(',', '')}").out == name.replace(",", "")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "data=${HOME}/x.jsonl",
            "data.path: no key 'HOME' to interpolate; an environment variable is written as ${oc.env:HOME}",
        ),
        (
            "seed=${oc.env:SLURM_ARRAY_TASK_ID}",
            "seed: the environment variable SLURM_ARRAY_TASK_ID is not set; set it, or write ${oc.env:SLURM_ARRAY_TASK_ID,",
        ),
        ("optim.lr=${optim.lr}", "optim.lr: an interpolation that refers to itself; write a value"),
        ("optim.lr=${optim.lrr}", "optim.lr: no key 'optim.lrr' to interpolate; write a key of the configuration"),
        ("optim.lr=${oc.nope:1}", "optim.lr: Unsupported interpolation type oc.nope"),
        ("out=???", "out: no value, got ???; write out=VALUE"),
        ("eval.every=None", "eval.every: expected a whole number, got 'None'; write null for no value"),
        ("hydra.sweeper.params={a: 1}", "hydra.sweeper.params: this sweeper has no such mapping; write lists as overrides"),
    ],
)
def test_what_does_not_resolve_is_one_line(word, message, capsys):
    assert app.run(["train", "recipe=sft", "model=tiny", word, "--dry-run"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1


def test_an_interpolation_that_resolves_is_kept(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert composed("seed=${oc.env:SLURM_ARRAY_TASK_ID}", "out=runs/${seed}").out == "runs/7"


def test_a_sweep_names_each_folder_once(capsys):
    assert app.run(["train", "recipe=sft", "out=a1,a1", "-m"]) == 2
    assert capsys.readouterr().err == "error: out: two runs of the sweep would write to a1; name each folder once\n"


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        (
            "defaults:\n  - db: mysql\n",
            "conf/train.yaml",
            "unknown db 'mysql'; it would be ./conf/db/mysql.yaml; conf/train.yaml replaces the packaged file: rename it,",
        ),
        ("name: adamw\n", "conf/optim/adamw.yaml", "conf/optim/adamw.yaml:1: optim: no _target_"),
    ],
)
def test_the_conf_folder_of_another_project_is_named(text, path, message, capsys):
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text(text)
    assert app.run(["train", "recipe=sft", "--dry-run"]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_folders_of_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    Path("broken").symlink_to("nowhere")
    small = ["train", "recipe=sft", "model=tiny", "debug=fast", "data.limit=32", "eval.limit=2"]
    for out, message in {
        "broken": "error: out: broken is a link to nowhere, which does not exist; remove the link, or create that",
        "x" * 300: "the name of a file or folder is too long; choose a shorter one",
    }.items():
        assert app.run([*small, f"out={out}"]) == 2
        assert message in capsys.readouterr().err
    assert app.run([*small, "out=~/run"]) == 0
    assert Path("home/run/status.json").is_file() and not Path("~").exists()


# Signals


def test_two_signals_within_half_a_second_count_as_one(monkeypatch, capsys):
    clock = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with InterruptGuard() as guard:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert guard.asked and guard.number == signal.SIGTERM
        clock[0] += 1
        with pytest.raises(Stopped) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
    assert exit_code(stop.value) == 129
    assert capsys.readouterr().err.count("stopping after this step") == 1


def test_a_hangup_that_the_parent_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals(), InterruptGuard() as guard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not guard.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_before_the_first_step_closes_the_run(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as stop, stopped_by_signals():
        os.kill(os.getpid(), number)
    assert exit_code(stop.value) == 128 + number
    assert signal.getsignal(number) == before


def test_the_exit_code_is_that_of_the_signal(monkeypatch):
    from cookbook.cli.hydra import bridge

    def stopped(*_):
        raise Interrupted(3, signal.SIGTERM)

    monkeypatch.setattr(bridge, "run", stopped)
    assert app.run(["train"]) == 143
    assert exit_code(KeyboardInterrupt()) == 130


# Streams


class Gone:
    """A stream whose terminal is gone."""

    name = "<stdout>"

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def isatty(self):
        return False

    def fileno(self):
        return self.descriptor

    def write(self, text):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    flush = close = lambda self: self.write("")


@pytest.mark.parametrize("outlives", [True, False])
def test_output_that_cannot_be_written_never_fails_a_run(outlives, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", Gone(file.fileno()))
        if outlives:
            with terminal.shown(outlives_reader=True):
                print("step 1")
            return
        with pytest.raises(OSError, match="Input/output"), terminal.shown():
            print("step 1", flush=True)


def test_closed_streams_and_characters_that_they_lack(monkeypatch, tmp_path):
    with (tmp_path / "ascii").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", None)
        terminal.make_writable()
        print("ünï")
        print("lost", file=sys.stderr)
        assert sys.stderr.name == os.devnull
        sys.stderr.close()
    assert (tmp_path / "ascii").read_text() == "?n?\n"


# Trackers


def test_an_unreachable_mlflow_server_is_found_in_seconds(tmp_path):
    with pytest.raises(
        ConnectionError, match=r"http://127.0.0.1:1/ does not answer: Connection refused; see tracker.mlflow.uri"
    ):
        _check_place("http://127.0.0.1:1")
    _check_place(str(tmp_path / "new" / "mlruns"))
    _check_place("sqlite:///mlflow.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_mlflow_cannot_write(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match=r"cannot be written; see tracker\.mlflow\.uri"):
        _check_place(str(tmp_path / "mlruns"))


def test_a_mistake_in_python_is_a_line_of_the_caller_and_one_message():
    with pytest.raises(ConfigError, match=r"optim\.lr: expected a number, got 'x'; write 1e-05, for example") as caught:
        cookbook.train(recipe="sft", model="tiny", optim={"lr": "x"})
    # The other frames of cookbook do not help to find a mistyped value.
    assert [Path(entry.path).name for entry in caught.traceback] == [Path(__file__).name, "python_api.py"]
    assert caught.value.__suppress_context__


def test_python_gets_the_same_errors():
    with pytest.raises(ConfigError, match="no key 'HOME' to interpolate"):
        composed("data=${HOME}/x.jsonl")
