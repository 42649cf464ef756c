"""How a reward is called: here or in processes of its own, and for how long at most."""

from __future__ import annotations

from dataclasses import dataclass, field

from cookbook.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What every reward has beside its own options, if it derives from this class.

    ``workers`` processes call the reward while sampling goes on; 0 calls it in this process, one completion after another.
    ``timeout_s`` is the longest one call may take, in seconds; only a process can be stopped, so it needs ``workers``.
    Neither has a part in what a completion is worth.

    Raises:
        ConfigError: a number out of its bounds, or a limit that nobody could keep.
    """

    workers: int = field(default=0, repr=False)
    timeout_s: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"reward.workers must be at least 0, got {self.workers}")
        if self.timeout_s is None:
            return
        if not self.timeout_s > 0:
            raise ConfigError(f"reward.timeout_s must be above 0, got {self.timeout_s}; null sets no limit")
        if not self.workers:
            limit = f"reward.timeout_s={self.timeout_s:g}"
            raise ConfigError(f"{limit} needs reward.workers of at least 1: no call can be stopped in this process")
