"""CPU seconds of a one-turn GRPO step, of this version and another: ``python benchmarks/grpo.py --before CHECKOUT``.

Each round trains the shipped tiny model on its sums for 5 and for 25 steps, with each version in turn, in processes of their
own on one thread. The difference of the two divided by 20 is the CPU time of a step, user and system, without imports, loading
and evaluation. The versions are interleaved: read the ratio. The losses and rewards of all steps are compared as well.

    git worktree add /tmp/before c611549   # the last commit without environments
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SHORT, LONG = 5, 25
# `loss` is absent, and compared as None, in steps without a gradient.
COMPARED = ("loss", "reward/mean", "rollout/tokens", "eval/accuracy")


def train(code: Path, out: Path, steps: int, words: list[str]) -> float:
    """Train in a process of its own. Return its CPU seconds."""
    command = [sys.executable, "-m", "cookbook", "train", "recipe=grpo", f"recipe.steps={steps}", f"out={out}", *words]
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    with out.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=code, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(out.with_suffix(".log").read_text())
    return usage.ru_utime + usage.ru_stime


def numbers(out: Path) -> list[tuple[object, ...]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], *(row.get(name) for name in COMPARED)) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the version to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="*", help="keys of the configuration that both versions know")
    given = parser.parse_args()
    versions = {"before": given.before.resolve(), "now": HERE}
    steps: dict[str, list[float]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for name, code in versions.items():
                outs = [Path(folder) / f"{name}-{number}-{count}" for count in (SHORT, LONG)]
                short, long = (train(code, out, count, given.words) for out, count in zip(outs, (SHORT, LONG), strict=True))
                steps[name].append((long - short) / (LONG - SHORT))
            before, now = (steps[name][-1] for name in versions)
            print(
                f"round {number + 1}: CPU s per step {before:.3f} before, {now:.3f} now, ratio {now / before:.2f}", flush=True
            )
        same = numbers(Path(folder) / f"before-0-{LONG}") == numbers(Path(folder) / f"now-0-{LONG}")
    middle = {name: statistics.median(values) for name, values in steps.items()}
    print(f"median: {middle['before']:.3f} before, {middle['now']:.3f} now, ratio {middle['now'] / middle['before']:.2f}")
    print(f"{', '.join(COMPARED)} of {LONG} steps: {'equal bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
