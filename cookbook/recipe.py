"""Recipes by name: files in ``./recipes``, then the packaged ones. Loading a recipe runs its file, listing does not."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType

from cookbook import paths, pyfile
from cookbook.errors import ConfigError
from cookbook.suggest import did_you_mean

NAMESPACE = "cookbook_recipes"
NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Found:
    """A recipe to choose. ``origin`` is ``packaged`` or ``user``; ``summary`` is its docstring's first line."""

    name: str
    path: Path
    origin: str
    summary: str


def load(name: str) -> ModuleType:
    """The module of ``./recipes/<name>.py``, or of the packaged one, run anew at every call.

    It has a dataclass ``Config``, which types the ``recipe`` node, and a function ``train(run)``.

    Raises:
        ConfigError: there is no such recipe, or its file is not one.
    """
    path = paths.find("recipes", f"{name}.py") if NAME.fullmatch(name) else None
    if path is None:
        names = [found.name for found in available()]
        choices = ", ".join(names)
        raise ConfigError(f"recipe.name: unknown recipe {name!r}.{did_you_mean(name, names)} (choices: {choices})")
    module = _run(path)
    if not is_dataclass(getattr(module, "Config", None)):
        raise ConfigError(f"{paths.shown(path)}: no dataclass 'Config'; a recipe declares its keys in one")
    if not callable(getattr(module, "train", None)):
        raise ConfigError(f"{paths.shown(path)}: no function 'train(run)'; a recipe's loop stands in it")
    return module


def available() -> list[Found]:
    """Every recipe by name, without running any."""
    found: dict[str, Found] = {}
    for folder in paths.overlays("recipes"):
        origin = "packaged" if folder == paths.packaged("recipes") else "user"
        for path in sorted(folder.glob("*.py")):
            if NAME.fullmatch(path.stem):
                found.setdefault(path.stem, Found(path.stem, path, origin, _summary(path)))
    return [found[name] for name in sorted(found)]


def _run(path: Path) -> ModuleType:
    """Executes the file as ``cookbook_recipes.<name>``."""
    package = sys.modules.setdefault(NAMESPACE, ModuleType(NAMESPACE))
    package.__path__ = []  # makes it a package, which holds nothing by itself
    return pyfile.run(path, f"{NAMESPACE}.{path.stem}")


def _summary(path: Path) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(path.read_bytes()))
    except SyntaxError as error:
        return f"(line {error.lineno} is not valid Python)"
    return (docstring or "").partition("\n")[0]
