"""Lossless difference between two versions of the same weights, as a file with digests of both versions.

At the learning rates of reinforcement learning most bfloat16 weights do not change in a step, bit for bit, and most others
change to an adjacent value. Each tensor has the smaller of two codings, compressed with zstd:

- ``positions``: the gaps between changed elements, and the differences of their bit patterns, read as integers;
- ``xor``: the exclusive or of all bit patterns.

Integers are stored in byte planes (all lowest bytes, then all second lowest, ...), because high bytes are nearly always zero.

A file holds, in this order: ``MAGIC``; the SHA-256 of everything after it; the header's length in 4 bytes, little-endian; the
header, compressed JSON; and the tensors' codings in their order. The header holds, per tensor, the digests of the bytes that
the delta applies to and of those that result. So a damaged file, or other weights, give an error and never a wrong weight.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import BinaryIO

import numpy as np
import zstandard
from torch import Tensor

from cookbook.checkpoints.tensor_digests import TensorInfo, Weights, as_integers, in_parallel, tensor_info
from cookbook.errors import CheckpointError
from cookbook.types import Array

FILE = "weights.delta"  # name in a checkpoint's folder
MAGIC = b"cbdelta1"
SAME, POSITIONS, XOR = "same", "positions", "xor"
# Level of zstd. Higher levels save nothing on data without repetitions, see benchmarks/delta.py.
LEVEL = 1
# Few changes that are scattered over a large tensor are always smaller as positions. The exclusive or, which takes as long as
# everything else together, is then not computed.
LARGE, FEW = 1 << 20, 1 / 16

_HEAD = len(MAGIC) + hashlib.sha256().digest_size
_REMEDY = "write a base checkpoint instead"


@dataclass(frozen=True)
class TensorDelta:
    """Header of one tensor: its digests ``before`` and ``after``, its coding of ``size`` bytes, and the number of elements that
    ``changed``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: str
    after: str
    coding: str
    changed: int
    size: int


@dataclass(frozen=True)
class Delta:
    """Difference between two versions of the weights. ``codings[i]`` is the coding of ``entries[i]``."""

    entries: tuple[TensorDelta, ...]
    codings: tuple[bytes | memoryview, ...]


# ---- making ----------------------------------------------------------------------------------------------------------


def between(before: Weights, after: Weights) -> Delta:
    """Compute the delta that turns ``before`` into ``after``.

    Raises:
        CheckpointError: the versions differ in names, types or shapes of their tensors.
    """
    _must_match(before, after)

    def difference(name: str) -> tuple[TensorDelta, bytes]:
        old = before.infos[name], before.tensors[name]
        new = after.infos[name], after.tensors[name]
        return coded(name, old, new)

    differences = in_parallel(difference, after.tensors)
    names = sorted(differences)
    return Delta(tuple(differences[name][0] for name in names), tuple(differences[name][1] for name in names))


def _must_match(before: Weights, after: Weights) -> None:
    old_kinds = {(name, info.dtype, info.shape) for name, info in before.infos.items()}
    new_kinds = {(name, info.dtype, info.shape) for name, info in after.infos.items()}
    if differences := old_kinds ^ new_kinds:
        name, dtype, shape = min(differences)
        raise CheckpointError(f"delta: {name} ({dtype}, shape {list(shape)}) is in one version only; {_REMEDY}")


def coded(name: str, before: tuple[TensorInfo, Tensor], after: tuple[TensorInfo, Tensor]) -> tuple[TensorDelta, bytes]:
    """Return the header and the coding of one tensor, from its two versions."""
    old_info, new_info = before[0], after[0]
    coding, num_changed, content = SAME, 0, b""
    if old_info != new_info:
        old, new = as_integers(before[1]), as_integers(after[1])
        places = np.flatnonzero(old != new)
        gaps = np.diff(places, prepend=-1) - 1
        coding, num_changed = POSITIONS, len(places)
        content = _positions(gaps, new[places] - old[places], len(new))
        # The other coding has a bit pattern for every element. It is tried unless it is known to be larger, to save its time.
        if not _scattered(gaps, len(new)):
            dense = _compressed(old ^ new)
            if len(dense) < len(content):
                coding, content = XOR, dense
    entry = TensorDelta(
        name, new_info.dtype, new_info.shape, old_info.digest, new_info.digest, coding, num_changed, len(content)
    )
    return entry, content


def _scattered(gaps: Array, elements: int) -> bool:
    """Whether few elements of a large tensor changed, most of them right after an unchanged one."""
    return elements >= LARGE and len(gaps) < FEW * elements and 2 * int(np.count_nonzero(gaps)) > len(gaps)


# Gaps have the smallest unsigned integer type for the number of elements.
def _positions(gaps: Array, steps: Array, elements: int) -> bytes:
    coded = _compressed(gaps.astype(np.min_scalar_type(elements)))
    return len(coded).to_bytes(8, "little") + coded + _compressed(_folded(steps))


def _folded(steps: Array) -> Array:
    """Map 0, -1, 1, -2, 2 ... (modulo the width) to 0, 1, 2, 3, 4, so that small steps of either sign have no high bytes."""
    signed = steps.view(f"i{steps.itemsize}")
    folded: Array = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    return folded


def _compressed(values: Array) -> bytes:
    elements = values.astype(f"<u{values.itemsize}", copy=False).view(np.uint8).reshape(-1, values.itemsize)
    # A transposed copy takes a quarter of the time of shifts.
    planes = np.ascontiguousarray(elements.T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


# ---- applying --------------------------------------------------------------------------------------------------------


def apply(delta: Delta, weights: Weights) -> Weights:
    """Return the resulting weights. ``weights`` are not changed; the result shares the tensors that do not change.

    Every resulting tensor is hashed, unchanged ones too, so damage in memory since the last hash is noticed.

    Raises:
        CheckpointError: the delta belongs to other weights, or a result has another digest. The error names the tensor.
    """
    known = {entry.name: TensorInfo(entry.dtype, entry.shape, entry.before) for entry in delta.entries}
    if others := known.items() ^ weights.infos.items():
        first = min(name for name, _ in others)
        raise CheckpointError(f"delta: applies to other weights than these ({first} differs); {_REMEDY}")
    parts = {entry.name: (entry, coding) for entry, coding in zip(delta.entries, delta.codings, strict=True)}
    tensors = in_parallel(lambda name: _applied(*parts[name], weights.tensors[name]), weights.tensors)
    return Weights(tensors, {entry.name: TensorInfo(entry.dtype, entry.shape, entry.after) for entry in delta.entries})


def _applied(entry: TensorDelta, coding: bytes | memoryview, tensor: Tensor) -> Tensor:
    if entry.coding != SAME:
        tensor = tensor.clone()
        try:
            _patch(as_integers(tensor), entry, coding)
        except (zstandard.ZstdError, ValueError) as error:
            raise CheckpointError(f"delta: {entry.name} cannot be decoded ({error}); {_REMEDY}") from None
    if tensor_info(tensor).digest != entry.after:
        raise CheckpointError(f"delta: the result for {entry.name} is wrong (its digest differs); {_REMEDY}")
    return tensor


def _patch(values: Array, entry: TensorDelta, coding: bytes | memoryview) -> None:
    """Apply ``coding`` to ``values`` in place. Raises ValueError or ZstdError: ``coding`` does not fit."""
    if entry.coding == XOR:
        np.bitwise_xor(values, _decompressed(coding, len(values), values.dtype), out=values)
        return
    length = int.from_bytes(coding[:8], "little")
    gaps = _decompressed(coding[8 : 8 + length], entry.changed, np.min_scalar_type(len(values)))
    places = gaps.cumsum(dtype=np.uint64) + np.arange(entry.changed, dtype=np.uint64)
    if entry.changed and places.max() >= len(values):
        raise ValueError(f"it changes an element after the last of {len(values)}")
    values[places] += _unfolded(_decompressed(coding[8 + length :], entry.changed, values.dtype))


def _unfolded(folded: Array) -> Array:
    # A number of the array's own type, because NumPy would widen the result of an array and a Python integer of another type.
    unit = folded.dtype.type(1)
    steps: Array = (folded >> unit) ^ (~(folded & unit) + unit)
    return steps


def _decompressed(content: bytes | memoryview, count: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
    """Decompress ``count`` integers. The size is checked first, so that a damaged file cannot fill the memory."""
    expected = count * dtype.itemsize
    if (size := zstandard.frame_content_size(content)) != expected:
        raise ValueError(f"it holds {size} bytes instead of {expected}")
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), np.uint8).reshape(dtype.itemsize, count)
    values: Array = planes[0].astype(dtype)
    for place in range(1, dtype.itemsize):
        values |= planes[place].astype(dtype) << dtype.type(8 * place)
    return values


# ---- as bytes --------------------------------------------------------------------------------------------------------


def to_bytes(delta: Delta) -> bytes:
    """Serialize a delta."""
    file = io.BytesIO()
    write(file, delta.entries, delta.codings)
    return file.getvalue()


def write(file: BinaryIO, entries: Sequence[TensorDelta], codings: Iterable[bytes | memoryview]) -> None:
    """Serialize a delta to a file, one coding after the other. ``codings`` are in the order of ``entries``."""
    header = zstandard.ZstdCompressor(level=LEVEL).compress(json.dumps([asdict(entry) for entry in entries]).encode())
    digest = hashlib.sha256()
    # The digest covers the header and all codings, so it is written last.
    file.write(MAGIC + bytes(digest.digest_size))
    for content in itertools.chain((len(header).to_bytes(4, "little"), header), codings):
        digest.update(content)
        file.write(content)
    file.seek(len(MAGIC))
    file.write(digest.digest())


def from_bytes(content: bytes, where: str = "delta") -> Delta:
    """Deserialize a delta. Errors begin with ``where``.

    Raises:
        CheckpointError: the content is damaged.
    """
    view = memoryview(content)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise CheckpointError(f"{where}: is not a delta (it does not begin with {MAGIC.decode()}); {_REMEDY}")
    if hashlib.sha256(view[_HEAD:]).digest() != view[len(MAGIC) : _HEAD]:
        raise CheckpointError(f"{where}: is damaged (its digest differs); {_REMEDY}")
    try:
        start = _HEAD + 4
        end = start + int.from_bytes(view[_HEAD:start], "little")
        rows = json.loads(zstandard.ZstdDecompressor().decompress(view[start:end]))
        entries = tuple(TensorDelta(**{**row, "shape": tuple(row["shape"])}) for row in rows)
        return Delta(entries, tuple(_pieces(view[end:], [entry.size for entry in entries])))
    except (zstandard.ZstdError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{where}: cannot be understood ({error}); {_REMEDY}") from None


def _pieces(content: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    if sum(sizes) != len(content):
        raise ValueError(f"{len(content)} bytes of codings instead of {sum(sizes)}")
    for size in sizes:
        yield content[:size]
        content = content[size:]
