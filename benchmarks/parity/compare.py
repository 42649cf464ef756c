"""Holds the two sides against each other: a table, a JSON file, and an exit code.

    .venv/bin/python benchmarks/parity/compare.py FOLDER

Exit 1 when a difference exceeds its tolerance, and when two definitions that are known to differ do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cases import CASES, RUNS, Case, Folder, Run
from safetensors.torch import load_file
from torch import Tensor

# float32 rounds to 6e-8. A logprob is a log-sum over the vocabulary behind some dozen layers' sums, a few roundings each:
# 1e-6 is 16 of them. It is meant relative to what the loss adds up (`scale`), since in GRPO terms of either sign cancel and
# DPO subtracts sums of logprobs: relative to the small rest, rounding has no bound.
VALUE = 1e-6
# A gradient adds up thousands of such products in another order on either side, and error grows with the root of their
# number: sqrt(1e4) * 6e-8 = 6e-6. Cookbook against itself, rows laid out otherwise, shows how much of it is used.
GRADIENT = 1e-5
# Adam divides every gradient by its own size, so an element that is all rounding moves as far as any other, and ten steps
# feed that back. Losses forgive it to first order, weights do not.
RUN_VALUE = 1e-5
RUN_UPDATE = 1e-4


@dataclass(frozen=True)
class Row:
    """One line of the table of one-batch cases; differences are relative, see the constants above."""

    name: str
    trl: float
    cookbook: float
    relative: float  # |TRL - cookbook| / |cookbook|
    value: float  # |TRL - cookbook| / scale
    gradient: float  # the largest over the parameters of ||TRL - cookbook|| / ||cookbook||
    parameter: str  # where that is
    itself: float  # the same between two layouts of cookbook's batch
    differs: str
    verdict: str


@dataclass(frozen=True)
class RunRow:
    name: str
    trl: list[float]
    cookbook: list[float]
    value: float  # the largest relative difference of a step's loss
    update: float  # ||difference of the final weights|| / ||distance they came||
    differs: str
    verdict: str


def _verdict(agrees: bool, differs: str) -> str:
    if differs:
        return "agrees, and should not" if agrees else f"differs: {differs}"
    return "agrees" if agrees else "TOO FAR APART"


def failed(row: Row | RunRow) -> bool:
    return row.verdict not in ("agrees", f"differs: {row.differs}")


def largest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[float, str]:
    """Of ``||a - b|| / ||b||`` over the tensors, and the name of that one."""
    if a.keys() != b.keys():
        raise SystemExit(f"parity: only one side has a gradient for {', '.join(sorted(a.keys() ^ b.keys()))}")
    differences = {name: distance([a[name]], [b[name]]) for name in a}
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """``||a - b|| / ||b||`` over all tensors together, in float64; 0 where both are 0."""
    apart = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)) ** 0.5
    size = sum(float(y.double().square().sum()) for y in b) ** 0.5
    return apart / size if size else float(apart > 0)


def case_row(case: Case, folder: Folder) -> Row:
    sides = ("trl", "cookbook", "cookbook-rearranged")
    trl, ours, rearranged = (load_file(folder.tensors(side, case.name)) for side in sides)
    a, b = (folder.read(side)["values"][case.name] for side in sides[:2])
    relative, value = (abs(a - b) / size for size in (abs(b), folder.read("cookbook")["scales"][case.name]))
    gradient, parameter = largest(trl, ours)
    agrees = value <= VALUE and gradient <= GRADIENT
    itself, _ = largest(rearranged, ours)
    verdict = _verdict(agrees, case.differs)
    return Row(case.name, a, b, relative, value, gradient, parameter, itself, case.differs, verdict)


def run_row(run: Run, folder: Folder) -> RunRow:
    a, b = (folder.read(side)["runs"][run.name] for side in ("trl", "cookbook"))
    value = max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
    start = load_file(folder.reference / "model.safetensors")
    trl, ours = (load_file(folder.tensors(side, run.name)) for side in ("trl", "cookbook"))
    moved = [[end[name] - start[name] for name in start] for end in (trl, ours)]
    update = distance(*moved)
    agrees = value <= RUN_VALUE and update <= RUN_UPDATE
    return RunRow(run.name, a, b, value, update, run.differs, _verdict(agrees, run.differs))


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Markdown, padded so that it reads on a terminal too. The first column is text, the rest numbers."""
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [heads, rule, *rows]
    cells = ([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def case_table(rows: list[Row]) -> str:
    heads = ["one batch", "TRL", "cookbook", "loss", "of scale", "gradient", "itself", "verdict"]
    lines = []
    for r in rows:
        differences = (r.relative, r.value, r.gradient, r.itself)
        lines.append([r.name, f"{r.trl:.7f}", f"{r.cookbook:.7f}", *(f"{x:.1e}" for x in differences), r.verdict])
    return table(heads, lines)


def run_tables(rows: list[RunRow]) -> str:
    heads = ["run", "largest difference of a loss", "difference of the update", "verdict"]
    summary = table(heads, [[r.name, f"{r.value:.1e}", f"{r.update:.1e}", r.verdict] for r in rows])
    steps = [str(step) for step in range(1, max(len(r.trl) for r in rows) + 1)]
    losses = [
        [f"{r.name}: {side}", *(f"{loss:.6f}" for loss in values)]
        for r in rows
        for side, values in (("TRL", r.trl), ("cookbook", r.cookbook))
    ]
    return f"{summary}\n\n{table(['loss at step', *steps], losses)}"


def main(folder: Folder) -> int:
    versions: dict[str, Any] = {**folder.read("cookbook")["versions"], **folder.read("trl")["versions"]}
    tolerances = {"loss of scale": VALUE, "gradient": GRADIENT, "run: loss": RUN_VALUE, "run: update": RUN_UPDATE}
    rows, runs = [case_row(case, folder) for case in CASES], [run_row(run, folder) for run in RUNS]
    print("Versions:", ", ".join(f"{name} {number}" for name, number in versions.items()))
    print("Tolerances:", ", ".join(f"{name} {number:g}" for name, number in tolerances.items()), "\n")
    print(case_table(rows), "\n")
    print(run_tables(runs), "\n")
    print(summary(rows))
    tables = {"cases": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
    path = folder.root / "parity.json"
    path.write_text(json.dumps({"versions": versions, "tolerances": tolerances, **tables}, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {path}.")
    every: list[Row | RunRow] = [*rows, *runs]
    wrong = [row for row in every if failed(row)]
    for row in wrong:
        print(f"parity: {row.name}: {row.verdict}", file=sys.stderr)
    return 1 if wrong else 0


def summary(rows: list[Row]) -> str:
    same = [row for row in rows if not row.differs]
    loss, gradient = (max(same, key=lambda row: getattr(row, key)) for key in ("value", "gradient"))
    return (
        f"Of {len(same)} equal definitions, the largest differences: loss {loss.value:.1e} ({loss.name}), "
        f"gradient {gradient.gradient:.1e} ({gradient.name}, {gradient.parameter})."
    )


if __name__ == "__main__":
    sys.exit(main(Folder(Path(sys.argv[1]))))
