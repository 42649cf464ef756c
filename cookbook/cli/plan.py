"""``cookbook plan``: what a step of a run will take, in memory and arithmetic, before any weight is loaded."""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from cookbook.backends.local import LocalConfig
from cookbook.check.rows import survey
from cookbook.cli import tables
from cookbook.cli.check_data import context
from cookbook.data import Renderer, load_rows
from cookbook.engine.estimate import Estimate, estimate
from cookbook.engine.memory import free_bytes, shortage_of
from cookbook.engine.model import load_tokenizer
from cookbook.engine.planning import CPU_PASS_TOKENS
from cookbook.errors import ConfigError
from cookbook.losses.base import Scope
from cookbook.session import Settings, settings

if TYPE_CHECKING:
    import torch

# Resident besides the weights once a model stands in a process with the CPU build of torch, whatever its size: 383 to 399 MB in
# eight cases of benchmarks/plan.py, of which 115 MB are pages of libraries.
PYTHON = 0.39e9


@dataclass(frozen=True)
class Shape:
    """The sequences of one step: how many, the longest and all of them in tokens. Those of the longest rows of the data."""

    sequences: int
    longest: int
    tokens: int


def run(cfg: DictConfig, overrides: list[str]) -> None:
    """Prints the estimate.

    Raises:
        CookbookError: the configuration is wrong, the data cannot be read, or there is no such model.
    """
    typed = settings(cfg)
    backend = typed.backend
    if not isinstance(backend, LocalConfig):
        raise ConfigError("backend: plan estimates the embedded trainer's work; use backend=local")
    shape = _shape(typed, cfg.recipe.name)
    device = backend.torch_device()
    cpu = device.type == "cpu"
    budget = min(backend.micro_batch_tokens, CPU_PASS_TOKENS) if cpu else backend.micro_batch_tokens
    pass_tokens = min(max(budget, shape.longest), shape.tokens)
    rows = max(1, round(pass_tokens / shape.longest))
    apart = typed.loss.scope in (Scope.token, Scope.sequence)
    of_step = functools.partial(
        estimate,
        typed.model,
        rows,
        round(pass_tokens / rows),
        step_tokens=shape.tokens,
        apart=apart,
        retain_bytes=int(backend.retain_gb * (1 << 30)),
        reference=typed.loss.needs_reference,
        cpu=cpu,
        optimizer=backend.optimizer,
    )
    found = of_step(checkpointing=bool(backend.recomputes))
    why = "as asked" if backend.recomputes else None
    if backend.recomputes is None and found.recomputable and (why := _shortage(found, budget, device)):
        found = of_step(checkpointing=True)
    tables.facts(_lines(found, shape, backend.optimizer, why), table=sys.stdout.isatty())


def _shortage(found: Estimate, pass_tokens: int, device: torch.device) -> str | None:
    """Why the engine would not keep the activations of ``pass_tokens``, the most that a pass may have, on this machine as it is
    now; None: it would."""
    free = max(free_bytes(device) - found.weights, 0)
    return shortage_of(found.saved_per_token * pass_tokens, pass_tokens, found.gradients + found.moments, free)


def _shape(typed: Settings, name: str) -> Shape:
    """From the recipe's own keys, under the names that the shipped recipes give them, and the longest rows."""
    kind = getattr(typed.module, "DATA", None)
    recipe = asdict(typed.recipe)
    count = recipe.get("batch_size") or recipe.get("prompts_per_step")
    if kind is None or count is None:
        raise ConfigError(f"recipes/{name}.py: plan needs DATA, and batch_size or prompts_per_step in its Config")
    tokenizer = load_tokenizer(typed.model)
    renderer = Renderer(tokenizer, context(typed.model, tokenizer))
    rows = load_rows(typed.data, "train", typed.seed, typed.eval.limit)
    found = survey(kind, rows, renderer, typed.data, typed.rollout.max_tokens)
    completion = typed.rollout.max_tokens if kind == "rollouts" else 0
    lengths = sorted((len(one.tokens) + completion for one in found.sequences), reverse=True)
    count *= 2 if kind == "preferences" else 1
    longest = [length for length in lengths[:count] for _ in range(recipe.get("group_size") or 1)]
    return Shape(len(longest), longest[0], sum(longest))


def _lines(found: Estimate, shape: Shape, optimizer: str, recomputed: str | None) -> list[tuple[str, str]]:
    """``recomputed``: why activations are computed again in the backward pass; None: they are kept."""
    lines = [
        ("parameters", f"{found.parameters:,}, of which {found.trained:,} are trained"),
        ("step", f"{shape.sequences:,} sequences of up to {shape.longest:,} tokens, {shape.tokens:,} in all, at the most"),
        ("largest pass", f"{found.pass_tokens:,} tokens; backend.micro_batch_tokens lowers it"),
        ("weights", _size(found.weights)),
        ("gradients", _size(found.gradients)),
        ("optimizer", f"{_size(found.moments)}, {optimizer}"),
    ]
    if found.reference:
        lines.append(("reference", f"{_size(found.reference)}, a frozen copy"))
    lines += [
        ("activations", f"{_size(found.passing)} at the worst moment of the backward pass"),
        (
            "recomputed",
            f"yes: {recomputed}" if recomputed else "no; backend.activation_checkpointing=true saves memory, and costs time",
        ),
        ("allocator", f"{_size(found.allocator)} of freed blocks that the C library keeps"),
        ("memory", f"{_size(found.peak)} at the peak, besides {_size(PYTHON)} of Python and torch"),
        ("arithmetic", f"{found.flops_per_token * shape.tokens:.3g} floating-point operations a step, forward and backward"),
    ]
    return lines


def _size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
