"""The files of ``conf/``: their names, origin, comments and values, read without Hydra."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.errors import ConfigError
from cookbook.utils import paths
from cookbook.utils.suggest import did_you_mean

OVERRIDE = "override /"
Node = dict[str, Any]
"""Keys and values of a YAML file."""
FORKED = re.compile(r"^# forked from (\w+)\n", re.MULTILINE)


@dataclass(frozen=True)
class ConfFile:
    """``conf/<group>/<name>.yaml``."""

    group: str
    name: str
    path: Path

    @property
    def origin(self) -> str:
        """``packaged`` or ``user``."""
        return "packaged" if self.path.is_relative_to(paths.packaged("conf")) else "user"

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def summary(self) -> str:
        """Return the first comment line that is written for readers."""
        for line in self.text().splitlines():
            if line.startswith("#") and "@package" not in line and not FORKED.match(f"{line}\n"):
                return line.lstrip("# ")
        return ""


def options(group: str) -> list[ConfFile]:
    """Return every file that ``group=NAME`` can choose, by name. Names with ``_`` in front are bases of others."""
    names = {path.stem for folder in paths.overlays("conf") for path in (folder / group).glob("[!_]*.yaml")}
    return [find(group, name) for name in sorted(names)]


def find(group: str, name: str) -> ConfFile:
    """Return the file that ``group=name`` chooses, the user's if ``./conf`` has one.

    Raises:
        ConfigError: no such file exists.
    """
    path = paths.find("conf", f"{group}/{name}.yaml")
    if path is None:
        names = [file.name for file in options(group)]
        raise ConfigError(f"unknown {group} {name!r}.{did_you_mean(name, names)} (choices: {', '.join(names)})")
    return ConfFile(group, name, path)


def values(file: ConfFile) -> Node:
    """Return the file's values, merged over those of the files of its group that its defaults list names.

    Raises:
        ConfigError: the file is not YAML, or names a file that does not exist.
    """
    own = _loaded(file.path)
    merged: Node = {}
    for name in own.pop("defaults", []):
        if isinstance(name, str) and name != "_self_":
            merged |= values(find(file.group, name))
    return merged | own


def _loaded(path: Path) -> Node:
    """Return the keys of a YAML file, with interpolations unresolved. Raise ConfigError if the file is not YAML."""
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except YAMLError as error:
        raise ConfigError(f"{paths.shown(path)}: not valid YAML: {error}".partition("\n")[0]) from error
    return {str(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}


def composed(recipe: str) -> Node:
    """Return every top-level key of ``cookbook train recipe=...`` with its value, without the recipe's own node.

    Hydra composes the same, but cannot be called while it composes or runs.
    """
    top, own = _file("train.yaml"), _file(f"recipe/{recipe}.yaml")
    choices = dict(_choices(top)) | dict(_choices(own))
    demos, shipped = options(f"demo/{choices.pop('demo', None)}"), f"{choices.get('model')}_{choices.get('data')}"
    demo = next((values(file) for file in demos if file.name == shipped), {})
    nodes = {group: values(find(group, option)) for group, option in choices.items()}
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(_without_defaults(top), nodes, _without_defaults(own), demo)
    plain = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "recipe"}


def comments(file: ConfFile) -> dict[str, str]:
    """Return the comment of each dotted key: behind its value, else the lines above the key. Bases are included."""
    import yaml

    texts: dict[str, str] = {}
    for name in _loaded(file.path).get("defaults", []):
        if isinstance(name, str) and name != "_self_":
            texts |= comments(find(file.group, name))
    text = file.text()
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            start = key.start_mark.line
            _, mark, comment = lines[value.end_mark.line - (value.end_mark.column == 0)].partition("# ")
            above: list[str] = []
            for line in reversed(lines[1:start]):
                if not line.lstrip().startswith("# "):
                    break
                above.insert(0, line.strip().removeprefix("# "))
            own = comment if mark and not isinstance(value, yaml.MappingNode) else ""
            if own or above:
                texts[f"{prefix}{key.value}"] = (own or " ".join(above)).strip()
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                walk(value, f"{prefix}{key.value}.")

    if isinstance(root := yaml.compose(text, Loader=yaml.SafeLoader), yaml.MappingNode):
        walk(root, "")
    return texts


def top_level(name: str) -> set[str]:
    """Return the top-level keys that the packaged ``conf/NAME.yaml`` has, and the groups that it chooses."""
    content = _loaded(paths.packaged("conf") / f"{name}.yaml")
    groups = {str(key).split()[-1] for entry in content.get("defaults", []) if isinstance(entry, Mapping) for key in entry}
    return {*_without_defaults(content), *(group for group in groups if "@" not in group)} - {"experiment", "debug", "local"}


def _file(name: str) -> Node:
    """Return the keys of a file of ``conf/``; none if the file is absent, because a run resumes without its recipe's file."""
    path = paths.find("conf", name)
    return _loaded(path) if path else {}


def _choices(content: Node) -> Iterator[tuple[str, str]]:
    """Yield group and option of each entry of a defaults list that chooses an option, except for ``recipe``."""
    for entry in content.get("defaults", []):
        for group, option in entry.items() if isinstance(entry, Mapping) else ():
            group = str(group).removeprefix(OVERRIDE)
            if option is not None and " " not in group and group != "recipe":
                yield group, str(option)


def _without_defaults(content: Node) -> Node:
    return {key: value for key, value in content.items() if key != "defaults"}


def note_shadowed(kind: str, names: Iterable[str]) -> None:
    """Print one line on stderr for each file of that name that both the user's folder and the packaged folder have."""
    for name in names:
        if sum((folder / name).is_file() for folder in paths.overlays(kind)) > 1:
            print(f"using ./{kind}/{name} instead of the packaged one", file=sys.stderr)
