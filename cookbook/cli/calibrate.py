"""``cookbook calibrate``: measure a run of reinforcement learning before it starts, and say what to change."""

from __future__ import annotations

from omegaconf import DictConfig

from cookbook.errors import ConfigError
from cookbook.run import calibration


def run(cfg: DictConfig, overrides: list[str], prompts: int, completions: int, price: float | None) -> None:
    """Print the measurements, the estimated hours, and what to change.

    Raises:
        CookbookError: the configuration is wrong, or sampling fails.
    """
    if price is not None and not 0 <= price < float("inf"):
        raise ConfigError(f"calibrate: --price must be at least 0, got {price}")
    measured = calibration.calibrate(cfg, overrides, prompts, completions)
    lines = measured.lines(price)
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:<{width}}  {text}")
    findings = measured.findings()
    print()
    for finding in findings:
        print(f"- {finding.problem}: {finding.remedy}")
    if not findings:
        print("nothing to change")
