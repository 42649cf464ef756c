"""What a run leaves for people: a summary on the terminal, and a picture of its curves in the run folder."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.backends.remote import pointers
from cookbook.checkpoints import manifest, store
from cookbook.evaluation import PASS, Example
from cookbook.run import Run
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
CURVES = [
    ("eval/accuracy", "held-out accuracy"),
    ("reward/mean", "reward while sampling"),
    ("eval/rewards/accuracy", "held-out preference accuracy"),
    ("eval/rewards/margin", "held-out margin"),
    ("loss", "loss"),
    ("eval/loss", "held-out loss"),
]


def summary(run: Run) -> None:
    """Prints before and after, a few completions, where everything is, and what to try next; draws ``curves.svg``."""
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
    print(f"next: {_next_command(run)}", flush=True)


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


def _next_command(run: Run) -> str:
    """What to try next: sampling, for which weights that are on a server have to be fetched first."""
    last = run.out / "checkpoints" / store.step_name(run.done)
    if (last / manifest.NAME).is_file() and (elsewhere := manifest.read(last).get(pointers.SERVER)) is not None:
        return shlex.join(["tinker", "checkpoint", "download", str(elsewhere["path"])])
    short = (example.prompt for example in run.examples if example.prompt.isprintable() and 0 < len(example.prompt) < 60)
    return shlex.join(["cookbook", "sample", str(run.out), next(short, "12+30=")])
