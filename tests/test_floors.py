"""The floors of the house, and its nevers: which module may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    5: "cookbook.cli cookbook.__main__",
    4: "cookbook.server cookbook.jobs",
    3: "cookbook.run cookbook.session cookbook.service cookbook.runfolder cookbook.report cookbook.identity "
    "cookbook.status cookbook.comparison cookbook.evaluate_alone cookbook.preflight cookbook.advice recipes",
    2: "cookbook.backends cookbook.deployments cookbook.weight_sync cookbook.checkpoints cookbook.trackers cookbook.rollout "
    "cookbook.resilience cookbook.rewards cookbook.data cookbook.hooks cookbook.config cookbook.recipe cookbook.evaluation "
    "cookbook.progress cookbook.check cookbook.bad_rows cookbook.failed_batch cookbook.reference "
    "cookbook.health",
    1: "cookbook.engine cookbook.losses cookbook.normalization cookbook.advantages cookbook.schedules cookbook.protocols",
    0: "cookbook.types cookbook.errors cookbook.paths cookbook.futures cookbook.interrupt cookbook.suggest cookbook.typed "
    "cookbook.svg cookbook.pyfile cookbook.atomic cookbook.lock cookbook.environment cookbook.hub cookbook.terminal",
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
FRONT = "cookbook"  # cookbook/__init__.py shows names of every floor, and imports none until it is asked

# who -> what it must never import; and what -> who alone may import it.
NEVER = [
    ("recipes", ("torch", "transformers", "tinker", "hydra", "omegaconf", "cookbook.backends")),
    ("cookbook.losses", ("cookbook.data", "cookbook.engine", "cookbook.backends")),
    ("cookbook.engine", ("cookbook.losses",)),
]
ONLY = [
    ("hydra", ("cookbook.cli.hydra_bridge",)),
    ("tinker", ("cookbook.backends.remote", "cookbook.server")),
    # Ranks compute in one place, and save in another: writing files is a floor above the maths.
    ("torch.distributed", ("cookbook.engine.parallel", "cookbook.checkpoints.ranks", "cookbook.checkpoints.sharded")),
]
GRAMMAR = "cookbook.losses.base"  # what every loss is made of; the engine may know that, and no loss by name


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def floor_of(module: str) -> int | None:
    return next((floor for known, floor in FLOOR.items() if inside(module, known)), None)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted([*ROOT.glob("cookbook/**/*.py"), *ROOT.glob("recipes/*.py")]):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported name, lazily or for types only too. ``from a import b`` may mean the module ``a.b``."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the whole module name: forks copy files"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


IMPORTS = [(module, path, line, target) for module, path in modules() for line, target in imports(path)]


def found(*problems: str) -> None:
    assert not problems, "\n" + "\n".join(sorted(problems))


def test_every_module_has_a_floor():
    unknown = [module for module, _ in modules() if module != FRONT and floor_of(module) is None]
    found(*(f"{module}: on no floor; add it to the table in tests/test_floors.py" for module in unknown))


def test_a_module_imports_from_its_own_floor_or_below():
    found(
        *(
            f"{path.relative_to(ROOT)}:{line} imports {target} (floor {floor_of(module)} -> {floor_of(target)})"
            for module, path, line, target in IMPORTS
            if module != FRONT and (floor_of(target) or 0) > (floor_of(module) or 0)
        )
    )


def test_the_nevers():
    forbidden = [
        (path, line, target)
        for module, path, line, target in IMPORTS
        if any(
            inside(module, who) and inside(target, what) and not inside(target, GRAMMAR)
            for who, whats in NEVER
            for what in whats
        )
        or any(inside(target, what) and not any(inside(module, who) for who in whos) for what, whos in ONLY)
    ]
    found(*(f"{path.relative_to(ROOT)}:{line} imports {target}" for path, line, target in forbidden))


def test_the_engine_names_no_loss():
    from cookbook.losses import LOSSES

    names = {*LOSSES, *(path.partition(":")[2] for path in LOSSES.values())}
    spoken = [
        f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}"
        for module, path in modules()
        if inside(module, "cookbook.engine")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    found(*spoken)


@pytest.mark.parametrize("command", ["import cookbook", "from cookbook.cli.app import run; run(['--help'])"])
def test_start_up_loads_nothing_heavy(command):
    heavy = {"torch", "numpy", "hydra", "omegaconf", "rich", "yaml", "transformers"}
    code = f"{command}\nimport sys; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
