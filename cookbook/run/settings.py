"""Typed settings of a run, and the checks that need neither data nor a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cookbook.backends.model_source import sampling_target
from cookbook.checkpoints import CheckpointConfig
from cookbook.config import OptimConfig
from cookbook.config import recipe as recipes
from cookbook.config.nodes import build, plain_node
from cookbook.config.optim import Schedule
from cookbook.config.typed import convert
from cookbook.data import DataConfig
from cookbook.data.stream import NOT_COUNTED
from cookbook.deployments.weight_sync import WeightSyncConfig
from cookbook.engine.model import ModelConfig, check_trainable
from cookbook.engine.optimizer import Adafactor, AdamW, update_rule
from cookbook.errors import ConfigError
from cookbook.jobs.backend import JobBackend
from cookbook.losses import Loss
from cookbook.losses.base import Scope
from cookbook.protocols import (
    Backend,
    DeploymentConfig,
    OptimizerBackend,
    PlannedBackend,
    Preflight,
    RankBackend,
    Reward,
    SeparateDeployment,
    Tracker,
)
from cookbook.run.hooks import Hook
from cookbook.sampling.environments import EnvironmentConfig
from cookbook.sampling.evaluation import EvalConfig
from cookbook.sampling.rewards import Weighted, model_rewards
from cookbook.sampling.rollouts import RolloutConfig


@dataclass
class Settings:
    """A typed configuration: one field per group of ``conf/``, and the recipe's module."""

    seed: int
    out: str | None
    resume: str
    module: ModuleType
    recipe: Any
    model: ModelConfig
    backend: Backend
    data: DataConfig
    loss: Loss
    reward: Reward | None
    env: EnvironmentConfig | None
    rollout: RolloutConfig
    deployment: DeploymentConfig
    weight_sync: WeightSyncConfig
    optim: OptimConfig
    schedule: Schedule
    checkpoint: CheckpointConfig
    eval: EvalConfig
    trackers: list[Tracker]
    hooks: list[Hook]

    @property
    def numbered(self) -> EnvironmentConfig | None:
        """The environment, if its rows are numbers and the run reads no data."""
        return self.env if self.env is not None and not self.env.contract.reads_rows else None

    @property
    def has_teacher(self) -> bool:
        """Whether the recipe has the keys of a teacher: it learns from the teacher, and a reward only measures."""
        return hasattr(self.recipe, "teacher") and hasattr(self.recipe, "teacher_url")

    @property
    def data_kind(self) -> str | None:
        """The kind of data that the recipe learns from, a key of ``PROVIDES``; None if the recipe does not say."""
        return getattr(self.module, "DATA", None)


def settings(cfg: DictConfig, *, trains: bool = True) -> Settings:
    """Return every part of a composed configuration, typed. No model and no data are loaded.

    ``trains``: whether the recipe runs, so that an environment has to suit its data. An evaluation may have any environment.

    Raises:
        ConfigError: an unknown or missing key, a wrong type or value, or parts that do not suit each other.
    """
    module = recipes.load(cfg.recipe.name)
    pin_model(cfg)
    if isinstance(cfg.seed, bool) or not isinstance(cfg.seed, int) or cfg.seed < 0:
        raise ConfigError(f"seed: expected an integer >= 0, got {cfg.seed!r}")
    if isinstance(cfg.resume, bool):
        remedy = "resume=auto" if cfg.resume else "resume=never"
        raise ConfigError(f"resume: expected auto, never, force or a checkpoint, got {str(cfg.resume).lower()}; write {remedy}")
    typed = Settings(
        seed=cfg.seed,
        out=convert(cfg.out, str | None, "out"),
        resume=convert(cfg.resume, str, "resume"),
        module=module,
        recipe=build(cfg.recipe, "recipe", module.Config),
        backend=job_backend(cfg, cfg.seed, getattr(module, "DATA", None)) or build(cfg.backend, "backend"),
        reward=build(cfg.reward, "reward") if cfg.reward else None,
        env=build(cfg.env, "env") if cfg.get("env") else None,
        trackers=[build(node, f"tracker.{name}") for name, node in (cfg.tracker or {}).items()],
        hooks=[build(node, f"hook.{name}") for name, node in (cfg.hook or {}).items()],
        **{name: build(cfg[name], name) for name in ("model", "data", "loss", "rollout", "deployment", "weight_sync")},
        **{name: build(cfg[name], name) for name in ("optim", "schedule", "checkpoint", "eval")},
    )
    typed.model = _with_dropout(typed.model, typed.data_kind)
    _check_recipe(cfg.recipe.name, typed, trains=trains)
    if trains:
        check_trainable(typed.model)
    _check_updates(typed)
    _check_credit(typed)
    _check_streaming(typed)
    if trains:
        _check_best(typed)
        _check_ahead(typed)
    _check_optimizer(typed.backend, typed.optim)
    return typed


def pin_model(cfg: DictConfig) -> None:
    """Replace a run in ``model.name`` by the folder of its checkpoint, so that a resumed run starts from the same weights.

    Raises:
        CheckpointError: the run has no checkpoint, or its weights are on a server.
    """
    name = OmegaConf.select(cfg, "model.name", default=None, throw_on_missing=False)
    if isinstance(name, str) and (source := sampling_target(name)) != name:
        OmegaConf.update(cfg, "model.name", source)


# Kinds of data whose losses compare log-probabilities of two passes, which dropout would make unequal.
WITHOUT_DROPOUT = ("preferences", "labels", "rollouts")


def _with_dropout(model: ModelConfig, kind: str | None) -> ModelConfig:
    """Return the model with the recipe's default dropout: 0 for preferences and RL, else the model's own."""
    return replace(model, dropout=0.0) if model.dropout is None and kind in WITHOUT_DROPOUT else model


def job_backend(cfg: DictConfig, seed: int, kind: str | None = None) -> JobBackend | None:
    """Return the backend of a job whose trainer computes with the configured backend; None with ``job=none``.

    Raises:
        ConfigError: a wrong key or value.
    """
    if not cfg.get("job"):
        return None
    backend, model = (plain_node(cfg[name], name) for name in ("backend", "model"))
    if model.get("dropout") is None and kind in WITHOUT_DROPOUT:
        model["dropout"] = 0.0
    return JobBackend(build(cfg.job, "job"), build(cfg.backend, "backend"), backend, model, seed)


def checked(cfg: DictConfig, overrides: list[str]) -> Settings:
    """Return :func:`settings` after all checks that need neither data nor a model.

    Raises:
        CookbookError: the first problem.
    """
    typed = settings(cfg)
    _check_random_weights(typed.model, overrides)
    # A class that does not keep the contract is refused before a model is loaded.
    _ = typed.env and typed.env.contract
    preflight(typed, typed.backend, typed.deployment, typed.reward, *typed.trackers, *typed.hooks)
    _check_ranks(typed)
    if typed.has_teacher:
        _check_teacher(typed)
    for key, reward in model_rewards(typed.reward).items():
        _check_place(f"{key}.model", f"{key}.url", reward.model, reward.url, typed.backend)
    return typed


def preflight(typed: Settings, *parts: object) -> None:
    """Let each part refuse: a package is missing, a device is absent, or a backend does not suit the part."""
    for part in parts:
        if isinstance(part, Preflight):
            part.preflight(typed.model, typed.backend)


# Inputs that the datums of a recipe have, by the kind of data that the recipe names in DATA.
PROVIDES = {
    "conversations": {"target_tokens", "weights"},
    "preferences": {"target_tokens", "weights", "reference_logprobs"},
    "labels": {"target_tokens", "weights", "labels", "reference_logprobs"},
    "rollouts": {"target_tokens", "weights", "advantages", "sampling_logprobs", "reference_logprobs"},
}


def _check_recipe(name: str, typed: Settings, *, trains: bool) -> None:
    """Reject a loss, a reward or an environment that does not suit the recipe's data."""
    kind, loss = typed.data_kind, typed.loss
    if kind is None:
        return
    if kind not in PROVIDES:
        raise ConfigError(f"recipes/{name}.py: DATA must be one of {', '.join(PROVIDES)}, got {kind!r}")
    if trains and typed.env is not None and kind != "rollouts":
        raise ConfigError(f"env: recipe={name} trains on {kind}, which no environment gives; choose recipe=grpo, or env=none")
    if kind == "rollouts" and typed.reward is None and typed.env is None and not typed.has_teacher:
        raise ConfigError(f"reward: recipe={name} learns from rewards; choose one, for example reward=number")
    if kind != "rollouts" and typed.data.curriculum is not None:
        raise ConfigError(f"data.curriculum: recipe={name} samples no prompts, so that they have no pass rate; remove the key")
    what = f"recipe={name} trains on {kind}, and {type(loss).__name__}"
    if missing := sorted(loss.needs - PROVIDES[kind]):
        raise ConfigError(f"loss: {what} needs {', '.join(missing)}; choose another loss (cookbook list losses)")
    if kind == "labels" and "labels" not in loss.needs | loss.reads:
        raise ConfigError(
            f"loss: {what} reads no labels, so it would learn undesirable answers; choose another loss, such as kto"
        )
    if (loss.scope is Scope.pair) != (kind == "preferences"):
        pairs = "compares pairs" if loss.scope is Scope.pair else "does not compare pairs"
        raise ConfigError(f"loss: {what} {pairs}; choose another loss (cookbook list losses)")


def _check_updates(typed: Settings) -> None:
    """Raises ConfigError: weight syncs are due between the steps that sample, so that none of these would have new weights."""
    updates, every = getattr(typed.recipe, "updates", 1), typed.weight_sync.every
    if updates > 1 and every % updates and updates % every:
        raise ConfigError(
            f"weight_sync.every={every}: with recipe.updates={updates} only one step in {updates} samples; use a multiple of "
            f"{updates}, or 1"
        )


def _check_credit(typed: Settings) -> None:
    """Raises ConfigError: rewards that are normalized one by one, and an option that changes their sum."""
    reward: object = typed.reward
    if not isinstance(reward, Weighted) or reward.normalize is None or typed.data_kind != "rollouts":
        return
    if (kind := getattr(typed.recipe, "advantage", "zscore")) != "zscore":
        raise ConfigError(f"recipe.advantage={kind}: reward.normalize=each divides by standard deviations; use zscore")
    if typed.env is not None and typed.env.gamma is not None:
        raise ConfigError("env.gamma: reward.normalize=each compares whole episodes; remove one of the two keys")
    if typed.rollout.overlong is not None:
        raise ConfigError(
            "rollout.overlong: reward.normalize=each normalizes the rewards of reward.parts, and no penalty; give the length a "
            "reward of its own, or remove the key"
        )


def _check_ahead(typed: Settings) -> None:
    """Raises ConfigError: the run cannot sample ahead, or its loss does not correct for older weights."""
    if not typed.rollout.ahead:
        return
    if typed.data_kind not in (None, "rollouts"):
        raise ConfigError(f"rollout.ahead: the recipe trains on {typed.data_kind} and samples no batches; remove the key")
    if typed.data.streaming:
        raise ConfigError("rollout.ahead: sampled batches are stored with the numbers of their rows; set data.streaming=false")
    if (updates := getattr(typed.recipe, "updates", 1)) > 1:
        raise ConfigError(f"rollout.ahead: only one step in {updates} samples; set recipe.updates=1, or rollout.ahead=0")
    if "sampling_logprobs" not in typed.loss.needs and not typed.rollout.ahead_uncorrected:
        raise ConfigError(
            f"rollout.ahead: {type(typed.loss).__name__} does not read sampling_logprobs, so that nothing corrects for older "
            "weights; choose another loss, such as loss=grpo, or set rollout.ahead_uncorrected=true"
        )
    has_servers = isinstance(typed.deployment, SeparateDeployment) and typed.deployment.has_own_weights
    if isinstance(typed.backend, RankBackend | JobBackend) and typed.backend.num_ranks > 1 and not has_servers:
        raise ConfigError(
            f"rollout.ahead: several ranks compute one call at a time, got {typed.backend.num_ranks}; set deployment=vllm, "
            "or rollout.ahead=0"
        )
    if typed.rollout.ahead > 1 and has_servers:
        raise ConfigError(
            f"rollout.ahead: servers hold one version of the weights, got {typed.rollout.ahead}; set it to 1, or use "
            "deployment=embedded"
        )


def _check_teacher(typed: Settings) -> None:
    """Raises ConfigError: a recipe with a teacher has none, or keys that do not suit one."""
    name, url, rollout = typed.recipe.teacher, typed.recipe.teacher_url, typed.rollout
    if not name:
        raise ConfigError("recipe.teacher: missing; give a run, a checkpoint, a model folder or a hub id")
    if rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature: a teacher computes logprobs at temperature 1, got {rollout.temperature:g}; remove the key"
        )
    if rollout.refill > 1:
        raise ConfigError(
            "rollout.refill: replaces groups whose rewards are equal, and with a teacher these teach as much; remove the key"
        )
    if typed.reward is None and typed.env is None and typed.data.curriculum is not None:
        raise ConfigError(
            "data.curriculum: chooses prompts by their rewards, and there is no reward; choose one, or remove the key"
        )
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"recipe.teacher_url: expected http://host:port or https://..., got {url!r}")
    _check_place("recipe.teacher", "recipe.teacher_url", name, url, typed.backend)


def _check_place(key: str, url_key: str, name: str, url: str | None, backend: Backend) -> None:
    """Raises ConfigError: a second model without a server has to be on one."""
    if url is not None:
        return
    if name.startswith("tinker://") and isinstance(backend, PlannedBackend):
        raise ConfigError(f"{key}: {name} is a checkpoint on a server; set {url_key} to the server's address")
    if isinstance(backend, JobBackend) or (isinstance(backend, RankBackend) and backend.num_ranks > 1):
        what = "teacher" if key == "recipe.teacher" else "reward model"
        raise ConfigError(
            f"{key}: a {what} is loaded into this process, and the model trains in others; serve the {what} with "
            f"`cookbook serve`, and set {url_key} to its address"
        )


def _check_streaming(typed: Settings) -> None:
    """Raises ConfigError: the run needs the number of the rows of a stream."""
    if not typed.data.streaming or typed.numbered is not None:
        return
    if typed.env is not None:
        raise ConfigError("data.streaming: the rows of an environment are read at the start; set data.streaming=false")
    if typed.rollout.refill > 1 or typed.data.curriculum is not None:
        key = "rollout.refill" if typed.rollout.refill > 1 else "data.curriculum"
        raise ConfigError(f"data.streaming: {key} chooses among all prompts, which a stream does not hold; remove {key}")
    recipe = asdict(typed.recipe)
    # By the keys of the shipped recipes.
    if "epochs" in recipe and recipe.get("steps", 0) is None:
        raise ConfigError(f"recipe.steps: missing, and {NOT_COUNTED}; set recipe.steps to the number of optimizer steps")


def _check_best(typed: Settings) -> None:
    """Raises ConfigError: the run would compare evaluations that it does not make, or by no metric."""
    if typed.eval.patience is not None and typed.checkpoint.best is None:
        raise ConfigError(
            f"eval.patience={typed.eval.patience}: no metric says which evaluation is better; add checkpoint.best=eval/loss"
        )
    if typed.checkpoint.best is not None and typed.eval.every is None:
        raise ConfigError(
            f"checkpoint.best={typed.checkpoint.best}: eval.every=null evaluates only before and after the run; set eval.every"
        )


def _check_optimizer(backend: Backend, optim: OptimConfig) -> None:
    """Reject options that the optimizer does not have, or that make sense with another optimizer only."""
    adam, name = optim.adam(), backend.optimizer if isinstance(backend, OptimizerBackend) else AdamW.name
    update_rule(name).options(adam)
    if name != Adafactor.name and adam.beta1 == adam.beta2 == 0.0:
        raise ConfigError(
            f"optim: beta1=0 and beta2=0 are for backend.optimizer=adafactor; with {name} every step would be the gradient's "
            "sign. Set backend.optimizer=adafactor, or optim=adamw"
        )


def _check_ranks(typed: Settings) -> None:
    """Raises ConfigError: the run would sample from weights in training that are sharded over ranks."""
    backend = typed.backend
    if not (isinstance(backend, RankBackend | JobBackend) and backend.num_ranks > 1):
        return
    if (shard := backend.shard_of(typed.model)) == "none":
        return
    if isinstance(typed.deployment, SeparateDeployment) and typed.deployment.has_own_weights:
        return
    if typed.data_kind == "rollouts":
        raise ConfigError(
            f"backend.shard: a recipe with rollouts does not sample from sharded weights, got {shard}; set deployment=vllm, or "
            "backend.shard=none if the model fits on every rank"
        )
    if typed.eval.answers:
        raise ConfigError(
            f"backend.shard: evaluation does not sample answers from sharded weights, got {shard}; set eval.answers=false to "
            "evaluate the loss only, deployment=vllm, or backend.shard=none"
        )


def _check_random_weights(model: ModelConfig, overrides: list[str]) -> None:
    """Reject random weights if the command names a model but does not say ``random``, which a recipe's default sets.

    Raises:
        ConfigError: the weights of ``model.name`` would be ignored.
    """
    keys = {override.partition("=")[0] for override in overrides}
    if model.random and "model.name" in keys and not {"model", "model.random"} & keys:
        raise ConfigError(
            f"model.name: this recipe initializes random weights by default and would ignore those of {model.name!r}; set "
            "model.random=false to load them, or model.random=true to keep random weights"
        )
