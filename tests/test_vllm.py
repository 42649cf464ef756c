"""The real thing: GRPO through a vLLM server, whose weights are replaced where they are.

Needs vLLM in an environment of its own: ``make test-vllm``, or ``COOKBOOK_VLLM_PYTHON`` with the Python of one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cookbook import paths
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.checkpoints import manifest
from cookbook.deployments import server
from cookbook.deployments.manager import DeploymentManager
from cookbook.deployments.vllm import VllmConfig, check_logprobs
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError, RolloutError
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("COOKBOOK_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))


def has_vllm() -> bool:
    try:
        server.check_python(PYTHON)
    except ConfigError:
        return False
    return True


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("not has_vllm()", reason=f"{PYTHON} has no vLLM; run `make test-vllm`"),
]
COMMON = {"python": PYTHON, "name": "tests", "max_length": 512, "on_exit": "keep"}


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory):
    """All deployments of this file, ended after it."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield
        DeploymentManager().delete("tests")
        assert DeploymentManager().running() == {}


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
    """What frozen weights say of a sample's tokens."""
    tokens = [*prompt, *sample.tokens]
    inputs = {"target_tokens": tokens[1:], "temperature": np.asarray(temperature)}
    return reference.logprobs([Datum(ModelInput.from_ints(tokens[:-1]), inputs)]).result()[0][len(prompt) - 1 :]


PROMPT = [10, 20, 30, 40]
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
    assert deployment.syncer.last.kind == "delta"
    deployment.load(trainer.step).result()
    with pytest.raises(RolloutError, match=r"asked for weights step-3-\w+, the server has sampled from \['step-4-\w+'\]"):
        before.sample(PROMPT, 1, LONG).result()


def test_requests_under_way_are_finished_on_the_weights_they_began_with(trainer, deployment):
    old, before = deployment.load(0).result(), trainer.reference()
    futures = [old.sample(PROMPT, 4, LONG) for _ in range(8)]
    train(trainer)
    time.sleep(0.3)  # they are on their way, and take longer
    assert not any(future.done() for future in futures)
    new, after = deployment.load(1).result(), trainer.reference()
    for one in futures[-1].result().sequences:
        assert len(one.tokens) == 300 and np.abs(under(before, PROMPT, one) - one.logprobs).max() < 1e-4
    assert len([future.result() for future in futures]) == 8  # none was lost
    one = new.sample(PROMPT, 1, LONG).result().sequences[0]
    assert np.abs(under(after, PROMPT, one) - one.logprobs).max() < 1e-4


def test_a_damaged_file_leaves_what_is_served(trainer, deployment, monkeypatch):
    sampler = deployment.load(0).result()
    load = deployment.servers.load

    def damaged(folder, step):
        path = folder / "weights.delta"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        load(folder, step)

    monkeypatch.setattr(deployment.servers, "load", damaged)
    with pytest.raises(RolloutError, match=r"weights\.delta is damaged .*; it goes on serving its earlier weights"):
        deployment.load(train(trainer))
    assert sampler.sample(PROMPT, 1, LONG).result().sequences
    monkeypatch.undo()
    deployment.load(1).result()
    assert deployment.syncer.last.kind == "base"


def test_servers_that_are_there_are_used_again(trainer, deployment):
    one = DeploymentManager().running()["tests"][0]
    deployment.load(0).result()
    with pytest.raises(ConfigError, match="tests is used by process"):
        VllmConfig(**COMMON).deploy(trainer, live=True)
    deployment.close()
    again = VllmConfig(**COMMON).deploy(trainer, live=True)
    assert DeploymentManager().running()["tests"] == [one]
    by_url = VllmConfig(url=one.url).deploy(trainer, live=True)
    for found in (by_url, again):  # each begins with a base, whatever the server holds
        found.load(0).result()
        assert found.syncer.last.kind == "base"
        found.close()
    assert one.alive


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


def test_grpo_learns_through_it(tmp_path):
    """The shipped model answers 19% of the held-out sums; 12 steps later well over a half."""
    words = ["recipe=grpo", "deployment=vllm", f"deployment.python={PYTHON}", "deployment.max_length=512", "recipe.steps=12"]
    command = [sys.executable, "-m", "cookbook", "train", *words, f"out={tmp_path / 'run'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < 0.2 and rows[-1]["eval/accuracy"] > 0.6
    # The sampler's logprobs are the trainer's, to float32: were a sync left out, k3 would be 1e-3 and more.
    assert all(row["kl/sampler_trainer_k3"] < 1e-8 and row["sync/version_lag"] == 0 for row in rows[1:])
    assert DeploymentManager().running() == {}
