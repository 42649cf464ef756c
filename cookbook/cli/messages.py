"""What Hydra says in several lines, said in one, with a suggestion.

Hydra's errors carry no fields, so their texts are matched. They may change with a release: every entry has a test.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook import paths, recipe
from cookbook.cli import names, shorthand
from cookbook.suggest import did_you_mean, did_you_mean_key
from cookbook.typed import TARGET


@dataclass(frozen=True)
class Keys:
    """Every key of the configuration.

    ``find`` is a function, because a composition is needed to find the keys. ``command`` prints them all. ``typed`` has the
    overrides of the command line.
    """

    find: Callable[[], Sequence[str]]
    command: str = "train"
    typed: Sequence[str] = ()

    def __call__(self) -> Sequence[str]:
        return self.find()


def explain(error: Exception, keys: Keys) -> str:
    """One line for an error raised while a configuration is composed."""
    if mark := getattr(error, "problem_mark", None):
        return _not_yaml(error, mark)
    text = str(error)
    for pattern, say in _TABLE:
        if match := re.search(pattern, text, re.DOTALL):
            return say(match, keys)
    if override := getattr(error, "override", None):
        return _unreadable(override)
    if error.__cause__ is not None:  # then it says only which override it is
        text = f"{text.removeprefix('Error merging override')}: {error.__cause__}".partition("\n")[0]
    return " ".join(re.sub(r"\nSee https://\S+.*", "", text).split())


def is_hydras(error: Exception) -> bool:
    """Whether the text is one of those Hydra writes, whatever the type says."""
    return any(re.search(pattern, str(error), re.DOTALL) for pattern, _ in _TABLE)


def unknown_key(key: str, keys: Keys) -> str:
    """The line for a key that nothing reads; if it is another library's name, for all such names of the command line."""
    known = keys()
    parent, _, last = key.rpartition(".")
    if last == TARGET:
        return f"unknown key {key!r}; to add a component, write {parent}='{{{TARGET}: package.module.Class}}'"
    typed = dict(word.lstrip("+").partition("=")[::2] for word in keys.typed)
    found = names.answer(key, typed.get(key), known)
    if found is None:
        return f"unknown key {key!r}.{did_you_mean_key(key, known)} {_every_key(keys)}"
    answers = {key: found}
    for other, value in typed.items():
        if (
            known
            and other not in known
            and not other.startswith(("~", "hydra"))
            and (found := names.answer(other, value, known))
        ):
            answers.setdefault(other, found)
    return names.line("key", answers)


def unknown_options(options: Mapping[str, str | None], keys: Keys) -> str | None:
    """The line for options that the command does not have, such as ``--optim.lr 1e-4``; None if no key answers to any."""
    found = {option: names.answer(option.lstrip("-"), value, keys()) for option, value in options.items()}
    answers = {option: answer for option, answer in found.items() if answer is not None}
    return names.line("option", answers) if answers else None


def _every_key(keys: Keys) -> str:
    return f"(cookbook {keys.command} --cfg job prints every key)"


def _unknown_key(match: re.Match[str], keys: Keys) -> str:
    return unknown_key(match["key"], keys)


def _not_yaml(error: Any, mark: Any) -> str:
    return f"{paths.shown(Path(mark.name))}:{mark.line + 1}: not valid YAML: {error.problem}"


def _unknown_option(match: re.Match[str], keys: Keys) -> str:
    group, option = match["group"], match["option"]
    choices = match["options"].split()
    if not option:
        return f"{group}: no option given (choices: {', '.join(choices)})"
    if words := names.choice(group, option, keys()):
        return f"unknown {group} {option!r}; write {shlex.join(words)} (choices: {', '.join(choices)})"
    here = shorthand.named_here(group)
    listed = "; ".join([", ".join(choices), *shorthand.FORMS.get(group, [])])
    return f"unknown {group} {option!r}.{did_you_mean(option, [*choices, *here])} (choices: {listed})"


def _no_option(match: re.Match[str], keys: Keys) -> str:
    return f"unknown {match['group']} {match['option']!r}; it would be ./conf/{match['group']}/{match['option']}.yaml"


def _no_primary(match: re.Match[str], keys: Keys) -> str:
    return f"--config-name: there is no {match['name']}.yaml in ./conf, a --config-dir, or the packaged conf"


def _not_global(match: re.Match[str], keys: Keys) -> str:
    return f"a file in conf/{match['folder']}/ overrides /{match['group']}, so it must start with '# @package _global_'"


def _override_in_file(match: re.Match[str], keys: Keys) -> str:
    hint = did_you_mean(match["group"], {key.partition(".")[0] for key in keys()})
    return f"conf/{match['file']}.yaml overrides /{match['group']}, which the configuration does not choose.{hint}"


def _override_nothing(match: re.Match[str], keys: Keys) -> str:
    return f"{match['group']} is not among the groups that are chosen; write +{match['group']}=... to add it"


def _sweep(match: re.Match[str], keys: Keys) -> str:
    key, _, values = match["override"].partition("=")
    one = f"{key}=[{values}]"
    return f"{match['override']!r} is a list of values: add -m to sweep over them, or write {one!r} for one list"


def _sweep_function(match: re.Match[str], keys: Keys) -> str:
    return f"{match['override']!r} stands for several values: add -m to sweep over them"


def _group_value(match: re.Match[str], keys: Keys) -> str:
    if match["type"] == "NoneType":
        return "a group takes an option name, not null: write ~group to drop it"
    return "a group takes an option name, not a number: write group=name"


def _nothing_to_drop(match: re.Match[str], keys: Keys) -> str:
    key = match["key"]
    return f"~{key}: there is no {key!r} to drop.{did_you_mean_key(key, keys())}"


def _exists(match: re.Match[str], keys: Keys) -> str:
    return f"{match['key']} is there already: write {match['key']}=... without the +"


def _unreadable(override: str) -> str:
    if any(found.name == override for found in recipe.available()):
        return f"cannot read {override!r}; write recipe={override}"
    return f"cannot read {override!r}; write key=value, and quotes around what is not a plain word: key=\"'a = b'\""


def _undecided(match: re.Match[str], keys: Keys) -> str:
    """A dropped group that decides whether the values of ``conf/demo`` hold."""
    group = next(group for group in ("model", "data", "demo") if group not in match["known"].split(", "))
    if group == "demo":
        return "~demo: write demo=none"
    return f"{group}: expected keys and values, got nothing; choose a file of conf/{group}/"


def _interpolation(match: re.Match[str], keys: Keys) -> str:
    return f"{match['key']}: {match['problem']}"


_TABLE: tuple[tuple[str, Callable[[re.Match[str], Keys], str]], ...] = (
    (
        r"Could not find '(?P<group>.+)/(?P<option>[^/']*)'\n\nAvailable options in '[^']*':"
        r"\n(?P<options>.*?)(?:\nConfig search path:|\Z)",
        _unknown_option,
    ),
    (r"Could not (?:find|load) '(?P<group>[^'\n]+)/(?P<option>[^/'\n]+)'", _no_option),
    (r"Cannot find primary config '(?P<name>[^']*)'", _no_primary),
    (r"In '(?P<folder>[^'/]+)/[^']*': Could not override '(?P<group>[^@']+)@(?P=folder)\.", _not_global),
    (r"In '(?P<file>[^']+)': Could not override '(?P<group>[^']+)'\. No match", _override_in_file),
    (r"Could not override '(?P<key>[^']+)'\.\nTo append to your config", _unknown_key),
    (r"Could not override '(?P<group>[^']+)'\.", _override_nothing),
    (r"Ambiguous value for argument '(?P<override>.*?)'\n", _sweep),
    (r"Sweep parameters '(?P<override>.*)' requires --multirun", _sweep_function),
    (r"Config group override must be a string or a list. Got (?P<type>\w+)", _group_value),
    (r"Could not delete from config. '(?P<key>[^']+)' does not exist", _nothing_to_drop),
    (r"Could not delete '(?P<key>[^']+)'. No match in the defaults list", _nothing_to_drop),
    (r"An item is already at '(?P<key>[^']+)'", _exists),
    (r"^(?P<key>\S+) appears more than once in the final defaults list", _exists),
    (r"^(?P<problem>(?:Interpolation|Unsupported interpolation)[^\n]*)\n\s*full_key: (?P<key>\S+)", _interpolation),
    (r"Error resolving interpolation '\$\{demo\}/.*', possible interpolation keys: (?P<known>.*)", _undecided),
    (r"force-add of config groups is not supported: '\+\+(?P<key>[^=']+)", _exists),
)
