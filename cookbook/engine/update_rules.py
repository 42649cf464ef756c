"""How a step turns gradients into new weights, and what it remembers from one step to the next."""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cookbook.errors import ConfigError
from cookbook.types import AdamParams


class UpdateRule(ABC):
    """One of torch's optimizers, or of a library's. Hyper-parameters come with every step; what it keeps are ``keys``."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    """The names of what is kept for a parameter, besides ``step``, the count of its updates."""

    library: ClassVar[str | None] = None
    """What has to be installed besides torch."""

    def require(self) -> None:
        """Raises ConfigError: the library is missing."""
        if self.library is not None and importlib.util.find_spec(self.library) is None:
            raise ConfigError(
                f"backend.optimizer: {self.name} needs {self.library}, which is not installed; "
                "run: pip install 'post-training-cookbook[lowbit]', or choose adafactor"
            )

    @abstractmethod
    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of ``parameters``, all of float32 or float64."""

    @abstractmethod
    def options(self, adam: AdamParams) -> dict[str, Any]:
        """The options of a parameter group, for one step.

        Raises:
            ConfigError: something is asked for that there is not.
        """

    @abstractmethod
    def kept_bytes(self, shape: Sequence[int], element: int) -> int:
        """Of a parameter of this ``shape`` and bytes an ``element``: what is kept of it from step to step."""

    def passing_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        """What exists only while such a parameter is updated."""
        return 0

    def restored(self, optimizer: Any, kept: dict[str, Tensor]) -> dict[str, Any]:
        """An optimizer's own state of a parameter, from what was ``kept`` of it."""
        return dict(kept)


class AdamW(UpdateRule):
    """Decoupled weight decay. Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2."""

    name = "adamw"
    keys = ("exp_avg", "exp_avg_sq")

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.0, foreach=None, fused=True)

    def options(self, adam: AdamParams) -> dict[str, Any]:
        return _adam_options(adam)

    def kept_bytes(self, shape: Sequence[int], element: int) -> int:
        return 2 * element * math.prod(shape)

    def restored(self, optimizer: Any, kept: dict[str, Tensor]) -> dict[str, Any]:
        """The fused kernel reads the count of updates where the moments are."""
        return {**kept, "step": kept["step"].to(kept["exp_avg"].device, torch.float32)}


class AdamW8bit(UpdateRule):
    """AdamW whose moments are kept as one byte a number, with a float32 scale for each 256, by bitsandbytes.

    Parameters of less than 4,096 numbers have float32 moments. On a CPU it is slow: an update of 4 million numbers took 0.24 s,
    of torch's fused AdamW 0.008 s, of Adafactor 0.08 s. On GPUs bitsandbytes has kernels of its own (not measured).

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
    """

    name = "adamw8bit"
    keys = ("state1", "state2", "absmax1", "absmax2")
    library = "bitsandbytes"
    BLOCK = 256
    LEAST = 4096

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit as Library

        made: torch.optim.Optimizer = Library(parameters, lr=0.0, min_8bit_size=self.LEAST)
        return made

    def options(self, adam: AdamParams) -> dict[str, Any]:
        return _adam_options(adam)

    def kept_bytes(self, shape: Sequence[int], element: int) -> int:
        count = math.prod(shape)
        return 2 * 4 * count if count < self.LEAST else 2 * (count + 4 * -(-count // self.BLOCK))

    def passing_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        # On a CPU both moments, the gradient, and two of the denominator's steps are whole in float32.
        return 5 * 4 * math.prod(shape) if cpu else 0

    def restored(self, optimizer: Any, kept: dict[str, Tensor]) -> dict[str, Any]:
        """With the tables that bytes are read by: they are the library's, the same for all parameters, and never change."""
        state: dict[str, Any] = {**kept, "step": int(kept["step"])}
        if kept["state1"].dtype == torch.uint8:
            tables = optimizer.name2qmap
            for number, name in ((1, "dynamic"), (2, "udynamic")):
                tables[name] = tables[name].to(kept["state1"].device)
                state[f"qmap{number}"] = tables[name]
        return state


class Adafactor(UpdateRule):
    """The second moment of a matrix as one number a row and one a column, and no first moment.

    torch's: a step is relative to the size of the weights, ``min(lr, 1/sqrt(t)) * max(1e-3, RMS(weights))``, the decay of the
    second moment at step t is ``1 - t^-0.8``, and an update of more than unit RMS is scaled down to that. ``eps`` is the least
    root of a second moment; weight decay is decoupled.

    Source: Shazeer & Stern, Adafactor (arXiv 1804.04235), algorithms 4 and 5.
    """

    name = "adafactor"
    keys = ("row_var", "col_var", "variance")

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        # One parameter after the other: all at once would need memory for all at once.
        return torch.optim.Adafactor(parameters, lr=0.0, foreach=False)

    def options(self, adam: AdamParams) -> dict[str, Any]:
        if adam.beta1 or adam.beta2:
            raise ConfigError(
                "backend.optimizer: adafactor has no first moment and sets the decay of the second by itself, got "
                f"beta1={adam.beta1} and beta2={adam.beta2}; set both to 0, as optim=adafactor does"
            )
        return {"lr": adam.learning_rate, "eps": (adam.eps, 1e-3), "weight_decay": adam.weight_decay}

    def kept_bytes(self, shape: Sequence[int], element: int) -> int:
        count = math.prod(shape)
        return element * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)

    def passing_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        return element * math.prod(shape)


RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (AdamW(), AdamW8bit(), Adafactor())}


def update_rule(name: str) -> UpdateRule:
    """Raises ConfigError: there is none of this name."""
    if name not in RULES:
        raise ConfigError(f"backend.optimizer: expected one of {', '.join(RULES)}, got {name!r}")
    return RULES[name]


def state_bytes(rule: UpdateRule, parameters: Iterable[Tensor]) -> int:
    """Bytes beside weights and gradients: what ``rule`` keeps, and float32 masters of half precision ``parameters``."""
    return sum(
        rule.kept_bytes(one.shape, max(one.element_size(), 4)) + (4 * one.numel() if one.element_size() < 4 else 0)
        for one in parameters
    )


def _adam_options(adam: AdamParams) -> dict[str, Any]:
    betas = (adam.beta1, adam.beta2)
    return {"lr": adam.learning_rate, "betas": betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
