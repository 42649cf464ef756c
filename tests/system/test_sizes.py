"""Limits on functions and names of the package. ``python tools/figures.py`` prints more figures: to look at, not to serve."""

import figures
from places import ROOT

PACKAGE = ROOT / "cookbook"
# A function is as long as its one thought, which seldom exceeds a screen.
MOST_LINES_OF_A_FUNCTION = 80
MOST_ANY_PER_1000_LINES = 8


def test_a_function_fits_a_screen() -> None:
    lengths = {f"{path}:{name}": lines for path in figures.modules(PACKAGE) for name, lines in figures.function_lengths(path)}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_class_name_stands_for_one_class() -> None:
    assert {name: paths for name, paths in figures.class_places(PACKAGE).items() if len(paths) > 1} == {}


def test_any_is_rare() -> None:
    assert figures.any_per_1000_lines(PACKAGE) <= MOST_ANY_PER_1000_LINES
