"""First steps of a new user: names that are slightly wrong, pipes that end early, lines without new information."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from runtools import ROOT, SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli import catalogue
from cookbook.cli.app import run
from cookbook.errors import ConfigError
from cookbook.futures import Awaiter
from cookbook.sampling.rewards import Python
from cookbook.sampling.rewards.runner import Arguments, RewardFailure, call
from cookbook.terminal import Console
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")


# Names


def test_list_says_what_it_can_list(capsys):
    assert run(["list", "loss"]) == 2
    choices = "(choices: all, recipes, losses, models, data, rewards, envs, experiments)"
    assert capsys.readouterr().err == f"error: list: unknown kind 'loss'. Did you mean 'losses'? {choices}\n"
    assert run(["list", "experiments"]) == 0
    assert any(line.split()[0] == "grpo_two_digits" for line in capsys.readouterr().out.splitlines() if line)
    assert run(["train", "--cfg", "foo"]) == 2
    assert capsys.readouterr().err == "error: Invalid value for '--cfg' / '-c': 'foo' is not one of 'job', 'hydra', 'all'.\n"


def test_diff_finds_a_forked_loss_by_its_name(capsys):
    assert run(["fork", "loss", "dpo", "my_dpo"]) == 0
    capsys.readouterr()
    assert run(["diff", "my_dpo"]) == 0
    assert capsys.readouterr().out == "my_dpo is the same as dpo\n"
    assert run(["diff", "my_dp"]) == 2
    error = "diff: conf/recipe/my_dp.yaml not found; cookbook fork writes it. Did you mean 'my_dpo'?"
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_key_of_serve_is_looked_up_in_serve(capsys):
    assert run(["serve", "port=1"]) == 2
    assert capsys.readouterr().err == "error: unknown key 'port'; write server.port=1\n"
    assert run(["serve", "prot=1"]) == 2
    error = "unknown key 'prot'. Did you mean 'server.port'? (cookbook serve --cfg job prints every key)"
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("grpo-20261121-002502-1966", " Did you mean 'runs/grpo-20261121-002502-1965'?"),
        ("grpo-20261121-002502-1965", " Did you mean 'runs/grpo-20261121-002502-1965'?"),
        ("runs/grpo-20261121-002502-1966", " Did you mean 'runs/grpo-20261121-002502-1965'?"),
        ("qwen3_0p6", " Did you mean 'qwen3_0p6b'?"),
        ("zzz", ""),
    ],
)
def test_sample_rejects_a_missing_model_without_waiting(name, hint, capsys, monkeypatch):
    Path("runs/grpo-20261121-002502-1965").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # A request to the hub would be tried again for a minute.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the hub was asked"))
    assert run(["sample", name, "1+1="]) == 2
    error = f"error: sample: no folder and no model is called {name!r}; give a run's folder, a checkpoint, a model of "
    assert capsys.readouterr().err == f"{error}`cookbook list models`, or a hub id as owner/name.{hint}\n"


def test_what_sample_takes(monkeypatch, tmp_path):
    Path("mine").mkdir()
    write("conf.txt", "")
    assert catalogue.resolve("mine") == "mine"
    assert catalogue.resolve("owner/name") == "owner/name"
    assert catalogue.resolve("gpt2") == "gpt2"
    assert catalogue.resolve("tiny") == str(packaged("data") / "tiny")
    assert catalogue.resolve("qwen3_0p6b") == "Qwen/Qwen3-0.6B"
    with pytest.raises(ConfigError, match="is called 'tiny_random'"):  # it has no weights of its own
        catalogue.resolve("tiny_random")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="is called 'old-model'"):
        catalogue.resolve("old-model")
    (tmp_path / "cache" / "models--old-model").mkdir(parents=True)
    assert catalogue.resolve("old-model") == "old-model"


@pytest.mark.slow
def test_a_hub_that_is_not_there_is_said_once(capfd, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for words in (["sample", "owner/name", "1+1="], ["train", *SMALL["dpo"], "model.name=owner/name", "out=run"]):
        assert run(words) == 2
        err = capfd.readouterr().err
        assert err.startswith(
            "error: model.name: the folder 'owner/name' does not exist, and the Hugging Face hub is unreachable; "
        )
        assert err.count("\n") == 1
    assert not Path("run").exists()


# Lines


def test_an_evaluation_is_said_when_it_is_new(capsys):
    console = Console(40, 0)
    console.update(0, {"eval/accuracy": 0.19})
    console.update(1, {"loss": 0.5})
    console.update(2, {"loss": 0.4})
    console.update(3, {"loss": 0.3, "eval/accuracy": 0.5})
    console.update(4, {"loss": 0.2})
    lines = [line.partition("  0:0")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "step 0/40  eval accuracy 19.0%",
        "step 2/40  loss 0.4000",
        "step 3/40  loss 0.3000  eval accuracy 50.0%",
        "step 4/40  loss 0.2000",
    ]


def test_a_reward_that_raises_in_a_library_is_named_by_the_users_own_line():
    """Where the json module raises is of no use to who wrote the reward."""
    write("mine.py", "import json\n\n\ndef grade(completion, row):\n    return json.loads('{' + completion)['a']\n")
    found = call(Python("mine.py:grade"), Arguments(["", {}]), Awaiter())
    assert isinstance(found, RewardFailure) and found.message.endswith(" (mine.py:5); fix the reward or row")


# Pipes


def piped(words: list[str], reader: str, errors: str = "2>errors.txt") -> int:
    """The exit code of a command whose output goes to ``reader``."""
    command = f"{sys.executable} -m cookbook {' '.join(words)} {errors} | {reader}; exit ${{PIPESTATUS[0]}}"
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(["bash", "-c", command], env=environment, check=False).returncode


@pytest.mark.parametrize("words", [["list"], pytest.param(["train", "--cfg", "job"], marks=pytest.mark.slow)], ids=" ".join)
def test_a_command_whose_reader_leaves_early_ends_silently(words):
    """Like ``cookbook list | head -1``: the reader exits before the second line."""
    assert piped(words, "true") == 0
    assert Path("errors.txt").read_text() == ""


@pytest.mark.parametrize("errors", ["2>&1", "2>errors.txt"])
@pytest.mark.slow
def test_a_run_outlives_the_reader_of_its_output(errors):
    """Like ``cookbook train ... | head -1``: a closed pipe must not end hours of training."""
    body = "    def on_step(self, *_):\n        print('x' * 70000)\n"
    write("talking.py", f"from cookbook import Hook\n\n\nclass Talk(Hook):\n{body}")
    words = ["train", *SMALL["orpo"], "out=run", "+hook.talk._target_=talking.Talk"]
    assert piped(words, "head -1 > first.txt", errors) == 0
    assert Path("first.txt").read_text().count("\n") == 1
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]
    assert yaml.safe_load(Path("run/status.json").read_text())["state"] == "finished"
    log = Path("run/log.txt").read_text()
    assert "the reader of <stdout> has closed the pipe; the command continues without it\n" in log
    assert log.endswith("INFO finished\n")
    if "errors" in errors:
        assert "Error" not in Path("errors.txt").read_text()


def test_ctrl_c_inside_of_omegaconf_is_ctrl_c():
    """Seen by ``make kills``: its clearing up fails, and it makes an error of its own of that."""
    from omegaconf.errors import ConfigAttributeError

    from cookbook.utils.signals import is_interrupt

    def clearing_up():
        try:
            raise KeyboardInterrupt
        finally:
            None._invalidate_flags_cache()

    try:
        try:
            clearing_up()
        except AttributeError as cause:
            raise ConfigAttributeError("no attribute") from cause
    except ConfigAttributeError as error:
        assert is_interrupt(error) and not is_interrupt(ConfigAttributeError("a slip"))


def test_ctrl_c_inside_of_an_import_of_transformers_is_ctrl_c():
    from cookbook.engine.model import _cannot_load

    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise ImportError("could not import module 'Qwen3ForCausalLM'")
    except ImportError as error:
        with pytest.raises(KeyboardInterrupt):
            _cannot_load("weights", "tiny", error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "model=tiny", "server.port=0"], "out: cannot write to runs/serve: Not a directory; choose another folder"),
        (["train", "recipe=sft", "seed=0,1", "-m"], "sweep: cannot write to runs/sweep-"),
        (["jobs", "create", "mine", "model=tiny", "job=local"], "job.folder: cannot write to "),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else None,
)
def test_a_folder_that_cannot_be_written_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    """Root may write anywhere: a file stands where a folder is needed."""
    pytest.importorskip("tinker" if words[0] == "jobs" else "fastapi")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("runs").touch()
    assert run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_one_warning_of_bitsandbytes_is_hidden_and_no_other(caplog):
    """peft imports bitsandbytes, which warns on every use of LoRA that a 4-bit kernel for CPUs is missing."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    import bitsandbytes.backends.cpu.ops as ops

    import cookbook.engine.model  # noqa: F401 - hides the warning

    text = "Failed to load CPU gemm_4bit_forward from kernels-community: %s."
    assert text in Path(ops.__file__).read_text()  # as this version words it
    ops.logger.warning(text, "no module")
    ops.logger.warning("Failed to load something else")
    assert [record.getMessage() for record in caplog.records] == ["Failed to load something else"]


# Ctrl-C


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupted_import_ends_the_command_without_a_trace(ignored):
    # A package `typer` that is interrupted while it is imported.
    Path("typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")
    program = "import os, signal, sys\nif sys.argv.pop(1) == 'True': signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = [sys.executable, "-c", program, str(ignored), "-m", "cookbook", "--help"]
    done = subprocess.run(words, env={"PYTHONPATH": f".:{ROOT}"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (7 if ignored else -signal.SIGINT, "")
