"""Plain values of YAML, converted to the annotations of a class.

OmegaConf's structured configs do the same, but without ``Literal``, ``str | list[str]``, tuples and frozen nested classes,
and they accept members of an enum by name only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from cookbook.config import python_file
from cookbook.errors import ConfigError, CookbookError
from cookbook.utils.suggest import did_you_mean

T = TypeVar("T")
# Annotation of a parameter that has none.
UNTYPED: object = Any
TARGET = "_target_"
MISSING = "???"  # OmegaConf's spelling of a value that must be given


class UnfitError(ConfigError):
    """Error of a value that does not fit the annotation of the key ``where``. ``has_remedy``: its text says what to write."""

    def __init__(self, message: str, where: str, has_remedy: bool) -> None:
        super().__init__(message)
        self.where, self.has_remedy = where, has_remedy


def construct(cls: type[T], values: Mapping[str, object], where: str) -> T:
    """``cls(**values)`` with every value converted to its annotation, and every problem named ``where.key``.

    Raises:
        ConfigError: a key that is unknown or missing, a value of the wrong type, or a ValueError from the class itself.
    """
    parameters = _parameters(cls, where)
    for key in values:
        if key not in parameters:
            hint = did_you_mean(key, parameters)
            known = ", ".join(parameters) or "no keys"
            raise ConfigError(f"unknown key '{where}.{key}'.{hint} ({cls.__name__} has {known})")
    for key, parameter in parameters.items():
        if values.get(key) == MISSING or (key not in values and parameter.default is parameter.empty):
            raise ConfigError(f"{where}.{key}: missing; {cls.__name__} needs {describe(parameter.annotation)}")
    arguments = {key: _argument(value, parameters[key], f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**arguments)
    except CookbookError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _argument(value: object, parameter: inspect.Parameter, where: str) -> object:
    """Return the converted value of a parameter. The error of a value that does not fit ends with one that does."""
    try:
        return convert(value, parameter.annotation, where)
    except UnfitError as error:
        # Errors of the items of a list have another place.
        if error.has_remedy or error.where != where:
            raise
        example = parameter.default
        if isinstance(example, bool | int | float) or (isinstance(example, str) and example):
            raise ConfigError(f"{error}; write {_plain(example)}, for example") from None
        if example is None:
            raise ConfigError(f"{error}; write {describe(parameter.annotation)}, or null") from None
        raise


def construct_target(values: Mapping[str, object], where: str) -> Any:
    """Return the object of a mapping with a ``_target_``."""
    arguments = {key: value for key, value in values.items() if key != TARGET}
    return construct(resolve_target(values[TARGET], f"{where}.{TARGET}"), arguments, where)


def resolve_target(target: object, where: str = TARGET) -> type:
    """Return the class that ``package.module.Class``, ``package.module:Class`` or ``file.py:Class`` names.

    Raises:
        ConfigError: the name cannot be imported, or is not a class.
    """
    if isinstance(target, str) and ".py:" in target:
        return _of_file(target, where)
    separator = ":" if isinstance(target, str) and ":" in target else "."
    module_name, _, name = target.rpartition(separator) if isinstance(target, str) else ("", "", "")
    if not module_name or not name:
        raise ConfigError(f"{where}: expected package.module.Class, got {target!r}")
    module = _import(module_name, where)
    if not hasattr(module, name):
        # Only __all__ has the names that a module imports on their first use.
        names = {*dir(module), *getattr(module, "__all__", ())}
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}.{did_you_mean(name, names)}")
    cls = getattr(module, name)
    if not isinstance(cls, type):
        raise ConfigError(f"{where}: {target!r} is a {type(cls).__name__}; name a class")
    return cls


def _of_file(target: str, where: str) -> type:
    # The user writes loss=FILE.py:NAME, so the error names that key.
    where = where.removesuffix(f".{TARGET}")
    definition = python_file.named(target, where, signature="")
    if isinstance(definition, type):
        return definition
    # A function with a declaration.
    if (constructor := getattr(definition, "constructor", None)) is not None:
        cls: type = constructor()
        return cls
    raise ConfigError(
        f'{where}: {target} is a function that declares nothing; put @cookbook.losses.returns("mean"), or "token_sum" or '
        '"sequence_sum", above it'
    )


def _import(name: str, where: str) -> types.ModuleType:
    # A fork may be newer than the cached directory listing.
    if name not in sys.modules:
        importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise ConfigError(f"{where}: {name} needs the module {missing!r}, which is not installed") from error
        parent, _, child = missing.rpartition(".")
        if not parent:
            raise ConfigError(f"{where}: the module {missing!r} is neither in this folder nor installed") from error
        folders = getattr(importlib.import_module(parent), "__path__", [])
        siblings = [module.name for module in pkgutil.iter_modules(folders)]
        raise ConfigError(f"{where}: {parent!r} has no {child!r}.{did_you_mean(child, siblings)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: not valid Python: {error.msg}") from error


def _parameters(cls: type, where: str) -> dict[str, inspect.Parameter]:
    """Parameters of the class by name, with their evaluated annotations."""
    try:
        # The fields of a dataclass may come from several modules, so its own __init__ cannot evaluate their annotations.
        hints = typing.get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
    except NameError as error:
        raise ConfigError(
            f"{where}: an annotation of {cls.__name__} cannot be read: {error}; import it outside TYPE_CHECKING"
        ) from error
    return {
        name: parameter.replace(annotation=hints.get(name, UNTYPED))
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def convert(value: object, hint: object, where: str) -> Any:
    """Convert ``value`` to the annotation ``hint``. A mapping with a ``_target_`` becomes an object at any depth.

    Raises:
        ConfigError: the value does not fit.
    """
    if isinstance(value, Mapping) and TARGET in value:
        return construct_target(value, where)
    if hint is UNTYPED:
        return _untyped(value, where)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(value, hint, where)
    if origin is Literal:
        return _checked(value in get_args(hint), value, hint, where)
    container = origin or hint
    if isinstance(container, type):
        if issubclass(container, Enum):
            return _member(value, container, where)
        if issubclass(container, Mapping):
            return _mapping(value, hint, where)
        if _is_list(container):
            return _collection(value, container, hint, where)
        if dataclasses.is_dataclass(container):
            if not isinstance(value, Mapping):
                raise _unfit(value, hint, where)
            return construct(container, value, where)
    return _scalar(value, hint, where)


def _untyped(value: object, where: str) -> object:
    if isinstance(value, Mapping):
        return {key: convert(item, UNTYPED, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [convert(item, UNTYPED, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _union(value: object, hint: object, where: str) -> object:
    members = [member for member in get_args(hint) if member is not type(None)]
    if value is None and len(members) < len(get_args(hint)):
        return None
    if len(members) == 1:
        return convert(value, members[0], where)
    exact = [member for member in members if type(value) is (get_origin(member) or member)]
    for member in [*exact, *members]:
        try:
            return convert(value, member, where)
        except ConfigError:
            continue
    raise _unfit(value, hint, where)


def _member(value: object, enum: type[Enum], where: str) -> Enum:
    match = next((member for member in enum if value in (member, member.value, member.name)), None)
    if match is None:
        raise _unfit(value, enum, where)
    return match


def _mapping(value: object, hint: object, where: str) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise _unfit(value, hint, where)
    of_key, of_item = get_args(hint) or (UNTYPED, UNTYPED)
    return {convert(key, of_key, where): convert(item, of_item, f"{where}.{key}") for key, item in value.items()}


def _is_list(container: type) -> bool:
    return container in (Iterable, Collection) or (issubclass(container, Sequence | Set) and container is not str)


def _collection(value: object, container: type, hint: object, where: str) -> object:
    of_items = get_args(hint) or (UNTYPED,)
    is_fixed = container is tuple and Ellipsis not in of_items and bool(get_args(hint))
    if not isinstance(value, list | tuple) or (is_fixed and len(value) != len(of_items)):
        raise _unfit(value, hint, where)
    if not is_fixed:
        of_items = of_items[:1] * len(value)
    pairs = zip(value, of_items, strict=True)
    items = [convert(item, of_item, f"{where}[{index}]") for index, (item, of_item) in enumerate(pairs)]
    return container(items) if container in (tuple, set, frozenset) else items


def _scalar(value: object, hint: object, where: str) -> object:
    if hint in (int, float):
        return _number(value, hint, where)
    if hint is str:
        # YAML and the command line read a name such as 7 as a number
        return str(_checked(isinstance(value, str) or type(value) is int, value, hint, where))
    if hint is Path:
        return Path(str(_checked(isinstance(value, str), value, hint, where)))
    fits = isinstance(hint, type) and not getattr(hint, "_is_protocol", False) and isinstance(value, hint)
    return _checked(fits, value, hint, where)


def _number(value: object, hint: type[int] | type[float], where: str) -> int | float:
    """Convert a number, or text that spells one, as an environment variable does. 1e3 is a whole number too."""
    # ValueError: 'fast'. OverflowError: nan or inf for a whole number.
    with contextlib.suppress(ValueError, OverflowError):
        number = hint(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and (hint is float or int(number) == number):
            return hint(number)
    raise _unfit(value, hint, where)


def _checked(fits: bool, value: object, hint: object, where: str) -> object:
    if not fits:
        raise _unfit(value, hint, where)
    return value


def _unfit(value: object, hint: object, where: str) -> ConfigError:
    remedy = ""
    if isinstance(value, str) and value.lower() in _NULLS:
        remedy = "; write null for no value"
    elif choices := _choices(hint):
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        remedy = f".{near}" if near else ""
    elif describe(hint) == "a list" and isinstance(value, str | int | float):
        remedy = f"; write [{_plain(value)}]"
    message = f"{where}: expected {describe(hint)}, got {_spelled(value)}{remedy}"
    return UnfitError(message, where, bool(remedy) or bool(_choices(hint)))


def _choices(hint: object) -> list[str]:
    """Return the words that an annotation allows; empty if it allows others."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    return []


# Spellings of YAML's null in other languages.
_NULLS = ("none", "nil", "undefined")


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", UNTYPED: "a value"}


def describe(hint: object) -> str:
    """Return a type annotation in words: ``float | None`` is "a number"."""
    origin = get_origin(hint)
    container = origin or hint
    if hint in _WORDS:
        return _WORDS[hint]
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(hint) if member is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(container, type):
        if issubclass(container, Enum):
            return f"one of {', '.join(str(member.value) for member in container)}"
        if issubclass(container, Mapping):
            return "a mapping"
        if _is_list(container):
            return "a list"
        if dataclasses.is_dataclass(container):
            return "keys and values"
    return f"a mapping with {TARGET}"


def _plain(value: float | str) -> str:
    """Return a value as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _spelled(value: object) -> str:
    """Return the value in the spelling of YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
