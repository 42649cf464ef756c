"""A loss that the unmodified client computes costs one forward pass, gives the embedded gradient, and holds bounded memory."""

from __future__ import annotations

import pytest
import servertools
import tiny
import torch

from cookbook.backends.local import LocalConfig
from cookbook.backends.local.kept_graphs import KeptGraphs
from cookbook.engine import memory
from cookbook.engine.model import ModelConfig
from cookbook.losses import CrossEntropy
from cookbook.server.state.host import Host

tinker = pytest.importorskip("tinker")

STEP = tinker.AdamParams(learning_rate=1e-2)
DATA = tiny.datums(4, seed=1)
PLAIN = [type(row)(row.model_input, {"target_tokens": row.loss_fn_inputs["target_tokens"]}) for row in DATA]


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"]) as found:
        yield found


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as client:
        yield client


def wire(data):
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row.model_input.to_ints()),
            loss_fn_inputs={"target_tokens": row.loss_fn_inputs["target_tokens"].array.tolist()},
        )
        for row in data
    ]


def sharpness(data, logprobs):
    """A loss no server knows, which couples all datums."""
    whole = torch.cat(logprobs)
    return (whole - whole.mean()).pow(2).mean(), {"sharpness": whole.detach().std().item()}


def passes(server, client):
    """A function that tells how many passes there were since it was last asked."""
    engine = server.engine(client)
    seen = engine.passes.count

    def since():
        nonlocal seen
        before, seen = seen, engine.passes.count
        return seen - before

    return since


def train(client, steps=1, before=None):
    for _ in range(steps):
        if before is not None:
            before()
        client.forward_backward_custom(wire(DATA), sharpness).result()
        client.optim_step(STEP).result()


def test_a_custom_step_costs_one_pass_from_the_second_on(server, service):
    client = service.create_lora_training_client("tiny", rank=4).result()
    since = passes(server, client)
    train(client)
    assert since() == 2
    train(client, 3)
    assert since() == 3
    assert server.service.host.graphs.num_bytes == 0


def test_gradients_and_weights_are_the_embedded_trainers(server, service):
    client = service.create_lora_training_client("tiny:full", rank=0).result()
    embedded = server.service.host.new_trainer(server.service.catalog.folder, rank=0, seed=0)
    for _ in range(3):
        client.forward_backward_custom(wire(DATA), sharpness).result()
        embedded.forward_backward_custom(DATA, sharpness).result()
        pairs = zip(tiny.gradients(server.engine(client)), tiny.gradients(embedded.engine), strict=True)
        assert all(torch.equal(here, there) for here, there in pairs)
        client.optim_step(STEP).result()
        embedded.optim_step(STEP).result()


def test_reference_forwards_keep_nothing_and_do_not_hide_the_one_that_counts(server, service):
    client = service.create_lora_training_client("tiny", rank=4).result()
    since, held = passes(server, client), []

    def reference():
        client.forward(wire(DATA[:2]), "cross_entropy").result()
        held.append(server.service.host.graphs.num_bytes)

    train(client, before=reference)
    assert since() == 3
    train(client, 2, before=reference)
    assert since() == 4
    assert held == [0, 0, 0]


def test_a_run_that_stops_giving_backwards_keeps_no_more_graphs(server, service):
    client = service.create_lora_training_client("tiny", rank=4).result()
    train(client, 2)
    graphs = server.service.host.graphs
    for expected in (True, False):  # a backward is expected of the first graph, but does not come
        client.forward(wire(DATA), "cross_entropy").result()
        assert (graphs.num_bytes > 0) is expected
        client.forward_backward(wire(DATA[2:]), "cross_entropy").result()
        client.optim_step(STEP).result()
        assert graphs.num_bytes == 0


def test_weights_that_moved_in_between_get_their_own_gradient(server, service):
    client = service.create_lora_training_client("tiny", rank=4).result()
    train(client, 2)
    client.forward(wire(DATA), "cross_entropy").result()
    client.forward_backward(wire(DATA[2:]), "cross_entropy").result()
    client.optim_step(STEP).result()
    since = passes(server, client)
    client.forward_backward(wire(DATA), "cross_entropy").result()
    assert since() == 1
    found = [one.clone() for one in tiny.gradients(server.engine(client))]
    engine = server.engine(client)
    engine.discard_gradient()
    engine.forward_backward(PLAIN, CrossEntropy())
    assert all(torch.equal(*pair) for pair in zip(found, tiny.gradients(engine), strict=True))


@pytest.fixture
def engines(make_engine):
    return [make_engine() for _ in range(2)]


def expect_backwards(graphs, engine):
    """A step in which the only forward got its backward."""
    graphs.forward(engine, DATA, CrossEntropy())
    graphs.take(engine, DATA)
    engine.version += 1


def test_memory_is_bounded_over_all_runs_and_the_oldest_graph_of_the_largest_goes(engines):
    graphs = KeptGraphs(1 << 40)
    for engine in engines:
        expect_backwards(graphs, engine)
        graphs.forward(engine, DATA, CrossEntropy())
    both = graphs.num_bytes
    graphs.max_bytes = both * 3 // 4
    graphs.forward(engines[1], DATA[:1], CrossEntropy())
    assert 0 < graphs.num_bytes <= graphs.max_bytes
    assert sorted(graphs.take(engine, DATA) is not None for engine in engines) == [False, True]


def test_a_forward_beyond_the_budget_is_computed_without_its_graph(engines):
    graphs = KeptGraphs(100)
    expect_backwards(graphs, engines[0])
    engines[0].passes.bytes_per_token = 100.0
    graphs.forward(engines[0], DATA, CrossEntropy())
    assert graphs.num_bytes == 0


def test_graphs_of_a_run_that_is_gone_are_gone(make_engine):
    graphs = KeptGraphs(1 << 40)
    engine = make_engine()
    expect_backwards(graphs, engine)
    graphs.forward(engine, DATA, CrossEntropy())
    assert graphs.num_bytes > 0
    del engine
    assert graphs.num_bytes == 0


def test_a_model_that_drops_out_computes_its_forward_without(make_engine):
    engine = make_engine(lora_rank=4, lora_dropout=0.5)
    graphs = KeptGraphs(1 << 40)
    expect_backwards(graphs, engine)
    graphs.forward(engine, DATA, CrossEntropy())
    assert graphs.num_bytes == 0


def test_an_adapter_keeps_the_activations_that_a_full_run_has_no_room_for(tiny_folder, tmp_path, monkeypatch):
    """Every run decides by its trained parameters, independently of the decision for the base weights."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 350_000)
    host = Host(ModelConfig(str(tiny_folder)), LocalConfig(packing="padded", micro_batch_tokens=16), seed=0)
    found = {}
    for rank in (0, 2):
        trainer = host.new_trainer(tmp_path / str(rank), rank=rank, seed=0)
        before = trainer.forward(DATA, "cross_entropy").result().metrics["loss"]
        found[rank] = trainer.engine.options.activation_checkpointing
        assert trainer.forward_backward(DATA, "cross_entropy").result().metrics["loss"] == pytest.approx(before, rel=1e-6)
        trainer.close()
    host.close()
    assert found == {0: True, 2: False}
