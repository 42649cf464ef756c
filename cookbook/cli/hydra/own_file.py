"""A YAML file of the user, ``cookbook train my.yaml``: its keys become overrides, as if they were typed before the others.

A key is that of the command line, dotted (``optim.lr: 1e-4``) or nested, and a group takes a preset, a name or a path
(``model: ./m``). The line of each key is kept, so that an error names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import QuotedString
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml import MappingNode, Node, ScalarNode, SequenceNode, YAMLError, compose  # type: ignore[import-untyped]

from cookbook.cli.hydra.quotes import in_quotes, is_plain
from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError
from cookbook.utils import paths

SUFFIXES = (".yaml", ".yml")
# In YAML 1.1 these numbers have base 8 and base 60.
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_HEADER = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
# Groups of the defaults list that a file may choose from: "override /model: tiny".
_OVERRIDE = re.compile(r"override\s+/?([\w/]+)")
# Characters of a key that Hydra reads if a backslash stands before them.
_ESCAPED = re.compile(r"([\\()\[\]{}:=, \t])")


@dataclass(frozen=True)
class Entry:
    """One key of a file with its value; ``where`` is ``my.yaml:4``, empty for keys of Python."""

    key: str
    value: object
    where: str = ""


@dataclass(frozen=True)
class OwnFile:
    """Keys and values of a file. ``lines`` has the line of each dotted key, and of each key above it."""

    name: str
    values: Mapping[str, object]
    lines: Mapping[str, int] = field(default_factory=dict)
    # The file's `# @package`, such as `_global_`.
    package: str | None = None

    def where(self, key: str) -> str:
        """Return ``my.yaml:4`` for a key, that of the key around it if the file has no line for it."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}:{self.lines[key]}" if key else self.name if self.lines else ""

    @property
    def is_stored(self) -> bool:
        """Whether the file is the configuration of a run: the recipe's name, and the class of each part."""
        recipe = self.values.get("recipe")
        parts = [self.values.get(group) for group in ("model", "data", "loss")]
        return (
            isinstance(recipe, Mapping)
            and "name" in recipe
            and all(isinstance(part, Mapping) and TARGET in part for part in parts)
        )


def is_file(word: str) -> bool:
    """Whether a word of the command line is a file rather than an override."""
    return word.lower().endswith(SUFFIXES) and ("=" not in word or Path(word).is_file())


def read(path: Path) -> OwnFile:
    """Return the keys of a YAML file.

    Raises:
        ConfigError: the file is missing, is not text, holds no keys, or has a number that YAML reads in another base.
        YAMLError: the file is not YAML.
    """
    name = paths.shown(path)
    if not path.is_file():
        there = "is a folder; name the file, such as" if path.is_dir() else "not found; write one with: cookbook init sft"
        raise ConfigError(f"{path}: {there}" + (f" {path / paths.RUN_CONFIG}" if path.is_dir() else f" {path}"))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    package = _HEADER.search(text)
    return parsed(text, name, package[1] if package else None)


def parsed(text: str, name: str, package: str | None = None) -> OwnFile:
    """Return the keys of YAML text; the errors are those of :func:`read`."""
    try:
        root = compose(text, Loader=get_yaml_loader())
        lines = dict(_lines(root, "")) if isinstance(root, MappingNode) else {}
        refuse_numbers_of_another_base(root, name)
        values = OmegaConf.to_container(OmegaConf.create(text)) if isinstance(root, MappingNode) else None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise
        raise ConfigError(
            f"{name}:{mark.line + 1}: not valid YAML: {getattr(error, 'problem', '')}{_tab(text, mark)}"
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        holds = "is empty" if root is None else "holds no keys"
        raise ConfigError(f"{name}: {holds}; write keys as on the command line, such as recipe: sft")
    return OwnFile(name, {str(key): value for key, value in values.items()}, lines, package)


def _tab(text: str, mark: Any) -> str:
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    return "; indent with spaces" if line.startswith("\t") else ""


def _lines(node: MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if isinstance(value, MappingNode):
            yield from _lines(value, f"{name}.")


def refuse_numbers_of_another_base(node: Node | None, name: str) -> None:
    """Raise ConfigError for ``010``, which YAML reads as 8, and for ``1:30``, which it reads as 90."""
    if isinstance(node, MappingNode):
        for pair in node.value:
            for part in pair:
                refuse_numbers_of_another_base(part, name)
    elif isinstance(node, SequenceNode):
        for part in node.value:
            refuse_numbers_of_another_base(part, name)
    elif isinstance(node, ScalarNode) and node.style is None and node.tag.endswith((":int", ":float")):
        for pattern, base in ((_OCTAL, 8), (_BASE_60, 60)):
            if pattern.fullmatch(node.value):
                number = OmegaConf.create(f"x: {node.value}").x
                plain = f"{node.value.lstrip('0') or '0'}" if base == 8 else "the number of seconds or minutes"
                raise ConfigError(
                    f"{name}:{node.start_mark.line + 1}: {node.value} is the number {number:g} in YAML, which reads it in base "
                    f"{base}; write {plain}, or '{node.value}' in quotes for a text"
                )


# ---- overrides -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The groups of the configuration: ``is_group`` and ``options`` ask Hydra for them."""

    is_group: Callable[[str], bool]
    options: Callable[[str], Collection[str]]


def split(file: OwnFile, groups: Groups) -> tuple[list[Entry], list[Entry]]:
    """Return the choices of the file, such as ``model: tiny``, and its other keys, those of a group still as one mapping.

    Raises:
        ConfigError: a group without a value, or an entry of ``defaults`` that is no choice.
    """
    choices: list[Entry] = []
    others: list[Entry] = []
    for key, value in file.values.items():
        where = file.where(key)
        if key == "defaults":
            choices += _defaults(value, where)
        elif key == "recipe.name":
            choices.append(Entry("recipe", value, where))
        elif not groups.is_group(key):
            others.append(Entry(key, value, where))
        elif isinstance(value, Mapping) and value:
            nested = dict(value)
            if key == "recipe" and "name" in nested:
                choices.append(Entry(key, nested.pop("name"), file.where("recipe.name")))
            others.append(Entry(key, nested, where))
        elif value is None or value is False or value == {}:
            choices += _nothing(key, where, groups)
        else:
            choices.append(Entry(key, value, where))
    return choices, others


def _defaults(entries: object, where: str) -> Iterator[Entry]:
    for entry in entries if isinstance(entries, list) else [entries]:
        if entry == "_self_":
            continue
        for key, value in entry.items() if isinstance(entry, dict) else [(str(entry), None)]:
            match = _OVERRIDE.fullmatch(str(key))
            if match is None or value is None:
                raise ConfigError(
                    f"{where}: defaults: expected 'override /GROUP: NAME', got {entry!r}; write GROUP: NAME as a key"
                )
            yield Entry(match[1], value, where)


def _nothing(group: str, where: str, groups: Groups) -> Iterator[Entry]:
    """Yield the choice of ``none`` for a group that may be absent."""
    names = groups.options(group)
    if "none" in names:
        yield Entry(group, "none", where)
    elif group not in ("experiment", "debug", "local"):
        # Values of Python have no line.
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}{group}: expected a name, got nothing; choose one of {', '.join(sorted(names))}")


def flat(entries: Sequence[Entry], file: OwnFile, known: Collection[str]) -> list[Entry]:
    """Return the entries with one dotted key each. A component, and the value of a known key, stay one mapping."""
    return [leaf for entry in entries for leaf in _flat(entry, file, known)]


def _flat(entry: Entry, file: OwnFile, known: Collection[str]) -> Iterator[Entry]:
    value = entry.value
    has_keys = any(key.startswith(f"{entry.key}.") for key in known) or entry.key.partition(".")[0] == "hydra"
    if not isinstance(value, Mapping) or TARGET in value or not has_keys:
        yield entry
        return
    for name, inner in value.items():
        key = f"{entry.key}.{name}"
        yield from _flat(Entry(key, inner, file.where(key)), file, known)


def refuse_twice(entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a key that a file has dotted and nested."""
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            raise ConfigError(f"{entry.where or entry.key}: {entry.key} is set twice; drop one of them")
        seen.add(entry.key)


def word(entry: Entry) -> str:
    """Return the override of an entry. Raises ConfigError: Hydra cannot read a key of the value."""
    return f"{entry.key}={_text(entry.value, entry)}"


def _text(value: object, entry: Entry) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(str(key), entry)}:{_text(inner, entry)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(inner, entry) for inner in value) + "]"
    text = str(value)
    return text if is_plain(text) else in_quotes(text)


def _key(key: str, entry: Entry) -> str:
    escaped = _ESCAPED.sub(r"\\\1", key)
    if not key or not re.fullmatch(r"[\w/\-+.$%*@?|\\()\[\]{}:=, \t]+", key, re.ASCII):
        raise ConfigError(f"{entry.where or entry.key}: {entry.key}: the key {key!r} has a character that no key may have")
    return escaped


def plain_value(value: object) -> object:
    """Return the value of an override as lists, dicts, texts and numbers."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(plain_value(key)): plain_value(inner) for key, inner in value.items()}
    return [plain_value(inner) for inner in value] if isinstance(value, list) else value
