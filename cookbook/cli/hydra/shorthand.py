"""Overrides that name a model, data, code or several rewards: ``model=owner/name``, ``env=file.py:Class``, ``reward=[a,b]``.

The presets that ship with cookbook, and the values of ``conf/demo``, are for the shipped model and data. Naming another model
or other data replaces such a preset by a neutral one: ``model=hf``, ``data=jsonl`` or ``data=hub``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cookbook.cli.hydra.quotes import in_quotes, is_plain
from cookbook.errors import ConfigError

# Language models whose hub id has no owner; the hub has not given out such names for years.
WITHOUT_OWNER = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt")
SHIPPED = "${cookbook:data}"

# Group -> the key that names the model or data -> preset for that key.
NEUTRAL = {"model": {"name": "hf"}, "data": {"mix": "jsonl", "path": "jsonl", "name": "hub"}}
# The preset of files. It reads Parquet too, so that its name would mislead in a note.
FILES = "data=jsonl"
# The same, for a class or function of the user's file.
CODE = {"env": {"target": "python"}, "reward": {"target": "python"}}
_TEXT_FILES = (".jsonl", ".json", ".csv", ".tsv")
DATA_FILES = (*_TEXT_FILES, ".parquet", *(f"{suffix}{packed}" for suffix in _TEXT_FILES for packed in (".gz", ".zst")))
# Values of a group besides presets, for error messages.
FORMS = {
    "model": ["model=owner/name or model=./folder"],
    "data": ["data=FILE or data=owner/name"],
    "backend": ["backend=remote backend.base_url=URL"],
    "deployment": ["deployment=vllm deployment.url=URL"],
    "env": ["env=FILE.py:CLASS"],
    "loss": ["loss=FILE.py:CLASS_OR_FUNCTION"],
    "reward": ["reward=FILE.py:FUNCTION", "'reward=[number,FILE.py:FUNCTION]'"],
}
# Group -> the option that combines several others.
COMBINED = {"reward": "weighted"}
NO_DEMO = "demo=none"
SHIPPED_WEIGHTS = "model=tiny"
YOURS = "choose yours with model=owner/name or model=./folder"


# A split with slices, such as train[:10%]+test, which Hydra reads only in quotes, and the keys that have splits.
_SLICED = re.compile(r"(?<![\w.+'\"-])[\w.+-]+\[[-\d_%]*:[-\d_%]*\][\w.+\[\]:%-]*")
_WITH_SPLITS = ("data.split=", "data.eval_split=", "data.mix=")


# Keys whose value is a path, which may have any character.
_PATHS = (
    "data",
    "data.path",
    "data.eval_path",
    "out",
    "resume",
    "model",
    "model.name",
    "model.chat_template",
    "recipe.teacher",
    "reward.model",
)

# Those that take no list.
_SINGLE = ("out", "resume", "model.name", "recipe.teacher", "reward.model")


def quoted(word: str) -> str:
    """Return the override with quotes where Hydra needs them: slices of splits, a command, paths with special characters."""
    key, _, value = word.partition("=")
    if key.lstrip("+") in _PATHS and (_is_special(value) or (key in _SINGLE and value[:1] in tuple("[{"))):
        return f"{key}={in_quotes(value)}"
    if key.lstrip("+") == "env.command" and value not in ("", "???") and not (value[0] in "'\"" and value[-1] == value[0]):
        return f"{key}={in_quotes(value)}"
    return _SLICED.sub(lambda match: f"'{match[0]}'", word) if word.lstrip("+").startswith(_WITH_SPLITS) else word


def _is_special(value: str) -> bool:
    """Whether a path is a text that Hydra would not read, or would read as a list, a mapping or a sweep."""
    # `cookbook list` imports this module and must not load Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if is_plain(value) or value[:1] in ("'", '"', ""):
        return False
    # No path: a name that is too long, such as a mapping with a whole configuration, or the home folder of an unknown user.
    with contextlib.suppress(OSError, RuntimeError):
        if Path(value).expanduser().exists():
            return True
    try:
        OverridesParser.create().parse_override(f"key={value}")
    except HydraException:
        return True
    return False


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
    overrides: list[str] = []
    notes: list[str] = []
    for word, group, values in words:
        if group == "loss" and len(values) == 1 and ".py:" in values[0]:
            overrides.append(f"loss={{_target_: {in_quotes(values[0])}}}")
            continue
        presets = NEUTRAL.get(group) or CODE.get(group)
        key = _key_of(group, values, is_preset) if presets else None
        if presets is None or key is None:
            overrides.append(word)
            continue
        preset, name, text = f"{group}={presets[key]}", f"{group}.{key}", word.partition("=")[2]
        if any(other.partition("=")[0] == name for other, _, _ in words):
            raise ConfigError(f"{group}: {word} and {name}=... both name one; drop one of them")
        overrides += [preset, f"{name}={text}"]
        # A word or a mistyped path may mean something else, so the user reads the interpretation.
        if group not in CODE and ("/" not in text or preset == "data=hub"):
            notes.append(f"{word} means {name}={text}" if preset == FILES else f"{word} means {preset} {name}={text}")
    return overrides, notes


def combined(group: str, options: Sequence[object] | None, weighted: bool) -> list[str]:
    """Return the overrides of ``reward=[number,file.py:f]``: the option that combines rewards, and each reward as a part.

    The part of ``file.py:f`` is called ``f``.

    Args:
        options: as typed; None for a sweep over lists.
        weighted: whether the command line gives the weights as one value. Otherwise each part gets a weight of 1, so that
            ``reward.weights.format=0.2`` overrides it.

    Raises:
        ConfigError: a sweep, no options, an option that is neither a name nor a function of a file, or the same name twice.
    """
    if options is None:
        raise ConfigError(f"{group}: a sweep over lists is not supported; write ./conf/{group}/NAME.yaml for each list")
    texts = [str(option) for option in options]
    # The name of each part, and its function.
    parts = [(text.rpartition(":")[2], text) if ".py:" in text else (text, None) for text in texts]
    names = [name for name, _ in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{group}: {', '.join(twice)} occurs twice; rename a function, or write ./conf/{group}/NAME.yaml for the second"
        )
    are_names = all(isinstance(option, str) for option in options) and all(
        target is None or name.isidentifier() for name, target in parts
    )
    if not names or not are_names:
        raise ConfigError(
            f"{group}: expected names of conf/{group} or FILE.py:FUNCTION, got [{', '.join(texts)}]; write, for example, "
            f"'{group}=[number,my.py:f]'"
        )
    overrides = [f"{group}={COMBINED[group]}"]
    for name, target in parts:
        overrides.append(f"+{group}@{group}.parts.{name}={name if target is None else CODE[group]['target']}")
        if target is not None:
            overrides.append(f"{group}.parts.{name}.target={in_quotes(target)}")
    return [*overrides, *(f"+{group}.weights.{name}=1.0" for name in names if not weighted)]


def _key_of(group: str, values: Sequence[str], is_preset: Callable[[str, str], bool]) -> str | None:
    """Return ``name``, ``path`` or ``target``, the key that ``group=value`` stands for; None for presets and unknown words."""
    keys = {None if is_preset(group, value) else _key(group, value) for value in values}
    if len(keys) > 1:
        raise ConfigError(
            f"{group}: a sweep takes files of conf/{group}, or names, or paths, and no mixture, got {','.join(values)}; "
            f"write a file ./conf/{group}/NAME.yaml for those that have none"
        )
    return next(iter(keys), None)


def _key(group: str, value: str) -> str | None:
    path = Path(value)
    if not value:
        return None
    if group in CODE:
        return "target" if ".py:" in value else None
    if group == "model":
        is_folder = path.is_dir() or Path(value.partition("@")[0]).is_dir()
        return "name" if "/" in value or is_folder or value in WITHOUT_OWNER else None
    if (
        path.exists()
        or value.endswith(DATA_FILES)
        or any(character in value for character in "*?")
        or value.startswith((".", "/", "~"))
    ):
        return "path"
    if "/" in value:
        return "path" if path.parent.is_dir() else "name"  # a slip in a path, rather than a dataset of the hub
    return None


def named_here(group: str) -> list[str]:
    """Return the names of the models or data files in the current folder."""
    if group == "model":
        return [path.parent.name for path in Path().glob("*/config.json")]
    return [path.name for path in Path().iterdir() if path.name.endswith(DATA_FILES)] if group == "data" else []


def replacements(
    choices: Mapping[str, str], nodes: Mapping[str, Mapping[str, object]], typed: Collection[str], swept: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return overrides that keep the values of the shipped model and data from any other model or data, and notes for the user.

    Args:
        choices: the preset of each group.
        nodes: keys and values of ``model`` and ``data``, as far as they are in the configuration, interpolations not resolved.
        typed: the groups that the command line chooses.
        swept: the keys that the command line sweeps over.
    """
    overrides, notes = [], []
    named = {group: _named(group, node, swept) for group, node in nodes.items()}
    for group, presets in NEUTRAL.items():
        key = named.get(group)
        if key is None or not _shipped(group, choices.get(group)):
            continue
        if group not in typed:
            overrides.append(f"{group}={presets[key]}")
        elif "demo" not in typed:
            overrides.append(NO_DEMO)
    model = _shipped("model", choices.get("model"))
    if model and "model" not in typed and named.get("data") and not named.get("model"):
        # A recipe may start the demo from fresh weights, and only the demo.
        if model.get("random"):
            overrides.append(SHIPPED_WEIGHTS)
        notes.append(f"model: uses {SHIPPED_WEIGHTS}, the shipped one of 0.6M parameters; {YOURS}")
    return overrides, notes


def _named(group: str, node: Mapping[str, object], swept: Collection[str]) -> str | None:
    """Return the key that names another model or other data than the shipped ones; None if no key does."""
    for key in NEUTRAL[group]:
        value = node.get(key)
        if f"{group}.{key}" in swept or (value is not None and not str(value).startswith(SHIPPED)):
            return key
    return None


def _shipped(group: str, preset: str | None) -> Mapping[str, object]:
    """Return the keys and values of ``conf/<group>/<preset>.yaml`` if it names the shipped model or data, else none."""
    from cookbook.cli.hydra import conf_files

    files = {file.name: file for file in conf_files.options(group)}
    node = conf_files.values(files[preset]) if preset in files else {}
    return node if any(str(node.get(key)).startswith(SHIPPED) for key in NEUTRAL[group]) else {}
