"""The last layer, for those tokens alone whose hidden state somebody reads.

Behind the last layer's attention no token is read by another one. So a prompt of weight 0 needs no more of that layer than its
keys and values: its queries, what follows its attention and its MLP would be computed for nobody, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cookbook.engine.layers.install import TOLERANCE
from cookbook.engine.model import LanguageModel

MLPS = ("mlp", "feed_forward", "block_sparse_moe", "mlp_block")
ATTENTIONS = ("self_attn", "attention", "attn")
PROJECTIONS = ("q_proj", "o_proj", "dense", "out_proj", "c_proj")  # of queries, and of what attention found
WORTH_IT = 0.9  # of the tokens; taking rows out and putting them back costs a little


class LastLayer:
    """``modules``: the parts of a model's last layer that treat every token by itself and that no other token's keys need."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    @classmethod
    def of(cls, model: LanguageModel) -> LastLayer:
        """The parts that go by the names transformers gives them and, on a few tokens, do what is expected of them."""
        parts = cls(_parts(model.network))
        return parts if parts.modules and _is_exact(model, parts) else cls([])

    @contextlib.contextmanager
    def only(self, rows: Tensor, total: int) -> Iterator[None]:
        """Around a pass of ``total`` tokens of which ``rows``, ``(n,)`` ascending, are read; what it finds of others is not
        to be used."""
        if not 0 < len(rows) <= WORTH_IT * total:
            yield
            return
        with contextlib.ExitStack() as hooks:
            for module in self.modules:
                narrowed = _Narrowed(rows)
                hooks.callback(module.register_forward_pre_hook(narrowed.take).remove)
                hooks.callback(module.register_forward_hook(narrowed.put_back).remove)
            yield


class _Narrowed:
    """Hooks of one call: the module sees some rows of its input, and its caller zeros in the place of all others."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.shape = torch.Size()  # of what the module was called with, but for the last dimension

    def take(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.shape = args[0].shape[:-1]
        return args[0].flatten(0, -2).index_select(0, self.rows)[None], *args[1:]

    def put_back(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, tuple):  # of a mixture of experts: with how it routed
            return self.put_back(module, args, out[0]), *out[1:]
        found = out.new_zeros(self.shape.numel(), out.shape[-1]).index_copy_(0, self.rows, out[0])
        return found.view(*self.shape, -1)


def _parts(network: Any) -> list[nn.Module]:
    count = network.config.get_text_config().num_hidden_layers
    stacks = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(stacks) != 1:
        return []
    last: nn.Module = stacks[0][-1]
    attentions = [child for name, child in last.named_children() if name in ATTENTIONS]
    projections = [child for attention in attentions for name, child in attention.named_children() if name in PROJECTIONS]
    return [child for name, child in last.named_children() if name in MLPS] + projections


@torch.no_grad()
def _is_exact(model: LanguageModel, parts: LastLayer) -> bool:
    """Whether every part makes the same of a row whatever stands beside it, and the model the same of what is read."""
    network, device = model.network, model.device
    network.eval()
    ids = (torch.arange(10, device=device)[None] * 7 + 3) % int(network.config.get_text_config().vocab_size)
    rows = torch.tensor([2, 3, 6, 9], device=device)
    seen: dict[nn.Module, tuple[Tensor, Any]] = {}
    hooks = [part.register_forward_hook(lambda part, args, out: seen.update({part: (args[0], out)})) for part in parts.modules]
    try:
        expected = network(input_ids=ids, use_cache=False).logits[:, rows]
        for hook in hooks:
            hook.remove()
        alike = [_close(_first(part(x[:, rows])), _first(out)[:, rows]) for part, (x, out) in seen.items()]
        with parts.only(rows, ids.numel()):
            found = network(input_ids=ids, use_cache=False).logits[:, rows]
    except (RuntimeError, TypeError, ValueError, IndexError):  # a part that takes, or returns, something else
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return len(alike) == len(parts.modules) and all(alike) and _close(found, expected)


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE[one.dtype] * other.abs().max())
