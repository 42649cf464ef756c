"""Several optimizer steps per batch of rollouts: ``recipe.updates``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from runtools import SMALL, bits, checkpoint, here, rows, timeless, train  # noqa: F401

from cookbook.data import RowDatum
from cookbook.futures import Future
from cookbook.losses import GRPO, PPO
from cookbook.run import minibatches
from cookbook.run.run import Run, Step
from cookbook.types import AdamParams

ADAM = AdamParams(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
UPDATES = 3


def rollouts_of(network, seed):
    """Datums that the network has sampled, up to some noise between sampler and trainer, without old logprobs."""
    rng = np.random.default_rng(seed)
    found = []
    for one, now in zip(tiny.datums(7, seed=seed), tiny.plain_logprobs(network, tiny.datums(7, seed=seed)), strict=True):
        inputs = {key: value for key, value in one.loss_fn_inputs.items() if key in ("target_tokens", "advantages")}
        logprobs = np.minimum(now.detach().numpy() + rng.normal(0, 0.3, len(now)), 0.0)
        weights = (one.loss_fn_inputs["weights"].array != 0).astype(np.float64)
        found.append(type(one)(one.model_input, {**inputs, "sampling_logprobs": logprobs, "weights": weights}))
    return found


def independent_terms(data, logprobs, old):
    """GRPO without a KL, from its formula: clip 0.2 around the old policy, importance weights up to 5 to the sampler's."""
    total, tokens, clipped, ratios = 0.0, 0, 0, []
    for one, now, before in zip(data, logprobs, old, strict=True):
        arrays = {key: torch.as_tensor(value.array) for key, value in one.loss_fn_inputs.items()}
        for place in torch.nonzero(arrays["weights"]).ravel().tolist():
            advantage = arrays["advantages"][place]
            ratio = torch.exp(now[place] - before[place])
            weight = min(float(torch.exp(before[place] - arrays["sampling_logprobs"][place])), 5.0)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - weight * surrogate
            outside = bool((ratio > 1.2) if advantage > 0 else (ratio < 0.8))
            tokens += not outside
            clipped += bool(ratio > 1.2 or ratio < 0.8)
            ratios.append(ratio)
    return total, tokens, clipped / len(ratios)


def test_several_updates_equal_an_independent_loop_in_float64(make_trainer):
    """Two batches of rollouts with three updates each: Adam by hand, the gradient by autograd through the whole model."""
    trainer, own = make_trainer(dtype="float64"), make_trainer(dtype="float64").engine.model.network
    parameters = [one for one in own.parameters() if one.requires_grad]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in parameters]
    run = SimpleNamespace(loss=GRPO(kl_beta=0.0), trainer=trainer)
    step, shares = 0, []
    for batch in range(2):
        data = rollouts_of(own, seed=batch)
        Run.split(run, data, UPDATES)
        old = [row.detach() for row in tiny.plain_logprobs(own, data)]
        for update in range(UPDATES):
            found = trainer.forward_backward(run.minibatches.pop(0), "grpo", run.loss.call_options())
            trainer.optim_step(ADAM, "num_loss_tokens").result()
            part = data[update::UPDATES]
            loss, tokens, share = independent_terms(part, tiny.plain_logprobs(own, part), old[update::UPDATES])
            gradients = torch.autograd.grad(loss / tokens, parameters)
            step += 1
            with torch.no_grad():
                for parameter, gradient, (first, second) in zip(parameters, gradients, moments, strict=True):
                    first.mul_(0.9).add_(0.1 * gradient)
                    second.mul_(0.95).add_(0.05 * gradient**2)
                    parameter -= 3e-3 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
            metrics = found.result().metrics
            assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
            assert metrics["loss/clip_frac"] == pytest.approx(share)
            shares.append(share)
        assert run.minibatches == []
    assert tiny.difference(tiny.weights(trainer.engine), parameters) < 1e-9
    # The first update of a batch measures from its own policy; the clip acts in the later ones.
    assert shares[0] == shares[UPDATES] == 0.0 and min(max(shares[1:3]), max(shares[4:])) > 0.0


def test_losses_that_measure_from_the_sampler_get_no_old_logprobs():
    run = SimpleNamespace(loss=PPO(), trainer=None)
    data = tiny.datums(5)
    Run.split(run, data, 2)
    assert [list(map(id, part)) for part in run.minibatches] == [list(map(id, data[::2])), list(map(id, data[1::2]))]
    run.loss = GRPO()
    Run.split(run, data, 1)
    assert [id(one) for one in run.minibatches[0]] == [id(one) for one in data]
    Run.split(run, [], 2)
    assert run.minibatches == [[], []]


def test_a_checkpoint_has_the_bits_of_the_minibatches():
    plain, temperature = tiny.datums(5, seed=3), np.asarray(0.7)
    named = [RowDatum(one.model_input, {**one.loss_fn_inputs, "temperature": temperature}, "a:1", "why?") for one in plain[:2]]
    parts = [[*named, plain[2]], [], plain[3:]]
    found = minibatches.restored(minibatches.state(parts))
    assert [len(part) for part in found] == [3, 0, 2]
    for one, other in zip([*parts[0], *parts[2]], [*found[0], *found[2]], strict=True):
        assert type(one) is type(other) and one.model_input.to_ints() == other.model_input.to_ints()
        assert one.loss_fn_inputs.keys() == other.loss_fn_inputs.keys()
        for key, tensor in one.loss_fn_inputs.items():
            array = other.loss_fn_inputs[key].array
            assert array.dtype == tensor.array.dtype and array.tobytes() == tensor.array.tobytes()
    assert (found[0][0].where, found[0][0].question) == ("a:1", "why?")
    assert minibatches.restored(None) == []


@pytest.mark.slow
def test_a_run_resumes_between_two_updates_with_the_same_bits(here):  # noqa: F811
    words = [*SMALL["grpo"], "recipe.updates=2", "eval.every=null", "eval.limit=2", "weight_sync.every=2"]
    assert train(*words, "recipe.steps=4", "out=whole") == 0
    assert train(*words, "recipe.steps=3", "out=parts") == 0
    assert "minibatches" in checkpoint("parts").joinpath("checkpoint.json").read_text()
    assert train(*words, "recipe.steps=4", "out=parts") == 0
    trained = [[row for row in timeless(folder) if row["step"] != 3] for folder in ("whole", "parts")]
    assert trained[0] == trained[1]
    assert bits(checkpoint("whole")) == bits(checkpoint("parts"))
    first, second, third, fourth = rows("whole")[1:]
    assert "reward/mean" in first and "reward/mean" not in second and "reward/mean" in third
    assert abs(first["loss/ratio_mean"] - 1) < 1e-6 and first["loss/clip_frac"] == 0.0
    assert second["kl/old_policy"] > 1e-6 and fourth["kl/old_policy"] > 1e-6
    # Half of the completions are trained in each of the two steps.
    assert second["optim/num_sequences"] <= 12


@pytest.mark.parametrize("every", [3, 5])
def test_a_sync_between_two_batches_of_rollouts_is_refused(every, here, capsys):  # noqa: F811
    assert train(*SMALL["grpo"], "recipe.updates=2", f"weight_sync.every={every}") == 2
    line = f"weight_sync.every={every}: with recipe.updates=2 only one step in 2 samples; use a multiple of 2, or 1"
    assert line in capsys.readouterr().err
    assert train(*SMALL["grpo"], "recipe.updates=0") == 2
    assert "recipe.updates: must be at least 1, got 0; 1 makes one optimizer step per batch" in capsys.readouterr().err


@pytest.mark.parametrize(("updates", "rate"), [(3, 0.0), (1, 0.01)])
def test_an_update_without_completions_moves_no_weight(updates, rate):
    """Momentum of earlier steps would move the weights. With one step per batch it does."""
    sent = []
    run = Run.__new__(Run)
    run.cfg = SimpleNamespace(updates=updates)
    run.optim = SimpleNamespace(adam=lambda factor: AdamParams(learning_rate=0.01 * factor))
    run.schedule = SimpleNamespace(factor=lambda step, total: 1.0)
    run.loss = SimpleNamespace(normalization=None)
    run.trainer = SimpleNamespace(optim_step=lambda adam, normalization: sent.append(adam) or Future())
    run._calls, run._accumulated = SimpleNamespace(add=lambda call: None), []
    run.forward_backward([])
    run.optim_step(Step(4, 9))
    assert sent[0].learning_rate == rate
