"""The checks of ``make release`` before and after it builds. tests/system/test_wheel.py tries the wheel itself."""

import importlib.util
import shutil
import subprocess
import sys

import pytest
from runtools import ROOT

spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)


def test_every_file_names_one_version():
    assert len(set(release.versions(ROOT).values())) == 1


@pytest.mark.parametrize("file", ["pyproject.toml", "CITATION.cff", "CHANGELOG.md"])
def test_another_version_is_refused_before_anything_is_built(file, tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "scripts/release.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    changed = tmp_path / file
    changed.write_text(changed.read_text(encoding="utf-8").replace("0.1.0", "9.9.9", 1), encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "scripts" / "release.py"], capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "dist").exists()
    assert done.stderr.startswith("error: the versions differ: ") and f"{file} 9.9.9" in done.stderr
    assert done.stderr.endswith("; write one version in all three\n")
