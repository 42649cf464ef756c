"""KTO: golden values by independent float64 code, answers of other rows, labelled data, and parity with TRL's trainer."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from places import ROOT
from runtools import SMALL, here, rows, train  # noqa: F401 - here is a fixture

from cookbook.check.batches import datum
from cookbook.check.bench import evaluate
from cookbook.data import DataConfig, Renderer, Row, label_datums
from cookbook.data.datums import mismatched
from cookbook.errors import DataError
from cookbook.losses import KTO

TRL = ROOT / ".venv-trl" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def independent(answers, beta, desirable, undesirable):
    """Label, logprobs and reference logprobs of the trained tokens of each answer -> the loss and its slope per token."""
    gains = [sum(now) - sum(reference) for _, now, reference in answers]
    others = [gain for (label, _, _), gain in zip(answers, gains, strict=True) if label == 0]
    z = max(0.0, sum(others) / len(others)) if others else 0.0
    count = sum(label != 0 for label, _, _ in answers)
    loss, slopes = 0.0, []
    for (label, _, _), gain in zip(answers, gains, strict=True):
        weight = {1: desirable, -1: undesirable, 0: 0.0}[label]
        value = sigmoid(label * beta * (gain - z))
        loss += weight * (1 - value) / count if label else 0.0
        slopes.append(-weight * label * beta * value * (1 - value) / count)
    return loss, slopes, z


def batch_of(answers):
    data = [
        datum(
            len(now) + 1,
            labels=[float(label)] * (len(now) + 1),
            reference_logprobs=[-9.0, *reference],
            weights=[0.0] + [1.0] * len(now),
        )
        for label, now, reference in answers
    ]
    return data, [[-7.0, *now] for _, now, _ in answers]


ANSWERS = [
    (1, [-0.1, -0.4], [-0.5, -0.5]),
    (-1, [-0.3, -2.0, -1.0], [-1.0, -1.0, -0.5]),
    (1, [-1.0], [-0.2]),
    (0, [-0.2, -0.1], [-0.9, -0.6]),
    (0, [-1.5], [-1.2]),
]


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.25}])
@pytest.mark.parametrize("answers", [ANSWERS, ANSWERS[:3], [*ANSWERS[:3], (0, [-3.0], [-1.0])], ANSWERS[:1], ANSWERS[3:]])
def test_values_and_slopes_are_those_of_independent_code(answers, options):
    beta, *weights = (options.get(key, default) for key, default in
                      (("beta", 0.1), ("desirable_weight", 1.0), ("undesirable_weight", 1.0)))  # fmt: skip
    if all(label == 0 for label, _, _ in answers):
        value, slopes, _ = evaluate(KTO(**options), *batch_of(answers))
        assert value == 0.0 and not any(map(any, slopes))
        return
    loss, expected, z = independent(answers, beta, *weights)
    value, slopes, metrics = evaluate(KTO(**options), *batch_of(answers))
    assert value == pytest.approx(loss, rel=1e-12) and metrics["kl/mismatched"] == pytest.approx(z, rel=1e-12, abs=1e-15)
    for own, slope in zip(slopes, expected, strict=True):
        assert own == [0.0, *[pytest.approx(slope, rel=1e-12, abs=1e-15)] * (len(own) - 1)]


def test_golden_values_by_hand():
    """beta 1: gains 0.5 (desirable) and -1 (not), and 0.25 of an answer to another prompt."""
    value, _, metrics = evaluate(KTO(beta=1.0), *batch_of([(1, [-0.5], [-1.0]), (-1, [-2.0], [-1.0]), (0, [-1.0], [-1.25])]))
    # (1 - S(0.25) + 1 - S(1.25)) / 2
    assert value == pytest.approx((0.4378234991 + 0.2227001388) / 2, abs=1e-10)
    assert (metrics["rewards/chosen"], metrics["rewards/rejected"], metrics["rewards/margin"]) == (0.5, -1.0, 1.5)
    assert metrics["kl/mismatched"] == 0.25


@pytest.mark.parametrize("labels", [[1.0, -1.0], [2.0, 2.0], [0.5, 0.5]])
def test_wrong_labels_are_refused(labels):
    with pytest.raises(DataError, match=r"datum 0: labels holds .*; give all tokens of a datum the same label"):
        evaluate(KTO(), [datum(2, labels=labels, reference_logprobs=[-1.0] * 2)], [[-1.0, -1.0]])


def labelled(*values, **options):
    config = DataConfig(path="rows.jsonl", **options)
    found = label_datums([Row(f"t:{index}", one) for index, one in enumerate(values)], Renderer(tiny.tokenizer(), 96), config)
    return found, [float(one.loss_fn_inputs["labels"].array[0]) for one in found]


def answers_of(data):
    tokens = [[*one.model_input.to_ints(), int(one.loss_fn_inputs["target_tokens"].array[-1])] for one in data]
    weights = [[0.0, *one.loss_fn_inputs["weights"].array.tolist()] for one in data]
    return [
        tiny.tokenizer().decode([token for token, weight in zip(own, chosen, strict=True) if weight], skip_special_tokens=True)
        for own, chosen in zip(tokens, weights, strict=True)
    ]


def test_rows_with_labels_and_pairs_are_answers():
    row = {"prompt": "2+2=", "completion": "4"}
    found, labels = labelled({**row, "label": True}, {**row, "completion": "5", "label": 0}, {**row, "label": "false"})
    assert labels == [1.0, -1.0, -1.0] and answers_of(found) == ["4", "5", "4"]
    assert all((one.loss_fn_inputs["weights"].array >= 0).all() for one in found)
    pairs, labels = labelled({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, chat=True)
    assert labels == [1.0, -1.0] and answers_of(pairs) == ["4", "5"]
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
    found, labels = labelled({"messages": [*talk, *talk], "label": 1})
    assert labels == [1.0] and answers_of(found) == ["2"]
    with pytest.raises(DataError, match=r't:1: "label" must be true, false, 1 or 0, got 2; fix or remove the row'):
        labelled({**row, "label": 1}, {**row, "label": 2})
    with pytest.raises(DataError, match=r"this recipe reads chosen\+rejected or prompt\+completion\+label"):
        labelled(row)


def test_every_prompt_gets_the_answer_of_the_row_before_it():
    values = [{"prompt": f"{number}+1=", "completion": str(number + 1) * number, "label": 1} for number in (1, 2, 3)]
    data, _ = labelled(*values)
    found = mismatched(data, 96)
    text = [tiny.tokenizer().decode(one.model_input.to_ints(), skip_special_tokens=True) for one in found]
    assert text == ["1+1=444", "2+1=2", "3+1=33"] and answers_of(found) == ["444", "2", "33"]
    assert not any(one.loss_fn_inputs["labels"].array.any() for one in found)
    assert mismatched(data[:1], 96) == []
    assert [one.model_input.length for one in mismatched(data, 6)] == [5, 5, 5]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # Pairs in the order of the data.
        ([1, 1, 2, 2, 3, 3], [4, 5, 0, 1, 2, 3]),
        # Different neighbors keep the rotation, even if the rows before them share a prompt.
        ([1, 2, 1, 2], [3, 0, 1, 2]),
        ([1, 1, 2, 3], [2, 3, 0, 1]),
        # More than half of the answers are to one prompt: as few as possible stay with it.
        ([1, 1, 1, 2], [1, 2, 3, 0]),
        # One prompt only.
        ([1, 1, 1], [2, 0, 1]),
    ],
)
def test_answers_change_to_other_prompts_if_possible(numbers, expected):
    values = [{"prompt": f"{number}+1=", "completion": chr(97 + place), "label": 1} for place, number in enumerate(numbers)]
    data, _ = labelled(*values)
    mismatches = mismatched(data, 96)
    assert answers_of(mismatches) == [chr(97 + place) for place in expected]
    prompts = [tiny.tokenizer().decode(one.model_input.to_ints(), skip_special_tokens=True)[0] for one in mismatches]
    assert prompts == [str(number) for number in numbers]


@pytest.mark.usefixtures("here")
def test_losses_without_labels_are_refused(capsys):
    assert train(*SMALL["kto"], "loss=cross_entropy") == 2
    assert "reads no labels, so it would learn undesirable answers" in capsys.readouterr().err
    assert train(*SMALL["kto"], "recipe.batch_size=1") == 2
    assert "recipe.batch_size must be at least 2, got 1" in capsys.readouterr().err
    assert train(*SMALL["sft"], "loss=kto") == 2
    assert "KTO needs labels" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.skipif(not TRL.is_dir(), reason="TRL is not installed in .venv-trl")
def test_the_loss_is_that_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TRL's own trainer computes the loss and its gradient for six rows; the model differs from its reference."""
    monkeypatch.syspath_prepend(str(TRL))
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import KTOConfig, KTOTrainer

    folders = [tiny.save(tmp_path / name, seed=seed) for seed, name in enumerate(("model", "reference"))]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    given = [
        {"prompt": f"{number}+{number * 7}=", "completion": str(number * 8) * (1 + number % 3), "label": number % 3 != 0}
        for number in range(6)
    ]
    weights = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    options = KTOConfig(str(tmp_path / "out"), per_device_train_batch_size=6, use_cpu=True, report_to=[], **weights)
    oracle = KTOTrainer(model, reference, options, train_dataset=Dataset.from_list(given), processing_class=tiny.tokenizer())
    inputs = next(iter(oracle.get_train_dataloader()))
    model.train()
    expected = oracle.compute_loss(model, inputs)
    expected.backward()
    data = []
    for row in oracle.train_dataset:
        for answer, label in ((row["completion_ids"], 1.0 if row["label"] else -1.0), (row["KL_completion_ids"], 0.0)):
            tokens = [*row["prompt_ids"], *answer]
            inside = [0.0] * (len(row["prompt_ids"]) - 1) + [1.0] * len(answer)
            targets = {"target_tokens": tokens[1:], "weights": inside, "labels": [label] * len(inside)}
            data.append(
                type(datum(1))(datum(1).model_input.from_ints(tokens[:-1]), {k: np.asarray(v) for k, v in targets.items()})
            )
    data = [one for one in data if one.loss_fn_inputs["labels"].array[0]] + [
        one for one in data if not one.loss_fn_inputs["labels"].array[0]
    ]
    # The mismatched sequences are ours, too.
    labels = [one for one in data if one.loss_fn_inputs["labels"].array[0]]
    assert [one.model_input.to_ints() for one in mismatched(labels, None)] == [
        one.model_input.to_ints() for one in data[len(labels) :]
    ]
    with torch.no_grad():
        logprobs = [row.numpy() for row in tiny.plain_logprobs(reference, data)]
    data = [one.with_inputs(reference_logprobs=row) for one, row in zip(data, logprobs, strict=True)]
    own = AutoModelForCausalLM.from_pretrained(folders[0])
    value, metrics = KTO(**weights)(data, tiny.plain_logprobs(own, data))
    value.backward()
    assert float(value.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    logged = SimpleNamespace(**{key.replace("/", "_"): values[-1] for key, values in oracle._metrics["train"].items()})
    assert metrics["rewards/chosen"] == pytest.approx(logged.rewards_chosen, rel=1e-4)
    assert metrics["kl/mismatched"] == pytest.approx(logged.kl, rel=1e-4)
    pairs = [(one.grad, other.grad) for one, other in zip(own.parameters(), model.parameters(), strict=True)]
    assert tiny.difference([one for one, _ in pairs], [other for _, other in pairs]) < 1e-5
