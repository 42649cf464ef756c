"""The load-balancing loss of mixture-of-experts models, over all tokens of a call, however they are cut into passes.

It is a product of two means over tokens, how many go to an expert and how probable it finds it, so losses of micro-batches
do not add up to that of the batch. The sums behind the means do; and since the number of tokens has no slope, the gradient
with respect to every pass's sum of probabilities is known once all of them have been counted.

Source: Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook.errors import ConfigError

TOLERANCE = 2e-2  # relative: half precision rounds the router's probabilities; another formula is off by far more


@dataclass(frozen=True)
class RouterLoad:
    """How tokens were routed, summed over tokens and layers, for ``E`` experts.

    ``assigned`` ``(E,)``: how often an expert was among the chosen. ``probability`` ``(E,)``: the sum of its routing
    probabilities, with the graph of its pass. ``rows``: how many tokens times layers.
    """

    assigned: Tensor
    probability: Tensor
    rows: int

    def __add__(self, other: RouterLoad) -> RouterLoad:
        return RouterLoad(self.assigned + other.assigned, self.probability + other.probability, self.rows + other.rows)

    def detached(self) -> RouterLoad:
        return RouterLoad(self.assigned, self.probability.detach(), self.rows)

    def gradient(self) -> Tensor:
        """The slope of the loss with respect to a sum of probabilities, ``(E,)``."""
        return self.assigned * (len(self.assigned) / self.rows**2)

    def loss(self) -> Tensor:
        """``E * sum_e (assigned_e / rows) * (probability_e / rows)``: ``top_k`` where the load is even, above it elsewhere."""
        return (self.gradient() * self.probability).sum()


def router_load(router_logits: Sequence[Tensor], places: Tensor, top_k: int) -> RouterLoad:
    """The load of one pass. ``router_logits``: of every layer that routes, ``(B * T, E)``; ``places``: its real tokens."""
    layers = torch.stack([layer.reshape(-1, layer.shape[-1])[places] for layer in router_logits])
    probabilities = layers.softmax(-1).flatten(0, 1)
    probabilities = probabilities.float() if probabilities.element_size() < 4 else probabilities
    chosen = probabilities.topk(top_k, dim=-1).indices
    assigned = torch.bincount(chosen.reshape(-1), minlength=probabilities.shape[-1])
    return RouterLoad(assigned.to(probabilities.dtype), probabilities.sum(0), len(probabilities))


def router_coefficient(network: Any, wanted: float | None) -> float:
    """What the loss is multiplied by. ``None``: the model's own coefficient if its config asks for router logits, else 0.

    Raises:
        ConfigError: a coefficient for a model that has no router, or balances its load in another way.
    """
    config = network.config.get_text_config()
    own = float(getattr(config, "router_aux_loss_coef", 0.0)) if getattr(config, "output_router_logits", False) else 0.0
    coefficient = own if wanted is None else wanted
    if coefficient and not _is_load_balancing(network):
        raise ConfigError(
            f"model.router_aux_loss_coef: {type(network).__name__} has no load-balancing loss that cookbook knows, "
            f"got {coefficient}; set it to 0"
        )
    return coefficient


@torch.no_grad()
def _is_load_balancing(network: Any) -> bool:
    """Whether the model's own auxiliary loss is this one, on a probe."""
    config = network.config.get_text_config()
    if not hasattr(config, "num_experts_per_tok") or not hasattr(config, "output_router_logits"):
        return False
    network.eval()
    device = next(network.parameters()).device
    probe = torch.arange(1, 17, device=device)[None] % int(config.vocab_size)
    out = network(input_ids=probe, use_cache=False, output_router_logits=True)
    if not getattr(out, "router_logits", None) or not isinstance(getattr(out, "aux_loss", None), Tensor):
        return False
    found = router_load(out.router_logits, torch.arange(16, device=device), config.num_experts_per_tok).loss()
    return bool((found - out.aux_loss).abs() <= TOLERANCE * out.aux_loss.abs())
