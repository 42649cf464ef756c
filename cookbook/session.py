"""From a configuration to a run: type every part, refuse what makes no sense, build, train, tell how it went."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig

from cookbook import advice, preflight, report, runfolder, terminal
from cookbook import recipe as recipes
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.remote import pointers
from cookbook.checkpoints import CheckpointConfig, manifest, store
from cookbook.checkpoints.cadence import Progress
from cookbook.config import OptimConfig, build
from cookbook.data import DataConfig, Refusals, Renderer
from cookbook.engine.model import ModelConfig
from cookbook.engine.update_rules import Adafactor, AdamW, update_rule
from cookbook.errors import CheckpointError, ConfigError, CookbookError, HookError
from cookbook.evaluation import EvalConfig
from cookbook.health import Health
from cookbook.hooks import Hook
from cookbook.identity import Identity
from cookbook.interrupt import Interrupted
from cookbook.losses import Loss
from cookbook.losses.base import Scope
from cookbook.paths import packaged
from cookbook.protocols import Backend, Deployment, DeploymentConfig, Reward, Sampler, Tracker, TrainingClient
from cookbook.rewards import Judge
from cookbook.rollout import RolloutConfig
from cookbook.run import Run
from cookbook.schedules import Schedule
from cookbook.status import Status
from cookbook.typed import convert
from cookbook.types import SamplingParams
from cookbook.weight_sync import DeploymentSyncer, WeightSyncConfig

log = logging.getLogger("cookbook")


@dataclass
class Settings:
    """A configuration, typed: one field a group of ``conf/``, and the recipe's module."""

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
    rollout: RolloutConfig
    deployment: DeploymentConfig
    weight_sync: WeightSyncConfig
    optim: OptimConfig
    schedule: Schedule
    checkpoint: CheckpointConfig
    eval: EvalConfig
    trackers: list[Tracker]
    hooks: list[Hook]


def settings(cfg: DictConfig) -> Settings:
    """Types every part of a composed configuration. Loads no model and no data.

    Raises:
        ConfigError: an unknown or missing key, a wrong type or value, parts that do not go together.
    """
    module = recipes.load(cfg.recipe.name)
    typed = Settings(
        seed=_integer(cfg, "seed"),
        out=convert(cfg.out, str | None, "out"),
        resume=convert(cfg.resume, str, "resume"),
        module=module,
        recipe=build(cfg.recipe, "recipe", module.Config),
        reward=build(cfg.reward, "reward") if cfg.reward else None,
        trackers=[build(node, f"tracker.{name}") for name, node in (cfg.tracker or {}).items()],
        hooks=[build(node, f"hook.{name}") for name, node in (cfg.hook or {}).items()],
        **{
            name: build(cfg[name], name)
            for name in ("model", "backend", "data", "loss", "rollout", "deployment", "weight_sync")
        },
        **{name: build(cfg[name], name) for name in ("optim", "schedule", "checkpoint", "eval")},
    )
    _check_parts(cfg.recipe.name, module, typed.loss, typed.reward)
    _check_optimizer(typed.backend, typed.optim)
    return typed


def _integer(cfg: DictConfig, key: str) -> int:
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}: expected an integer >= 0, got {value!r}")
    return value


# What the datums of a recipe carry, by the kind of data it names in DATA.
PROVIDES = {
    "conversations": {"target_tokens", "weights"},
    "preferences": {"target_tokens", "weights", "reference_logprobs"},
    "rollouts": {"target_tokens", "weights", "advantages", "sampling_logprobs", "reference_logprobs"},
}


def _check_parts(name: str, module: ModuleType, loss: Loss, reward: Reward | None) -> None:
    """Refuses parts that cannot work on what the recipe feeds them, before anything loads."""
    kind = getattr(module, "DATA", None)
    if kind is None:
        return
    if kind not in PROVIDES:
        raise ConfigError(f"recipes/{name}.py: DATA must be one of {', '.join(PROVIDES)}, got {kind!r}")
    if kind == "rollouts" and reward is None:
        raise ConfigError(f"reward: recipe={name} learns from rewards; choose one, for example reward=number")
    what = f"recipe={name} trains on {kind}, and {type(loss).__name__}"
    if missing := sorted(loss.needs - PROVIDES[kind]):
        raise ConfigError(f"loss: {what} needs {', '.join(missing)}; choose another loss (cookbook list losses)")
    if (loss.scope is Scope.pair) != (kind == "preferences"):
        pairs = "compares pairs" if loss.scope is Scope.pair else "does not compare pairs"
        raise ConfigError(f"loss: {what} {pairs}; choose another loss (cookbook list losses)")


def _check_optimizer(backend: Backend, optim: OptimConfig) -> None:
    """Refuses what the optimizer does not know, and what only another one makes sense of."""
    adam, name = optim.adam(), backend.optimizer if isinstance(backend, LocalConfig) else AdamW.name
    update_rule(name).options(adam)
    if name != Adafactor.name and adam.beta1 == adam.beta2 == 0.0:
        raise ConfigError(
            f"optim: beta1=0 and beta2=0 are for backend.optimizer=adafactor; with {name} every step would be the gradient's "
            "sign. Set backend.optimizer=adafactor, or optim=adamw"
        )


def checked(cfg: DictConfig, overrides: list[str]) -> Settings:
    """:func:`settings`, once every check is made that needs neither data nor a model.

    Raises:
        CookbookError: the first part that is wrong.
    """
    typed = settings(cfg)
    _weights_are_meant(typed.model, overrides)
    preflight.check_parts(typed)
    return typed


@runfolder.warnings_shown()
def train(cfg: DictConfig, overrides: list[str], defaults: Callable[[], Mapping[str, Any]] = dict) -> float | None:
    """Run the recipe of ``cfg`` from its start, or from the newest checkpoint of an earlier run in the same folder.

    Returns ``eval.objective``, for a sweeper that optimizes: see :func:`cookbook.report.objective`.

    Args:
        defaults: the value of each top-level key where nothing is said, for those that the earlier run does not know.

    Raises:
        CookbookError: anything the user can mend.
        Interrupted: the first Ctrl-C; the run is saved.
        KeyboardInterrupt: the second; it is as it was at its last checkpoint.
    """
    typed = checked(cfg, overrides)
    plain = runfolder.plain(cfg)
    identity = Identity(plain, typed.module.Config, defaults, force=typed.resume == "force")
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(runfolder.opened(typed.out, typed.resume, cfg, overrides, identity))
        refusals = Refusals(typed.data)
        rows = preflight.Rows(typed, identity, refusals)
        trainer = stack.enter_context(_trainer(typed, place.folder))
        with terminal.doing("computing the digest of the weights"):
            for subject, digest in trainer.digests().items():
                identity.measured(subject, digest)
        advice.warn(typed, rows, Renderer(trainer.tokenizer, trainer.max_length))
        with terminal.doing("starting the deployment"):
            deployment = typed.deployment.deploy(trainer, live=typed.weight_sync.every == 1)
        stack.callback(deployment.close)
        judge = stack.enter_context(judging(typed.reward))
        run = _build(typed, plain, trainer, deployment, judge, rows, refusals, place, identity)
        stack.enter_context(_resume_named(place.status))
        stack.enter_context(_told(run, plain))
        _collect_garbage_from_here()
        try:
            typed.module.train(run)
            run.finish()
        except Interrupted as stop:
            print(f"stopped after step {stop.step}, saved; go on with: {place.status.resume}", flush=True)
            raise
        except HookError:
            raise
        except CookbookError as error:
            told = run.explained(error)
            if told is error:
                raise
            raise told from error
        if run.done == 0 or (run.done == run.first_step and not run.metrics_file.path.exists()):
            raise ConfigError(f"recipe: {run.name} has ended without one step; train inside of `for step in run.steps(n)`")
        report.summary(run, rows.first)
        run.health.check()
        return report.objective(run.metrics_file.read(), typed.eval.objective)


@contextlib.contextmanager
def judging(reward: Reward | None) -> Iterator[Judge | None]:
    """What calls the reward, with processes of its own until the end; None without a reward."""
    judge = Judge(reward) if reward is not None else None
    try:
        yield judge
    finally:
        if judge is not None:
            judge.close()


def _weights_are_meant(model: ModelConfig, overrides: list[str]) -> None:
    """Refuses to train fresh weights under a name that the user gave for its weights.

    Raises:
        ConfigError: ``model.name`` was set, and a recipe's default that nobody spoke of says ``random``.
    """
    spoken_of = {override.partition("=")[0] for override in overrides}
    if model.random and "model.name" in spoken_of and not {"model", "model.random"} & spoken_of:
        raise ConfigError(
            f"model.name: this recipe starts from fresh weights unless told otherwise, so those of {model.name!r} would not be "
            "read; add model.random=false to train them, or model.random=true to start anew"
        )


def _collect_garbage_from_here() -> None:
    """Ends what the command began: no collection during start-up, and none ever of what it made."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _trainer(typed: Settings, out: Path) -> Iterator[TrainingClient]:
    """The trainer, closed at the end, which raises a failure that nobody has read."""
    trainer = typed.backend.make_trainer(typed.model, seed=typed.seed, folder=out / "checkpoints")
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.close)
        try:
            yield trainer
        except KeyboardInterrupt:
            stack.pop_all()  # closing would wait for what it is computing
            raise


def _build(
    typed: Settings,
    cfg: dict[str, Any],
    trainer: TrainingClient,
    deployment: Deployment,
    judge: Judge | None,
    rows: preflight.Rows,
    refusals: Refusals,
    place: runfolder.Opened,
    identity: Identity,
) -> Run:
    # The reference is the weights the run started from: taken before a checkpoint is loaded over them.
    with terminal.doing("copying the reference weights"):
        reference = trainer.reference() if typed.loss.needs_reference else None
    earlier: Mapping[str, Any] = {}
    before = Progress()
    sampler = None
    out, resume_from = place.folder, place.resume_from
    if resume_from is not None:
        facts = manifest.read(resume_from)
        earlier, before = facts.get("run", {}), Progress.of(facts)
        with terminal.doing(f"loading {resume_from}"):
            sampler = _load(trainer, deployment, resume_from, earlier.get("sampler_step"))
        _say(f"going on after step {trainer.step}, from {resume_from}")
    elif (out / runfolder.METRICS).exists():
        _say(f"{out} has no checkpoint to go on from; starting it over")
    run = Run(
        cfg=typed.recipe,
        name=cfg["recipe"]["name"],
        seed=typed.seed,
        out=out,
        trainer=trainer,
        loss=typed.loss,
        reward=typed.reward,
        judge=judge,
        reference=reference,
        renderer=Renderer(trainer.tokenizer, trainer.max_length),
        data=typed.data,
        rows=rows,
        refusals=refusals,
        rollout=typed.rollout,
        optim=typed.optim,
        schedule=typed.schedule,
        eval=typed.eval,
        checkpoint=typed.checkpoint,
        syncer=DeploymentSyncer(deployment),
        sync_every=typed.weight_sync.every,
        trackers=typed.trackers,
        hooks=[place.status, *typed.hooks],
        identity=identity.facts,
        before=before,
        planned_steps=earlier.get("total_steps"),
        sampler=sampler,
        health=_health(typed, place, earlier),
    )
    kept = run.first_step if resume_from else -1
    for file in (run.metrics_file, run.samples_file):
        file.keep_until(kept)
    run.bad_rows.go_on(kept)
    # The last sitting may have been killed before.
    store.prune(out / "checkpoints", typed.checkpoint.keep, run.first_step, typed.checkpoint.staying)
    return run


def _health(typed: Settings, place: runfolder.Opened, earlier: Mapping[str, Any]) -> Health:
    """The counts of the run's earlier processes. A branch off another run's checkpoint is a new run, and begins at 0."""
    if place.resume_from is None or place.folder.resolve() not in place.resume_from.resolve().parents:
        return Health(typed.rollout.max_tokens)
    return Health.restored(earlier.get("health"), typed.rollout.max_tokens)


def _load(trainer: TrainingClient, deployment: Deployment, checkpoint: Path, sampler_step: int | None) -> Sampler | None:
    """Loads a checkpoint; of one from between two weight syncs also the sampler that the run had then."""
    sampler = None
    if sampler_step is not None:
        trainer.load_state(str(checkpoint / store.SAMPLER), optimizer=False).result()
        sampler = deployment.load(0).result()  # weights without an optimizer have seen no step
        sampler.step = sampler_step
    trainer.load_state(str(checkpoint)).result()
    return sampler


@contextlib.contextmanager
def _told(run: Run, cfg: dict[str, Any]) -> Iterator[None]:
    """Calls trackers and hooks at the beginning and the end of the run."""

    def at_end(tell: Callable[[str], None]) -> Callable[..., None]:
        def leave(kind: object, error: BaseException | None, trace: object) -> None:
            failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            tell("finished" if error is None else failed)

        return leave

    with contextlib.ExitStack() as stack:
        stack.callback(run.metrics_file.close)
        stack.callback(run.samples_file.close)
        stack.callback(run.bad_rows.file.close)
        stack.push(at_end(run.tracking.end))
        run.tracking.start(cfg, str(run.out), run.out.name, run.first_step)
        stack.push(at_end(functools.partial(run.hook_calls.end, run)))
        run.hook_calls.start(run)
        yield


@contextlib.contextmanager
def _resume_named(status: Status) -> Iterator[None]:
    """Adds to the error of a hook what is saved, and the command that resumes the run."""
    try:
        yield
    except HookError as error:
        saved = f"step {status.saved_step} is saved" if status.saved_step else "no step is saved yet"
        raise HookError(f"{error}; {saved}; fix the hook, then resume with: {status.resume}") from None


def _say(line: str) -> None:
    print(line, flush=True)
    log.info("%s", line)


def sample(
    target: str, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, num_samples: int = 1, seed: int = 0
) -> list[str]:
    """Completions of ``prompt`` by a run's newest checkpoint, a checkpoint, a model folder or a hub id.

    The prompt is one user message when the tokenizer has a chat template, plain text otherwise.

    Raises:
        CookbookError: nothing to sample from, or the prompt does not fit.
    """
    with contextlib.closing(LocalTrainer(ModelConfig(sampling_target(target)), LocalConfig())) as trainer:
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        chat = getattr(trainer.tokenizer, "chat_template", None)
        tokens = renderer.prompt_tokens([{"role": "user", "content": prompt}] if chat else prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        with terminal.doing("sampling"):
            response = trainer.live_sampler(0).result().sample(tokens, num_samples, params).result()
        return [renderer.text(sequence.tokens) for sequence in response.sequences]


def sampling_target(target: str) -> str:
    """The folder or hub id to load: of a run, its newest checkpoint."""
    folder = Path(target)
    if (folder / runfolder.CONFIG).is_file():
        checkpoint = store.newest(folder / "checkpoints")
        if checkpoint is None:
            raise CheckpointError(f"{target}: this run has no checkpoint yet; wait for one, or lower checkpoint.every")
        if (elsewhere := manifest.read(checkpoint).get(pointers.SERVER)) is not None:
            raise CheckpointError(
                f"{target}: the weights of its checkpoints are on the server at {elsewhere['url']}; fetch them with "
                f"`tinker checkpoint download {elsewhere['path']}`, and sample from that folder"
            )
        return str(checkpoint)
    return str(packaged("data") / "tiny") if target == "tiny" and not folder.exists() else target
