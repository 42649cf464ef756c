"""How good the policy is on rows it is not trained on."""

from __future__ import annotations

import functools
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cookbook import terminal
from cookbook.data import Refusals, RenderedPrompt, Renderer
from cookbook.errors import BadRowError, ConfigError
from cookbook.protocols import Sampler
from cookbook.resilience import Asker, Request
from cookbook.rewards import Judge
from cookbook.types import Datum, ModelInput, Sample, SamplingParams

log = logging.getLogger("cookbook")

SHOWN = 3  # completions kept for people to read
CORRECT = 1.0  # a completion with at least this reward counts as correct
FINGERPRINT = "eval/crc32"
PASS = "eval/pass@"  # before k
HIGHER = ("eval/accuracy", "eval/reward", "eval/rewards/accuracy", "eval/rewards/margin")  # better if higher
EVALUATION = 1_701_208_428  # keeps these draws apart from others of the same seed

Rate = Callable[[int, Sequence[Sample]], Callable[[], list[float]]]
"""The rewards, once they are there, of a question's completions; the question by its place."""


@dataclass
class EvalConfig:
    """When and on how much a run is evaluated. ``conf/eval/default.yaml`` says what each field means."""

    every: int | None = 20
    limit: int | None = 200
    max_tokens: int = 512
    pass_at: list[int] = field(default_factory=list)
    num_samples: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    objective: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"eval.every must be at least 1, got {self.every}; null evaluates before and after only")
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
            raise ConfigError(f"eval.temperature must be > 0, got {self.temperature}: greedy completions are all alike")

    @property
    def num_drawn(self) -> int:
        """Completions drawn of every prompt, besides the greedy one."""
        return (self.num_samples or max(self.pass_at)) if self.pass_at else 0


def is_better_higher(metric: str) -> bool:
    """Whether a metric of an evaluation grows with quality: accuracies, rewards, margins and pass@k do, losses do not."""
    return metric in HIGHER or metric.startswith(PASS)


@dataclass(frozen=True)
class Example:
    """What became of one row: its greedy completion, and how many of the drawn ones were correct, if any were drawn."""

    prompt: str
    completion: str
    reward: float | None
    row: str = ""
    num_correct: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """Metrics named ``eval/...``, and completions. ``a | b`` joins two."""

    metrics: Mapping[str, float]
    examples: list[Example] = field(default_factory=list)

    def __or__(self, other: Evaluation) -> Evaluation:
        return Evaluation({**self.metrics, **other.metrics}, [*self.examples, *other.examples])

    def abridged(self) -> Evaluation:
        """With so few completions that people read them."""
        return replace(self, examples=self.examples[:SHOWN])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that at least one of ``k`` completions is correct, without bias, from ``num_samples`` >= k of them.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Question:
    """``tokens`` to continue by up to ``max_tokens``; ``shown`` is what people read of them, ``row`` where they come from."""

    tokens: Sequence[int]
    max_tokens: int
    shown: str
    row: str


@dataclass
class Evaluator:
    """Asks questions of a sampler, greedily and, for pass@k, by drawing; ``seed`` decides the draws.

    The draws are the same at every evaluation of a run: what changes between two of them is the policy's doing.
    """

    config: EvalConfig
    renderer: Renderer
    asker: Asker
    judge: Judge | None
    stop: Sequence[str]
    seed: int
    refusals: Refusals | None = None

    def rewards(self, sampler: Sampler, prompts: Sequence[RenderedPrompt]) -> Evaluation:
        """The rewards of completions: ``eval/reward``, the mean, ``eval/accuracy``, the share of at least ``CORRECT``, pass@k.

        Raises:
            ConfigError: there is no reward.
        """
        if self.judge is None:
            raise ConfigError("reward: none is chosen to judge completions by; choose one, for example reward=number")
        judge = self.judge

        def rate(place: int, samples: Sequence[Sample]) -> Callable[[], list[float]]:
            pending = [judge.submit(self.renderer.text(sample.tokens), prompts[place].row) for sample in samples]
            return lambda: [reward() for reward in pending]

        questions = [Question(one.tokens, self.config.max_tokens, one.question, one.row.where) for one in prompts]
        found, rewards = self._ask(sampler, questions, rate)
        return Evaluation({"eval/reward": float(np.mean(rewards)), **found.metrics}, found.examples) if rewards else found

    def answers(self, sampler: Sampler, data: Sequence[Datum]) -> Evaluation:
        """How many answers are reproduced token by token: ``eval/accuracy``, pass@k, and ``eval/answers``, of how many.

        Rows without a prompt before their last answer are left out, and so are answers longer than ``eval.max_tokens``.
        """
        split = ((datum, pair) for datum in data if (pair := split_answer(datum)) is not None)
        asked = [(datum, *pair) for datum, pair in split if len(pair[1]) <= self.config.max_tokens]
        questions = [
            Question(prompt, self._room(len(prompt)), getattr(datum, "question", ""), getattr(datum, "where", ""))
            for datum, prompt, _ in asked
        ]

        def rate(place: int, samples: Sequence[Sample]) -> Callable[[], list[float]]:
            return lambda: [float(sample.tokens == asked[place][2]) for sample in samples]

        found, rewards = self._ask(sampler, questions, rate)
        return Evaluation({**found.metrics, "eval/answers": float(len(rewards))}, found.examples) if rewards else found

    def fingerprint(self, rows_digest: str) -> int:
        """Equal where two evaluations asked the same rows, let completions be as long, and judged them alike."""
        judged_by = "the row's tokens" if self.judge is None else self.judge.fingerprint()
        asked = [rows_digest, judged_by, self.config.max_tokens, list(self.stop)]
        return zlib.crc32(json.dumps(asked).encode())

    def _room(self, length: int) -> int:
        """A row that fills the context leaves less than ``max_tokens``, and always enough for its answer."""
        context = self.renderer.max_length
        return self.config.max_tokens if context is None else min(self.config.max_tokens, context - length)

    def _ask(self, sampler: Sampler, questions: Sequence[Question], rate: Rate) -> tuple[Evaluation, list[float]]:
        """What every evaluation measures, and the rewards of the greedy completions."""
        count = len(questions)
        kinds = (False, True) if self.config.num_drawn else (False,)
        requests = [self._request(sampler, question, place, kind) for kind in kinds for place, question in enumerate(questions)]
        pending: dict[int, Callable[[], list[float]]] = {}
        texts: dict[int, str] = {}

        def arrived(number: int, samples: list[Sample]) -> None:
            activity.count += 1
            pending[number] = rate(number % count, samples)
            if number < count:
                texts[number] = self.renderer.text(samples[0].tokens)

        with terminal.doing("evaluating", total=len(requests), noun="prompts") as activity:
            unanswered = self.asker.ask(requests, arrived)
        for number, error in unanswered.failed.items():
            log.info("%s: left out of the evaluation: %s", questions[number % count].row, error)
        rewards = self._judged(pending, [questions[number % count].row for number in range(len(requests))])
        greedy = {number: found[0] for number, found in rewards.items() if number < count}
        correct = {number % count: _num_correct(found) for number, found in rewards.items() if number >= count}
        if not greedy:
            return Evaluation({}), []
        metrics = {
            "eval/accuracy": float(np.mean([reward >= CORRECT for reward in greedy.values()])),
            **self._pass_at(list(correct.values())),
            "eval/failed": float(len(unanswered.failed)),
        }
        examples = [
            Example(questions[place].shown, texts[place], reward, questions[place].row, correct.get(place))
            for place, reward in greedy.items()
        ]
        return Evaluation(metrics, examples), list(greedy.values())

    def _judged(self, pending: Mapping[int, Callable[[], list[float]]], rows: Sequence[str]) -> dict[int, list[float]]:
        """The rewards by request; without those whose row the reward finds at fault, where ``data.on_bad_row`` skips it."""
        found = {}
        for number in sorted(pending):
            try:
                found[number] = pending[number]()
            except BadRowError as error:
                if self.refusals is None or not self.refusals.skips_bad_rows:
                    raise
                self.refusals.add(rows[number], "on_bad_row", str(error))
        return found

    def _request(self, sampler: Sampler, question: Question, place: int, drawn: bool) -> Request:
        stop: list[str | int] = [*self.renderer.stop_token_ids, *self.stop]
        params = SamplingParams(max_tokens=question.max_tokens, temperature=0.0, stop=stop)
        if drawn:
            seed = int(np.random.SeedSequence((self.seed, EVALUATION, place)).generate_state(1, np.uint64)[0]) >> 16
            params = replace(params, temperature=self.config.temperature, top_p=self.config.top_p, seed=seed)
        prompt = ModelInput.from_ints(list(question.tokens))
        return functools.partial(sampler.sample, prompt, self.config.num_drawn if drawn else 1, params)

    def _pass_at(self, correct: Sequence[int]) -> dict[str, float]:
        """The mean over the rows of which some completions were drawn, ``correct`` of them correct."""
        drawn = self.config.num_drawn
        return {
            f"{PASS}{k}": float(np.mean([pass_at_k(drawn, one, k) for one in correct])) for k in self.config.pass_at if correct
        }


def _num_correct(rewards: Sequence[float]) -> int:
    return sum(reward >= CORRECT for reward in rewards)


def split_answer(datum: Datum) -> tuple[list[int], list[int]] | None:
    """Prompt and answer of a supervised datum: the last run of trained tokens, and what comes before it.

    None when nothing is trained, or everything is: then the token before the first target is the text's own beginning, or the
    one that begins every text, and nothing has been asked.
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
