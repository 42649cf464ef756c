"""Runs beside each other: in what their configurations differ, how they came out, and whether that can be compared at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook import runfolder, status
from cookbook.errors import ConfigError
from cookbook.evaluate_alone import FOLDER
from cookbook.evaluation import FINGERPRINT, PASS
from cookbook.report import HEADLINES, pass_metrics
from cookbook.suggest import did_you_mean
from cookbook.trackers.jsonl import JsonLines

NOT_THE_RUNS = frozenset({"out", "resume"})  # keys that say where a run is, and not what it is
# What decides which rows an evaluation asks, and how it judges; and where the rows are of the training data, which those are.
ASKED = ("reward", "eval.limit", "eval.max_tokens", "rollout.stop", "data.eval_", "data.columns")
TAKEN_FROM = ("data.path", "data.name", "data.subset", "data.split", "data.limit", "seed")
MISSING = "-"

Cells = tuple[str, list[str]]
"""What a line is about, and a cell for every run."""


@dataclass(frozen=True)
class Past:
    """A run as its folder tells of it. ``evals`` are the results of ``cookbook eval``, the newest weights last."""

    name: str
    config: Mapping[str, Any]
    state: str
    rows: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]

    @property
    def fingerprint(self) -> int | None:
        """Of what it was asked while it trained, the last time."""
        found = series(self, FINGERPRINT)
        return int(found[-1][1]) if found else None


def read(folders: Sequence[str]) -> list[Past]:
    """Raises ConfigError: one is not a run, or there are fewer than two."""
    if len(folders) < 2:
        raise ConfigError(
            f"compare: expected two runs or more, got {len(folders)}; for example: cookbook compare runs/a runs/b"
        )
    names = [Path(folder).name for folder in folders]
    return [_past(folder, name if names.count(name) == 1 else folder) for folder, name in zip(folders, names, strict=True)]


def _past(name: str, shown: str) -> Past:
    folder = Path(name)
    if not (folder / runfolder.CONFIG).is_file():
        siblings = [path.parent.name for path in folder.parent.glob(f"*/{runfolder.CONFIG}")]
        raise ConfigError(f"compare: {name} is not a run (no {runfolder.CONFIG}).{did_you_mean(folder.name, siblings)}")
    config = dict(_flat(runfolder.load_config(folder)))
    told = status.read(folder) or {}
    evals = [_eval(path) for path in sorted((folder / FOLDER).glob("*.json"))]
    rows = JsonLines(folder / runfolder.METRICS).read()
    return Past(shown, config, str(told.get("state", "unknown")), rows, sorted(evals, key=lambda one: int(one["step"])))


def _eval(path: Path) -> dict[str, Any]:
    """Raises ConfigError: the file is damaged."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(result["step"])
        return result
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"compare: {path} is damaged; delete the file and run `cookbook eval` again") from None


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in NOT_THE_RUNS:
            yield f"{prefix}{key}", value


def differing(runs: Sequence[Past]) -> list[Cells]:
    """The keys of the configurations that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = [(key, [_value(run.config, key) for run in runs]) for key in keys]
    return [(key, cells) for key, cells in found if len(set(cells)) > 1]


def _value(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], default=str).strip('"') if key in config else MISSING


def outcomes(runs: Sequence[Past]) -> list[Cells]:
    """State and steps of every run, and for every metric worth it what it came to and what it was at best."""
    lines = [
        ("state", [run.state for run in runs]),
        ("steps", [str(run.rows[-1]["step"]) if run.rows else "0" for run in runs]),
    ]
    for key in _keys(runs):
        found = [series(run, key) for run in runs]
        lines.append((key, [spelled(key, values[-1][1]) if values else MISSING for values in found]))
        lines.append(("  at best", [_best(key, values) if values else MISSING for values in found]))
    return lines


def _keys(runs: Sequence[Past]) -> list[str]:
    known = [key for key, _, _ in HEADLINES]
    rows = [row for run in runs for row in run.rows]
    has = {key for row in rows for key in row}
    return [key for key in [*known[:1], *pass_metrics(rows), *known[1:], "reward/mean", "loss"] if key in has]


def series(run: Past, key: str) -> list[tuple[int, float]]:
    """A metric as it was logged: step and value. One that was no number is left out."""
    return [(int(row["step"]), float(row[key])) for row in run.rows if row.get(key) is not None]


def _best(key: str, values: Sequence[tuple[int, float]]) -> str:
    best = (min if key.endswith("loss") else max)(values, key=lambda one: one[1])
    return f"{spelled(key, best[1])} (step {best[0]})"


def spelled(key: str, value: float) -> str:
    """A metric's value for people: shares as percentages."""
    return f"{value:.1%}" if key.startswith(PASS) or key.endswith("accuracy") else f"{value:.4g}"


@dataclass(frozen=True)
class Asked:
    """What several runs were asked by ``cookbook eval``, and how each did, with the newest of the weights it was asked of."""

    title: str
    lines: list[Cells]


def evaluated(runs: Sequence[Past]) -> list[Asked]:
    """The results of ``cookbook eval``, those together that can be compared."""
    prints = dict.fromkeys(_print(one) for run in runs for one in run.evals)
    return [_asked(runs, fingerprint) for fingerprint in prints]


def _asked(runs: Sequence[Past], fingerprint: int) -> Asked:
    newest = [next((one for one in reversed(run.evals) if _print(one) == fingerprint), None) for run in runs]
    facts = next(one for one in newest if one is not None)
    keys = dict.fromkeys(key for one in newest if one is not None for key in one["metrics"] if key != FINGERPRINT)
    lines = [("step", [MISSING if one is None else str(one["step"]) for one in newest])]
    lines += [(key, [_metric(one, key) for one in newest]) for key in keys]
    judged = facts["reward"] or "comparison with the row's answer"
    return Asked(f"{facts['rows']['count']} rows from {facts['rows']['first']}, judged by {judged}", lines)


def _print(result: Mapping[str, Any]) -> int:
    return int(result["metrics"][FINGERPRINT])


def _metric(result: Mapping[str, Any] | None, key: str) -> str:
    return MISSING if result is None or key not in result["metrics"] else spelled(key, result["metrics"][key])


def warnings(runs: Sequence[Past]) -> list[str]:
    """Why the numbers must not be compared, where they must not."""
    return [*_other_questions(runs), *_other_draws(runs), *_changed_midway(runs)]


def _other_questions(runs: Sequence[Past]) -> Iterator[str]:
    asked = {run.name: run.fingerprint for run in runs}
    if silent := [name for name, fingerprint in asked.items() if fingerprint is None]:
        yield f"{', '.join(silent)}: not evaluated while training; cookbook eval RUN does it now"
    told = {name: fingerprint for name, fingerprint in asked.items() if fingerprint is not None}
    if len(set(told.values())) < 2:
        return
    others = [key for key, _ in differing(runs) if key not in ("reward.workers", "reward.timeout_s")]
    keys = [key for key in others if key.startswith(ASKED)] or [key for key in others if key in TAKEN_FROM]
    why = (
        f"they differ in {', '.join(keys)}" if keys else "their configurations agree there, so the rows themselves have changed"
    )
    yield (
        "the runs were not evaluated on the same rows with the same reward while they trained "
        f"({', '.join(f'{name}: {fingerprint:08x}' for name, fingerprint in told.items())}): {why}; to compare them, "
        "evaluate each alike: cookbook eval RUN data=... reward=..."
    )


def _other_draws(runs: Sequence[Past]) -> Iterator[str]:
    passed = [run for run in runs if any(key.startswith(PASS) for row in run.rows for key in row)]
    for key in ("eval.temperature", "eval.top_p"):
        if len(values := {_value(run.config, key) for run in passed}) > 1:
            yield f"pass@k was drawn with {key} of {' and '.join(sorted(values))}, and depends on it"


def _changed_midway(runs: Sequence[Past]) -> Iterator[str]:
    for run in runs:
        found = series(run, FINGERPRINT)
        changed = next((step for (_, one), (step, other) in itertools.pairwise(found) if one != other), None)
        if changed is not None:
            yield f"{run.name}: from step {changed} on it was evaluated on other rows, or judged otherwise, than before"
