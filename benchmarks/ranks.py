"""Time of a step on two ranks: ``python benchmarks/ranks.py [--rounds N] [--small] [--gpus]``, or ``make bench-ranks``.

One process, two replicas and two sharded ranks (FSDP2) train one model on the same rows, with one thread for each process. The
groups start once, then train in turn, round after round, while the others wait without computing. A step is timed between two
barriers, after a first step that is not counted. The table has medians over the rounds, with the lowest and the highest, and
how many times as fast as one process a step is. The figures are of use only if nothing else runs on the two cores.

``--gpus``: on every GPU of this machine instead, a larger model in bfloat16. This was not run on GPUs yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig
from cookbook.engine.ranks.loading import load_on
from cookbook.engine.ranks.processes import join
from cookbook.losses import get_loss
from cookbook.server.rank import choose_gpu, exit_now
from cookbook.types import AdamParams, datum_from_tokens_weights
from cookbook.utils.paths import packaged

ONE = "one process"
# Of a round.
STEPS = 2
# Hidden size, layers, rows of a step.
MEDIUM, SMALL, LARGE = (512, 6, 8), (64, 2, 8), (2048, 16, 128)


def make_model(folder: Path, hidden: int, layers: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=4096)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- in a rank -------------------------------------------------------------------------------------------------------


def rank_main(folder: Path, shard: str, num_rows: int, device: torch.device) -> None:
    """Train a round for every line of the standard input, and print the seconds of each step of this rank."""
    torch.set_num_threads(1)
    is_cuda = device.type == "cuda"
    if is_cuda:
        choose_gpu()
    ranks = join(shard, device)
    model = ModelConfig(str(folder), dtype="bfloat16" if is_cuda else "float32")
    engine = Engine(load_on(ranks, model, ranks.device or device, 0), EngineOptions(micro_batch_tokens=4096))
    draw = np.random.default_rng(0)
    lengths = draw.integers(250, 1000, num_rows)
    rows = [datum_from_tokens_weights(draw.integers(0, 256, length), np.ones(length)) for length in lengths]
    loss = get_loss("cross_entropy")
    data = loss.prepare(rows)

    def step() -> tuple[float, float]:
        ranks.gathered(None)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.forward_backward(data, loss)
        engine.optim_step(AdamParams(learning_rate=1e-4), None)
        if is_cuda:
            torch.cuda.synchronize()
        cpu = time.process_time() - cpu
        ranks.gathered(None)
        return time.perf_counter() - wall, cpu

    step()
    report({"tokens": int(lengths.sum()) - num_rows})
    for _ in sys.stdin:
        report([step() for _ in range(STEPS)])
    exit_now(0)


def report(result: object) -> None:
    """Print a result as one line, for the process of the command."""
    print(json.dumps(result), flush=True)


# ---- in the process of the command -----------------------------------------------------------------------------------


class Group:
    """The processes of one group. A context manager, which ends them."""

    def __init__(self, folder: Path, size: int, shard: str, num_rows: int, device: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", str(folder), shard, str(num_rows), device]
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Group:
        self.tokens: int = self._reports()[0]["tokens"]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def measured(self) -> dict[str, float]:
        """Train one round. Return the median wall time of a step, and its CPU seconds summed over the ranks."""
        for process in self._processes:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        found = self._reports()
        wall = statistics.median(wall for wall, _ in found[0])
        return {"wall_s": wall, "cpu_s": sum(statistics.median(cpu for _, cpu in steps) for steps in found)}

    def _reports(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(lines):
            sys.exit("a rank failed; its error is above")
        return [json.loads(line) for line in lines]


def processor() -> str:
    """Name of the CPU, and its flags for products in bfloat16."""
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        return "an unknown CPU"
    lines = facts.read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown CPU")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return f"{name} ({', '.join(flag for flag in flags if 'bf16' in flag or 'amx' in flag) or 'no bfloat16 products'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small model, to try the benchmark; its figures mean nothing")
    parser.add_argument("--gpus", action="store_true", help="every GPU of this machine instead of two CPU cores")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    size, device = (torch.cuda.device_count(), "cuda") if args.gpus else (2, "cpu")
    if size < 2:
        print(f"several ranks: not measured, because this machine has {size} GPUs")
        return
    hidden, layers, num_rows = SMALL if args.small else LARGE if args.gpus else MEDIUM
    shapes = {ONE: (1, "none"), f"{size} replicas": (size, "none"), f"{size} sharded ranks (FSDP2)": (size, "all")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in shapes}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_model(Path(folder), hidden, layers)
        groups = {
            name: stack.enter_context(Group(Path(folder), count, shard, num_rows, device))
            for name, (count, shard) in shapes.items()
        }
        tokens = groups[ONE].tokens
        for _ in range(args.rounds):
            for name, group in groups.items():
                found[name].append(group.measured())
    rows: list[dict[str, Any]] = []
    one = statistics.median(row["wall_s"] for row in found[ONE])
    print(f"\na step of {num_rows} rows, {tokens:,.0f} tokens, H={hidden}, {layers} layers; {processor()}")
    print(f"  {'group':<26}{'wall s':>8}{'lowest':>8}{'highest':>9}{'CPU s':>8}{'times as fast':>15}")
    for name, results in found.items():
        walls, cpu = [row["wall_s"] for row in results], statistics.median(row["cpu_s"] for row in results)
        wall = statistics.median(walls)
        rows.append({"group": name, "wall_s": wall, "cpu_s": cpu, "speedup": one / wall})
        print(f"  {name:<26}{wall:>8.3f}{min(walls):>8.3f}{max(walls):>9.3f}{cpu:>8.3f}{one / wall:>15.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), torch.device(sys.argv[5]))
    else:
        main()
