"""Implementations by name: ``pytorch``, ``torch_compile``, ``cce`` (the cut-cross-entropy package), ``auto``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging

import torch
from torch import Tensor

from cookbook.errors import ConfigError

AUTO, PYTORCH, TORCH_COMPILE, CCE = "auto", "pytorch", "torch_compile", "cce"
IMPLEMENTATIONS = (AUTO, PYTORCH, TORCH_COMPILE, CCE)

log = logging.getLogger("cookbook")


def check(name: str) -> str:
    """Raises: ConfigError: no implementation is called so."""
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"impl: must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return name


def cce_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor | None:
    """``(N,)`` float32, differentiable, by Apple's kernels; None, and one warning, where they cannot run."""
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return _cannot("the package is not installed (pip install cut-cross-entropy)")
    if hidden.device.type != "cuda":
        return _cannot(f"it needs a GPU, and the model is on the {hidden.device.type}")
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return _cannot(f"it needs bfloat16, and the model is in {hidden.dtype}")
    if bias is not None or targets.ndim != 1:
        return _cannot("it takes no bias and one target per token")
    package = importlib.import_module("cut_cross_entropy")  # an extra, and slow to import
    losses: Tensor = package.linear_cross_entropy(hidden, weight, targets, softcap=softcap, reduction="none")
    return -losses.float()


@functools.cache
def _cannot(why: str) -> None:
    log.warning("impl=cce cannot run here: %s; impl=pytorch is used instead", why)
