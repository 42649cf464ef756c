"""``model.add_tokens``: new rows of the embeddings are trained, saved and loaded, in full and under LoRA."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow
from scoring import largest, logprobs

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.remote.connection import ServerInfo
from cookbook.checkpoints import sampler_checkpoints
from cookbook.engine.model import ModelConfig, load
from cookbook.engine.shape import shape_of
from cookbook.errors import ConfigError
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

TOKENS = ["<call>", "</call>"]
FIRST, SECOND = tiny.VOCABULARY, tiny.VOCABULARY + 1


def datums() -> list[Datum]:
    """Sequences with added tokens as inputs and as targets."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(4):
        tokens = rng.integers(0, tiny.VOCABULARY, 20)
        tokens[[3, 9, 15]] = [FIRST, SECOND, FIRST]
        found.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": np.ones(19)}))
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_begin_as_the_mean(tied: bool, tmp_path: Path) -> None:
    folder = str(tiny.save(tmp_path, tie_word_embeddings=tied))
    plain = load(ModelConfig(folder), torch.device("cpu"), seed=0)
    model = load(ModelConfig(folder, add_tokens=TOKENS), torch.device("cpu"), seed=0)
    assert model.vocabulary_size == len(model.tokenizer) == tiny.VOCABULARY + 2
    assert model.tokenizer("a<call>b</call>", add_special_tokens=False)["input_ids"][1::2] == [FIRST, SECOND]
    assert model.tokenizer.decode([FIRST], skip_special_tokens=True) == "<call>"
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(plain.network, name)().weight, getattr(model.network, name)().weight
        assert torch.equal(new[: tiny.VOCABULARY], old) and torch.allclose(new[FIRST:], old.mean(0).expand(2, -1), atol=1e-6)
    shape = shape_of(ModelConfig(folder, lora_rank=2, add_tokens=TOKENS))
    assert shape is not None and shape.vocabulary_size == tiny.VOCABULARY + 2 and shape.trained is not None


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_rows_in_reserve_leaves_the_base_as_it_is(tied: bool, tmp_path: Path) -> None:
    """Qwen's models have more embeddings than their tokenizer has tokens; a merged export compares the base with its files."""
    folder = str(tiny.save(tmp_path / "base", tie_word_embeddings=tied, vocab_size=tiny.VOCABULARY + 5))
    plain = load(ModelConfig(folder), torch.device("cpu"), seed=0)
    config = ModelConfig(folder, lora_rank=2, add_tokens=TOKENS)
    trainer = LocalTrainer(config, LocalConfig(), seed=0, folder=tmp_path / "run")
    saved = Path(trainer.save_state("state").result().path)
    found = load(ModelConfig(str(saved)), torch.device("cpu"), seed=0)
    assert found.vocabulary_size == tiny.VOCABULARY + 5
    old = plain.network.get_input_embeddings().weight
    base = found.network.get_input_embeddings()
    assert torch.equal(base.original_module.weight, old)
    tokens = torch.tensor([[FIRST, SECOND]])
    assert torch.allclose(base(tokens)[0], old[:FIRST].mean(0).expand(2, -1), atol=1e-6)
    sampler_checkpoints.export(saved, tmp_path / "merged", merged=True)
    merged = load(ModelConfig(str(tmp_path / "merged")), torch.device("cpu"), seed=0)
    assert torch.allclose(merged.network(tokens).logits, found.network(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(("tied", "rank"), rest_slow(itertools.product((True, False), (4, 0)), fast=1))
def test_added_tokens_are_trained_saved_and_loaded(tied: bool, rank: int, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    model = ModelConfig(str(tiny.save(tmp_path / "base", tie_word_embeddings=tied)), lora_rank=rank, add_tokens=TOKENS)
    config, data = LocalConfig(all_logprobs=True), datums()
    trainer = LocalTrainer(model, config, seed=0, folder=tmp_path / "run")
    rows = trainer.engine.model.network.get_input_embeddings()(torch.tensor([FIRST, SECOND])).detach().clone()
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    moved = trainer.engine.model.network.get_input_embeddings()(torch.tensor([FIRST, SECOND])).detach() - rows
    assert (moved.abs().max(1).values > 5e-3).all()
    own, saved = logprobs(trainer, data), trainer.save_state("state").result().path
    load_other = AutoPeftModelForCausalLM if rank else AutoModelForCausalLM
    other = load_other.from_pretrained(saved).eval()
    assert largest(own, tiny.plain_logprobs(other, data)) < 1e-5
    for name in ("continued", "again"):
        named = ModelConfig(saved, add_tokens=TOKENS if name == "again" else [])
        assert largest(own, logprobs(LocalTrainer(named, config, seed=1, folder=tmp_path / name), data)) == 0
    resumed = LocalTrainer(model, config, seed=0, folder=tmp_path / "resumed")
    resumed.load_state(saved).result()
    assert largest(own, logprobs(resumed, data)) == 0
    if rank:
        sampler_checkpoints.export(Path(saved), tmp_path / "merged", merged=True)
        deployed = trainer.save_weights_for_sampler_ext("deployed", merged=True).result().path
        for folder in (tmp_path / "merged", Path(deployed)):
            merged = AutoModelForCausalLM.from_pretrained(folder).eval()
            assert largest(own, tiny.plain_logprobs(merged, data)) < 1e-5
        # The merge has not changed the model in training, nor the base under its adapter.
        assert largest(own, logprobs(trainer, data)) == 0
        with trainer.engine.model.network.disable_adapter():
            base = trainer.engine.model.network.get_input_embeddings()(torch.tensor([FIRST, SECOND]))
        assert torch.equal(base, rows)
    prompt = [5, FIRST, 7, SECOND]
    [drawn] = trainer.live_sampler(2).result().sample(prompt, 1, SamplingParams(max_tokens=6, seed=1)).result().sequences
    with torch.no_grad():
        expected = other(input_ids=torch.tensor([prompt + drawn.tokens])).logits[0].log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) - 1 + len(drawn.tokens))
    assert drawn.logprobs == pytest.approx(
        [float(expected[at, token]) for at, token in zip(places, drawn.tokens, strict=True)], abs=1e-5
    )


# Reports of other trackers: transformers 45127 and unsloth 1971 (embedding and head of a tied model, merged), LlamaFactory 8046
# (more or fewer rows than tokens), peft 1554 (an adapter on the embedding, and a tokenizer with more tokens).
RESIZED = {
    "embeddings stored, tied": (True, 0, {}),
    "embeddings stored, untied": (False, 0, {}),
    "both modules stored": (False, 0, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "both modules stored, tied": (True, 0, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "more rows than tokens": (True, 59, {}),
    "fewer rows than tokens": (True, -1, {}),
    "factors of the embedding, not resized": (True, -2, {"target_modules": ["q_proj", "embed_tokens"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESIZED)
def test_an_adapter_of_another_program_on_a_resized_vocabulary(case: str, tmp_path: Path) -> None:
    """PEFT stores the whole embeddings if the vocabulary was resized. Checkpoints of cookbook have to keep them."""
    tied, more, options = RESIZED[case]
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, made = tiny.save(tmp_path / "base", tie_word_embeddings=tied), tmp_path / "made"
    network, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS)
    if more != -2:
        network.resize_token_embeddings(len(tokenizer) + more)
    adapted = get_peft_model(network, LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": "all-linear", **options}))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(made)
    tokenizer.save_pretrained(made)
    data = datums() if more >= 0 else tiny.datums(4)
    expected = [one.detach() for one in tiny.plain_logprobs(adapted.eval(), data)]
    config = LocalConfig(all_logprobs=True)
    trainer = LocalTrainer(ModelConfig(str(made)), config, seed=0, folder=tmp_path / "run")
    assert largest(logprobs(trainer, data), expected) < 1e-5
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    own, saved = logprobs(trainer, data), trainer.save_state("state").result().path
    again = LocalTrainer(ModelConfig(saved), config, seed=0, folder=tmp_path / "again")
    assert largest(own, logprobs(again, data)) < 1e-5
    sampler_checkpoints.export(Path(saved), tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert largest(own, tiny.plain_logprobs(merged, data)) < 2e-5
    trainer.load_state(saved).result()
    assert largest(own, logprobs(trainer, data)) == 0


def test_what_does_not_work_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.add_tokens: a token occurs twice, got \['<a>', '<a>'\]; name each token once"
    ):
        ModelConfig("x", add_tokens=["<a>", "<a>"])
    with pytest.raises(ConfigError, match=r"model.add_tokens: expected a list of texts, got \['']"):
        ModelConfig("x", add_tokens=[""])
    model = ModelConfig(str(tiny.save(tmp_path / "base")), lora_rank=2)
    trainer = LocalTrainer(model, LocalConfig(), seed=0, folder=tmp_path / "run")
    adapter = trainer.save_weights_for_sampler_ext("adapter").result().path
    with pytest.raises(ConfigError, match=r"model.add_tokens: .* holds an adapter without \['<a>'\]; add the tokens when"):
        load(ModelConfig(adapter, add_tokens=["<a>"]), torch.device("cpu"), seed=0)
    server = ServerInfo([], {**vars(ModelConfig("m")), "add_tokens": []}, {}, "", 1, "", 1)
    server.check(ModelConfig("m"), "http://x")
    with pytest.raises(ConfigError, match=r"model.add_tokens: the server at http://x was started with \[\], got \['<a>'\]"):
        server.check(ModelConfig("m", add_tokens=["<a>"]), "http://x")
