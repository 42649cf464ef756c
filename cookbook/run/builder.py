"""Build a run from its configuration, train it, and report the result."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

from omegaconf import DictConfig

from cookbook import terminal
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import manifest, store
from cookbook.checkpoints.schedule import Progress
from cookbook.data import Renderer
from cookbook.engine import quantized
from cookbook.engine.lora_targets import TrainedShare
from cookbook.engine.model import ModelConfig
from cookbook.engine.shape import shape_of
from cookbook.errors import ConfigError, CookbookError, HookError
from cookbook.losses.policy import PolicyLoss
from cookbook.protocols import (
    Deployment,
    DeploymentConfig,
    Reference,
    Reward,
    Sampler,
    SizedDeployment,
    StartedBackend,
    Trainer,
)
from cookbook.run import folder as run_folder
from cookbook.run import preflight, report, second_models
from cookbook.run.data import SplitRows
from cookbook.run.diagnostics import Health
from cookbook.run.hooks import Status
from cookbook.run.identity import Identity
from cookbook.run.result import RunResult
from cookbook.run.run import Origin, Run
from cookbook.run.settings import Settings, checked
from cookbook.sampling.environments import AgentEnvironment, EnvironmentConfig, EnvironmentRunner, EpisodeRunner
from cookbook.sampling.evaluation import Evaluator
from cookbook.sampling.rewards import RewardRunner
from cookbook.sampling.rollouts import PolicySampling
from cookbook.sampling.teacher import Teacher
from cookbook.terminal import warnings_shown
from cookbook.types import JsonObject, SamplingParams
from cookbook.utils.signals import Interrupted, stopped_by_signals


@warnings_shown()
def train(cfg: DictConfig, overrides: list[str], defaults: Callable[[], JsonObject] = dict) -> RunResult:
    """Run the recipe of ``cfg`` from its start, or from the newest checkpoint of an earlier run in the same folder.

    Args:
        defaults: default of each top-level key, for keys that the configuration of the earlier run lacks.

    Raises:
        CookbookError: an error that the user can fix.
        Interrupted: the first signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1); the run is saved.
        KeyboardInterrupt: the second signal; the run keeps its last checkpoint.
    """
    typed = checked(cfg, overrides)
    plain = run_folder.plain(cfg)
    identity = Identity(plain, typed.module.Config, defaults, force=typed.resume == "force")
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopped_by_signals())
        status, resume_from = stack.enter_context(run_folder.opened(typed.out, typed.resume, cfg, overrides, identity))
        rows = SplitRows(typed, identity)
        backend = typed.backend
        if isinstance(backend, StartedBackend):
            backend = stack.enter_context(backend.started(status.folder))
        second_models.shapes(typed)
        trainer = backend.make_trainer(typed.model, seed=typed.seed, folder=status.folder / "checkpoints")
        stack.push(functools.partial(_close, trainer))
        if isinstance(trainer, LocalTrainer) and trainer.engine.model.is_lora:
            model = trainer.engine.model
            terminal.say(f"trains a LoRA adapter: {TrainedShare.of(model.network).text}")
            if model.config.quantize:
                terminal.say(f"model.quantize={model.config.quantize}: {quantized.summary(model.network)}")
        with terminal.doing("computing the digest of the weights"):
            for subject, digest in trainer.digests().items():
                identity.measured(subject, digest)
        vocabulary = trainer.engine.model.vocabulary_size if isinstance(trainer, LocalTrainer) else None
        renderer = Renderer(trainer.tokenizer, trainer.max_length, vocabulary)
        preflight.check_signature(typed, rows.first)
        preflight.check_environment(typed, rows.first)
        preflight.warn(typed, rows, renderer)
        typed.deployment, renderer = _sized(typed, rows, renderer)
        if typed.rollout.ahead and isinstance(trainer, LocalTrainer):
            trainer.sample_between_passes()
        with terminal.doing("starting the deployment"):
            deployment = typed.deployment.deploy(trainer, live=typed.weight_sync.every == 1 and not typed.rollout.ahead)
        stack.callback(deployment.close)
        second_models.connect_rewards(typed, status.folder, stack, identity)
        runner = stack.enter_context(reward_runner(typed.reward))
        stop = tuple(typed.rollout.stop or ())
        environment = stack.enter_context(environment_runner(typed.env, renderer))
        connect_reward(runner, environment)
        retrier = typed.rollout.retrier()
        evaluator = Evaluator(typed.eval, renderer, retrier, runner, stop, typed.seed, rows.refusals, environment)
        reference = _reference(typed, trainer, identity, status.folder / "teacher", stack)
        origin, sampler = _resumed(status.folder, resume_from, rows, trainer, deployment)
        sampling = PolicySampling(
            deployment,
            typed.weight_sync.every,
            typed.rollout,
            evaluator,
            sampler,
            needs_reward=not typed.has_teacher,
            masks_truncated=isinstance(typed.loss, PolicyLoss) and typed.loss.mask_truncated,
        )
        run = Run(cfg.recipe.name, rows, trainer, reference, sampling, status, origin)
        stack.callback(run.close)
        if isinstance(trainer, LocalTrainer):
            run.trained_weights = TrainedShare.of(trainer.engine.model.network).short
        run.recorder.keep_until(run.first_step if resume_from else -1)
        # The previous process may have been killed between saving and deleting.
        run.saver.prune(run.first_step)
        stack.enter_context(_resume_named(status))
        _start(run, plain, stack)
        collect_garbage_from_here()
        _call_recipe(typed.module, run, status)
        report.curves(run)
        # The summary of a run that has learned nothing would look like a success above the error.
        run.health.check()
        report.summary(run, rows.first)
        return RunResult(status.folder)


def _sized(typed: Settings, rows: SplitRows, renderer: Renderer) -> tuple[DeploymentConfig, Renderer]:
    """Return the deployment with its size, and the renderer of what it samples, whose context is the deployment's.

    Raises:
        ConfigError: a sequence is longer than the deployment takes, or it does not fit into the memory.
    """
    is_sized = isinstance(typed.deployment, SizedDeployment)
    shape = shape_of(typed.model) if is_sized else None
    deployment = preflight.sized_deployment(typed, rows, renderer, shape, loaded=True)
    if not isinstance(deployment, SizedDeployment) or (limit := deployment.longest) is None:
        return deployment, renderer
    if typed.data_kind == "rollouts" and (renderer.max_length is None or limit < renderer.max_length):
        renderer.max_length = limit
    return deployment, renderer


def _call_recipe(recipe: ModuleType, run: Run, status: Status) -> None:
    """Train, and complete a loop that the recipe has left early.

    Raises:
        CookbookError: an error that the user can fix; of several, the first.
        Interrupted: the first Ctrl-C; the run is saved.
    """
    try:
        recipe.train(run)
        run.finish()
    except Interrupted as stop:
        print(f"stopped after step {stop.step}, saved; resume with: {status.resume}", flush=True)
        raise
    except HookError:
        raise
    except CookbookError as error:
        cause = run.root_cause(error)
        if cause is error:
            raise
        raise cause from error
    if run.done == 0 or (run.done == run.first_step and not run.recorder.metrics.path.exists()):
        raise ConfigError(f"recipe: {run.name} has ended without a step; train inside of `for step in run.steps(n)`")


def reward_runner(reward: Reward | None) -> AbstractContextManager[RewardRunner | None]:
    """Yield the object that calls the reward, and stop its worker processes at the end; None without a reward."""
    return contextlib.nullcontext() if reward is None else contextlib.closing(RewardRunner(reward))


def environment_runner(config: EnvironmentConfig | None, renderer: Renderer) -> AbstractContextManager[EpisodeRunner | None]:
    """Yield the object that plays episodes, and stop its processes at the end; None without an environment.

    Raises:
        ConfigError: a package that programs need is not installed.
    """
    return contextlib.nullcontext() if config is None else contextlib.closing(episode_runner(config, renderer))


def connect_reward(runner: RewardRunner | None, environment: EpisodeRunner | None) -> None:
    """Let environments call a reward function that gets them.

    Raises:
        ConfigError: the environment is a program, which is not an object that a function can get.
    """
    if runner is None or environment is None or not runner.reads_environments:
        return
    if isinstance(environment.config, AgentEnvironment):
        raise ConfigError("reward: env=agent runs programs, and the function gets environments; use trajectory in their place")
    environment.grader = runner.grader()


def episode_runner(config: EnvironmentConfig, renderer: Renderer) -> EpisodeRunner:
    """Return the object that plays episodes. Raises ConfigError: as :func:`environment_runner`."""
    if not isinstance(config, AgentEnvironment):
        return EnvironmentRunner(config)
    try:
        from cookbook.server.agents import AgentRunner
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env: the package {error.name!r} is not installed; install post-training-cookbook[server]"
        ) from error
    return AgentRunner(config, renderer)


def collect_garbage_from_here() -> None:
    """Enable garbage collection, which the command disabled at start-up, and exempt all objects made until now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _reference(
    typed: Settings, trainer: Trainer, identity: Identity, folder: Path, stack: contextlib.ExitStack
) -> Reference | None:
    """Return the teacher, or a copy of the weights that the run starts from if the loss reads one; None: neither.

    Raises:
        ConfigError: the teacher has another tokenizer.
        CookbookError: the teacher cannot be loaded.
    """
    if not typed.has_teacher:
        with terminal.doing("copying the reference weights"):
            return trainer.reference() if typed.loss.needs_reference else None
    recipe = typed.recipe
    model = second_models.SecondModel("recipe.teacher", recipe.teacher, recipe.teacher_url)
    teacher = second_models.load(model, typed.backend, folder, stack)
    preflight.compare_vocabularies(typed, trainer.tokenizer, teacher.trainer.tokenizer)
    if teacher.digest is not None:
        identity.measured("teacher", teacher.digest)
    return Teacher(teacher.sampler)


def _close(trainer: Trainer, kind: object, error: BaseException | None, trace: object) -> None:
    """Close the trainer at the end of a run, which raises an error that no future has reported."""
    # After Ctrl-C, closing would wait for the current call.
    if not isinstance(error, KeyboardInterrupt):
        trainer.close()


def _resumed(
    folder: Path, checkpoint: Path | None, rows: SplitRows, trainer: Trainer, deployment: Deployment
) -> tuple[Origin, Sampler | None]:
    """Load the checkpoint to resume from, if there is one. Return the run's state at it, and its sampler if it has one."""
    max_tokens = rows.settings.rollout.max_tokens
    if checkpoint is None:
        if (folder / run_folder.METRICS).exists():
            terminal.say(f"{folder} has no checkpoint to resume from; starting it over")
        return Origin(health=Health(max_tokens)), None
    facts = manifest.read(checkpoint)
    earlier = facts.get("run", {})
    with terminal.doing(f"loading {checkpoint}"):
        sampler = _load(trainer, deployment, checkpoint, earlier.get("sampler_step"))
    terminal.say(f"resuming after step {trainer.step}, from {checkpoint}")
    # A branch off another run's checkpoint is a new run, whose counts begin at 0.
    is_branch = folder.resolve() not in checkpoint.resolve().parents
    health = Health(max_tokens) if is_branch else Health.restored(earlier.get("health"), max_tokens)
    origin = Origin(
        Progress.of(facts),
        earlier.get("total_steps"),
        health,
        earlier.get("streams", ()),
        earlier.get("prompts"),
        earlier.get("minibatches"),
        # The checkpoints of another run are not kept here.
        None if is_branch else earlier.get("best"),
        checkpoint,
    )
    return origin, sampler


def _load(trainer: Trainer, deployment: Deployment, checkpoint: Path, sampler_step: int | None) -> Sampler | None:
    """Load a checkpoint. Return the sampler that the run had then, if it was saved between two weight syncs."""
    sampler = None
    if sampler_step is not None:
        trainer.load_state(str(checkpoint / store.SAMPLER), optimizer=False).result()
        # The trainer counts no steps for weights without an optimizer.
        sampler = deployment.load(0).result()
        sampler.step = sampler_step
    trainer.load_state(str(checkpoint)).result()
    return sampler


def _start(run: Run, cfg: JsonObject, stack: contextlib.ExitStack) -> None:
    """Call trackers and hooks now and at the end of the stack, which also closes the run's files."""
    stack.callback(run.recorder.close)
    stack.push(functools.partial(_end, functools.partial(run.recorder.trackers.call, "end")))
    run.recorder.trackers.start(cfg, str(run.out), run.out.name, run.first_step)
    stack.push(functools.partial(_end, functools.partial(run.hook_calls.end, run)))
    run.hook_calls.start(run)


def _end(call: Callable[[str], None], kind: object, error: BaseException | None, trace: object) -> None:
    """Call ``call`` with the state in which a run has ended."""
    failed = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    call("finished" if error is None else failed)


@contextlib.contextmanager
def _resume_named(status: Status) -> Iterator[None]:
    """Add to a hook's error the step that is saved, and the command that resumes the run."""
    try:
        yield
    except HookError as error:
        saved = f"step {status.saved_step} is saved" if status.saved_step else "no step is saved yet"
        raise HookError(f"{error}; {saved}; fix the hook, then resume with: {status.resume}") from None


def sample(
    target: str,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    num_samples: int = 1,
    seed: int = 0,
    chat_template_kwargs: JsonObject | None = None,
) -> list[str]:
    """Return completions of ``prompt`` by a run's newest checkpoint, a checkpoint, a model folder or a hub id.

    The prompt is one user message if the tokenizer has a chat template, unless a run was trained on texts without it; else it
    is plain text. ``chat_template_kwargs``: options of the template, in place of those that a run was trained with.

    Raises:
        CookbookError: ``target`` has no weights, or the prompt does not fit the context.
    """
    model = ModelConfig(run_folder.sampling_target(target), chat_template_kwargs=chat_template_kwargs)
    with contextlib.closing(LocalTrainer(model, LocalConfig())) as trainer:
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        chat = getattr(trainer.tokenizer, "chat_template", None) and not manifest.is_of_text(Path(model.name))
        tokens = renderer.prompt_tokens([{"role": "user", "content": prompt}] if chat else prompt)
        collect_garbage_from_here()
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        with terminal.doing("sampling"):
            response = trainer.live_sampler(0).result().sample(tokens, num_samples, params).result()
        return [renderer.text(sequence.tokens, continues=not chat) for sequence in response.sequences]
