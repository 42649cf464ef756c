"""Fused norms, gated MLPs and rotary embeddings, and the trimmed last layer."""

from cookbook.engine.layers.install import are_installed, install, last_layer_parts, trimmable_parts, uninstall

__all__ = ["are_installed", "install", "last_layer_parts", "trimmable_parts", "uninstall"]
