"""Catalog of the checkpoints and runs on disk, their addresses ``tinker://<run>/<kind>/<name>``, and signed download URLs.

All of it is read from disk, so a restarted server finds the checkpoints of earlier processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cookbook.checkpoints import manifest
from cookbook.engine.model import LORA_FILE
from cookbook.errors import CheckpointError
from cookbook.server.wire.bodies import MAX_TTL_S, Refused
from cookbook.utils import files

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
    """Description of a checkpoint. Times are seconds since 1970; ``request`` is the number of the request that saved it."""

    address: Address
    time: float
    size_bytes: int
    expires: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    request: int | None = None


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

    # ---- runs ----------------------------------------------------------------------------------------------------

    def run_folder(self, run_id: str) -> Path:
        return self.folder / run_id.replace(":", ".")

    def add_run(self, info: RunInfo) -> RunInfo:
        """Record a run. Returns the description that an earlier process recorded if there is one, else ``info``."""
        folder = self.run_folder(info.run_id)
        if (folder / _RUN_FILE).is_file():
            return self.run(info.run_id)
        files.make_folders(folder / _RECORDS)
        files.write_text(folder / _RUN_FILE, json.dumps(asdict(info), indent=2) + "\n")
        return info

    def run(self, run_id: str) -> RunInfo:
        """Return the description of a run. Raises Refused (404): the run is unknown."""
        file = self.run_folder(run_id) / _RUN_FILE
        if _RUN.fullmatch(run_id) and run_id.startswith(IMPORTED) and (imported := self._imported(run_id)) is not None:
            return imported
        if not _RUN.fullmatch(run_id) or not file.is_file():
            raise unknown_run(run_id)
        return RunInfo(**json.loads(file.read_text()))

    def runs(self) -> list[RunInfo]:
        """Return all runs, newest first."""
        runs = [RunInfo(**json.loads(file.read_text())) for file in self.folder.glob(f"*/{_RUN_FILE}")]
        return sorted(runs, key=lambda info: info.created, reverse=True)

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
        if record.expires is not None and record.expires <= time.time():
            self.delete(address)
            raise CheckpointError(f"checkpoint: {address.path} has expired")
        return record

    def owner_of(self, address: Address) -> str | None:
        """Return the owner of a checkpoint; None also if its run is unknown."""
        try:
            return self.run(address.run_id).owner
        except Refused:
            return None

    def is_public(self, address: Address) -> bool:
        """Whether a checkpoint is published; False also if it is unknown."""
        try:
            return _read(address, self._record_file(address)).public
        except FileNotFoundError:
            return False

    def add(
        self, address: Address, ttl_s: float | None, user_metadata: dict[str, str] | None, request: int | None = None
    ) -> CheckpointRecord:
        """Record a checkpoint that has just been saved."""
        size = sum(path.stat().st_size for path in self.folder_of(address).rglob("*") if path.is_file())
        now = time.time()
        record = CheckpointRecord(address, now, size, _expiry(now, ttl_s), False, user_metadata or None, request)
        self._write(record)
        return record

    def was_saved_by(self, address: Address, request: int) -> bool:
        """Whether request number ``request`` saved the checkpoint.

        The record is written last, so without a record the save is incomplete, and its files are deleted.
        """
        try:
            return _read(address, self._record_file(address)).request == request
        except FileNotFoundError:
            shutil.rmtree(self.folder_of(address), ignore_errors=True)
            return False

    def publish(self, address: Address, public: bool) -> None:
        self._write(replace(self.find(address), public=public))

    def set_ttl(self, address: Address, ttl_s: float | None) -> None:
        self._write(replace(self.find(address), expires=_expiry(time.time(), ttl_s)))

    def delete(self, address: Address) -> None:
        self._record_file(address).unlink(missing_ok=True)
        shutil.rmtree(self.folder_of(address), ignore_errors=True)

    def of_run(self, run_id: str) -> list[CheckpointRecord]:
        """Return the checkpoints of a run, oldest first, and delete the expired ones."""
        addresses = [
            Address(run_id, kind, file.stem.removeprefix(f"{kind}."))
            for kind in TYPES
            for file in (self.run_folder(run_id) / _RECORDS).glob(f"{kind}.*.json")
        ]
        checkpoints = []
        for address in addresses:
            # The checkpoint may have expired, or another request may have just deleted it.
            with contextlib.suppress(CheckpointError):
                checkpoints.append(self.find(address))
        return sorted(checkpoints, key=lambda record: record.time)

    def of_runs(self, runs: Iterable[RunInfo]) -> list[CheckpointRecord]:
        """Return the checkpoints of the runs, newest first."""
        checkpoints = [record for info in runs for record in self.of_run(info.run_id)]
        return sorted(checkpoints, key=lambda record: record.time, reverse=True)

    def _record_file(self, address: Address) -> Path:
        return self.run_folder(address.run_id) / _RECORDS / f"{address.folder_name}.json"

    def _write(self, record: CheckpointRecord) -> None:
        fields = {key: value for key, value in asdict(record).items() if key != "address"}
        files.write_text(self._record_file(record.address), json.dumps(fields, indent=2) + "\n")


def unknown_run(run_id: str) -> Refused:
    return Refused(404, f"unknown training run {run_id!r}")


def not_found(address: Address) -> CheckpointError:
    return CheckpointError(f"checkpoint: {address.path} not found; it was never saved, or was deleted")


def _read(address: Address, file: Path) -> CheckpointRecord:
    return CheckpointRecord(address, **json.loads(file.read_text()))


def check_ttl(ttl_s: float | None) -> None:
    """Validate a time to live. Raises CheckpointError: it is out of range."""
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise CheckpointError(f"ttl_seconds: expected above 0 and at most {MAX_TTL_S:.0f}, got {ttl_s}")


def _expiry(now: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now + ttl_s


class Downloads:
    """Issues and verifies signed download tokens. The secret is random per process, so a restart invalidates all tokens."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> float:
        return float(int(time.time() + VALID_S))

    def files(self, address: Address) -> list[str]:
        """Return the files of a checkpoint, relative to its folder."""
        folder = self._catalog.folder_of(address)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def sign(self, address: Address, file: str, expires: float) -> str:
        """Return a token for one file: its checkpoint, the expiry time, and a signature over both and the name of the file."""
        claim = f"{address.run_id}~{address.kind}~{address.name}~{int(expires)}"
        return f"{claim}~{self._signature(claim, file)}"

    def open(self, token: str, file: str) -> Path:
        """Return the path of the file that a token is for.

        Raises:
            Refused: 403, the signature is wrong, or the token has expired; 404, the file was deleted.
        """
        claim, _, signature = token.rpartition("~")
        if not hmac.compare_digest(signature.encode(), self._signature(claim, file).encode()):
            raise Refused(403, "download: this URL was not issued by this server")
        *parts, expires = claim.split("~")
        if float(expires) < time.time():
            raise Refused(403, "download: this URL has expired; request a new one")
        path = self._catalog.folder_of(Address(*parts)) / file
        if not path.is_file():
            raise Refused(404, f"download: {file} was deleted")
        return path

    def _signature(self, claim: str, file: str) -> str:
        # No claim contains a line break. With another "~", a part of the claim could be declared a part of the file's name.
        return hmac.new(self._secret, f"{claim}\n{file}".encode(), hashlib.sha256).hexdigest()
