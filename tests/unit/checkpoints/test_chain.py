"""Checkpoints to sample from: bases and deltas that give back exactly what was trained, or an error."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from families import FAMILIES, language_model
from manifests import rewritten
from marks import rest_slow
from safetensors.torch import load_file
from scoring import TOKENS, logprobs_of

from cookbook.checkpoints import delta, gathered, manifest, sampler_checkpoints
from cookbook.checkpoints.sampler_checkpoints import SamplerCheckpoints, export, lineage, reconstruct
from cookbook.checkpoints.tensor_digests import Weights
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, add_lora
from cookbook.engine.parallel import Ranks
from cookbook.errors import CheckpointError
from cookbook.losses import DPO
from cookbook.types import AdamParams


def train(engine, step=0, lr=1e-6):
    engine.forward_backward(tiny.datums(4, seed=step), DPO())
    engine.optim_step(AdamParams(learning_rate=lr), None)


def trained(engine):
    """A copy of the model's weights, under the names of a file."""
    return {
        name: tensor.clone()
        for name, tensor in sampler_checkpoints.on_disk(sampler_checkpoints.full_network(engine.model)).items()
    }


class OneShard(Ranks):
    """A single rank that saves tensor by tensor, as sharded ranks do. ``tests/system/test_ranks.py`` has several ranks."""

    shards = True


class Gathered(SamplerCheckpoints):
    """Saves every checkpoint twice, the second tensor by tensor, and expects the same bytes in all files."""

    def __init__(self, dtype=None):
        super().__init__(dtype)
        self.other = SamplerCheckpoints(dtype)

    def save(self, engine, folder, kind):
        super().save(engine, folder, kind)
        self.again(engine, folder, lambda other: self.other.save(engine, other, kind))

    def save_adapted(self, engine, folder):
        super().save_adapted(engine, folder)
        self.again(engine, folder, lambda other: self.other.save_adapted(engine, other))

    def again(self, engine, folder, save):
        other = folder.parent / "gathered" / folder.name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "ranks", OneShard())
            save(other)
        assert contents(other) == contents(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(make_engine, tmp_path):
    """A base and three deltas in ``tmp_path``, and what the model held at each."""
    engine, checkpoints, held = make_engine(dtype="bfloat16"), Gathered(), []
    for step in range(4):
        checkpoints.save(engine, tmp_path / f"v{step}", "delta" if step else "base")
        held.append(trained(engine))
        train(engine, step)
    return held


def test_a_chain_gives_back_every_version(saved, tmp_path):
    assert not same(saved[0], saved[1])
    for step, held in enumerate(saved):
        folder = tmp_path / f"v{step}"
        assert [path.name for path in lineage(folder)] == [f"v{i}" for i in range(step + 1)]
        assert same(reconstruct(folder).tensors, held)
        facts = manifest.verify(folder)
        assert (facts["step"], facts["kind"]) == (step, "delta" if step else "base")
        assert facts["weights"] == Weights.of(held).digest
    assert manifest.read(tmp_path / "v2")["applies_to"] == Weights.of(saved[1]).digest
    sizes = [sum(path.stat().st_size for path in (tmp_path / f"v{i}").glob("*weights.delta")) for i in (1, 2, 3)]
    assert all(0 < size < 0.2 * (tmp_path / "v0" / "model.safetensors").stat().st_size for size in sizes)


@pytest.mark.slow
def test_a_chain_may_begin_again(make_engine, saved, tmp_path):
    engine, checkpoints = make_engine(dtype="bfloat16"), SamplerCheckpoints()
    for step, kind in enumerate(("base", "delta", "base", "delta")):
        checkpoints.save(engine, tmp_path / f"again{step}", kind)
        assert same(reconstruct(tmp_path / f"again{step}").tensors, saved[step])
        train(engine, step)
    assert [path.name for path in lineage(tmp_path / "again3")] == ["again2", "again3"]


def test_an_export_is_what_a_base_would_have_been(make_engine, saved, tmp_path):
    engine = make_engine(dtype="bfloat16")
    for step in range(3):
        train(engine, step)
    SamplerCheckpoints().save(engine, tmp_path / "direct", "base")
    export(tmp_path / "v3", tmp_path / "exported")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("direct", "exported")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_an_export_of_several_files(make_engine, saved, tmp_path):
    engine = make_engine(dtype="bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered, "FILE_BYTES", 8000)
        checkpoints = Gathered()
        checkpoints.save(engine, tmp_path / "several", "base")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    train(engine)
    checkpoints.save(engine, tmp_path / "after", "delta")
    export(tmp_path / "after", tmp_path / "exported")
    assert same(reconstruct(tmp_path / "exported").tensors, trained(engine))
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert same(loaded.state_dict(), engine.model.network.state_dict())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "mixtral", "gpt2", "gpt_oss", "gemma3_text"])
def test_names_and_parts_are_those_of_save_pretrained(family, tmp_path):
    """Some architectures, experts above all, have other tensors in memory than on disk; tied weights are stored once."""
    assert family in FAMILIES
    engine = Engine(language_model(family), EngineOptions())
    engine.model.network.save_pretrained(tmp_path / "plain")
    assert same(sampler_checkpoints.on_disk(engine.model.network), load_file(tmp_path / "plain" / "model.safetensors"))
    checkpoints = Gathered()
    checkpoints.save(engine, tmp_path / "base", "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == (tmp_path / "plain" / "model.safetensors").read_bytes()
    train(engine, lr=1e-3)
    checkpoints.save(engine, tmp_path / "delta", "delta")
    engine.model.network.save_pretrained(tmp_path / "later")
    assert same(reconstruct(tmp_path / "delta").tensors, load_file(tmp_path / "later" / "model.safetensors"))


def test_weights_may_be_served_in_another_type(make_engine, tmp_path):
    from transformers import AutoModelForCausalLM

    engine, checkpoints = make_engine(), Gathered("bfloat16")
    checkpoints.save(engine, tmp_path / "base", "base")
    train(engine)
    checkpoints.save(engine, tmp_path / "delta", "delta")
    export(tmp_path / "delta", tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    own = engine.model.network.state_dict()
    assert same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in own.items()})
    assert manifest.read(tmp_path / "exported")["dtype"] == "bfloat16"
    assert (tmp_path / "delta" / delta.FILE).stat().st_size < 0.2 * (tmp_path / "base" / "model.safetensors").stat().st_size


def test_an_adapter_stands_alone(make_engine, tmp_path):
    engine, checkpoints = make_engine(lora_rank=4), SamplerCheckpoints()
    first = checkpoints.save(engine, tmp_path / "first", "base")
    train(engine, lr=1e-2)
    second = checkpoints.save(engine, tmp_path / "second", "delta")
    assert (first.kind, second.kind) == ("base", "base")
    found = [manifest.verify(tmp_path / name)["weights"] for name in ("first", "second")]
    assert found == [
        Weights.of(load_file(tmp_path / name / "adapter_model.safetensors")).digest for name in ("first", "second")
    ]
    assert found[0] != found[1]


# ---- an adapter and what it adapts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", rest_slow(["all-linear", ["q_proj", "embed_tokens"], ["down_proj", "lm_head"]]), ids=str)
def test_merged_weights_compute_what_the_adapter_does(make_engine, tmp_path, modules):
    """Also where one of two tied weights is adapted, which the merged folder then holds apart. 1e-5: float32, added up once."""
    from transformers import AutoModelForCausalLM

    engine = make_engine(lora_rank=4, lora_target_modules=modules)
    Gathered().save_adapted(engine, tmp_path / "adapted")
    train(engine, lr=1e-2)
    with_adapter = logprobs_of(engine.model.network, TOKENS)
    with engine.model.network.disable_adapter():
        without = logprobs_of(engine.model.network, TOKENS)
    assert (with_adapter - without).abs().max() > 0.05
    assert SamplerCheckpoints().save(engine, tmp_path / "merged", "base", merged=True).kind == "base"
    for name, expected in (("merged", with_adapter), ("adapted", without)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert not (tmp_path / name / "adapter_config.json").exists()
        assert (logprobs_of(loaded, TOKENS) - expected).abs().max() < 1e-5
        assert manifest.verify(tmp_path / name)["lora"] is False
    assert logprobs_of(engine.model.network, TOKENS).equal(with_adapter)  # it was not touched


@pytest.mark.slow
def test_merged_weights_are_chained_as_others(make_engine, tmp_path):
    engine, checkpoints = make_engine(lora_rank=4, dtype="bfloat16"), SamplerCheckpoints()
    for step, kind in enumerate(("base", "delta", "delta")):
        checkpoints.save(engine, tmp_path / f"v{step}", kind, merged=True)
        assert same(reconstruct(tmp_path / f"v{step}").tensors, trained(engine))
        train(engine, step, lr=1e-3)
    alone = checkpoints.save(engine, tmp_path / "adapter", "delta")  # a separate adapter leaves the chain as before
    assert alone.kind == "base" and (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    checkpoints.save(engine, tmp_path / "v3", "delta", merged=True)
    assert manifest.read(tmp_path / "v3")["predecessor"] == "v2"
    assert same(reconstruct(tmp_path / "v3").tensors, trained(engine))


def test_a_sum_is_rounded_once(make_engine, tmp_path):
    """The adapter's change of the weights is not rounded to bfloat16; only its sum with the weights is."""
    engine = make_engine(lora_rank=4, dtype="bfloat16")
    train(engine, lr=1e-2)
    plain = engine.model.network.get_base_model().state_dict()
    name = "model.layers.0.mlp.down_proj"
    a, b = (plain[f"{name}.lora_{factor}.default.weight"].double() for factor in "AB")
    exact = plain[f"{name}.base_layer.weight"].double() + (32 / 4) * (b @ a)
    found = trained(engine)[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    assert (found != exact.bfloat16()).float().mean() < 1e-3  # float32 is between the two


@pytest.mark.parametrize("family", rest_slow(["gpt2", "qwen3_moe", "gemma3_text"]))
def test_merged_weights_of_other_architectures(family, tmp_path):
    """Layers that keep their weights transposed, experts, tied heads."""
    from transformers import AutoModelForCausalLM

    plain, config = language_model(family), ModelConfig(family, lora_rank=2)
    engine = Engine(replace(plain, network=add_lora(plain.network, config, 0), config=config), EngineOptions())
    Gathered().save_adapted(engine, tmp_path / "adapted")
    train(engine, lr=1e-2)
    SamplerCheckpoints().save(engine, tmp_path / "merged", "base", merged=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = logprobs_of(engine.model.network, TOKENS)
    assert (logprobs_of(loaded, TOKENS) - expected).abs().max() < 1e-5


# ---- any doubt is an error -------------------------------------------------------------------------------------------


def test_the_first_is_a_base(make_engine, tmp_path):
    checkpoints = SamplerCheckpoints()
    with pytest.raises(CheckpointError, match="v0: a delta needs a checkpoint before it; write a base first"):
        checkpoints.save(make_engine(), tmp_path / "v0", "delta")
    assert not list(tmp_path.iterdir())


def test_a_delta_after_the_weights_were_replaced_is_refused(make_engine, tmp_path):
    engine, checkpoints = make_engine(), SamplerCheckpoints()
    checkpoints.save(engine, tmp_path / "v0", "base")
    checkpoints.forget()
    with pytest.raises(CheckpointError, match="a delta needs a checkpoint before it"):
        checkpoints.save(engine, tmp_path / "v1", "delta")


def test_a_delta_needs_its_predecessor_on_the_disk(make_engine, tmp_path):
    engine, checkpoints = make_engine(), SamplerCheckpoints()
    checkpoints.save(engine, tmp_path / "v0", "base")
    checkpoints.save(engine, tmp_path / "v1", "delta")
    shutil.rmtree(tmp_path / "v1")
    with pytest.raises(CheckpointError, match=r"needs a checkpoint before it \(.*v1 is gone\); write a base first"):
        checkpoints.save(engine, tmp_path / "v2", "delta")


@pytest.mark.slow
def test_a_failed_save_breaks_no_chain(make_engine, saved, tmp_path):
    """A checkpoint that was not written is not a predecessor."""
    engine, checkpoints = make_engine(dtype="bfloat16"), SamplerCheckpoints()
    checkpoints.save(engine, tmp_path / "base", "base")
    for kind in ("delta", "base"):
        train(engine)
        with pytest.raises(CheckpointError, match="v1: exists already; choose another name"):
            checkpoints.save(engine, tmp_path / "v1", kind)
    checkpoints.save(engine, tmp_path / "next", "delta")
    assert manifest.read(tmp_path / "next")["predecessor"] == "base"
    assert same(reconstruct(tmp_path / "next").tensors, trained(engine))


@pytest.mark.parametrize(("folder", "file"), [("v0", "model.safetensors"), ("v1", "weights.delta"), ("v2", "weights.delta")])
def test_a_flipped_bit_anywhere_in_the_chain_is_noticed(saved, tmp_path, folder, file):
    content = bytearray((tmp_path / folder / file).read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{folder}: {file} is damaged|{folder}: holds other weights"):
        reconstruct(tmp_path / "v2")
    with pytest.raises(CheckpointError):
        export(tmp_path / "v2", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_file_that_is_overwritten_changes_nothing_that_was_read(saved, tmp_path):
    found = reconstruct(tmp_path / "v0")
    path = tmp_path / "v0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    assert same(found.tensors, saved[0])


def test_a_missing_or_misnamed_predecessor_is_an_error(saved, tmp_path):
    shutil.copytree(tmp_path / "v3", tmp_path / "astray")
    rewritten(tmp_path / "astray", predecessor="v0")
    with pytest.raises(CheckpointError, match=r"delta: applies to other weights than these"):
        reconstruct(tmp_path / "astray")
    rewritten(tmp_path / "astray", predecessor="../elsewhere")
    with pytest.raises(CheckpointError, match="checkpoint name: expected letters"):
        reconstruct(tmp_path / "astray")
    rewritten(tmp_path / "astray", predecessor="astray")
    with pytest.raises(CheckpointError, match=r"astray: is a delta of .*astray, which is a delta of it as well"):
        reconstruct(tmp_path / "astray")
    shutil.rmtree(tmp_path / "v1")
    with pytest.raises(CheckpointError, match=r"v2: is a delta of .*v1, which is missing"):
        reconstruct(tmp_path / "v3")


def test_a_manifest_that_promises_other_weights_is_an_error(saved, tmp_path):
    for folder in ("v0", "v2"):
        rewritten(tmp_path / folder, weights="0" * 64)
        with pytest.raises(CheckpointError, match=f"{folder}: holds other weights than its manifest says"):
            reconstruct(tmp_path / "v2")
        rewritten(tmp_path / "v0", weights=Weights.of(saved[0]).digest)


def test_other_checkpoints_are_not_sampled_from(make_trainer, tmp_path):
    make_trainer().save_state("state").result()
    with pytest.raises(CheckpointError, match="state: is not a checkpoint to sample from"):
        reconstruct(tmp_path / "state")


# ---- through the trainer ---------------------------------------------------------------------------------------------


def test_deltas_through_the_trainer(make_trainer, tmp_path):
    trainer = make_trainer(dtype="bfloat16")
    with pytest.raises(CheckpointError, match="checkpoint_type: expected one of base, delta, got 'diff'"):
        trainer.save_weights_for_sampler_ext("v0", checkpoint_type="diff")
    trainer.save_weights_for_sampler_ext("v0").result()
    trainer.forward_backward(tiny.datums(4), "dpo")
    trainer.optim_step(AdamParams(learning_rate=1e-5))
    saved = trainer.save_weights_for_sampler_ext("v1", checkpoint_type="delta").result()
    assert (saved.kind, saved.step, saved.path) == ("delta", 1, str(tmp_path / "v1"))
    assert same(reconstruct(tmp_path / "v1").tensors, trained(trainer.engine))
    other = make_trainer(dtype="bfloat16")
    other.load_state(saved, optimizer=False).result()  # loads the chain
    assert same(trained(other.engine), trained(trainer.engine))
    with pytest.raises(CheckpointError, match="holds weights only"):
        other.load_state(saved).result()


def test_loading_a_state_breaks_the_chain(make_trainer):
    trainer = make_trainer()
    state = trainer.save_state("state").result()
    trainer.save_weights_for_sampler_ext("v0").result()
    trainer.load_state(state).result()
    with pytest.raises(CheckpointError, match="write a base first"):
        trainer.save_weights_for_sampler_ext("v1", checkpoint_type="delta").result()
