"""Supervised fine-tuning on a GPU: ``python benchmarks/gpu.py [--json FILE] [--profile] [--small]``.

A model of Qwen3-0.6B's shape and one with layers of Qwen3-8B's, random weights, bfloat16 with float32 masters. A step is
forward, backward and AdamW over packed sequences of lognormal lengths, every token trained. The table gives tokens per second,
and the share of the GPU's dense bfloat16 arithmetic that the model itself needs (MFU: 6 FLOPs a token and parameter that is
multiplied with, and the causal half of attention; the embedding is looked up).
``--small`` runs on any machine, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from cookbook.data.byte_tokenizer import byte_tokenizer
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig
from cookbook.losses import get_loss
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16, by the vendor's datasheets
ADAM = AdamParams(learning_rate=1e-5)
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A Qwen3 and what it is trained on: ``rows`` sequences of about ``length`` tokens a step."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool
    rows: int
    length: int
    micro_batch_tokens: int

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=self.tied,
        )

    def data(self) -> list[Datum]:
        draw = np.random.default_rng(0)
        lengths = np.clip(draw.lognormal(np.log(self.length), 0.6, self.rows), 32, 4095).astype(int)
        return [datum_from_tokens_weights(draw.integers(0, self.vocabulary, n + 1), np.ones(n + 1)) for n in lengths]


SHAPES = [
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 151_936, True, 128, 512, 16_384),
    Shape("Qwen3-8B, 4 of its layers", 4096, 12_288, 4, 32, 8, 151_936, False, 64, 512, 16_384),
]
SMALL = [Shape("small", 64, 128, 2, 2, 1, 1000, True, 8, 64, 512)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--small", action="store_true", help="a tiny model, on any device: does it run?")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that took longest")
    parser.add_argument("--only", help="shapes whose name contains this")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for shape in SMALL if arguments.small else SHAPES:
        if arguments.only and arguments.only not in shape.name:
            continue
        rows += measured(shape, device, profile=arguments.profile)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measured(shape: Shape, device: torch.device, *, profile: bool) -> list[Row]:
    data = shape.data()
    tokens = sum(datum.model_input.length for datum in data)
    flops = model_flops(shape, data)
    size = f"{len(data)} sequences, {tokens:,} tokens a step, {flops / tokens / 1e9:.2f} GFLOP a token"
    print(f"\n{shape.name}: {size}", flush=True)
    rows = []
    for name, options in CANDIDATES.items():
        step = ours(shape, device, data, **options)
        rows.append(report(shape, f"cookbook{name}", step, device, tokens, flops))
        if profile:
            show_profile(step, device)
        del step
    return rows


CANDIDATES: dict[str, dict[str, Any]] = {"": {"token_metrics": False}, ", with entropy and accuracy": {}}


def ours(shape: Shape, device: torch.device, data: list[Datum], **options: Any) -> Callable[[], None]:
    engine = Engine(network(shape, device), EngineOptions(micro_batch_tokens=shape.micro_batch_tokens, **options))
    loss = get_loss("cross_entropy")
    prepared = loss.prepare(data)

    def step() -> None:
        engine.forward_backward(prepared, loss)
        engine.optim_step(ADAM, None)

    return step


def network(shape: Shape, device: torch.device) -> LanguageModel:
    torch.manual_seed(0)
    with device:
        made = Qwen3ForCausalLM(shape.config()).to(torch.bfloat16)
    return LanguageModel(made, byte_tokenizer(4096), ModelConfig("random", dtype="bfloat16"), device)


def model_flops(shape: Shape, data: list[Datum]) -> float:
    """Of a step, by shapes: nothing of what an implementation computes again or besides counts."""
    wide, narrow = shape.heads * 128, shape.key_heads * 128
    layer = shape.hidden * (2 * wide + 2 * narrow + 3 * shape.intermediate)
    multiplied = shape.layers * layer + shape.hidden * shape.vocabulary
    lengths = np.array([datum.model_input.length for datum in data], dtype=np.float64)
    attention = 12 * shape.layers * wide * float((lengths * (lengths + 1) / 2).sum())  # 2 products, 3 times, 2 FLOPs each
    return 6 * multiplied * float(lengths.sum()) + attention


def report(
    shape: Shape, name: str, step: Callable[[], None], device: torch.device, tokens: int, flops: float, rounds: int = 5
) -> Row:
    step()  # compiles, allocates
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds)[rounds // 2]
    row: Row = {"shape": shape.name, "candidate": name, "s": median, "tokens/s": tokens / median}
    if device.type == "cuda":
        known = next((peak for chip, peak in PEAK_FLOPS.items() if chip in torch.cuda.get_device_name()), None)
        row["MFU"] = flops / median / known if known else None
        row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    cells = "".join(f"  {key} {_shown(value)}" for key, value in row.items() if key not in ("shape", "candidate"))
    print(f"  {name:36s}{cells}", flush=True)
    return row


def _shown(value: Any) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"


def show_profile(step: Callable[[], None], device: torch.device) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=kinds) as found:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    kernels = sorted(found.key_averages(), key=lambda event: -getattr(event, order.replace("cuda", "device"), 0))[:45]
    for event in kernels:
        spent = getattr(event, order.replace("cuda", "device"), 0)
        print(f"    {spent / 1e3:10.2f} ms {event.count:7d}  {event.key[:100]}")


if __name__ == "__main__":
    main()
