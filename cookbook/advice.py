"""Warnings before a run about values that are allowed and do not fit: one line each, with the key, the reason and a remedy."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from cookbook.backends.local import LocalConfig
from cookbook.check.rows import Survey, survey
from cookbook.data import Refusals, Renderer
from cookbook.data.answers import answer_text
from cookbook.engine.shape import is_adapter, num_parameters
from cookbook.engine.update_rules import Adafactor
from cookbook.errors import CookbookError
from cookbook.preflight import SPLITS, Rows, batch_size, planned_steps
from cookbook.run import Split

if TYPE_CHECKING:
    from cookbook.session import Settings

log = logging.getLogger("cookbook")

SAMPLED_ROWS = 500  # rows of a split whose tokens are counted: a tenth of a second, and a percentile within a few per cent
PERCENTILE = 95

# Learning rates of full training, as TRL 1.16 has them for models of hundreds of millions of parameters and more. An adapter
# takes ten times as much: Schulman et al. 2025, "LoRA Without Regret".
RATES = {"conversations": ("SFT", 2e-5), "preferences": ("preference training", 1e-6), "rollouts": ("RL", 1e-6)}
OF_ADAPTERS = 10.0
FAR_ABOVE = 10.0
# The narrower a model, the larger the rate it takes: the shipped one of 0.6M parameters learns best at 1e-4 to 3e-3. Published
# recipes for models from about 100M parameters up use rates near those above, so smaller models get no warning.
SMALLEST_MODEL = 50_000_000

# Runs of so few steps are trials, and evaluation before and after takes longer than those.
TRIAL_STEPS = 10
# Work of a token that is only read, where one that is trained or sampled counts 1. Training takes a forward and a backward
# pass, three times a forward pass. Sampling is one token at a time and uses the hardware about as much worse.
READ = 1 / 3


@dataclass(frozen=True)
class Counted:
    """Token counts of a sample of one split. ``answers`` are the lengths of the rows' own answers, end of turn included."""

    num_rows: int
    survey: Survey
    answers: Sequence[int]

    @property
    def basis(self) -> str:
        """The part of the split that was counted, in words."""
        sampled = self.survey.num_rows
        return f" (in a sample of {sampled:,} of {self.num_rows:,} rows)" if sampled < self.num_rows else ""

    @property
    def long_answer(self) -> int | None:
        """Tokens that 95% of the answers do not exceed; None without answers."""
        return int(np.percentile(self.answers, PERCENTILE, method="higher")) if self.answers else None

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence, or of a prompt."""
        return float(np.mean([len(one.tokens) for one in self.survey.sequences] or [0]))


def warn(typed: Settings, rows: Rows, renderer: Renderer | None) -> None:
    """Log a warning for each value that does not fit. Without ``renderer``, no token is counted."""
    kind = getattr(typed.module, "DATA", None)
    if kind is None:
        return
    counted: dict[Split, Counted] = {}
    for which in SPLITS:
        # Columns or rows that cannot be read: the run refuses them next, or leaves them out and says so.
        with contextlib.suppress(CookbookError):
            if renderer is not None and rows.counts.get(which):
                counted[which] = _counted(typed, kind, rows, which, renderer)
    lines = [*_batch(typed, rows), *_learning_rate(typed, kind), *_completions(typed, kind, counted)]
    for line in [*lines, *_evaluation(typed, kind, counted)]:
        log.warning("%s", line)


def _counted(typed: Settings, kind: str, rows: Rows, which: Split, renderer: Renderer) -> Counted:
    sample = rows.sample(which, SAMPLED_ROWS)
    found = survey(kind, sample, renderer, typed.data, 0, Refusals(typed.data, collect=True))
    texts = [text for row in sample if (text := answer_text(row, typed.data)) is not None]
    tokens = renderer.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return Counted(rows.counts[which], found, [len(one) + 1 for one in tokens])


def _batch(typed: Settings, rows: Rows) -> Iterator[str]:
    recipe, count = asdict(typed.recipe), rows.counts.get("train")
    size = batch_size(recipe)
    if count and size and count < size:
        key = "batch_size" if "batch_size" in recipe else "prompts_per_step"
        noun = "row" if count == 1 else "rows"
        yield (
            f"recipe.{key}={size}: the data have {count:,} {noun} to train on, so no step gets more than {count:,}; add rows, "
            f"or lower recipe.{key}"
        )


def _learning_rate(typed: Settings, kind: str) -> Iterator[str]:
    if typed.model.random or (isinstance(typed.backend, LocalConfig) and typed.backend.optimizer == Adafactor.name):
        return  # fresh weights take far larger rates; Adafactor's rate is relative to the size of the weights
    training, rate = RATES[kind]
    adapter = is_adapter(typed.model)
    rate *= OF_ADAPTERS if adapter else 1.0
    lr = typed.optim.lr
    if lr <= rate * FAR_ABOVE * (1 + 1e-9):
        return
    size = num_parameters(typed.model)
    if size is None or size >= SMALLEST_MODEL:
        usual = f"{rate:g}".replace("e-0", "e-")
        what = "an adapter" if adapter else "all parameters"
        yield (
            f"optim.lr={lr:g}: {lr / rate:,.0f} times the {usual} that is usual for {training} of {what}, so the model may "
            f"lose what it knows; set optim.lr={usual}, and raise it only as far as the evaluation improves"
        )


def _completions(typed: Settings, kind: str, counted: dict[Split, Counted]) -> Iterator[str]:
    """Completions that end before the data's own answers do."""
    judged = typed.reward is not None
    lost = "earn no reward" if judged else "are left out of eval/accuracy"
    cases: list[tuple[Split, str, int, str]] = [("eval", "eval.max_tokens", typed.eval.max_tokens, lost)]
    if kind == "rollouts":
        cases.insert(0, ("train", "rollout.max_tokens", typed.rollout.max_tokens, "earn no reward"))
    for which, key, limit, effect in cases:
        found = counted.get(which)
        if found is not None and (needed := found.long_answer) is not None and needed > limit:
            yield (
                f"{key}={limit}: {PERCENTILE}% of the data's own answers have up to {needed:,} tokens{found.basis}, and longer "
                f"ones {effect}; set {key}={needed} or more"
            )


def _evaluation(typed: Settings, kind: str, counted: dict[Split, Counted]) -> Iterator[str]:
    """Evaluation that takes longer than the training between: an estimate, by tokens."""
    train, held_out = counted.get("train"), counted.get("eval")
    if train is None or held_out is None:
        return
    recipe, every = asdict(typed.recipe), typed.eval.every
    steps, size = planned_steps(typed, train.num_rows), batch_size(recipe)
    if steps is None or size is None or steps <= TRIAL_STEPS:
        return
    times = 1 + (-(-steps // every) if every else 1)
    training = steps * min(size, train.num_rows) * _step_work(typed, kind, train, recipe.get("group_size") or 1)
    ratio = times * _evaluation_work(typed, kind, held_out) / max(training, 1.0)
    if ratio > 1:
        yield (
            f"eval.every={'null' if every is None else every}: {times} evaluations of {held_out.num_rows:,} rows take about "
            f"{ratio:.1f} times as long as the training itself (an estimate by tokens); raise eval.every, or lower eval.limit "
            "or eval.max_tokens"
        )


def _step_work(typed: Settings, kind: str, train: Counted, group_size: int) -> float:
    """Work of training on one row, in trained tokens."""
    if kind != "rollouts":
        return train.mean_tokens * (2 if kind == "preferences" else 1)
    completion = typed.rollout.max_tokens
    sampling = READ * train.mean_tokens + completion
    return group_size * (sampling + train.mean_tokens + completion)


def _evaluation_work(typed: Settings, kind: str, held_out: Counted) -> float:
    """Work of one evaluation, in trained tokens: reading the rows for their loss, then sampling completions."""
    limit, mean = typed.eval.max_tokens, held_out.mean_tokens
    completions = 1 + typed.eval.num_drawn
    if kind == "rollouts":
        return held_out.num_rows * completions * (READ * mean + limit)
    answers = [one for one in held_out.answers if typed.reward is not None or one <= limit]
    share = len(answers) / max(held_out.survey.num_rows, 1)
    sampled = min(float(np.mean(answers)), limit) if answers else 0.0
    sides = 2 if kind == "preferences" else 1
    return held_out.num_rows * (sides * READ * mean + share * completions * (READ * mean + sampled))
