"""Recipes by name: files of ``./recipes``, then the packaged files. Loading a recipe runs its file; listing does not."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType

from cookbook.config import python_file
from cookbook.errors import ConfigError
from cookbook.utils import paths
from cookbook.utils.suggest import did_you_mean

NAMESPACE = "cookbook_recipes"
NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe's file. ``origin`` is ``packaged`` or ``user``; ``summary`` is the first line of its docstring."""

    name: str
    path: Path
    origin: str
    summary: str


def load(name: str) -> ModuleType:
    """Run ``./recipes/<name>.py`` or the packaged recipe, and return its module.

    The module has a dataclass ``Config`` for the node ``recipe``, and a function ``train(run)``.

    Raises:
        ConfigError: the recipe is unknown, or its file is not a recipe.
    """
    path = paths.find("recipes", f"{name}.py") if NAME.fullmatch(name) else None
    if path is None:
        names = [info.name for info in available()]
        raise ConfigError(f"recipe.name: unknown recipe {name!r}.{did_you_mean(name, names)} (choices: {', '.join(names)})")
    package = sys.modules.setdefault(NAMESPACE, ModuleType(NAMESPACE))
    # Makes the module an empty package, which may contain the recipe.
    package.__path__ = []
    module = python_file.run(path, f"{NAMESPACE}.{name}")
    if not is_dataclass(getattr(module, "Config", None)):
        raise ConfigError(f"{paths.shown(path)}: no dataclass 'Config'; define it with the recipe's keys")
    if not callable(getattr(module, "train", None)):
        raise ConfigError(f"{paths.shown(path)}: no function 'train(run)'; define it with the recipe's loop")
    return module


def available() -> list[RecipeInfo]:
    """Return every recipe by name, without running any."""
    recipes: dict[str, RecipeInfo] = {}
    for folder in paths.overlays("recipes"):
        origin = "packaged" if folder == paths.packaged("recipes") else "user"
        for path in sorted(folder.glob("*.py")):
            if NAME.fullmatch(path.stem):
                recipes.setdefault(path.stem, RecipeInfo(path.stem, path, origin, _summary(path)))
    return [recipes[name] for name in sorted(recipes)]


def _summary(path: Path) -> str:
    try:
        docstring = ast.get_docstring(ast.parse(path.read_bytes()))
    except SyntaxError as error:
        return f"(line {error.lineno} is not valid Python)"
    return (docstring or "").partition("\n")[0]
