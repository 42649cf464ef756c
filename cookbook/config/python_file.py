"""Python files of the user, run as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cookbook.errors import ConfigError
from cookbook.utils import paths


def run(path: Path, name: str) -> ModuleType:
    """Execute the file as the module ``name``, again at every call. Dataclasses and launchers look the module up by this name.

    Raises:
        ConfigError: the file is not a Python file, or imports an unknown module. Its other errors are not caught.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{paths.shown(path)}: not a Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = paths.shown(Path(error.filename or path))
        raise ConfigError(f"{where}:{error.lineno}: not valid Python: {error.msg}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"{paths.shown(path)}: imports {error.name!r}, which cannot be found") from error
    return module


def run_beside(path: Path, name: str) -> ModuleType:
    """Execute the file as :func:`run` does; it may import modules of its folder, which is added to the end of the import path.

    Raises:
        ConfigError: as :func:`run`.
    """
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return run(path, name)


def named(target: str, where: str, *, signature: str) -> Any:
    """Return the function or class that ``file.py:name`` names; the path is relative to the current folder.

    ``where`` is the configuration key of ``target``. ``signature`` completes the error for a missing name.

    Raises:
        ConfigError: the file or the name does not exist, or the file cannot be imported. Other errors of the file
            are not caught.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{where}: expected file.py:function, got {target!r}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: {path} does not exist in {Path.cwd()}; give file.py:function")
    function = getattr(run_beside(file, f"cookbook_{where.replace('.', '_')}_{file.stem}"), name, None)
    if not callable(function):
        raise ConfigError(f"{where}: {path} has no function {name!r}; define {name}{signature}")
    return function
