"""Plain values, as they come from YAML, made into what a class's annotations say.

OmegaConf's structured configs could do this too, but they know no ``Literal``, no ``str | list[str]``, no tuples and
nothing nested in a frozen class, and take enum members by name only.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from cookbook.errors import ConfigError, CookbookError
from cookbook.suggest import did_you_mean

TARGET = "_target_"
MISSING = "???"  # OmegaConf's spelling of a value that must be given


def construct(cls: type, values: Mapping[str, Any], where: str) -> Any:
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
        if values.get(key) == MISSING or (key not in values and parameter.required):
            raise ConfigError(f"{where}.{key}: missing; {cls.__name__} needs {describe(parameter.hint)}")
    arguments = {key: convert(value, parameters[key].hint, f"{where}.{key}") for key, value in values.items()}
    try:
        return cls(**arguments)
    except CookbookError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def construct_target(values: Mapping[str, Any], where: str) -> Any:
    """The object of a mapping with a ``_target_``."""
    rest = {key: value for key, value in values.items() if key != TARGET}
    return construct(resolve_target(values[TARGET], f"{where}.{TARGET}"), rest, where)


def resolve_target(target: Any, where: str = TARGET) -> type:
    """The class that ``package.module.Class`` or ``package.module:Class`` names.

    Raises:
        ConfigError: it cannot be imported, or is not a class.
    """
    separator = ":" if isinstance(target, str) and ":" in target else "."
    module_name, _, name = target.rpartition(separator) if isinstance(target, str) else ("", "", "")
    if not module_name or not name:
        raise ConfigError(f"{where}: expected package.module.Class, got {target!r}")
    module = _import(module_name, where)
    if not hasattr(module, name):
        names = {*dir(module), *getattr(module, "__all__", ())}  # __all__ knows those that are imported when asked for
        raise ConfigError(f"{where}: {module_name!r} has no {name!r}.{did_you_mean(name, names)}")
    found = getattr(module, name)
    if not isinstance(found, type):
        raise ConfigError(f"{where}: {target!r} is a {type(found).__name__}; name a class")
    return found


def _import(name: str, where: str) -> types.ModuleType:
    importlib.invalidate_caches()  # a fork may have been written a moment ago
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise ConfigError(f"{where}: {name} needs the module {missing!r}, which is not installed") from error
        parent, _, child = missing.rpartition(".")
        if not parent:
            raise ConfigError(f"{where}: there is no module {missing!r} here or among the installed ones") from error
        folders = getattr(importlib.import_module(parent), "__path__", [])
        siblings = [module.name for module in pkgutil.iter_modules(folders)]
        raise ConfigError(f"{where}: {parent!r} has no {child!r}.{did_you_mean(child, siblings)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: not valid Python: {error.msg}") from error


@dataclasses.dataclass(frozen=True)
class _Parameter:
    hint: Any
    required: bool


def _parameters(cls: type, where: str) -> dict[str, _Parameter]:
    """What the class is constructed from: a dataclass's fields, any other class's ``__init__`` arguments."""
    dataclass = dataclasses.is_dataclass(cls)
    try:
        hints = typing.get_type_hints(cls if dataclass else cls.__init__)  # type: ignore[misc]
    except NameError as error:
        raise ConfigError(
            f"{where}: an annotation of {cls.__name__} cannot be read: {error}; import it outside TYPE_CHECKING"
        ) from error
    if dataclass:
        return {
            field.name: _Parameter(
                hints[field.name],
                field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(cls)
            if field.init
        }
    return {
        name: _Parameter(hints.get(name, Any), parameter.default is parameter.empty)
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the annotation ``hint`` wants it. A mapping with a ``_target_`` is built wherever it stands.

    Raises:
        ConfigError: it does not fit.
    """
    if isinstance(value, Mapping) and TARGET in value:
        return construct_target(value, where)
    if hint is Any:
        return _untyped(value, where)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(value, hint, where)
    if origin is Literal:
        return _checked(value in get_args(hint), value, value, hint, where)
    container = origin or hint
    if isinstance(container, type):
        if issubclass(container, Enum):
            return _member(value, container, where)
        if issubclass(container, Mapping):
            return _mapping(value, hint, where)
        if _is_list(container):
            return _collection(value, container, hint, where)
        if dataclasses.is_dataclass(container):
            _checked(isinstance(value, Mapping), value, value, hint, where)
            return construct(container, value, where)
    return _scalar(value, hint, where)


def _untyped(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: convert(item, Any, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [convert(item, Any, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def _union(value: Any, hint: Any, where: str) -> Any:
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
    return _checked(False, value, value, hint, where)


def _member(value: Any, enum: type[Enum], where: str) -> Enum:
    found = next((member for member in enum if value in (member, member.value, member.name)), None)
    _checked(found is not None, value, value, enum, where)
    assert found is not None
    return found


def _mapping(value: Any, hint: Any, where: str) -> dict[Any, Any]:
    _checked(isinstance(value, Mapping), value, value, hint, where)
    of_key, of_item = get_args(hint) or (Any, Any)
    return {convert(key, of_key, where): convert(item, of_item, f"{where}.{key}") for key, item in value.items()}


def _is_list(container: type) -> bool:
    return container in (Iterable, Collection) or (issubclass(container, Sequence | Set) and container is not str)


def _collection(value: Any, container: type, hint: Any, where: str) -> Any:
    _checked(isinstance(value, list | tuple), value, value, hint, where)
    of_items = get_args(hint) or (Any,)
    if container is tuple and Ellipsis not in of_items and get_args(hint):
        _checked(len(value) == len(of_items), value, value, hint, where)
    else:
        of_items = of_items[:1] * len(value)
    pairs = zip(value, of_items, strict=True)
    items = [convert(item, of_item, f"{where}[{index}]") for index, (item, of_item) in enumerate(pairs)]
    return container(items) if container in (tuple, set, frozenset) else items


def _scalar(value: Any, hint: Any, where: str) -> Any:
    if hint in (int, float):
        return _number(value, hint, where)
    if hint is str:
        # 7 where a name is wanted is a name: YAML and the command line cannot tell
        return _checked(isinstance(value, str) or type(value) is int, value, str(value), hint, where)
    if hint is Path:
        return _checked(isinstance(value, str), value, Path(str(value)), hint, where)
    fits = isinstance(hint, type) and not getattr(hint, "_is_protocol", False) and isinstance(value, hint)
    return _checked(fits, value, value, hint, where)


def _number(value: Any, hint: type[int] | type[float], where: str) -> int | float:
    """A number, or text that spells one, as an environment variable does. 1e3 is a whole number too."""
    try:
        number = hint(value) if isinstance(value, str) else value
        fits = type(number) in (int, float) and (hint is float or int(number) == number)
    except (ValueError, OverflowError):  # 'fast'; nan or inf where a whole number is wanted
        fits = False
    return hint(_checked(fits, value, value, hint, where))


def _checked(fits: bool, value: Any, result: Any, hint: Any, where: str) -> Any:
    if not fits:
        raise ConfigError(f"{where}: expected {describe(hint)}, got {_spelled(value)}")
    return result


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", Any: "a value"}


def describe(hint: Any) -> str:
    """A type annotation in words: ``float | None`` is "a number"."""
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


def _spelled(value: Any) -> str:
    """As it would be written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
