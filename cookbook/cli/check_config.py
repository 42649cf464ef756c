"""``cookbook check config``, and ``cookbook train --dry-run``: everything typed and put together, nothing trained."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cookbook import advice, paths, preflight, runfolder
from cookbook import recipe as recipes
from cookbook.backends.local import LocalConfig
from cookbook.check.bench import described
from cookbook.checkpoints import manifest
from cookbook.cli import conf_defaults, tables
from cookbook.data import DataConfig
from cookbook.engine.model import AUTO, ModelConfig
from cookbook.identity import Identity
from cookbook.session import Settings, checked

OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW with 8-bit moments", "adafactor": "Adafactor"}


def dry_run(cfg: DictConfig, overrides: list[str]) -> None:
    """Check every key, and print the configuration as YAML.

    Raises:
        CookbookError: as :func:`~cookbook.session.checked`.
    """
    checked(cfg, overrides)
    print(OmegaConf.to_yaml(cfg, resolve=True), end="")


@runfolder.warnings_shown()
def run(cfg: DictConfig, overrides: list[str]) -> None:
    """Check everything that a run checks before its first step, and print what the run would do.

    Raises:
        CookbookError: what the run would refuse, as far as that can be known without weights and without the hub.
    """
    tables.facts(plan(cfg, overrides), table=sys.stdout.isatty())


def plan(cfg: DictConfig, overrides: list[str]) -> list[tuple[str, str]]:
    """What the run would do: a subject and a sentence each. Warnings go to the log.

    Raises:
        CookbookError: as :func:`run`.
    """
    typed = checked(cfg, overrides)
    identity = Identity(
        runfolder.plain(cfg),
        typed.module.Config,
        lambda: conf_defaults.composed(cfg.recipe.name),
        force=typed.resume == "force",
    )
    folder, resume_from = runfolder.examine(typed.out, typed.resume, cfg, identity)
    done = int(manifest.read(resume_from)["step"]) if resume_from is not None else 0
    found = preflight.examine(typed, identity, folder, done)
    advice.warn(typed, found.rows, found.renderer)
    name = cfg.recipe.name
    kind = getattr(typed.module, "DATA", None)
    rows, held_out = (found.rows.counts.get(which) for which in preflight.SPLITS)
    place = "hub" if isinstance(typed.backend, LocalConfig) else "server"
    lines = [
        ("recipe", _recipe(name, kind)),
        ("model", _model(typed.model) + ("" if found.renderer else f"; of the {place}, not read")),
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
        ("evaluation", _evaluation(typed, held_out)),
        ("checkpoints", _checkpoints(typed)),
    ]
    if typed.trackers or typed.hooks:
        lines.append(("tells", ", ".join(type(one).__name__ for one in [*typed.trackers, *typed.hooks])))
    going_on = f", going on from {paths.shown(resume_from.absolute())}" if resume_from else ""
    lines.append(("writes to", f"{folder}{going_on}"))
    return lines


def _recipe(name: str, kind: str | None) -> str:
    found = next(found for found in recipes.available() if found.name == name)
    learns = f", learns from {kind}" if kind else ""
    return f"{paths.shown(found.path)}{learns}. {found.summary}"


def _model(model: ModelConfig) -> str:
    weights = "fresh weights" if model.random else "its weights"
    trained = f"a LoRA adapter of rank {model.lora_rank}" if model.lora_rank else "every parameter"
    dtype = "the type of its files" if model.dtype == AUTO else model.dtype
    return f"{paths.shown(Path(model.name))}, {weights}, {dtype}; trains {trained}"


def _source(data: DataConfig) -> str:
    return paths.shown(Path(data.path)) if data.path else f"{data.name}[{data.split}]"


def _rows(count: int | None, limit: int | None = None) -> str:
    if count is None:
        return "of the hub, not read"
    sampled = f", of which {preflight.RENDERED_ROWS:,} were checked" if count > preflight.RENDERED_ROWS else ""
    return (f"{count:,} rows" if count else "no rows") + (f" (eval.limit={limit})" if count == limit else "") + sampled


def _rollout(typed: Settings) -> str:
    rollout = typed.rollout
    return f"completions of up to {rollout.max_tokens} tokens at temperature {rollout.temperature:g}"


def _optimizer(typed: Settings) -> str:
    optim, schedule = typed.optim, typed.schedule
    warmup = f"{schedule.warmup_steps} steps" if schedule.warmup_steps else f"{schedule.warmup_ratio or 0:.0%} of the steps"
    rise = f", after a warm-up of {warmup}" if schedule.warmup_steps or schedule.warmup_ratio else ""
    clip = f"; gradient clipped at norm {optim.grad_clip_norm:g}" if optim.grad_clip_norm else "; gradient not clipped"
    rule = typed.backend.optimizer if isinstance(typed.backend, LocalConfig) else "adamw"
    return f"{OPTIMIZERS.get(rule, rule)}, learning rate {optim.lr:g}, {type(schedule).__name__.lower()}{rise}{clip}"


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


def _evaluation(typed: Settings, held_out: int | None) -> str:
    if held_out == 0:
        return "none, without held-out rows; data.eval_path and data.eval_fraction give some"
    return _every(typed.eval.every, "before and after the run", "before and after the run only")


def _checkpoints(typed: Settings) -> str:
    saving = typed.checkpoint
    if not saving.every and not saving.final:
        return "none"
    often = _every(saving.every, "and the last" if saving.final else "not the last", "after the last step")
    return f"{often}; {f'the newest {saving.keep} are kept' if saving.keep else 'all are kept'}"
