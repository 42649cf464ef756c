"""Cookbook's norms, gated MLPs and rotary embeddings: equal to plain torch, and in a model only where they equal its own."""

from __future__ import annotations

import copy

import families
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.layers import install, uninstall
from cookbook.engine.layers.fused import gated, rms_norm, rotary
from cookbook.engine.layers.install import PatchedForward
from cookbook.losses import DPO
from cookbook.types import AdamParams

EPS = 1e-6


def plain_norm(x, weight, offset=0.0):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (offset + weight)


def plain_rotary(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def random(*shape, dtype=torch.float64, seed=0):
    """Return the same numbers for every dtype, rounded to it."""
    drawn = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).requires_grad_()


def with_gradients(out, inputs):
    outs = out if isinstance(out, tuple) else (out,)
    slopes = [random(*one.shape, dtype=one.dtype, seed=number).detach() for number, one in enumerate(outs, 50)]
    return [*outs, *torch.autograd.grad(outs, inputs, slopes)]


def assert_same(found, expected, tolerance):
    """``tolerance`` is relative to the largest element of each."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().double().abs().max()) <= tolerance * float(other.detach().abs().max())


# Sums of a few dozen terms: some units in the last place.
ROUNDING = [(torch.float64, 1e-14), (torch.float32, 2e-6)]

# ---- each against plain torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), ROUNDING)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
@pytest.mark.parametrize("layout", ["flat", "heads", "heads first"])
def test_rms_norm(dtype, tolerance, offset, scale, layout):
    x = (random(2, 7, 3, 16, dtype=torch.float64, seed=1).detach() * scale + scale).to(dtype)  # its mean is not 0
    x = {"flat": x.flatten(2), "heads": x, "heads first": x.transpose(1, 2)}[layout].requires_grad_()
    weight = random(x.shape[-1], dtype=dtype, seed=2)
    wide = [value.detach().double().requires_grad_() for value in (x, weight)]
    expected = with_gradients(plain_norm(*wide, offset), wide)
    assert_same(with_gradients(rms_norm(x, weight, EPS, offset), [x, weight]), expected, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), ROUNDING)
def test_rotary(dtype, tolerance):
    q, k = (random(2, 7, heads, 8, dtype=dtype, seed=heads) for heads in (4, 2))
    for rows in (1, 2):
        cos, sin = (random(rows, 7, 8, dtype=dtype, seed=seed).detach() for seed in (3, 4))
        wide = [value.detach().double().requires_grad_() for value in (q, k)]
        both = tuple(plain_rotary(x.transpose(1, 2), cos.double(), sin.double()) for x in wide)
        found = with_gradients(rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin), [q, k])
        assert_same(found, with_gradients(both, wide), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), ROUNDING)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(dtype, tolerance, activation):
    gate, up = (random(5, 12, dtype=dtype, seed=seed) for seed in (5, 6))
    wide = [value.detach().double().requires_grad_() for value in (gate, up)]
    plain = silu(wide[0]) if activation == "silu" else gelu(wide[0], approximate="tanh")
    expected = with_gradients(plain * wide[1], wide)
    assert_same(with_gradients(gated(gate, up, activation), [gate, up]), expected, tolerance)


def test_gradients_are_slopes():
    x, weight = random(3, 2, 6, seed=7), random(6, seed=8)
    q, k, cos, sin = random(1, 2, 3, 4), random(1, 1, 3, 4, seed=9), random(1, 3, 4).detach(), random(1, 3, 4, seed=2).detach()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight.detach(), EPS, 1.0), (x,))
    assert torch.autograd.gradcheck(lambda w: rms_norm(x.detach(), w, EPS), (weight,))
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))
    for activation in ("silu", "gelu_tanh"):
        assert torch.autograd.gradcheck(lambda a, b, name=activation: gated(a, b, name), (x, x.detach().sin().requires_grad_()))


def test_half_precision_is_rounded_once():
    x, weight = random(40, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16, seed=1)
    wide = [value.detach().float().requires_grad_() for value in (x, weight)]
    expected = with_gradients(plain_norm(*wide).to(torch.bfloat16), wide)
    found = with_gradients(rms_norm(x, weight, EPS), [x, weight])
    assert all(one.dtype == torch.bfloat16 for one in found)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.to(torch.bfloat16).float(), rtol=2**-7, atol=1e-6)


def test_a_row_of_zeros_and_no_rows_at_all():
    weight = random(8)
    assert torch.equal(rms_norm(torch.zeros(1, 8, dtype=torch.float64), weight, EPS), torch.zeros(1, 8, dtype=torch.float64))
    empty = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    assert [one.shape for one in torch.autograd.grad(rms_norm(empty, weight, EPS).sum(), (empty, weight))] == [(0, 8), (8,)]


# ---- in a model ------------------------------------------------------------------------------------------------------


def ours(network: nn.Module) -> set[str]:
    """The classes of the modules whose forward was replaced."""
    return {type(module).__name__ for module in network.modules() if isinstance(vars(module).get("forward"), PatchedForward)}


REPLACED = {
    "llama": {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"},
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"},
    "gemma2": {"Gemma2RMSNorm", "Gemma2MLP", "Gemma2Attention"},
    "olmo2": {"Olmo2RMSNorm", "Olmo2MLP", "Olmo2Attention"},
    "cohere": {"CohereMLP"},  # it norms by mean and variance, and rotates adjacent pairs
    "gpt_oss": {"GptOssRMSNorm"},
    "gpt2": set(),
}


@pytest.mark.parametrize("family", REPLACED)
def test_what_is_replaced_computes_the_same(family):
    network = families.language_model(family).network
    data, names = tiny.datums(4), list(network.state_dict())
    plain = tiny.plain_gradients(network, data, DPO())
    install(network)
    assert ours(network) == REPLACED[family]
    assert tiny.difference(tiny.plain_gradients(network, data, DPO()), plain) < 1e-5
    assert list(network.state_dict()) == names
    uninstall(network)
    assert not ours(network)
    assert all(torch.equal(a, b) for a, b in zip(tiny.plain_gradients(network, data, DPO()), plain, strict=True))


def test_a_module_called_with_more_than_it_was_tried_with_keeps_its_own_code():
    """Mamba2's norm is an RMS norm by itself, and takes a gate beside its input."""
    network = families.language_model("mamba2").network
    data = tiny.datums(4)
    plain = tiny.plain_gradients(network, data, DPO())
    install(network)
    assert tiny.difference(tiny.plain_gradients(network, data, DPO()), plain) < 1e-5
    norm = network.backbone.layers[0].mixer.norm
    x, gate = (random(3, len(norm.weight), dtype=torch.float32, seed=seed) for seed in (1, 2))
    assert torch.equal(norm(x, gate), type(norm).forward(norm, x, gate))
    assert torch.equal(norm(x, gate=gate), type(norm).forward(norm, x, gate))


class MeanNorm(nn.Module):
    """Named and shaped like the others, and another function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), EPS

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight


class DetachedNorm(MeanNorm):
    """The right numbers, and another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach() * self.weight


class ExactGeluMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SwappedMLP(ExactGeluMLP):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize("module", [MeanNorm, DetachedNorm, ExactGeluMLP, SwappedMLP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_computes_something_else_keeps_its_own(module, dtype):
    network = nn.Sequential(module()).to(dtype)
    install(network)
    assert not ours(network)


def test_a_norm_of_another_dtype_keeps_what_it_returns():
    """PEFT may keep a saved norm in float32 under activations in bfloat16."""
    network = families.language_model("llama").network.bfloat16()
    install(network)
    norm = network.model.norm.float()
    x = random(2, 32, dtype=torch.bfloat16)
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_copies_norm_with_weights_of_their_own():
    network = families.language_model("llama").network
    install(network)
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied.model.norm.weight.zero_()
    x = random(2, 32, dtype=torch.float32)
    assert not copied.model.norm(x).any()
    assert network.model.norm(x).any()


def test_the_switch_is_the_models_own_code():
    def trained(**options):
        engine = Engine(families.language_model("qwen3"), EngineOptions(**options))
        for seed in range(2):
            engine.forward_backward(tiny.datums(4, seed=seed), DPO())
            engine.optim_step(AdamParams(learning_rate=1e-4), None)
        data = tiny.datums(4)
        found = engine.forward(data).loss_fn_outputs
        engine.forward_backward(data, DPO())
        return ours(engine.model.network), [torch.from_numpy(row["logprobs"].array) for row in found], tiny.gradients(engine)

    (on, *fused), (off, *own) = trained(), trained(fused_layers=False)
    assert on == REPLACED["qwen3"]
    assert off == set()
    assert tiny.difference(fused[0], own[0]) < 1e-6
    assert tiny.difference(fused[1], own[1]) < 1e-5


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"activation_offloading": True}, {"packing": "padded"}]
)
def test_recomputed_and_offloaded_layers(options):
    data = tiny.datums(4)
    engines = [
        Engine(families.language_model("gemma3_text"), EngineOptions(**some)) for some in ({"fused_layers": False}, options)
    ]
    for engine in engines:
        engine.forward_backward(data, DPO())
    assert tiny.difference(*(tiny.gradients(engine) for engine in reversed(engines))) < 1e-5


def test_under_an_adapter_that_drops_out_and_saves_norms():
    from peft import LoraConfig, get_peft_model

    model = copy.copy(families.language_model("qwen3"))
    lora = LoraConfig(
        r=2, target_modules=["gate_proj", "down_proj"], modules_to_save=["norm"], lora_dropout=0.5, init_lora_weights=False
    )
    model.network = get_peft_model(model.network, lora).eval()
    data = tiny.datums(4)
    plain = tiny.plain_gradients(model.network, data, DPO())
    install(model.network)
    assert ours(model.network) == REPLACED["qwen3"]
    assert tiny.difference(tiny.plain_gradients(model.network, data, DPO()), plain) < 1e-5
