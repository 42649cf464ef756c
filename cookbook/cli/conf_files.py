"""The files of ``conf/`` as files: which there are, whose they are, what they say. Composing them is Hydra's part."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook import paths
from cookbook.errors import ConfigError
from cookbook.suggest import did_you_mean

FORKED = re.compile(r"^# forked from (\w+)\n", re.MULTILINE)


@dataclass(frozen=True)
class ConfFile:
    """``conf/<group>/<name>.yaml``; ``origin`` is ``packaged`` or ``user``."""

    group: str
    name: str
    path: Path
    origin: str

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def summary(self) -> str:
        """The first comment line that is meant for people."""
        for line in self.text().splitlines():
            if line.startswith("#") and "@package" not in line and not FORKED.match(f"{line}\n"):
                return line.lstrip("# ")
        return ""


def options(group: str) -> list[ConfFile]:
    """Every file of a group by name, the user's instead of a packaged one of the same name."""
    found: dict[str, ConfFile] = {}
    for folder in paths.overlays("conf"):
        origin = "packaged" if folder == paths.packaged("conf") else "user"
        for path in sorted((folder / group).glob("*.yaml")):
            found.setdefault(path.stem, ConfFile(group, path.stem, path, origin))
    return [found[name] for name in sorted(found)]


def find(group: str, name: str) -> ConfFile:
    """The file that ``group=name`` chooses.

    Raises:
        ConfigError: there is none.
    """
    files = {file.name: file for file in options(group)}
    if name not in files:
        raise ConfigError(f"unknown {group} {name!r}.{did_you_mean(name, files)} (choices: {', '.join(files)})")
    return files[name]


def values(file: ConfFile) -> dict[str, Any]:
    """The file's keys, on top of those of the files of its own group that its defaults list names.

    Raises:
        ConfigError: it is not YAML, or a file it names is not there.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file.path))
    except YAMLError as error:
        raise ConfigError(f"{paths.shown(file.path)}: not valid YAML: {error}".partition("\n")[0]) from error
    own = {str(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}
    merged: dict[str, Any] = {}
    for name in own.pop("defaults", []):
        if isinstance(name, str) and name != "_self_":
            merged |= values(find(file.group, name))
    return merged | own
