"""When a run is saved: its progress and the intervals between its checkpoints, in optimizer steps, tokens or minutes."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from cookbook.errors import ConfigError
from cookbook.types import JsonObject


@dataclass(frozen=True)
class Progress:
    """Totals over all processes of a run: optimizer steps, tokens of forward_backward calls, minutes of training."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0

    @classmethod
    def of(cls, manifest: JsonObject) -> Progress:
        """Return the progress in a checkpoint's manifest; values that the manifest lacks are 0."""
        stated = manifest.get("run", {}).get("progress", {})
        return cls(int(manifest["step"]), int(stated.get("tokens", 0)), float(stated.get("minutes", 0.0)))


@dataclass(frozen=True)
class SaveInterval:
    """Interval that ends when any of its parts that is set (steps, tokens, minutes) has passed."""

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None

    def due(self, before: Progress, now: Progress) -> bool:
        """Whether a multiple of the interval lies after ``before`` and at or before ``now``."""
        # The three classes have the same units, in the same order.
        units = zip(astuple(self), astuple(before), astuple(now), strict=True)
        return any(size is not None and earlier // size < later // size for size, earlier, later in units)


@dataclass
class CheckpointConfig:
    """When a run is saved, and which checkpoints are kept. ``conf/checkpoint/default.yaml`` documents each field."""

    every: int | None = 50
    every_tokens: int | None = None
    every_minutes: float | None = None
    final: bool = True
    best: str | None = None
    keep: int | None = 3
    keep_every: int | None = None
    keep_every_tokens: int | None = None
    keep_every_minutes: float | None = None
    asynchronous: bool = False
    final_state: bool = True

    def __post_init__(self) -> None:
        if self.best is not None and not self.best.startswith("eval/"):
            raise ConfigError(
                f"checkpoint.best: expected a metric of the evaluation, such as eval/loss or eval/accuracy, got {self.best!r}"
            )
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, got {self.keep}; null keeps all")
        for name, default in (("every", "null saves only at the end"), ("keep_every", "null keeps none of the older ones")):
            for unit, least in (("", "at least 1"), ("_tokens", "at least 1"), ("_minutes", "above 0")):
                value = getattr(self, name + unit)
                if value is not None and not (value > 0 if unit == "_minutes" else value >= 1):
                    raise ConfigError(f"checkpoint.{name}{unit} must be {least}, got {value}; {default}")

    @property
    def saving(self) -> SaveInterval:
        """Interval between two checkpoints."""
        return SaveInterval(self.every, self.every_tokens, self.every_minutes)

    @property
    def staying(self) -> SaveInterval:
        """Interval between two checkpoints that are kept indefinitely."""
        return SaveInterval(self.keep_every, self.keep_every_tokens, self.keep_every_minutes)
