"""Configurations in folders that another person may have made: they name no code but the package's, and no foreign address.

``cookbook eval RUN`` reads the configuration in the folder of the run. A value that would run code, or send data to another
machine, counts only if the user writes the same key on the command line.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

from cookbook.config import recipe
from cookbook.config.typed import TARGET, resolve_target
from cookbook.utils import paths

# Fields of configuration classes that may name a function of a Python file (file.py:name) or a hub repository of kernels.
FILES = ("target", "opponent", "head_impl", "attn_implementation")
# Fields that start programs, or decide how a program or the code of a model's repository is run.
PROGRAMS = ("command", "python", "setup", "environment", "args", "container", "trust_remote_code")
# Fields with the address of a service that gets prompts, completions and API keys.
ADDRESSES = ("url", "base_url", "cluster")
_TARGET_LINE = re.compile(rf"^\s*{TARGET}:\s*(\S+)", re.MULTILINE)


@functools.cache
def packaged_targets() -> frozenset[str]:
    """Return the configuration classes of the package: each ``_target_`` of the packaged ``conf/``."""
    files = paths.packaged("conf").rglob("*.yaml")
    return frozenset(name for file in files for name in _TARGET_LINE.findall(file.read_text(encoding="utf-8")))


def targets(node: object) -> Iterator[str]:
    """Yield every ``_target_`` of a configuration, at any depth."""
    if isinstance(node, Mapping):
        if isinstance(name := node.get(TARGET), str):
            yield name
        for value in node.values():
            yield from targets(value)
    elif isinstance(node, list):
        for item in node:
            yield from targets(item)


def first_foreign(values: Mapping[str, object], is_named: Callable[[str], bool]) -> tuple[str, object, str] | None:
    """Return the key, the value and the reason of the first value that a received configuration must not set; None if all may.

    ``is_named`` says whether the user sets the dotted key on the command line.
    """
    for key, value, reason in _foreign(values, "", is_named):
        if not is_named(key):
            return key, value, reason
    return None


def _foreign(node: Mapping[str, object], prefix: str, is_named: Callable[[str], bool]) -> Iterator[tuple[str, object, str]]:
    # Top-level groups are components, even if the command line names their class.
    is_component = TARGET in node or prefix.count(".") == 1
    for name, value in node.items():
        key = f"{prefix}{name}"
        # Hydra reads both: the first names classes that it constructs, the second files that it merges.
        if key in ("hydra", "defaults"):
            yield key, value, "is not a key of a run's configuration"
        elif key == "out" and value:
            yield key, value, "a folder of a run may not choose a file to write"
        elif key == "recipe.name":
            if not _is_packaged_recipe(value):
                yield key, value, "a folder of a run may choose only cookbook's own recipes"
        elif name == TARGET:
            if not isinstance(value, str) or value not in packaged_targets():
                yield key, value, "a folder of a run may name only cookbook's own configuration classes"
        elif is_component and (reason := _reason(str(name), value, node.get(TARGET), is_named(f"{prefix}{TARGET}"))):
            yield key, value, reason
        else:
            yield from _inside(key, value, is_named)


def _inside(key: str, value: object, is_named: Callable[[str], bool]) -> Iterator[tuple[str, object, str]]:
    if isinstance(value, Mapping):
        yield from _foreign(value, f"{key}.", is_named)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _inside(f"{key}[{place}]", item, is_named)
    elif isinstance(value, str) and "${" in value:
        # A run stores its configuration resolved. An interpolation could read environment variables.
        yield key, value, "a folder of a run may hold no interpolation"


def _reason(field: str, value: object, target: object, target_is_named: bool) -> str | None:
    """Return the reason to refuse the value of a field of a configuration class; None if the value is harmless."""
    if field in FILES and {":", "/"} & set(str(value)):
        return "a folder of a run may not choose a Python file or a repository with code"
    if field in PROGRAMS and value:
        # The class is the package's: its key precedes, or the command line names the class.
        cls = (
            resolve_target(target) if isinstance(target, str) and target in packaged_targets() and not target_is_named else None
        )
        return None if value == getattr(cls, field, None) else "a folder of a run may not run programs or other people's code"
    if field in ADDRESSES and value and not _is_loopback(str(value)):
        return "a folder of a run may not send data to another machine"
    return None


def _is_packaged_recipe(name: object) -> bool:
    """Whether the name is a recipe of the package, and no file of ./recipes replaces the recipe."""
    # A name such as ../x would also choose a file for the keys that the configuration lacks.
    if not isinstance(name, str) or not recipe.NAME.fullmatch(name):
        return False
    path = paths.find("recipes", f"{name}.py")
    return path is not None and path.parent == paths.packaged("recipes")


def _is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
