"""Implementations by name: ``pytorch``, ``cce`` (the cut-cross-entropy package), ``auto``; ``torch_compile`` is understood.

Anybody may write another: a :class:`TargetLogprobs`, handed over in the place of a name.

Compiled on the CPU, a tile's elementwise work is no faster (0.59 ms against 0.53 ms forward, 0.43 ms against 0.42 ms backward,
4 MB, one thread), since a tile is in the cache anyway. So ``torch_compile`` runs the pytorch code and says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Protocol

import torch
from torch import Tensor

from cookbook.errors import ConfigError

AUTO, PYTORCH, TORCH_COMPILE, CCE = "auto", "pytorch", "torch_compile", "cce"
IMPLEMENTATIONS = (AUTO, PYTORCH, TORCH_COMPILE, CCE)

log = logging.getLogger("cookbook")


def check(name: str) -> str:
    """Warns, once, of a name that another stands in for. Raises: ConfigError: no implementation is called so."""
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"impl: must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    if name == TORCH_COMPILE:
        _cannot(TORCH_COMPILE, "compiled, its tiles were measured to be no faster")
    return name


class TargetLogprobs(Protocol):
    """From hidden states to log-probabilities of targets: what an engine can be given in the place of its own code."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: Tensor | None,
    ) -> Tensor | None:
        """Shapes and options as in :func:`~cookbook.engine.linear_logprobs.linear_logprobs`; float32, in the targets' shape,
        differentiable by ``hidden`` and ``weight``. None where it cannot, and the engine computes them itself."""
        ...


def implementation(impl: str | TargetLogprobs) -> TargetLogprobs | None:
    """What ``impl`` names, or is; None: the pytorch code. Raises: ConfigError: nothing is called so."""
    if not isinstance(impl, str):
        return impl
    return cce_logprobs if check(impl) == CCE else None


def cce_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: Tensor | None,
) -> Tensor | None:
    """By Apple's kernels; None, and one warning, where they cannot run."""
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return _cannot(CCE, "the package is not installed (pip install cut-cross-entropy)")
    if hidden.device.type != "cuda":
        return _cannot(CCE, f"it needs a GPU, and the model is on the {hidden.device.type}")
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return _cannot(CCE, f"it needs bfloat16, and the model is in {hidden.dtype}")
    if bias is not None or temperature is not None or targets.ndim != 1:
        return _cannot(CCE, "it takes no bias, no temperature, and one target per token")
    package = importlib.import_module("cut_cross_entropy")  # an extra, and slow to import
    rows = hidden if scale == 1.0 else hidden * scale
    losses: Tensor = package.linear_cross_entropy(rows, weight, targets, softcap=softcap, reduction="none")
    return -losses.float()


@functools.cache
def _cannot(name: str, why: str) -> None:
    log.warning("impl=%s does not run here: %s; impl=pytorch is used instead", name, why)
