"""Answers to names of other libraries: ``names.yaml`` lists TRL's, axolotl's, Tinker's and Fireworks' with cookbook's keys."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook import suggest

ALL_OTHERS = "*"  # of `values`


@dataclass(frozen=True)
class Counterpart:
    """Overrides to write in place of a name, a remark, or both."""

    words: Sequence[str] = ()
    remark: str = ""


@dataclass(frozen=True)
class ForeignName:
    """One alternative of ``names.yaml``, which documents the fields."""

    to: str | None = None
    needs: str | None = None
    values: Mapping[str, str] | None = None
    form: str | None = None
    adds: str | None = None
    note: str = ""

    def fits(self, keys: Collection[str]) -> bool:
        """Whether a configuration with ``keys`` has the key or group, or would have it with ``adds``."""
        if self.to is None or (self.adds is not None and self.needs is None):
            return True
        return (self.needs or self.to) in keys

    def overrides(self, value: str | None) -> list[str]:
        """The typed value as overrides of cookbook; empty if the value is absent or has no exact counterpart."""
        if self.to is None or value is None:
            return []
        if self.values is not None:
            found = self.values.get(value.lower(), self.values.get(ALL_OTHERS))
            if found is None or "=" in found:
                return (found or "").split()
            value = found.replace("{}", value)
        return _filled(self.form or f"{self.to}={{}}", value)

    def answer(self, value: str | None, keys: Collection[str]) -> Counterpart:
        if self.to is None:
            return Counterpart(remark=self.note)
        words = self.overrides(value)
        added = [self.adds] if self.adds is not None and self.to not in keys else []
        if words:
            return Counterpart([*added, *words], self.note)
        subject = f"cookbook's key is {self.to}" + "".join(f", with {word}" for word in added)
        if self.values and value is not None and not self.note:
            subject += f", which has no value for {value!r}"
        return Counterpart(remark=f"{subject}: {self.note}" if self.note else subject)


def answer(name: str, value: str | None, keys: Collection[str]) -> Counterpart | None:
    """The answer to a key or option that the configuration does not have; None if the name is unknown.

    Args:
        name: as typed, with or without one of cookbook's prefixes: ``learning_rate``, ``optim.learning_rate``.
        value: as typed; None if the command line has none.
        keys: every dotted key of the configuration; empty if it cannot be composed.
    """
    if name in keys:
        return Counterpart(choice(name, value or "", keys) or [f"{name}={value or 'VALUE'}"])
    prefix, _, last = name.replace("-", "_").rpartition(".")
    entries = table().get(last, ())
    fitting = [entry for entry in entries if not keys or entry.fits(keys)]
    if fitting:
        fitting.sort(key=lambda entry: _group(entry.to) != _group(prefix))
        return fitting[0].answer(value, keys)
    same = suggest.same_last_part(last, keys)
    if len(same) == 1 and value is not None:
        return Counterpart(_filled(f"{same[0]}={{}}", value))
    if entries and not same:
        absent = " or ".join(dict.fromkeys(str(entry.to) for entry in entries))
        return Counterpart(remark=f"cookbook's key is {absent}, which the chosen recipe and its parts do not have")
    return None


def choice(group: str, option: str, keys: Collection[str]) -> list[str]:
    """The overrides for another library's option of a group of cookbook, such as ``optim=adamw_torch``; empty if unknown."""
    return next((words for entry in table().get(group, ()) if entry.fits(keys) and (words := entry.overrides(option))), [])


def line(kind: str, answers: Mapping[str, Counterpart]) -> str:
    """One line for all answers; ``kind`` is ``key`` or ``option``."""
    names = ", ".join(map(repr, answers))
    words = [word for found in answers.values() for word in found.words]
    remarks = [(name, found.remark) for name, found in answers.items() if found.remark]
    parts = ["write " + shlex.join(dict.fromkeys(words))] if words else []
    parts += [f"{name}: {remark}" if len(answers) > 1 else remark for name, remark in remarks]
    text = parts[0] + "".join(f" ({part})" for part in parts[1:]) if len(answers) == 1 else "; ".join(parts)
    return f"unknown {kind}{'s' if len(answers) > 1 else ''} {names}; {text}"


def unknown_options(arguments: Sequence[str], known: Mapping[str, bool]) -> tuple[dict[str, str | None], list[str]]:
    """The options of a command line that the command does not have, with their values, and the other words.

    Args:
        arguments: the words behind the command's name.
        known: the command's options; whether each is followed by a value.
    """
    options: dict[str, str | None] = {}
    plain: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or not word.strip("-"):
            plain.append(word)
        elif name in known:
            del words[: int(known[name] and not equals)]
        elif equals:
            options[name] = value
        elif words and _is_value(words[0]):
            options[name] = words.pop(0)
        else:
            options[name] = "true"
    return options, plain


def _is_value(word: str) -> bool:
    """Whether a word behind an option is its value: neither an option nor an override."""
    return "=" not in word and (not word.startswith("-") or word[1:2].isdigit())


@functools.cache
def table() -> dict[str, list[ForeignName]]:
    """Every name with its alternatives."""
    import yaml  # type: ignore[import-untyped]

    read = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
    return {name: [_entry(found) for found in (node if isinstance(node, list) else [node])] for name, node in read.items()}


def _entry(node: Any) -> ForeignName:
    if isinstance(node, str):
        return ForeignName(node)
    values = node.get("values")
    if values is not None:
        values = {_spelled(typed): _spelled(value) for typed, value in values.items()}
    return ForeignName(node.get("to"), node.get("if"), values, node.get("form"), node.get("with"), node.get("note", ""))


def _spelled(value: Any) -> str:
    """A value of YAML as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _filled(form: str, value: str) -> list[str]:
    """The words of ``form`` with the value in each; a value may have spaces."""
    return [word.replace("{}", value) for word in form.split()]


def _group(key: str | None) -> str:
    return (key or "").partition(".")[0]
