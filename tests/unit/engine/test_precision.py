"""Precision of passes: `backend.matmul_precision` and `backend.autocast`, and what neither may change."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow
from runtools import SMALL, here, train  # noqa: F401 - here is a fixture
from torch.nn.functional import scaled_dot_product_attention

from cookbook.backends.local import LocalConfig
from cookbook.engine.attention import attend
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.precision import DEFAULT, Precision, attended, half_attention, instructions, multiplies_half
from cookbook.engine.precision.choice import medium_is_exact, restored
from cookbook.errors import ConfigError
from cookbook.losses import DPO, CrossEntropy
from cookbook.types import AdamParams, SamplingParams, datum_from_tokens_weights
from cookbook.utils.paths import packaged

MEDIUM, MIXED = Precision("medium"), Precision("highest", "bfloat16")
REDUCED = [Precision("high"), MEDIUM, MIXED, Precision("medium", "bfloat16")]
# Relative to the norm of the float32 gradient. bfloat16 rounds operands by up to 2^-9 = 0.002. The test model has weights of
# ten times the usual size: measured 0.020 to 0.024, and 0.020 with bfloat16 weights; the shipped model 0.007, and 0.005.
# Medium is exact on CPUs with AVX512-BF16 (5e-7); on those with AMX it rounds the operands as mixed precision does.
LIMIT, SHIPPED = 0.03, 0.0095
needs_instructions = pytest.mark.skipif(instructions() is None, reason="this CPU has no bfloat16 instructions")


def gradient(engine, data, loss=None) -> torch.Tensor:
    engine.discard_gradient()
    engine.forward_backward(data, loss or CrossEntropy())
    parts = [one.float().flatten() for one in engine.gradients.all() if one is not None]
    engine.discard_gradient()
    return torch.cat(parts)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def sampled(engine, num_samples: int = 2) -> tuple[list[int], list[float]]:
    request = SampleRequest([7, 8, 9, 10], num_samples, SamplingParams(max_tokens=8, seed=3), 0)
    found = sample(engine.model, [request], 0, 1024)[0]
    return [token for one in found for token in one.tokens], [value for one in found for value in one.logprobs]


@needs_instructions
@pytest.mark.parametrize("chosen", REDUCED, ids=str)
@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"activation_checkpointing": True}, {"packing": "padded"}], ids=str)
def test_gradients_are_near_those_of_float32(make_engine, chosen, options):
    data = tiny.datums(8)
    exact, reduced = make_engine(**options), make_engine(**options, precision=chosen)
    for loss in (CrossEntropy(), DPO()):
        found, expected = gradient(reduced, data, loss), gradient(exact, data, loss)
        assert error(found, expected) < LIMIT
        # The option does something.
        assert chosen.autocast is None or error(found, expected) > 1e-4
        assert torch.equal(found, gradient(reduced, data, loss))


@needs_instructions
@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"activation_checkpointing": True}], ids=str)
def test_both_halves_of_a_pass_run_at_the_precision(make_engine, options):
    engine = make_engine(precision=MEDIUM, **options)
    seen: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def note(half: str) -> None:
        seen[half].add(torch.get_float32_matmul_precision())

    # The module of the last layer: its hooks run in the middle of each half.
    last = next(one for one in engine.model.network.modules() if isinstance(one, torch.nn.ModuleList))[-1]
    last.register_forward_hook(lambda *_: note("forward"))
    last.register_full_backward_hook(lambda *_: note("backward"))
    gradient(engine, tiny.datums(4))
    assert seen == {"forward": {"medium"}, "backward": {"medium"}}


@needs_instructions
@pytest.mark.parametrize("chosen", [DEFAULT, *REDUCED], ids=str)
def test_activation_checkpointing_recomputes_each_layer_once(make_engine, chosen):
    """Also with several runs in a row, each of which is a part of the backward pass at a precision of its own."""
    data, found = tiny.datums(8), []
    for checkpointing in (False, True):
        engine = make_engine(precision=chosen, activation_checkpointing=checkpointing)
        layers, calls = engine.model.network.model.layers, []
        layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(torch.get_float32_matmul_precision()))
        before = engine.passes.count
        found.append(gradient(engine, data))
        assert calls == [chosen.matmul] * ((engine.passes.count - before) * (1 + checkpointing))
    assert torch.equal(*found)


@needs_instructions
def test_gradients_of_the_shipped_model_are_near_those_of_float32(make_engine):
    shipped = packaged("data") / "tiny"
    found, expected = (gradient(make_engine(name=shipped, precision=one), tiny.datums(8)) for one in (MIXED, DEFAULT))
    assert 1e-4 < error(found, expected) < SHIPPED


@pytest.mark.parametrize("chosen", REDUCED, ids=str)
def test_load_time_choices_and_samples_of_trials_are_those_of_float32(make_engine, chosen):
    exact, reduced = make_engine(), make_engine(precision=chosen)
    assert reduced.packing == exact.packing
    assert exact.packing.packed
    assert exact.packing.shared
    assert len(reduced.passes.last_layer) == len(exact.passes.last_layer) > 0
    assert reduced.passes.head.transform == exact.passes.head.transform
    before = gradient(exact, tiny.datums(4))
    gradient(reduced, tiny.datums(4))
    assert sampled(reduced) == sampled(exact)
    # Nothing of the other engine's precision stays in the process.
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(gradient(exact, tiny.datums(4)), before)


@pytest.mark.parametrize("chosen", REDUCED, ids=str)
def test_a_context_restores_what_it_found(chosen):
    with pytest.raises(ZeroDivisionError), chosen.forward(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == chosen.matmul
        assert torch.is_autocast_enabled("cpu") == (chosen.autocast is not None)
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("options", [{"precision": MEDIUM}, {"precision": MIXED}, {"dtype": "bfloat16"}], ids=str)
def test_attention_has_a_precision_of_its_own(make_engine, monkeypatch, options):
    calls = []
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "avx512_bf16")
    monkeypatch.setattr("cookbook.engine.attention.attended", lambda *of: calls.append(of) or attended(*of))
    engine = make_engine(**options)
    calls.clear()
    gradient(engine, tiny.datums(4))
    assert calls


@needs_instructions
@pytest.mark.parametrize("shape", [(256, 64, 1500), (3, 64, 130), (1500, 512, 1536)], ids=str)
def test_medium_products_of_bfloat16_numbers_are_those_of_float32(shape):
    """Attention in bfloat16 relies on this. Without AMX it holds for all numbers, as cookbook plan says."""
    rows, inner, columns = shape
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, inner, generator=draw), torch.randn(inner, columns, generator=draw)
    if instructions() == "amx_bf16":
        left, right = left.bfloat16().float(), right.bfloat16().float()
    expected = left.double() @ right.double()
    with MEDIUM.backward():
        found = torch.bmm(left[None], right[None])[0], left @ right
    for one in found:
        # Operands that are rounded to bfloat16 give an error of 2e-3.
        assert (one - expected).norm() / expected.norm() < 1e-6


def test_the_default_enters_no_context(make_engine, monkeypatch):
    """So the bits of a default run of a narrow model do not depend on this module."""

    def fail(*_: object) -> None:
        raise AssertionError("the default precision ran code of cookbook.engine.precision")

    # With or without the instructions, a precision other than the default enters it.
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "avx512_bf16")
    engine = make_engine()
    for name in ("forward", "backward"):
        monkeypatch.setattr(Precision, name, fail)
    monkeypatch.setattr("cookbook.engine.attention.attended", fail)
    gradient(engine, tiny.datums(4))
    with pytest.raises(AssertionError, match="the default precision"):
        gradient(make_engine(precision=MEDIUM), tiny.datums(4))


@pytest.mark.parametrize("exact", [pytest.param(True, marks=needs_instructions), False])
def test_wide_models_are_computed_by_onednn_if_its_products_are_exact(make_engine, monkeypatch, exact):
    data, seen = tiny.datums(4), []

    def watched():
        engine = make_engine()
        engine.model.network.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
        seen.clear()
        return engine

    narrow = watched()
    expected, samples = gradient(narrow, data), sampled(narrow, 16)
    assert set(seen) == {"highest"}
    monkeypatch.setattr("cookbook.engine.precision.choice.LEAST_HIDDEN", narrow.model.network.config.hidden_size)
    exact = exact and medium_is_exact()
    monkeypatch.setattr("cookbook.engine.precision.choice.is_amd", lambda: exact)
    wide = watched()
    found = gradient(wide, data)
    assert set(seen) == {"medium" if exact else "highest"}
    # Operands that are rounded to bfloat16 give an error above 1e-3.
    assert error(found, expected) < 1e-6
    assert exact or torch.equal(found, expected)
    seen.clear()
    tokens, logprobs = sampled(wide, 16)
    # The prefill of four tokens and rounds of few rows are not faster with oneDNN.
    assert seen[0] == "highest"
    assert set(seen) == ({"medium", "highest"} if exact else {"highest"})
    assert tokens == samples[0]
    np.testing.assert_allclose(logprobs, samples[1], atol=1e-5)
    seen.clear()
    assert sampled(wide, 2)[0]
    assert set(seen) == {"highest"}


@needs_instructions
@pytest.mark.parametrize("options", [{"precision": MEDIUM}, {"precision": MIXED}, {"dtype": "bfloat16"}], ids=str)
def test_an_error_in_attentions_part_of_the_backward_pass_leaves_nothing_set(make_engine, monkeypatch, options):
    def fails(*_: object) -> None:
        # As in a part that runs at medium precision, and ends before it switches back.
        torch.set_float32_matmul_precision("medium")
        raise ZeroDivisionError

    engine = make_engine(**options)
    gradient(engine, tiny.datums(4))
    monkeypatch.setattr("cookbook.engine.attention.multiplies_half", lambda *_: False)
    monkeypatch.setattr("cookbook.engine.precision.attention._SwitchedBack.backward", fails)
    with restored():  # for the tests after this one, should it fail
        with pytest.raises(ZeroDivisionError):
            gradient(engine, tiny.datums(4))
        assert torch.get_float32_matmul_precision() == "highest"


def test_rounded_products_are_not_taken_for_exact(monkeypatch):
    if instructions() == "avx512_bf16":
        assert medium_is_exact.__wrapped__()
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "avx512_bf16")
    with torch.autocast("cpu", torch.bfloat16):
        assert not medium_is_exact.__wrapped__()
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: None)
    assert not medium_is_exact.__wrapped__()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_do_not_take_products_of_wide_models(make_engine, monkeypatch, dtype):
    monkeypatch.setattr("cookbook.engine.precision.choice.LEAST_HIDDEN", 1)
    for name, value in (("is_amd", True), ("medium_is_exact", True), ("instructions", "avx512_bf16")):
        monkeypatch.setattr(f"cookbook.engine.precision.choice.{name}", lambda value=value: value)
    network = make_engine(dtype=dtype).model.network
    # The sums of the layers are float32 with weights of bfloat16.
    expected = MIXED if dtype == "bfloat16" else DEFAULT
    assert DEFAULT.used(network, torch.device("cpu")) == expected
    assert DEFAULT.used(network.float(), torch.device("cuda")) == DEFAULT
    assert [one.used(network, torch.device("cpu")) for one in (DEFAULT, Precision("high"), MIXED)] == [MEDIUM, MEDIUM, MIXED]


def test_a_cpu_without_the_instructions_computes_as_by_default(make_engine, monkeypatch, caplog):
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: None)
    caplog.set_level("INFO", logger="cookbook")
    expected = gradient(make_engine(), tiny.datums(4))
    for chosen in REDUCED:
        assert torch.equal(gradient(make_engine(precision=chosen), tiny.datums(4)), expected)
        assert f"products are exact, not {chosen}: this CPU has no bfloat16 instructions" in caplog.text
    cpu = torch.device("cpu")
    assert MIXED.described(cpu) == "highest: this CPU has no bfloat16 instructions for highest, autocast bfloat16"
    # Without a choice there is nothing to say.
    assert Precision().described(cpu) == "highest"


@needs_instructions
@pytest.mark.parametrize(("tokens", "width", "inside"), [(511, 64, "highest"), (512, 32, "highest"), (512, 64, "medium")])
def test_small_blocks_of_attention_are_exact(tokens, width, inside):
    """Both halves, forward and backward, run at the precision of the block's size, and the gradient is that of plain torch."""
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_float32_matmul_precision())
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            seen.append(torch.get_float32_matmul_precision())
            return slope

    def compute(*operands):
        return Watched.apply(scaled_dot_product_attention(*operands, is_causal=True))

    torch.manual_seed(0)
    operands = [torch.randn(1, 2, tokens, width, requires_grad=True) for _ in range(3)]
    slope = torch.randn(1, 2, tokens, width)
    with MEDIUM.forward(torch.device("cpu")):
        out = attended(compute, *operands)
    with MEDIUM.backward():
        found = torch.autograd.grad(out, operands, slope)
    assert seen == [inside, inside]
    expected = torch.autograd.grad(scaled_dot_product_attention(*operands, is_causal=True), operands, slope)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < (1e-6 if inside == "highest" else LIMIT)


# Runs of one block and of several, tokens after a prefix, and windows that begin before the first key or after it.
# The window of the last run hides one key, from the last query.
RUNS = [(300, 300, None), (64, 400, None), (200, 500, None), (300, 300, 70), (300, 300, 290), (200, 500, 150), (16, 16, 15)]


@pytest.mark.parametrize(("queries", "keys", "window"), RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [True, False], ids=["weights kept", "weights recomputed"])
def test_attention_in_bfloat16_is_near_that_of_float64(queries, keys, window, dtype, kept, monkeypatch):
    """Measured 0.002 and 0.005. Scores reach 30; if they were rounded to bfloat16, gradients would be off by 0.04."""
    monkeypatch.setattr("cookbook.engine.precision.attention.MOST_KEYS_KEPT", keys if kept else keys - 1)
    torch.manual_seed(0)
    shapes = [(2, heads, count, 64) for heads, count in ((4, queries), (2, keys), (2, keys))]
    exact = [(2 * torch.randn(shape)).bfloat16().double().requires_grad_() for shape in shapes]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    mask = mask if window is None else mask.triu(keys - queries - window + 1)
    rounded = [one.detach().to(dtype).requires_grad_() for one in exact]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        found = half_attention(*rounded, window, 0.3)
    expected = scaled_dot_product_attention(*exact, mask, scale=0.3, enable_gqa=True)
    slope = torch.randn(expected.shape).bfloat16()
    assert len(found.grad_fn.saved_tensors) == 3 + (-(-queries // 128) if kept else 0)
    gradients = torch.autograd.grad(found, rounded, slope)
    assert found.dtype == torch.bfloat16
    assert [one.dtype for one in gradients] == [dtype] * 3
    assert error(found.detach().double(), expected.detach()) < 0.004
    for one, other in zip(gradients, torch.autograd.grad(expected, exact, slope.double()), strict=True):
        assert error(one.double(), other) < 0.008


@pytest.mark.parametrize(
    ("heads", "count", "width", "expected"), [(8, 125, 64, True), (8, 124, 64, False), (4, 396, 32, True), (4, 395, 32, False)]
)
def test_attention_in_bfloat16_is_chosen_by_shape_and_instructions(monkeypatch, heads, count, width, expected):
    operand = torch.zeros(1, heads, count, width)
    for name in ("avx512_bf16", None):
        monkeypatch.setattr("cookbook.engine.precision.attention.instructions", lambda name=name: name)
        assert multiplies_half(operand.bfloat16(), operand, operand) == (expected and name is not None)
        assert not multiplies_half(operand, operand, operand)
        assert not multiplies_half(operand.bfloat16(), operand, operand[..., : width // 2])


@pytest.mark.parametrize("options", [{"precision": MIXED}, {"dtype": "bfloat16"}], ids=str)
def test_packed_runs_use_attention_in_bfloat16(make_engine, monkeypatch, options):
    """A row mixes runs that do with runs that do not, and the gradient differs by rounding only."""
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "avx512_bf16")
    engine, calls = make_engine(**options), []
    data = tiny.datums(6)
    other = gradient(engine, data)
    monkeypatch.setattr("cookbook.engine.attention.multiplies_half", lambda query, key, value: key.shape[2] > 20)
    monkeypatch.setattr("cookbook.engine.attention.half_attention", lambda *of: calls.append(of) or half_attention(*of))
    found = gradient(engine, data)
    assert calls
    assert 0 < error(found, other) < LIMIT
    # The weights of attention that are kept, recomputed, or recomputed with the layer, have the same bits.
    assert error(gradient(make_engine(**options, activation_checkpointing=True), data), found) == 0
    monkeypatch.setattr("cookbook.engine.precision.attention.MOST_KEYS_KEPT", 0)
    assert error(gradient(make_engine(**options), data), found) == 0


def test_attention_of_float64_stays_exact_at_medium_precision():
    torch.manual_seed(0)
    operands = [torch.randn(1, heads, 600, 64, dtype=torch.float64) for heads in (2, 1, 1)]
    with Precision("medium").backward():
        found, _ = attend(torch.nn.Module(), *operands, None)
    expected = scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert error(found, expected) < 1e-14


def test_the_weights_that_attention_keeps_are_expected_before_the_first_pass(make_engine, monkeypatch):
    """The choice of activation checkpointing relies on a trial of few tokens, in which attention keeps nothing."""
    monkeypatch.setattr("cookbook.engine.precision.attention.instructions", lambda: "avx512_bf16")
    monkeypatch.setattr("cookbook.engine.precision.attention.LEAST_OF_NARROW_HEADS", 100_000)
    monkeypatch.setattr("cookbook.engine.precision.attention.BLOCK_QUERIES", 4)
    asked: list[float] = []
    real: list[float] = []
    monkeypatch.setattr("cookbook.engine.memory.shortage_of", lambda kept, tokens, *_: asked.append(kept / tokens))
    for most in (95, 0):
        monkeypatch.setattr("cookbook.engine.precision.attention.MOST_KEYS_KEPT", most)
        engine = make_engine(dtype="bfloat16", activation_checkpointing=None, micro_batch_tokens=95)
        gradient(engine, [datum_from_tokens_weights(np.arange(96), np.ones(96))])
        real.append(engine.passes.bytes_per_token)
    # Each of two layers with two heads keeps about 95 bytes for each head.
    assert 380 == asked[0] - asked[1] == pytest.approx(real[0] - real[1], rel=0.05)


@pytest.mark.parametrize(
    "options",
    rest_slow([{"matmul_precision": "high"}, {"matmul_precision": "medium"}, {"autocast": "bfloat16"}, {"dtype": "bfloat16"}]),
    ids=str,
)
def test_a_resume_repeats_the_bits_of_its_precision(make_trainer, options):
    def steps(trainer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(trainer.forward_backward(tiny.datums(6), "cross_entropy").result().metrics["loss"])
            trainer.optim_step(AdamParams(learning_rate=1e-3)).result()
        return losses

    whole = make_trainer(**options)
    steps(whole, 2)
    saved = whole.save_state("two").result()
    after = steps(whole, 2)
    resumed = make_trainer(**options)
    resumed.load_state(saved).result()
    assert steps(resumed, 2) == after
    pairs = zip(whole.engine.model.trainable(), resumed.engine.model.trainable(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


@needs_instructions
def test_logprobs_are_near_those_of_float32(make_engine):
    """Measured: 0.008 nats on average, logprobs having a size of 6."""
    outputs = [make_engine(precision=one).forward(tiny.datums(8)).loss_fn_outputs for one in (MIXED, DEFAULT)]
    found, expected = (np.concatenate([row["logprobs"].to_numpy() for row in rows]) for rows in outputs)
    assert 1e-4 < np.abs(found - expected).mean() < 0.05


def test_unknown_words_are_refused():
    wrong = [("matmul_precision", "fast"), ("matmul_precision", "tf32"), ("autocast", "float16"), ("autocast", "high")]
    for name, value in wrong:
        with pytest.raises(ConfigError, match=rf"^backend\.{name}: expected .* got '{value}'$"):
            LocalConfig(**{name: value})


def test_mixed_precision_needs_float32_weights(make_trainer):
    message = r"^backend\.autocast: bfloat16 products need float32 weights, got model\.dtype=bfloat16; "
    with pytest.raises(ConfigError, match=message):
        make_trainer(dtype="bfloat16", autocast="bfloat16")
    for dtype in ("float16", "float64"):
        with pytest.raises(ConfigError, match=f"need float32 weights, got model.dtype={dtype}; "):
            Precision(autocast="bfloat16").refuse_half(dtype)


def test_ranks_get_the_precision():
    from cookbook.engine.model import ModelConfig

    config = LocalConfig(ranks=2, matmul_precision="medium", autocast="bfloat16").rank_config(ModelConfig("tiny"), 0)
    assert (config["backend"]["matmul_precision"], config["backend"]["autocast"]) == ("medium", "bfloat16")


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_run_is_resumed_at_its_precision_only(capsys):
    words = [*SMALL["sft"], "recipe.steps=1", "eval.every=null", "checkpoint.every=1", "out=run"]
    assert train(*words, "backend.autocast=bfloat16") == 0
    longer = [*words, "recipe.steps=2"]
    assert train(*longer) == 2
    line = "backend.matmul_precision and backend.autocast: the run that saved run/checkpoints/step-000001 was made with "
    assert f"{line}'highest, autocast bfloat16', now it is 'highest'; restore the old value" in capsys.readouterr().err
    assert train(*longer, "backend.autocast=bfloat16") == 0


def test_the_gain_is_described_in_one_short_line_where_there_is_one(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "amx_bf16")
    line = "highest; backend.autocast=bfloat16 is 7 times as fast on this CPU, but rounds"
    assert Precision().described(cpu) == line and len(line) < 100
    # Autocast needs float32 weights, and is chosen already.
    assert Precision().described(cpu, "bfloat16") == "highest"
    assert MIXED.described(cpu) == "highest, autocast bfloat16"


def test_products_of_float32_are_tf32_on_a_gpu_by_default(monkeypatch):
    assert LocalConfig(device="cpu").precision.matmul == "highest"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert LocalConfig().precision.matmul == "high" and LocalConfig(device="cpu").precision.matmul == "highest"
    assert LocalConfig(matmul_precision="highest").precision.matmul == "highest"
    assert "TF32" in LocalConfig().precision.described(torch.device("cuda"))
