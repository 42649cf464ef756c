"""Losses made by the unmodified client and computed by the server: the client's numbers, and nothing not allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
import torch

from cookbook.errors import ConfigError, DataError
from cookbook.server.wire import loss_graph
from cookbook.server.wire.bodies import CustomLoss
from cookbook.server.wire.loss_graph import GraphLoss

tinker = pytest.importorskip("tinker")

CLOSE = 2e-6  # the client adds datums up in another order: a few float32 roundings


@pytest.fixture(scope="module")
def client(service):
    return service.create_lora_training_client("tiny:full", rank=0).result()


def clipped(logprobs, old, advantages, scale):
    """Branches nowhere, but indexes, compares, reduces, and calls functions, methods, operators and math."""
    ratio = torch.exp(logprobs - old)
    inner = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    penalty = torch.nn.functional.softplus(logprobs[1:] - logprobs[:-1]).sum() / logprobs.shape[0]
    mask = (advantages > 0).to(torch.float32)
    loss = -(inner * scale).sum() + math.sqrt(2.0) * penalty + 0.01 * (logprobs**2 * mask).mean()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/positive:sum": mask.sum()}


RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "scale": 0}


def rows():
    draw = np.random.default_rng(0)
    found = []
    for datum in tiny.datums(4, seed=5):
        targets = datum.loss_fn_inputs["target_tokens"].array
        arrays = {
            "target_tokens": targets,
            "old": draw.normal(-4, 1, len(targets)).astype("f4"),
            "advantages": draw.normal(size=len(targets)).astype("f4"),
            "scale": np.float32(draw.uniform(0.5, 2)),
        }
        tensors = {key: tinker.TensorData.from_numpy(np.asarray(array)) for key, array in arrays.items()}
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(datum.model_input.to_ints()), loss_fn_inputs=tensors))
    return found


@pytest.fixture(scope="module")
def handle(service):
    return service.create_custom_loss(clipped, RANKS).result()


def gradient(server, client):
    found = torch.cat([one.double().ravel() for one in tiny.gradients(server.engine(client))])
    client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    return found


def test_a_traced_loss_gives_what_the_same_loss_gives_at_the_client_in_one_pass(server, client, handle):
    assert handle.loss_id is not None
    before = server.engine(client).passes.count
    served = client.forward_backward_custom(rows(), handle).result()
    assert server.engine(client).passes.count == before + 1
    found = gradient(server, client)

    def local(data, logprobs):
        parts = [
            clipped(own, *(row.loss_fn_inputs[key].to_torch() for key in ("old", "advantages", "scale")))
            for row, own in zip(data, logprobs, strict=True)
        ]
        return sum(part[0] for part in parts), {"custom/positive:sum": float(sum(p[1]["custom/positive:sum"] for p in parts))}

    here = client.forward_backward_custom(rows(), local).result()
    expected = gradient(server, client)
    assert float((found - expected).norm() / expected.norm()) < CLOSE
    assert served.metrics["loss:sum"] == pytest.approx(here.metrics["loss:sum"], rel=1e-5)
    assert served.metrics["custom/positive:sum"] == here.metrics["custom/positive:sum"]
    assert 0 < served.metrics["custom/ratio:mean"] < 1e4


def test_a_loss_the_server_does_not_allow_is_an_error(service):
    def random(logprobs):
        return (logprobs * torch.rand_like(logprobs)).sum(), {}

    with pytest.raises(tinker.RequestFailedError, match=r"calls torch\.rand_like, which is not allowed"):
        service.create_custom_loss(random, {"logprobs": 1}).result()


def test_an_unknown_loss_and_wrong_data_fail_through_the_future(client, handle):
    bad = rows()
    del bad[1].loss_fn_inputs["old"]
    with pytest.raises(ValueError, match="old"):
        client.forward_backward_custom(bad, handle).result()
    with pytest.raises(tinker.RequestFailedError, match="unknown custom loss 'missing'"):
        client.forward_backward(rows(), "custom", {"loss_id": "missing"}).result()
    with pytest.raises(tinker.RequestFailedError, match="unknown custom loss"):
        client.optim_step(tinker.AdamParams()).result()


# ---- what a hostile graph may try ------------------------------------------------------------------------------------


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name):
    return {"ref": name}


LOGPROBS = node("placeholder", "logprobs", "logprobs")
LOSS = node("call_method", "loss", "sum", ref("x"))
RETURN = node("output", "output", "output", {"tuple": [ref("loss"), {"dict": {}}]})


def graph(*middle, inputs=("logprobs",), end=(LOSS, RETURN)):
    return CustomLoss(
        session_id="s",
        custom_loss_seq_id=0,
        name="mine",
        inputs=[{"name": name, "rank": 1} for name in inputs],
        graph={"nodes": [LOGPROBS, *middle, *end]},
    )


X = ref("logprobs")


@pytest.mark.parametrize(
    "wire",
    [
        graph(node("call_function", "x", "os.system", "true")),
        graph(node("call_function", "x", "builtins.eval", "1")),
        graph(node("call_function", "x", "torch.load", "/etc/passwd")),
        graph(node("call_function", "x", "torch.zeros", 1 << 40)),
        graph(node("call_function", "x", "torch.ops.aten.exp", X)),
        graph(node("call_method", "x", "__class__", X)),
        graph(node("call_method", "x", "add_", X, 1)),
        graph(node("call_method", "x", "numpy", X)),
        graph(node("call_method", "x", "expand", X, 1 << 40)),
        graph(node("call_module", "x", "linear", X)),
        graph(node("get_attr", "x", "weight")),
        graph(node("call_function", "x", "torch.exp", X, out=X)),
        graph(node("call_function", "x", "torch.exp", ref("later"))),
        graph(node("call_method", "x", "to", X, {"device": "cuda"})),
        graph(node("call_method", "x", "to", X, {"dtype": "load"})),
        graph(node("call_function", "x", "torch.exp", {"ref": "logprobs", "tuple": []})),
        graph(node("call_function", "logprobs", "torch.exp", X)),
        graph(node("call_function", "x", "torch.exp", X), inputs=("logprobs", "more")),
        graph(node("call_function", "x", "torch.exp", X), end=(LOSS,)),
        graph(node("call_function", "x", "torch.exp", X), end=(RETURN, LOSS)),
        graph(*[node("call_function", f"x{i}", "torch.exp", X) for i in range(3000)]),
        graph(
            node("call_function", "x", "torch.exp", X),
            end=(LOSS, node("output", "output", "output", {"tuple": [ref("loss"), {"dict": {"loss:sum": ref("loss")}}]})),
        ),
    ],
)
def test_what_is_not_allowed_is_refused_before_it_runs(wire):
    with pytest.raises(ConfigError, match="create_custom_loss"):
        GraphLoss(wire=wire)


def doubling(count):
    """Return a graph that repeatedly joins a tensor with itself."""
    steps = [node("call_function", "x0", "torch.cat", [X, X])]
    steps += [node("call_function", f"x{i}", "torch.cat", [ref(f"x{i - 1}")] * 2) for i in range(1, count)]
    return [*steps, node("call_function", "x", "torch.exp", ref(f"x{count - 1}"))]


def spreading():
    """Each unsqueezed copy multiplies the size by T."""
    steps, last = [], X
    for i in range(12):
        steps.append(node("call_method", f"u{i}", "unsqueeze", last, -1))
        last = ref(f"m{i}")
        steps.append(node("call_function", f"m{i}", "operator.mul", ref(f"u{i}"), X))
    return [*steps, node("call_function", "x", "torch.exp", last)]


def powers():
    """A whole number that Python would compute for hours."""
    steps = [node("call_function", "n0", "operator.pow", 9, 9)]
    steps += [node("call_function", f"n{i}", "operator.pow", ref(f"n{i - 1}"), ref(f"n{i - 1}")) for i in range(1, 9)]
    return [*steps, node("call_function", "x", "operator.mul", X, ref("n8"))]


def square(*steps):
    """Return a graph of a square tensor ``m``, indices ``i`` of its size, and more steps."""
    made = [
        node("call_method", "u", "unsqueeze", X, -1),
        node("call_function", "m", "operator.mul", ref("u"), X),
        node("call_function", "i", "torch.argsort", ref("m")),
        node("call_method", "flat", "flatten", ref("i")),
        node("call_function", "mask", "operator.ge", X, -9e9),
    ]
    return [*made, *steps]


@pytest.mark.parametrize(
    ("kind", "target", "args"),
    [
        ("call_function", "operator.getitem", [ref("m"), ref("i")]),
        ("call_function", "operator.getitem", [ref("m"), {"tuple": [{"slice": [None, None, None]}, ref("i")]}]),
        ("call_function", "operator.getitem", [ref("m"), {"tuple": [ref("mask"), ref("flat")]}]),
        ("call_function", "operator.getitem", [ref("m"), [0] * 400]),
        ("call_function", "torch.index_select", [ref("m"), 0, ref("flat")]),
        ("call_method", "index_select", [ref("m"), 0, ref("flat")]),
    ],
)
def test_the_budget_is_checked_before_an_operation_allocates(monkeypatch, kind, target, args):
    """An index repeats parts of a tensor: the result is larger than all arguments."""
    data = tiny.datums(1, seed=1)
    length = data[0].model_input.length
    monkeypatch.setattr(loss_graph, "MAX_ELEMENTS", 9 * length**2)
    monkeypatch.setitem(loss_graph._CALLS[kind], target, lambda *_: pytest.fail("allocated"))
    loss = GraphLoss(wire=graph(*square(node(kind, "x", target, *args))))
    with pytest.raises(DataError, match="computes more than"):
        loss(data, [torch.linspace(-1, 0, length, requires_grad=True)])


def test_indices_that_select_a_part_cost_no_more_than_the_part():
    data = tiny.datums(1, seed=1)
    steps = [
        node("call_function", "part", "operator.getitem", ref("m"), {"tuple": [ref("mask"), 0]}),
        node("call_function", "x", "operator.getitem", ref("part"), {"slice": [1, None, None]}),
    ]
    value, _ = GraphLoss(wire=graph(*square(*steps)))(data, [torch.zeros(data[0].model_input.length, requires_grad=True)])
    assert value.isfinite()


@pytest.mark.parametrize(
    "middle",
    [
        doubling(60),
        spreading(),
        powers(),
        [node("call_function", "x", "operator.mul", "a", 1 << 40)],
        [node("call_function", "x", "operator.getitem", {"dict": {}}, "a")],
        [node("call_function", "x", "getattr", X, "grad_fn")],
        [node("call_function", "x", "torch.exp", X, X, X)],
        [node("call_function", "x", "operator.getitem", X, 1 << 40)],
        [node("call_method", "x", "sum", 3)],
    ],
)
def test_what_grows_without_bound_or_does_not_fit_fails_quickly(middle):
    loss = GraphLoss(wire=graph(*middle))
    data = tiny.datums(1, seed=1)
    logprobs = [torch.zeros(data[0].model_input.length, requires_grad=True)]
    with pytest.raises(DataError, match="custom loss 'mine'"):
        loss(data, logprobs)
