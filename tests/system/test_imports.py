"""The order of imports by the contracts of ``pyproject.toml``, their tables in CONTRIBUTING.md, and imports at the start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from places import ROOT
from sources import nodes

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
# Package -> its layers from top to bottom, each a list of modules that do not import each other.
ORDER = {one["containers"][0]: [layer.split(" | ") for layer in one["layers"]] for one in CONTRACTS if one["type"] == "layers"}
# The recipes, and the module that imports the public names, are not layers. Other contracts order them.
OUTSIDE = ["recipes/*.py", "cookbook/__init__.py"]


def test_imports_follow_the_contracts() -> None:
    """A name that is not in an order breaks its contract too."""
    command = "from importlinter.cli import lint_imports_command as main; main(['--no-cache', '--no-logo'])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contributing_shows_the_order() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    outer = [*ORDER["cookbook"][:2], OUTSIDE, *ORDER["cookbook"][2:]]
    shown = re.findall(r"^\| (\d+) \| `(.+?)` \|", page, re.MULTILINE)
    assert [(int(number), name) for number, name in shown] == [
        (number, name) for number, layer in zip(reversed(range(len(outer))), outer, strict=True) for name in layer
    ]
    inner = re.findall(r"^\| `(cookbook/[\w/]+)/` \| `(.*)` \|", page, re.MULTILINE)
    found = {name.replace("/", "."): [layer.split("`, `") for layer in text.split("` > `")] for name, text in inner}
    assert found == {package: layers for package, layers in ORDER.items() if package != "cookbook"}


def test_the_engine_names_no_loss() -> None:
    from cookbook.losses import LOSSES

    names = {*LOSSES, *(path.partition(":")[2] for path in LOSSES.values())}
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}"
        for path in sorted((ROOT / "cookbook" / "engine").rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []


def test_test_files_do_not_import_each_other() -> None:
    """Code that several test files share is in tests/support."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    names = {path.stem for path in files if path.stem.startswith("test_")}
    imported = re.compile(r"^\s*(?:import|from)\s+(test_\w+)", re.MULTILINE)
    wrong = {path.relative_to(ROOT): names & set(imported.findall(path.read_text(encoding="utf-8"))) for path in files}
    assert not any(wrong.values()), wrong


# Packages that no plain run needs, or that only the load of a model needs.
NOT_YET = {"transformers", "torch._dynamo", "sympy", "scipy", "pandas", "datasets", "peft", "tinker", "httpx", "rich", "hydra"}
HEAVY = {"torch", "numpy", "hydra", "omegaconf", "rich", "yaml", "transformers"}


@pytest.mark.parametrize(
    "command, heavy",
    [
        ("import cookbook", HEAVY),
        ("from cookbook.cli.app import run; run(['--help'])", HEAVY),
        ("from cookbook.cli.app import run; run(['list'])", HEAVY - {"omegaconf", "yaml"}),
        pytest.param("import cookbook.run.builder", NOT_YET, marks=pytest.mark.slow),
    ],
)
def test_start_up_loads_nothing_heavy(command: str, heavy: set[str]) -> None:
    code = f"{command}\nimport sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
