"""A last layer that computes scored tokens alone changes only the amount of work, for every family."""

from __future__ import annotations

import copy
import dataclasses

import families
import numpy as np
import pytest
import tiny
import torch
from families import CORE
from torch import nn

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.layers import trimmable_parts
from cookbook.engine.layers.fused import only_rows
from cookbook.losses import DPO, CrossEntropy
from cookbook.types import Datum, ModelInput

# What is left out of the last layer, besides keys and values; where queries, keys and values are one product, not the queries.
FUSED_PROJECTIONS = {"phi3", "gpt_neox", "gpt2"}
PARTS = {name: 2 if name in FUSED_PROJECTIONS else 3 for name in CORE}
PARTS |= {"opt": 2, "recurrent_gemma": 1, "mamba": 0}  # no module for its MLP; no attention that is known; neither
QUICK = {"qwen3", "gpt2", "qwen3_moe"}


def trained(model, data, loss=None, **options):
    """Gradients and what is returned of one call, and how many rows the last layer's parts saw in all its passes."""
    engine = Engine(copy.deepcopy(model), EngineOptions(all_logprobs=False, **options))
    seen: dict[nn.Module, int] = {}

    def count(module, args, _):
        seen[module] = seen.get(module, 0) + args[0].shape[:-1].numel()

    parts = engine.passes.last_layer  # asked for now, so that the hooks do not see the trial
    for part in parts:
        part.register_forward_hook(count)
    out = engine.forward_backward(data, loss or CrossEntropy())
    return tiny.gradients(engine), out, [seen[part] for part in parts]


def double(family):
    model = families.language_model(family)
    model.network.double()
    return model


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CORE])
def test_every_family(family):
    model, data = families.language_model(family), tiny.datums(4)
    scored = sum(np.count_nonzero(datum.loss_fn_inputs["weights"].array) for datum in data)
    gradients, out, rows = trained(model, data)
    whole_gradients, whole_out, whole_rows = trained(model, data, trim_last_layer=False)
    assert rows == [scored] * PARTS[family]
    assert all(row >= sum(datum.model_input.length for datum in data) for row in whole_rows)
    assert tiny.difference(gradients, whole_gradients) < 1e-5
    assert out.metrics.keys() == whole_out.metrics.keys()
    for name, value in whole_out.metrics.items():
        assert out.metrics[name] == pytest.approx(value, rel=1e-5), name
    for found, expected in zip(out.loss_fn_outputs, whole_out.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(found["logprobs"].array, expected["logprobs"].array, atol=families.EXACT)


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("loss", [CrossEntropy, DPO])
def test_to_the_rounding_of_float64(packing, loss):
    model, data = double("qwen3"), tiny.datums(6)
    (found, _, rows), (expected, _, whole) = (
        trained(model, data, loss(), packing=packing, trim_last_layer=on) for on in (True, False)
    )
    assert len(rows) == 3 and all(some < every for some, every in zip(rows, whole, strict=True))
    assert tiny.difference(found, expected) < 1e-12


def test_several_sequences_that_train_their_common_prompt():
    """A token of two sequences is one row: computed once, with the gradients of both."""
    prompt = [7, 3, 9, 4, 8, 2]
    rows = [[*prompt, *rest] for rest in ([5, 6, 1, 4], [10, 12, 11, 3])]
    weights = np.r_[np.zeros(3), np.ones(6)]  # the second half of the prompt is trained, by both
    data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": np.array(row[1:]), "weights": weights}) for row in rows]
    model = double("qwen3")
    found, _, seen = trained(model, data)
    expected, _, _ = trained(model, data, trim_last_layer=False, shared_prompts=False)
    assert seen == [3 + 3 + 3] * 3
    assert tiny.difference(found, expected) < 1e-12


def test_every_token_is_computed_where_every_token_is_asked_for():
    model, data = families.language_model("qwen3"), tiny.datums(4)
    total = sum(datum.model_input.length for datum in data)
    engine = Engine(model, EngineOptions(all_logprobs=True, packing="packed"))
    seen = []
    engine.passes.last_layer[0].register_forward_hook(lambda _, args, out: seen.append(out.shape[:-1].numel()))
    engine.forward_backward(data, CrossEntropy())
    engine.forward(data)
    assert sum(seen) == 2 * total


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CORE])
def test_activation_checkpointing_changes_no_bit(family):
    """The last layer keeps its activations and skips the same tokens."""
    model, data = families.language_model(family), tiny.datums(4)
    gradients, out, rows = trained(model, data, activation_checkpointing=True)
    expected, expected_out, expected_rows = trained(model, data)
    assert rows == expected_rows
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    assert out.metrics == expected_out.metrics


def test_a_network_that_computed_its_layers_again_keeps_them_now():
    """As the copies of a base model that was found too large to be trained whole, and fits under an adapter."""
    model, data = double("qwen3"), tiny.datums(4)
    expected, _, _ = trained(model, data)
    Engine(model, EngineOptions(activation_checkpointing=True))
    found, _, rows = trained(model, data)
    assert rows == [sum(np.count_nonzero(datum.loss_fn_inputs["weights"].array) for datum in data)] * 3
    assert tiny.difference(found, expected) < 1e-12


def adapted(**options):
    from peft import LoraConfig, get_peft_model

    model = double("qwen3")
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options)
    model.network = get_peft_model(model.network, lora).double()
    return model


def test_under_an_adapter():
    model, data = adapted(), tiny.datums(6)
    (found, _, rows), (expected, _, whole) = (trained(model, data, DPO(), trim_last_layer=on) for on in (True, False))
    assert len(rows) == 3 and rows[0] < whole[0]
    assert tiny.difference(found, expected) < 1e-12


def test_what_draws_at_random_draws_the_same():
    model, data = adapted(lora_dropout=0.4), tiny.datums(6)
    found, expected = (trained(model, data, trim_last_layer=on)[0] for on in (True, False))
    assert tiny.difference(found, expected) == 0


def test_a_loss_about_the_routing_of_all_tokens():
    model, data = families.language_model("qwen3_moe"), tiny.datums(4)
    model.config = dataclasses.replace(model.config, router_aux_loss_coef=0.5)
    (found, out, rows), (expected, whole_out, whole) = (trained(model, data, trim_last_layer=on) for on in (True, False))
    assert rows == whole
    assert out.metrics["loss/router"] == whole_out.metrics["loss/router"]
    assert tiny.difference(found, expected) < 1e-6


@pytest.mark.parametrize("retain_bytes", [0, 1 << 30])
def test_passes_that_wait_for_a_gradient(retain_bytes):
    model, data = double("qwen3"), tiny.datums(8)
    options = {"micro_batch_tokens": 40, "retain_bytes": retain_bytes}
    found, expected = (trained(model, data, DPO(), trim_last_layer=on, **options)[0] for on in (True, False))
    assert tiny.difference(found, expected) < 1e-12


def test_a_call_leaves_no_hook_behind_when_it_fails():
    model = families.language_model("qwen3")
    last = trimmable_parts(model)
    with pytest.raises(RuntimeError, match="fails"), only_rows(last, torch.tensor([1])):
        raise RuntimeError("fails")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in last)


class ReadsItsNeighbor(nn.Module):
    """An MLP in which every token also reads the token before it, as in RWKV: always, or in training only."""

    def __init__(self, own: nn.Module, *, always: bool) -> None:
        super().__init__()
        self.own, self.always = own, always

    def forward(self, x):
        return self.own(x + 0.05 * x.roll(1, dims=1) if self.always or self.training else x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("always", [True, False])
def test_a_part_that_reads_other_tokens_is_left_alone(always, dtype):
    model = families.language_model("qwen3")
    layer = model.network.to(dtype).model.layers[-1]
    assert len(trimmable_parts(model)) == 3
    layer.mlp = ReadsItsNeighbor(layer.mlp, always=always)
    assert trimmable_parts(model) == []


class Particular(nn.Module):
    def forward(self, x):
        raise AssertionError("only from where I am used to")


def test_a_model_that_cannot_be_tried_is_left_alone():
    model = families.language_model("qwen3")
    model.network.model.layers[-1].mlp = Particular()
    assert trimmable_parts(model) == []


def test_a_model_that_reads_its_last_layer_elsewhere_is_left_alone():
    model = families.language_model("qwen3")
    norm = model.network.model.norm
    norm.register_forward_pre_hook(lambda _, args: (args[0] + args[0].cumsum(1),))
    assert trimmable_parts(model) == []
