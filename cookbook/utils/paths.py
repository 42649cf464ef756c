"""Paths of the packaged folders and of the user's folders, which take precedence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# Environment variable with the name of the folder of a sweep, for its runs; processes of a launcher inherit it.
SWEEP = "COOKBOOK_SWEEP"
# Configuration of a run, and the folder of its checkpoints, in the folder of the run.
RUN_CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
# File of a PEFT adapter.
LORA_FILE = "adapter_config.json"
# Manifest of a checkpoint.
MANIFEST_FILE = "checkpoint.json"


def packaged(kind: str) -> Path:
    """The folder ``recipes``, ``conf`` or ``data`` that ships with cookbook.

    In an installed wheel the folder is ``cookbook/_<kind>``; in a checkout it is next to the package.
    """
    inside = PACKAGE / f"_{kind}"
    return inside if inside.is_dir() else PACKAGE.parent / kind


def user(kind: str) -> Path:
    """The user's folder of that kind, in the current directory. It may not exist."""
    return Path.cwd() / kind


def overlays(kind: str) -> list[Path]:
    """Return the folders of that kind, the user's first. In a checkout of cookbook both are the same folder."""
    folders = [user(kind), packaged(kind)]
    return folders[1:] if folders[0].resolve() == folders[1].resolve() else folders


def find(kind: str, name: str) -> Path | None:
    """The first ``<folder>/<name>`` that is a file, the user's before the packaged one."""
    return next((path for folder in overlays(kind) if (path := folder / name).is_file()), None)


def state(kind: str) -> Path:
    """Return the folder for state that outlives runs, one per user. On a cluster all login nodes share it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "cookbook" / kind


def import_from_here() -> None:
    """Append the current folder to the import path, for ``_target_: my_module.MyLoss``. It hides no installed module."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def shown(path: Path) -> str:
    """Return the path for messages: relative to the current directory, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def is_run(folder: Path) -> bool:
    """Whether the folder is that of a run."""
    return (folder / RUN_CONFIG).is_file()


def holds_adapter(name: str) -> bool:
    """Whether a model is a LoRA adapter: a folder with one, or a run (``RUN`` or ``RUN@step-N``) that trains one.

    Reads file names only. All checkpoints of a run are of one kind.
    """
    folder = Path(name)
    run = folder if is_run(folder) else Path(name.rpartition("@")[0])
    if "@" in name and not folder.exists() and not is_run(run):
        return False
    if is_run(run) and not (folder / LORA_FILE).is_file():
        return any((run / CHECKPOINTS).glob(f"step-*/{LORA_FILE}"))
    return (folder / LORA_FILE).is_file()
