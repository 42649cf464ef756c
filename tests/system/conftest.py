"""A cluster of Slurm, and a folder in which the commands of the documentation run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurmtools
from places import ROOT
from runtools import here, inside  # noqa: F401 - here is a fixture


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """Slurm on this machine, with two nodes. Debian packages: slurm-wlm and munge."""
    absent = slurmtools.missing()
    if absent is not None:
        pytest.skip(f"{absent} is not installed: apt-get install slurm-wlm munge")
    with slurmtools.cluster() as conf, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pageruns import prepare

    folder = tmp_path_factory.mktemp("pages")
    with inside(folder):
        prepare()
    return folder


@pytest.fixture
def place(filled: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A copy of the filled folder, as the current directory."""
    shutil.copytree(filled, here / "pages")
    monkeypatch.chdir(here / "pages")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COOKBOOK_CACHE", str(here / "cache"))
    # The programs that a command names `python`, and servers in processes of their own.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The records of jobs: the id of a deleted job stays taken.
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))
    return here / "pages"
