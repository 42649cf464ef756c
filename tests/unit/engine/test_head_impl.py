"""Implementations of the output head: a user's own function or class, and torch.compile, against cookbook's own code."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from marks import rest_nightly, rest_slow
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

import cookbook
from cookbook.backends.local import LocalConfig
from cookbook.backends.remote.config import RemoteConfig
from cookbook.engine.head.fused_loss import LinearCrossEntropyLoss
from cookbook.engine.head.linear_logprobs import compiled, implementations, linear_logprobs
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LogitTransform
from cookbook.errors import BackendError, ConfigError
from cookbook.losses import GRPO, CrossEntropy
from cookbook.service import ServiceClient
from cookbook.types import AdamParams

FILE = """
from pathlib import Path

import torch


def logprobs(hidden, weight, targets, *, bias, scale, softcap, temperature):
    Path("called").touch()
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = scale * logits
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if temperature is None else logits / temperature[:, None].to(logits)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


class Function:
    def __call__(self, hidden, weight, targets, *, bias, scale, softcap, temperature):
        found = logprobs(hidden, weight, targets, bias=bias, scale=scale, softcap=softcap, temperature=temperature)
        with torch.no_grad():
            all_logprobs = (scale * hidden @ weight.T).log_softmax(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return found, entropy, found >= all_logprobs.amax(-1) - 1e-6


class MyLoss:
    def __init__(self, output_embeddings):
        self.layer = output_embeddings

    def __call__(self, hidden_states, labels):
        logits = self.forward_logits(hidden_states)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    def forward_logits(self, hidden_states):
        return self.layer(hidden_states)

    def target_logprobs(self, hidden, weight, targets, *, bias, scale, softcap, temperature):
        assert weight is self.layer.weight
        return logprobs(hidden, weight, targets, bias=bias, scale=scale, softcap=softcap, temperature=temperature)


class Old:
    def __init__(self, output_embeddings):
        pass

    def __call__(self, hidden_states, labels):
        pass


class Nothing:
    pass


class Sized(Function):
    def __init__(self, size):
        pass


NUMBER = 3
"""
OWN = ["logprobs", "Function", "MyLoss"]
OPTIONS = {"bias": None, "scale": 1.0, "softcap": None, "temperature": None}


@pytest.fixture
def own(here):  # noqa: F811
    """The user's file, in the current folder."""
    write("my_head.py", FILE)
    return here / "my_head.py"


def supplied(path: Path, name: str):
    spec = importlib.util.spec_from_file_location("my_head_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("loss", [CrossEntropy(), GRPO(kl_beta=0.05)], ids=["sft", "grpo"])
@pytest.mark.parametrize("name", rest_slow([*OWN, "LinearCrossEntropyLoss"]))
def test_a_users_own_computes_what_the_built_in_does(make_engine, own, name, loss, lora_rank):
    impl = LinearCrossEntropyLoss if name == "LinearCrossEntropyLoss" else supplied(own, name)
    data, found = loss.prepare(tiny.datums()), []
    for one in ("auto", impl):
        engine = make_engine(dtype="float64", head_impl=one, lora_rank=lora_rank)
        for _ in range(2):  # an adapter's first step moves B alone
            output = engine.forward_backward(data, loss)
            engine.optim_step(AdamParams(learning_rate=1e-2), None)
        found.append((tiny.weights(engine), output.metrics))
    assert tiny.difference(found[1][0], found[0][0]) < 1e-10
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)  # entropy and accuracy too
    assert name == "LinearCrossEntropyLoss" or Path("called").exists()


@pytest.mark.parametrize(("recipe", "lora_rank"), [("sft", 4), ("grpo", 0)])
@pytest.mark.slow
def test_a_users_own_from_the_command_line(own, recipe, lora_rank, capsys):
    words = [*SMALL[recipe], f"model.lora_rank={lora_rank}", "eval.every=null", "recipe.steps=2"]
    assert train(*words, "out=built_in") == 0
    assert not Path("called").exists()
    assert train(*words, "out=own", "backend.head_impl=my_head.py:MyLoss") == 0
    assert Path("called").exists()
    found = [[row for row in rows(folder) if "loss" in row] for folder in ("own", "built_in")]
    assert [len(steps) for steps in found] == [2, 2]
    for ours, theirs in zip(*found, strict=True):
        names = [name for name in theirs if name.startswith(("loss", "optim/", "tokens/"))]
        assert len(names) > 2
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-3)


@pytest.mark.parametrize("given", [*OWN, "my_head.py:Function"])
def test_a_users_own_from_the_python_api(own, tiny_folder, given):
    head_impl = given if ":" in given else supplied(own, given)
    data, found = tiny.datums(3), []
    for options in ({}, {"head_impl": head_impl}, {"backend": LocalConfig(head_impl=head_impl, all_logprobs=True)}):
        with ServiceClient(**options) as service:
            training = service.create_training_client(str(tiny_folder))
            found.append(training.forward_backward(data, "cross_entropy").result().metrics["loss"])
    assert Path("called").exists()
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


def test_a_server_chooses_its_own(own):
    with pytest.raises(ConfigError, match=r"^head_impl: is for the embedded trainer"):
        ServiceClient(backend=RemoteConfig("http://localhost:1"), head_impl=supplied(own, "logprobs"))


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        ("fast", "must be one of auto, pytorch, torch_compile, cce, or file.py:name, got 'fast'"),
        ("nothing.py:f", "nothing.py does not exist in "),
        ("my_head.py:g", r"my_head.py has no function 'g'; define g\(hidden, weight, targets, "),
        ("my_head.py:NUMBER", "my_head.py has no function 'NUMBER'"),
        ("my_head.py:Old", r"Old must take \(hidden, weight, targets, .*, got \(self, hidden_states, labels\): .*Target"),
        ("my_head.py:Nothing", r"Nothing has no method __call__\(hidden, weight, targets, .*\); add it"),
        (lambda hidden, labels: 0.0, r"<lambda> must take \(hidden, weight, targets, "),
        (3, "must be a name, a function or a class, got 3"),
    ],
)
def test_what_is_no_implementation_is_refused_before_a_model_is_loaded(own, impl, message):
    with pytest.raises(ConfigError, match=f"^backend.head_impl: {message}"):
        LocalConfig(head_impl=impl)


def test_a_class_that_needs_arguments(own, make_engine):
    with pytest.raises(ConfigError, match=r"^backend.head_impl: cannot construct Sized without arguments: .*'size'"):
        make_engine(head_impl="my_head.py:Sized")


def test_a_mistake_on_the_command_line_is_one_line(own, capsys):
    assert train("recipe=sft", "backend.head_impl=my_head.py:Old") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: good[:-1], r"must return logprobs as a tensor of shape \((\d+),\) .*, got shape \(\d+,\); see"),
        (lambda good: good.mean(), r"got shape \(\)"),
        (lambda good: good.bfloat16(), "and dtype torch.float32 on cpu, got dtype torch.bfloat16"),
        (lambda good: good.detach(), "returned logprobs without a graph; compute them"),
        (lambda good: good.tolist(), "got a list"),
        (lambda good: (good, good[:-1].detach(), None), "must return entropy as .*, got shape"),
        (lambda good: (good, None, good.detach()), "must return hit as .* dtype torch.bool on cpu, got dtype torch.float32"),
    ],
)
def test_a_wrong_result_is_one_line(make_engine, change, message):
    def mine(hidden, weight, targets, *, bias, scale, softcap, temperature):
        return change((hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0])

    engine = make_engine(head_impl=mine)
    with pytest.raises(BackendError, match=f"^backend.head_impl: mine .*{message}") as caught:
        engine.forward_backward(CrossEntropy().prepare(tiny.datums()), CrossEntropy())
    assert "\n" not in str(caught.value)


def test_what_it_declines_the_engine_computes_with_one_warning(make_engine, caplog):
    def never(hidden, weight, targets, *, bias, scale, softcap, temperature):
        return None

    implementations._cannot.cache_clear()
    data, found = CrossEntropy().prepare(tiny.datums()), []
    with caplog.at_level(logging.WARNING, logger="cookbook"):
        for impl in ("auto", never):
            engine = make_engine(head_impl=impl, micro_batch_tokens=50)
            engine.forward_backward(data, CrossEntropy())
            found.append(tiny.gradients(engine))
    assert tiny.difference(found[1], found[0]) < 1e-6
    assert [record.message for record in caplog.records] == [
        "impl=never does not run here: it returned None; impl=pytorch is used instead"
    ]


@pytest.mark.parametrize(
    "reason", ["the loss needs the gradient of the entropy", "the model's logits are not those of a linear layer"]
)
def test_cases_it_cannot_compute_go_to_the_engine_with_one_warning(make_engine, caplog, reason):
    def mine(hidden, weight, targets, *, bias, scale, softcap, temperature):
        raise AssertionError("it is asked")

    implementations._cannot.cache_clear()
    engine = make_engine(head_impl=mine)
    if "logits" in reason:
        engine.passes.head.transform = None
    for _ in range(2):
        engine.forward_backward(tiny.datums(3), GRPO(kl_beta=0.0, entropy_coef=0.0 if "logits" in reason else 0.1))
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"impl=mine does not run here: {reason}")


def test_an_adapter_on_the_output_layer_is_the_engines_own(make_engine, caplog, own):
    implementations._cannot.cache_clear()
    with caplog.at_level(logging.WARNING, logger="cookbook"):
        untied = tiny.save(own.parent / "untied", tie_word_embeddings=False)
        options = {"lora_rank": 2, "lora_target_modules": ("lm_head",), "head_impl": "my_head.py:logprobs", "name": untied}
        make_engine(**options).forward_backward(CrossEntropy().prepare(tiny.datums()), CrossEntropy())
    assert any("impl=logprobs does not run here: the output layer has a LoRA adapter" in one.message for one in caplog.records)
    assert not Path("called").exists()


# ---- cce -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "meant"), [(None, None), ("auto", "auto"), ("high", "high"), ("1e-4", 1e-4), (0.01, 0.01)])
def test_gradient_filtering_of_cce_is_off_unless_asked_for(given, meant):
    config = LocalConfig(head_impl="cce", cce_filter_eps=given)
    assert config.cce_filter_eps == meant
    found = implementations.implementation("cce", None, options={} if meant is None else {"filter_eps": meant})
    assert found.logprobs.keywords.get("filter_eps") == meant
    assert implementations.cce_logprobs.__kwdefaults__["filter_eps"] is None  # the package's own default filters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cce_filter_eps": "auto"}, "backend.cce_filter_eps: requires backend.head_impl=cce, got head_impl='auto'"),
        ({"head_impl": "cce", "cce_filter_eps": "some"}, "backend.cce_filter_eps: expected null, auto, high or a number"),
        ({"head_impl": "cce", "cce_filter_eps": 0}, "got 0"),
    ],
)
def test_gradient_filtering_is_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalConfig(**options)


# ---- torch.compile -------------------------------------------------------------------------------------------------

COMPILER = os.environ.get("CXX", "g++")
with_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs a C++ compiler: there is no {COMPILER}")


def problem(count, vocabulary, bias=False, temperature=False, dtype=torch.float32):
    draw = torch.Generator().manual_seed(count)
    operands = [torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((count, 16), (vocabulary, 16), (vocabulary,))]
    targets = torch.randint(0, vocabulary, (count,), generator=draw)
    divisor = torch.rand(count, generator=draw) + 0.5 if temperature else None
    return operands[: 2 + bias], targets, divisor, torch.randn(count, generator=draw, dtype=dtype)


def compare(count, vocabulary, tolerance, *, scale=1.0, softcap=None, chunk_size=None, **options):
    """Compiled against cookbook's own code: logprobs, entropy, hits, gradients."""
    operands, targets, divisor, upstream = problem(count, vocabulary, **options)
    found = []
    for ours in (True, False):
        hidden, weight, *bias = leaves = [one.clone().requires_grad_() for one in operands]
        named = {"bias": bias[0] if bias else None, "scale": scale, "softcap": softcap}
        if ours:
            layer = LinearLayer(weight, *bias, transform=LogitTransform(scale, softcap))
            result = linear_logprobs(hidden, layer, targets, divisor, entropy=True, hit=True)
            scores = (result.logprobs, result.entropy, result.hit)
        else:
            scores = compiled.compiled_logprobs(hidden, weight, targets, temperature=divisor, chunk_size=chunk_size, **named)
        scores[0].backward(upstream)
        found.append([*scores, *(leaf.grad for leaf in leaves)])
    for name, one, other in zip(("logprobs", "entropy", "hit", "hidden", "weight", "bias"), *found, strict=False):
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@with_compiler
@pytest.mark.parametrize("backend", rest_nightly(["aot_eager", "inductor"]))
def test_torch_compile_compiles_once_for_all_lengths(make_engine, monkeypatch, backend):
    """The fast backend compiles the same graphs for the same lengths, forward and backward, but generates no C++."""
    from torch._dynamo.utils import counters

    kernels = tuple(torch.compile(one, dynamic=True, backend=backend) for one in (compiled._score, compiled._product_gradient))
    if backend != "inductor":
        monkeypatch.setattr(compiled, "_kernels", lambda: kernels)
    compare(50, 259, 2e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs >= 2  # one forward, one backward
    for count, chunk_size in ((7, None), (64, 16), (65, 16), (300, 64)):
        compare(count, 259, 2e-5, chunk_size=chunk_size)
    compare(40, 1000, 2e-5)
    assert counters["stats"]["unique_graphs"] == graphs
    layer, labels = torch.nn.Linear(16, 259, bias=False), torch.randint(0, 259, (2, 30))
    hidden = torch.randn(2, 30, 16)
    own = LinearCrossEntropyLoss(layer, "torch_compile", chunk_size=20)(hidden, labels)
    torch.testing.assert_close(own, LinearCrossEntropyLoss(layer)(hidden, labels))
    data = CrossEntropy().prepare(tiny.datums())
    for lora_rank in (0, 4):
        found = []
        for impl in ("auto", "torch_compile"):
            engine = make_engine(head_impl=impl, lora_rank=lora_rank)
            output = engine.forward_backward(data, CrossEntropy())
            found.append((tiny.gradients(engine), output.metrics))
        assert tiny.difference(found[1][0], found[0][0]) < 1e-5
        assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs


@with_compiler
@pytest.mark.parametrize(
    "options",
    rest_nightly(
        [
            {"bias": True, "temperature": True, "softcap": 5.0},
            {"bias": True},
            {"softcap": 3.0, "scale": 0.5},
            {"temperature": True},
        ]
    ),
)
def test_torch_compile_with_what_models_do_to_their_logits(options):
    compare(50, 259, 2e-5, **options)
    compare(33, 300, 1e-12, dtype=torch.float64, chunk_size=8, **options)


@with_compiler
@pytest.mark.slow
def test_torch_compile_without_a_compiler_falls_back_with_one_warning(caplog):
    import torch._dynamo
    from torch._inductor import config

    implementations._cannot.cache_clear()
    (hidden, _), targets, _, _ = problem(20, 30)
    layer = torch.nn.Linear(16, 30, bias=False)
    loss = LinearCrossEntropyLoss(layer, "torch_compile")
    torch._dynamo.reset()
    broken = config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    with broken, caplog.at_level(logging.WARNING, logger="cookbook"):
        found = [loss(hidden[None], targets[None]) for _ in range(2)]
    torch._dynamo.reset()
    assert found[0] == LinearCrossEntropyLoss(layer)(hidden[None], targets[None])
    (warning,) = [record.message for record in caplog.records if record.name == "cookbook"]
    assert warning.startswith("impl=torch_compile does not run here: torch.compile fails: ")
    assert "\n" not in warning


def test_public_names():
    assert isinstance(LinearCrossEntropyLoss(torch.nn.Linear(4, 9)), cookbook.FusedOutputLoss)
    assert cookbook.TargetLogprobs and cookbook.without_logits
