"""Cost of the server: ``python benchmarks/server.py [--only requests] [--json FILE]``.

The unmodified client and ``cookbook serve`` in a process of its own, beside the embedded trainer. A step is a forward-backward
pass of 16 x 256 tokens and an optimizer step; its cost the CPU seconds of client and server together. Candidates run in turn,
round after round. Ratios are what to quote: the machine is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import step
import tinker
import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.model import ModelConfig
from cookbook.server.config import DURABILITY_LEVELS, ServerConfig

ADAM = tinker.AdamParams(learning_rate=1e-5)
DEFAULT = ServerConfig.durability
REQUESTS = 50
TICKS_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["requests"], help="the fixed cost of a small request alone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        step.model(Path(folder) / "model", 256, 4)
        rows = requests(Path(folder))
        if arguments.only is None:
            rows += steps_and_samples(Path(folder))
    step.show([row for row in rows if "cpu_s" in row])
    for row in rows:
        if "wall_s" in row:
            print(f"\n{row['comparison']}: {1000 * row['wall_s']:.1f} ms")
        if "server_cpu_s" in row:
            lowest, tenth, cpu = (1000 * row[key] for key in ("lowest_s", "lowest_tenth_s", "server_cpu_s"))
            print(f"lowest {lowest:.1f}, lowest tenth {tenth:.1f}; CPU of the server {cpu:.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def steps_and_samples(folder: Path) -> list[dict[str, Any]]:
    with serving(folder, DEFAULT) as (url, cpu_s), tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
        return [*steps(folder, service, cpu_s), samples(f"{folder}/model", service)]


@contextlib.contextmanager
def serving(folder: Path, durability: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """The server's address, and a function that tells the CPU seconds it has used."""
    overrides = [f"model.name={folder}/model", "backend.token_metrics=false", "server.port=0", f"out={folder}/{durability}"]
    overrides.append(f"server.durability={durability}")
    with subprocess.Popen([sys.executable, "-m", "cookbook", "serve", *overrides], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = re.search(r"http://\S+?:\d+", server.stdout.readline())
        assert url is not None, "the server did not start"

        def cpu_s() -> float:
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / TICKS_S

        try:
            yield url[0], cpu_s
        finally:
            server.terminate()


def steps(folder: Path, service: tinker.ServiceClient, server_cpu_s: Callable[[], float]) -> list[dict[str, Any]]:
    """Embedded and served, by name and with a loss of the client's own."""
    config = LocalConfig(token_metrics=False)
    embedded: Any = LocalTrainer(ModelConfig(f"{folder}/model"), config)
    served = service.create_lora_training_client(f"{folder}/model:full", rank=0).result()
    data = batch(16, 256)
    losses: dict[str, Callable[[Any], Any]] = {
        "built-in": lambda client: client.forward_backward(data, "cross_entropy"),
        "custom": lambda client: client.forward_backward_custom(data, nll),
    }

    def candidate(client: Any, loss: Callable[[Any], Any]) -> Callable[[], None]:
        def run() -> None:
            loss(client).result()
            client.optim_step(ADAM).result()

        return run

    candidates = {
        f"{where}, {name}": candidate(client, loss)
        for where, client in (("embedded", embedded), ("served", served))
        for name, loss in losses.items()
    }
    found = measured(candidates, lambda: time.process_time() + server_cpu_s())
    embedded.close()
    title = "step of 16 x 256 tokens, H=256 L=4, CPU seconds of client and server"
    return [
        {
            "comparison": title,
            "candidate": name,
            "cpu_s": statistics.median(times),
            "ratio": statistics.median(times) / statistics.median(found["embedded, built-in"]),
        }
        for name, times in found.items()
    ]


def requests(folder: Path) -> list[dict[str, Any]]:
    """The fixed cost of a small request at every level of durability, in turn: wall time, and CPU seconds of the server."""
    small, asks, spent = batch(1, 8), {}, {}
    with contextlib.ExitStack() as stack:
        for level in DURABILITY_LEVELS:
            url, spent[level] = stack.enter_context(serving(folder, level))
            service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key="tml-bench"))
            client = service.create_lora_training_client(f"{folder}/model", rank=1).result()
            asks[level] = functools.partial(lambda one: one.forward(small, "cross_entropy").result(), client)
        measured(asks, time.perf_counter)  # a first round of all, to warm up
        before = {level: cpu_s() for level, cpu_s in spent.items()}
        found = measured(asks, time.perf_counter, rounds=REQUESTS)
        used = {level: (cpu_s() - before[level]) / (REQUESTS + 2) for level, cpu_s in spent.items()}
    title = "a forward of 8 tokens, wall, server.durability="
    return [
        {
            "comparison": f"{title}{level}",
            "wall_s": statistics.median(taken),
            "lowest_s": min(taken),
            "lowest_tenth_s": statistics.quantiles(taken, n=10)[0],
            "server_cpu_s": used[level],
        }
        for level, taken in found.items()
    ]


def samples(model: str, service: tinker.ServiceClient) -> dict[str, Any]:
    """Many samples at the same time."""
    client = service.create_lora_training_client(model, rank=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = batch(1, 8)[0].model_input, tinker.SamplingParams(max_tokens=8, stop=[])

    def many() -> None:
        for answer in [sampler.sample(prompt, 1, params) for _ in range(500)]:
            answer.result()

    taken = measured({"": many}, time.perf_counter)[""]
    return {"comparison": "500 concurrent samples of 8 tokens, wall", "wall_s": statistics.median(taken)}


def measured(
    candidates: dict[str, Callable[[], object]], clock: Callable[[], float], rounds: int = step.ROUNDS
) -> dict[str, list[float]]:
    """Seconds of every round of each. The first two rounds are not counted: they warm up, and the server learns from them."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 2):
        for name, run in candidates.items():
            start = clock()
            run()
            if round_number >= 2:
                taken[name].append(clock() - start)
    return taken


def nll(data: Any, logprobs: Any) -> Any:
    """Cross-entropy, as a function of the client's."""
    return -sum(one.sum() for one in logprobs), {}


def batch(count: int, length: int) -> list[tinker.Datum]:
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 256, length + 1).tolist() for _ in range(count)]
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * length},
        )
        for row in rows
    ]


if __name__ == "__main__":
    main()
