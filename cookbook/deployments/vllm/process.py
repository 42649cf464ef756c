"""A vLLM server as a process of this machine: its command line, its start and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook import terminal
from cookbook.deployments.vllm import worker
from cookbook.deployments.vllm.http import Client, ServerUnavailableError
from cookbook.errors import ConfigError, RolloutError
from cookbook.utils import gpus, paths

MODEL = "policy"  # name of the model in the server's API
PROGRESS_S, POLL_S, END_S = 10.0, 0.5, 15.0
TAIL_BYTES, LINE = 1 << 16, 300
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


@dataclass(frozen=True)
class Options:
    """Options of a server. Two servers with equal options are interchangeable.

    ``max_length``: in tokens. ``kv_cache_bytes``: memory for keys and values; None: vLLM's own share of a GPU;
    ``kv_cache_is_fixed``: the user has chosen the number. ``lora_rank``: rank of the adapters, 0 for none; ``args``: more
    arguments of vLLM's command line; ``gpus``: numbers of the GPUs of each server, used in turn; empty: CPUs;
    ``shares_gpus``: another process computes on the same GPUs.
    """

    python: str
    model: str
    dtype: str
    max_length: int
    kv_cache_bytes: int | None
    threads: int
    lora_rank: int
    args: tuple[str, ...]
    gpus: tuple[tuple[int, ...], ...] = ()
    shares_gpus: bool = False
    kv_cache_is_fixed: bool = False

    def serve(self, request: Options) -> bool:
        """Whether a server with these options can be used in place of one with the options of ``request``.

        Its sequences may be longer, and memory for keys and values that was computed may differ.
        """
        is_fixed = self.kv_cache_is_fixed or request.kv_cache_is_fixed
        memory = self.kv_cache_bytes if is_fixed else request.kv_cache_bytes
        same = replace(self, max_length=request.max_length, kv_cache_bytes=memory)
        return self.max_length >= request.max_length and same == request

    def gpus_of(self, place: int) -> tuple[int, ...]:
        """Return the numbers of the GPUs of the server number ``place``; empty: vLLM chooses."""
        return self.gpus[place % len(self.gpus)] if self.gpus else ()


def command(options: Options, port: int, place: int = 0) -> list[str]:
    """Command line of the server number ``place``."""
    memory = [] if options.kv_cache_bytes is None else ["--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
    return [
        *(options.python, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", options.model, "--served-model-name", MODEL, "--dtype", options.dtype),
        # The control routes have no authentication.
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(options.max_length), *memory),
        *_engine(options),
        *("--enable-scale-out", "--generation-config", "vllm"),
        # Logprobs of the distribution that was sampled from.
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", worker.NAME),
        *_lora(options.lora_rank),
        *_on_gpus(options, place),
        *options.args,
    ]


def _engine(options: Options) -> list[str]:
    """Arguments of the engine: on a GPU CUDA graphs, chunked prefill and prefix caching."""
    if options.gpus:
        # CUDA graphs are vLLM's default.
        return ["--enable-chunked-prefill", "--enable-prefix-caching"]
    # With chunked prefill, requests with seeds end vLLM's CPU engine, even at a resume. Without it, a prompt must fit into one
    # batch. Compiling takes two minutes on a CPU, and gains nothing.
    batch = max(8192, options.max_length)
    return ["--enforce-eager", "--max-num-batched-tokens", str(batch), "--no-enable-chunked-prefill"]


def _lora(rank: int) -> list[str]:
    """Arguments for adapters. Two are active at a time: that of the samples in progress, and the newest."""
    if rank == 0:
        return []
    max_rank = next((size for size in LORA_RANKS if size >= rank), None)
    if max_rank is None:
        raise ConfigError(f"model.lora_rank: vLLM takes adapters of rank {LORA_RANKS[-1]} at most, got {rank}; lower it")
    return ["--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", "2", "--max-cpu-loras", "4"]


def _on_gpus(options: Options, place: int) -> list[str]:
    """Arguments for a server whose GPUs are given. A server with several GPUs divides every layer among them."""
    several = len(options.gpus_of(place))
    arguments = ["--tensor-parallel-size", str(several)] if several > 1 else []
    # vLLM refuses to start unless this part of the GPU's memory is free, 0.92 by default, although kv_cache_bytes limits its
    # memory.
    return [*arguments, "--gpu-memory-utilization", "0.01"] if options.shares_gpus else arguments


def environment(options: Options, packages: Path, place: int = 0) -> Mapping[str, str]:
    """Environment of the server number ``place``; PYTHONPATH holds a symlink to the package ``cookbook`` and nothing else."""
    packages.mkdir(parents=True, exist_ok=True)
    link = packages / "cookbook"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(paths.PACKAGE)
    own = {
        "PYTHONPATH": str(packages),
        "VLLM_SERVER_DEV_MODE": "1",  # routes that pause the server and load weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM binds its threads to cores that other processes use
        "OMP_NUM_THREADS": str(options.threads),
    }
    if own_gpus := options.gpus_of(place):
        own[gpus.VARIABLE] = gpus.visible(own_gpus)
    return {**{key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}, **own}


def check_python(python: str) -> None:
    """Raises ConfigError: this system cannot run vLLM servers, or ``python`` has no vLLM."""
    # :func:`birth` reads /proc, to distinguish a server's process from a later one with the same number.
    if sys.platform != "linux":
        raise ConfigError(
            "deployment: vLLM servers are started on Linux only; start one there and set deployment.url=http://..."
        )
    try:
        answer = subprocess.run(
            [python, "-c", "import importlib.util as u; print(u.find_spec('vllm') is not None)"],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"deployment.python: {python} cannot be started ({error.strerror}); run `make vllm`") from None
    if answer.stdout.strip() != "True":
        raise ConfigError(f"deployment.python: {python} has no vLLM; run `make vllm`, or name another environment's Python")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(options: Options, port: int, folder: Path, log: Path, place: int = 0) -> int:
    """Start the server number ``place`` in a new process group, and return the number of the group."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(options, port, place),
            env=dict(environment(options, folder / "python", place)),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid


def wait_until_healthy(client: Client, log: Path | None, limit_s: float, say: Callable[[str], None]) -> None:
    """Wait until the server answers, and report its progress with ``say``.

    Raises:
        RolloutError: the server's process has ended, or the server does not answer within ``limit_s``.
    """
    started = reported = time.monotonic()
    with terminal.doing("deployment: starting vLLM", detail=lambda: last_line(log)):
        while True:
            try:
                client.once("/health", method="GET", timeout_s=5)
                return
            except ServerUnavailableError as error:
                problem = str(error)
            if reason := client.gone():
                raise RolloutError(f"deployment: {reason}")
            waited = time.monotonic() - started
            if waited > limit_s:
                end = last_line(log)
                raise RolloutError(f"deployment: not ready after {waited:.0f} s ({problem}); its log ends with: {end}")
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                say(f"deployment: starting for {waited:.0f} s; {last_line(log)}")
            time.sleep(POLL_S)


def last_line(log: Path | None) -> str:
    """Last line of the log."""
    return _tail(log)[-1][-LINE:]


def first_error(log: Path | None) -> str:
    """First error near the end of the log, since later errors are its consequences; without an error, the last line."""
    lines = _tail(log)
    return next((line[-LINE:] for line in lines if "Error: " in line and "WARNING" not in line), lines[-1][-LINE:])


def _tail(log: Path | None) -> list[str]:
    if log is None or not log.is_file():
        return ["nothing"]
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()] or ["nothing"]


def birth(pid: int) -> str | None:
    """Start time of a process, in ticks of the kernel; None if it has ended. Number and start time identify a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def kill(pid: int, born: str) -> None:
    """End the server and its child processes with SIGKILL, without waiting for them."""
    if birth(pid) in (born, None):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def stop(pid: int, born: str) -> None:
    """End the server and its child processes, with SIGTERM and after a while with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if birth(pid) not in (born, None):
            return  # the number belongs to another process now
        end = time.monotonic() + END_S
        try:
            os.killpg(pid, number)
            while time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                os.killpg(pid, 0)
                time.sleep(0.05)
        # The group has no more processes.
        except ProcessLookupError:
            return
