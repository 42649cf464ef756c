"""The load-balancing loss of mixtures of experts equals transformers' own on one batch, and does not depend on its cut."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig
from cookbook.errors import ConfigError
from cookbook.losses import DPO, CrossEntropy, ImportanceSampling
from cookbook.types import Datum, ModelInput

COEFFICIENT = 0.5
FAMILIES = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(family="Qwen3Moe", coefficient: float | None = COEFFICIENT, config=None, **options) -> Engine:
    import transformers

    shape = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": tiny.CONTEXT,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**shape, **FAMILIES.get(family, {}), **(config or {}))
    # Float64, which the grouped matrix product of the default does not know.
    network = transformers.AutoModelForCausalLM.from_config(made, experts_implementation="eager").double()
    model = LanguageModel(network, None, ModelConfig("x", router_aux_loss_coef=coefficient), torch.device("cpu"))
    return Engine(model, EngineOptions(**options))


def same_length(count=3, length=12):
    """Datums whose batch needs no padding, so that transformers' forward over it sees the same tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, tiny.VOCABULARY, (count, length + 1))
    return [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:], "weights": np.ones(length)}) for row in tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradient_are_those_of_transformers(family):
    engine, data = make(family), same_length()
    ids = torch.tensor([datum.model_input.to_ints() for datum in data])
    targets = torch.tensor(np.stack([datum.loss_fn_inputs["target_tokens"].array for datum in data]))
    out = engine.model.network(input_ids=ids, output_router_logits=True)
    nll = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    value = nll + COEFFICIENT * out.aux_loss
    expected = torch.autograd.grad(value, [parameter for _, parameter in engine.model.trainable()], allow_unused=True)
    loss = CrossEntropy()
    metrics = engine.forward_backward(loss.prepare(data), loss).metrics
    assert metrics["loss/router"] == pytest.approx(out.aux_loss.item(), rel=1e-6)  # transformers counts in float32
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-6)
    found = tiny.gradients(engine)
    wanted = [torch.zeros_like(one) if other is None else other for one, other in zip(found, expected, strict=True)]
    assert tiny.difference(found, wanted) < 1e-6


@pytest.mark.parametrize("loss", [CrossEntropy(), DPO(), ImportanceSampling()], ids=lambda loss: loss.name)
def test_the_gradient_does_not_depend_on_the_cut(loss):
    data = loss.prepare(tiny.datums(6))
    found = []
    for options in ({}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 40, "retain_bytes": 0, "packing": "packed"}):
        engine = make(**options)
        metrics = engine.forward_backward(data, loss).metrics
        found.append((tiny.gradients(engine), metrics["loss"], metrics["loss/router"]))
    for gradients, value, router in found[1:]:
        assert tiny.difference(gradients, found[0][0]) < 1e-10
        assert (value, router) == pytest.approx(found[0][1:], rel=1e-10)
    assert engine.passes.count == 5  # three passes, of which two are computed twice


def test_its_weight_is_relative_to_the_main_loss():
    """If the main loss is a sum over n tokens, the router loss counts n times; divided by n, its weight is the coefficient."""
    data, gradients = tiny.datums(4), []
    for coefficient in (COEFFICIENT, 0.0):
        engine = make(coefficient=coefficient)
        engine.forward_backward(data, ImportanceSampling())
        gradients.append(tiny.gradients(engine))
    summed = [one - other for one, other in zip(*gradients, strict=True)]
    engine = make(coefficient=COEFFICIENT)
    loss = CrossEntropy()
    engine.forward_backward(loss.prepare(data), loss)
    alone = make(coefficient=0.0)
    alone.forward_backward(loss.prepare(data), loss)
    mean = [one - other for one, other in zip(tiny.gradients(engine), tiny.gradients(alone), strict=True)]
    tokens = sum(int((datum.loss_fn_inputs["weights"].array != 0).sum()) for datum in data)
    # The router computes in float32, and both sides are small differences of large gradients: three digits are lost.
    assert tiny.difference(summed, [tokens * one for one in mean]) < 1e-4


def test_the_model_decides_unless_the_user_does():
    assert make(coefficient=None).router_coefficient == 0.0
    asking = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert make(coefficient=None, config=asking).router_coefficient == 0.02
    assert make(coefficient=0.0, config=asking).router_coefficient == 0.0
    with pytest.raises(ConfigError, match="router_aux_loss_coef: LlamaForCausalLM has no load-balancing loss"):
        make("Llama", coefficient=0.1)
    with pytest.raises(ConfigError, match="must be >= 0"):
        ModelConfig("x", router_aux_loss_coef=-1.0)
