"""A reward of the user's own: a function in a Python file."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from cookbook import pyfile
from cookbook.rewards.limits import Limits


@dataclass(frozen=True)
class Python(Limits):
    """``target`` is ``file.py:function``, relative to the current folder.

    ``function(completion, row)`` returns a number; ``row`` is the dataset's row as it was read. A class is made once a
    process, without arguments, and called the same way. The file's folder joins the import path: it may import its neighbours.
    By default a process of its own calls it, with a limit: it may be slow, and it may hang.

    Raises:
        ConfigError: no such file or function, or a file that cannot be imported. What else the file raises stays.
    """

    target: str
    workers: int = field(default=1, repr=False, kw_only=True)
    timeout_s: float | None = field(default=60.0, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._function  # a mistake in the file shows before a model is loaded

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Any:
        return self._function(completion, row)

    @property
    def digest(self) -> str:
        """Of the file's text, without what it imports."""
        return hashlib.sha256(Path(self.target.rpartition(":")[0]).expanduser().read_bytes()).hexdigest()

    @cached_property
    def _function(self) -> Callable[[str, Mapping[str, Any]], Any]:
        found = pyfile.named(self.target, "reward.target", signature="(completion, row)")
        if inspect.isclass(found):
            found = found()
        return cast("Callable[[str, Mapping[str, Any]], Any]", found)
