"""What a configuration holds where nothing is said: for keys that one of an earlier version does not have yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from cookbook import paths
from cookbook.cli import conf_files
from cookbook.errors import ConfigError

OVERRIDE = "override /"


def composed(recipe: str) -> dict[str, Any]:
    """Every top-level key of ``cookbook train recipe=...`` with its value, the recipe's own node aside.

    Hydra would say the same, and cannot be asked while it composes or runs.
    """
    top, own = _file("train.yaml"), _file(f"recipe/{recipe}.yaml")
    choices = dict(_choices(top)) | dict(_choices(own))
    demo = _demo(choices.pop("demo", None), f"{choices.get('model')}_{choices.get('data')}")
    nodes = {group: conf_files.values(conf_files.find(group, option)) for group, option in choices.items()}
    merged = OmegaConf.merge(_without_defaults(top), nodes, _without_defaults(own), demo)
    found = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items() if key != "recipe"}


def _demo(name: str | None, option: str) -> dict[str, Any]:
    """The values of ``conf/demo/<name>/<option>.yaml``; none if there is no such file."""
    return next((conf_files.values(file) for file in conf_files.options(f"demo/{name}") if file.name == option), {})


def _file(name: str) -> dict[str, Any]:
    """Empty where there is none: a run goes on without its recipe's file in ``conf/``."""
    path = paths.find("conf", name)
    found = OmegaConf.to_container(OmegaConf.load(path)) if path else {}
    if not isinstance(found, dict):
        raise ConfigError(f"conf/{name}: expected keys and values")
    return {str(key): value for key, value in found.items()}


def _choices(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Group and option of each entry of a defaults list that chooses one, ``recipe`` aside."""
    for entry in content.get("defaults", []):
        for group, option in entry.items() if isinstance(entry, Mapping) else ():
            group = str(group).removeprefix(OVERRIDE)
            if option is not None and " " not in group and group != "recipe":
                yield group, str(option)


def _without_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "defaults"}
