"""The update of every recipe's loss is the same however its batch is cut, packed, padded, ordered and divided.

Compared with one padded pass over the whole batch, after a step of Adam whose ``eps`` is large enough for the step to be
proportional to the gradient: with the usual one the first step is the gradient's sign, and would hide its size.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import tiny

from cookbook.losses import DPO, GRPO, ORPO, CrossEntropy
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.types import AdamParams

LOSSES = {"sft": CrossEntropy(), "dpo": DPO(), "orpo": ORPO(), "grpo": GRPO(kl_beta=0.05), "gspo": GRPO(ratio="sequence")}
ADAM = AdamParams(learning_rate=1e3, beta1=0.0, beta2=0.0, eps=1e3, grad_clip_norm=0.0)  # a step of about the gradient
# Float32 keeps 7 digits; sums of a few hundred terms in another order lose two of them at most.
SAME = {"float32": 1e-5, "float64": 1e-12}
PAIRS = 4


# A mean takes no division: to divide it again is refused, which is tested elsewhere. A sum takes any.
CASES = [
    (name, normalization)
    for name, loss in LOSSES.items()
    for normalization in (None, *Normalization)
    if normalization is None or loss.reduction is not Reduction.mean
]

# Into how many passes, how they are laid out, and whether the pairs change places.
CUTS = list(itertools.product((1, 2, 3, 5, "uneven"), ("packed", "padded"), (False, True)))
FEW_CUTS = [(1, "packed", False), (3, "padded", True), ("uneven", "packed", True)]


def lengths(data):
    return [datum.model_input.length for datum in data]


def in_micro_batches(data, count):
    """The budget, tokens, under which padded rows make about ``count`` passes; 0 for the whole batch in one."""
    return 10_000 if count == 1 else max(max(lengths(data)), -(-sum(lengths(data)) // count))


def shuffled(data):
    """Pairs stay pairs."""
    order = np.random.default_rng(1).permutation(len(data) // 2)
    return [data[2 * pair + side] for pair in order for side in (0, 1)]


@pytest.fixture
def update(make_engine):
    """The change of the weights by one step, for a loss, a normalization and a way to cut."""

    @functools.cache
    def change(name, normalization, dtype, count, packing, mixed):
        loss = LOSSES[name]
        data = loss.prepare(tiny.datums(2 * PAIRS, seed=3))
        budget = 17 if count == "uneven" else in_micro_batches(data, count)
        engine = make_engine(dtype=dtype, micro_batch_tokens=budget, packing=packing)
        before = tiny.weights(engine)
        engine.forward_backward(shuffled(data) if mixed else data, loss)
        engine.optim_step(ADAM, normalization)
        assert engine.passes.count >= (count if isinstance(count, int) else 3)
        return [after - start for after, start in zip(tiny.weights(engine), before, strict=True)]

    return change


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "normalization"), CASES)
def test_the_update_is_the_same_however_the_batch_is_cut(update, name, normalization, dtype):
    expected = update(name, normalization, dtype, 1, "padded", False)
    for cut in FEW_CUTS if dtype == "float32" else CUTS:
        found = update(name, normalization, dtype, *cut)
        assert tiny.difference(found, expected) < SAME[dtype], cut


def test_the_divisions_differ(update):
    """So that the test above does not compare three times the same."""
    sizes = [
        np.concatenate([row.numpy().ravel() for row in update("grpo", normalization, "float64", 1, "padded", False)])
        for normalization in (None, Normalization.num_loss_tokens, Normalization.num_sequences)
    ]
    whole, by_tokens, by_sequences = (float(np.abs(size).sum()) for size in sizes)
    assert whole > 2 * by_sequences > 4 * by_tokens
