"""The syntax trees of the package and the recipes, parsed once per process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of :func:`ast.walk`."""
    return tuple(ast.walk(tree(path)))
