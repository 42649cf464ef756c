"""Limits on the size of the package, so that it stays easy to read, and on the files that one training step visits."""

import ast
import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import ClassVar

import pytest
from marks import rest_slow
from runtools import SMALL, here, train  # noqa: F401 - here is a fixture
from sources import nodes

from cookbook import Hook
from cookbook.run import hooks

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cookbook"
LIMITS = {
    "modules at the root": 8,
    "modules in a folder": 15,
    "modules in losses": 16,
    "lines of a file": 500,
    "lines of a function": 60,
    "classes of one name": 1,
    "Any per 1,000 lines": 8,
    "files of an SFT step": 30,
    "files of a GRPO step": 45,
}
# Values that are still above their limit: they may fall, not rise. A value within its limit fails until it is removed here.
EXCEPTIONS: dict[str, dict[str, float]] = {}


@cache
def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def check(limit: str, measured: Mapping[str, float]) -> None:
    """Fail for every thing that is above the limit, and for every exception that is not needed any more."""
    allowed = EXCEPTIONS.get(limit, {})
    above = {name: value for name, value in measured.items() if value > allowed.get(name, LIMITS[limit])}
    assert not above, f"{limit}: at most {LIMITS[limit]}, got {above}"
    unused = [name for name in allowed if measured.get(name, 0) <= LIMITS[limit]]
    assert not unused, f"within the limit; remove from EXCEPTIONS[{limit!r}]: {unused}"


def test_folders_are_small() -> None:
    modules = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in files() if path.name not in ("__init__.py", "__main__.py")
    )
    check("modules at the root", {"cookbook": modules.pop("cookbook")})
    check("modules in losses", {"cookbook/losses": modules.pop("cookbook/losses")})
    check("modules in a folder", modules)


def test_files_and_functions_are_short() -> None:
    check("lines of a file", {str(path.relative_to(ROOT)): len(path.read_bytes().splitlines()) for path in files()})
    check(
        "lines of a function",
        {
            f"{path.relative_to(ROOT)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
            for path in files()
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        },
    )


def test_a_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    check("classes of one name", {name: len(paths) for name, paths in places.items()})


def test_any_is_rare() -> None:
    lines = sum(len(path.read_bytes().splitlines()) for path in files())
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for path in files() for node in nodes(path))
    check("Any per 1,000 lines", {"cookbook": 1000 * uses / lines})


class StepFiles(Hook):
    """Notes the files whose functions are called between the ends of step 2 and step 3, by any thread."""

    watching = False
    seen: ClassVar[set[str]] = set()

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        StepFiles.watching = step == 2
        sys.setprofile(self.profile if step == 2 else None)  # of this thread

    @classmethod
    def profile(cls, frame: FrameType, event: str, argument: object) -> None:
        if cls.watching and event == "call":
            cls.seen.add(frame.f_code.co_filename)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("recipe", "limit"), rest_slow([("grpo", "files of a GRPO step"), ("sft", "files of an SFT step")]))
def test_a_step_visits_few_files(recipe: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepFiles, "seen", set())
    # The status file is written at most once a second: on a slow machine in step 3, on a fast one before or after it.
    monkeypatch.setattr(hooks, "EVERY_S", math.inf)
    threading.setprofile(StepFiles.profile)  # of threads that the run starts
    try:
        assert (
            train(
                *SMALL[recipe],
                "recipe.steps=4",
                "eval.every=null",
                "checkpoint.every=null",
                f"+hook.watch._target_={__name__}.StepFiles",
            )
            == 0
        )
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    files = sorted(name for name in StepFiles.seen if Path(name).is_relative_to(PACKAGE))
    print("\n".join(files))
    check(limit, {recipe: len(files)})
