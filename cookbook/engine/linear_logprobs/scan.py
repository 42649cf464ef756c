"""The forward pass: one walk over the tiles, which leaves a few numbers per row and what the backward pass asked for.

Every row has one reference for the whole walk, ``exp2(bits - reference)`` is what is summed. It starts as a guess (the
target's logit, or the largest of a sample, or 0 where they are near it); where the guess was more than 69 nats too low, the
walk is repeated with the true maximum. So no running maximum is kept, nothing is rescaled on the way, and kept tiles share
one factor per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cookbook.engine.linear_logprobs.projection import LIKELY_BITS, LN2, Block, Projection, Tiling, add_product, part

EXCLUDED = -1e9  # bits; exp2 of it is 0, and so is its product with that 0, unlike infinity's
SAFE_SUM = 2.0**100  # float32 ends at 2^128, and sums are multiplied with weights
SAMPLED_COLUMNS = 64
NEAR_ZERO = 32.0  # bits; exponentials of such logits are as safe and as exact without a reference, and a pass cheaper


@dataclass(frozen=True)
class Wanted:
    """What a walk is to leave behind."""

    keep: bool = False  # every tile
    mixture: bool = False  # the weight's rows mixed by probability
    entropy: bool = False
    entropy_mixture: bool = False
    hit: bool = False


@dataclass
class Scores:
    """Per row. ``logprobs`` ``(N, K)``; ``entropy`` nats, ``hit``, ``normalizer`` (bits), ``factor`` ``(N,)``.

    ``factor`` times a kept exponential is a probability. ``kept``: the tiles, ``(N * V,)``, or the mixtures ``(N, D')``.
    """

    logprobs: Tensor
    normalizer: Tensor
    factor: Tensor
    entropy: Tensor | None = None
    hit: Tensor | None = None
    kept: Tensor | None = None

    def select(self, rows: Tensor | slice) -> Scores:
        """Some rows; kept tiles stay behind."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Scores(self.logprobs[rows], self.normalizer[rows], self.factor[rows], entropy)


@dataclass
class _Sums:
    """What one walk adds up, relative to the reference; the target is left out when there is one."""

    total: Tensor
    weighted: Tensor | None = None
    largest: Tensor | None = None
    mixtures: list[Tensor] = field(default_factory=list)
    entropy_mixtures: list[Tensor] = field(default_factory=list)


def scan(projection: Projection, tiling: Tiling, wanted: Wanted, kept: Tensor | None = None) -> Scores:
    """Log-probabilities of the targets, and what is ``wanted``; ``kept`` is a buffer for the tiles to use again."""
    target_bits = projection.target_bits()
    reference = torch.maximum(target_bits.amax(1), _sampled_maximum(projection))
    reference = torch.where(reference.abs() < NEAR_ZERO, 0, reference)
    if wanted.keep and kept is None:
        kept = _empty(projection, projection.num_rows * projection.vocabulary)
    sums = _walk(projection, tiling, wanted, target_bits, reference, kept)
    if bool((sums.total > SAFE_SUM).any()):
        reference = torch.maximum(target_bits.amax(1), _maximum(projection, tiling))
        sums = _walk(projection, tiling, wanted, target_bits, reference, kept)
    scores = _scores(projection, wanted, target_bits, reference, sums)
    if kept is not None:
        scores.kept = kept
        if projection.one_target:
            _write_targets(projection, tiling, kept, torch.expm1(scores.logprobs[:, 0]) / scores.factor)
    if wanted.mixture:
        scores.kept = _mixtures(projection, wanted, scores, sums, reference)
    return scores


def _walk(
    projection: Projection, tiling: Tiling, wanted: Wanted, target_bits: Tensor, reference: Tensor, kept: Tensor | None
) -> _Sums:
    rows = projection.num_rows
    sums = _Sums(_zeros(projection, rows))
    sums.weighted = _zeros(projection, rows) if wanted.entropy else None
    sums.largest = torch.full_like(sums.total, -torch.inf) if wanted.hit else None
    for mixtures, wants in ((sums.mixtures, wanted.mixture), (sums.entropy_mixtures, wanted.entropy_mixture)):
        mixtures += [_zeros(projection, rows, weight.shape[1]) for _, weight in projection.pairs] if wants else []
    buffer = _empty(projection, tiling.block_rows * tiling.tile_columns)
    second = torch.empty_like(buffer) if wanted.entropy else None
    moved = reference.is_cuda or bool(reference.any())  # to ask a GPU costs more than the pass it may spare
    for rows_of_block in tiling.blocks:
        block = Block(projection.select(rows_of_block), tiling)
        for index, tile in enumerate(tiling.tiles):
            shape = (block.projection.num_rows, tile.stop - tile.start)
            out = part(buffer, shape) if kept is None else tiling.view(kept, rows_of_block, tile)
            start = reference[rows_of_block] if moved else None
            _visit(block, index, tile, rows_of_block, target_bits[rows_of_block], start, out, second, sums)
    return sums


def _visit(
    block: Block,
    index: int,
    tile: slice,
    rows: slice,
    target_bits: Tensor,
    reference: Tensor | None,
    out: Tensor,
    second: Tensor | None,
    sums: _Sums,
) -> None:
    """Adds one tile to the sums; ``out`` then holds its exponentials. No ``reference`` is one of 0."""
    bits = block.bits(tile, out if second is None else part(second, (len(out), out.shape[1])))
    if block.rounds:
        shares = torch.exp2(bits if reference is None else bits - reference[:, None]).sum(1) + sums.total[rows]
        block.sharpen(bits, tile, shares.log2_().add_(LIKELY_BITS if reference is None else reference + LIKELY_BITS))
    inside, columns, places = block.placed[index]
    if block.projection.one_target:
        bits[inside, columns] = EXCLUDED
    else:
        bits[inside, columns] = target_bits.reshape(-1)[places]  # exact also where the tile is rounded
    if sums.largest is not None:
        torch.maximum(sums.largest[rows], bits.amax(1), out=sums.largest[rows])
    slope = block.projection.capped_slope(bits) if sums.mixtures else None
    exponentials = torch.exp2(bits if reference is None else bits.sub_(reference[:, None]), out=out)
    if sums.weighted is not None:
        bits.mul_(exponentials)
        sums.weighted[rows] += bits.sum(1)
        _mix(block, tile, rows, bits, slope, sums.entropy_mixtures)
    sums.total[rows] += exponentials.sum(1)
    _mix(block, tile, rows, exponentials, slope, sums.mixtures)


def _mix(block: Block, tile: slice, rows: slice, values: Tensor, slope: Tensor | None, mixtures: list[Tensor]) -> None:
    if not mixtures:
        return
    values = values if slope is None else values * slope
    for (_, weight), mixture in zip(block.projection.pairs, mixtures, strict=True):
        add_product(values.to(weight.dtype), weight[tile], mixture[rows])


def _scores(projection: Projection, wanted: Wanted, target_bits: Tensor, reference: Tensor, sums: _Sums) -> Scores:
    # reference - target first: where the target is the reference they cancel exactly, and a probability near 1 stays exact.
    if projection.one_target:
        odds = ((reference - target_bits[:, 0]) + sums.total.log2()).mul_(LN2)
        logprobs = F.logsigmoid(-odds)[:, None]
        normalizer = target_bits[:, 0] - logprobs[:, 0] / LN2
    else:
        normalizer = reference + sums.total.log2()
        logprobs = (target_bits - normalizer[:, None]) * LN2
    factor = torch.exp2(reference - normalizer)
    scores = Scores(logprobs, normalizer, factor)
    if wanted.hit:
        assert sums.largest is not None
        scores.hit = target_bits[:, 0] >= sums.largest
    if wanted.entropy:
        assert sums.weighted is not None
        mean = factor * sums.weighted + (reference - normalizer) * factor * sums.total  # of log2 p, weighed with p
        if projection.one_target:
            mean += logprobs[:, 0].exp() * logprobs[:, 0] / LN2
        scores.entropy = -LN2 * mean
    return scores


def _mixtures(projection: Projection, wanted: Wanted, scores: Scores, sums: _Sums, reference: Tensor) -> Tensor:
    """``(N, D)`` per pair: d logprob / d x without the targets' rows, sign turned; then the same of the entropy."""
    slope = (projection.slope() * scores.factor)[:, None]
    columns = [mixture * slope for mixture in sums.mixtures]
    if wanted.entropy_mixture:
        assert scores.entropy is not None
        shift = (LN2 * (reference - scores.normalizer) + scores.entropy)[:, None]
        columns += [
            (more * LN2 + mixture * shift) * slope for more, mixture in zip(sums.entropy_mixtures, sums.mixtures, strict=True)
        ]
    return torch.cat(columns, 1)


def _write_targets(projection: Projection, tiling: Tiling, kept: Tensor, values: Tensor) -> None:
    """Kept tiles hold p / factor; at the target, p - 1 takes p's place."""
    flat = projection.targets[:, 0]
    for rows in tiling.blocks:
        inside = torch.arange(rows.stop - rows.start, device=flat.device)
        wanted = flat[rows]
        start = wanted // tiling.tile_columns * tiling.tile_columns
        width = (projection.vocabulary - start).clamp(max=tiling.tile_columns)
        places = rows.start * projection.vocabulary + len(inside) * start + inside * width + (wanted - start)
        kept[places] = values[rows]


def _sampled_maximum(projection: Projection) -> Tensor:
    """The largest of some logits of each row, evenly spaced over the vocabulary."""
    columns = max(1, min(SAMPLED_COLUMNS, projection.vocabulary // 16))
    step = projection.vocabulary // columns
    sample = Projection(
        pairs=tuple((x, weight[::step]) for x, weight in projection.pairs),
        bias=None if projection.bias is None else projection.bias[::step],
        targets=torch.zeros_like(projection.targets),
        temperature=projection.temperature,
        scale=projection.scale,
        softcap=projection.softcap,
        tile_bytes=projection.tile_bytes,
    )
    return _maximum(sample, Tiling.of(sample))


def _maximum(projection: Projection, tiling: Tiling) -> Tensor:
    largest = torch.full((projection.num_rows,), -torch.inf, dtype=projection.work_dtype, device=projection.device)
    buffer = _empty(projection, tiling.block_rows * tiling.tile_columns)
    for rows in tiling.blocks:
        block = Block(projection.select(rows), tiling)
        for tile in tiling.tiles:
            bits = block.bits(tile, part(buffer, (block.projection.num_rows, tile.stop - tile.start)))
            torch.maximum(largest[rows], bits.amax(1), out=largest[rows])
    return largest


def _empty(projection: Projection, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=projection.work_dtype, device=projection.device)


def _zeros(projection: Projection, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=projection.work_dtype, device=projection.device)
