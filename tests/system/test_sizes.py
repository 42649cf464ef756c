"""Limits on functions and names of the package. Contracts of import-linter forbid import cycles: test_imports.py."""

from __future__ import annotations

import ast

from places import ROOT
from sources import nodes

# A function is as long as its one thought, which seldom exceeds a screen.
MOST_LINES_OF_A_FUNCTION = 80
# protoc writes the others.
FILES = [path for path in sorted((ROOT / "cookbook").rglob("*.py")) if not path.name.endswith("_pb2.py")]


def test_a_function_fits_a_screen() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
