"""Architectures of the Hugging Face zoo, tiny and random: cookbook computes what a model's own code computes, by the known way,
and checkpoints load again. ``python tools/families.py`` prints a table of all."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import families
import marks
import numpy as np
import pytest
import tiny
import torch
from families import CORE, FAMILIES, language_model, support_table
from places import ROOT

from cookbook.checkpoints import store
from cookbook.engine import capabilities
from cookbook.engine.attention import NAME
from cookbook.engine.batch.plan import PackingSupport
from cookbook.engine.decoding import decoder
from cookbook.engine.decoding.decoder import decode, sample
from cookbook.engine.decoding.requests import SampleRequest, sample_states
from cookbook.engine.decoding.rows import METHODS
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.losses import DPO
from cookbook.types import AdamParams, SamplingParams

# Some of each kind, in the fast tests.
QUICK = ["deepseek_v3", "gpt2", "gpt_oss", "llama", "mamba", "qwen3"]


def some(names, quick):
    """All ``names``: the ``quick`` ones in fast tests, a third of the others in CI, by the seed of the run."""
    others = [name for name in names if name not in quick]
    in_ci = marks.some(others, len(others) // 3)
    chosen = {name: [] if name in quick else pytest.mark.slow if name in in_ci else pytest.mark.nightly for name in names}
    return pytest.mark.parametrize("family", [pytest.param(name, marks=mark) for name, mark in chosen.items()])


CORE_SOME = some(CORE, ("qwen3", "gemma2", "gpt2", "qwen3_5_text", "mamba"))


def test_the_support_matrix_of_the_docs_is_that_of_the_families():
    page = (ROOT / "docs/reference/support.md").read_text(encoding="utf-8")
    assert support_table() in page


@some(FAMILIES, QUICK)
def test_it_trains_and_samples_as_its_own_code_does(family, tmp_path, caplog):
    """SFT and GRPO, all weights and an adapter: logprobs, gradients, steps and samples."""
    caplog.set_level("INFO", logger="cookbook")
    results = families.check_family(family, tmp_path)
    for result in results:
        assert (result.rows, result.sampling) == (FAMILIES[family].rows, FAMILIES[family].sampling)
        assert not result.failed(FAMILIES[family])
    if results[0].sampling != "prompt copies" and results[0].sampling != "shared prompts":
        told = {record.getMessage() for record in caplog.records if record.getMessage().startswith("sampling: ")}
        assert len(told) == 1  # of both models the same line
        assert f"({family}) " in told.pop()


@CORE_SOME
def test_greedy_samples_are_those_of_generate(family):
    model = language_model(family)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3, 1, 4, 1, 5, 9]]
    params = SamplingParams(max_tokens=9, temperature=0.0, stop=[])
    requests = [SampleRequest(prompt, 2, params, seed=0) for prompt in prompts]
    model.network.generation_config.eos_token_id = None
    for prompt, found in zip(prompts, sample(model, requests, 0, 10_000), strict=True):
        expected = model.network.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert [one.tokens for one in found] == [expected[0, len(prompt) :].tolist()] * 2


@CORE_SOME
def test_checkpoints_load_again(family, tmp_path):
    """transformers keeps some families in memory under other names than on disk."""
    engine = Engine(language_model(family), EngineOptions())
    data = tiny.datums(2)
    engine.forward_backward(data, DPO())
    engine.optim_step(AdamParams(learning_rate=1e-2), None)
    saved, expected = store.save(engine, tmp_path / "one", state=True), logprobs(engine, data)
    fresh = Engine(language_model(family), EngineOptions())
    store.load(fresh, tmp_path / "one", optimizer=True)
    assert saved.step == fresh.step == 1
    assert all(np.array_equal(a, b) for a, b in zip(logprobs(fresh, data), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(fresh), tiny.weights(engine), strict=True))


def logprobs(engine, data):
    return [row["logprobs"].array for row in engine.forward(data).loss_fn_outputs]


# ---- fast paths that are given up --------------------------------------------------------------------------------------


def breaking(network):
    """No fast path can follow this model: it takes ids alone, returns no states, and calls its norms by name."""
    own, layer = network.forward, network.model.layers[0]
    network.forward = lambda input_ids, use_cache=None: own(input_ids=input_ids, use_cache=False)
    layer.input_layernorm.register_forward_pre_hook(lambda _, args, named: ((), {"hidden_states": args[0]}), with_kwargs=True)


def test_what_no_fast_path_can_follow_is_left_to_the_models_own_code(caplog):
    caplog.set_level("INFO", logger="cookbook")
    model = language_model("qwen3")
    expected = tiny.plain_gradients(model.network, tiny.datums(4), DPO())
    breaking(model.network)
    engine = Engine(model, EngineOptions())
    engine.forward_backward(tiny.datums(4), DPO())
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-5
    found = sample(model, [SampleRequest([5, 6, 7], 2, SamplingParams(max_tokens=4, stop=[]), seed=0)], 0, 1000)
    assert all(len(one.tokens) == 4 for one in found[0])
    assert model.network.config._attn_implementation == "sdpa"
    told = [record.getMessage() for record in caplog.records]
    of_sampling = [line for line in told if line.startswith("sampling: ")]
    assert of_sampling == [line for line in of_sampling if "Qwen3ForCausalLM (qwen3) recomputes the whole sequence" in line]
    assert len(of_sampling) == 1 and "its forward pass returns no cached states" in of_sampling[0]
    assert sum("sequences are padded: " in line and "Qwen3ForCausalLM" in line for line in told) == 1


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_decoding_method_gives_the_same_samples(method):
    """Rows of several lengths, more than the budget holds at the same time, that end at different times."""
    model = language_model("qwen3")
    requests = [
        SampleRequest(list(range(3, 3 + length)), 2, SamplingParams(max_tokens=limit, stop=[]), seed=length)
        for length, limit in ((4, 9), (4, 3), (7, 5), (2, 20))
    ]
    expected = sample(model, requests, 0, 10_000)
    found = decode(model, [sample_states(model, i, request) for i, request in enumerate(requests)], 0, 60, method)
    for one, other in zip(found, expected, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        for each, same in zip(one, other, strict=True):
            np.testing.assert_allclose(each.logprobs, same.logprobs, atol=2e-5)


def test_weights_that_are_broken_are_no_reason_to_give_up_a_fast_path():
    model = language_model("qwen3")
    with torch.no_grad():
        model.network.model.norm.weight[0] = float("nan")
    with pytest.raises(RolloutError, match="logits are not finite"):
        decoder.decoding_method(model, 10)


def test_a_mask_of_the_models_own_making_is_not_packed_away(caplog):
    """Doge scores its keys by a mask that it learns: the gradient of that was lost in packed rows."""
    model = language_model("doge")
    assert not capabilities.packing_support(model).packed
    assert "builds its own attention mask" in capabilities.packing_support(model).reason
    assert model.network.config._attn_implementation != NAME


def test_rows_that_change_each_other_are_computed_in_separate_passes(caplog):
    """A router with a capacity is such a model: a row that takes an expert's place leaves none for another row."""
    caplog.set_level("INFO", logger="cookbook")
    model = language_model("qwen3")
    model.network.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out + out.mean(0, keepdim=True))
    expected = tiny.plain_gradients(model.network, tiny.datums(4), DPO())
    engine = Engine(model, EngineOptions(packing="padded"))
    assert not engine.packing.padded
    engine.forward_backward(tiny.datums(4), DPO())
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-5
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("sequences are ")]
    assert told == ["sequences are one per pass: Qwen3ForCausalLM computes other numbers in padded rows"]


def test_rounding_is_no_reason_to_give_up_padding():
    """Without an attention output, rounding is the only difference between padded and separate sequences."""
    model = language_model("qwen3")
    with torch.no_grad():
        for layer in model.network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    assert Engine(model, EngineOptions(packing="padded")).packing == PackingSupport(False, False)


# ---- what cannot be had is one line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["auto", "padded"])
@pytest.mark.parametrize("family", families.NOT_CAUSAL)
def test_a_model_that_reads_later_tokens_is_one_line(family, packing):
    """Trained, it would learn to copy the token that it reads."""
    model = language_model(family)
    with pytest.raises(BackendError, match=rf"^model\.name: {model.class_name} \({family}\) is not causal: ") as raised:
        Engine(model, EngineOptions(packing=packing))
    assert str(raised.value).endswith("; choose a causal language model") == (family != "bert")
    assert ("; set is_decoder to true in its config.json, or choose a causal" in str(raised.value)) == (family == "bert")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "nonsense"])
def test_an_attention_that_is_not_there_is_one_line(tiny_folder, asked):
    with pytest.raises(ConfigError, match=rf"^model\.attn_implementation: .*got {asked}; set it to auto") as raised:
        load(ModelConfig(str(tiny_folder), attn_implementation=asked), torch.device("cpu"), 0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
@pytest.mark.parametrize("random", [False, True])
def test_a_quantized_base_is_refused(tiny_folder, tmp_path, method, random):
    copied = shutil.copytree(tiny_folder, tmp_path / "quantized")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(BackendError) as raised:
        load(ModelConfig(str(copied), random=random, lora_rank=4), torch.device("cpu"), 0)
    expected = f"model.name: quantized weights are not supported, got '{copied}'; use the 16-bit model"
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("vocab_size", -5, "vocab_size must be above 0, got -5"),
        ("vocab_size", 0, "vocab_size must be above 0, got 0"),
        ("vocab_size", "many", "expected int, got str"),
        ("hidden_size", -8, "hidden_size must be above 0, got -8"),
        ("num_hidden_layers", -1, "num_hidden_layers"),
    ],
)
def test_impossible_sizes_are_one_line(tiny_folder, tmp_path, name, value, reason):
    copied = shutil.copytree(tiny_folder, tmp_path / "impossible")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(BackendError) as raised:
        load(ModelConfig(str(copied)), torch.device("cpu"), 0)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_a_pickled_model_runs_no_code(tiny_folder, tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    copied = shutil.copytree(tiny_folder, tmp_path / "pickled")
    for file in copied.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Hostile()}, copied / "pytorch_model.bin")
    with pytest.raises(BackendError) as raised:
        load(ModelConfig(str(copied)), torch.device("cpu"), 0)
    assert not (tmp_path / "ran").exists() and "\n" not in str(raised.value)


def test_a_package_that_a_model_needs_is_one_line(tiny_folder, monkeypatch):
    import transformers

    def missing(*args, **options):
        raise ImportError("This modeling file requires the following packages: einops. Run `pip install einops`")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", missing)
    with pytest.raises(BackendError, match="requires the following packages: einops"):
        load(ModelConfig(str(tiny_folder)), torch.device("cpu"), 0)


def test_experts_in_float64_are_multiplied_one_by_one(tmp_path, caplog):
    """torch's grouped products know no float64."""
    caplog.set_level("INFO", logger="cookbook")
    families.network("qwen3_moe").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    engines = [Engine(families.loaded(tmp_path, 0, dtype), EngineOptions()) for dtype in ("float64", "float32")]
    assert [engine.model.network.config._experts_implementation for engine in engines] == ["eager", "grouped_mm"]
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("experts: ")]
    assert len(told) == 1 and "Qwen3MoeForCausalLM (qwen3_moe) uses one matrix product per expert" in told[0]
    found, expected = (torch.from_numpy(np.concatenate(logprobs(engine, tiny.datums(4)))) for engine in engines)
    assert (found - expected).abs().max() < 2e-5


def test_layers_that_cannot_have_an_adapter_get_none(tmp_path, caplog):
    """Of Mamba's layers PEFT refuses one; a router returns a tuple."""
    caplog.set_level("INFO", logger="cookbook")
    for family, layer in (("mamba", "out_proj"), ("phimoe", "router")):
        families.network(family).save_pretrained(tmp_path / family)
        tiny.tokenizer().save_pretrained(tmp_path / family)
        model = families.loaded(tmp_path / family, 2, "float32")
        adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.trainable()}
        assert adapted and layer not in adapted
        assert any(f"({family}) gets no adapter on {layer}" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("modules", "level"), [("all-linear", "INFO"), (["dt_proj", "x_proj"], "WARNING")])
def test_adapters_that_train_nothing_are_named(tmp_path, caplog, modules, level):
    """Mamba multiplies with the weight of ``dt_proj`` and never calls the layer."""
    caplog.set_level("INFO", logger="cookbook")
    families.network("mamba").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path), lora_rank=2, lora_target_modules=modules)
    engine = Engine(load(config, torch.device("cpu"), 0), EngineOptions())
    for _ in range(2):
        engine.forward_backward(tiny.datums(2), DPO())
        engine.optim_step(AdamParams(learning_rate=1e-2), None)
    (told,) = [record for record in caplog.records if "does not use its adapters" in record.getMessage()]
    assert told.levelname == level
    assert told.getMessage().startswith("LoRA: MambaForCausalLM does not use its adapters on dt_proj, so they get no gradient")


def test_copies_know_what_was_tried(caplog):
    """A sampler of its own weights tries nothing again, and says nothing again."""
    caplog.set_level("INFO", logger="cookbook")
    model = language_model("mamba")
    decoder.decoding_method(model, 10)
    caplog.clear()
    assert decoder.decoding_method(copy.copy(model), 10).name == "own states"
    assert not caplog.records
