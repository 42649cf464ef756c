"""Overrides that name a model or data directly: ``model=owner/name``, ``data=chats.jsonl``, ``model.name=./folder``.

The presets that ship with cookbook, and the values of ``conf/demo``, are for the shipped model and data. Naming another model
or other data replaces such a preset by a neutral one: ``model=hf``, ``data=jsonl`` or ``data=hub``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.cli.sample_target import SHIPPED, WITHOUT_OWNER
from cookbook.errors import ConfigError

NEUTRAL = {"model": {"name": "hf"}, "data": {"path": "jsonl", "name": "hub"}}  # group -> its key that names it -> preset
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
FORMS = {"model": ["model=owner/name or model=./folder"], "data": ["data=FILE or data=owner/name"]}  # besides presets
NO_DEMO = "demo=none"
YOURS = "choose yours with model=owner/name or model=./folder"


def spelled_out(
    words: Sequence[tuple[str, str, Sequence[str]]], is_preset: Callable[[str, str], bool]
) -> tuple[list[str], list[str]]:
    """Return the overrides with names and paths in their own keys, and what the user should read about those not obvious.

    Args:
        words: each override as typed, the group that it chooses (or ""), and its values: one, or those of a sweep.
        is_preset: whether a group has a file of that name.

    Raises:
        ConfigError: the values of a sweep do not go into one key, or the key has a value already.
    """
    found: list[str] = []
    notes: list[str] = []
    for word, group, values in words:
        key = _key_of(group, values, is_preset) if group in NEUTRAL else None
        if key is None:
            found.append(word)
            continue
        preset, name, text = f"{group}={NEUTRAL[group][key]}", f"{group}.{key}", word.partition("=")[2]
        if any(other.partition("=")[0] == name for other, _, _ in words):
            raise ConfigError(f"{group}: {word} and {name}=... name two; drop one of them")
        found += [preset, f"{name}={text}"]
        if "/" not in text or preset == "data=hub":  # which a word and a path's slip could also be
            notes.append(f"{word} means {preset} {name}={text}")
    return found, notes


def _key_of(group: str, values: Sequence[str], is_preset: Callable[[str, str], bool]) -> str | None:
    """The key that ``group=value`` stands for: ``name`` or ``path``; None if the values are presets, or unknown words."""
    found = {None if is_preset(group, value) else _key(group, value) for value in values}
    if len(found) > 1:
        raise ConfigError(
            f"{group}: a sweep takes files of conf/{group}, or names, or paths, and no mixture, got {','.join(values)}; "
            f"write a file ./conf/{group}/NAME.yaml for those that have none"
        )
    return next(iter(found), None)


def _key(group: str, value: str) -> str | None:
    path = Path(value)
    if not value:
        return None
    if group == "model":
        return "name" if "/" in value or path.is_dir() or value in WITHOUT_OWNER else None
    if path.exists() or value.endswith(DATA_FILES) or value.startswith((".", "/", "~")):
        return "path"
    if "/" in value:
        return "path" if path.parent.is_dir() else "name"  # a slip in a path, rather than a dataset of the hub
    return None


def named_here(group: str) -> list[str]:
    """The models or data files in the current folder, by name."""
    if group == "model":
        return [path.parent.name for path in Path().glob("*/config.json")]
    return [path.name for path in Path().iterdir() if path.name.endswith(DATA_FILES)] if group == "data" else []


@dataclass(frozen=True)
class Replacements:
    """Overrides to add, and what the user should read about those that are not obvious."""

    overrides: list[str]
    notes: list[str]


def replacements(
    choices: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]], typed: Collection[str], swept: Collection[str]
) -> Replacements:
    """Return what keeps every value of the shipped model and data from another model and other data.

    Args:
        choices: the preset of each group.
        nodes: keys and values of ``model`` and ``data``, as far as the configuration has them, interpolations not resolved.
        typed: the groups that the command line chooses.
        swept: the keys that the command line sweeps over.
    """
    found = Replacements([], [])
    named = {group: _named(group, node, swept) for group, node in nodes.items()}
    for group, presets in NEUTRAL.items():
        key = named.get(group)
        if key is None or not _shipped(group, choices.get(group)):
            continue
        if group not in typed:
            found.overrides.append(f"{group}={presets[key]}")
        elif "demo" not in typed:
            found.overrides.append(NO_DEMO)
    model = _shipped("model", choices.get("model"))
    if model and "model" not in typed and named.get("data") and not named.get("model"):
        # A recipe may start the demo from fresh weights, and only the demo.
        if model.get("random"):
            found.overrides.append("model=tiny")
        found.notes.append(f"model: uses model=tiny, the shipped one of 0.6M parameters; {YOURS}")
    return found


def _named(group: str, node: Mapping[str, Any], swept: Collection[str]) -> str | None:
    """The key that names another model or other data than the shipped ones; None if there is none."""
    for key in NEUTRAL[group]:
        value = node.get(key)
        if f"{group}.{key}" in swept or (value is not None and not str(value).startswith(SHIPPED)):
            return key
    return None


def _shipped(group: str, preset: Any) -> Mapping[str, Any]:
    """The keys and values of ``conf/<group>/<preset>.yaml`` if it names the shipped model or data, else none."""
    from cookbook.cli import conf_files

    files = {file.name: file for file in conf_files.options(group)}
    node = conf_files.values(files[preset]) if preset in files else {}
    return node if any(str(node.get(key)).startswith(SHIPPED) for key in NEUTRAL[group]) else {}
