"""One client's large request beside another client's small ones: ``python benchmarks/fair.py``.

The unmodified client and ``cookbook serve`` in a process of its own, on the shipped tiny model. The large request draws 4,096
samples of up to 4,000 tokens. With ``--large training`` it is a forward-backward pass of 4,000 x 256 tokens. With ``prompts``
or ``logprobs`` it is 400 requests with prompts of 4,000 tokens, for 16 tokens or for the logprobs of the prompt. The small ones
are a training step (forward-backward pass of 8 x 64 tokens, optimizer step) and a sample of 12 tokens, by a client of its own.
Prints medians and the largest value, alone and beside the large request, and how long the server computes on after the large
request is cancelled, or its session ends.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import tinker
from server import ADAM, batch, serving

from cookbook.utils.paths import packaged

LARGE = {"max_tokens": 4000, "stop": [], "seed": 1}
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--large", choices=tuple(START), default="sampling")
    arguments = parser.parse_args()
    calls, start = arguments.calls, START[arguments.large]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").symlink_to(packaged("data") / "tiny")
        with serving(Path(folder), "synced") as (url, cpu_s), tinker.ServiceClient(base_url=url, api_key="tml-b") as service:
            jobs = small_jobs(service, f"{folder}/model")
            alone = {name: times(job, calls) for name, job in jobs.items()}
            stop = start(url, f"{folder}/model")
            time.sleep(2)
            beside = {name: times(job, calls) for name, job in jobs.items()}
            stop()
            busy_s = busy(cpu_s)
    print("| request | alone, median | largest | beside, median | largest | ratio of medians |\n|---|---|---|---|---|---|")
    for name, first in alone.items():
        row = [f"{1000 * value:.0f} ms" for value in (middle(first), max(first), middle(beside[name]), max(beside[name]))]
        print(f"| {name} | {' | '.join(row)} | {middle(beside[name]) / middle(first):.2f} |")
    print(f"\nseconds of computation after the cancellation: {busy_s:.1f}")


def small_jobs(service: tinker.ServiceClient, model: str) -> dict[str, Callable[[], Any]]:
    training = service.create_lora_training_client(model, rank=8).result()
    sampler = service.create_sampling_client(base_model=model).result()
    data, params = batch(8, 64), tinker.SamplingParams(max_tokens=12, seed=1, stop=[])

    def step() -> None:
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(ADAM).result()

    return {"training step": step, "sample of 12 tokens": lambda: sampler.sample(PROMPT, 1, params).result()}


def start_training(url: str, model: str) -> Callable[[], Any]:
    """Send the large training request in a session of its own. Returns a function that ends the session."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-a")
    training = service.create_lora_training_client(model, rank=8).result()
    training.forward_backward(batch(4000, 256), "cross_entropy")
    # The request is uploaded in parts.
    time.sleep(8)
    session_id = training.model_id.partition(":")[0]
    return lambda: httpx.post(f"{url}/api/v1/sessions/{session_id}/finish").raise_for_status()


def start_sampling(url: str, model: str) -> Callable[[], Any]:
    """Send the large request in a session of its own. Returns a function that cancels it."""
    return start_samples(url, model, 1, {"num_samples": 4096, "sampling_params": LARGE}, lambda number: PROMPT.to_ints())


def start_prompts(url: str, model: str) -> Callable[[], Any]:
    """Send requests to complete long prompts in a session of their own. Returns a function that cancels them."""
    return start_samples(url, model, 400, {"sampling_params": {**LARGE, "max_tokens": 16}}, long_prompt)


def start_logprobs(url: str, model: str) -> Callable[[], Any]:
    """Send requests for the logprobs of long prompts in a session of their own. Returns a function that cancels them."""
    scored = {"sampling_params": {**LARGE, "max_tokens": 1}, "prompt_logprobs": True}
    return start_samples(url, model, 400, scored, long_prompt)


def start_samples(
    url: str, model: str, count: int, body: dict[str, Any], prompt: Callable[[int], list[int]]
) -> Callable[[], Any]:
    """Send ``count`` requests in a session of their own. Returns a function that cancels them."""
    http = httpx.Client(base_url=f"{url}/api/v1/", timeout=60)
    session = http.post("create_session", json={}).json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
    sampler = http.post("create_sampling_session", json=asked).json()["sampling_session_id"]
    sent = []
    for number in range(count):
        one = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": prompt(number)}]}}
        sent.append(http.post("asample", json={**one, **body}).raise_for_status().json()["request_id"])

    def cancel() -> None:
        for request_id in sent:
            http.post("cancel_future", json={"request_id": request_id}).raise_for_status()

    return cancel


def long_prompt(number: int) -> list[int]:
    return [(number + token) % 90 + 5 for token in range(4000)]


START = {"sampling": start_sampling, "training": start_training, "prompts": start_prompts, "logprobs": start_logprobs}


def times(job: Callable[[], Any], count: int) -> list[float]:
    job()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        job()
        found.append(time.perf_counter() - began)
    return found


def middle(values: list[float]) -> float:
    return statistics.median(values)


def busy(cpu_s: Callable[[], float]) -> float:
    """Seconds until the server uses less than a tenth of a core."""
    began, before = time.perf_counter(), cpu_s()
    while True:
        time.sleep(0.5)
        now = cpu_s()
        if now - before < 0.05:
            return time.perf_counter() - began - 0.5
        before = now


if __name__ == "__main__":
    main()
