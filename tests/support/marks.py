"""Marks of parametrized cases, and the seed that chooses the cases of a run."""

from __future__ import annotations

import math
import os
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SEED = "COOKBOOK_TESTS_SEED"


def rest_slow(cases: Iterable[Any], fast: int = 1) -> list[Any]:
    """Return ``cases``: the first ``fast`` without a mark, a sixth of the others `slow`, by the seed, the rest `nightly`.

    A tuple holds the values of several names.
    """
    every = list(cases)
    return [*every[:fast], *rotating(every[fast:], math.ceil(len(every[fast:]) / 6))]


# The program of one tracker reads a run back in CI, the seed chooses which; the night takes all.
TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow")


def tracker(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs the package of a tracker, whose imports take seconds."""
    assert name in TRACKERS
    return pytest.mark.slow if name in some(TRACKERS, 1) else pytest.mark.nightly


# What is learned from start to end, beside GRPO. CI learns one of them, which the seed chooses; the night all of them.
LEARNED = ("sft", "dpo", "orpo", "distill", "environment")


def learning_seeds(subject: str) -> list[Any]:
    """Return the seeds 0 to 2 of a test that learns ``subject``: `slow` is seed 0 of GRPO and of one other subject."""
    assert subject in ("grpo", *LEARNED)
    return rest_nightly([0, 1, 2], slow=int(subject in ("grpo", *some(LEARNED, 1))))


def rest_nightly(cases: Iterable[Any], slow: int = 1) -> list[Any]:
    """Return ``cases`` with the mark `slow` on the first ``slow``, and the mark `nightly` on the others."""
    return [_marked(case, pytest.mark.slow if index < slow else pytest.mark.nightly) for index, case in enumerate(cases)]


def rotating(cases: Iterable[Any], slow: int) -> list[Any]:
    """Return ``cases`` with the mark `slow` on ``slow`` of them, which the seed chooses, and `nightly` on the others."""
    every = list(cases)
    chosen = some(range(len(every)), slow)
    return [_marked(case, pytest.mark.slow if index in chosen else pytest.mark.nightly) for index, case in enumerate(every)]


def some(cases: Iterable[Any], count: int | None) -> list[Any]:
    """Return ``count`` of the cases, which the seed of the run chooses, in their order. None means all."""
    every = list(cases)
    if count is None:
        return every
    return [every[index] for index in sorted(random.Random(seed()).sample(range(len(every)), count))]


def seed() -> str:
    """The seed of this run: ``COOKBOOK_TESTS_SEED``, by default the week of the commit, such as 2026-W48.

    So all commits of a week run the same cases: what passed before a commit runs again after it. Test processes of one run
    inherit the seed.
    """
    if SEED not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "log", "-1", "--format=%cd", "--date=format:%G-W%V"]
        try:
            os.environ[SEED] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            # Not a git checkout, or no git.
            os.environ[SEED] = "0"
    return os.environ[SEED]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, mark], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
