"""Check of all files in the folder of a server: ``cookbook serve --verify``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cookbook.checkpoints import manifest
from cookbook.errors import CheckpointError
from cookbook.server.journal.log import Log, Record
from cookbook.server.state.catalog import damage_of

# Names of the logs in the folder of a session.
LOGS = ("log", "samples", "run-*")


def verify(out: Path) -> None:
    """Read every file of the runs, checkpoints and sessions below ``out``, and print one line for each object.

    A server may be running: the end of a log that is being written counts as whole.

    Raises:
        CheckpointError: ``out`` is not the folder of a server, or a file is damaged; the error counts the damaged objects.
    """
    if not (out / "sessions").is_dir() and not any(out.glob("*/facts")):
        raise CheckpointError(f"out: {out} is not the folder of a server; pass out=... as to cookbook serve")
    num_objects = num_damaged = 0
    for path, problem in _objects(out):
        print(f"damaged  {problem}" if problem else f"whole    {path}")
        num_objects += 1
        num_damaged += bool(problem)
    if num_damaged:
        raise CheckpointError(f"{out}: {num_damaged} of {num_objects} objects are damaged; see above")


def _objects(out: Path) -> Iterator[tuple[Path, str]]:
    """Yield each object below ``out`` with its problem, "" if it is whole."""
    for run in sorted(path.parent for path in out.glob("*/facts")):
        yield from damage_of(run)
        yield from _checkpoints(run)
    for session in sorted((out / "sessions").glob("*")):
        for log in sorted(path for pattern in LOGS for path in session.glob(pattern) if path.is_dir()):
            yield from _log(log)
            yield from _checkpoints(log)
        yield from _checkpoints(session)


def _checkpoints(folder: Path) -> Iterator[tuple[Path, str]]:
    for checkpoint in sorted(path.parent for path in folder.glob(f"*/{manifest.NAME}")):
        try:
            manifest.verify(checkpoint)
        except CheckpointError as error:
            yield checkpoint, str(error)
        else:
            yield checkpoint, ""


def _log(folder: Path) -> Iterator[tuple[Path, str]]:
    log = Log(folder, Record({}), fsync=False)
    for _ in log.earlier_records():
        pass
    yield folder, "; ".join(map(str, log.damage))
