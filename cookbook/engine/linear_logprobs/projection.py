"""The output layer as a function of a tile: some rows (tokens) by some columns (tokens of the vocabulary).

Everything here is in bits: ``bits = log2(e) * softcap(scale * (x W^T + bias)) / temperature``, because ``exp2`` costs the same
whatever its argument, while ``exp`` is up to a hundred times slower on the CPU where its result underflows (measured:
36 ns against 0.3 ns at -90; the tail of a peaked distribution is full of such values).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2)
GATHERED_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}  # of target rows of the weight that exist at once
MAX_ROWS = {"cpu": 4096, "cuda": 8192}
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # on the CPU a tile stays in the cache; on a GPU it fills the multiprocessors
COLUMN_STEP = 64
LIKELY_BITS = -6.0  # a probability of 1/64: what is likelier is sharpened, at most 64 tokens a row


@dataclass(frozen=True)
class Projection:
    """``N`` rows and the layer they go through. ``pairs`` add up: the layer itself, and perhaps a low-rank adapter on it.

    ``pairs`` of ``(N, D)`` and ``(V, D)``; ``bias`` ``(V,)``; ``targets`` ``(N, K)``; ``temperature`` ``(N,)``.
    """

    pairs: tuple[tuple[Tensor, Tensor], ...]
    targets: Tensor
    bias: Tensor | None = None
    temperature: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    tile_bytes: int | None = None

    @property
    def num_rows(self) -> int:
        return self.targets.shape[0]

    @property
    def vocabulary(self) -> int:
        return self.pairs[0][1].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands of the matrix products."""
        return self.pairs[0][1].dtype

    @property
    def work_dtype(self) -> torch.dtype:
        """Of everything else."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def one_target(self) -> bool:
        """Then the target is left out of every sum, which keeps 1 - p exact where p is near 1."""
        return self.targets.shape[1] == 1

    def inner(self) -> Tensor:
        """``(N,)``: what the layer's output is multiplied with; bits when there is no soft cap, else the tanh's argument."""
        if self.softcap is not None:
            return self._column(self.scale / self.softcap)
        return self._over_temperature(self.scale * LOG2E)

    def outer(self) -> Tensor:
        """``(N,)``: from the soft cap's tanh to bits."""
        assert self.softcap is not None
        return self._over_temperature(self.softcap * LOG2E)

    def slope(self) -> Tensor:
        """``(N,)``: d logit / d output of the layer, the soft cap's own slope left out."""
        return self._over_temperature(self.scale)

    def capped_slope(self, bits: Tensor) -> Tensor | None:
        """The soft cap's slope ``1 - tanh^2``, from ``bits`` ``(N, C)``; None without a cap."""
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
        """``(N, K)`` in the work dtype: exact products of the operands, also where the tiles are rounded to bfloat16."""
        parts = [part._target_bits() for part in self._in_gatherable_parts()]
        return torch.cat(parts) if parts else self.targets.new_zeros(self.targets.shape, dtype=self.work_dtype)

    def target_rows(self, coefficients: Tensor, pair: int) -> Tensor:
        """``(N, D)``: the targets' rows of the weight, weighed with ``coefficients`` ``(N, K)`` and added up."""
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

    def _in_gatherable_parts(self) -> Iterator[Projection]:
        return (self.select(rows) for rows in self._gatherable_slices())

    def _gatherable_slices(self) -> Iterator[slice]:
        width = max(weight.shape[1] for _, weight in self.pairs) * self.targets.shape[1]
        step = max(1, of_device(GATHERED_VALUES, self.device) // width)
        return (slice(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step))

    def _column(self, value: float) -> Tensor:
        return torch.full((self.num_rows,), value, dtype=self.work_dtype, device=self.device)

    def _over_temperature(self, value: float) -> Tensor:
        return self._column(value) if self.temperature is None else value / self.temperature


@dataclass(frozen=True)
class Tiling:
    """How rows and columns are cut. Blocks of rows are equal but for the last, tiles of columns too."""

    num_rows: int
    vocabulary: int
    block_rows: int
    tile_columns: int

    @classmethod
    def of(cls, projection: Projection, *, whole_rows: bool = False) -> Tiling:
        most = projection.num_rows if whole_rows else of_device(MAX_ROWS, projection.device)
        rows = max(1, min(projection.num_rows, most))
        budget = projection.tile_bytes or of_device(TILE_BYTES, projection.device)
        columns = budget // (projection.work_dtype.itemsize * rows) // COLUMN_STEP * COLUMN_STEP
        return cls(projection.num_rows, projection.vocabulary, rows, min(max(columns, COLUMN_STEP), projection.vocabulary))

    @property
    def blocks(self) -> list[slice]:
        """At least one: no rows at all still give gradients, of zero."""
        starts = range(0, max(self.num_rows, 1), self.block_rows)
        return [slice(start, min(start + self.block_rows, self.num_rows)) for start in starts]

    @property
    def tiles(self) -> list[slice]:
        starts = range(0, self.vocabulary, self.tile_columns)
        return [slice(start, min(start + self.tile_columns, self.vocabulary)) for start in starts]

    def view(self, flat: Tensor, block: slice, tile: slice) -> Tensor:
        """The place of one tile in a buffer of ``N * V`` values."""
        rows, offset = block.stop - block.start, block.start * self.vocabulary
        return flat[offset + rows * tile.start : offset + rows * tile.stop].view(rows, tile.stop - tile.start)


class Block:
    """Rows made ready: scaled once, their targets found by tile."""

    def __init__(self, projection: Projection, tiling: Tiling) -> None:
        self.projection = projection
        self.inner = self.projection.inner()
        self.outer = None if projection.softcap is None else self.projection.outer()
        self.tiling = tiling
        # Scaling inside the product, or the rows, saves a pass over the logits. The latter would round bfloat16's; the former
        # too on the CPU, whose product has bfloat16 as its result.
        exact = projection.dtype == projection.work_dtype
        self.alpha = self._alpha() if exact or projection.device.type != "cpu" else None
        self.scaled = exact or self.alpha is not None
        xs = [x for x, _ in self.projection.pairs]
        self.xs = [x * self.inner[:, None] for x in xs] if exact and self.alpha is None else xs

    def bits(self, tile: slice, out: Tensor) -> Tensor:
        """The tile's logits in bits, written to ``out``, ``(M, C)`` in the work dtype."""
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
    def rounds(self) -> bool:
        """Whether products come rounded to half precision: the CPU knows none that hand out the float32 they add up in."""
        return not self.scaled and self.projection.device.type == "cpu"

    def sharpen(self, bits: Tensor, tile: slice, least: Tensor) -> None:
        """Makes logits above ``least`` ``(M,)`` exact. Rounded, one of 18 is off by up to 0.06, and a few make up the sum."""
        some = (bits.amax(1) > least).nonzero()[:, 0]
        found, columns = (bits.index_select(0, some) > least[some, None]).nonzero(as_tuple=True)
        rows = some[found]
        exact = replace(self.projection.select(rows), targets=(columns + tile.start)[:, None])
        bits[rows, columns] = exact.target_bits()[:, 0]

    def _alpha(self) -> float | None:
        """What all rows are multiplied with, or None. Only temperatures are looked at, for which a GPU has to wait."""
        if self.projection.softcap is not None:
            return self.projection.scale / self.projection.softcap
        if self.projection.temperature is None:
            return self.projection.scale * LOG2E
        return uniform(self.inner)

    @functools.cached_property
    def placed(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per tile: row, column, and place in ``targets.reshape(-1)`` of the targets inside it."""
        flat, tiles = self.projection.targets.reshape(-1), self.tiling.tiles
        if len(tiles) == 1:
            everywhere = torch.arange(len(flat), device=flat.device)
            return [(everywhere // self.projection.targets.shape[1], flat, everywhere)]
        ordered, order = flat.sort(stable=True)
        starts = torch.arange(0, self.tiling.vocabulary, self.tiling.tile_columns, device=flat.device)
        cuts = [*torch.searchsorted(ordered, starts).tolist(), len(flat)]
        rows = order // self.projection.targets.shape[1]
        return [
            (rows[a:b], ordered[a:b] - tile.start, order[a:b]) for tile, a, b in zip(tiles, cuts[:-1], cuts[1:], strict=True)
        ]


def of_device(limits: Mapping[str, int], device: torch.device) -> int:
    """The limit that holds there; every accelerator's is a GPU's."""
    return limits.get(device.type, limits["cuda"])


def part(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    """The beginning of a flat buffer, in a shape."""
    return buffer[: shape[0] * shape[1]].view(shape)


def uniform(column: Tensor) -> float | None:
    """The number that all of ``column`` is, or None. It goes into a product as it is, without a copy of the rows."""
    if not len(column):
        return 1.0
    first = column[0]
    return float(first) if bool((column == first).all()) else None


def product(a: Tensor, b: Tensor, out: Tensor, alpha: float | None = None) -> Tensor:
    """``out = alpha a b``, accumulated in float32 whatever the operands; no ``alpha`` is 1."""
    alpha = 1.0 if alpha is None else alpha
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out) if alpha == 1.0 else out.addmm_(a, b, beta=0, alpha=alpha)
    if a.is_cuda:
        return torch.addmm(out, a, b, beta=0, alpha=alpha, out_dtype=out.dtype, out=out)
    out.copy_(torch.mm(a, b))  # the CPU's product rounds its result; it accumulates in float32 inside
    return out if alpha == 1.0 else out.mul_(alpha)


def add_product(a: Tensor, b: Tensor, out: Tensor, alpha: float | None = None) -> Tensor:
    """``out += alpha a b``, accumulated in the dtype of ``out``; no ``alpha`` is 1."""
    alpha = 1.0 if alpha is None else alpha
    if a.dtype == out.dtype:
        return out.addmm_(a, b, alpha=alpha)
    if a.is_cuda:
        return torch.addmm(out, a, b, alpha=alpha, out_dtype=out.dtype, out=out)
    return out.add_(torch.mm(a, b), alpha=alpha)
