"""Architectures of the Hugging Face zoo, tiny and random: cookbook computes what a model's own code computes, by the known way,
and checkpoints load again. ``python tests/families.py`` prints a table of all."""

from __future__ import annotations

import copy

import families
import numpy as np
import pytest
import tiny
import torch
from families import FAMILIES, language_model

from cookbook.checkpoints import store
from cookbook.engine import probe
from cookbook.engine.attention import NAME
from cookbook.engine.decoded_rows import WAYS
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.engine.sampler import Request, sample
from cookbook.errors import BackendError, ConfigError, RolloutError
from cookbook.losses import DPO
from cookbook.types import AdamParams, SamplingParams

# Some of each kind, in the fast tests; the others are slow tests.
# fmt: off
QUICK = [
    "bloom", "cohere2", "deepseek_v3", "doge", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "gptj",
    "granite", "jamba", "llama", "mamba", "mamba2", "minimax", "mistral", "mixtral", "olmo2", "openai-gpt", "opt", "phi3",
    "phimoe", "qwen2", "qwen3", "qwen3_moe", "recurrent_gemma", "starcoder2",
]
# Those that the other tests go through.
CORE = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2",
    "granite", "cohere", "olmo2", "smollm3", "hyperclovax", "opt", "gpt_oss", "qwen3_5_text", "recurrent_gemma", "mamba",
]
# fmt: on


def some(names, quick):
    """All ``names``; those that are not ``quick`` are slow tests."""
    params = [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("family", params)


CORE_SOME = some(CORE, ("qwen3", "gemma2", "gpt2", "qwen3_5_text", "mamba"))


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
    requests = [Request(prompt, 2, params, seed=0) for prompt in prompts]
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
    found = sample(model, [Request([5, 6, 7], 2, SamplingParams(max_tokens=4, stop=[]), seed=0)], 0, 1000)
    assert all(len(one.tokens) == 4 for one in found[0])
    assert model.network.config._attn_implementation == "sdpa"
    told = [record.getMessage() for record in caplog.records]
    of_sampling = [line for line in told if line.startswith("sampling: ")]
    assert of_sampling == [line for line in of_sampling if "Qwen3ForCausalLM (qwen3) computes every sequence again" in line]
    assert len(of_sampling) == 1 and "its forward pass returns no states" in of_sampling[0]
    assert sum("sequences are padded: " in line and "Qwen3ForCausalLM" in line for line in told) == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_to_decode_gives_the_same_samples(way):
    """Rows of several lengths, more than the budget holds at once, that end at different times."""
    model = language_model("qwen3")
    requests = [
        Request(list(range(3, 3 + length)), 2, SamplingParams(max_tokens=limit, stop=[]), seed=length)
        for length, limit in ((4, 9), (4, 3), (7, 5), (2, 20))
    ]
    expected = sample(model, requests, 0, 10_000)
    found = probe.decode(model, requests, 0, 60, way=way)
    for one, other in zip(found, expected, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        for each, same in zip(one, other, strict=True):
            np.testing.assert_allclose(each.logprobs, same.logprobs, atol=2e-5)


def test_weights_that_are_broken_are_no_reason_to_give_up_a_fast_path():
    model = language_model("qwen3")
    with torch.no_grad():
        model.network.model.norm.weight[0] = float("nan")
    with pytest.raises(RolloutError, match="logits are not finite"):
        model.way_to_decode(10)


def test_a_mask_of_the_models_own_making_is_not_packed_away(caplog):
    """Doge scores its keys by a mask that it learns: the gradient of that was lost in packed rows."""
    model = language_model("doge")
    assert not model.layouts.packed
    assert "mask of its own making" in model.layouts.reason
    assert model.network.config._attn_implementation != NAME


# ---- what cannot be had is one line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["flash_attention_2", "flash_attention_3", "nonsense"])
def test_an_attention_that_is_not_there_is_one_line(tiny_folder, asked):
    with pytest.raises(ConfigError, match=rf"^model\.attn_implementation: .*got {asked}; set it to auto") as raised:
        load(ModelConfig(str(tiny_folder), attn_implementation=asked), torch.device("cpu"), 0)
    assert "\n" not in str(raised.value)


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
    assert len(told) == 1 and "Qwen3MoeForCausalLM (qwen3_moe) multiplies one expert after the other" in told[0]
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


def test_copies_know_what_was_tried(caplog):
    """A sampler of its own weights tries nothing again, and says nothing again."""
    caplog.set_level("INFO", logger="cookbook")
    model = language_model("mamba")
    model.way_to_decode(10)
    caplog.clear()
    assert copy.copy(model).way_to_decode(10).name == "own states"
    assert not caplog.records
