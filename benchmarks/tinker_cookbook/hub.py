"""A folder in which the names of a hub are local folders: the tiny model, small data in the formats of the big sets."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


# The sums in the formats of data sets for distillation: a question and its answer, as messages.
REASONING: dict[str, Callable[[list[Row]], Row]] = {
    "zwhe99/DeepMath-103K": lambda turns: {"question": turns[0]["content"]},
    "allenai/tulu-3-sft-mixture": lambda turns: {"messages": turns},
    "open-thoughts/OpenThoughts3-1.2M": lambda turns: {
        "conversations": [{"from": name, "value": turn["content"]} for name, turn in zip(("human", "gpt"), turns, strict=True)]
    },
    "tangqiaoyu/ToolAlpaca": lambda turns: {"instruction": turns[0]["content"], "output": turns[1]["content"]},
}


def prepare(folder: Path, data: Path, models: Sequence[str]) -> None:
    """Fills ``folder``: the tiny model under ``models``, chats and preferences of ``data``, sums as ``math_rl`` asks,
    and rows for the models of ``tuned.py``.
    """
    for name in models:
        shutil.copytree(data / "tiny", folder / name, dirs_exist_ok=True)
    chats = [read(data / "arithmetic" / f"chat_{split}.jsonl") for split in ("train", "eval")]
    pairs = [read(data / "arithmetic" / f"pairs_{split}.jsonl") for split in ("train", "eval")]
    for split, chat, pair in zip(("train", "test"), chats, pairs, strict=True):
        write(folder / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", chat)
        write(folder / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", map(preference, pair))
    write(folder / "sums.jsonl", sums(4096))
    for split, count in (("train", 2048), ("test", 16)):
        write(folder / "openai" / "gsm8k" / "main" / f"{split}.jsonl", gsm8k(count))
        write(folder / f"rubric_{split}.jsonl", rubrics(count))
    # The name of the configuration that the recipes ask for, as a hub would give it.
    splits = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "openai" / "gsm8k" / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    asked = [row["messages"][2:] for row in sums(4096)]
    for place, make in REASONING.items():
        write(folder / place / "train.jsonl", map(make, asked))


def preference(row: Row) -> Row:
    """Return the row in the format of that dataset: whole dialogues as text."""
    return {side: f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[side]}" for side in ("chosen", "rejected")}


def sums(count: int) -> Iterable[Row]:
    """The questions of ``math_rl`` behind its own example."""
    draw = random.Random(0)
    for _ in range(count):
        a, b = draw.randint(0, 100), draw.randint(0, 100)
        turns = ["What is 4 + 5?", "9", f"What is {a} + {b}?", str(a + b)]
        roles = ("user", "assistant") * 2
        yield {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]}


def gsm8k(count: int) -> Iterable[Row]:
    """Sums of 2: one answer is right."""
    draw = random.Random(0)
    for a in (draw.randint(0, 2) for _ in range(count)):
        yield {"question": f"What is {a} + {2 - a}?", "answer": "#### 2"}


def rubrics(count: int) -> Iterable[Row]:
    """A question to the policy, and what the grader is asked about its answer."""
    form = {"extraction_regex": "<score>(.*?)</score>", "grader_output_format_instruction": "Score?"}
    for _ in range(count):
        yield {"convo": [{"role": "user", "content": "How are you?"}], "rubric_items": [{"rubric_str": "Is it good?", **form}]}


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
