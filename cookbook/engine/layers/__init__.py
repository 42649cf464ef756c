"""What the body of a model computes between its matrix products, in fewer passes over memory than the model's own code."""

from cookbook.engine.layers.install import are_installed, install, uninstall

__all__ = ["are_installed", "install", "uninstall"]
