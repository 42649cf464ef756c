"""Failed requests: which are retried, which are left out, which end the run, and the state of the run then."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tiny
from runtools import here, rows, timeless, train  # noqa: F401 - here is a fixture
from waiting import WAIT_S, until

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.deployments.vllm.http import Client
from cookbook.deployments.vllm.sampler import DeploymentSampler, Pool
from cookbook.errors import ConfigError, RolloutError, SampleRefusedError, SamplerUnavailableError
from cookbook.futures import Future, done
from cookbook.sampling import episodes, rollouts
from cookbook.sampling.episodes import Retrier
from cookbook.sampling.rewards import Format, Python, RewardRunner
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import Sample, SampleResponse

FLAKY = ["deployment._target_=flaky.FlakyConfig"]
GRPO = ["recipe=grpo", "recipe.steps=2", "recipe.prompts_per_step=6", "recipe.group_size=3", "data.limit=12", "eval.limit=4"]
GRPO += ["eval.every=null", "rollout.log_samples=18"]


@pytest.fixture(autouse=True)
def waits(monkeypatch) -> list[float]:
    """The seconds of each wait before a retry."""
    found: list[float] = []
    monkeypatch.setattr(episodes.time, "sleep", found.append)
    return found


# Which errors are which


def answer(token: int = 1) -> Future[SampleResponse]:
    return done(SampleResponse([Sample([token], [0.0], "stop")]))


def failure(error: BaseException) -> Future[SampleResponse]:
    future: Future[SampleResponse] = Future()
    future.set_exception(error)
    return future


def asked(outcomes, retries=2, in_a_row=16):
    """Results of requests, each with its outcomes attempt by attempt: the answers, and the reports of the failed ones."""
    attempts = [iter(one) for one in outcomes]
    arrived = {}

    def request(place):
        found = next(attempts[place])
        return failure(found) if isinstance(found, Exception) else answer(found)

    requests = [lambda place=place: request(place) for place in range(len(outcomes))]
    unanswered = Retrier(retries, in_a_row).sample(
        requests, lambda place, samples: arrived.update({place: samples[0].tokens[0]})
    )
    return arrived, unanswered


PASSING = SamplerUnavailableError("busy")
REFUSED = SampleRefusedError("too long")


def test_a_temporary_failure_is_retried_and_then_left_out(waits):
    arrived, unanswered = asked([[5], [PASSING, 6], [ConnectionError(), TimeoutError(), 7], [PASSING] * 3])
    assert arrived == {0: 5, 1: 6, 2: 7}
    assert unanswered.failed == {3: PASSING} and unanswered.num_retries == 3 + 2
    assert waits == [0.25, 0.5]


def test_it_makes_no_difference_whether_the_call_or_its_future_fails():
    attempts = iter([PASSING, 5])

    def request():
        if isinstance(found := next(attempts), Exception):
            raise found
        return answer(found)

    arrived = {}
    unanswered = Retrier(1, 16).sample([request], lambda place, samples: arrived.update({place: samples[0].tokens}))
    assert arrived == {0: [5]} and not unanswered.failed and unanswered.num_retries == 1


def test_what_is_refused_is_left_out_without_a_retry(waits):
    arrived, unanswered = asked([[REFUSED], [5]])
    assert arrived == {1: 5} and unanswered.failed == {0: REFUSED} and unanswered.num_retries == 0 and waits == []


@pytest.mark.parametrize("error", [RolloutError("other weights"), ZeroDivisionError("a bug")])
def test_anything_else_is_raised_unchanged(error):
    with pytest.raises(type(error), match=str(error)):
        asked([[5], [error], [PASSING, 6]])


def test_without_any_sample_requests_are_retried_until_one_succeeds(waits):
    """While a step has no samples at all, the limit of retries does not apply."""
    arrived, unanswered = asked([[PASSING] * 5 + [3], [PASSING] * 9], retries=0)
    assert arrived == {0: 3} and set(unanswered.failed) == {1} and len(waits) == 5
    with pytest.raises(RolloutError, match="all 2 requests were refused; the first: too long"):
        asked([[REFUSED], [REFUSED]])


def test_the_limit_of_consecutive_failures_ends_it():
    with pytest.raises(RolloutError, match="sampling: 4 consecutive requests failed, the last with: busy; fix the deployment"):
        asked([[5], *[[PASSING] * 9] * 4, [6]], in_a_row=4)
    arrived, _ = asked([*[[PASSING, 1]] * 3, [6], *[[PASSING, 2]] * 3], in_a_row=4)
    assert len(arrived) == 7


def test_they_are_counted_from_one_batch_to_the_next():
    retrier = Retrier(0, 3)
    for _ in range(2):
        retrier.sample([lambda: answer(), lambda: failure(PASSING)], lambda *_: None)  # an answer in between resets the count
    retrier.sample([lambda: answer(), lambda: failure(PASSING), lambda: failure(PASSING)], lambda *_: None)
    with pytest.raises(RolloutError, match="3 consecutive requests failed"):
        retrier.sample([lambda: failure(PASSING), lambda: answer()], lambda *_: None)


def test_the_order_of_answers_makes_no_difference():
    """Three failures in a row by place: whichever comes first, the limit of three is reached, and one of four is not."""
    for order in itertools.permutations(range(5)):
        for limit in (3, 4):
            futures = [Future() for _ in range(5)]
            errors = {1, 2, 3}

            def answer_all(futures=futures, order=order, errors=errors):
                for place in order:
                    if place in errors:
                        futures[place].set_exception(PASSING)
                    else:
                        futures[place].set_result(SampleResponse([]))

            thread = threading.Thread(target=answer_all)
            thread.start()
            requests = [lambda future=future: future for future in futures]
            if limit == 3:
                with pytest.raises(RolloutError, match="3 consecutive requests failed"):
                    Retrier(0, limit).sample(requests, lambda *_: None)
            else:
                assert set(Retrier(0, limit).sample(requests, lambda *_: None).failed) == errors
            thread.join()


@pytest.mark.parametrize(("key", "least"), [("retries", 0), ("max_consecutive_failures", 1)])
def test_limits_have_bounds(key, least):
    with pytest.raises(ConfigError, match=rf"rollout\.{key} must be at least {least}, got {least - 1}"):
        RolloutConfig(**{key: least - 1})


# Whole runs


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_survives_that_30_percent_fail_and_reports_it(capsys):
    assert train(*GRPO, *FLAKY, "+deployment.rate=0.3", "rollout.retries=0", "out=run") == 0
    found = rows("run")
    assert [row["step"] for row in found] == [0, 1, 2]
    left_out = [int(row["rollout/failed"]) for row in found[1:]]
    assert sum(left_out) > 0 and max(left_out) < 6
    fails = np.random.default_rng(0).random(4 + 2 * 6 + 4) < 0.3  # the evaluation, two steps, the evaluation
    expected = [int(fails[4 + 6 * step : 10 + 6 * step].sum()) for step in range(2)]
    assert left_out == expected
    assert [row["eval/failed"] for row in (found[0], found[-1])] == [fails[:4].sum(), fails[-4:].sum()]
    out, err = capsys.readouterr()
    assert f"sampling: 0 retried requests, {sum(left_out)} prompts left out (log.txt names their rows)" in out
    assert "Traceback" not in err
    log = Path("run/log.txt").read_text()
    assert log.count("left out, its completions could not be sampled: the server is on fire") == sum(left_out)
    assert "prompts_train.jsonl:" in log


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory):
    """The same run without failures."""
    folder = tmp_path_factory.mktemp("untroubled") / "run"
    assert train(*GRPO, f"out={folder}") == 0
    return folder


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_failures_that_pass_change_no_sample(untroubled):
    assert train(*GRPO, *FLAKY, "+deployment.rate=0.3", "+deployment.error=timeout", "rollout.retries=20", "out=run") == 0
    assert sum(row.get("rollout/retries", 0) for row in rows("run")) > 0
    assert not any(row["rollout/failed"] for row in rows("run")[1:])
    first, expected = ([row for row in rows(out, "samples.jsonl") if row["step"] == 1] for out in ("run", untroubled))
    assert first == expected and len(first) == 18
    for row, plain in zip(timeless("run"), timeless(untroubled), strict=True):
        # What is computed together differs, and with it the last bits of float32 logprobs.
        found = {key: value for key, value in row.items() if key != "rollout/retries"}
        assert found == pytest.approx({key: plain[key] for key in found}, rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_an_outage_ends_the_run_as_it_was_after_its_last_step(untroubled, capsys):
    words = [*GRPO, *FLAKY, "checkpoint.every=1", "out=run"]
    # 4 requests of the evaluation, 6 of step 1: the second step has none of its samples
    assert train(*words, "+deployment.outage=10") == 2
    assert capsys.readouterr().err == (
        "error: sampling: 16 consecutive requests failed, the last with: the server is on fire; fix the deployment and run the "
        "same command to resume, or raise rollout.max_consecutive_failures\n"
    )
    assert [row["step"] for row in rows("run")] == [0, 1]
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000001"]
    status = json.loads(Path("run/status.json").read_text())
    assert (status["state"], status["step"], status["saved_step"]) == ("failed", 1, 1)
    assert train(*words) == 0
    assert timeless("run") == timeless(untroubled)  # step 2 took the prompts that the outage had not let through


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_an_outage_from_the_start_leaves_nothing(capsys):
    assert train(*GRPO, *FLAKY, "+deployment.outage=0", "out=run") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("error", ["fatal", "bug"])
@pytest.mark.slow
def test_errors_that_concern_all_requests_end_it_immediately(error, capsys):
    words = [*GRPO, *FLAKY, "+deployment.outage=4", f"+deployment.error={error}", "out=run"]
    if error == "bug":
        with pytest.raises(ZeroDivisionError):
            train(*words)
    else:
        assert train(*words) == 2
        assert capsys.readouterr().err == "error: the server is on fire\n"
    assert [row["step"] for row in rows("run")] == [0] and not Path("run/checkpoints").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_an_evaluation_by_itself_survives_too(capsys):
    assert run(["eval", "tiny", "eval.limit=24", *FLAKY, "+deployment.rate=0.3", "rollout.retries=0", "out=found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    failed = found["metrics"]["eval/failed"]
    assert failed == (np.random.default_rng(0).random(24) < 0.3).sum() > 0
    assert len(found["completions"]) == 24 - failed
    assert found["metrics"]["eval/reward"] == np.mean([one["reward"] for one in found["completions"]])


# A server


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.status_of(body["token_ids"][0])
        if status == "hangs":
            self.server.ended.wait(WAIT_S)
            self.close_connection = True
            return
        content = json.dumps(self.server.samples(body) if status == 200 else {"error": "no"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args) -> None:
        """Nothing to stderr."""


class Server(ThreadingHTTPServer):
    """Answers as vLLM does; with the statuses of ``script`` first, by the first token of the prompt."""

    daemon_threads = True

    def __init__(self, script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = {token: list(statuses) for token, statuses in script.items()}
        self.asked: list[int] = []
        self.ended = threading.Event()

    def status_of(self, token):
        self.asked.append(token)
        waiting = self.script.get(token)
        return waiting.pop(0) if waiting else 200

    def samples(self, body):
        token = body["token_ids"][0]
        content = [{"token_id": token, "logprob": -0.5}]
        span = {"version": "v", "start": 0, "end": 1}
        one = {"finish_reason": "stop", "token_ids": [token], "weight_versions": [span], "logprobs": {"content": content}}
        return {"choices": [{"index": index, **one} for index in range(body["sampling_params"]["n"])]}


@pytest.fixture
def serving():
    """``serving(script)``: a sampler of such a server, whose client does not ask again by itself."""
    servers, pools = [], []

    def serve(script) -> tuple[DeploymentSampler, Server]:
        web = Server(script)
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((web, thread))
        pools.append(Pool([Client(f"http://127.0.0.1:{web.server_port}", timeout_s=3.0, retries=0)], 64, 8))
        return DeploymentSampler(pools[-1], 3, "v"), web

    yield serve
    for pool in pools:
        pool.close()
    for web, thread in servers:
        web.ended.set()
        web.shutdown()
        thread.join()
        web.server_close()


PROMPTS = [RenderedPrompt([token], Row(f"here:{token}", {}), "", "") for token in range(40, 46)]


def rolled_out(sampler, runner=None, **config):
    renderer = Renderer(tiny.tokenizer(), tiny.CONTEXT)
    return rollouts.sample_groups(
        sampler, PROMPTS, 2, RolloutConfig(**{"max_tokens": 16, **config}), renderer, seed=0, runner=runner
    )


@pytest.mark.slow
def test_a_server_that_sometimes_fails(serving):
    sampler, web = serving({40: [500], 42: [503, 503], 43: [400], 45: ["hangs", "hangs", "hangs"]})
    found = rolled_out(sampler)
    assert [group.prompt.row.where for group in found.groups] == ["here:40", "here:41", "here:42", "here:44"]
    assert all(
        len(group.trajectories) == 2 and group.trajectories[0].turns[0].tokens == group.prompt.tokens for group in found.groups
    )
    assert isinstance(found.requests.failed[3], SampleRefusedError) and ": 400: " in str(found.requests.failed[3])
    assert "no answer (timed out)" in str(found.requests.failed[5])
    assert web.asked.count(43) == 1 and web.asked.count(45) == 3
    assert found.requests.num_retries == 1 + 2 + 2


def test_a_prompt_that_a_server_refuses_is_replaced(serving):
    """The first four prompts have one refused; of the further ones, the server refuses the first permanently."""
    sampler, web = serving({42: [400], 44: [503, 400]})
    renderer, further = Renderer(tiny.tokenizer(), tiny.CONTEXT), iter(PROMPTS[4:])
    judge = RewardRunner(Format("x"))
    config = RolloutConfig(max_tokens=16, refill=1.5)
    found = rollouts.sample_groups(
        sampler, PROMPTS[:4], 2, config, renderer, 0, runner=judge, further=lambda count: [next(further) for _ in range(count)]
    )
    # All answers of the server are equal, so that every group ties and the step stops at its limit of six prompts.
    assert [group.prompt.row.where for group in found.groups] == ["here:40", "here:41", "here:43", "here:45"]
    assert sorted(found.requests.failed) == [2, 4] and found.requests.num_retries == 1
    assert sorted(set(web.asked)) == list(range(40, 46)) and found.metrics()["refill/groups_dropped"] == 4.0


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_only_fails(serving, status):
    sampler, web = serving({token: [status] * 99 for token in range(40, 46)})
    with pytest.raises(RolloutError, match=rf"9 consecutive requests failed, the last with: http.*: {status}: no; fix"):
        rolled_out(sampler, max_consecutive_failures=9)
    assert 9 <= len(web.asked) <= 12


@pytest.mark.slow
def test_a_server_that_only_hangs_or_is_gone(serving):
    sampler, web = serving({token: ["hangs"] * 99 for token in range(40, 46)})
    with pytest.raises(RolloutError, match=r"6 consecutive requests failed, the last with: .*no answer \(timed out\)"):
        rolled_out(sampler, max_consecutive_failures=6)
    web.ended.set()
    web.shutdown()
    web.server_close()
    with pytest.raises(RolloutError, match=r"12 consecutive requests failed, the last with: .*no answer"):
        rolled_out(sampler, max_consecutive_failures=12)


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_does_not_want_us(serving, status):
    sampler, _ = serving({41: [status]})
    with pytest.raises(RolloutError, match=rf": {status}: no$"):
        rolled_out(sampler)


# Slow rewards


@pytest.mark.usefixtures("here")
def test_rewards_are_under_way_while_others_are_sampled(tmp_path):
    """The last prompt is answered once a reward has been called: code that waits for all samples first would deadlock."""
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n\n\ndef called(completion, row):\n    Path(row['note']).touch()\n    return 1\n"
    )
    note = tmp_path / "called"

    class Sampler:
        step = 0

        def sample(self, prompt, num_samples, params):
            if prompt.to_ints() != [45]:
                return done(SampleResponse([Sample([1], [0.0], "stop")] * num_samples))
            future: Future[SampleResponse] = Future()

            def answer_when_judged():
                try:
                    until(note.exists, lambda: "no reward was called")
                    future.set_result(SampleResponse([Sample([2], [0.0], "stop")] * num_samples))
                except AssertionError as error:
                    future.set_exception(error)

            threading.Thread(target=answer_when_judged).start()
            return future

    judge = RewardRunner(Python(f"{tmp_path}/mine.py:called"))
    prompts = [RenderedPrompt(one.tokens, Row(one.row.where, {"note": str(note)}), "", "") for one in PROMPTS]
    renderer = Renderer(tiny.tokenizer(), tiny.CONTEXT)
    found = rollouts.sample_groups(Sampler(), prompts, 2, RolloutConfig(), renderer, seed=0, runner=judge)
    judge.close()
    assert [group.rewards for group in found.groups] == [[1.0, 1.0]] * 6
