"""Deltas between versions of the weights: bit for bit what they promise, or an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import rest_slow

from cookbook.checkpoints import delta
from cookbook.checkpoints.delta import POSITIONS, SAME, XOR, Delta
from cookbook.checkpoints.tensor_digests import Weights, as_integers
from cookbook.errors import CheckpointError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)


def from_bits(bits, dtype, *shape):
    """A tensor of exactly these bit patterns, NaNs with whatever they carry included."""
    tensor = torch.empty(shape, dtype=dtype)
    as_integers(tensor)[:] = bits
    return tensor


def random_bits(rng, dtype, *shape):
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 1 << 8 * width
    return from_bits(rng.integers(0, high, int(np.prod(shape)), dtype=f"u{width}"), dtype, *shape)


def moved(rng, tensor, share, steps=1):
    """``tensor`` with about ``share`` of its elements changed by up to ``steps`` adjacent values."""
    bits = as_integers(tensor).copy()
    chosen = rng.random(len(bits)) < share
    bits[chosen] += rng.integers(1, steps + 1, chosen.sum()).astype(bits.dtype)
    return from_bits(bits, tensor.dtype, *tensor.shape)


def the_same(one, other):
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and np.array_equal(as_integers(one[name]), as_integers(other[name]))
        for name in one
    )


def sent(before, after):
    """Rebuild ``after`` from ``before`` and the file."""
    received = delta.from_bytes(delta.to_bytes(delta.between(before, after)))
    made = delta.apply(received, before)
    for kind, weights in (("before", before), ("after", after)):
        assert {one.name: getattr(one, kind) for one in received.entries} == {
            name: info.digest for name, info in weights.infos.items()
        }
    assert made.infos == after.infos == Weights.of(made.tensors).infos
    return made.tensors


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_round_trip_bit_for_bit(dtype, share):
    rng = np.random.default_rng(0)
    old = {"a.weight": random_bits(rng, dtype, 40, 30), "b": random_bits(rng, dtype, 7), "scalar": random_bits(rng, dtype)}
    old["empty"] = random_bits(rng, dtype, 0, 3)
    chosen = {name: torch.from_numpy(np.asarray(rng.random(tensor.shape) < share)) for name, tensor in old.items()}
    new = {name: torch.where(chosen[name], random_bits(rng, dtype, *tensor.shape), tensor) for name, tensor in old.items()}
    before, after = Weights.of(old), Weights.of(new)
    assert the_same(sent(before, after), new)
    assert the_same(before.tensors, old)  # the tensors it was applied to are unchanged


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_round_trip_of_anything(data):
    """Arbitrary bytes before and after, over and under the share of changes from which the exclusive or is tried."""
    dtype = data.draw(st.sampled_from(DTYPES[:-1]))  # a bool has two bit patterns only
    width = torch.empty(0, dtype=dtype).element_size()
    old = np.frombuffer(data.draw(st.binary(min_size=width, max_size=40 * width)), np.uint8)
    old = old[: len(old) // width * width].view(f"u{width}")
    places = data.draw(st.lists(st.integers(0, len(old) - 1), max_size=len(old)))
    new = old.copy()
    new[places] = data.draw(st.lists(st.integers(0, (1 << 8 * width) - 1), min_size=len(places), max_size=len(places)))
    before, after = ({"weight": from_bits(bits, dtype, len(bits))} for bits in (old, new))
    assert the_same(sent(Weights.of(before), Weights.of(after)), after)


@pytest.mark.parametrize(("dtype", "nans"), [(torch.float32, (0x7FC00001, 0xFFC0BEEF)), (torch.bfloat16, (0x7FC1, 0xFFDE))])
def test_signs_of_zero_and_what_nans_carry_survive(dtype, nans):
    width = f"u{torch.empty(0, dtype=dtype).element_size()}"
    sign = 1 << (8 * np.dtype(width).itemsize - 1)
    old = from_bits(np.array([0, sign, nans[0], nans[1], 5], width), dtype, 5)
    new = from_bits(np.array([sign, 0, nans[1], nans[0], 5], width), dtype, 5)
    found = sent(Weights.of({"w": old}), Weights.of({"w": new}))["w"]
    assert as_integers(found).tolist() == [sign, 0, nans[1], nans[0], 5]
    assert torch.equal(torch.signbit(found[:2]), torch.tensor([True, False]))


def test_tensors_that_are_not_contiguous_or_share_memory():
    base = torch.arange(12.0).reshape(3, 4)
    old, new = {"t": base.T, "view": base[1]}, {"t": (base + 1).T, "view": base[2]}
    assert the_same(sent(Weights.of(old), Weights.of(new)), {name: tensor.contiguous() for name, tensor in new.items()})


def test_fifty_deltas_in_a_row():
    rng = np.random.default_rng(1)
    first = {name: torch.from_numpy(rng.normal(size=(64, 48)) / 50).bfloat16() for name in "abc"}
    trained = held = Weights.of(first)
    for _ in range(50):
        after = Weights.of({name: moved(rng, tensor, 0.02) for name, tensor in trained.tensors.items()})
        held = delta.apply(delta.from_bytes(delta.to_bytes(delta.between(trained, after))), held)
        trained = after
    assert held.digest == trained.digest == Weights.of(held.tensors).digest
    assert the_same(held.tensors, trained.tensors) and not the_same(held.tensors, first)


# ---- small -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("share", "coding"), [(0.0, SAME), (0.001, POSITIONS), (0.05, POSITIONS)])
def test_few_changes_are_kept_as_positions(dtype, share, coding):
    rng = np.random.default_rng(2)
    old = torch.from_numpy(rng.normal(size=1 << 16) / 50).to(dtype)
    new = moved(rng, old, share)
    found = delta.between(Weights.of({"w": old}), Weights.of({"w": new}))
    assert found.entries[0].coding == coding
    # Shannon's bound for the places is H(share) bits an element, and a step of +1 costs none. zstd comes within a half of it.
    entropy = -sum(p * np.log2(p) for p in (share, 1 - share) if p)
    assert len(found.codings[0]) <= 1.5 * entropy / 8 * len(old) + 64
    assert found.entries[0].changed == (as_integers(old) != as_integers(new)).sum()


@pytest.mark.parametrize("elements", [1 << 12, delta.LARGE])
@pytest.mark.parametrize("bits", rest_slow([1, 8, 12]))
@pytest.mark.parametrize("clustered", [False, True], ids=["scattered", "clustered"])
def test_the_smaller_coding_is_kept(elements, bits, clustered):
    """For all shares and patterns of changes, and also if only one coding is tried, for few changes of a large tensor."""
    rng = np.random.default_rng(3)
    old = (torch.from_numpy(rng.normal(size=elements)) / 50).bfloat16()
    was = as_integers(old)
    for share in (0.001, 0.02, 0.06, 0.3, 0.6, 1.0):
        chosen = np.arange(elements) < share * elements if clustered else rng.random(elements) < share
        became = np.where(chosen, was ^ rng.integers(1, 1 << bits, elements).astype(was.dtype), was)
        kept = delta.between(Weights.of({"w": old}), Weights.of({"w": from_bits(became, old.dtype, elements)}))
        places = np.flatnonzero(was != became)
        gaps = np.diff(places, prepend=-1) - 1
        both = {
            XOR: len(delta._compressed(was ^ became)),
            POSITIONS: len(delta._positions(gaps, became[places] - was[places], elements)),
        }
        assert len(kept.codings[0]) == min(both.values()) == both[kept.entries[0].coding], share


# ---- never a wrong weight --------------------------------------------------------------------------------------------


def versions(dtype=torch.bfloat16):
    """Two versions of three tensors: one that stays, one with few changes, one with many."""
    rng = np.random.default_rng(5)
    shapes = {"few": (64, 64), "many": (16, 9), "none": (16, 9)}
    old = {name: torch.from_numpy(rng.normal(size=shape) / 50).to(dtype) for name, shape in shapes.items()}
    new = {**old, "few": moved(rng, old["few"], 0.03), "many": random_bits(rng, dtype, 16, 9)}
    return Weights.of(old), Weights.of(new)


def test_nothing_unannounced_takes_memory():
    """A few bytes of zstd may say that they hold a petabyte."""
    before, after = versions()
    made = delta.between(before, after)
    begun = zstandard.ZstdCompressor().compressobj(size=1 << 50)
    bomb = begun.compress(b"0") + begun.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    entry = replace(made.entries[0], coding=XOR)
    with pytest.raises(CheckpointError, match=f"few cannot be decoded .it holds {1 << 50} bytes instead of 8192"):
        delta.apply(Delta((entry, *made.entries[1:]), (bomb, *made.codings[1:])), before)


def test_every_flipped_bit_and_every_cut_is_noticed():
    before, after = versions()
    content = delta.to_bytes(delta.between(before, after))
    assert {entry.coding for entry in delta.from_bytes(content).entries} == {SAME, POSITIONS, XOR}
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(CheckpointError, match=r"is (damaged|not a delta)"):
            delta.from_bytes(bytes(damaged))
    for cut in (content[:-1], content[:60], content[:20], content[:3], b"", content + b"\0"):
        with pytest.raises(CheckpointError, match=r"is (damaged|not a delta)"):
            delta.from_bytes(cut)


def test_codings_that_lie_give_an_error_and_no_weight():
    """Damage that came before the file's digest was made, or malice: every byte of every coding, and its length."""
    before, after = versions()
    made = delta.between(before, after)
    for number, (entry, coding) in enumerate(zip(made.entries, made.codings, strict=True)):
        for place in range(len(coding)):
            changed = bytearray(coding)
            changed[place] ^= 255
            wrong = [*made.codings]
            wrong[number] = bytes(changed)
            try:
                result = delta.apply(replace(made, codings=tuple(wrong)), before)
            except CheckpointError as error:
                assert entry.name in str(error)
            else:  # zstd has bits that mean nothing
                assert Weights.of(result.tensors).infos == after.infos


@pytest.mark.parametrize("lie", [{"changed": 0}, {"changed": 1 << 40}, {"coding": SAME}, {"coding": XOR}, {"after": "0" * 64}])
def test_headers_that_lie_give_an_error(lie):
    before, after = versions()
    made = delta.between(before, after)
    with pytest.raises(CheckpointError, match=r"delta: (the result for few is wrong|few cannot be decoded)"):
        delta.apply(replace(made, entries=(replace(made.entries[0], **lie), *made.entries[1:])), before)


def test_a_change_behind_the_last_element_is_an_error():
    before, after = versions()
    made = delta.between(before, after)
    gap = delta._compressed(np.array([4096], "u2"))
    step = delta._compressed(np.array([1], "u2"))
    entry = replace(made.entries[0], changed=1)
    forged = replace(made, entries=(entry, *made.entries[1:]))
    forged = replace(forged, codings=(len(gap).to_bytes(8, "little") + gap + step, *made.codings[1:]))
    with pytest.raises(CheckpointError, match=r"few cannot be decoded \(it changes an element after the last of 4096"):
        delta.apply(forged, before)


def test_other_weights_are_refused():
    before, after = versions()
    made = delta.between(before, after)
    with pytest.raises(CheckpointError, match=r"applies to other weights than these \(few differs\); write a base"):
        delta.apply(made, after)  # twice
    fewer = Weights.of({name: tensor for name, tensor in before.tensors.items() if name != "none"})
    with pytest.raises(CheckpointError, match=r"other weights than these \(none differs\)"):
        delta.apply(made, fewer)


@pytest.mark.parametrize("name", ["none", "few", "many"])
def test_weights_that_were_damaged_in_memory_are_noticed(name):
    before, after = versions()
    made = delta.between(before, after)
    as_integers(before.tensors[name])[3] ^= 1
    with pytest.raises(CheckpointError, match=f"delta: the result for {name} is wrong"):
        delta.apply(made, before)


@pytest.mark.parametrize(
    "other",
    [
        {"few": torch.zeros(32, 128, dtype=torch.bfloat16)},
        {"few": torch.zeros(64, 64, dtype=torch.float16)},
        {"more": torch.zeros(1)},
    ],
    ids=["shape", "dtype", "name"],
)
def test_changed_shapes_types_and_names_are_refused(other):
    before, after = versions()
    with pytest.raises(CheckpointError, match=rf"delta: {next(iter(other))} \(.* is in one version only; write a base"):
        delta.between(before, Weights.of({**after.tensors, **other}))


def test_the_digest_tells_names_shapes_and_types_apart():
    zeros = torch.zeros(4, 2)
    kinds = [{"a": zeros}, {"b": zeros}, {"a": zeros.T}, {"a": zeros.view(torch.int32)}, {"a": zeros, "b": zeros}]
    kinds += [{"a": -zeros}, {}]
    assert len({Weights.of(tensors).digest for tensors in kinds}) == len(kinds)
