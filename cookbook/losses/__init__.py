"""The built-in losses by name. Importing this module imports no torch; asking it for a loss does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cookbook.errors import ConfigError
from cookbook.suggest import did_you_mean
from cookbook.typed import construct

if TYPE_CHECKING:
    from cookbook.losses.base import Batch, Loss, Scope
    from cookbook.losses.cispo import CISPO
    from cookbook.losses.cross_entropy import CrossEntropy
    from cookbook.losses.dft import DFT
    from cookbook.losses.dpo import DPO
    from cookbook.losses.dro import DRO
    from cookbook.losses.function import returns
    from cookbook.losses.grpo import GRPO
    from cookbook.losses.gspo import GSPO
    from cookbook.losses.importance_sampling import ImportanceSampling
    from cookbook.losses.orpo import ORPO
    from cookbook.losses.ppo import PPO

__all__ = [
    "CISPO",
    "DFT",
    "DPO",
    "DRO",
    "GRPO",
    "GSPO",
    "LOSSES",
    "ORPO",
    "PPO",
    "Batch",
    "CrossEntropy",
    "ImportanceSampling",
    "Loss",
    "Scope",
    "get_loss",
    "loss_class",
    "loss_of_call",
    "returns",
]

LOSSES: dict[str, str] = {
    "cross_entropy": "cookbook.losses.cross_entropy:CrossEntropy",
    "dft": "cookbook.losses.dft:DFT",
    "grpo": "cookbook.losses.grpo:GRPO",
    "importance_sampling": "cookbook.losses.importance_sampling:ImportanceSampling",
    "ppo": "cookbook.losses.ppo:PPO",
    "gspo": "cookbook.losses.gspo:GSPO",
    "cispo": "cookbook.losses.cispo:CISPO",
    "dro": "cookbook.losses.dro:DRO",
    "dpo": "cookbook.losses.dpo:DPO",
    "orpo": "cookbook.losses.orpo:ORPO",
}
"""Every built-in loss: name -> ``module:Class``."""


def loss_class(name: str) -> type[Loss]:
    """The class called ``name``.

    Raises:
        ConfigError: no loss has that name.
    """
    if name not in LOSSES:
        raise ConfigError(f"loss: unknown name {name!r}.{did_you_mean(name, LOSSES)} (there are {', '.join(LOSSES)})")
    module, _, attribute = LOSSES[name].partition(":")
    found: type[Loss] = getattr(importlib.import_module(module), attribute)
    return found


def get_loss(name: str, config: Mapping[str, Any] | None = None) -> Loss:
    """The loss called ``name`` with the options of ``config``; the rest keep their defaults.

    Raises:
        ConfigError: an unknown name or option, or a value of the wrong type or out of range.
    """
    loss: Loss = construct(loss_class(name), config or {}, "loss_fn_config")
    return loss


def loss_of_call(name: str, config: Mapping[str, Any] | None) -> Loss:
    """The loss that ``forward_backward(data, name, config)`` means.

    Raises:
        ConfigError: as :func:`get_loss`, and for a normalization, which a single call could not apply.
    """
    if (config or {}).get("normalization") is not None:
        raise ConfigError(
            f"loss_fn_config.normalization: forward_backward divides nothing, got {config['normalization']!r}; pass it to "  # type: ignore[index]
            "optim_step as grad_accumulation_normalization"
        )
    return get_loss(name, config)


def __getattr__(attribute: str) -> Any:
    """The classes by their own names, imported when asked for."""
    if attribute in ("FunctionLoss", "returns"):
        return getattr(importlib.import_module("cookbook.losses.function"), attribute)
    if attribute in ("Batch", "Loss", "Scope"):
        return getattr(importlib.import_module("cookbook.losses.base"), attribute)
    for name, path in LOSSES.items():
        if path.endswith(f":{attribute}"):
            return loss_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
