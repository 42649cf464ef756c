"""Hydra's errors of several lines as one line, with a suggestion.

Hydra's errors carry no fields, so their texts are matched. They may change with a release: every entry has a test.
``foreign_names.yaml`` lists names of TRL, axolotl, Tinker and Fireworks with cookbook's keys for the same setting.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from cookbook.cli.hydra import conf_files, shorthand
from cookbook.config import recipe
from cookbook.config.typed import TARGET
from cookbook.utils import paths
from cookbook.utils.suggest import did_you_mean, did_you_mean_key, same_last_part


@dataclass(frozen=True)
class Keys:
    """Every key of the configuration.

    ``find`` is a function, because a composition is needed to find the keys. ``command`` prints them all. ``typed`` has the
    overrides of the command line.
    """

    find: Callable[[], Sequence[str]]
    command: str = "train"
    typed: Sequence[str] = ()


def explain(error: Exception, keys: Keys) -> str:
    """Return one line for an error raised while a configuration is composed."""
    if mark := getattr(error, "problem_mark", None):
        return f"{paths.shown(Path(mark.name))}:{mark.line + 1}: not valid YAML: {getattr(error, 'problem', '')}"
    text = str(error)
    for pattern, say in _TABLE:
        if match := re.search(pattern, text, re.DOTALL):
            return say.format(**match.groupdict()) if isinstance(say, str) else say(match, keys)
    if override := getattr(error, "override", None):
        return _unreadable(override, list(keys.typed))
    # With a cause, the text names the override only.
    if error.__cause__ is not None:
        text = f"{text.removeprefix('Error merging override')}: {error.__cause__}".partition("\n")[0]
    return " ".join(re.sub(r"\nSee https://\S+.*", "", text).split())


def unresolved(error: OmegaConfBaseException) -> str:
    """Return one line for an interpolation that does not resolve. A variable of the environment needs ``oc.env``."""
    text = " ".join(str(error).splitlines()[0].split())
    where = error.full_key or "configuration"
    if match := re.search(r"Environment variable '(\w+)' not found", text):
        name = match[1]
        return f"{where}: the environment variable {name} is not set; set it, or write ${{oc.env:{name},DEFAULT}}"
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        name = match[1]
        if name in os.environ or name.isupper():
            return f"{where}: no key {name!r} to interpolate; an environment variable is written as ${{oc.env:{name}}}"
        return f"{where}: no key {name!r} to interpolate; write a key of the configuration, such as ${{optim.lr}}"
    if "Recursive interpolation" in text or "recursion" in text:
        return f"{where}: an interpolation that refers to itself; write a value"
    return f"{where}: {text}"


def is_hydras(error: Exception) -> bool:
    """Whether the text is one of Hydra's, for an error of any type."""
    return any(re.search(pattern, str(error), re.DOTALL) for pattern, _ in _TABLE)


def unknown_key(key: str, keys: Keys) -> str:
    """Return the line for a key that nothing reads; if it is another library's name, for all such names of the command line."""
    known = keys.find()
    parent, _, last = key.rpartition(".")
    if last == TARGET:
        return f"unknown key {key!r}; to add a component, write {parent}='{{{TARGET}: package.module.Class}}'"
    typed = dict(word.lstrip("+").partition("=")[::2] for word in keys.typed)
    answer = _answer(key, typed.get(key), known)
    if (own := _own_component(key, known)) and not (answer and answer.words):
        return f"unknown key {key!r}; {own}"
    if answer is None:
        return f"unknown key {key!r}.{did_you_mean_key(key, known)} (cookbook {keys.command} --cfg job prints every key)"
    answers = {key: answer}
    for other, value in typed.items():
        if known and other not in known and not other.startswith(("~", "hydra")) and (answer := _answer(other, value, known)):
            answers.setdefault(other, answer)
    return _line("key", answers)


def _own_component(key: str, known: Sequence[str]) -> str:
    """Return how to add the component that ``key`` is a setting of, such as ``tracker.mine``; "" if it is no component's.

    Trackers and hooks have names, a reward has none.
    """
    group, _, name_and_field = key.partition(".")
    name = name_and_field.partition(".")[0]
    own = group if group == "reward" else f"{group}.{name}"
    if group not in ("tracker", "hook", "reward") or not name or {f"{group}.{TARGET}", f"{group}.{name}"} & set(known):
        return ""
    if own != group and name in (file.name for file in conf_files.options(group)):
        return f"add {group}={name}"
    return f"a {group} of your own needs {TARGET}: write {own}='{{{TARGET}: package.module.Class}}' with its settings"


# Ways in which an error begins that names a key: an unknown key, a group, or the key itself. The next word may be a key
# of the group.
_NAMES_KEY = re.compile(r"unknown keys? '(?P<key>[\w./]+)'|unknown (?P<group>\w+) '|(?P<path>[A-Za-z_][\w./]*): (?P<next>\w+)?")
# The remedy of an unknown key as on the command line.
_WRITTEN = re.compile(r"(?<=write )([\w.]+)=([^\s;,()]+)(?=$|[;\s])(?! \w+[.=])")


def located(message: str, origins: Mapping[str, str]) -> str:
    """Return a message with the place of the key that it begins with, ``my.yaml:4: ...``, if ``origins`` has one.

    Args:
        origins: dotted key -> file and line.
    """
    match = _NAMES_KEY.match(message)
    if match is None:
        return message
    key = match["key"] or match["group"] or match["path"]
    where = origins.get(f"{key}.{match['next']}") or origins.get(key)
    if where is None or message.startswith(where):
        return message
    as_in_a_file = _WRITTEN.sub(r"\1: \2", message)
    return f"{where}: {as_in_a_file}"


def unknown_options(options: Mapping[str, str | None], keys: Keys) -> str | None:
    """Return the line for options that the command does not have, such as ``--optim.lr 1e-4``; None if no key fits any."""
    counterparts = {option: _answer(option.lstrip("-"), value, keys.find()) for option, value in options.items()}
    answers = {option: answer for option, answer in counterparts.items() if answer is not None}
    return _line("option", answers) if answers else None


def _unknown_option(match: re.Match[str], keys: Keys) -> str:
    group, option = match["group"], match["option"]
    choices = [choice for choice in match["options"].split() if not choice.startswith("_")]
    if not option:
        return f"{group}: no option given (choices: {', '.join(choices)})"
    if words := _choice(group, option, keys.find()):
        return f"unknown {group} {option!r}; write {shlex.join(words)} (choices: {', '.join(choices)})"
    here = shorthand.named_here(group)
    listed = "; ".join([", ".join(choices), *shorthand.FORMS.get(group, [])])
    return f"unknown {group} {option!r}.{did_you_mean(option, [*choices, *here])} (choices: {listed})"


def _override_in_file(match: re.Match[str], keys: Keys) -> str:
    hint = did_you_mean(match["group"], {key.partition(".")[0] for key in keys.find()})
    return f"conf/{match['file']}.yaml overrides /{match['group']}, which the configuration does not choose.{hint}"


def _sweep(match: re.Match[str], keys: Keys) -> str:
    key, _, values = match["override"].partition("=")
    list_override = f"{key}=[{values}]"
    return f"{match['override']!r} is a list of values: add -m to sweep over them, or write {list_override!r} for one list"


def _group_value(match: re.Match[str], keys: Keys) -> str:
    if match["type"] == "NoneType":
        return "a group takes an option name, not null: write ~group to drop it"
    # The text has neither group nor value: the word is the one of a group whose value is not text.
    words = [word for word in keys.typed if re.fullmatch(r"\+*[\w/]+=(true|false|[-+.\d][-+.\de]*)", word, re.IGNORECASE)]
    for group in (word.lstrip("+").partition("=")[0] for word in words):
        if names := [file.name for file in conf_files.options(group)]:
            return (
                f"{group}: a group takes an option name, not a number or true: write {group}=NAME (choices: {', '.join(names)})"
            )
    return "a group takes an option name, not a number: write group=name"


def _nothing_to_drop(match: re.Match[str], keys: Keys) -> str:
    key = match["key"]
    return f"~{key}: {key!r} is not in the configuration.{did_you_mean_key(key, keys.find())}"


def _unreadable(override: str, typed: list[str]) -> str:
    place = typed.index(override) if override in typed else 0
    before, after = typed[max(place - 1, 0) : place], typed[place + 1 : place + 3]
    joined = override
    if after and after[0].startswith("="):
        joined += "".join(after[: 2 if after[0] == "=" else 1])
    elif before and before[0].endswith("="):
        joined = before[0] + override
    if joined != override:
        return f"cannot read {override!r}; write {shlex.quote(joined)}, without spaces around the ="
    if any(info.name == override for info in recipe.available()):
        return f"cannot read {override!r}; write recipe={override}"
    return f"cannot read {override!r}; write key=value, and quotes around what is not a plain word: key=\"'a = b'\""


def _undecided(match: re.Match[str], keys: Keys) -> str:
    """Return the line for a dropped group that decides whether the values of ``conf/demo`` apply."""
    group = next(group for group in ("model", "data", "demo") if group not in match["known"].split(", "))
    if group == "demo":
        return "~demo: write demo=none"
    return f"{group}: expected keys and values, got nothing; choose a file of conf/{group}/"


ADDED_TWICE = "{key} is already in the configuration; write {key}=... without the +"
# Pattern of a text, and the line for it: a format of the pattern's groups, or a function.
_TABLE: tuple[tuple[str, str | Callable[[re.Match[str], Keys], str]], ...] = (
    (
        r"Could not find '(?P<group>\w+)/(?P<option>[^']*)'\n\nAvailable options in '[^']*':"
        r"\n(?P<options>.*?)(?:\nConfig search path:|\Z)",
        _unknown_option,
    ),
    (
        r"Could not (?:find|load) '(?P<group>[^'\n]+)/(?P<option>[^/'\n]+)'",
        "unknown {group} {option!r}; it would be ./conf/{group}/{option}.yaml",
    ),
    (
        r"Cannot find primary config '(?P<name>[^']*)'",
        "--config-name: {name}.yaml not found in ./conf, a --config-dir, or the packaged conf",
    ),
    (
        r"In '(?P<folder>[^'/]+)/[^']*': Could not override '(?P<group>[^@']+)@(?P=folder)\.",
        "a file in conf/{folder}/ overrides /{group}, so it must start with '# @package _global_'",
    ),
    (r"In '(?P<file>[^']+)': Could not override '(?P<group>[^']+)'\. No match", _override_in_file),
    (r"Could not override '(?P<key>[^']+)'\.\nTo append to your config", lambda match, keys: unknown_key(match["key"], keys)),
    (r"Could not override '(?P<group>[^']+)'\.", "{group} is not a chosen group; write +{group}=... to add it"),
    (r"Ambiguous value for argument '(?P<override>.*?)'\n", _sweep),
    (
        r"Sweep parameters '(?P<override>.*)' requires --multirun",
        "{override!r} stands for several values: add -m to sweep over them",
    ),
    (r"Config group override must be a string or a list. Got (?P<type>\w+)", _group_value),
    (r"Could not delete from config. '(?P<key>[^']+)' does not exist", _nothing_to_drop),
    (r"Could not delete '(?P<key>[^']+)'. No match in the defaults list", _nothing_to_drop),
    (r"An item is already at '(?P<key>[^']+)'", ADDED_TWICE),
    (r"^(?P<key>\S+) appears more than once in the final defaults list", ADDED_TWICE),
    (r"^(?P<problem>(?:Interpolation|Unsupported interpolation)[^\n]*)\n\s*full_key: (?P<key>\S+)", "{key}: {problem}"),
    (r"Error resolving interpolation '\$\{demo\}/.*', possible interpolation keys: (?P<known>.*)", _undecided),
    (r"force-add of config groups is not supported: '\+\+(?P<key>[^=']+)", ADDED_TWICE),
)

ALL_OTHERS = "*"  # of `values`


@dataclass(frozen=True)
class Counterpart:
    """Overrides to write in place of a name, a remark, or both."""

    words: Sequence[str] = ()
    remark: str = ""


@dataclass(frozen=True)
class ForeignName:
    """One alternative of ``foreign_names.yaml``, which documents the fields."""

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
        """Return the typed value as overrides of cookbook; empty if the value is absent or has no exact counterpart."""
        if self.to is None or value is None:
            return []
        if self.values is not None:
            counterpart = self.values.get(value.lower(), self.values.get(ALL_OTHERS))
            if counterpart is None or "=" in counterpart:
                return (counterpart or "").split()
            value = counterpart.replace("{}", value)
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


def _answer(name: str, value: str | None, keys: Collection[str]) -> Counterpart | None:
    """Return the answer to a key or option that the configuration does not have; None if the name is unknown.

    Args:
        name: as typed, with or without one of cookbook's prefixes: ``learning_rate``, ``optim.learning_rate``.
        value: as typed; None if the command line has none.
        keys: every dotted key of the configuration; empty if it cannot be composed.
    """
    if name in keys:
        return Counterpart(_choice(name, value or "", keys) or [f"{name}={value or 'VALUE'}"])
    # backend.rank is backend.ranks rather than another library's rank.
    for own in (f"{name}s", name.removesuffix("s")):
        if own in keys:
            return Counterpart([f"{own}={value or 'VALUE'}"])
    prefix, _, last = name.replace("-", "_").rpartition(".")
    entries = table().get(last, ())
    fitting = [entry for entry in entries if not keys or entry.fits(keys)]
    if fitting:
        # Without a group the first entry wins, even over a remark, which has no group either.
        best = min(fitting, key=lambda entry: bool(prefix) and _group(entry.to) != _group(prefix))
        return best.answer(value, keys)
    same = same_last_part(last, keys)
    if len(same) == 1 and value is not None:
        return Counterpart(_filled(f"{same[0]}={{}}", value))
    if entries and not same:
        absent = " or ".join(dict.fromkeys(str(entry.to) for entry in entries))
        return Counterpart(remark=f"cookbook's key is {absent}, which the chosen recipe and its parts do not have")
    return None


def _choice(group: str, option: str, keys: Collection[str]) -> list[str]:
    """Return overrides for another library's option of one of cookbook's groups, such as ``optim=adamw_torch``; or none."""
    return next((words for entry in table().get(group, ()) if entry.fits(keys) and (words := entry.overrides(option))), [])


def _line(kind: str, answers: Mapping[str, Counterpart]) -> str:
    """Return one line for all answers; ``kind`` is ``key`` or ``option``."""
    names = ", ".join(map(repr, answers))
    words = [word for answer in answers.values() for word in answer.words]
    remarks = [(name, answer.remark) for name, answer in answers.items() if answer.remark]
    parts = ["write " + shlex.join(dict.fromkeys(words))] if words else []
    parts += [f"{name}: {remark}" if len(answers) > 1 else remark for name, remark in remarks]
    text = parts[0] + "".join(f" ({part})" for part in parts[1:]) if len(answers) == 1 else "; ".join(parts)
    return f"unknown {kind}{'s' if len(answers) > 1 else ''} {names}; {text}"


def split_options(arguments: Sequence[str], known: Mapping[str, bool]) -> tuple[dict[str, str | None], list[str]]:
    """Return the options that the command does not have, with their values, and the other words of the command line.

    Args:
        arguments: the words after the command's name.
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
    """Whether a word after an option is its value: neither an option nor an override."""
    return "=" not in word and (not word.startswith("-") or word[1:2].isdigit())


@functools.cache
def table() -> dict[str, list[ForeignName]]:
    """Return every name of another library with its alternatives."""
    import yaml  # type: ignore[import-untyped]

    # As on the command line, every value is text.
    read = yaml.load(Path(__file__).with_name("foreign_names.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return {name: [_entry(item) for item in (node if isinstance(node, list) else [node])] for name, node in read.items()}


def _entry(node: str | conf_files.Node) -> ForeignName:
    return ForeignName(node) if isinstance(node, str) else ForeignName(**node)


def _filled(form: str, value: str) -> list[str]:
    """Return the words of ``form``, each with ``value`` for its ``{}``; a value may have spaces."""
    return [word.replace("{}", value) for word in form.split()]


def _group(key: str | None) -> str:
    return (key or "").partition(".")[0]
