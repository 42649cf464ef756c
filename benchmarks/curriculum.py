"""Sampled tokens until GRPO reaches an accuracy, without and with ``data.curriculum``: ``python benchmarks/curriculum.py``.

The rows are a mix of 12 difficulties of reasoning-gym's ``basic_arithmetic``: sums of 2 to 5 numbers of 1 to 3 digits, in equal
parts, written as the shipped tiny model knows them, ``4+7=``. This model learns sums of two numbers below 100 and no others, so
most rows are too hard. The held-out rows are other sums of two numbers below 100. The runs of a seed have the same
configuration except for the keys in the table. Prints a table of tokens, and the ratio of each seed. Needs reasoning-gym.

Without ``by``, a pass rate is of one prompt, and helps only when prompts repeat: 40 steps draw 640 of about 4,000 rows. The
protocol for it, chosen before any such run: 320 rows, accuracy 20%, seeds 0 to 2, all runs to their end.

    python benchmarks/curriculum.py --arms uniform prompts --steps 60 -- data.limit=320
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cookbook.cli.app import run

# Numbers of a sum, and their digits. There are few different sums of two digits, so that their level has fewer rows.
TERMS, DIGITS, LEVEL = (2, 3, 4, 5), (1, 2, 3), 400
# Held-out rows of the levels that the model learns.
HELD_OUT = {(2, 1): 20, (2, 2): 180}
ARMS = {
    "uniform": [],
    "curriculum": ["data.curriculum={by: level}"],
    "prompts": ["data.curriculum={}"],
    "refill": ["rollout.refill=2"],
    "both": ["data.curriculum={by: level}", "rollout.refill=2"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["uniform", "curriculum"])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps, if the accuracy is not reached earlier")
    parser.add_argument("--accuracy", type=float, default=0.2, help="greedy accuracy on the held-out rows")
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs; those already there are only read")
    parser.add_argument("words", nargs="*", help="further keys of the configuration, for both runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data, held_out = out / "mix.jsonl", out / "held_out.jsonl"
        for path, rows in zip((data, held_out), mixed(), strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
                if not is_finished(folder):
                    run(["train", *COMMON, *words, *ARMS[name], *given.words])
                table[name].append(reached(folder, given.accuracy))
    report(table, given.seeds, given.accuracy)


COMMON = [
    "recipe=grpo", "recipe.prompts_per_step=16", "recipe.group_size=8", "optim.lr=1e-4", "rollout.max_tokens=16",
    "eval.max_tokens=16", "eval.every=5", "checkpoint.every=null", "checkpoint.final=false",
    "rollout.store_mb=null", "data.chat=true",
]  # fmt: skip


def mixed() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows to train on and the held-out rows, in the order of a fixed seed."""
    import reasoning_gym

    rows, held_out = list[dict[str, str]](), list[dict[str, str]]()
    for terms, digits in itertools.product(TERMS, DIGITS):
        options = {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits, "operators": ("+",)}
        tasks = reasoning_gym.create_dataset(
            "basic_arithmetic", seed=0, size=4 * LEVEL, allow_parentheses=False, allow_negation=False, **options
        )
        sums = {task["metadata"]["expression"].replace(" ", "") + "=": task["answer"] for task in tasks}
        level = [{"prompt": sum_, "answer": answer, "level": f"{terms}x{digits}"} for sum_, answer in sums.items()]
        held_out += level[: (count := HELD_OUT.get((terms, digits), 0))]
        rows += level[count : count + LEVEL]
    random.Random(0).shuffle(rows)
    return rows, held_out


def is_finished(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"


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
