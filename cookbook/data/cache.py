"""Cache of rows and tokens on disk: tables of arrays, each in a folder that is complete or absent.

A table is written to a temporary folder, which is renamed when the table is complete. The kernel's lock on a file of the
temporary folder shows that its process is alive; other temporary folders are removed. Every file has a CRC-32, which is
compared before the file is mapped, so a power failure cannot leave a table that looks complete.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

import filelock
import numpy as np

from cookbook.types import Array, JsonObject

log = logging.getLogger("cookbook")

# Environment variable with the folder of the cache.
CACHE = "COOKBOOK_CACHE"
AUTO, OFF = "auto", "off"
FACTS, LOCK, TEMPORARY = "entry.json", ".lock", ".new-"
# Form of the name of an entry, as of :func:`key_of`.
KEY = re.compile(r"[a-z]+-[0-9a-f]{32}")
FORMAT = 1
CHUNK_BYTES = 1 << 20
# Age of a temporary folder at which it is removed if its process has ended.
ABANDONED_S = 60.0
# Age of an unused entry at which the next write removes it.
UNUSED_S = 30 * 24 * 3600.0
# Packages that decide the tokens of a row.
PACKAGES = ("transformers", "tokenizers", "jinja2", "datasets", "numpy")

_said: set[str] = set()


def location(setting: str | bool) -> Path | None:
    """Return the folder of the cache for ``data.cache``: ``auto``, ``off`` (None) or a folder.

    The environment variable has the same values. YAML reads ``off`` without quotes as False, and ``on`` as True.
    """
    if setting in (True, AUTO):
        setting = os.environ.get(CACHE) or AUTO
    if setting in (False, OFF):
        return None
    if setting != AUTO:
        return Path(str(setting)).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path("~/.cache").expanduser()) / "cookbook"


def key_of(kind: str, *parts: object) -> str:
    """Return the name of an entry: ``kind`` and a digest of ``parts``, which are JSON-compatible, and of the code."""
    text = json.dumps([FORMAT, code_version(), *parts], sort_keys=True, default=str)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@functools.cache
def code_version() -> str:
    """Return a digest of the code that makes rows and tokens, and of the versions of the packages that it uses."""
    sha = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sha.update(path.read_bytes())
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            sha.update(f"{package} {metadata.version(package)}".encode())
    return sha.hexdigest()


@dataclass(frozen=True)
class CachedTable:
    """Arrays of one axis, memory-mapped and read-only, or in memory; and JSON-compatible facts about them."""

    arrays: Mapping[str, Array]
    facts: JsonObject


@dataclass(frozen=True)
class CacheEntry:
    """One table on disk. ``used_s``: Unix time of its last use; ``facts``: empty if the table is damaged."""

    path: Path
    num_bytes: int
    used_s: float
    facts: JsonObject


def find(root: Path, key: str) -> CachedTable | None:
    """Return the table of ``key``; None if it is missing or cannot be read. A damaged table is removed. The log says why."""
    folder = root / key
    try:
        stated = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        arrays = {name: _checked(folder / f"{name}.bin", **column) for name, column in stated["columns"].items()}
        # The time of last use.
        with contextlib.suppress(OSError):
            os.utime(folder / FACTS)
        return CachedTable(arrays, stated["facts"])
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            return None
        reason = "a file is missing"
    except OSError as error:
        # The table may be whole: too many open files, no permission, an interrupted network drive.
        log.warning("cache: cannot read %s (%s); the data are read and tokenized again", folder, error.strerror or error)
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error)
    log.warning("cache: %s is damaged (%s); the data are read and tokenized again", folder, reason)
    _remove(folder)
    return None


def _checked(path: Path, dtype: str, num_bytes: int, crc32: int) -> Array:
    if path.stat().st_size != num_bytes:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {num_bytes}")
    crc = 0
    # Read, not mapped: mapped pages would count as memory of this process.
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    if crc != crc32:
        raise ValueError(f"{path.name} has another checksum")
    return _mapped(path, np.dtype(dtype))


def _mapped(path: Path, dtype: np.dtype[np.generic]) -> Array:
    # A plain array: slices of np.memmap are slow to make. Empty files cannot be mapped.
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def entries(root: Path) -> list[CacheEntry]:
    """Return the tables, the least recently used first."""
    result = []
    # Another program may have folders next to the tables.
    for folder in (path for path in root.iterdir() if KEY.fullmatch(path.name)) if root.is_dir() else ():
        # Another process may remove the entry now.
        with contextlib.suppress(OSError):
            size = sum(file.stat().st_size for file in folder.iterdir())
            facts = folder / FACTS
            used_s = (facts if facts.exists() else folder).stat().st_mtime
            result.append(CacheEntry(folder, size, used_s, _facts(facts)))
    return sorted(result, key=lambda entry: entry.used_s)


def _facts(path: Path) -> JsonObject:
    """Return the facts of an entry; empty if the file is damaged."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))["facts"]
        return {**facts, "rows": int(facts["rows"]), "first": str(facts["first"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def clear(root: Path, older_than_s: float = 0.0) -> list[CacheEntry]:
    """Remove the tables that were not used for ``older_than_s`` seconds, and return them. Raises OSError.

    A process that uses a table keeps it: its files are removed from the disk when the process ends.
    """
    old = [entry for entry in entries(root) if entry.used_s <= time.time() - older_than_s]
    for entry in old:
        _remove(entry.path)
        if entry.path.exists():
            raise OSError(f"{entry.path} cannot be removed")
    _remove_abandoned(root)
    return old


def _remove(folder: Path) -> None:
    """Remove an entry. It is renamed first, so that other processes never see a part of it."""
    temporary = folder.with_name(f"{TEMPORARY}{folder.name}-{os.getpid()}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        folder.rename(temporary)
        shutil.rmtree(temporary)


def _remove_abandoned(root: Path) -> None:
    """Remove temporary folders whose processes have ended."""
    for folder in root.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime < ABANDONED_S:
                continue
            with (folder / LOCK).open("ab") if (folder / LOCK).exists() else contextlib.nullcontext() as lock:
                if lock is None or filelock.lock_descriptor(lock.fileno(), blocking=False):
                    shutil.rmtree(folder)


def _say_once(problem: str) -> None:
    if problem not in _said:
        _said.add(problem)
        log.warning("cache: %s", problem)


class _Column:
    """Array that grows: in a file, or in memory."""

    def __init__(self, path: Path | None, dtype: np.dtype[np.generic]) -> None:
        self.dtype = dtype
        self.num_bytes, self.crc32 = 0, 0
        self._path = path
        self._memory = bytearray()
        self._file = path.open("x+b", buffering=0) if path else None

    def append(self, values: Array) -> None:
        """Append values of the column's type. Raises OSError: the disk refuses; the column is as before."""
        content = memoryview(values.astype(self.dtype, copy=False).tobytes())
        if self._file is None:
            self._memory += content
        else:
            unwritten = content
            # The system may write less than it is given.
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        self.num_bytes += len(content)
        self.crc32 = zlib.crc32(content, self.crc32)

    def to_memory(self) -> None:
        """Continue in memory. Bytes of a write that failed are left out. Nothing happens after :meth:`array`."""
        if self._file is not None and not self._file.closed:
            # No second handle: the reason may be that the process has too many.
            self._file.seek(0)
            self._memory = bytearray(self._file.readall()[: self.num_bytes])
            self._file.close()
            self._file = None

    def array(self) -> Array:
        """Return the values, read-only; nothing can be appended afterwards."""
        if self._file is None or self._path is None:
            return np.frombuffer(bytes(self._memory), self.dtype)
        self._file.close()
        return _mapped(self._path, self.dtype)


class TableWriter:
    """Writer of one table. If the disk refuses, the table stays in memory, and the log gets one line for each folder.

    Args:
        root: folder of the cache; None: in memory.
        columns: type of each column.
    """

    def __init__(self, root: Path | None, columns: Mapping[str, str]) -> None:
        self._root, self._folder = root, None
        self._lock: IO[bytes] | None = None
        self._columns: dict[str, _Column] = {}
        if root is not None:
            try:
                self._folder = self._begin(root)
            except OSError as error:
                self._fail(error)
        for name, dtype in columns.items():
            self._add_empty(name, np.dtype(dtype))

    def _begin(self, root: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        folder = root / f"{TEMPORARY}{os.getpid()}-{time.monotonic_ns()}"
        folder.mkdir()
        self._lock = (folder / LOCK).open("xb")
        # Some network drives have no locks. There, a writer that takes longer than ABANDONED_S may lose its table.
        with contextlib.suppress(OSError):
            filelock.lock_descriptor(self._lock.fileno(), blocking=False)
        # A table that is never committed, such as rows of the hub, is removed at the latest when the process ends.
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _add_empty(self, name: str, dtype: np.dtype[np.generic]) -> None:
        """Add a column in a file; in memory if the disk refuses, as then the other columns."""
        path = self._folder and self._folder / f"{name}.bin"
        try:
            self._columns[name] = _Column(path, dtype)
        except OSError as error:
            self._fail(error)
            self._columns[name] = _Column(None, dtype)

    def _fail(self, error: OSError) -> None:
        """Continue in memory."""
        for column in self._columns.values():
            column.to_memory()
        _say_once(
            f"cannot write to {self._root} ({error.strerror or error}); rows and tokens stay in memory, and the next start "
            f"reads them again; set {CACHE} or data.cache to another folder"
        )
        self._end()

    def append(self, **values: Array) -> None:
        """Append to several columns, whose order in memory is that of the calls."""
        for name, array in values.items():
            column = self._columns[name]
            try:
                column.append(array)
            except OSError as error:
                self._fail(error)
                # Without a file, an append cannot fail.
                column.append(array)

    def add_column(self, name: str, values: Array) -> None:
        """Add a column that is complete, also after :meth:`arrays`."""
        self._add_empty(name, values.dtype)
        self.append(**{name: values})

    def arrays(self) -> dict[str, Array]:
        """Return the columns; nothing can be appended afterwards."""
        return {name: column.array() for name, column in self._columns.items()}

    def commit(self, key: str, facts: JsonObject) -> None:
        """Keep the table under ``key``. If another process has done so before, its table stays."""
        if self._folder is None or self._root is None:
            return
        columns = {
            name: {"dtype": column.dtype.str, "num_bytes": column.num_bytes, "crc32": column.crc32}
            for name, column in self._columns.items()
        }
        try:
            (self._folder / FACTS).write_text(json.dumps({"columns": columns, "facts": facts}), encoding="utf-8")
            (self._folder / LOCK).unlink()
            try:
                self._folder.rename(self._root / key)
            except OSError:
                # A folder that is not empty is never replaced.
                if not (self._root / key).is_dir():
                    raise
        except OSError as error:
            self._fail(error)
            return
        self._end()
        try:
            clear(self._root, UNUSED_S)
        except OSError as error:
            _say_once(f"old tables stay ({error}); remove them yourself, or set {CACHE} or data.cache to another folder")

    def _end(self) -> None:
        """Remove the temporary folder, if it is still there. Arrays that are mapped stay valid."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        self._folder = self._lock = None
