"""Cost of the output head: ``python benchmarks/head.py [--json FILE] [--device cuda]``.

Forward and backward of one tensor of hidden states ``(N, H)`` and a vocabulary of V, from random numbers. Candidates run in
turn, round after round, in one process on one thread, timed in CPU seconds (CUDA events on a GPU); the table gives the least of
the rounds, as a busy machine only ever adds. "floor3" is the three matrix products that any gradient needs, "floor2" those of a
frozen weight, into tensors that are already there. Each peak of memory is measured in a process of its own. TRL and
cut-cross-entropy take part where they can be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cookbook.engine.fast_path import FastPathError
from cookbook.engine.head.linear_logprobs import linear_logprobs, linear_logprobs_with_gradient
from cookbook.engine.head.linear_logprobs.api import LinearLayer
from cookbook.engine.head.linear_logprobs.compiled import compiled_logprobs

ROUNDS = 4
SHAPES = [(1024, 32000, 512), (1024, 151936, 256)]
GPU_SHAPES = [(16384, 151936, 1024), (8192, 151936, 4096)]  # Qwen3-0.6B and 8B
MEMORY_SHAPE = (4096, 151936, 256)
MASKED_SHAPE = (1024, 32000, 512)
EXACT_SHAPE = (512, 32000, 512)
MODES = ("recompute", "cached", "tokenwise", "frozen")
BYTES_PER_LOGIT = {"naive log_softmax": 12, "F.cross_entropy": 12, "F.cross_entropy, frozen": 12, "cached": 4}
TRL_COLUMNS = 8192
Row = dict[str, Any]


@dataclass
class Problem:
    """Leaves, targets, and what the loss sends back: the gradient of a mean."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    slope: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int, int], device: str, dtype: torch.dtype, deviation: float = 4.0) -> Problem:
        """Logits of standard deviation 4, as a trained model's have, unless it is another."""
        rows, vocabulary, width = shape
        draw = torch.Generator(device).manual_seed(0)
        hidden = torch.randn(rows, width, generator=draw, device=device) * deviation / width**0.5
        weight = torch.randn(vocabulary, width, generator=draw, device=device)
        targets = torch.randint(0, vocabulary, (rows,), generator=draw, device=device)
        slope = torch.full((rows,), -1 / rows, device=device)
        return cls(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, slope)

    def with_slope(self, slope: Tensor) -> Problem:
        return Problem(self.hidden, self.weight, self.targets, slope)

    def half(self) -> Problem:
        """Every other row, cut out before the head sees it."""
        return Problem(self.hidden.detach()[::2].clone().requires_grad_(), self.weight, self.targets[::2], self.slope[::2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", type=_shape, action="append", help="N,V,H instead of the usual ones; may be repeated")
    parser.add_argument("--small", action="store_true", help="tiny shapes: does it run?")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = arguments.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if arguments.peak_of:
        print(extra_peak(Problem.of(arguments.shape[0], device, dtype), arguments.peak_of))
        return
    shapes = arguments.shape or (SHAPES if device == "cpu" else GPU_SHAPES)
    memory, masked, exact = MEMORY_SHAPE, MASKED_SHAPE, EXACT_SHAPE
    if arguments.small:
        shapes, memory, masked, exact = [(64, 1000, 32)], (64, 1000, 32), (64, 1000, 32), (64, 1000, 32)
    rows: list[Row] = []
    for shape in shapes:
        rows += report(f"forward and backward, {_named(shape)}, {dtype}", times(Problem.of(shape, device, dtype)))
    rows += report(f"entropy and hit on top, {_named(masked)}", metrics(Problem.of(masked, device, dtype)))
    rows += report(f"half the tokens masked, {_named(masked)}", masks(Problem.of(masked, device, dtype)))
    rows += report(f"extra peak memory, {_named(memory)}", peaks(memory, device))
    rows += report(f"errors against float64, {_named(exact)}", errors(exact, device))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def candidates(problem: Problem) -> dict[str, Callable[[], object]]:
    """Functions that compute logprobs and the gradients of ``problem.hidden`` and, unless frozen, ``problem.weight``."""
    found = {mode: _ours(problem, mode) for mode in MODES}
    found["torch_compile"] = lambda: _back(problem, torch_compile(problem))
    found["naive log_softmax"] = lambda: _back(problem, naive(problem))
    found["F.cross_entropy"] = lambda: _back(problem, cross_entropy(problem))
    found["F.cross_entropy, frozen"] = lambda: _back(problem, cross_entropy(problem), frozen=True)
    if importlib.util.find_spec("trl"):
        found["TRL chunked logprobs"] = lambda: _back(problem, trl(problem))
    if importlib.util.find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = lambda: _back(problem, cut_cross_entropy(problem))
    return {name: _from_nothing(problem, run, frozen="frozen" in name) for name, run in found.items()}


def _ours(problem: Problem, mode: str, **options: Any) -> Callable[[], object]:
    def run() -> Tensor:
        operands = (problem.hidden, LinearLayer(problem.weight), problem.targets)
        if mode == "tokenwise":
            found = linear_logprobs_with_gradient(*operands, lambda rows, _: problem.slope[rows], **options)
            found.surrogate.backward()
            return found.logprobs
        logprobs = linear_logprobs(*operands, mode=mode, **options).logprobs
        logprobs.backward(problem.slope)
        return logprobs

    return run


def _back(problem: Problem, logprobs: Tensor, *, frozen: bool = False) -> Tensor:
    logprobs.backward(problem.slope.to(logprobs.dtype), inputs=[problem.hidden] if frozen else None)
    return logprobs


def _from_nothing(problem: Problem, run: Callable[[], object], *, frozen: bool) -> Callable[[], object]:
    def once() -> object:
        problem.hidden.grad = problem.weight.grad = None
        problem.weight.requires_grad_(not frozen)
        return run()

    return once


def naive(problem: Problem) -> Tensor:
    logits = (problem.hidden @ problem.weight.T).float()
    return logits.log_softmax(-1).gather(1, problem.targets[:, None])[:, 0]


def cross_entropy(problem: Problem) -> Tensor:
    return -F.cross_entropy((problem.hidden @ problem.weight.T).float(), problem.targets, reduction="none")


def trl(problem: Problem) -> Tensor:
    function = importlib.import_module("trl.kernels").ChunkedLogProbFunction
    found: tuple[Tensor, ...] = function.apply(
        problem.hidden, problem.weight, None, problem.targets, 1.0, TRL_COLUMNS, None, 1.0, ()
    )
    return found[0]


def torch_compile(problem: Problem) -> Tensor:
    """With entropy and hit, which it always computes."""
    options: dict[str, Any] = {"bias": None, "scale": 1.0, "softcap": None, "temperature": None}
    return compiled_logprobs(problem.hidden, problem.weight, problem.targets, **options)[0]


def cut_cross_entropy(problem: Problem) -> Tensor:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    impl = "cce" if problem.hidden.is_cuda else "torch_compile"
    losses: Tensor = function(problem.hidden, problem.weight, problem.targets, reduction="none", filter_eps=None, impl=impl)
    return -losses


def floors(problem: Problem) -> dict[str, Callable[[], object]]:
    hidden, weight = problem.hidden.detach(), problem.weight.detach()
    logits = torch.empty(len(hidden), len(weight), dtype=weight.dtype, device=weight.device)

    def two() -> Tensor:
        torch.mm(hidden, weight.T, out=logits)
        return logits @ weight

    def three() -> tuple[Tensor, Tensor]:
        return two(), logits.T @ hidden

    def fresh() -> tuple[Tensor, Tensor]:
        made = hidden @ weight.T
        return made @ weight, made.T @ hidden

    return {"floor3": three, "floor2": two, "floor3 and its logits' allocation": fresh}


def times(problem: Problem) -> list[Row]:
    seconds = least(problem, floors(problem) | candidates(problem))
    return [
        {"candidate": name, "s": s, "to floor3": s / seconds["floor3"], "to floor2": s / seconds["floor2"]}
        for name, s in seconds.items()
    ]


def metrics(problem: Problem) -> list[Row]:
    both = {"entropy": True, "hit": True}
    runs = {mode: _ours(problem, mode) for mode in MODES} | {
        f"{mode}, entropy and hit": _ours(problem, mode, **both) for mode in MODES
    }
    seconds = least(problem, {name: _from_nothing(problem, run, frozen="frozen" in name) for name, run in runs.items()})
    return [{"candidate": mode, "to without": seconds[f"{mode}, entropy and hit"] / seconds[mode]} for mode in MODES]


def masks(problem: Problem) -> list[Row]:
    slope = problem.slope.clone()
    slope[::2] = 0
    some, half = problem.with_slope(slope), problem.half()
    runs: dict[str, Callable[[], object]] = {}
    for mode in MODES:
        for name, given in (("all", problem), ("gradient 0", some), ("left out", half)):
            runs[f"{mode}, {name}"] = _from_nothing(given, _ours(given, mode), frozen=mode == "frozen")
    runs["F.cross_entropy, all"] = _from_nothing(problem, lambda: _back(problem, cross_entropy(problem)), frozen=False)
    runs["F.cross_entropy, gradient 0"] = _from_nothing(some, lambda: _back(some, cross_entropy(some)), frozen=False)
    runs["F.cross_entropy, left out"] = _from_nothing(half, lambda: _back(half, cross_entropy(half)), frozen=False)
    seconds = least(problem, runs)
    return [
        {"candidate": name, **{f"{how} / all": seconds[f"{name}, {how}"] / seconds[f"{name}, all"] for how in _HALVES}}
        for name in (*MODES, "F.cross_entropy")
    ]


_HALVES = ("gradient 0", "left out")


def least(problem: Problem, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds; the first round warms up."""
    clock = _gpu_seconds if problem.hidden.is_cuda else _cpu_seconds
    rounds = [{name: clock(run) for name, run in runs.items()} for _ in range(ROUNDS + 1)]
    return {name: min(one[name] for one in rounds[1:]) for name in runs}


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _gpu_seconds(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000


def peaks(shape: tuple[int, int, int], device: str) -> list[Row]:
    """MB beside operands and gradients."""
    names = list(candidates(Problem.of((2, 4, 2), device, torch.float32)))
    return [{"candidate": name, "extra MB": _peak_in_a_process(name, shape, device)} for name in names]


def _peak_in_a_process(name: str, shape: tuple[int, int, int], device: str) -> float | None:
    """None where the machine has too little memory for it."""
    needed = BYTES_PER_LOGIT.get(name, 0) * shape[0] * shape[1] + (1 << 30)
    if device == "cpu" and needed > _available():
        return None
    command = [sys.executable, __file__, "--device", device, "--shape", ",".join(map(str, shape)), "--peak-of", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def extra_peak(problem: Problem, name: str) -> float:
    """MB at the highest point of one call beyond what was there before, its gradients not counted."""
    warm = Problem.of((64, 512, problem.weight.shape[1]), problem.hidden.device.type, problem.weight.dtype)
    candidates(warm)[name]()  # libraries take their own memory at the first product
    run = candidates(problem)[name]
    if problem.hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
        before = _status("VmRSS")
        run()
        peak = _status("VmHWM")
    gradients = sum(one.grad.nbytes for one in (problem.hidden, problem.weight) if one.grad is not None)
    return (peak - before - gradients) / 1e6


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def errors(shape: tuple[int, int, int], device: str) -> list[Row]:
    """Of logprobs, absolute; of gradients, norm over norm, also among the tokens with p > 0.99 alone.

    The targets' probabilities have quartiles of about 5e-4, 0.09 and 0.96: a trained model.
    """
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem.of(shape, device, dtype, deviation=2.0)
        with torch.no_grad():
            lift = torch.linspace(0, 20, shape[0], device=device)[:, None] / shape[2]
            problem.hidden.copy_((problem.hidden.float() + lift * problem.weight[problem.targets]).to(dtype))
        exact = Problem(
            problem.hidden.detach().double().requires_grad_(),
            problem.weight.detach().double().requires_grad_(),
            problem.targets,
            problem.slope.double(),
        )
        logits = exact.hidden @ exact.weight.T
        wanted = _back(exact, logits.log_softmax(-1).gather(1, exact.targets[:, None])[:, 0]).detach()
        for name, run in candidates(problem).items():
            try:
                found = run()
            # torch_compile has no kernels for bfloat16 on a CPU.
            except FastPathError:
                off = dict.fromkeys(ERRORS)
            else:
                assert isinstance(found, Tensor)
                off = _errors(problem, exact, found.detach(), wanted)
            rows.append({"candidate": f"{name}, {str(dtype)[6:]}", **off})
    return rows


ERRORS = ("logprob max", "logprob mean", "d hidden", "d hidden, p > 0.99", "d weight")


def _errors(problem: Problem, exact: Problem, found: Tensor, wanted: Tensor) -> Row:
    sure = wanted.exp() > 0.99
    off = (found.double() - wanted).abs()
    values = (
        off.max().item(),
        off.mean().item(),
        _relative(problem.hidden.grad, exact.hidden.grad),
        _relative(problem.hidden.grad, exact.hidden.grad, sure),
        _relative(problem.weight.grad, exact.weight.grad),
    )
    return dict(zip(ERRORS, values, strict=True))


def _relative(found: Tensor | None, wanted: Tensor | None, rows: Tensor | None = None) -> float | None:
    if found is None or wanted is None:
        return None
    if rows is not None:
        found, wanted = found[rows], wanted[rows]
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def report(what: str, rows: list[Row]) -> list[Row]:
    columns = [name for name in rows[0] if name != "candidate"]
    print(f"\n{what}\n  {'':36s}" + "".join(f"{name:>20s}" for name in columns))
    for row in rows:
        print(f"  {row['candidate']:36s}" + "".join(f"{_shown(row[name]):>20s}" for name in columns), flush=True)
    return [{"comparison": what, **row} for row in rows]


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.2f}"


def _shape(text: str) -> tuple[int, int, int]:
    rows, vocabulary, width = map(int, text.split(","))
    return rows, vocabulary, width


def _named(shape: tuple[int, int, int]) -> str:
    return "N={} V={:,} H={}".format(*shape)


if __name__ == "__main__":
    main()
