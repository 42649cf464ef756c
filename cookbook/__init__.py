"""cookbook: config-driven post-training of language models. One readable loop, any trainer.

``import cookbook`` loads nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cookbook.utils.version import __version__

# Modules and the public names that they define.
_NAMES = {
    "cookbook.service": "ServiceClient TrainingClient SamplingClient",
    "cookbook.types": "AdamParams Datum EncodedTextChunk ForwardBackwardOutput ModelInput OptimStepOutput SamplingParams "
    "TensorData datum_from_tokens_weights",
    "cookbook.engine.head.linear_logprobs.implementations": "FusedOutputLoss TargetLogprobs",
    "cookbook.engine.head.fused_loss": "LinearCrossEntropyLoss without_logits",
    "cookbook.engine.head.pipeline": "PipelineLoss",
    "cookbook.errors": "CookbookError",
    "cookbook.futures": "start_all",
    "cookbook.deployments.vllm.registry": "DeploymentManager",
    "cookbook.deployments.vllm.sampler": "DeploymentSampler",
    "cookbook.protocols": "WeightSyncer",
    "cookbook.jobs.manager": "TrainerJobManager TrainerJobConfig",
    "cookbook.jobs.endpoint": "JobEndpoint",
    "cookbook.jobs.local": "LocalJob",
    "cookbook.jobs.slurm": "SlurmJob",
    "cookbook.jobs.ray": "RayJob",
    "cookbook.run.hooks": "Hook",
    "cookbook.run.result": "RunResult",
    "cookbook.cli.hydra.python_api": "train",
    "cookbook.losses": "Loss CrossEntropy DFT GRPO GSPO ImportanceSampling PPO CISPO DRO SAPO DPPO DPO ORPO KTO",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
# `types` is the module itself, as programs written for Tinker say `types.Datum`.
_MODULES = {
    "types": "cookbook.types",
    "losses": "cookbook.losses",
    "errors": "cookbook.errors",
    "advantages": "cookbook.sampling.advantages",
    "schedules": "cookbook.config.optim",
}

__all__ = ["__version__", *_HOMES, *sorted(_MODULES)]

if TYPE_CHECKING:
    from cookbook import errors, losses, types
    from cookbook.cli.hydra.python_api import train
    from cookbook.config import optim as schedules
    from cookbook.deployments.vllm.registry import DeploymentManager
    from cookbook.deployments.vllm.sampler import DeploymentSampler
    from cookbook.engine.head.fused_loss import LinearCrossEntropyLoss, without_logits
    from cookbook.engine.head.linear_logprobs.implementations import FusedOutputLoss, TargetLogprobs
    from cookbook.engine.head.pipeline import PipelineLoss
    from cookbook.errors import CookbookError
    from cookbook.futures import start_all
    from cookbook.jobs.endpoint import JobEndpoint
    from cookbook.jobs.local import LocalJob
    from cookbook.jobs.manager import TrainerJobConfig, TrainerJobManager
    from cookbook.jobs.ray import RayJob
    from cookbook.jobs.slurm import SlurmJob
    from cookbook.losses import (
        CISPO,
        DFT,
        DPO,
        DPPO,
        DRO,
        GRPO,
        GSPO,
        KTO,
        ORPO,
        PPO,
        SAPO,
        CrossEntropy,
        ImportanceSampling,
        Loss,
    )
    from cookbook.protocols import WeightSyncer
    from cookbook.run.hooks import Hook
    from cookbook.run.result import RunResult
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
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'cookbook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
