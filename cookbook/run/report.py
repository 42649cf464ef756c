"""Results of runs, for people: the summary and the curves of a run that ends, and the comparison of several runs."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
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
from cookbook.run.diagnostics import SLOW_EVALUATION_S
from cookbook.run.recorder import JsonLines
from cookbook.run.run import Run
from cookbook.sampling.evaluation import ANSWERS, FINGERPRINT, PASS, ROWS, Example, is_better_higher
from cookbook.terminal import say
from cookbook.types import JsonObject
from cookbook.utils import files
from cookbook.utils.plot import Curve, chart
from cookbook.utils.suggest import did_you_mean
from cookbook.utils.words import counted

log = logging.getLogger("cookbook")


@dataclass(frozen=True)
class Headline:
    """A metric to compare before and after. It is a mean over as many ``noun`` as the metric ``count`` says.

    ``is_share``: a share of these that are right, so that it has the standard error of a proportion.
    """

    key: str
    label: str
    form: str
    count: str
    noun: str
    is_share: bool = False


# The most important first.
HEADLINES = [
    Headline("eval/accuracy", "accuracy", "{:.1%}", ANSWERS, "prompt", is_share=True),
    Headline("eval/reward", "reward", "{:.3f}", ANSWERS, "prompt"),
    Headline("eval/rewards/accuracy", "preference accuracy", "{:.1%}", ROWS, "pair", is_share=True),
    Headline("eval/rewards/margin", "margin", "{:.3f}", ROWS, "row"),
    Headline("eval/loss", "loss", "{:.4f}", ROWS, "row"),
]
# Prefixes of the metrics whose value depends on the judge of a completion, and of those among them that do not.
JUDGED_PREFIXES = ("eval/accuracy", "eval/reward", "reward/mean", PASS)
NOT_JUDGED_PREFIXES = ("eval/rewards/",)
TOKEN_EQUALITY = "token equality"
# The standard error of a share is shown for a smaller number of rows.
MANY_ROWS = 1000
KEY_VARIABLE = "TINKER_API_KEY"
PLACEHOLDER = "your prompt"
# Characters.
LONGEST_PROMPT = 60
CURVES = [
    ("eval/accuracy", "held-out accuracy (share of prompts)"),
    ("reward/mean", "reward while sampling (mean)"),
    ("eval/rewards/accuracy", "held-out preference accuracy (share of pairs)"),
    ("eval/rewards/margin", "held-out margin (nats)"),
    ("loss", "loss of the step"),
    ("eval/loss", "held-out loss (mean)"),
]


def objective(rows: Sequence[JsonObject], name: str | None) -> float | None:
    """Return the last value of a metric; NaN if that is not finite, None if no row has the metric.

    Args:
        rows: of ``metrics.jsonl``.
        name: the metric; None: the first of ``HEADLINES`` that the rows have and that grows with quality.
    """
    names = [name] if name else [headline.key for headline in HEADLINES if is_better_higher(headline.key)]
    for key in names:
        values = [row[key] for row in rows if key in row]
        if values:
            # JSON has no NaN, so a value that is not finite is stored as null.
            return math.nan if values[-1] is None else float(values[-1])
    return None


def curves(run: Run) -> None:
    """Draw ``curves.svg`` in the folder of the run."""
    draw(run.recorder.metrics.read(), run.out / "curves.svg", f"{run.name}: {run.out.name}")


def summary(run: Run, first_rows: Mapping[Split, Sequence[Row]]) -> None:
    """Print the metrics before and after, a few completions, the files, and a command to try.

    ``first_rows`` are the first rows of each split; one of them becomes the prompt of the command.
    """
    rows = run.recorder.metrics.read()
    print()
    judge = judge_of_run(run.out)
    for line in headlines(rows, judge):
        say(line)
    if (slow := slow_evaluation(rows)) is not None:
        say(slow)
    dropped = int(sum(row.get("rollout/failed", 0) for row in rows))
    retries = int(sum(row.get("rollout/retries", 0) for row in rows))
    if dropped or retries:
        say(
            f"sampling: {counted(retries, 'retried request')}, {counted(dropped, 'prompt')} left out (log.txt names their rows)"
        )
    # Whether the best weights are those of an earlier step than the last.
    is_best_older = run.best.step not in (None, run.done)
    if run.best.step is not None:
        name = f"; {run.out}@best" if is_best_older else ""
        say(f"best: {run.best.text}{name}")
    for example in run.recorder.examples:
        say(f"  {one_line(example, judge)}")
    if (left_out := run.recorder.bad_rows.summary()) is not None:
        say(left_out)
    names = [name for name in ("metrics.jsonl", "samples.jsonl", "curves.svg", "checkpoints") if (run.out / name).exists()]
    say(f"run folder: {run.out}  ({', '.join(names)})")
    say(f"next: {_next(run, is_best_older, [*first_rows.get('eval', ()), *first_rows.get('train', ())])}")


def headlines(rows: Sequence[JsonObject], judge: str) -> Iterator[str]:
    """Yield a line for each metric of held-out rows that was measured twice: before and after, the judge, the number of rows.

    Args:
        rows: of ``metrics.jsonl``.
        judge: of completions, see :func:`judge`.
    """
    passes = [Headline(key, key.removeprefix("eval/"), "{:.1%}", ANSWERS, "prompt") for key in pass_metrics(rows)]
    are_pairs = any("eval/rewards/accuracy" in row for row in rows)
    for headline in [*HEADLINES, *passes]:
        values = series(rows, headline.key)
        if len(values) < 2:
            continue
        (first, before), (last, after) = values[0], values[-1]
        counts = series(rows, headline.count)
        # A recipe of the user may log the metric without its number of rows.
        number = int(counts[-1][1]) if counts else None
        noun = "pair" if headline.noun == "row" and are_pairs else headline.noun
        where = f"held-out {noun}s" if number is None else counted(number, f"held-out {noun}")
        by = f", by {judge}" if is_judged(headline.key) else ""
        error = "" if not headline.is_share or number is None else _error(number, before, after)
        change = f"{headline.form.format(before)} after {counted(first, 'step')} -> {headline.form.format(after)} after {last}"
        yield f"{headline.label} on {where}{by}: {change}{error}"


def _error(number: int, *shares: float) -> str:
    """Return the largest standard error of shares of ``number`` rows as text; empty if there are many rows."""
    if number >= MANY_ROWS:
        return ""
    points = 100 * max(standard_error(share, number) for share in shares)
    decimals = 0 if points >= 10 else 1
    return f" (standard error {points:.{decimals}f} points)"


def error_of(key: str, metrics: Mapping[str, float]) -> str:
    """Return the standard error of a metric of one evaluation as text; empty for metrics that are not a share of rows."""
    for headline in HEADLINES:
        if headline.key == key and headline.is_share and headline.count in metrics:
            return _error(int(metrics[headline.count]), metrics[key]).strip()
    return ""


def standard_error(share: float, number: int) -> float:
    """Return the standard error of a share of ``number`` independent rows.

    Half a row is added to each side, so that the error of 0 of 20 right rows is not 0.
    """
    share = (share * number + 0.5) / (number + 1)
    return math.sqrt(share * (1 - share) / number)


def slow_evaluation(rows: Sequence[JsonObject]) -> str | None:
    """Return a line with the keys to change, if evaluating took longer than training; otherwise None."""
    evaluations = [row["time/eval_s"] for row in rows if row.get("time/eval_s")]
    trained = sum(row.get("time/step_s", 0.0) for row in rows)
    if sum(evaluations) <= max(trained, SLOW_EVALUATION_S):
        return None
    return (
        f"time: {counted(len(evaluations), 'evaluation')} took {sum(evaluations):,.0f} s, and the training {trained:,.0f} s; "
        "to evaluate less, raise eval.every, lower eval.limit or eval.max_tokens, or set eval.answers=false (sft, dpo, orpo, "
        "kto)"
    )


def is_judged(key: str) -> bool:
    """Whether a metric depends on the judge of completions."""
    return key.startswith(JUDGED_PREFIXES) and not key.startswith(NOT_JUDGED_PREFIXES)


def judge_of_run(folder: Path) -> str:
    """Return :func:`judge` of the run in ``folder``."""
    return judge(dict(_flat(run_folder.load_config(folder))))


def judge(config: JsonObject) -> str:
    """Return the judge of a run's completions: ``reward=number``, ``env=arithmetic``, or ``token equality``.

    Args:
        config: of the run, with dotted keys.
    """
    return _part(config, "env") or _part(config, "reward") or TOKEN_EQUALITY


def _part(config: JsonObject, group: str) -> str | None:
    """Return ``reward=number`` for the class ``Number`` of the group; the user's own function or class by its place."""
    target = config.get(f"{group}._target_")
    if target is None:
        return None
    own = config.get(f"{group}.target")
    # Presets are named as their classes: math_verify is MathVerify.
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(target).rpartition(".")[2].rpartition(":")[2]).lower()
    return f"{group}={own or name}"


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


def one_line(example: Example, judge: str) -> str:
    """Return a completion and the verdict of its judge on one line."""
    prompt = " ".join(example.prompt.split())
    reward = "" if example.reward is None else f"   reward {example.reward:g}"
    if reward and judge.startswith(TOKEN_EQUALITY):
        reward = "   equal" if example.reward else "   not equal"
    return f"{prompt[-60:]!r} -> {' '.join(example.completion.split())[:100]!r}{reward}"


def _next(run: Run, is_best_older: bool, rows: Iterable[Row]) -> str:
    """Return the command that samples from the newest checkpoint, or from an older one that is the best.

    Weights on a server are downloaded first.
    """
    # This run saved the checkpoint. Verifying the files again would read all of a large model.
    saved = store.all_steps(run.out / "checkpoints")
    if not saved:
        return "nothing to sample from, as no checkpoint was saved; set checkpoint.final=true or checkpoint.every"
    prompt = next((text for row in rows if (text := _prompt(row, run.data)) is not None), PLACEHOLDER)
    # Without --, a prompt such as -5+3= would be read as an option.
    words = ["--", prompt] if prompt.startswith("-") else [prompt]
    server = manifest.read(saved[-1]).get(pointers.SERVER)
    if server is None or pointers.on_disk(server) is not None:
        return shlex.join(["cookbook", "sample", f"{run.out}@best" if is_best_older else str(run.out), *words])
    path = str(server["path"])
    # Tinker's command requires a key, and a server without keys ignores it.
    key = [] if os.environ.get(KEY_VARIABLE) else [f"{KEY_VARIABLE}={NO_KEY}"]
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
MISSING_CELL = "-"

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


def _summary(name: str, label: str) -> RunSummary:
    folder = Path(name)
    if not (folder / run_folder.CONFIG).is_file():
        siblings = [path.parent.name for path in folder.parent.glob(f"*/{run_folder.CONFIG}")]
        raise ConfigError(f"compare: {name} is not a run (no {run_folder.CONFIG}).{did_you_mean(folder.name, siblings)}")
    config = dict(_flat(run_folder.load_config(folder)))
    state = (hooks.read_status(folder) or {}).get("state", "unknown")
    evals = [_eval(path) for path in sorted((folder / run_folder.EVALS).glob("*.json"))]
    rows = JsonLines(folder / run_folder.METRICS).read()
    return RunSummary(label, config, str(state), rows, sorted(evals, key=lambda evaluation: int(evaluation["step"])))


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
    return json.dumps(config[key], default=str).strip('"') if key in config else MISSING_CELL


def outcomes(runs: Sequence[RunSummary]) -> list[Cells]:
    """Return the state and steps of every run, and the last and best values of the important metrics.

    Values of different judges have lines of their own.
    """
    lines = [
        ("state", [run.state for run in runs]),
        ("steps", [str(run.rows[-1]["step"]) if run.rows else "0" for run in runs]),
    ]
    judges = judges_of(runs)
    for key, label in ((ANSWERS, "judged completions"), (ROWS, "held-out rows")):
        if any(series(run.rows, key) for run in runs):
            lines.append((label, [_last(run, key) for run in runs]))
    for key in _keys(runs):
        having = [run for run in runs if series(run.rows, key)]
        if is_judged(key):
            measures = judges
        elif key.endswith("loss"):
            measures = {run.name: _loss_name(run) for run in runs}
        else:
            measures = dict.fromkeys(judges, "")
        names = dict.fromkeys(measures[run.name] for run in having)
        for name in names:
            # A loss is named only if the runs have different ones.
            label = f"{key} by {name}" if name and (is_judged(key) or len(names) > 1) else key
            lines += _outcome(label, key, runs, [run for run in having if measures[run.name] == name])
    return lines


def _loss_name(run: RunSummary) -> str:
    """Return the class of a run's loss and its variant: values of different losses are not comparable."""
    words = [str(run.config.get("loss._target_", "")).rpartition(".")[2], str(run.config.get("loss.variant", ""))]
    return " ".join(filter(None, words))


def _outcome(label: str, key: str, runs: Sequence[RunSummary], having: Sequence[RunSummary]) -> Iterator[Cells]:
    """Yield the last and the best value of a metric; only those of the runs ``having`` belong on these lines."""
    yield label, [_last(run, key) if run in having else MISSING_CELL for run in runs]
    # The loss of reinforcement learning says nothing about quality: it is relative to the samples of its own step.
    compared = [run for run in having if key != "loss" or not _learns_from_rollouts(run)]
    if compared:
        yield "  at best", [_best(key, series(run.rows, key)) if run in compared else MISSING_CELL for run in runs]


def _last(run: RunSummary, key: str) -> str:
    values = series(run.rows, key)
    return spelled(key, values[-1][1]) if values else MISSING_CELL


def _learns_from_rollouts(run: RunSummary) -> bool:
    return any("rollout/tokens" in row for row in run.rows)


def judges_of(runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return the judge of each run by the run's name. Judges of one name with different options also state these options."""
    names = {run.name: judge(run.config) for run in runs}
    stated = {}
    for run in runs:
        same = [rival for rival in runs if names[rival.name] == names[run.name]]
        options = [
            f"{key}={cells[runs.index(run)]}"
            for key, cells in differing(runs)
            if key.startswith(("reward.", "env."))
            and not key.endswith((".workers", ".timeout_s"))
            and len({cells[runs.index(rival)] for rival in same}) > 1
        ]
        stated[run.name] = " ".join([names[run.name], *options])
    return stated


def _keys(runs: Sequence[RunSummary]) -> list[str]:
    known = [headline.key for headline in HEADLINES]
    rows = [row for run in runs for row in run.rows]
    has = {key for row in rows for key in row}
    return [key for key in [*known[:1], *pass_metrics(rows), *known[1:], "reward/mean", "loss"] if key in has]


def series(rows: Sequence[JsonObject], key: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric. Values that were not finite are left out."""
    return [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]


def _best(key: str, values: Sequence[tuple[int, float]]) -> str:
    best = (min if key.endswith("loss") else max)(values, key=lambda value: value[1])
    return f"{spelled(key, best[1])} (step {best[0]})"


def spelled(key: str, value: float) -> str:
    """Return a metric's value as text, shares as percentages."""
    return f"{value:.1%}" if key.startswith(PASS) or key.endswith("accuracy") else f"{value:.4g}"


def evaluated(runs: Sequence[RunSummary]) -> Iterator[tuple[str, list[Cells]]]:
    """Yield the title and the lines of a table for each set of comparable results of ``cookbook eval``.

    A table has a run's newest weights that were evaluated in that way.
    """
    for fingerprint in dict.fromkeys(evaluation["metrics"][FINGERPRINT] for run in runs for evaluation in run.evals):
        comparable = [
            [evaluation for evaluation in run.evals if evaluation["metrics"][FINGERPRINT] == fingerprint] for run in runs
        ]
        newest = [results[-1]["metrics"] | {"step": results[-1]["step"]} if results else {} for results in comparable]
        keys = dict.fromkeys(key for metrics in newest for key in metrics if key not in (FINGERPRINT, "step"))
        lines = [("step", [str(metrics.get("step", MISSING_CELL)) for metrics in newest])]
        lines += [(key, [spelled(key, metrics[key]) if key in metrics else MISSING_CELL for metrics in newest]) for key in keys]
        facts = next(results[-1] for results in comparable if results)
        judge = judge_of_result(facts, facts["metrics"])
        yield f"{counted(facts['rows']['count'], 'row')} from {facts['rows']['first']}, judged by {judge}", lines


def judge_of_result(facts: JsonObject, metrics: Mapping[str, float]) -> str:
    """Return the judge of a result of ``cookbook eval``."""
    if facts["reward"] is None and facts["env"] is None and not any(map(is_judged, metrics)):
        return "the loss only"
    reward = facts["reward"] or f"{TOKEN_EQUALITY} with the row's answer"
    if facts["env"] is None:
        return str(reward)
    return f"the environment{f'; if it gives no reward, by {reward}' if facts['reward'] else ''}"


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
    runs_with_draws = [run for run in runs if any(key.startswith(PASS) for row in run.rows for key in row)]
    for key in ("eval.temperature", "eval.top_p"):
        if len(values := {_value(run.config, key) for run in runs_with_draws}) > 1:
            yield f"pass@k was drawn with {key} of {' and '.join(sorted(values))}, and depends on it"


def _changed_midway(runs: Sequence[RunSummary]) -> Iterator[str]:
    for run in runs:
        values = series(run.rows, FINGERPRINT)
        changed = next((step for (_, before), (step, after) in itertools.pairwise(values) if before != after), None)
        if changed is not None:
            yield f"{run.name}: from step {changed} on, evaluated on other rows or with another reward than before"
