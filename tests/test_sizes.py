"""Limits on the size of the package, so that it stays easy to read, and on the files that one training step visits.

``python tests/figures.py`` prints the figures.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import figures
import pytest
from marks import rest_slow
from runtools import here  # noqa: F401 - a fixture

from cookbook.run import hooks

PACKAGE = Path(__file__).resolve().parent.parent / "cookbook"
LIMITS = {
    "modules at the root": 8,
    "modules in a folder": 15,
    "modules in losses": 16,
    "lines of a file": 500,
    "lines of a function": 60,
    "lines of a recipe": 59,
    "classes of one name": 1,
    "Any per 1,000 lines": 8,
    "files of an SFT step": 30,
    "files of a GRPO step": 45,
}


def check(limit: str, measured: Mapping[str, float]) -> None:
    """Fail for every value that is above the limit."""
    above = {name: value for name, value in measured.items() if value > LIMITS[limit]}
    assert not above, f"{limit}: at most {LIMITS[limit]}, got {above}"


def test_folders_are_small() -> None:
    modules = figures.folder_sizes(PACKAGE)
    check("modules at the root", {"cookbook": modules.pop("cookbook")})
    check("modules in losses", {"cookbook/losses": modules.pop("cookbook/losses")})
    check("modules in a folder", modules)


def test_files_and_functions_are_short() -> None:
    paths = figures.modules(PACKAGE)
    check("lines of a file", {str(path): figures.num_lines(path) for path in paths})
    check("lines of a function", {f"{path}:{name}": n for path in paths for name, n in figures.function_lengths(path)})


def test_recipes_are_short() -> None:
    check("lines of a recipe", {path.name: figures.num_lines(path) for path in (PACKAGE.parent / "recipes").glob("*.py")})


def test_a_class_name_stands_for_one_class() -> None:
    check("classes of one name", {name: len(paths) for name, paths in figures.class_places(PACKAGE).items()})


def test_any_is_rare() -> None:
    check("Any per 1,000 lines", {"cookbook": figures.any_per_1000_lines(PACKAGE)})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("recipe", "limit"), rest_slow([("grpo", "files of a GRPO step"), ("sft", "files of an SFT step")]))
def test_a_step_visits_few_files(recipe: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The status file is written at most once a second: on a slow machine in step 3, on a fast one before or after it.
    monkeypatch.setattr(hooks, "EVERY_S", math.inf)
    files = figures.step_files(recipe, PACKAGE)
    print("\n".join(files))
    check(limit, {recipe: len(files)})
