"""``cookbook compare --html``: the comparison of runs as one page, which needs no other file and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from cookbook.run import report
from cookbook.run.hooks import writing_to
from cookbook.run.recorder import JsonLines
from cookbook.types import JsonObject
from cookbook.utils import files
from cookbook.utils.plot import LINES, Curve, chart

# Held-out prompts whose completions the page shows.
EXAMPLES = 20
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #27272a; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #d4d4d8; }
th, td { overflow-wrap: anywhere; }
td.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 12px; }
svg { max-width: 100%; height: auto; } .reward { color: #71717a; }
"""


def write(folders: Sequence[str], file: Path) -> None:
    """Write the page.

    Raises:
        ConfigError: as :func:`cookbook.run.report.read_runs`; or the file cannot be written.
    """
    runs = report.read_runs(folders)
    names = [run.name for run in runs]
    title = " and ".join(names)
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    parts = [head, f"<h1>{escape(title)}</h1>", _legend(names)]
    parts += [f"<p>warning: {escape(warning)}</p>" for warning in report.warnings(runs)]
    differing = report.differing(runs)
    if differing:
        parts += ["<h2>Configuration</h2>", _table("differs in", names, differing)]
    else:
        parts.append("<p>The configurations are the same.</p>")
    parts += ["<h2>Metrics</h2>", _table("metric", names, report.outcomes(runs))]
    parts += [_curves(runs)]
    for about, lines in report.evaluated(runs):
        parts += [f"<h2>cookbook eval: {escape(about)}</h2>", _table("metric", names, lines)]
    parts += _completions(names, [_held_out(Path(folder)) for folder in folders])
    with writing_to(file, "give a file, for example --html compare.html"):
        files.write_text(file, "\n".join(parts) + "\n")


def _legend(names: Sequence[str]) -> str:
    marks = (f'<b style="color:{LINES[number % len(LINES)]}">&#9644;</b> {escape(name)}' for number, name in enumerate(names))
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def _table(subject: str, names: Sequence[str], lines: Sequence[report.Cells]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in (subject, *names))
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in (about, *cells))}</tr>" for about, cells in lines)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _curves(runs: Sequence[report.RunSummary]) -> str:
    """Return the curves of the metrics that every run has."""
    curves = []
    for key, label in report.CURVES:
        series = [report.series(run.rows, key) for run in runs]
        if all(len(points) > 1 for points in series):
            curves.append(Curve(label, series[0], series[1:]))
    return chart("", "optimizer steps", curves) if curves else ""


def _held_out(folder: Path) -> Mapping[str, JsonObject]:
    """Return the completions of the last evaluation in ``samples.jsonl``, by prompt."""
    path = folder / "samples.jsonl"
    rows = [row for row in JsonLines(path).read() if row.get("split") == "eval"] if path.exists() else []
    last = max((row["step"] for row in rows), default=None)
    return {_text(row["prompt"]): row for row in rows if row["step"] == last}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _completions(names: Sequence[str], held_out: Sequence[Mapping[str, JsonObject]]) -> Iterator[str]:
    """Yield the table of completions of the same held-out prompts, at the last step of each run."""
    prompts = [prompt for prompt in held_out[0] if all(prompt in rows for rows in held_out)][:EXAMPLES]
    if not prompts:
        return
    yield "<h2>Held-out completions at the last step</h2>"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in ("prompt", *names))
    yield f"<table><tr>{head}</tr>"
    for prompt in prompts:
        cells = [f'<td class="text">{escape(prompt)}</td>']
        for rows in held_out:
            row = rows[prompt]
            reward = "" if row.get("reward") is None else f'\n<span class="reward">reward {row["reward"]:g}</span>'
            cells.append(f'<td class="text">{escape(_text(row["completion"]))}{reward}</td>')
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table>"
