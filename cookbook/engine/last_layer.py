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

from cookbook.engine.fast_path import GivenUpError, first_working
from cookbook.engine.layers.install import TOLERANCE
from cookbook.engine.model import LanguageModel

MLPS = ("mlp", "feed_forward", "block_sparse_moe", "mlp_block")
ATTENTIONS = ("self_attn", "attention", "attn")
PROJECTIONS = ("q_proj", "o_proj", "dense", "out_proj", "c_proj")  # of queries, and of what attention found
TRIAL_TOKENS, ROWS = 10, [2, 3, 6, 9]


class LastLayer:
    """``modules``: the parts of a model's last layer that treat every token by itself and that no other token's keys need."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    @classmethod
    def of(cls, model: LanguageModel) -> LastLayer:
        """The parts that go by the names transformers gives them, if on a few tokens they do what is expected of them."""
        before = model.network.training
        ways = [("is trimmed", lambda: cls._tried(model)), ("computes all tokens there", lambda: cls([]))]
        try:
            return first_working(model, "last layer", ways)
        finally:
            model.network.train(before)

    @classmethod
    def _tried(cls, model: LanguageModel) -> LastLayer:
        parts = cls(_parts(model.network))
        if not parts.modules:
            raise GivenUpError("no part of it has a known name")
        if not all(_is_exact(model, parts, training=training) for training in (False, True)):
            raise GivenUpError("trimmed it computes something else")
        return parts

    @contextlib.contextmanager
    def only(self, rows: Tensor) -> Iterator[None]:
        """Around a pass of whose tokens ``rows``, ``(n,)`` ascending, are read; what it finds of others is not to be used."""
        with contextlib.ExitStack() as hooks:
            for module in self.modules:
                narrowed = _Narrowed(rows)
                hooks.callback(module.register_forward_pre_hook(narrowed.take).remove)
                hooks.callback(module.register_forward_hook(narrowed.put_back).remove)
            yield


def worth_it(rows: int, total: int) -> bool:
    """Whether computing ``rows`` of ``total`` tokens saves more than taking them out and putting them back costs."""
    return 0 < rows <= 0.9 * total


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
    count = getattr(network.config.get_text_config(), "num_hidden_layers", 0)
    stacks = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(stacks) != 1:
        return []
    last: nn.Module = stacks[0][-1]
    attentions = [child for name, child in last.named_children() if name in ATTENTIONS]
    projections = [child for attention in attentions for name, child in attention.named_children() if name in PROJECTIONS]
    return [child for name, child in last.named_children() if name in MLPS] + projections


@torch.no_grad()
def _is_exact(model: LanguageModel, parts: LastLayer, *, training: bool) -> bool:
    """Whether every part makes the same of a row whatever the others hold, and the model the same of the rows asked for."""
    model.network.train(training)
    seen: dict[nn.Module, Tensor] = {}
    hooks = [part.register_forward_hook(lambda part, args, _: seen.update({part: args[0]})) for part in parts.modules]
    try:
        expected = _logits(model)[:, ROWS]
    finally:
        for hook in hooks:
            hook.remove()
    if not all(_is_row_wise(part, seen[part]) for part in parts.modules):
        return False
    with parts.only(torch.tensor(ROWS, device=model.device)):
        found = _logits(model)[:, ROWS]
    return bool((found - expected).abs().max() <= TOLERANCE[found.dtype] * expected.abs().max())


def _logits(model: LanguageModel) -> Tensor:
    """``(1, TRIAL_TOKENS, V)``."""
    vocabulary = int(model.network.config.get_text_config().vocab_size)
    ids = (torch.arange(TRIAL_TOKENS, device=model.device)[None] * 7 + 3) % vocabulary
    logits: Tensor = model.network(input_ids=ids, use_cache=False).logits
    return logits


def _is_row_wise(part: nn.Module, x: Tensor) -> bool:
    others = -x
    others[:, ROWS] = x[:, ROWS]
    found, expected = (_first(part(values))[:, ROWS] for values in (others, x))
    # Two units in the last place: of a mixture, experts get other numbers of rows, and their products round differently.
    return bool((found - expected).abs().max() <= 2 * torch.finfo(x.dtype).eps * expected.abs().max())


def _first(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found
