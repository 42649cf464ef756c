"""Hostile variants of requests: of JSON by its structure and by its schema, of protobuf by fields and by bytes.

Values are hypothesis'; where they go is drawn from a ``random.Random``, evenly, which hypothesis does not.
"""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard
from hypothesis import strategies as st

from cookbook.losses import LOSSES
from cookbook.server.wire import messages_pb2 as pb

TRICK = "owned-by-fuzz"  # part of every name that tries to get out of the server's folder
NAMES = (
    "",
    ".",
    "..",
    f"../../{TRICK}",
    f"/tmp/{TRICK}",
    f"..\\{TRICK}",
    f"a/../../../{TRICK}",
    f"%2e%2e%2f{TRICK}",
    f"tinker://../../{TRICK}/weights/x",
    f"tinker://s:train:0/weights/../../../{TRICK}",
    f"file:///tmp/{TRICK}",
    "x" * 300,
    "x" * 100_000,
    "a\0b",
    "a\nb",
    "CON",
    "\u202egnp.exe",
    "😀" * 50,
    "{{7*7}}",
    "__import__('os').system('id')",
)
# What JSON has and Python's writer has not goes in as a marked text, and is written bare.
BARE = ("1e999", "-1e999", "NaN", "Infinity", "-0", "1" + "0" * 400, "1" + "0" * 5000, "0.1e-400", '"\\ud800"', '"\\u0000"')
_MARK = "@bare@"
NUMBERS = (0, 1, -1, 2, 7, 255, 4096, 4097, 1 << 31, -(1 << 31), 1 << 32, 1 << 53, 1 << 63, -(1 << 63), 1 << 64, 10**12, 10**30)
FLOATS = (0.5, -0.5, 1.0, 1e-320, 1e30, 1e308, -1e308)
OTHERS = (None, True, False, [], {}, [[]], {"": None}, "1", "1e5", "nan", "true", list(range(50)), [None] * 50)

numbers = st.sampled_from((*NUMBERS, *FLOATS, *(_MARK + one for one in BARE[:-2])))
extremes = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from([_MARK + one for one in BARE]),
    numbers,
    st.sampled_from(OTHERS),
    st.integers(1, 3000).map(lambda depth: _nested(depth)),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
)


def like(value: Any) -> st.SearchStrategy[Any]:
    """Extreme values of the type of ``value``, or of any type, for fields of which only the type is checked."""
    if isinstance(value, bool) or value is None:
        return extremes
    if isinstance(value, int | float):
        return st.one_of(numbers, numbers, extremes)
    return st.one_of(st.sampled_from(NAMES), extremes) if isinstance(value, str) else extremes


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(min(depth, 900)):  # Python's own writer ends there
        value = [value]
    return value


def dumped(value: Any) -> bytes:
    text = json.dumps(value)
    for one in BARE:
        text = text.replace(json.dumps(_MARK + one), one)
    return text.encode()


# ---- JSON ------------------------------------------------------------------------------------------------------------


def from_schema(described: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that an OpenAPI schema describes, and every so often one that it does not."""
    valid = _valid(described)
    return st.one_of(valid, valid, valid, extremes)


def _valid(described: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in described:
        return st.one_of(*map(from_schema, described["anyOf"]))
    if "enum" in described:
        return st.sampled_from(described["enum"])
    kind = described.get("type")
    if kind == "object":
        fields, required = described.get("properties", {}), set(described.get("required", ()))
        if not fields:
            values = described.get("additionalProperties")
            return st.dictionaries(st.text(max_size=5), from_schema(values if isinstance(values, dict) else {}), max_size=3)
        given = {name: from_schema(one) for name, one in fields.items()}
        optional = {name: one for name, one in given.items() if name not in required}
        return st.fixed_dictionaries({name: given[name] for name in fields if name in required}, optional=optional)
    if kind == "array":
        return st.lists(from_schema(described.get("items", {})), max_size=4)
    low, high = described.get("minimum"), described.get("maximum")
    plain: dict[Any, st.SearchStrategy[Any]] = {
        "string": st.text(max_size=12),
        "integer": st.integers(low, high),
        "number": st.floats(min_value=low, max_value=high),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return plain.get(kind, extremes)


Place = tuple[Any, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where the parts of a JSON value are, itself first."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*at, key))


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _change(value: Any, inner: list[Place], draw: Draw, rng: random.Random) -> None:
    """One of the parts of ``value`` that are at ``inner``, in place."""
    place, what = rng.choice(inner), rng.choice(("extreme",) * 5 + ("drop", "swap", "wrap", "rename", "repeat"))
    parent, key, old = _at(value, place[:-1]), place[-1], copy.deepcopy(_at(value, place))
    if what == "drop":
        del parent[key]
    elif what == "rename" and isinstance(parent, dict):
        parent[rng.choice((key.upper(), "__proto__", "type", ""))] = parent.pop(key)
    elif what == "swap":
        parent[key] = copy.deepcopy(_at(value, rng.choice(inner)))
    elif what == "wrap":
        parent[key] = rng.choice(([old], {"x": old}))
    elif what == "repeat":
        parent[key] = [old] * rng.choice((2, 7, 200, 3000))
    else:
        parent[key] = copy.deepcopy(draw(like(old)))


def changed(valid: Any, draw: Draw, rng: random.Random) -> bytes:
    """``valid`` with one to three of its parts dropped, replaced, exchanged, wrapped or called something else."""
    value = copy.deepcopy(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        inner = list(places(value))[1:]
        if not inner or rng.random() < 0.03:
            # A copy: later changes are made in place, and hypothesis draws the same object again.
            value = copy.deepcopy(draw(extremes))
            continue
        _change(value, inner, draw, rng)
    return dumped(value)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bombs() -> dict[str, tuple[str, bytes]]:
    """Small bodies that decompress to large ones: name -> ``Content-Encoding`` and bytes."""
    zeros, pack = bytes(1 << 23), zstandard.ZstdCompressor().compress
    bomb = pack(zeros)
    return {
        "zstd": ("zstd", bomb),
        "zstd, many frames": ("zstd", bomb * 64),
        "zstd in zstd": ("zstd", pack(bomb)),
        "zstd, twice by name": ("zstd, zstd", pack(pack(b"{}"))),
        "zstd, huge window": ("zstd", b"\x28\xb5\x2f\xfd\x00\xff" + bytes(16)),
        "zstd, cut": ("zstd", bomb[: len(bomb) // 2]),
        "gzip": ("gzip", zlib.compress(zeros, wbits=31)),
        "deflate": ("deflate", zlib.compress(zeros)),
        "br": ("br", bytes(64)),
        **{name: ("zstd", pack(body)) for name, body in crowds().items()},
    }


def crowds() -> dict[str, bytes]:
    """Valid JSON bodies, and a valid message, of a few MB, whose many values take a parser up to 1,000 times their bytes."""
    million = 1_000_000
    objects, numbers = b",".join([b"{}"] * million), b",".join([b"1"] * million)
    sample = b'{"sampling_session_id": "s:sample:0", "seq_id": 0, "sampling_params": {}, "prompt": {"chunks": [%s]}}'
    return {
        "many chunks": sample % objects,
        "many tokens": sample % (b'{"tokens": [%s]}' % numbers),
        "many texts": b'{"model": "tiny", "prompt": [%s]}' % b",".join([b'""'] * million),
        "many messages": b'{"model": "tiny", "messages": [%s]}' % objects,
        "many keys": b"{%s}" % b",".join(b'"%d":0' % number for number in range(million // 2)),
        "many levels": b'{"user_metadata": {"a": %s%s}}' % (b"[" * 100_000, b"]" * 100_000),
        "many datums": b"\x1a\x00" * million,
    }


def damaged(body: bytes, draw: random.Random) -> bytes:
    """``body`` with bits flipped, bytes cut out, put in, doubled, or lengths and field numbers changed."""
    found = bytearray(body)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        what = draw.randrange(7)
        if what == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del found[at:]
        elif what == 2:
            found[at:at] = draw.randbytes(draw.choice((1, 4, 64)))
        elif what == 3:
            found[at:at] = found[at : at + draw.choice((1, 8, 200))]
        elif what == 4:
            found[at:at] = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[
                -draw.randrange(1, 11) :
            ]  # a length or number, as varint
        elif what == 5 and at < len(found):
            found[at] = draw.choice(
                (0x00, 0x0A, 0x0B, 0x0C, 0x0D, 0x12, 0x1A, 0x7F, 0x80, 0xFF)
            )  # keys of fields: kinds, groups
        else:
            del found[at : at + draw.choice((1, 3, 30))]
    return bytes(found)


# ---- protobuf --------------------------------------------------------------------------------------------------------


def passed(valid: bytes, model_id: str, number: int, rng: random.Random) -> bytes:
    """A ``forward_backward`` message for request ``number`` of a run: ``valid`` with its fields at their extremes."""
    message = pb.ForwardBackwardRequest.FromString(valid)
    message.model_id, message.seq_id = model_id, number
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(_FIELDS)(message, rng)
    body: bytes = message.SerializeToString()
    return body


def _some(message: Any, rng: random.Random) -> Any:
    return rng.choice(message.data) if message.data else message.data.add()


def _tokens(message: Any, rng: random.Random) -> None:
    datum = _some(message, rng)
    kind = rng.choice((np.int32, np.int64, np.float32))
    count = rng.choice((0, 1, 5, 95, 97, 5000))
    values = np.array([rng.choice((0, 1, 258, 259, 70000, -1, 2**31 - 1, -(2**31))) for _ in range(count)])
    (datum.model_input[0] if datum.model_input else datum.model_input.add()).encoded_text.tokens = values.astype(kind).tobytes()


def _tensor(message: Any, rng: random.Random) -> None:
    """Other numbers, of another kind, under a name that some loss reads."""
    datum = _some(message, rng)
    name = rng.choice(
        (*datum.loss_fn_inputs, "weights", "advantages", "logprobs", "target_tokens", "old_logprobs", "temperature", "")
    )
    length = rng.choice((8, 8, 8, 0, 1, 9, 1000))  # 8 is what fits
    values = [
        rng.choice((0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-45, 300.0, 2.0**31, -5.0)) for _ in range(length)
    ]
    tensor = datum.loss_fn_inputs[name]
    kind = rng.choice(("<f4", "<i8", "<i4"))
    with np.errstate(all="ignore"):
        tensor.dense = np.array(values).astype(kind).tobytes()
    tensor.dtype = {"<f4": 1, "<i8": 2, "<i4": 3}[kind] if rng.random() < 0.8 else rng.choice((0, 1, 2, 3, 4, 9, -1))
    del tensor.shape[:]
    tensor.shape.extend(rng.choice(((), (length,), (length,), (length, 1), (1, length))))


def _shape(message: Any, rng: random.Random) -> None:
    for tensor in _some(message, rng).loss_fn_inputs.values():
        del tensor.shape[:]
        tensor.shape.extend(rng.choice((0, 1, 2, 8, -1, 1 << 40, (1 << 63) - 1)) for _ in range(rng.choice((0, 1, 2, 3, 100))))


def _sparse(message: Any, rng: random.Random) -> None:
    tensor = _some(message, rng).loss_fn_inputs[rng.choice(("target_tokens", "weights"))]
    rows = rng.choice((0, 8, 1 << 20))
    tensor.sparse_csr.crow_indices = np.array(
        [rng.choice((0, 1, -1, 1 << 40)) for _ in range(min(rows, 64) + 1)], "<i8"
    ).tobytes()
    tensor.sparse_csr.col_indices = np.array(
        [rng.choice((0, 1, -1, 1 << 40)) for _ in range(rng.randrange(4))], "<i8"
    ).tobytes()
    tensor.sparse_csr.values = bytes(4 * rng.randrange(4))
    del tensor.shape[:]
    tensor.shape.extend((rng.choice((0, 8, 1 << 26, 1 << 62)), rng.choice((0, 2, 1 << 26, 1 << 62))))
    tensor.dtype = rng.choice((1, 2))


def _loss(message: Any, rng: random.Random) -> None:
    """Name a built-in or an unknown loss, and usually add the inputs that losses read."""
    if rng.random() < 0.7:
        for datum in message.data:
            for name in ("advantages", "logprobs", "sampling_logprobs", "reference_logprobs", "weights"):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = np.full(8, rng.choice((-1.0, 0.5, 3e4, np.nan)), "<f4").tobytes(), pb.DTYPE_FLOAT32
                del tensor.shape[:]
    message.loss_fn = rng.choice(
        (*LOSSES, "custom", "stable_reinforce", "", "nonsense", "__class__", "cross_entropy\0", "../x")
    )
    message.forward_only = rng.random() < 0.3


def _options(message: Any, rng: random.Random) -> None:
    keys = ("beta", "clip_low_threshold", "clip_high_threshold", "normalization", "variant", "loss_id", "name", "__init__", "")
    value = message.loss_fn_config_v2[rng.choice(keys)]
    if rng.random() < 0.6:
        value.number = rng.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308, 1e-320))
    else:
        value.text = rng.choice((*NAMES[:6], "null", "true", "num_loss_tokens", "ipo"))


def _rows(message: Any, rng: random.Random) -> None:
    if rng.random() < 0.5:
        del message.data[:]
    else:
        copied = [copy.deepcopy(_some(message, rng)) for _ in range(rng.choice((1, 3, 30)))]
        message.data.extend(copied)


def _chunk(message: Any, rng: random.Random) -> None:
    chunk = _some(message, rng).model_input.add()
    if rng.random() < 0.5:
        chunk.image.data = rng.randbytes(20)
    else:
        chunk.encoded_text.tokens = rng.randbytes(rng.choice((0, 3, 4, 8)))


_FIELDS = (_tokens, _tensor, _tensor, _tensor, _shape, _sparse, _loss, _loss, _options, _rows, _chunk)
