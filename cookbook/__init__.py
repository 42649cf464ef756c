"""cookbook: config-driven post-training of language models. One readable loop, any trainer.

``import cookbook`` loads nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. `types` is the module itself, as programs written for Tinker say `types.Datum`.
_HOMES = {
    "ServiceClient": "cookbook.service",
    "TrainingClient": "cookbook.service",
    "SamplingClient": "cookbook.service",
    "AdamParams": "cookbook.types",
    "Datum": "cookbook.types",
    "EncodedTextChunk": "cookbook.types",
    "ForwardBackwardOutput": "cookbook.types",
    "ModelInput": "cookbook.types",
    "OptimStepOutput": "cookbook.types",
    "SamplingParams": "cookbook.types",
    "TensorData": "cookbook.types",
    "datum_from_tokens_weights": "cookbook.types",
    "FusedOutputLoss": "cookbook.protocols",
    "TargetLogprobs": "cookbook.protocols",
    "LinearCrossEntropyLoss": "cookbook.engine.fused_loss",
    "without_logits": "cookbook.engine.fused_loss",
    "CookbookError": "cookbook.errors",
    "DeploymentManager": "cookbook.deployments.manager",
    "DeploymentSampler": "cookbook.deployments.sampler",
    "WeightSyncer": "cookbook.protocols",
    "Hook": "cookbook.hooks",
    "Loss": "cookbook.losses",
    "CrossEntropy": "cookbook.losses",
    "DFT": "cookbook.losses",
    "GRPO": "cookbook.losses",
    "GSPO": "cookbook.losses",
    "ImportanceSampling": "cookbook.losses",
    "PPO": "cookbook.losses",
    "CISPO": "cookbook.losses",
    "DRO": "cookbook.losses",
    "DPO": "cookbook.losses",
    "ORPO": "cookbook.losses",
}
_MODULES = {"types", "losses", "errors", "advantages", "schedules"}

__all__ = ["__version__", *_HOMES, *sorted(_MODULES)]

if TYPE_CHECKING:
    from cookbook import advantages, errors, losses, schedules, types
    from cookbook.deployments.manager import DeploymentManager
    from cookbook.deployments.sampler import DeploymentSampler
    from cookbook.engine.fused_loss import LinearCrossEntropyLoss, without_logits
    from cookbook.errors import CookbookError
    from cookbook.hooks import Hook
    from cookbook.losses import CISPO, DFT, DPO, DRO, GRPO, GSPO, ORPO, PPO, CrossEntropy, ImportanceSampling, Loss
    from cookbook.protocols import FusedOutputLoss, TargetLogprobs, WeightSyncer
    from cookbook.service import SamplingClient, ServiceClient, TrainingClient
    from cookbook.types import (
        AdamParams,
        Datum,
        EncodedTextChunk,
        ForwardBackwardOutput,
        ModelInput,
        OptimStepOutput,
        SamplingParams,
        TensorData,
        datum_from_tokens_weights,
    )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"cookbook.{name}")
    raise AttributeError(f"module 'cookbook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
