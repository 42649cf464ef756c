"""The only gradient path: equal to autograd for any split of the batch, without extra cost."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow

from cookbook.engine import capabilities, loss_gradient, memory
from cookbook.engine.batch.plan import PackingSupport
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.head import output_head
from cookbook.engine.head.linear_logprobs import tokenwise
from cookbook.engine.model import ModelConfig, SharedBase, layer_stack, load
from cookbook.errors import BackendError, ConfigError, DataError
from cookbook.losses import DFT, DPO, GRPO, ORPO, CrossEntropy
from cookbook.types import AdamParams, Datum, ModelInput
from cookbook.utils import paths

LOSSES = {
    "cross_entropy": CrossEntropy(),
    "dft": DFT(),
    "grpo": GRPO(kl_beta=0.05),
    "dpo": DPO(beta=0.1),
    "orpo": ORPO(),
}
# Float32 keeps 7 digits; sums of a few hundred terms in another order lose two of them at most.
SAME = {"float32": 1e-5, "float64": 1e-12}


def undeclared(loss):
    """The same mathematics as a function about which the engine knows nothing."""
    return lambda data, logprobs: loss(data, logprobs)


@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_plain_autograd(make_engine, name, dtype):
    loss = LOSSES[name]
    data = loss.prepare(tiny.datums())
    engine = make_engine(dtype=dtype, micro_batch_tokens=40)
    expected = tiny.plain_gradients(engine.model.network, data, loss)
    value, _ = loss(data, tiny.plain_logprobs(engine.model.network, data))
    for path in (loss, undeclared(loss)):
        output = engine.forward_backward(data, path)
        assert tiny.difference(tiny.gradients(engine), expected) < SAME[dtype]
        assert output.metrics["loss"] == pytest.approx(value.item(), rel=1e-5)
        engine.discard_gradient()
    assert engine.passes.count > 2  # it was really cut up, pairs too


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in ("dft", "dpo", "orpo") else ()) for one in LOSSES]
)
def test_the_update_does_not_depend_on_how_the_batch_is_cut(make_engine, name):
    loss = LOSSES[name]
    data = loss.prepare(tiny.datums(8))
    whole = make_engine(micro_batch_tokens=10_000, packing="padded")
    whole.forward_backward(data, loss)
    expected = tiny.gradients(whole)
    for tokens, packing, retain in itertools.product((1, 60, 10_000), ("packed", "padded"), (0, 4 << 30)):
        engine = make_engine(micro_batch_tokens=tokens, packing=packing, retain_bytes=retain)
        engine.forward_backward(data, undeclared(loss) if tokens == 60 else loss)
        assert tiny.difference(tiny.gradients(engine), expected) < 1e-5, (tokens, packing, retain)


@pytest.mark.parametrize("name", rest_slow(LOSSES))
def test_the_update_does_not_depend_on_the_order(make_engine, name):
    loss = LOSSES[name]
    data = loss.prepare(tiny.datums(8))
    order = np.random.default_rng(0).permutation(4)
    shuffled = [data[2 * pair + side] for pair in order for side in (0, 1)]  # pairs stay pairs
    found = []
    for batch in (data, shuffled):
        engine = make_engine(micro_batch_tokens=60)
        output = engine.forward_backward(batch, loss)
        found.append((tiny.gradients(engine), output))
    assert tiny.difference(found[1][0], found[0][0]) < 1e-5
    for place, pair in enumerate(order):  # and the outputs have the order of the data
        ours, theirs = (out.loss_fn_outputs[2 * i]["logprobs"].array for out, i in ((found[1][1], place), (found[0][1], pair)))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def passes_of(engine, data, loss):
    before = engine.passes.count
    engine.forward_backward(data, loss)
    return engine.passes.count - before


def test_a_custom_loss_costs_what_the_built_in_loss_costs(make_engine):
    data, loss = tiny.datums(), LOSSES["grpo"]
    engine = make_engine(micro_batch_tokens=40)
    cost = passes_of(engine, data, loss)
    assert cost > 2
    assert passes_of(engine, data, undeclared(loss)) == cost


def test_graphs_that_do_not_fit_are_computed_a_second_time(make_engine):
    data, loss = tiny.datums(), undeclared(LOSSES["dpo"])
    engine = make_engine(micro_batch_tokens=40)
    cost = passes_of(engine, data, loss)
    assert passes_of(make_engine(micro_batch_tokens=40, retain_bytes=0), data, loss) == 2 * cost - 1  # one always fits
    half = int(sum(datum.model_input.length for datum in data) / 2 * engine.passes.bytes_per_token)
    partly = passes_of(make_engine(micro_batch_tokens=40, retain_bytes=half), data, loss)
    assert cost < partly < 2 * cost


def test_kept_graphs_are_measured(make_engine):
    """Memory that the first pass keeps per token: every activation once, no weight; against a count by the tensors' names."""
    engine = make_engine(token_metrics=False)
    engine.forward_backward(tiny.datums(4), LOSSES["cross_entropy"])
    config = engine.model.network.config
    a_layer = 25 * config.hidden_size  # about: 4 norms, their inputs, q, k, v, attention's output, 3 of the MLP
    logits = 2 * tiny.VOCABULARY
    expected = 4 * (config.num_hidden_layers * a_layer + logits)
    assert 0.5 * expected < engine.passes.bytes_per_token < 2 * expected


def test_a_batch_of_one_pass_is_never_computed_twice(make_engine):
    engine = make_engine(retain_bytes=0)
    assert passes_of(engine, tiny.datums(), undeclared(LOSSES["dpo"])) == 1


def test_passes_without_gradient_are_not_run_backward(make_engine):
    data = tiny.datums(6)
    engine = make_engine(micro_batch_tokens=1, retain_bytes=0)
    assert passes_of(engine, data, lambda _, logprobs: (logprobs[2].sum(), {})) == 7  # 6 forward, 1 again


@pytest.mark.parametrize("option", rest_slow(["activation_checkpointing", "activation_offloading"]))
def test_saving_memory_changes_nothing(make_engine, option):
    data, loss = tiny.datums(), LOSSES["dpo"]
    found = []
    for options in ({}, {option: True}, {option: True, "retain_bytes": 0}):
        engine = make_engine(micro_batch_tokens=60, **options)
        engine.forward_backward(data, loss)
        found.append(tiny.gradients(engine))
    assert tiny.difference(found[1], found[0]) < 1e-6
    assert tiny.difference(found[2], found[0]) < 1e-6


@pytest.mark.parametrize("retain", rest_slow([0, 4 << 30]))
def test_dropout_draws_the_same_mask_when_a_pass_is_recomputed(make_engine, retain):
    data, loss = tiny.datums(), undeclared(LOSSES["dpo"])
    engine = make_engine(micro_batch_tokens=40, lora_rank=4, lora_dropout=0.5, retain_bytes=retain)
    for _, parameter in engine.model.trainable():  # an adapter that does something: its dropout is then seen
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    first = engine.forward_backward(data, loss)
    found = tiny.gradients(engine)
    kept = make_engine(micro_batch_tokens=40, lora_rank=4, lora_dropout=0.5)
    for (_, parameter), value in zip(kept.model.trainable(), tiny.weights(engine), strict=True):
        parameter.data.copy_(value)
    second = kept.forward_backward(data, loss)
    assert tiny.difference(found, tiny.gradients(kept)) < 1e-6
    assert first.metrics["loss"] == second.metrics["loss"]
    assert first.metrics["loss"] != kept.forward_backward(data, loss).metrics["loss"]  # the next call drops others
    assert kept.forward(data, loss).metrics["loss"] == kept.forward(data, loss).metrics["loss"]  # forward drops none


def test_dropout_leaves_the_callers_random_numbers_alone(make_engine):
    engine = make_engine(lora_rank=4, lora_dropout=0.5)
    torch.manual_seed(7)
    engine.forward_backward(tiny.datums(2), LOSSES["cross_entropy"])
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def top_k(seed=0, widths=(3, 3, 2)):
    """Datums with several targets a position, each with its weight."""
    rng = np.random.default_rng(seed)
    data = []
    for width in widths:
        length = int(rng.integers(4, 12))
        targets = rng.integers(0, tiny.VOCABULARY, (length, width))
        tokens = ModelInput.from_ints(rng.integers(0, tiny.VOCABULARY, length))
        data.append(Datum(tokens, {"target_tokens": targets, "weights": rng.uniform(0, 1, (length, width))}))
    return data


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_several_targets_a_position(make_engine, packing):
    data, loss = top_k(), LOSSES["cross_entropy"]
    engine = make_engine(dtype="float64", packing=packing)
    expected = tiny.plain_gradients(engine.model.network, data, loss)
    for path in (loss, undeclared(loss)):
        output = engine.forward_backward(data, path)
        assert tiny.difference(tiny.gradients(engine), expected) < 1e-12
        assert [row["logprobs"].shape for row in output.loss_fn_outputs] == [d.loss_fn_inputs["weights"].shape for d in data]
        engine.discard_gradient()


def test_forward_returns_logprobs_and_touches_no_gradient(make_engine):
    data, loss = tiny.datums(), LOSSES["dpo"]
    engine = make_engine(micro_batch_tokens=40)
    engine.forward_backward(data, loss)
    before, counts = tiny.gradients(engine), engine.counts
    output = engine.forward(data, loss)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.gradients(engine), strict=True))
    assert engine.counts == counts
    for row, expected in zip(output.loss_fn_outputs, tiny.plain_logprobs(engine.model.network, data), strict=True):
        np.testing.assert_allclose(row["logprobs"].array, expected.detach().numpy(), atol=1e-5)
        assert row["logprobs"].dtype == "float32"
    assert output.metrics["loss"] == output.metrics["loss:sum"]
    assert "rewards/margin" in output.metrics


def test_a_custom_loss_gets_float32_tensors_that_want_a_gradient(make_engine):
    data, seen = tiny.datums(), []

    def loss(given, logprobs):
        seen.extend(logprobs)
        assert list(given) == data
        return sum(row.sum() for row in logprobs), {"mine": torch.tensor(3.0)}

    output = make_engine(micro_batch_tokens=40).forward_backward(data, loss)
    assert [tuple(row.shape) for row in seen] == [(datum.model_input.length,) for datum in data]
    assert all(row.dtype == torch.float32 and row.requires_grad for row in seen)
    assert output.metrics["mine"] == 3.0


def surrogate(slopes):
    """A loss with given slopes, as sent by a client that computed its own loss."""
    return lambda _, logprobs: (sum((slope * row).sum() for slope, row in zip(slopes, logprobs, strict=True)), {})


@pytest.mark.parametrize("retain", [0, 4 << 30])
def test_a_gradient_continues_from_the_forward(make_engine, retain):
    data, loss = tiny.datums(), LOSSES["dpo"]
    engine = make_engine(micro_batch_tokens=40, retain_bytes=retain)
    engine.forward_backward(data, loss)
    expected, counts, cost = tiny.gradients(engine), engine.counts, engine.passes.count
    engine.discard_gradient()
    retained, output = engine.forward_retained(data, CrossEntropy())
    assert output.metrics["loss"] == engine.forward(data, CrossEntropy()).metrics["loss"]
    before = engine.passes.count - cost
    leaves = [row["logprobs"].to_torch().clone().requires_grad_() for row in output.loss_fn_outputs]
    slopes = torch.autograd.grad(loss(data, leaves)[0], leaves)
    others = [datum.with_inputs(weights=np.ones(datum.model_input.length)) for datum in data]  # a loss may read what it likes
    engine.forward_backward(others, surrogate(slopes), retained)
    assert all(torch.equal(found, wanted) for found, wanted in zip(tiny.gradients(engine), expected, strict=True))
    assert engine.counts == counts and engine.passes.count == cost + before + (0 if retain else cost // 2 + 0)
    assert not retained.passes  # used


def test_a_forward_that_does_not_fit_is_ignored(make_engine):
    """Of other weights, of other tokens, of another temperature, or used before: the gradient is right anyway."""
    data, loss = tiny.datums(2), undeclared(LOSSES["dpo"])
    engine = make_engine()

    def stale():
        retained, _ = engine.forward_retained(data)
        engine.forward_backward(data, loss)
        engine.optim_step(AdamParams(), None)
        return retained, data

    def used():
        retained, _ = engine.forward_retained(data)
        engine.forward_backward(data, loss, retained)
        engine.discard_gradient()
        return retained, data

    def other(change):
        return lambda: (engine.forward_retained(data)[0], [change(data[0]), data[1]])

    swapped = other(lambda datum: Datum(ModelInput.from_ints([9, *datum.model_input.tokens[1:]]), datum.loss_fn_inputs))
    heated = other(lambda datum: datum.with_inputs(temperature=np.array(0.5)))
    for case in (stale, used, swapped, heated):
        retained, given = case()
        before = engine.passes.count
        engine.forward_backward(given, loss, retained)
        assert engine.passes.count == before + 1
        found = tiny.gradients(engine)
        engine.discard_gradient()
        engine.forward_backward(given, loss)
        assert all(torch.equal(a, b) for a, b in zip(found, tiny.gradients(engine), strict=True))
        engine.discard_gradient()


def test_token_metrics_are_those_of_the_logits(make_engine):
    data = tiny.datums()
    engine = make_engine(micro_batch_tokens=40)
    metrics = engine.forward_backward(data, LOSSES["cross_entropy"]).metrics
    hits, entropies = [], []
    for datum in data:
        with torch.no_grad():
            logprobs = engine.model.network(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
        trained = datum.loss_fn_inputs["weights"].to_torch() != 0
        hits.append((logprobs.argmax(-1) == datum.loss_fn_inputs["target_tokens"].to_torch())[trained].double())
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[trained].double())
    assert metrics["tokens/accuracy"] == pytest.approx(float(torch.cat(hits).mean()), abs=1e-12)
    assert metrics["tokens/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    assert metrics["tokens/trained"] == len(torch.cat(hits))
    assert "tokens/accuracy" not in make_engine(token_metrics=False).forward_backward(data, LOSSES["orpo"]).metrics


@pytest.mark.parametrize("rows", [1, 7])
def test_a_head_in_slices_is_the_head(make_engine, monkeypatch, rows):
    data, loss = [*tiny.datums()], LOSSES["dpo"]
    found = []
    for chunk in (output_head.CHUNK_BYTES, rows * 4 * tiny.VOCABULARY):
        monkeypatch.setattr(output_head, "CHUNK_BYTES", chunk)
        engine = make_engine(dtype="float64")
        output = engine.forward_backward(data, loss)
        found.append((tiny.gradients(engine), output.metrics))
    assert tiny.difference(found[1][0], found[0][0]) < 1e-12
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-9)


@pytest.mark.parametrize("chunk_rows", [5, 10_000])
@pytest.mark.parametrize("name", rest_slow(LOSSES, fast=3))
def test_tokens_of_weight_0_need_not_be_scored(make_engine, monkeypatch, name, chunk_rows):
    monkeypatch.setattr(output_head, "CHUNK_BYTES", chunk_rows * 4 * tiny.VOCABULARY)
    rows = tiny.datums(6)
    if name not in ("dpo", "orpo"):  # a pair needs both its answers
        rows[5] = rows[5].with_inputs(weights=np.zeros(rows[5].model_input.length))
    data = LOSSES[name].prepare(rows)
    found = []
    for all_logprobs in (True, False):
        engine = make_engine(dtype="float64", micro_batch_tokens=40, all_logprobs=all_logprobs)
        output = engine.forward_backward(data, LOSSES[name])
        found.append((tiny.gradients(engine), engine.counts, output))
    (gradients, counts, whole), (others, other_counts, part) = found
    assert tiny.difference(others, gradients) < 1e-12
    assert other_counts == counts
    assert part.metrics == pytest.approx(whole.metrics, rel=1e-12)
    for datum, one, other in zip(data, part.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
        masked = datum.loss_fn_inputs["weights"].array == 0
        np.testing.assert_allclose(one["logprobs"].array[~masked], other["logprobs"].array[~masked], rtol=1e-6)
        assert np.isnan(one["logprobs"].array[masked]).all() and np.isfinite(other["logprobs"].array).all()


@pytest.mark.parametrize("name", ["cross_entropy", "dft", "grpo"])
def test_a_loss_of_tokens_never_holds_the_logits_of_a_whole_datum(make_engine, monkeypatch, name):
    """One long datum, a chunk of a few rows: the gradient is that of the whole, the largest tensor that of the chunk."""
    loss = LOSSES[name]
    data = loss.prepare([tiny.datums(40, longest=90)[7]])
    whole = make_engine(dtype="float64", micro_batch_tokens=10_000)
    expected = whole.forward_backward(data, loss)
    monkeypatch.setattr(output_head, "CHUNK_BYTES", 4 * 4 * tiny.VOCABULARY)
    monkeypatch.setattr(tokenwise, "_chunk_rows", lambda given: 5)
    engine = make_engine(dtype="float64", micro_batch_tokens=10_000)
    calls = []
    inner = loss_gradient.loss_gradient
    monkeypatch.setattr(
        "cookbook.engine.loss_gradient.loss_gradient", lambda *given, **how: calls.append(given[1]) or inner(*given, **how)
    )
    output = engine.forward_backward(data, loss)
    assert len(calls) > 3 and all(datum.model_input.length <= 5 for call in calls for datum in call)
    assert tiny.difference(tiny.gradients(engine), tiny.gradients(whole)) < 1e-12
    assert engine.counts == whole.counts
    assert output.metrics == pytest.approx(expected.metrics, rel=1e-12)


def test_a_call_that_fails_leaves_nothing_behind(make_engine):
    data = tiny.datums(4)
    engine = make_engine(micro_batch_tokens=1)

    def loss(_, logprobs):
        return sum(row.sum() for row in logprobs) * float("nan"), {}

    for bad in (loss, DPO()):
        with pytest.raises((BackendError, DataError)):
            engine.forward_backward(
                [*data[:3], Datum(data[3].model_input, {"target_tokens": data[3].loss_fn_inputs["target_tokens"]})], bad
            )
        assert not engine.accumulated and engine.counts.num_loss_tokens == 0
        assert all(not gradient.any() for gradient in tiny.gradients(engine))
    engine.forward_backward(data, DPO())


def test_what_cannot_be_packed_is_not_packed_by_force(make_engine):
    with pytest.raises(ConfigError, match="expected one of auto, packed, padded, got 'packd'"):
        make_engine(packing="packd")
    engine = make_engine(packing="auto")
    capabilities.PACKING[engine.model.lineage] = PackingSupport(False, False, "reason")
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM does not support packed rows: reason; set it to auto"):
        type(engine)(engine.model, EngineOptions(packing="packed"))


def test_every_token_is_scored_for_a_loss_of_which_nothing_is_known(make_engine):
    data, seen = tiny.datums(2), []

    def loss(_, logprobs):
        seen.extend(logprobs)
        return sum(row.sum() for row in logprobs), {}

    engine = make_engine(all_logprobs=False)
    outputs = engine.forward_backward(data, loss).loss_fn_outputs
    assert all((row < 0).all() for row in seen)
    assert all(np.isfinite(row["logprobs"].array).all() for row in outputs)
    assert all(np.isfinite(row["logprobs"].array).all() for row in engine.forward(data, LOSSES["dpo"]).loss_fn_outputs)


@pytest.mark.slow
def test_the_whole_step_in_slices_packed_and_recomputed(make_engine, monkeypatch):
    """All options that save memory together, against none of them, over three steps of Adam."""
    adam = AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)
    found = []
    for options in ({}, {"micro_batch_tokens": 50, "packing": "packed", "activation_checkpointing": True, "retain_bytes": 0}):
        engine = make_engine(dtype="float64", **options)
        for step in range(3):
            engine.forward_backward(tiny.datums(seed=step), LOSSES["orpo"])
            engine.optim_step(adam, None)
        found.append(tiny.weights(engine))
        monkeypatch.setattr(output_head, "CHUNK_BYTES", 5000)
    assert tiny.difference(found[1], found[0]) < 1e-9


def test_logprobs_by_an_implementation_that_was_handed_over(make_engine):
    """``head_impl`` takes a callable; if it returns None (here, for a temperature), the engine computes the logprobs itself."""
    calls = []

    def plain(hidden, weight, targets, *, bias, scale, softcap, temperature):
        calls.append(len(targets))
        if temperature is not None:
            return None
        return (hidden @ weight.T * scale).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    for temperature in (None, 0.7):
        data = CrossEntropy().prepare(tiny.datums())
        data = [datum.with_inputs(temperature=np.array(temperature)) for datum in data] if temperature else data
        found = []
        for impl in ("auto", plain):
            engine = make_engine(head_impl=impl)
            output = engine.forward_backward(data, CrossEntropy())
            found.append((tiny.gradients(engine), output.metrics))
        assert tiny.difference(found[1][0], found[0][0]) < 1e-6
        assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)  # entropy and accuracy too
    assert len(calls) == 2


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_activations_are_recomputed_where_they_do_not_fit(make_engine, monkeypatch, caplog, lora_rank):
    """A pass that fits keeps its activations, even if one of the whole budget would not fit."""
    data = CrossEntropy().prepare(tiny.datums(8))
    probe = make_engine(lora_rank=lora_rank)
    lasting = 12 * sum(parameter.numel() for _, parameter in probe.model.trainable())
    tokens = sum(datum.model_input.length for datum in data)
    enough = int((lasting + probe.passes.trial_bytes_per_token() * (tokens + 1)) / memory.USABLE_SHARE)
    found = {}
    for free, computed in ((1 << 40, "kept"), (1 << 10, "again"), (enough, "kept"), (lasting + 1, "again")):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        engine = make_engine(activation_checkpointing=None, lora_rank=lora_rank)
        calls = []
        named = dict(engine.model.network.named_modules())
        norm = next(module for name, module in named.items() if name.endswith("layers.0.input_layernorm"))
        monkeypatch.setattr(norm, "forward", lambda *rest, norm=norm.forward, calls=calls: calls.append(1) or norm(*rest))
        with caplog.at_level(logging.INFO, logger="cookbook"):
            engine.forward_backward(data, CrossEntropy())
        found[free] = tiny.gradients(engine)
        assert len(calls) == (2 if computed == "again" else 1), free
        assert engine.options.activation_checkpointing is (free < 1 << 40)
    first, *others = found.values()
    assert all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("pass_tokens", [4096, 32])
def test_free_memory_does_not_change_what_is_computed(make_engine, monkeypatch, lora_rank, pass_tokens):
    """The last layer skips the same tokens with and without activation checkpointing: a product's rows decide its last bits."""
    data = CrossEntropy().prepare(tiny.datums(8))
    rows, gradients = [], []
    for choice, free in ((False, 1 << 40), (None, 1 << 40), (None, 1 << 10), (True, 1 << 40)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        options = {"activation_checkpointing": choice, "lora_rank": lora_rank, "micro_batch_tokens": pass_tokens}
        engine = make_engine(all_logprobs=False, token_metrics=False, **options)
        seen, mlp = [], layer_stack(engine.model.network)[-1].mlp
        # The verification of the last layer comes first, so that the hook does not see it.
        assert engine.passes.last_layer
        mlp.register_forward_hook(lambda _, inputs, output, seen=seen: seen.append(output.shape[:-1].numel()))
        engine.forward_backward(data, CrossEntropy())
        rows.append(seen)
        gradients.append(tiny.gradients(engine))
    tokens = sum(datum.model_input.length for datum in data)
    assert all(one == rows[0] for one in rows)
    assert sum(rows[0]) < tokens
    assert all(torch.equal(one, two) for other in gradients for one, two in zip(gradients[0], other, strict=True))


def test_the_bytes_of_a_token_are_those_of_a_pass(make_engine):
    """The trial measures 32 tokens, without the head's logits. Longer rows spread a row's fixed memory over more tokens."""
    engine = make_engine(token_metrics=False)
    engine.forward_backward(CrossEntropy().prepare(tiny.datums(40)), CrossEntropy())
    measured = engine.passes.trial_bytes_per_token()
    assert measured == pytest.approx(engine.passes.bytes_per_token - 4 * tiny.VOCABULARY, rel=0.15)


@pytest.mark.slow
def test_a_copy_of_a_model_computes_the_same_bits():
    """The weights of the shipped model do not begin at a cache line: a plain copy of them has other gradients."""
    name = str(paths.packaged("data") / "tiny")
    models = [load(ModelConfig(name), torch.device("cpu"), seed=0)]
    models.append(load(ModelConfig(name), torch.device("cpu"), seed=0, shared=SharedBase(name, models[0].network)))
    models[0].network.requires_grad_(True)
    engines = [Engine(model, EngineOptions()) for model in models]
    for engine in engines:
        engine.forward_backward(tiny.datums(32, longest=60), DPO())
    one, other = (tiny.gradients(engine) for engine in engines)
    assert one[0].any() and all(map(torch.equal, one, other))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(*(model.network.parameters() for model in models), strict=True))
