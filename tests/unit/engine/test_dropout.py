"""The model's dropout: off in preference and RL training, and set by ``model.dropout`` for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from marks import rest_slow
from runtools import here, rows, train  # noqa: F401 - here is a fixture

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.dropout import set_dropout
from cookbook.engine.model import ModelConfig, load
from cookbook.errors import ConfigError

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = {**HEADS, "intermediate_size": 48}
BOTH = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PDROP = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
# Families by the place of their probabilities: modules, numbers of modules, and, for Falcon and Persimmon, the configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT, "n_positions": tiny.CONTEXT},
    "falcon": {**HEADS, **BOTH, "parallel_attn": False, "new_decoder_architecture": False},
    "opt": {**HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.2},
    "phi": {**DENSE, **PDROP, "attention_dropout": 0.1},
    "phi3": {**DENSE, **PDROP, "num_key_value_heads": 2, "attention_dropout": 0.1, "pad_token_id": 0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, **BOTH},
    "gpt_neox": {**DENSE, **BOTH},
    "gptj": {**GPT, **PDROP, "attn_pdrop": 0.1, "rotary_dim": 8},
    "gpt_bigcode": GPT,
    "persimmon": {**DENSE, **BOTH},
    "stablelm": {**DENSE, **BOTH, "num_key_value_heads": 2},
    "llama": {**DENSE, "attention_dropout": 0.1},
    "biogpt": {**DENSE, "layerdrop": 0.3},
    "mixtral": {
        **DENSE,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "router_jitter_noise": 0.1,
        "attention_dropout": 0.1,
    },
}


def gpt2(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tiny.VOCABULARY, n_positions=256, bos_token_id=None, eos_token_id=0, **GPT, **changes
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tiny.byte_tokenizer(256).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", rest_slow(FAMILIES, fast=2))
def test_every_dropout_of_a_family_is_set(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, vocab_size=tiny.VOCABULARY, **FAMILIES[family])
    network = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, tiny.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))

    def logits(training: bool) -> torch.Tensor:
        return network.train(training)(ids, use_cache=False).logits

    assert not torch.equal(logits(True), logits(True))
    stated = config.to_dict()
    set_dropout(network, 0.0)
    assert torch.equal(logits(True), logits(False))
    set_dropout(network, 0.3)
    assert not torch.equal(logits(True), logits(True))
    # A checkpoint keeps the model's own probabilities.
    assert network.config.to_dict() == stated


def test_a_model_without_dropout_refuses_a_probability() -> None:
    config = transformers.MambaConfig(vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=8)
    with pytest.raises(ConfigError, match=r"model.dropout: MambaForCausalLM has no dropout, got 0.1; remove the key"):
        set_dropout(transformers.AutoModelForCausalLM.from_config(config), 0.1)
    with pytest.raises(ConfigError, match=r"model.dropout must be at least 0 and below 1, or null, got 1.5"):
        ModelConfig("x", dropout=1.5)


def test_training_uses_the_dropout_that_is_set(tmp_path: Path) -> None:
    folder, data = str(gpt2(tmp_path / "gpt2")), tiny.datums(4)
    losses = {}
    for dropout in (None, 0.0, 0.5):
        trainer = LocalTrainer(ModelConfig(folder, dropout=dropout), LocalConfig(), seed=0, folder=tmp_path / str(dropout))
        plain = trainer.forward(data, "cross_entropy").result().metrics["loss"]
        losses[dropout] = trainer.forward_backward(data, "cross_entropy").result().metrics["loss"] - plain
        assert trainer.engine.passes.has_dropout == (dropout != 0.0)
        trainer.close()
    assert abs(losses[0.0]) < 1e-4 < 0.01 < abs(losses[0.5]) and losses[None] not in (losses[0.0], losses[0.5])


def test_a_continued_adapter_has_the_dropout_of_the_run(tmp_path: Path) -> None:
    model = ModelConfig(str(tiny.save(tmp_path / "base")), lora_rank=2, lora_dropout=0.4)
    trainer = LocalTrainer(model, LocalConfig(), seed=0, folder=tmp_path / "saved")
    folder = trainer.save_weights_for_sampler_ext("adapter").result().path
    trainer.close()
    for dropout, expected in ((None, 0.4), (0.0, 0.0)):
        loaded = load(ModelConfig(folder, dropout=dropout), torch.device("cpu"), seed=0)
        found = {module.p for module in loaded.network.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0}
        assert found == ({expected} - {0.0}) and loaded.config.lora_dropout == expected


@pytest.mark.slow
def test_preferences_and_rl_train_without_dropout(here: Path) -> None:  # noqa: F811
    """DPO at a learning rate of 0 has a loss of log 2, and the first ratios of GRPO are 1."""
    model = f"model={gpt2(here / 'gpt2')}"
    short = [model, "optim.lr=0", "data.limit=8", "eval.limit=2", "eval.max_tokens=4", "recipe.steps=2", "eval.every=null"]
    assert train("recipe=dpo", "data=arithmetic_pairs", "recipe.batch_size=4", "out=dpo", *short) == 0
    assert [row["loss"] for row in rows("dpo") if "loss" in row] == pytest.approx([0.693147] * 2, abs=1e-5)
    words = [
        "recipe=grpo",
        "data=arithmetic",
        "recipe.prompts_per_step=2",
        "recipe.group_size=2",
        "rollout.max_tokens=8",
        *short,
    ]
    # The rewards of an untrained model are equal without this.
    Path("reward.py").write_text("def length(completion, row):\n    return float(sum(map(ord, completion)) % 7)\n")
    assert train(*words, "reward=reward.py:length", "out=grpo") == 0
    ratios = [row["loss/ratio_mean"] for row in rows("grpo") if "loss/ratio_mean" in row]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4) and ratios
    assert train("recipe=dpo", "data=arithmetic_pairs", "recipe.batch_size=4", "out=on", "model.dropout=0.1", *short) == 0
    assert rows("on")[1]["loss"] != pytest.approx(0.693147, abs=1e-4)


@pytest.mark.slow
def test_a_run_on_a_server_has_the_dropout_of_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps the model's own dropout for clients that state none, such as Tinker's."""
    pytest.importorskip("tinker")
    import servertools

    from cookbook.backends.remote.config import RemoteConfig

    monkeypatch.setenv("TINKER_API_KEY", servertools.KEY)
    folder, data = gpt2(tmp_path / "gpt2"), tiny.datums(4)
    with servertools.running(folder, tmp_path / "server", names=["gpt2"]) as server:
        for dropout in (None, 0.0):
            trainer = RemoteConfig(server.url, patience_s=30.0).make_trainer(
                ModelConfig(str(folder), dropout=dropout, lora_rank=2), seed=0, folder=tmp_path / str(dropout)
            )
            plain = trainer.forward(data, "cross_entropy").result().metrics["loss"]
            [run] = server.service.runs.values()
            assert run.trainer.engine.model.config.dropout == dropout
            assert run.trainer.engine.passes.has_dropout == (dropout is None)
            trained = trainer.forward_backward(data, "cross_entropy").result().metrics["loss"]
            assert (abs(trained - plain) < 1e-4) == (dropout == 0.0)
            trainer.close()
            servertools.wait_until(lambda: not server.service.runs)
