"""Evaluation of a sampler on held-out rows: rewards of completions, answers reproduced, pass@k."""

from __future__ import annotations

import json
import logging
import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cookbook import terminal
from cookbook.data import RejectedRows, RenderedPrompt, Renderer, Row
from cookbook.errors import BadRowError, ConfigError
from cookbook.protocols import Sampler
from cookbook.sampling.environments import EpisodeRunner
from cookbook.sampling.episodes import Draw, Episodes, Retrier
from cookbook.sampling.rewards import Parts, PendingScores, RewardRunner, Score, part_means
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Datum, SamplingParams

log = logging.getLogger("cookbook")

# Completions of an evaluation that are kept for people to read.
NUM_EXAMPLES = 3
# A completion with at least this reward counts as correct.
CORRECT_REWARD = 1.0
# Tokens. With eval.answers=auto, answers are compared token by token if their median length is at most this. No two people
# write the same longer text, so the share of equal ones is 0 before and after training.
SHORT_ANSWER = 32
# A completion that is longer than the row's answer is wrong. It may be longer by this many tokens, for people to read.
EXTRA_TOKENS = 16
FINGERPRINT = "eval/crc32"
# Number of greedy completions that were judged, and number of held-out rows or pairs whose loss was computed.
ANSWERS = "eval/answers"
ROWS = "eval/rows"
# Prefix of the metrics pass@k; k follows.
PASS = "eval/pass@"
# Metrics that grow with quality.
HIGHER_IS_BETTER = ("eval/accuracy", "eval/reward", "eval/rewards/accuracy", "eval/rewards/margin")
# Metric endings of values that fall with quality.
LOWER_IS_BETTER = ("loss", "/nll", "/perplexity", "/bits_per_byte")
# Prefix of the means of a reward's named parts.
PART_PREFIX = "eval/reward/part/"
# Separates the draws of evaluation from other draws of the same seed.
EVALUATION_SEED = 1_701_208_428

Scoring = Callable[[RenderedPrompt, Sequence[Trajectory]], PendingScores]
"""Function that starts the scoring of all attempts at a prompt."""


@dataclass
class EvalConfig:
    """Options of evaluation. ``conf/eval/default.yaml`` explains each field."""

    every: int | None = 20
    patience: int | None = None
    limit: int | None = 200
    answers: bool | Literal["auto"] = "auto"
    max_tokens: int = 512
    pass_at: list[int] = field(default_factory=list)
    num_samples: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    objective: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"eval.every must be at least 1, got {self.every}; null evaluates before and after only")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"eval.patience must be at least 1, got {self.patience}; null never stops a run early")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"eval.limit must be at least 1, got {self.limit}; null takes all rows")
        if any(k < 1 for k in self.pass_at):
            raise ConfigError(f"eval.pass_at: every k must be at least 1, got {self.pass_at}")
        if self.num_samples is not None and self.num_samples < max(self.pass_at, default=1):
            raise ConfigError(
                f"eval.num_samples={self.num_samples} is less than the largest k of eval.pass_at={self.pass_at}; raise it, or "
                "set it to null"
            )
        if self.temperature <= 0:
            raise ConfigError(f"eval.temperature must be > 0, got {self.temperature}: greedy completions are all equal")

    @property
    def num_drawn(self) -> int:
        """Completions drawn for every prompt, in addition to the greedy one."""
        return (self.num_samples or max(self.pass_at)) if self.pass_at else 0

    def compares(self, lengths: Sequence[int]) -> bool:
        """Whether answers with these numbers of tokens are compared token by token, if no reward judges completions."""
        if self.answers == "auto":
            return bool(lengths) and statistics.median(lengths) <= SHORT_ANSWER
        return self.answers


def is_better_higher(metric: str) -> bool:
    """Whether a metric of an evaluation grows with quality: accuracies, rewards, margins and pass@k do, losses do not."""
    return metric in HIGHER_IS_BETTER or metric.startswith((PASS, PART_PREFIX)) or metric.endswith("/accuracy")


def is_better_lower(metric: str) -> bool:
    """Whether a metric of an evaluation falls with quality: losses do."""
    return metric.startswith("eval/") and metric.endswith(LOWER_IS_BETTER)


@dataclass(frozen=True)
class Example:
    """Result of one row: the greedy completion, and how many of the drawn completions were correct, if any were drawn."""

    prompt: str
    completion: str
    reward: float | None
    row: str = ""
    num_correct: int | None = None
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Metrics named ``eval/...``, and completions. ``a | b`` joins two."""

    metrics: Mapping[str, float]
    examples: list[Example] = field(default_factory=list)

    def __or__(self, other: Evaluation) -> Evaluation:
        return Evaluation({**self.metrics, **other.metrics}, [*self.examples, *other.examples])

    def abridged(self) -> Evaluation:
        """Return a copy with the first ``NUM_EXAMPLES`` completions."""
        return replace(self, examples=self.examples[:NUM_EXAMPLES])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate, from ``num_samples`` >= k completions, that at least one of ``k`` is correct.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass
class Evaluator:
    """Evaluates samplers on questions, with greedy completions and, for pass@k, with draws that ``seed`` decides.

    The draws are the same at every evaluation of a run: only the policy changes the results.
    """

    config: EvalConfig
    renderer: Renderer
    retrier: Retrier
    runner: RewardRunner | None
    stop: Sequence[str]
    seed: int
    refusals: RejectedRows | None = None
    environment: EpisodeRunner | None = None

    @property
    def has_reward(self) -> bool:
        """Whether completions are scored, by a reward or an environment."""
        return self.runner is not None or self.environment is not None

    def at_step(self, step: int) -> None:
        """Tell rewards how many optimizer steps are finished."""
        if self.runner is not None:
            self.runner.step = step
        if self.environment is not None:
            self.environment.step = step

    def rewards(self, sampler: Sampler, prompts: Sequence[RenderedPrompt]) -> Evaluation:
        """Return ``eval/reward``, the mean reward, ``eval/accuracy``, the share of at least ``CORRECT``, and pass@k.

        ``eval/reward/part/NAME`` is the mean of a named part, ``eval/answers`` the number of greedy completions.
        ``eval/env_errors`` is the number of episodes that the environment has ended by an error. They are left out of all other
        metrics, unless ``env.on_error=end``.

        Raises:
            ConfigError: there is no reward.
            RolloutError: the environment has ended every episode by an error.
        """
        if not self.has_reward:
            raise ConfigError("reward: no reward is chosen, and evaluation needs one; choose one, for example reward=number")
        episodes = Episodes(self.renderer, self.retrier, self.runner, self.environment)
        result, scores = self._sample(sampler, prompts, episodes, episodes.scores)
        if not scores:
            return result
        parts = part_means([score.parts for score in scores], PART_PREFIX)
        reward = float(np.mean([score.value for score in scores]))
        return Evaluation({"eval/reward": reward, **parts, **result.metrics}, result.examples)

    def answers(self, sampler: Sampler, data: Sequence[Datum]) -> Evaluation:
        """Return ``eval/accuracy``, the share of answers reproduced token by token, pass@k, and ``eval/answers``, their number.

        Rows without a prompt before their last answer are left out, and so are answers longer than ``eval.max_tokens``. A
        completion ends at most ``LONGER`` tokens after the length of its answer.
        """
        split = ((datum, pair) for datum in data if (pair := split_answer(datum)) is not None)
        used = [(_prompt(datum, pair[0]), pair[1]) for datum, pair in split if len(pair[1]) <= self.config.max_tokens]
        expected = {id(prompt): answer for prompt, answer in used}

        def scores_of(prompt: RenderedPrompt, attempts: Sequence[Trajectory]) -> PendingScores:
            return lambda: [Score(float(attempt.turns[0].tokens == expected[id(prompt)])) for attempt in attempts]

        prompts = [prompt for prompt, _ in used]
        limits = [len(answer) + EXTRA_TOKENS for _, answer in used]
        result, _ = self._sample(sampler, prompts, Episodes(self.renderer, self.retrier), scores_of, limits)
        return result

    def fingerprint(self, rows_digest: str) -> int:
        """Return a checksum of the rows, the reward, the limit of a completion and the stop texts.

        Two evaluations are comparable if their checksums are equal.
        """
        scored_by = "the row's tokens" if self.runner is None else self.runner.fingerprint()
        if self.environment is not None:
            scored_by = f"{self.environment.config.fingerprint()} {scored_by}"
        return zlib.crc32(json.dumps([rows_digest, scored_by, self.config.max_tokens, list(self.stop)]).encode())

    def _sample(
        self,
        sampler: Sampler,
        prompts: Sequence[RenderedPrompt],
        episodes: Episodes,
        scores_of: Scoring,
        limits: Sequence[int] | None = None,
    ) -> tuple[Evaluation, list[Score]]:
        """Return the metrics that every evaluation has, and the scores of the greedy completions.

        Draws ``0 .. count - 1`` are greedy; if completions are drawn, draws ``count .. 2 * count - 1`` are theirs. ``limits``
        are the largest numbers of tokens of a completion, by prompt.
        """
        count = len(prompts)
        kinds = (False, True) if self.config.num_drawn else (False,)
        limits = limits or [self.config.max_tokens] * count
        draws = [self._draw(prompt, index, kind, limits[index]) for kind in kinds for index, prompt in enumerate(prompts)]
        pending: dict[int, PendingScores] = {}
        first: dict[int, Trajectory] = {}
        num_episodes = num_failed = num_left_out = 0

        def ended(number: int, attempts: list[Trajectory]) -> None:
            nonlocal num_episodes, num_failed, num_left_out
            activity.count += 1
            valid = episodes.valid(attempts)
            num_episodes += len(attempts)
            num_failed += sum(attempt.has_failed for attempt in attempts)
            num_left_out += len(attempts) - len(valid)
            if not valid:
                return
            pending[number] = scores_of(prompts[number % count], valid)
            if number < count:
                first[number] = valid[0]

        with terminal.doing("evaluating", total=len(draws), noun="prompts") as activity:
            failed = episodes.play(sampler, draws, ended).failed
        if episodes.environment is not None:
            episodes.environment.report_errors(num_left_out, num_episodes, "evaluation")
        for number, error in failed.items():
            log.info("%s: left out of the evaluation: %s", prompts[number % count].row.where, error)
        scores = self._scores(pending, [prompts[number % count].row.where for number in range(len(draws))])
        greedy = {number: of_one[0] for number, of_one in scores.items() if number < count}
        scores_of_draws = {number % count: of_one for number, of_one in scores.items() if number >= count}
        correct = {
            index: (len(of_one), sum(score.value >= CORRECT_REWARD for score in of_one))
            for index, of_one in scores_of_draws.items()
        }
        if not greedy:
            return Evaluation({}), []
        metrics = {
            "eval/accuracy": float(np.mean([score.value >= CORRECT_REWARD for score in greedy.values()])),
            **self._pass_at(list(correct.values())),
            "eval/failed": float(len(failed)),
            **({} if episodes.environment is None else {"eval/env_errors": float(num_failed)}),
            ANSWERS: float(len(greedy)),
        }
        examples = [
            Example(
                prompts[index].question or first[index].opening,
                first[index].text,
                score.value,
                prompts[index].row.where,
                correct[index][1] if index in correct else None,
                score.parts,
            )
            for index, score in greedy.items()
        ]
        return Evaluation(metrics, examples), list(greedy.values())

    def _scores(self, pending: Mapping[int, PendingScores], rows: Sequence[str]) -> dict[int, list[Score]]:
        """Wait for the scores of each request. A row that the reward rejects is dropped if ``data.on_bad_row`` is ``skip``."""
        scores = {}
        for number in sorted(pending):
            try:
                scores[number] = pending[number]()
            except BadRowError as error:
                if self.refusals is None or not self.refusals.skips_bad_rows:
                    raise
                self.refusals.add(rows[number], "on_bad_row", str(error))
        return scores

    def _draw(self, prompt: RenderedPrompt, index: int, several: bool, limit: int) -> Draw:
        stop: list[str | int] = [*self.renderer.stop_token_ids, *self.stop]
        max_tokens, context = min(self.config.max_tokens, limit), self.renderer.max_length
        # Fewer after a prompt that almost fills the context; the row's own answer always fits.
        if context is not None:
            max_tokens = min(max_tokens, context - len(prompt.tokens))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)
        if several:
            seed = int(np.random.SeedSequence((self.seed, EVALUATION_SEED, index)).generate_state(1, np.uint64)[0]) >> 16
            params = replace(params, temperature=self.config.temperature, top_p=self.config.top_p, seed=seed)
        return Draw(prompt, self.config.num_drawn if several else 1, params)

    def _pass_at(self, correct: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Return pass@k, the mean over rows; ``correct`` are the numbers of draws and of correct draws of each row.

        A row that has fewer than k draws, because the environment has ended the others by errors, is left out of pass@k.
        """
        metrics = {}
        for k in self.config.pass_at:
            if shares := [pass_at_k(count, right, k) for count, right in correct if count >= k]:
                metrics[f"{PASS}{k}"] = float(np.mean(shares))
        return metrics


def _prompt(datum: Datum, tokens: list[int]) -> RenderedPrompt:
    """Return the prompt of a supervised datum's answer."""
    return RenderedPrompt(tokens, Row(getattr(datum, "where", ""), {}), "", getattr(datum, "question", ""))


def answer_lengths(data: Sequence[Datum]) -> list[int]:
    """Return the numbers of tokens of the answers of supervised datums. A datum without a prompt has no answer."""
    return [len(pair[1]) for datum in data if (pair := split_answer(datum)) is not None]


def split_answer(datum: Datum) -> tuple[list[int], list[int]] | None:
    """Return the prompt and the answer of a supervised datum: the last span of trained tokens, and all tokens before it.

    Return None if no token is trained, or if the span begins at the first target: then the datum has no prompt.
    """
    trained = np.flatnonzero(datum.loss_fn_inputs["weights"].array)
    if not len(trained):
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    start, stop = int(trained[gaps[-1] + 1] if len(gaps) else trained[0]), int(trained[-1]) + 1
    if start == 0:
        return None
    prompt = datum.model_input.to_ints()[: start + 1]
    return prompt, datum.loss_fn_inputs["target_tokens"].array[start:stop].tolist()
