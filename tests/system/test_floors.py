"""Order of imports: which package may import which, from top to bottom, and which imports are never allowed.

A module imports only from lines below its own; lazy and type-checking imports count. CONTRIBUTING.md shows the order.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from places import ROOT
from sources import nodes

# Per package, its packages and modules from top to bottom. Those of one line do not import each other. The root is "".
ORDER = {
    "": [
        "__main__",
        "cli",
        "recipes __init__",
        "run",
        "deployments jobs server service",
        "backends sampling",
        "checkpoints trackers",
        "protocols",
        "check engine",
        "losses",
        "config data",
        "futures terminal types utils",
        "errors",
    ],
    "run": [
        "standalone_eval",
        "builder",
        "result",
        "report",
        "run",
        "preflight recorder",
        "data folder rollout_store",
        "settings",
        "diagnostics held_out_loss hooks identity stored_steps",
    ],
    "server": [
        "agents rank",
        "serve",
        "app",
        "routes",
        "handlers",
        "state",
        "journal",
        "config",
        "connections keys metrics pages",
        "wire",
    ],
    "jobs": ["backend", "endpoint", "manager", "command local ray slurm store", "launcher"],
    "sampling": [
        "prompt_queue",
        "rollouts",
        "evaluation",
        "episodes",
        "environments lm_eval_tasks rewards",
        "advantages teacher trajectory workers",
    ],
    "deployments": ["vllm", "embedded weight_sync"],
    "deployments.vllm": [
        "deployment",
        "registry",
        "process replicas",
        "api sampler worker",
        "http weight_store",
    ],
    "checkpoints": [
        "inventory",
        "sampler_checkpoints",
        "gathered store",
        "contents",
        "card delta gguf_file sharded snapshots",
        "manifest ranks schedule tensor_digests",
    ],
    "engine": [
        "engine",
        "decoding estimate",
        "forward heap options",
        "capabilities",
        "memory head layers offload shape",
        "optimizer",
        "batch",
        "attention",
        "precision",
        "fast_path",
        "ranks",
        "model",
        "dropout lora_targets loss_gradient parallel router_loss vocabulary",
    ],
}
SHOWN = {"__init__": "cookbook/__init__.py", "recipes": "recipes/*.py"}  # names in CONTRIBUTING.md
FRONT = "cookbook"  # cookbook/__init__.py hands names of every package on, and imports them when they are used
# Imports that still go upwards. A pair that is no longer imported fails until it is removed.
UPWARD: set[str] = set()
# Packages whose modules still import each other in a circle. A package without one fails until it is removed.
CIRCLES: set[str] = set()

# Importer -> packages it never imports.
NEVER = [
    ("cookbook.recipes", ("torch", "transformers", "tinker", "hydra", "omegaconf", "cookbook.backends")),
    ("cookbook.losses", ("cookbook.data", "cookbook.engine", "cookbook.backends")),
    ("cookbook.engine", ("cookbook.losses",)),
]
# The engine may import what all losses share, and no loss.
SHARED = ("cookbook.losses.base", "cookbook.losses.normalization")
# Package -> its only importers.
ONLY = [
    ("hydra", ("cookbook.cli.hydra",)),
    ("tinker", ("cookbook.backends.remote", "cookbook.server")),
    # Ranks compute in engine.ranks.processes and save in checkpoints.sharded: the engine writes no files.
    ("torch.distributed", ("cookbook.engine.ranks.processes", "cookbook.checkpoints.sharded", "cookbook.checkpoints.ranks")),
]


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def place(module: str) -> str:
    """Return the module's name in the order, where the recipes and ``cookbook/__init__.py`` have lines."""
    if module == FRONT or inside(module, "recipes"):
        return "cookbook.__init__" if module == FRONT else f"cookbook.{module}"
    return module


@cache
def modules() -> dict[str, Path]:
    """Return every module's file, by the name the module is imported by."""
    paths = sorted([*ROOT.glob("cookbook/**/*.py"), *ROOT.glob("recipes/*.py")])
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every import. ``from a import b`` may mean the module ``a.b``."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole module name: forks copy files"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def module_of(name: str) -> str:
    """Return the module that holds ``name``; for an outside package, ``name`` itself."""
    module = name
    while module and module not in modules():
        module = module.rpartition(".")[0]
    return module or name


@cache
def all_imports() -> list[tuple[str, Path, int, str]]:
    """Return every import: the importing module, its file, the line, and the imported module. Parsing takes a second."""
    return [(module, path, line, module_of(name)) for module, path in modules().items() for line, name in imports(path)]


def unit(module: str, package: str) -> str:
    """Return the child of ``package`` that holds ``module``, or "" for the package itself."""
    return module.removeprefix(f"cookbook.{package}".rstrip(".")).lstrip(".").partition(".")[0]


@cache
def lines_of(module: str) -> dict[str, int | None]:
    """Return the module's line in the order of each package that holds it; None if the order does not name it."""
    holders = [package for package in ORDER if inside(module, f"cookbook.{package}".rstrip(".")) and unit(module, package)]
    return {
        package: next((i for i, line in enumerate(ORDER[package]) if unit(module, package) in line.split()), None)
        for package in holders
    }


def report(problems: Iterable[str]) -> None:
    lines = sorted(problems)
    assert not lines, "\n" + "\n".join(lines)


def test_every_module_is_in_the_order() -> None:
    report(
        f"{path.relative_to(ROOT)}: add {unit(place(module), package)!r} to ORDER[{package!r}] in tests/system/test_floors.py"
        for module, path in modules().items()
        for package, line in lines_of(place(module)).items()
        if line is None
    )


def upward() -> Iterator[tuple[str, str]]:
    """Yield pair and place of every import of a package or module that is not below the importer."""
    for module, path, line, target in all_imports():
        above, below = place(module), place(target)
        package = max(lines_of(above).keys() & lines_of(below).keys(), key=len, default="")
        own, other = lines_of(above).get(package), lines_of(below).get(package)
        if module == FRONT or target not in modules() or own is None or other is None:
            continue
        if own >= other and unit(above, package) != unit(below, package):
            pair = f"{package}: {unit(above, package)} -> {unit(below, package)}".removeprefix(": ")
            yield pair, f"{path.relative_to(ROOT)}:{line} imports {target}, which is not below it ({pair})"


def test_imports_go_downwards() -> None:
    report(text for pair, text in upward() if pair not in UPWARD)
    report(f"{pair}: no longer imported; remove the exception" for pair in UPWARD - {pair for pair, _ in upward()})


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    imported: dict[str, set[str]] = {module: set() for module in modules()}
    for module, _, _, target in all_imports():
        if target in imported and FRONT not in (module, target) and target != module:
            imported[module].add(target)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = imported[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reach = {module: reachable(module) for module in imported}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in imported}
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other() -> None:
    groups = {unit(place(group[0]), ""): group for group in circles()}
    report(f"{group} import each other" for package, group in groups.items() if package not in CIRCLES)
    report(f"{package}: without circles; remove the exception" for package in CIRCLES - groups.keys())


def test_contributing_shows_this_order() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+) \| `(.+?)` \|", page, re.MULTILINE)
    top = len(ORDER[""]) - 1
    assert [(int(number), name) for number, name in shown] == [
        (top - i, SHOWN.get(name, name)) for i, line in enumerate(ORDER[""]) for name in line.split()
    ]
    inner = re.findall(r"^\| `cookbook/([\w/]+)/` \| `(.*)` \|", page, re.MULTILINE)
    assert {name.replace("/", "."): [line.split("`, `") for line in text.split("` > `")] for name, text in inner} == {
        package: [line.split() for line in order] for package, order in ORDER.items() if package
    }


def test_the_nevers() -> None:
    problems = []
    for module, path, line, target in all_imports():
        here, there = place(module), place(target)
        never = any(inside(there, package) for importer, banned in NEVER if inside(here, importer) for package in banned)
        only = any(inside(there, package) and not any(inside(here, one) for one in importers) for package, importers in ONLY)
        if (never and there not in SHARED) or only:
            problems.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    report(problems)


def test_the_engine_names_no_loss() -> None:
    from cookbook.losses import LOSSES

    names = {*LOSSES, *(path.partition(":")[2] for path in LOSSES.values())}
    report(
        f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}"
        for module, path in modules().items()
        if inside(module, "cookbook.engine")
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in names
    )


# Packages that no plain run needs, or that only the load of a model needs.
NOT_YET = {"transformers", "torch._dynamo", "sympy", "scipy", "pandas", "datasets", "peft", "tinker", "httpx", "rich", "hydra"}
HEAVY = {"torch", "numpy", "hydra", "omegaconf", "rich", "yaml", "transformers"}


@pytest.mark.parametrize(
    "command, heavy",
    [
        ("import cookbook", HEAVY),
        ("from cookbook.cli.app import run; run(['--help'])", HEAVY),
        ("from cookbook.cli.app import run; run(['list'])", HEAVY - {"omegaconf", "yaml"}),
        ("import cookbook.run.builder", NOT_YET),
    ],
)
def test_start_up_loads_nothing_heavy(command: str, heavy: set[str]) -> None:
    code = f"{command}\nimport sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
