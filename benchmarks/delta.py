"""Cost of a delta: ``python benchmarks/delta.py``.

First its size after real updates: GRPO on the model and the sums that ship. Then its speed on weights as those of a pretrained
model, of which 2% change to an adjacent value. CPU seconds are the sum over all threads; the GB are those of the base.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import delta
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.data import DataConfig, RenderedPrompt, Renderer, load_rows, prompts
from cookbook.engine.model import ModelConfig
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import group_advantages
from cookbook.sampling.rewards import Number, RewardRunner
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import AdamParams, Datum
from cookbook.utils.paths import packaged

R = TypeVar("R")
STEPS, PROMPTS, GROUP = 5, 16, 8
SHARE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.5, help="size of the weights for the second table, GB")
    size = int(parser.parse_args().gb * 1e9)
    print(f"GRPO, {STEPS} steps\n  {'dtype':10s} {'lr':>6s} {'changed':>9s} {'delta / base':>13s}")
    for dtype in ("bfloat16", "float32"):
        for lr in (1e-6, 1e-5, 1e-4, 1e-3):
            changed, ratio = updates(dtype, lr)
            print(f"  {dtype:10s} {lr:6.0e} {changed:9.2%} {ratio:13.2%}")
    print(f"\n{size / 1e9:.2f} GB in bfloat16, {SHARE:.0%} changed")
    print(f"  {'':32s} {'wall s':>7s} {'CPU s':>7s} {'GB/s':>6s} {'a core':>7s}")
    speed(size)


def updates(dtype: str, lr: float) -> tuple[float, float]:
    """The share of elements a step changes, and the size of its delta over the base's: means over the steps after the first."""
    model = ModelConfig(str(packaged("data") / "tiny"), dtype=dtype)
    with contextlib.closing(LocalTrainer(model, LocalConfig(token_metrics=False))) as trainer:
        data = DataConfig(path=str(packaged("data") / "arithmetic" / "prompts_train.jsonl"), chat=True)
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        rows = prompts(load_rows(data), renderer, data, 16)
        before, found = held(trainer), []
        for step in range(STEPS):
            trainer.forward_backward(
                sampled(trainer, renderer, rows[step * PROMPTS :][:PROMPTS], step), "grpo", {"kl_beta": 0.0}
            )
            trainer.optim_step(AdamParams(learning_rate=lr), "num_loss_tokens").result()
            after = held(trainer)
            made = delta.between(before, after)
            elements = sum(tensor.numel() for tensor in after.tensors.values())
            changed = sum(entry.changed for entry in made.entries)
            found.append((changed / elements, len(delta.to_bytes(made)) / num_bytes(after)))
            before = after
        shares, ratios = zip(*found[1:], strict=True)
        return sum(shares) / len(shares), sum(ratios) / len(ratios)


def num_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.tensors.values())


def sampled(trainer: LocalTrainer, renderer: Renderer, rows: list[RenderedPrompt], step: int) -> list[Datum]:
    sampler = trainer.live_sampler(step).result()
    groups = rollouts.sample_groups(sampler, rows, GROUP, RolloutConfig(), renderer, step, runner=RewardRunner(Number())).groups
    return rollouts.datums(groups, group_advantages([group.rewards for group in groups], "zscore").tolist())


def held(trainer: LocalTrainer) -> Weights:
    return Weights.of({name: p.detach().clone() for name, p in trainer.engine.model.network.named_parameters()})


def speed(size: int) -> None:
    torch.manual_seed(0)
    old = {name: torch.randn(rows, 1024, dtype=torch.bfloat16).mul_(0.02) for name, rows in layers(size // 2048)}
    new = {name: moved(tensor) for name, tensor in old.items()}
    before = Weights.of(old)
    after = timed("digest", size, lambda: Weights.of(new))
    made = timed("compare and compress", size, lambda: delta.between(before, after))
    content = delta.to_bytes(made)
    received = delta.from_bytes(content)
    timed("apply, every tensor verified", size, lambda: delta.apply(received, before))
    with tempfile.TemporaryDirectory() as folder:
        timed("for comparison: write a base", size, lambda: save_file(new, Path(folder) / "model.safetensors"))
    print(f"  {'delta / base':32s} {len(content) / num_bytes(after):7.2%}")


def layers(rows: int) -> Iterator[tuple[str, int]]:
    """Names and rows of a fifth for the embedding, the rest in matrices of 3,072 rows."""
    yield "embedding", rows // 5
    for start in range(rows // 5, rows, 3072):
        yield f"layer.{start}", min(3072, rows - start)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with a share of its elements moved to the next number up or down."""
    steps = (torch.rand(tensor.shape) < SHARE).to(torch.int16) * (2 * torch.randint(0, 2, tensor.shape, dtype=torch.int16) - 1)
    return (tensor.view(torch.int16) + steps).view(torch.bfloat16)


def timed(what: str, size: int, work: Callable[[], R]) -> R:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  {what:32s} {wall:7.2f} {cpu:7.2f} {size / 1e9 / wall:6.2f} {size / 1e9 / cpu:7.2f}")
    return result


if __name__ == "__main__":
    main()
