"""Warnings about steps that teach nothing, each once a run, and whether any step of the run had a gradient."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cookbook.errors import NoGradientError
from cookbook.schedules import Schedule

log = logging.getLogger("cookbook")

IN_A_ROW = 3  # steps; a single step without spread is common when a run begins or ends well
CUT_OFF = 0.5  # share of completions that reach rollout.max_tokens
CONSTANT, TIED, NO_GRADIENT, TRUNCATED = "constant", "tied", "no_gradient", "truncated"

LOOK = "read the completions in samples.jsonl"
REMEDIES = {
    CONSTANT: f"{LOOK} and check the reward function and how it parses the answer",
    TIED: "raise recipe.group_size or rollout.temperature, or train on prompts that the model answers only sometimes",
    NO_GRADIENT: "check the options of the loss, and which tokens are trained: cookbook check data",
}


@dataclass
class Health:
    """Counts of steps by what is wrong with them. A checkpoint keeps the counts, so that a resumed run continues them.

    ``learned`` counts the steps with a gradient, or whose metrics do not say; ``seen`` all steps. ``streaks`` are the steps in
    a row, up to the newest, that show a problem; ``totals`` all steps that do. ``reward`` is the value that all rewards of the
    newest step had, if they were equal; ``rewarded`` says whether a mean reward was ever above 0.
    """

    max_tokens: int = 0  # of a completion, rollout.max_tokens
    seen: int = 0
    learned: int = 0
    rewarded: bool = False
    reward: float | None = None
    streaks: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)

    @classmethod
    def restored(cls, state: Mapping[str, Any] | None, max_tokens: int) -> Health:
        """The counts of a checkpoint. One that has none was saved by an earlier version, and counts as a step with gradient."""
        return cls(**{**(state or {"seen": 1, "learned": 1}), "max_tokens": max_tokens})

    def state(self) -> dict[str, Any]:
        """A copy of the counts, JSON-compatible."""
        return {name: value for name, value in asdict(self).items() if name != "max_tokens"}

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count one finished step, and log a warning if it is the third in a row with the same problem."""
        problems = self._problems(metrics)
        self.seen += 1
        self.learned += NO_GRADIENT not in problems
        for kind in (CONSTANT, TIED, NO_GRADIENT, TRUNCATED):
            self.streaks[kind] = self.streaks.get(kind, 0) + 1 if kind in problems else 0
            self.totals[kind] = self.totals.get(kind, 0) + (kind in problems)
        lasting = [kind for kind, count in self.streaks.items() if count >= IN_A_ROW]
        # Equal rewards make groups tie, and tied groups have no gradient: one cause, one warning.
        causes = [kind for kind in (CONSTANT, TIED, NO_GRADIENT) if kind in lasting][:1]
        for kind in [*causes, *(kind for kind in lasting if kind == TRUNCATED)]:
            if kind not in self.warned:
                self.warned.append(kind)
                log.warning("step %d: %s", step, self._explained(kind, f"the last {self.streaks[kind]} steps", metrics))

    def check(self) -> None:
        """Raises NoGradientError: the run has had steps, and none of them had a gradient."""
        if not self.seen or self.learned:
            return
        steps = f"all {self.seen} steps" if self.seen > 1 else "its only step"
        cause = next(kind for kind in (CONSTANT, TIED, NO_GRADIENT) if self.totals.get(kind) == self.seen)
        why = "" if cause == NO_GRADIENT else f" ({self._fact(cause)})"
        raise NoGradientError(
            f"training: the gradient was zero in {steps}{why}, so the run learned nothing; {self._remedy(cause)}"
        )

    def _problems(self, metrics: Mapping[str, float]) -> set[str]:
        mean, spread = metrics.get("reward/mean"), metrics.get("reward/std")
        equal = mean is not None and spread is not None and spread <= 1e-9 * max(abs(mean), 1e-9)
        found = set()
        if equal and self.reward in (None, mean):
            found.add(CONSTANT)
        self.reward = mean if equal else None
        self.rewarded = self.rewarded or (mean is not None and mean > 0)
        if metrics.get("reward/frac_groups_without_spread") == 1.0:
            found.add(TIED)
        if metrics.get("rollout/truncated_frac", 0.0) > CUT_OFF:
            found.add(TRUNCATED)
        # A server may report no norm; a step that has trained no token has no gradient.
        if metrics.get("optim/grad_norm", metrics.get("tokens/trained", 1.0)) == 0.0:
            found.add(NO_GRADIENT)
        return found

    def _explained(self, kind: str, steps: str, metrics: Mapping[str, float]) -> str:
        if kind == TRUNCATED:
            share = metrics["rollout/truncated_frac"]
            return (
                f"more than half of the completions of {steps} were cut off ({share:.0%} in this one), and a cut-off answer "
                f"earns no reward; raise rollout.max_tokens, now {self.max_tokens}"
            )
        if kind == NO_GRADIENT:
            return f"the gradient of {steps} was zero, so they changed nothing; {self._remedy(kind)}"
        return f"in {steps} {self._fact(kind)}, so these steps taught nothing; {self._remedy(kind)}"

    def _fact(self, kind: str) -> str:
        if kind == TIED:
            return "all groups tied, each prompt's completions having equal rewards"
        never = "" if self.rewarded else ", and no reward of this run was above 0"
        return f"every reward was {self.reward:g}{never}"

    def _remedy(self, kind: str) -> str:
        if kind == CONSTANT and self.rewarded:
            return f"{LOOK}: if they are right, train on harder prompts, else check the reward function"
        return REMEDIES[kind]


def warn_of_other_rates(schedule: Schedule, first_step: int, planned: int, total: int) -> None:
    """A schedule that depends on the number of steps would have given the steps before a resume other learning rates."""
    done = range(1, min(first_step, planned, total) + 1)
    if any(schedule.factor(step, planned) != schedule.factor(step, total) for step in done):
        log.warning(
            "recipe.steps: %d steps had the learning rates of a run of %d steps, and the run now has %d; "
            "the same steps without the interruption would have other rates",
            first_step,
            planned,
            total,
        )
