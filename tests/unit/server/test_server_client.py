"""The unmodified tinker client through everything it can do with our server, and what it meets when things go wrong."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.request

import httpx
import numpy as np
import pytest
import servertools
import tiny
import torch
import zstandard
from places import ROOT
from waiting import WAIT_S, until

from cookbook.checkpoints import manifest
from cookbook.server.keys import KeyRing
from cookbook.server.wire import bodies
from cookbook.types import SamplingParams

tinker = pytest.importorskip("tinker")
proto = pytest.importorskip("tinker.proto.request_conv")

STEP = tinker.AdamParams(learning_rate=1e-2)
PROMPT = tinker.ModelInput.from_ints([5, 6, 7, 8])


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server"), names=["tiny"], max_request_mb=1) as found:
        yield found


@pytest.fixture(scope="module")
def training(service):
    return service.create_lora_training_client("tiny", rank=4, user_metadata={"project": "mine"}).result()


@pytest.fixture
def post(server):
    """``post(path, content or json)`` -> status, answer."""

    def send(path, **body):
        response = httpx.post(f"{server.url}/api/v1/{path}", headers=body.pop("headers", {}), **body, timeout=WAIT_S)
        return response.status_code, response.json() if "json" in response.headers["content-type"] else response.content

    return send


def data(count=3, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        tokens = rng.integers(0, tiny.VOCABULARY, 9).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        rows.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def message(model_id, number, rows, loss="cross_entropy"):
    """The bytes the client would send for one part of a batch."""
    asked = tinker.types.ForwardBackwardInput(data=rows, loss_fn=loss, loss_fn_config=None)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=asked, model_id=model_id, seq_id=number)
    return proto.forward_backward_request_to_proto(request).SerializeToString()


def loss_of(client):
    return client.forward(data(), "cross_entropy").result().metrics["loss:sum"]


# ---- what cannot work is named -----------------------------------------------------------------------------------------


def test_a_client_that_is_too_old_is_told_to_update(post, training):
    for place in ("client/config", "create_session"):
        status, told = post(place, json={"sdk_version": "0.24.1"})
        assert status == 400 and "tinker 0.24.1 cannot work with this server; update the client: pip install" in told["detail"]
        assert [post(place, json={"sdk_version": one})[0] for one in ("0.25.0", "0.38.0", "1.0.0", "main")] == [200] * 4
    status, told = post("forward_backward", json={"model_id": training.model_id, "seq_id": 1})
    assert status == 422 and "update the client: pip install" in told["detail"]


def test_infinite_rates_and_losses_that_are_not_numbers_are_named(service):
    training = service.create_lora_training_client("tiny", rank=2).result()
    for rate in (float("inf"), float("nan")):
        with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
            training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
    with pytest.raises(tinker.RequestFailedError, match="gradient of the custom loss is not finite"):
        training.forward_backward_custom(
            data(), lambda _, logprobs: (sum(row.sum() for row in logprobs) * float("nan"), {})
        ).result()


# ---- the whole cycle -------------------------------------------------------------------------------------------------


def test_a_run_is_trained_saved_loaded_and_sampled(service):
    training = service.create_lora_training_client("tiny", rank=4).result()
    before = loss_of(training)
    for _ in range(3):
        training.forward_backward(data(), "cross_entropy")
        training.optim_step(STEP)
    assert loss_of(training) < before
    path = training.save_state("one").result().path
    assert path == f"tinker://{training.model_id}/weights/one"
    fresh = service.create_training_client_from_state(path).result()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert loss_of(training) == loss_of(fresh) == loss_of(resumed)
    for client in (training, fresh, resumed):
        client.forward_backward(data(seed=1), "cross_entropy")
        client.optim_step(STEP).result()
    assert loss_of(resumed) == loss_of(training) != loss_of(fresh)  # the moments make the difference
    training.load_state_with_optimizer(path).result()
    assert loss_of(training) != loss_of(resumed)


def test_samplers_of_a_run_of_saved_weights_and_of_the_base_model(service, training):
    training.forward_backward(data(), "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    saved = training.save_weights_for_sampler("sampled").result().path
    live = training.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, seed=3)
    answers = [
        client.sample(PROMPT, 3, params, include_prompt_logprobs=True).result()
        for client in (
            live,
            service.create_sampling_client(model_path=saved).result(),
            service.create_sampling_client(base_model="tiny").result(),
        )
    ]
    drawn = [[sequence.tokens for sequence in answer.sequences] for answer in answers]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]  # one seed, three draws
    for answer in answers:
        assert answer.prompt_logprobs[0] is None and all(one < 0 for one in answer.prompt_logprobs[1:])
        for sequence in answer.sequences:
            assert len(sequence.tokens) == len(sequence.logprobs) <= 6
    training.forward_backward(data(), "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    assert live.compute_logprobs(PROMPT).result() == answers[0].prompt_logprobs  # a snapshot stays
    assert live.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result() == [None] * 3 + answers[0].prompt_logprobs[-1:]


def test_the_most_probable_tokens_of_a_prompt_are_the_models_own(server, service):
    client = service.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=1)
    answer = client.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    network = server.service.host.base_sampler().engine().model.network
    expected = network(torch.tensor([PROMPT.to_ints()])).logits[0, :-1].detach().log_softmax(-1).topk(3)
    rows = answer.topk_prompt_logprobs
    assert not rows[0] and [[token for token, _ in row] for row in rows[1:]] == expected.indices.tolist()
    # One product of a 32-wide layer in float32, by two ways through the head: a few roundings of values near 5.
    assert np.allclose([[value for _, value in row] for row in rows[1:]], expected.values.numpy(), atol=1e-5)
    with pytest.raises(tinker.BadRequestError, match="the vocabulary size"):
        client.sample(PROMPT, 1, params, topk_prompt_logprobs=10**6).result()


def test_the_most_probable_tokens_of_samples_are_those_of_the_same_text_as_a_prompt(service):
    client = service.create_sampling_client(base_model="tiny").result()
    params = tinker.SamplingParams(max_tokens=5, seed=1)
    for sequence in client.sample(PROMPT, 2, params, topk_sample_logprobs=3).result().sequences:
        text = tinker.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
        whole = client.sample(text, 1, tinker.SamplingParams(max_tokens=1), topk_prompt_logprobs=3).result()
        assert sequence.topk_logprobs == whole.topk_prompt_logprobs[-len(sequence.tokens) :]
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs: expected at most"):
        client.sample(PROMPT, 1, params, topk_sample_logprobs=10**6).result()


def test_the_logprobs_of_named_tokens_are_the_models_own_dense_and_sparse(server, service):
    client = service.create_sampling_client(base_model="tiny").result()
    params, tokens = tinker.SamplingParams(max_tokens=1), PROMPT.to_ints()
    network = server.service.host.base_sampler().engine().model.network
    logprobs = network(torch.tensor([tokens])).logits[0, :-1].detach().log_softmax(-1)
    ids = torch.tensor([[number, 7, -1] for number in range(len(tokens) - 1)])
    expected = torch.where(ids < 0, 0.0, logprobs.gather(1, ids.clamp(min=0)))
    dense = client.sample(PROMPT, 1, params, target_prompt_logprobs=tinker.TensorData.from_torch(ids)).result()
    # One product of a 32-wide layer in float32, by two ways through the head.
    assert np.allclose(dense.target_prompt_logprobs.to_torch().numpy(), expected.numpy(), atol=1e-5)
    asked = tinker.TensorData.from_torch_sparse(ids, pad_value=-1)
    sparse = client.sample(PROMPT, 1, params, target_prompt_logprobs=asked).result().target_prompt_logprobs
    assert np.allclose(sparse.to_torch().to_dense().numpy(), expected.numpy(), atol=1e-5)
    for wrong, message in ((ids[:-1], "rows, one per token"), (ids + 10**6, "expected ids below")):
        with pytest.raises(tinker.BadRequestError, match=message):
            client.sample(PROMPT, 1, params, target_prompt_logprobs=tinker.TensorData.from_torch(wrong)).result()


def test_named_tokens_of_any_shape_are_answered_or_refused(post, service):
    sampler = service.create_sampling_client(base_model="tiny").result()._sampling_session_id
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1}}
    empty = {"data": [], "dtype": "int64", "sparse_crow_indices": [0, 0]}
    for number, (shape, status) in enumerate([([1, 10**30], 422), ([1, -1], 422), ([1, 2], 200)]):
        wanted = {**empty, "shape": shape}
        code, answer = post("asample", json={**body, "seq_id": number, "target_prompt_logprobs": wanted})
        assert code == status, answer
    until(lambda: post("retrieve_future", json={"request_id": answer["request_id"]})[0] == 200)


def test_a_copy_of_a_checkpoint_outlives_the_checkpoint(server, service, training, post):
    rest = service.create_rest_client()
    saved = training.save_state("to-be-copied", user_metadata={"k": "v"}).result().path
    copy = rest.copy_weights(saved, "archive", ttl_seconds=7200).result()
    run_id, _, name = copy.removeprefix("tinker://").partition("/")
    assert run_id != training.model_id and name == "weights/to-be-copied"
    rest.delete_checkpoint_from_tinker_path(saved).result()
    [listed] = rest.list_checkpoints(run_id).result().checkpoints
    assert listed.user_metadata == {"k": "v"} and listed.expires_at is not None
    assert rest.get_training_run(run_id).result().user_metadata == {"destination_project_id": "archive"}
    assert service.create_training_client_from_state(copy).result().get_info().is_lora
    with pytest.raises(tinker.NotFoundError, match="was never saved, or was deleted"):
        rest.copy_weights(saved, "archive").result()
    with pytest.raises(tinker.BadRequestError, match="weights_access_token is not supported"):
        rest.copy_weights(copy, "archive", weights_access_token="x").result()
    body = {"source_path": copy, "destination_project_id": "a"}
    again = [post("copy_weights", json=body, headers={"X-Idempotency-Key": "k"}) for _ in range(2)]
    assert again[0] == again[1] and again[0][0] == 200
    assert post("copy_weights", json={"source_path": copy})[0] == 400
    body = {"source_path": copy, "session_id": training.model_id.partition(":")[0], "model_seq_id": 0}
    assert "is a training run" in post("copy_weights", json=body)[1]["detail"]
    assert post("copy_weights", json={**body, "model_seq_id": 77})[1]["tinker_path"].endswith(":train:77/weights/to-be-copied")
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    body = {**body, "source_path": training.save_state("to-be-copied").result().path, "model_seq_id": 77}
    assert "has other weights of this name" in post("copy_weights", json=body)[1]["detail"]
    creation = {"session_id": body["session_id"], "model_seq_id": 77, "base_model": "tiny", "lora_config": {"rank": 2}}
    request = post("create_model", json=creation)[1]["request_id"]
    assert "has copies of checkpoints" in str(post("retrieve_future", json={"request_id": request}))


def test_a_sampler_in_flight_follows_what_is_published(training):
    first = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = first.compute_logprobs(PROMPT).result()
    training.forward_backward(data(), "cross_entropy")
    training.optim_step(STEP).result()
    assert first.compute_logprobs(PROMPT).result() == before
    second = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert first.compute_logprobs(PROMPT).result() == second.compute_logprobs(PROMPT).result() != before


@pytest.mark.parametrize("stop", [None, [], "e", ["e", "a"], [101]])
def test_samples_are_the_embedded_samplers(server, service, stop):
    options = {"max_tokens": 30, "seed": 1, "stop": stop, "temperature": 0.9, "top_k": 200, "top_p": 0.95}
    client = service.create_sampling_client(base_model="tiny").result()
    found = client.sample(PROMPT, 4, tinker.SamplingParams(**options)).result().sequences
    expected = server.service.host.base_sampler().sample(PROMPT, 4, SamplingParams(**options)).result().sequences
    assert [(one.tokens, one.stop_reason) for one in found] == [(one.tokens, one.stop_reason) for one in expected]
    assert np.array_equal(np.concatenate([one.logprobs for one in found]), single([one.logprobs for one in expected]))
    assert len({one.sequence_id for one in found}) == 4


def test_min_p_is_taken_of_those_who_speak_the_protocol_themselves():
    sent = {"max_tokens": 8, "seed": 1, "stop": ["e"], "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.2}
    assert SamplingParams(**bodies.Sampling.model_validate(sent).model_dump()) == SamplingParams(**sent)


def single(rows):
    """Join the rows in single precision, the precision of the wire."""
    return np.concatenate(rows).astype("f4")


def test_info(service, training, tiny_folder):
    info = training.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.arch) == (True, 4, "qwen3")
    assert training.save_weights_and_get_sampling_client().result().get_base_model() == "cookbook/tiny"
    full = service.create_lora_training_client(f"{tiny_folder}:full").result().get_info()
    assert (full.is_lora, full.lora_rank, full.model_data.model_name) == (False, None, "cookbook/tiny")


def test_checkpoints_are_listed_kept_and_deleted(server, service):
    training = service.create_lora_training_client("tiny", rank=2, user_metadata={"renderer_name": "plain"}).result()
    rest = tinker.RestClient(base_url=server.url, api_key=servertools.KEY)
    path = training.save_state("a.b", user_metadata={"k": "v"}).result().path
    training.save_weights_for_sampler("a.b", ttl_seconds=3600).result()
    run = rest.get_training_run(training.model_id).result()
    assert run.user_metadata == {"renderer_name": "plain"} and run.last_checkpoint.tinker_path == path
    state, sampler = rest.list_checkpoints(training.model_id).result().checkpoints
    assert (state.checkpoint_id, state.user_metadata, state.expires_at) == ("weights/a.b", {"k": "v"}, None)
    assert sampler.expires_at > sampler.time and sampler.size_bytes > 1000
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank) == (True, 2)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints[0]
    assert listed.public and listed.expires_at is not None
    with pytest.raises(tinker.RequestFailedError, match=r"weights\.a\.b: exists already"):
        training.save_state("a.b").result()
    training.save_state("a.b", overwrite=True).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [one.checkpoint_id for one in rest.list_checkpoints(training.model_id).result().checkpoints] == [
        "sampler_weights/a.b"
    ]
    with pytest.raises(tinker.RequestFailedError, match="not found; it was never saved"):
        service.create_training_client_from_state(path).result()


def test_weights_are_fetched_as_files_without_a_key(server, service, training, tmp_path, tiny_folder, monkeypatch):
    rest = tinker.RestClient(base_url=server.url, api_key=servertools.KEY)
    path = training.save_weights_external("exported").result().path
    found = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= found.keys()
    # Without keys on the server, an adapter keeps the folder of its base model.
    stated = json.loads(urllib.request.urlopen(found["adapter_config.json"], timeout=WAIT_S).read())
    assert stated["base_model_name_or_path"] == str(tiny_folder)
    monkeypatch.setattr(server.service.tenants.keys, "keys", KeyRing(secrets=[servertools.KEY]).keys)
    # An address that was issued without a key ends with the first key.
    assert httpx.get(found["adapter_config.json"], timeout=WAIT_S).status_code == 403
    found = rest.get_external_weights_urls(path).result().urls
    for name, url in found.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url, timeout=WAIT_S).read())
    monkeypatch.undo()
    found = rest.get_external_weights_urls(path).result().urls
    # Its files name no folder of the server, and its digests are those of the files that were sent.
    assert manifest.verify(tmp_path)["base_model"] == "cookbook/tiny"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "cookbook/tiny"
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    network = PeftModel.from_pretrained(base, tmp_path)
    live = server.engine(training).model.network
    ids = torch.tensor([PROMPT.to_ints()])
    torch.testing.assert_close(network(ids).logits, live(ids).logits, rtol=0, atol=1e-5)  # the live one's layers are fused
    name, url = next(iter(found.items()))
    assert httpx.get(url.replace(name, "checkpoint.json"), timeout=WAIT_S).status_code == 403
    assert httpx.get(url.replace("exported", "sampled"), timeout=WAIT_S).status_code == 403
    # The end of the claim is moved into the file's name.
    claim, expires, signature = url.removesuffix(f"/{name}").rsplit("~", 2)
    assert httpx.get(f"{claim}~{signature}/{expires}~{name}", timeout=WAIT_S).status_code == 403


def test_adapters_share_the_base_weights_and_a_full_run_has_its_own(server, service):
    clients = [service.create_lora_training_client("tiny", rank=rank).result() for rank in (2, 4, 0)]
    networks = [server.engine(client).model.network for client in clients]
    frozen = [{p.data_ptr() for p in network.parameters() if not p.requires_grad} for network in networks]
    assert frozen[0] == frozen[1] and len(frozen[0]) > 10 and not frozen[2]
    assert not frozen[0] & {p.data_ptr() for p in networks[2].parameters()}
    before = loss_of(clients[0])
    clients[2].forward_backward(data(), "cross_entropy")
    clients[2].optim_step(STEP).result()
    assert loss_of(clients[0]) == before != loss_of(clients[2])


@pytest.mark.slow
def test_several_concurrent_clients_compute_what_each_computes_alone(server, tiny_folder):
    alone = []

    def train(found, seed):
        with tinker.ServiceClient(base_url=server.url, api_key=servertools.KEY) as client:
            training = client.create_lora_training_client("tiny", rank=2, seed=seed).result()
            for step in range(3):
                training.forward_backward(data(seed=seed + step), "cross_entropy")
                training.optim_step(STEP)
            found.append(loss_of(training))

    for seed in range(3):
        train(alone, seed)
    together: list[list[float]] = [[] for _ in range(3)]
    threads = [threading.Thread(target=train, args=(together[seed], seed)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one[0] for one in together] == alone


def test_a_server_finds_what_another_has_saved(server, service, training, tiny_folder, tmp_path):
    path = training.save_state("last").result().path
    saved = server.service.catalog.run_folder(training.model_id)
    shutil.copytree(saved, tmp_path / saved.name)
    with (
        servertools.running(tiny_folder, tmp_path, names=["tiny"]) as later,
        tinker.ServiceClient(base_url=later.url, api_key=servertools.KEY) as other,
    ):
        assert loss_of(other.create_training_client_from_state_with_optimizer(path).result()) == loss_of(training)
        with pytest.raises(tinker.NotFoundError, match=r"training run .* is not in memory"):
            other.holder.run_coroutine_threadsafe(_info(other.holder, training.model_id)).result()


async def _info(holder, model_id):
    from tinker.lib.public_interfaces.training_client import fetch_training_info

    return await fetch_training_info(holder, model_id)


# ---- order and repetition --------------------------------------------------------------------------------------------


@pytest.fixture
def raw(server, service, post):
    """A full run that is spoken to without its client: ``(model_id, engine)``."""
    client = service.create_lora_training_client("tiny", rank=0).result()
    return client.model_id, server.engine(client)


def test_parts_that_arrive_out_of_order_run_in_order(raw, post):
    model_id, engine = raw
    step = {"model_id": model_id, "seq_id": 4, "adam_params": {"learning_rate": 1e-2}}
    rows = data(6)
    promises = {4: post("optim_step", json=step)[1]}
    for number in (2, 3):
        promises[number] = post("forward_backward", content=message(model_id, number, rows[2 * number - 2 : 2 * number]))[1]
    assert engine.step == 0 and engine.counts.num_sequences == 0
    promises[1] = post("forward_backward", content=message(model_id, 1, rows[:2]))[1]
    metrics = post("retrieve_future", json=promises[4])[1]["metrics"]
    assert (engine.step, metrics["optim/num_sequences"]) == (1, 6)


def test_a_repeated_request_runs_once(raw, post):
    model_id, engine = raw
    body = message(model_id, 1, data())
    first, again = (post("forward_backward", content=body) for _ in range(2))
    assert first == again and first[0] == 200
    results = [post("retrieve_future", json=first[1])[1] for _ in range(2)]
    assert results[0] == results[1]
    assert engine.counts.num_sequences == 3
    status, answer = post("forward_backward", content=message(model_id, 1, data(seed=9)))
    assert status == 400 and "was accepted with a different body" in answer["detail"]


def test_a_failed_request_takes_its_number_and_the_next_step_reports_it(service):
    training = service.create_lora_training_client("tiny", rank=2).result()
    lacking = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={"weights": [1.0, 1.0]})
    with pytest.raises(tinker.RequestFailedError, match="datum 0: missing required field 'target_tokens'") as failed:
        training.forward_backward([lacking], "cross_entropy").result()
    assert failed.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="missing required field"):
        training.optim_step(STEP).result()
    with pytest.raises(tinker.RequestFailedError, match=r"unknown name 'cross_entropi'.*cross_entropy"):
        training.forward_backward(data(), "cross_entropi").result()
    with pytest.raises(tinker.RequestFailedError, match="unknown name"):
        training.optim_step(STEP).result()
    training.forward_backward(data(), "cross_entropy")
    assert training.optim_step(STEP).result().metrics["optim/num_sequences"] == 3


def test_a_request_whose_forerunner_never_comes_fails(server, raw, post, monkeypatch):
    model_id, _ = raw
    monkeypatch.setattr(server.service.runs[model_id], "gap_timeout_s", 0.05)
    _, promised = post("optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": {}})
    _, answer = post("retrieve_future", json=promised)
    assert answer["category"] == "server" and "request 1 of" in answer["error"]


def test_targets_of_several_alternatives_and_sparse_ones(training):
    rows = data(2)
    alternatives = np.stack([np.array(row.loss_fn_inputs["target_tokens"].data) for row in rows])
    pair = np.stack([alternatives, np.zeros_like(alternatives)], -1)
    soft = np.stack([np.full(alternatives.shape, 0.5), np.zeros(alternatives.shape)], -1).astype("f4")

    def built(make):
        return [
            tinker.Datum(
                model_input=row.model_input,
                loss_fn_inputs={"target_tokens": make(pair[i]), "weights": make(soft[i])},
            )
            for i, row in enumerate(rows)
        ]

    dense = training.forward(built(tinker.TensorData.from_numpy), "cross_entropy").result()
    sparse = training.forward(
        built(lambda array: tinker.TensorData.from_torch_sparse(torch.from_numpy(array))), "cross_entropy"
    )
    plain = training.forward(rows, "cross_entropy").result()
    assert dense.metrics == sparse.result().metrics
    assert dense.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"] / 2, rel=1e-6)
    assert dense.loss_fn_outputs[0]["logprobs"].shape == [8, 2]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_no_run_can_answer_gets_a_status(post, raw):
    model_id, _ = raw
    assert post("forward_backward", content=b"\xff\xff")[0] == 422
    assert post("forward_backward", content=message("unknown", 1, data()))[0] == 404
    assert post("forward_backward", content=message(model_id, 0, data()))[0] == 422
    assert post("optim_step", content=b"{")[0] == 422
    assert post("optim_step", json={"model_id": model_id})[1]["detail"] == "OptimStep: seq_id: Field required"
    assert post("retrieve_future", json={"request_id": "x"})[0] == 404
    assert post("create_model", json={"session_id": "x", "model_seq_id": 0, "base_model": "tiny"})[0] == 404
    assert post("session_heartbeat", json={"session_id": "x"})[0] == 404


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "error"),
    [
        ([], 0, "the prompt is empty; send at least one token"),
        ([], 5, "the prompt is empty"),
        ([5], 0, "max_tokens: expected at least 1, got 0"),
        ([5], -3, "max_tokens: expected at least 1, got -3"),
    ],
)
def test_a_sample_without_a_prompt_or_tokens_is_refused(post, tokens, max_tokens, error):
    session_id = post("create_session", json={})[1]["session_id"]
    asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = post("create_sampling_session", json=asked)[1]["sampling_session_id"]
    sample = {"prompt": {"chunks": [{"tokens": tokens}]}, "sampling_params": {"max_tokens": max_tokens}}
    status, refused = post("asample", json={"sampling_session_id": sampler_id, "seq_id": 0, **sample})
    assert status == 400 and error in refused["detail"]


def test_a_request_that_is_too_large_packed_or_unpacked_is_refused(post):
    packed = zstandard.ZstdCompressor().compress
    headers = {"content-encoding": "zstd"}
    assert post("forward_backward", content=bytes(2 << 20))[0] == 413
    assert post("forward_backward", content=packed(bytes(1 << 30)), headers=headers)[0] == 413
    assert post("forward_backward", content=b"nonsense", headers=headers)[0] == 422
    assert post("forward_backward", content=packed(b"\xff"), headers=headers)[0] == 422
    assert post("forward_backward", content=b"x", headers={"content-encoding": "gzip"})[0] == 415


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 300, ".hidden", "a\0b"])
def test_a_name_is_no_path(server, service, training, name):
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match=r"expected tinker://|checkpoint name"):
        training.save_weights_for_sampler(name or "/").result()
    with pytest.raises(tinker.APIStatusError):
        service.create_sampling_client(model_path=f"tinker://{training.model_id}/sampler_weights/../{name}").result()


def test_another_model_is_refused_by_name(service):
    with pytest.raises(tinker.BadRequestError, match="choose one of tiny"):
        service.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.BadRequestError, match="choose one of tiny"):
        service.create_sampling_client(base_model="Qwen/Qwen3-8B").result()


# ---- the table of methods --------------------------------------------------------------------------------------------

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)
REFUSED = {
    "get_audit_log": ("all",),
    "assign_session_project": ("s0", "a-project"),
    "export_session_trace": ("s0",),
}


def rows_of_methods():
    """Works, refused and local methods of each class, as the page says."""
    page = (ROOT / "docs/reference/tinker-compatibility.md").read_text()
    for kind in CLIENTS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}` |"))
        yield kind, [re.findall(r"`(\w+)`", cell) for cell in row.split("|")[2:-1]]


def test_the_table_has_every_public_method_of_the_client():
    for kind, cells in rows_of_methods():
        public = {name.removesuffix("_async") for name in dir(kind) if not name.startswith("_")}
        listed = [name for cell in cells for name in cell if name != "age_encryption_recipients"]
        assert sorted(listed) == sorted(public), kind.__name__


@pytest.mark.slow
def test_methods_that_the_server_does_not_have_are_refused_by_name(service):
    rest = service.create_rest_client()
    for name, arguments in REFUSED.items():
        with pytest.raises(tinker.APIStatusError, match=r"/api/v1/\S+: this server has no such route"):
            getattr(rest, name)(*arguments).result()
