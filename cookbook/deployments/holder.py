"""What a serving replica knows of the weights it serves: a copy in host memory, whose digest it can be asked for.

The copy is what a delta applies to. Reading and applying go on in a thread while the replica serves; only what it does with the
result is for it to pause for. Adapters lie on those weights, several at a time and by name; of them the digest is kept. Runs
inside vLLM's workers too, so it needs nothing but torch, numpy, safetensors and zstandard.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

from cookbook.checkpoints import delta, manifest, weights
from cookbook.checkpoints.weights import Weights
from cookbook.errors import CheckpointError, CookbookError

IDLE, READING, READY, FAILED = "idle", "reading", "ready", "failed"


class WeightHolder:
    """Weights that are served, and those that are to be served next.

    ``incarnation`` is new whenever the replica starts: what was true of an earlier one is not of this.
    """

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self._served: Weights | None = None
        self._adapters: dict[str, str] = {}  # name -> digest
        self._next: Weights | None = None
        self._state = IDLE
        self._error = ""
        self._thread: threading.Thread | None = None

    def status(self) -> dict[str, Any]:
        """``digest``: of the weights that are served, None before the first were taken; ``state``: of those read for later."""
        return {
            "incarnation": self.incarnation,
            "digest": self._served.digest if self._served is not None else None,
            "adapters": dict(self._adapters),
            "state": self._state,
            "error": self._error,
        }

    def prepare(self, folder: Path) -> None:
        """Begins to read a base or an adapter, or to apply a delta. :meth:`status` tells when it is ready, or has failed.

        Raises:
            CheckpointError: an earlier one is still being read.
        """
        if self._state == READING:
            raise CheckpointError(f"{folder}: an earlier checkpoint is still being read; wait for it")
        self._state, self._error, self._next = READING, "", None
        self._thread = threading.Thread(target=self._prepare, args=(folder,), daemon=True)
        self._thread.start()

    def _prepare(self, folder: Path) -> None:
        try:
            self._next = _read(folder, self._served)
        except (CookbookError, OSError, MemoryError) as error:
            self._state, self._error = FAILED, f"{error}"
        except BaseException as error:
            self._state, self._error = FAILED, f"{type(error).__name__}: {error}"  # or it would be "reading" for ever
            raise
        else:
            self._state = READY

    @property
    def prepared(self) -> Weights:
        """What was prepared.

        Raises:
            CheckpointError: nothing is ready.
        """
        if self._next is None:
            raise CheckpointError(f"weights: none are ready to be served (state {self._state}); prepare them first")
        return self._next

    def begin(self) -> Weights:
        """The weights that were prepared. Until :meth:`finish` nobody knows what is served, and no adapter counts any more.

        Raises:
            CheckpointError: none are ready.
        """
        new = self.prepared
        self._served = None
        self._adapters.clear()
        return new

    def finish(self) -> None:
        """What :meth:`begin` gave is served now."""
        self._served, self._next, self._state = self._next, None, IDLE

    def add_adapter(self, name: str) -> None:
        """What was prepared is served as the adapter ``name`` now.

        Raises:
            CheckpointError: nothing is ready.
        """
        self._adapters[name] = self.prepared.digest
        self._next, self._state = None, IDLE

    def drop_adapter(self, name: str) -> None:
        """It is served no more."""
        self._adapters.pop(name, None)


def _read(folder: Path, served: Weights | None) -> Weights:
    """Every file and the result are verified, so that a flipped bit is an error."""
    facts = manifest.verify(folder)
    if facts["kind"] == "delta":
        if served is None:
            raise CheckpointError(f"{folder}: is a delta, and there are no weights that it could apply to; send a base")
        path = folder / delta.FILE
        found = delta.apply(delta.from_bytes(path.read_bytes(), str(path)), served)
    else:
        found = weights.read(folder, weights.ADAPTER_FILES if facts["lora"] else weights.FILES)
    if found.digest != facts.get("weights"):
        raise CheckpointError(f"{folder}: holds other weights than its manifest says; send another checkpoint")
    return found
