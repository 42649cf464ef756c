"""A reward of the user's own: a function in a Python file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from cookbook import pyfile
from cookbook.errors import ConfigError


@dataclass(frozen=True)
class Python:
    """``target`` is ``file.py:function``, relative to the current folder.

    ``function(completion, row)`` returns a number; ``row`` is the dataset's row as it was read. A class is made once,
    without arguments, and called the same way. The file's folder joins the import path: it may import its neighbours.

    Raises:
        ConfigError: no such file or function, or a file that cannot be imported. What else the file raises stays.
    """

    target: str

    def __post_init__(self) -> None:
        _ = self._function  # a mistake in the file shows before a model is loaded

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Any:
        return self._function(completion, row)

    @cached_property
    def _function(self) -> Callable[[str, Mapping[str, Any]], Any]:
        path, _, name = self.target.rpartition(":")
        if not path or not name:
            raise ConfigError(f"reward.target: expected file.py:function, got {self.target!r}")
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"reward.target: {path} does not exist in {Path.cwd()}; give file.py:function")
        found = getattr(pyfile.run_beside(file, f"cookbook_reward_{file.stem}"), name, None)
        if not callable(found):
            raise ConfigError(f"reward.target: {path} has no function {name!r}; define {name}(completion, row)")
        if inspect.isclass(found):
            found = found()
        return cast("Callable[[str, Mapping[str, Any]], Any]", found)
