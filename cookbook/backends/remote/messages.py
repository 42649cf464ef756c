"""What goes wrong with a server, in one line each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cookbook.errors import BackendError, CookbookError

_WRAPPING = re.compile(r"^Request failed: (.*) for self\.request_id=.*$", re.DOTALL)
LOST = (404, 410)


class Explain:
    """Turns what the client package raises into our errors. ``key_env`` is where the key comes from."""

    def __init__(self, tinker: Any, url: str, key_env: str) -> None:
        self._tinker = tinker
        self._url = url
        self._key_env = key_env

    def __call__(self, error: BaseException, kind: type[CookbookError] = BackendError) -> BaseException:
        """``error`` as a CookbookError, of ``kind`` where the server refused the call itself; others as they are."""
        if isinstance(error, self._tinker.RequestFailedError):
            return kind(_unwrapped(str(error)))
        status = _status(error)
        if status is not None:
            return self._refused(status, error, kind)
        if isinstance(error, self._tinker.APIConnectionError):
            return self.silent()
        if type(error).__name__ == "RetryableException":
            return self._lost()
        if isinstance(error, self._tinker.TinkerError):
            return BackendError(f"backend.base_url: {self._url}: {_line(str(error))}")
        return error

    def silent(self, reason: str = "") -> BackendError:
        """It does not answer."""
        why = f" ({reason})" if reason else ""
        return BackendError(
            f"backend.base_url: no answer from {self._url}{why}; start the server there (cookbook serve) or correct the "
            "address, then run the same command again: it goes on from the last checkpoint"
        )

    def wrong_key(self) -> BackendError:
        return BackendError(
            f"backend.base_url: {self._url} refuses the API key; set ${self._key_env} to one that the server knows"
        )

    def _lost(self) -> BackendError:
        return BackendError(
            f"backend.base_url: {self._url} has no such run any more: it was started anew, or the run was silent for too "
            "long; run the same command again: it goes on from the last checkpoint"
        )

    def _refused(self, status: int, error: BaseException, kind: type[CookbookError]) -> CookbookError:
        if status in (401, 403):
            return self.wrong_key()
        detail = _detail(error)
        if status in LOST and "checkpoint" not in detail:
            return self._lost()
        return kind(f"{self._url}: {detail}")


def _status(error: BaseException) -> int | None:
    """The HTTP status behind ``error``. Results that cannot be fetched come as a ValueError with the cause attached."""
    for one in (error, error.__cause__):
        status = getattr(one, "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _detail(error: BaseException) -> str:
    """What the server said."""
    for one in (error, error.__cause__):
        body = getattr(one, "body", None)
        if isinstance(body, dict) and isinstance(body.get("detail"), str):
            return _line(body["detail"])
    return _line(str(error))


def _unwrapped(message: str) -> str:
    found = _WRAPPING.match(message)
    return _line(found[1] if found else message)


def _line(message: str) -> str:
    return " ".join(message.split())


Explained = Callable[[BaseException], BaseException]
