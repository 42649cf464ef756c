"""Training on a GPU: ``python benchmarks/gpu/run.py [--trl PYTHON] [--json FILE] [--profile] [--small]``.

A model of Qwen3-0.6B's shape and one with layers of Qwen3-8B's, random weights, bfloat16 with float32 masters. A step is
forward, backward and AdamW over sequences of lognormal lengths, every token trained; and over sequences of 16k tokens, SFT and
GRPO, in full and with LoRA. The table gives tokens per second, and
the share of the GPU's dense bfloat16 arithmetic that the model itself needs (MFU). ``--trl``: also TRL's step, by the
Python of its environment. ``--small`` runs on any machine, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import LR, PEAK_FLOPS, ROUNDS, SHAPES, SMALL, WARM_UP, Shape
from transformers import AutoTokenizer, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig, add_lora
from cookbook.losses import GRPO, get_loss
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights
from cookbook.utils.paths import packaged

ADAM = AdamParams(learning_rate=LR)
CUDA = torch.cuda.is_available()
CANDIDATES: dict[str, dict[str, Any]] = {"": {"token_metrics": False}, ", with entropy and accuracy": {}}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, help="the Python of TRL's environment: its step is measured too")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device: does it run?")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that took longest")
    parser.add_argument("--only", help="shapes whose name contains this")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    rows: list[Row] = []
    for shape in SMALL if arguments.small else SHAPES:
        if not arguments.only or arguments.only in shape.name:
            rows += measured(shape, arguments.trl, profile=arguments.profile)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measured(shape: Shape, trl: Path | None, *, profile: bool) -> list[Row]:
    tokens = sum(shape.inputs())
    size = f"{shape.rows} sequences, {tokens:,} tokens a step, {shape.flops() / tokens / 1e9:.2f} GFLOP a token"
    print(f"\n{shape.name}: {size}", flush=True)
    rows = []
    for name, options in CANDIDATES.items():
        step = ours(shape, **options)
        rows.append(report(shape, f"cookbook{name}", *timed(step)))
        if profile:
            show_profile(step)
        del step
        gc.collect()  # the model is in a cycle with its hooks
        torch.cuda.empty_cache()
    if trl and shape.loss == "cross_entropy" and not shape.lora_rank:
        beside = [
            report(shape, f"TRL, {n} rows a pass", *found) for n in rows_a_pass(shape) if (found := theirs(shape, n, trl))
        ]
        best = min((row["s"] for row in beside), default=float("nan"))
        print(f"  cookbook, with entropy and accuracy as TRL: {best / rows[-1]['s']:.2f} times as fast as its best", flush=True)
        rows += beside
    return rows


def rows_a_pass(shape: Shape) -> list[int]:
    """How TRL may cut a step; its fastest is what counts."""
    return sorted({max(1, shape.rows // passes) for passes in (4, 8, 16, 32)})


def ours(shape: Shape, **options: Any) -> Callable[[], None]:
    settings = EngineOptions(micro_batch_tokens=shape.micro_batch_tokens, activation_checkpointing=shape.recompute, **options)
    engine = Engine(network(shape), settings)
    loss = GRPO(kl_beta=0.0) if shape.loss == "grpo" else get_loss(shape.loss)
    prepared = loss.prepare([datum(tokens, 1 - 2 * (row % 2)) for row, tokens in enumerate(shape.sequences())])

    def step() -> None:
        engine.forward_backward(prepared, loss)
        engine.optim_step(ADAM, None)

    return step


def datum(tokens: Sequence[int], advantage: float) -> Datum:
    """Train every token. The advantage and the sampling log-probabilities are read by GRPO."""
    made = datum_from_tokens_weights(tokens, np.ones(len(tokens)))
    count = len(tokens) - 1
    sampled = {"advantages": np.full(count, advantage), "sampling_logprobs": np.full(count, -np.log(1000))}
    return Datum(made.model_input, {**made.loss_fn_inputs, **sampled})


def network(shape: Shape) -> LanguageModel:
    torch.manual_seed(0)
    device = torch.device("cuda" if CUDA else "cpu")
    with device:
        made = Qwen3ForCausalLM(shape.config()).to(torch.bfloat16)
    config = ModelConfig("random", dtype="bfloat16", lora_rank=shape.lora_rank)
    tokenizer = AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=shape.context)
    return LanguageModel(add_lora(made, config, seed=0) if shape.lora_rank else made, tokenizer, config, device)


def timed(step: Callable[[], None]) -> tuple[float, float | None]:
    """The median of its seconds, and its peak of the GPU's memory, GB."""
    for _ in range(WARM_UP):
        step()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 1e9 if CUDA else None


def theirs(shape: Shape, rows: int, trl: Path) -> tuple[float, float | None] | None:
    """The same of TRL, in a process of its own that sees nothing of cookbook; None where it failed, as for want of memory."""
    command = [str(trl.absolute()), str(Path(__file__).with_name("trl_side.py")), shape.name, str(rows)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CI": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    if done.returncode:
        print(f"  TRL, {rows} rows a pass: ended with {done.returncode}", flush=True)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return found["s"], found["peak GB"]


def report(shape: Shape, name: str, seconds: float, peak: float | None) -> Row:
    row: Row = {"shape": shape.name, "candidate": name, "s": seconds, "tokens/s": sum(shape.inputs()) / seconds}
    if CUDA:
        known = next((flops for chip, flops in PEAK_FLOPS.items() if chip in torch.cuda.get_device_name()), None)
        row |= {"MFU": shape.flops() / seconds / known if known else None, "peak GB": peak}
    cells = "".join(f"  {key} {_shown(value)}" for key, value in row.items() if key not in ("shape", "candidate"))
    print(f"  {name:36s}{cells}", flush=True)
    return row


def _shown(value: Any) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def show_profile(step: Callable[[], None]) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
    with torch.profiler.profile(activities=kinds) as found:
        step()
        if CUDA:
            torch.cuda.synchronize()
    order = "self_device_time_total" if CUDA else "self_cpu_time_total"
    for event in sorted(found.key_averages(), key=lambda event: -getattr(event, order))[:45]:
        print(f"    {getattr(event, order) / 1e3:10.2f} ms {event.count:7d}  {event.key[:100]}")


if __name__ == "__main__":
    main()
