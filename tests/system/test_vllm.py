"""The real thing: GRPO through a vLLM server, whose weights are replaced where they are.

Needs vLLM in an environment of its own: ``make test-vllm``, or ``COOKBOOK_VLLM_PYTHON`` with the Python of one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import slurmtools
from places import ROOT
from vllmtools import PYTHON, has_vllm, pytestmark  # noqa: F401 - has_vllm is used by the mark

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import manifest
from cookbook.cli.app import run
from cookbook.deployments.vllm import api
from cookbook.deployments.vllm.deployment import PRIVATE_PREFIX, VllmConfig, check_logprobs
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.registry import DeploymentManager
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError, RolloutError
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams
from cookbook.utils import paths


def kind_of(sampler) -> str:
    """Kind of the checkpoint that the sampler's sync has sent."""
    return manifest.read(sampler.checkpoint)["kind"]


COMMON = {"python": PYTHON, "name": "tests", "max_length": 512, "on_exit": "keep"}


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory):
    """All deployments of this file, ended after it."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield
        for name in ("tests", "adapters", "bfloat16"):
            DeploymentManager().delete(name)
        assert DeploymentManager().running() == {}


@pytest.fixture
def slurm():
    """The configuration of Slurm on this machine."""
    if (absent := slurmtools.missing()) is not None:
        pytest.skip(f"{absent} is not installed: apt-get install slurm-wlm munge")
    with slurmtools.cluster() as conf:
        yield str(conf)


@pytest.fixture
def trainer(tmp_path):
    made = LocalTrainer(ModelConfig(str(paths.packaged("data") / "tiny")), LocalConfig(), folder=tmp_path / "checkpoints")
    yield made
    made.close()


@pytest.fixture
def deployment(trainer):
    found = VllmConfig(**COMMON).deploy(trainer, live=True)
    yield found
    found.close()


def train(trainer, lr=1e-2):
    """A step that changes every answer."""
    tokens = np.random.default_rng(trainer.step).integers(0, 259, 64)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": np.ones(63)})
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=lr)).result()
    return trainer.step


def under(reference, prompt, sample, temperature=1.0) -> np.ndarray:
    """Logprobs of a sample's tokens under frozen weights."""
    tokens = [*prompt, *sample.tokens]
    inputs = {"target_tokens": tokens[1:], "temperature": np.asarray(temperature)}
    return reference.logprobs([Datum(ModelInput.from_ints(tokens[:-1]), inputs)]).result()[0][len(prompt) - 1 :]


PROMPT = [10, 20, 30, 40]
STOP = """
import os, signal
from cookbook import Hook

class Stop(Hook):
    def on_step(self, run, step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
"""
LONG = SamplingParams(max_tokens=300, seed=1, stop=[])


def test_samples_come_from_exactly_the_trainers_weights(trainer, deployment):
    """Base and deltas; the embeddings are tied, so the packed head must follow. 1e-4: float32 through two programs."""
    for _ in range(4):
        sampler = deployment.load(trainer.step).result()
        params = SamplingParams(max_tokens=40, temperature=0.8, seed=5, stop=[])
        found = sampler.sample(PROMPT, 3, params).result().sequences
        again = sampler.sample(PROMPT, 3, params).result().sequences
        assert [one.tokens for one in found] == [one.tokens for one in again]
        assert len({tuple(one.tokens) for one in found}) == 3
        for one in found:
            assert len(one.tokens) == 40 and one.stop_reason == "length" and one.step == trainer.step
            assert np.abs(under(trainer.reference(), PROMPT, one, 0.8) - one.logprobs).max() < 1e-4
        before = sampler
        train(trainer)
    assert kind_of(sampler) == "delta"
    deployment.load(trainer.step).result()
    with pytest.raises(RolloutError, match=r"asked for weights step-3-\w+, the server has sampled from \['step-4-\w+'\]"):
        before.sample(PROMPT, 1, LONG).result()


def test_requests_under_way_are_finished_on_the_weights_they_began_with(trainer, deployment):
    old, before = deployment.load(0).result(), trainer.reference()
    train(trainer)
    futures = [old.sample(PROMPT, 4, LONG) for _ in range(8)]
    time.sleep(0.3)  # they are on their way, and take longer
    assert not any(future.done() for future in futures)
    new, after = deployment.load(1).result(), trainer.reference()
    for one in futures[-1].result().sequences:
        assert len(one.tokens) == 300 and np.abs(under(before, PROMPT, one) - one.logprobs).max() < 1e-4
    assert len([future.result() for future in futures]) == 8  # none was lost
    one = new.sample(PROMPT, 1, LONG).result().sequences[0]
    assert np.abs(under(after, PROMPT, one) - one.logprobs).max() < 1e-4


def test_seeds_go_with_long_prompts(deployment):
    """Were prefill done in chunks, seeded requests that do not fit into one batch together would end vLLM's CPU engine."""
    sampler = deployment.load(0).result()
    prompts = [[*PROMPT * 100, number] for number in range(48)]
    params = SamplingParams(max_tokens=8, seed=3, stop=[])
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    together = [future.result().sequences[0].tokens for future in futures]
    alone = sampler.sample(prompts[7], 1, params).result().sequences[0].tokens
    assert all(len(tokens) == 8 for tokens in together) and together[7] == alone


def test_a_damaged_file_leaves_what_is_served(trainer, deployment, monkeypatch):
    sampler = deployment.load(0).result()
    load = deployment.servers.load

    def damaged(folder, step):
        path = folder / "weights.delta"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        load(folder, step)

    monkeypatch.setattr(deployment.servers, "load", damaged)
    with pytest.raises(RolloutError, match=r"weights\.delta is damaged .*; the server keeps its earlier weights"):
        deployment.load(train(trainer))
    assert sampler.sample(PROMPT, 1, LONG).result().sequences
    monkeypatch.undo()
    assert kind_of(deployment.load(1).result()) == "base"


def test_servers_that_are_there_are_used_again(trainer, deployment):
    one = DeploymentManager().running()["tests"][0]
    deployment.load(0).result()
    with pytest.raises(ConfigError, match="tests is used by process"):
        VllmConfig(**COMMON).deploy(trainer, live=True)
    deployment.close()
    again = VllmConfig(**COMMON).deploy(trainer, live=True)
    assert DeploymentManager().running()["tests"] == [one]
    by_url = VllmConfig(url=one.url).deploy(trainer, live=True)
    for found in (by_url, again):  # each begins with a base; the server's weights do not count
        assert kind_of(found.load(0).result()) == "base"
        found.close()
    assert one.alive


def test_the_command_and_a_run_find_the_same_servers(trainer, capsys):
    """The command starts a server and a run uses it; then two servers get the same weights and take turns."""
    settings = [f"deployment.python={PYTHON}", "deployment.max_length=512"]
    assert run(["deployments", "create", "tests", *settings]) == 0
    first = DeploymentManager().running()["tests"]
    VllmConfig(**COMMON).deploy(trainer, live=True).close()
    assert DeploymentManager().running()["tests"] == first
    capsys.readouterr()
    assert run(["deployments", "list"]) == 0
    assert f"tests       healthy  {first[0].url}" in capsys.readouterr().out
    assert run(["deployments", "scale", "tests", "2"]) == 0 and run(["deployments", "warm-up", "tests"]) == 0
    two = VllmConfig(**COMMON, replicas=2).deploy(trainer, live=True)
    for _ in range(2):
        sampler = two.load(trainer.step).result()
        assert len({one.digest for one in two.servers.report()}) == 1 and len(two.servers.report()) == 2
        answers = [sampler.sample(PROMPT, 1, LONG).result().sequences[0].tokens for _ in range(2)]
        assert answers[0] == answers[1]  # one from each, with the same seed
        train(trainer)
    running = DeploymentManager().running()["tests"]
    assert running[0] == first[0] and len(running) == 2
    os.killpg(running[1].pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=f"the server's process {running[1].pid} has ended"):
        two.load(trainer.step)
    two.close()
    assert run(["deployments", "scale", "tests", "1"]) == 0 and DeploymentManager().running()["tests"] == first


def test_a_server_that_does_not_compute_with_what_it_holds(trainer, deployment):
    sampler = deployment.load(0).result()
    train(trainer)
    with pytest.raises(RolloutError, match="the deployment's logprobs differ from the trainer's by"):
        check_logprobs(trainer, sampler, 1e-3)


def test_what_the_server_refuses_is_one_line(trainer, deployment):
    sampler = deployment.load(0).result()
    with pytest.raises(RolloutError, match="400: Token id 9000 is out of vocabulary"):
        sampler.sample([1, 9000], 1, SamplingParams(max_tokens=2)).result()
    assert manifest.read(next(trainer.folder.glob("sync-*")))["kind"] == "base"


def test_a_server_that_dies_ends_the_run_with_its_reason(trainer, deployment):
    """And the next deployment of that name starts another one."""
    sampler = deployment.load(0).result()
    one = DeploymentManager().running()["tests"][0]
    os.killpg(one.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match=f"the server's process {one.pid} has ended"):
        sampler.sample(PROMPT, 1, LONG).result()
    with pytest.raises(RolloutError, match=f"the server's process {one.pid} has ended"):
        deployment.load(train(trainer))
    deployment.close()
    DeploymentManager().delete("tests")


def has_amx():
    """vLLM has kernels of their own for bfloat16 on CPUs with AMX. Where a virtual machine denies it, they end the worker."""
    return "amx_bf16" in Path("/proc/cpuinfo").read_text()


def test_served_in_bfloat16(trainer):
    """Other kernels than float32's. The server holds the trainer's weights, rounded; logprobs agree within 8 bits.

    With AMX alone, a server that ends at its first tokens is accepted if one line reports the end and names the remedy.
    """
    config = VllmConfig(**{**COMMON, "name": "bfloat16", "dtype": "bfloat16"})
    try:
        deployment = config.deploy(trainer, live=True)
    except RolloutError as error:
        assert has_amx(), error
        assert re.fullmatch(r"deployment: .* set deployment\.dtype=float32", str(error))
        return
    for _ in range(2):
        sampler = deployment.load(trainer.step).result()
        futures = [sampler.sample([*PROMPT * 50, number], 4, LONG) for number in range(16)]
        reference = trainer.reference()
        gaps = [under(reference, [*PROMPT * 50, 0], one) - one.logprobs for one in futures[0].result().sequences]
        assert 1e-4 < np.abs(np.concatenate(gaps)).mean() < 0.05
        assert all(len(one.tokens) == 300 for future in futures for one in future.result().sequences)
        train(trainer)
    assert kind_of(sampler) == "delta" and manifest.read(sampler.checkpoint)["dtype"] == "bfloat16"
    deployment.close()


def test_a_server_that_ends_at_its_first_tokens_is_one_line(trainer, monkeypatch):
    """A server that is killed at its first request, as AMX kills bfloat16 in some virtual machines."""
    real = Client.call

    def dying(client, *arguments, **options):
        for one in DeploymentManager().running()["bfloat16"]:
            os.killpg(one.pid, signal.SIGKILL)
        return real(client, *arguments, **options)

    monkeypatch.setattr(Client, "call", dying)
    with pytest.raises(RolloutError, match=r"^deployment: .* has ended.* set deployment\.dtype=float32$"):
        VllmConfig(**{**COMMON, "name": "bfloat16", "dtype": "bfloat16", "on_exit": "delete"}).deploy(trainer, live=True)
    assert "bfloat16" not in DeploymentManager().running()


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(tmp_path):
    """A trainer of an adapter, on weights that are not those of its folder, and servers for it."""
    model = ModelConfig(str(paths.packaged("data") / "tiny"), random=True, lora_rank=4)
    trainer = LocalTrainer(model, LocalConfig(), folder=tmp_path / "checkpoints")
    deployment = VllmConfig(**{**COMMON, "name": "adapters"}).deploy(trainer, live=False)
    yield trainer, deployment
    deployment.close()
    trainer.close()


def test_an_adapter_is_synced_beside_the_one_that_is_asked(adapted):
    """Loaded without a pause; requests under way, and older samplers, answer with theirs. 1e-4: float32, two programs."""
    trainer, deployment = adapted
    samplers, references = [], []
    for _ in range(3):
        samplers.append(deployment.load(trainer.step).result())
        references.append(trainer.snapshot_sampler(trainer.step).result())
        under_way = [samplers[-1].sample(PROMPT, 4, LONG) for _ in range(4)]
        train(trainer, lr=3e-2)
        for future in under_way:
            assert all(len(one.tokens) == 300 for one in future.result().sequences)
    for sampler, reference in zip(samplers, references, strict=True):
        for one in sampler.sample(PROMPT, 2, LONG).result().sequences:
            tokens = [*PROMPT, *one.tokens]
            said = np.array(reference.compute_logprobs(tokens).result()[len(PROMPT) :])
            assert np.abs(said - one.logprobs).max() < 1e-4 and one.step == sampler.step
    client = Client(DeploymentManager().running()["adapters"][0].url)
    assert set(api.adapters(client)) == {one.adapter for one in samplers}
    del samplers, sampler
    newest = deployment.load(trainer.step).result()
    assert api.adapters(client) == [newest.adapter]
    assert len(list(trainer.folder.iterdir())) == 1  # nothing of the weights under it, nor of older versions
    assert newest.sample(PROMPT, 1, LONG).result().sequences  # vLLM does not miss their folders


def test_an_adapter_that_is_not_what_was_read_is_an_error(adapted, monkeypatch):
    """vLLM reads the folder by itself, after the worker has verified it."""
    trainer, deployment = adapted
    deployment.load(trainer.step).result()
    prepare = api.prepare

    def read_and_changed(clients, folder):
        prepare(clients, folder)
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(api, "prepare", read_and_changed)
    with pytest.raises(RolloutError, match="vLLM has loaded another adapter than the one that was read and verified"):
        deployment.load(train(trainer))
    monkeypatch.undo()
    deployment.load(trainer.step).result()


def test_what_is_merged_computes_as_the_adapter_does(adapted, trainer, tmp_path):
    """Served as full weights by another server. 1e-4: float32, two programs, and the adapter added once."""
    adapting, deployment = adapted
    train(adapting, lr=3e-2)
    one = deployment.load(adapting.step).result().sample(PROMPT, 1, LONG).result().sequences[0]
    merged = adapting.save_weights_for_sampler_ext("merged", merged=True).result()
    trainer.load_state(merged, optimizer=False).result()
    full = VllmConfig(**COMMON).deploy(trainer, live=True)
    said = full.load(trainer.step).result().compute_logprobs([*PROMPT, *one.tokens]).result()
    full.close()
    assert np.abs(np.array(said[len(PROMPT) :]) - one.logprobs).max() < 1e-4


# ---- samples that lag behind -----------------------------------------------------------------------------------------


@pytest.fixture
def lagging(trainer):
    found = VllmConfig(**COMMON).deploy(trainer, live=False)
    yield found
    found.close()


def test_older_weights_are_loaded_again_for_a_new_request(trainer, lagging):
    samplers, drawn = [], []
    for _ in range(3):  # a base and two deltas
        samplers.append(lagging.load(trainer.step).result())
        drawn.append(samplers[-1].sample(PROMPT, 2, LONG).result().sequences)
        train(trainer)
    assert kind_of(samplers[-1]) == "delta"
    for place in (1, 0, 2, 1):
        again = samplers[place].sample(PROMPT, 2, LONG).result().sequences
        assert [one.tokens for one in again] == [one.tokens for one in drawn[place]]
        assert [one.step for one in again] == [place] * 2
    kept = [sampler.checkpoint for sampler in samplers]
    newest = lagging.load(trainer.step).result()
    assert kind_of(newest) == "base"  # for the last delta applies to other weights than are served
    assert all(folder.is_dir() for folder in kept)
    del samplers, newest
    lagging.load(train(trainer)).result()
    assert not any(folder.is_dir() for folder in kept)


def test_a_resume_between_two_syncs_has_exactly_the_older_weights(trainer, lagging, tmp_path):
    lagging.load(0).result()
    older = lagging.load(train(trainer)).result()  # a delta: what is saved has to be put together
    drawn = older.sample(PROMPT, 2, LONG).result().sequences
    train(trainer)
    saved = trainer.save_state("step-2", sampler=older, asynchronous=True).result()
    train(trainer)
    trainer.load_state(f"{saved.path}/sampler", optimizer=False).result()
    again = lagging.load(0).result()
    trainer.load_state(saved).result()
    assert trainer.step == 2
    assert manifest.read(again.checkpoint)["weights"] == manifest.read(older.checkpoint)["weights"]
    assert [one.tokens for one in again.sample(PROMPT, 2, LONG).result().sequences] == [one.tokens for one in drawn]


@pytest.mark.parametrize(
    "where",
    [[], ["backend.ranks=2", "backend.shard=all"], ["job=local"], ["job=slurm"]],
    ids=["one process", "shards", "a job", "a job of Slurm"],
)
def test_grpo_with_samples_that_lag_behind(tmp_path, where, request):
    """A run that was stopped between two syncs continues to sample from the older weights."""
    if where:
        pytest.importorskip("tinker", reason="needs the package tinker")
    words = ["recipe=grpo", "deployment=vllm", f"deployment.python={PYTHON}", "deployment.max_length=512", "recipe.steps=5"]
    words += ["weight_sync.every=3", "recipe.prompts_per_step=8", "eval.every=2", "eval.limit=8", "optim.lr=1e-3"]
    words += ["deployment.name=tests", "deployment.on_exit=keep", f"out={tmp_path / 'run'}", *where]
    (tmp_path / "stopping.py").write_text(STOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if where == ["job=slurm"]:
        environment["SLURM_CONF"] = request.getfixturevalue("slurm")
    command = [sys.executable, "-m", "cookbook", "train", *words]
    stopped = subprocess.run([*command, "+hook.stop._target_=stopping.Stop"], cwd=tmp_path, env=environment, check=False)
    assert stopped.returncode == 130
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "sampler" / "model.safetensors").exists()
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [row["sync/version_lag"] for row in rows] == [0, 1, 2, 0, 1]
    drift = [row["kl/sampler_trainer_k3"] for row in rows]
    assert max(drift[0], drift[3]) < 1e-8 < 1e-6 < min(drift[1], drift[2], drift[4])
    assert all(row["kl/sampler_trainer_k1"] != 0 for row in rows)


def test_grpo_of_an_adapter_learns_through_it(tmp_path):
    """As the next test, with an adapter of rank 16."""
    words = ["recipe=grpo", "deployment=vllm", f"deployment.python={PYTHON}", "deployment.max_length=512", "recipe.steps=12"]
    words += ["model.lora_rank=16", "optim.lr=2e-3", "weight_sync.every=2", "eval.every=null"]
    command = [sys.executable, "-m", "cookbook", "train", *words, f"out={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < 0.2 and rows[-1]["eval/accuracy"] > 0.4
    assert all((row["kl/sampler_trainer_k3"] < 1e-8) == (row["sync/version_lag"] == 0) for row in rows[1:])


@pytest.mark.parametrize(("chosen", "turns"), [([], None), (["env=arithmetic"], 2.0)], ids=["one turn", "two turns"])
def test_grpo_learns_through_it(tmp_path, chosen, turns):
    """The shipped model answers 19% of the held-out sums; 12 steps later well over a half."""
    words = ["recipe=grpo", "deployment=vllm", f"deployment.python={PYTHON}", "recipe.steps=12"]
    words += chosen
    command = [sys.executable, "-m", "cookbook", "train", *words, f"out={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < 0.2 and rows[-1]["eval/accuracy"] > 0.6
    # The sampler's logprobs are the trainer's, to float32: were a sync left out, k3 would be 1e-3 and more.
    assert all(row["kl/sampler_trainer_k3"] < 1e-8 and row["sync/version_lag"] == 0 for row in rows[1:])
    assert rows[1].get("rollout/turns_max") == turns
    assert not [name for name in DeploymentManager().running() if name.startswith(PRIVATE_PREFIX)]  # its own has ended with it


def test_a_model_with_the_keys_and_values_of_qwen3_0p6b_starts_with_the_defaults(tmp_path, capsys):
    """Its context of 40,960 tokens takes 4.4 GB. Only the width of the layers is small."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder, tokenizer = tmp_path / "model", AutoTokenizer.from_pretrained(paths.packaged("data") / "tiny")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": len(tokenizer), "max_position_embeddings": 40960}
    Qwen3ForCausalLM(Qwen3Config(**heads, **sizes, dtype="bfloat16")).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = [f"deployment.python={PYTHON}", f"model.name={folder}", "model.dtype=bfloat16"]
    assert run(["deployments", "create", "shapes", "model=hf", *words]) == 0
    [one] = DeploymentManager().running()["shapes"]
    # On a machine with little memory the default is shorter than the context.
    assert 256 <= one.options.max_length <= 40960 and api.max_length([Client(one.url)]) == one.options.max_length
    assert one.options.kv_cache_bytes >= 2 * 28 * 8 * 128 * 2 * one.options.max_length
    DeploymentManager().delete("shapes")


RANKS = ["backend.ranks=2"]
SHARDED = [*RANKS, "backend.shard=all"]
KEPT = ["deployment.name=tests", "deployment.on_exit=keep"]


@pytest.mark.parametrize(
    ("words", "accuracy"),
    [([*SHARDED, *KEPT], 0.6), ([*RANKS, *KEPT], 0.6), ([*SHARDED, "model.lora_rank=16", "optim.lr=2e-3"], 0.4)],
    ids=["shards", "replicas", "shards of an adapted model"],
)
def test_grpo_on_two_ranks_learns_through_it(tmp_path, words, accuracy):
    """As one process. Each sync is verified by the digests of the weights, and by logprobs that the ranks compute."""
    pytest.importorskip("tinker", reason="needs the package tinker")
    common = ["recipe=grpo", "deployment=vllm", f"deployment.python={PYTHON}", "deployment.max_length=512", "recipe.steps=12"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cookbook", "train", *common, *words, f"out={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < 0.2 and rows[-1]["eval/accuracy"] > accuracy
    assert all(row["kl/sampler_trainer_k3"] < 1e-8 and row["sync/version_lag"] == 0 for row in rows[1:])
    kinds = [manifest.read(path)["kind"] for path in sorted((tmp_path / "run" / "checkpoints").glob("sync-*"))]
    # Full weights are a base and a delta for each step; of an adapter the last versions remain.
    assert set(kinds) == {"base"} if "model.lora_rank=16" in words else kinds == ["base", *["delta"] * 12]
