"""AdamW over the trainable parameters, with float32 masters where the model computes in half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from cookbook.engine.gradients import Gradients
from cookbook.engine.model import LanguageModel
from cookbook.types import AdamParams


class Optimizer:
    """Decoupled weight decay (AdamW). All hyper-parameters come with the step; only the moments live here.

    bfloat16 parameters keep a float32 master copy: at RL learning rates most updates are smaller than a bfloat16 step, and
    would be lost.

    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    def __init__(self, model: LanguageModel, gradients: Gradients) -> None:
        self.names = [name for name, _ in model.trainable()]
        self.parameters = [parameter for _, parameter in model.trainable()]
        self.gradients = gradients
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, foreach=None, fused=True)

    def step(self, adam: AdamParams, scale: float) -> None:
        """One update with the gradient times ``scale``; a parameter without a gradient counts as one of zero."""
        for gradient, master in zip(self.gradients.all(), self.masters, strict=True):
            master.grad = torch.zeros_like(master) if gradient is None else gradient
            if scale != 1.0:
                master.grad.mul_(scale)
        for group in self.adamw.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay)
        self.adamw.step()
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
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
            if master is not parameter:
                tensors[f"master.{name}"] = master.detach().cpu().contiguous()
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`; tensors of other names are ignored, and the moments become the optimizer's own."""
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if master is not parameter and f"master.{name}" in tensors:
                master.data.copy_(tensors[f"master.{name}"])
            state = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors}
            if state:
                self.adamw.state[master] = {
                    key: value if key == "step" else value.to(master.device) for key, value in state.items()
                }

    def reset(self) -> None:
        """Forgets the moments and takes the masters anew from the parameters."""
        self.adamw.state.clear()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.data.copy_(parameter)


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return torch.nn.Parameter(parameter.detach().float().clone())
