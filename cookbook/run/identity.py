"""Identity of a run: the settings and data that must not change when the run is resumed. log.txt lists other changes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cookbook.checkpoints import manifest
from cookbook.config import received, typed
from cookbook.engine.precision import EXACT
from cookbook.errors import ConfigError

log = logging.getLogger("cookbook")

# Groups of the configuration that belong to the identity, and the fields of a group that do not.
GROUPS: Mapping[str, frozenset[str]] = {
    # batches[i] does not depend on how many batches follow.
    # A teacher's digest is compared, and its server may move.
    "recipe": frozenset({"steps", "epochs", "teacher_url"}),
    "seed": frozenset(),
    "model": frozenset(),
    "loss": frozenset(),
    # With on_bad_row=fail the run has met no bad row so far, so the policy can change. The cache changes no row.
    "data": frozenset({"on_bad_row", "cache"}),
    # These fields do not change the reward's values. A judge is named by its model: its server may move.
    "reward": frozenset({"workers", "timeout_s", "url", "api_key_env", "cache", "retries", "backoff_s"}),
    "env": frozenset({"workers", "timeout_s"}),
    "rollout": frozenset({"retries", "max_consecutive_failures", "log_samples", "store_mb", "ahead_uncorrected"}),
}
MEASURED, PRECISION = "measured", "precision"
# Digests that a configuration does not contain: files may change under the same name.
SUBJECTS = {
    "rows": "data: the digest of the training rows",
    "weights": "model.name: the digest of the initial weights",
    "teacher": "recipe.teacher: the digest of its weights",
    "reward_models": "reward.model: the digest of its weights",
    "tokenizer": "model.name: the digest of its tokenizer",
    "chat_template": "model.chat_template: the digest of its text",
    PRECISION: "backend.matmul_precision and backend.autocast",
}


class Identity:
    """The identity of the run that starts now. Each of its checkpoints stores ``facts``, which are JSON-compatible.

    Args:
        recipe: the recipe's ``Config``.
        defaults: default of each top-level key.
        force: a difference is a warning in the log instead of an error.
    """

    def __init__(
        self,
        cfg: Mapping[str, object],
        recipe: type,
        defaults: Callable[[], Mapping[str, object]] = dict,
        *,
        force: bool = False,
    ) -> None:
        self._recipe = recipe
        # Only these classes are imported: the earlier run's folder may be another person's.
        self._known_targets = received.packaged_targets() | set(received.targets(cfg))
        self._defaults = defaults
        self._force = force
        self._earlier: Mapping[str, object] = {}
        self._origin = ""
        self._digests: dict[str, str] = {}
        self.facts = self._of(cfg)
        self.facts[MEASURED] = self._digests

    def compare_config(self, origin: str, cfg: Mapping[str, object]) -> None:
        """Raise ConfigError if the run of ``cfg`` has another identity. ``origin`` names that run in the error."""
        now = {key: value for key, value in self.facts.items() if key != MEASURED}
        for name, before, after in differences("", self._of(cfg), now):
            self._differs(name, origin, before, after)

    def compare_checkpoint(self, checkpoint: Path) -> None:
        """Compare with the identity that a checkpoint stores; the checkpoint may be outside of its run's folder.

        Raises:
            ConfigError: the checkpoint is of a run with another identity.
        """
        then = manifest.read(checkpoint).get("run", {}).get("identity")
        # A checkpoint saved through the Python API has no configuration.
        if then is None:
            log.warning("resume: %s does not say which run saved it, so its settings cannot be compared", checkpoint)
            return
        self._origin, self._earlier = f"the run that saved {checkpoint}", {PRECISION: EXACT, **then.get(MEASURED, {})}
        self.compare_config(self._origin, then)

    def measured(self, subject: str, digest: str) -> None:
        """Add the digest of one of ``SUBJECTS``.

        Raises:
            ConfigError: the checkpoint to resume from has another digest.
        """
        self._digests[subject] = digest
        if self._earlier.get(subject, digest) != digest:
            self._differs(SUBJECTS[subject], self._origin, self._earlier[subject], digest)

    def compare_stream(self, before: str, now: str) -> None:
        """Raise ConfigError: the rows of a stream that the checkpoint's run has read are ``before``, and they are ``now``."""
        self._differs("data: the part of the stream that the run has read", self._origin, before, now)

    def _of(self, cfg: Mapping[str, object]) -> dict[str, object]:
        """Return the groups of ``GROUPS``. A key that the configuration of the run lacks has its default."""
        groups = {}
        for group, free in GROUPS.items():
            node = cfg[group] if group in cfg else self._defaults().get(group)
            groups[group] = self._without(free, group, node) if isinstance(node, Mapping) else node
        # The same types as in the manifest of a checkpoint.
        facts: dict[str, object] = json.loads(json.dumps(groups, default=str))
        return facts

    def _without(self, free: frozenset[str], group: str, node: Mapping[str, object]) -> dict[str, object]:
        """Return a node without its free fields, also inside of the rewards that a reward consists of."""
        fixed = {name: value for name, value in self._filled(group, node).items() if name not in free}
        parts = fixed.get("parts")
        if group == "reward" and isinstance(parts, Mapping):
            fixed["parts"] = {name: self._without(free, group, part) for name, part in parts.items()}
        return fixed

    def _filled(self, group: str, node: Mapping[str, object]) -> dict[str, object]:
        target = node.get(typed.TARGET)
        # If the class is another one or does not exist here, the comparison reports it.
        with suppress(ConfigError):
            if group == "recipe":
                return _merged(node, _defaults(self._recipe))
            if isinstance(target, str) and target in self._known_targets:
                return _merged(node, _defaults(typed.resolve_target(target)))
        return dict(node)

    def _differs(self, name: str, origin: str, before: object, after: object) -> None:
        line = f"{name}: {origin} was made with {before!r}, now it is {after!r}"
        if not self._force:
            raise ConfigError(f"{line}; restore the old value to resume, or set another out= to start a new run")
        log.warning("%s; the run resumes anyway, because of resume=force", line)


class _Missing:
    """Placeholder for the value of a missing key."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def differences(key: str, then: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name and both values of every key that differs; ``MISSING`` if a configuration lacks the key."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in {**then, **now}:
            yield from differences(f"{key}.{name}".removeprefix("."), then.get(name, MISSING), now.get(name, MISSING))
    elif then != now:
        yield key, then, now


def _defaults(cls: type) -> dict[str, object]:
    """Return the default values of the parameters of a class."""
    parameters = inspect.signature(cls).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
    # The signature shows a placeholder for a default that a factory makes.
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.init and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            defaults[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(type(value)) else value
    return defaults


def _merged(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return ``values`` with ``defaults`` for missing keys, at every depth."""
    merged = dict(values)
    for name, default in defaults.items():
        value = merged.setdefault(name, default)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            merged[name] = _merged(value, default)
    return merged
