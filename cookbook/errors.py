"""What can go wrong that the user can mend.

The command prints these as one line and exits with 2. Every other exception is a bug: it keeps its trace and exits with 1.
A message says where, what is wrong, what was found, and what to do: ``datum 3: weights has 12 values and model_input 13;
build both from the same tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CookbookError(Exception):
    """Base of every error that has a remedy on the user's side."""


class ConfigError(CookbookError, ValueError):
    """A key, value or combination of the configuration."""


class DataError(CookbookError, ValueError):
    """A row of a dataset, or a datum made from one."""


class BackendError(CookbookError, RuntimeError):
    """The trainer: loading a model, computing, running out of memory."""


class NonFiniteError(BackendError):
    """A loss or a gradient came out NaN or infinite, and the weights are as they were.

    ``datums`` are the places in the call of those to blame; empty where the fault is of all of them together.
    """

    def __init__(self, message: str, datums: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.datums = tuple(datums)


class NoGradientError(CookbookError, RuntimeError):
    """A run in which no step had a gradient: its weights are those that it started from."""


class CheckpointError(CookbookError, RuntimeError):
    """Saving, finding or loading a checkpoint."""


class RolloutError(CookbookError, RuntimeError):
    """Sampling from a deployment, or rewarding what was sampled. Raised by a sampler, it ends the run; its children do not."""


class BadRowError(RolloutError):
    """A reward finds the row itself at fault, whatever the completion: ``data.on_bad_row`` decides."""


class SamplerUnavailableError(RolloutError):
    """A sampler cannot answer now. The same request may be answered when it is made again."""


class SampleRefusedError(RolloutError):
    """A sampler cannot answer this one request, now or later. It may answer others."""


class HookError(CookbookError, RuntimeError):
    """A hook of the user's raised. The run ends after its state is saved."""


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
    last = " ".join(traceback.format_exception_only(error)[-1].split())
    return f"{last} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else last
