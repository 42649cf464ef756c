"""The engine on a GPU against itself on the CPU in float64. Skipped where there is no GPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tiny
import torch

from cookbook.checkpoints import snapshots, store
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.head.linear_logprobs import linear_logprobs, linear_logprobs_with_gradient
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LogitTransform
from cookbook.engine.head.linear_logprobs.implementations import implementation
from cookbook.engine.model import ModelConfig, load
from cookbook.engine.offload import offloading
from cookbook.losses import DFT, DPO, GRPO, ORPO, CrossEntropy
from cookbook.types import AdamParams, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is false")

LOSSES = {"cross_entropy": CrossEntropy(), "dft": DFT(), "grpo": GRPO(kl_beta=0.05), "dpo": DPO(beta=0.1), "orpo": ORPO()}
# float32 products without TF32 keep 7 digits; bfloat16 keeps 8 bits, and layers add up what they round.
SAME = {"float32": 2e-5, "bfloat16": 4e-2}


@pytest.fixture(scope="module", autouse=True)
def exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """Heads of 64, which the kernels of GPUs know."""
    shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
    return tiny.save(tmp_path_factory.mktemp("model") / "wide", initializer_range=0.08, **shape)


def engine_on(device, folder, dtype, lora_rank=0, **options):
    model = load(ModelConfig(str(folder), dtype=dtype, lora_rank=lora_rank), torch.device(device), seed=0)
    return Engine(model, EngineOptions(**options))


def gradients(engine):
    return [gradient.double().cpu() for gradient in tiny.gradients(engine)]


@pytest.mark.parametrize("dtype", SAME)
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_cpu(wide_folder, name, lora_rank, dtype):
    loss = LOSSES[name]
    data = loss.prepare(tiny.datums(8))
    reference = engine_on("cpu", wide_folder, "float32", lora_rank)
    reference.model.network.double()
    for key, parameter in reference.model.trainable():
        if "lora_B" in key:
            parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    engine = engine_on("cuda", wide_folder, dtype, lora_rank, micro_batch_tokens=60)
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(engine.model.trainable(), reference.model.trainable(), strict=True):
            ours.copy_(theirs)
    expected = reference.forward_backward(data, loss)
    found = engine.forward_backward(data, loss)
    assert tiny.difference(gradients(engine), gradients(reference)) < SAME[dtype]
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=SAME[dtype], abs=SAME[dtype])


@pytest.mark.parametrize("dtype", SAME)
def test_layouts_agree(wide_folder, dtype):
    data = CrossEntropy().prepare(tiny.datums(10))
    found = {}
    for packing in ("packed", "padded"):
        engine = engine_on("cuda", wide_folder, dtype, packing=packing)
        engine.forward_backward(data, CrossEntropy())
        found[packing] = gradients(engine)
    assert tiny.difference(found["packed"], found["padded"]) < SAME[dtype] / 2


@pytest.mark.parametrize("option", ["activation_checkpointing", "activation_offloading"])
def test_memory_options_change_nothing(wide_folder, option):
    data = CrossEntropy().prepare(tiny.datums(6))
    found = []
    for on in (False, True):
        engine = engine_on("cuda", wide_folder, "float32", **{option: on})
        engine.forward_backward(data, CrossEntropy())
        found.append(gradients(engine))
    assert tiny.difference(found[1], found[0]) < 1e-6


def deep(offloaded, window_bytes=64 << 20):
    """The gradient through 24 frozen layers that save 16 MB each, and the most memory besides the weights."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    weights = [torch.randn(2048, 2048, device=device) / 45 for _ in range(24)]
    x = y = torch.randn(2048, 2048, device=device, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with offloading(weights, device, window_bytes=window_bytes) if offloaded else contextlib.nullcontext():
        for weight in weights:
            y = torch.tanh(y @ weight)
    y.square().sum().backward()
    torch.cuda.synchronize()
    return x.grad, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("window", [0, 64 << 20, 1 << 30])
def test_offloaded_activations_are_the_same_to_the_bit(window):
    """Several times over: memory that is used again too early would not fail every time."""
    expected, most = deep(offloaded=False)
    for _ in range(5):
        found, peak = deep(offloaded=True, window_bytes=window)
        assert torch.equal(found, expected)
        if window < 1 << 30:  # of 24 activations of 16 MB those in the window stay, and a few that are at work
            assert peak < most - (24 - 8) * (16 << 20) + window


def test_offloading_runs_while_the_gpu_computes():
    """In the profiler's record some copy, in either direction, runs at the same time as some product of matrices."""
    deep(offloaded=True)  # compiles and allocates what the first pass does
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as record:
        deep(offloaded=True)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in record.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    products = [span for span in spans if "gemm" in span[0].lower() or "cutlass" in span[0].lower()]
    for direction in ("DtoH", "HtoD"):
        copies = [span for span in spans if direction in span[0]]
        assert any(a < end and start < b for _, a, b in copies for _, start, end in products), direction


@pytest.mark.parametrize("name", ["adamw8bit", "adafactor"])
def test_memory_saving_optimizers(wide_folder, name):
    """On a GPU as on a CPU, from the same gradients, up to where a byte rounds the other way."""
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    betas = (0.0, 0.0) if name == "adafactor" else (0.9, 0.95)
    data = CrossEntropy().prepare(tiny.datums(8))
    found = {}
    for device in ("cpu", "cuda"):
        engine = engine_on(device, wide_folder, "float32", optimizer=name)
        for _ in range(3):
            engine.forward_backward(data, CrossEntropy())
            engine.optim_step(AdamParams(1e-3, *betas, 1e-8), None)
        found[device] = [weight.cpu() for weight in tiny.weights(engine)]
    assert tiny.difference(found["cuda"], found["cpu"]) < 1e-2


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_resumes_exactly(wide_folder, tmp_path, dtype, lora_rank, aside):
    """Resume from a checkpoint, written directly or from a copy in host memory."""

    def train(engine):
        for seed in (1, 2):
            engine.forward_backward(CrossEntropy().prepare(tiny.datums(4, seed=seed)), CrossEntropy())
            engine.optim_step(AdamParams(learning_rate=1e-3), None)

    engine, again = (engine_on("cuda", wide_folder, dtype, lora_rank) for _ in range(2))
    train(engine)
    store.save(snapshots.on_host(engine, engine.model.tokenizer) if aside else engine, tmp_path / "two", state=True)
    store.load(again, tmp_path / "two", optimizer=True)
    assert tiny.difference(tiny.weights(again), tiny.weights(engine)) == 0.0
    kept = again.optimizer.state()
    assert all(torch.equal(kept[key], one) for key, one in engine.optimizer.state().items())
    for one in (engine, again):
        train(one)
    # Kernels that add in any order may be among those of the backward pass, and Adam divides by what is near 0.
    assert tiny.difference(tiny.weights(again), tiny.weights(engine)) < (1e-4 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", SAME)
def test_heads_that_the_variable_length_kernel_does_not_know(tmp_path, dtype):
    """A width that is no multiple of eight."""
    shape = {"hidden_size": 80, "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tiny.save(tmp_path / "odd", initializer_range=0.08, **shape)
    data = CrossEntropy().prepare(tiny.datums(8))
    found = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        engine = engine_on(device, folder, kind, packing="packed")
        engine.forward_backward(data, CrossEntropy())
        found.append(gradients(engine))
    assert tiny.difference(found[1], found[0]) < SAME[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [1000, 50_304])
@pytest.mark.parametrize("mode", ["recompute", "cached", "frozen", "tokenwise"])
def test_the_head(mode, vocabulary, dtype):
    """Compare with log_softmax in float64 of the same rounded operands."""
    draw = torch.Generator("cuda").manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = (torch.randn(300, 64, generator=draw, device="cuda") / 2).to(kind).requires_grad_()
    weight = torch.randn(vocabulary, 64, generator=draw, device="cuda").to(kind).requires_grad_(mode != "frozen")
    targets = torch.randint(0, vocabulary, (300,), generator=draw, device="cuda")
    slope = torch.randn(300, generator=draw, device="cuda")
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted.backward(slope.double())
    layer = LinearLayer(weight)
    if mode == "tokenwise":
        found = linear_logprobs_with_gradient(hidden, layer, targets, lambda rows, _: slope[rows], entropy=True, hit=True)
        found.surrogate.backward()
    else:
        found = linear_logprobs(hidden, layer, targets, mode=mode, entropy=True, hit=True)
        found.logprobs.backward(slope)
    half = dtype == "bfloat16"
    assert found.logprobs.dtype == torch.float32
    assert float((found.logprobs.double() - wanted).abs().mean()) < (1e-3 if half else 2e-6)
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    assert float((found.entropy.double() - entropy).abs().max()) < (2e-2 if half else 2e-5)
    assert torch.equal(found.hit, logits.argmax(-1) == targets)
    assert tiny.difference([hidden.grad], [exact[0].grad]) < (5e-3 if half else 2e-6)
    if mode != "frozen":
        assert tiny.difference([weight.grad], [exact[1].grad]) < (5e-3 if half else 2e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("impl", "dtype"), [("torch_compile", "float32"), ("torch_compile", "bfloat16"), ("cce", "bfloat16")])
def test_other_implementations_of_the_head(impl, dtype, softcap):
    """They run, without a fallback, and agree with log_softmax in float64 of the same operands."""
    if impl == "cce":
        pytest.importorskip("cut_cross_entropy", reason="needs cut-cross-entropy, which is not installed")
    draw = torch.Generator("cuda").manual_seed(0)
    kind = getattr(torch, dtype)
    hidden = (torch.randn(300, 64, generator=draw, device="cuda") / 2).to(kind).requires_grad_()
    weight = torch.randn(5000, 64, generator=draw, device="cuda").to(kind).requires_grad_()
    targets = torch.randint(0, 5000, (300,), generator=draw, device="cuda")
    slope = torch.randn(300, generator=draw, device="cuda")
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted.backward(slope.double())
    given = implementation(impl, None)
    found = given.scores(hidden, LinearLayer(weight, transform=LogitTransform(softcap=softcap)), targets)
    assert found is not None
    found.logprobs.backward(slope)
    half = dtype == "bfloat16"
    assert float((found.logprobs.double() - wanted).abs().mean()) < (2e-2 if half else 2e-6)
    # cce adds up the weight's gradient in bfloat16.
    assert tiny.difference([hidden.grad], [exact[0].grad]) < (1e-2 if half else 2e-6)
    assert tiny.difference([weight.grad], [exact[1].grad]) < (2e-2 if half else 2e-6)
    if impl == "torch_compile":
        assert torch.equal(found.hit, logits.argmax(-1) == targets)


@pytest.mark.parametrize("impl", ["torch_compile", "cce"])
def test_a_step_with_another_implementation_of_the_head(wide_folder, impl):
    if impl == "cce":
        pytest.importorskip("cut_cross_entropy", reason="needs cut-cross-entropy, which is not installed")
    found = []
    for name in ("auto", impl):
        engine = engine_on("cuda", wide_folder, "bfloat16", head_impl=name)
        output = engine.forward_backward(CrossEntropy().prepare(tiny.datums(8)), CrossEntropy())
        found.append((gradients(engine), output.metrics["loss"]))
    assert tiny.difference(found[1][0], found[0][0]) < SAME["bfloat16"]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_logprobs_are_those_of_the_forward_pass(wide_folder, dtype):
    engine = engine_on("cuda", wide_folder, dtype)
    params = SamplingParams(max_tokens=12, temperature=1.0, stop=[])
    requests = [SampleRequest([3 + i, 5, 7, 11 + i], 4, params, seed=i) for i in range(5)]
    for request, samples in zip(requests, sample(engine.model, requests, 0, 1 << 16), strict=True):
        for one in samples:
            ids = torch.tensor([request.prompt + list(one.tokens)], device="cuda")
            with torch.no_grad():
                logits = engine.model.network(input_ids=ids).logits[0].float()
            expected = logits.log_softmax(-1)[3:-1].gather(1, ids[0, 4:, None])[:, 0]
            off = np.abs(np.asarray(one.logprobs) - expected.cpu().numpy()).max()
            assert off < (1e-4 if dtype == "float32" else 0.2)


def test_it_learns_in_bfloat16(wide_folder):
    engine = engine_on("cuda", wide_folder, "bfloat16")
    data = CrossEntropy().prepare(tiny.datums(8))
    losses = []
    for _ in range(30):
        losses.append(engine.forward_backward(data, CrossEntropy()).metrics["loss"])
        engine.optim_step(AdamParams(learning_rate=3e-3), None)
    assert losses[-1] < losses[0] / 4


def test_a_step_is_the_same_twice(wide_folder):
    """Two engines of one seed, bit for bit, in float32."""
    found = []
    for _ in range(2):
        engine = engine_on("cuda", wide_folder, "float32")
        data = CrossEntropy().prepare(tiny.datums(8))
        for _ in range(3):
            engine.forward_backward(data, CrossEntropy())
            engine.optim_step(AdamParams(learning_rate=1e-3), None)
        found.append(tiny.weights(engine))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
