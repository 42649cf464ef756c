"""Makes ``data/two_digits``: mental arithmetic as a chat, for GRPO of a real model.

    python scripts/make_two_digits.py [FOLDER]

A question is a sum, a difference or a small product: "What is 47 + 15? Reply with the number only." 1,000 rows are for
training, 200 others are held out; no question occurs twice. The answer is a number, so ``reward=number`` judges completions.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TRAINING, HELD_OUT = 1000, 200


def main(folder: Path) -> None:
    generator = random.Random("two digits")
    questions = [*sums(), *differences(), *products()]
    chosen = generator.sample(questions, TRAINING + HELD_OUT)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", chosen[:TRAINING])
    write(folder / "eval.jsonl", chosen[TRAINING:])


def sums() -> list[tuple[str, int]]:
    return [(f"{a} + {b}", a + b) for a in range(10, 100) for b in range(10, 100)]


def differences() -> list[tuple[str, int]]:
    """Return differences that are not negative."""
    return [(f"{a} - {b}", a - b) for a in range(10, 100) for b in range(10, a + 1)]


def products() -> list[tuple[str, int]]:
    """Return products of a number of two digits with one of a single digit."""
    return [(f"{a} * {b}", a * b) for a in range(10, 100) for b in range(2, 10)]


def write(path: Path, questions: list[tuple[str, int]]) -> None:
    rows = [{"prompt": f"What is {text}? Reply with the number only.", "answer": str(answer)} for text, answer in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "data" / "two_digits")
