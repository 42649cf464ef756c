"""``cookbook list``: what can be chosen, where it comes from, and what it says about itself."""

from __future__ import annotations

from collections.abc import Sequence

from cookbook import recipe, typed
from cookbook.cli import conf_files
from cookbook.errors import ConfigError

GROUPS = {"models": "model", "data": "data", "rewards": "reward"}  # what is listed -> its group in conf/


def print_list(kind: str, *, table: bool) -> None:
    """Prints one kind, or ``all``: as tables on a terminal, as aligned text anywhere else."""
    for one in ("recipes", "losses", *GROUPS) if kind == "all" else (kind,):
        head, rows = _rows(one)
        (_print_table if table else _print_text)(one, head, rows)


def _rows(kind: str) -> tuple[Sequence[str], list[Sequence[str]]]:
    if kind == "recipes":
        return ("recipe", "from", "what it does"), [(found.name, found.origin, found.summary) for found in recipe.available()]
    if kind == "losses":
        head = ("loss", "from", "returns", "divided by", "what it is")
        return head, [_loss_row(file) for file in conf_files.options("loss")]
    group = GROUPS[kind]
    return (group, "from", "what it is"), [(file.name, file.origin, file.summary()) for file in conf_files.options(group)]


def _loss_row(file: conf_files.ConfFile) -> Sequence[str]:
    """What a loss returns is a fact of its class; what the gradient is then divided by is a choice of the file."""
    try:
        values = conf_files.values(file)
        cls = typed.resolve_target(values.get(typed.TARGET))
    except ConfigError as error:
        return file.name, file.origin, "?", "?", f"unusable: {error}"
    reduction = str(getattr(cls, "reduction", "?")).replace("_", " ")
    normalization = values.get("normalization", getattr(cls, "normalization", None))
    return file.name, file.origin, reduction, str(normalization or "nothing"), file.summary()


def _print_text(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def _print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
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
