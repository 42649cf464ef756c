"""Small runs of the real command, and what they leave behind."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from preloaded import Forked

from cookbook.cli.app import run
from cookbook.utils.files import LOCK

LITTLE = ["data.limit=24", "eval.limit=4", "eval.every=2"]
# The demo's values; with another model or other data a recipe's own values allow hundreds of tokens.
BRIEF = ["rollout.max_tokens=16", "eval.max_tokens=16"]
# An environment of two turns whose rewards differ for any model.
TWO_TURNS = """
class Two:
    def reset(self, seed):
        self.turns = 0
        return f"{seed % 7}+{seed % 5}="

    def step(self, text):
        self.turns += 1
        return None if self.turns == 2 else "again", sum(map(ord, text)) % 7 / 7
"""
# Three steps of each recipe, a second of work at most.
SMALL = {
    "sft": ["recipe=sft", "recipe.steps=3", "recipe.batch_size=6", *LITTLE],
    "dpo": ["recipe=dpo", "recipe.steps=3", "recipe.batch_size=4", *LITTLE],
    "kto": ["recipe=kto", "recipe.steps=3", "recipe.batch_size=4", *LITTLE],
    "orpo": ["recipe=orpo", "recipe.steps=3", "recipe.batch_size=4", *LITTLE],
    "grpo": ["recipe=grpo", "recipe.steps=3", "recipe.prompts_per_step=6", "recipe.group_size=4", *LITTLE],
}


@contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Change into ``folder``. Entries that the block adds to ``sys.path``, and modules from there, are removed afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        known = set(sys.modules)
        yield folder
        for name in set(sys.modules) - known:
            module = sys.modules[name]
            # A package without __init__.py has no file.
            if str(folder) in str(getattr(module, "__file__", None) or list(getattr(module, "__path__", ""))):
                del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """Change into an empty folder."""
    with inside(tmp_path):
        yield tmp_path


def train(*words: str) -> int:
    return run(["train", *words])


def write(name: str, text: str) -> None:
    """Write a file of the user into the current folder."""
    Path(name).write_text(text)


def rows(run_folder: Path | str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_folder) / name).read_text().splitlines()]


def timeless(run_folder: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a run without the times: equal on every repetition, to the last bit."""
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows(run_folder)]


def same_numbers(one: Path | str, other: Path | str) -> bool:
    """Whether two runs agree, one of them on a server: losses to the last bit, metrics up to one rounding.

    The client of a server multiplies and divides means by the number of datums.
    """
    pairs = list(zip(timeless(one), timeless(other), strict=True))
    return all(a == pytest.approx(b, rel=1e-15, abs=0) and a.get("loss") == b.get("loss") for a, b in pairs)


def checkpoint(run_folder: Path | str, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest."""
    found = sorted((Path(run_folder) / "checkpoints").glob("step-??????"))
    return found[-1] if step is None else Path(run_folder) / "checkpoints" / f"step-{step:06d}"


def bits(folder: Path) -> dict[str, bytes]:
    """Tensor files of a checkpoint: model or adapter, optimizer, and the weights of the sampler."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    assert "trainer/shard-00000-00000.safetensors" in found and len(found) in (2, 3)
    return found


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below with its time of change and content, without bytecode, and without the lock, which readers take too."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK and path.suffix != ".pyc")
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def start(words: Sequence[str]) -> Forked:
    """The command in a process of its own, to send signals to."""
    return Forked("train", *words, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def resume_words(output: str) -> list[str]:
    """The arguments of the command that a stopped run prints to resume it."""
    line = next(line for line in output.splitlines() if "resume with: " in line)
    words = shlex.split(line.partition("resume with: ")[2])
    assert words[0] == "cookbook"
    return words[1:]


FOUR = ["recipe.steps=4"]


def stop_at(*steps: int, number: signal.Signals = signal.SIGINT, moment: str = "on_step") -> list[str]:
    """Return overrides for a hook that sends the run a signal after one of ``steps``, one signal per process."""
    arguments, at = ("checkpoint", "checkpoint.step") if moment == "on_checkpoint" else ("step, metrics", "step")
    write(
        "stopping.py",
        "import os\nfrom cookbook import Hook\n\n\n"
        "class Stop(Hook):\n"
        f"    def {moment}(self, run, {arguments}):\n"
        f"        if {at} in {steps} and run.first_step < {at}:\n"
        f"            os.kill(os.getpid(), {int(number)})\n",
    )
    return ["+hook.stop._target_=stopping.Stop"]


def same_as_undisturbed(stopped: str = "stopped", straight: str = "straight") -> None:
    assert timeless(stopped) == timeless(straight)
    assert bits(checkpoint(stopped)) == bits(checkpoint(straight))
    assert checkpoint(stopped).name == checkpoint(straight).name
