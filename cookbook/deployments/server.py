"""A vLLM server as a process of this machine: the command line, the wait until it answers, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import cookbook
from cookbook import terminal
from cookbook.deployments import vllm_worker
from cookbook.deployments.http import Client, ServerUnavailableError
from cookbook.errors import ConfigError, RolloutError

MODEL = "policy"  # the name it serves the model under
PROGRESS_S, POLL_S, END_S = 10.0, 0.5, 15.0
TAIL_BYTES, LINE = 1 << 16, 300
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for


@dataclass(frozen=True)
class Options:
    """What tells one server from another.

    ``kv_cache_bytes`` of memory for keys and values; ``lora_rank`` of the adapters it takes, 0 for none; ``args`` go to vLLM as
    they are.
    """

    python: str
    model: str
    dtype: str
    max_length: int
    kv_cache_bytes: int
    threads: int
    lora_rank: int
    args: tuple[str, ...]


def command(options: Options, port: int) -> list[str]:
    """Chunked prefill is off: with seeds it ends vLLM's CPU engine, also at a resume. A prompt must then fit into one batch."""
    batch = max(8192, options.max_length)
    return [
        *(options.python, "-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", options.model, "--served-model-name", MODEL, "--dtype", options.dtype),
        *("--host", "127.0.0.1", "--port", str(port)),  # its control routes ask nobody for a password
        *("--max-model-len", str(options.max_length), "--kv-cache-memory-bytes", str(options.kv_cache_bytes)),
        *("--max-num-batched-tokens", str(batch), "--no-enable-chunked-prefill"),
        *("--enforce-eager", "--enable-scale-out", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),  # those of the distribution that was sampled from
        *("--worker-extension-cls", vllm_worker.NAME),
        *_lora(options.lora_rank),
        *options.args,
    ]


def _lora(rank: int) -> list[str]:
    """Two adapters may answer at once: those that samples under way began with, and the newest."""
    if rank == 0:
        return []
    room = next((size for size in LORA_RANKS if size >= rank), None)
    if room is None:
        raise ConfigError(f"model.lora_rank: vLLM takes adapters of rank {LORA_RANKS[-1]} at most, got {rank}; lower it")
    return ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2", "--max-cpu-loras", "4"]


def environment(options: Options, packages: Path) -> Mapping[str, str]:
    """Its Python sees of ours the package ``cookbook`` and nothing else, through a folder made for that."""
    packages.mkdir(parents=True, exist_ok=True)
    link = packages / "cookbook"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(Path(cookbook.__file__).resolve().parent)
    own = {
        "PYTHONPATH": str(packages),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause it and load weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes the cores that others use
        "OMP_NUM_THREADS": str(options.threads),
    }
    return {**{key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}, **own}


def check_python(python: str) -> None:
    """Raises ConfigError if this system cannot run vLLM servers, or ``python`` has no vLLM."""
    # :func:`birth` reads /proc to tell a server's process from a later one with the same number.
    if sys.platform != "linux":
        raise ConfigError(
            "deployment: vLLM servers are started on Linux only; start one there and set deployment.url=http://..."
        )
    try:
        found = subprocess.run(
            [python, "-c", "import importlib.util as u; print(u.find_spec('vllm') is not None)"],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"deployment.python: {python} cannot be started ({error.strerror}); run `make vllm`") from None
    if found.stdout.strip() != "True":
        raise ConfigError(f"deployment.python: {python} has no vLLM; run `make vllm`, or name another environment's Python")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(options: Options, port: int, folder: Path, log: Path) -> int:
    """Starts it in a group of processes of its own, whose number is returned."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(options, port),
            env=dict(environment(options, folder / "python")),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process.pid


def wait_until_healthy(client: Client, log: Path | None, limit_s: float, say: Callable[[str], None]) -> None:
    """Returns when it answers; tells how it goes meanwhile.

    Raises:
        RolloutError: its process has ended, or the time is over.
    """
    with terminal.doing("deployment: starting vLLM", detail=lambda: last_line(log)):
        _wait(client, log, limit_s, say)


def _wait(client: Client, log: Path | None, limit_s: float, say: Callable[[str], None]) -> None:
    started = told = time.monotonic()
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
            raise RolloutError(f"deployment: not ready after {waited:.0f} s ({problem}); it said: {last_line(log)}")
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            say(f"deployment: starting for {waited:.0f} s; {last_line(log)}")
        time.sleep(POLL_S)


def last_line(log: Path | None) -> str:
    """The log's last line."""
    return _tail(log)[-1][-LINE:]


def first_error(log: Path | None) -> str:
    """The first line of the log's end that tells of an error, which the others follow from; without one its last."""
    lines = _tail(log)
    return next((line[-LINE:] for line in lines if "Error: " in line and "WARNING" not in line), lines[-1][-LINE:])


def _tail(log: Path | None) -> list[str]:
    if log is None or not log.is_file():
        return ["nothing"]
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()] or ["nothing"]


def birth(pid: int) -> str | None:
    """When the process began, in the kernel's ticks; None when there is none. With it a number means one process for ever."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def stop(pid: int, born: str) -> None:
    """Ends the server and what it has started: asks first, and insists after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if birth(pid) not in (born, None):
            return  # its number belongs to somebody else now
        end = time.monotonic() + END_S
        try:
            os.killpg(pid, number)
            while time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                os.killpg(pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:  # nobody is left in its group
            return
