"""Diagnostics of a run: the batch of a failed call in ``failed_batch/``, and warnings about steps without a gradient."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cookbook.config.optim import Schedule
from cookbook.data import Renderer, RowDatum
from cookbook.errors import CookbookError, DataError, NoGradientError, NonFiniteError
from cookbook.futures import Future
from cookbook.protocols import Trainer
from cookbook.types import Datum, ForwardBackwardOutput, JsonObject, OptimStepOutput
from cookbook.utils import files

log = logging.getLogger("cookbook")

FOLDER = "failed_batch"
# Rows named in an error.
SHOWN = 4

# Steps in a row with the same problem before a warning. A single step without spread is common at the start and end of a run.
IN_A_ROW = 3
# Share of completions that reach rollout.max_tokens.
CUT_OFF = 0.5
# Share of the ratios of an on-policy update outside of the clip range. Rounding in bfloat16 clips less than 1%.
MOST_CLIPPED = 0.02
# Seconds. A shorter evaluation is not worth a warning, even if it takes longer than the training.
SLOW_EVALUATION_S = 10.0
CONSTANT, TIED, NO_GRADIENT, TRUNCATED, ENV_ERRORS = "constant", "tied", "no_gradient", "truncated", "env_errors"
CLIPPED = "clipped"
# Metrics of rollouts that show a problem.
OF_ROLLOUTS = ("reward/mean", "reward/std", "reward/frac_groups_without_spread", "rollout/truncated_frac", "env/errors")
ROWS_CHECKSUM = "data/rows_crc32"

LOOK = "read the completions in samples.jsonl"
REMEDIES = {
    CONSTANT: f"{LOOK} and check the reward function and how it parses the answer",
    TIED: "raise recipe.group_size or rollout.temperature, or train on prompts that the model answers only sometimes",
    NO_GRADIENT: "check the options of the loss, and which tokens are trained: cookbook check data",
}


@dataclass(frozen=True)
class TrackedCall:
    """A call of the trainer for optimizer step ``step``. The ``data`` of an ``update`` are those since the previous update."""

    step: int
    data: Sequence[Datum]
    future: Future[ForwardBackwardOutput] | Future[OptimStepOutput]
    update: bool = False

    def succeeded(self) -> bool:
        return self.future.done() and self.future.failure() is None


class TrackedCalls:
    """The calls since the last update that succeeded: those that may still fail, and those that have failed."""

    def __init__(self) -> None:
        self._calls: deque[TrackedCall] = deque()

    def add(self, call: TrackedCall) -> None:
        while any(earlier.update and earlier.succeeded() for earlier in self._calls) or (
            self._calls and self._calls[0].succeeded()
        ):
            self._calls.popleft()
        self._calls.append(call)

    def failed(self) -> TrackedCall | None:
        """Return the first failed call; later failures are its consequences."""
        return next((call for call in self._calls if call.future.failure() is not None), None)


def root_cause(error: CookbookError, calls: TrackedCalls, out: Path, trainer: Trainer, renderer: Renderer) -> BaseException:
    """Return the error of the first failed call, or ``error`` if no call failed.

    If numbers of the call's batch are at fault, the batch is written to ``failed_batch/``, and the error names the rows and
    the file.
    """
    call = calls.failed()
    # Reading the exception marks it as reported.
    cause = call and call.future.exception()
    if call is None or not call.data or not isinstance(cause, NonFiniteError | DataError):
        return cause or error
    blamed = _blamed(cause)
    rows = _rows(call.data, blamed)
    path = out / FOLDER / f"step-{call.step:06d}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        files.write_text(path, _lines(call, blamed, trainer, renderer))
    except OSError as reason:
        log.warning("%s: cannot be written: %s", path, reason.strerror)
        return type(cause)(f"step {call.step}: {cause} ({rows})")
    return type(cause)(f"step {call.step}: {cause} ({rows}; the batch is in {path})")


def _blamed(error: CookbookError) -> Sequence[int]:
    """Return the indices of the datums at fault; empty if the error does not say."""
    if isinstance(error, NonFiniteError):
        return error.datums
    match = re.match(r"datum (\d+)\b", str(error))
    return [int(match[1])] if match else []


def _rows(data: Sequence[Datum], blamed: Sequence[int]) -> str:
    """Return the locations of the rows at fault, or of all rows if it is unknown which are."""
    places = [place for place in dict.fromkeys(_where(data[index]) for index in blamed or range(len(data))) if place]
    first_places = ", ".join(places[:SHOWN]) + (", ..." if len(places) > SHOWN else "")
    count = f"{len(data)} datums" if not blamed else ""
    return " of ".join(part for part in (count, first_places) if part) or f"{len(data)} datums"


def _where(datum: Datum) -> str:
    return datum.where if isinstance(datum, RowDatum) else ""


def _lines(call: TrackedCall, blamed: Sequence[int], trainer: Trainer, renderer: Renderer) -> str:
    """Return one JSON object per datum. ``logprobs`` are computed with the weights before the update."""
    logprobs: Sequence[list[float] | None] = [None] * len(call.data)
    # After a failure the trainer may be unable to compute them.
    with contextlib.suppress(CookbookError, RuntimeError):
        output = trainer.forward(call.data, "cross_entropy").result()
        logprobs = [row["logprobs"].tolist() for row in output.loss_fn_outputs]
    lines = []
    for index, (datum, numbers) in enumerate(zip(call.data, logprobs, strict=True)):
        tokens = datum.model_input.to_ints()
        row = {
            "step": call.step,
            "datum": index,
            "row": _where(datum),
            "blamed": index in blamed,
            "text": renderer.tokenizer.decode(tokens),
            "tokens": tokens,
            **{key: tensor.tolist() for key, tensor in datum.loss_fn_inputs.items()},
            "logprobs": numbers,
        }
        lines.append(json.dumps(_spelled(row), ensure_ascii=False) + "\n")
    return "".join(lines)


def _spelled(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by text, at every depth."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Health:
    """Counts of steps by problem, and warnings about them, each once per run. Checkpoints keep the counts.

    ``seen`` counts all steps, ``learned`` the steps with a gradient, and those without a metric of it. By problem, ``streaks``
    is the number of consecutive steps up to the newest that have the problem, and ``totals`` the number of all such steps.
    ``reward`` is the value that all rewards of the newest step had, if they were equal; ``rewarded`` says whether a mean
    reward was ever above 0. ``max_tokens`` is ``rollout.max_tokens``. ``sampled`` has the metrics of the newest rollouts that
    show problems: with ``recipe.updates`` above 1 the steps after that of the sampling train the same rollouts.
    """

    max_tokens: int = 0
    seen: int = 0
    learned: int = 0
    rewarded: bool = False
    reward: float | None = None
    streaks: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    sampled: dict[str, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, state: JsonObject | None, max_tokens: int) -> Health:
        """Return the counts of a checkpoint. A checkpoint saved through the Python API has none; assume a gradient."""
        return cls(**{**(state or {"seen": 1, "learned": 1}), "max_tokens": max_tokens})

    def state(self) -> JsonObject:
        """Return a copy of the counts, JSON-compatible."""
        return {name: value for name, value in asdict(self).items() if name != "max_tokens"}

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count one finished step, and log a warning if it is the third in a row with the same problem.

        Clipped ratios of an on-policy step are a problem in its first step: the same weights have sampled the completions.
        """
        if "reward/mean" in metrics:
            self.sampled = {key: metrics[key] for key in OF_ROLLOUTS if key in metrics}
        # A step that uses rows of the data, or rollouts of its own, has a checksum of the rows.
        elif ROWS_CHECKSUM not in metrics:
            metrics = {**self.sampled, **metrics}
        problems = self._problems(metrics)
        if self._clips_on_policy(metrics) and CLIPPED not in self.warned:
            self.warned.append(CLIPPED)
            log.warning("step %d: %s", step, self._explained(CLIPPED, "", metrics))
        self.seen += 1
        self.learned += not problems[NO_GRADIENT]
        for kind, is_present in problems.items():
            self.streaks[kind] = self.streaks.get(kind, 0) + 1 if is_present else 0
            self.totals[kind] = self.totals.get(kind, 0) + is_present
        lasting = [kind for kind, count in self.streaks.items() if count >= IN_A_ROW]
        # Equal rewards make groups tie, and tied groups have no gradient: one cause, one warning.
        causes = [kind for kind in (CONSTANT, TIED, NO_GRADIENT) if kind in lasting][:1]
        for kind in [*causes, *(kind for kind in lasting if kind == TRUNCATED)]:
            if kind not in self.warned:
                self.warned.append(kind)
                log.warning("step %d: %s", step, self._explained(kind, f"the last {self.streaks[kind]} steps", metrics))

    def check(self) -> None:
        """Raise NoGradientError if the run has had steps, and none of them had a gradient."""
        if not self.seen or self.learned:
            return
        steps = f"all {self.seen} steps" if self.seen > 1 else "its only step"
        cause = next(kind for kind in (CONSTANT, TIED, NO_GRADIENT) if self.totals.get(kind) == self.seen)
        why = "" if cause == NO_GRADIENT else f" ({self._fact(cause)})"
        raise NoGradientError(
            f"training: the gradient was zero in {steps}{why}, so the run learned nothing; {self._remedy(cause)}"
        )

    def _problems(self, metrics: Mapping[str, float]) -> dict[str, bool]:
        """Return whether the step has each problem."""
        mean, spread = metrics.get("reward/mean"), metrics.get("reward/std")
        equal = mean is not None and spread is not None and spread <= 1e-9 * max(abs(mean), 1e-9)
        problems = {
            CONSTANT: equal and self.reward in (None, mean),
            TIED: metrics.get("reward/frac_groups_without_spread") == 1.0,
            # A server may report no norm; a step that has trained no token has no gradient.
            NO_GRADIENT: metrics.get("optim/grad_norm", metrics.get("tokens/trained", 1.0)) == 0.0,
            TRUNCATED: metrics.get("rollout/truncated_frac", 0.0) > CUT_OFF,
            ENV_ERRORS: metrics.get("env/errors", 0.0) > 0,
        }
        self.reward = mean if equal else None
        self.rewarded = self.rewarded or (mean is not None and mean > 0)
        return problems

    def _clips_on_policy(self, metrics: Mapping[str, float]) -> bool:
        # A step without this metric has sampled nothing: it updates with completions of an earlier step.
        return metrics.get("sync/version_lag") == 0 and metrics.get("loss/clip_frac", 0.0) > MOST_CLIPPED

    def _explained(self, kind: str, steps: str, metrics: Mapping[str, float]) -> str:
        if kind == CLIPPED:
            return (
                f"{metrics['loss/clip_frac']:.1%} of the ratios of an on-policy update were clipped (kl/sampler_trainer_k3 is "
                f"{metrics.get('kl/sampler_trainer_k3', math.nan):.2g}), so sampler and trainer compute different "
                "log-probabilities; give both the same weights, precision and temperature, or set loss.anchor=trainer"
            )
        if kind == TRUNCATED:
            share = metrics["rollout/truncated_frac"]
            return (
                f"more than half of the completions of {steps} were cut off ({share:.0%} in this one), and a cut-off answer "
                f"earns no reward; raise rollout.max_tokens, now {self.max_tokens}"
            )
        if kind == NO_GRADIENT:
            return f"the gradient of {steps} was zero, so they changed nothing; {self._remedy(kind)}"
        groups = metrics.get("refill/groups")
        refilled = "" if groups is None else f", though rollout.refill sampled {groups:.0f} groups in this one"
        return f"in {steps} {self._fact(kind)}{refilled}, so these steps taught nothing; {self._remedy(kind)}"

    def _fact(self, kind: str) -> str:
        if kind == TIED:
            return "all groups tied, each prompt's completions having equal rewards"
        never = "" if self.rewarded else ", and no reward of this run was above 0"
        return f"every reward was {self.reward:g}{never}"

    def _remedy(self, kind: str) -> str:
        if kind == CONSTANT and self.streaks.get(ENV_ERRORS):
            return "fix the environment: it ended episodes by errors (env/errors), and log.txt has the reasons"
        if kind == CONSTANT and self.rewarded:
            return f"{LOOK}: if they are right, train on harder prompts, else check the reward function"
        return REMEDIES[kind]


def warn_of_other_rates(schedule: Schedule, first_step: int, planned: int, total: int) -> None:
    """Warn if the steps before a resume had learning rates that the new number of steps would change."""
    done = range(1, min(first_step, planned, total) + 1)
    if any(schedule.factor(step, planned) != schedule.factor(step, total) for step in done):
        log.warning(
            "recipe.steps: %d steps had the learning rates of a run of %d steps, and the run now has %d; "
            "the same steps without the interruption would have other rates",
            first_step,
            planned,
            total,
        )
