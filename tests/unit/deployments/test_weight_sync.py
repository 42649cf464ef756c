"""The chain of checkpoints to replicas that serve: exactly the trainer's weights on every one of them, or an error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import tiny
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig
from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.deployments.vllm.weight_store import FAILED, READING, WeightStore
from cookbook.deployments.weight_sync import ChainSyncer, SyncTarget
from cookbook.engine.model import ModelConfig
from cookbook.errors import CheckpointError, CookbookError, RolloutError
from cookbook.types import AdamParams

BASE, DELTA = "base", "delta"


class Served:
    """Replicas that hold weights as those of a server do, without a model behind them."""

    def __init__(self, count: int = 2) -> None:
        self.holders = [WeightStore() for _ in range(count)]
        self.got: list[str] = []  # kinds of the checkpoints
        self.fails: set[int] = set()  # replicas whose load fails
        self.used: list[Path] = []  # checkpoints that samplers may want again
        self.lies: set[int] = set()  # replicas that say they are ready and have done nothing

    def report(self) -> list[SyncTarget]:
        return [SyncTarget(str(i), one.incarnation, one.status()["digest"]) for i, one in enumerate(self.holders)]

    def load(self, folder: Path, step: int) -> None:
        self.got.append(manifest.read(folder)["kind"])
        for place, holder in enumerate(self.holders):
            if place in self.lies:
                continue
            if place in self.fails:
                raise RolloutError(f"replica {place} has failed")
            holder.prepare(folder)
            holder._thread.join(WAIT_S)
            if (status := holder.status())["state"] == FAILED:
                raise RolloutError(status["error"])
            holder.begin()
            holder.finish()

    def sampler(self, step: int):
        return step

    def in_use(self) -> list[Path]:
        return self.used


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def trainer(make_trainer):
    return make_trainer(dtype="bfloat16")


def train(trainer, lr=1e-4):
    trainer.forward_backward(tiny.datums(2, seed=trainer.step), "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=lr)).result()
    return trainer.step


def serves_the_trainers(served, trainer) -> bool:
    digest = Weights.of(sampler_checkpoints.on_disk(trainer.engine.model.network)).digest
    return all(one.status()["digest"] == digest == Weights.of(one._serving.tensors).digest for one in served.holders)


def folders(trainer) -> list[str]:
    return sorted(manifest.read(path)["kind"] for path in trainer.folder.glob("sync-*"))


def test_a_base_and_then_deltas(trainer, served):
    syncer = ChainSyncer(trainer, served)
    for _ in range(4):
        assert syncer.sync(trainer.step) == trainer.step
        assert serves_the_trainers(served, trainer)
        train(trainer, lr=1e-6)
    assert served.got == [BASE, DELTA, DELTA, DELTA]
    newest = max(trainer.folder.glob("sync-*"))
    assert manifest.read(newest)["step"] == 3
    assert 0 < sum(path.stat().st_size for path in newest.iterdir()) < 0.5 * tiny_bytes(trainer)


def tiny_bytes(trainer) -> int:
    return sum(tensor.nbytes for tensor in sampler_checkpoints.on_disk(trainer.engine.model.network).values())


def test_regular_bases_and_old_chains_deleted(trainer, served):
    trainer.folder.mkdir(exist_ok=True)
    foreign = trainer.folder / "sync-best"
    foreign.mkdir()
    syncer = ChainSyncer(trainer, served, deltas=1, keep=2)
    for _ in range(5):
        syncer.sync(trainer.step)
        train(trainer)
    assert served.got == [BASE, DELTA, BASE, DELTA, BASE]
    foreign.rmdir()  # no folder of the syncer, so it was not deleted
    assert folders(trainer) == [BASE, BASE, DELTA]


def test_a_chain_in_use_is_kept_until_no_replica_needs_it(trainer, served):
    syncer = ChainSyncer(trainer, served, deltas=0, keep=1)
    syncer.sync(trainer.step)
    [first] = trainer.folder.glob("sync-*")
    served.used = [first]
    for _ in range(2):
        syncer.sync(train(trainer))
    assert first.exists() and folders(trainer) == [BASE, BASE]
    served.used = []
    syncer.sync(train(trainer))
    assert not first.exists() and folders(trainer) == [BASE]


def test_a_chain_on_disk_is_bounded_and_deleted_at_the_end(trainer, served):
    """Deltas of a large learning rate are nearly as large as all weights."""
    syncer, sizes = ChainSyncer(trainer, served, chain_size=1.01), []
    for _ in range(6):
        syncer.sync(trainer.step)
        train(trainer, lr=1e-2)
        sizes.append(sum(path.stat().st_size for path in trainer.folder.rglob("sync-*/*") if path.is_file()))
    assert served.got == [BASE, DELTA, BASE, DELTA, BASE, DELTA]
    assert max(sizes) < 2 * sizes[0]
    state = trainer.save_state("step-000006").result()
    syncer.delete_checkpoints(keep_newest=True)
    assert folders(trainer) == [BASE, DELTA]
    syncer.delete_checkpoints()
    assert folders(trainer) == []
    trainer.load_state(state).result()
    # The next sync does not need them.
    syncer.sync(trainer.step)
    assert served.got[-1] == BASE and serves_the_trainers(served, trainer)


def test_without_deltas(trainer, served):
    syncer = ChainSyncer(trainer, served, deltas=0)
    for _ in range(3):
        syncer.sync(train(trainer))
    assert served.got == [BASE] * 3 and folders(trainer) == [BASE]


@pytest.mark.parametrize("who", [0, 1])
def test_a_load_that_fails_on_one_replica(trainer, served, who):
    """Base saved, load failed; then one of two replicas has the new weights and the other the old ones."""
    syncer = ChainSyncer(trainer, served)
    for _ in range(2):  # of a base, then of a delta
        served.fails = {who}
        with pytest.raises(RolloutError, match=f"replica {who} has failed"):
            syncer.sync(trainer.step)
        served.fails = set()
        syncer.sync(trainer.step)
        assert serves_the_trainers(served, trainer)
        train(trainer)
    assert served.got == [BASE, BASE, DELTA, BASE]
    assert folders(trainer) == [BASE]


def test_a_deployment_that_lies_about_readiness(trainer, served):
    syncer = ChainSyncer(trainer, served)
    served.lies = {1}
    with pytest.raises(RolloutError, match=r"1 should serve step 0 .* and serves unknown weights; do not"):
        syncer.sync(0)
    served.lies = set()
    syncer.sync(0)
    served.lies = {0}
    with pytest.raises(RolloutError, match=r"0 should serve step 1 \(\w{12}\.\.\.\) and serves \w{12}\.\.\.; do not"):
        syncer.sync(train(trainer))
    served.lies = set()
    syncer.sync(trainer.step)
    assert served.got == [BASE, BASE, DELTA, BASE]
    assert serves_the_trainers(served, trainer)


def test_a_replica_that_has_restarted(trainer, served):
    syncer = ChainSyncer(trainer, served)
    syncer.sync(0)
    served.holders[1] = WeightStore()
    syncer.sync(train(trainer))
    # A restarted replica is another one, even if another process has loaded the same weights into it.
    old, served.holders[0] = served.holders[0], WeightStore()
    served.holders[0]._serving = old._serving
    syncer.sync(train(trainer))
    served.holders.append(WeightStore())  # scaled up
    syncer.sync(train(trainer))
    served.holders.pop()  # and down
    syncer.sync(train(trainer))
    assert served.got == [BASE] * 5
    assert serves_the_trainers(served, trainer)


def test_a_replica_whose_weights_another_process_has_changed(trainer, served, make_trainer):
    syncer = ChainSyncer(trainer, served)
    syncer.sync(0)
    served.load(Path(trainer.save_weights_for_sampler_ext("mine").result().path), 0)
    train(trainer)
    ChainSyncer(trainer, Served()).sync(trainer.step)
    served.load(Path(trainer.save_weights_for_sampler_ext("other").result().path), 0)
    served.got.clear()
    syncer.sync(trainer.step)
    assert served.got == [BASE] and serves_the_trainers(served, trainer)


def test_two_saves_and_one_load(trainer, served):
    syncer = ChainSyncer(trainer, served)
    syncer.sync(0)
    train(trainer)
    trainer.save_weights_for_sampler_ext("by-hand", checkpoint_type=DELTA).result()
    syncer.sync(train(trainer))
    assert served.got == [BASE, BASE] and serves_the_trainers(served, trainer)
    assert folders(trainer) == [BASE]  # the delta against the other save is gone
    syncer.sync(train(trainer))
    assert served.got[-1] == DELTA


def test_rollback_by_load_state(trainer, served):
    syncer = ChainSyncer(trainer, served)
    saved = trainer.save_state("start").result()
    syncer.sync(0)
    syncer.sync(train(trainer))
    trainer.load_state(saved).result()
    syncer.sync(0)
    assert served.got == [BASE, DELTA, BASE] and serves_the_trainers(served, trainer)
    train(trainer)  # that the trainer refused a delta is no error of its own
    syncer.sync(1)
    assert served.got[-1] == DELTA and serves_the_trainers(served, trainer)


def test_a_delta_saved_by_an_earlier_process(trainer, served):
    ChainSyncer(trainer, served).sync(0)
    first = ChainSyncer(trainer, served)
    first.sync(0)
    first.sync(train(trainer))
    train(trainer)
    later = ChainSyncer(trainer, served)
    later.sync(trainer.step)
    assert served.got == [BASE, BASE, DELTA, BASE]
    assert folders(trainer) == [BASE]  # what the earlier one left is gone


def test_a_predecessor_that_is_missing(trainer, served):
    syncer = ChainSyncer(trainer, served)
    syncer.sync(0)
    for path in trainer.folder.glob("sync-*"):
        path.rename(trainer.folder / "moved")
    syncer.sync(train(trainer))
    assert served.got == [BASE, BASE] and serves_the_trainers(served, trainer)


@pytest.mark.parametrize("kind", [BASE, DELTA])
def test_a_flipped_bit_in_a_file(trainer, served, kind, monkeypatch):
    syncer = ChainSyncer(trainer, served)
    if kind == DELTA:
        syncer.sync(0)
        train(trainer)
    before = served.report()
    load = served.load

    def damaged(folder: Path, step: int) -> None:
        path = folder / ("model.safetensors" if kind == BASE else "weights.delta")
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)
        load(folder, step)

    monkeypatch.setattr(served, "load", damaged)
    with pytest.raises(RolloutError, match=r"is damaged \(its digest differs\)"):
        syncer.sync(trainer.step)
    assert served.report() == before  # they serve what they did
    monkeypatch.undo()
    syncer.sync(trainer.step)
    assert served.got[-1] == BASE and serves_the_trainers(served, trainer)


def test_weights_of_another_step_are_refused(trainer, served):
    with pytest.raises(RolloutError, match="the trainer is at step 0, expected step 3"):
        ChainSyncer(trainer, served).sync(3)
    assert served.got == []


def test_no_replica_at_all(trainer):
    with pytest.raises(RolloutError, match="no replica has reported"):
        ChainSyncer(trainer, Served(0)).sync(0)


# ---- what a replica holds --------------------------------------------------------------------------------------------


def test_a_holder_refuses_what_does_not_fit(trainer, tmp_path):
    trainer.save_weights_for_sampler_ext("a").result()
    train(trainer)
    delta = Path(trainer.save_weights_for_sampler_ext("b", checkpoint_type=DELTA).result().path)
    holder = WeightStore()
    for folder, reason in ((delta, "is a delta, but this replica has no weights"), (tmp_path / "none", "is not a checkpoint")):
        holder.prepare(folder)
        holder._thread.join(WAIT_S)
        assert holder.status()["state"] == FAILED and reason in holder.status()["error"]
        with pytest.raises(CheckpointError, match="no weights are ready to be served"):
            holder.begin()
    assert holder.status()["digest"] is None


def test_a_holder_knows_nothing_while_weights_are_put_in(trainer):
    base = Path(trainer.save_weights_for_sampler_ext("a").result().path)
    holder = WeightStore()
    holder.prepare(base)
    if holder.status()["state"] == READING:
        with pytest.raises(CookbookError, match="still being read"):
            holder.prepare(base)
    holder._thread.join(WAIT_S)
    holder.begin()
    assert holder.status()["digest"] is None
    holder.finish()
    assert holder.status()["digest"] == manifest.read(base)["weights"]
    # Other weights take the place of these: a load that fails leaves neither.
    holder.prepare(base)
    holder._thread.join(WAIT_S)
    holder.begin()
    assert holder.status()["digest"] is None


# ---- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group(request, tiny_folder, tmp_path):
    """A trainer on two ranks, which are replicas or shards."""
    pytest.importorskip("tinker", reason="needs the package tinker")
    model = ModelConfig(str(tiny_folder))
    made = LocalConfig(ranks=2, shard=request.param).make_trainer(model, seed=0, folder=tmp_path / "ranks")
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.parametrize("group", ["none", "all"], indirect=True)
def test_a_group_of_ranks_sends_what_one_process_sends(group, served, make_trainer):
    one, names = make_trainer(), []
    assert (group.model_config, group.adapted_model) == (one.model_config, one.adapted_model)
    for trainer in (group, one):
        trainer.set_checkpoint_dtype("bfloat16")
    with pytest.raises(CheckpointError, match="none: a delta needs a checkpoint before it; write a base first"):
        group.save_weights_for_sampler_ext("none", checkpoint_type="delta").result()
    syncer = ChainSyncer(group, served)

    def sync() -> None:
        syncer.sync(group.step)
        names.append(manifest.read(syncer._chains[-1][-1])["weights"])
        assert {holder.status()["digest"] for holder in served.holders} == {names[-1]}
        # The server keeps the checkpoint that the next delta applies to, and no other.
        assert len(list(group._group.state.glob("*/sampler_weights.*"))) == 1

    for _ in range(3):
        sync()
        train(group)
    assert served.got == [BASE, DELTA, DELTA] and len(set(names)) == 3
    saved = manifest.verify(Path(one.save_weights_for_sampler_ext("base").result().path))
    assert names[0] == saved["weights"] and saved["dtype"] == "bfloat16"
    chain = syncer._chains[-1]
    assert sampler_checkpoints.reconstruct(chain[-1]).digest == names[-1]
    assert sampler_checkpoints.lineage(chain[-1]) == chain
    killed = group._group.pids
    os.kill(killed[1], signal.SIGKILL)
    while set(killed) & set(group._group.pids):
        time.sleep(0.05)
    sync()  # asked for a delta; the new ranks do not know of what
    train(group)
    sync()
    assert served.got[3:] == [BASE, DELTA]
    state = group.save_state("state").result()
    sync()
    group.load_state(state).result()
    assert group.delta_predecessor().result() is None
    sync()
    assert served.got[5:] == [DELTA, BASE] and names[-1] == names[-2] == names[-3]
