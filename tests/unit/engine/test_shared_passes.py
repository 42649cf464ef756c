"""Calls of several adapters in one pass: the results of separate passes, and the same bits again from the shape of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cookbook.backends.local import LocalConfig
from cookbook.engine.engine import Engine
from cookbook.engine.loss_gradient import LossFunction
from cookbook.engine.model import ModelConfig, SharedBase, load
from cookbook.engine.shared_passes import AdapterCall, PassShape, forward_backward_in, forward_backward_together
from cookbook.errors import BackendError, DataError, NonFiniteError
from cookbook.losses import get_loss
from cookbook.types import AdamParams, Datum, ModelInput, TensorData, datum_from_tokens_weights

ADAM = AdamParams(learning_rate=1e-2)
SFT, POLICY = get_loss("cross_entropy"), get_loss("importance_sampling")


@pytest.fixture(scope="module")
def bases(tiny_folder: Path) -> dict[str, SharedBase]:
    """One base model in memory by element type."""
    types = ("float32", "float64", "bfloat16")
    models = {dtype: load(ModelConfig(str(tiny_folder), dtype=dtype), torch.device("cpu"), 0) for dtype in types}
    return {dtype: SharedBase(str(tiny_folder.resolve()), model.network) for dtype, model in models.items()}


@pytest.fixture
def base(bases: dict[str, SharedBase]) -> SharedBase:
    return bases["float32"]


def engine(base: SharedBase, seed: int, **model: Any) -> Engine:
    """An engine with a trained adapter: its B factors are not zero."""
    config = ModelConfig(base.name, **{"lora_rank": 4, **model})
    made = LocalConfig(all_logprobs=True).make_engine(config, seed, base)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in made.model.trainable():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=draw)
    return made


def engines(base: SharedBase, **model: Any) -> list[Engine]:
    """Adapters of several ranks and scales."""
    ranks = enumerate((4, 1, 8, 4))
    return [engine(base, number, lora_rank=rank, lora_alpha=8 * (number + 1), **model) for number, rank in ranks]


def rows(seed: int, *lengths: int) -> list[Datum]:
    draw = np.random.default_rng(seed)
    return [datum_from_tokens_weights(draw.integers(0, 200, n + 1), (np.arange(n + 1) > 1).astype(float)) for n in lengths]


def policy_rows(seed: int, *lengths: int) -> list[Datum]:
    """Completions of one prompt with advantages, as in GRPO; the last datum has the advantage 0 and gets no gradient."""
    draw, prompt = np.random.default_rng(seed), np.arange(12)
    data = []
    for place, length in enumerate(lengths):
        tokens = np.concatenate([prompt, draw.integers(0, 200, length + 1)])
        mask = (np.arange(1, len(tokens)) >= len(prompt)).astype(np.float32)
        advantage = 0.0 if place == len(lengths) - 1 else float(draw.normal())
        fields = {
            "target_tokens": TensorData.from_numpy(tokens[1:]),
            "logprobs": TensorData.from_numpy((draw.normal(-3, 0.5, len(mask)) * mask).astype(np.float32)),
            "advantages": TensorData.from_numpy(mask * np.float32(advantage)),
        }
        data.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), fields))
    return data


def preference(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss of pairs, as DPO is: it needs the logprobs of all datums."""
    sums = [row.sum() for row in logprobs]
    margins = torch.stack([one - other for one, other in zip(sums[::2], sums[1::2], strict=True)])
    return -torch.nn.functional.logsigmoid(0.1 * margins).sum(), {"margin": float(margins.detach().mean())}


CASES: dict[str, list[tuple[LossFunction, list[Datum]]]] = {
    "sft": [(SFT, rows(0, 9)), (SFT, rows(1, 5, 17, 3)), (SFT, rows(2, 9, 9)), (SFT, rows(3, 30))],
    "grpo": [(POLICY, policy_rows(seed, 4, 9, 6, 2)) for seed in range(4)],
    "dpo": [(preference, rows(seed, 6 + seed, 8, 5, 7)) for seed in range(4)],
    # The last datum has no token with a weight, so its adapter gets no gradient.
    "mixed": [(SFT, rows(0, 9)), (POLICY, policy_rows(1, 5, 6)), (preference, rows(2, 5, 4)), (SFT, rows(3, 1))],
}


def gradients(of: Engine) -> list[torch.Tensor]:
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for _, one in of.model.trainable()]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm of ``other``."""
    flat, expected = (torch.cat([part.double().flatten() for part in parts]) for parts in (one, other))
    return float((flat - expected).norm() / (expected.norm() or 1))


def together(members: list[Engine], case: list[tuple[LossFunction, list[Datum]]]) -> list[AdapterCall]:
    calls = [AdapterCall(of, data, loss) for of, (loss, data) in zip(members, case, strict=True)]
    assert len({call.key for call in calls}) == 1
    assert calls[0].key is not None
    forward_backward_together(calls)
    return calls


def same(
    calls: list[AdapterCall],
    alone: list[Any],
    members: list[Engine],
    expected: list[list[torch.Tensor]],
    allowed: float = 2e-6,
) -> None:
    for call, output, of, own in zip(calls, alone, members, expected, strict=True):
        assert call.error is None
        assert call.output is not None
        assert call.output.metrics.keys() == output.metrics.keys()
        assert call.output.metrics == pytest.approx(output.metrics, rel=5 * allowed, abs=allowed)
        for one, other in zip(call.output.loss_fn_outputs, output.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=0, atol=5 * allowed)
        assert difference(gradients(of), own) < allowed


# In float64 a mistake would not hide behind rounding. float32 rounds to 6e-8, and a sum over many products more.
@pytest.mark.parametrize(("dtype", "allowed"), [("float64", 1e-10), ("float32", 2e-6)])
@pytest.mark.parametrize("case", CASES)
def test_a_shared_pass_gives_the_results_of_separate_passes(bases, case, dtype, allowed):
    members = engines(bases[dtype], dtype=dtype)
    alone = [of.forward_backward(data, loss) for of, (loss, data) in zip(members, CASES[case], strict=True)]
    expected, counts = [gradients(of) for of in members], [(of.counts, of.accumulated, of.seeds) for of in members]
    for of in members:
        of.discard_gradient()
    passes = [of.passes.count for of in members]
    calls = together(members, CASES[case])
    assert sum(of.passes.count for of in members) == sum(passes) + 1
    same(calls, alone, members, expected, allowed)
    assert [(of.counts, of.accumulated, of.seeds) for of in members] == counts
    # The layers of the model that ran the pass are its own again.
    again = [of.forward_backward(data, loss) for of, (loss, data) in zip(members, CASES[case], strict=True)]
    assert [one.metrics for one in again] == [one.metrics for one in alone]


@pytest.mark.parametrize("case", CASES)
def test_the_shape_of_a_pass_gives_its_bits_again(base, case):
    """A server that was killed replays one adapter's calls without the data of the others."""
    members = engines(base)
    calls = together(members, CASES[case])
    expected = [gradients(of) for of in members]
    for call, own, (loss, data) in zip(calls, expected, CASES[case], strict=True):
        assert call.shape is not None
        assert call.output is not None
        call.engine.discard_gradient()
        repeated = AdapterCall(call.engine, data, loss)
        forward_backward_in(PassShape.from_json(call.shape.to_json()), repeated)
        assert repeated.output is not None
        assert repeated.output.metrics == call.output.metrics
        for one, other in zip(repeated.output.loss_fn_outputs, call.output.loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())
        assert all(torch.equal(*pair) for pair in zip(gradients(call.engine), own, strict=True))


def test_two_steps_of_accumulation(base):
    """Gradients of two shared passes add up, and an optimizer step of each adapter follows its own counts."""
    shared, alone = engines(base), engines(base)
    for _ in range(2):
        together(shared, CASES["mixed"])
        for of, (loss, data) in zip(alone, CASES["mixed"], strict=True):
            of.forward_backward(data, loss)
    for one, other in zip(shared, alone, strict=True):
        assert one.optim_step(ADAM, None).metrics == pytest.approx(other.optim_step(ADAM, None).metrics, rel=1e-5)
        assert not one.accumulated


def test_a_failed_call_harms_no_other(base):
    members = engines(base)
    expected = [of.forward_backward(data, loss) for of, (loss, data) in zip(members, CASES["sft"], strict=True)]
    own = [gradients(of) for of in members]
    for of in members:
        of.discard_gradient()

    def broken(data: Sequence[Datum], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum(row.sum() for row in logprobs) * torch.tensor(float("inf")), {}

    # Token 100,000 is not in the vocabulary.
    invalid = [Datum(ModelInput.from_ints([100_000]), rows(0, 1)[0].loss_fn_inputs)]
    case = [(SFT, invalid), (broken, CASES["sft"][1][1]), *CASES["sft"][2:]]
    calls = together(members, case)
    assert [type(call.error) for call in calls] == [DataError, NonFiniteError, type(None), type(None)]
    same(calls[2:], expected[2:], members[2:], own[2:])
    assert all(not of.accumulated and not of.lost_gradient and not of.counts.num_loss_tokens for of in members[:2])
    assert all(one.grad is None or not one.grad.any() for of in members[:2] for _, one in of.model.trainable())


def test_an_error_of_the_pass_is_that_of_every_call(base, monkeypatch):
    """The gradient of earlier calls is dropped, and the next optimizer step raises, as after a failed pass of its own."""
    members = engines(base)
    together(members, CASES["sft"])

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch.autograd, "backward", fail)
    calls = together(members, CASES["sft"])
    assert all(isinstance(call.error, RuntimeError) for call in calls)
    assert all(of.lost_gradient for of in members)
    with pytest.raises(BackendError, match="was dropped"):
        members[0].optim_step(ADAM, None)


def test_which_adapters_share_a_pass(base, tiny_folder):
    data = rows(0, 5)
    first = AdapterCall(engine(base, 0), data, SFT)
    assert AdapterCall(engine(base, 1, lora_rank=2, lora_alpha=7), data, SFT).key == first.key
    assert AdapterCall(engine(base, 1, lora_target_modules=["q_proj"]), data, SFT).key not in (first.key, None)
    assert AdapterCall(engine(base, 1, lora_dropout=0.1), data, SFT).key is None
    assert AdapterCall(first.engine, rows(0, 5000), SFT).key is None
    assert AdapterCall(first.engine, [], SFT).key is None
    full = LocalConfig().make_engine(ModelConfig(str(tiny_folder)), 0, base)
    assert AdapterCall(full, data, SFT).key is None
    other = LocalConfig().make_engine(ModelConfig(str(tiny_folder), lora_rank=4), 0)
    assert AdapterCall(other, data, SFT).key != first.key


def test_layers_of_16_bits(bases):
    """The base multiplies in bfloat16 over float32 factors, as in a pass of its own. bfloat16 rounds to 0.4%."""
    members = engines(bases["bfloat16"], dtype="bfloat16")
    alone = [of.forward_backward(data, loss) for of, (loss, data) in zip(members, CASES["sft"], strict=True)]
    expected = [gradients(of) for of in members]
    for of in members:
        of.discard_gradient()
    calls = together(members, CASES["sft"])
    for call, output, own in zip(calls, alone, expected, strict=True):
        assert call.output is not None
        assert call.output.metrics["loss"] == pytest.approx(output.metrics["loss"], rel=1e-2)
        assert all(one.dtype is torch.float32 for one in gradients(call.engine))
        assert difference(gradients(call.engine), own) < 5e-2
