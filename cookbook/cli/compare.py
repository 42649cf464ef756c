"""``cookbook compare``: runs beside each other, as tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cookbook import comparison
from cookbook.cli import tables
from cookbook.comparison import Cells

LONGEST = 40  # characters of a value


def run(folders: Sequence[str], *, table: bool) -> None:
    """Prints what differs, what came out, and what ``cookbook eval`` has found; warnings go to stderr.

    Raises:
        ConfigError: a folder is not a run, or there are fewer than two.
    """
    runs = comparison.read(folders)
    names = [one.name for one in runs]
    if differing := comparison.differing(runs):
        _show("configuration", "differs in", names, differing, table=table)
    else:
        print("the configurations are the same\n")
    _show("while training", "metric", names, comparison.outcomes(runs), table=table)
    for asked in comparison.evaluated(runs):
        print(f"cookbook eval: {asked.title}")
        _show("", "metric", names, asked.lines, table=table)
    for warning in comparison.warnings(runs):
        print(f"warning: {warning}", file=sys.stderr)


def _show(title: str, subject: str, names: Sequence[str], lines: Sequence[Cells], *, table: bool) -> None:
    tables.show(title, [subject, *names], [[about, *map(_short, cells)] for about, cells in lines], table=table)


def _short(cell: str) -> str:
    """The end of a long value: paths differ there."""
    return cell if len(cell) <= LONGEST else f"...{cell[3 - LONGEST :]}"
