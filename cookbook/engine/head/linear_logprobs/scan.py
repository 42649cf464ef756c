"""The forward pass: one scan over tiles of logits, each some rows (tokens) by some columns (of the vocabulary).

The scan computes a few numbers per row, and the values that the backward pass needs. Logits are in bits,
``bits = log2(e) * softcap(scale * (x W^T + bias)) / temperature``, for ``exp2``: it takes the same time for every argument,
while ``exp`` is up to a hundred times slower on the CPU if its result underflows (measured: 36 ns at -90, otherwise 0.3 ns; the
tail of a peaked distribution is full of such values).

The scan sums ``exp2(bits - reference)``, with one reference per row. Online softmax would rescale the sums whenever the running
maximum changes. Here the reference is guessed before the scan: the maximum over the target and a sample of the logits, or 0 if
that is near 0. If a guess is more than 69 nats too low, the scan runs again with the true maximum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2)
# Number of values of target rows of the weight that are gathered at a time.
GATHERED_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}
MAX_ROWS = {"cpu": 4096, "cuda": 8192}
# On the CPU a tile stays in the cache; on a GPU it fills the multiprocessors.
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
COLUMN_STEP = 64
# log2(1/64). If products are rounded to bfloat16, logits of more likely tokens, at most 64 per row, are recomputed exactly.
LIKELY_BITS = -6.0


@dataclass(frozen=True)
class Projection:
    """``N`` rows and the output layer: the sum of the products of ``pairs``, hidden states with weight and perhaps a LoRA.

    ``pairs``: ``(N, D)`` and ``(V, D)``. ``bias``: ``(V,)``. ``targets``: ``(N, K)``. ``temperature``: ``(N,)``.
    """

    pairs: tuple[tuple[Tensor, Tensor], ...]
    targets: Tensor
    bias: Tensor | None = None
    temperature: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def num_rows(self) -> int:
        return self.targets.shape[0]

    @property
    def vocabulary(self) -> int:
        return self.pairs[0][1].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the operands of the matrix products."""
        return self.pairs[0][1].dtype

    @property
    def work_dtype(self) -> torch.dtype:
        """Dtype of all other values."""
        return torch.promote_types(self.pairs[0][1].dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def one_target(self) -> bool:
        """Whether each row has one target. Then all sums exclude the target, which keeps 1 - p accurate for p near 1."""
        return self.targets.shape[1] == 1

    def inner(self) -> Tensor:
        """Return the factor from the layer's output to bits, or with a soft cap to the argument of its tanh, ``(N,)``."""
        if self.softcap is not None:
            return self._per_row(self.scale / self.softcap)
        return self._per_row(self.scale * LOG2E, self.temperature)

    def outer(self) -> Tensor:
        """Return the factor from the soft cap's tanh to bits, ``(N,)``."""
        assert self.softcap is not None
        return self._per_row(self.softcap * LOG2E, self.temperature)

    def logit_derivative(self) -> Tensor:
        """Return d logit / d output of the layer, without the derivative of the soft cap, ``(N,)``."""
        return self._per_row(self.scale, self.temperature)

    def softcap_derivative(self, bits: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap, ``1 - tanh^2``, from ``bits`` ``(N, C)``; None without a soft cap."""
        if self.softcap is None:
            return None
        return (bits / self.outer()[:, None]).square_().neg_().add_(1)

    def select(self, rows: Tensor | slice) -> Projection:
        return replace(
            self,
            pairs=tuple((x[rows], weight) for x, weight in self.pairs),
            targets=self.targets[rows],
            temperature=None if self.temperature is None else self.temperature[rows],
        )

    def target_bits(self) -> Tensor:
        """Return the targets' logits in bits, ``(N, K)``, computed in the work dtype even if tiles are rounded to bfloat16."""
        bits = torch.empty(self.targets.shape, dtype=self.work_dtype, device=self.device)
        for rows in self._gatherable_slices():
            bits[rows] = self.select(rows)._target_bits()
        return bits

    def target_rows(self, coefficients: Tensor, pair: int) -> Tensor:
        """Return the sum over K of ``coefficients`` ``(N, K)`` times the targets' rows of the weight, ``(N, D)``."""
        weight = self.pairs[pair][1]
        out = torch.empty(self.num_rows, weight.shape[1], dtype=self.work_dtype, device=self.device)
        for rows in self._gatherable_slices():
            gathered = weight[self.targets[rows]].to(self.work_dtype)
            torch.sum(gathered.mul_(coefficients[rows][..., None]), 1, out=out[rows])
        return out

    def _target_bits(self) -> Tensor:
        raw = torch.zeros(self.targets.shape, dtype=self.work_dtype, device=self.device)
        for x, weight in self.pairs:
            gathered = weight[self.targets].to(self.work_dtype)
            raw += gathered.mul_(x.to(self.work_dtype)[:, None]).sum(-1)
        if self.bias is not None:
            raw += self.bias[self.targets]
        raw *= self.inner()[:, None]
        return raw if self.softcap is None else raw.tanh_().mul_(self.outer()[:, None])

    def _gatherable_slices(self) -> Iterator[slice]:
        width = max(weight.shape[1] for _, weight in self.pairs) * self.targets.shape[1]
        step = max(1, device_limit(GATHERED_VALUES, self.device) // width)
        return (slice(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step))

    def _per_row(self, value: float, temperature: Tensor | None = None) -> Tensor:
        """Return ``value`` for each row, ``(N,)``, divided by the row's temperature if there is one."""
        if temperature is not None:
            return value / temperature
        return torch.full(self.targets.shape[:1], value, dtype=self.work_dtype, device=self.device)


@dataclass(frozen=True)
class Tiling:
    """Division into blocks of rows and tiles of columns, of equal sizes except for the last block and the last tile."""

    num_rows: int
    vocabulary: int
    block_rows: int
    tile_columns: int

    @classmethod
    def of(cls, projection: Projection, *, whole_rows: bool = False) -> Tiling:
        most = projection.num_rows if whole_rows else device_limit(MAX_ROWS, projection.device)
        rows = max(1, min(projection.num_rows, most))
        budget = device_limit(TILE_BYTES, projection.device)
        columns = budget // (projection.work_dtype.itemsize * rows) // COLUMN_STEP * COLUMN_STEP
        return cls(projection.num_rows, projection.vocabulary, rows, min(max(columns, COLUMN_STEP), projection.vocabulary))

    @property
    def blocks(self) -> list[slice]:
        """Blocks of rows; at least one, so that an empty batch gets gradients of zero."""
        starts = range(0, max(self.num_rows, 1), self.block_rows)
        return [slice(start, min(start + self.block_rows, self.num_rows)) for start in starts]

    @property
    def tiles(self) -> list[slice]:
        starts = range(0, self.vocabulary, self.tile_columns)
        return [slice(start, min(start + self.tile_columns, self.vocabulary)) for start in starts]

    def view(self, flat: Tensor, block: slice, tile: slice) -> Tensor:
        """Return one tile of a flat buffer of ``N * V`` values, as a view; a tile is contiguous in memory."""
        rows, offset = block.stop - block.start, block.start * self.vocabulary
        return flat[offset + rows * tile.start : offset + rows * tile.stop].view(rows, tile.stop - tile.start)


class RowBlock:
    """Logits of one block of rows, tile by tile. The rows are scaled once, and the targets sorted by tile."""

    def __init__(self, projection: Projection, tiling: Tiling) -> None:
        self.projection = projection
        self.inner = self.projection.inner()
        self.outer = None if projection.softcap is None else self.projection.outer()
        self.tiling = tiling
        # Scaling inside the matrix product, or scaling the rows, saves a pass over the logits. Scaled bfloat16 rows would be
        # rounded; on the CPU the product too, because its result is bfloat16.
        exact = projection.dtype == projection.work_dtype
        self.alpha = self._alpha() if exact or projection.device.type != "cpu" else None
        self.scaled = exact or self.alpha is not None
        xs = [x for x, _ in self.projection.pairs]
        self.xs = [x * self.inner[:, None] for x in xs] if exact and self.alpha is None else xs

    def bits(self, tile: slice, out: Tensor) -> Tensor:
        """Write the tile's logits, in bits, to ``out``, ``(M, C)`` in the work dtype."""
        weights = [weight[tile] for _, weight in self.projection.pairs]
        product(self.xs[0], weights[0].T, out, self.alpha)
        for x, weight in zip(self.xs[1:], weights[1:], strict=True):
            add_product(x, weight.T, out, self.alpha)
        if not self.scaled:
            out.mul_(self.inner[:, None])
        if self.projection.bias is not None:
            out.addr_(self.inner, self.projection.bias[tile].to(out.dtype))
        return out if self.outer is None else out.tanh_().mul_(self.outer[:, None])

    @property
    def rounds_products(self) -> bool:
        """Whether matrix products are rounded to bfloat16: on the CPU they cannot return their float32 sums."""
        return not self.scaled and self.projection.device.type == "cpu"

    def recompute_likely(self, bits: Tensor, tile: slice, least: Tensor) -> None:
        """Recompute logits above ``least`` ``(M,)`` exactly.

        A logit of 18 in bfloat16 has an error of up to 0.06. Correcting the few tokens that dominate the sum is enough.
        """
        some = (bits.amax(1) > least).nonzero()[:, 0]
        indices, columns = (bits.index_select(0, some) > least[some, None]).nonzero(as_tuple=True)
        rows = some[indices]
        exact = replace(self.projection.select(rows), targets=(columns + tile.start)[:, None])
        bits[rows, columns] = exact.target_bits()[:, 0]

    def _alpha(self) -> float | None:
        """Return the factor that all rows have in common, or None. Comparing temperatures on a GPU makes the CPU wait."""
        if self.projection.softcap is not None:
            return self.projection.scale / self.projection.softcap
        if self.projection.temperature is None:
            return self.projection.scale * LOG2E
        return common_value(self.inner)

    @functools.cached_property
    def targets_by_tile(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Targets inside each tile: their rows, columns, and indices into ``targets.reshape(-1)``."""
        flat, tiles = self.projection.targets.reshape(-1), self.tiling.tiles
        if len(tiles) == 1:
            every = torch.arange(len(flat), device=flat.device)
            return [(every // self.projection.targets.shape[1], flat, every)]
        ordered, order = flat.sort(stable=True)
        starts = torch.arange(0, self.tiling.vocabulary, self.tiling.tile_columns, device=flat.device)
        bounds = [*torch.searchsorted(ordered, starts).tolist(), len(flat)]
        rows = order // self.projection.targets.shape[1]
        return [
            (rows[a:b], ordered[a:b] - tile.start, order[a:b])
            for tile, a, b in zip(tiles, bounds[:-1], bounds[1:], strict=True)
        ]


def device_limit(limits: Mapping[str, int], device: torch.device) -> int:
    """Return the limit for ``device``; any accelerator has the limit of ``cuda``."""
    return limits.get(device.type, limits["cuda"])


def buffer_view(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the first values of a flat buffer as a view of ``shape``."""
    return buffer[: shape[0] * shape[1]].view(shape)


def common_value(column: Tensor) -> float | None:
    """Return the value that all entries of ``column`` have, or None if they differ. A matrix product takes it as ``alpha``."""
    if not len(column):
        return 1.0
    first = column[0]
    return float(first) if bool((column == first).all()) else None


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float | None = None) -> Tensor:
    """Compute ``out = alpha a b``, accumulated in at least float32; ``alpha`` None is 1."""
    alpha = 1.0 if alpha is None else alpha
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out) if alpha == 1.0 else out.addmm_(a, b, beta=0, alpha=alpha)
    if a.is_cuda:
        return torch.addmm(out, a, b, beta=0, alpha=alpha, out_dtype=out.dtype, out=out)
    # On the CPU a product of bfloat16 accumulates in float32, and rounds its result to bfloat16.
    out.copy_(torch.mm(a, b))
    return out if alpha == 1.0 else out.mul_(alpha)


def add_product(a: Tensor, b: Tensor, out: Tensor, alpha: float | None = None) -> Tensor:
    """Compute ``out += alpha a b``, accumulated in the dtype of ``out``; ``alpha`` None is 1."""
    alpha = 1.0 if alpha is None else alpha
    if a.dtype == out.dtype:
        return out.addmm_(a, b, alpha=alpha)
    if a.is_cuda:
        return torch.addmm(out, a, b, alpha=alpha, out_dtype=out.dtype, out=out)
    return out.add_(torch.mm(a, b), alpha=alpha)


# A logit, in bits, whose exp2 is 0. Finite, because the entropy multiplies the logit by its exp2, and -inf * 0 is NaN.
EXCLUDED_BITS = -1e9
# Largest sum of exponentials that is safe. float32 ends at 2^128, and the sums are multiplied by logits and weights.
SAFE_SUM = 2.0**100
SAMPLED_COLUMNS = 64
# Bits. If the reference is smaller than this, 0 is as safe, and saves the subtraction, a pass over the tile.
NEAR_ZERO = 32.0


@dataclass(frozen=True)
class ScanSpec:
    """Results of a scan besides the logprobs. ``keep``: the exponentials of all tiles.

    ``mixture``: the mean of the weight's rows under p, for d logprob / d hidden; ``entropy_mixture``: for d entropy / d hidden.
    """

    keep: bool = False
    mixture: bool = False
    entropy: bool = False
    entropy_mixture: bool = False
    hit: bool = False


@dataclass
class ScanOutput:
    """Results per row: ``logprobs`` ``(N, K)`` and ``entropy`` in nats; ``normalizer``, the log-sum-exp, in bits.

    ``factor`` times a kept exponential is a probability. ``cache``: the tiles, ``(N * V,)``, or the mixtures ``(N, D')``.
    """

    logprobs: Tensor
    normalizer: Tensor
    factor: Tensor
    entropy: Tensor | None = None
    hit: Tensor | None = None
    cache: Tensor | None = None

    def select(self, rows: Tensor | slice) -> ScanOutput:
        """Return the results of some rows, without kept values."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return ScanOutput(self.logprobs[rows], self.normalizer[rows], self.factor[rows], entropy)


@dataclass
class _Sums:
    """Sums of exponentials, and of exponentials times logits, relative to the reference; one target per row is excluded."""

    total: Tensor
    weighted: Tensor | None = None
    largest: Tensor | None = None
    mixtures: list[Tensor] = field(default_factory=list)
    entropy_mixtures: list[Tensor] = field(default_factory=list)


def scan(projection: Projection, tiling: Tiling, spec: ScanSpec, cache: Tensor | None = None) -> ScanOutput:
    """Return the log-probabilities of the targets and the results in ``spec``; ``cache``: a buffer for the tiles."""
    target_bits = projection.target_bits()
    reference = torch.maximum(target_bits.amax(1), _sample_maximum(projection))
    reference = torch.where(reference.abs() < NEAR_ZERO, 0, reference)
    if spec.keep and cache is None:
        cache = _empty(projection, projection.num_rows * projection.vocabulary)
    sums = _run_scan(projection, tiling, spec, target_bits, reference, cache)
    if bool((sums.total > SAFE_SUM).any()):
        reference = torch.maximum(target_bits.amax(1), _maximum(projection, tiling))
        sums = _run_scan(projection, tiling, spec, target_bits, reference, cache)
    scores = _scores(projection, spec, target_bits, reference, sums)
    if cache is not None:
        scores.cache = cache
        if projection.one_target:
            _write_at_targets(projection, tiling, cache, torch.expm1(scores.logprobs[:, 0]) / scores.factor)
    if spec.mixture:
        scores.cache = _mixtures(projection, spec, scores, sums, reference)
    return scores


def _run_scan(
    projection: Projection, tiling: Tiling, spec: ScanSpec, target_bits: Tensor, reference: Tensor, cache: Tensor | None
) -> _Sums:
    rows = projection.num_rows
    sums = _Sums(_zeros(projection, rows), _zeros(projection, rows) if spec.entropy else None)
    sums.largest = torch.full_like(sums.total, -torch.inf) if spec.hit else None
    for mixtures, needed in ((sums.mixtures, spec.mixture), (sums.entropy_mixtures, spec.entropy_mixture)):
        mixtures += [_zeros(projection, rows, weight.shape[1]) for _, weight in projection.pairs] if needed else []
    buffer = _empty(projection, tiling.block_rows * tiling.tile_columns)
    second = torch.empty_like(buffer) if spec.entropy else None
    # On a GPU, reading the flag would synchronize, which costs more than the subtraction that it may save.
    subtracts = reference.is_cuda or bool(reference.any())
    for rows_of_block in tiling.blocks:
        block = RowBlock(projection.select(rows_of_block), tiling)
        for index, tile in enumerate(tiling.tiles):
            shape = (block.projection.num_rows, tile.stop - tile.start)
            out = buffer_view(buffer, shape) if cache is None else tiling.view(cache, rows_of_block, tile)
            start = reference[rows_of_block] if subtracts else None
            _add_tile(block, index, tile, rows_of_block, target_bits[rows_of_block], start, out, second, sums)
    return sums


def _add_tile(
    block: RowBlock,
    index: int,
    tile: slice,
    rows: slice,
    target_bits: Tensor,
    reference: Tensor | None,
    out: Tensor,
    second: Tensor | None,
    sums: _Sums,
) -> None:
    """Add one tile to the sums, and write its exponentials to ``out``. ``reference`` None: 0."""
    bits = block.bits(tile, out if second is None else buffer_view(second, (len(out), out.shape[1])))
    if block.rounds_products:
        shares = torch.exp2(bits if reference is None else bits - reference[:, None]).sum(1) + sums.total[rows]
        block.recompute_likely(bits, tile, shares.log2_().add_(LIKELY_BITS if reference is None else reference + LIKELY_BITS))
    inside, columns, indices = block.targets_by_tile[index]
    if block.projection.one_target:
        bits[inside, columns] = EXCLUDED_BITS
    else:
        # The exact target logits, even if the tile is rounded to bfloat16.
        bits[inside, columns] = target_bits.reshape(-1)[indices]
    if sums.largest is not None:
        torch.maximum(sums.largest[rows], bits.amax(1), out=sums.largest[rows])
    derivative = block.projection.softcap_derivative(bits) if sums.mixtures else None
    exponentials = torch.exp2(bits if reference is None else bits.sub_(reference[:, None]), out=out)
    if sums.weighted is not None:
        bits.mul_(exponentials)
        sums.weighted[rows] += bits.sum(1)
        _add_mixture(block, tile, rows, bits, derivative, sums.entropy_mixtures)
    sums.total[rows] += exponentials.sum(1)
    _add_mixture(block, tile, rows, exponentials, derivative, sums.mixtures)


def _add_mixture(block: RowBlock, tile: slice, rows: slice, values: Tensor, factor: Tensor | None, into: list[Tensor]) -> None:
    if not into:
        return
    values = values if factor is None else values * factor
    for (_, weight), mixture in zip(block.projection.pairs, into, strict=True):
        add_product(values.to(weight.dtype), weight[tile], mixture[rows])


def _scores(projection: Projection, spec: ScanSpec, target_bits: Tensor, reference: Tensor, sums: _Sums) -> ScanOutput:
    # reference - target first: they cancel exactly if they are equal, so 1 - p stays accurate for p near 1.
    if projection.one_target:
        odds = ((reference - target_bits[:, 0]) + sums.total.log2()).mul_(LN2)
        logprobs = F.logsigmoid(-odds)[:, None]
        normalizer = target_bits[:, 0] - logprobs[:, 0] / LN2
    else:
        normalizer = reference + sums.total.log2()
        logprobs = (target_bits - normalizer[:, None]) * LN2
    factor = torch.exp2(reference - normalizer)
    scores = ScanOutput(logprobs, normalizer, factor)
    if spec.hit:
        assert sums.largest is not None
        scores.hit = target_bits[:, 0] >= sums.largest
    if spec.entropy:
        assert sums.weighted is not None
        # The mean of log2 p under p: minus the entropy in bits.
        mean = factor * sums.weighted + (reference - normalizer) * factor * sums.total
        if projection.one_target:
            mean += logprobs[:, 0].exp() * logprobs[:, 0] / LN2
        scores.entropy = -LN2 * mean
    return scores


def _mixtures(projection: Projection, spec: ScanSpec, scores: ScanOutput, sums: _Sums, reference: Tensor) -> Tensor:
    """Return -d logprob / d x of each pair, then -d entropy / d x, both without the term of the target's row."""
    derivative = (projection.logit_derivative() * scores.factor)[:, None]
    columns = [mixture * derivative for mixture in sums.mixtures]
    if spec.entropy_mixture:
        assert scores.entropy is not None
        shift = (LN2 * (reference - scores.normalizer) + scores.entropy)[:, None]
        columns += [(a * LN2 + b * shift) * derivative for a, b in zip(sums.entropy_mixtures, sums.mixtures, strict=True)]
    return torch.cat(columns, 1)


def _write_at_targets(projection: Projection, tiling: Tiling, cache: Tensor, values: Tensor) -> None:
    """Write ``values``, (p - 1) / factor, at the targets of the kept tiles; elsewhere the tiles hold p / factor."""
    flat = projection.targets[:, 0]
    for rows in tiling.blocks:
        inside = torch.arange(rows.stop - rows.start, device=flat.device)
        targets = flat[rows]
        start = targets // tiling.tile_columns * tiling.tile_columns
        width = (projection.vocabulary - start).clamp(max=tiling.tile_columns)
        indices = rows.start * projection.vocabulary + len(inside) * start + inside * width + (targets - start)
        cache[indices] = values[rows]


def _sample_maximum(projection: Projection) -> Tensor:
    """Return each row's largest logit among a sample of columns, evenly spaced over the vocabulary."""
    columns = max(1, min(SAMPLED_COLUMNS, projection.vocabulary // 16))
    step = projection.vocabulary // columns
    sample = replace(
        projection,
        pairs=tuple((x, weight[::step]) for x, weight in projection.pairs),
        bias=None if projection.bias is None else projection.bias[::step],
        targets=torch.zeros_like(projection.targets),
    )
    return _maximum(sample, Tiling.of(sample))


def _maximum(projection: Projection, tiling: Tiling) -> Tensor:
    largest = _zeros(projection, projection.num_rows).fill_(-torch.inf)
    buffer = _empty(projection, tiling.block_rows * tiling.tile_columns)
    for rows in tiling.blocks:
        block = RowBlock(projection.select(rows), tiling)
        for tile in tiling.tiles:
            bits = block.bits(tile, buffer_view(buffer, (block.projection.num_rows, tile.stop - tile.start)))
            torch.maximum(largest[rows], bits.amax(1), out=largest[rows])
    return largest


def _empty(projection: Projection, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=projection.work_dtype, device=projection.device)


def _zeros(projection: Projection, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=projection.work_dtype, device=projection.device)
