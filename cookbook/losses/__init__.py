"""The built-in losses. This module imports no torch; the first use of one of its names does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cookbook.losses.base import LOSSES, Loss, LossBatch, Scope, get_loss, loss_class, loss_of_call
    from cookbook.losses.cispo import CISPO
    from cookbook.losses.cross_entropy import CrossEntropy
    from cookbook.losses.dft import DFT
    from cookbook.losses.dpo import DPO
    from cookbook.losses.dppo import DPPO
    from cookbook.losses.dro import DRO
    from cookbook.losses.function import FunctionLoss, returns
    from cookbook.losses.grpo import GRPO
    from cookbook.losses.gspo import GSPO
    from cookbook.losses.importance_sampling import ImportanceSampling
    from cookbook.losses.kto import KTO
    from cookbook.losses.orpo import ORPO
    from cookbook.losses.ppo import PPO
    from cookbook.losses.sapo import SAPO

__all__ = [
    "CISPO",
    "DFT",
    "DPO",
    "DPPO",
    "DRO",
    "GRPO",
    "GSPO",
    "KTO",
    "LOSSES",
    "ORPO",
    "PPO",
    "SAPO",
    "CrossEntropy",
    "FunctionLoss",
    "ImportanceSampling",
    "Loss",
    "LossBatch",
    "Scope",
    "get_loss",
    "loss_class",
    "loss_of_call",
    "returns",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module("cookbook.losses.base")
    modules = {path.partition(":")[2]: path.partition(":")[0] for path in base.LOSSES.values()}
    modules |= dict.fromkeys(("FunctionLoss", "returns"), "cookbook.losses.function")
    return getattr(importlib.import_module(modules.get(name, base.__name__)), name)
