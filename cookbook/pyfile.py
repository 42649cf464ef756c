"""A Python file of the user's, run as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cookbook import paths
from cookbook.errors import ConfigError


def run(path: Path, name: str) -> ModuleType:
    """Executes the file as the module ``name``, anew at every call. Dataclasses and launchers look it up by that name.

    Raises:
        ConfigError: it is no Python file, or imports what is not there. What else it raises stays.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{paths.shown(path)}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = paths.shown(Path(error.filename)) if error.filename else paths.shown(path)
        raise ConfigError(f"{where}:{error.lineno}: not valid Python: {error.msg}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"{paths.shown(path)}: it imports {error.name!r}, which cannot be found") from error
    return module


def run_beside(path: Path, name: str) -> ModuleType:
    """The same, and the file may import its neighbours: its folder joins the import path, last.

    Raises:
        ConfigError: as :func:`run`.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return run(path, name)


def named(target: str, where: str, *, signature: str) -> Any:
    """The function or class that ``file.py:name`` names; the path is relative to the current folder.

    ``where`` is the configuration key of ``target``. ``signature`` completes the error for a missing name.

    Raises:
        ConfigError: the file or the name does not exist, or the file cannot be imported. What else the file raises stays.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{where}: expected file.py:function, got {target!r}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: {path} does not exist in {Path.cwd()}; give file.py:function")
    found = getattr(run_beside(file, f"cookbook_{where.replace('.', '_')}_{file.stem}"), name, None)
    if not callable(found):
        raise ConfigError(f"{where}: {path} has no function {name!r}; define {name}{signature}")
    return found
