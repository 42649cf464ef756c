"""Custom losses: gradients of their own parameters, declarations, and refusals that name datums."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import servertools
import tiny
import torch

import cookbook
from cookbook.backends.remote.config import RemoteConfig
from cookbook.backends.remote.linearized_loss import PendingGradient
from cookbook.check.loss import check_loss
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, ConfigError, DataError
from cookbook.losses import GRPO, CrossEntropy, loss_of_call, normalization, returns
from cookbook.losses.base import Scope
from cookbook.types import AdamParams, ForwardBackwardOutput

STEP = AdamParams(learning_rate=1e-3)
DATA = tiny.datums(5)


@pytest.fixture(scope="module")
def url(tiny_folder, tmp_path_factory):
    pytest.importorskip("tinker")
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server")) as server:
        yield server.url


@pytest.fixture(params=["embedded", pytest.param("small passes", marks=pytest.mark.slow), "recomputed", "remote"])
def trainer(request, make_trainer, tiny_folder, tmp_path):
    """Trainers that split the batch in different ways, and one on a server."""
    if request.param == "remote":
        url = request.getfixturevalue("url")
        made = RemoteConfig(url).make_trainer(ModelConfig(str(tiny_folder)), seed=0, folder=tmp_path / "remote")
        yield made
        made.connection.close()
    else:
        options = {"small passes": {"micro_batch_tokens": 20}, "recomputed": {"micro_batch_tokens": 20, "retain_gb": 0.0}}
        yield make_trainer(**options.get(request.param, {}))


def tempered(temperature):
    """A mean over tokens with a learned temperature."""

    def loss(data, logprobs):
        flat = torch.cat(logprobs)
        return -(flat / temperature.exp()).mean() + temperature.square().sum(), {}

    return loss


def headed(head):
    """A value head on the logprobs of each sequence."""

    def loss(data, logprobs):
        return sum((head(torch.stack([row.mean(), row.min()])) - 1).square().sum() for row in logprobs), {}

    return loss


class Multiplied(cookbook.Loss):
    """A sum of token terms with a learned multiplier: called for one micro-batch after the other."""

    name = "multiplied"
    reduction = normalization.Reduction.token_sum
    scope = Scope.token

    def __init__(self, multiplier):
        self.multiplier = multiplier

    def __call__(self, data, logprobs):
        return -sum(row.sum() for row in logprobs) * self.multiplier, {}


def parameter(value=0.3):
    return torch.nn.Parameter(torch.tensor(value))


def losses():
    torch.manual_seed(0)
    temperature, head, multiplier = parameter(), torch.nn.Linear(2, 3), parameter()
    return {
        "temperature": (tempered(temperature), [temperature]),
        "head": (headed(head), list(head.parameters())),
        "multiplier": (Multiplied(multiplier), [multiplier]),
    }


@pytest.mark.parametrize("name", ["temperature", "head", "multiplier"])
def test_the_parameters_of_a_loss_get_the_gradient_of_plain_autograd(trainer, name):
    found = trainer.forward(DATA, "cross_entropy").result().loss_fn_outputs
    logprobs = [torch.tensor(row["logprobs"].to_numpy()) for row in found]
    loss, parameters = losses()[name]
    loss(DATA, logprobs)[0].backward()
    expected = [one.grad.clone() for one in parameters]

    loss, parameters = losses()[name]
    ids = None
    for calls in (1, 2):
        assert trainer.forward_backward_custom(DATA, loss).result().metrics["loss"] != 0
        for one, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one.grad, calls * gradient, rtol=1e-5, atol=1e-7)  # float32 sums over micro-batches
        ids = ids or [one.grad.data_ptr() for one in parameters]
    assert ids == [one.grad.data_ptr() for one in parameters]  # in place, as torch adds
    before = [one.grad.clone() for one in parameters]
    assert trainer.optim_step(STEP).result().metrics["optim/grad_norm"] > 0
    assert all(torch.equal(one.grad, kept) for one, kept in zip(parameters, before, strict=True))  # the caller's to clear


def test_hooks_run_once_and_frozen_parameters_get_nothing(trainer):
    used, frozen, idle = parameter(), torch.tensor(2.0), parameter()
    ran = []
    used.register_hook(lambda gradient: ran.append("gradient"))
    used.register_post_accumulate_grad_hook(lambda _: ran.append("added"))

    def loss(data, logprobs):
        assert idle.requires_grad
        return sum(row.sum() for row in logprobs) * used * frozen, {}

    trainer.forward_backward_custom(DATA, loss).result()
    assert ran == ["gradient", "added"] and frozen.grad is None and idle.grad is None


def test_a_call_that_fails_gives_a_parameter_nothing(trainer):
    weight = parameter()

    def raises(data, logprobs):
        (weight * 2).square()
        raise ValueError("mine")

    def infinite(data, logprobs):
        return sum(row.sum() for row in logprobs) * weight * float("inf"), {}

    def without_logprobs(data, logprobs):
        return weight.square(), {}

    for loss, message in ((raises, "mine"), (infinite, "for datums 0, 1, 2, 3, 4"), (without_logprobs, "no gradient")):
        with pytest.raises((ValueError, BackendError), match=message):
            trainer.forward_backward_custom(DATA, loss).result()
    assert weight.grad is None


def test_a_failure_in_a_later_micro_batch_gives_a_parameter_nothing(make_trainer):
    trainer, weight, calls = make_trainer(micro_batch_tokens=1), parameter(), []

    class Second(Multiplied):
        def __call__(self, data, logprobs):
            calls.append(len(data))
            if len(calls) == 2:
                raise ValueError("the second")
            return super().__call__(data, logprobs)

    with pytest.raises(ValueError, match="the second"):
        trainer.forward_backward_custom(DATA, Second(weight)).result()
    assert calls == [1, 1] and weight.grad is None
    trainer.forward_backward_custom(DATA, Multiplied(weight)).result()
    assert weight.grad is not None


def test_a_forward_and_the_check_of_a_loss_leave_parameters_alone(make_trainer):
    weight = parameter()
    check_loss(tempered(weight))
    make_trainer().engine.forward(DATA, tempered(weight))
    assert weight.grad is None


# ---- declarations ----------------------------------------------------------------------------------------------------


def plain_mean(data, logprobs):
    return -torch.cat(logprobs).mean(), {"custom/x": 1.0}


KINDS = ("mean", "token_sum")


def weighted_mean(data, logprobs):
    weights = torch.cat([torch.tensor(datum.loss_fn_inputs["weights"].array) for datum in data])
    return -(torch.cat(logprobs) * weights).sum() / weights.sum(), {}


def plain_sum(data, logprobs):
    return -torch.cat(logprobs).sum(), {}


def test_a_function_declares_what_it_returns(trainer):
    mean, summed = returns("mean")(plain_mean), returns("token_sum", scope="token")(plain_sum)
    assert mean.__name__ == "plain_mean" and mean(DATA, [torch.zeros(2)])[1] == {"custom/x": 1.0}
    trainer.forward_backward_custom(DATA, mean).result()
    with pytest.raises(ConfigError, match="already returns a mean; normalization=num_loss_tokens would divide twice"):
        trainer.optim_step(STEP, "num_loss_tokens").result()
    trainer.forward_backward_custom(DATA, mean)
    with pytest.raises(ConfigError, match="plain_mean returns a mean, and means of several calls do not add up"):
        trainer.forward_backward_custom(DATA, mean).result()
    assert trainer.optim_step(STEP).result().metrics["optim/divisor"] == 1
    trainer.forward_backward_custom(DATA, summed)
    trainer.forward_backward_custom(DATA, summed)
    tokens = sum(datum.model_input.length for datum in DATA)
    assert trainer.optim_step(STEP, "num_loss_tokens").result().metrics["optim/divisor"] == 2 * tokens


@pytest.mark.parametrize("scope", ["token", "batch"])
def test_a_declared_function_without_gradient_is_refused_too(trainer, scope):
    @returns("token_sum", scope=scope)
    def flat(data, logprobs):
        return torch.cat(logprobs).sum() * 0.0, {}

    with pytest.raises(
        BackendError, match="loss flat: has a zero gradient with respect to the logprobs of datums 0, 1, 2, 3, 4"
    ):
        trainer.forward_backward_custom(DATA, flat).result()


def test_declarations_that_contradict_themselves():
    with pytest.raises(ConfigError, match=r"expected a reduction of mean, token_sum, sequence_sum .* got 'average'"):
        returns("average")
    with pytest.raises(ConfigError, match="a mean needs the whole batch, got scope='token'"):
        returns("mean", scope="token")


def test_the_check_examines_a_declared_function():
    failed = [[verdict.check for verdict in check_loss(returns(kind)(weighted_mean)) if verdict.failed] for kind in KINDS]
    assert not failed[0] and "reduction" in failed[1]


def test_an_undeclared_loss_under_a_division_is_warned_of_once(trainer, monkeypatch, caplog):
    monkeypatch.setattr(normalization, "_warned", set())
    logging.getLogger("cookbook").propagate = True
    for _ in range(2):
        trainer.forward_backward_custom(DATA, plain_sum)
        trainer.forward_backward_custom(DATA, returns("token_sum")(plain_sum))
        trainer.optim_step(STEP, "num_loss_tokens").result()
    trainer.forward_backward_custom(DATA, plain_mean)
    trainer.optim_step(STEP).result()  # nothing is divided
    told = [record.getMessage() for record in caplog.records if "does not declare what it returns" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("loss plain_sum: does not declare") and "num_loss_tokens" in told[0]


def test_a_loss_whose_call_failed_is_not_warned_of(trainer, monkeypatch, caplog):
    def broken(data, logprobs):
        raise ValueError("no")

    monkeypatch.setattr(normalization, "_warned", set())
    logging.getLogger("cookbook").propagate = True
    with pytest.raises(ValueError, match="no"):
        trainer.forward_backward_custom(DATA, broken).result()
    trainer.forward_backward_custom(DATA, returns("token_sum")(plain_sum)).result()
    trainer.optim_step(STEP, "num_loss_tokens").result()
    assert not [record for record in caplog.records if "does not declare" in record.getMessage()]
    pending = PendingGradient()
    pending.add(plain_sum)()  # a backward pass that fails on the server
    assert not pending.undeclared and not pending.reductions


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda data, rows: 1.0, r"must return \(scalar tensor, dict of metrics\), got a float for datums 0, 1, 2, 3, 4"),
        (lambda data, rows: (rows[0], {}), r"must return a scalar tensor, got a tensor of shape \(\d+,\) for datums 0"),
        (lambda data, rows: (rows[0].sum(), {"x": "y"}), "metric 'x' must be a single number, got a str for datums 0"),
        (lambda data, rows: (torch.tensor(1.0), {}), "does not depend on the logprobs of datums 0, 1, 2, 3, 4"),
        (lambda data, rows: (rows[3].sum() / 0, {}), "returned -?inf for datums? "),
        (lambda data, rows: (rows[0].sum() + (rows[3] * 0 - 1).sqrt().sum(), {}), "returned nan for datum"),
    ],
)
def test_a_refused_loss_names_datums(trainer, loss, message):
    with pytest.raises(BackendError, match=message):
        trainer.forward_backward_custom(DATA, loss).result()


def test_a_datum_is_named_by_its_place_in_the_call(make_trainer):
    """Also if the loss sees a part of the call only."""

    class Picky(Multiplied):
        def __call__(self, data, logprobs):
            for index, datum in enumerate(data):
                if datum.model_input == DATA[3].model_input:
                    raise DataError(f"datum {index}: not this one")
            return super().__call__(data, logprobs)

    with pytest.raises(DataError, match="datum 3: not this one"):
        make_trainer(micro_batch_tokens=1).forward_backward_custom(DATA, Picky(parameter())).result()


def changed(datum, **inputs):
    return datum.with_inputs(**inputs)


def test_a_logprob_above_0_is_refused_where_it_is_read(trainer):
    length = DATA[2].model_input.length
    positive = np.full(length, -1.0)
    positive[-1] = 0.5
    data = [*DATA[:2], changed(DATA[2], sampling_logprobs=positive), *DATA[3:]]
    message = f"datum 2: sampling_logprobs holds 0.5 at position {length - 1}, and the logarithm of a probability is at most 0"
    with pytest.raises((DataError, BackendError), match=message):
        trainer.forward_backward(data, "ppo").result()
    with pytest.raises((DataError, BackendError), match=message.replace("sampling", "reference")):
        trainer.forward_backward([*DATA[:2], changed(DATA[2], reference_logprobs=positive)], "grpo").result()
    trainer.forward_backward(data, "cross_entropy").result()  # does not read it
    positive[0], positive[-1] = 0.5, 5e-7  # weight 0; the rounding of a sampler
    data[2] = changed(DATA[2], sampling_logprobs=positive)
    trainer.forward_backward(data, "ppo").result()


def test_a_missing_reference_names_the_remedy():
    bare = [
        type(one)(one.model_input, {k: v for k, v in one.loss_fn_inputs.items() if k != "reference_logprobs"}) for one in DATA
    ]
    for name, remedy in (("grpo", "or set kl_beta=0"), ("dpo", "or set reference_free=true")):
        with pytest.raises(DataError, match=f"datum 0: missing required field 'reference_logprobs'.*{remedy}$"):
            loss_of_call(name, None).check_data(bare)
    GRPO(kl_beta=0).check_data(bare)


def test_a_normalization_in_the_options_of_a_call_is_refused(trainer):
    with pytest.raises(ConfigError, match="forward_backward divides nothing, got 'num_sequences'; pass it to optim_step"):
        trainer.forward_backward(DATA, "grpo", {"normalization": "num_sequences"})
    trainer.forward_backward(DATA, "grpo", {"normalization": None}).result()


def test_no_datums_are_an_empty_sum(trainer):
    empty = ForwardBackwardOutput([], {"loss": 0.0, "loss:sum": 0.0})
    for name in ("cross_entropy", "dpo", "grpo"):
        assert trainer.forward_backward([], name).result() == trainer.forward([], name).result() == empty
    assert trainer.forward_backward_custom([], plain_mean).result() == empty
    trainer.forward_backward(DATA, "cross_entropy")
    trainer.forward_backward_custom([], CrossEntropy())
    assert trainer.optim_step(STEP).result().metrics["optim/grad_norm"] > 0
    trainer.forward_backward([], "dpo")
    metrics = trainer.optim_step(STEP, "num_loss_tokens").result().metrics
    assert metrics["optim/grad_norm"] == metrics["optim/num_loss_tokens"] == 0.0 and metrics["optim/divisor"] == 1.0
