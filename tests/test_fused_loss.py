"""LinearCrossEntropyLoss as anybody's trainer would use it, against transformers' own loss."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from cookbook.engine.fused_loss import FusedOutputLoss, LinearCrossEntropyLoss, hidden_states_of
from cookbook.engine.linear_logprobs import implementations
from cookbook.errors import ConfigError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.fixture(params=["untied", "tied and capped"])
def model(request):
    torch.manual_seed(0)
    if request.param == "untied":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).double()
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=2.0, tie_word_embeddings=True)).double()


@pytest.fixture
def batch():
    tokens = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :4] = -100
    labels[1, 7:] = -100
    return tokens, labels


def fused(model, **options) -> LinearCrossEntropyLoss:
    capping = getattr(model.config, "final_logit_softcapping", None)
    return LinearCrossEntropyLoss(model.get_output_embeddings(), softcap=capping, **options)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_it_is_transformers_own_loss(model, batch, chunk_size):
    tokens, labels = batch
    mine = fused(model, chunk_size=chunk_size)(model.model(tokens), labels)
    mine.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    theirs = model(tokens, labels=labels).loss
    theirs.backward()
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)  # transformers computes its loss in float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_logits_for_inference_are_the_models(model, batch):
    tokens, _ = batch
    assert torch.allclose(fused(model).forward_logits(model.model(tokens)), model(tokens).logits, atol=1e-12)


def test_the_weight_is_read_at_call_time(model, batch):
    tokens, labels = batch
    loss = fused(model)
    before = loss(model.model(tokens), labels)
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight * 2)
    assert loss(model.model(tokens), labels) != before


def test_a_bias_belongs_to_the_layer():
    layer = torch.nn.Linear(4, 9)
    hidden, labels = torch.randn(2, 5, 4), torch.randint(0, 9, (2, 5))
    loss = LinearCrossEntropyLoss(layer)(hidden, labels)
    logits = layer(hidden)[:, :-1].reshape(-1, 9)
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)))


def test_nothing_to_learn_is_a_zero_with_a_graph():
    layer = torch.nn.Linear(4, 9)
    loss = LinearCrossEntropyLoss(layer)(torch.randn(2, 5, 4), torch.full((2, 5), -100))
    loss.backward()
    assert loss == 0
    assert not layer.weight.grad.any()


HIDDEN = torch.randn(2, 5, 4)


@pytest.mark.parametrize(
    "output",
    [
        HIDDEN,
        (HIDDEN, None),
        SimpleNamespace(last_hidden_state=HIDDEN, hidden_states=None),
        SimpleNamespace(logits=torch.zeros(1), hidden_states=(torch.zeros(1), HIDDEN)),
        (SimpleNamespace(last_hidden_state=HIDDEN), None),
    ],
)
def test_whatever_holds_hidden_states(output):
    assert hidden_states_of(output) is HIDDEN


@pytest.mark.parametrize("output", [[1.0], None, (), SimpleNamespace(logits=HIDDEN), {"a": 1}])
def test_anything_else_is_an_error_naming_its_type(output):
    with pytest.raises(ValueError, match=f"got a {type(output).__name__}"):
        hidden_states_of(output)


def test_labels_must_match():
    with pytest.raises(ConfigError, match=r"hidden states' shape \(2, 5\), got \(2, 4\)"):
        LinearCrossEntropyLoss(torch.nn.Linear(4, 9))(HIDDEN, torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("options", [{"impl": "fast"}, {"chunk_size": 0}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError):
        LinearCrossEntropyLoss(torch.nn.Linear(4, 9), **options)


def test_cce_falls_back_with_one_warning(caplog):
    implementations._cannot.cache_clear()
    layer, labels = torch.nn.Linear(4, 9, bias=False), torch.randint(0, 9, (2, 5))
    with caplog.at_level(logging.WARNING, logger="cookbook"):
        losses = [LinearCrossEntropyLoss(layer, impl="cce")(HIDDEN, labels) for _ in range(2)]
    assert losses[0] == LinearCrossEntropyLoss(layer)(HIDDEN, labels)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_it_satisfies_the_protocol_that_others_may_implement():
    assert isinstance(LinearCrossEntropyLoss(torch.nn.Linear(4, 9)), FusedOutputLoss)
