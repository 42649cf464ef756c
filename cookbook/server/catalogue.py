"""Saved weights, and what is known of the runs they belong to: ``tinker://<run>/<kind>/<name>`` to folders and back.

Everything is in the folders themselves, so a server that starts again finds what an earlier one saved.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cookbook import atomic
from cookbook.errors import CheckpointError
from cookbook.server.errors import Refused

SCHEME = "tinker://"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
MAX_TTL_S = 100 * 365 * 86400.0  # a century; calendars end
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RUN_FILE = "run.json"
_FACTS = "facts"  # a folder of its own: a checkpoint may be called x.json


@dataclass(frozen=True)
class Address:
    """Where saved weights are: a run, a kind of ``TYPES`` and a name."""

    run_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """Raises CheckpointError unless every part is what it should be: the parts become names of folders."""
        if not _RUN.fullmatch(self.run_id) or self.kind not in TYPES or not _NAME.fullmatch(self.name):
            raise CheckpointError(
                f"checkpoint: expected {SCHEME}<run>/<weights|sampler_weights>/<name>, the name of letters, digits, '.', '_' "
                f"and '-', got {self.path!r}"
            )

    @classmethod
    def parse(cls, path: str) -> Address:
        """Raises CheckpointError."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3:
            raise CheckpointError(f"checkpoint: expected {SCHEME}<run>/<kind>/<name>, got {path!r}")
        return cls(*parts)

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    @property
    def folder_name(self) -> str:
        """Names of one run's folder, where kinds may repeat each other's names."""
        return f"{self.kind}.{self.name}"


@dataclass(frozen=True)
class RunFacts:
    """What is known of a training run, besides its weights."""

    run_id: str
    base_model: str
    is_lora: bool
    lora_rank: int | None
    seed: int
    created: float
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Saved:
    """One checkpoint. Times are seconds since 1970; ``request`` is the number of the run's request that made it."""

    address: Address
    time: float
    size_bytes: int
    expires: float | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = field(default=None)
    request: int | None = None


class Catalogue:
    """The checkpoints and the run facts below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        atomic.make_folders(folder)

    # ---- runs ----------------------------------------------------------------------------------------------------

    def knows(self, run_id: str) -> bool:
        return (self.run_folder(run_id) / _RUN_FILE).is_file()

    def run_folder(self, run_id: str) -> Path:
        return self.folder / run_id.replace(":", ".")

    def add_run(self, facts: RunFacts) -> None:
        folder = self.run_folder(facts.run_id)
        atomic.make_folders(folder / _FACTS)
        atomic.write_text(folder / _RUN_FILE, json.dumps(asdict(facts), indent=2) + "\n")

    def run(self, run_id: str) -> RunFacts:
        """Raises Refused, 404."""
        file = self.run_folder(run_id) / _RUN_FILE
        if not _RUN.fullmatch(run_id) or not file.is_file():
            raise Refused(404, f"there is no training run {run_id!r}")
        return RunFacts(**json.loads(file.read_text()))

    def runs(self) -> list[RunFacts]:
        """All of them, the newest first."""
        found = [RunFacts(**json.loads(file.read_text())) for file in self.folder.glob(f"*/{_RUN_FILE}")]
        return sorted(found, key=lambda facts: facts.created, reverse=True)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def place(self, address: Address) -> Path:
        """Where its files are, or would be."""
        return self.run_folder(address.run_id) / address.folder_name

    def find(self, address: Address) -> Saved:
        """Raises CheckpointError: it was never saved, is deleted or has expired."""
        try:
            saved = _read(address, self._facts(address))
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint: there is no {address.path}; it was never saved, or is deleted") from None
        if saved.expires is not None and saved.expires <= time.time():
            self.delete(address)
            raise CheckpointError(f"checkpoint: {address.path} has expired")
        return saved

    def add(
        self, address: Address, ttl_s: float | None, user_metadata: Mapping[str, str] | None, request: int | None = None
    ) -> Saved:
        """Notes what has just been saved."""
        size = sum(path.stat().st_size for path in self.place(address).rglob("*") if path.is_file())
        now = time.time()
        metadata = dict(user_metadata) if user_metadata else None
        saved = Saved(address, now, size, _expiry(now, ttl_s), user_metadata=metadata, request=request)
        self._write(saved)
        return saved

    def was_saved_by(self, address: Address, request: int) -> bool:
        """Whether that request has made the checkpoint, in an earlier process. What a killed one left half done is deleted."""
        try:
            return _read(address, self._facts(address)).request == request
        except FileNotFoundError:
            shutil.rmtree(self.place(address), ignore_errors=True)
            return False

    def publish(self, address: Address, public: bool) -> None:
        self._write(replace(self.find(address), public=public))

    def set_ttl(self, address: Address, ttl_s: float | None) -> None:
        self._write(replace(self.find(address), expires=_expiry(time.time(), ttl_s)))

    def delete(self, address: Address) -> None:
        self._facts(address).unlink(missing_ok=True)
        shutil.rmtree(self.place(address), ignore_errors=True)

    def of_run(self, run_id: str) -> list[Saved]:
        """The checkpoints of a run, oldest first. Those that have expired are deleted."""
        addresses = [
            Address(run_id, kind, file.stem.removeprefix(f"{kind}."))
            for kind in TYPES
            for file in (self.run_folder(run_id) / _FACTS).glob(f"{kind}.*.json")
        ]
        return sorted(self._alive(addresses), key=lambda saved: saved.time)

    def all(self) -> list[Saved]:
        """Every checkpoint, the newest first."""
        found = [saved for facts in self.runs() for saved in self.of_run(facts.run_id)]
        return sorted(found, key=lambda saved: saved.time, reverse=True)

    def _alive(self, addresses: list[Address]) -> Iterator[Saved]:
        for address in addresses:
            try:
                yield self.find(address)
            except CheckpointError:
                continue  # expired, or deleted by a request of this moment

    def _facts(self, address: Address) -> Path:
        return self.run_folder(address.run_id) / _FACTS / f"{address.folder_name}.json"

    def _write(self, saved: Saved) -> None:
        facts: dict[str, Any] = asdict(saved)
        del facts["address"]
        atomic.write_text(self._facts(saved.address), json.dumps(facts, indent=2) + "\n")


def _read(address: Address, file: Path) -> Saved:
    return Saved(address, **json.loads(file.read_text()))


def check_ttl(ttl_s: float | None) -> None:
    """Raises CheckpointError: nothing can live for so long, or so short."""
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise CheckpointError(f"ttl_seconds: expected above 0 and at most {MAX_TTL_S:.0f}, got {ttl_s}")


def _expiry(now: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now + ttl_s
