"""Datums sampled at a temperature are scored at that temperature; entropies have a gradient where a loss asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.head import output_head
from cookbook.errors import DataError
from cookbook.losses import GRPO
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import SamplingParams

TEMPERATURES = [0.5, None, 2.0, 0.7, None, 1.3]  # None: the datum carries no temperature


def heated():
    """Datums of six temperatures."""
    pairs = zip(tiny.datums(6), TEMPERATURES, strict=True)
    return [datum if t is None else datum.with_inputs(temperature=np.array(t)) for datum, t in pairs]


def plain(network, data):
    """Per datum logprobs and entropies from the model's own logits over the temperature, with graph."""
    logprobs, entropies = [], []
    for row in data:
        logits = network(input_ids=torch.tensor([row.model_input.to_ints()]), use_cache=False).logits[0]
        divisor = row.loss_fn_inputs["temperature"].array if "temperature" in row.loss_fn_inputs else 1.0
        scaled = (logits / float(divisor)).log_softmax(-1)
        logprobs.append(scaled.gather(-1, row.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0])
        entropies.append(-(scaled.exp() * scaled).sum(-1))
    return logprobs, entropies


@pytest.mark.parametrize("chunk_rows", [3, 10_000])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_logprobs_and_gradients_are_those_of_scaled_logits(make_engine, monkeypatch, coefficient, chunk_rows):
    monkeypatch.setattr(output_head, "CHUNK_BYTES", chunk_rows * 4 * tiny.VOCABULARY)
    data, loss = heated(), GRPO(kl_beta=0.05, entropy_coef=coefficient)
    engine = make_engine(dtype="float64", micro_batch_tokens=40)
    logprobs, entropies = plain(engine.model.network, data)
    value, _ = loss(data, logprobs, entropies)
    expected = torch.autograd.grad(value, [parameter for _, parameter in engine.model.trainable()])
    output = engine.forward_backward(data, loss)
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-12
    assert output.metrics["loss"] == pytest.approx(value.item(), rel=1e-12)
    for row, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_allclose(row["logprobs"].to_numpy(), wanted.detach().numpy(), rtol=1e-6)
    assert engine.forward(data, loss).metrics["loss"] == pytest.approx(value.item(), rel=1e-12)


def test_the_entropy_bonus_is_coefficient_times_entropy():
    data = tiny.datums(3)
    rng = np.random.default_rng(0)
    rows = [row.model_input.length for row in data]
    logprobs = [torch.from_numpy(-rng.uniform(1, 5, length)) for length in rows]
    entropies = [torch.from_numpy(rng.uniform(0, 5, length)) for length in rows]
    with_bonus, without = (GRPO(entropy_coef=c, length_divisor=2.0)(data, logprobs, entropies)[0] for c in (0.25, 0.0))
    weights = [row.loss_fn_inputs["weights"].to_torch() for row in data]
    expected = sum(float((weight * entropy).sum()) for weight, entropy in zip(weights, entropies, strict=True)) * 0.25 / 2
    assert float(without - with_bonus) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(DataError, match="needs entropies got none"):
        GRPO(entropy_coef=0.25)(data, logprobs)


def test_tokens_that_only_the_bonus_moves_count(make_engine):
    data = [row.with_inputs(advantages=np.zeros(row.model_input.length)) for row in tiny.datums(4)]
    trained = sum(int((row.loss_fn_inputs["weights"].array != 0).sum()) for row in data)
    engine = make_engine()
    engine.forward_backward(data, GRPO(kl_beta=0.0, entropy_coef=0.1))
    assert engine.counts.num_loss_tokens == trained


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_on_policy_rollouts_have_a_ratio_of_one_at_any_temperature(make_engine, temperature):
    """The sampler's logprobs, computed with its cache and at its temperature, equal the trainer's."""
    engine = make_engine()
    prompt = list(range(65, 75))
    requests = [SampleRequest(prompt, 4, SamplingParams(max_tokens=8, temperature=temperature, stop=[]), seed=3)]
    samples = sample(engine.model, requests, 0, 10_000)[0]
    data = [Trajectory.single(prompt, "", drawn, "").datums(1.0, temperature)[0] for drawn in samples]
    metrics = engine.forward_backward(data, GRPO(kl_beta=0.0)).metrics
    assert metrics["loss/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["kl/sampler_trainer_k3"]) < 1e-9


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_a_temperature_is_one_positive_number(make_engine, bad):
    data = [tiny.datums(1)[0].with_inputs(temperature=np.array(bad))] if not isinstance(bad, list) else None
    if data is None:
        row = tiny.datums(1)[0]
        data = [row.with_inputs(temperature=np.ones(row.model_input.length))]
    with pytest.raises(DataError, match="datum 0: temperature must be one number > 0"):
        make_engine().forward(data)
