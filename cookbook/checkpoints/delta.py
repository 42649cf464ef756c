"""The lossless difference between two versions of the same weights, as a file that knows what it belongs to.

At the learning rates of reinforcement learning most bfloat16 weights do not change from one step to the next, bit for bit, and
those that do mostly move to a neighbour. Per tensor the smaller of two codings is kept, each compressed with zstd:

- ``positions``: the gaps between changed elements, and by how much their bit patterns, read as integers, went up or down;
- ``xor``: the exclusive or of all bit patterns.

Integers are laid out in byte planes (all lowest bytes, then all second lowest, ...): high bytes are nearly always zero.

A file holds, in this order: ``MAGIC``; the SHA-256 of all that follows; the header's length in 4 bytes, little-endian; the
header, compressed JSON; and the tensors' codings one after another. The header says of every tensor which bytes it applies to
and which must result. So a file that is damaged, or applied to anything else, gives an error and never a weight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import zstandard
from torch import Tensor

from cookbook.checkpoints.weights import Fact, Weights, as_integers, digest_of, fact, in_parallel
from cookbook.errors import CheckpointError
from cookbook.types import Array

FILE = "weights.delta"  # in a checkpoint's folder
MAGIC = b"cbdelta1"
SAME, POSITIONS, XOR = "same", "positions", "xor"
LEVEL = 1  # zstd's: higher ones save nothing on data without repetitions, see benchmarks/delta.py
# Few changes that are scattered over a large tensor are always smaller as positions. The exclusive or would cost as much time
# as everything else together, and is not even tried.
LARGE, FEW = 1 << 20, 1 / 16

_HEAD = len(MAGIC) + hashlib.sha256().digest_size
_REMEDY = "write a base checkpoint instead"


@dataclass(frozen=True)
class Entry:
    """One tensor: its digests ``before`` and ``after``, and how it is coded, in ``size`` bytes.

    ``changed`` counts the elements that differ.
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
    """What turns one version of the weights into another. ``entries[i]`` is coded in ``codings[i]``."""

    entries: tuple[Entry, ...]
    codings: tuple[bytes | memoryview, ...]

    @property
    def applies_to(self) -> str:
        """The digest of the weights it applies to."""
        return digest_of({entry.name: Fact(entry.dtype, entry.shape, entry.before) for entry in self.entries})

    @property
    def results_in(self) -> str:
        """The digest of the weights that result."""
        return digest_of({entry.name: Fact(entry.dtype, entry.shape, entry.after) for entry in self.entries})

    @property
    def changed(self) -> int:
        """Elements that differ, over all tensors."""
        return sum(entry.changed for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.codings))


# ---- making ----------------------------------------------------------------------------------------------------------


def between(before: Weights, after: Weights) -> Delta:
    """What turns ``before`` into ``after``.

    Raises:
        CheckpointError: they do not have the same tensors, of the same types and shapes.
    """
    _must_match(before, after)
    names = sorted(after.tensors)
    coded = in_parallel(lambda name: _coded(name, before, after), names, [after.tensors[name].nbytes for name in names])
    return Delta(tuple(entry for entry, _ in coded), tuple(coding for _, coding in coded))


def _must_match(before: Weights, after: Weights) -> None:
    kinds = [{(name, one.dtype, one.shape) for name, one in weights.facts.items()} for weights in (before, after)]
    if others := kinds[0] ^ kinds[1]:
        name, dtype, shape = min(others)
        raise CheckpointError(f"delta: {name} ({dtype}, shape {list(shape)}) is in one version only; {_REMEDY}")


def _coded(name: str, before: Weights, after: Weights) -> tuple[Entry, bytes]:
    was, became = before.facts[name], after.facts[name]
    coding, changed, content = SAME, 0, b""
    if was != became:
        old, new = as_integers(before.tensors[name]), as_integers(after.tensors[name])
        places = np.flatnonzero(old != new)
        gaps = np.diff(places, prepend=-1) - 1
        coding, changed, content = POSITIONS, len(places), _positions(gaps, new[places] - old[places], len(new))
        if not _scattered(gaps, len(new)) and len(dense := _compressed(old ^ new)) < len(content):
            coding, content = XOR, dense
    entry = Entry(name, became.dtype, became.shape, was.digest, became.digest, coding, changed, len(content))
    return entry, content


def _scattered(gaps: Array, elements: int) -> bool:
    """Whether few of a large tensor's elements changed, and most of those beside one that did not."""
    return elements >= LARGE and len(gaps) < FEW * elements and 2 * int(np.count_nonzero(gaps)) > len(gaps)


def _positions(gaps: Array, steps: Array, elements: int) -> bytes:
    coded = _compressed(gaps.astype(_gap_type(elements)))
    return len(coded).to_bytes(8, "little") + coded + _compressed(_folded(steps))


def _gap_type(elements: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned integer that holds a gap between two of that many elements."""
    return np.min_scalar_type(elements)


def _folded(steps: Array) -> Array:
    """0, -1, 1, -2, 2 ... (modulo the width) as 0, 1, 2, 3, 4: small steps of either sign have no high bytes."""
    signed = steps.view(f"i{steps.itemsize}")
    folded: Array = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    return folded


def _compressed(values: Array) -> bytes:
    planes = np.empty((values.itemsize, len(values)), np.uint8)
    for place in range(values.itemsize):
        planes[place] = values >> values.dtype.type(8 * place)  # what is above the lowest byte is cut off
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


# ---- applying --------------------------------------------------------------------------------------------------------


def apply(delta: Delta, weights: Weights) -> Weights:
    """The weights that result. ``weights`` stay as they are; tensors that do not change are shared with them.

    All that results is hashed, what did not change too: so what was damaged in memory since its facts were taken is noticed.

    Raises:
        CheckpointError: the delta belongs to other weights, or what results is not what it promises. The tensor is named.
    """
    known = {entry.name: Fact(entry.dtype, entry.shape, entry.before) for entry in delta.entries}
    if others := known.items() ^ weights.facts.items():
        first = min(name for name, _ in others)
        raise CheckpointError(f"delta: applies to other weights than these ({first} differs); {_REMEDY}")
    work = list(zip(delta.entries, delta.codings, strict=True))
    made = in_parallel(lambda one: _applied(*one, weights), work, [weights.tensors[one.name].nbytes for one in delta.entries])
    names = [entry.name for entry in delta.entries]
    return Weights(dict(zip(names, made, strict=True)), {e.name: Fact(e.dtype, e.shape, e.after) for e in delta.entries})


def _applied(entry: Entry, coding: bytes | memoryview, weights: Weights) -> Tensor:
    tensor = weights.tensors[entry.name]
    if entry.coding != SAME:
        tensor = tensor.clone()
        try:
            _patch(as_integers(tensor), entry, coding)
        except (zstandard.ZstdError, ValueError) as error:
            raise CheckpointError(f"delta: {entry.name} cannot be decoded ({error}); {_REMEDY}") from None
    if fact(tensor).digest != entry.after:
        raise CheckpointError(f"delta: {entry.name} does not come out as promised (its digest differs); {_REMEDY}")
    return tensor


def _patch(values: Array, entry: Entry, coding: bytes | memoryview) -> None:
    """Raises ValueError or ZstdError when ``coding`` says nothing about ``values``."""
    if entry.coding == XOR:
        np.bitwise_xor(values, _decompressed(coding, len(values), values.dtype), out=values)
        return
    length = int.from_bytes(coding[:8], "little")
    gaps = _decompressed(coding[8 : 8 + length], entry.changed, _gap_type(len(values)))
    places = gaps.cumsum(dtype=np.uint64) + np.arange(entry.changed, dtype=np.uint64)
    if entry.changed and places.max() >= len(values):
        raise ValueError(f"it changes an element after the last of {len(values)}")
    values[places] += _unfolded(_decompressed(coding[8 + length :], entry.changed, values.dtype))


def _unfolded(folded: Array) -> Array:
    one = folded.dtype.type(1)
    steps: Array = (folded >> one) ^ (~(folded & one) + one)
    return steps


def _decompressed(content: bytes | memoryview, count: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
    """``count`` integers. The size is looked at first: nothing that was not announced takes memory."""
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
    """The file's content."""
    header = zstandard.ZstdCompressor(level=LEVEL).compress(json.dumps([asdict(entry) for entry in delta.entries]).encode())
    body = b"".join([len(header).to_bytes(4, "little"), header, *delta.codings])
    return MAGIC + hashlib.sha256(body).digest() + body


def from_bytes(content: bytes, where: str = "delta") -> Delta:
    """The inverse of :func:`to_bytes`. ``where`` stands in the error.

    Raises:
        CheckpointError: a byte is not as it was written.
    """
    view = memoryview(content)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise CheckpointError(f"{where}: is not a delta (it does not begin with {MAGIC.decode()}); {_REMEDY}")
    if hashlib.sha256(view[_HEAD:]).digest() != view[len(MAGIC) : _HEAD]:
        raise CheckpointError(f"{where}: is damaged (its digest differs); {_REMEDY}")
    try:
        entries, rest = _header(view[_HEAD:])
        return Delta(entries, tuple(_pieces(rest, [entry.size for entry in entries])))
    except (zstandard.ZstdError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{where}: cannot be understood ({error}); {_REMEDY}") from None


def _header(body: memoryview) -> tuple[tuple[Entry, ...], memoryview]:
    length = int.from_bytes(body[:4], "little")
    rows = json.loads(zstandard.ZstdDecompressor().decompress(body[4 : 4 + length]))
    return tuple(Entry(**{**row, "shape": tuple(row["shape"])}) for row in rows), body[4 + length :]


def _pieces(content: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    if sum(sizes) != len(content):
        raise ValueError(f"{len(content)} bytes of codings instead of {sum(sizes)}")
    for size in sizes:
        yield content[:size]
        content = content[size:]
