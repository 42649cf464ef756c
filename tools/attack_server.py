"""Attacks on ``cookbook serve`` by the owner of an API key: ``python tools/attack_server.py``.

The server runs as a process with two keys. A victim trains and samples in its own process, probes ``healthz`` every 20 ms, and
compares every number with an undisturbed play. The attacker has a small quota. For each attack, a row shows whether the server
held, the longest waits of the victim for ``healthz`` and for a training step, and the server's peak memory.

The server has held if the check of the attack passes, no response has status 5xx, the server still runs, the victim has met no
error and no other number, and ``healthz`` took at most half a second. Only seconds in which the server computed count: on
a busy machine the server itself waits for a core. ``tests/system/test_attacks.py`` runs the attacks without clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import httpx
from attacks import ATTACKS, Attacker, attacker_lines

VICTIM = "tml-victim"
# Longest wait for healthz, and how much longer a training step of the victim may take than its longest in peace, in seconds.
MAX_HEALTH_S, MAX_STEP_S = 0.5, 2.0
PROBE_S = 0.02
STEPS = 4
LIMITS = (
    "max_sessions=32",
    "max_runs=16",
    "max_results_mb=16",
    "max_pending_mb=64",
    "max_request_mb=16",
    "max_connections=96",
    "gap_timeout_s=5",
    "upload_timeout_s=5",
)


# ---- the victim ------------------------------------------------------------------------------------------------------


def computed_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    seconds = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            seconds += int(file.read_text().split()[0]) / 1e9
    return seconds


class Stopwatch:
    """Measures a wait for the server: its seconds, and how many of them the server can have caused by computing."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began, self._cpu = pid, time.perf_counter(), computed_s(pid)

    def read(self) -> tuple[float, float]:
        seconds = time.perf_counter() - self._began
        return seconds, min(seconds, computed_s(self._pid) - self._cpu)


def victim(url: str, pid: int) -> None:
    """Train and sample until stdin is closed. Print a line of JSON for every wait, and for every error."""
    import numpy as np
    import tinker
    import tiny

    lock, ended = threading.Lock(), threading.Event()

    def tell(kind: str, value: object) -> None:
        with lock:
            print(json.dumps([time.time(), kind, value]), flush=True)

    def probe() -> None:
        client = httpx.Client(timeout=60, trust_env=False)
        while not ended.wait(PROBE_S):
            watch = Stopwatch(pid)
            try:
                ok = client.get(f"{url}/api/v1/healthz").status_code == httpx.codes.OK
            except httpx.HTTPError:
                # The server closed an idle connection. A second failure is an error.
                client = httpx.Client(timeout=60, trust_env=False)
                try:
                    ok = client.get(f"{url}/api/v1/healthz").status_code == httpx.codes.OK
                except httpx.HTTPError as error:
                    tell("error", f"healthz: {error!r}")
                    continue
            tell("health" if ok else "error", watch.read())

    def play(service: tinker.ServiceClient) -> list[object]:
        draw = np.random.default_rng(0)
        training, seen = service.create_lora_training_client("tiny", rank=4, seed=3).result(), []
        for _ in range(STEPS):
            rows = [draw.integers(0, tiny.VOCABULARY, 32).tolist() for _ in range(4)]
            inputs = [{"target_tokens": row[1:], "weights": [1.0] * 31} for row in rows]
            data = [
                tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=one)
                for row, one in zip(rows, inputs, strict=True)
            ]
            watch = Stopwatch(pid)
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
            seen += [passed.result().metrics["loss:sum"], stepped.result().metrics]
            tell("step", watch.read())
        sampler = training.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), 1, tinker.SamplingParams(max_tokens=6, seed=1)).result()
        return [*seen, [list(one.tokens) for one in answer.sequences]]

    threading.Thread(target=probe, daemon=True).start()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    expected = None
    while not ended.is_set():
        try:
            # A session for each play, because runs stay in memory as long as their session.
            with tinker.ServiceClient(base_url=url, api_key=VICTIM) as service:
                seen = play(service)
            expected = expected or seen
            tell("play" if seen == expected else "error", "" if seen == expected else f"other numbers: {seen} != {expected}")
        except Exception as error:  # noqa: BLE001 - a row of the table
            tell("error", repr(error)[:500])


@dataclass(frozen=True)
class Wait:
    """``seconds`` of a wait, and ``busy_s`` of them in which the server computed."""

    seconds: float
    busy_s: float

    def __str__(self) -> str:
        return f"{1000 * self.busy_s:.0f} ({1000 * self.seconds:.0f})"


@dataclass
class Watch:
    """The lines of the victim."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str, object]] = field(default_factory=list)

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("["):
                self.lines.append(tuple(json.loads(line)))

    def count(self, kind: str) -> int:
        return sum(one[1] == kind for one in self.lines)

    def worst(self, kind: str, since: float) -> Wait:
        """Return the longest wait, and the longest one that the server can have caused."""
        found = [value for at, name, value in list(self.lines) if name == kind and at >= since and isinstance(value, list)]
        return Wait(max((one[0] for one in found), default=0.0), max((one[1] for one in found), default=0.0))

    def errors(self, since: float) -> list[str]:
        return [str(value) for at, name, value in list(self.lines) if name == "error" and at >= since]

    def wait(self, kind: str, more: int) -> None:
        """Wait for ``more`` lines of ``kind``. Raises TimeoutError: the victim is stuck for a minute."""
        wanted, end = self.count(kind) + more, time.monotonic() + 60
        while self.count(kind) < wanted:
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError
            time.sleep(0.05)


# ---- the server ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    keys = folder / "keys"
    keys.write_text(f"victim: {VICTIM}\n{attacker_lines()}")
    options = [f"server.{one}" for one in (*LIMITS, "port=0", f"keys_file={keys}")]
    command = [sys.executable, "-m", "cookbook", "serve", "model=tiny", f"out={folder / 'out'}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = (folder / "stderr").open("w")
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+?:\d+", server.stdout.readline())
        assert found is not None, (folder / "stderr").read_text()
        try:
            yield found[0], server
        finally:
            server.terminate()


def peak_mb(pid: int, *, reset: bool = False) -> float:
    """Return the peak memory of a process since the last reset."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    if reset:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(found[1]) / 1024


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    faults: list[str]
    health: Wait
    step: Wait
    memory_mb: float

    @property
    def line(self) -> str:
        held = "yes" if not self.faults else "NO"
        return f"| {self.name} | {held} | {self.health} | {self.step} | {self.memory_mb:.0f} |"


def run(
    name: str, attack: Callable[[Attacker], None], url: str, server: subprocess.Popen[str], watch: Watch, calm: Wait
) -> Row:
    """Run one attack while the victim trains, and judge it."""
    peak_mb(server.pid, reset=True)
    began, faults = time.time(), []
    attacker = Attacker(url)
    try:
        attack(attacker)
        faults += attacker.faults
    except Exception as error:  # noqa: BLE001 - a row of the table
        faults.append(f"{type(error).__name__}: {error}")
    # What an attack leaves behind must not harm the victim either.
    try:
        watch.wait("step", 2)
    except TimeoutError:
        faults.append("the victim makes no step")
    faults += watch.errors(began)
    health, step = watch.worst("health", began), watch.worst("step", began)
    if health.busy_s > MAX_HEALTH_S:
        faults.append(f"healthz took {health.busy_s:.2f} s")
    if step.busy_s > calm.busy_s + MAX_STEP_S:
        faults.append(f"a step of the victim took {step.busy_s:.2f} s, {calm.busy_s:.2f} s in peace")
    if server.poll() is not None:
        faults.append(f"the server has ended, {server.returncode}")
    else:
        attacker.clean_up()
    return Row(name, faults, health, step, 0.0 if server.poll() is not None else peak_mb(server.pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="regular expression of the names of attacks")
    parser.add_argument("--victim", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.victim:
        victim(arguments.victim[0], int(arguments.victim[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (url, server):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--victim", url, str(server.pid)]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            watch = Watch(process)
            watch.start()
            watch.wait("play", 1)
            began = time.time()
            watch.wait("play", 3)
            calm = watch.worst("step", began)
            rows.append(Row("(none)", watch.errors(0), watch.worst("health", began), calm, peak_mb(server.pid)))
            print("| attack | held | healthz, ms | step, ms | peak memory, MB |\n|---|---|---|---|---|")
            print(rows[0].line, flush=True)
            for name, attack in ATTACKS.items():
                if re.search(arguments.only, name):
                    rows.append(run(name, attack, url, server, watch, calm))
                    print(rows[-1].line, flush=True)
                    for fault in rows[-1].faults:
                        print(f"    {fault[:600]}", file=sys.stderr, flush=True)
                    if server.poll() is not None:
                        break
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        text = (Path(folder) / "stderr").read_text()
    if "Traceback" in text:
        rows.append(Row("(log of the server)", [text[-3000:]], Wait(0, 0), Wait(0, 0), 0))
        print(f"the server has printed a traceback:\n{text[-3000:]}", file=sys.stderr)
    lost = sum(bool(row.faults) for row in rows)
    print(f"{len(rows)} rows, {lost} not held")
    raise SystemExit(bool(lost))


if __name__ == "__main__":
    main()
