"""What the server says when it cannot do what was asked."""

from __future__ import annotations

from cookbook.errors import BackendError, CookbookError


class Refused(CookbookError):  # noqa: N818 - it is an answer, not a fault
    """A request that gets an HTTP status instead of a result."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def category(error: BaseException) -> str:
    """Whose fault a failed call is, in the protocol's words: ``user`` or ``server``."""
    return "user" if isinstance(error, CookbookError) and not isinstance(error, BackendError) else "server"


def described(error: BaseException) -> str:
    """The message of a failed call."""
    return str(error) if isinstance(error, CookbookError) else f"{type(error).__name__}: {error}"
