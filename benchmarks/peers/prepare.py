"""Makes what both sides read: untrained Qwen3 models and the rows of every workload.

    python benchmarks/peers/prepare.py FOLDER [--gsm8k FOLDER]

Rows are GSM8K's where its files are at hand, else random letters of GSM8K's lengths. The workloads of the real model need
`make real-model`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from workloads import COMPLETION_TOKENS, CONTEXT, MID, REAL, SMALL, WIDE, WORKLOADS, Folder, Model, Workload

from cookbook.utils.paths import packaged

LONGEST = 1024  # tokens of a row before rows are joined: TRL's default max_length
TEMPLATE_TOKENS = 64  # more than the chat template adds to a question and an answer
Pair = tuple[str, str]  # question and answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gsm8k", type=Path, default=Path("../shared/data/gsm8k"), help="a folder with a *.jsonl of it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Folder(arguments.folder)
    folder.root.mkdir(parents=True, exist_ok=True)
    for model in (SMALL, MID, WIDE):
        _make(model, folder.model(model))
    _link(REAL, folder.model(REAL))
    pairs, source = _pairs(arguments.gsm8k, max(map(_needed, WORKLOADS)))
    print(f"rows: {source}", flush=True)
    (folder.root / "source.txt").write_text(f"{source}\n", encoding="utf-8")
    for workload in WORKLOADS:
        _write_rows(folder, workload, pairs)


def _make(model: Model, folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=CONTEXT)
    config = Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=3 * model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads // 2,
        head_dim=model.hidden // model.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _link(model: Model, link: Path) -> None:
    """Let ``link`` name the real model, if `make real-model` has made it."""
    source = Path(__file__).parents[2] / str(model.source)
    link.unlink(missing_ok=True)
    if source.is_dir():
        link.symlink_to(source.resolve())


def _pairs(gsm8k: Path, count: int) -> tuple[list[Pair], str]:
    """Questions with answers that fit the context, and where they are from."""
    files = sorted(path for path in gsm8k.rglob("*.jsonl") if "train" in path.name)
    if files:
        rows = (json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines())
        pairs, source = [(row["question"], row["answer"]) for row in rows], str(files[0])
    else:
        pairs, source = _random_pairs(2 * count), "random letters, lognormal lengths like GSM8K's"
    fitting = [pair for pair in pairs if _length(pair) <= LONGEST - TEMPLATE_TOKENS - COMPLETION_TOKENS]
    if len(fitting) < count:
        raise SystemExit(f"prepare: {len(fitting)} rows fit {LONGEST} tokens, and {count} are needed")
    return fitting[:count], source


def _random_pairs(count: int) -> list[Pair]:
    """GSM8K's questions have 235 bytes on average, its answers 290."""
    draw = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", dtype=np.uint8)
    lengths = np.stack([draw.lognormal(5.37, 0.42, count), draw.lognormal(5.55, 0.5, count)], 1).astype(int)

    def text(length: int) -> str:
        return "x" + bytes(draw.choice(letters, max(length, 8)).tolist()).decode("ascii") + "x"  # templates strip blanks

    return [(text(question), text(answer)) for question, answer in lengths]


def _length(pair: Pair) -> int:
    return sum(len(text.encode()) for text in pair)


def _needed(workload: Workload) -> int:
    """Rows of GSM8K: a row of the workload joins some, and every pair needs a rejected answer."""
    joined = -(-workload.least_bytes // 200) + 1
    return 2 * workload.rows * workload.steps * joined


def _joined(pairs: Sequence[Pair], least_bytes: int) -> list[Pair]:
    """Questions and answers of several rows in one, until it has ``least_bytes``."""
    rows: list[Pair] = []
    part: list[Pair] = []
    for pair in pairs:
        part.append(pair)
        if sum(map(_length, part)) >= least_bytes:
            rows.append((" ".join(question for question, _ in part), " ".join(answer for _, answer in part)))
            part = []
    return rows


def _write_rows(folder: Folder, workload: Workload, pairs: Sequence[Pair]) -> None:
    pairs = _joined(pairs, workload.least_bytes)
    count = workload.rows * workload.steps  # the rows after that lend the rejected answers
    rows = [_row(workload, pair, other) for pair, other in zip(pairs[:count], pairs[count:], strict=False)]
    _write(folder.rows(workload), rows)
    sizes = [len(json.dumps(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (i // workload.rows, -sizes[i]))
    _write(folder.rows(workload, by_length=True), [rows[i] for i in order])


def _row(workload: Workload, pair: Pair, other: Pair) -> dict[str, Any]:
    question, answer = {"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}
    if workload.method == "sft" and workload.model.source:
        # TRL can mask the prompt of this form without a template of its own for the model.
        return {"prompt": [question], "completion": [answer]}
    if workload.method == "sft":
        return {"messages": [question, answer]}
    if workload.method == "grpo":
        return {"prompt": [question]}
    return {"prompt": pair[0], "chosen": pair[1], "rejected": other[1]}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
