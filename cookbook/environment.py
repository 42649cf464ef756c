"""What a result may depend on besides the configuration."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

from cookbook import __version__

SWEEP = "COOKBOOK_SWEEP"  # the environment variable that names the sweep of a run, also in a launcher's processes
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "hydra-core", "omegaconf", "numpy")


def environment(overrides: list[str]) -> dict[str, Any]:
    """Time, command line, versions and the state of the checkout, as JSON has them."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["cookbook", "train", *overrides],
        "sweep": os.environ.get(SWEEP),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {"cookbook": __version__, **{name: _version(name) for name in PACKAGES}},
        "git": _git_state(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit and whether files differ from it, when the current folder is in a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": git("status", "--porcelain").splitlines()[:50]}
    except (OSError, subprocess.SubprocessError):
        return None
