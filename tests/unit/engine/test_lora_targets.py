"""Weights that get a LoRA adapter: experts, no routers; the share that a run says; checkpoints that PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import tiny
from marks import rest_slow
from scoring import largest, logprobs

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import sampler_checkpoints
from cookbook.engine.lora_targets import TrainedShare, expert_parameters
from cookbook.engine.model import ModelConfig, add_lora
from cookbook.errors import ConfigError
from cookbook.types import AdamParams

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
# Family -> layers with an adapter. PEFT's own all-linear leaves out the experts of gpt-oss and the shared experts of DeepSeek,
# and adapts the routers of Qwen3-MoE, Mixtral, JetMoE and DBRX.
LAYERS = {
    "gpt_oss": ATTENTION | EXPERTS,
    "qwen3_moe": ATTENTION | EXPERTS,
    "mixtral": ATTENTION | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS | DENSE,
    "llama4_text": ATTENTION | EXPERTS | DENSE,
    "qwen2_moe": ATTENTION | EXPERTS | DENSE,
    "phimoe": ATTENTION | EXPERTS,
    "jetmoe": {"kv_proj", "input_linear", "output_linear"},
    "dbrx": {"Wqkv", "out_proj"},
    "qwen3": ATTENTION | DENSE,
}


@pytest.mark.parametrize("family", rest_slow(LAYERS, fast=2))
def test_all_linear_is_every_matrix_but_routers(family: str) -> None:
    network = add_lora(families.network(family), ModelConfig("x", lora_rank=2), seed=0)
    share = TrainedShare.of(network)
    assert set(share.layers) == LAYERS[family]
    assert share.trained == sum(one.numel() for one in network.parameters() if one.requires_grad)
    assert share.base == sum(one.numel() for name, one in network.named_parameters() if ".lora_" not in name)
    assert "unchanged: " in share.text and f"the model's {share.base:,}" in share.text


def test_names_may_be_those_of_parameters() -> None:
    model = ModelConfig("x", lora_rank=2, lora_target_modules=["q_proj", "experts.down_proj", "router.weight"])
    assert TrainedShare.of(add_lora(families.network("gpt_oss"), model, seed=0)).layers == (
        "experts.down_proj",
        "q_proj",
        "router",
    )
    with pytest.raises(ConfigError, match=r"model.lora_dropout: adapters on .*experts.down_proj.* have no dropout, got 0.1"):
        add_lora(families.network("gpt_oss"), ModelConfig("x", lora_rank=2, lora_dropout=0.1), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_an_adapter_on_experts_loads_in_peft_continues_and_merges(family: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base, data = tmp_path / "base", tiny.datums(4)
    families.network(family).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model, config = ModelConfig(str(base), lora_rank=2), LocalConfig(all_logprobs=True)
    trainer = LocalTrainer(model, config, seed=0, folder=tmp_path / "run")
    before = logprobs(trainer, data)
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    own, saved = logprobs(trainer, data), trainer.save_state("state").result().path
    assert largest(own, before) > 0.5
    assert "router" not in json.dumps(json.loads((Path(saved) / "adapter_config.json").read_text())["target_parameters"])
    assert largest(own, tiny.plain_logprobs(AutoPeftModelForCausalLM.from_pretrained(saved).eval(), data)) < 3e-5
    continued = LocalTrainer(ModelConfig(saved), config, seed=1, folder=tmp_path / "continued")
    assert largest(own, logprobs(continued, data)) == 0
    resumed = LocalTrainer(model, config, seed=0, folder=tmp_path / "resumed")
    resumed.load_state(saved).result()
    assert largest(own, logprobs(resumed, data)) == 0
    sampler_checkpoints.export(Path(saved), tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert largest(own, tiny.plain_logprobs(merged, data)) < 3e-5


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in ("xlstm",)])
def test_an_adapter_on_experts_has_the_gradient_of_the_models_own_code(family: str, tmp_path: Path) -> None:
    network = families.network(family)
    if not any(expert_parameters(network)):
        pytest.skip("the family stores no experts as one parameter")
    network.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert families.check(families.loaded(tmp_path, 2, "float32")).failed(families.FAMILIES[family]) == []
