"""Checkpoints: folders that appear whole or not at all, and are checked by digest before they are loaded."""

from cookbook.checkpoints.schedule import CheckpointConfig

__all__ = ["CheckpointConfig"]
