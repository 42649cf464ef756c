"""Samplers compute with the weights and the precision of the training passes, wherever they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import servertools
import torch
from forkedranks import forked_ranks  # noqa: F401 - a fixture
from marks import rest_slow, rotating
from runtools import SMALL, here, train  # noqa: F401 - here is a fixture

from cookbook.backends.local import LocalConfig
from cookbook.backends.remote.config import RemoteConfig
from cookbook.engine.model import ModelConfig
from cookbook.engine.precision import CastWeights, Precision, instructions
from cookbook.losses.policy import k3
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams
from cookbook.utils.paths import packaged

SHIPPED = packaged("data") / "tiny"
AUTOCAST, HALF = {"autocast": "bfloat16"}, {"dtype": "bfloat16"}
MODES = [AUTOCAST, HALF, {**AUTOCAST, "lora_rank": 4}, {**HALF, "lora_rank": 4}, {"matmul_precision": "medium"}, {}]
# Limit of kl/sampler_trainer_k3 with the shipped model: measured up to 7e-7, and 6e-6 to 4e-5 when the sampler multiplied
# float32 weights or rounded its logits. With a model of 135M parameters it was 0.0002 to 0.0007, and 0.002 to 0.17.
LIMIT = 2e-6
needs_instructions = pytest.mark.skipif(instructions() is None, reason="this CPU has no bfloat16 instructions")
pytestmark = needs_instructions


def drawn(sampler, seed: int = 0) -> list[Datum]:
    """Two prompts with eight completions each. ``weights`` mark the sampled tokens, ``sampling_logprobs`` are the sampler's."""
    params = [SamplingParams(max_tokens=16, seed=seed + number, stop=[]) for number in range(2)]
    prompts = [[5 + number, 7, 9, 11, 13] for number in range(2)]
    answers = [sampler.sample(ModelInput.from_ints(one), 8, of) for one, of in zip(prompts, params, strict=True)]
    data = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for one in answer.result().sequences:
            tokens, before = prompt + list(one.tokens), [0.0] * (len(prompt) - 1)
            arrays = {"weights": before + [1.0] * len(one.tokens), "sampling_logprobs": before + list(one.logprobs)}
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **arrays}))
    return data


def drift(data: list[Datum], rows: list[np.ndarray]) -> float:
    """The metric kl/sampler_trainer_k3 for logprobs of the trainer."""
    values = [
        logprobs[datum.loss_fn_inputs["weights"].to_numpy() > 0]
        - datum.loss_fn_inputs["sampling_logprobs"].to_numpy()[datum.loss_fn_inputs["weights"].to_numpy() > 0]
        for datum, logprobs in zip(data, rows, strict=True)
    ]
    return float(k3(torch.from_numpy(np.concatenate(values)).double()).mean())


def scored(trainer, data: list[Datum]) -> list[np.ndarray]:
    return [row["logprobs"].to_numpy() for row in trainer.forward(data, "cross_entropy").result().loss_fn_outputs]


def update(trainer, data: list[Datum], rate: float = 1e-4) -> None:
    trainer.forward_backward(data, "cross_entropy").result()
    trainer.optim_step(AdamParams(learning_rate=rate)).result()


@pytest.mark.parametrize("options", rest_slow(MODES), ids=str)
def test_an_embedded_sampler_agrees_with_the_trainer_before_and_after_updates(make_trainer, options):
    trainer = make_trainer(name=SHIPPED, **options)
    rate = 1e-3 if "lora_rank" in options else 1e-4
    for step in range(2):
        live, copied = trainer.live_sampler(step).result(), trainer.snapshot_sampler(step).result()
        data = drawn(live, seed=10 * step)
        rows = scored(trainer, data)
        assert drift(data, rows) < LIMIT
        again = drawn(copied, seed=10 * step)
        assert [one.loss_fn_inputs["sampling_logprobs"].to_numpy().tolist() for one in again] == [
            one.loss_fn_inputs["sampling_logprobs"].to_numpy().tolist() for one in data
        ]
        update(trainer, data, rate)


@pytest.mark.parametrize("options", rotating([{**AUTOCAST, "lora_rank": 4}, AUTOCAST], 1), ids=str)
def test_a_remote_sampler_agrees_with_the_trainer(tmp_path, options):
    rank = options.get("lora_rank", 0)
    with servertools.running(SHIPPED, tmp_path / "server", backend=LocalConfig(autocast="bfloat16")) as server:
        trainer = RemoteConfig(server.url, patience_s=30.0).make_trainer(
            ModelConfig(str(SHIPPED), lora_rank=rank), seed=0, folder=tmp_path / "checkpoints"
        )
        try:
            for step in range(2):
                data = drawn(trainer.live_sampler(step).result(), seed=10 * step)
                assert drift(data, scored(trainer, data)) < LIMIT
                update(trainer, data, 1e-3 if rank else 1e-4)
        finally:
            trainer.connection.give_up()
            trainer.connection.close()


@pytest.mark.parametrize("options", rest_slow([AUTOCAST, HALF]), ids=str)
def test_a_sampler_of_merged_weights_agrees_with_the_trainer_of_the_adapter(make_trainer, options):
    """Merged weights are rounded after the sum, so they differ more from the adapter: measured 1.5e-4."""
    trainer = make_trainer(name=SHIPPED, lora_rank=4, **options)
    update(trainer, drawn(trainer.live_sampler(0).result()), 1e-3)
    saved = trainer.save_weights_for_sampler_ext("merged", merged=True).result()
    merged = make_trainer(name=Path(saved.path), **options)
    data = drawn(merged.live_sampler(0).result())
    assert drift(data, scored(merged, data)) < LIMIT
    assert drift(data, scored(trainer, data)) < 1e-3


@pytest.mark.parametrize("options", rest_slow([AUTOCAST, HALF]), ids=str)
def test_streams_prompts_and_references_have_the_precision_too(make_trainer, options):
    trainer = make_trainer(name=SHIPPED, **options)
    update(trainer, drawn(trainer.live_sampler(0).result()))
    sampler = trainer.live_sampler(1).result()
    data = drawn(sampler)
    rows = scored(trainer, data)
    prompt = ModelInput.from_ints([5, 7, 9, 11, 13])
    params = SamplingParams(max_tokens=16, seed=0, stop=[])
    streamed: dict[int, list[float]] = {}
    for chunk in sampler.stream(prompt, 8, params):
        streamed.setdefault(chunk.number, []).extend(chunk.logprobs)
    of_first = [one.loss_fn_inputs["sampling_logprobs"].to_numpy()[4:] for one in data[:8]]
    np.testing.assert_allclose(np.concatenate([streamed[number] for number in range(8)]), np.concatenate(of_first), atol=0.02)
    tokens = [*data[0].model_input.to_ints(), int(data[0].loss_fn_inputs["target_tokens"].to_numpy()[-1])]
    np.testing.assert_allclose(sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()[1:], rows[0], atol=0.02)
    top = sampler.sample(ModelInput.from_ints(tokens), 1, params, topk_prompt_logprobs=259).result().topk_prompt_logprobs
    found = [dict(position)[token] for position, token in zip(top[1:], tokens[1:], strict=True)]
    # Logits of unlikely tokens are rounded.
    np.testing.assert_allclose(found, rows[0], atol=0.07)
    likely = rows[0] > np.log(1 / 64)
    np.testing.assert_allclose(np.array(found)[likely], rows[0][likely], atol=0.01)
    assert drift(data, trainer.reference().logprobs(data).result()) < LIMIT


def test_weights_are_cast_once_per_version_and_freed_for_training(make_trainer, monkeypatch):
    casts = []
    original = CastWeights._cast_of
    monkeypatch.setattr(CastWeights, "_cast_of", lambda self, one: casts.append(one) or original(self, one))
    trainer = make_trainer(**AUTOCAST)
    network = trainer.engine.model.network
    linear = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    data = drawn(trainer.live_sampler(0).result())
    drawn(trainer.live_sampler(0).result())
    assert len(casts) == len(linear)
    # The layers have their own weights again, and tied ones are tied.
    assert all(module.weight.dtype == torch.float32 for module in linear)
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    trainer.forward_backward(data, "cross_entropy").result()
    assert not trainer.engine.sampler_pass._weights._slots
    trainer.optim_step(AdamParams(learning_rate=1e-3)).result()
    drawn(trainer.live_sampler(1).result())
    assert len(casts) == 2 * len(linear)


def test_adapters_share_the_casts_of_their_base():
    base = torch.nn.Linear(4, 4).requires_grad_(False)
    other = torch.nn.Linear(4, 4)
    other.weight = base.weight
    one, two = (CastWeights(torch.nn.Sequential(layer), torch.bfloat16) for layer in (base, other))
    with one.in_use(), two.in_use():
        shared = base.weight
        assert shared.dtype == torch.bfloat16
        assert other.weight is shared
        assert other.bias.dtype == torch.bfloat16
    assert base.weight is other.weight
    assert base.weight.dtype == torch.float32


def test_the_layers_get_their_weights_back_after_an_error():
    layer = torch.nn.Linear(4, 4)
    original = layer.weight
    with pytest.raises(ZeroDivisionError), CastWeights(torch.nn.Sequential(layer), torch.bfloat16).in_use():
        _ = 1 / 0
    assert layer.weight is original


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=str)
def test_sums_of_layers_are_float32_with_bfloat16_weights(make_engine, options):
    engine, seen = make_engine(dtype="bfloat16", **options), []
    layers = next(one for one in engine.model.network.modules() if isinstance(one, torch.nn.ModuleList))
    layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    engine.forward([Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})])
    assert set(seen) == {torch.float32}
    assert engine.passes.precision == Precision(autocast="bfloat16")


def test_a_model_that_needs_one_dtype_keeps_sums_of_bfloat16(make_engine, monkeypatch, caplog):
    caplog.set_level("INFO", logger="cookbook")

    def refuses(*_: object) -> None:
        from cookbook.engine.fast_path import FastPathError

        raise FastPathError("expected BFloat16 but found Float")

    monkeypatch.setattr("cookbook.engine.precision.choice.plain_logits", refuses)
    engine = make_engine(dtype="bfloat16")
    assert engine.passes.precision == Precision()
    assert "the sums of the layers are bfloat16: Qwen3ForCausalLM needs one dtype: expected BFloat16" in caplog.text
    engine.forward([Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})])


@pytest.mark.usefixtures("here", "forked_ranks")
@pytest.mark.parametrize(
    "words",
    [["backend.autocast=bfloat16"], pytest.param(["backend.autocast=bfloat16", "backend.ranks=2"], marks=pytest.mark.nightly)],
)
def test_the_first_update_of_a_run_is_on_policy(words, caplog):
    Path("reward.py").write_text("def reward(completion, row):\n    return sum(map(ord, completion)) % 7 / 7\n")
    task = ["reward=python", "reward.target=reward.py:reward", "recipe.steps=2", "eval.every=null", "optim.lr=1e-4", "out=run"]
    assert train(*SMALL["grpo"], *task, *words) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    found = [row["kl/sampler_trainer_k3"] for row in rows if "kl/sampler_trainer_k3" in row]
    assert len(found) == 2
    assert max(found) < 1e-5
    assert "were clipped" not in caplog.text
