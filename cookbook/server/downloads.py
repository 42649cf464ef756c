"""Addresses that let anybody who has them fetch one file, for a while."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path

from cookbook.server.catalogue import Address, Catalogue
from cookbook.server.errors import Refused

VALID_S = 3600.0


class Downloads:
    """Signs and checks them. The secret lives as long as the server, and so do the addresses."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._secret = secrets.token_bytes(32)

    def expiry(self) -> float:
        return float(int(time.time() + VALID_S))

    def files(self, address: Address) -> list[str]:
        """The files of a checkpoint, relative to its folder."""
        place = self._catalogue.place(address)
        return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())

    def sign(self, address: Address, file: str, expires: float) -> str:
        """A token for one file: what it is for, until when, and the proof that we said so."""
        claim = f"{address.run_id}~{address.kind}~{address.name}~{int(expires)}"
        return f"{claim}~{self._proof(claim, file)}"

    def open(self, token: str, file: str) -> Path:
        """The file a token stands for.

        Raises:
            Refused: 403, we did not sign it, or it has expired; 404, the file is gone.
        """
        claim, _, proof = token.rpartition("~")
        if not hmac.compare_digest(proof.encode(), self._proof(claim, file).encode()):
            raise Refused(403, "download: this address was not given by this server")
        *parts, expires = claim.split("~")
        if float(expires) < time.time():
            raise Refused(403, "download: this address has expired; ask for a new one")
        path = self._catalogue.place(Address(*parts)) / file
        if not path.is_file():
            raise Refused(404, f"download: {file} is no longer there")
        return path

    def _proof(self, claim: str, file: str) -> str:
        return hmac.new(self._secret, f"{claim}~{file}".encode(), hashlib.sha256).hexdigest()
