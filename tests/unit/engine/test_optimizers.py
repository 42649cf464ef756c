"""The memory-saving optimizers: their update against formulas written down here, what they keep, and exact resumption."""

from __future__ import annotations

import importlib.util

import pytest
import tiny
import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import snapshots, store
from cookbook.cli.app import run
from cookbook.engine.model import ModelConfig
from cookbook.engine.optimizer import RULES, state_bytes
from cookbook.errors import CheckpointError, ConfigError
from cookbook.losses import CrossEntropy
from cookbook.types import AdamParams

ADAM = {
    "adamw": AdamParams(2e-3, 0.9, 0.95, 1e-8, 0.1, grad_clip_norm=1.0),
    "adamw8bit": AdamParams(2e-3, 0.9, 0.95, 1e-8, 0.1, grad_clip_norm=1.0),
    "adafactor": AdamParams(2e-2, 0.0, 0.0, 1e-8, 0.1, grad_clip_norm=1.0),
}
SAVING = ["adamw8bit", "adafactor"]


def updated(name, parameter, gradients, adam):
    """The optimizer itself, after one update for each of ``gradients``."""
    rule = RULES[name]
    made = rule.make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        made.param_groups[0].update(rule.options(adam))
        made.step()
    return made


def train(engine, name, *seeds):
    for seed in seeds:
        engine.forward_backward(CrossEntropy().prepare(tiny.datums(4, seed=seed)), CrossEntropy())
        engine.optim_step(ADAM[name], None)


def test_adafactor_is_the_papers(draw):
    """Two steps of a matrix and of a vector, number by number in float64."""
    adam = AdamParams(0.02, 0.0, 0.0, 1e-8, 0.1)
    for shape in ((6, 4), (5,)):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64))
        gradients = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2)]
        weight = parameter.detach().clone()
        rows, columns, whole = 0.0, 0.0, 0.0
        for t, gradient in enumerate(gradients, 1):
            decay, square = 1 - t**-0.8, gradient**2
            size = max(1e-3, float(weight.square().mean().sqrt())) * min(0.02, t**-0.5)
            weight = weight * (1 - 0.02 * 0.1)
            whole = decay * whole + (1 - decay) * square
            second = whole
            if len(shape) == 2:
                rows = decay * rows + (1 - decay) * square.mean(1)
                columns = decay * columns + (1 - decay) * square.mean(0)
                second = torch.outer(rows, columns) / rows.mean()
            update = gradient / second.sqrt()
            weight = weight - size * update / max(1.0, float(update.square().mean().sqrt()))
        updated("adafactor", parameter, gradients, adam)
        assert float((parameter.detach() - weight).abs().max()) < 1e-12


def dequantized(state, number):
    table = state[f"qmap{number}"]
    scales = state[f"absmax{number}"].repeat_interleave(256)
    return table[state[f"state{number}"].long().reshape(-1)] * scales, table, scales


def test_adamw8bit_is_adamw_up_to_the_rounding_of_its_moments(draw):
    """From the bytes of the step before, each update is AdamW's, and the new bytes are the nearest of their table."""
    pytest.importorskip("bitsandbytes")
    adam = AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.1)
    weight = torch.randn(4096, generator=draw)
    first = second = torch.zeros(4096)
    parameter = torch.nn.Parameter(weight.clone())
    made = RULES["adamw8bit"].make([parameter])
    for t in (1, 2, 3):
        gradient = torch.randn(4096, generator=draw)
        parameter.grad = gradient.clone()
        made.param_groups[0].update(RULES["adamw8bit"].options(adam))
        made.step()
        exact = (0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2)
        root = (exact[1] / (1 - 0.95**t)).sqrt() + 1e-8
        weight = weight * (1 - 1e-2 * 0.1) - 1e-2 * exact[0] / (1 - 0.9**t) / root
        assert float((parameter.detach() - weight).abs().max()) < 2e-6  # float32 rounding of numbers up to 4
        weight = parameter.detach().clone()
        kept = []
        for number, value in enumerate(exact, 1):
            found, table, scales = dequantized(made.state[parameter], number)
            nearest = ((value / scales)[:, None] - table).abs().amin(1)
            assert float(((found - value).abs() / scales - nearest).max()) < 1e-4  # it compares with rounded middles
            assert float(nearest.max()) < 0.008  # of the largest of its 256
            assert not torch.equal(found, value)  # it is rounded indeed
            kept.append(found)
        first, second = kept


def test_it_keeps_less(make_engine):
    """The bytes themselves are those that are promised for shapes alone; of tensors that are not tiny, much less."""
    pytest.importorskip("bitsandbytes")
    kept = {}
    for name, rule in RULES.items():
        engine = make_engine(optimizer=name)
        train(engine, name, 1)
        state = {key: one.nbytes for key, one in engine.optimizer.state().items() if not key.startswith("step.")}
        assert sum(state.values()) == state_bytes(rule, engine.optimizer.parameters)
        large = {name for name, parameter in engine.model.trainable() if parameter.numel() >= 4096}
        kept[name] = sum(size for key, size in state.items() if key.partition(".")[2] in large)
    assert kept["adamw8bit"] < 0.255 * kept["adamw"]  # (1 + 4/256) / 4
    assert kept["adafactor"] < 0.05 * kept["adamw"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAVING)
def test_a_run_resumes_exactly(make_engine, tmp_path, name, dtype):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    engine = make_engine(optimizer=name, dtype=dtype)
    train(engine, name, 1, 2)
    store.save(engine, tmp_path / "two", state=True)
    apart = snapshots.on_host(engine, engine.model.tokenizer)  # the copy that is saved while training continues
    before = {key: one.clone() for key, one in engine.optimizer.state().items()}
    again = make_engine(seed=1, optimizer=name, dtype=dtype)
    store.load(again, tmp_path / "two", optimizer=True)
    for copied in (apart, again):
        assert copied.optimizer.state().keys() == before.keys()
        assert all(torch.equal(copied.optimizer.state()[key], one) for key, one in before.items())
    for one in (engine, again):
        train(one, name, 3, 4)
    assert tiny.difference(tiny.weights(again), tiny.weights(engine)) == 0.0
    assert all(torch.equal(again.optimizer.state()[key], one) for key, one in engine.optimizer.state().items())


def test_what_is_saved_aside_computes_nothing(make_engine, monkeypatch):
    """On a GPU its weights lie on another device than the rest of the model: a pass of it would fail."""
    engine = make_engine()
    train(engine, "adamw", 1)
    monkeypatch.setattr(type(engine.model.network), "forward", lambda *_, **__: pytest.fail("it was called"))
    assert snapshots.on_host(engine, engine.model.tokenizer).step == 1


def test_the_count_of_updates_is_where_the_moments_are():
    """As torch's fused kernel wants it, wherever it was read to; here from the CPU to a device without numbers."""
    moments = {key: torch.empty(3, device="meta") for key in RULES["adamw"].keys}
    restored = RULES["adamw"].restored(None, {"step": torch.tensor(2.0), **moments})
    parameter = torch.nn.Parameter(torch.ones(3))
    own = updated("adamw", parameter, [torch.ones(3)], ADAM["adamw"]).state[parameter]
    assert restored.keys() == own.keys()
    assert restored["step"].device.type == "meta" and restored["step"].dtype == own["step"].dtype


@pytest.mark.parametrize("name", SAVING)
def test_it_learns(make_engine, name):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    engine = make_engine(optimizer=name)
    data = CrossEntropy().prepare(tiny.datums(4))
    losses = []
    for _ in range(12):
        losses.append(engine.forward_backward(data, CrossEntropy()).metrics["loss"])
        engine.optim_step(ADAM[name], None)
    assert losses[-1] < 0.7 * losses[0]


def test_what_an_optimizer_lacks_is_refused(make_engine):
    engine = make_engine(optimizer="adafactor")
    engine.forward_backward(tiny.datums(2), CrossEntropy())
    before = tiny.weights(engine)
    with pytest.raises(ConfigError, match=r"adafactor has no first moment .* got beta1=0.9 and beta2=0.95; set both to 0"):
        engine.optim_step(AdamParams(), None)
    assert tiny.difference(tiny.weights(engine), before) == 0.0


def test_another_optimizer_is_named_on_resume(make_engine, tmp_path):
    engine = make_engine()
    train(engine, "adamw", 1)
    store.save(engine, tmp_path / "one", state=True)
    other = make_engine(optimizer="adafactor")
    with pytest.raises(CheckpointError, match=r"was made with backend.optimizer=adamw, now it is adafactor; set it back"):
        store.load(other, tmp_path / "one", optimizer=True)
    store.load(other, tmp_path / "one", optimizer=False)
    assert tiny.difference(tiny.weights(other), tiny.weights(engine)) == 0.0


def test_a_missing_library_is_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw8bit needs bitsandbytes, which is not installed; run: pip install"):
        LocalTrainer(ModelConfig("./nowhere"), LocalConfig(optimizer="adamw8bit"))
    with pytest.raises(ConfigError, match=r"backend.optimizer: expected one of adamw, adamw8bit, adafactor, got 'adam'"):
        LocalConfig(optimizer="adam")


@pytest.mark.slow
def test_plan_counts_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "recipe=sft", "recipe.batch_size=2", "backend.optimizer=adamw8bit"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer"))
    assert line.endswith(", adamw8bit")
    assert 2.0 < float(line.split()[1]) * 1e6 / 624_384 < 2.2  # bytes a parameter


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(0)


def test_bytes_of_shapes():
    """Numbers one can check by hand: 2 x (10,000 + 4 x 40), 4 x (100 + 100), and float32 masters of half precision."""
    matrix = torch.empty(100, 100)
    expected = {"adamw": 80_000, "adamw8bit": 20_320, "adafactor": 800}
    assert {name: state_bytes(rule, [matrix]) for name, rule in RULES.items()} == expected
    half = {name: state_bytes(rule, [matrix.bfloat16()]) for name, rule in RULES.items()}
    assert half == {name: count + 40_000 for name, count in expected.items()}
