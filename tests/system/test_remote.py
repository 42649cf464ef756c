"""Runs on a server: the numbers of those in this process, and one line for whatever goes wrong between the two."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import servertools
import tiny
from marks import rest_slow, rotating
from runtools import BRIEF, SMALL, TWO_TURNS, here, rows, same_numbers, timeless, train, write  # noqa: F401 - here is a fixture
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.remote import connection, convert, pointers, watchdog
from cookbook.backends.remote.config import RemoteConfig
from cookbook.cli.app import run
from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, CheckpointError, ConfigError, CookbookError, DataError, RolloutError
from cookbook.jobs.endpoint import Relay
from cookbook.losses import GRPO, CrossEntropy
from cookbook.service import ServiceClient
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

pytest.importorskip("tinker")
pytestmark = pytest.mark.usefixtures("here")

REWARD = "def reward(completion, row):\n    return sum(map(ord, completion)) % 7 / 7\n"
STEP = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with servertools.running(tiny_folder, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def make_remote(server, tiny_folder, tmp_path):
    """``make_remote(**fields of ModelConfig)``: a trainer on the server."""
    made = []

    def make(seed=0, **model):
        config = RemoteConfig(server.url, patience_s=30.0)
        made.append(config.make_trainer(ModelConfig(str(tiny_folder), **model), seed=seed, folder=tmp_path / "checkpoints"))
        return made[-1]

    yield make
    for trainer in made:
        trainer.connection.give_up()
        trainer.connection.close()


@pytest.fixture
def model(tiny_folder):
    return ["model=tiny", f"model.name={tiny_folder}", "model.chat_template=null", *BRIEF]


@pytest.fixture
def backend(server):
    return ["backend=remote", f"backend.base_url={server.url}"]


LAGGING = ["weight_sync.every=2", "rollout.temperature=0.8", "rollout.stop=[a,e]"]  # stop texts beside the template's ids


# ---- the next command ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", rotating([0, 2], 1))
def test_the_next_command_of_a_run_downloads_its_weights_and_samples_from_them(rank, model, backend, monkeypatch, capsys):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert (
        train(*SMALL["dpo"], *model, *backend, f"model.lora_rank={rank}", "recipe.steps=1", "eval.every=null", "out=run") == 0
    )
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    fetch, sample = ([*shlex.split(one)] for one in line.split(" && "))
    setting = [word for word in fetch if word.startswith("TINKER_")]
    assert [word.partition("=")[0] for word in setting] == ["TINKER_BASE_URL", "TINKER_API_KEY"]
    # A separate process: in this one the client package would keep the first address that it connected to.
    environment = {**os.environ, **dict(word.split("=", 1) for word in setting), "TINKER_TELEMETRY": "0"}
    command = [str(Path(sys.executable).with_name("tinker")), *fetch[len(setting) + 1 :]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sample[:2] == ["cookbook", "sample"] and (Path(sample[2]) / "adapter_config.json").exists() == bool(rank)
    assert run(sample[1:]) == 0
    assert capsys.readouterr().out.count("\n") == 1


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param("sft", ["model.lora_rank=4"], marks=pytest.mark.slow),
        *rotating(
            [
                ("dpo", []),
                ("orpo", []),
                ("grpo", ["reward=python", "reward.target=reward.py:reward", *LAGGING]),
                (
                    "grpo",
                    ["reward=python", "reward.target=reward.py:reward", *LAGGING, "rollout.refill=3", "data.curriculum={}"],
                ),
                ("grpo", ["env=two.py:Two", "env.chat=false", "weight_sync.every=2"]),
                ("grpo", ["env=two.py:Two", "env.chat=false", "rollout.ahead=1"]),
            ],
            2,
        ),
    ],
)
def test_a_run_has_the_numbers_of_the_embedded_one(recipe, options, model, backend):
    write("reward.py", REWARD)
    write("two.py", TWO_TURNS)
    # The rows of an environment are numbers.
    small = [word for word in SMALL[recipe] if not (word.startswith("data") and options[:1] == ["env=two.py:Two"])]
    words = [*small, *model, *options]
    assert train(*words, "out=embedded") == 0
    assert train(*words, *backend, "out=remote") == 0
    assert same_numbers("remote", "embedded")
    if recipe == "grpo":
        assert any(row.get("optim/grad_norm") for row in rows("remote"))  # or nothing was compared


@pytest.mark.parametrize(
    ("recipe", "options"),
    rotating([("dpo", []), ("grpo", ["reward=python", "reward.target=reward.py:reward", "loss.kl_beta=0.1"])], 1),
)
def test_a_server_that_knows_only_cross_entropy_gets_the_slopes_of_other_losses(recipe, options, model, backend, monkeypatch):
    write("reward.py", REWARD)
    words = [*SMALL[recipe], *model, *options, "eval.every=null"]
    assert train(*words, "out=embedded") == 0
    monkeypatch.setattr(connection, "PATH", "/api/v1/unknown")  # what a server that is not ours has there: nothing
    monkeypatch.setenv("TINKER_API_KEY", servertools.KEY)
    assert train(*words, *backend, "out=remote") == 0
    for found, expected in zip(rows("remote")[1:], rows("embedded")[1:], strict=True):
        # Slopes travel in single precision: each optimizer step moves the weights by rounding errors of 6e-8 relative to a
        # learning rate of 1e-4, far below what a loss of order 1 shows; the policy loss is a difference of such terms.
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-7)
        assert found["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-6)  # that of the divided gradient
        for name in ("optim/divisor", "optim/num_loss_tokens", "optim/num_sequences", "data/rows_crc32"):
            assert found[name] == expected[name]


def saved(server):
    return {one.address.path for one in server.service.catalog.of_runs(server.service.catalog.runs())}


@pytest.mark.parametrize("recipe", rotating(["sft", "grpo"], 1))
def test_a_run_resumes_where_it_stopped(recipe, model, backend, server):
    write("reward.py", REWARD)
    sampled = ["reward=python", "reward.target=reward.py:reward", "weight_sync.every=3"] if recipe == "grpo" else []
    # Learning rates that do not depend on the number of steps.
    constant = ["schedule=constant", "schedule.warmup_ratio=null"]
    words = [*SMALL[recipe], *model, *sampled, *backend, *constant]
    words += ["checkpoint.every=1", "checkpoint.keep=1", "recipe.steps=4"]
    before = saved(server)
    assert train(*words, "out=whole") == 0
    assert train(*words, "out=parts", "recipe.steps=2") == 0
    assert train(*words, "out=parts") == 0
    assert timeless("parts")[3:] == timeless("whole")[3:]  # step 2 was the last of its process, and was evaluated
    assert [path.name for path in Path("parts/checkpoints").iterdir()] == ["step-000004"]
    pointed = {path for folder in ("whole", "parts") for path in pointers.below(Path(folder))}
    assert saved(server) - before == pointed  # what the run folders have dropped is deleted there too


# ---- a trainer -------------------------------------------------------------------------------------------------------


LONG = tiny.datums(4, longest=80)  # a third of the tokens weigh nothing: enough to leave them out of the last layer
RECIPES = {"cross_entropy": None, "dpo": None, "orpo": None, "grpo": "num_loss_tokens"}


@pytest.mark.parametrize("loss", rest_slow(RECIPES, fast=2))
def test_the_defaults_compute_the_same_bits_on_both_sides(make_remote, make_trainer, server, loss):
    """The server leaves out the tokens that the embedded trainer leaves out: with all of them, sums have another order."""
    remote, embedded = make_remote(), make_trainer()
    for _ in range(3):
        outputs = [trainer.forward_backward(LONG, loss) for trainer in (remote, embedded)]
        steps = [trainer.optim_step(STEP, RECIPES[loss]) for trainer in (remote, embedded)]
        one, other = (output.result() for output in outputs)
        for found, expected in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            # The wire has single precision, which the logprobs are computed in.
            assert np.array_equal(found["logprobs"].to_numpy(), expected["logprobs"].to_numpy(), equal_nan=True)
        assert {**one.metrics, "loss": 0} == pytest.approx({**other.metrics, "loss": 0}, rel=1e-15, abs=0)
        assert one.metrics["loss"] == other.metrics["loss"] and steps[0].result().metrics == steps[1].result().metrics
    assert is_equal(weights_of(remote, server), weights_of(embedded, server))


def test_a_trainer_is_the_embedded_one(make_remote, make_trainer, server):
    remote, embedded = make_remote(lora_rank=4), make_trainer(lora_rank=4)
    data = tiny.datums()
    for trainer in (remote, embedded):
        trainer.forward_backward(data, "cross_entropy")
        trainer.forward_backward_custom(data, CrossEntropy())
        trainer.optim_step(STEP, "num_loss_tokens").result()
    outputs = [trainer.forward(data, "cross_entropy").result() for trainer in (remote, embedded)]
    assert is_equal(weights_of(remote, server), weights_of(embedded, server))
    for found, expected in zip(*(output.loss_fn_outputs for output in outputs), strict=True):
        assert np.array_equal(found["logprobs"].to_numpy(), expected["logprobs"].to_numpy())
    assert outputs[0].metrics == pytest.approx(outputs[1].metrics, rel=1e-15, abs=0)
    assert remote.step == embedded.step == 1 and remote.max_length == embedded.max_length
    same = ("tokenizer", "chat_template", "precision")
    assert remote.digests().items() >= {key: embedded.digests()[key] for key in same}.items()


def test_what_fails_is_told_once_by_the_next_step(make_remote):
    trainer = make_remote()
    data = tiny.datums()

    def broken(data, logprobs):
        raise ValueError("mine")

    trainer.forward_backward_custom(data, broken)
    with pytest.raises(ValueError, match="mine"):
        trainer.optim_step(STEP).result()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP).result()
    assert trainer.step == 1
    state = trainer.save_state("whole").result()
    bad = [datum.with_inputs(target_tokens=np.full(datum.model_input.length, 10_000)) for datum in data]
    trainer.forward_backward(bad, "cross_entropy")
    with pytest.raises(BackendError, match="datum 0: target_tokens holds token 10000"):
        trainer.optim_step(STEP).result()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP).result()
    assert trainer.step == 2
    trainer.forward_backward(data, "cross_entropy")
    trainer.forward_backward_custom(data, broken)  # the server has half of the gradient now, and cannot know
    with pytest.raises(ValueError, match="mine"):
        trainer.optim_step(STEP).result()
    with pytest.raises(BackendError, match="has accumulated an incomplete gradient"):
        trainer.forward_backward(data, "cross_entropy").result()
    with pytest.raises(BackendError, match="has accumulated an incomplete gradient"):
        trainer.optim_step(STEP).result()
    trainer.load_state(state).result()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP).result()
    assert trainer.step == 2


def broken(data, logprobs):
    raise ValueError("mine")


BAD = [tiny.datums(1)[0].with_inputs(target_tokens=np.full(tiny.datums(1)[0].model_input.length, 10_000))]
WAYS = {
    "load_state of a missing path": lambda trainer: trainer.load_state("nowhere"),
    "a taken name in save_state": lambda trainer: trainer.save_state("taken"),
    "a delta without a base": lambda trainer: trainer.save_weights_for_sampler_ext("delta", checkpoint_type="delta"),
    "a forward of a bad datum": lambda trainer: trainer.forward(BAD, "cross_entropy"),
    "a custom loss that raises": lambda trainer: trainer.forward_backward_custom(tiny.datums(), broken),
    "a gradient of a bad datum": lambda trainer: trainer.forward_backward(BAD, "cross_entropy"),
    "a loss without gradient": lambda trainer: trainer.forward_backward_custom(tiny.datums(2), no_gradient),
}


def no_gradient(data, logprobs):
    return sum(row.sum() for row in logprobs) * 0.0, {}


@pytest.fixture(params=["embedded", "remote"])
def make_either(request):
    """A trainer in this process, or on the server."""
    return request.getfixturevalue("make_trainer" if request.param == "embedded" else "make_remote")


def weights_of(trainer, server):
    engine = trainer.engine if isinstance(trainer, LocalTrainer) else server.engine(trainer._calls._client)
    return tiny.weights(engine)


def is_equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def two_gradients_and_a_step(trainer, between=lambda: None):
    trainer.forward_backward(tiny.datums(), "cross_entropy")
    between()
    trainer.forward_backward(tiny.datums(seed=1), "cross_entropy")
    assert trainer.optim_step(STEP).result().metrics["optim/grad_norm"] > 0
    assert trainer.step == 1


@pytest.fixture(scope="module")
def undisturbed(tiny_folder, tmp_path_factory):
    """The weights after one step, of an embedded trainer in which no call failed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer = LocalConfig().make_trainer(ModelConfig(str(tiny_folder)), seed=0, folder=folder)
    two_gradients_and_a_step(trainer)
    weights = tiny.weights(trainer.engine)
    trainer.close()
    return weights


@pytest.mark.parametrize("way", rest_slow(WAYS, fast=2))
def test_an_error_that_was_read_fails_nothing_else(make_either, undisturbed, server, way):
    """The step uses the gradients made before and after the failed call, to the last bit."""
    trainer = make_either()
    trainer.save_state("taken").result()

    def fail():
        with pytest.raises((CookbookError, ValueError)):
            WAYS[way](trainer).result()

    two_gradients_and_a_step(trainer, between=fail)
    assert is_equal(weights_of(trainer, server), undisturbed)
    trainer.close()  # has nothing to report


@pytest.mark.parametrize("way", rest_slow(WAYS, fast=2))
def test_an_unread_error_fails_the_next_step_and_the_end(make_either, server, way):
    trainer, data = make_either(), tiny.datums()
    trainer.save_state("taken").result()
    before = weights_of(trainer, server) if isinstance(trainer, LocalTrainer) else None
    try:
        unread = WAYS[way](trainer)
    except CookbookError:
        return  # raised by the call itself, so the caller cannot miss it
    with pytest.raises((CookbookError, ValueError)) as told:
        trainer.optim_step(STEP).result()
    with pytest.raises(type(told.value), match=re.escape(str(told.value)[:40])):
        unread.result()
    assert trainer.step == 0 and (before is None or is_equal(weights_of(trainer, server), before))
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP).result()  # reading the step's error was reading the call's
    unread = WAYS[way](trainer)
    with pytest.raises(type(told.value)):
        trainer.close()


def test_a_step_asked_for_before_the_error_was_read_fails(make_either, server):
    """The usual loop requests the step immediately, and reads the gradient's future first."""
    trainer, data = make_either(), tiny.datums()
    trainer.forward_backward(data, "cross_entropy").result()
    before = weights_of(trainer, server)
    gradients = [trainer.forward_backward(BAD, "cross_entropy"), trainer.forward_backward(data, "cross_entropy")]
    steps = [trainer.optim_step(STEP), trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(STEP)]
    for future in (gradients[0], steps[0], steps[2]):
        with pytest.raises(CookbookError, match="datum 0: target_tokens holds token 10000"):
            future.result()
    assert is_equal(weights_of(trainer, server), before)
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP).result()
    assert trainer.step == 1
    trainer.close()


def test_a_plain_client_hears_of_an_error_once_more_from_its_next_step(server, make_remote):
    """The server cannot know which errors the program has read."""
    remote = make_remote().connection
    client = remote._service.create_lora_training_client("tiny", rank=4)
    data, bad = ([convert.datum(one, ("target_tokens", "weights")) for one in rows] for rows in (tiny.datums(2), BAD))
    adam = convert.adam(AdamParams(learning_rate=1e-3))
    with pytest.raises(Exception, match="10000"):
        client.forward_backward(bad, "cross_entropy").result()
    client.forward_backward(data, "cross_entropy").result()
    steps = [client.optim_step(adam), client.forward_backward(data, "cross_entropy"), client.optim_step(adam)]
    with pytest.raises(Exception, match="10000"):
        steps[0].result()
    assert steps[2].result().metrics["optim/grad_norm"] > 0


@pytest.mark.slow
def test_nothing_can_be_sampled_here_from_weights_that_are_elsewhere(model, backend, capsys):
    assert train(*SMALL["sft"], *model, *backend, "out=run", "recipe.steps=1") == 0
    assert run(["sample", "run", "x"]) == 2
    assert "are on the server at http" in capsys.readouterr().err


@pytest.mark.slow
def test_samplers_and_saved_weights(make_remote):
    trainer = make_remote(lora_rank=4)
    data = tiny.datums()
    reference = trainer.reference()
    before = reference.logprobs(data).result()
    live = trainer.live_sampler(0).result()
    lagging = trainer.lagging_sampler(0).result()
    drawn = [one.sample([5, 6, 7], 2, SamplingParams(max_tokens=4, seed=1)).result() for one in (live, lagging)]
    assert drawn[0] == drawn[1] and drawn[0].sequences[0].tokens != drawn[0].sequences[1].tokens
    assert len(live.compute_logprobs([5, 6, 7]).result()) == 3
    with pytest.raises(RolloutError, match="context"):
        live.sample([5] * tiny.CONTEXT, 1, SamplingParams(max_tokens=4)).result()
    with pytest.raises(RolloutError, match=r"min_p=0\.1 is not in Tinker's protocol"):  # its client would leave it out
        live.sample([5, 6, 7], 1, SamplingParams(max_tokens=4, min_p=0.1))
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(STEP)
    state = trainer.save_state("one").result()
    assert state.step == 1
    trainer.live_sampler(1).result()
    with pytest.raises(RolloutError, match="sync again"):
        live.sample([5, 6, 7]).result()
    assert lagging.sample([5, 6, 7], 2, SamplingParams(max_tokens=4, seed=1)).result() == drawn[1]
    assert all(np.array_equal(*pair) for pair in zip(before, reference.logprobs(data).result(), strict=True))
    with pytest.raises(CheckpointError, match="exists already"):
        trainer.save_state("one")
    weights = [trainer.save_state("last", overwrite=True, optimizer=False).result() for _ in range(2)][-1]
    with pytest.raises(CheckpointError, match="holds weights only"):
        trainer.load_state(weights)
    resumed = make_remote(lora_rank=4)
    resumed.load_state(weights, optimizer=False).result()
    resumed.load_state(state).result()
    assert resumed.step == 1
    outputs = [one.forward(data, "cross_entropy").result().metrics for one in (trainer, resumed)]
    assert outputs[0] == outputs[1]


def test_requests_are_computed_together_although_the_server_was_away_when_they_were_announced(server, tiny_folder, tmp_path):
    relay = Relay()
    relay.lead_to(server.url.removeprefix("http://"))
    try:
        config = RemoteConfig(f"http://127.0.0.1:{relay.port}", patience_s=30.0)
        trainer = config.make_trainer(ModelConfig(str(tiny_folder)), seed=0, folder=tmp_path / "checkpoints")
        sampler = trainer.live_sampler(0).result()
        relay.lead_to(None)
        drawn = [sampler.sample([5, 6, number], 1, SamplingParams(max_tokens=2)) for number in range(3)]
        threading.Timer(0.3, relay.lead_to, [server.url.removeprefix("http://")]).start()
        assert all(one.result().sequences for one in drawn)
        (session,) = [one for one in server.service.sessions.values() if sampler.client._sampling_session_id in one.sampler_ids]
        records = [record.kind for record in session.samples.earlier_records() if record.kind in ("batch", "request")]
        assert records == ["batch", "request", "request", "request"]
        trainer.connection.give_up()
        trainer.connection.close()
    finally:
        relay.close()


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["synced", "off"])
def test_a_delta_over_http_is_small_and_sampled_from_like_the_weights_themselves(tiny_folder, tmp_path, durability):
    with servertools.running(tiny_folder, tmp_path / "out", durability=durability) as server:
        service = ServiceClient(base_url=server.url, checkpoint_dir=tmp_path / "pointers")
        training = service.create_training_client(str(tiny_folder), 0)
        with pytest.raises(CheckpointError, match="write a base first"):
            training.save_weights_for_sampler_ext("none", "delta").result()
        kinds = [training.save_weights_for_sampler_ext("one").result().kind]
        for name in ("two", "three"):
            training.forward_backward(tiny.datums(), "cross_entropy").result()
            training.optim_step(STEP).result()
            kinds.append(training.save_weights_for_sampler_ext(name, "delta").result().kind)
        assert kinds == ["base", "delta", "delta"]
        params = SamplingParams(max_tokens=8, seed=1)
        expected = training.save_weights_and_get_sampling_client().sample([5, 6, 7], 2, params).result().sequences
        path = tmp_path / "pointers" / "three"
        found = service.create_sampling_client(path).sample([5, 6, 7], 2, params).result().sequences
        assert [(one.tokens, one.logprobs) for one in found] == [(one.tokens, one.logprobs) for one in expected]
        [delta] = (tmp_path / "out").glob("*/sampler_weights.three")
        assert (delta / "weights.delta").is_file() and not list(delta.glob("*.safetensors"))
        body = {"model": pointers.read(path).path, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 1}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).json()["choices"][0]["text"]
        assert text == training.get_tokenizer().decode(expected[0].tokens, skip_special_tokens=True)
        with pytest.raises(CheckpointError, match="expected one of base, delta"):
            training.save_weights_for_sampler_ext("four", "half")
        service.close()


def losses(service, base_model):
    """The loop of the documentation: train, save, load, sample."""
    with service:
        training = service.create_lora_training_client(base_model, rank=4)
        data, found = tiny.datums(), []
        for _ in range(2):
            found.append(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(STEP).result()
        state = training.save_state("state").result()
        resumed = service.create_training_client_from_state_with_optimizer(state)
        found.append(resumed.forward(data, "cross_entropy").result().metrics["loss:sum"])
        weights = training.save_weights_for_sampler("weights").result()
        samplers = [
            training.save_weights_and_get_sampling_client(),
            service.create_sampling_client(weights),
            service.create_sampling_client(base_model=base_model),
        ]
        params = SamplingParams(max_tokens=5, seed=3)
        found += [one.sample([5, 6, 7], 1, params).result().sequences[0].tokens for one in samplers]
        assert training.get_info().is_lora and training.get_info().lora_rank == resumed.get_info().lora_rank == 4
        return found


@pytest.mark.slow
def test_a_service_client_is_the_same_over_http(server, tiny_folder):
    name = str(tiny_folder)
    embedded = losses(ServiceClient(checkpoint_dir="embedded"), name)
    assert losses(ServiceClient(base_url=server.url, checkpoint_dir="remote"), name) == embedded
    with pytest.raises(ConfigError, match="base_url: got a backend as well"):
        ServiceClient(base_url=server.url, backend=LocalConfig())


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def error_of(capsys, *words):
    assert train(*words, "out=run") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and not Path("run").exists()
    return lines[0]


def test_no_server(capsys, model):
    url = f"http://127.0.0.1:{servertools.free_port()}"
    found = error_of(capsys, *SMALL["sft"], *model, "backend=remote", f"backend.base_url={url}")
    assert f"no answer from {url}" in found and "cookbook serve" in found


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"[]"), (200, b'{"wire": 2}'), pytest.param(404, b"no", marks=pytest.mark.slow)],
)
def test_a_web_server_that_is_another_program(monkeypatch, status, body):
    monkeypatch.setenv("TINKER_API_KEY", servertools.KEY)
    with servertools.web_server(status, body) as url:
        error = f"^backend.base_url: the server at {url} is neither `cookbook serve` nor a Tinker service; correct the address$"
        with pytest.raises(BackendError, match=error):
            RemoteConfig(url).make_trainer(ModelConfig("tiny"), seed=0, folder=Path())


@pytest.mark.slow
def test_another_model_or_one_that_is_computed_otherwise(capsys, backend, model):
    words = [*SMALL["sft"], *model, *backend]
    assert "does not serve 'unknown/model'; choose one of these: " in error_of(capsys, *words, "model.name=unknown/model")
    assert "model.dtype: the server at " in error_of(capsys, *words, "model.dtype=bfloat16")
    assert "max_batch_tokens" in error_of(capsys, *words, "deployment.max_batch_tokens=7")
    assert "base_url: expected http" in error_of(capsys, *words, "backend.base_url=localhost")
    assert "backend.base_url: missing" in error_of(capsys, *SMALL["sft"], "backend=remote")


@pytest.mark.slow
def test_a_wrong_key(capsys, monkeypatch, tiny_folder, tmp_path, model):
    monkeypatch.setenv("COOKBOOK_API_KEYS", "tml-right")
    with servertools.running(tiny_folder, tmp_path / "server") as guarded:
        words = [*SMALL["sft"], *model, "backend=remote", f"backend.base_url={guarded.url}"]
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        assert "refuses the API key; set $TINKER_API_KEY" in error_of(capsys, *words)
        assert "backend.api_key_file: cannot read 'key'" in error_of(capsys, *words, "backend.api_key_file=key")
        monkeypatch.setenv("MY_KEY", "tml-right")
        assert train(*words, "backend.api_key_env=MY_KEY", "out=run", "recipe.steps=1") == 0
        write("key", "tml-right\n")
        assert train(*words, "backend.api_key_file=key", "out=other", "recipe.steps=1") == 0


def test_a_server_of_another_version(capsys, monkeypatch, backend, model):
    monkeypatch.setattr(connection, "WIRE", 1)
    assert "install the same version on both sides" in error_of(capsys, *SMALL["sft"], *model, *backend)


@pytest.mark.slow
def test_a_server_that_dies(monkeypatch, tiny_folder, tmp_path, caplog):
    monkeypatch.setattr(watchdog, "PROBE_S", 0.2)
    with servertools.running(tiny_folder, tmp_path / "server") as mortal:
        config = RemoteConfig(mortal.url, patience_s=0.5)
        trainer = config.make_trainer(ModelConfig(str(tiny_folder)), seed=0, folder=tmp_path / "checkpoints")
        trainer.forward_backward(tiny.datums(), "cross_entropy").result()
    step = trainer.optim_step(STEP)
    with pytest.raises(BackendError, match=r"no answer from .*; start the server there"):
        step.result()
    trainer.close()
    told = [record.getMessage() for record in caplog.records if record.name == "cookbook" and mortal.url in record.getMessage()]
    assert told == [f"no answer from {mortal.url}; trying again for up to 0.5 s (backend.patience_s)"]


def test_without_the_package(monkeypatch, capsys, backend, model):
    monkeypatch.setitem(sys.modules, "tinker", None)
    assert "install post-training-cookbook[tinker]" in error_of(capsys, *SMALL["sft"], *model, *backend)


def test_checkpoints_of_the_other_backend_are_told_apart(make_remote, make_trainer, tiny_folder):
    local = make_trainer().save_state("mine").result()
    with pytest.raises(CheckpointError, match="resume with backend=local"):
        make_remote().load_state(local)


def test_losses_that_need_more_than_logprobs(make_remote, monkeypatch):
    monkeypatch.setattr(connection, "PATH", "/api/v1/unknown")
    monkeypatch.setenv("TINKER_API_KEY", servertools.KEY)
    with pytest.raises(ConfigError, match="needs the policy"):
        make_remote().forward_backward(tiny.datums(), "grpo", {"entropy_coef": 0.1})


def test_embedded_makes_a_local_trainer(tiny_folder, tmp_path):
    assert isinstance(LocalConfig().make_trainer(ModelConfig(str(tiny_folder)), seed=0, folder=tmp_path), LocalTrainer)


def test_a_step_reports_errors_of_earlier_calls_only(make_remote):
    """A loss that lacks a field fails immediately on the client, while the step before it is still pending."""
    trainer = make_remote()
    for _ in range(2):
        trainer.forward_backward(LONG, "cross_entropy")
        step = trainer.optim_step(STEP)
        failed = trainer.forward_backward_custom([Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})], GRPO())
        assert step.result().metrics["optim/grad_norm"] > 0
        with pytest.raises(DataError, match="missing required field"):
            failed.result()


def test_reading_a_step_reads_every_error_that_it_had_to_report(make_remote):
    def fails(data, logprobs):
        raise ValueError(len(data))

    trainer = make_remote()
    for count in (1, 2):
        trainer.forward_backward_custom(LONG[:count], fails)
    with pytest.raises(ValueError, match="1"):
        trainer.optim_step(STEP).result()
    trainer.forward_backward(LONG, "cross_entropy")
    assert trainer.optim_step(STEP).result().metrics["optim/grad_norm"] > 0


def test_only_the_watchdog_ends_the_retries_of_a_request(server):
    import asyncio

    import httpx

    tinker = connection.require_tinker()
    opened = RemoteConfig(server.url, patience_s=1000.0)._connection()
    holder, calls = opened._service.holder, []

    async def within_limit(call):
        return await call()

    async def request():
        calls.append(len(calls))
        # What the package raises once its own limit of 5 minutes has passed.
        if len(calls) < 4:
            raise tinker.APIConnectionError(request=httpx.Request("GET", server.url))
        return "answer"

    holder.execute_with_retries = within_limit
    opened._retry_until_given_up(holder)
    with pytest.raises(tinker.APIConnectionError):
        asyncio.run(holder.execute_with_retries(request))
    assert len(calls) == 1
    opened._watchdog._last_unanswered = time.monotonic()
    assert asyncio.run(holder.execute_with_retries(request)) == "answer" and len(calls) == 4
    calls.clear()
    opened.close()
    with pytest.raises(tinker.APIConnectionError):
        asyncio.run(holder.execute_with_retries(request))
    assert len(calls) == 1
