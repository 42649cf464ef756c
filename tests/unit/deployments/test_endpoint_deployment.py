"""The endpoint in front of a deployment of this file, which does what a test needs: waits, fails, or deletes checkpoints."""

from __future__ import annotations

import asyncio
import shutil
import threading
import weakref
from pathlib import Path

import httpx
import pytest
import servertools
from servertools import wait_until
from waiting import WAIT_S

from cookbook.backends.local.sample_queue import LocalSampler
from cookbook.deployments.vllm.http import ServerUnavailableError
from cookbook.errors import RolloutError
from cookbook.futures import Future, done
from cookbook.server.serve import drain
from cookbook.server.state.deployed import KEPT_VERSIONS, Deployed, Turns
from cookbook.types import Sample, SampleResponse, SamplingParams

BODY = {"model": "tiny", "prompt": "3+4=", "max_tokens": 6}
PARAMS = SamplingParams(max_tokens=6)


class Answer(Future):
    def stop(self) -> None:
        if not self.done():
            self.set_exception(RolloutError("stopped in the deployment"))


class Version:
    """A sampler of the deployment."""

    def __init__(self, deployment, folder) -> None:
        self.deployment, self.folder = deployment, folder

    def sample(self, prompt, num_samples, params):
        answer = Answer()
        self.deployment.answers.append(answer)
        if not self.deployment.waits:
            answer.set_result(SampleResponse([Sample([1], [-1.0], "stop")] * num_samples))
        return answer

    def reload(self) -> None:
        self.deployment.fail()


class Deployment:
    """Its own config. ``error``: raised by each load; ``waits``: whether answers wait for the test."""

    def __init__(self) -> None:
        self.error, self.waits, self.answers, self.saved = None, False, [], 0
        self.versions = weakref.WeakSet()

    def deploy(self, trainer, *, live):
        self.trainer = trainer
        return self

    def load(self, step):
        self.saved += 1
        folder = Path(self.trainer.save_weights_for_sampler_ext(f"v{self.saved}").result().path)
        self.fail()
        version = Version(self, folder)
        self.versions.add(version)
        for path in folder.parent.iterdir():
            if path not in {one.folder for one in self.versions}:
                shutil.rmtree(path)
        return done(version)

    def fail(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        pass


@pytest.fixture
def deployment():
    return Deployment()


@pytest.fixture
def server(tiny_folder, tmp_path, deployment):
    with servertools.running(tiny_folder, tmp_path, names=["tiny"]) as running:
        running.service.deployed = Deployed(deployment, running.service.host, tmp_path)
        yield running


def versions(server, count):
    """Samplers that differ, on the base model. Their engines are made when they are first used."""
    engine, names = server.service.host.base_sampler().engine(), []

    def make():
        names.append(threading.current_thread().name)
        return engine

    queue = server.service.host.sample_queue(server.service.host.worker)
    return [LocalSampler(queue, make, 0) for _ in range(count)], names


def sampled(server, weights):
    """The sample of a request to ``weights``, after it is done."""
    return server.call(lambda: asyncio.wrap_future(server.service.deployed.sample(weights, [5], 1, PARAMS, None)))


def test_few_versions_are_kept_and_engines_are_made_on_the_worker(server, deployment, tmp_path):
    weights, names = versions(server, KEPT_VERSIONS + 2)
    for one in weights:
        assert sampled(server, one).sequences[0].tokens == [1]
        assert len(list((tmp_path / "deployed").iterdir())) <= KEPT_VERSIONS
    assert names == [server.service.host.worker.thread.name] * len(weights)
    before = deployment.saved
    for one in weights[-KEPT_VERSIONS:]:
        sampled(server, one)
    assert deployment.saved == before, "the kept versions are not saved again"
    sampled(server, weights[0])
    assert deployment.saved == before + 1


@pytest.mark.parametrize("error", [RolloutError("no memory"), OSError(28, "full"), ServerUnavailableError("busy", 503)])
def test_a_failed_load_is_an_error_of_the_server(server, deployment, tmp_path, error):
    """Of a first load, which leaves no checkpoint, and of a reload."""
    for num_checkpoints in range(2):
        deployment.error = error
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_S)
        assert answer.status_code == 503 and str(error) in answer.json()["error"]["message"]
        assert len(list((tmp_path / "deployed").iterdir())) == num_checkpoints
        deployment.error = None
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_S).status_code == 200


def test_a_stopped_request_returns_its_tokens_and_its_scores_are_not_computed(server, deployment):
    """While it waits for the turn of its weights, and while the deployment computes it."""
    deployment.waits = True
    [first, second], _ = versions(server, 2)
    deployed = server.service.deployed
    scores = first.compute_logprobs([5, 6])
    [running] = server.call(lambda: [deployed.sample(first, [5], 1, PARAMS, scores)])
    wait_until(lambda: deployment.answers)
    scored = second.compute_logprobs([5, 6])
    [waiting] = server.call(lambda: [deployed.sample(second, [5], 1, PARAMS, scored)])
    server.call(lambda: asyncio.sleep(0.05))
    for future in (waiting, running):
        server.call(future.stop)
        with pytest.raises(RolloutError, match="stopped on request"):
            future.result(timeout=WAIT_S)
    assert scores.is_stopped and scored.is_stopped
    wait_until(lambda: not server.call(lambda: deployed._tasks))
    assert len(deployment.answers) == 1 and not deployed._turns._waiting and not deployed._turns._num_active


def test_a_shutdown_ends_long_answers_with_status_503(server, deployment):
    """While the worker is busy with a long call."""
    assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_S).status_code == 200
    deployment.answers.clear()
    deployment.waits = True
    free = threading.Event()
    server.service.host.worker.submit(free.wait)
    answers = []
    asked = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_S))
    )
    asked.start()
    wait_until(lambda: deployment.answers)
    server.call(lambda: drain(server.service, 0.2))
    asked.join()
    free.set()
    assert answers[0].status_code == 503 and "the server stops" in answers[0].json()["error"]["message"]
    assert deployment.answers[0].done() and not server.service.endpoint.num_unfinished


def test_a_turn_that_is_cancelled_is_passed_on():
    """While it waits, and after it was given and before its task runs."""

    async def run():
        turns, ran, free = Turns(), [], asyncio.Event()

        async def use(version):
            async with turns.of(version):
                ran.append(version)
                await free.wait()
            if version == "A":
                # C was given its turn just now.
                tasks[2].cancel()

        tasks = [asyncio.create_task(use(version)) for version in "ABCD"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        free.set()
        await asyncio.wait_for(tasks[3], 5)
        return ran

    assert asyncio.run(run()) == ["A", "D"]
