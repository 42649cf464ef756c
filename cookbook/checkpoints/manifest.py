"""The list of a checkpoint's files with their digests: what makes a torn or damaged one recognizable."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from cookbook import atomic, terminal
from cookbook.errors import CheckpointError

NAME = "checkpoint.json"
# The model card has no digest: users edit it, and nothing computes with it.
CARD = "README.md"
FORMAT = 2
READ_BYTES = 1 << 20


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Digest every file of ``folder``, write the manifest last, and force all of it to the disk.

    All files get the manifest's mode, which the umask decides: safetensors makes files that only their owner can read.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CARD]
    files = {str(path.relative_to(folder)): _digest(path) for path in paths}
    manifest = folder / NAME
    stated = {"format": FORMAT, **facts, "files": files}
    manifest.write_text(json.dumps({**stated, "digest": _digest_of(stated)}, indent=2) + "\n")
    mode = stat.S_IMODE(manifest.stat().st_mode)
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        atomic.sync(path)


def read(folder: Path) -> dict[str, Any]:
    """The manifest, without looking at the files.

    Raises:
        CheckpointError: there is none, it is not one of ours, or it is damaged.
    """
    try:
        manifest = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: is not a checkpoint (no {NAME}); pass a folder under <run>/checkpoints") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {NAME} cannot be read ({error}); use another checkpoint") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{folder}: {NAME} is not in format {FORMAT}, which this version reads; use another checkpoint")
    if manifest.pop("digest", None) != _digest_of(manifest):
        raise CheckpointError(f"{folder}: {NAME} is damaged (its digest differs); use another checkpoint")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest, after comparing every file with it.

    Raises:
        CheckpointError: a file is missing or damaged, or there are more tensors than it says; the file is named.
    """
    manifest = read(folder)
    for path in sorted(folder.rglob("*.safetensors")):  # whoever loads the folder would take every such file for a part of it
        if (name := str(path.relative_to(folder))) not in manifest["files"]:
            raise CheckpointError(f"{folder}: {name} does not belong to it; use another checkpoint")
    with terminal.doing(f"verifying {folder}"):
        for name, digest in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder}: {name} is missing; use another checkpoint")
            if _digest(path) != digest:
                raise CheckpointError(f"{folder}: {name} is damaged (its digest differs); use another checkpoint")
    return manifest


def _digest_of(stated: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            sha.update(block)
    return sha.hexdigest()
