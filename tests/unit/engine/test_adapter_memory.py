"""Memory of an adapter: sampling and training need the memory of a full model, plus the matrices of the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow
from torch.utils._python_dispatch import TorchDispatchMode

from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.losses import CrossEntropy
from cookbook.types import SamplingParams, datum_from_tokens_weights

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
HIGH_WATER = Path("/proc/self/clear_refs")


class Operands(TorchDispatchMode):
    """Largest operand of a matrix product, in bytes, as if every view were copied. oneDNN copies expanded views."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            sizes = (one.numel() * one.element_size() for one in args if isinstance(one, torch.Tensor))
            self.largest = max(self.largest, *sizes)
        return func(*args, **(kwargs or {}))


def requests(prompts: int, length: int = 6) -> list[SampleRequest]:
    params = SamplingParams(max_tokens=2, stop=[])
    return [SampleRequest([1 + index, *range(2, length + 1)], 1, params, seed=index) for index in range(prompts)]


def largest_of_sampling(model: LanguageModel, prompts: int) -> int:
    with Operands() as operands:
        sample(model, requests(prompts), 0, 100_000)
    return operands.largest


def largest_of_training(model: LanguageModel, rows: int) -> int:
    loss = CrossEntropy()
    data = loss.prepare([datum_from_tokens_weights(np.arange(8) + row, np.ones(8)) for row in range(rows)])
    # Padded rows: the network's own output layer computes the last position of each row.
    engine = Engine(model, EngineOptions(packing="padded"))
    with Operands() as operands:
        engine.forward_backward(data, loss)
    return operands.largest


@pytest.mark.parametrize("family", rest_slow(["llama", "mamba", "bloom", "falcon"]))
@pytest.mark.parametrize("largest", [largest_of_sampling, largest_of_training])
def test_an_adapter_multiplies_the_operands_of_a_full_model(tmp_path, family, largest):
    """A product with a frozen weight was computed sequence by sequence: the output layer was copied for each prompt."""
    families.network(family).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    full, adapter = (families.loaded(tmp_path, rank, "float32") for rank in (0, 2))
    for number in (4, 12):
        assert largest(adapter, number) <= largest(full, number)


def test_bytes_per_prompt_token_do_not_grow_with_the_output_layer(make_engine):
    """Tokens of a prompt cost its activations: 24 more prompts of 6 tokens added 24 copies of the output layer."""
    model = make_engine(lora_rank=4).model
    few, many = largest_of_sampling(model, 8), largest_of_sampling(model, 32)
    widest = max(model.network.config.intermediate_size, model.vocabulary_size)
    assert (many - few) / (24 * 6) <= 4 * widest


@pytest.mark.slow
@pytest.mark.skipif(not HIGH_WATER.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_resident_memory_of_a_prefill_with_an_adapter(tmp_path, options):
    """40 prompts: the peak was 40 copies of an output layer of 20 MB, if oneDNN computed its product."""
    tiny.save(tmp_path, hidden_size=256, vocab_size=20_000)
    model = load(ModelConfig(str(tmp_path), lora_rank=8, **options), torch.device("cpu"), seed=0)
    # The decoding method is chosen, and the kernels are compiled, by the first samples.
    sample(model, requests(40), 0, 100_000)
    before = kilobytes("VmRSS")
    HIGH_WATER.write_text("5")
    sample(model, requests(40), 0, 100_000)
    assert kilobytes("VmHWM") - before < 100_000


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
