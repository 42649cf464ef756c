"""Results of runs, for people: the summary and the curves of a run that ends, and the comparison of several runs."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.backends.remote import pointers
from cookbook.backends.remote.connection import NO_KEY
from cookbook.checkpoints import manifest, store
from cookbook.data import DataConfig, Row
from cookbook.data.formats import Plain, prompt_reader
from cookbook.errors import ConfigError, CookbookError
from cookbook.run import folder as run_folder
from cookbook.run import hooks
from cookbook.run.data import Split
from cookbook.run.recorder import JsonLines
from cookbook.run.run import Run
from cookbook.sampling.evaluation import FINGERPRINT, PASS, Example, is_better_higher
from cookbook.types import JsonObject
from cookbook.utils import files
from cookbook.utils.plot import Curve, chart
from cookbook.utils.suggest import did_you_mean

log = logging.getLogger("cookbook")

# Metrics to compare before and after, the most important first, with label and format.
HEADLINES = [
    ("eval/accuracy", "accuracy on held-out prompts", "{:.1%}"),
    ("eval/reward", "reward on held-out prompts", "{:.3f}"),
    ("eval/rewards/accuracy", "preference accuracy on held-out pairs", "{:.1%}"),
    ("eval/rewards/margin", "margin on held-out pairs", "{:.3f}"),
    ("eval/loss", "loss on held-out rows", "{:.4f}"),
]
KEY = "TINKER_API_KEY"
PLACEHOLDER = "your prompt"
# Characters.
LONGEST_PROMPT = 60
CURVES = [
    ("eval/accuracy", "held-out accuracy"),
    ("reward/mean", "reward while sampling"),
    ("eval/rewards/accuracy", "held-out preference accuracy"),
    ("eval/rewards/margin", "held-out margin"),
    ("loss", "loss"),
    ("eval/loss", "held-out loss"),
]


def objective(rows: Sequence[JsonObject], name: str | None) -> float | None:
    """Return the last value of a metric; NaN if that is not finite, None if no row has the metric.

    Args:
        rows: of ``metrics.jsonl``.
        name: the metric; None: the first of ``HEADLINES`` that the rows have and that grows with quality.
    """
    names = [name] if name else [key for key, _, _ in HEADLINES if is_better_higher(key)]
    values = next(([row[key] for row in rows if key in row] for key in names if any(key in row for row in rows)), None)
    return None if values is None else math.nan if values[-1] is None else float(values[-1])


def summary(run: Run, first_rows: Mapping[Split, Sequence[Row]]) -> None:
    """Print the metrics before and after, a few completions, the files, and a command to try; draw ``curves.svg``.

    ``first_rows`` are the first rows of each split; one of them becomes the prompt of the command.
    """
    rows = run.recorder.metrics.read()
    draw(rows, run.out / "curves.svg", f"{run.name}: {run.out.name}")
    print()
    passes = [(key, f"{key.removeprefix('eval/')} on held-out prompts", "{:.1%}") for key in pass_metrics(rows)]
    for key, label, form in [*HEADLINES, *passes]:
        values = series(rows, key)
        if len(values) > 1:
            (first, before), (last, after) = values[0], values[-1]
            print(f"{label}: {form.format(before)} after {first} steps -> {form.format(after)} after {last}")
    dropped, retries = (int(sum(row.get(key, 0) for row in rows)) for key in ("rollout/failed", "rollout/retries"))
    if dropped or retries:
        print(f"sampling: {retries} requests were retried, {dropped} prompts left out (log.txt names their rows)")
    for example in run.recorder.examples:
        print(f"  {one_line(example)}")
    if (left_out := run.recorder.bad_rows.summary()) is not None:
        print(left_out)
    names = [name for name in ("metrics.jsonl", "samples.jsonl", "curves.svg", "checkpoints") if (run.out / name).exists()]
    print(f"run folder: {run.out}  ({', '.join(names)})")
    print(f"next: {_next(run, [*first_rows.get('eval', ()), *first_rows.get('train', ())])}", flush=True)


def pass_metrics(rows: Sequence[JsonObject]) -> list[str]:
    """Return the names of the metrics pass@k in the rows, by k."""
    return sorted({key for row in rows for key in row if key.startswith(PASS)}, key=lambda key: int(key.removeprefix(PASS)))


def draw(rows: Sequence[JsonObject], path: Path, title: str) -> None:
    """Draw the run's curves as an SVG picture: shares of one on the left axis, other metrics scaled to their own range."""
    curves = [Curve(label, points) for key, label in CURVES if len(points := series(rows, key)) > 1]
    if not curves:
        return
    try:
        files.write_text(path, chart(title, "optimizer steps", curves))
    # The run itself is finished and saved.
    except OSError as error:
        log.warning("%s: cannot be written: %s", path, error.strerror)


def one_line(example: Example) -> str:
    """Return a completion and its reward on one line."""
    prompt = " ".join(example.prompt.split())
    reward = "" if example.reward is None else f"   reward {example.reward:g}"
    return f"{prompt[-60:]!r} -> {' '.join(example.completion.split())[:100]!r}{reward}"


def _next(run: Run, rows: Iterable[Row]) -> str:
    """Return the command that samples from the newest checkpoint; weights on a server are downloaded first."""
    # This run saved the checkpoint. Verifying the files again would read all of a large model.
    saved = store.all_steps(run.out / "checkpoints")
    if not saved:
        return "nothing to sample from, as no checkpoint was saved; set checkpoint.final=true or checkpoint.every"
    prompt = next((text for row in rows if (text := _prompt(row, run.data)) is not None), PLACEHOLDER)
    # Without --, a prompt such as -5+3= would be read as an option.
    words = ["--", prompt] if prompt.startswith("-") else [prompt]
    server = manifest.read(saved[-1]).get(pointers.SERVER)
    if server is None or pointers.on_disk(server) is not None:
        return shlex.join(["cookbook", "sample", str(run.out), *words])
    path = str(server["path"])
    # Tinker's command requires a key, and a server without keys ignores it.
    key = [] if os.environ.get(KEY) else [f"{KEY}={NO_KEY}"]
    fetch = shlex.join([f"TINKER_BASE_URL={server['url']}", *key, "tinker", "checkpoint", "download", path])
    # The name that Tinker's command gives the folder.
    folder = path.removeprefix("tinker://").replace("/", "_")
    return f"{fetch} && {shlex.join(['cookbook', 'sample', folder, *words])}"


def _prompt(row: Row, data: DataConfig) -> str | None:
    """Return the prompt of a row, if the row is one short line and perhaps an answer; None if it has another form."""
    try:
        example = prompt_reader(row, data)(row)
    # A text without a prompt, or a row that was left out.
    except CookbookError:
        return None
    if isinstance(example, Plain):
        text = example.prompt
    else:
        messages = [message for message in example.messages[: example.start or None] if message.role != "system"]
        messages = messages[:-1] if len(messages) > 1 and messages[-1].role == "assistant" else messages
        text = messages[0].content if len(messages) == 1 else ""
    return text if text.isprintable() and 0 < len(text.strip()) < LONGEST_PROMPT else None


# ---- comparison ------------------------------------------------------------------------------------------------------

# Keys that do not influence a run's results.
LOCATION_KEYS = frozenset({"out", "resume"})
# Keys that decide the rows and the rewards of an evaluation; and those that also do if the rows are held out of training data.
EVALUATION_KEYS = ("reward", "eval.limit", "eval.max_tokens", "rollout.stop", "data.eval_", "data.columns")
HELD_OUT_KEYS = ("data.path", "data.name", "data.subset", "data.split", "data.mix", "data.limit", "seed")
MISSING = "-"

Cells = tuple[str, list[str]]
"""The subject of a line, and a cell for every run."""


@dataclass(frozen=True)
class RunSummary:
    """A run, read from its folder. ``evals`` are the results of ``cookbook eval``, those of the newest weights last."""

    name: str
    config: JsonObject
    state: str
    rows: Sequence[JsonObject]
    evals: Sequence[JsonObject]


def read_runs(folders: Sequence[str]) -> list[RunSummary]:
    """Return the runs in ``folders``.

    Raises:
        ConfigError: a folder holds no run, or there are fewer than two.
    """
    if len(folders) < 2:
        raise ConfigError(
            f"compare: expected two runs or more, got {len(folders)}; for example: cookbook compare runs/a runs/b"
        )
    names = [Path(folder).name for folder in folders]
    return [_summary(folder, name if names.count(name) == 1 else folder) for folder, name in zip(folders, names, strict=True)]


def _summary(name: str, shown: str) -> RunSummary:
    folder = Path(name)
    if not (folder / run_folder.CONFIG).is_file():
        siblings = [path.parent.name for path in folder.parent.glob(f"*/{run_folder.CONFIG}")]
        raise ConfigError(f"compare: {name} is not a run (no {run_folder.CONFIG}).{did_you_mean(folder.name, siblings)}")
    config = dict(_flat(run_folder.load_config(folder)))
    state = (hooks.read_status(folder) or {}).get("state", "unknown")
    evals = [_eval(path) for path in sorted((folder / run_folder.EVALS).glob("*.json"))]
    rows = JsonLines(folder / run_folder.METRICS).read()
    return RunSummary(shown, config, str(state), rows, sorted(evals, key=lambda one: int(one["step"])))


def _eval(path: Path) -> JsonObject:
    """Return a result of ``cookbook eval``.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        result: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        int(result["step"])
        return result
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"compare: {path} is damaged; delete the file and run `cookbook eval` again") from None


def _flat(node: JsonObject, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in LOCATION_KEYS:
            yield f"{prefix}{key}", value


def differing(runs: Sequence[RunSummary]) -> list[Cells]:
    """Return the keys of the configurations whose values differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    lines = [(key, [_value(run.config, key) for run in runs]) for key in keys]
    return [(key, cells) for key, cells in lines if len(set(cells)) > 1]


def _value(config: JsonObject, key: str) -> str:
    return json.dumps(config[key], default=str).strip('"') if key in config else MISSING


def outcomes(runs: Sequence[RunSummary]) -> list[Cells]:
    """Return the state and steps of every run, and the last and best values of the important metrics."""
    lines = [
        ("state", [run.state for run in runs]),
        ("steps", [str(run.rows[-1]["step"]) if run.rows else "0" for run in runs]),
    ]
    for key in _keys(runs):
        of_runs = [series(run.rows, key) for run in runs]
        lines.append((key, [spelled(key, values[-1][1]) if values else MISSING for values in of_runs]))
        lines.append(("  at best", [_best(key, values) if values else MISSING for values in of_runs]))
    return lines


def _keys(runs: Sequence[RunSummary]) -> list[str]:
    known = [key for key, _, _ in HEADLINES]
    rows = [row for run in runs for row in run.rows]
    has = {key for row in rows for key in row}
    return [key for key in [*known[:1], *pass_metrics(rows), *known[1:], "reward/mean", "loss"] if key in has]


def series(rows: Sequence[JsonObject], key: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric. Values that were not finite are left out."""
    return [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]


def _best(key: str, values: Sequence[tuple[int, float]]) -> str:
    best = (min if key.endswith("loss") else max)(values, key=lambda one: one[1])
    return f"{spelled(key, best[1])} (step {best[0]})"


def spelled(key: str, value: float) -> str:
    """Return a metric's value as text, shares as percentages."""
    return f"{value:.1%}" if key.startswith(PASS) or key.endswith("accuracy") else f"{value:.4g}"


def evaluated(runs: Sequence[RunSummary]) -> Iterator[tuple[str, list[Cells]]]:
    """Yield the title and the lines of a table for each set of comparable results of ``cookbook eval``.

    A table has a run's newest weights that were evaluated in that way.
    """
    for fingerprint in dict.fromkeys(one["metrics"][FINGERPRINT] for run in runs for one in run.evals):
        comparable = [[one for one in run.evals if one["metrics"][FINGERPRINT] == fingerprint] for run in runs]
        newest = [results[-1]["metrics"] | {"step": results[-1]["step"]} if results else {} for results in comparable]
        keys = dict.fromkeys(key for metrics in newest for key in metrics if key not in (FINGERPRINT, "step"))
        lines = [("step", [str(metrics.get("step", MISSING)) for metrics in newest])]
        lines += [(key, [spelled(key, metrics[key]) if key in metrics else MISSING for metrics in newest]) for key in keys]
        facts = next(results[-1] for results in comparable if results)
        reward = facts["reward"] or "comparison with the row's answer"
        yield f"{facts['rows']['count']} rows from {facts['rows']['first']}, judged by {reward}", lines


def warnings(runs: Sequence[RunSummary]) -> list[str]:
    """Return the reasons why the runs' numbers are not comparable."""
    return [*_different_rows(runs), *_different_draws(runs), *_changed_midway(runs)]


def _different_rows(runs: Sequence[RunSummary]) -> Iterator[str]:
    of_all = {run.name: series(run.rows, FINGERPRINT) for run in runs}
    if missing := [name for name, values in of_all.items() if not values]:
        yield f"{', '.join(missing)}: not evaluated while training; cookbook eval RUN does it now"
    # The rows and the reward of the last evaluation count.
    fingerprints = {name: int(values[-1][1]) for name, values in of_all.items() if values}
    if len(set(fingerprints.values())) < 2:
        return
    others = [key for key, _ in differing(runs) if not (key.startswith("reward.") and key.endswith((".workers", ".timeout_s")))]
    keys = [key for key in others if key.startswith(EVALUATION_KEYS)] or [key for key in others if key in HELD_OUT_KEYS]
    why = (
        f"they differ in {', '.join(keys)}" if keys else "their configurations agree there, so the rows themselves have changed"
    )
    yield (
        "the runs were not evaluated on the same rows with the same reward while they trained "
        f"({', '.join(f'{name}: {fingerprint:08x}' for name, fingerprint in fingerprints.items())}): {why}; to compare them, "
        "evaluate each in the same way: cookbook eval RUN data=... reward=..."
    )


def _different_draws(runs: Sequence[RunSummary]) -> Iterator[str]:
    drawn = [run for run in runs if any(key.startswith(PASS) for row in run.rows for key in row)]
    for key in ("eval.temperature", "eval.top_p"):
        if len(values := {_value(run.config, key) for run in drawn}) > 1:
            yield f"pass@k was drawn with {key} of {' and '.join(sorted(values))}, and depends on it"


def _changed_midway(runs: Sequence[RunSummary]) -> Iterator[str]:
    for run in runs:
        values = series(run.rows, FINGERPRINT)
        changed = next((step for (_, one), (step, other) in itertools.pairwise(values) if one != other), None)
        if changed is not None:
            yield f"{run.name}: from step {changed} on, evaluated on other rows or with another reward than before"
