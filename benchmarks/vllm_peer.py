"""vLLM as a candidate of ``sampling.py``: a server over HTTP, and in process. A run returns the CPU seconds it took there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cookbook.deployments.vllm import process
from cookbook.deployments.vllm.http import Client

HERE = Path(__file__).resolve().parent
STARTUP_S, TIMEOUT_S = 900.0, 1800.0
TICKS = os.sysconf("SC_CLK_TCK")
# The fastest options: all samples at the same time, and no seeds. Logprobs are on, because training needs them.
ROOM = ("--max-num-seqs", "512")

Peer = Callable[[], float]


@contextlib.contextmanager
def over_http(
    python: str, model: Path, folder: Path, prompts: Sequence[list[int]], samples: int, tokens: int
) -> Iterator[Peer]:
    """A server as ``deployment=vllm`` starts it, with all prompts sent together; the client is this process."""
    options = process.Options(python, str(model), "float32", 512, 2 << 30, 1, 0, ROOM)
    port, log = process.free_port(), folder / "server.log"
    pid = process.start(options, port, folder, log)
    client = Client(f"http://127.0.0.1:{port}", TIMEOUT_S, retries=0)
    params = {"n": samples, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}

    def ask(prompt: list[int]) -> int:
        answer: Any = client.call("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
        return sum(len(choice["token_ids"]) for choice in answer["choices"])

    def run() -> float:
        before = _cpu_seconds(pid)
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert sum(pool.map(ask, prompts)) == len(prompts) * samples * tokens
        return _cpu_seconds(pid) - before

    try:
        process.wait_until_healthy(client, log, STARTUP_S, print)
        yield run
    finally:
        process.stop(pid, process.birth(pid) or "")


@contextlib.contextmanager
def in_process(python: str, model: Path, prompts: Sequence[list[int]], samples: int, tokens: int) -> Iterator[Peer]:
    """vLLM's engine without a server, in one process."""
    given = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [python, str(HERE / "vllm_in_process.py")],
        env={**os.environ, **given},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def say(message: object) -> Any:
        print(json.dumps(message), file=asked, flush=True)
        return json.loads(answers.readline())

    try:
        assert say({"model": str(model), "prompts": list(prompts), "samples": samples, "tokens": tokens})["ready"]
        yield lambda: float(say("go")["cpu_s"])
    finally:
        asked.close()
        process.wait(60)


def _cpu_seconds(group: int) -> float:
    """CPU seconds of all processes of a group that still run."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
    return total / TICKS
