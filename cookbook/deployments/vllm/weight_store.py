"""Weights of a serving replica: a copy in host memory, with its digest.

Deltas are applied to this copy. A thread reads checkpoints and applies deltas while the replica serves; the replica pauses only
to load the result. A replica serves several adapters at a time, by name; the store keeps their digests. vLLM's workers import
this module in their own environment, so it may depend on torch, numpy, safetensors and zstandard only.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import TypedDict

from cookbook.checkpoints import delta, manifest, tensor_digests
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.errors import CheckpointError, CookbookError

IDLE, READING, READY, FAILED = "idle", "reading", "ready", "failed"


class StoreStatus(TypedDict):
    """Status of a :class:`WeightStore`, as JSON.

    Attributes:
        digest: digest of the weights that are served; None before the first load.
        adapters: digests of the adapters that are served, by name.
        state: state of the preparation of the next weights, with its ``error`` if that failed.
    """

    incarnation: str
    digest: str | None
    adapters: dict[str, str]
    state: str
    error: str


class WeightStore:
    """The weights that are served, and the weights that are prepared to be served next.

    ``incarnation`` is a random id, so it changes whenever the replica restarts.
    """

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self._serving: Weights | None = None
        # Digest by name.
        self._adapters: dict[str, str] = {}
        self._prepared: Weights | None = None
        self._state = IDLE
        self._error = ""
        self._thread: threading.Thread | None = None

    def status(self) -> StoreStatus:
        return {
            "incarnation": self.incarnation,
            "digest": self._serving.digest if self._serving is not None else None,
            "adapters": dict(self._adapters),
            "state": self._state,
            "error": self._error,
        }

    def prepare(self, folder: Path) -> None:
        """Start to read a base or an adapter, or to apply a delta. :meth:`status` reports when the weights are ready.

        Raises:
            CheckpointError: an earlier checkpoint is still being read.
        """
        if self._state == READING:
            raise CheckpointError(f"{folder}: an earlier checkpoint is still being read; wait for it")
        self._state, self._error, self._prepared = READING, "", None
        self._thread = threading.Thread(target=self._prepare, args=(folder,), daemon=True)
        self._thread.start()

    def _prepare(self, folder: Path) -> None:
        try:
            self._prepared = _read(folder, self._serving)
        except (CookbookError, OSError, MemoryError) as error:
            self._state, self._error = FAILED, f"{error}"
        # Catch unexpected errors too: otherwise the replica would report "reading" indefinitely.
        except BaseException as error:
            self._state, self._error = FAILED, f"{type(error).__name__}: {error}"
            raise
        else:
            self._state = READY

    @property
    def prepared(self) -> Weights:
        """The prepared weights.

        Raises:
            CheckpointError: no weights are ready.
        """
        if self._prepared is None:
            raise CheckpointError(
                f"weights: no weights are ready to be served (state {self._state}); prepare a checkpoint first"
            )
        return self._prepared

    def begin(self) -> Weights:
        """Return the prepared weights for loading. All adapters are dropped, and the digest is unknown until :meth:`finish`.

        Raises:
            CheckpointError: no weights are ready.
        """
        new = self.prepared
        self._serving = None
        self._adapters.clear()
        return new

    def finish(self) -> None:
        """Record that the weights of :meth:`begin` are now served."""
        self._serving, self._prepared, self._state = self._prepared, None, IDLE

    def add_adapter(self, name: str) -> None:
        """Record that the prepared weights are now served as the adapter ``name``.

        Raises:
            CheckpointError: no weights are ready.
        """
        self._adapters[name] = self.prepared.digest
        self._prepared, self._state = None, IDLE

    def drop_adapter(self, name: str) -> None:
        """Record that an adapter is no longer served."""
        self._adapters.pop(name, None)


def _read(folder: Path, served: Weights | None) -> Weights:
    """Read weights. The digests of every file and of the result are verified, so that corrupted weights are never served."""
    facts = manifest.verify(folder)
    if facts["kind"] == "delta":
        if served is None:
            raise CheckpointError(f"{folder}: is a delta, but this replica has no weights yet; send a base first")
        path = folder / delta.FILE
        result = delta.apply(delta.from_bytes(path.read_bytes(), str(path)), served)
    else:
        result = tensor_digests.read(folder, tensor_digests.ADAPTER_FILES if facts["lora"] else tensor_digests.FILES)
    if result.digest != facts.get("weights"):
        raise CheckpointError(f"{folder}: holds other weights than its manifest says; send another checkpoint")
    return result
