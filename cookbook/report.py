"""Summary of a run on the terminal, and a picture of its curves in the run folder."""

from __future__ import annotations

import logging
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.backends.remote import pointers
from cookbook.backends.remote.server import NO_KEY
from cookbook.checkpoints import manifest, store
from cookbook.data import DataConfig, Row
from cookbook.data.formats import Plain, prompt_reader
from cookbook.errors import CookbookError
from cookbook.evaluation import PASS, Example, is_better_higher
from cookbook.run import Run, Split
from cookbook.svg import Curve, chart

log = logging.getLogger("cookbook")

# The metrics worth comparing before and after, best first, with how they read.
HEADLINES = [
    ("eval/accuracy", "accuracy on held-out prompts", "{:.1%}"),
    ("eval/reward", "reward on held-out prompts", "{:.3f}"),
    ("eval/rewards/accuracy", "preference accuracy on held-out pairs", "{:.1%}"),
    ("eval/rewards/margin", "margin on held-out pairs", "{:.3f}"),
    ("eval/loss", "loss on held-out rows", "{:.4f}"),
]
KEY = "TINKER_API_KEY"
PLACEHOLDER = "your prompt"
LONGEST_PROMPT = 60  # characters
CURVES = [
    ("eval/accuracy", "held-out accuracy"),
    ("reward/mean", "reward while sampling"),
    ("eval/rewards/accuracy", "held-out preference accuracy"),
    ("eval/rewards/margin", "held-out margin"),
    ("loss", "loss"),
    ("eval/loss", "held-out loss"),
]


def objective(rows: Sequence[Mapping[str, Any]], name: str | None) -> float | None:
    """Return the last value of a metric; NaN if that is not finite, None if no row has the metric.

    Args:
        rows: of ``metrics.jsonl``.
        name: the metric; None: the first of ``HEADLINES`` that the rows have and that grows with quality.
    """
    names = [name] if name else [key for key, _, _ in HEADLINES if is_better_higher(key)]
    found = next(([row[key] for row in rows if key in row] for key in names if any(key in row for row in rows)), None)
    return None if found is None else math.nan if found[-1] is None else float(found[-1])


def summary(run: Run, first_rows: Mapping[Split, Sequence[Row]]) -> None:
    """Print before and after, a few completions, where everything is, and what to try next; draw ``curves.svg``.

    ``first_rows`` are the first rows of each split, of which one becomes the prompt to try.
    """
    rows = run.metrics_file.read()
    draw(rows, run.out / "curves.svg", f"{run.name}: {run.out.name}")
    print()
    passes = [(key, f"{key.removeprefix('eval/')} on held-out prompts", "{:.1%}") for key in pass_metrics(rows)]
    for key, label, form in [*HEADLINES, *passes]:
        values = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if len(values) > 1:
            (first, before), (last, after) = values[0], values[-1]
            print(f"{label}: {form.format(before)} after {first} steps -> {form.format(after)} after {last}")
    for line in _failures(rows):
        print(line)
    for example in run.examples:
        print(f"  {one_line(example)}")
    if (left_out := run.bad_rows.summary()) is not None:
        print(left_out)
    found = [name for name in ("metrics.jsonl", "samples.jsonl", "curves.svg", "checkpoints") if (run.out / name).exists()]
    print(f"run folder: {run.out}  ({', '.join(found)})")
    print(f"next: {_next(run, [*first_rows.get('eval', ()), *first_rows.get('train', ())])}", flush=True)


def pass_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of pass@k that the rows have, by k."""
    return sorted({key for row in rows for key in row if key.startswith(PASS)}, key=lambda key: int(key.removeprefix(PASS)))


def _failures(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What could not be sampled, if anything."""
    left_out, again = (int(sum(row.get(key, 0) for row in rows)) for key in ("rollout/failed", "rollout/retries"))
    if left_out or again:
        yield f"sampling: {again} requests were made again, {left_out} prompts left out (log.txt names their rows)"


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """The run's curves as an SVG picture: shares of one on the left axis, everything else scaled to its own range."""
    curves = []
    for key, label in CURVES:
        points = [(float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
        if len(points) > 1:
            curves.append(Curve(label, points))
    if not curves:
        return
    try:
        atomic.write_text(path, chart(title, "optimizer steps", curves))
    except OSError as error:  # the run itself is finished and saved
        log.warning("%s: cannot be written: %s", path, error.strerror)


def one_line(example: Example) -> str:
    """A completion, and what it is worth."""
    prompt = " ".join(example.prompt.split())
    reward = "" if example.reward is None else f"   reward {example.reward:g}"
    return f"{prompt[-60:]!r} -> {' '.join(example.completion.split())[:100]!r}{reward}"


def _next(run: Run, rows: Iterable[Row]) -> str:
    """The command that samples from the newest checkpoint; weights on a server are downloaded first."""
    # Saved just now or earlier by this run: verifying the files again would read all of a large model.
    saved = store.all_steps(run.out / "checkpoints")
    if not saved:
        return "nothing to sample from, as no checkpoint was saved; set checkpoint.final=true or checkpoint.every"
    prompt = next((text for row in rows if (text := _prompt(row, run.data)) is not None), PLACEHOLDER)
    # Without --, a prompt such as -5+3= would be read as an option.
    asked = ["--", prompt] if prompt.startswith("-") else [prompt]
    if (elsewhere := manifest.read(saved[-1]).get(pointers.SERVER)) is None:
        return shlex.join(["cookbook", "sample", str(run.out), *asked])
    path = str(elsewhere["path"])
    # Tinker's command insists on a key, and a server without keys ignores it.
    key = [] if os.environ.get(KEY) else [f"{KEY}={NO_KEY}"]
    fetch = shlex.join([f"TINKER_BASE_URL={elsewhere['url']}", *key, "tinker", "checkpoint", "download", path])
    folder = path.removeprefix("tinker://").replace("/", "_")  # as Tinker's command names it
    return f"{fetch} && {shlex.join(['cookbook', 'sample', folder, *asked])}"


def _prompt(row: Row, data: DataConfig) -> str | None:
    """A prompt of one short line that the row consists of, besides its answer; None if it has another form."""
    try:
        example = prompt_reader(row, data)(row)
    except CookbookError:  # text without a prompt, or a row that was left out
        return None
    if isinstance(example, Plain):
        text = example.prompt
    else:
        asked = [message for message in example.messages[: example.start or None] if message.role != "system"]
        asked = asked[:-1] if len(asked) > 1 and asked[-1].role == "assistant" else asked
        text = asked[0].content if len(asked) == 1 else ""
    return text if text.isprintable() and 0 < len(text.strip()) < LONGEST_PROMPT else None
