"""Makes ``data/arithmetic``: sums of two numbers below 50, split once into disjoint training and held-out pairs.

    python scripts/make_arithmetic.py [FOLDER]

- ``prompts_*.jsonl``: prompt and answer, for GRPO.
- ``gsm8k_*.jsonl``: the same rows in the form of GSM8K, "question" and an "answer" that ends with "#### 36".
- ``chat_*.jsonl``: conversations with the exact answer, for SFT.
- ``pairs_*.jsonl``: the exact answer chosen, a rounded one rejected, for DPO and ORPO.
- ``rounded_train.jsonl``: conversations with mostly rounded answers ("about 90"), on which ``model=tiny`` was fine-tuned
  last, so that GRPO, DPO and ORPO can improve the model.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

NUMBERS = range(50)
HELD_OUT = 400  # pairs of numbers never trained on
PREFERENCES = 1600
ROUNDED = 9600
ROUNDS = 0.65  # share of answers that are rounded in rounded_train.jsonl


def main(folder: Path) -> None:
    draw = random.Random("arithmetic")
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    draw.shuffle(pairs)
    held_out, training = pairs[:HELD_OUT], pairs[HELD_OUT:]
    folder.mkdir(parents=True, exist_ok=True)
    for which, rows in (("train", training), ("eval", held_out)):
        write(folder / f"prompts_{which}.jsonl", ({"prompt": ask(*row), "answer": exact(*row)} for row in rows))
        write(folder / f"gsm8k_{which}.jsonl", (problem(*row) for row in rows))
        write(folder / f"chat_{which}.jsonl", (chat(ask(*row), exact(*row)) for row in rows))
    # A pair whose rounded answer happens to be right would teach nothing.
    write(folder / "pairs_train.jsonl", preferences(training, PREFERENCES))
    write(folder / "pairs_eval.jsonl", preferences(held_out, HELD_OUT))
    rounded_rows = (draw.choice(training) for _ in range(ROUNDED))
    write(
        folder / "rounded_train.jsonl",
        (chat(ask(*row), rounded(*row) if draw.random() < ROUNDS else exact(*row)) for row in rounded_rows),
    )


def ask(a: int, b: int) -> str:
    return f"{a}+{b}="


def exact(a: int, b: int) -> str:
    return str(a + b)


def problem(a: int, b: int) -> dict[str, str]:
    return {"question": ask(a, b), "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}


def rounded(a: int, b: int) -> str:
    return f"about {(a + b + 5) // 10 * 10}"


def chat(prompt: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def preferences(pairs: list[tuple[int, int]], count: int) -> Iterable[dict[str, str]]:
    misleading = [row for row in pairs if sum(row) % 10]
    return ({"prompt": ask(*row), "chosen": exact(*row), "rejected": rounded(*row)} for row in misleading[:count])


def write(path: Path, rows: Iterable[dict[str, object]] | Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "data" / "arithmetic")
