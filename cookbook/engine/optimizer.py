"""The optimizer step over the trainable parameters, with float32 masters where the model computes in half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from cookbook.engine.gradients import Gradients
from cookbook.engine.model import LanguageModel
from cookbook.engine.update_rules import UpdateRule
from cookbook.types import AdamParams


class Optimizer:
    """Applies an update rule. All hyper-parameters come with the step; only what the rule remembers lives here.

    bfloat16 parameters keep a float32 master copy, whatever the rule: at RL learning rates most updates are smaller than a
    bfloat16 step, and would be lost.
    """

    def __init__(self, model: LanguageModel, gradients: Gradients, rule: UpdateRule) -> None:
        self.names = [name for name, _ in model.trainable()]
        self.parameters = [parameter for _, parameter in model.trainable()]
        self.gradients = gradients
        self.rule = rule
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.inner = rule.make(self.masters)

    def step(self, adam: AdamParams, scale: float) -> None:
        """One update with the gradient times ``scale``; a parameter without a gradient counts as one of zero.

        Raises:
            ConfigError: ``adam`` asks for something that the rule does not know; nothing has changed.
        """
        options = self.rule.options(adam)
        for gradient, master in zip(self.gradients.all(), self.masters, strict=True):
            master.grad = torch.zeros_like(master) if gradient is None else gradient
            if scale != 1.0:
                master.grad.mul_(scale)
        for group in self.inner.param_groups:
            group.update(options)
        self.inner.step()
        self.publish()

    def publish(self) -> None:
        """Rounds the masters into the parameters the model computes with."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything an exact continuation needs beyond the weights, as flat named tensors."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            for key, value in self.inner.state.get(master, {}).items():
                if key in self._keys:
                    tensors[f"{key}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
            if master is not parameter:
                tensors[f"master.{name}"] = master.detach().cpu().contiguous()
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`; tensors of other names are ignored, and the moments become the optimizer's own."""
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if master is not parameter and f"master.{name}" in tensors:
                master.data.copy_(tensors[f"master.{name}"])
            kept = {key: tensors[f"{key}.{name}"] for key in self._keys if f"{key}.{name}" in tensors}
            if kept:
                there = {key: value if key == "step" else value.to(master.device) for key, value in kept.items()}
                self.inner.state[master] = self.rule.restored(self.inner, there)

    def reset(self) -> None:
        """Forgets the moments and takes the masters anew from the parameters."""
        self.inner.state.clear()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.data.copy_(parameter)

    @property
    def _keys(self) -> tuple[str, ...]:
        return ("step", *self.rule.keys)


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return torch.nn.Parameter(parameter.detach().float().clone())
