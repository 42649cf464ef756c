"""Load-balancing loss of mixture-of-experts models, over all tokens of a call, independent of the micro-batches.

With ``f_e`` the share of tokens that are routed to expert ``e`` and ``P_e`` the mean routing probability of ``e``, the loss is
``E * sum_e f_e P_e``. As a product of means, it is not the sum of the losses of the micro-batches. But the sums behind both
means add up over micro-batches, and ``f_e`` has no gradient. So once all passes have been counted, the gradient with respect to
each pass's sum of probabilities is known: ``E * f_e / rows``.

Source: Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative: bfloat16 rounds the routing probabilities. A different formula would differ by far more.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class RouterLoad:
    """Routing of tokens to ``E`` experts, summed over tokens and layers.

    ``assigned``: ``(E,)``, how often each expert was chosen. ``probability``: ``(E,)``, sum of the routing probabilities, with
    the graph of its pass. ``rows``: number of tokens times number of layers.
    """

    assigned: Tensor
    probability: Tensor
    rows: int

    def __add__(self, other: RouterLoad) -> RouterLoad:
        return RouterLoad(self.assigned + other.assigned, self.probability + other.probability, self.rows + other.rows)

    def detached(self) -> RouterLoad:
        return RouterLoad(self.assigned, self.probability.detach(), self.rows)

    def gradient(self) -> Tensor:
        """Return the gradient of the loss with respect to ``probability``, ``(E,)``."""
        return self.assigned * (len(self.assigned) / self.rows**2)

    def loss(self) -> Tensor:
        """Return ``E * sum_e (assigned_e / rows) * (probability_e / rows)``: ``top_k`` for an even load, otherwise larger."""
        return (self.gradient() * self.probability).sum()


def router_load(router_logits: Sequence[Tensor], flat_indices: Tensor, top_k: int) -> RouterLoad:
    """Return the load of one pass.

    ``router_logits``: ``(B * T, E)`` for each layer with a router. ``flat_indices``: the tokens that are not padding.
    """
    layers = torch.stack([layer.reshape(-1, layer.shape[-1])[flat_indices] for layer in router_logits])
    probabilities = layers.softmax(-1).flatten(0, 1)
    probabilities = probabilities.float() if probabilities.element_size() < 4 else probabilities
    chosen = probabilities.topk(top_k, dim=-1).indices
    assigned = torch.bincount(chosen.reshape(-1), minlength=probabilities.shape[-1])
    return RouterLoad(assigned.to(probabilities.dtype), probabilities.sum(0), len(probabilities))


def router_coefficient(network: PreTrainedModel, configured: float | None) -> float:
    """Return the coefficient of the router loss. ``configured`` None: the model's own, if its config enables the loss, else 0.

    Raises:
        ConfigError: the coefficient is not 0, and the model has no router, or another load-balancing loss.
    """
    config = network.config.get_text_config()
    own = float(getattr(config, "router_aux_loss_coef", 0.0)) if getattr(config, "output_router_logits", False) else 0.0
    coefficient = own if configured is None else configured
    if coefficient and not _is_load_balancing(network):
        raise ConfigError(
            f"model.router_aux_loss_coef: {type(network).__name__} has no load-balancing loss that cookbook supports, "
            f"got {coefficient}; set it to 0"
        )
    return coefficient


@torch.no_grad()
def _is_load_balancing(network: PreTrainedModel) -> bool:
    """Whether the model's own auxiliary loss equals this loss, on a probe."""
    config = network.config.get_text_config()
    if not hasattr(config, "num_experts_per_tok") or not hasattr(config, "output_router_logits"):
        return False
    network.eval()
    device = next(network.parameters()).device
    probe = torch.arange(1, 17, device=device)[None] % int(config.vocab_size)
    out = network(input_ids=probe, use_cache=False, output_router_logits=True)
    if not getattr(out, "router_logits", None) or not isinstance(getattr(out, "aux_loss", None), Tensor):
        return False
    loss = router_load(out.router_logits, torch.arange(16, device=device), config.num_experts_per_tok).loss()
    return bool((loss - out.aux_loss).abs() <= TOLERANCE * out.aux_loss.abs())
