"""What may not change while a run goes on: it decides what step N is a step of. Everything else may, and log.txt says so."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cookbook import typed
from cookbook.checkpoints import manifest
from cookbook.data import Row
from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

# The groups that count, but for the named fields.
GROUPS: Mapping[str, frozenset[str]] = {
    "recipe": frozenset({"steps", "epochs"}),  # batches[i] does not depend on how many follow
    "seed": frozenset(),
    "model": frozenset(),
    "loss": frozenset(),
    "data": frozenset({"on_bad_row"}),  # a run that fails on them has met none before
    "reward": frozenset({"workers", "timeout_s"}),  # where it is called, and not what it says
    "rollout": frozenset({"retries", "max_consecutive_failures", "log_samples"}),
}
MEASURED = "measured"
# What a configuration cannot tell, because it may change under the same name.
SUBJECTS = {
    "rows": "data: the digest of the training rows",
    "weights": "model.name: the digest of the weights it starts from",
    "tokenizer": "model.name: the digest of its tokenizer",
    "chat_template": "model.chat_template: the digest of its text",
}


class Identity:
    """The identity of the run that starts now. ``facts``, as JSON has them, go into each of its checkpoints.

    Args:
        recipe: the recipe's ``Config``.
        defaults: the value of each top-level key where nothing is said.
        force: a difference is a warning in the log, and no error.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        recipe: type,
        defaults: Callable[[], Mapping[str, Any]] = dict,
        *,
        force: bool = False,
    ) -> None:
        self._recipe = recipe
        self._defaults = defaults
        self._force = force
        self._earlier: Mapping[str, Any] = {}
        self._which = ""
        self.facts = self._of(cfg)
        self.facts[MEASURED] = {}

    def compare_config(self, which: str, cfg: Mapping[str, Any]) -> None:
        """Raises ConfigError when ``which`` run, made from ``cfg``, is another one."""
        self._compare(which, self._of(cfg))

    def compare_checkpoint(self, checkpoint: Path) -> None:
        """Asks the checkpoint itself which run it is of, wherever it stands.

        Raises:
            ConfigError: it is of another one.
        """
        then = manifest.read(checkpoint).get("run", {}).get("identity")
        if then is None:  # made through the Python API, which has no configuration
            log.warning("resume: %s does not say which run made it, so nothing checks that this one is the same", checkpoint)
            return
        self._which, self._earlier = f"the run that saved {checkpoint}", then.get(MEASURED, {})
        self._compare(self._which, self._of(then))

    def measured(self, subject: str, digest: str) -> None:
        """Notes one of ``SUBJECTS``.

        Raises:
            ConfigError: the checkpoint that the run goes on from was made with another one.
        """
        self.facts[MEASURED][subject] = digest
        if self._earlier.get(subject, digest) != digest:
            self._differs(SUBJECTS[subject], self._which, self._earlier[subject], digest)

    def _of(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """The groups that count. A key that is missing, because another version wrote the configuration, has its default."""
        found = {}
        for group, free in GROUPS.items():
            node = cfg[group] if group in cfg else self._defaults().get(group)
            if isinstance(node, Mapping):
                node = {name: value for name, value in self._filled(group, node).items() if name not in free}
            found[group] = node
        return _as_json(found)

    def _filled(self, group: str, node: Mapping[str, Any]) -> dict[str, Any]:
        with suppress(ConfigError):  # the class is gone, or was of another folder; the comparison then names it
            cls = self._recipe if group == "recipe" else typed.resolve_target(node.get(typed.TARGET))
            return _merged(node, _defaults(cls))
        return dict(node)

    def _compare(self, which: str, then: Mapping[str, Any]) -> None:
        now = {key: value for key, value in self.facts.items() if key != MEASURED}
        for name, before, after in differences("", then, now):
            self._differs(name, which, before, after)

    def _differs(self, name: str, which: str, before: Any, after: Any) -> None:
        line = f"{name}: {which} was made with {before!r}, now it is {after!r}"
        if not self._force:
            raise ConfigError(f"{line}; set it back to go on, or choose another out= to start anew")
        log.warning("%s; going on all the same, as resume=force asks", line)


class _Missing:
    """Stands for the value of a key that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def differences(key: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every place where two configurations differ: its dotted name, and both values, ``MISSING`` for one that is not there."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in {**then, **now}:
            yield from differences(f"{key}.{name}".removeprefix("."), then.get(name, MISSING), now.get(name, MISSING))
    elif then != now:
        yield key, then, now


def rows_digest(rows: Iterable[Row]) -> str:
    """Of their values, in their order; where they were read from does not count."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(json.dumps(row.values, default=str).encode())
    return sha.hexdigest()[:16]


def _defaults(cls: type) -> dict[str, Any]:
    """What the class takes when nothing is said."""
    if not dataclasses.is_dataclass(cls):
        parameters = inspect.signature(cls).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not one.empty}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.init and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            found[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(type(value)) else value
        elif field.init and field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def _merged(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, and what they lack; also inside of what both have."""
    found = dict(values)
    for name, default in defaults.items():
        if isinstance(found.get(name), Mapping) and isinstance(default, Mapping):
            found[name] = _merged(found[name], default)
        else:
            found.setdefault(name, default)
    return found


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return found
