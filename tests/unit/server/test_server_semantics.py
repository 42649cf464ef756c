"""Results of the unmodified client on cookbook's server: sums are sums, and every number equals the embedded trainer's."""

from __future__ import annotations

import numpy as np
import pytest
import servertools
import tiny
import torch
from marks import rest_slow

from cookbook.losses import CrossEntropy
from cookbook.types import AdamParams, Datum, ModelInput

tinker = pytest.importorskip("tinker")

STEP = tinker.AdamParams(learning_rate=1e-2)
# Gradients of float32 passes that add the same terms in another order, or rescaled: a few roundings of 6e-8 each.
CLOSE = 2e-6


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"]) as found:
        yield found


@pytest.fixture(scope="module")
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as client:
        yield client


@pytest.fixture(scope="module")
def full(service):
    """A client that trains every parameter. No test steps it with a gradient, so each finds the same weights."""
    return service.create_lora_training_client("tiny:full", rank=1).result()


def single(data):
    """The arrays as the client sends them, in single precision."""
    return [
        Datum(
            row.model_input,
            {k: v.array.astype("f4" if v.array.dtype.kind == "f" else "i8") for k, v in row.loss_fn_inputs.items()},
        )
        for row in data
    ]


DATA = single(tiny.datums(5, seed=3))


def wire(data, **inputs):
    """Convert cookbook's datums to the client's, with targets and weights, or the named inputs."""
    keys = inputs.pop("keys", ("target_tokens", "weights"))
    rows = []
    for row in data:
        arrays = {key: row.loss_fn_inputs[key].array for key in keys}
        arrays |= {key: np.asarray(make(row), dtype="f4") for key, make in inputs.items()}
        tensors = {key: tinker.TensorData.from_numpy(array) for key, array in arrays.items()}
        rows.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(row.model_input.to_ints()), loss_fn_inputs=tensors))
    return rows


def weights(row):
    return row.loss_fn_inputs["weights"].array


@pytest.fixture(scope="module")
def gradient(server, full):
    """``gradient(calls...)``: the gradient that the calls accumulate, as one vector. A step with learning rate 0 clears it."""

    def measure(*calls):
        for call in calls:
            call(full).result()
        found = torch.cat([one.double().ravel() for one in tiny.gradients(server.engine(full))])
        full.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
        return found

    return measure


@pytest.fixture(scope="module")
def whole(gradient):
    """The gradient of the plain sum over all datums."""
    return gradient(passes(wire(DATA)))


def passes(data, loss="cross_entropy", config=None):
    return lambda client: client.forward_backward(data, loss, config)


def custom(data, loss):
    return lambda client: client.forward_backward_custom(data, loss)


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


def weighted(scale):
    def loss(data, logprobs):
        total = sum(
            (row * torch.tensor(datum.loss_fn_inputs["weights"].data)).sum() for datum, row in zip(data, logprobs, strict=True)
        )
        return -scale * total, {}

    return loss


def plain(server, full, data, loss):
    """The same gradient by autograd through the whole model."""
    network = server.engine(full).model.network
    network.requires_grad_(True)
    return torch.cat([one.double().ravel() for one in tiny.plain_gradients(network, data, loss)])


def test_a_sum_of_weighted_logprobs_has_the_gradient_autograd_says(server, full, whole):
    assert distance(whole, plain(server, full, DATA, CrossEntropy())) < CLOSE


def test_weights_times_ten(gradient, whole):
    ten = gradient(passes(wire(DATA, weights=lambda row: 10 * weights(row))))
    assert distance(ten, 10 * whole) < CLOSE


def test_the_same_datum_twice(gradient):
    assert distance(gradient(passes(wire(DATA[:1] * 2))), 2 * gradient(passes(wire(DATA[:1])))) < CLOSE


def test_accumulated_calls_add(gradient, whole):
    parts = [passes(wire(DATA[:2])), passes(wire(DATA[2:]))]
    assert distance(gradient(*parts), whole) < CLOSE


def test_another_datum_in_the_batch_changes_no_datum(gradient, whole):
    apart = gradient(passes(wire(DATA[:1]))) + gradient(passes(wire(DATA[1:])))
    assert distance(whole, apart) < CLOSE


def test_weights_of_zero_leave_out_exactly_their_tokens(gradient, whole):
    even, odd = (lambda row, one=one: weights(row) * (np.arange(len(weights(row))) % 2 == one) for one in (0, 1))
    halves = [gradient(passes(wire(DATA, weights=one))) for one in (even, odd)]
    assert distance(halves[0] + halves[1], whole) < CLOSE
    assert distance(halves[0], halves[1]) > 0.1


def test_weights_of_zero_everywhere_are_no_gradient(gradient):
    assert gradient(passes(wire(DATA, weights=lambda row: 0 * weights(row)))).norm() == 0


def test_negative_weights_are_the_opposite_gradient(gradient, whole):
    assert distance(gradient(passes(wire(DATA, weights=lambda row: -weights(row)))), -whole) < CLOSE


def test_weights_of_both_signs(gradient):
    def signed(row):
        return weights(row) * np.where(np.arange(len(weights(row))) % 2, -1, 1)

    parts = [lambda row, sign=sign: np.where(signed(row) * sign > 0, signed(row), 0) for sign in (1, -1)]
    apart = sum(gradient(passes(wire(DATA, weights=one))) for one in parts)
    assert distance(gradient(passes(wire(DATA, weights=signed))), apart) < CLOSE


def test_a_custom_loss_times_ten_and_its_opposite(gradient, whole):
    one = gradient(custom(wire(DATA), weighted(1.0)))
    assert distance(one, whole) < CLOSE
    assert distance(gradient(custom(wire(DATA), weighted(10.0))), 10 * one) < CLOSE
    assert distance(gradient(custom(wire(DATA), weighted(-1.0))), -one) < CLOSE


def test_a_custom_loss_that_couples_the_batch(server, full, gradient):
    """A contrast of the first two datums: weights of both signs, which depend on the logprobs."""

    def contrast(data, logprobs):
        margin = logprobs[0].mean() - logprobs[1].mean()
        return -torch.nn.functional.logsigmoid(margin), {"margin": margin.item()}

    assert distance(gradient(custom(wire(DATA[:2]), contrast)), plain(server, full, DATA[:2], contrast)) < CLOSE


def test_a_forward_pass_adds_nothing(gradient, whole):
    after = gradient(lambda client: client.forward(wire(DATA[:2]), "cross_entropy"), passes(wire(DATA)))
    assert torch.equal(after, whole)


def test_advantages_scale_and_turn_the_gradient(gradient):
    keys = ("target_tokens", "advantages")
    near = {"logprobs": lambda row: row.loss_fn_inputs["sampling_logprobs"].array}

    def of(scale):
        scaled = {"advantages": lambda row: scale * row.loss_fn_inputs["advantages"].array}
        return gradient(passes(wire(DATA, keys=keys, **near, **scaled), "importance_sampling"))

    assert distance(of(3.0), 3 * of(1.0)) < CLOSE
    assert distance(of(-1.0), -of(1.0)) < CLOSE


def test_a_step_uses_the_gradient_up(full):
    full.forward_backward(wire(DATA), "cross_entropy")
    first = full.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
    second = full.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics
    assert first["optim/grad_norm"] > 0 and first["optim/num_sequences"] == len(DATA)
    assert second["optim/grad_norm"] == 0 and second["optim/num_loss_tokens"] == 0


@pytest.mark.parametrize("unit", ["num_loss_tokens", "num_sequences"])
def test_normalization_comes_with_the_step(full, unit):
    from tinker.types.optimizer import OptimParamsBase

    norms = []
    for extra in ({}, {"grad_accumulation_normalization": unit}):
        full.forward_backward(wire(DATA), "cross_entropy")
        params = OptimParamsBase(type="adamw", learning_rate=0.0, **extra)
        norms.append(full.optim_step(params).result().metrics)
    assert norms[1]["optim/divisor"] == norms[1][f"optim/{unit}"] > 1
    assert norms[1]["optim/grad_norm"] == pytest.approx(norms[0]["optim/grad_norm"] / norms[1]["optim/divisor"], rel=1e-12)


# ---- the embedded trainer's numbers ----------------------------------------------------------------------------------


def every_loss(client, step, rows):
    """One step with each kind of loss; yields what every call returned."""
    rl = ("target_tokens", "advantages", "weights")
    near = {"logprobs": lambda row: row.loss_fn_inputs["sampling_logprobs"].array}
    calls = [
        ("cross_entropy", None, {}),
        ("dft", None, {}),
        ("importance_sampling", None, {"keys": rl, **near}),
        ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}, {"keys": rl, **near}),
        ("cispo", {"clip_high_threshold": 3.0}, {"keys": rl, **near}),
        ("dro", {"beta": 0.1}, {"keys": rl, **near}),
        ("gspo", None, {"keys": rl, **near}),
        ("grpo", {"kl_beta": 0.1, "ratio": "sequence"}, {"keys": (*rl, "reference_logprobs"), **near}),
    ]
    for name, config, inputs in calls:
        yield client.forward(rows(DATA, **inputs), name, config).result()
        passed = client.forward_backward(rows(DATA, **inputs), name, config)
        stepped = client.optim_step(step)
        yield passed.result()
        yield stepped.result()
    passed = client.forward_backward_custom(rows(DATA), squares)
    stepped = client.optim_step(step)
    yield passed.result()
    yield stepped.result()


def squares(data, logprobs):
    return sum((row * row).sum() for row in logprobs), {"mine": 2.0}


def ours(data, **inputs):
    """Our datums with the same arrays as :func:`wire`'s."""
    return [
        Datum(
            ModelInput.from_ints(row.model_input.to_ints()),
            {key: tensor.to_numpy() for key, tensor in row.loss_fn_inputs.items()},
        )
        for row in wire(data, **inputs)
    ]


def named(metrics):
    """Metrics by their own names, without how the client combines them."""
    return {key.partition(":")[0]: value for key, value in metrics.items()}


@pytest.mark.parametrize("rank", rest_slow([0, 4]))
def test_every_number_is_the_embedded_trainers(server, service, make_trainer, rank):
    remote = service.create_lora_training_client("tiny", rank=rank, seed=5).result()
    local = make_trainer(seed=5, lora_rank=rank, all_logprobs=True)  # the protocol has no gaps in them
    pairs = zip(
        every_loss(remote, tinker.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0), wire),
        every_loss(local, AdamParams(learning_rate=1e-2, grad_clip_norm=1.0), ours),
        strict=True,
    )
    for found, expected in pairs:
        for one, other in zip(getattr(found, "loss_fn_outputs", []), getattr(expected, "loss_fn_outputs", []), strict=True):
            assert np.array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())
        same_tokens = "mine" not in expected.metrics  # a surrogate of other weights counts other tokens
        for key, value in named(expected.metrics).items():
            if same_tokens or not key.startswith("tokens/"):
                # The client combines even a single part as n * value / n, which may cost the last bit.
                assert named(found.metrics)[key] == pytest.approx(value, rel=1e-15, abs=0), key
    for one, other in zip(tiny.weights(server.engine(remote)), tiny.weights(local.engine), strict=True):
        assert torch.equal(one, other)
