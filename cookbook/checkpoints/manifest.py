"""Manifest of a checkpoint: its files with their digests, by which an incomplete or damaged checkpoint is recognized."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cookbook import terminal
from cookbook.errors import CheckpointError
from cookbook.types import JsonObject
from cookbook.utils import files, paths

NAME = paths.MANIFEST_FILE
# The model card has no digest: users edit it, and nothing computes with it.
CARD = "README.md"
FORMAT = 2


def write(folder: Path, facts: JsonObject, known: Mapping[str, str] | None = None) -> None:
    """Digest every file of ``folder``, write the manifest last, and force all of it to the disk.

    ``known``: digests of files that are not read again, by their names in ``folder``.

    All files get the manifest's mode, which the umask decides: safetensors makes files that only their owner can read.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CARD]
    names = [str(path.relative_to(folder)) for path in paths]
    digests = {name: (known or {}).get(name) or files.sha256(folder / name) for name in names}
    manifest = folder / NAME
    stated = {"format": FORMAT, **facts, "files": digests}
    manifest.write_text(json.dumps({**stated, "digest": _digest_of(stated)}, indent=2) + "\n")
    mode = stat.S_IMODE(manifest.stat().st_mode)
    for path in [*folder.rglob("*"), folder]:
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
        files.sync(path)


def read(folder: Path) -> JsonObject:
    """Read the manifest, without the files that it lists.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of an unknown format.
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


def trained_on(facts: JsonObject) -> list[str]:
    """Return the kinds of rows that the weights were trained on, ``chat`` and ``text``; empty if they are not known.

    ``facts``: the manifest of a checkpoint of a run, or of an export of it.
    """
    return list(facts.get("run", {}).get("trained_on") or facts.get("trained_on") or ())


def is_of_text(folder: Path) -> bool:
    """Whether a folder is a checkpoint whose run was trained on texts only, without the chat template of the tokenizer."""
    return (folder / NAME).is_file() and trained_on(read(folder)) == ["text"]


def verify(folder: Path) -> JsonObject:
    """Read the manifest, and compare every file with it.

    Raises:
        CheckpointError: a file is missing or damaged, or is not listed; the error names the file.
    """
    manifest = read(folder)
    # Programs that load the folder read every safetensors file in it.
    for path in sorted(folder.rglob("*.safetensors")):
        if (name := str(path.relative_to(folder))) not in manifest["files"]:
            raise CheckpointError(f"{folder}: {name} does not belong to it; use another checkpoint")
    with terminal.doing(f"verifying {folder}"):
        for name, digest in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder}: {name} is missing; use another checkpoint")
            if files.sha256(path) != digest:
                raise CheckpointError(f"{folder}: {name} is damaged (its digest differs); use another checkpoint")
    return manifest


def rewritten(folder: Path, change: Callable[[str], str], suffixes: Collection[str]) -> str:
    """Return the manifest of a copy of the checkpoint: ``change`` is applied to the manifest and to files with the suffixes.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of an unknown format.
    """
    stated = json.loads(change(json.dumps(read(folder))))
    for name in stated["files"]:
        if Path(name).suffix in suffixes:
            content = change((folder / name).read_text(encoding="utf-8"))
            stated["files"][name] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({**stated, "digest": _digest_of(stated)}, indent=2) + "\n"


def _digest_of(stated: JsonObject) -> str:
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
