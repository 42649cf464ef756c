"""Golden numbers of the losses and the small maths around them, made with numpy, independently of this project.

They come twice: copied here to ten digits, so that the tests run anywhere, and from ``shared/golden/losses.json`` in
full where that file is.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from places import SHARED

from cookbook.check.batches import datum
from cookbook.check.bench import evaluate
from cookbook.config.optim import WSD, Constant, Cosine, Linear
from cookbook.losses import CISPO, DFT, DPO, DPPO, DRO, GRPO, GSPO, ORPO, PPO, SAPO, CrossEntropy, ImportanceSampling
from cookbook.losses.policy import importance_weights, k3
from cookbook.sampling.advantages import group_advantages

FILE = SHARED / "golden" / "losses.json"

INLINE: dict[str, Any] = {
    "advantages": {
        "binary": {
            "rewards": [1, 0, 0, 1],
            "center": [0.5, -0.5, -0.5, 0.5],
            "z_sample_std_eps1e-8": [0.8660253888, -0.8660253888, -0.8660253888, 0.8660253888],
        },
        "graded": {
            "rewards": [0.2, 0.9, 0.4, 0.4],
            "center": [-0.275, 0.425, -0.075, -0.075],
            "z_sample_std_eps1e-8": [-0.9209401633, 1.4232711614, -0.2511654991, -0.2511654991],
        },
        "one_success_of_8": {
            "rewards": [1] + [0] * 7,
            "center": [0.875] + [-0.125] * 7,
            "z_sample_std_eps1e-8": [2.4748736642] + [-0.3535533806] * 7,
        },
    },
    "tis": {
        "inputs": {
            "old_policy": [-1, -0.5, -2, -0.3],
            "behaviour": [-1.2, -2.5, -1, -0.3],
            "cap": 5,
            "icepop_threshold": 2,
        },
        "token": {"weight": [1.2214027582, 5, 0.3678794412, 1], "weight_mean": 1.8973205498, "clip_frac": 0.25},
        "sequence": {"weight": 1.3498588076},
        "icepop": {"weight": [1.2214027582, 0, 0, 1], "dropped_frac": 0.5},
    },
    "grpo": {
        "inputs": {
            "samples": [
                {
                    "A": 1.0,
                    "pi": [-0.7, -1.1, -0.4, -2],
                    "old": [-1, -1.1, -0.9, -1.8],
                    "inf": [-1.05, -1.3, -0.9, -1.8],
                    "ref": [-0.9, -1, -0.6, -2.5],
                    "mask": [1, 1, 0, 1],
                },
                {
                    "A": -0.5,
                    "pi": [-0.2, -1.5, -0.9],
                    "old": [-0.6, -1.2, -0.9],
                    "inf": [-0.6, -1.1, -2.9],
                    "ref": [-0.3, -1.4, -0.8],
                    "mask": [1, 1, 1],
                },
            ]
        },
        "per_token_loss": [
            [-1.260588778, -1.2211442123, 0, -0.8134042201],
            [0.7461542197, 0.3621935131, 2.5002585459],
        ],
        "grad_wrt_logprob": [
            [0.0090634623, -1.2266613041, 0, -0.7990572861],
            [0.7506704779, -0.0052585459, 2.4947414541],
        ],
        "loss_sum": 0.3134690684,
        "nonzero_grad_tokens": 6,
        "metrics": {
            "ppo_kl": 0.0335387465,
            "ref_kl": 0.0242685975,
            "tis/weight_mean": 1.6962518788,
            "ppo_clip_frac": 0.5,
            "ppo_ratio_mean": 1.0668720798,
        },
    },
    "grpo_no_kl": {
        "loss_sum": 0.3061884891,
        "nonzero_grad_tokens": 4,
        "grad_wrt_logprob": [[0, -1.2214027582, 0, -0.8187307531], [0.7459123488, 0, 2.5]],
    },
    "grpo_clip_higher": {"loss_sum": 0.2220868014},
    "kl_estimators": {
        "pi": [-1, -0.2, -3],
        "ref": [-2, -0.5, -1],
        "k3": [0.3678794412, 0.0408182207, 4.3890560989],
        "grad_k3": [0.6321205588, 0.2591817793, -6.3890560989],
    },
    "policy_loss_table": {
        "adv=+1": {
            "ratio": [0.5, 0.8, 1, 1.2, 1.5, 4],
            "ppo_eps0.2": [-0.5, -0.8, -1, -1.2, -1.2, -1.2],
            "ppo_grad": [-0.5, -0.8, -1, -1.2, 0, 0],
            "dual_clip_c3": [-0.5, -0.8, -1, -1.2, -1.2, -1.2],
            "dual_clip_c3_grad": [-0.5, -0.8, -1, -1.2, 0, 0],
            "dapo_0.2_0.28": [-0.5, -0.8, -1, -1.2, -1.28, -1.28],
            "cispo_0.8_1.28": [1.3545177444, 0.9785148411, 1, 0.9812141318, 0.7610046616, -0.4944567822],
            "cispo_grad": [-0.8, -0.8, -1, -1.2, -1.28, -1.28],
            "importance_sampling": [-0.5, -0.8, -1, -1.2, -1.5, -4],
            "is_grad": [-0.5, -0.8, -1, -1.2, -1.5, -4],
            "dro_beta0.05": [1.7051585059, 1.2243883774, 1, 0.818509472, 0.5986449407, -0.3382490597],
            "dro_grad": [-1.034657359, -1.0111571776, -1, -0.9908839222, -0.9797267446, -0.9306852819],
        },
        "adv=-1": {
            "ratio": [0.5, 0.8, 1, 1.2, 1.5, 4],
            "ppo_eps0.2": [0.8, 0.8, 1, 1.2, 1.5, 4],
            "ppo_grad": [0, 0.8, 1, 1.2, 1.5, 4],
            "dual_clip_c3": [0.8, 0.8, 1, 1.2, 1.5, 3],
            "dual_clip_c3_grad": [0, 0.8, 1, 1.2, 1.5, 0],
            "dapo_0.2_0.28": [0.8, 0.8, 1, 1.2, 1.5, 4],
            "cispo_0.8_1.28": [-1.3545177444, -0.9785148411, -1, -0.9812141318, -0.7610046616, 0.4944567822],
            "cispo_grad": [0.8, 0.8, 1, 1.2, 1.28, 1.28],
            "importance_sampling": [0.5, 0.8, 1, 1.2, 1.5, 4],
            "is_grad": [0.5, 0.8, 1, 1.2, 1.5, 4],
            "dro_beta0.05": [-1.6811358552, -1.2218987252, -1, -0.8168474145, -0.590424843, 0.4343396625],
            "dro_grad": [0.965342641, 0.9888428224, 1, 1.0091160778, 1.0202732554, 1.0693147181],
        },
    },
    "gspo": {
        "inputs": {"pi": [-0.9, -0.3, -1.6, -0.5], "old": [-1, -1.3, -1.5, -0.6], "mask": [1, 0, 1, 1]},
        "active_only(correct)": {"seq_ratio": 1.0338951135, "loss_token_broadcast_sum": -3.1016853405},
    },
    "dpo": {
        "inputs": {
            "pairs(response-only logprobs)": [
                {"pc": [-0.1, -0.1], "pr": [-0.1, -2], "rc": [-0.5, -0.5], "rr": [-1, -1]},
                {"pc": [-1, -0.5, -0.25], "pr": [-0.75, -0.5], "rc": [-0.8, -0.7, -0.3], "rr": [-1, -0.5]},
            ]
        },
        "per_pair": [
            {
                "margin": 0.9,
                "loss": 0.649159339,
                "grad_per_chosen_token": -0.0477515175,
                "grad_per_rejected_token": 0.0477515175,
                "chosen_reward": 0.08,
                "rejected_reward": -0.01,
                "cdpo_label_smoothing_0.1": 0.658159339,
                "robust_0.1": 0.637909339,
                "ipo": 20.7025,
                "ipo_sum_logps": 16.81,
                "hinge": 0.91,
                "simpo_beta2_gamma0.5": 0.2204174099,
            },
            {
                "margin": -0.2,
                "loss": 0.7031971797,
                "grad_per_chosen_token": -0.0504999833,
                "grad_per_rejected_token": 0.0504999833,
                "chosen_reward": 0.005,
                "rejected_reward": 0.025,
                "cdpo_label_smoothing_0.1": 0.7011971797,
                "robust_0.1": 0.7056971797,
                "ipo": 26.0950694444,
                "ipo_sum_logps": 27.04,
                "hinge": 1.02,
                "simpo_beta2_gamma0.5": 0.9230267127,
            },
        ],
        "batch_mean": 0.6761782594,
        "accuracy": 0.5,
        "at_reference(loss)": 0.6931471806,
    },
    "orpo": {
        "inputs": [
            {"c": [-0.5, -0.3, -0.1], "r": [-1, -1.4]},
            {"c": [-2, -1], "r": [-0.4, -0.2, -0.6]},
            {"c": [-0.01], "r": [-30]},
        ],
        "per_pair": [
            {
                "log_odds_ratio": 1.891843195,
                "nll": 0.3,
                "or_loss": 0.1404518005,
                "loss_lambda1": 0.4404518005,
                "loss_lambda0.1": 0.31404518,
                "grad_per_chosen_token": -0.501856564,
                "grad_per_rejected_token": 0.0937559867,
            },
            {
                "log_odds_ratio": -1.9571504727,
                "nll": 1.5,
                "or_loss": 2.0892837149,
                "loss_lambda1": 3.5892837149,
                "loss_lambda0.1": 1.7089283715,
                "grad_per_chosen_token": -1.0639453305,
                "grad_per_rejected_token": 0.8859341984,
            },
            {
                "log_odds_ratio": 34.6001660193,
                "nll": 0.01,
                "or_loss": 0,
                "loss_lambda1": 0.01,
                "loss_lambda0.1": 0.01,
                "grad_per_chosen_token": -1,
                "grad_per_rejected_token": 0,
            },
        ],
        "batch_mean_lambda1": 1.3465785051,
    },
}


@pytest.fixture(params=["inline", "file"])
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "inline":
        return INLINE
    return _file()


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def _file() -> dict[str, Any]:
    if not FILE.is_file():
        pytest.skip(f"no {FILE}: the copies in this module are checked instead")
    loaded: dict[str, Any] = json.loads(FILE.read_text())
    return loaded


def near(expected: Any, golden: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Float32 has 7 digits and these are short sums; the copies above were rounded at the tenth decimal place."""
    if dtype is torch.float32:
        return pytest.approx(expected, rel=1e-6, abs=1e-6)
    return pytest.approx(expected, rel=1e-10, abs=1e-10 if golden is not INLINE else 1e-9)


def test_advantages(golden: dict[str, Any]) -> None:
    for name, case in golden["advantages"].items():
        if name == "constant":  # the file shows the rounding noise of a bare mean; ours is exactly 0
            assert not group_advantages(case["rewards"]).any()
            continue
        assert group_advantages(case["rewards"], "centered").tolist() == near(case["center"], golden)
        found = group_advantages(case["rewards"], "zscore", eps=1e-8)
        assert found.tolist() == near(case["z_sample_std_eps1e-8"], golden)


def grpo_batch(golden: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    samples = golden["grpo"]["inputs"]["samples"]
    data = [
        datum(
            len(row["pi"]),
            advantages=[row["A"]] * len(row["pi"]),
            sampling_logprobs=row["inf"],
            old_logprobs=row["old"],
            reference_logprobs=row["ref"],
            weights=row["mask"],
        )
        for row in samples
    ]
    return data, [row["pi"] for row in samples]


def test_grpo(golden: dict[str, Any], dtype: torch.dtype) -> None:
    expected = golden["grpo"]
    value, gradients, metrics = evaluate(GRPO(kl_beta=0.05), *grpo_batch(golden), dtype)
    assert value == near(expected["loss_sum"], golden, dtype)
    for found, wanted in zip(gradients, expected["grad_wrt_logprob"], strict=True):
        assert found == near(wanted, golden, dtype)
    assert np.count_nonzero(np.concatenate(gradients)) == expected["nonzero_grad_tokens"]
    names = {
        "kl/old_policy": "ppo_kl",
        "kl/reference": "ref_kl",
        "loss/importance_weight_mean": "tis/weight_mean",
        "loss/clip_frac": "ppo_clip_frac",
        "loss/ratio_mean": "ppo_ratio_mean",
    }
    for ours, theirs in names.items():
        assert metrics[ours] == near(expected["metrics"][theirs], golden, dtype), ours


def test_grpo_per_token(golden: dict[str, Any], dtype: torch.dtype) -> None:
    data, logprobs = grpo_batch(golden)
    for row, now, wanted in zip(data, logprobs, golden["grpo"]["per_token_loss"], strict=True):
        for place, term in enumerate(wanted):
            weights = row.loss_fn_inputs["weights"].array * (np.arange(len(now)) == place)
            value, _, _ = evaluate(GRPO(kl_beta=0.05), [row.with_inputs(weights=weights)], [now], dtype)
            assert value == near(term, golden, dtype)


def test_grpo_without_kl(golden: dict[str, Any], dtype: torch.dtype) -> None:
    expected = golden["grpo_no_kl"]
    value, gradients, _ = evaluate(GRPO(kl_beta=0.0), *grpo_batch(golden), dtype)
    assert value == near(expected["loss_sum"], golden, dtype)
    for found, wanted in zip(gradients, expected["grad_wrt_logprob"], strict=True):
        assert found == near(wanted, golden, dtype)
    assert np.count_nonzero(np.concatenate(gradients)) == expected["nonzero_grad_tokens"]


def test_grpo_clip_higher(golden: dict[str, Any], dtype: torch.dtype) -> None:
    value, _, _ = evaluate(GRPO(kl_beta=0.0, clip_high=0.28), *grpo_batch(golden), dtype)
    assert value == near(golden["grpo_clip_higher"]["loss_sum"], golden, dtype)


def test_importance_weights(golden: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = golden["tis"]["inputs"]
    old, sampled = (torch.tensor(inputs[key], dtype=dtype) for key in ("old_policy", "behaviour"))
    token, icepop = golden["tis"]["token"], golden["tis"]["icepop"]
    assert importance_weights(old - sampled, inputs["cap"], None).tolist() == near(token["weight"], golden, dtype)
    found = importance_weights(old - sampled, inputs["cap"], inputs["icepop_threshold"])
    assert found.tolist() == near(icepop["weight"], golden, dtype)

    length = len(inputs["behaviour"])
    data = [datum(length, sampling_logprobs=inputs["behaviour"], advantages=[1.0] * length)]
    for options, mean, key, fraction in (
        ({}, token["weight_mean"], "capped", token["clip_frac"]),
        ({"importance_level": "sequence"}, golden["tis"]["sequence"]["weight"], "capped", 0.0),
        ({"icepop_threshold": 2.0}, sum(icepop["weight"]) / length, "dropped", icepop["dropped_frac"]),
    ):
        value, gradients, metrics = evaluate(
            GRPO(kl_beta=0.0, anchor="trainer", **options), data, [inputs["old_policy"]], dtype
        )
        assert metrics["loss/importance_weight_mean"] == near(mean, golden, dtype)
        assert metrics[f"loss/importance_{key}_frac"] == fraction
        # at the first update the ratio is 1, so the weights are all there is
        assert value == near(-mean * length, golden, dtype)
        assert sum(gradients[0]) == near(-mean * length, golden, dtype)


def test_policy_loss_table(golden: dict[str, Any], dtype: torch.dtype) -> None:
    rows = (
        ("ppo_eps0.2", "ppo_grad", GRPO(kl_beta=0.0)),
        ("ppo_eps0.2", "ppo_grad", GRPO(kl_beta=0.0, anchor="sampler")),
        ("ppo_eps0.2", "ppo_grad", PPO()),
        ("dual_clip_c3", "dual_clip_c3_grad", GRPO(kl_beta=0.0, clip_max=3.0)),
        ("dapo_0.2_0.28", None, GRPO(kl_beta=0.0, clip_high=0.28)),
        ("cispo_0.8_1.28", "cispo_grad", CISPO(clip_low_threshold=0.8, clip_high_threshold=1.28)),
        ("importance_sampling", "is_grad", ImportanceSampling()),
        ("dro_beta0.05", "dro_grad", DRO()),
    )
    tables = golden["policy_loss_table"]
    for advantage, table in ((1.0, tables["adv=+1"]), (-1.0, tables["adv=-1"])):
        for place, ratio in enumerate(table["ratio"]):
            data = [datum(1, logprobs=[-1.0], old_logprobs=[-1.0], advantages=[advantage])]
            for values, slopes, loss in rows:
                value, gradients, _ = evaluate(loss, data, [[-1.0 + np.log(ratio)]], dtype)
                assert value == near(table[values][place], golden, dtype), (values, advantage, ratio)
                if slopes:
                    assert gradients[0] == near([table[slopes][place]], golden, dtype), (slopes, advantage, ratio)


# Made with Python's math module in float64, for a token that was sampled with probability exp(-1.5).
# Slopes are those of the logprob.
RATIOS = [0.5, 0.8, 1, 1.2, 1.5, 4]
SOFT: dict[float, dict[str, list[float]]] = {
    1.0: {
        "sapo": [-1.5101626752, -1.8006640108, -2.0, -2.1993359892, -2.4898373248, -3.8102965073],
        "sapo_grad": [-0.4700074244, -0.7920530327, -1.0, -1.188079549, -1.4100222732, -0.7228265557],
        "dppo_tv": [-0.5, -0.8, -1.0, -1.2, -1.5, 0.0],
        "dppo_kl": [-0.5, -0.8, -1.0, -1.2, -1.5, 0.0],
    },
    -1.0: {
        "sapo": [1.4159383303, 1.7054936778, 1.9047619048, 2.1040301317, 2.3935854792, 3.6529856069],
        "sapo_grad": [0.4670699116, 0.7912444243, 1.0, 1.1868666365, 1.4012097349, 0.6304445609],
        "dppo_tv": [0.5, 0.8, 1.0, 1.2, 1.5, 4.0],
        "dppo_kl": [0.0, 0.8, 1.0, 1.2, 1.5, 4.0],
    },
}
DIVERGENCES = {
    "tv": [0.111565080, 0.044626032, 0.0, 0.044626032, 0.111565080, 0.669390480],
    "kl": [0.050415, 0.006399, 0.0, 0.005278, 0.029965, 1.227304],
}


@pytest.mark.parametrize("advantage", SOFT)
@pytest.mark.parametrize("place", range(len(RATIOS)))
def test_sapo_and_dppo(advantage: float, place: int, dtype: torch.dtype) -> None:
    expected, near_by = SOFT[advantage], {"rel": 1e-9 if dtype is torch.float64 else 1e-5, "abs": 1e-9}
    data = [datum(1, logprobs=[-1.5], advantages=[advantage])]
    now = [[-1.5 + np.log(RATIOS[place])]]
    value, [[slope]], _ = evaluate(SAPO(), data, now, dtype)
    assert value == pytest.approx(expected["sapo"][place], **near_by)
    assert slope == pytest.approx(expected["sapo_grad"][place], **near_by)
    for kind, limit in (("tv", 0.2), ("kl", 0.05)):
        loss = DPPO(divergence=kind, threshold_low=limit, threshold_high=limit)  # type: ignore[arg-type]
        value, [[slope]], metrics = evaluate(loss, data, now, dtype)
        # The slope of r A with respect to the logprob is r A.
        assert value == slope == pytest.approx(expected[f"dppo_{kind}"][place], **near_by)
        assert metrics["loss/divergence_mean"] == pytest.approx(DIVERGENCES[kind][place], abs=1e-6)
        assert metrics["loss/clip_frac"] == float(value == 0)


def test_dppo_of_certain_tokens_is_finite() -> None:
    data = [datum(2, logprobs=[0.0, -30.0], advantages=[-1.0, 1.0])]
    value, [slopes], metrics = evaluate(DPPO(divergence="kl"), data, [[-1.0, 0.0]], torch.float32)
    assert value == 0.0 == slopes[0] == slopes[1] and np.isfinite(metrics["loss/divergence_mean"])


def test_gspo(golden: dict[str, Any], dtype: torch.dtype) -> None:
    inputs, expected = golden["gspo"]["inputs"], golden["gspo"]["active_only(correct)"]
    arrays = {"sampling_logprobs": inputs["old"], "old_logprobs": inputs["old"], "advantages": [1.0] * 4}
    slope = -expected["seq_ratio"]
    for loss in (GRPO(kl_beta=0.0, ratio="sequence"), GSPO()):
        value, gradients, metrics = evaluate(loss, [datum(4, weights=inputs["mask"], **arrays)], [inputs["pi"]], dtype)
        assert value == near(expected["loss_token_broadcast_sum"], golden, dtype)
        assert gradients[0] == near([slope, 0.0, slope, slope], golden, dtype)
        assert metrics["loss/ratio_mean"] == near(expected["seq_ratio"], golden, dtype)


def test_k3(golden: dict[str, Any], dtype: torch.dtype) -> None:
    expected = golden["kl_estimators"]
    now = torch.tensor(expected["pi"], dtype=dtype, requires_grad=True)
    value = k3(torch.tensor(expected["ref"], dtype=dtype) - now)
    value.sum().backward()
    assert value.tolist() == near(expected["k3"], golden, dtype)
    assert now.grad is not None and now.grad.tolist() == near(expected["grad_k3"], golden, dtype)


def dpo_batch(golden: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    data, logprobs = [], []
    for pair in golden["dpo"]["inputs"]["pairs(response-only logprobs)"]:
        for now, reference in ((pair["pc"], pair["rc"]), (pair["pr"], pair["rr"])):
            data.append(datum(len(now) + 1, reference_logprobs=[-9.0, *reference], weights=[0.0] + [1.0] * len(now)))
            logprobs.append([-7.0, *now])
    return data, logprobs


def test_dpo(golden: dict[str, Any], dtype: torch.dtype) -> None:
    expected, pairs = golden["dpo"], golden["dpo"]["per_pair"]
    data, logprobs = dpo_batch(golden)
    value, gradients, metrics = evaluate(DPO(), data, logprobs, dtype)
    assert value == near(expected["batch_mean"], golden, dtype)
    for index, pair in enumerate(pairs):
        for row, side in ((gradients[2 * index], "chosen"), (gradients[2 * index + 1], "rejected")):
            slope = pair[f"grad_per_{side}_token"] / len(pairs)
            assert row == near([0.0] + [slope] * (len(row) - 1), golden, dtype)
    for key in ("chosen", "rejected"):
        mean = sum(pair[f"{key}_reward"] for pair in pairs) / len(pairs)
        assert metrics[f"rewards/{key}"] == near(mean, golden, dtype)
    assert metrics["rewards/margin"] == near(0.1 * sum(pair["margin"] for pair in pairs) / len(pairs), golden, dtype)
    assert metrics["rewards/accuracy"] == expected["accuracy"]
    at_reference = [row.loss_fn_inputs["reference_logprobs"].array for row in data]
    assert evaluate(DPO(), data, at_reference, dtype)[0] == near(expected["at_reference(loss)"], golden, dtype)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("loss", {}),
        ("cdpo_label_smoothing_0.1", {"label_smoothing": 0.1}),
        ("robust_0.1", {"variant": "robust", "label_smoothing": 0.1}),
        ("ipo", {"variant": "ipo"}),
        ("ipo_sum_logps", {"variant": "ipo_sum"}),
        ("hinge", {"variant": "hinge"}),
        ("simpo_beta2_gamma0.5", {"variant": "simpo", "beta": 2.0, "simpo_gamma": 0.5}),
    ],
)
def test_dpo_variants(golden: dict[str, Any], dtype: torch.dtype, key: str, options: dict[str, Any]) -> None:
    data, logprobs = dpo_batch(golden)
    for index, pair in enumerate(golden["dpo"]["per_pair"]):
        both = slice(2 * index, 2 * index + 2)
        value, _, _ = evaluate(DPO(**options), data[both], logprobs[both], dtype)
        assert value == near(pair[key], golden, dtype)


def test_dpo_trains_the_first_response_token() -> None:
    """G6b: the response starts at token 2, which is target 1: the margin is 1.4 with that target, and 0 without."""
    rows = (([-0.1, -0.1], [-0.5, -0.5]), ([-0.1, -2.0], [-1.0, -1.0]))
    data = [datum(2, reference_logprobs=reference, weights=[0.0, 1.0]) for _, reference in rows]
    _, _, metrics = evaluate(DPO(beta=1.0), data, [now for now, _ in rows])
    assert metrics["rewards/margin"] == pytest.approx(1.4, rel=1e-10)


def test_orpo(golden: dict[str, Any], dtype: torch.dtype) -> None:
    expected = golden["orpo"]
    data, logprobs = [], []
    for pair in expected["inputs"]:
        for now in (pair["c"], pair["r"]):
            data.append(datum(len(now) + 1, weights=[0.0] + [1.0] * len(now)))
            logprobs.append([-7.0, *now])
    for index, pair in enumerate(expected["per_pair"]):
        both = slice(2 * index, 2 * index + 2)
        value, gradients, metrics = evaluate(ORPO(), data[both], logprobs[both], dtype)
        assert value == near(pair["loss_lambda1"], golden, dtype)
        assert metrics["loss/nll"] == near(pair["nll"], golden, dtype)
        assert metrics["loss/odds_ratio"] == near(pair["or_loss"], golden, dtype)
        assert metrics["loss/log_odds_ratio"] == near(pair["log_odds_ratio"], golden, dtype)
        for row, side in zip(gradients, ("chosen", "rejected"), strict=True):
            slope = pair[f"grad_per_{side}_token"]
            assert row == near([0.0] + [slope] * (len(row) - 1), golden, dtype)
        value, _, _ = evaluate(ORPO(odds_weight=0.1), data[both], logprobs[both], dtype)
        assert value == near(pair["loss_lambda0.1"], golden, dtype)
    value, _, _ = evaluate(ORPO(), data, logprobs, dtype)
    assert value == near(expected["batch_mean_lambda1"], golden, dtype)


def test_cross_entropy_and_dft_from_logits() -> None:
    golden = _file()
    expected = golden["sft_dft"]
    targets, mask = expected["inputs"]["targets"], expected["inputs"]["mask"]
    for loss, mean, rows in (
        (CrossEntropy(), "ce_token_mean", {1: "ce_grad_row1"}),
        (DFT(), "dft_token_mean", {1: "dft_grad_row1", 2: "dft_grad_row2"}),
    ):
        logits = torch.tensor(expected["inputs"]["logits"], dtype=torch.float64, requires_grad=True)
        logprobs = logits.log_softmax(-1)[range(4), targets]
        value, metrics = loss(loss.prepare([datum(4, weights=mask)]), [logprobs])
        value.backward()
        assert float(value.detach()) == near(expected[mean], golden)
        assert metrics["loss/nll"] == near(expected["ce_token_mean"], golden)
        assert logits.grad is not None
        for row, key in rows.items():
            assert logits.grad[row].tolist() == near(expected[key], golden)


def test_token_mean_of_a_step(dtype: torch.dtype) -> None:
    """G10: two sequences, [-1, -1] and six times -0.5: token mean 0.625, also when computed in two calls."""
    rows = [[-1.0] * 2, [-0.5] * 6]
    data = CrossEntropy().prepare([datum(len(row), weights=[1.0] * len(row)) for row in rows])
    assert evaluate(CrossEntropy(), data, rows, dtype)[0] == pytest.approx(0.625, rel=1e-6)
    parts = [evaluate(CrossEntropy(), [one], [row], dtype)[0] for one, row in zip(data, rows, strict=True)]
    assert sum(parts) == pytest.approx(0.625, rel=1e-6)


def test_schedules() -> None:
    golden = _file()
    schedules = {
        "constant": Constant(warmup_steps=2),
        "linear": Linear(warmup_steps=2),
        "cosine": Cosine(warmup_steps=2),
        "wsd_decay_ratio0.4_linear": WSD(warmup_steps=2, decay_ratio=0.4),
        "wsd_decay_ratio0.4_sqrt": WSD(warmup_steps=2, decay_ratio=0.4, decay_type="sqrt"),
    }
    for name, schedule in schedules.items():
        found = [schedule.factor(step, 10) for step in range(1, 11)]
        assert found == pytest.approx(golden["lr_schedules"][name], rel=1e-12), name
