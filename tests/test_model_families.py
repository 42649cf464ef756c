"""Architectures of the Hugging Face zoo, tiny and random: the head's logprobs are those of the model's own logits, packing and
sampling do what a plain forward pass does or are not done, and checkpoints load again."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
import torch

from cookbook.checkpoints import store
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig
from cookbook.engine.sampler import Request, sample
from cookbook.errors import RolloutError
from cookbook.losses import DPO
from cookbook.types import AdamParams, SamplingParams

SHAPE = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": tiny.CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LINEAR = {f"linear_{name}": 2 if name.startswith("num") else 8 for name in (
    "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
)}  # fmt: skip
PACKS = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Mistral": {"sliding_window": 6},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": {"sliding_window": 6, "final_logit_softcapping": 3.0},
    "Gemma3Text": {"sliding_window": 6},
    "Phi3": {},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": tiny.CONTEXT, **NO_DROPOUT},
    "Granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "Cohere": {"logit_scale": 0.25},
    "Olmo2": {},
    "SmolLM3": {},
    "HyperCLOVAX": {"logits_scaling": 3.0},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "GptOss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 6, "rope_parameters": {"rope_type": "default"}},
}
# Their layers carry a state along the row.
DOES_NOT_PACK = {
    "Qwen3_5Text": {**LINEAR, "num_hidden_layers": 4},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "logits_soft_cap": 3.0},
    "Mamba": {"state_size": 4},
}
CANNOT_BE_SAMPLED = {"RecurrentGemma", "Mamba"}  # they keep their state where the sampler cannot follow
FAMILIES = {**PACKS, **DOES_NOT_PACK}
QUICK = ("Qwen3", "Gemma2", "GPT2", "Qwen3_5Text", "Mamba")  # of each kind one; the others beside the slow tests
MORE = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES], indirect=True
)
EXACT = 2e-5  # float32 logprobs of size 10, summed in another order


def language_model(family: str) -> LanguageModel:
    import transformers

    config_class = getattr(transformers, f"{family}Config", None)
    if config_class is None:
        pytest.skip(f"this transformers has no {family}")
    config = config_class(**{**SHAPE, **FAMILIES[family]})
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in network.parameters():  # fresh weights predict nothing in particular; these do
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return LanguageModel(network.eval(), tiny.tokenizer(), ModelConfig(family), torch.device("cpu"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return language_model(family)


def logprobs(engine, data):
    return [row["logprobs"].array for row in engine.forward(data).loss_fn_outputs]


def test_logprobs_are_those_of_the_models_own_logits(family, model):
    data = tiny.datums(4)
    with torch.no_grad():
        expected = tiny.plain_logprobs(model.network, data)
    for packing in ("padded", "auto"):
        engine = Engine(model, EngineOptions(packing=packing))
        assert engine.passes.head.finish is not None  # recognized: the logits of a batch never exist at once
        for found, own in zip(logprobs(engine, data), expected, strict=True):
            np.testing.assert_allclose(found, own.numpy(), atol=EXACT)
    assert model.layouts.packed == model.layouts.shared == (family in PACKS)


def test_gradients_are_those_of_plain_autograd(model):
    data = tiny.datums(4)
    engine = Engine(model, EngineOptions())
    expected = tiny.plain_gradients(model.network, data, DPO())
    engine.forward_backward(data, DPO())
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-4
    engine.discard_gradient()


@MORE
def test_greedy_samples_are_those_of_generate(family, model):
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3, 1, 4, 1, 5, 9]]
    params = SamplingParams(max_tokens=9, temperature=0.0, stop=[])
    requests = [Request(prompt, 2, params, seed=0) for prompt in prompts]
    if family in CANNOT_BE_SAMPLED:
        with pytest.raises(RolloutError, match="keeps its cache where this sampler cannot follow"):
            sample(model, requests, 0, 10_000)
        return
    model.network.generation_config.eos_token_id = None
    for prompt, found in zip(prompts, sample(model, requests, 0, 10_000), strict=True):
        expected = model.network.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert [one.tokens for one in found] == [expected[0, len(prompt) :].tolist()] * 2


@MORE
def test_under_an_adapter_too(family):
    from peft import LoraConfig, get_peft_model

    if family == "Mamba":
        pytest.skip("PEFT has no LoRA for all of its layers")
    model = copy.copy(language_model(family))
    model.network = get_peft_model(model.network, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    engine = Engine(model, EngineOptions())
    assert engine.passes.head.finish is not None
    data = tiny.datums(2)
    expected = tiny.plain_gradients(model.network, data, DPO())
    engine.forward_backward(data, DPO())
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-4


@MORE
def test_checkpoints_load_again(model, family, tmp_path):
    """transformers keeps some families in memory under other names than on disk."""
    engine = Engine(copy.deepcopy(model), EngineOptions())
    data = tiny.datums(2)
    engine.forward_backward(data, DPO())
    engine.optim_step(AdamParams(learning_rate=1e-2), None)
    saved, expected = store.save(engine, tmp_path / "one", state=True), logprobs(engine, data)
    fresh = Engine(language_model(family), EngineOptions())
    store.load(fresh, tmp_path / "one", optimizer=True)
    assert saved.step == fresh.step == 1
    assert all(np.array_equal(a, b) for a, b in zip(logprobs(fresh, data), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(fresh), tiny.weights(engine), strict=True))
