"""CPU seconds of a step, of this version and another: ``python benchmarks/before.py CHECKOUT recipe=grpo [KEY=VALUE ...]``.

Both versions train with the same keys, each in a process of its own, on one thread of the same core. They step
in turn: a hook stops each process after a step until the other has made the same one. The CPU time of a step is the process's,
user and system. As both make a step within the same second with the same numbers, the ratios of the steps hardly depend on what
else the machine does: read their median. The losses and rewards of all steps are compared as well.

    git worktree add /tmp/before COMMIT
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import cookbook

HERE = Path(__file__).resolve().parent.parent
# `loss` is absent, and compared as None, in steps without a gradient; rewards are those of GRPO.
COMPARED = ("loss", "reward/mean", "rollout/tokens")
# Environment variable of the child processes: the pipes to write to and to read from.
PIPES = "BEFORE_PIPES"


class Turn(cookbook.Hook):
    """Writes the CPU seconds of the process after each step, and waits for its next turn."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        to_parent, from_parent = map(int, os.environ[PIPES].split())
        os.write(to_parent, f"{time.process_time()}\n".encode())
        os.read(from_parent, 1)


class Version:
    """A run of one version, which makes a step at a time."""

    def __init__(self, code: Path, out: Path, steps: int, words: list[str]) -> None:
        self.out = out
        self._log = out.with_suffix(".log")
        own, self._turn = os.pipe()
        times, to_parent = os.pipe()
        self._times = os.fdopen(times)
        command = [sys.executable, "-m", "cookbook", "train", f"recipe.steps={steps}", f"out={out}"]
        quiet = ["eval.every=null", "checkpoint.every=null", "checkpoint.final=false", "+hook.turn._target_=before.Turn"]
        path = f"{code}{os.pathsep}{HERE / 'benchmarks'}"
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", PIPES: f"{to_parent} {own}"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *quiet, *words],
                env=environment,
                cwd=code,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(to_parent, own),
            )
        os.close(own)
        os.close(to_parent)

    def stepped(self) -> float:
        """Wait for the end of the step. Return the CPU seconds of the process so far."""
        line = self._times.readline()
        if not line:
            raise SystemExit(self._log.read_text())
        return float(line)

    def go(self) -> None:
        os.write(self._turn, b"1")

    def numbers(self) -> list[tuple[object, ...]]:
        """Wait for the end of the run. Return the numbers of its steps."""
        if self._process.wait():
            raise SystemExit(self._log.read_text())
        rows = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], *(row.get(name) for name in COMPARED)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the version to compare with")
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--now", nargs="+", default=[], help="keys of the configuration for this version only")
    parser.add_argument("words", nargs="+", help="keys of the configuration that both versions know")
    given = parser.parse_args()
    # Both run on one core, whose load slows both versions equally.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        versions = {"before": (given.checkout.resolve(), given.words), "now": (HERE, [*given.words, *given.now])}
        # The starts are not measured.
        runs = {name: Version(code, Path(folder) / name, given.steps, words) for name, (code, words) in versions.items()}
        last = {name: run.stepped() for name, run in runs.items()}
        steps: dict[str, list[float]] = {name: [] for name in runs}
        for step in range(1, given.steps):
            # The first of two may find other contents in the caches: take turns.
            for name in sorted(runs, reverse=step % 2 == 0):
                runs[name].go()
                now = runs[name].stepped()
                steps[name].append(now - last[name])
                last[name] = now
        for run in runs.values():
            run.go()
        same = runs["before"].numbers() == runs["now"].numbers()
    ratios = [now / before for before, now in zip(steps["before"], steps["now"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = ", ".join(f"{statistics.median(values):.3f} {name}" for name, values in steps.items())
    print(f"median CPU s of a step: {seconds}; ratio of {len(ratios)} steps {middle:.3f} (quartiles {low:.3f}, {high:.3f})")
    print(f"sum of the CPU s: ratio {sum(steps['now']) / sum(steps['before']):.3f}")
    print(f"{', '.join(COMPARED)} of {given.steps} steps: {'equal bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
