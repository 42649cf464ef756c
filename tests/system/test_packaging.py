"""The package declares what it imports, under one name of its own that every text uses."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from places import ROOT
from sources import nodes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = "post-training-cookbook"

DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "google": "protobuf",
    "hydra": "hydra-core",
    "mlflow": "mlflow-skinny",
}  # modules that are named differently
OWN = {"cookbook", "cookbook_recipes"}
ELSEWHERE = {"vllm"}  # imported by processes of vLLM's own environment only
# Folders and files that are imported only if an extra is installed.
WITH_EXTRA = {
    "cookbook/server/": "server",
    "cookbook/cli/serve.py": "server",
    "cookbook/backends/remote/": "tinker",
    "cookbook/trackers/wandb.py": "wandb",
    "cookbook/trackers/tensorboard.py": "tensorboard",
    "cookbook/trackers/trackio.py": "trackio",
    "cookbook/trackers/mlflow.py": "mlflow",
    "cookbook/engine/optimizer.py": "lowbit",
    "cookbook/engine/quantized.py": "lowbit",
    "cookbook/checkpoints/gguf_file.py": "gguf",
    "cookbook/sampling/rewards/math_verify.py": "math-verify",
    "cookbook/sampling/rewards/ifeval.py": "lm-eval",
    "cookbook/sampling/lm_eval_tasks.py": "lm-eval",
    "cookbook/sampling/environments/ready.py": "reasoning-gym",
    "cookbook/sampling/environments/games.py": "textarena",
    "cookbook/sampling/environments/tool_calls.py": "renderers",
    "cookbook/engine/head/linear_logprobs/implementations.py": "cce",
}


def distribution(requirement: str) -> str:
    """``hydra-core`` of ``hydra-core>=1.3.2,<1.4``."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


DECLARED = {distribution(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {extra: {distribution(one) for one in ones} for extra, ones in PROJECT["optional-dependencies"].items()}


def third_party(path: Path) -> set[str]:
    """Distributions that a file imports, lazily or not, by a statement or by name."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            found |= {name.value.partition(".")[0] for name in node.args if isinstance(name, ast.Constant)}
    modules = found - set(sys.stdlib_module_names) - OWN - ELSEWHERE
    return {DISTRIBUTIONS.get(module, module).lower().replace("_", "-") for module in modules}


@cache
def imports() -> dict[str, set[str]]:
    files = [*ROOT.glob("cookbook/**/*.py"), *ROOT.glob("recipes/*.py")]
    return {str(path.relative_to(ROOT)): third_party(path) for path in files}


@pytest.mark.slow
def test_every_import_is_declared():
    for file, found in imports().items():
        allowed = DECLARED.union(*(EXTRAS[extra] for place, extra in WITH_EXTRA.items() if file.startswith(place)))
        assert found <= allowed, f"{file} imports {sorted(found - allowed)}, which pyproject.toml does not declare"


def test_every_declared_distribution_is_imported():
    imported = set.union(*imports().values())
    extras = set().union(*(ones for extra, ones in EXTRAS.items() if extra != "dev"))
    # Imported by torch.utils.tensorboard, by uvicorn's httptools_impl, and by MLflow's local database.
    assert DECLARED | extras <= imported | {"tensorboard", "httptools", "sqlalchemy", "alembic"}


def test_every_direct_dependency_has_a_tested_version():
    pinned = {distribution(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")}
    everything = DECLARED.union(*EXTRAS.values()) - {NAME}
    assert everything <= pinned, f"constraints.txt lacks {sorted(everything - pinned)}"


def test_every_text_names_the_distribution():
    """PyPI's ``cookbook`` is another project: no text may tell a user to install it."""
    assert PROJECT["name"] == NAME
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    if not files:
        pytest.skip("no git checkout")
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", "") and path.is_file() and path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            wrong = re.findall(r"(?<![\w-])cookbook\[[a-z]+[,\]]|pip install '?cookbook\b", text)
            assert not wrong, f"{name} names {wrong}; the distribution is {NAME}"
    extras = set(re.findall(rf"{NAME}\[(\w+)\]", "".join((ROOT / name).read_text() for name in files if name.endswith(".py"))))
    assert extras <= set(EXTRAS)


def test_the_supported_systems_are_named():
    systems = [one for one in PROJECT["classifiers"] if one.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux", "Operating System :: MacOS"]


def test_the_wheel_has_every_file_of_the_package():
    """Tables that the package reads, such as ``foreign_names.yaml``, are no Python files."""
    from hatchling.builders.wheel import WheelBuilder

    wheel = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("cookbook/**/*.*") if path.suffix != ".pyc"}
    assert "cookbook/cli/hydra/foreign_names.yaml" in package
    assert package <= wheel, sorted(package - wheel)
