"""A small line chart as SVG text, one panel per curve. Needs no plotting library, so every run can draw its chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 300, 170
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 26, 28
COLUMNS = 3
HEADER = 34
GRID, INK = "#d4d4d8", "#27272a"
# Colors of the lines of a panel, the first for its own points.
LINES = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#be123c", "#0891b2")


@dataclass(frozen=True)
class Curve:
    """``points``: (x, y), by rising x; at least two. ``others``: the points of further lines of the same panel."""

    label: str
    points: Sequence[tuple[float, float]]
    others: Sequence[Sequence[tuple[float, float]]] = ()

    @property
    def lines(self) -> list[Sequence[tuple[float, float]]]:
        return [self.points, *self.others]


def chart(title: str, x_label: str, curves: Sequence[Curve]) -> str:
    """The SVG document. Every panel has its own y axis; the x axes are the same."""
    lines = [line for curve in curves for line in curve.lines]
    low, high = min(line[0][0] for line in lines), max(line[-1][0] for line in lines)
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // COLUMNS)
    width, height = columns * PANEL_WIDTH, HEADER + rows * PANEL_HEIGHT + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, size=14),
    ]
    for number, curve in enumerate(curves):
        x, y = (number % COLUMNS) * PANEL_WIDTH, HEADER + (number // COLUMNS) * PANEL_HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{_panel(curve, low, high)}</g>')
    parts.append(_text(width / 2, height - 6, x_label))
    return "\n".join([*parts, "</svg>\n"])


def _panel(curve: Curve, low: float, high: float) -> str:
    lines = [[(x, y) for x, y in line if math.isfinite(y)] for line in curve.lines]
    bottom, top = _range([y for line in lines for _, y in line])
    inner_width, inner_height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / ((high - low) or 1)
        # Halves: the difference of two large numbers may overflow.
        up = (y / 2 - bottom / 2) / (top / 2 - bottom / 2)
        return LEFT + across * inner_width, TOP + (1 - up) * inner_height

    parts = [_text(LEFT + inner_width / 2, 16, curve.label)]
    for share in (0.0, 0.5, 1.0):
        value = (1 - share) * bottom + share * top
        _, y = place(low, value)
        parts.append(f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 5, y + 4, f"{value:.2g}", anchor="end"))
    for x_value in (low, high):
        x, _ = place(x_value, bottom)
        parts.append(_text(x, PANEL_HEIGHT - BOTTOM + 15, f"{x_value:g}", anchor="end" if x_value == high else "start"))
    for number, line in enumerate(lines):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        color = LINES[number % len(LINES)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return "".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return [0, 1] for shares of one, and the range of the values for all others."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and 0.5 <= high <= 1:
        return 0.0, 1.0
    # A margin of 0.5 would vanish beside a large number.
    margin = max(0.5, abs(low) * 0.05)
    return (low - margin, high + margin) if low == high else (low, high)


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
