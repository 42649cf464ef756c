"""The real SmolLM2-135M-Instruct, made once per checkout by ``scripts/make_real_model.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from runtools import ROOT

NAMED_FOLDER = "COOKBOOK_REAL_MODEL"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of the model. ``COOKBOOK_REAL_MODEL`` names another folder than ``build/smollm2``."""
    if NAMED_FOLDER in os.environ:
        return Path(os.environ[NAMED_FOLDER])
    folder = ROOT / "build" / "smollm2"
    folder.parent.mkdir(exist_ok=True)
    # Several test processes may need the model at the same time.
    with FileLock(f"{folder}.lock"):
        command = [sys.executable, str(ROOT / "scripts" / "make_real_model.py")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot download" in result.stderr:
        pytest.skip(f"no real model: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    return folder
