"""Reference logprobs of a static dataset are computed once, in any order of requests."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import tiny
from runtools import LITTLE, here, timeless, train  # noqa: F401

from cookbook.backends.local.trainer import LocalReference
from cookbook.errors import BackendError
from cookbook.run.data import CachedReference

TWO_EPOCHS = ["recipe=dpo", "recipe.epochs=2", "recipe.batch_size=8", *LITTLE, "checkpoint.every=1"]


def test_each_datum_is_computed_once_in_blocks_of_the_list(make_trainer, monkeypatch):
    monkeypatch.setattr("cookbook.run.data.BLOCK", 4)
    trainer = make_trainer()
    data = tiny.datums(10)
    reference = trainer.reference()
    expected = reference.logprobs(data).result()
    computed = []

    class Counting:
        def logprobs(self, some):
            computed.append(len(some))
            return reference.logprobs(some)

    inner = Counting()
    gone = weakref.ref(inner)
    remembered = CachedReference(inner, data)
    del inner
    orders = ([9, 1], [1, 0, 9, 8], [5, 7, 6])
    found = {
        place: row
        for order in orders
        for place, row in zip(order, remembered.logprobs([data[i] for i in order]).result(), strict=True)
    }
    assert computed == [4, 2, 4]
    for place, row in found.items():
        assert abs(row - expected[place]).max() < 1e-5
    gc.collect()
    assert gone() is None  # its last use is over
    assert len(remembered.logprobs(data).result()) == 10
    with pytest.raises(BackendError, match="not registered"):
        remembered.logprobs(tiny.datums(1, seed=1))


@pytest.mark.slow
def test_two_epochs_compute_it_for_one_and_a_resume_finds_the_same_bits(here, monkeypatch):  # noqa: F811
    asked = []
    plain = LocalReference.logprobs

    def counted(self, data):
        asked.append(len(data))
        return plain(self, data)

    monkeypatch.setattr(LocalReference, "logprobs", counted)
    assert train(*TWO_EPOCHS, "out=whole") == 0
    whole = timeless("whole")
    pairs, held_out, steps = 24, 4, 6
    assert len([row for row in whole if "loss" in row]) == steps
    assert sum(asked) == 2 * (pairs + held_out)  # not twice the pairs
    assert whole[1]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    shutil.copytree("whole", "part")
    for step in (5, 6):  # stopped in the second epoch
        shutil.rmtree(Path("part/checkpoints") / f"step-{step:06d}")
    assert train(*TWO_EPOCHS, "out=part") == 0
    assert timeless("part") == whole
    ours, theirs = (Path(name, "checkpoints/step-000006/model.safetensors").read_bytes() for name in ("whole", "part"))
    assert ours == theirs
