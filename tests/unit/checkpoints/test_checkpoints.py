"""Checkpoints: exact to continue from, plain Hugging Face folders, whole or not there, and known by their digests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow

from cookbook.backends.local import LocalConfig
from cookbook.checkpoints import CheckpointConfig, manifest, store
from cookbook.checkpoints.snapshots import digests
from cookbook.errors import CheckpointError, ConfigError
from cookbook.losses import DPO
from cookbook.types import AdamParams
from cookbook.utils import files

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.01)
OPTIMIZER = f"{store.TRAINER}/shard-00000-00000.safetensors"
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora_rank": 4},
    "lora on bfloat16, with dropout": {"lora_rank": 4, "dtype": "bfloat16", "lora_dropout": 0.3},
}


def train(engine, *seeds):
    """A step a seed; the metrics of the steps."""
    found = []
    for seed in seeds:
        loss = engine.forward_backward(tiny.datums(4, seed=seed), DPO()).metrics
        found.append({**loss, **engine.optim_step(ADAM, None).metrics})
    return found


def names_in(folder):
    """Its files, those in folders included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same_network(plain, ours):
    """Whether the weights are equal to the bit, and the logits up to the rounding of two attention implementations."""
    own, found = ours.state_dict(), plain.state_dict()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        close = torch.allclose(plain.eval()(input_ids=ids).logits, ours.eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    return close and own.keys() == found.keys() and all(torch.equal(tensor, found[name]) for name, tensor in own.items())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tiny.weights(one), tiny.weights(other), strict=True))


# ---- what is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_to_the_bit(make_engine, tmp_path, kind):
    engine = make_engine(**KINDS[kind])
    train(engine, 0, 1)
    saved = store.save(engine, tmp_path / "two", state=True)
    assert (saved.step, saved.kind, saved.path) == (2, "state", str(tmp_path / "two"))
    again = make_engine(**KINDS[kind])
    train(again, 5)  # whatever it was before
    store.load(again, tmp_path / "two", optimizer=True)
    assert again.step == 2 and same(again, engine)
    assert train(again, 2, 3) == train(engine, 2, 3)
    assert same(again, engine)
    state, other = engine.optimizer.state(), again.optimizer.state()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_a_checkpoint_may_come_before_the_first_step(make_engine, tmp_path):
    store.save(make_engine(), tmp_path / "zero", state=True)
    engine, fresh = make_engine(), make_engine()
    train(engine, 0)
    store.load(engine, tmp_path / "zero", optimizer=True)
    assert train(engine, 1) == train(fresh, 1)


def test_weights_alone_reset_the_optimizer(make_engine, tmp_path):
    engine = make_engine()
    train(engine, 0, 1)
    store.save(engine, tmp_path / "two", state=True)
    again = make_engine()
    train(again, 7)
    again.forward_backward(tiny.datums(2), DPO())  # an unfinished step is forgotten
    store.load(again, tmp_path / "two", optimizer=False)
    assert again.step == 0 and same(again, engine) and not again.optimizer.state()
    started = make_engine(name=tmp_path / "two")  # as a model folder
    assert train(again, 2) == train(started, 2) and same(again, started)


def test_transformers_loads_it_unchanged(make_engine, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine()
    train(engine, 0)
    for name, state in (("state", True), ("base", False)):
        store.save(engine, tmp_path / name, state=state)
        network = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert same_network(network, engine.model.network)
        assert AutoTokenizer.from_pretrained(tmp_path / name)("hello").input_ids == tiny.tokenizer()("hello").input_ids
    assert list((tmp_path / "state" / store.TRAINER).iterdir()) and not (tmp_path / "base" / store.TRAINER).exists()


def test_peft_loads_an_adapter_unchanged(make_engine, tmp_path):
    from peft import AutoPeftModelForCausalLM

    engine = make_engine(lora_rank=4)
    train(engine, 0)
    store.save(engine, tmp_path / "adapter", state=False)
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))  # it stands alone
    network = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert same_network(network, engine.model.network)
    loaded = make_engine(name=tmp_path / "adapter")  # and so do we, to train it further
    assert same(loaded, engine) and loaded.model.config.lora_rank == 4
    assert train(loaded, 1)[0]["loss"] == pytest.approx(train(engine, 1)[0]["loss"], rel=1e-6)


def test_an_adapter_finds_its_base_from_anywhere(make_engine, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_folder.parent)
    engine = make_engine(name=Path(tiny_folder.name), lora_rank=2)
    store.save(engine, tmp_path / "adapter", state=False)
    monkeypatch.chdir(tmp_path)
    assert same(make_engine(name=Path("adapter")), engine)


def test_saving_asks_no_hub(make_engine, tmp_path, monkeypatch):
    """PEFT looks for the base model's config on the hub, unless it is told not to."""
    engine = make_engine(lora_rank=2)
    engine.model.network.peft_config["default"].base_model_name_or_path = "unknown/model"
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_, **__: pytest.fail("asked the hub"))
    store.save(engine, tmp_path / "one", state=True)
    store.load(engine, tmp_path / "one", optimizer=True)


# ---- saved while training continues ----------------------------------------------------------------------------------


def _content(file):
    """Return the bytes; for PEFT's configuration, whose lists have a random order, the sorted values."""
    if file.name != "adapter_config.json":
        return file.read_bytes()
    facts = json.loads(file.read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in facts.items()}


@pytest.mark.parametrize("kind", rest_slow(KINDS, fast=2))
def test_saved_aside_it_holds_what_was_when_it_was_asked_for(make_trainer, tmp_path, kind):
    """The same bytes as a save that training waits for, although three more steps were requested immediately."""
    trainer = make_trainer(**KINDS[kind])
    for name, aside in (("waited", False), ("aside", True)):
        trainer.forward_backward(tiny.datums(2), "dpo")
        trainer.optim_step(ADAM)
        saved = trainer.save_state(name, asynchronous=aside)
        reference = trainer.save_state(f"{name}-again") if aside else None
        for _ in range(3):
            trainer.forward_backward(tiny.datums(2), "dpo")
            trainer.optim_step(ADAM)
        assert saved.result().step == (1 if not aside else 5)
    trainer.close()
    one, other = Path(saved.result().path), Path(reference.result().path)
    manifest.verify(one)
    files = names_in(one)
    assert files == names_in(other) and OPTIMIZER in files
    for name in set(files) - {manifest.NAME}:
        assert _content(one / name) == _content(other / name), name


def test_a_save_aside_that_fails_is_told(make_trainer, tmp_path):
    """The reader of a future gets its error; an unread error is raised by the next step and at the end."""
    trainer = make_trainer()
    (tmp_path / "file").write_text("text")
    trainer.folder = tmp_path / "file"
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        trainer.save_state("one", asynchronous=True).result()
    lost = trainer.save_state("two", asynchronous=True)
    while not lost.done():
        time.sleep(0.01)
    trainer.forward_backward(tiny.datums(2), "dpo")
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        trainer.optim_step(ADAM).result()
    trainer.save_state("three", asynchronous=True)
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        trainer.close()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tiny_folder, tmp_path_factory):
    """A checkpoint after one step, to be copied."""
    from cookbook.engine.engine import Engine, EngineOptions
    from cookbook.engine.model import ModelConfig, load

    engine = Engine(load(ModelConfig(str(tiny_folder)), torch.device("cpu"), 0), EngineOptions())
    train(engine, 0)
    folder = tmp_path_factory.mktemp("good") / "step-000001"
    store.save(engine, folder, state=True)
    return folder


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "flipped": (lambda path: flip(path, random.Random(path.name).randrange(1 << 30)), "damaged|cannot be read|not in format"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-7]), "damaged|cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "damaged|cannot be read"),
    "missing": (lambda path: path.unlink(), "is missing|is not a checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found_and_named(make_engine, good, tmp_path, damage):
    spoil, message = DAMAGE[damage]
    engine = make_engine()
    before = tiny.weights(engine)
    names = [name for name in names_in(good) if name != manifest.CARD]  # a user may edit the model card
    assert {"model.safetensors", OPTIMIZER, "config.json", "tokenizer.json", "checkpoint.json"} <= set(names)
    for name in names:
        folder = tmp_path / damage / name.replace("/", "-")
        shutil.copytree(good, folder)
        spoil(folder / name)
        with pytest.raises(CheckpointError, match=message) as caught:
            store.load(engine, folder, optimizer=True)
        assert name in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), before, strict=True))


STRANGE = {
    "a tensor file too many": lambda folder: shutil.copy(
        folder / OPTIMIZER, folder / store.TRAINER / "shard-00001-00000.safetensors"
    ),
    "weights too many": lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors"),
    "the optimizer is gone": lambda folder: shutil.rmtree(folder / store.TRAINER),
    "no manifest yet": lambda folder: (folder / manifest.NAME).unlink(),
    "of another program": lambda folder: (folder / manifest.NAME).write_text('{"format": "pt", "files": {}}'),
    "of an earlier version": lambda folder: (folder / manifest.NAME).write_text('{"format": 1, "files": {}}'),
    "of another checkpoint": lambda folder: (folder / "config.json").write_text("{}"),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "not renamed yet": lambda folder: folder.rename(folder.with_name(f".{folder.name}.77.tmp")),
    "moved away": lambda folder: folder.rename(folder.with_name(f".{folder.name}.77.old")),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_if_the_newest_is_damaged_in_any_way_the_one_before_it_is_taken(make_engine, good, tmp_path, strange):
    copies(good, tmp_path, 1, 2)
    STRANGE[strange](tmp_path / store.step_name(2))
    assert store.newest(tmp_path) == tmp_path / store.step_name(1)
    engine = make_engine()
    before = tiny.weights(engine)
    with pytest.raises(CheckpointError) as caught:
        store.load(engine, tmp_path / store.step_name(2), optimizer=True)
    assert store.step_name(2) in str(caught.value) and "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), before, strict=True))


def test_a_note_of_the_users_in_a_checkpoint_does_no_harm(make_engine, good, tmp_path):
    copies(good, tmp_path, 1)
    (tmp_path / store.step_name(1) / "NOTES.md").write_text("the good one")
    store.load(make_engine(), tmp_path / store.step_name(1), optimizer=True)


def test_no_pickle_is_on_the_disk(good):
    suffixes = {Path(name).suffix for name in names_in(good)}
    assert suffixes | {".jinja"} == {".safetensors", ".json", ".jinja", ".md"}


def test_a_file_of_the_state_is_read_once_and_leaves_the_cache(make_engine, tmp_path, monkeypatch):
    """The memory that caches a file is that of the file before. A second reading, for the manifest, would fill it again."""
    read, left = [], []
    monkeypatch.setattr(store, "STATE_BYTES", 4096)
    monkeypatch.setattr(files, "sha256", lambda path, sha256=files.sha256: read.append(path.name) or sha256(path))
    monkeypatch.setattr(files, "forget", lambda path, forget=files.forget: left.append(path.name) or forget(path))
    engine = make_engine()
    train(engine, 0)
    store.save(engine, tmp_path / "one", state=True)
    shards = [path.name for path in (tmp_path / "one" / store.TRAINER).iterdir()]
    assert len(shards) > 2 and sorted(left) == sorted(shards)
    assert all(read.count(name) == 1 for name in shards)
    manifest.verify(tmp_path / "one")


def test_large_ones_come_in_several_files(make_trainer, tmp_path):
    """Of weights as transformers cuts them, so that it reads them too; and of the optimizer."""
    from transformers import AutoModelForCausalLM

    trainer, other = make_trainer(shard_gb=40_000 / (1 << 30)), make_trainer()
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM)
    folder = Path(trainer.save_state("one").result().path)
    sizes = [path.stat().st_size for path in folder.rglob("*.safetensors")]
    assert len(list(folder.glob("model-*"))) > 2 and len(list((folder / store.TRAINER).iterdir())) > 4 and max(sizes) < 50_000
    assert (folder / "model.safetensors.index.json").is_file()
    other.load_state(str(folder)).result()
    assert same(other.engine, trainer.engine)
    state = trainer.engine.optimizer.state()
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.engine.optimizer.state().items())
    assert same_network(AutoModelForCausalLM.from_pretrained(folder), trainer.engine.model.network)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_one_element_anywhere_makes_other_weights(make_engine, kind):
    """The digest that tells a run's model from another one of the same name."""
    engine = make_engine(**KINDS[kind])
    before = digests(engine.model)
    assert digests(make_engine(**KINDS[kind]).model) == before
    draw = random.Random(0)
    for name, parameter in engine.model.network.named_parameters():
        bits = parameter.detach().reshape(-1).view(torch.uint8)
        for place in {0, len(bits) - 1, draw.randrange(len(bits))}:
            bits[place] ^= 1
            assert digests(engine.model)["weights"] != before["weights"], (name, place)
            bits[place] ^= 1
    embedding = engine.model.network.get_input_embeddings().weight.detach()
    embedding[[3, 200]] = embedding[[200, 3]].clone()  # the same elements in another order
    changed = digests(engine.model)
    assert changed["weights"] != before["weights"] and changed["tokenizer"] == before["tokenizer"]


def test_a_manifest_that_lies_is_found(make_engine, good, tmp_path):
    folder = shutil.copytree(good, tmp_path / "lie")
    facts = json.loads((folder / manifest.NAME).read_text())
    (folder / manifest.NAME).write_text(json.dumps({**facts, "step": 999}))
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged"):
        store.load(make_engine(), folder, optimizer=True)


def test_what_is_not_a_checkpoint(make_engine, good, tiny_folder, tmp_path):
    (tmp_path / "file").write_text("text")
    other = shutil.copytree(good, tmp_path / "other")
    (other / manifest.NAME).write_text(json.dumps({"format": 99, "files": {}}))
    engine = make_engine()
    for folder, message in (
        (tmp_path / "nowhere", "is not a checkpoint"),
        (tiny_folder, "is not a checkpoint"),  # a model folder without a manifest
        (tmp_path / "file", "cannot be read"),
        (other, "not in format 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.load(engine, folder, optimizer=True)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_changes_nothing(make_engine, good, tmp_path):
    small = tiny.save(tmp_path / "small", num_hidden_layers=1)
    adapters = {rank: make_engine(lora_rank=rank, lora_alpha=alpha) for rank, alpha in ((4, 32), (2, 32))}
    for rank, engine in adapters.items():
        store.save(engine, tmp_path / f"rank-{rank}", state=True)
    cases = [
        (make_engine(name=small), good, "is of another model"),
        (make_engine(lora_rank=4), good, "holds full weights, but the model is configured differently; set model.lora_rank"),
        (make_engine(), tmp_path / "rank-4", "holds a LoRA adapter"),
        (adapters[2], tmp_path / "rank-4", "is of another model"),
        (make_engine(lora_rank=4, lora_target_modules=["q_proj"]), tmp_path / "rank-4", "is of another model"),
        (make_engine(lora_rank=4, lora_alpha=8), tmp_path / "rank-4", "made with lora_alpha=32, got 8"),
    ]
    for engine, folder, message in cases:
        before = tiny.weights(engine)
        with pytest.raises(CheckpointError, match=message) as caught:
            store.load(engine, folder, optimizer=True)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), before, strict=True))


def test_weights_for_sampling_hold_no_optimizer(make_engine, tmp_path):
    engine = make_engine()
    store.save(engine, tmp_path / "base", state=False)
    with pytest.raises(CheckpointError, match="holds weights only; pass optimizer=False"):
        store.load(engine, tmp_path / "base", optimizer=True)
    store.load(engine, tmp_path / "base", optimizer=False)


@pytest.mark.parametrize("name", ["../up", "a/b", "/abs", "", ".", "..", ".hidden", "-flag", "a b", "a\n", "x" * 256, "ü"])
def test_names_are_not_paths(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"checkpoint name: expected letters"):
        store.named(tmp_path, name)


@pytest.mark.parametrize("name", ["final", "step-000001", "v1.0_b", "7"])
def test_names_that_will_do(tmp_path, name):
    assert store.named(tmp_path, name) == tmp_path / name


def test_nothing_is_overwritten_unasked(make_trainer, tmp_path):
    trainer = make_trainer()
    first = trainer.save_state("mine").result()
    with pytest.raises(CheckpointError, match="exists already; choose another name"):
        trainer.save_state("mine").result()
    before = Path(first.path, manifest.NAME).read_text()
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM).result()
    assert trainer.save_state("mine", overwrite=True).result().step == 1
    assert Path(first.path, manifest.NAME).read_text() != before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # no leftovers


# ---- failed and killed saves -----------------------------------------------------------------------------------------

SCRIPT = """
import os, resource, sys
import torch
from cookbook.checkpoints import contents, store
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.errors import CheckpointError
from cookbook.losses import CrossEntropy
from cookbook.types import AdamParams, datum_from_tokens_weights
from pathlib import Path

model, folder = sys.argv[1], Path(sys.argv[2])
engine = Engine(load(ModelConfig(model), torch.device("cpu"), 0), EngineOptions())
engine.forward_backward([datum_from_tokens_weights([1, 2, 3], [1.0, 1.0, 1.0])], CrossEntropy())
engine.optim_step(AdamParams(), None)  # now there are moments to save
"""
FULL_DISK = """
store.save(engine, folder / "before", state=True)
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for overwrite in (False, True):
        try:
            store.save(engine, folder / ("before" if overwrite else "after"), state=True, overwrite=overwrite)
        except CheckpointError as error:
            print(error)
"""
# For each line of input, start a child that saves until it is killed; print its process id, and then that it was killed.
ENDLESS = """
for _ in sys.stdin:
    child = os.fork()
    while child == 0:
        engine.step += 1
        store.save(engine, folder / f"step-{engine.step % 3:06d}", state=True, overwrite=True)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def run(script, *arguments):
    return [sys.executable, "-c", SCRIPT + script, *map(str, arguments)]


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(tiny_folder, tmp_path):
    limits = (100, 20_000, 100_000)  # bytes a file: the config, the weights, the moments do not fit
    done = subprocess.run(run(FULL_DISK, tiny_folder, tmp_path, *limits), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stdout + done.stderr
    assert all("could not be saved: " in line and "earlier checkpoints are untouched" in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    manifest.verify(tmp_path / "before")


@contextlib.contextmanager
def as_nobody():
    """Without root's right to write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_that_may_not_be_written_is_one_line(make_engine, mode):
    engine = make_engine()
    with tempfile.TemporaryDirectory() as locked:
        Path(locked).chmod(mode)
        with as_nobody(), pytest.raises(CheckpointError, match="could not be saved: Permission denied"):
            store.save(engine, Path(locked) / "one", state=True)
        Path(locked).chmod(0o700)


def test_a_folder_that_is_a_file_is_one_line(make_engine, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        store.save(make_engine(), tmp_path / "file" / "one", state=True)


@pytest.mark.nightly
def test_a_killed_save_leaves_whole_checkpoints_only(tiny_folder, tmp_path):
    """SIGKILL at a dozen moments of an endless series of saves, by one process after another in the same folder.

    On a busy machine a kill may come before the first byte: kills repeat until some came within a save, 60 at most.
    """
    pause = random.Random(0)
    whole, torn = 0, 0
    with subprocess.Popen(
        run(ENDLESS, tiny_folder, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        for number in range(60):
            if number >= 12 and whole > 6 and torn:
                break
            print("save", file=process.stdin)
            child = int(process.stdout.readline())
            time.sleep(pause.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            for folder in store.all_steps(tmp_path):
                manifest.verify(folder)
                whole += 1
            torn += len(list(tmp_path.glob(".step-*.tmp")))
        process.stdin.close()
    assert whole > 6 and torn > 0  # some were killed while they wrote
    store.prune(tmp_path, None)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


# ---- a run's row of checkpoints --------------------------------------------------------------------------------------


def copies(good, folder, *steps):
    for step in steps:
        shutil.copytree(good, folder / store.step_name(step))


def test_the_newest_whole_one_is_found(good, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)
    assert store.newest(tmp_path / "nothing") is None
    copies(good, tmp_path, 2, 10, 9, 1_000_000)
    (tmp_path / "step-9999999").write_text("a file")
    (tmp_path / ".step-2000000.1.tmp").mkdir()
    assert [path.name for path in store.all_steps(tmp_path)] == ["step-000002", "step-000009", "step-000010", "step-1000000"]
    assert store.newest(tmp_path) == tmp_path / "step-1000000"
    flip(tmp_path / "step-1000000" / "model.safetensors", 1000)
    (tmp_path / "step-000010" / manifest.NAME).unlink()
    with caplog.at_level(logging.WARNING, logger="cookbook"):
        assert store.newest(tmp_path) == tmp_path / "step-000009"
    assert "model.safetensors is damaged" in caplog.text and "step-000010: is not a checkpoint" in caplog.text


def test_pruning_keeps_the_newest(good, tmp_path):
    copies(good, tmp_path, 1, 2, 3, 10)
    (tmp_path / "final").mkdir()
    (tmp_path / ".step-000007.123.tmp").mkdir()
    (tmp_path / ".final.123.old").mkdir()
    store.prune(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", *(store.step_name(step) for step in (1, 2, 3, 10))]
    store.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step-000003", "step-000010"]
    store.prune(tmp_path, 5)
    assert len(store.all_steps(tmp_path)) == 2


def test_pruning_keeps_the_one_just_saved_where_damaged_ones_have_later_numbers(good, tmp_path):
    copies(good, tmp_path, 1, 2, 3, 7, 8, 9)
    store.prune(tmp_path, 2, saved=3)
    assert [path.name for path in store.all_steps(tmp_path)] == [store.step_name(step) for step in (2, 3, 7, 8, 9)]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_weights_of_a_sampler_that_lags_behind_are_restored_to_the_bit(make_trainer, tmp_path, lora_rank):
    trainer, again = make_trainer(lora_rank=lora_rank), make_trainer(lora_rank=lora_rank)
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM)
    sampler = trainer.snapshot_sampler(1).result()
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM)
    saved = trainer.save_state("two", facts={"run": {"total_steps": 9}}, sampler=sampler).result()
    assert manifest.verify(Path(saved.path))["run"] == {"total_steps": 9}
    again.load_state(f"{saved.path}/{store.SAMPLER}", optimizer=False).result()
    held, now, found = (one.model.network.state_dict() for one in (sampler.engine(), trainer.engine, again.engine))
    assert all(torch.equal(found[name], held[name]) for name in held)
    assert not all(torch.equal(found[name], now[name]) for name in held)
    again.load_state(saved).result()
    assert same(again.engine, trainer.engine)
    flip(Path(saved.path, store.SAMPLER, "config.json" if not lora_rank else "adapter_config.json"), 5)
    with pytest.raises(CheckpointError, match=r"sampler/.*config\.json is damaged"):
        again.load_state(saved).result()


def test_options_out_of_range():
    with pytest.raises(ConfigError, match=r"checkpoint\.keep must be at least 1, got 0"):
        CheckpointConfig(keep=0)
    with pytest.raises(ConfigError, match=r"backend\.shard_gb: expected a number above 0, got 0"):
        LocalConfig(shard_gb=0)


def test_loading_through_the_trainer(make_trainer):
    trainer, other = make_trainer(), make_trainer()
    trainer.forward_backward(tiny.datums(2), "dpo")
    trainer.optim_step(ADAM)
    saved = trainer.save_state("one").result()
    other.load_state(saved)
    outputs = [one.forward(tiny.datums(2), "dpo").result() for one in (trainer, other)]
    assert outputs[0].metrics == outputs[1].metrics
    assert np.array_equal(*(out.loss_fn_outputs[0]["logprobs"].array for out in outputs))
    assert other.engine.step == 1
    base = trainer.save_weights_for_sampler_ext("base").result()
    assert (base.kind, base.step) == ("base", 1)
    other.load_state(base.path, optimizer=False).result()
