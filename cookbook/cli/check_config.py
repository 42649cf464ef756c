"""``cookbook check config`` and ``cookbook train --dry-run``: build and check everything, train nothing."""

from __future__ import annotations

import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from cookbook.check.bench import described
from cookbook.checkpoints import manifest
from cookbook.cli.hydra import conf_files
from cookbook.config import recipe as recipes
from cookbook.data import DataConfig
from cookbook.data.source import source_text
from cookbook.engine.model import AUTO, ModelConfig
from cookbook.engine.shape import Shape, is_adapter
from cookbook.protocols import Backend, ModelReward, OptimizerBackend, PlannedBackend, PrecisionBackend, SizedDeployment
from cookbook.run import folder as run_folder
from cookbook.run import preflight
from cookbook.run.data import SPLITS
from cookbook.run.identity import Identity
from cookbook.run.settings import Settings, checked
from cookbook.sampling.rewards import model_rewards
from cookbook.terminal import warnings_shown
from cookbook.types import JsonObject
from cookbook.utils import paths, tables

OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "AdamW with 8-bit moments", "adafactor": "Adafactor"}
# Measured on CPUs with 28 layers, without the time of products.
SLOW_ON_GPU = "embedded: 9 to 13 ms of Python per token, so sampling is the bottleneck on a GPU; deployment=vllm avoids it"
NEEDS_REFERENCE = "the weights the run starts from; one more forward pass per step"


def dry_run(cfg: DictConfig, overrides: list[str]) -> None:
    """Check every key, and print the configuration as YAML.

    Raises:
        CookbookError: as :func:`~cookbook.run.settings.checked`.
    """
    checked(cfg, overrides)
    print(OmegaConf.to_yaml(cfg, resolve=True), end="")


@warnings_shown()
def run(cfg: DictConfig, overrides: list[str]) -> None:
    """Check everything that a run checks before its first step, and describe the run.

    Raises:
        CookbookError: the run would fail for a reason that is visible without weights and without the hub.
    """
    tables.facts(plan(cfg, overrides), table=sys.stdout.isatty())


def plan(cfg: DictConfig, overrides: list[str]) -> list[tuple[str, str]]:
    """Return a description of the run, as pairs of subject and sentence. Warnings go to the log.

    Raises:
        CookbookError: as :func:`run`.
    """
    typed = checked(cfg, overrides)
    identity = Identity(
        run_folder.plain(cfg),
        typed.module.Config,
        lambda: conf_files.composed(cfg.recipe.name),
        force=typed.resume == "force",
    )
    folder, resume_from = run_folder.examine(typed.out, typed.resume, cfg, identity)
    done = int(manifest.read(resume_from)["step"]) if resume_from is not None else 0
    split_rows, renderer, shape = preflight.examine(typed, identity, folder, done)
    preflight.warn(typed, split_rows, renderer)
    name = cfg.recipe.name
    kind = typed.data_kind
    rows, held_out = (split_rows.counts.get(which) for which in SPLITS)
    place = "hub" if isinstance(typed.backend, PlannedBackend) else "server"
    resumed = f", resuming from {paths.shown(resume_from.absolute())}" if resume_from else ""
    trained = _streamed(typed.data) if split_rows.is_stream("train") else _rows(rows)
    counts = f"{trained}; held out: {_rows(held_out, typed.eval.limit)}"
    completions = f"completions of up to {typed.rollout.max_tokens} tokens at temperature {typed.rollout.temperature:g}"
    lines = [
        ("recipe", _recipe(name, kind)),
        ("model", _model(typed.model, shape) + ("" if renderer else f"; of the {place}, not read")),
        ("data", f"{source_text(typed.data)}, {counts}" if typed.numbered is None else ""),
        ("environment", _environment(typed, counts)),
        ("loss", f"{typed.loss.name}, {type(typed.loss).__module__}.{type(typed.loss).__qualname__}: {described(typed.loss)}"),
        ("reward", _reward(typed)),
        ("reward model", "; ".join(map(_reward_model, model_rewards(typed.reward).values()))),
        ("rollout", completions if kind == "rollouts" else ""),
        ("teacher", _teacher(typed) if typed.has_teacher else ""),
        ("reference", NEEDS_REFERENCE if typed.loss.needs_reference and not typed.has_teacher else ""),
        ("optimizer", _optimizer(typed)),
        ("precision", precision(typed.backend, typed.model.dtype)),
        ("steps", _steps(asdict(typed.recipe), rows)),
        ("evaluation", _evaluation(typed, held_out)),
        ("deployment", _deployment(typed)),
        ("checkpoints", _checkpoints(typed)),
        ("trackers, hooks", ", ".join(type(part).__name__ for part in [*typed.trackers, *typed.hooks])),
        ("writes to", f"{folder}{resumed}"),
    ]
    return [(subject, sentence) for subject, sentence in lines if sentence]


def _recipe(name: str, kind: str | None) -> str:
    info = next(info for info in recipes.available() if info.name == name)
    learns = f", learns from {kind}" if kind else ""
    return f"{paths.shown(info.path)}{learns}. {info.summary}"


def _model(model: ModelConfig, shape: Shape | None) -> str:
    weights = "fresh weights" if model.random else "its weights"
    trained = _trained(model)
    dtype = "the type of its files" if model.dtype == AUTO else model.dtype
    share = f": {shape.trained.text}" if shape is not None and shape.trained is not None and is_adapter(model) else ""
    return f"{paths.shown(Path(model.name))}, {weights}, {dtype}; trains {trained}{share}{_dropout(model)}"


def _trained(model: ModelConfig) -> str:
    if paths.holds_adapter(model.name):
        return "the LoRA adapter in this folder, which continues"
    return f"a LoRA adapter of rank {model.lora_rank}" if model.lora_rank else "every parameter"


def _dropout(model: ModelConfig) -> str:
    """Describe ``model.dropout``; empty if it is the model's own, or off."""
    return f"; dropout {model.dropout:g}" if model.dropout else ""


def _rows(count: int | None, limit: int | None = None) -> str:
    if count is None:
        return "of the hub, not read"
    sampled = f", of which {preflight.RENDERED_ROWS:,} were checked" if count > preflight.RENDERED_ROWS else ""
    return (f"{count:,} rows" if count else "no rows") + (f" (eval.limit={limit})" if count == limit else "") + sampled


def _streamed(data: DataConfig) -> str:
    order = f"shuffled in a buffer of {data.shuffle_buffer:,} rows" if data.shuffle else "in the order of the data"
    return f"streamed, {order}; the first {preflight.RENDERED_ROWS:,} rows were checked"


def _environment(typed: Settings, counts: str) -> str:
    """Describe the environment, its required keys and its rows; empty without an environment."""
    config = typed.env
    if config is None:
        return ""
    required = [field.name for field in fields(config) if field.default is MISSING and field.default_factory is MISSING]
    name = ", ".join([type(config).__name__, *(f"{key}={getattr(config, key)}" for key in required)])
    tools = [str(tool["function"]["name"]) for tool in config.contract.tools]
    answers = f"tools: {', '.join(tools)}" if tools else "answers text with text"
    rows = "plays the rows of the data" if typed.numbered is None else f"numbered rows (env.rows): {counts}"
    return f"{name}; {answers}; up to {config.max_turns} turns; {rows}"


def _reward(typed: Settings) -> str:
    own = repr(typed.reward) if typed.reward is not None else ""
    if typed.env is None:
        return own
    return f"the environment's{f'; if it gives none, {own}' if own else ''}"


def _teacher(typed: Settings) -> str:
    name, url = typed.recipe.teacher, typed.recipe.teacher_url
    return f"{name}{f' at {url}' if url else ''} grades every sampled token; frozen"


def _reward_model(reward: ModelReward) -> str:
    return f"{reward.model}{f' at {reward.url}' if reward.url else ''} compares the completions of a group; frozen"


def _optimizer(typed: Settings) -> str:
    optim, schedule = typed.optim, typed.schedule
    warmup = f"{schedule.warmup_steps} steps" if schedule.warmup_steps else f"{schedule.warmup_ratio or 0:.0%} of the steps"
    rise = f", after a warm-up of {warmup}" if schedule.warmup_steps or schedule.warmup_ratio else ""
    clip = f"; gradient clipped at norm {optim.grad_clip_norm:g}" if optim.grad_clip_norm else "; gradient not clipped"
    rule = typed.backend.optimizer if isinstance(typed.backend, OptimizerBackend) else "adamw"
    return f"{OPTIMIZERS.get(rule, rule)}, learning rate {optim.lr:g}, {type(schedule).__name__.lower()}{rise}{clip}"


def _deployment(typed: Settings) -> str:
    """Describe the servers that sample, or why the trainer's sampler is slow here; else empty."""
    if isinstance(typed.deployment, SizedDeployment):
        return typed.deployment.size_text
    backend = typed.backend
    has_gpu = isinstance(backend, PrecisionBackend) and backend.torch_device().type == "cuda"
    return SLOW_ON_GPU if has_gpu and typed.data_kind == "rollouts" else ""


def precision(backend: Backend, dtype: str) -> str:
    """Describe the precision of products with weights of ``dtype`` on this machine; empty if another machine computes."""
    return backend.precision.described(backend.torch_device(), dtype) if isinstance(backend, PrecisionBackend) else ""


def _steps(recipe: JsonObject, rows: int | None) -> str:
    """Describe the steps from the recipe's keys, under the names that the packaged recipes use."""
    size, epochs, steps = recipe.get("batch_size"), recipe.get("epochs"), recipe.get("steps")
    if prompts := recipe.get("prompts_per_step"):
        batch = f"{prompts} prompts with {recipe.get('group_size')} completions each"
        updates = recipe.get("updates", 1)
        return f"{steps}, of {batch}" if updates == 1 else f"{steps}, {updates} for each batch of {batch}"
    if steps:
        return f"{steps}" + (f", of {size} rows" if size else "")
    if size and epochs and rows:
        return f"at most {epochs * -(-rows // size):,}: {epochs} x {rows:,} rows, {size} per step"
    return f"{epochs} x the rows, {size} per step" if size and epochs else "chosen by the recipe"


def _every(every: int | None, also: str, never: str) -> str:
    return f"every {every} steps, {also}" if every and every > 1 else f"every step, {also}" if every else never


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
