"""The parts of the server that need no model: the wire, the order of requests, answers, checkpoints, keys."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from cookbook.errors import CheckpointError, ConfigError, DataError
from cookbook.server import calls, schema
from cookbook.server.auth import Auth
from cookbook.server.catalogue import Address, Catalogue, RunFacts
from cookbook.server.config import ServerConfig
from cookbook.server.downloads import Downloads
from cookbook.server.errors import Refused
from cookbook.server.futures import SAMPLE, Answers
from cookbook.server.live import LiveSamplers
from cookbook.server.log import NoLog
from cookbook.server.order import Order
from cookbook.server.results import Result, passed, wire_name
from cookbook.server.samplers import SamplingSession
from cookbook.types import ForwardBackwardOutput, TensorData

RUN = "s1:train:0"


# ---- the wire --------------------------------------------------------------------------------------------------------


def test_the_messages_are_those_of_the_client():
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")
    for name in schema.MESSAGES:
        own = schema._pool.FindMessageTypeByName(f"cookbook_wire.{name}")
        for field in own.fields:
            other = theirs.DESCRIPTOR.message_types_by_name[name].fields_by_name[field.name]
            kinds = {field.TYPE_ENUM: field.TYPE_INT32}  # both travel as a varint
            assert (field.number, field.type) == (other.number, kinds.get(other.type, other.type)), f"{name}.{field.name}"
            assert field.is_repeated == other.is_repeated


def request(**tensor):
    """A message of one datum of two tokens, and a tensor ``x`` as described."""
    message = schema.ForwardBackwardRequest(model_id=RUN, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    found = datum.loss_fn_inputs["x"]
    sparse = tensor.pop("sparse", None)
    if sparse is not None:
        for name, (values, dtype) in zip(("values", "crow_indices", "col_indices"), sparse, strict=True):
            setattr(found.sparse_csr, name, np.array(values, dtype).tobytes())
    for name, value in tensor.items():
        (found.shape.extend if name == "shape" else lambda one, name=name: setattr(found, name, one))(value)
    return message


FLOATS = np.array([1, 2], "<f4").tobytes()


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        ({"dense": FLOATS, "dtype": 1, "shape": [3]}, "2 values do not make the shape"),
        ({"dense": FLOATS, "dtype": 1, "shape": [-1, -2]}, "its shape is"),
        ({"dense": FLOATS, "dtype": 9}, "its dtype is 9"),
        ({"dense": FLOATS[:5], "dtype": 1}, "5 bytes are not a whole number of float32"),
        ({"dense": FLOATS * 2, "dtype": 1}, "x has 4 values and model_input 2"),
        ({"sparse": [([1], "f4"), ([0, 1, 1], "i8"), ([5], "i8")], "dtype": 1, "shape": [2, 3]}, "column index lies outside"),
        ({"sparse": [([1], "f4"), ([0, 2, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 3]}, "must rise from 0"),
        ({"sparse": [([1], "f4"), ([0, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 3]}, "do not make the shape"),
        ({"sparse": [([1], "f4"), ([0, 1, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 1 << 40]}, "unfold to more"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_named(tensor, problem):
    with pytest.raises(DataError, match=f"datum 0: .*{problem}|{problem}"):
        calls.call_of(request(**tensor))


def test_a_sparse_tensor_has_zeros_where_it_names_nothing():
    sparse = [([7, 8], "f4"), ([0, 1, 2], "i8"), ([2, 0], "i8")]
    datum = calls.call_of(request(sparse=sparse, dtype=1, shape=[2, 3])).data[0]
    assert datum.loss_fn_inputs["x"].tolist() == [[0, 0, 7], [8, 0, 0]]


def test_options_of_a_loss_come_as_numbers_and_words():
    message = request(dense=FLOATS, dtype=1)
    message.loss_fn = "dpo"
    message.loss_fn_config["beta"] = 9.0  # what older clients read
    for key, value in (("beta", 0.2), ("reference_free", 1.0)):
        message.loss_fn_config_v2[key].number = value
    message.loss_fn_config_v2["variant"].text = "ipo"
    message.loss_fn_config_v2["normalization"].text = "null"
    found = calls.call_of(message).loss_fn_config
    assert found == {"beta": 0.2, "reference_free": True, "variant": "ipo", "normalization": None}


def test_outputs_of_different_widths_make_records_in_order():
    rows = [{"logprobs": TensorData(np.full(shape, i, "f4"))} for i, shape in enumerate([(2,), (3,), (2, 2), (1,)])]
    message = schema.ForwardBackwardOutput.FromString(passed(ForwardBackwardOutput(rows, {"loss": 1.0, "loss:sum": 1.0})).body)
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    assert [list(record.fields["logprobs"].trailing_shape) for record in message.loss_fn_outputs] == [[], [2], []]
    assert np.frombuffer(message.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 20]
    assert dict(message.metrics) == {"loss:sum": 1.0}


@pytest.mark.parametrize("name", ["loss:sum", "loss/nll", "tokens/trained", "a:b:c"])
def test_every_metric_says_how_it_is_combined(name):
    assert wire_name(name).count(":") == 1


# ---- order and answers -----------------------------------------------------------------------------------------------


class Noted:
    def __init__(self, number, into):
        self.number, self.into = number, into

    def start(self):
        self.into.append(self.number)


@pytest.mark.parametrize("arrival", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
def test_requests_run_in_the_order_of_their_numbers(arrival):
    done: list[int] = []
    order: Order[Noted] = Order()
    for number in arrival:
        order.put(number, Noted(number, done))
    assert (done, order.waiting) == ([1, 2, 3, 4], 0)


def test_a_gap_holds_back_what_follows_until_it_is_given_up():
    done: list[int] = []
    order: Order[Noted] = Order()
    for number in (1, 4, 3):
        order.put(number, Noted(number, done))
    assert (done, order.waiting) == ([1], 2)
    assert [one.number for one in order.give_up()] == [3, 4]
    assert (order.following, order.waiting) == (2, 0)


def test_results_that_were_fetched_go_first_and_say_that_they_are_gone():
    async def scenario():
        answers = Answers(max_bytes=25)
        made = [answers.claim(NoLog(), RUN, number, b"x", "optim_step")[0] for number in range(4)]
        for answer in made[:2]:
            answers.settle(answer, Result(bytes(10)))
        await answers.fetch(made[1].request_id, 1)
        for answer in made[2:]:
            answers.settle(answer, Result(bytes(10)))
        for dropped, why in ((1, "fetched before"), (0, "raise server.max_results_mb")):
            with pytest.raises(Refused, match=why) as gone:
                await answers.fetch(made[dropped].request_id, 1)
            assert gone.value.status == 410
        for kept in (2, 3):
            assert await answers.fetch(made[kept].request_id, 1) is not None
        answers.forget(RUN)
        return len(answers), answers.kept_bytes

    assert asyncio.run(scenario()) == (0, 0)


def test_nothing_more_is_accepted_while_too_much_is_pending_but_what_others_wait_for():
    answers = Answers(max_bytes=100, max_pending=10)
    first, _ = answers.claim(NoLog(), RUN, 2, bytes(20), "optim_step")  # alone it may be larger than all
    with pytest.raises(Refused, match="are pending; send it again later") as later:
        answers.claim(NoLog(), RUN, 3, b"x", "optim_step")
    assert later.value.status == 429
    due, _ = answers.claim(NoLog(), RUN, 1, b"x", "optim_step", is_due=True)
    for one in (first, due):
        answers.settle(one, Result(b""))
    assert answers.pending_bytes == 0 and answers.claim(NoLog(), RUN, 3, b"x", "optim_step")[1]


@pytest.mark.parametrize("kind", ["optim_step", SAMPLE])
def test_what_is_computed_for_a_client_that_left_is_nobodys(kind):
    answers = Answers(max_bytes=10, max_pending=100)
    left, _ = answers.claim(NoLog(), RUN, 1, bytes(30), kind)
    answers.forget("s1")
    answers.settle(left, Result(bytes(8)))
    assert (answers.pending_bytes, answers.kept_bytes, len(answers)) == (0, 0, 0)
    assert not answers.completions._feeds
    for number in (1, 2):  # more than is kept: the oldest goes, and that is one that is there
        answers.settle(answers.claim(NoLog(), "s2:train:0", number, b"x", kind)[0], Result(bytes(8)))
    assert (answers.pending_bytes, answers.kept_bytes, len(answers)) == (0, 8, 2)


def test_without_a_log_what_was_fetched_long_ago_is_forgotten_and_not_run_again():
    async def scenario():
        answers = Answers(max_bytes=100)
        made = [answers.claim(NoLog(), RUN, number, b"x", "optim_step")[0] for number in (1, 2, 3)]
        for answer in made[:2]:
            answers.settle(answer, Result(b"done"))
        await answers.fetch(made[0].request_id, 1)
        answers.forget_old(0.0)
        assert len(answers) == 2 and not answers.claim(NoLog(), RUN, 1, b"x", "optim_step")[1]
        with pytest.raises(Refused, match="fetched before"):
            await answers.fetch(made[0].request_id, 1)
        assert (await answers.fetch(made[1].request_id, 1)).body == b"done"

    asyncio.run(scenario())


def test_who_waits_for_a_result_of_a_session_that_ends_is_told():
    async def scenario():
        answers = Answers(max_bytes=100)
        answer, _ = answers.claim(NoLog(), RUN, 1, b"x", "optim_step")
        asyncio.get_running_loop().call_later(0.01, answers.forget, "s1")
        with pytest.raises(Refused, match="has ended"):
            await answers.fetch(answer.request_id, 30)

    asyncio.run(scenario())


def test_who_waits_for_a_result_gets_it_when_it_is_there():
    async def scenario():
        answers = Answers(max_bytes=100)
        answer, _ = answers.claim(NoLog(), RUN, 1, b"x", "optim_step")
        assert await answers.fetch(answer.request_id, 0.01) is None
        asyncio.get_running_loop().call_later(0.05, answers.settle, answer, Result(b"done"))
        began = time.monotonic()
        found = await answers.fetch(answer.request_id, 30)
        return found.body, time.monotonic() - began < 5

    assert asyncio.run(scenario()) == (b"done", True)


# ---- samplers that have their weights in memory ------------------------------------------------------------------------


def held(number, weights, num_bytes=10, waiting=0):
    return SamplingSession(f"s1:sample:{number}", "s1", "tiny", None, weights, 0, num_bytes=num_bytes, waiting=waiting)


def numbers_after(max_bytes, samplers):
    """Of the samplers that are there when all have been added."""
    gone = []
    live = LiveSamplers(max_bytes, gone.append, lambda _: None)
    for sampler in samplers:
        live.add(sampler)
    assert len(live) + len(gone) == len(samplers) == len(live) + live.num_let_go
    return [int(one.rpartition(":")[2]) for one in live]


def test_samplers_are_let_go_only_where_that_frees_memory():
    one, two, three = object(), object(), object()  # weights: nothing is asked of them here but whether they are the same
    assert numbers_after(10, [held(0, one), held(1, two)]) == [1]
    assert numbers_after(10, [held(0, one), held(1, two, 0), held(2, three)]) == [1, 2]
    assert numbers_after(5, [held(number, one) for number in range(4)]) == [0, 1, 2, 3]  # they share the newest's
    assert numbers_after(10, [held(0, one), held(1, one, waiting=1), held(2, two)]) == [0, 1, 2]  # somebody waits for them
    assert numbers_after(20, [held(0, one), held(1, two), held(2, one), held(3, three)]) == [0, 2, 3]  # 0's were asked of 2
    assert numbers_after(10, [held(0, one), held(1, one), held(2, two)]) == [2]  # only both free them


def test_samplers_without_weights_of_their_own_have_a_bound_too(monkeypatch):
    monkeypatch.setattr("cookbook.server.live.MAX_SAMPLERS", 2)
    base = object()
    assert numbers_after(10, [held(number, base, 0) for number in range(4)]) == [2, 3]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def catalogue(tmp_path):
    found = Catalogue(tmp_path)
    found.add_run(RunFacts(RUN, "tiny", True, 4, 0, 1.0))
    return found


def put(catalogue, name, kind="weights", ttl_s=None):
    address = Address(RUN, kind, name)
    catalogue.place(address).mkdir()
    (catalogue.place(address) / "model").write_text("weights")
    catalogue.add(address, ttl_s, {"k": "v"})
    return address


def test_what_was_saved_is_found_again(catalogue, tmp_path):
    addresses = [put(catalogue, name, kind) for kind in ("weights", "sampler_weights") for name in ("x", "x.json", "a.b")]
    again = Catalogue(tmp_path)
    assert [saved.address for saved in again.of_run(RUN)] == addresses
    assert again.run(RUN).lora_rank == 4
    saved = again.find(addresses[0])
    assert (saved.size_bytes, saved.user_metadata, saved.expires) == (7, {"k": "v"}, None)
    again.delete(addresses[1])
    assert [one.address for one in again.all()] == [one for one in addresses[::-1] if one != addresses[1]]


def test_what_has_expired_is_gone(catalogue):
    address = put(catalogue, "x", ttl_s=100)
    assert catalogue.find(address).expires > time.time()
    catalogue.set_ttl(address, -1)
    with pytest.raises(CheckpointError, match="has expired"):
        catalogue.find(address)
    assert catalogue.of_run(RUN) == [] and not catalogue.place(address).exists()


@pytest.mark.parametrize(
    "path",
    [
        f"tinker://{RUN}/weights/../x",
        f"tinker://{RUN}/weights/..",
        f"tinker://{RUN}/other/x",
        "tinker://../weights/x",
        "tinker://s1:train:0/../weights/x",
        f"{RUN}/weights/x",
        f"tinker://{RUN}/weights/x\n",
        f"tinker://{RUN}/weights/{'x' * 201}",
    ],
)
def test_an_address_is_no_path_elsewhere(path):
    with pytest.raises(CheckpointError, match="expected tinker://"):
        Address.parse(path)


def test_a_download_address_opens_one_file_for_a_while(catalogue, monkeypatch):
    address, downloads = put(catalogue, "x"), Downloads(catalogue)
    assert downloads.files(address) == ["model"]
    token = downloads.sign(address, "model", downloads.expiry())
    assert downloads.open(token, "model").read_text() == "weights"
    for bad, file in ((token, "other"), (token, "../run.json"), (token.replace("x", "y", 1), "model"), ("", "model")):
        with pytest.raises(Refused, match="not given by this server"):
            downloads.open(bad, file)
    with pytest.raises(Refused, match="not given by this server"):
        Downloads(catalogue).open(token, "model")
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(Refused, match="expired"):
        downloads.open(token, "model")


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_without_keys_nobody_else_may_reach_the_server(monkeypatch, tmp_path):
    monkeypatch.delenv("COOKBOOK_API_KEYS", raising=False)
    assert ServerConfig().api_keys() == []
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            ServerConfig(host=host).api_keys()
    monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-a, tml-b")
    file = tmp_path / "keys"
    file.write_text("# ours\ntml-c\n\n")
    assert ServerConfig(host="0.0.0.0", keys_file=str(file)).api_keys() == ["tml-a", "tml-b", "tml-c"]
    with pytest.raises(ConfigError, match="cannot read"):
        ServerConfig(keys_file=str(tmp_path / "none")).api_keys()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/v1/x", {}, 401),
        ("/api/v1/x", {"X-API-Key": "tml-b"}, 404),
        ("/api/v1/x", {"Authorization": "Bearer tml-a"}, 404),
        ("/api/v1/x", {"X-API-Key": "tml-"}, 401),
        ("/api/v1/x", {"X-API-Key": ""}, 401),
        ("/api/v1/healthz", {}, 404),
        ("/api/v1/healthz/../x", {}, 401),
    ],
)
def test_a_key_opens_and_nothing_else_does(path, headers, status):
    async def ask():
        transport = httpx.ASGITransport(Auth(FastAPI(docs_url=None), ["tml-a", "tml-b"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get(path, headers=headers)).status_code

    assert asyncio.run(ask()) == status
