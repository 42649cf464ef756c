"""Sampled tokens until GRPO reaches an accuracy, without and with ``data.curriculum``: ``python benchmarks/curriculum.py``.

The rows are a mix of difficulties for the shipped tiny model: sums of two numbers below 50, which it learns in a few steps;
sums with one number from 50 to 59, which it solves rarely and learns slowly; and sums of two numbers from 60 to 99, which it
does not solve. The held-out rows are other sums of the second kind. The runs of a seed have the same configuration but for
the keys in the table. Prints a table of tokens, and the ratio of each seed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cookbook.cli.app import run

# Rows to train on by kind, and held-out rows.
EASY, LEARNABLE, HARD, HELD_OUT = 120, 120, 120, 80
ARMS = {
    "uniform": [],
    "curriculum": ["data.curriculum={}"],
    "refill": ["rollout.refill=2"],
    "both": ["data.curriculum={}", "rollout.refill=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["uniform", "curriculum"])
    parser.add_argument("--steps", type=int, default=35, help="optimizer steps, if the accuracy is not reached earlier")
    parser.add_argument("--accuracy", type=float, default=0.18, help="greedy accuracy on the held-out rows")
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs")
    parser.add_argument("words", nargs="*", help="further keys of the configuration, for both runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data, held_out = out / "mix.jsonl", out / "held_out.jsonl"
        for path, pairs in zip((data, held_out), mixed(), strict=True):
            write(path, pairs)
        table: dict[str, list[tuple[float, int] | None]] = {name: [] for name in given.arms}
        for seed in given.seeds:
            for name in given.arms:
                folder = out / f"{name}-{seed}"
                words = [
                    f"seed={seed}",
                    f"recipe.steps={given.steps}",
                    f"out={folder}",
                    f"data.path={data}",
                    f"data.eval_path={held_out}",
                ]
                run(["train", *COMMON, *words, *ARMS[name], *given.words])
                table[name].append(reached(folder, given.accuracy))
    report(table, given.seeds, given.accuracy)


COMMON = [
    "recipe=grpo", "recipe.prompts_per_step=16", "recipe.group_size=8", "optim.lr=1e-4", "rollout.max_tokens=16",
    "eval.max_tokens=16", "eval.every=5", "checkpoint.every=null", "checkpoint.final=false",
    "rollout.store_mb=null", "data.chat=true",
]  # fmt: skip


def mixed() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return pairs of numbers to add: those to train on, and those held out, in the order of a fixed seed."""
    draw = random.Random(0)
    fifties = [pair for low in range(1, 50) for high in range(50, 60) for pair in ((low, high), (high, low))]
    draw.shuffle(fifties)
    easy = draw.sample([(one, other) for one in range(1, 50) for other in range(1, 50)], EASY)
    hard = draw.sample([(one, other) for one in range(60, 100) for other in range(60, 100)], HARD)
    rows = [*easy, *hard, *fifties[HELD_OUT : HELD_OUT + LEARNABLE]]
    draw.shuffle(rows)
    return rows, fifties[:HELD_OUT]


def write(path: Path, pairs: Sequence[tuple[int, int]]) -> None:
    lines = [json.dumps({"prompt": f"{one}+{other}=", "answer": str(one + other)}) + "\n" for one, other in pairs]
    path.write_text("".join(lines))


def reached(folder: Path, accuracy: float) -> tuple[float, int] | None:
    """Return the tokens sampled for training and the step at which a run has reached an accuracy; None if it has not."""
    tokens = 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens += row.get("rollout/tokens", 0.0)
        if row.get("eval/accuracy", 0.0) >= accuracy:
            return tokens, row["step"]
    return None


def report(table: dict[str, list[tuple[float, int] | None]], seeds: Sequence[int], accuracy: float) -> None:
    first = next(iter(table))
    print(f"\ntokens sampled until accuracy {accuracy:.0%} (step), and how many times fewer than {first}")
    print(f"| keys | {' | '.join(f'seed {seed}' for seed in seeds)} |\n|---|{'---|' * len(seeds)}")
    for name, results in table.items():
        cells = []
        for base, own in zip(table[first], results, strict=True):
            ratio = f", {base[0] / own[0]:.2f}x" if base and own and name != first else ""
            cells.append(f"{own[0]:,.0f} ({own[1]}){ratio}" if own else "not reached")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
