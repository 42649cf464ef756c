"""Catalog of the checkpoints and runs on disk, their addresses ``tinker://<run>/<kind>/<name>``, and signed download URLs.

Each run and each checkpoint has a small JSON file, which is replaced as a whole. An index in memory is filled from these files
at the start and updated with every change, so that a list reads the files of its page only. A damaged file costs its object
only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cookbook.checkpoints import manifest
from cookbook.engine.model import LORA_FILE
from cookbook.errors import CheckpointError
from cookbook.server.keys import KeyRing, caller_name
from cookbook.server.state.clock import FILE, Clock
from cookbook.server.wire.bodies import MAX_TTL_S, Refused
from cookbook.types import JsonObject
from cookbook.utils import files

log = logging.getLogger("cookbook")
SCHEME = "tinker://"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RUN_FILE = "run.json"
# Prefix of the ids of runs that another program created, by copying one checkpoint into the folder. Such a run has no run.json
# and its checkpoint has no record, so both are derived from the checkpoint's manifest.
IMPORTED = "imported-"
# Folder of the checkpoint records. They are not stored beside the checkpoints, because a checkpoint may be named x.json.
_RECORDS = "facts"
# Lifetime of a download URL.
VALID_S = 3600.0


@dataclass(frozen=True)
class Address:
    """Address of a checkpoint: a run, a kind (a key of ``TYPES``) and a name."""

    run_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """Validate the parts, which are used as folder names. Raises CheckpointError: a part is invalid."""
        if not _RUN.fullmatch(self.run_id) or self.kind not in TYPES or not _NAME.fullmatch(self.name):
            raise CheckpointError(
                f"checkpoint: expected {SCHEME}<run>/<weights|sampler_weights>/<name>, where the name consists of letters, "
                f"digits, '.', '_' and '-', got {self.path!r}"
            )

    @classmethod
    def parse(cls, path: str) -> Address:
        """Split ``tinker://<run>/<kind>/<name>``. Raises CheckpointError: the address is invalid."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3:
            raise CheckpointError(f"checkpoint: expected {SCHEME}<run>/<kind>/<name>, got {path!r}")
        return cls(*parts)

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @property
    def folder_name(self) -> str:
        """Name of the checkpoint's folder in the folder of the run. It includes the kind, since kinds may share a name."""
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class RunInfo:
    """Description of a training run, stored in ``run.json``. ``owner``: name of the API key that created the run, if any."""

    run_id: str
    base_model: str
    is_lora: bool
    lora_rank: int | None
    seed: int
    created: float
    user_metadata: dict[str, str] | None = None
    owner: str | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """Description of a checkpoint. ``request`` is the number of the request that saved it.

    ``time`` is in seconds since 1970, and ``expires`` a time of :class:`Clock`.
    """

    address: Address
    time: float
    size_bytes: int
    expires: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    request: int | None = None


class DamagedFileError(CheckpointError):
    """Error of a file of the catalog that cannot be read."""


class Catalog:
    """The checkpoints and runs below ``folder``.

    Args:
        base_model: base model of imported checkpoints.
        seed: seed of runs that start from imported checkpoints.
    """

    def __init__(self, folder: Path, base_model: str = "", seed: int = 0) -> None:
        self.folder = folder
        self._base_model, self._seed = base_model, seed
        files.make_folders(folder)
        self.clock = Clock(folder / FILE)
        # Descriptions without user metadata, which stays on disk.
        self._runs: dict[str, RunInfo] = {}
        self._checkpoints: defaultdict[str, dict[Address, CheckpointRecord]] = defaultdict(dict)
        # Damaged files, each of which the console has named.
        self._damaged: set[Path] = set()
        self._read_folder()

    def _read_folder(self) -> None:
        """Fill the index from the files of earlier processes."""
        for folder in self.folder.iterdir():
            file, run_id = folder / _RUN_FILE, folder.name.replace(".", ":")
            if not _RUN.fullmatch(run_id) or not (folder / _RECORDS).is_dir():
                continue
            try:
                self._runs[run_id] = replace(_run_info(run_id, file), user_metadata=None)
            except DamagedFileError as error:
                self._report(file, error)
                self._runs[run_id] = RunInfo(run_id, self._base_model, False, None, self._seed, folder.stat().st_mtime)
            except FileNotFoundError:
                # A run that another program has created, or a run that was being created.
                continue
            for address in _addresses(run_id, folder / _RECORDS):
                try:
                    record = _read(address, self._record_file(address))
                except DamagedFileError as error:
                    self._report(self._record_file(address), error)
                except FileNotFoundError:
                    continue
                else:
                    self._checkpoints[run_id][address] = replace(record, user_metadata=None)

    def _report(self, file: Path, error: DamagedFileError) -> None:
        """Name a damaged file on the console, once."""
        if file not in self._damaged:
            self._damaged.add(file)
            log.warning("%s", error)

    def is_damaged(self, run_id: str) -> bool:
        """Whether the description of a run is damaged."""
        return self.run_folder(run_id) / _RUN_FILE in self._damaged

    # ---- runs ----------------------------------------------------------------------------------------------------

    def run_folder(self, run_id: str) -> Path:
        return self.folder / run_id.replace(":", ".")

    def add_run(self, info: RunInfo) -> RunInfo:
        """Record a run. Returns the description that an earlier process recorded if there is a whole one, else ``info``."""
        folder = self.run_folder(info.run_id)
        if (folder / _RUN_FILE).is_file():
            with contextlib.suppress(Refused):
                return self.run(info.run_id)
        files.make_folders(folder / _RECORDS)
        files.write_text(folder / _RUN_FILE, json.dumps(asdict(info), indent=2) + "\n")
        self._damaged.discard(folder / _RUN_FILE)
        self._runs[info.run_id] = replace(info, user_metadata=None)
        return info

    def run(self, run_id: str) -> RunInfo:
        """Return the description of a run. Raises Refused: 404, the run is unknown; 410, its description is damaged."""
        file = self.run_folder(run_id) / _RUN_FILE
        if _RUN.fullmatch(run_id) and run_id.startswith(IMPORTED) and (imported := self._imported(run_id)) is not None:
            return imported
        if not _RUN.fullmatch(run_id) or not file.is_file():
            raise unknown_run(run_id)
        try:
            return _run_info(run_id, file)
        except DamagedFileError as error:
            self._report(file, error)
            raise Refused(410, str(error)) from None

    def has_run(self, run_id: str) -> bool:
        """Whether a run is recorded, even if its description is damaged."""
        return run_id in self._runs

    def runs(self) -> list[RunInfo]:
        """Return all runs, newest first, without user metadata."""
        return sorted(self._runs.values(), key=lambda info: info.created, reverse=True)

    def _imported(self, run_id: str) -> RunInfo | None:
        for folder in self.run_folder(run_id).glob("weights.*"):
            checkpoint = manifest.read(folder)
            rank = json.loads((folder / LORA_FILE).read_text())["r"] if checkpoint["lora"] else None
            return RunInfo(run_id, self._base_model, bool(checkpoint["lora"]), rank, self._seed, folder.stat().st_mtime)
        return None

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def folder_of(self, address: Address) -> Path:
        """Return the folder of a checkpoint, even if the checkpoint does not exist."""
        return self.run_folder(address.run_id) / address.folder_name

    def find(self, address: Address) -> CheckpointRecord:
        """Return the record of a checkpoint. Raises CheckpointError: it was never saved, was deleted or has expired."""
        try:
            record = _read(address, self._record_file(address))
        except FileNotFoundError:
            if address.run_id.startswith(IMPORTED) and self.folder_of(address).is_dir():
                return CheckpointRecord(address, self.folder_of(address).stat().st_mtime, 0)
            raise not_found(address) from None
        except DamagedFileError as error:
            self._report(self._record_file(address), error)
            raise
        if self._has_expired(record):
            self.delete(address)
            raise CheckpointError(f"checkpoint: {address.path} has expired")
        return record

    def _has_expired(self, record: CheckpointRecord) -> bool:
        return record.expires is not None and record.expires <= self.clock.now()

    def owner_of(self, address: Address) -> str | None:
        """Return the owner of a checkpoint; None also if its run is unknown or damaged."""
        try:
            return self.run(address.run_id).owner
        except Refused:
            return None

    def is_public(self, address: Address) -> bool:
        """Whether a checkpoint is published; False also if it is unknown or its record is damaged."""
        try:
            return _read(address, self._record_file(address)).public
        except (FileNotFoundError, DamagedFileError):
            return False

    def add(
        self, address: Address, ttl_s: float | None, user_metadata: dict[str, str] | None, request: int | None = None
    ) -> CheckpointRecord:
        """Record a checkpoint that has just been saved."""
        size = sum(path.stat().st_size for path in self.folder_of(address).rglob("*") if path.is_file())
        expires = _expiry(self.clock.now(), ttl_s)
        record = CheckpointRecord(address, time.time(), size, expires, False, user_metadata or None, request)
        self._write(record)
        return record

    def was_saved_by(self, address: Address, request: int) -> bool:
        """Whether request number ``request`` saved the checkpoint.

        The record is written last, so without a record the save is incomplete, and its files are deleted.
        """
        try:
            return _read(address, self._record_file(address)).request == request
        except (FileNotFoundError, DamagedFileError):
            self.delete(address)
            return False

    def saved_at(self, address: Address) -> float | None:
        """Return when a checkpoint was saved; None: it does not exist."""
        record = self._checkpoints.get(address.run_id, {}).get(address)
        return None if record is None else record.time

    def publish(self, address: Address, public: bool) -> None:
        self._write(replace(self.find(address), public=public))

    def set_ttl(self, address: Address, ttl_s: float | None) -> None:
        self._write(replace(self.find(address), expires=_expiry(self.clock.now(), ttl_s)))

    def delete(self, address: Address) -> None:
        self._record_file(address).unlink(missing_ok=True)
        self._checkpoints[address.run_id].pop(address, None)
        shutil.rmtree(self.folder_of(address), ignore_errors=True)

    def of_run(self, run_id: str) -> list[CheckpointRecord]:
        """Return the checkpoints of a run, oldest first and without user metadata, and delete the expired ones."""
        records = list(self._checkpoints.get(run_id, {}).values())
        for expired in filter(self._has_expired, records):
            self.delete(expired.address)
        return sorted((record for record in records if not self._has_expired(record)), key=lambda record: record.time)

    def delete_expired(self) -> None:
        """Delete the checkpoints that have expired."""
        for run_id in list(self._checkpoints):
            self.of_run(run_id)

    def with_metadata(self, records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
        """Return the records with their user metadata, read from disk, without those that were deleted or are damaged now."""
        whole = []
        for record in records:
            with contextlib.suppress(CheckpointError):
                whole.append(self.find(record.address))
        return whole

    def of_runs(self, runs: Iterable[RunInfo]) -> list[CheckpointRecord]:
        """Return the checkpoints of the runs, newest first and without user metadata."""
        checkpoints = [record for info in runs for record in self.of_run(info.run_id)]
        return sorted(checkpoints, key=lambda record: record.time, reverse=True)

    def _record_file(self, address: Address) -> Path:
        return self.run_folder(address.run_id) / _RECORDS / f"{address.folder_name}.json"

    def _write(self, record: CheckpointRecord) -> None:
        fields = {key: value for key, value in asdict(record).items() if key != "address"}
        files.write_text(self._record_file(record.address), json.dumps(fields, indent=2) + "\n")
        self._checkpoints[record.address.run_id][record.address] = replace(record, user_metadata=None)


def unknown_run(run_id: str) -> Refused:
    return Refused(404, f"unknown training run {run_id!r}")


def not_found(address: Address) -> CheckpointError:
    return CheckpointError(f"checkpoint: {address.path} not found; it was never saved, or was deleted")


def _addresses(run_id: str, records: Path) -> list[Address]:
    """Return the addresses of the checkpoints that have a record in a folder."""
    addresses = []
    for kind in TYPES:
        for file in records.glob(f"{kind}.*.json"):
            # Another program may have added a file.
            with contextlib.suppress(CheckpointError):
                addresses.append(Address(run_id, kind, file.stem.removeprefix(f"{kind}.")))
    return addresses


# Types of the fields of a run and of the record of a checkpoint.
_RUN_TYPES: dict[str, tuple[type, ...]] = {
    "run_id": (str,),
    "base_model": (str,),
    "is_lora": (bool,),
    "lora_rank": (int, type(None)),
    "seed": (int,),
    "created": (int, float),
    "user_metadata": (dict, type(None)),
    "owner": (str, type(None)),
}
_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "time": (int, float),
    "size_bytes": (int,),
    "expires": (int, float, type(None)),
    "public": (bool,),
    "user_metadata": (dict, type(None)),
    "request": (int, type(None)),
}


def _fields(file: Path, types: dict[str, tuple[type, ...]], what: str) -> JsonObject:
    """Read the fields of an object from its file.

    Raises:
        FileNotFoundError: the file does not exist.
        DamagedFileError: the file is not JSON, or a field has another type.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        wrong = [name for name, value in fields.items() if not isinstance(value, types.get(name, ()))]
        reason = f"invalid field {wrong[0]!r}" if wrong else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = str(error)
    if reason is not None:
        raise DamagedFileError(f"{what}: {file} is damaged ({reason}); restore the file from a backup, or delete its object")
    result: JsonObject = fields
    return result


def _run_info(run_id: str, file: Path) -> RunInfo:
    what = f"training run {run_id}"
    try:
        info = RunInfo(**_fields(file, _RUN_TYPES, what))
    except TypeError as error:
        raise DamagedFileError(f"{what}: {file} is damaged ({error}); restore the file from a backup") from None
    if info.run_id != run_id:
        raise DamagedFileError(f"{what}: {file} describes {info.run_id!r}; restore the file from a backup")
    return info


def _read(address: Address, file: Path) -> CheckpointRecord:
    what = f"checkpoint {address.path}"
    try:
        return CheckpointRecord(address, **_fields(file, _RECORD_TYPES, what))
    except TypeError as error:
        raise DamagedFileError(f"{what}: {file} is damaged ({error}); restore the file from a backup") from None


def damage_of(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run's folder that describe the run and its checkpoints, each with its damage, "" if it is whole."""
    run_id = folder.name.replace(".", ":")
    readers: dict[Path, Callable[[], object]] = {folder / _RUN_FILE: lambda: _run_info(run_id, folder / _RUN_FILE)}
    for address in _addresses(run_id, folder / _RECORDS):
        file = folder / _RECORDS / f"{address.folder_name}.json"
        readers[file] = functools.partial(_read, address, file)
    for file, reader in readers.items():
        try:
            reader()
        except DamagedFileError as error:
            yield file, str(error)
        except FileNotFoundError:
            yield file, f"training run {run_id}: {file} is missing; restore the file from a backup"
        else:
            yield file, ""


def check_ttl(ttl_s: float | None) -> None:
    """Validate a time to live. Raises CheckpointError: it is out of range."""
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise CheckpointError(f"ttl_seconds: expected above 0 and at most {MAX_TTL_S:.0f}, got {ttl_s}")


def _expiry(now: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now + ttl_s


class Downloads:
    """Issues and verifies signed download tokens. The secret is random per process, so a restart invalidates all tokens.

    A token is for one save of a checkpoint, and for the key that requested it. It becomes invalid when a checkpoint is saved
    again under the same name, and when its key may no longer read the checkpoint.
    """

    def __init__(self, catalog: Catalog, keys: KeyRing) -> None:
        self._catalog = catalog
        self._keys = keys
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> float:
        """Return the time of :class:`Clock` until which a new token is valid."""
        return float(int(self._catalog.clock.now() + VALID_S))

    def files(self, address: Address) -> list[str]:
        """Return the files of a checkpoint, relative to its folder."""
        folder = self._catalog.folder_of(address)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def sign(self, address: Address, file: str, expires: float) -> str:
        """Return a token for one file of a checkpoint, for the key of the current request.

        It contains the address of the checkpoint, the version of the save, the name of the key and the time of expiry, and a
        signature over these and the name of the file.
        """
        version, reader = self._version(address), caller_name() or ""
        claim = f"{address.run_id}~{address.kind}~{address.name}~{version}~{reader}~{int(expires)}"
        return f"{claim}~{self._signature(claim, file)}"

    def open(self, token: str, file: str) -> Path:
        """Return the path of the file that a token is for.

        Raises:
            Refused: 403, the signature is wrong, the token has expired, the checkpoint was saved again, or the key may not read
                it; 404, the file was deleted.
        """
        claim, _, signature = token.rpartition("~")
        if not hmac.compare_digest(signature.encode(), self._signature(claim, file).encode()):
            raise Refused(403, "download: this URL was not issued by this server")
        run_id, kind, name, version, reader, expires = claim.split("~")
        if float(expires) < self._catalog.clock.now():
            raise Refused(403, "download: this URL has expired; request a new one")
        address = Address(run_id, kind, name)
        if not self._catalog.is_public(address) and not self._is_owner(reader, address):
            raise Refused(403, "download: the checkpoint is not readable for the key of this URL; request a new one")
        if version != self._version(address):
            raise Refused(403, "download: the checkpoint was deleted or saved again after this URL was issued; request another")
        path = self._catalog.folder_of(address) / file
        if not path.is_file():
            raise Refused(404, f"download: {file} was deleted")
        return path

    def _is_owner(self, reader: str, address: Address) -> bool:
        """Whether the key ``reader`` exists and may use the checkpoint as its owner does. True for a server without keys."""
        if not self._keys.keys:
            return True
        return self._keys.named(reader) is not None and self._keys.may_use(reader, self._catalog.owner_of(address))

    def _version(self, address: Address) -> str:
        """Return a digest of the checkpoint's manifest and of the time when it was saved."""
        digest = hashlib.sha256()
        with contextlib.suppress(OSError):
            digest.update((self._catalog.folder_of(address) / manifest.NAME).read_bytes())
        digest.update(str(self._catalog.saved_at(address)).encode())
        return digest.hexdigest()[:32]

    def _signature(self, claim: str, file: str) -> str:
        # No claim contains a line break. With another "~", a part of the claim could be declared a part of the file's name.
        return hmac.new(self._secret, f"{claim}\n{file}".encode(), hashlib.sha256).hexdigest()
