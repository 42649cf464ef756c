"""The wheel holds all that training needs: installed into an empty environment it trains from an empty folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from runtools import ROOT, SMALL, here, rows  # noqa: F401 - here is a fixture

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("here")]
pytest.importorskip("build", reason="the development tools are not installed")
pytest.importorskip("hatchling", reason="the development tools are not installed")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the commands' folder of an environment with only the wheel and its dependencies."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = place.glob("post_training_cookbook-*.whl")
    environment = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    # torch and the rest are not downloaded again. A line in a .pth adds the folder, but reads no .pth files in there: cookbook
    # as it is installed for development stays unseen.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def command(installed: Path, *words: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([installed / "cookbook", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", SMALL)
def test_it_trains_two_steps_from_an_empty_folder(installed, recipe):
    command(installed, "train", *SMALL[recipe], "recipe.steps=2", "out=run")
    assert [row["step"] for row in rows("run")] == [0, 1, 2]
    model = next(line for line in Path("run/config.yaml").read_text().splitlines() if "/tiny" in line)
    assert f"{installed.parent}/lib/" in model  # and not the checkout's


def test_its_files_are_listed_and_forked(installed):
    listed = command(installed, "list")
    assert all(name in listed for name in ("grpo", "cross_entropy", "qwen3_0p6b", "gsm8k", "number"))
    command(installed, "fork", "sft", "mine")
    command(installed, "train", "recipe=mine", *SMALL["sft"][1:], "recipe.steps=1", "out=run")
    assert [row["step"] for row in rows("run")] == [0, 1]
