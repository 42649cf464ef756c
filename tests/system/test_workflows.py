"""Workflows of GitHub and files for clouds: their commands exist. GitHub's and Kubernetes' own schemas check the format.

pip install check-jsonschema kubernetes-validate
check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
kubernetes-validate examples/clouds/kubernetes.yaml
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

from cookbook.cli.hydra.bridge import ComposeRequest, show

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CLOUDS = ROOT / "examples" / "clouds"


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"].split() for path in WORKFLOWS for step in steps(path) if "run" in step]
    assert len(commands) >= 4
    assert all(words[0] == "make" and set(words[1:]) <= targets for words in commands)


def test_every_supported_python_is_tested() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = {one.rpartition(" ")[2] for one in classifiers if re.search(r":: 3\.\d+$", one)}
    fast = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]["fast"]["strategy"]["matrix"]
    assert supported <= set(fast["python"])
    assert {*fast["os"], *(one["os"] for one in fast["include"])} == {"ubuntu-latest", "macos-latest"}


def test_the_commands_for_clouds_compose() -> None:
    task = yaml.safe_load((CLOUDS / "skypilot.yaml").read_text())
    words = [task["envs"]["ARGS"].split()]
    for document in yaml.safe_load_all((CLOUDS / "kubernetes.yaml").read_text()):
        if document["kind"] == "Job":
            [container] = document["spec"]["template"]["spec"]["containers"]
            assert container["command"] == ["cookbook"] and container["args"][0] == "train"
            words.append(container["args"][1:])
    assert len(words) == 2
    for overrides in words:
        assert "Qwen/Qwen3-0.6B" in show(ComposeRequest(overrides), "job", resolve=True)


@pytest.mark.skipif(not shutil.which("check-jsonschema"), reason="no check-jsonschema: pip install check-jsonschema")
def test_the_workflows_have_the_format_of_github() -> None:
    subprocess.run(["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)], check=True)
