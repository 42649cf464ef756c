"""Errors that the user can fix.

The command prints these as one line and exits with 2. Every other exception is a bug: it keeps its traceback and exits with 1.
A message says where, what is wrong, the value, and what to do: ``datum 3: weights has 12 values and model_input 13; build both
from the same tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Characters of the user's values and messages in an error message.
LONGEST_TEXT = 1000


class CookbookError(Exception):
    """Base of every error that the user can fix."""


class ConfigError(CookbookError, ValueError):
    """Error in a key, value or combination of the configuration."""


class DataError(CookbookError, ValueError):
    """Error in a row of a dataset, or in a datum made from one."""


class BackendError(CookbookError, RuntimeError):
    """Error of the trainer: the model does not load, a computation fails, memory runs out."""


class NonFiniteError(BackendError):
    """A loss or a gradient is NaN or infinite. The weights have not changed.

    ``datums`` are the offending datums, by their places in the call; empty if no single datum is at fault.
    """

    def __init__(self, message: str, datums: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.datums = tuple(datums)


class NoGradientError(CookbookError, RuntimeError):
    """Error of a run in which no step had a gradient: its weights are those that it started from."""


class CheckpointError(CookbookError, RuntimeError):
    """Error in saving, finding or loading a checkpoint."""


class RolloutError(CookbookError, RuntimeError):
    """Error in sampling or in a reward.

    A sampler that raises this class ends the run; a sampler that raises one of its children does not.
    """


class BadRowError(RolloutError):
    """Error of a reward about the row itself, for any completion; ``data.on_bad_row`` decides what follows."""


class SamplerUnavailableError(RolloutError):
    """Error of a sampler that cannot answer now. A retry of the request may succeed."""


class SampleRefusedError(RolloutError):
    """Error of a sampler that cannot answer this request, now or later, but may answer others."""


class HookError(CookbookError, RuntimeError):
    """Error that a hook of the user has raised. The run saves its state, then ends."""


def first_line(error: BaseException) -> str:
    """Return the first line of the message; the name of the class without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def described(error: BaseException) -> str:
    """The class, message and place of an exception in the user's code: ``KeyError: 'a' (my_hook.py:7)``.

    The place is the innermost frame outside of cookbook and of installed libraries, if there is one.
    """
    import sysconfig
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for excluded in ((*libraries, "<", str(Path(__file__).parent)), (*libraries, "<"), ()):
        if own := [frame for frame in frames if not frame.filename.startswith(excluded)]:
            break
    last = shortened(" ".join(traceback.format_exception_only(error)[-1].split()))
    return f"{last} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else last


def shortened(text: str) -> str:
    """Return the start of a text that is too long for an error message."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
