"""Rows for people: a table on a terminal, aligned text anywhere else."""

from __future__ import annotations

from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, table: bool) -> None:
    """Prints the rows under their heads; on a terminal (``table``) with the title above."""
    if table:
        _table(title, head, rows)
    else:
        print("\n".join(aligned([head, *rows])))
        print()


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """A line per row, its cells under each other; columns whose number is in ``right`` stand to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        sides = [str.rjust if column in right else str.ljust for column in range(len(row))]
        return "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()

    return [line(row) for row in rows]


def facts(rows: Sequence[tuple[str, str]], *, table: bool) -> None:
    """Prints a subject and a sentence a line; on a terminal (``table``) long sentences stay in their column."""
    if not table:
        print("\n".join(aligned(rows)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for subject, sentence in rows:
        grid.add_row(Text(subject, "bold"), Text(sentence))
    Console(highlight=False).print(grid)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in head:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, row))  # Text: no cell is markup
    Console().print(table)
