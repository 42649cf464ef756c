"""A rehearsal of training and sampling on a GPU: no operation mixes devices, and the host seldom waits for the GPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import families
import pytest
import tiny
import torch
from marks import rest_slow
from pretended_gpu import GPU, DeviceError, moved, pretended_gpu

from cookbook.engine.decoding.decoder import GPU_CHECK_STEPS, sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig, add_lora
from cookbook.engine.precision import Precision
from cookbook.losses import DPO, GRPO, CrossEntropy
from cookbook.types import AdamParams, SamplingParams

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss"]
LOSSES = {"sft": CrossEntropy(), "preference": DPO(beta=0.1), "rl": GRPO(kl_beta=0.05)}
ADAM = AdamParams(learning_rate=1e-3)


def models(family: str, lora_rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[LanguageModel, LanguageModel]:
    """Two equal models: one on the CPU, and one that moves to the GPU."""
    network = families.network(family).to(dtype)
    config = ModelConfig(family, lora_rank=lora_rank, dtype=str(dtype).removeprefix("torch."))
    if lora_rank:
        network = add_lora(network, config, seed=0)
    return tuple(LanguageModel(copy.deepcopy(network), tiny.tokenizer(), config, torch.device("cpu")) for _ in range(2))


def on_gpu(model: LanguageModel, options: EngineOptions) -> Engine:
    moved(model.network)
    model.device = GPU
    return Engine(model, options)


def data(loss: Any) -> list[Any]:
    return list(loss.prepare(tiny.datums(8)))


def step(engine: Engine, loss: Any) -> dict[str, float]:
    found = engine.forward_backward(data(loss), loss).metrics
    adam = ADAM if engine.options.optimizer != "adafactor" else replace(ADAM, beta1=0.0, beta2=0.0)
    return {**found, **engine.optim_step(adam, None).metrics}


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    *((family, "sft", 0, {}) for family in FAMILIES),
    *((family, "rl", 4, {}) for family in FAMILIES),
    ("llama", "preference", 0, {"activation_checkpointing": True}),
    ("qwen3", "preference", 4, {"activation_offloading": True}),
    ("llama", "sft", 0, {"optimizer": "adafactor"}),
    ("llama", "rl", 0, {"packing": "padded"}),
    ("qwen3", "sft", 0, {"precision": Precision(autocast="bfloat16")}),
    ("gemma2", "preference", 0, {}),
    ("gpt_oss", "preference", 0, {}),
]


@pytest.mark.parametrize(
    ("family", "kind", "lora_rank", "options"),
    rest_slow(CASES, fast=1),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_step_on_a_gpu_is_that_of_the_cpu(family, kind, lora_rank, options, monkeypatch):
    """Loss, metrics and the norm of the gradient."""
    own, other = models(family, lora_rank)
    chosen = replace(EngineOptions(micro_batch_tokens=60), **options)
    expected = step(Engine(own, chosen), LOSSES[kind])
    with pretended_gpu(monkeypatch) as transfers:
        engine = on_gpu(other, chosen)
        transfers.clear()
        found = step(engine, LOSSES[kind])
        assert all(parameter.device == GPU for _, parameter in engine.model.trainable())
    tolerance = 2e-2 if "precision" in options else 2e-4
    assert found == {name: pytest.approx(value, rel=tolerance, abs=tolerance) for name, value in expected.items()}


@pytest.mark.parametrize("family", rest_slow(["llama", "qwen3_moe"], fast=1))
def test_syncs_of_a_micro_batch(family, monkeypatch):
    """The host waits once per micro-batch, for the logprobs, and once per step, for the norm of the gradient."""
    _, model = models(family)
    with pretended_gpu(monkeypatch) as transfers:
        engine = on_gpu(model, EngineOptions(micro_batch_tokens=60))
        passes = len(engine._plan_passes(data(CrossEntropy()), CrossEntropy()))
        transfers.clear()
        step(engine, CrossEntropy())
        assert passes == 3
        # In float32, transformers asks in every layer which experts have tokens, and for the tokens of each expert.
        of_experts = {"engine/head/output_head.py: hidden_states"} if family == "qwen3_moe" else set()
        syncs = {line: count for line, count in transfers.of("sync").items() if line not in of_experts}
        assert syncs == {"engine/forward.py: _on_host": passes, "engine/optimizer.py: norm": 1}
        # Ids and positions, targets, selected tokens, and the gradient of the logprobs.
        assert sum(transfers.of("upload").values()) == 5 * passes


@pytest.mark.slow
def test_syncs_of_a_decoded_token(monkeypatch):
    """The host waits once in a few tokens, for the number of rows that have ended."""
    _, model = models("llama")
    with pretended_gpu(monkeypatch) as transfers:
        engine = on_gpu(model, EngineOptions())
        counts = {}
        for tokens in (17, 33):
            request = SampleRequest([1, 2, 3, 4], 4, SamplingParams(max_tokens=tokens, stop=[]), 1)
            sample(engine.model, [request], 0, 1000, engine.sampler_pass)
            transfers.clear()
            sample(engine.model, [request], 0, 1000, engine.sampler_pass)
            counts[tokens] = sum(transfers.of("sync").values())
        # A round of 16 tokens: its checks, and its tokens, logprobs, counts and ends.
        assert counts[33] - counts[17] <= 16 / GPU_CHECK_STEPS + 8


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_gpu_are_those_of_the_cpu(family, monkeypatch):
    own, other = models(family)
    sizes = (([5, 6, 7], 3, 20), ([9, 8], 2, 9))
    requests = [SampleRequest(prompt, count, SamplingParams(max_tokens=longest), 3) for prompt, count, longest in sizes]
    engine = Engine(own, EngineOptions())
    expected = sample(engine.model, requests, 0, 1000, engine.sampler_pass)
    with pretended_gpu(monkeypatch):
        engine = on_gpu(other, EngineOptions())
        found = sample(engine.model, requests, 0, 1000, engine.sampler_pass)
    for ours, theirs in zip(found, expected, strict=True):
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]


def test_mixed_devices_are_found(monkeypatch):
    with pretended_gpu(monkeypatch) as transfers:
        weight = torch.ones(2, 2, device="cuda", requires_grad=True)
        with pytest.raises(DeviceError, match="mixes devices"):
            weight @ torch.ones(2, 2)
        (weight @ weight).sum().backward()
        assert weight.grad.device == GPU and weight.grad.cpu().tolist() == [[4.0, 4.0], [4.0, 4.0]]
        assert transfers.counts == {("sync", "tests"): 1}
        with pytest.raises(TypeError, match="cuda"):
            weight.detach().numpy()
