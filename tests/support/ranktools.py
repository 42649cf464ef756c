"""Cases of several ranks against one process, run as ``python tests/support/ranktools.py JOB`` in every process of a group.

The environment has the variables that torchrun sets. ``python tests/support/ranktools.py --parent`` imports once, and forks the
ranks of each job that its standard input names. Every process runs all cases in the same order. The first one also
computes each case alone, and writes what differs to ``JOB/results.json``. Then the first rank leads, and runs the programs of
:mod:`leading`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import tiny
import torch
from leading import PROGRAMS, rescale
from ports import free_port

from cookbook.backends.local import sample_queue
from cookbook.checkpoints import gathered
from cookbook.engine import optimizer
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig
from cookbook.engine.parallel import Ranks
from cookbook.engine.ranks import commands, processes
from cookbook.engine.ranks.loading import load_on
from cookbook.engine.ranks.processes import ProcessRanks, join
from cookbook.losses import DFT, DPO, GRPO, ORPO, CrossEntropy
from cookbook.losses.normalization import Normalization
from cookbook.server.rank import exit_now
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

HERE = Path(__file__).resolve()
LIMIT_S = 1200
PRELOADED = ("transformers.models.qwen3.modeling_qwen3", "torch.distributed.checkpoint.hf_storage", "torch.distributed.fsdp")
# A parameter of glibc's mallopt: larger blocks have pages of their own.
M_MMAP_THRESHOLD = -3
MODEL_FIELDS = {"dtype", "lora_rank", "lora_dropout", "router_aux_loss_coef"}
# Bytes of a bucket of gradients, so that a tiny model has several.
BUCKET_BYTES = 4096
# A graph of its own parameter, as a learned temperature has.
ANCHOR = torch.zeros((), requires_grad=True)


# ---- in the test's process -------------------------------------------------------------------------------------------


def start(count: int, arguments: Sequence[object], **variables: str) -> list[subprocess.Popen[str]]:
    """Start ``python ARGUMENTS`` as ``count`` ranks of one group."""
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for all processes. Return the exit code and the output of each; none is left behind."""
    end = time.monotonic() + LIMIT_S
    try:
        return [(process.wait(max(1.0, end - time.monotonic())), process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


class Parent:
    """A process that imports once, which takes 6 s of CPU time, and forks the ranks of one group after the other."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE), "--parent"]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)

    def fork(self, count: int, folder: Path, variables: Mapping[str, str]) -> list[int]:
        """Fork the ranks of a group, which run the job of the folder. Return their process ids."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([count, str(folder), variables]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def wait(self) -> list[int]:
        """Wait for the ranks. Return the exit code of each, in their order."""
        return self._answer()

    def _answer(self) -> list[int]:
        """Read a line. A parent that is silent for too long is killed with its ranks."""
        assert self.process.stdout is not None
        timer = threading.Timer(LIMIT_S, self.process.kill)
        timer.start()
        try:
            found: list[int] = json.loads(self.process.stdout.readline() or "[-1]")
        finally:
            timer.cancel()
        return found


@functools.cache
def parent() -> Parent:
    """The parent of all groups of this test process."""
    return Parent()


def results_of(
    count: int,
    folder: Path,
    cases: Sequence[dict[str, Any]] = (),
    programs: Sequence[tuple[str, str]] = (),
    shard: str = "all",
    sampled: str | None = None,
    **variables: str,
) -> dict[str, dict[str, Any]]:
    """Run cases, and programs of a model each, on ``count`` ranks. Return the results of the first rank by name.

    ``sampled``: a model whose samples are the result ``sampled``.
    """
    job = {"cases": list(cases), "programs": list(programs), "shard": shard}
    (folder / "job.json").write_text(json.dumps(job | ({"sampled": sampled} if sampled else {})))
    parent().fork(count, folder, variables)
    assert not any(parent().wait()), outputs_of(folder)
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def outputs_of(folder: Path) -> str:
    """Output of the ranks, in their order."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("output-*")))


# ---- models, losses and data -----------------------------------------------------------------------------------------


def shared_prompts(count: int = 2, completions: int = 4, seed: int = 0) -> list[Datum]:
    """Completions of ``count`` prompts, with everything that the losses read."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(0, tiny.VOCABULARY, 16)
        for _ in range(completions):
            tokens = np.concatenate([prompt, rng.integers(0, tiny.VOCABULARY, int(rng.integers(4, 9)))])
            weights = np.concatenate([np.zeros(15), np.ones(len(tokens) - 16)])
            logprobs = {f"{name}_logprobs": -rng.uniform(3, 9, len(tokens) - 1) for name in ("sampling", "reference", "old")}
            inputs = {"target_tokens": tokens[1:], "weights": weights, "advantages": np.full(len(weights), rng.normal())}
            found.append(Datum(ModelInput.from_ints(tokens[:-1]), {**inputs, **logprobs}))
    return found


def longest(count: int) -> list[Datum]:
    """One datum that is longer than all others together."""
    return [tiny.datums(1, seed=3, longest=90)[0], *tiny.datums(count - 1, longest=8)]


DATA: dict[str, Callable[[], list[Datum]]] = {
    "usual": lambda: tiny.datums(8),
    "seven": lambda: tiny.datums(7),
    "shared": shared_prompts,
    "one prompt": lambda: shared_prompts(1, 8),
    "one": lambda: tiny.datums(1),
    "pair": lambda: tiny.datums(2, longest=12),
    "longest": lambda: longest(4),
}


def custom(data: Sequence[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A function that the engine knows nothing about: it reads the whole batch, and leaves some datums without a slope."""
    used = logprobs[: max(1, len(logprobs) - 2)]
    total = torch.cat(used)
    return -(total.mean() + 0.1 * total.std()) + 0.0 * ANCHOR.to(total), {"custom/mean": float(total.detach().mean())}


LOSSES: dict[str, Any] = {
    "sft": CrossEntropy(),
    "grpo": GRPO(kl_beta=0.05),
    "grpo entropy": GRPO(entropy_coef=0.01),
    "dft": DFT(),
    "dpo": DPO(beta=0.1),
    "orpo": ORPO(),
    "custom": custom,
}


def engine_of(model: str, case: dict[str, Any], ranks: Ranks | None) -> Engine:
    options = {key: value for key, value in case.get("options", {}).items() if key not in MODEL_FIELDS}
    config = {key: value for key, value in case.get("options", {}).items() if key in MODEL_FIELDS}
    loaded = load_on(ranks or Ranks(), ModelConfig(model, **config), torch.device("cpu"), 0)
    return Engine(loaded, EngineOptions(**{"micro_batch_tokens": 40, **options}))


# ---- in a rank -------------------------------------------------------------------------------------------------------


def train(engine: Engine, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train some steps, of two calls each if the case accumulates. Return metrics and logprobs."""
    loss, found = LOSSES[case["loss"]], []
    data = DATA[case.get("data", "usual")]()
    calls = [data, data[: len(data) // 2]] if case.get("accumulates") else [data]
    normalization = Normalization.num_loss_tokens if getattr(loss, "reduction", None) == "token_sum" else None
    for _ in range(case.get("steps", 4)):
        outputs = []
        for rows in calls:
            prepared = loss.prepare(rows) if hasattr(loss, "prepare") else rows
            retained = engine.forward_retained(prepared)[0] if case.get("retained") else None
            outputs.append(engine.forward_backward(prepared, loss, retained, all_logprobs=True))
        step = engine.optim_step(AdamParams(learning_rate=1e-3, grad_clip_norm=0.5), normalization)
        logprobs = [row["logprobs"].array for output in outputs for row in output.loss_fn_outputs]
        metrics = {f"{number}/{key}": value for number, output in enumerate(outputs) for key, value in output.metrics.items()}
        found.append({"metrics": {**metrics, **step.metrics}, "logprobs": np.concatenate(logprobs) if logprobs else None})
    return found


def weights(engine: Engine) -> torch.Tensor:
    """All trained weights, whole, in one row."""
    return torch.cat([engine.ranks.whole(parameter.detach()).double().reshape(-1) for _, parameter in engine.model.trainable()])


def compared(model: str, case: dict[str, Any], ranks: ProcessRanks) -> dict[str, Any]:
    """Run a case on all ranks, and on the first rank alone."""
    engine = engine_of(model, case, ranks)
    early = during_passes(engine.gradients)
    with mock.patch("torch.distributed.reduce_scatter_single", counted_scatter(early)):
        steps, final = train(engine, case), weights(engine)
    tokens, overlap = ranks.gathered(engine.passes.num_tokens), ranks.gathered(sum(early) / max(len(early), 1))
    copies = ranks.gathered(final.numpy().tobytes())
    again = None
    if case.get("repeats"):
        second = engine_of(model, case, ranks)
        train(second, case)
        again = weights(second).equal(final)
    if ranks.rank:
        return {}
    alone = engine_of(model, case, None)
    expected, expected_final = train(alone, case), weights(alone)
    start = torch.cat([p.detach().double().reshape(-1) for _, p in engine_of(model, case, None).model.trainable()])
    return {
        "shares": [count / sum(tokens) for count in tokens],
        "tokens": sum(tokens) / alone.passes.num_tokens,
        "overlap": overlap,
        "metrics": max(_apart(one["metrics"], other["metrics"]) for one, other in zip(steps, expected, strict=True)),
        "logprobs": max(
            float(np.abs(one["logprobs"] - other["logprobs"]).max()) for one, other in zip(steps, expected, strict=True)
        ),
        "weights": float((final - expected_final).norm() / expected_final.norm()),
        "updates": float((final - expected_final).norm() / (expected_final - start).norm()),
        "ranks agree": all(copy == copies[0] for copy in copies),
        "repeats": again,
    }


def during_passes(gradients: optimizer.GradientBuffer) -> list[bool]:
    """Return a list that gets, for every sum of a bucket, whether it starts during a backward pass."""
    start_sum, found = gradients._start_sum, []

    def counted() -> None:
        found.append(bool(gradients._missing))
        start_sum()

    gradients._start_sum = counted  # type: ignore[method-assign]
    return found


def counted_scatter(found: list[bool]) -> Callable[..., Any]:
    """Return the operation with which FSDP2 adds gradients up. It reports whether autograd still computes gradients."""
    scatter = torch.distributed.reduce_scatter_single

    def counted(*args: Any, **options: Any) -> Any:
        # After the last gradient of a pass, FSDP2 runs outside of any node of the graph.
        found.append(torch._C._current_autograd_node() is not None)
        return scatter(*args, **options)

    return counted


def sampled(model: str, ranks: ProcessRanks) -> dict[str, Any]:
    """Sample from replicas, and from the first rank alone."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCABULARY, length).tolist() for length in (3, 9, 4, 6, 5, 8, 7)]
    requests = [SampleRequest(one, 4, SamplingParams(max_tokens=8), seed) for seed, one in enumerate(prompts)]
    sampling = sample_queue._begin(engine_of(model, {"options": {"dtype": "float64"}}, ranks), requests, 0, 64)
    while sampling.advance(3):
        pass
    counts = ranks.gathered(sum(len(one.tokens) for answer in sampling._own.samples() for one in answer))
    answers = sampling.samples()
    alone = sample(engine_of(model, {"options": {"dtype": "float64"}}, None).model, requests, 0, 64)
    return {
        "shares": [count / sum(counts) for count in counts],
        "same tokens": [[one.tokens for one in answer] for answer in answers]
        == [[one.tokens for one in answer] for answer in alone],
        "logprobs": max(
            abs(this - that)
            for answer, expected in zip(answers, alone, strict=True)
            for one, other in zip(answer, expected, strict=True)
            for this, that in zip(one.logprobs, other.logprobs, strict=True)
        ),
    }


def _apart(one: dict[str, float], other: dict[str, float]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(abs(one[key] - other[key]) / max(abs(other[key]), 1e-3) for key in one)


def memory_of(model: str, folder: Path) -> dict[str, int]:
    """Bytes by which the process's memory grows, at its peak: to load and shard, to save a base and a delta, and to train."""
    ranks = join("all", timeout_s=LIMIT_S)
    # The libraries are imported before.
    _saved(engine_of(str(Path(model).parent / "small"), {}, ranks), folder / "small")
    before = _status("VmRSS")
    kept = engine_of(model, {}, ranks)
    found = {"load": _status("VmHWM") - before, **_saved(kept, folder / "large")}
    for _ in range(2):
        kept.forward_backward(LOSSES["sft"].prepare(tiny.datums(4)), LOSSES["sft"])
        kept.optim_step(AdamParams(learning_rate=1e-3), None)
    return found | {"train": _status("VmHWM") - before}


def _saved(engine: Engine, folder: Path) -> dict[str, int]:
    """Save a base and a delta; return by how many bytes the memory has grown during each, at its peak."""
    found, version = {}, None
    for kind in ("base", "delta"):
        path = folder / kind
        path.mkdir(parents=True, exist_ok=True)
        before = _status("VmRSS")
        # Sets VmHWM, the peak, to the memory of now.
        Path("/proc/self/clear_refs").write_text("5")
        if version is None:
            version = gathered.write_base(engine, path, path, None)
        else:
            version = gathered.write_delta(engine, path, path, None, version)
        found[kind] = _status("VmHWM") - before
        rescale(engine)
    return found


def _status(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    optimizer.BUCKET_BYTES = BUCKET_BYTES
    job = json.loads((folder / "job.json").read_text())
    if "memory" in job:
        # Each tensor in pages of its own, so that freed memory is returned: the heap's holes are not a rank's share.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
        (folder / f"memory-{os.environ['RANK']}.json").write_text(json.dumps(memory_of(job["memory"], folder)))
        return
    groups: dict[str, Ranks] = {}
    found = {}
    for case in job["cases"]:
        shard = case["shard"]
        ranks = groups[shard] if shard in groups else groups.setdefault(shard, join(shard, timeout_s=LIMIT_S))
        assert isinstance(ranks, ProcessRanks)
        found[case["name"]] = compared(case["model"], case, ranks)
    if "sampled" in job:
        ranks = groups.get("none") or join("none", timeout_s=LIMIT_S)
        assert isinstance(ranks, ProcessRanks)
        found["sampled"] = sampled(job["sampled"], ranks)
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if job["programs"]:
        leader = commands.start(join(job["shard"], timeout_s=float(os.environ.get("TIMEOUT_S", LIMIT_S))))
        assert leader is not None
        for program, model in job["programs"]:
            found[program] = PROGRAMS[program](model, folder)
        leader.end()
    elif os.environ["RANK"] != "0":
        return
    (folder / "results.json").write_text(json.dumps(found))


def serve() -> None:
    """Fork the ranks of one group for each line of the standard input. Answer with their process ids, and their exit codes."""
    for name in PRELOADED:
        __import__(name)
    assert threading.active_count() == 1, "a thread would not be there after the fork"
    # A full collection over the imported modules takes a third of a second.
    gc.freeze()
    _end_with_parent()
    for line in sys.stdin:
        count, folder, variables = json.loads(line)
        # The first rank inherits the socket: another process could take a port that is only looked up.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            variables |= {"WORLD_SIZE": str(count), "MASTER_PORT": str(listener.getsockname()[1])}
            ranks = [_forked(rank, Path(folder), variables, listener) for rank in range(count)]
        print(json.dumps(ranks), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)


def _forked(rank: int, folder: Path, variables: dict[str, str], listener: socket.socket) -> int:
    """Fork a rank, which prints into a file of the folder. Return its process id."""
    if process := os.fork():
        return process
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    _end_with_parent()
    processes._listener = lambda *_: listener.detach()
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    return _exit(lambda: main(folder))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _exit(job: Callable[[], None]) -> NoReturn:
    """Run the job and end the process, with the exit code that the interpreter would have."""
    code: Any = 0
    try:
        job()
    except SystemExit as end:
        code = end.code or 0
    except Exception:  # noqa: BLE001 - an error of any kind is printed, as the interpreter would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--parent":
        serve()
        sys.exit()
    main(Path(sys.argv[1]))
    # As every rank of cookbook ends: gloo's destructors abort some processes whose partners are gone.
    exit_now(0)


# The second rank gets no memory for a gradient, also after a restart.
LIMITED = """
import os, resource
if os.environ.get("RANK") == "1":
    import psutil
    from cookbook.engine.ranks.commands import Follower
    execute = Follower._execute

    def limited(self, packed):
        if b"forward_backward" in packed:
            most = psutil.Process().memory_info().vms + (8 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        execute(self, packed)

    Follower._execute = limited
"""


def long_run(folder: Path) -> list[str]:
    """Return the words of a run with large steps, and let Python processes of the test import ``LIMITED`` at their start."""
    # Equal prompts would be computed once.
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "12345678" * 50}] for n in range(100)]
    (folder / "long.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (folder / "sitecustomize.py").write_text(LIMITED)
    sizes = ["recipe.batch_size=90", "recipe.steps=2", "eval.limit=4", "eval.answers=false"]
    return ["recipe=sft", f"data={folder}/long.jsonl", *sizes]
