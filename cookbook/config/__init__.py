"""Typed objects from YAML; recipes and other Python files of the user. Importing the package loads no OmegaConf."""

from cookbook.config.optim import OptimConfig

__all__ = ["OptimConfig"]
