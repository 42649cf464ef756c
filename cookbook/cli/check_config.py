"""``cookbook check config``, and ``cookbook train --dry-run``: everything typed and put together, nothing trained."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cookbook import paths, runfolder
from cookbook import recipe as recipes
from cookbook.check.bench import described
from cookbook.cli import tables
from cookbook.data import DataConfig, load_rows
from cookbook.engine.model import ModelConfig
from cookbook.session import Settings, settings

NEW = "<time>-<id>"  # what a new run's folder ends with


def dry_run(cfg: DictConfig, overrides: list[str]) -> None:
    """Types every key, and prints the configuration as YAML.

    Raises:
        ConfigError: as :func:`~cookbook.session.settings`.
    """
    settings(cfg)
    print(OmegaConf.to_yaml(cfg, resolve=True), end="")


def run(cfg: DictConfig, overrides: list[str]) -> None:
    """Types every key, and prints what the run would do.

    Raises:
        CookbookError: as :func:`~cookbook.session.settings`; or the run's folder is taken, or its local data are not there.
    """
    tables.facts(plan(cfg, settings(cfg)), table=sys.stdout.isatty())


def plan(cfg: DictConfig, typed: Settings) -> list[tuple[str, str]]:
    """What the run would do: a subject and a sentence each."""
    name = cfg.recipe.name
    kind = getattr(typed.module, "DATA", None)
    rows, held_out = (_num_rows(typed, which) for which in ("train", "eval"))
    lines = [
        ("recipe", _recipe(name, kind)),
        ("model", _model(typed.model)),
        ("data", f"{_source(typed.data)}, {_rows(rows)}; held out: {_rows(held_out, typed.eval.limit)}"),
        ("loss", f"{typed.loss.name}, {type(typed.loss).__module__}.{type(typed.loss).__qualname__}: {described(typed.loss)}"),
    ]
    if typed.reward is not None:
        lines.append(("reward", repr(typed.reward)))
    if kind == "rollouts":
        lines.append(("rollout", _rollout(typed)))
    if typed.loss.needs_reference:
        lines.append(("reference", "the weights the run starts from; one forward pass more per step"))
    lines += [
        ("optimizer", _optimizer(typed)),
        ("steps", _steps(asdict(typed.recipe), rows)),
        ("evaluation", _every(typed.eval.every, "before and after the run", "before and after the run only")),
        ("checkpoints", _checkpoints(typed)),
    ]
    if typed.trackers or typed.hooks:
        lines.append(("tells", ", ".join(type(one).__name__ for one in [*typed.trackers, *typed.hooks])))
    lines.append(("writes to", _folder(typed, name)))
    return lines


def _recipe(name: str, kind: str | None) -> str:
    found = next(found for found in recipes.available() if found.name == name)
    learns = f", learns from {kind}" if kind else ""
    return f"{paths.shown(found.path)}{learns}. {found.summary}"


def _model(model: ModelConfig) -> str:
    weights = "fresh weights" if model.random else "its weights"
    trained = f"a LoRA adapter of rank {model.lora_rank}" if model.lora_rank else "every parameter"
    return f"{paths.shown(Path(model.name))}, {weights}, {model.dtype}; trains {trained}"


def _source(data: DataConfig) -> str:
    return paths.shown(Path(data.path)) if data.path else f"{data.name}[{data.split}]"


def _num_rows(typed: Settings, which: Any) -> int | None:
    """Rows of a local file or folder; None of a dataset of the hub, which would have to be downloaded."""
    data = typed.data
    local = data.path is not None and (which == "train" or not data.eval_name)
    return len(load_rows(data, which, typed.seed, typed.eval.limit)) if local else None


def _rows(count: int | None, limit: int | None = None) -> str:
    if count is None:
        return "of the hub, not read"
    return (f"{count:,} rows" if count else "no rows") + (f" (eval.limit={limit})" if count == limit else "")


def _rollout(typed: Settings) -> str:
    rollout = typed.rollout
    return f"completions of up to {rollout.max_tokens} tokens at temperature {rollout.temperature:g}"


def _optimizer(typed: Settings) -> str:
    optim, schedule = typed.optim, typed.schedule
    warmup = f"{schedule.warmup_steps} steps" if schedule.warmup_ratio is None else f"{schedule.warmup_ratio:.0%} of the steps"
    rise = f", after a warm-up of {warmup}" if schedule.warmup_steps or schedule.warmup_ratio else ""
    clip = f"; gradient clipped at norm {optim.grad_clip_norm:g}" if optim.grad_clip_norm else "; gradient not clipped"
    return f"AdamW, learning rate {optim.lr:g}, {type(schedule).__name__.lower()}{rise}{clip}"


def _steps(recipe: dict[str, Any], rows: int | None) -> str:
    """As far as the recipe's own keys tell, under the names that the shipped recipes give them."""
    size, epochs, steps = recipe.get("batch_size"), recipe.get("epochs"), recipe.get("steps")
    if prompts := recipe.get("prompts_per_step"):
        return f"{steps}, of {prompts} prompts with {recipe.get('group_size')} completions each"
    if steps:
        return f"{steps}" + (f", of {size} rows" if size else "")
    if size and epochs and rows:
        return f"{epochs * -(-rows // size):,} at most: {epochs} x {rows:,} rows, {size} a step"
    return f"{epochs} x the rows, {size} a step" if size and epochs else "as the recipe says"


def _every(every: int | None, also: str, never: str) -> str:
    return f"every {every} steps, {also}" if every else never


def _checkpoints(typed: Settings) -> str:
    saving = typed.checkpoint
    if not saving.every and not saving.final:
        return "none"
    often = _every(saving.every, "and the last" if saving.final else "not the last", "after the last step")
    return f"{often}; {f'the newest {saving.keep} are kept' if saving.keep else 'all are kept'}"


def _folder(typed: Settings, name: str) -> str:
    folder, checkpoint = runfolder.choose(typed.out, typed.resume, name, NEW)
    going_on = f", going on from {paths.shown(checkpoint.absolute())}" if checkpoint else ""
    return f"{folder}{going_on}"
