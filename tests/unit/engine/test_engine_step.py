"""The optimizer step: division, clipping and refusals; errors that leave the weights unchanged; LoRA and half precision."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow

from cookbook.engine.model import ModelConfig, load
from cookbook.engine.optimizer import GradientBuffer
from cookbook.errors import BackendError, ConfigError, DataError
from cookbook.losses import DPO, CrossEntropy, ImportanceSampling, Loss, Scope
from cookbook.losses.normalization import Normalization, Reduction
from cookbook.types import AdamParams, Datum, ModelInput, datum_from_tokens_weights

SUM = CrossEntropy()  # without its prepare: -sum w logp


def any_sum(data, logprobs):
    """The same, as a function about which the engine knows nothing."""
    return SUM(data, logprobs)


BY_TOKENS, BY_SEQUENCES = Normalization.num_loss_tokens, Normalization.num_sequences


def weighted(*weights, seed=0):
    """A datum a list of weights."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in weights:
        tokens = rng.integers(0, tiny.VOCABULARY, len(row) + 1)
        rows.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": np.array(row, float)}))
    return rows


# ---- what is divided -------------------------------------------------------------------------------------------------

FOUR_OF_SIX = weighted([1, 0, 2], [0, -1, 0.5], [0, 0, 0])  # 9 tokens, 4 with a gradient, in 2 of 3 sequences


@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize(("normalization", "divisor"), [(None, 1), (BY_TOKENS, 4), (BY_SEQUENCES, 2)])
def test_only_what_has_a_gradient_counts(make_engine, normalization, divisor, tokens):
    engine = make_engine(micro_batch_tokens=tokens)
    engine.forward_backward(FOUR_OF_SIX, any_sum)
    norm = float(torch.cat([g.ravel() for g in tiny.gradients(engine)]).norm())
    metrics = engine.optim_step(AdamParams(), normalization).metrics
    assert metrics["optim/divisor"] == divisor
    assert metrics["optim/num_loss_tokens"] == 4
    assert metrics["optim/num_sequences"] == 2
    assert metrics["optim/grad_norm"] == pytest.approx(norm / divisor, rel=1e-6)


@pytest.mark.parametrize("shape", [pytest.param((150_000_000,), marks=pytest.mark.slow), (20_000_000,), (1 << 16, 3), (7,)])
def test_the_norm_is_exact_however_many_numbers_there_are(shape):
    """A float32 sum of squares rounds each time it grows: of 150 million equal numbers the norm was 3% off, of 20, 1%."""
    value = torch.tensor(1e-3)
    parameter = torch.nn.Parameter(torch.full(shape, 1e-3), requires_grad=True)
    parameter.grad = parameter.detach()  # the same memory: 0.6 GB are enough
    small = torch.nn.Parameter(torch.zeros(3, 2))
    small.grad = torch.arange(6.0).view(3, 2).T.contiguous().T * 1e-3
    expected = (parameter.numel() * float(value) ** 2 + float(small.grad.double().square().sum())) ** 0.5
    assert GradientBuffer([parameter, torch.nn.Parameter(torch.zeros(2)), small]).norm() == pytest.approx(expected, rel=1e-7)


def test_the_divisor_counts_everything_since_the_last_step(make_engine):
    engine = make_engine()
    loss = ImportanceSampling()  # it clips nothing: every trained token has a gradient
    data = tiny.datums(6)
    trained = sum(int((datum.loss_fn_inputs["weights"].array != 0).sum()) for datum in data)
    for part in (data[:2], data[2:]):
        engine.forward_backward(part, loss)
    metrics = engine.optim_step(AdamParams(learning_rate=1e-3), BY_TOKENS).metrics
    assert metrics["optim/divisor"] == trained
    at_once = make_engine()
    at_once.forward_backward(data, loss)
    at_once.optim_step(AdamParams(learning_rate=1e-3), BY_TOKENS)
    assert tiny.difference(tiny.weights(engine), tiny.weights(at_once)) < 1e-6
    engine.forward_backward(data[:1], loss)
    assert engine.optim_step(AdamParams(), BY_TOKENS).metrics["optim/divisor"] < trained  # counted again from 0


def test_positions_of_several_targets_count_once(make_engine):
    targets = np.array([[1, 2], [3, 4], [5, 6]])
    weights = np.array([[0.5, 0.5], [0, 0], [0, 1]])
    engine = make_engine()
    engine.forward_backward([Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": targets, "weights": weights})], SUM)
    assert engine.counts.num_loss_tokens == 2


def test_clipping_comes_after_the_division(make_engine):
    """SGD in disguise would show it directly; Adam's first step is the sign, so the moments are looked at."""
    data, clip = tiny.datums(), 0.01
    engine = make_engine(dtype="float64")
    engine.forward_backward(data, any_sum)
    gradient = tiny.gradients(engine)
    norm = float(torch.cat([g.ravel() for g in gradient]).norm())
    divisor = engine.counts.num_loss_tokens
    metrics = engine.optim_step(AdamParams(grad_clip_norm=clip, beta1=0.9), BY_TOKENS).metrics
    assert metrics["optim/grad_norm"] == pytest.approx(norm / divisor, rel=1e-9)  # before clipping, after division
    assert metrics["optim/clipped"] == 1.0
    moments = [engine.optimizer.inner.state[master]["exp_avg"] for master in engine.optimizer.masters]
    expected = [g * (0.1 * clip / norm) for g in gradient]
    assert tiny.difference(moments, expected) < 1e-3  # torch's clipping adds 1e-6 to the norm of 0.01 and more
    engine.forward_backward(data, any_sum)
    assert engine.optim_step(AdamParams(grad_clip_norm=1e9), None).metrics["optim/clipped"] == 0.0


def test_the_step_is_adamw(make_engine):
    """Three steps with weight decay against torch's own, on the gradients of plain autograd."""
    engine, plain = make_engine(dtype="float64"), make_engine(dtype="float64")
    parameters = [p for _, p in plain.model.trainable()]
    theirs = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        data = tiny.datums(4, seed=step)
        engine.forward_backward(data, DPO())
        engine.optim_step(AdamParams(1e-3, 0.8, 0.9, 1e-8, 0.1), None)
        for parameter, gradient in zip(parameters, tiny.plain_gradients(plain.model.network, data, DPO()), strict=True):
            parameter.grad = gradient
        theirs.step()
    assert tiny.difference(tiny.weights(engine), tiny.weights(plain)) < 1e-10


def test_a_step_without_gradient_is_reported(make_engine):
    engine = make_engine()
    before = tiny.weights(engine)
    metrics = engine.optim_step(AdamParams(), BY_TOKENS).metrics
    assert metrics["optim/grad_norm"] == metrics["optim/num_loss_tokens"] == 0.0
    assert tiny.difference(tiny.weights(engine), before) == 0.0


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_means_of_several_calls_are_refused(make_engine):
    engine = make_engine()
    engine.forward_backward(tiny.datums(2), DPO())
    with pytest.raises(ConfigError, match="DPO returns a mean, and means of several calls do not add up"):
        engine.forward_backward(tiny.datums(2), DPO())
    engine.discard_gradient()
    engine.forward_backward(tiny.datums(2), DPO())
    engine.optim_step(AdamParams(), None)
    engine.forward_backward(tiny.datums(2), DPO())  # a step lies between


@pytest.mark.parametrize("first", [0, 1])
def test_a_mean_and_an_unknown_function_may_add_up(make_engine, first):
    engine = make_engine()
    for loss in [DPO(), lambda _, logprobs: (logprobs[0].sum(), {})][:: -1 if first else 1]:
        engine.forward_backward(tiny.datums(2), loss)
    assert engine.optim_step(AdamParams(), None).metrics["optim/grad_norm"] > 0


@pytest.mark.parametrize("normalization", [BY_TOKENS, BY_SEQUENCES])
def test_a_mean_is_not_divided_again(make_engine, normalization):
    engine = make_engine()
    engine.forward_backward(tiny.datums(2), DPO())
    with pytest.raises(ConfigError, match="already returns a mean"):
        engine.optim_step(AdamParams(), normalization)


BAD_LOSSES = {
    "a metric named loss": (lambda _, rows: (rows[0].sum(), {"loss": 0.0}), r"metric 'loss' is the value of the loss itself"),
    "no gradient": (lambda _, rows: (torch.tensor(1.0), {}), "does not depend on the logprobs"),
    "detached": (lambda _, rows: (rows[0].detach().sum(), {}), "does not depend on the logprobs"),
    "another leaf": (lambda _, rows: (torch.ones(1, requires_grad=True).sum(), {}), "no gradient with respect to the logprobs"),
    "zero gradient": (lambda _, rows: (0.0 * rows[0].sum(), {}), "a zero gradient with respect to the logprobs"),
    "a vector": (lambda _, rows: (rows[0], {}), r"must return a scalar tensor, got a tensor of shape \("),
    "a float": (lambda _, rows: (1.0, {}), "must return a scalar tensor, got a float"),
    "no metrics": (lambda _, rows: rows[0].sum(), r"must return \(scalar tensor, dict of metrics\)"),
    "a metric of two": (lambda _, rows: (rows[0].sum(), {"mine": rows[0][:2]}), r"metric 'mine' must be a single number"),
    "nan": (lambda _, rows: (rows[2].sum() * float("nan") + rows[0].sum(), {}), "returned nan for datum 2;"),
    "infinity": (lambda _, rows: (rows[3].sum() / 0.0 + rows[1].sum() / 0.0, {}), "returned -inf for datums 1, 3;"),
    "nan of no datum": (lambda _, rows: (sum(r.sum() for r in rows) + float("nan"), {}), "nan for datums 0, 1, 2, 3, 4, 5;"),
    "infinite slope": (lambda _, rows: ((rows[4] - rows[4].detach()).abs().sqrt().sum(), {}), "not finite for datum 4"),
}


@pytest.mark.parametrize("name", rest_slow(BAD_LOSSES, fast=4))
def test_a_bad_custom_loss_is_named_and_changes_nothing(make_engine, name):
    loss, message = BAD_LOSSES[name]
    engine, untouched = make_engine(micro_batch_tokens=40), make_engine(micro_batch_tokens=40)
    before, data = tiny.weights(engine), tiny.datums()
    with pytest.raises(BackendError, match=message) as caught:
        engine.forward_backward(data, loss)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), before, strict=True))
    engine.discard_gradient()
    for one in (engine, untouched):
        one.forward_backward(data, DPO())
        one.optim_step(AdamParams(), None)
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), tiny.weights(untouched), strict=True))


@dataclass(frozen=True)
class Scaled(Loss):
    """A sum of token terms that reads a field without checking it."""

    name = "scaled"
    reduction = Reduction.token_sum
    scope = Scope.token

    def __call__(self, data, logprobs):
        return sum(float(d.loss_fn_inputs["scale"].array) * row.sum() for d, row in zip(data, logprobs, strict=True)), {}


def test_the_datum_is_named_by_its_place_in_the_call(make_engine):
    """Also where the loss sees one micro-batch at a time."""
    data = [datum.with_inputs(scale=float("nan") if i == 3 else 1.0) for i, datum in enumerate(tiny.datums())]
    engine = make_engine(micro_batch_tokens=1)
    with pytest.raises(BackendError, match="loss scaled: returned nan for datum 3;"):
        engine.forward_backward(data, Scaled())


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(make_engine):
    engine = make_engine()
    before = tiny.weights(engine)
    engine.forward_backward(tiny.datums(), DPO())
    engine.model.trainable()[0][1].grad[0, 0] = float("nan")
    with pytest.raises(BackendError, match="optim_step: the gradient norm is nan after 0 steps"):
        engine.optim_step(AdamParams(), None)
    assert all(torch.equal(a, b) for a, b in zip(tiny.weights(engine), before, strict=True))
    assert engine.step == 0
    engine.forward_backward(tiny.datums(), DPO())
    assert np.isfinite(engine.optim_step(AdamParams(), None).metrics["optim/grad_norm"])


def bad(tokens=(1, 2, 3), **inputs):
    return [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]}), Datum(ModelInput.from_ints(tokens), inputs)]


BAD_DATA = {
    "missing": (bad(), "datum 1: missing required field 'target_tokens'"),
    "ignored": (
        bad(target_tokens=[1, -100, 2]),
        "datum 1: target_tokens holds -100 at position 1, which is not a token id; to mask the position, set its weight to 0",
    ),
    "outside": (bad(target_tokens=[1, 2, 259]), "datum 1: target_tokens holds token 259, but the vocabulary has 259 tokens"),
    "negative": (bad((1, -2, 3), target_tokens=[1, 2, 3]), "datum 1: model_input holds token -2"),
    "too long": (bad(range(97), target_tokens=range(97)), "datum 1: 97 tokens exceed the model's context of 96"),
    "empty": (bad((), target_tokens=[]), "datum 1: model_input is empty"),
    "floats": (bad(target_tokens=[1.0, 2.0, 3.0]), "datum 1: target_tokens must be integers"),
    "scalar": (bad(target_tokens=5), "datum 1: target_tokens must be integers of shape"),
}


@pytest.mark.parametrize("name", BAD_DATA)
@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_bad_data_is_named_before_the_model_sees_it(make_engine, name, call):
    data, message = BAD_DATA[name]
    engine = make_engine()
    with pytest.raises(DataError, match=re.escape(message)):
        getattr(engine, call)(data, SUM)
    assert engine.passes.count == 0


# ---- half precision, LoRA --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_half_precision_moves_at_learning_rates_below_its_own_steps(make_engine):
    engine = make_engine(dtype="bfloat16")
    start = tiny.weights(engine)
    for _ in range(20):
        engine.forward_backward(tiny.datums(), DPO())
        engine.optim_step(AdamParams(learning_rate=1e-6), None)
    masters = [master.detach() for master in engine.optimizer.masters]
    assert all(master.dtype == torch.float32 for master in masters)
    # Adam moves every weight by about its learning rate a step; a bfloat16 weight of 0.2 steps by 2^-11 = 5e-4.
    moved = torch.cat([(m - s.float()).abs().ravel() for m, s in zip(masters, start, strict=True)])
    assert 5e-6 < float(moved.median()) < 3e-5
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(tiny.weights(engine), masters, strict=True))


@pytest.mark.slow
def test_half_precision_without_masters_would_stand_still(make_engine):
    """The reason for master weights: plain AdamW on the bfloat16 weights loses nearly every step."""
    moved = []
    for masters in (True, False):
        engine = make_engine(dtype="bfloat16")
        start, parameters = tiny.weights(engine), [p for _, p in engine.model.trainable()]
        plain = torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0)
        for _ in range(60):
            engine.forward_backward(tiny.datums(2), DPO())
            if masters:
                engine.optim_step(AdamParams(learning_rate=1e-6), None)
            else:
                for parameter, gradient in zip(parameters, tiny.gradients(engine), strict=True):
                    parameter.grad = gradient.to(parameter.dtype)
                plain.step()
                engine.discard_gradient()
        moved.append(float(torch.cat([(p != s).ravel() for p, s in zip(parameters, start, strict=True)]).float().mean()))
    with_masters, without = moved
    assert with_masters > 0.05  # the share of weights that have crossed a rounding edge
    assert without < with_masters / 10


def test_half_precision_gradients_are_near_the_full_ones(make_engine):
    found = []
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(dtype=dtype)
        engine.forward_backward(tiny.datums(), DPO())
        found.append(tiny.gradients(engine))
    assert tiny.difference(found[1], found[0]) < 0.1  # 8 bits of mantissa, two layers


@pytest.mark.slow
def test_half_precision_gradients_are_summed_in_full(make_engine):
    """The same two passes 300 times give 300 times their gradient; a sum kept in bfloat16 stalls at 256 times a term."""
    data, found = tiny.datums(2, seed=4), []
    for times in (1, 300):
        engine = make_engine(dtype="bfloat16", micro_batch_tokens=1)
        engine.forward_backward(data * times, SUM)
        found.append([row / times for row in tiny.gradients(engine)])
    assert all(row.dtype == torch.float32 for row in found[1])
    assert tiny.difference(found[1], found[0]) < 1e-5


def test_a_rank_beyond_the_model_is_refused(make_engine):
    with pytest.raises(ConfigError, match=r"model.lora_rank: must be at most the model's hidden size of 32, got 33"):
        make_engine(lora_rank=33)


def test_lora_trains_the_adapter_only(make_engine):
    engine = make_engine(lora_rank=4)
    base = {name: p.detach().clone() for name, p in engine.model.network.named_parameters() if not p.requires_grad}
    names = [name for name, _ in engine.model.trainable()]
    assert names and all("lora_" in name for name in names)
    assert engine.adapter_is_idle()
    data = tiny.datums()
    expected = tiny.plain_gradients(engine.model.network, data, DPO())
    engine.forward_backward(data, DPO())
    assert tiny.difference(tiny.gradients(engine), expected) < 1e-5
    engine.optim_step(AdamParams(learning_rate=1e-2), None)
    assert not engine.adapter_is_idle()
    after = dict(engine.model.network.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in base.items())


def test_without_the_adapter_it_is_the_base_model(make_engine):
    data = tiny.datums()
    base = make_engine().forward(data).loss_fn_outputs
    engine = make_engine(lora_rank=4)
    for _ in range(2):
        engine.forward_backward(data, DPO())
        engine.optim_step(AdamParams(learning_rate=1e-2), None)
    engine.forward_backward(data, DPO())
    gradient = tiny.gradients(engine)
    reference = engine.forward(data, adapter=False).loss_fn_outputs
    with_it = engine.forward(data).loss_fn_outputs
    for plain, without, trained in zip(base, reference, with_it, strict=True):
        np.testing.assert_allclose(without["logprobs"].array, plain["logprobs"].array, atol=1e-5)
        assert np.abs(trained["logprobs"].array - plain["logprobs"].array).max() > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(tiny.gradients(engine), gradient, strict=True))
    assert engine.optim_step(AdamParams(), None).metrics["optim/grad_norm"] > 0  # the adapter is on and trainable again


def test_seeds_decide_fresh_weights_and_adapters(tiny_folder):
    def made(seed, **options):
        model = load(ModelConfig(str(tiny_folder), **options), torch.device("cpu"), seed)
        return torch.cat([p.detach().ravel() for _, p in model.trainable()])

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    for options in ({"random": True}, {"lora_rank": 2}):
        assert torch.equal(made(1, **options), made(1, **options))
        assert not torch.equal(made(1, **options), made(2, **options))
    assert torch.equal(torch.rand(2), expected)


def test_a_datum_of_tokens_and_weights_works_with_any_loss(make_engine):
    data = [datum_from_tokens_weights([1, 2, 3, 4], [0, 0, 1, 1]), datum_from_tokens_weights([5, 6, 7], [0, 0.5, 1])]
    engine = make_engine()
    engine.forward_backward(data, CrossEntropy())
    built_in = tiny.gradients(engine)
    engine.discard_gradient()

    def custom(given, logprobs):
        return -sum((d.loss_fn_inputs["weights"].to_torch() * row).sum() for d, row in zip(given, logprobs, strict=True)), {}

    engine.forward_backward(data, custom)
    assert tiny.difference(tiny.gradients(engine), built_in) < 1e-6


def test_a_step_without_gradient_moves_nothing(make_engine) -> None:
    """Neither momentum nor weight decay moves weights in a step that taught nothing, as when no group has a spread."""
    engine = make_engine()
    adam = AdamParams(learning_rate=1e-2, weight_decay=0.1)
    engine.forward_backward(weighted([1.0, 1.0, 0.5]), SUM)
    engine.optim_step(adam, None)
    before = {name: parameter.clone() for name, parameter in engine.model.network.named_parameters()}
    metrics = engine.optim_step(adam, BY_TOKENS).metrics
    assert metrics["optim/num_loss_tokens"] == 0.0 and engine.step == 2
    assert all(torch.equal(parameter, before[name]) for name, parameter in engine.model.network.named_parameters())
