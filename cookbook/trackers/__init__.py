"""Trackers of a run's metrics, next to the console and ``metrics.jsonl``, which every run has."""

import importlib.util

from cookbook.errors import ConfigError


def need_package(name: str) -> None:
    """Raise ConfigError: the package of this tracker is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"tracker: {name} is not installed; pip install 'post-training-cookbook[{name}]', or leave tracker={name} out"
        )
