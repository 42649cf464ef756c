"""Memory that ``cookbook plan`` estimates and whole runs of the command need: ``python benchmarks/plan.py --real MODEL``.

Each case is a run of two steps with ``cookbook train``, evaluation and checkpoint included. The peak is the resident memory of
all its processes, where pages that several processes share count once. MODEL is the folder of a chat model, such as
``build/smollm2``. The case with a long row needs 5 GB, and the case of a large batch 8 GB.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

TRAIN = [sys.executable, "-m", "cookbook"]
COMMON = ["demo=none", "recipe.steps=2", "eval.limit=2", "eval.max_tokens=8"]
SFT = [
    "recipe=sft",
    "data=jsonl",
    "data.path=chat.jsonl",
    "data.eval_path=chat.jsonl",
    "eval.answers=false",
    "recipe.batch_size=4",
]
PAIRS = ["data=jsonl", "data.path=pairs.jsonl", "data.eval_path=pairs.jsonl", "eval.answers=false", "recipe.batch_size=2"]
# A reward that differs between all completions, so that every group has a gradient; completions of the full length.
GRPO = [
    *("recipe=grpo", "data=jsonl", "data.path=prompts.jsonl", "data.eval_path=prompts.jsonl", "data.chat=true"),
    *("reward=python", "reward.target=spread.py:spread", "recipe.prompts_per_step=4", "recipe.group_size=8"),
    *("rollout.max_tokens=24", "rollout.stop=[]"),
]
CASES = {
    "SFT, 4 rows": SFT,
    "SFT, 20 rows": [*SFT, "recipe.batch_size=20"],
    "SFT, padded": [*SFT, "backend.packing=padded"],
    "SFT, a row of 4,289 tokens, checkpointing": [
        *SFT,
        *("data.path=long.jsonl", "recipe.batch_size=1", "backend.activation_checkpointing=true"),
    ],
    "SFT, autocast": [*SFT, "backend.autocast=bfloat16"],
    "SFT, LoRA": [*SFT, "model.lora_rank=16"],
    "SFT, two ranks": [*SFT, "backend.ranks=2"],
    "DPO": ["recipe=dpo", *PAIRS],
    "ORPO": ["recipe=orpo", *PAIRS],
    "GRPO": GRPO,
    "GRPO, LoRA, 200 held-out rows": [*GRPO, "model.lora_rank=16", "eval.limit=200"],
}


def compare(model: Path, only: str, say: Any = print) -> list[dict[str, Any]]:
    """Return a row for each case whose name contains ``only``."""
    rows = []
    say(f"{'':44s}{'plan, GB':>10s}{'measured':>10s}{'off by':>8s}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        for case, words in CASES.items():
            if only not in case:
                continue
            words = [f"model={model.resolve()}", *COMMON, *words]
            planned, measured = planned_bytes(words, folder), peak_bytes([*words, f"out=run-{len(rows)}"], folder)
            rows.append(
                {"case": case, "estimated bytes": planned, "measured bytes": measured, "memory off by": planned / measured - 1}
            )
            say(f"{case:44s}{planned / 1e9:10.2f}{measured / 1e9:10.2f}{planned / measured - 1:8.0%}", flush=True)
    return rows


def planned_bytes(words: list[str], folder: Path) -> float:
    done = subprocess.run([*TRAIN, "plan", *words], check=True, capture_output=True, text=True, cwd=folder)
    together = re.search(r"([\d.]+) GB in all processes together", done.stdout)
    if together is not None:
        return float(together[1]) * 1e9
    peak, python = re.search(r"^memory +([\d.]+) GB at the peak, plus ([\d.]+) GB", done.stdout, re.MULTILINE).groups()
    return (float(peak) + float(python)) * 1e9


def peak_bytes(words: list[str], folder: Path) -> int:
    """Train, and return the largest sum over the processes of their memory, read twice a second."""
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([*TRAIN, "train", *words], stdout=log, stderr=log, cwd=folder)
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(_shared_once(one) for one in _tree(process.pid)))
            time.sleep(0.5)
    if process.returncode:
        raise SystemExit((folder / "log.txt").read_text())
    return peak


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _shared_once(pid: int) -> int:
    """Return the resident bytes of a process, with a page that n processes share counted as 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def write_data(folder: Path) -> None:
    """Write rows about sums, with answers of about 150 words, one of 4,200 words, and a reward."""
    draw = random.Random(0)
    words = ["the", "sum", "of", "two", "numbers", "adding", "tens", "and", "then", "ones", "carrying", "where", "needed"]

    def question() -> str:
        return f"What is {draw.randint(10, 99)} + {draw.randint(10, 99)}? Reply with the number only."

    def answer(length: int) -> str:
        return " ".join(draw.choice(words) for _ in range(length))

    def chat(length: int) -> dict[str, Any]:
        turns = [("user", question()), ("assistant", answer(length))]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    files = {
        "chat": [chat(150) for _ in range(60)],
        "long": [chat(4200)] * 2,
        "pairs": [{"prompt": question(), "chosen": answer(100), "rejected": answer(100)} for _ in range(20)],
        "prompts": [{"prompt": question(), "answer": "1"} for _ in range(200)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spread.py").write_text("def spread(completion, row):\n    return float(sum(map(ord, completion)) % 97)\n")
