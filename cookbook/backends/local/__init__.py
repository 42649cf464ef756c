"""Backend ``local``: training and sampling in this process."""

from cookbook.backends.local.config import LocalConfig
from cookbook.backends.local.trainer import LocalTrainer

__all__ = ["LocalConfig", "LocalTrainer"]
