"""``cookbook list``: what can be chosen, where it comes from, and what it says about itself."""

from __future__ import annotations

from collections.abc import Sequence

from cookbook import recipe, typed
from cookbook.cli import conf_files, tables
from cookbook.errors import ConfigError

GROUPS = {"models": "model", "data": "data", "rewards": "reward"}  # what is listed -> its group in conf/


def print_list(kind: str, *, table: bool) -> None:
    """Prints one kind, or ``all``: as tables on a terminal, as aligned text anywhere else."""
    for one in ("recipes", "losses", *GROUPS) if kind == "all" else (kind,):
        head, rows = _rows(one)
        tables.show(one, head, rows, table=table)


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
