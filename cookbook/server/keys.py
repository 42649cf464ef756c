"""API keys: their file, their names and quotas, and the key of the current request.

Objects belong to the name of the key that created them, so a key can be replaced by another one of the same name. Only names
and digests of keys are kept, in memory and on disk.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from cookbook.errors import ConfigError

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):\s+(\S+)(.*)")
ADMIN = "admin"


@dataclass(frozen=True)
class Quota:
    """Limits of one name, for all its sessions together. None: no limit.

    Attributes:
        max_runs: training runs in memory.
        max_tokens: tokens of unfinished requests, trained and sampled.
        max_disk_gb: GB of checkpoints and logs on disk.
    """

    max_runs: float | None = None
    max_tokens: float | None = None
    max_disk_gb: float | None = None


QUOTAS = tuple(Quota.__dataclass_fields__)


@dataclass(frozen=True)
class ApiKey:
    """An API key without its secret.

    Attributes:
        name: owner of the objects that requests with this key create.
        digest: SHA-256 of the secret.
        is_admin: the key sees and changes the objects of all keys.
    """

    name: str
    digest: bytes
    is_admin: bool = False
    quota: Quota = Quota()


# Key of the current request. None: the server itself, a server without keys, or a route without authentication. None is not
# restricted, so that recovery and tasks of the server can use every object.
CALLER: ContextVar[ApiKey | None] = ContextVar("CALLER", default=None)


def caller_name() -> str | None:
    """Return the owner of what the current request creates; None: the server has no keys."""
    key = CALLER.get()
    return None if key is None else key.name


class KeyRing:
    """The API keys of a server.

    Args:
        file: file of keys; None: no file.
        secrets: further keys, without names.

    Raises:
        ConfigError: the file cannot be read, has an invalid line, or contains no key.
    """

    def __init__(self, file: Path | None = None, secrets: Iterable[str] = ()) -> None:
        self._file = file
        self._unnamed = [_unnamed(secret) for secret in secrets]
        self._stamp: tuple[int, ...] | None = None
        self.keys: list[ApiKey] = list(self._unnamed)
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it has changed. After an error the former keys stay valid, until the file changes again.

        Raises:
            ConfigError: the file cannot be read, has an invalid line, or contains no key.
        """
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if self._stamp == ():
                return
            self._stamp = ()
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"server.keys_file: cannot read {str(self._file)!r}: {reason}; pass a readable file") from None
        keys = list(_keys(text, self._file))
        if not keys:
            raise ConfigError(f"server.keys_file: {self._file} contains no key; write one key per line")
        self.keys = _checked([*self._unnamed, *keys], self._file)

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key with this secret; None: the secret is unknown.

        Every key is compared, in constant time, so that the response time reveals nothing about the keys.
        """
        digest = hashlib.sha256(secret).digest()
        matches = [key for key in self.keys if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches else None

    def named(self, name: str | None) -> ApiKey | None:
        """Return a key with this name; None: no key has this name."""
        return next((key for key in self.keys if key.name == name), None)

    def may_use(self, name: str | None, owner: str | None) -> bool:
        """Whether the key ``name`` may use an object of ``owner``.

        ``owner`` None: the object was created without a key. It belongs to the only key, and to admin keys if there are several
        names. A server without keys restricts nothing.
        """
        names = {key.name for key in self.keys}
        if not names or name == owner:
            return True
        key = self.named(name)
        return key is not None and (key.is_admin or (owner is None and len(names) == 1))


def _unnamed(secret: str) -> ApiKey:
    digest = hashlib.sha256(secret.encode()).digest()
    return ApiKey(f"key-{digest.hex()[:12]}", digest)


def _keys(text: str, file: Path) -> Iterator[ApiKey]:
    """Yield the keys of a file. Errors name the line and do not repeat it, because it contains a secret."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        where, words = f"server.keys_file: {file}:{number}", line.split()
        if len(words) == 1:
            yield _unnamed(words[0])
        elif (match := _NAMED.fullmatch(line.strip())) is not None:
            name, secret, options = match.groups()
            yield _with_options(replace(_unnamed(secret), name=name), options.split(), where)
        else:
            raise ConfigError(f"{where}: invalid line; write KEY, or NAME: KEY with options such as {ADMIN} or {QUOTAS[0]}=4")


def _with_options(key: ApiKey, options: Iterable[str], where: str) -> ApiKey:
    for option in options:
        name, _, value = option.partition("=")
        if option == ADMIN:
            key = replace(key, is_admin=True)
        elif name in QUOTAS and re.fullmatch(r"\d{1,15}(\.\d{1,6})?", value):
            key = replace(key, quota=replace(key.quota, **{name: float(value)}))
        else:
            choices = ", ".join([ADMIN, *(f"{quota}=NUMBER" for quota in QUOTAS)])
            raise ConfigError(f"{where}: invalid option of {key.name}; choose from {choices}")
    return key


def _checked(keys: list[ApiKey], file: Path) -> list[ApiKey]:
    """Raise ConfigError if two names have the same key, or two keys of one name have different options."""
    names: dict[bytes, str] = {}
    options: dict[str, ApiKey] = {}
    for key in keys:
        if names.setdefault(key.digest, key.name) != key.name:
            raise ConfigError(f"server.keys_file: {file}: {names[key.digest]} and {key.name} have the same key; replace one")
        if replace(options.setdefault(key.name, key), digest=b"") != replace(key, digest=b""):
            raise ConfigError(f"server.keys_file: {file}: the keys of {key.name} have different options; repeat the same ones")
    return keys
