"""Readable rows: a table on a terminal, aligned text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, table: bool) -> None:
    """Print the rows under their column heads; on a terminal (``table``) with the title above."""
    if not table:
        print("\n".join(aligned([head, *rows])) + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in head:
        grid.add_column(column)
    for row in rows:
        grid.add_row(*map(Text, row))  # Text, because rich would read brackets in a plain cell as markup.
    Console().print(grid)


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return a line per row with aligned cells; columns whose number is in ``right`` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        sides = [str.rjust if column in right else str.ljust for column in range(len(row))]
        return "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()

    return [line(row) for row in rows]


def facts(rows: Sequence[tuple[str, str]], *, table: bool) -> None:
    """Print a subject and a sentence per line; on a terminal (``table``) long sentences wrap inside their column."""
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
