"""What a client that stays can make the server hold: every kind of it has a bound, and who meets it is told what to do."""

from __future__ import annotations

import gc

import httpx
import pytest
import servertools
import torch

tinker = pytest.importorskip("tinker")

TOKENS = list(range(40, 60))
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 19},
)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])
ONE = tinker.SamplingParams(max_tokens=1)


@pytest.fixture
def serve(tiny_folder, tmp_path):
    """``serve(**options)``: a server and its client."""

    def start(**options):
        return servertools.running(tiny_folder, tmp_path, names=["tiny"], **options)

    return start


def gauges(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))}


def client_of(server):
    return tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY)


def test_snapshots_that_nobody_asks_make_room_for_newer_ones_and_say_so(serve):
    with serve() as server, client_of(server) as service:
        training = service.create_lora_training_client("tiny", rank=2).result()
        base = service.create_sampling_client(base_model="tiny").result()

        def snapshot():
            return training.save_weights_and_get_sampling_client().result()

        samplers = [snapshot(), snapshot(), snapshot()]
        limit = server.service.samplers.max_bytes = int(gauges(server.url)["cookbook_sampler_bytes"])
        assert limit > 0 and limit % 3 == 0
        samplers[0].sample(PROMPT, 1, ONE).result()  # it is needed; the two after it are not
        samplers += [snapshot(), snapshot()]
        found = gauges(server.url)
        assert (found["cookbook_sampler_bytes"], found["cookbook_samplers_let_go_total"]) == (limit, 2)
        for gone in samplers[1:3]:
            with pytest.raises(
                tinker.RequestFailedError, match=r"let go.* make a new sampling client, or raise server\.samplers_gb"
            ):
                gone.sample(PROMPT, 1, ONE).result()
        for there in (base, samplers[0], *samplers[3:]):
            assert there.sample(PROMPT, 1, ONE).result().sequences
    assert not gauges_left(server)


def gauges_left(server):
    """What ended clients have left behind."""
    return len(server.service.answers) + len(server.service.samplers) + server.service.samplers.num_bytes


def test_a_sampler_that_was_let_go_stays_so_after_a_restart(serve):
    with serve() as server:
        service = client_of(server)
        training = service.create_lora_training_client("tiny", rank=2).result()
        path = training.save_weights_for_sampler("kept").result().path
        first = service.create_sampling_client(model_path=path).result()
        kept = server.service.durability.sampler_weights(first._sampling_session_id)
        assert kept.exists()
        server.service.samplers.max_bytes = 1
        second = service.create_sampling_client(model_path=path).result()
        assert not kept.exists() and server.service.durability.sampler_weights(second._sampling_session_id).exists()
    with serve() as again:
        assert list(again.service.samplers) == [second._sampling_session_id]


def test_runs_and_sessions_have_a_limit_that_says_what_to_do(serve):
    with serve(max_runs=1, max_sessions=2) as server, client_of(server) as service:
        training = service.create_lora_training_client("tiny", rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match=r"1 training runs are in memory; .*raise server\.max_runs"):
            service.create_lora_training_client("tiny", rank=2).result()
        assert training.forward([DATUM], "cross_entropy").result().metrics["loss:sum"] > 0
        asked = [httpx.post(f"{server.url}/api/v1/create_session", json={}) for _ in range(2)]
        assert [one.status_code for one in asked] == [200, 429]
        assert "raise server.max_sessions" in asked[1].json()["detail"]


def test_runs_that_have_ended_leave_no_tensors(serve):
    def tensors():
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    with serve() as server:
        left = []
        for _ in range(3):
            with client_of(server) as service:
                service.create_lora_training_client("tiny", rank=2).result()
            server.service.host.worker.submit(lambda: None).result()
            left.append(tensors())
    assert left[1] == left[2]
