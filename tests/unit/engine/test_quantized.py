"""``model.quantize``: adapters on 4-bit and 8-bit weights compute what adapters on the dequantized weights compute."""

from __future__ import annotations

from pathlib import Path

import families
import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow
from scoring import largest, logprobs
from torch import nn

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import manifest, sampler_checkpoints
from cookbook.deployments.vllm.deployment import VllmConfig
from cookbook.engine import quantized
from cookbook.engine.engine import Engine
from cookbook.engine.estimate import estimate
from cookbook.engine.lora_targets import TrainedShare
from cookbook.engine.model import ModelConfig, SharedBase, check_trainable, fresh_network, load
from cookbook.engine.quantized import QuantizedLinear
from cookbook.engine.shape import shape_of
from cookbook.errors import BackendError, ConfigError
from cookbook.service import ServiceClient
from cookbook.types import AdamParams, ModelInput, SamplingParams

pytest.importorskip("bitsandbytes")

CPU = torch.device("cpu")
# The values of the 4-bit NormalFloat, appendix E of arXiv:2305.14314.
NORMAL_FLOAT = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def layer(rows: int = 30, columns: int = 100, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias).to(dtype)


def nearest(weight: np.ndarray, scheme: str) -> np.ndarray:
    """The values that a quantized weight stands for, in float64."""
    if scheme == "int8":
        step = np.abs(weight).max(1, keepdims=True) / 127
        return np.round(weight / step) * step
    # Blocks of 64 weights, row after row; the last is filled up with zeros.
    blocks = np.concatenate([weight.ravel(), np.zeros(-weight.size % 64)]).reshape(-1, 64)
    scales = np.abs(blocks).max(1, keepdims=True)
    values = np.array(NORMAL_FLOAT)
    chosen = values[np.abs(blocks[..., None] / scales[..., None] - values).argmin(-1)]
    return (chosen * scales).ravel()[: weight.size].reshape(weight.shape)


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_weights_are_the_nearest_values(scheme: str) -> None:
    own = layer()
    found = QuantizedLinear(own, scheme)
    weight = own.weight.detach().double().numpy()
    assert np.abs(found.weight.double().numpy() - nearest(weight, scheme)).max() < 1e-7
    assert found.values.nbytes == own.weight.numel() // (2 if scheme == "nf4" else 1)
    assert found.weight.shape == own.weight.shape and not next(found.parameters()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_products_are_those_of_the_dequantized_layer(scheme: str, dtype: torch.dtype) -> None:
    found = QuantizedLinear(layer(dtype=dtype), scheme)
    plain, results = found.plain(), []
    for one in (found, plain):
        x = torch.linspace(-2, 2, 700).view(7, 100).to(dtype).requires_grad_()
        out = one(x)
        assert out.grad_fn is not None
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    # Weights are not saved for the backward pass, which dequantizes them again.
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        found(x)
    assert not saved
    with torch.autocast("cpu", torch.bfloat16):
        assert found(x.float()).dtype == torch.bfloat16


def test_a_row_of_zeros_stays_zero() -> None:
    empty = layer(2, 64, bias=False)
    with torch.no_grad():
        empty.weight[1] = 0
    for scheme in ("nf4", "int8"):
        assert not QuantizedLinear(empty, scheme).weight[1].any()


def dequantized(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model as a folder of ordinary weights, those that the quantized ones stand for."""
    base = load(ModelConfig(model.name, quantize=model.quantize, dtype=model.dtype), CPU, seed=0)
    quantized.uninstall(base.network)
    base.network.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return ModelConfig(str(folder), lora_rank=model.lora_rank, dtype=model.dtype)


@pytest.mark.parametrize(
    ("scheme", "dtype", "options"),
    rest_slow(
        [
            ("nf4", "float32", {}),
            ("int8", "float32", {}),
            ("nf4", "bfloat16", {}),
            ("nf4", "float32", {"autocast": "bfloat16"}),
            ("nf4", "float32", {"activation_checkpointing": True}),
            ("int8", "float32", {"packing": "padded"}),
        ],
        fast=2,
    ),
)
def test_training_and_sampling_are_those_on_the_dequantized_weights(
    scheme: str, dtype: str, options: dict[str, object], tmp_path: Path
) -> None:
    """Losses, gradients and samples are equal in every bit, before and after steps."""
    model = ModelConfig(str(tiny.save(tmp_path / "base")), lora_rank=4, quantize=scheme, dtype=dtype)
    data, results = tiny.datums(), []
    for number, one in enumerate((model, dequantized(model, tmp_path / "plain"))):
        trainer = LocalTrainer(one, LocalConfig(**options), seed=0, folder=tmp_path / f"run{number}")
        for loss in ("cross_entropy", "importance_sampling"):
            trainer.forward_backward(data, loss).result()
            trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
        params = SamplingParams(max_tokens=8, temperature=0.8, seed=3)
        drawn = trainer.live_sampler(2).result().sample(ModelInput.from_ints([1, 2, 3]), 3, params).result()
        results.append((tiny.weights(trainer.engine), logprobs(trainer, data), [list(one.tokens) for one in drawn.sequences]))
    (weights, scores, tokens), (plain_weights, plain_scores, plain_tokens) = results
    assert all(map(torch.equal, weights, plain_weights)) and all(map(torch.equal, scores, plain_scores))
    assert tokens == plain_tokens
    assert all(weight.dtype == torch.float32 for weight in weights)


def test_a_merged_export_is_exact_and_a_checkpoint_continues_quantized(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = ModelConfig(str(tiny.save(tmp_path / "base")), lora_rank=4, quantize="nf4")
    data, config = tiny.datums(), LocalConfig()
    trainer = LocalTrainer(model, config, seed=0, folder=tmp_path / "run")
    for _ in range(2):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    own, saved = logprobs(trainer, data), trainer.save_state("state").result().path
    assert manifest.read(Path(saved))["quantize"] == "nf4"
    sampler_checkpoints.export(Path(saved), tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert largest(own, tiny.plain_logprobs(merged, data)) < 1e-5
    sampler_checkpoints.export(Path(saved), tmp_path / "adapter")
    # The adapter says what it was trained on; `none` overrules it.
    for name in (saved, str(tmp_path / "adapter")):
        assert largest(own, logprobs(LocalTrainer(ModelConfig(name), config, seed=1, folder=tmp_path / "next"), data)) == 0
    other = LocalTrainer(ModelConfig(saved, quantize="none"), config, seed=1, folder=tmp_path / "other")
    assert largest(own, logprobs(other, data)) > 1e-3
    client = ServiceClient(checkpoint_dir=tmp_path / "clients").create_training_client_from_state(saved)
    assert largest(own, logprobs(client, data)) == 0


@pytest.mark.parametrize("family", rest_slow(["gpt_oss", "qwen3", "gemma2", "llama", "qwen3_moe", "mamba", "gpt_neox"], fast=2))
def test_families(family: str, tmp_path: Path) -> None:
    """Every linear layer but the output layer and routers is quantized, and the fast paths compute the model's own numbers."""
    families.network(family).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    model = ModelConfig(str(tmp_path / "base"), lora_rank=2, quantize="nf4")
    trainer = LocalTrainer(model, LocalConfig(), seed=0, folder=tmp_path / "run")
    network = trainer.engine.model.network
    plain = load(dequantized(model, tmp_path / "plain"), CPU, seed=0).network
    names = {path.rpartition(".")[2] for path, _ in quantized.layers(network.get_base_model())} - {"base_layer"}
    assert quantized.num_weights(network) and "lm_head" not in names and "router" not in names
    share, plain_share = TrainedShare.of(network), TrainedShare.of(plain)
    assert share == plain_share
    assert trainer.info().num_parameters == plain.num_parameters()
    data = tiny.datums()
    assert largest(logprobs(trainer, data), tiny.plain_logprobs(plain, data)) < 1e-4


def test_runs_of_a_server_share_the_quantized_weights(tiny_folder: Path) -> None:
    model = ModelConfig(str(tiny_folder), quantize="nf4")
    base = SharedBase(str(tiny_folder), load(model, CPU, seed=0).network)
    runs = [load(ModelConfig(str(tiny_folder), lora_rank=2, quantize="nf4"), CPU, seed, base) for seed in (0, 1)]
    places = [{one.values.data_ptr() for _, one in quantized.layers(run.network)} for run in runs]
    assert places[0] == places[1] == {one.values.data_ptr() for _, one in quantized.layers(base._network)}
    with pytest.raises(ConfigError, match=r"model.quantize: quantized weights cannot be trained; train a LoRA adapter on them"):
        load(ModelConfig(str(tiny_folder), quantize="nf4"), CPU, 0, base)


def test_an_adapter_of_other_weights_than_the_servers_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "base")
    trainer = LocalTrainer(ModelConfig(str(folder), lora_rank=2, quantize="nf4"), LocalConfig(), seed=0, folder=tmp_path)
    saved = trainer.save_state("state").result().path
    base = SharedBase(str(folder), load(ModelConfig(str(folder)), CPU, seed=0).network)
    with pytest.raises(ConfigError, match=r"quantized as nf4, and those of the server are whole; start the server with"):
        load(ModelConfig(saved), CPU, 0, base)
    assert not quantized.num_weights(load(ModelConfig(saved, quantize="none"), CPU, 0, base).network)


@pytest.mark.slow
def test_memory_is_counted(tiny_folder: Path) -> None:
    plain, four, eight = (ModelConfig(str(tiny_folder), lora_rank=2, quantize=one) for one in (None, "nf4", "int8"))
    network = load(four, CPU, seed=0).network
    buffers = [buffer for _, layer in quantized.layers(network) for buffer in layer.buffers()]
    expected = sum(one.nbytes for one in [*network.parameters(), *buffers])
    options = {"step_tokens": 64, "interleaved": True, "retain_bytes": 0, "reference": False, "cpu": True}
    needs = {one.quantize: estimate(one, 2, 16, **options) for one in (plain, four, eight)}
    assert needs["nf4"].weights == expected and needs["nf4"].weights < needs["int8"].weights < needs[None].weights
    assert needs["nf4"].parameters == needs[None].parameters and needs["nf4"].trained == needs[None].trained
    shape = shape_of(four)
    assert shape is not None and shape.weight_bytes == expected
    assert sum(1 for _ in quantized.layers(fresh_network(four))) == sum(1 for _ in quantized.layers(network))


def test_mistakes(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.quantize: expected null or one of nf4, int8, none, got 'fp4'"):
        ModelConfig(str(tiny_folder), quantize="fp4")
    plain = ModelConfig(str(tiny_folder), quantize="nf4")
    message = r"model.quantize: quantized weights are not trained, got nf4 without an adapter; set model.lora_rank"
    with pytest.raises(ConfigError, match=message):
        check_trainable(plain)
    with pytest.raises(ConfigError, match=message):
        ServiceClient(checkpoint_dir=tmp_path).create_training_client(str(tiny_folder), quantize="nf4")
    adapted = ModelConfig(str(tiny_folder), lora_rank=2, quantize="nf4")
    check_trainable(adapted)
    with pytest.raises(ConfigError, match=r"deployment: vLLM would add the adapter to other weights .* deployment=embedded"):
        VllmConfig().preflight(adapted, LocalConfig())


def test_the_summary_names_what_is_not_quantized() -> None:
    """The experts of gpt-oss are one parameter, which keeps its element type."""
    network = families.network("gpt_oss")
    total = network.num_parameters()
    quantized.install(network, "nf4", [])
    summary = quantized.summary(network)
    assert summary.startswith(f"{quantized.num_weights(network):,} of {total:,} weights are quantized, not those of ")
    assert "gate_up_proj" in summary and "embed_tokens" in summary and "q_proj" not in summary


def test_a_damaged_manifest_is_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    config = LocalConfig()
    trainer = LocalTrainer(ModelConfig(str(tiny_folder), lora_rank=2), config, seed=0, folder=tmp_path / "run")
    saved = Path(trainer.save_state("state").result().path)
    (saved / manifest.NAME).write_text("{")
    with pytest.raises(BackendError, match=r"model.name: cannot read .*checkpoint.json: .*; use another checkpoint"):
        load(ModelConfig(str(saved)), CPU, seed=0)


def test_evaluation_needs_no_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(ModelConfig(str(tiny_folder), quantize="int8"), LocalConfig(), seed=0, folder=tmp_path)
    assert isinstance(trainer.engine, Engine) and len(logprobs(trainer, tiny.datums())) == 6
