"""Kill ranks (SIGKILL) at random moments of a run with ``backend.ranks=2``, and compare it with an undisturbed one.

    python tools/kill_ranks.py --kills 20 --steps 300

The victims are the first rank, the second, and the command itself, which supervises both. The command notices a lost rank only
as a pause. After its own end the same command resumes from the newest checkpoint. Metrics and the final weights and moments
must be equal bit for bit, and no rank may outlive its command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import psutil
from runtools import bits, checkpoint, timeless

NUM_RANKS = 2
VICTIMS = ("rank 0", "rank 1", "command")
END_S, STEP_S = 60.0, 300.0
# A snapshot every second, so that restarts load snapshots and replay requests.
MAIN = """
import sys
from cookbook.backends.remote import group_trainer
from cookbook.cli.app import run
group_trainer.SERVER["checkpoint_s"] = 1.0
sys.exit(run(["train", *sys.argv[1:]]))
"""
RECIPES = {
    "sft": ["recipe=sft", "recipe.batch_size=6", "recipe.epochs=1000"],
    "grpo": ["recipe=grpo", "recipe.prompts_per_step=4", "recipe.group_size=4"],
    "sharded": ["recipe=sft", "recipe.batch_size=6", "recipe.epochs=1000", "backend.shard=all", "eval.answers=false"],
    "dpo": ["recipe=dpo", "recipe.batch_size=6", "recipe.epochs=1000"],
}
COMMON = [f"backend.ranks={NUM_RANKS}", "data.limit=24", "eval.limit=4", "eval.every=20", "checkpoint.every=10"]


@dataclass
class Campaign:
    """One run in ``out``, and its kills so far."""

    out: Path
    words: Sequence[str]
    log: Path
    killed: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> psutil.Process:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            command = [sys.executable, "-c", MAIN, *self.words, f"out={self.out}"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        return psutil.Process(self.process.pid)

    def steps(self) -> int:
        """Finished steps."""
        metrics = self.out / "metrics.jsonl"
        return max(metrics.read_bytes().count(b"\n") - 1, 0) if metrics.exists() else 0

    def reach(self, step: int) -> None:
        """Wait until ``step`` has been finished."""
        end = time.monotonic() + STEP_S
        assert self.process is not None
        while self.steps() < step:
            assert self.process.poll() is None, f"exit code {self.process.returncode}; see {self.log}"
            assert time.monotonic() < end, f"step {step} is not reached; see {self.log}"
            time.sleep(0.05)

    def kill(self, command: psutil.Process, victim: str) -> psutil.Process:
        """Kill the victim. Return the command's process."""
        assert self.process is not None
        self.killed.append(victim)
        if victim == "command":
            ranks = ranks_of(command)
            self.process.kill()
            self.process.wait()
            gone(ranks)
            return self.start()
        number = int(victim.split()[1])
        # The ranks may just have been lost, and not be started again yet.
        while len(ranks := ranks_of(command)) <= number:
            assert self.process.poll() is None, f"exit code {self.process.returncode}; see {self.log}"
            time.sleep(0.01)
        ranks[number].send_signal(signal.SIGKILL)
        return command


def ranks_of(command: psutil.Process) -> list[psutil.Process]:
    """Return the ranks of a command in their order, which is that of their start."""
    found = []
    for child in command.children():
        # A rank that has just been killed has no command line.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "cookbook.server.rank" in " ".join(child.cmdline()):
                found.append(child)
    return sorted(found, key=lambda one: one.pid)


def gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until the processes have ended. Raises AssertionError: one is left."""
    left = psutil.wait_procs(processes, timeout=END_S)[1]
    assert not left, f"left behind: {left}"


def played(out: Path, recipe: str, steps: int, kills: int, victims: Sequence[str], seed: int = 0) -> Campaign:
    """Train in ``out``, and kill a random victim ``kills`` times at random moments."""
    campaign = Campaign(out, [*RECIPES[recipe], *COMMON, f"recipe.steps={steps}"], out.with_suffix(".log"))
    draw = random.Random(seed)
    command = campaign.start()
    try:
        for number, step in enumerate(sorted(draw.randrange(steps - 1) for _ in range(kills))):
            campaign.reach(step)
            time.sleep(draw.random() * 0.3)
            command = campaign.kill(command, victims[number % len(victims)])
        assert campaign.process is not None
        # Ranks that are killed with the last victim are children of the command too.
        ranks = ranks_of(command)
        code = campaign.process.wait()
        assert code == 0, f"exit code {code}; see {campaign.log}"
        gone(ranks)
    except BaseException:
        logs = [campaign.log, out / "checkpoints/.ranks/log.txt"]
        print(*(one.read_text()[-4000:] for one in logs if one.exists()), sep="\n----\n", file=sys.stderr)
        raise
    finally:
        if campaign.process is not None and campaign.process.poll() is None:
            campaign.process.kill()
    return campaign


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences of two runs, in rows of metrics and in files of the last checkpoint."""
    rows, rows_too = timeless(one), timeless(other)
    found = [f"metrics of row {place}" for place, (this, that) in enumerate(zip(rows, rows_too, strict=True)) if this != that]
    files, files_too = bits(checkpoint(one)), bits(checkpoint(other))
    return found + [name for name in files.keys() | files_too.keys() if files.get(name) != files_too.get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recipe", choices=RECIPES, default="sft")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder) / "calm", Path(folder) / "killed"
        played(calm, arguments.recipe, arguments.steps, 0, VICTIMS)
        campaign = played(killed, arguments.recipe, arguments.steps, arguments.kills, VICTIMS, arguments.seed)
        found = differences(calm, killed)
        counts = ", ".join(f"{campaign.killed.count(victim)} of {victim}" for victim in VICTIMS)
        print(f"{counts}; {len(timeless(calm))} rows of metrics, {len(found)} differences")
    raise SystemExit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
