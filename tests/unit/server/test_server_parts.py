"""The parts of the server that need no model: the wire, the order of requests, store, checkpoints, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from google.protobuf.descriptor import FieldDescriptor
from waiting import WAIT_S

from cookbook.backends import worker
from cookbook.backends.worker import Worker
from cookbook.errors import CheckpointError, ConfigError, DataError
from cookbook.server import app
from cookbook.server.app import Auth
from cookbook.server.config import ServerConfig
from cookbook.server.journal.attempts import Attempts
from cookbook.server.journal.log import NoLog
from cookbook.server.keys import KeyRing
from cookbook.server.serve import DrainingServer
from cookbook.server.state.catalog import Address, Catalog, Downloads, RunInfo
from cookbook.server.state.requests import SAMPLE, Request, RequestState, RequestStore
from cookbook.server.state.run import RequestOrder
from cookbook.server.state.samplers import SamplerCache, SamplingSession
from cookbook.server.state.service import Service
from cookbook.server.wire import decode, json_pieces
from cookbook.server.wire import messages_pb2 as pb
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import StoredResult, forward_backward_result, wire_name
from cookbook.types import ForwardBackwardOutput, TensorData

RUN = "s1:train:0"


# ---- what a full or broken disk must not end -------------------------------------------------------------------------


def test_a_request_is_computed_even_if_its_attempt_cannot_be_counted(tmp_path, caplog):
    attempts, thread = Attempts(tmp_path), Worker(1)
    thread.on_slice(attempts.computing, attempts.is_suspect)
    (tmp_path / "read only").touch()
    attempts._file = os.open(tmp_path / "read only", os.O_RDONLY)
    with caplog.at_level("INFO", "cookbook.server"), contextlib.closing(thread):
        for name in ("one", "two"):
            with worker.purpose(name):
                assert thread.submit(lambda name=name: name).result(timeout=WAIT_S) == name
    assert caplog.text.count("attempts not counted") == 1


def test_a_cleanup_that_fails_is_repeated(monkeypatch, caplog):
    calls = []

    def unload(_):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is full")

    monkeypatch.setattr(app, "CLEANUP_S", 0.0)
    monkeypatch.setattr(app, "unload_silent_sessions", unload)

    async def clean_up():
        task = asyncio.create_task(app._clean_up_periodically(SimpleNamespace(excuse_silence=lambda: None)))
        while len(calls) < 2 and not task.done():
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(clean_up())
    assert len(calls) == 2 and "the disk is full" in caplog.text


def test_an_idle_server_ends_even_if_it_cannot_tell_why(tmp_path, capsys):
    (tmp_path / "file").touch()
    config = ServerConfig(idle_h=1e-9, idle_file=str(tmp_path / "file" / "idle"))
    server = DrainingServer(uvicorn.Config("none"), SimpleNamespace(config=config, last_request=-1.0))
    asyncio.run(server._end_if_idle())
    assert server.should_exit and "server.idle_file: cannot write" in capsys.readouterr().err


# ---- the wire --------------------------------------------------------------------------------------------------------


def test_the_messages_are_those_of_the_client():
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")
    for name, own_message in pb.DESCRIPTOR.message_types_by_name.items():
        for own in own_message.fields:
            other = theirs.DESCRIPTOR.message_types_by_name[name].fields_by_name[own.name]
            assert (own.number, own.type, own.is_repeated) == (other.number, other.type, other.is_repeated), (
                f"{name}.{own.name}"
            )
    for name, own_enum in pb.DESCRIPTOR.enum_types_by_name.items():
        values = {value.name: value.number for value in theirs.DESCRIPTOR.enum_types_by_name[name].values}
        assert {value.name: value.number for value in own_enum.values} == values


def test_the_compiled_messages_are_those_of_the_proto_file():
    """Fields of ``messages.proto``, and of the code that protoc has written from it."""

    def kind_of(field):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return f"map<string, {kind_of(field.message_type.fields_by_name['value'])}>"
        named = field.message_type or field.enum_type
        return named.name if named else scalars[field.type]

    names = ("bytes", "string", "double", "bool", "int32", "int64", "uint32")
    scalars = {getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name for name in names}
    compiled = {
        (message.name, field.name, field.number, kind_of(field))
        for message in pb.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    text = Path(pb.__file__).with_name("messages.proto").read_text(encoding="utf-8")
    written = {
        (name, field, int(number), kind)
        for name, body in re.findall(r"^message (\w+) {(.*?)^}", text, re.MULTILINE | re.DOTALL)
        for kind, field, number in re.findall(r"^ +(?:optional |repeated )?(map<.+>|\w+) (\w+) = (\d+);", body, re.MULTILINE)
    }
    assert compiled == written


def request(**tensor):
    """A message of one datum of two tokens, and a tensor ``x`` as described."""
    message = pb.ForwardBackwardRequest(model_id=RUN, seq_id=1, loss_fn="cross_entropy")
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
        ({"dense": FLOATS, "dtype": 1, "shape": [3]}, "2 values do not fill the shape"),
        ({"dense": FLOATS, "dtype": 1, "shape": [-1, -2]}, "negative size in the shape"),
        ({"dense": FLOATS, "dtype": 9}, "unknown dtype 9"),
        ({"dense": FLOATS[:5], "dtype": 1}, "expected a multiple of 4 bytes \\(float32\\), got 5"),
        ({"dense": FLOATS * 2, "dtype": 1}, "x has 4 values and model_input 2"),
        ({"sparse": [([1], "f4"), ([0, 1, 1], "i8"), ([5], "i8")], "dtype": 1, "shape": [2, 3]}, "column index is outside"),
        ({"sparse": [([1], "f4"), ([0, 2, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 3]}, "must increase from 0"),
        ({"sparse": [([1], "f4"), ([0, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 3]}, "do not fill the shape"),
        ({"sparse": [([1], "f4"), ([0, 1, 1], "i8"), ([0], "i8")], "dtype": 1, "shape": [2, 1 << 40]}, "expand to more"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_named(tensor, problem):
    with pytest.raises(DataError, match=f"datum 0: .*{problem}|{problem}"):
        decode.forward_backward_input(request(**tensor))


def test_a_sparse_tensor_has_zeros_where_it_names_nothing():
    sparse = [([7, 8], "f4"), ([0, 1, 2], "i8"), ([2, 0], "i8")]
    datum = decode.forward_backward_input(request(sparse=sparse, dtype=1, shape=[2, 3])).data[0]
    assert datum.loss_fn_inputs["x"].tolist() == [[0, 0, 7], [8, 0, 0]]


def test_options_of_a_loss_come_as_numbers_and_words():
    message = request(dense=FLOATS, dtype=1)
    message.loss_fn = "dpo"
    message.loss_fn_config["beta"] = 9.0  # what older clients read
    for key, value in (("beta", 0.2), ("reference_free", 1.0)):
        message.loss_fn_config_v2[key].number = value
    message.loss_fn_config_v2["variant"].text = "ipo"
    message.loss_fn_config_v2["normalization"].text = "null"
    found = decode.forward_backward_input(message).loss_fn_config
    assert found == {"beta": 0.2, "reference_free": True, "variant": "ipo", "normalization": None}


def test_outputs_of_different_widths_make_records_in_order():
    rows = [{"logprobs": TensorData(np.full(shape, i, "f4"))} for i, shape in enumerate([(2,), (3,), (2, 2), (1,)])]
    message = pb.ForwardBackwardOutput.FromString(
        forward_backward_result(ForwardBackwardOutput(rows, {"loss": 1.0, "loss:sum": 1.0})).body
    )
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    assert [list(record.fields["logprobs"].trailing_shape) for record in message.loss_fn_outputs] == [[], [2], []]
    assert np.frombuffer(message.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 20]
    assert dict(message.metrics) == {"loss:sum": 1.0}


@pytest.mark.parametrize("name", ["loss:sum", "loss/nll", "tokens/trained", "a:b:c"])
def test_every_metric_says_how_it_is_combined(name):
    assert wire_name(name).count(":") == 1


# ---- order and store -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrival", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
def test_requests_run_in_the_order_of_their_numbers(arrival):
    order: RequestOrder[int] = RequestOrder()
    done = [due for number in arrival for due in order.put(number, number)]
    assert (done, order.num_waiting) == ([1, 2, 3, 4], 0)


def test_a_gap_holds_back_what_follows_until_it_is_given_up():
    order: RequestOrder[int] = RequestOrder()
    done = [due for number in (1, 4, 3) for due in order.put(number, number)]
    assert (done, order.num_waiting) == ([1], 2)
    assert order.take_waiting() == [3, 4]
    assert (order.next_number, order.num_waiting) == (2, 0)


def accept(store, number, body=b"x", kind="optim_step", scope=RUN, log=None, **options):
    return store.accept(log or NoLog(), Request(scope, number, kind, body), body, **options)


class FullDisk(NoLog):
    """A log that takes requests, and no results while ``full``."""

    full = True

    def append(self, record):
        if self.full and record.kind == "result":
            raise Refused(507, "the disk is full")


def test_a_request_goes_through_its_states():
    store, log = RequestStore(max_bytes=100), FullDisk()
    request, _ = accept(store, 1, log=log)
    states = [request.state]
    request.start()
    states.append(request.state)
    store.settle(request, StoredResult(b"done"))
    states.append(request.state)
    log.full = False
    store.log_results(RUN)
    assert [*states, request.state] == list(RequestState)
    request.start()  # a request that is drawn again with its batch
    assert request.state is RequestState.logged and accept(store, 1)[0] is request


def test_results_that_were_fetched_go_first_and_say_that_they_are_gone():
    async def scenario():
        store = RequestStore(max_bytes=25)
        made = [accept(store, number, b"x")[0] for number in range(4)]
        for request in made[:2]:
            store.settle(request, StoredResult(bytes(10)))
        await store.fetch(made[1].request_id, 1)
        for request in made[2:]:
            store.settle(request, StoredResult(bytes(10)))
        for dropped, why in ((1, "fetched before"), (0, "raise server.max_results_mb")):
            with pytest.raises(Refused, match=why) as gone:
                await store.fetch(made[dropped].request_id, 1)
            assert gone.value.status == 410
        for kept in (2, 3):
            assert await store.fetch(made[kept].request_id, 1) is not None
        store.remove_session(RUN)
        return len(store), store.kept_bytes

    assert asyncio.run(scenario()) == (0, 0)


def test_nothing_more_is_accepted_while_too_much_is_pending_but_what_others_wait_for():
    store = RequestStore(max_bytes=100, max_pending=10)
    first, _ = accept(store, 2, bytes(20))  # alone it may be larger than all
    with pytest.raises(Refused, match="are pending; retry later") as later:
        accept(store, 3, b"x")
    assert later.value.status == 429
    due, _ = accept(store, 1, b"x", is_due=True)
    for one in (first, due):
        store.settle(one, StoredResult(b""))
    assert store.pending_bytes == 0 and accept(store, 3, b"x")[1]


@pytest.mark.parametrize("kind", ["optim_step", SAMPLE])
def test_what_is_computed_for_a_client_that_left_is_dropped(kind):
    store = RequestStore(max_bytes=10, max_pending=100)
    left, _ = accept(store, 1, bytes(30), kind, RUN)
    store.remove_session("s1")
    store.settle(left, StoredResult(bytes(8)))
    assert (store.pending_bytes, store.kept_bytes, len(store)) == (0, 0, 0)
    assert not store.completions._feeds
    for number in (1, 2):  # more than is kept: the oldest goes, and that is one that is there
        store.settle(accept(store, number, b"x", kind, "s2:train:0")[0], StoredResult(bytes(8)))
    assert (store.pending_bytes, store.kept_bytes, len(store)) == (0, 8, 2)


def test_without_a_log_what_was_fetched_long_ago_is_forgotten_and_not_run_again():
    async def scenario():
        store = RequestStore(max_bytes=100)
        made = [accept(store, number, b"x")[0] for number in (1, 2, 3)]
        for request in made[:2]:
            store.settle(request, StoredResult(b"done"))
        await store.fetch(made[0].request_id, 1)
        store.remove_old(0.0)
        assert len(store) == 2 and not accept(store, 1, b"x")[1]
        with pytest.raises(Refused, match="fetched before"):
            await store.fetch(made[0].request_id, 1)
        assert (await store.fetch(made[1].request_id, 1)).body == b"done"

    asyncio.run(scenario())


def test_who_waits_for_a_result_of_a_session_that_ends_is_told():
    async def scenario():
        store = RequestStore(max_bytes=100)
        request, _ = accept(store, 1, b"x")
        asyncio.get_running_loop().call_later(0.01, store.remove_session, "s1")
        with pytest.raises(Refused, match="has ended"):
            await store.fetch(request.request_id, 30)

    asyncio.run(scenario())


def test_a_waiting_request_gets_the_result_when_it_is_ready():
    async def scenario():
        store = RequestStore(max_bytes=100)
        request, _ = accept(store, 1, b"x")
        assert await store.fetch(request.request_id, 0.01) is None
        asyncio.get_running_loop().call_later(0.05, store.settle, request, StoredResult(b"done"))
        return (await asyncio.wait_for(store.fetch(request.request_id, 10 * WAIT_S), WAIT_S)).body

    assert asyncio.run(scenario()) == b"done"


# ---- samplers that have their weights in memory ------------------------------------------------------------------------


def held(number, weights, num_bytes=10, waiting=0):
    return SamplingSession(f"s1:sample:{number}", "s1", "tiny", None, weights, 0, num_bytes=num_bytes, num_pending=waiting)


def numbers_after(max_bytes, samplers):
    """Add the samplers, and return the numbers of those that remain."""
    gone = []
    live = SamplerCache(max_bytes, gone.append, lambda _: None)
    for sampler in samplers:
        live.add(sampler)
    assert len(live) + len(gone) == len(samplers) == len(live) + live.num_evicted
    return [int(one.rpartition(":")[2]) for one in live]


def test_samplers_are_evicted_only_if_that_frees_memory():
    one, two, three = object(), object(), object()  # weights: nothing is asked of them here but whether they are the same
    assert numbers_after(10, [held(0, one), held(1, two)]) == [1]
    assert numbers_after(10, [held(0, one), held(1, two, 0), held(2, three)]) == [1, 2]
    assert numbers_after(5, [held(number, one) for number in range(4)]) == [0, 1, 2, 3]  # they share the newest's
    assert numbers_after(10, [held(0, one), held(1, one, waiting=1), held(2, two)]) == [0, 1, 2]  # a request waits for them
    assert numbers_after(20, [held(0, one), held(1, two), held(2, one), held(3, three)]) == [0, 2, 3]  # 0's were asked of 2
    assert numbers_after(10, [held(0, one), held(1, one), held(2, two)]) == [2]  # only both free them


def test_samplers_without_weights_of_their_own_have_a_bound_too(monkeypatch):
    monkeypatch.setattr("cookbook.server.state.samplers.MAX_SAMPLERS", 2)
    base = object()
    assert numbers_after(10, [held(number, base, 0) for number in range(4)]) == [2, 3]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture
def catalog(tmp_path):
    found = Catalog(tmp_path)
    found.add_run(RunInfo(RUN, "tiny", True, 4, 0, 1.0))
    return found


def put(catalog, name, kind="weights", ttl_s=None):
    address = Address(RUN, kind, name)
    catalog.folder_of(address).mkdir()
    (catalog.folder_of(address) / "model").write_text("weights")
    catalog.add(address, ttl_s, {"k": "v"})
    return address


def test_what_was_saved_is_found_again(catalog, tmp_path):
    addresses = [put(catalog, name, kind) for kind in ("weights", "sampler_weights") for name in ("x", "x.json", "a.b")]
    again = Catalog(tmp_path)
    assert [saved.address for saved in again.of_run(RUN)] == addresses
    assert again.run(RUN).lora_rank == 4
    saved = again.find(addresses[0])
    assert (saved.size_bytes, saved.user_metadata, saved.expires) == (7, {"k": "v"}, None)
    again.delete(addresses[1])
    assert [one.address for one in again.of_runs(again.runs())] == [one for one in addresses[::-1] if one != addresses[1]]


def test_what_has_expired_is_gone(catalog):
    address = put(catalog, "x", ttl_s=100)
    assert catalog.find(address).expires > catalog.clock.now()
    catalog.set_ttl(address, -1)
    with pytest.raises(CheckpointError, match="has expired"):
        catalog.find(address)
    assert catalog.of_run(RUN) == [] and not catalog.folder_of(address).exists()


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


def test_a_download_address_opens_one_file_for_a_while(catalog, monkeypatch):
    address, downloads = put(catalog, "x"), Downloads(catalog, KeyRing())
    assert downloads.files(address) == ["model"]
    token = downloads.sign(address, "model", downloads.expiry())
    assert downloads.open(token, "model").read_text() == "weights"
    for bad, file in ((token, "other"), (token, "../run.json"), (token.replace("x", "y", 1), "model"), ("", "model")):
        with pytest.raises(Refused, match="not issued by this server"):
            downloads.open(bad, file)
    with pytest.raises(Refused, match="not issued by this server"):
        Downloads(catalog, KeyRing()).open(token, "model")
    later = time.monotonic() + 4000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(Refused, match="expired"):
        downloads.open(token, "model")


def test_a_download_address_is_for_one_save_and_one_key(catalog, tmp_path, monkeypatch):
    """Unpublishing, a new save under the same name and the removal of a key make an address invalid."""
    (tmp_path / "keys").write_text("alice: tml-a\nbob: tml-b\n")
    keys = KeyRing(tmp_path / "keys")
    catalog.add_run(RunInfo("s2:train:0", "tiny", True, 4, 0, 1.0, owner="alice"))
    address, downloads = Address("s2:train:0", "weights", "x"), Downloads(catalog, keys)
    catalog.folder_of(address).mkdir()
    (catalog.folder_of(address) / "model").write_text("weights")
    catalog.add(address, None, None)

    def token(name):
        monkeypatch.setattr("cookbook.server.state.catalog.caller_name", lambda: name)
        return downloads.sign(address, "model", downloads.expiry())

    catalog.publish(address, True)
    own, foreign = token("alice"), token("bob")
    assert downloads.open(own, "model") == downloads.open(foreign, "model")
    catalog.publish(address, False)
    assert downloads.open(own, "model").is_file()
    with pytest.raises(Refused, match="not readable for the key of this URL") as refused:
        downloads.open(foreign, "model")
    assert refused.value.status == 403
    catalog.publish(address, True)
    catalog.delete(address)
    catalog.folder_of(address).mkdir()
    (catalog.folder_of(address) / "model").write_text("private")
    catalog.add(address, None, None)
    for old in (own, foreign):
        with pytest.raises(Refused, match=r"not readable|saved again after this URL was issued") as refused:
            downloads.open(old, "model")
        assert refused.value.status == 403
    own = token("alice")
    (tmp_path / "keys").write_text("bob: tml-b\ncarol: tml-c\n")
    keys.refresh()
    with pytest.raises(Refused, match="not readable"):
        downloads.open(own, "model")


def test_a_damaged_file_costs_its_object_only(catalog, tmp_path, caplog):
    put(catalog, "good"), put(catalog, "bad")
    catalog.add_run(RunInfo("s2:train:0", "tiny", True, 4, 0, 2.0, owner="bob"))
    damaged = [tmp_path / "s2.train.0" / "run.json", tmp_path / RUN.replace(":", ".") / "facts" / "weights.bad.json"]
    for content in ("", "{", "[]", '{"run_id": 1}', '{"time": "now"}', "\0" * 50, "[" * 100_000):
        for file in damaged:
            file.write_text(content)
        caplog.clear()
        again = Catalog(tmp_path)
        assert [info.run_id for info in again.runs()] in ([RUN, "s2:train:0"], ["s2:train:0", RUN])
        assert [one.address.name for one in again.of_run(RUN)] == ["good"]
        assert again.is_damaged("s2:train:0") and not again.is_damaged(RUN)
        for _ in range(2):
            with pytest.raises(Refused, match="is damaged") as refused:
                again.run("s2:train:0")
            assert refused.value.status == 410
            with pytest.raises(CheckpointError, match=r"weights\.bad\.json is damaged"):
                again.find(Address(RUN, "weights", "bad"))
        assert again.owner_of(Address("s2:train:0", "weights", "x")) is None
        assert not again.is_public(Address(RUN, "weights", "bad"))
        # Each file is named on the console once.
        assert len(caplog.records) == 2
    # The log of a run has its description too.
    again.add_run(RunInfo("s2:train:0", "tiny", True, 4, 0, 2.0, owner="bob"))
    assert again.run("s2:train:0").owner == "bob" and not again.is_damaged("s2:train:0")


def test_other_keys_do_not_learn_that_a_damaged_run_exists(catalog, tmp_path):
    catalog.add_run(RunInfo("s2:train:0", "tiny", True, 4, 0, 2.0, owner="bob"))
    (tmp_path / "s2.train.0" / "run.json").write_text("{")
    for caller, status in (("alice", 404), ("bob", 410)):
        tenants = SimpleNamespace(owner_of=lambda _: "bob", may_use=lambda owner, caller=caller: owner == caller)
        with pytest.raises(Refused) as refused:
            Service.run_info(SimpleNamespace(catalog=catalog, tenants=tenants), "s2:train:0")
        assert refused.value.status == status


def test_lists_read_no_files(catalog, monkeypatch, tmp_path):
    put(catalog, "x")
    again = Catalog(tmp_path)
    for changed in (catalog, again):
        monkeypatch.setattr("cookbook.server.state.catalog._fields", None)
        assert [info.run_id for info in changed.runs()] == [RUN] and len(changed.of_runs(changed.runs())) == 1
        monkeypatch.undo()
    # Metadata stays on disk.
    assert again.of_run(RUN)[0].user_metadata is None
    assert again.with_metadata(again.of_run(RUN))[0].user_metadata == {"k": "v"}


def test_a_jump_of_the_wall_clock_deletes_no_checkpoint(catalog, monkeypatch, tmp_path):
    address = put(catalog, "x", ttl_s=3600)
    catalog.clock.store()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
    assert catalog.find(address) and Catalog(tmp_path).find(address)
    shown = catalog.clock.wall_time(catalog.find(address).expires) - time.time()
    assert 3590 < shown <= 3600
    later = time.monotonic() + 4000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    catalog.delete_expired()
    assert not catalog.folder_of(address).exists()


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_without_keys_only_this_machine_reaches_the_server(monkeypatch, tmp_path):
    monkeypatch.delenv("COOKBOOK_API_KEYS", raising=False)
    assert ServerConfig().key_ring().keys == []
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ConfigError, match="is reachable from other machines"):
            ServerConfig(host=host).key_ring()
    monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-a, tml-b")
    file = tmp_path / "keys"
    file.write_text("# ours\ntml-c\n\n  # indented\n")
    ring = ServerConfig(host="0.0.0.0", keys_file=str(file)).key_ring()
    assert [ring.find(secret) for secret in (b"tml-a", b"tml-b", b"tml-c")] == ring.keys and ring.find(b"tml-d") is None
    with pytest.raises(ConfigError, match="cannot read"):
        ServerConfig(keys_file=str(tmp_path / "none")).key_ring()


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
        transport = httpx.ASGITransport(Auth(FastAPI(docs_url=None), KeyRing(secrets=["tml-a", "tml-b"])))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return (await client.get(path, headers=headers)).status_code

    assert asyncio.run(ask()) == status


ROW = {f"token {number}": -number / 3 for number in range(20)}
TOPS = {
    "choices": [{"text": "é\n", "logprobs": {"tokens": ["a"] * 600, "top_logprobs": [None, *[ROW] * 599]}}] * 3,
    "usage": {},
}
ENTRY = {"token": "x", "bytes": [1, 2], "top_logprobs": [{"token": "y", "logprob": -1.5}] * 20}
CHAT = {"choices": [{"logprobs": {"content": [ENTRY] * 300}}], "n": 1.5}


@pytest.mark.parametrize("value", [TOPS, CHAT, [], {}, [[1], [[2], {}]], {1: [True, None, "a"]}, "text"])
def test_json_in_pieces_is_that_of_one_piece(value):
    """A piece holds Python's lock, so a response of a million logprobs stopped the server's event loop."""
    assert json_pieces.dumps(value) == json.dumps(value)
    assert max(map(len, json_pieces._pieces(value, json_pieces.LEVELS))) <= json_pieces.PIECE_ITEMS * (len(json.dumps(ROW)) + 2)
