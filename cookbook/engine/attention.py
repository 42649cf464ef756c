"""Attention inside rows that hold several sequences, and sequences that share their beginning.

A pass is one stream of tokens with a :class:`Layout` beside it. Every run of tokens reads keys of its own choosing, itself
the last of them, so no mask of the size of the row exists. On the CPU runs of one shape are computed together by
scaled-dot-product attention; on a GPU in half precision all runs by one variable-length kernel.

Installed in a Hugging Face model as an attention implementation of this name. Sampling brings the prompts that its rows go on
from; other calls with a mask or a cache go on to transformers' own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cookbook.engine.attention_scores import Prompts, Rule, attend_by_scores
from cookbook.engine.fast_path import GivenUpError

NAME = "cookbook"


@dataclass(frozen=True)
class Block:
    """``count`` runs of tokens, one after the other in the stream, each of ``queries`` tokens that read ``keys`` tokens.

    The last ``queries`` keys are the run itself, which looks at itself causally.
    """

    count: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Layout:
    """Which tokens of the stream see which. The blocks cover the stream, in order.

    ``key_index``, shape (keys of all runs,): the tokens every run reads; None when each reads itself alone. ``windows``, where
    it is a list, is told the sliding window that every layer asked for.
    """

    blocks: tuple[Block, ...]
    key_index: Tensor | None
    device: torch.device
    windows: list[int | None] | None = None
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, block: Block, window: int | None) -> Tensor | None:
        """``(queries, keys)``, true where a token is seen; None when that is plain causality. All layers share it."""
        if window is not None and window >= block.keys:
            window = None
        if window is None and block.queries == block.keys:
            return None
        shape = (block.queries, block.keys, window)
        if shape not in self.masks:
            before = block.keys - block.queries
            seen = torch.ones(block.queries, block.keys, dtype=torch.bool, device=self.device).tril(before)
            self.masks[shape] = seen if window is None else seen.triu(before - window + 1)
        return self.masks[shape]

    @functools.cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """Where every run's queries and keys start and the last ends, ``(runs + 1,)`` int32 each."""
        if len(self.blocks) == 1:  # made where it is used: to bring it there would wait for all that a GPU has to do before
            block = self.blocks[0]
            starts = torch.arange(block.count + 1, dtype=torch.int32, device=self.device)
            return starts * block.queries, starts * block.keys
        queries = [block.queries for block in self.blocks for _ in range(block.count)]
        keys = [block.keys for block in self.blocks for _ in range(block.count)]
        ends = torch.tensor([[0, *queries], [0, *keys]], device=self.device).cumsum(1).int()
        return ends[0], ends[1]


_LAID_OUT: ContextVar[bool] = ContextVar("laid_out", default=False)


@contextlib.contextmanager
def by_layout(laid_out: bool) -> Iterator[None]:
    """Around a call of the model that brings a layout, or prompts: what its tokens see then needs no mask."""
    token = _LAID_OUT.set(laid_out)
    try:
        yield
    finally:
        _LAID_OUT.reset(token)


def install(network: Any) -> None:
    """Make this module the attention of a Hugging Face model."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask_unless_causal)
    network.set_attn_implementation(NAME)


def uninstall(network: Any, before: str | None) -> None:
    """Give the model the attention back that it had ``before``."""
    network.set_attn_implementation(before)


def is_installed(network: Any) -> bool:
    return bool(getattr(network.config, "_attn_implementation", None) == NAME)


def _mask_unless_causal(
    batch_size: int, q_length: int, kv_length: int, attention_mask: Tensor | None = None, use_vmap: bool = False, **rest: Any
) -> Tensor | None:
    """transformers asks for the mask of a pass: None where ``attend`` knows by itself, with or without a window.

    ``use_vmap`` marks masks a model made of something else, ``allow_is_causal_skip=False`` those of several sequences in a row,
    which somebody else's call tells by positions alone.
    """
    from transformers.masking_utils import sdpa_mask

    causal = q_length == kv_length and rest.get("allow_is_causal_skip", True)
    if attention_mask is None and not use_vmap and (causal or _LAID_OUT.get()):
        return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, use_vmap=use_vmap, **rest
    )
    return mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    prompts: Prompts | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' attention functions: ``(B, heads, T, D)`` in, ``(B, T, heads, D)`` out.

    ``s_aux`` are attention sinks, one logit a head. Without a ``layout`` every row is one sequence, which goes on from one of
    the ``prompts`` where there are any.
    """
    rule = Rule(scaling if scaling is not None else query.shape[-1] ** -0.5, dropout, softcap, s_aux)
    if prompts is not None:
        return prompts.attend(query, key, value, module.layer_idx, rule).transpose(1, 2), None
    if layout is not None and attention_mask is not None:
        raise GivenUpError("its attention has a mask of its own making, of which a layout knows nothing")
    causal = rest.get("is_causal", getattr(module, "is_causal", True)) is not False and rest.get("position_bias") is None
    if attention_mask is None and query.shape[2] == key.shape[2] and causal:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        count, _, width, _ = query.shape
        layout = layout or Layout((Block(count, width, width),), None, query.device)
        if layout.windows is not None:
            layout.windows.append(sliding_window)
        out = _attend(q, k, v, layout, sliding_window, rule)
        return out.view(count, width, *out.shape[1:]), None
    if rule.is_plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest)
        return out, None
    causal = attention_mask is None and query.shape[2] > 1
    if causal:  # the first keys of a cache that is not full yet
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return attend_by_scores(query, key, value, attention_mask, causal, rule).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, window: int | None, rule: Rule) -> Tensor:
    """``(tokens, heads, D)`` -> ``(tokens, heads, D)``."""
    if layout.key_index is not None:
        key, value = key.index_select(0, layout.key_index), value.index_select(0, layout.key_index)
    varlen = _varlen_kernel() if _suits_varlen(query, value, rule) else None
    if varlen is not None:
        return _attend_varlen(varlen, query, key, value, layout, window, rule)
    compute = _plain if rule.is_plain else attend_by_scores
    queries = torch.split(query, [block.count * block.queries for block in layout.blocks])
    sizes = [block.count * block.keys for block in layout.blocks]
    found = []
    for block, q, k, v in zip(layout.blocks, queries, torch.split(key, sizes), torch.split(value, sizes), strict=True):
        q, k, v = (x.view(block.count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = layout.mask(block, window)
        found.append(compute(q, k, v, mask, mask is None, rule).transpose(1, 2).flatten(0, 1))
    return torch.cat(found) if len(found) > 1 else found[0]


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, rule: Rule) -> Tensor:
    """``(N, heads, queries, D)``, ``(N, key heads, keys, D)`` twice -> ``(N, heads, queries, D)``."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and (query.dtype == torch.float32 or mask is not None):
        # The kernels of a GPU that take these share no keys among heads; without one, all scores would exist.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=rule.dropout,
        is_causal=causal,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _suits_varlen(query: Tensor, value: Tensor, rule: Rule) -> bool:
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    return half and rule.is_plain and not rule.dropout and width == value.shape[-1] and width % 8 == 0 and width <= 256


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's, where it is new enough to know grouped heads and windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return cast("Callable[..., Tensor]", varlen_attn) if {"enable_gqa", "window_size"} <= set(known) else None


def _attend_varlen(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, layout: Layout, window: int | None, rule: Rule
) -> Tensor:
    """Its causality aligns the last query with the last key, as a run is the last of what it reads."""
    starts, key_starts = layout.offsets
    return kernel(
        query,
        key,
        value,
        starts,
        key_starts,
        max(block.queries for block in layout.blocks),
        max(block.keys for block in layout.blocks),
        scale=rule.scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
