"""Properties of every loss: its declared reduction and scope, its gradient, its inputs, its options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from places import ROOT

import cookbook.losses
from cookbook.check.batches import USUAL_KEYS, RandomBatch, datum, without
from cookbook.check.batches import random_batch as random_loss_batch
from cookbook.check.bench import along, evaluate, slope_along
from cookbook.config.typed import construct_target
from cookbook.errors import ConfigError, DataError
from cookbook.losses import (
    CISPO,
    DFT,
    DPO,
    DPPO,
    DRO,
    GRPO,
    GSPO,
    LOSSES,
    ORPO,
    PPO,
    SAPO,
    CrossEntropy,
    ImportanceSampling,
    Loss,
    get_loss,
    loss_class,
)
from cookbook.losses.normalization import GradientCounts, Normalization, Reduction, as_normalization, check
from cookbook.losses.orpo import log_odds
from cookbook.losses.policy import bounded_exp, k3

CONF = ROOT / "conf" / "loss"
EVERY = sorted(LOSSES)
POLICY = [name for name in EVERY if issubclass(loss_class(name), cookbook.losses.policy.PolicyLoss)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_batch(draws: np.random.Generator, sequences: int = 4, binary_weights: bool = False) -> RandomBatch:
    """Datums with every key under one name, and logprobs for them."""
    return random_loss_batch(draws, USUAL_KEYS - {"logprobs"}, sequences, binary_weights)


# ---- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_loss_is_called_what_the_registry_calls_it(name: str) -> None:
    loss = get_loss(name)
    assert loss.name == name
    assert getattr(cookbook.losses, type(loss).__name__) is type(loss)
    assert get_loss(name, asdict(loss)) == loss


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("gropo", {}, ["gropo", "Did you mean 'grpo'?"]),
        ("grpo", {"clip_lo": 0.1}, ["clip_lo", "Did you mean 'clip_low'?"]),
        ("grpo", {"clip_low": "wide"}, ["clip_low", "a number", "'wide'"]),
        ("dpo", {"variant": "sigmoidal"}, ["variant", "sigmoid", "ipo", "'sigmoidal'"]),
        ("grpo", {"normalization": "tokens"}, ["normalization", "num_loss_tokens", "'tokens'"]),
    ],
)
def test_mistakes_in_names_and_options_are_explained(name: str, config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        get_loss(name, config)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="GROPO"):
        _ = cookbook.losses.GROPO


def test_the_registry_imports_no_torch() -> None:
    code = "import sys, cookbook.losses; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: GRPO(clip_low=1.5), "clip_low"),
        (lambda: GRPO(clip_low=float("nan")), "clip_low"),
        (lambda: GRPO(clip_high=-0.1), "clip_high"),
        (lambda: GRPO(clip_max=1.0), "clip_max"),
        (lambda: GRPO(kl_beta=-1.0), "kl_beta"),
        (lambda: GRPO(importance_cap=0.0), "importance_cap"),
        (lambda: GRPO(icepop_threshold=0.5), "icepop_threshold"),
        (lambda: GRPO(icepop_threshold=2.0, importance_level="sequence"), "icepop_threshold"),
        (lambda: GRPO(length_divisor=0.0), "length_divisor"),
        (lambda: GRPO(anchor="rollout"), "anchor"),  # type: ignore[arg-type]
        (lambda: GRPO(ratio="word"), "ratio"),  # type: ignore[arg-type]
        (lambda: GRPO(importance_level="word"), "importance_level"),  # type: ignore[arg-type]
        (lambda: PPO(clip_low_threshold=1.3), "clip_low_threshold"),
        (lambda: CISPO(clip_high_threshold=float("inf")), "clip_high_threshold"),
        (lambda: DRO(beta=-0.1), "beta"),
        (lambda: SAPO(tau_negative=0.0), "tau_negative"),
        (lambda: DPPO(threshold_high=0.0), "threshold_high"),
        (lambda: DPPO(divergence="js"), "divergence"),  # type: ignore[arg-type]
        (lambda: DPO(beta=0.0), "beta"),
        (lambda: DPO(variant="kto"), "variant"),  # type: ignore[arg-type]
        (lambda: DPO(label_smoothing=0.5), "label_smoothing"),
        (lambda: DPO(variant="ipo", label_smoothing=0.1), "label_smoothing"),
        (lambda: DPO(variant="simpo", simpo_gamma=-1.0), "simpo_gamma"),
        (lambda: ORPO(odds_weight=-1.0), "odds_weight"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Loss], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make()


# ---- what it returns, and what it is divided by ----------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_dividing_a_mean_again_is_refused(name: str) -> None:
    cls = loss_class(name)
    mean = cls.reduction is Reduction.mean
    assert cls().normalization == (None if mean else Normalization.num_loss_tokens)
    assert cls(normalization=None).normalization is None  # type: ignore[call-arg]
    for division in Normalization:
        if mean:
            with pytest.raises(ConfigError, match="already returns a mean"):
                cls(normalization=division)  # type: ignore[call-arg]
        else:
            assert cls(normalization=str(division)).normalization is division  # type: ignore[call-arg]


def test_a_sum_over_sequences_is_not_divided_by_tokens() -> None:
    check("loss", Reduction.sequence_sum, Normalization.num_sequences)
    with pytest.raises(ConfigError, match="num_sequences"):
        check("loss", Reduction.sequence_sum, Normalization.num_loss_tokens)


def test_the_divisor_is_what_was_counted() -> None:
    counts = GradientCounts()
    assert [counts.divisor(division) for division in (None, *Normalization)] == [1.0, 1.0, 1.0]  # nothing to divide
    counts.add(num_loss_tokens=5, num_sequences=2)
    counts.add(num_loss_tokens=1, num_sequences=1)
    assert counts.divisor(None) == 1.0
    assert counts.divisor(Normalization.num_loss_tokens) == 6.0
    assert counts.divisor(Normalization.num_sequences) == 3.0
    assert as_normalization("none") is None and as_normalization("num_sequences") is Normalization.num_sequences
    with pytest.raises(ConfigError, match="expected null, num_loss_tokens, num_sequences, got 'tokens'"):
        as_normalization("tokens")


def test_prepared_weights_sum_to_one_in_double_precision() -> None:
    data = [datum(4, weights=np.array([0, 1, 1, 0.3], np.float32)), datum(3, weights=[1.0] * 3)]
    prepared = CrossEntropy().prepare(data)
    weights = [one.loss_fn_inputs["weights"].array for one in prepared]
    assert {row.dtype for row in weights} == {np.dtype("float64")}
    assert sum(row.sum() for row in weights) == pytest.approx(1.0, rel=1e-12)
    assert weights[1] == pytest.approx(np.full(3, 1 / 5.3), rel=1e-7)  # 0.3 was single precision
    again = [one.loss_fn_inputs["weights"].array for one in CrossEntropy().prepare(prepared)]
    assert np.concatenate(again) == pytest.approx(np.concatenate(weights), rel=1e-12)
    ones = CrossEntropy().prepare([datum(3), datum(1)])
    assert [one.loss_fn_inputs["weights"].tolist() for one in ones] == [[0.25] * 3, [0.25]]
    with pytest.raises(DataError, match="datum 1: missing field 'weights', which datum 0 has"):
        CrossEntropy().prepare([data[0], datum(3)])


@pytest.mark.parametrize("data", [[datum(2, weights=[0.0, 0.0])], [datum(2, weights=[1.0, -1.0])], []])
def test_a_step_without_weight_has_no_mean(data: list[Any]) -> None:
    for loss in (CrossEntropy(), DFT()):
        with pytest.raises(DataError, match=r"sum to 0.*weight above 0"):
            loss.prepare(data)


# ---- gradients -------------------------------------------------------------------------------------------------------

SMOOTH: dict[str, tuple[Loss, bool]] = {  # True: weights of 0 and 1, which the exact gradient of a sequence ratio needs
    "cross_entropy": (CrossEntropy(), False),
    "grpo": (GRPO(kl_beta=0.05, clip_max=1.4), False),
    "grpo, against the sampler": (GRPO(kl_beta=0.05), False),
    "grpo, icepop": (GRPO(icepop_threshold=1.3, length_divisor=7.0), False),
    "grpo, sequence weights": (GRPO(importance_level="sequence"), False),
    "grpo, sequence ratio against the sampler": (GRPO(kl_beta=0.05, ratio="sequence"), True),
    "importance_sampling": (ImportanceSampling(), False),
    "ppo": (PPO(), False),
    "gspo": (GSPO(), True),
    "dro": (DRO(), False),
    "sapo": (SAPO(), False),
    "dppo": (DPPO(threshold_low=0.05, threshold_high=0.05), False),
    "dppo, kl": (DPPO(divergence="kl", threshold_low=0.01, threshold_high=0.02), False),
    **{f"dpo, {name}": (DPO(variant=name), False) for name in ("sigmoid", "hinge", "ipo", "ipo_sum", "simpo")},
    "dpo, conservative": (DPO(label_smoothing=0.1), False),
    "dpo, robust": (DPO(variant="robust", label_smoothing=0.1, reference_free=True), False),
    "orpo": (ORPO(), False),
}


@pytest.mark.parametrize("case", SMOOTH)
def test_the_gradient_is_the_slope_of_the_value(case: str) -> None:
    """Central differences along random directions. A kink within the step of 1e-6 of a token has odds of about 1e-5."""
    loss, binary = SMOOTH[case]
    draws = rng(2)
    for _ in range(50):
        data, logprobs = random_batch(draws, sequences=2, binary_weights=binary)
        if "against the sampler" in case:
            data = [without(one, "old_logprobs") for one in data]
        direction = [draws.normal(size=len(row)) for row in logprobs]
        promised = along(evaluate(loss, data, logprobs).gradients, direction)
        found = slope_along(loss, data, logprobs, direction)
        # the difference of two values of order 10 known to 1e-16 each, over 2e-6
        assert promised == pytest.approx(found, rel=1e-5, abs=1e-8)


def test_stopped_gradients() -> None:
    """Where a factor is a constant to the gradient, the slope of the value is not the gradient: compare with the formula."""
    data, logprobs = random_batch(rng(3))
    fields = [{key: tensor.array for key, tensor in one.loss_fn_inputs.items()} for one in data]
    for loss, formula in (
        (DFT(), lambda p, q, a, w: -w * np.exp(p)),
        (CISPO(clip_high_threshold=1.1), lambda p, q, a, w: -w * a * np.clip(np.exp(p - q), 0, 1.1)),
    ):
        _, gradients, _ = evaluate(loss, data, logprobs)
        for found, p, one in zip(gradients, logprobs, fields, strict=True):
            expected = formula(p, one["sampling_logprobs"], one["advantages"], one["weights"])
            assert found == pytest.approx(expected, rel=1e-12)


def test_the_first_update_needs_no_old_logprobs() -> None:
    """Anchored at the trainer, it is where the policy stands: ratio 1, and the gradient is the importance weight times -A."""
    data, logprobs = random_batch(rng(4))
    bare = [without(one, "old_logprobs") for one in data]
    explicit = [one.with_inputs(old_logprobs=p) for p, one in zip(logprobs, data, strict=True)]
    loss = GRPO(kl_beta=0.0, anchor="trainer")
    value, gradients, metrics = evaluate(loss, bare, logprobs)
    assert (value, gradients) == evaluate(loss, explicit, logprobs)[:2]
    assert metrics["loss/ratio_mean"] == 1.0 and metrics["loss/clip_frac"] == 0.0
    for found, p, one in zip(gradients, logprobs, bare, strict=True):
        inputs = {key: tensor.array for key, tensor in one.loss_fn_inputs.items()}
        weight = np.minimum(np.exp(p - inputs["sampling_logprobs"]), 5.0)
        assert found == pytest.approx(-weight * inputs["advantages"] * inputs["weights"], rel=1e-12)


def test_the_reference_kl_has_a_gradient() -> None:
    data, logprobs = random_batch(rng(5))
    _, without, _ = evaluate(GRPO(kl_beta=0.0), data, logprobs)
    _, with_kl, _ = evaluate(GRPO(kl_beta=0.3), data, logprobs)
    for one, p, low, high in zip(data, logprobs, without, with_kl, strict=True):
        inputs = {key: tensor.array for key, tensor in one.loss_fn_inputs.items()}
        expected = 0.3 * (1 - np.exp(inputs["reference_logprobs"] - p)) * inputs["weights"]
        assert np.subtract(high, low) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_ratios_far_out_stay_finite_and_keep_pushing() -> None:
    """A token with a negative advantage became e^60 times more likely: a clamped ratio would have no gradient to undo that."""
    data = [datum(2, sampling_logprobs=[-61.0, -1.0], advantages=[-1.0, 1.0], reference_logprobs=[-1.0, -70.0])]
    for loss in (GRPO(anchor="sampler"), ImportanceSampling(), PPO(), GSPO()):
        value, gradients, _ = evaluate(loss, data, [[-1.0, -90.0]], torch.float32)
        assert np.isfinite(value) and np.isfinite(gradients).all()
    _, gradients, _ = evaluate(ImportanceSampling(), data, [[-1.0, -1.0]], torch.float32)
    assert gradients[0][0] == pytest.approx(np.exp(20), rel=1e-6)
    far = torch.tensor([-100.0, -20.0, 19.0, 20.0, 21.0, 500.0], dtype=torch.float64, requires_grad=True)
    for function in (bounded_exp, k3):
        (slope,) = torch.autograd.grad(function(far).sum(), far)
        assert torch.isfinite(slope).all()
    assert bounded_exp(far).tolist()[:4] == pytest.approx(np.exp([-100, -20, 19, 20]), rel=1e-12)


def test_k3_is_exact_near_zero_in_single_precision() -> None:
    small = torch.tensor([1e-4, -1e-4, 0.0])
    assert k3(small).tolist() == pytest.approx([5e-9, 5e-9, 0.0], rel=1e-2)  # exp(x) - x - 1 would say 0 or 1.2e-7
    assert (k3(torch.linspace(-1e-3, 1e-3, 2001)) >= 0).all()


def test_log_odds_and_its_slope_are_finite_everywhere() -> None:
    """From -1e-6 to -80 as the formula says; above that the tangent, so that a certain token is still pushed."""
    values = -np.logspace(-6, np.log10(80), 400)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        logprob = torch.tensor(values, dtype=dtype, requires_grad=True)
        odds = log_odds(logprob)
        odds.sum().backward()
        assert odds.tolist() == pytest.approx(values - np.log(-np.expm1(values)), rel=tolerance, abs=1e-6)
        assert logprob.grad is not None
        assert logprob.grad.tolist() == pytest.approx(-1 / np.expm1(values), rel=1e-5)
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).backward()
    assert certain.grad is not None and float(certain.grad) == pytest.approx(1e6, rel=1e-5)


def test_orpo_bears_certain_and_impossible_answers() -> None:
    for chosen, rejected in ((0.0, -80.0), (-80.0, 0.0), (-1e-6, -1e-6), (0.0, 0.0), (-80.0, -80.0)):
        value, gradients, _ = evaluate(ORPO(), [datum(1), datum(1)], [[chosen], [rejected]], torch.float32)
        assert np.isfinite(value) and np.isfinite(gradients).all()
        assert gradients[0][0] < 0 <= gradients[1][0]


# ---- what it reads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EVERY, "grpo/sequence"])
def test_masked_tokens_change_nothing_bit_for_bit(name: str) -> None:
    loss = GRPO(ratio="sequence", importance_level="sequence") if name == "grpo/sequence" else get_loss(name)
    data, logprobs = random_batch(rng(6), binary_weights=True)
    expected = evaluate(loss, data, logprobs, torch.float32)
    for junk in (-3.0, 40.0, -1e30):
        wild = []
        for one in data:
            masked = one.loss_fn_inputs["weights"].array == 0
            keys = set(one.loss_fn_inputs) - {"weights", "target_tokens"}
            wild.append(one.with_inputs(**{k: np.where(masked, junk, one.loss_fn_inputs[k].array) for k in keys}))
        assert evaluate(loss, wild, logprobs, torch.float32) == expected
    masks = [one.loss_fn_inputs["weights"].array == 0 for one in data]
    impossible = [np.where(mask, -np.inf, row) for mask, row in zip(masks, logprobs, strict=True)]
    value, gradients, metrics = evaluate(loss, data, impossible, torch.float32)
    assert (value, gradients, metrics) == expected
    assert not any(np.asarray(row)[mask].any() for row, mask in zip(gradients, masks, strict=True))


def test_without_weights_unsampled_tokens_are_left_out_of_dro() -> None:
    """Tinker's callers send 0 for sampling logprob and advantage of the prompt, and no weights."""
    arrays = {"logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 0.0]}
    value, gradients, metrics = evaluate(DRO(beta=0.5), [datum(3, **arrays)], [[-4.0, -1.5, -1.0]])
    masked = evaluate(DRO(beta=0.5), [datum(3, weights=[0.0, 1.0, 1.0], **arrays)], [[-4.0, -1.5, -1.0]])
    assert (value, gradients, metrics) == masked
    assert gradients[0][0] == 0 and gradients[0][2] == pytest.approx(0.5)  # beta (p - q), though the advantage is 0


def test_bounds_in_the_datum_win_over_the_options() -> None:
    arrays = {"logprobs": [-1.0] * 2, "advantages": [1.0] * 2}
    now = [-1.0 + np.log(1.5)] * 2
    own = {"clip_low_threshold": [0.0, 0.0], "clip_high_threshold": [1.3, 2.0]}
    for loss, slopes in ((PPO(), [0.0, -1.5]), (CISPO(clip_high_threshold=1.0), [-1.3, -1.5]), (GSPO(), [0.0, -1.5])):
        _, gradients, _ = evaluate(loss, [datum(2, **arrays, **own)], [now])
        assert gradients[0] == pytest.approx(slopes, rel=1e-12), loss.name
    with pytest.raises(DataError, match="datum 1: clip_low_threshold is above"):
        evaluate(PPO(), [datum(2, **arrays, **own), datum(2, **arrays, **{**own, "clip_low_threshold": [9.0, 0.0]})], [now] * 2)


def test_gspo_reads_the_ratio_mask_of_tinker() -> None:
    arrays = {"logprobs": [0.0, -1.0, -1.0], "advantages": [0.0, 1.0, 1.0]}
    now = [[-5.0, -1.0 + np.log(1.1), -3.0]]
    _, gradients, _ = evaluate(GSPO(), [datum(3, **arrays, sequence_ratio_mask=[0.0, 1.0, 0.0])], now)
    assert gradients[0] == pytest.approx([0.0, -1.1, -1.1], rel=1e-12)


def test_several_targets_per_position() -> None:
    """Soft targets (T, K), and datums of different K in one batch; only the supervised losses support them."""
    weights = np.array([[0.7, 0.3], [0.0, 0.0], [0.5, 0.5]])
    data = [datum(3, target_tokens=np.zeros((3, 2), int), weights=weights), datum(2, weights=[1.0] * 2)]
    logprobs = [-np.arange(1.0, 7.0).reshape(3, 2), [-1.0, -2.0]]
    value, gradients, _ = evaluate(CrossEntropy(), data, logprobs)
    assert value == pytest.approx(0.7 + 0.6 + 2.5 + 3.0 + 3.0)
    assert gradients[0] == (-weights).tolist()
    prepared = CrossEntropy().prepare(data)
    assert evaluate(CrossEntropy(), prepared, logprobs)[0] == pytest.approx(value / 4)
    with pytest.raises(DataError, match=r"datum 0: weights has 3 values and logprobs shape \(3, 2\)"):
        evaluate(CrossEntropy(), [data[0].with_inputs(weights=[1.0] * 3)], logprobs[:1])
    with pytest.raises(DataError, match=r"datum 0: .*one target per position"):
        evaluate(ImportanceSampling(), [datum(3, logprobs=np.zeros((3, 2)), advantages=np.zeros((3, 2)))], logprobs[:1])


@pytest.mark.parametrize("name", EVERY)
def test_missing_misaligned_and_infinite_fields_name_the_datum(name: str) -> None:
    loss = get_loss(name)
    data, logprobs = random_batch(rng(7))
    required = set(loss.needs) - {"target_tokens"} | ({"reference_logprobs"} if loss.needs_reference else set())
    for key in sorted(required | {"weights"}):
        lengths = (len(logprobs[2]), len(logprobs[2]) - 1)
        partial = [*data[:2], without(data[2], key), *data[3:]]
        short = [*logprobs[:2], logprobs[2][:-1], *logprobs[3:]]
        holed = np.where(np.arange(lengths[0]) == 1, np.nan, data[2].loss_fn_inputs[key].array)
        bad = [*data[:2], data[2].with_inputs(**{key: holed}), *data[3:]]
        scalar = [*data[:2], data[2].with_inputs(**{key: 1.0}), *data[3:]]
        for call in (lambda rows: evaluate(loss, rows, logprobs), loss.check_data):
            with pytest.raises(DataError, match=rf"^datum 2: missing (required )?field '{key}'"):
                call(partial)
            with pytest.raises(DataError, match=rf"^datum 2: {key} holds nan at position 1"):
                call(bad)
            with pytest.raises(DataError, match=rf"^datum 2: {key} has one value for the whole sequence and .* {lengths[0]}"):
                call(scalar)
        with pytest.raises(DataError, match=rf"^datum 2: \w+ has {lengths[0]} values and logprobs {lengths[1]} values"):
            evaluate(loss, data, short)
    for key in required:
        with pytest.raises(DataError, match=rf"^datum 0: missing required field '{key}'.*hold .*target_tokens"):
            evaluate(loss, [without(one, key) for one in data], logprobs)
    with pytest.raises(DataError, match=f"{len(data)} datums and logprobs of {len(data) - 1}"):
        evaluate(loss, data, logprobs[:-1])
    loss.check_data(data)


def test_targets_are_asked_for_before_anything_runs() -> None:
    bare = datum(2)
    bare = type(bare)(bare.model_input, {})
    for name in EVERY:
        with pytest.raises(DataError, match=r"^datum 1: missing required field '"):
            get_loss(name).check_data([random_batch(rng())[0][0], bare])
    with pytest.raises(DataError, match=r"^datum 0: missing required field 'target_tokens'"):
        CrossEntropy().prepare([bare])


def test_a_reference_is_needed_where_one_is_read() -> None:
    needing = {name for name in EVERY if get_loss(name).needs_reference}
    assert needing == {"dpo", "grpo", "kto"}
    for loss in (GRPO(kl_beta=0.0), DPO(variant="simpo"), DPO(reference_free=True)):
        assert not loss.needs_reference
        data, logprobs = random_batch(rng())
        bare = [without(one, "reference_logprobs") for one in data]
        evaluate(loss, bare, logprobs)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_pairs_are_whole_and_have_responses(name: str) -> None:
    data, logprobs = random_batch(rng())
    with pytest.raises(DataError, match=r"3 datums.*chosen, rejected"):
        evaluate(get_loss(name), data[:3], logprobs[:3])
    empty = data[3].with_inputs(weights=np.zeros(len(logprobs[3])))
    with pytest.raises(DataError, match=r"^datum 3: the weights of the rejected response sum to 0"):
        evaluate(get_loss(name), [*data[:3], empty], logprobs)


@pytest.mark.parametrize("name", POLICY)
def test_every_policy_loss_tells_sampler_and_trainer_apart(name: str) -> None:
    """KL(sampler || trainer) with tokens drawn from the sampler: k1 is the mean of q - p, k3 is never negative."""
    draw = random_batch(rng(8))
    _, _, metrics = evaluate(get_loss(name), *draw)
    gaps = np.concatenate(
        [
            (one.loss_fn_inputs["sampling_logprobs"].array - row)[~mask]
            for one, row, mask in zip(*draw, draw.masked, strict=True)
        ]
    )
    assert metrics["kl/sampler_trainer_k1"] == pytest.approx(gaps.mean(), rel=1e-12)
    assert metrics["kl/sampler_trainer_k3"] == pytest.approx((np.expm1(-gaps) + gaps).mean(), rel=1e-12)
    assert "loss/ratio_mean" in metrics and all("/" in key and np.isfinite(metrics[key]) for key in metrics)


def test_sampling_logprobs_go_by_both_names() -> None:
    data, logprobs = random_batch(rng(9))
    renamed = [without(one.with_inputs(logprobs=one.loss_fn_inputs["sampling_logprobs"]), "sampling_logprobs") for one in data]
    for name in POLICY:
        assert evaluate(get_loss(name), renamed, logprobs) == evaluate(get_loss(name), data, logprobs)
        get_loss(name).check_data(renamed)


# ---- conf/loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_restate_the_defaults_and_presets_only_what_differs(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    assert len(path.read_text().splitlines()) <= 30
    if "defaults" not in written:
        loss = construct_target(written, "loss")
        assert type(loss) is loss_class(path.stem)
        written.pop("_target_")
        assert list(written) == list(asdict(loss))
        assert written == asdict(type(loss)()) == asdict(loss)
        return
    base, last = written.pop("defaults")
    assert last == "_self_"
    written = {key: 16 if str(value).startswith("${") else value for key, value in written.items()}
    defaults = asdict(loss_class(base)())
    assert all(defaults[key] != value for key, value in written.items())
    assert get_loss(base, written) != loss_class(base)()


# ---- how well a text is predicted ------------------------------------------------------------------------------------


def test_perplexity_and_bits_per_byte() -> None:
    """Closed form: two tokens of probability 1/2 and 1/8 spell 4 bytes; weights scale the mean and not the information."""
    one = datum(3, weights=[0.0, 1.0, 0.5]).with_inputs(num_bytes=4)
    logprobs = [torch.log(torch.tensor([0.9, 0.5, 0.125], dtype=torch.float64))]
    for loss in (CrossEntropy(), DFT()):
        _, metrics = loss([one], logprobs)
        assert metrics["loss/nll"] == pytest.approx((np.log(2) + 0.5 * np.log(8)) / 1.5, rel=1e-12)
        assert metrics["loss/perplexity"] == pytest.approx(np.exp(metrics["loss/nll"]), rel=1e-12)
        assert metrics["loss/bits_per_byte"] == pytest.approx((1 + 3) / 4, rel=1e-12)
    _, metrics = CrossEntropy()([datum(3)], logprobs)
    assert "loss/bits_per_byte" not in metrics
