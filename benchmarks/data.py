"""Cost of the data of a run: CPU time and memory of the first start, the second start, a stream, and a start with few rows.

    python benchmarks/data.py                       # 100,000 rows
    python benchmarks/data.py --before CHECKOUT     # also of another version of cookbook, interleaved
    python benchmarks/data.py --rows 1000000 --steps 0

Each start is ``cookbook train recipe=sft`` on the shipped model in a process of its own, from its begin to its end: imports,
weights, data, evaluation, checkpoint. CPU time is that of the process and its children, user and system; memory is the largest
resident set, which includes mapped pages of the cache. The row counts are of short conversations, 71 tokens each. The first
start of each version is not counted: Python compiles the source of cookbook then, as an installer does for a user.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TOKENS_PER_ROW = 71
FEW = 100
STREAMED = "streamed"
HEAD = f"{'version':10} {'start':22} {'CPU s':>8} {'of it system':>12} {'wall s':>8} {'peak MB':>8} {'bytes per token':>16}"


def write_rows(path: Path, count: int) -> Path:
    """Write conversations with one question and one answer, from a fixed seed."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            a, b = draw.randrange(50), draw.randrange(50)
            question = {"role": "user", "content": f"What is {a} plus {b}? (question {number})"}
            answer = {"role": "assistant", "content": f"{a} plus {b} is {a + b}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def start(code: Path, data: Path, folder: Path, steps: int, *more: str) -> tuple[float, float, float, float]:
    """Run one start. Return seconds of CPU time, of it in the system, of wall time, and the peak memory in bytes."""
    out = Path(tempfile.mkdtemp(dir=folder))
    words = ["train", "recipe=sft", "data=jsonl", f"data.path={data}", f"recipe.steps={steps}", f"out={out / 'run'}", *more]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "PYTHONPATH": str(code), "COOKBOOK_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    # Bytecode goes to a folder that is removed with the others.
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    began = time.monotonic()
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cookbook", *words], env=environment, cwd=code, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit((out / "log").read_text())
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return usage.ru_utime + usage.ru_stime, usage.ru_stime, time.monotonic() - began, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of 32 rows; 0: an epoch")
    parser.add_argument("--before", type=Path, help="checkout of a version to compare with")
    args = parser.parse_args()
    versions = {**({"before": args.before.resolve()} if args.before else {}), "now": HERE}
    steps = args.steps or -(-args.rows // 32)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, few = write_rows(folder / "rows.jsonl", args.rows), write_rows(folder / "few.jsonl", FEW)
        bare: dict[str, float] = {}
        for code in versions.values():
            start(code, few, folder, 1)
        kinds = {f"{FEW} rows": few, f"first, {args.rows:,} rows": rows, f"second, {args.rows:,}": rows, STREAMED: rows}
        for kind, data in kinds.items():
            more = ["data.streaming=true"] if kind == STREAMED else []
            for version, code in versions.items():
                if more and code != HERE:
                    continue
                cpu, system, wall, peak = start(code, data, folder, 1 if data is few else steps, *more)
                bare.setdefault(version, peak)
                share = f"{(peak - bare[version]) / (args.rows * TOKENS_PER_ROW):16.1f}" if data is rows else ""
                print(f"{version:10} {kind:22} {cpu:8.1f} {system:12.1f} {wall:8.0f} {peak / 1e6:8.0f} {share}", flush=True)


if __name__ == "__main__":
    main()
