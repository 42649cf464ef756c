"""Measure a run of reinforcement learning before it starts: rewards, lengths, speed, and the size of one optimizer step."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from cookbook import terminal
from cookbook.data import RenderedPrompt, Renderer, datums
from cookbook.errors import ConfigError
from cookbook.protocols import Trainer
from cookbook.run import passes, preflight
from cookbook.run.builder import collect_garbage_from_here, connect_reward, environment_runner, reward_runner
from cookbook.run.data import SPLITS, SplitRows
from cookbook.run.folder import plain
from cookbook.run.identity import Identity
from cookbook.run.second_models import connect_rewards
from cookbook.run.settings import Settings, checked
from cookbook.sampling import environments, rollouts
from cookbook.sampling.evaluation import Evaluator
from cookbook.sampling.rollouts import PolicySampling, StepRollouts
from cookbook.terminal import warnings_shown
from cookbook.types import Datum
from cookbook.utils.words import counted

# A completion with at least this reward is solved, as for eval/accuracy; data.curriculum.solved_reward has its own value.
SOLVED = 1.0
# Bounds of a healthy run, as in docs/reference/metrics.md.
ALWAYS, NEVER, FEW_SPREAD, OFTEN_CUT = 0.95, 0.02, 0.3, 0.1
# Nats per token by which one step may move the model, and by which it should; see kl/old_policy.
LARGEST_KL, GOOD_KL = 0.05, 0.005
# Ratios outside of 1 - CLIP to 1 + CLIP count as clipped.
CLIP = 0.2


@dataclass(frozen=True)
class StepSize:
    """One optimizer step with the run's learning rate: k3 of KL(before || after) in nats per token, ratios outside the clip.

    ``train_s`` and ``forward_s`` are the seconds of the gradient and the update, and of a pass without a gradient.
    """

    kl: float
    clipped: float
    train_s: float
    forward_s: float


@dataclass(frozen=True)
class Finding:
    """A problem that the measurement shows, and what to change."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Calibration:
    """Measurements with a sample of prompts, and the estimate of the whole run.

    ``rewards`` and ``lengths`` are those of all completions; ``finished`` the lengths of those that were not cut off.
    """

    typed: Settings
    num_prompts: int
    rewards: Sequence[float]
    lengths: Sequence[int]
    finished: Sequence[int]
    spread: float
    env_errors: int
    sampling_s: float
    reward_s: float
    step: StepSize
    num_held_out: int

    @property
    def solved(self) -> float:
        """The least reward of a solved completion."""
        curriculum = self.typed.data.curriculum
        return SOLVED if curriculum is None else curriculum.solved_reward

    @property
    def pass_rate(self) -> float:
        return float(np.mean([reward >= self.solved for reward in self.rewards]))

    @property
    def cut_off(self) -> float:
        """Share of the completions that reached ``rollout.max_tokens``."""
        return 1 - len(self.finished) / len(self.lengths)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.sampling_s

    @property
    def hours(self) -> float:
        """Estimated hours of the run: sampling, rewards, training and evaluations, at the measured speeds.

        Groups that ``rollout.refill`` adds are counted. ``rollout.ahead`` overlaps sampling and training, which is not.
        """
        recipe = asdict(self.typed.recipe)
        updates, steps = recipe.get("updates", 1), recipe["steps"]
        batches = math.ceil(steps / updates)
        share = recipe["prompts_per_step"] * recipe["group_size"] / len(self.rewards)
        training_s = self.step.train_s + self.step.forward_s * (self.typed.loss.needs_reference + (updates > 1))
        # Each group without spread is replaced by others until the step has enough with spread, or refill times its groups.
        share *= min(self.typed.rollout.refill, 1 / self.spread if self.spread else math.inf)
        # Groups without spread are not trained.
        batch_s = share * (self.sampling_s + self.reward_s + self.spread * training_s)
        every = self.typed.eval.every
        evaluations = 2 + (steps // every if every else 0)
        completions = self.num_held_out * (1 + self.typed.eval.num_drawn)
        evaluation_s = (self.sampling_s + self.reward_s) * completions / len(self.rewards)
        return float(batches * batch_s + evaluations * evaluation_s) / 3600

    def lines(self, price: float | None = None) -> list[tuple[str, str]]:
        """Return the measurements as names and texts. ``price``: of an hour, in any currency."""
        rewards, lengths = np.array(self.rewards), np.array(self.lengths)
        recipe = self.typed.recipe
        hours = f"{self.hours:.2g} for {counted(recipe.steps, 'step')}, at the speed of this machine"
        if self.typed.rollout.ahead:
            hours += f", without the overlap of rollout.ahead={self.typed.rollout.ahead}"
        return [
            ("sampled", f"{self.num_prompts} prompts x {len(self.rewards) // max(self.num_prompts, 1)} completions"),
            ("pass rate", f"{self.pass_rate:.1%} of the completions have a reward of {self.solved:g} or more"),
            ("reward", f"mean {rewards.mean():.3g}, from {rewards.min():.3g} to {rewards.max():.3g}"),
            ("with spread", f"{self.spread:.0%} of the groups; the others have no gradient"),
            ("cut off", f"{self.cut_off:.0%} of the completions, at {self.typed.rollout.max_tokens} tokens"),
            ("length", f"mean {lengths.mean():.0f} tokens, longest {lengths.max()}"),
            ("sampling", f"{self.tokens_per_s:,.0f} tokens/s"),
            ("one step", f"KL {self.step.kl:.2g} nats per token, {self.step.clipped:.0%} of the ratios outside of the clip"),
            ("hours", hours),
            *([] if price is None else [("cost", f"{self.hours * price:.2f}, with a price of {price:g} per hour")]),
        ]

    def findings(self) -> list[Finding]:
        """Return what to change before the run; empty: nothing."""
        findings = [*self._of_rewards()]
        if self.cut_off > OFTEN_CUT:
            longest = f"; the longest that ended has {max(self.finished)} tokens" if self.finished else ""
            findings.append(
                Finding(
                    f"{self.cut_off:.0%} of the completions are cut off, and a cut-off answer seldom earns a reward{longest}",
                    f"raise rollout.max_tokens, now {self.typed.rollout.max_tokens}, or ask for shorter answers in the prompt",
                )
            )
        if self.step.kl > LARGEST_KL:
            rate = self.typed.optim.lr
            # The divergence grows with the square of a small step.
            better = float(f"{rate * math.sqrt(GOOD_KL / self.step.kl):.1g}")
            findings.append(
                Finding(
                    f"one step with optim.lr={rate:g} moves the model by {self.step.kl:.2g} nats per token, and "
                    f"{LARGEST_KL:g} is much",
                    f"lower the learning rate, for example optim.lr={better:g}",
                )
            )
        if self.env_errors:
            findings.append(
                Finding(f"the environment ended {counted(self.env_errors, 'episode')} by an error", "run cookbook check env")
            )
        return findings

    def _of_rewards(self) -> Iterator[Finding]:
        lowest, highest = min(self.rewards), max(self.rewards)
        if self.pass_rate >= ALWAYS:
            yield Finding(
                f"{self.pass_rate:.0%} of the completions are solved already, so there is little to learn",
                "train on harder prompts, or prefer the hard ones: data.curriculum={}",
            )
        elif self.spread == 0 and highest - lowest < 1e-9:
            yield Finding(
                f"every completion has the reward {highest:g}, so nothing can be learned",
                "read completions (cookbook sample) and the reward function; train with recipe=sft first, or on easier prompts",
            )
        elif self.pass_rate <= NEVER and highest < self.solved and self.spread < FEW_SPREAD:
            yield Finding(
                f"no completion is solved, and {self.spread:.0%} of the groups have different rewards",
                "train with recipe=sft first, or on easier prompts, or give partial rewards",
            )
        elif self.spread < FEW_SPREAD:
            yield Finding(
                f"only {self.spread:.0%} of the groups have different rewards, and the others have no gradient",
                "raise recipe.group_size, replace groups with rollout.refill=2, or prefer medium prompts: data.curriculum={}",
            )


@warnings_shown()
def calibrate(cfg: DictConfig, overrides: list[str], num_prompts: int, num_completions: int) -> Calibration:
    """Sample, reward and make one optimizer step with weights that are then dropped. Nothing is written.

    Raises:
        CookbookError: an error that the user can fix.
    """
    typed = checked(cfg, overrides)
    if typed.data_kind != "rollouts" or typed.has_teacher:
        raise ConfigError(f"calibrate: recipe={cfg.recipe.name} does not learn from rewards; choose recipe=grpo")
    for key in ("steps", "prompts_per_step", "group_size"):
        if not hasattr(typed.recipe, key):
            raise ConfigError(f"calibrate: recipe={cfg.recipe.name} has no key {key}, from which the hours are estimated")
    if num_prompts < 1 or num_completions < 2:
        raise ConfigError(f"calibrate: expected at least 1 prompt and 2 completions, got {num_prompts} and {num_completions}")
    rows = SplitRows(typed, Identity(plain(cfg), typed.module.Config, dict, force=True))
    for which in SPLITS:
        rows.read(which)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = typed.backend.make_trainer(typed.model, seed=typed.seed, folder=folder)
        stack.callback(trainer.close)
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        preflight.check_signature(typed, rows.first)
        preflight.check_environment(typed, rows.first)
        prompts = _prompts(typed, rows, renderer, num_prompts)
        with terminal.doing("starting the deployment"):
            deployment = typed.deployment.deploy(trainer, live=True)
        stack.callback(deployment.close)
        connect_rewards(typed, folder, stack)
        runner = stack.enter_context(reward_runner(typed.reward))
        environment = stack.enter_context(environment_runner(typed.env, renderer))
        connect_reward(runner, environment)
        stop = tuple(typed.rollout.stop or ())
        retrier = typed.rollout.retrier()
        evaluator = Evaluator(typed.eval, renderer, retrier, runner, stop, typed.seed, rows.refusals, environment)
        sampling = PolicySampling(deployment, 1, replace(typed.rollout, refill=1.0), evaluator)
        collect_garbage_from_here()
        sampled = sampling.groups(sampling.sync(0), prompts, num_completions, 0)
        with terminal.doing("measuring a step"):
            step = _one_step(typed, trainer, _with_gradient(sampled))
        return _measured(typed, sampled, step, rows.counts.get("eval", 0))


def _prompts(typed: Settings, rows: SplitRows, renderer: Renderer, count: int) -> Sequence[RenderedPrompt]:
    sample = rows.sample("train", count)
    if typed.env is not None:
        return environments.prompts(typed.env, sample, renderer, typed.data, rows.refusals)
    return datums.prompts(sample, renderer, typed.data, typed.rollout.max_tokens, rows.refusals)


def _measured(typed: Settings, sampled: StepRollouts, step: StepSize, num_held_out: int) -> Calibration:
    attempts = [attempt for group in sampled.groups for attempt in group.trajectories]
    return Calibration(
        typed,
        len(sampled.groups),
        [reward for group in sampled.groups for reward in group.rewards],
        [attempt.num_sampled_tokens for attempt in attempts],
        [attempt.num_sampled_tokens for attempt in attempts if not attempt.is_truncated],
        float(np.mean([group.has_spread for group in sampled.groups])),
        len(sampled.left_out),
        sampled.sampling_s,
        sampled.reward_s,
        step,
        num_held_out,
    )


def _with_gradient(sampled: StepRollouts) -> list[Datum]:
    """Return the datums of all completions, with advantages of 1 and -1 in turn.

    The first step of Adam has the same size for any gradient, so that groups without spread measure the learning rate too.
    """
    signs = [[1.0 - 2.0 * (index % 2) for index in range(len(group.trajectories))] for group in sampled.groups]
    return rollouts.datums(sampled.groups, signs)


def _one_step(typed: Settings, trainer: Trainer, data: Sequence[Datum]) -> StepSize:
    """Make one step with the full learning rate, and compare the logprobs with those of the sampler."""
    # At its start the model is its own reference.
    data = [datum.with_inputs(reference_logprobs=datum.loss_fn_inputs["sampling_logprobs"].array) for datum in data]
    prepared = typed.loss.prepare(data)
    started = time.monotonic()
    passes.backward(trainer, typed.loss, prepared).result()
    trainer.optim_step(typed.optim.adam(1.0), typed.loss.normalization).result()
    trained = time.monotonic()
    logprobs = passes.target_logprobs(trainer, data)
    ended = time.monotonic()
    drift = []
    for datum, row in zip(data, logprobs, strict=True):
        inside = datum.loss_fn_inputs["weights"].array != 0
        now, before = row.array.astype(np.float64), datum.loss_fn_inputs["sampling_logprobs"].array
        drift.append((now - before)[inside])
    ratios = np.concatenate(drift)
    # A model that has left its samples altogether has an infinite divergence.
    k3 = np.expm1(np.minimum(ratios, 700.0)) - ratios
    clipped = np.abs(np.expm1(np.minimum(ratios, 700.0))) > CLIP
    return StepSize(float(k3.mean()), float(clipped.mean()), trained - started, ended - trained)
