"""Attention for packed rows, with or without shared prefixes, and for decoding with shared prompts.

A packed row consists of runs of consecutive tokens, described by an :class:`AttentionLayout`. Each run attends to its own list
of keys, which ends with the run itself, so there is no attention mask over the whole row. On the CPU, runs of one shape are
computed as one batch by scaled-dot-product attention. On a GPU in half precision, one variable-length kernel computes all runs.

:func:`install` registers :func:`attend` as an attention implementation of transformers. In decoding, :class:`SharedPrefixKV`
holds the keys and values of the prompts. Calls with a mask or another cache go to the attention of transformers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from cookbook.engine.fast_path import FastPathError
from cookbook.engine.precision import EXACT, attended, half_attention, multiplies_half, query_blocks, rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of the attention weights. ``softcap``: soft cap of the scores. ``sinks``: one extra logit per head."""

    scale: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, mask: Tensor | None, filled: int | None = None) -> Tensor:
        """Return the softmax of ``scores`` over the keys, in the same shape, ``(N, heads, queries, keys)``.

        ``mask``: true where a query sees a key, of a shape that broadcasts. ``filled``: no query sees a key after this number;
        ``scores`` may be changed. With sinks, the weights sum to less than 1.
        """
        keys = scores.shape[-1]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if filled is not None:
            scores[..., filled:] = torch.finfo(scores.dtype).min
        # Finite, because left padding of a prompt sees no key, and a softmax over -inf alone is NaN.
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = self.sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., :keys]


def attend_by_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, params: AttentionParams
) -> Tensor:
    """Attention with explicit scores, for soft caps and sinks.

    ``query``: ``(N, heads, queries, D)``. ``key`` and ``value``: ``(N, key heads, keys, D)``. Returns the shape of ``query``.
    """
    count, heads, queries, _ = query.shape
    # Query heads that share a key head are adjacent.
    grouped = query.reshape(count, key.shape[1], -1, queries, query.shape[-1])
    scores = (grouped @ key.transpose(-1, -2)[:, :, None] * params.scale).flatten(1, 2)
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = params.weights(scores, mask).to(value.dtype)
    weights = drop(weights, params.dropout) if params.dropout else weights
    out: Tensor = weights.view(count, key.shape[1], -1, queries, key.shape[2]) @ value[:, :, None]
    return out.view(count, heads, queries, -1)


@dataclass(frozen=True)
class SharedPrefixKV:
    """Keys and values for a decoding step in which several rows share one copy of their prompt.

    Each row attends to its prompt and its own tokens. Rows are arranged as ``prompts * slots``, so that all rows of a prompt
    read it in one matrix product; ``slots`` is the largest number of rows of a prompt, and unused slots repeat a row.

    ``layers``: for each layer, keys and values of the prompts, ``(prompts, key heads, columns, D)`` each. ``filled``: number
    of columns of the rows' own tokens that hold tokens, including the new one. ``row_of_slot``: ``(prompts * slots,)``, the row
    in each slot. ``slot_of_row``: ``(rows,)``, the slot of each row. Both are None if the rows are already in slot order.
    ``mask``: ``(rows, 1, 1, columns)``, true where a filled column holds a token of the row; None: everywhere.
    """

    layers: list[tuple[Tensor, Tensor]]
    filled: int
    slots: int
    row_of_slot: Tensor | None
    slot_of_row: Tensor | None
    mask: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, params: AttentionParams) -> Tensor:
        """Attend from the new tokens, ``query`` ``(rows, heads, 1, D)``; return the same shape.

        ``key`` and ``value``: of the rows' own tokens, ``(rows, key heads, columns, D)``, at least float32; the first
        ``filled`` columns hold tokens. The products read all columns, because contiguous memory is faster; unfilled columns get
        no weight.
        """
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(query, key, value, layer, params)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, params: AttentionParams) -> Tensor:
        prompt_keys, prompt_values = self.layers[layer]
        grouped = query.to(key.dtype).reshape(len(query), key.shape[1], -1, query.shape[-1]) * params.scale
        before = self._ungroup(self._group_by_prompt(grouped) @ prompt_keys.transpose(-1, -2))
        scores = torch.cat([before, grouped @ key.transpose(-1, -2)], -1)
        filled = before.shape[-1] + self.filled
        weights = params.weights(scores.flatten(1, 2).unsqueeze(2), self.mask, filled).view_as(scores)
        of_prompts, of_own = torch.split(weights, [before.shape[-1], key.shape[2]], -1)
        out: Tensor = self._ungroup(self._group_by_prompt(of_prompts) @ prompt_values) + of_own @ value
        return out.reshape(*query.shape[:3], value.shape[-1]).to(query.dtype)

    def _group_by_prompt(self, x: Tensor) -> Tensor:
        """Group rows by prompt: ``(rows, key heads, queries, N)`` -> ``(prompts, key heads, slots * queries, N)``."""
        x = x if self.row_of_slot is None else x.index_select(0, self.row_of_slot)
        return x.view(-1, self.slots, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _ungroup(self, x: Tensor) -> Tensor:
        """Ungroup: the inverse of :meth:`_group_by_prompt`."""
        x = x.view(*x.shape[:2], self.slots, -1, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return x if self.slot_of_row is None else x.index_select(0, self.slot_of_row)


NAME = "cookbook"
# Larger float32 scores are computed by blocks of queries, whose scores have about this size.
SCORES_BYTES = 128 << 20
# Fewest queries of a block.
LEAST_QUERIES = 64


@dataclass(frozen=True)
class AttentionBlock:
    """``count`` adjacent runs of one shape: each has ``queries`` tokens and attends to ``keys`` tokens.

    The last ``queries`` keys are the run itself, with causal attention.
    """

    count: int
    queries: int
    keys: int


@dataclass(frozen=True)
class AttentionLayout:
    """The keys of each run of a packed row. The blocks cover the row, in order.

    ``key_index``: ``(keys of all runs,)``, indices in the row of each run's keys; None if each run attends to itself only.
    ``windows``: records the sliding window that each layer has passed. ``masks``: cache of :meth:`mask`.
    """

    blocks: tuple[AttentionBlock, ...]
    key_index: Tensor | None
    device: torch.device
    windows: list[int | None] = field(default_factory=list, repr=False)
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, block: AttentionBlock, window: int | None) -> Tensor | None:
        """Return the mask of a run, ``(queries, keys)``, true where a key is seen; None if plain causal attention is enough."""
        if window is not None and window >= block.keys:
            window = None
        if window is None and block.queries == block.keys:
            return None
        shape = (block.queries, block.keys, window)
        if shape not in self.masks:
            self.masks[shape] = _mask(*shape, self.device)
        return self.masks[shape]

    @functools.cached_property
    def offsets(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of the runs' queries and keys, ``(runs + 1,)`` int32 each, for the variable-length kernel."""
        # Computed on the device, because a copy to a GPU waits for the kernels that are already queued.
        if len(self.blocks) == 1:
            block = self.blocks[0]
            starts = torch.arange(block.count + 1, dtype=torch.int32, device=self.device)
            return starts * block.queries, starts * block.keys
        queries = [block.queries for block in self.blocks for _ in range(block.count)]
        keys = [block.keys for block in self.blocks for _ in range(block.count)]
        ends = torch.tensor([[0, *queries], [0, *keys]], device=self.device).cumsum(1).int()
        return ends[0], ends[1]


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of the last ``queries`` of ``keys`` tokens, ``(queries, keys)``, true where a key is seen."""
    before = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before - window + 1)


_SKIP_MASKS: ContextVar[bool] = ContextVar("laid_out", default=False)


@contextlib.contextmanager
def skip_masks(enabled: bool) -> Iterator[None]:
    """Context of a model call. With ``enabled``, transformers builds no mask: a layout or shared prompts determine the keys."""
    token = _SKIP_MASKS.set(enabled)
    try:
        yield
    finally:
        _SKIP_MASKS.reset(token)


def install(network: PreTrainedModel) -> None:
    """Make this module the attention of a Hugging Face model."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask_unless_causal)
    network.set_attn_implementation(NAME)
    _detect_packed_rows_for_masks_only()


def _detect_packed_rows_for_masks_only() -> None:
    """Make transformers look for packed rows only if it builds a mask: on a GPU the host waits for the answer in every pass."""
    from transformers import masking_utils

    own = masking_utils.find_packed_sequence_indices
    if getattr(own, "is_lazy", False):
        return

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        return None if _SKIP_MASKS.get() else own(position_ids)

    find_packed_sequence_indices.is_lazy = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def is_installed(network: PreTrainedModel) -> bool:
    return bool(getattr(network.config, "_attn_implementation", None) == NAME)


def _mask_unless_causal(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: object,
) -> Tensor | None:
    """Return the mask of a pass, for transformers; None if :func:`attend` needs no mask, with or without a window.

    transformers sets ``use_vmap`` for custom masks of a model, and ``allow_is_causal_skip=False`` if another caller has packed
    several sequences into a row and marks them by their positions.
    """
    from transformers.masking_utils import sdpa_mask

    causal = q_length == kv_length and options.get("allow_is_causal_skip", True)
    if attention_mask is None and not use_vmap and (causal or _SKIP_MASKS.get()):
        return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **options,
    )
    return mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: AttentionLayout | None = None,
    prompts: SharedPrefixKV | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention function of transformers: ``query`` ``(B, heads, T, D)`` -> ``(B, T, heads, D)``, and None for the weights.

    ``s_aux``: attention sinks, one logit per head. ``layout``: layout of a packed row; without it, each row is one sequence.
    ``prompts``: keys and values of shared prompts, in decoding.

    Raises:
        FastPathError: the model passes a mask of its own together with a layout.
    """
    params = AttentionParams(scaling if scaling is not None else query.shape[-1] ** -0.5, dropout, softcap, s_aux)
    (query,) = rounded(query)
    if prompts is not None:
        return prompts.attend(query, key, value, cast("int", module.layer_idx), params).transpose(1, 2), None
    key, value = rounded(key, value)
    if layout is not None and attention_mask is not None:
        raise FastPathError("the model builds its own attention mask, which packed rows do not support")
    causal = options.get("is_causal", getattr(module, "is_causal", True)) is not False and options.get("position_bias") is None
    if attention_mask is None and query.shape[2] == key.shape[2] and causal:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        count, _, width, _ = query.shape
        layout = layout or AttentionLayout((AttentionBlock(count, width, width),), None, query.device)
        layout.windows.append(sliding_window)
        out = _attend(q, k, v, layout, sliding_window, params)
        return out.view(count, width, *out.shape[1:]), None
    if params.is_plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
        return out, None
    causal = attention_mask is None and query.shape[2] > 1
    # A preallocated cache has unused columns after the keys of the tokens.
    if causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return attend_by_scores(query, key, value, attention_mask, causal, params).transpose(1, 2), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, window: int | None, params: AttentionParams
) -> Tensor:
    """Attention of a packed row by its layout. ``query``: ``(tokens, heads, D)``; returns the same shape."""
    if layout.key_index is not None:
        key, value = key.index_select(0, layout.key_index), value.index_select(0, layout.key_index)
    varlen = _varlen_kernel() if _supports_varlen(query, value, params) else None
    if varlen is not None:
        longest = max(block.queries for block in layout.blocks), max(block.keys for block in layout.blocks)
        # The kernel aligns the last query with the last key, which is right here: a run is the end of its keys.
        size = (-1 if window is None else window - 1, 0)
        grouped = query.shape[1] != key.shape[1]
        return varlen(query, key, value, *layout.offsets, *longest, scale=params.scale, window_size=size, enable_gqa=grouped)
    is_set = params.is_plain and _is_precision_set(query)
    compute = functools.partial(attended, _plain) if is_set else _plain
    queries = torch.split(query, [block.count * block.queries for block in layout.blocks])
    sizes = [block.count * block.keys for block in layout.blocks]
    outputs = []
    for block, q, k, v in zip(layout.blocks, queries, torch.split(key, sizes), torch.split(value, sizes), strict=True):
        q, k, v = (x.view(block.count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if is_set and not params.dropout and multiplies_half(q, k, v):
            out = half_attention(q, k, v, window, params.scale)
        elif params.is_plain:
            out = _by_window(compute, q, k, v, layout, window, params)
        elif params.dropout or _scores_bytes(q, k) <= SCORES_BYTES:
            mask = layout.mask(block, window)
            out = attend_by_scores(q, k, v, mask, mask is None, params)
        else:
            out = _ScoresInBlocks.apply(params, window, q, k, v, params.sinks)  # type: ignore[no-untyped-call]
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _by_window(
    compute: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    window: int | None,
    params: AttentionParams,
) -> Tensor:
    """``compute`` for runs of one shape. In a layer with a window, long runs are computed by blocks of queries.

    A block reads the keys of its windows only, so that memory and time are linear in the length.
    """
    count, _, queries, _ = query.shape
    keys = key.shape[2]
    size = queries if window is None else max(LEAST_QUERIES, window // 2)
    if window is None or keys < window + 2 * size:
        mask = layout.mask(AttentionBlock(count, queries, keys), window)
        return compute(query, key, value, mask, mask is None, params)
    outputs = []
    for block, seen in query_blocks(queries, keys, window, size):
        mask = layout.mask(AttentionBlock(count, block.stop - block.start, seen.stop - seen.start), window)
        outputs.append(compute(query[:, :, block], key[:, :, seen], value[:, :, seen], mask, mask is None, params))
    return torch.cat(outputs, 2)


def _scores_bytes(query: Tensor, key: Tensor) -> int:
    """Return the size of the scores of all queries and keys in float32."""
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4


class _ScoresInBlocks(torch.autograd.Function):
    """:func:`attend_by_scores` by blocks of queries, without dropout. The backward pass recomputes the scores of each block.

    So the memory is linear in the length: the scores of 64 heads and 8,192 tokens would take 17 GB.
    """

    @staticmethod
    def forward(
        ctx: Any, params: AttentionParams, window: int | None, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        device = query.device.type
        ctx.params, ctx.window = params, window
        ctx.autocast = {"dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        ctx.save_for_backward(query, key, value, sinks)
        outputs = [
            _attend_to(query[:, :, block], key[:, :, seen], value[:, :, seen], window, params)
            for block, seen in _score_blocks(query, key, window)
        ]
        return torch.cat(outputs, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        d_query = torch.empty_like(query)
        # Sums over blocks, at least in float32.
        d_key, d_value = (
            torch.zeros_like(state, dtype=torch.promote_types(state.dtype, torch.float32)) for state in (key, value)
        )
        d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.promote_types(sinks.dtype, torch.float32))
        for block, seen in _score_blocks(query, key, ctx.window):
            q, k, v = (part.detach().requires_grad_() for part in (query[:, :, block], key[:, :, seen], value[:, :, seen]))
            params, inputs = ctx.params, [q, k, v]
            if sinks is not None:
                params = replace(params, sinks=sinks.detach().requires_grad_())
                inputs.append(params.sinks)
            with torch.enable_grad(), torch.autocast(query.device.type, **ctx.autocast):
                out = _attend_to(q, k, v, ctx.window, params)
            d_query[:, :, block], of_keys, of_values, *of_sinks = torch.autograd.grad(out, inputs, gradient[:, :, block])
            d_key[:, :, seen] += of_keys
            d_value[:, :, seen] += of_values
            if d_sinks is not None:
                d_sinks += of_sinks[0]
        if d_sinks is not None:
            d_sinks = d_sinks.to(sinks.dtype)
        return None, None, d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks


def _attend_to(query: Tensor, key: Tensor, value: Tensor, window: int | None, params: AttentionParams) -> Tensor:
    """Attention of a block of queries to the keys that it sees, which end with the block's own."""
    mask = _mask(query.shape[2], key.shape[2], window, query.device)
    return attend_by_scores(query, key, value, mask, causal=False, params=params)


def _score_blocks(query: Tensor, key: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries whose scores take at most ``SCORES_BYTES``, and the keys that a block sees.

    A block has at least ``LEAST_QUERIES`` queries, and in a layer with a window no more than the window, since it sees
    ``window`` keys more than it has queries.
    """
    count, heads, queries, _ = query.shape
    most_queries = queries if window is None else max(window, LEAST_QUERIES)
    keys = key.shape[2] if window is None else min(key.shape[2], window + most_queries)
    size = min(most_queries, max(LEAST_QUERIES, SCORES_BYTES // (count * heads * keys * 4)))
    return query_blocks(queries, key.shape[2], window, size)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, params: AttentionParams) -> Tensor:
    """Scaled-dot-product attention. Shapes as in :func:`attend_by_scores`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda and (query.dtype == torch.float32 or mask is not None):
        # Repeat the keys: the fused GPU kernels for these arguments do not support grouped heads, and the fallback would
        # compute all scores in memory.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, params.dropout, causal, scale=params.scale, enable_gqa=grouped)


def _is_precision_set(query: Tensor) -> bool:
    """Whether products on a CPU are at another precision than torch's default."""
    if query.device.type != "cpu" or query.dtype == torch.float64:
        return False
    return query.element_size() < 4 or torch.get_float32_matmul_precision() != EXACT or torch.is_autocast_enabled("cpu")


def _supports_varlen(query: Tensor, value: Tensor, params: AttentionParams) -> bool:
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    return half and params.is_plain and not params.dropout and width == value.shape[-1] and width % 8 == 0 and width <= 256


@functools.cache
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """Return torch's variable-length kernel; None if this version of torch lacks its grouped heads or windows."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    return cast("Callable[..., Tensor]", varlen_attn) if {"enable_gqa", "window_size"} <= set(known) else None
