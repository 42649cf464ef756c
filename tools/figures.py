"""Print the size and shape of the package, for one or more checkouts side by side.

``python tools/figures.py [CHECKOUT ...]`` takes a minute per checkout; the default is this one. For an older commit:
``git worktree add /tmp/old COMMIT``, then ``python tools/figures.py /tmp/old .``.
``tests/system/test_sizes.py`` holds the limits.
"""

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from types import FrameType
from typing import ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

from runtools import SMALL
from sources import nodes, tree

from cookbook import Hook

BRIEF = ["recipe.steps=4", "eval.every=null", "checkpoint.every=null"]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def modules(package: Path) -> list[Path]:
    """Return the Python files of a package, without generated ones."""
    return sorted(path for path in package.rglob("*.py") if not path.name.endswith("_pb2.py"))


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def function_lengths(path: Path) -> list[tuple[str, int]]:
    return [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in nodes(path) if isinstance(node, FUNCTIONS)]


def folder_sizes(package: Path) -> Counter[str]:
    """Count the modules of every folder, without ``__init__`` and ``__main__``."""
    ordinary = (path for path in modules(package) if path.name not in ("__init__.py", "__main__.py"))
    return Counter(path.parent.relative_to(package.parent).as_posix() for path in ordinary)


def class_places(package: Path) -> dict[str, list[Path]]:
    """Return the files that define each class name."""
    places: dict[str, list[Path]] = {}
    for path in modules(package):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    return places


def any_per_1000_lines(package: Path) -> float:
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for path in modules(package) for node in nodes(path))
    return 1000 * uses / sum(map(num_lines, modules(package)))


def docstring_lines(path: Path) -> set[int]:
    result: set[int] = set()
    for node in [tree(path), *nodes(path)]:
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node, clean=False) is not None:
            result.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return result


def code_and_comment_lines(path: Path) -> tuple[int, int]:
    """Count the lines with code, without docstrings, and the lines with a comment only."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstring_lines(path)), len(comments - code)


def static_figures(checkout: Path) -> Iterator[tuple[str, str]]:
    """Yield name and value of every figure that needs no run."""
    package = checkout / "cookbook"
    paths = modules(package)
    folders = folder_sizes(package)
    lengths = [(n, f"{path.relative_to(package)}:{name}") for path in paths for name, n in function_lengths(path)]
    code, comments = map(sum, zip(*map(code_and_comment_lines, paths), strict=True))
    lines = sum(map(num_lines, paths))
    yield "files", f"{len(paths)}"
    yield "files below 60 lines", f"{sum(num_lines(path) < 60 for path in paths)}"
    yield "lines", f"{lines:,}"
    yield "code lines (no comment or docstring)", f"{code:,}"
    yield "own-line comments", f"{100 * comments / lines:.1f}%"
    yield "modules at the root", f"{folders.pop('cookbook')}"
    yield "largest folder", "{1} in {0}".format(*folders.most_common(1)[0])
    yield "class names with two meanings", f"{sum(len(places) > 1 for places in class_places(package).values())}"
    yield "Any per 1,000 lines", f"{any_per_1000_lines(package):.1f}"
    yield "longest function", "{} lines, {}".format(*max(lengths))
    yield "median function", f"{median(n for n, _ in lengths):.0f} lines"


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


def step_files(recipe: str, package: Path) -> list[str]:
    """Train four small steps in the current folder; return the package's files that the third one enters."""
    StepFiles.seen.clear()
    threading.setprofile(StepFiles.profile)  # of threads that the run starts
    try:
        train = import_module("cookbook.cli.app").run
        watch = f"+hook.watch._target_={StepFiles.__module__}.StepFiles"
        assert train(["train", *SMALL[recipe], *BRIEF, watch]) == 0
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(name for name in StepFiles.seen if Path(name).is_relative_to(package))


def count_step_files(checkout: Path, recipe: str) -> str:
    """Run :func:`step_files` with the code and the small runs of a checkout, in another process and an empty folder."""
    program = (
        "import importlib, math, pathlib, sys, figures\n"
        "for name in ('cookbook.run.hooks', 'cookbook.status'):\n"
        "    try: importlib.import_module(name).EVERY_S = math.inf\n"
        "    except ImportError: pass\n"
        "print(len(figures.step_files(sys.argv[1], pathlib.Path(sys.argv[2]))))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            map(str, [checkout, checkout / "tests" / "support", checkout / "tests", ROOT / "tests" / "support", ROOT / "tools"])
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, recipe, str(checkout / "cookbook")]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return result.stdout.split()[-1] if result.returncode == 0 else result.stderr.splitlines()[-1]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    for checkout in parser.parse_args(words).checkouts:
        checkout = checkout.resolve()
        print(checkout)
        for name, value in static_figures(checkout):
            print(f"  {name:38}{value}")
        for recipe in ("sft", "grpo"):
            print(f"  {f'files that a {recipe} step enters':38}{count_step_files(checkout, recipe)}", flush=True)


if __name__ == "__main__":
    main()
