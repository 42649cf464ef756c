"""Many adapters on one base model: ``python benchmarks/adapters.py [--tokens 32] [--adapters 1 4 16 64]``.

For each number N: a training step of one adapter with N datums, of N adapters with a datum each in passes of their own, and of
N adapters that share passes (``server.share_passes=true``). A step is a forward-backward pass and an optimizer step. The calls
are those of a server's trainers, without HTTP, and wait at the same time. CPU milliseconds of the process on one thread,
medians. The three candidates run in turn, round after round; the ratios to the first one are what to quote.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.local.shared_calls import PassSharing
from cookbook.backends.worker import Account
from cookbook.engine.model import ModelConfig
from cookbook.server.state.host import Host
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights
from cookbook.utils.paths import packaged

ADAM = AdamParams(learning_rate=1e-4)
RANKS = (8, 16, 32, 4)
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(packaged("data") / "tiny"))
    parser.add_argument("--tokens", type=int, default=32, help="tokens per datum")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    host = Host(ModelConfig(arguments.model), LocalConfig(), seed=0)
    data = rows(max(arguments.adapters), arguments.tokens)
    print("| adapters | one adapter, as many datums | passes of their own | ratio | shared passes | ratio |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        made = {shares: trainers(host, Path(folder), len(data), shares=shares) for shares in (False, True)}
        for count in arguments.adapters:
            one, *others = measured(host, made, data[:count], arguments.rounds)
            cells = [f"{1000 * one:.0f} ms", *(f"{1000 * other:.0f} ms | {other / one:.2f}" for other in others)]
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
    host.close()


def trainers(host: Host, folder: Path, count: int, *, shares: bool) -> list[LocalTrainer]:
    """Trainers of adapters of several ranks, each with an account of its own."""
    return [
        host.new_trainer(
            folder / str(number),
            rank=RANKS[number % len(RANKS)],
            seed=number,
            lane=host.worker.lane(Account(), pauses=True),
            sharing=PassSharing(shares),
        )
        for number in range(count)
    ]


def measured(host: Host, made: dict[bool, list[LocalTrainer]], data: list[Datum], rounds: int) -> list[float]:
    """Median CPU seconds of a step: of one adapter, of separate passes, and of shared passes."""
    single = [[datum] for datum in data]
    candidates = [
        lambda: step(host, made[False][:1], [data]),
        lambda: step(host, made[False], single),
        lambda: step(host, made[True], single),
    ]
    taken: list[list[float]] = [[] for _ in candidates]
    for number in range(WARM_UP + rounds):
        for times, candidate in zip(taken, candidates, strict=True):
            began = time.process_time()
            candidate()
            if number >= WARM_UP:
                times.append(time.process_time() - began)
    return [statistics.median(times) for times in taken]


def step(host: Host, of: list[LocalTrainer], batches: list[list[Datum]]) -> None:
    """A step of each trainer. No call begins before all have been made."""
    go = held(host)
    futures = []
    for trainer, batch in zip(of, batches, strict=False):
        futures += [trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(ADAM)]
    go()
    for future in futures:
        future.result()


def held(host: Host) -> Callable[[], None]:
    """Let the worker wait until the returned function is called."""
    go = threading.Event()
    host.worker.submit(go.wait)
    return go.set


def rows(count: int, tokens: int) -> list[Datum]:
    draw = np.random.default_rng(0)
    return [datum_from_tokens_weights(draw.integers(0, 256, tokens + 1), np.ones(tokens + 1)) for _ in range(count)]


if __name__ == "__main__":
    main()
