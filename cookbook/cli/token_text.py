"""A sequence as text in which one sees what is trained: in colour on a terminal, between marks anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from cookbook.check.rows import Piece

if TYPE_CHECKING:
    from rich.text import Text

OPEN, CLOSE = "[[", "]]"  # the marks
HEAD, TAIL = 240, 120  # pieces shown of a long sequence


def show(title: str, pieces: Sequence[Piece], sampled: str, *, colour: bool) -> None:
    """Prints the text under its title, and behind it, when there is any, what will be ``sampled`` there."""
    (_print_coloured if colour else _print_marked)(title, _elided(pieces), sampled)


def _elided(pieces: Sequence[Piece]) -> Sequence[Piece]:
    if len(pieces) <= HEAD + TAIL:
        return pieces
    gap = Piece(f" ... {len(pieces) - HEAD - TAIL} tokens ... ", 0.0)
    return [*pieces[:HEAD], gap, *pieces[-TAIL:]]


def _print_marked(title: str, pieces: Sequence[Piece], sampled: str) -> None:
    text = ""
    for weight, run in groupby(pieces, key=lambda piece: piece.weight):
        part = "".join(piece.text for piece in run)
        times = "" if weight in (0, 1) else f"x{weight:g}"
        text += f"{OPEN}{part}{CLOSE}{times}" if weight else part
    text += f"{OPEN}{sampled}{CLOSE}" if sampled else ""
    print(f"{title}\n{text.rstrip()}\n")


def _print_coloured(title: str, pieces: Sequence[Piece], sampled: str) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for index, piece in enumerate(pieces):
        text.append_text(_styled(piece, index))
    text.append(f"<{sampled}>" if sampled else "", "green italic")
    text.rstrip()
    console = Console(highlight=False)
    console.print(Text(title, "bold"))
    console.print(text)
    console.print()


def _styled(piece: Piece, index: int) -> Text:
    """Trained tokens in green, in two shades by turns to tell them apart; in yellow where they count for less than 1."""
    from rich.text import Text

    if not piece.weight:
        return Text(piece.text, "dim")
    shades = ("green", "rgb(120,220,120)") if piece.weight == 1 else ("yellow", "rgb(230,210,110)")
    visible = piece.text.replace("\n", "\u23ce\n")  # a trained line break is a decision of the model
    return Text(visible, f"bold {shades[index % 2]}")
