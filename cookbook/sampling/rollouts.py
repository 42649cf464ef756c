"""Rollouts: a group of completions per prompt with their rewards, and the datums that a policy-gradient loss reads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cookbook import terminal
from cookbook.data import RejectedRows, RenderedPrompt, Renderer, RowDatum
from cookbook.errors import BadRowError, ConfigError
from cookbook.protocols import Deployment, Sampler
from cookbook.sampling.advantages import Kind, group_advantages, groups_without_spread
from cookbook.sampling.credit import Credit, Float, credits_of, normalized_each, places, returns
from cookbook.sampling.environments import EpisodeRunner
from cookbook.sampling.episodes import Draw, Episodes, FailedRequests, Retrier
from cookbook.sampling.evaluation import Evaluator
from cookbook.sampling.rewards import Parts, PendingScores, RewardRunner, Score, part_means
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Datum, JsonObject, SamplingParams, as_sampling

log = logging.getLogger("cookbook")

Further = Callable[[int], Sequence[RenderedPrompt]]
"""Returns at most that many further prompts."""


@dataclass
class RolloutConfig:
    """Options of sampling. ``conf/rollout/default.yaml`` explains each field."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] | None = None
    overlong: int | None = None
    overlong_penalty: float = 1.0
    refill: float = 1.0
    ahead: int = 0
    ahead_uncorrected: bool = False
    retries: int = 2
    max_consecutive_failures: int = 16
    log_samples: int = 8
    store_mb: float | None = 64

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"rollout.retries must be at least 0, got {self.retries}")
        if not 1 <= self.refill < float("inf"):
            raise ConfigError(f"rollout.refill must be a number >= 1, got {self.refill}; 1.0 replaces no group")
        if self.ahead < 0:
            raise ConfigError(f"rollout.ahead must be at least 0, got {self.ahead}; 0 samples and trains in turn")
        if self.overlong is not None and not 1 <= self.overlong <= self.max_tokens:
            raise ConfigError(
                f"rollout.overlong must be between 1 and rollout.max_tokens={self.max_tokens}, got {self.overlong}; "
                "null: no penalty"
            )
        if not 0 < self.overlong_penalty < float("inf"):
            raise ConfigError(f"rollout.overlong_penalty must be > 0, got {self.overlong_penalty}; rollout.overlong=null: none")
        if self.max_consecutive_failures < 1:
            raise ConfigError(f"rollout.max_consecutive_failures must be at least 1, got {self.max_consecutive_failures}")
        if self.store_mb is not None and self.store_mb <= 0:
            raise ConfigError(f"rollout.store_mb must be > 0, got {self.store_mb}; null stores nothing")
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature must be > 0, got {self.temperature}: all greedy completions of a prompt are equal"
            )
        self.sampling([])

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        """Return the parameters of a request: the fields of the same names, and all texts and tokens that end a completion."""
        return replace(as_sampling(self), stop=[*stop_token_ids, *(self.stop or [])])

    def length_penalty(self, num_tokens: int) -> float:
        """Return what the length of a completion adds to its reward: 0, or less in the last ``overlong`` tokens.

        With ``L = max_tokens`` and ``C = overlong``, it is ``(L - C - num_tokens) / C``, times ``overlong_penalty``.

        Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
        """
        if self.overlong is None:
            return 0.0
        excess = num_tokens - (self.max_tokens - self.overlong)
        return -self.overlong_penalty * min(max(excess / self.overlong, 0.0), 1.0)

    def retrier(self) -> Retrier:
        """Return the object that makes the sampling requests of one run."""
        return Retrier(self.retries, self.max_consecutive_failures)


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt, at most ``G`` attempts at it, and their rewards (empty until they are known), with their named parts, if any.

    ``temperature`` is the divisor of the logits that the completions were drawn with. ``masks_truncated``: completions that
    were cut off are not trained (``loss.mask_truncated``). ``place`` is the number of the prompt in its step, from 0.
    """

    prompt: RenderedPrompt
    trajectories: list[Trajectory]
    rewards: list[float]
    temperature: float = 1.0
    parts: list[Parts] = field(default_factory=list)
    masks_truncated: bool = False
    # Discount of the rewards of later turns; None: all turns have the credit of the whole attempt.
    gamma: float | None = None
    # Weights of the parts that are normalized one by one; None: the sum is.
    normalized: Mapping[str, float] | None = None
    # Per attempt the returns of its turns or tokens; empty: each attempt has one reward.
    returns: list[list[Float]] = field(default_factory=list)
    place: int = 0

    @property
    def has_spread(self) -> bool:
        """Whether the rewards differ, so that the group has a gradient."""
        if self.returns:
            return not groups_without_spread(places(self.returns)).all()
        if self.normalized is not None:
            of_parts = [[value for parts in self.parts if (value := parts.get(name)) is not None] for name in self.normalized]
            return not all(groups_without_spread(values) for values in of_parts if values)
        return not groups_without_spread(self.rewards)


@dataclass(frozen=True)
class StepRollouts:
    """Rollouts of one step: a group per prompt, without the prompts whose requests failed.

    ``sampling_s``: seconds until the last completion arrived; ``reward_s``: seconds from then until the last reward arrived;
    ``has_turns``: there is an environment; ``refills``: rounds of further prompts, None if ``rollout.refill`` is off.
    ``left_out``: episodes that the environment has ended by an error, with ``env.on_error=drop``. They are in no group.
    """

    groups: list[RolloutGroup]
    requests: FailedRequests
    sampling_s: float
    reward_s: float
    has_turns: bool = False
    refills: int | None = None
    left_out: Sequence[Trajectory] = ()
    # What the length of each completion has added to its reward; None without rollout.overlong.
    penalties: Sequence[float] | None = None

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups, and ``rollout/failed``, the number of dropped prompts, and ``rollout/retries``, of retries."""
        of_groups = metrics(self.groups, self.left_out)
        return {
            **of_groups,
            **(turn_metrics(self.groups, self.left_out) if self.has_turns else {}),
            **({} if self.refills is None else self._refill_metrics(self.refills)),
            **({} if self.penalties is None else self._penalty_metrics(self.penalties)),
            **({"rollout/masked": float(self._num_masked())} if self.groups and self.groups[0].masks_truncated else {}),
            "rollout/failed": float(len(self.requests.failed)),
            "rollout/retries": float(self.requests.num_retries),
            "time/sampled_tokens_per_s": of_groups["rollout/tokens"] / self.sampling_s,
            "time/reward_s": self.reward_s,
        }

    def _num_masked(self) -> int:
        return sum(trajectory.is_truncated for group in self.groups for trajectory in group.trajectories)

    def _penalty_metrics(self, penalties: Sequence[float]) -> dict[str, float]:
        return {
            "rollout/overlong": float(sum(penalty < 0 for penalty in penalties)),
            "reward/overlong": math.fsum(penalties) / max(len(penalties), 1),
        }

    def _refill_metrics(self, refills: int) -> dict[str, float]:
        dropped = sum(not group.has_spread for group in self.groups)
        return {
            "refill/groups": float(len(self.groups)),
            "refill/groups_dropped": float(dropped),
            "refill/rounds": float(refills),
        }


def sample_groups(
    sampler: Sampler,
    prompts: Sequence[RenderedPrompt],
    group_size: int,
    config: RolloutConfig,
    renderer: Renderer,
    seed: int,
    retrier: Retrier | None = None,
    runner: RewardRunner | None = None,
    refusals: RejectedRows | None = None,
    environment: EpisodeRunner | None = None,
    further: Further | None = None,
    *,
    masks_truncated: bool = False,
) -> StepRollouts:
    """Sample ``group_size`` completions of every prompt. All requests are made before the first result is awaited.

    The draws depend only on ``seed``, the prompt's index and the sample's index. If there is a ``runner``, it computes the
    rewards of a prompt's completions while other prompts are still being sampled. With an ``environment`` an attempt may have
    several turns (see :mod:`cookbook.sampling.episodes`), and the environment may give the reward. A prompt whose row the
    reward rejects is added to ``refusals``, and its group is dropped.

    With ``further``, as many further prompts are sampled as groups lack spread, in rounds, until as many groups have spread as
    there are ``prompts``, or ``config.refill`` times the prompts are sampled. Groups without spread stay in the result: they
    are part of the metrics, and :func:`datums` leaves them out.

    An episode that the environment has ended by an error is in no group, unless ``env.on_error=end``. A group may then have
    fewer episodes than ``group_size``; a prompt without any is left out.

    Raises:
        BadRowError: the reward rejects a row, and ``refusals`` is None, ``data.on_bad_row`` is ``fail``, or no row is left.
        RolloutError: sampling failed (see :class:`~cookbook.sampling.episodes.Retrier`), a reward failed, or the environment
            has ended every episode by an error.
    """
    episodes = Episodes(renderer, retrier or config.retrier(), runner, environment)
    params = replace(config.sampling(renderer.stop_token_ids), seed=seed * 100_003)
    step = _StepSampling(episodes, sampler, group_size, params, config, refusals, masks_truncated)
    step.sample(prompts)
    refills = 0
    # A product such as 1.1 * 10 is rounded up to the next float.
    limit = math.floor(config.refill * len(prompts) + 1e-9)
    while further is not None and (count := min(len(prompts) - step.num_with_spread(), limit - step.num_prompts)) > 0:
        step.sample(further(count))
        refills += 1
    if environment is not None:
        num_valid = sum(len(group.trajectories) for group in step.groups.values())
        environment.report_errors(len(step.left_out), num_valid + len(step.left_out), "step")
    return StepRollouts(
        [step.groups[index] for index in sorted(step.groups)],
        FailedRequests(step.failed, step.num_retries),
        step.sampling_s,
        step.reward_s,
        environment is not None,
        None if further is None else refills,
        step.left_out,
        None if config.overlong is None else step.penalties,
    )


@dataclass(eq=False)
class _StepSampling:
    """The groups of a step by the index of their prompt. ``params`` are those of the first prompt; the seeds count up."""

    episodes: Episodes
    sampler: Sampler
    group_size: int
    params: SamplingParams
    config: RolloutConfig
    refusals: RejectedRows | None
    masks_truncated: bool = False
    penalties: list[float] = field(default_factory=list)
    groups: dict[int, RolloutGroup] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    left_out: list[Trajectory] = field(default_factory=list)
    num_prompts: int = 0
    num_retries: int = 0
    sampling_s: float = 0.0
    reward_s: float = 0.0

    def num_with_spread(self) -> int:
        """Return the number of groups whose rewards differ."""
        return sum(group.has_spread for group in self.groups.values())

    def sample(self, prompts: Sequence[RenderedPrompt]) -> None:
        """Add the groups of further prompts, with their rewards."""
        first = self.num_prompts
        self.num_prompts += len(prompts)
        seed = (self.params.seed or 0) + first
        draws = [Draw(prompt, self.group_size, replace(self.params, seed=seed + index)) for index, prompt in enumerate(prompts)]
        pending: dict[int, PendingScores] = {}
        left_out: dict[int, list[Trajectory]] = {}

        def ended(index: int, attempts: list[Trajectory]) -> None:
            activity.count += 1
            valid = self.episodes.valid(attempts)
            valid_ids = {id(trajectory) for trajectory in valid}
            left_out[first + index] = [trajectory for trajectory in attempts if id(trajectory) not in valid_ids]
            if not valid:
                return
            self.groups[first + index] = RolloutGroup(
                prompts[index],
                valid,
                [],
                self.config.temperature,
                masks_truncated=self.masks_truncated,
                gamma=self.episodes.gamma,
                normalized=self.episodes.runner.normalized if self.episodes.runner is not None else None,
                place=first + index,
            )
            if self.episodes.runner or self.episodes.environment:
                pending[first + index] = self.episodes.scores(prompts[index], valid)

        started = time.monotonic()
        with terminal.doing("sampling", total=len(prompts), noun="prompts") as activity:
            result = self.episodes.play(self.sampler, draws, ended, has_samples=first > 0)
        # In the order of the prompts, not of their ends.
        self.left_out += [trajectory for index in sorted(left_out) for trajectory in left_out[index]]
        sampled = time.monotonic()
        self.sampling_s += sampled - started
        self.num_retries += result.num_retries
        for index, error in result.failed.items():
            self.failed[first + index] = error
            log.info("%s: left out, its completions could not be sampled: %s", prompts[index].row.where, error)
        for index in sorted(pending):
            try:
                scores = pending[index]()
            except BadRowError as error:
                self._reject(index, error)
            else:
                self._add_scores(self.groups[index], scores)
        self.reward_s += time.monotonic() - sampled

    def _reject(self, index: int, error: BadRowError) -> None:
        """Drop a group whose row the reward rejects. Raise the error if such rows end the run, or if it is the last group."""
        if self.refusals is None or not self.refusals.skips_bad_rows or len(self.groups) == 1:
            raise error
        self.refusals.add(self.groups[index].prompt.row.where, "on_bad_row", str(error))
        del self.groups[index]

    def _add_scores(self, group: RolloutGroup, scores: Sequence[Score]) -> None:
        """Add the rewards and their parts to a group, with the penalties for long completions."""
        pairs = list(zip(scores, group.trajectories, strict=True))
        # Rewards of turns that the environment gives count only with env.gamma.
        has_steps = group.gamma is not None or any(score.steps for score, attempt in pairs if not attempt.turn_rewards)
        if has_steps and group.normalized is not None:
            raise ConfigError(
                "reward.normalize=each: the sum of each reward is normalized, and a reward returned a list; return one "
                "number, or remove reward.normalize"
            )
        of_tokens = any(len(score.steps) not in (0, len(attempt.turns)) for score, attempt in pairs)
        discount = 1.0 if group.gamma is None else group.gamma
        for score, attempt in pairs:
            # The longest turn counts, because each turn of an episode may have max_tokens.
            num_tokens = max((len(turn.tokens) for turn in attempt.turns), default=0)
            penalty = self.config.length_penalty(num_tokens)
            group.rewards.append(score.value + penalty)
            group.parts.append(score.parts)
            self.penalties.append(penalty)
            if has_steps:
                steps = list(score.steps)
                if not steps:
                    # One number for the attempt is earned at its last turn.
                    steps = [0.0] * (len(attempt.turns) - 1) + [score.value]
                steps[-1] += penalty
                group.returns.append(returns(attempt.by_turn(steps, of_tokens=of_tokens), discount))


def advantages(groups: Sequence[RolloutGroup], kind: Kind, group_size: int | None = None) -> list[list[Credit]]:
    """Return the advantage of every attempt: one number, or numbers of its turns or tokens.

    Rewards of whole attempts are compared within their group (:func:`~cookbook.sampling.advantages.group_advantages`), with
    ``reward.normalize=each`` one by one (:func:`~cookbook.sampling.credit.normalized_each`). Rewards of turns (``env.gamma``)
    and of tokens are compared from their place on (:func:`~cookbook.sampling.credit.credits_of`).

    Args:
        kind: ``recipe.advantage``.
        group_size: the number of completions that were sampled per group; some may have been left out.

    Raises:
        ConfigError, RolloutError: see these functions.
    """
    if groups and groups[0].normalized is not None:
        each = normalized_each([group.parts for group in groups], groups[0].normalized, kind, group_size=group_size)
        return [[*row] for row in each]
    if not any(group.returns for group in groups):
        by_group = group_advantages([group.rewards for group in groups], kind, group_size=group_size)
        return [list(row) for row in by_group.tolist()]
    return [
        [*credits_of(group.returns, kind, group_size=group_size)]
        if group.returns
        else [*group_advantages([group.rewards], kind, group_size=group_size)[0].tolist()]
        for group in groups
    ]


def datums(groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[Credit]] | None = None) -> list[Datum]:
    """Return the datums of every group whose completions differ in reward. The others have zero advantages and no gradient.

    With ``loss.mask_truncated``, completions that were cut off have no datum.

    Without ``advantages``: the datums of all groups, with advantages of 0, for a recipe that computes them per token.
    """
    data: list[Datum] = []
    zeros: list[list[Credit]] = [[0.0] * len(group.trajectories) for group in groups]
    for group, row in zip(groups, zeros if advantages is None else advantages, strict=True):
        if advantages is None or any(_is_nonzero(value) for value in row):
            for trajectory, advantage in zip(group.trajectories, row, strict=True):
                if group.masks_truncated and trajectory.is_truncated:
                    continue
                data.extend(
                    RowDatum(datum.model_input, datum.loss_fn_inputs, group.prompt.row.where, group.prompt.question)
                    for datum in trajectory.datums(advantage, group.temperature)
                )
    return data


def _is_nonzero(credit: Credit) -> bool:
    return any(turn.any() for turn in credit) if isinstance(credit, list) else bool(credit)


def metrics(groups: Sequence[RolloutGroup], left_out: Sequence[Trajectory] = ()) -> dict[str, float]:
    """Return the metrics of a step's rewards and completions.

    ``reward/std`` is over all completions. ``reward/group_std`` is the mean over groups of the standard deviation within a
    group (divisor G - 1, as in z-scored advantages), which TRL logs as ``reward_std``. ``reward/frac_groups_without_spread``
    is the share of groups without a gradient, ``reward/part/NAME`` the mean of a named part. Without rewards these are
    missing. Lengths are in tokens; ``rollout/truncated_frac`` is the share of completions that reached ``max_tokens``.
    Lengths include the episodes that were ``left_out``, which have no reward.
    """
    attempts = [*(trajectory for group in groups for trajectory in group.trajectories), *left_out]
    lengths = np.array([attempt.num_sampled_tokens for attempt in attempts])
    return {
        **(_reward_metrics(groups) if groups[0].rewards else {}),
        "rollout/completion_tokens_mean": float(lengths.mean()),
        "rollout/completion_tokens_max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([attempt.is_truncated for attempt in attempts])),
        "rollout/tokens": float(lengths.sum()),
    }


def _reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    rewards = np.array([reward for group in groups for reward in group.rewards])
    # Groups of different sizes, if episodes were left out.
    stds = [float(np.std(group.rewards, ddof=1)) if len(group.rewards) > 1 else 0.0 for group in groups]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/group_std": float(np.mean(stds)),
        "reward/frac_groups_without_spread": float(np.mean([not group.has_spread for group in groups])),
        **part_means([parts for group in groups for parts in group.parts], "reward/part/"),
    }


def turn_metrics(groups: Sequence[RolloutGroup], left_out: Sequence[Trajectory] = ()) -> dict[str, float]:
    """Return the metrics of episodes in an environment.

    ``rollout/branches`` is the number of episodes whose earlier turns the chat template rewrites, ``env/errors`` of those that
    have ended by an error or a time limit, ``rollout/max_turns`` of those cut off by ``env.max_turns``, ``rollout/context`` of
    those that have filled the model's context. Calls of tools are counted: all that were made, those that could not be read,
    and those that raised. All are over the groups and the episodes that were ``left_out``.
    """
    attempts = [*(trajectory for group in groups for trajectory in group.trajectories), *left_out]
    turns = [len(attempt.turns) for attempt in attempts]
    return {
        "rollout/turns_mean": float(np.mean(turns)),
        "rollout/turns_max": float(max(turns)),
        "rollout/branches": float(sum(len(attempt.branches) > 1 for attempt in attempts)),
        "rollout/max_turns": float(sum(attempt.ended == "max_turns" for attempt in attempts)),
        "rollout/context": float(sum(attempt.ended == "context" for attempt in attempts)),
        "env/errors": float(sum(attempt.has_failed for attempt in attempts)),
        "rollout/tool_calls": float(sum(attempt.calls for attempt in attempts)),
        "rollout/malformed_calls": float(sum(attempt.malformed_calls for attempt in attempts)),
        "rollout/failed_calls": float(sum(attempt.failed_calls for attempt in attempts)),
    }


def log_rows(groups: Sequence[RolloutGroup], count: int) -> list[JsonObject]:
    """Return the first ``count`` rollouts as rows of ``samples.jsonl``: the first completion of each group, then the second."""
    most = max(len(group.trajectories) for group in groups)
    order = [(group, i) for i in range(most) for group in groups if i < len(group.trajectories)]
    return [
        {
            "row": group.prompt.row.where,
            "prompt": group.prompt.question or group.trajectories[i].opening,
            "completion": group.trajectories[i].text,
            **({"reward": group.rewards[i]} if group.rewards else {}),
            **({"parts": dict(group.parts[i])} if group.parts and group.parts[i] else {}),
            "stop_reason": group.trajectories[i].ended,
            **({"turns": group.trajectories[i].messages()} if len(group.trajectories[i].turns) > 1 else {}),
        }
        for group, i in order[:count]
    ]


@dataclass(eq=False)
class PolicySampling:
    """Samples completions from the weights in training.

    ``sampler`` has the weights of the last sync that was due; None before the first. ``sync_s`` are the seconds spent on syncs
    since it was last set to 0. ``on_sync`` is called with every new sampler.

    Args:
        sync_every: optimizer steps between two weight syncs.
        evaluator: evaluates the same weights. Training shares its renderer, reward, seed and count of consecutive failures.
        sampler: of a resumed run, if the run was saved between two weight syncs.
        needs_reward: whether the recipe learns from rewards. A recipe with a teacher does not.
        masks_truncated: whether completions that were cut off are not trained.
    """

    deployment: Deployment
    sync_every: int
    config: RolloutConfig
    evaluator: Evaluator
    sampler: Sampler | None = None
    needs_reward: bool = True
    masks_truncated: bool = False
    on_sync: Callable[[Sampler], None] = lambda sampler: None
    sync_s: float = 0.0

    def sync(self, step: int) -> Sampler:
        """Return a sampler of the weights after ``step`` optimizer steps, or of the last sync if no sync is due."""
        if self.sampler is None or (step % self.sync_every == 0 and self.sampler.step != step):
            self.sampler = self._load(step)
        return self.sampler

    def older_sampler(self, step: int) -> Sampler | None:
        """Return the current sampler if a checkpoint after ``step`` steps must also hold its older weights."""
        return self.sampler if step % self.sync_every else None

    def groups(
        self,
        sampler: Sampler,
        prompts: Sequence[RenderedPrompt],
        group_size: int,
        index: int,
        further: Further | None = None,
        *,
        retrier: Retrier | None = None,
        refusals: RejectedRows | None = None,
    ) -> StepRollouts:
        """Sample ``group_size`` completions of every prompt, with their rewards, for the step after ``index`` steps.

        Args:
            retrier: counts the failures; None: that of the evaluations.
            refusals: gets the rows that the reward rejects; None: those of the run.

        Raises:
            ConfigError: the run has no reward, and ``needs_reward``.
        """
        evaluator = self.evaluator
        if self.needs_reward and evaluator.runner is None and evaluator.environment is None:
            raise ConfigError("reward: this recipe learns from rewards; choose one, for example reward=number")
        seed = evaluator.seed * 1_000_003 + index
        evaluator.at_step(index)
        return sample_groups(
            sampler,
            prompts,
            group_size,
            self.config,
            evaluator.renderer,
            seed,
            retrier=retrier or evaluator.retrier,
            runner=evaluator.runner,
            refusals=evaluator.refusals if refusals is None else refusals,
            environment=evaluator.environment,
            further=further,
            masks_truncated=self.masks_truncated,
        )

    def newest(self, step: int) -> Sampler:
        """Return a sampler of exactly the weights after ``step`` steps. The training loop keeps its own between two syncs."""
        if step % self.sync_every == 0:
            return self.sync(step)
        return self.sampler if self.sampler is not None and self.sampler.step == step else self._load(step)

    def _load(self, step: int) -> Sampler:
        started = time.monotonic()
        sampler = self.deployment.load(step).result()
        self.sync_s += time.monotonic() - started
        self.on_sync(sampler)
        return sampler
