"""The calls of Tinker's documentation, on an embedded trainer: with our types and with Tinker's, plain and async."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from marks import rest_slow
from waiting import WAIT_S

import cookbook
from cookbook.backends.local import sample_queue
from cookbook.errors import CheckpointError, ConfigError, DataError, RolloutError
from cookbook.losses import LOSSES, loss_class
from cookbook.service import ServiceClient

PROMPT = [5, 6, 7]


@pytest.fixture(params=["cookbook", "tinker"])
def types(request):
    """Where a program takes its nouns from."""
    return cookbook if request.param == "cookbook" else pytest.importorskip("tinker")


@pytest.fixture
def service(tmp_path):
    with ServiceClient(checkpoint_dir=tmp_path / "checkpoints") as client:
        yield client


def examples(types):
    """Datums as the documentation builds them: weights and targets by hand."""
    rng = np.random.default_rng(0)
    rows = []
    for length in (6, 9, 4):
        tokens = rng.integers(0, tiny.VOCABULARY, length).tolist()
        weights = [0.0] * (length // 3) + [1.0] * (length - length // 3)
        inputs = {"weights": weights[1:], "target_tokens": tokens[1:]}
        rows.append(types.Datum(model_input=types.ModelInput.from_ints(tokens=tokens[:-1]), loss_fn_inputs=inputs))
    return rows


def mean_loss(output, data):
    logprobs = np.concatenate([row["logprobs"].tolist() for row in output.loss_fn_outputs])
    weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in data])
    return -np.dot(logprobs, weights) / weights.sum()


# ---- the loop of the documentation -----------------------------------------------------------------------------------


def test_training_and_sampling(service, types, tiny_folder):
    training = service.create_lora_training_client(base_model=str(tiny_folder), rank=8)
    data, adam = examples(types), types.AdamParams(learning_rate=1e-2)
    losses = []
    for _ in range(6):
        forward_backward = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam)
        result = forward_backward.result()
        assert stepped.result().metrics["optim/lr"] == 1e-2
        losses.append(mean_loss(result, data))
        assert result.metrics["loss:sum"] == pytest.approx(losses[-1] * sum(map(sum_of_weights, data)), rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]

    sampling = training.save_weights_and_get_sampling_client(name="mine")
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=["\n"])
    response = sampling.sample(prompt=prompt, sampling_params=params, num_samples=2).result()
    assert len(response.sequences) == 2
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) <= 6
        assert sequence.stop_reason in ("stop", "length")
    assert isinstance(training.get_tokenizer().decode(response.sequences[0].tokens), str)

    scored = sampling.compute_logprobs(prompt).result()
    assert scored[0] is None and len(scored) == 3 and all(logprob < 0 for logprob in scored[1:])
    with_scores = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True).result()
    assert with_scores.prompt_logprobs == scored


def sum_of_logprobs(data, logprobs):
    return sum(row.sum() for row in logprobs), {"m": 1.0}


def sum_of_weights(datum):
    return float(np.sum(datum.loss_fn_inputs["weights"].tolist()))


@pytest.mark.parametrize("twice", rest_slow([False, True]))
def test_the_same_awaited_once_and_twice(service, types, tiny_folder, twice):
    """``_async`` twins answer with a future first; programs await that as well, or read its ``.result()``."""

    async def answer(awaitable):
        first = await awaitable
        return await first if twice else first.result()

    async def program():
        training = await answer(service.create_lora_training_client_async(base_model=str(tiny_folder), rank=8))
        data = examples(types)
        forward_backward = await training.forward_backward_async(data, "cross_entropy")
        stepped = await training.optim_step_async(types.AdamParams(learning_rate=1e-2))
        loss = mean_loss(await forward_backward, data)
        assert (await stepped).metrics["optim/grad_norm"] > 0
        after = mean_loss(await training.forward(data, "cross_entropy"), data)
        custom = await answer(training.forward_backward_custom_async(data, sum_of_logprobs))
        assert after < loss and custom.metrics["m"] == 1.0
        await answer(training.optim_step_async(types.AdamParams()))
        saved = await answer(training.save_state_async("one"))
        sampling = await training.save_weights_and_get_sampling_client_async()
        sampling = await sampling if twice else sampling
        params = types.SamplingParams(max_tokens=4, seed=1)
        prompt = types.ModelInput.from_ints(PROMPT)
        both = await asyncio.gather(*(sampling.sample_async(prompt, 2, params) for _ in range(2)))
        alone = await sampling.sample(prompt, 2, params)
        assert both[0] == both[1]
        assert [one.tokens for one in both[0].sequences] == [one.tokens for one in alone.sequences]
        assert (await sampling.compute_logprobs_async(prompt))[0] is None
        resumed = await answer(service.create_training_client_from_state_with_optimizer_async(saved.path))
        await answer(resumed.load_state_with_optimizer_async(saved.path))
        return resumed.get_info()

    assert asyncio.run(program()).is_lora


def test_clients_may_be_used_with_or_without_waiting_for_result(service, tiny_folder):
    for client in (
        service.create_lora_training_client(str(tiny_folder), rank=2),
        service.create_lora_training_client(str(tiny_folder), rank=2).result(),
        service.create_training_client(str(tiny_folder)).result(timeout=WAIT_S),
    ):
        assert client.forward_backward(tiny.datums(2), "dpo").result()
        assert client.save_weights_and_get_sampling_client().result().compute_logprobs(PROMPT).result()[0] is None


def test_a_custom_loss(service, types, tiny_folder):
    training = service.create_training_client(str(tiny_folder))
    data = examples(types)

    def loss(given, logprobs):
        weights = [torch.tensor(datum.loss_fn_inputs["weights"].tolist()) for datum in given]
        total = sum((row * w).sum() for row, w in zip(logprobs, weights, strict=True))
        return -total, {"custom_metric": total.item()}

    built_in = training.forward_backward(data, "cross_entropy").result()
    custom = training.forward_backward_custom(data, loss).result()
    assert custom.metrics["loss"] == pytest.approx(built_in.metrics["loss"], rel=1e-6)
    assert custom.metrics["custom_metric"] == pytest.approx(-built_in.metrics["loss"], rel=1e-6)
    training.optim_step(types.AdamParams()).result()


def test_reinforcement_with_the_field_names_of_tinker(service, types, tiny_folder):
    training = service.create_training_client(str(tiny_folder))
    sampler = training.save_weights_and_get_sampling_client()
    futures = [sampler.sample(types.ModelInput.from_ints(PROMPT), 4, types.SamplingParams(max_tokens=5))]
    data = []
    for place, sequence in enumerate(futures[0].result().sequences):
        tokens = [*PROMPT, *sequence.tokens]
        padding = [0.0] * (len(PROMPT) - 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": [*padding, *sequence.logprobs],
                    "advantages": [*padding, *[float(place - 1.5)] * len(sequence.tokens)],
                },
            )
        )
    for name in ("importance_sampling", "ppo", "cispo"):
        output = training.forward_backward(data, name).result()
        assert abs(output.metrics["kl/sampler_trainer_k1"]) < 1e-5  # the sampler's weights are the trainer's
    metrics = training.optim_step(types.AdamParams(), "num_loss_tokens").result().metrics
    assert metrics["optim/num_loss_tokens"] == 3 * sum(len(sequence.tokens) for sequence in futures[0].result().sequences)


def test_an_input_made_of_chunks(service, types, tiny_folder):
    """Tinker's documentation builds prompts so, and reads the model's name through ``model_data``."""
    training = service.create_lora_training_client(base_model=str(tiny_folder), rank=4)
    chunks = [types.EncodedTextChunk(tokens=[5, 6]), types.EncodedTextChunk(tokens=[7])]
    prompt = types.ModelInput(chunks=chunks).append_int(8)
    assert (prompt.length, prompt.append(chunks[0]).to_ints()) == (4, [5, 6, 7, 8, 5, 6])
    datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [0.0, 1.0, 1.0, 1.0]})
    assert len(training.forward_backward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()) == 4
    sampling = training.save_weights_and_get_sampling_client()
    assert sampling.compute_logprobs(prompt).result() == sampling.compute_logprobs([5, 6, 7, 8]).result()
    data = training.get_info().model_data
    assert (data.arch, data.model_name) == ("qwen3", str(tiny_folder)) and data.tokenizer_id


@pytest.fixture
def batches(monkeypatch):
    """How many requests were decoded together, call by call."""
    sizes = []
    original = sample_queue.SlicedSampling

    def counting(model, requests, *rest):
        sizes.append(len(requests))
        return original(model, requests, *rest)

    monkeypatch.setattr(sample_queue, "SlicedSampling", counting)
    return sizes


def test_what_coroutines_ask_together_is_one_batch(service, tiny_folder, batches):
    sampling = service.create_sampling_client(base_model=str(tiny_folder))
    engine = sampling._sampler.engine()
    params = cookbook.SamplingParams(max_tokens=3, stop=[])

    async def rollout(length):
        return await sampling.sample(list(range(1, length)), 2, params)

    async def program():
        await asyncio.gather(*(sampling.sample_async(list(range(1, length)), 2, params) for length in range(3, 8)))
        await asyncio.gather(*(rollout(length) for length in range(3, 7)))  # a coroutine of the user's own
        before = engine.passes.count
        await asyncio.gather(*(sampling.compute_logprobs_async(list(range(1, length))) for length in range(3, 8)))
        return engine.passes.count - before

    passes = asyncio.run(program())
    assert batches == [5, 4]
    assert passes == 1


@pytest.mark.slow
def test_samplers_of_the_same_weights_draw_differently_and_repeat(tmp_path, tiny_folder):
    params = cookbook.SamplingParams(max_tokens=8, stop=[])

    def program():
        with ServiceClient(checkpoint_dir=tmp_path) as service:
            training = service.create_training_client(str(tiny_folder))
            samplers = [training.save_weights_and_get_sampling_client() for _ in range(2)]
            samplers += [service.create_sampling_client(base_model=str(tiny_folder)) for _ in range(2)]
            return [sampler.sample(PROMPT, 1, params).result().sequences[0].tokens for sampler in samplers]

    found = program()
    assert len(set(map(tuple, found))) == 4
    assert program() == found


# ---- saving and resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 4])
def test_resuming_from_a_state(service, tiny_folder, rank):
    adam = cookbook.AdamParams(learning_rate=1e-2)

    def step(client, seed):
        metrics = client.forward_backward(tiny.datums(2, seed=seed), "dpo").result().metrics
        client.optim_step(adam).result()
        return metrics["loss"]

    training = service.create_lora_training_client(str(tiny_folder), rank=rank, seed=3)
    step(training, 0)
    saved = training.save_state("first").result()
    assert Path(saved.path).is_dir()
    resumed = service.create_training_client_from_state_with_optimizer(saved.path)
    fresh = service.create_training_client_from_state(saved)
    losses = [[step(client, seed) for seed in (1, 2)] for client in (training, resumed, fresh)]
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[2][0] and losses[0][1] != losses[2][1]  # the same weights, no moments
    training.load_state_with_optimizer(saved).result()
    assert step(training, 1) == losses[0][0]
    training.load_state(saved.path).result()
    assert step(training, 1) == losses[0][0]
    assert resumed.get_info().lora_rank == rank


@pytest.mark.parametrize("rank", [0, 4])
def test_sampling_from_saved_weights(service, tiny_folder, rank):
    training = service.create_lora_training_client(str(tiny_folder), rank=rank)
    training.forward_backward(tiny.datums(2), "dpo")
    training.optim_step(cookbook.AdamParams(learning_rate=1e-2))
    saved = training.save_weights_for_sampler("weights").result()
    expected = training.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
    for client in (
        service.create_sampling_client(model_path=saved.path),
        service.create_sampling_client(saved),
        training.create_sampling_client(saved.path).result(),
    ):
        assert client.compute_logprobs(PROMPT).result() == expected
    base = service.create_sampling_client(base_model=str(tiny_folder))
    assert base.compute_logprobs(PROMPT).result() != expected
    assert base.get_base_model() == str(tiny_folder)
    assert base.get_tokenizer().decode([1]) == tiny.tokenizer().decode([1])


def test_a_checkpoint_keeps_its_precision(service, tiny_folder):
    training = service.create_training_client(str(tiny_folder), dtype="bfloat16")
    saved = training.save_state("half").result()
    again = service.create_training_client_from_state_with_optimizer(saved)
    sampler = service.create_sampling_client(model_path=saved.path)
    expected = training.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result()
    assert again.save_weights_and_get_sampling_client().compute_logprobs(PROMPT).result() == expected
    assert sampler.compute_logprobs(PROMPT).result() == expected


def test_damaged_weights_are_not_sampled_from(service, tiny_folder):
    training = service.create_training_client(str(tiny_folder))
    saved = training.save_state("mine").result()
    weights = Path(saved.path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x00\x01")
    for call in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        service.create_sampling_client,
        training.create_sampling_client,
    ):
        with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
            call(saved.path)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_what_is_known_of_a_model(service, tiny_folder):
    training = service.create_lora_training_client(str(tiny_folder), rank=2)
    info = training.get_info()
    assert (info.model_name, info.lora_rank, info.is_lora) == (str(tiny_folder), 2, True)
    assert info.max_context_length == tiny.CONTEXT and info.num_parameters > 0


def test_the_end_tells_every_error_and_closes_everything(tmp_path, tiny_folder):
    service = ServiceClient(checkpoint_dir=tmp_path)
    clients = [service.create_training_client(str(tiny_folder)) for _ in range(2)]
    clients[0].forward_backward([cookbook.Datum(cookbook.ModelInput.from_ints([1]))], "cross_entropy")
    with pytest.raises(DataError, match="missing required field 'target_tokens'"):
        service.close()
    for client in clients:
        with pytest.raises(Exception, match="the trainer is closed"):
            client.forward(tiny.datums(1), "cross_entropy")


def trainer_threads():
    return [thread for thread in threading.enumerate() if thread.name == "cookbook-trainer" and thread.is_alive()]


def ended(threads):
    """Whether these threads end by themselves."""
    for thread in threads:
        thread.join(WAIT_S)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.slow
def test_a_client_that_is_dropped_frees_its_model_and_ends_its_thread(service, tiny_folder):
    before = trainer_threads()
    training = service.create_training_client(str(tiny_folder))
    training.forward_backward(tiny.datums(2), "dpo")
    outputs = [training.optim_step(cookbook.AdamParams()).result()]
    snapshot = training.save_weights_and_get_sampling_client()
    asked = service.create_sampling_client(base_model=str(tiny_folder)).sample(PROMPT, 1)  # the future outlives its client
    model = weakref.ref(training._trainer.engine.model)
    threads = [thread for thread in trainer_threads() if thread not in before]
    assert len(threads) == 2

    del training
    gc.collect()
    assert model() is None and outputs
    assert len(snapshot.compute_logprobs(PROMPT).result()) == 3  # and the snapshot outlives the trainer
    assert len(asked.result().sequences) == 1
    frozen = weakref.ref(snapshot._sampler.engine().model)
    del snapshot
    gc.collect()
    assert frozen() is None and ended(threads)


def test_a_call_that_is_under_way_is_finished_without_a_client(service, tiny_folder):
    training = service.create_training_client(str(tiny_folder))
    saved, threads = training.save_state("last"), trainer_threads()
    del training
    gc.collect()
    assert Path(saved.result().path).is_dir()
    gc.collect()
    assert ended(threads)


def test_the_error_of_a_client_that_is_gone_is_told(tmp_path, tiny_folder):
    service = ServiceClient(checkpoint_dir=tmp_path)
    bad = [cookbook.Datum(cookbook.ModelInput.from_ints([1]))]
    service.create_training_client(str(tiny_folder)).forward_backward(bad, "cross_entropy")
    gc.collect()
    with pytest.raises(DataError, match="missing required field 'target_tokens'"):
        service.close()
    service.close()  # once


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        ("ServiceClient", {"base_ulr": "x"}, "ServiceClient: unknown option 'base_ulr'. Did you mean 'base_url'?"),
        ("ServiceClient", {"warp": 9}, r"unknown option 'warp'\. \(there are base_url, "),
        ("create_training_client", {"dtpye": "bfloat16"}, "unknown option 'dtpye'. Did you mean 'dtype'?"),
        ("create_lora_training_client", {"rnak": 4}, "unknown option 'rnak'. Did you mean 'rank'?"),
        ("create_lora_training_client", {"train_mlp": False}, "train_mlp: .*lora_target_modules"),
        ("create_lora_training_client", {"train_attn": False}, "train_attn: .*lora_target_modules"),
        ("create_lora_training_client", {"train_unembed": True}, "train_unembed: .*lora_target_modules"),
        ("create_lora_training_client", {"optimizer": "dimuon"}, "optimizer: this trainer has AdamW only, got 'dimuon'"),
        ("create_training_client_from_state", {"optimizer": "dimuon"}, "this trainer has AdamW only"),
        ("create_training_client_from_state_with_optimizer", {"pth": 1}, "unknown option 'pth'"),
        ("create_sampling_client", {"base_modle": "x"}, "unknown option 'base_modle'. Did you mean 'base_model'?"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(service, tiny_folder, call, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ServiceClient(**options) if call == "ServiceClient" else getattr(service, call)(str(tiny_folder), **options)
    assert "\n" not in str(caught.value)


NOT_OFFERED = {"base_model"}  # of create_training_client_from_state: a checkpoint on another base


@pytest.mark.parametrize(
    "call",
    [
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
        "create_sampling_client",
    ],
)
def test_options_of_tinker_without_a_meaning_here_are_taken(tmp_path, tiny_folder, call):
    """Every parameter of Tinker's own client; the ones that both have keep their defaults."""
    tinker = pytest.importorskip("tinker")

    def only_theirs(theirs, ours):
        names = [name for name, one in inspect.signature(theirs).parameters.items() if one.kind is not one.VAR_KEYWORD]
        return {name: None for name in names if name not in {*inspect.signature(ours).parameters, *NOT_OFFERED}}

    with ServiceClient(checkpoint_dir=tmp_path, **only_theirs(tinker.ServiceClient, ServiceClient)) as service:
        training = service.create_training_client(str(tiny_folder))
        saves = only_theirs(tinker.TrainingClient.save_state, type(training).save_state)
        saved = training.save_state("a", **saves).result()
        training.load_state(saved, weights_access_token=None).result()
        start = str(tiny_folder) if call == "create_lora_training_client" else saved.path
        options = only_theirs(getattr(tinker.ServiceClient, call), getattr(ServiceClient, call))
        assert options and getattr(service, call)(start, **options)
        if call == "create_lora_training_client":
            options = {"optimizer": tinker.types.AdamOptimizerConfig(), "train_mlp": True, "train_attn": True}
            training = service.create_lora_training_client(start, **options)
            trained = " ".join(name for name, _ in training._trainer.engine.model.trainable())
            assert all(layer in trained for layer in ("q_proj", "o_proj", "gate_proj", "down_proj"))
            assert "lm_head" not in trained and "embed_tokens" not in trained


def test_mistakes(service, tiny_folder):
    with pytest.raises(ConfigError, match="base_url: expected http"):
        ServiceClient(base_url="localhost:8000")
    for wrong in ({}, {"model_path": "a", "base_model": "b"}):
        with pytest.raises(ConfigError, match="pass either model_path or base_model"):
            service.create_sampling_client(**wrong)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        service.create_training_client_from_state("nowhere")
    training = service.create_training_client(str(tiny_folder))
    for name in ("fly", "fly_async", "_hidden_async"):
        with pytest.raises(AttributeError, match=name):
            getattr(training, name)


def test_the_package_offers_it_all():
    """``import cookbook as tinker`` finds the names that programs use."""
    for name in ("ServiceClient", "Datum", "ModelInput", "AdamParams", "SamplingParams", "TensorData", "types"):
        assert getattr(cookbook, name) is not None
    assert cookbook.types.Datum is cookbook.Datum
    for name in ("DeploymentManager", "DeploymentSampler", "WeightSyncer", "FusedOutputLoss"):
        assert getattr(cookbook, name).__name__ == name
    for name in LOSSES:
        assert getattr(cookbook, loss_class(name).__name__) is loss_class(name)
    assert all(getattr(cookbook, name) is not None for name in cookbook.__all__)


def test_what_tinker_programs_ask_a_service(service, tiny_folder, tmp_path):
    training = service.create_lora_training_client(str(tiny_folder), rank=4)
    models = service.get_server_capabilities().supported_models
    assert [(one.model_name, one.max_context_length) for one in models] == [("tiny", None), (str(tiny_folder), tiny.CONTEXT)]
    saved, weights = training.save_state("state").result(), training.save_weights_for_sampler("weights").result()
    rest = service.create_rest_client()
    assert rest.get_server_capabilities().result().supported_models == models
    assert repr(service) == "<ServiceClient: trains in this process, 1 model in use>"
    assert repr(training) == f"<TrainingClient: {tiny_folder}, trains a LoRA adapter of rank 4, 0 steps>"
    assert repr(training.save_weights_and_get_sampling_client()) == f"<SamplingClient: {tiny_folder}>"
    found = rest.get_weights_info_by_tinker_path(saved.path).result()
    assert (found.base_model, found.is_lora, found.lora_rank) == (str(tiny_folder), True, 4)
    listed = rest.list_user_checkpoints().result().checkpoints
    assert [(one.tinker_path, one.checkpoint_type) for one in listed] == [(weights.path, "sampler"), (saved.path, "training")]
    with pytest.raises(ConfigError, match=r"create_rest_client\(\)\.list_sessions: only a server has runs"):
        rest.list_sessions()

    def loss(data, logprobs):
        return logprobs[0].sum(), {}

    training.forward_backward_custom(tiny.datums(1), loss, loss_type_input="logprobs").result()
    with pytest.raises(ConfigError, match="loss_type_input: losses read logprobs, got 'logits'"):
        training.forward_backward_custom(tiny.datums(1), loss, loss_type_input="logits")


def test_the_most_probable_tokens_of_a_prompt(service, tiny_folder):
    client = service.create_sampling_client(base_model=str(tiny_folder))
    params, prompt = cookbook.SamplingParams(max_tokens=1, seed=1), [5, 6, 7, 8]
    answer = client.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=tiny.VOCABULARY).result()
    assert answer.topk_prompt_logprobs[0] is None and len(answer.topk_prompt_logprobs) == len(prompt)
    for token, logprob, row in zip(prompt[1:], answer.prompt_logprobs[1:], answer.topk_prompt_logprobs[1:], strict=True):
        assert dict(row)[token] == pytest.approx(logprob, abs=1e-5)
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
    few = client.sample(prompt, 1, params, topk_prompt_logprobs=3).result()
    assert few.topk_prompt_logprobs[1:] == [row[:3] for row in answer.topk_prompt_logprobs[1:]]
    assert client.sample(prompt, 1, params).result().topk_prompt_logprobs is None
    with pytest.raises(RolloutError, match="topk_prompt_logprobs: expected 0 to 259"):
        client.sample(prompt, 1, params, topk_prompt_logprobs=260).result()
    with pytest.raises(ConfigError, match="sample: topk_sample_logprobs is not offered, got 2; leave it out"):
        client.sample(prompt, 1, params, topk_sample_logprobs=2)
    with pytest.raises(ConfigError, match="unknown option 'topk'"):
        client.sample(prompt, 1, params, topk=2)
