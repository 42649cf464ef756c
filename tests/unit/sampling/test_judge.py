"""A judge behind a real HTTP server that fails in every way: scores, retries, errors, cache, limits, and a killed run."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtools import SMALL, here, rows, start, timeless, train, write  # noqa: F401 - here is a fixture
from waiting import WAIT_S

from cookbook.data import RenderedPrompt, Row
from cookbook.data.formats import Chat, Plain
from cookbook.data.messages import ChatMessage
from cookbook.errors import BadRowError, ConfigError, RolloutError
from cookbook.sampling.rewards import RewardRunner
from cookbook.sampling.rewards import judge as judges
from cookbook.sampling.rewards.judge import Judge
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Sample

pytestmark = pytest.mark.usefixtures("here")

HANG, DROP = "hang", "drop"


class JudgeServer(ThreadingHTTPServer):
    """Answers as ``script`` says: a function of the request and of its number among equal ones, from 0."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests = []  # (path, headers, body)
        self.answered = Counter()
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        """The client has closed the connection: it was killed, or has reached its time limit."""

    @property
    def asked(self):
        return Counter(json.dumps(body, sort_keys=True) for _, _, body in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = json.dumps(body, sort_keys=True)
        with server.lock:
            number = server.asked[key]
            server.requests.append((self.path, dict(self.headers), body))
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        reply = server.script(body, number)
        with server.lock:
            server.running -= 1
        if reply == HANG:
            server.ended.wait(WAIT_S)
        if reply in (HANG, DROP):
            self.close_connection = True
            return
        status, content, *headers = reply if isinstance(reply, tuple) else (200, completion(reply))
        data = content.encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        with server.lock:
            server.answered[key] += 1

    def log_message(self, *_):
        pass


def completion(text, reason="stop"):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})


@pytest.fixture
def serving():
    """``serving(script)``: a server of its own, stopped after the test."""
    servers = []

    def make(script):
        servers.append(JudgeServer(script if callable(script) else lambda body, number: script))
        return servers[-1]

    yield make
    for server in servers:
        server.ended.set()
        server.shutdown()
        server.server_close()


def judge_of(server, **more):
    fields = {"rubric": None, "backoff_s": 0.001, "timeout_s": 20.0, "cache": "cache", **more}
    return Judge(url=server.url, model="m", **fields)


def scores(judge, *completions, row=None, example=None):
    """The rewards of completions of one prompt, as a run asks for them."""
    example = example or Plain("here:1", "6*7=")
    prompt = RenderedPrompt([1], Row("rows.jsonl:7", row or {}), "<s>6*7=", "6*7=", example)
    attempts = [Trajectory.single([1], "<s>6*7=", Sample([5], [-1.0], "stop", 0), text) for text in completions]
    with closing(RewardRunner(judge)) as runner:
        return [score.value for score in runner.submit_attempts(prompt, attempts)()]


def test_the_request_has_the_rubric_with_its_values_and_the_answer_becomes_a_reward(serving, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    write("rubric.txt", 'Task: {prompt}\nGold: {answer} of {facts}\nSaid: {completion}\nJSON: {"a": 1}\n')
    server = serving("Fine.\nScore: 7")
    judge = judge_of(server, rubric="rubric.txt", api_key_env="MY_KEY", request={"temperature": None, "top_p": 0.5})
    assert scores(judge, "It is {answer}", row={"answer": "42", "facts": [1, "é"]}) == [0.7]
    ((path, headers, body),) = server.requests
    question = (
        'Task: 6*7=\nGold: 42 of [1, "é"]\nSaid: It is {answer}\nJSON: {"a": 1}\n\n'
        "End with one line of the form 'Score: N', where N is a number from 0 (worst) to 10 (best)."
    )
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {"model": "m", "messages": [{"role": "user", "content": question}], "top_p": 0.5}
    assert "secret" not in repr(judge) + judge.fingerprint() + "".join(one.read_text() for one in Path("cache").rglob("*.json"))


def test_a_conversation_reaches_the_judge_without_the_marks_of_the_chat_template(serving):
    write("rubric.txt", "{prompt}\n---\n{trajectory}\n---")
    server = serving("Score: 10")
    chat = Chat("here:1", (ChatMessage("system", "Be brief."), ChatMessage("user", "6*7=")))
    assert scores(judge_of(server, rubric="rubric.txt"), "42", example=chat) == [1.0]
    prompt = "[system]\nBe brief.\n\n[user]\n6*7="
    assert server.requests[0][2]["messages"][0]["content"].startswith(
        f"{prompt}\n---\n{prompt}\n\n[assistant]\n42\n---\n\nEnd with"
    )


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 0.7),
        ("Good.\n\n**Score: 7.5/10**\n", 0.75),
        ("score : 0", 0.0),
        ("### Score: **10**.", 1.0),
        ("Score: 3\nScore: 4", 0.4),
        ("Score: 7\nThat is all.", None),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: 7/5", None),
        ("Score: seven", None),
        ("Score: 7 or 8", None),
        ("The score: 7", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_last_line_alone_is_the_score(answer, score):
    assert Judge(url="http://localhost:1/v1", model="m").score(answer) == score


class Timeouts:
    """``asyncio.timeout`` of a judge, for one request at a time, which the test ends."""

    def timeout(self, limit_s):
        self.loop, self.latest = asyncio.get_running_loop(), asyncio.timeout(None)
        return self.latest

    def end(self):
        self.loop.call_soon_threadsafe(lambda: self.latest.reschedule(self.loop.time()))


def test_every_failure_is_retried(serving, monkeypatch):
    """One completion meets them all, in turn; the answer without a score is followed by a correction."""
    replies = [
        (500, "broken"), (503, "busy", ("Retry-After", "0")), (429, "slow down"), DROP, HANG, (200, "<html>no JSON"),
        (200, '{"choices": []}'), (200, '{"choices": [{"message": {"content": null}}]}'), "I like it", "Score: 4",
    ]  # fmt: skip
    said, timeouts = iter(replies), Timeouts()
    monkeypatch.setattr(judges, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeouts.timeout}))

    def reply(body, number):
        if (found := next(said)) == HANG:
            timeouts.end()
        return found

    server = serving(reply)
    assert scores(judge_of(server, retries=len(replies) - 1), "42") == [0.4]
    assert len(server.requests) == len(replies)
    last = server.requests[-1][2]["messages"]
    assert [one["role"] for one in last] == ["user", "assistant", "user"] and last[1]["content"] == "I like it"
    assert last[2]["content"].startswith("End with one line of the form 'Score: N'")
    assert all(one[2]["messages"] == last[:1] for one in server.requests[:-1])


@pytest.mark.parametrize(
    ("reply", "asked", "message"),
    [
        ((500, "a\nb" + "x" * 200), 3, "HTTP 500, '...xxx"),
        (HANG, 3, "no answer after 0.3 s (reward.timeout_s) (3 attempts); check the judge, or raise reward.retries"),
        (DROP, 3, "Server disconnected without sending a response. (3 attempts); check the judge"),
        ((200, "[]"), 3, "expected a chat completion, got '[]' (3 attempts)"),
        ("Great!", 3, "no last line 'Score: N' with 0 <= N <= 10, got 'Great!' (3 attempts); check the judge"),
        ((200, completion("Well", "length")), 3, "got 'Well', cut at its token limit (reward.request) (3 attempts)"),
        ((401, "who?"), 1, "HTTP 401, 'who?'; set reward.api_key_env to the environment variable that holds the key"),
        ((404, "no m"), 1, "HTTP 404, 'no m'; fix reward.url or reward.model"),
        ((400, "too long"), 1, "HTTP 400, 'too long'; fix reward.request, or shorten the rubric or the row"),
    ],
)
def test_a_failure_that_lasts_names_the_row_and_is_not_stored(serving, reply, asked, message):
    server = serving(reply)
    with pytest.raises(RolloutError) as error:
        scores(judge_of(server, retries=2, timeout_s=0.3 if reply == HANG else 20.0), "42")
    assert str(error.value).startswith(f"rows.jsonl:7: reward: the judge at {server.url}/chat/completions: ")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert len(server.requests) == asked and not list(Path().rglob("*.json"))


def test_an_endpoint_that_is_not_there_names_the_row(serving):
    server = serving("Score: 1")
    server.shutdown()
    server.server_close()
    with pytest.raises(
        RolloutError, match=r"^rows\.jsonl:7: reward: the judge at .*: All connection attempts failed \(1 attempt\)"
    ):
        scores(judge_of(server, retries=0), "42")


def test_nothing_is_asked_twice(serving):
    """Equal completions of a group, a later process, a server at another address; other text is another request."""
    server = serving(lambda body, number: time.sleep(0.05) or f"Score: {len(body['messages'][0]['content']) % 7}")
    first = scores(judge_of(server), "42", "42", "about 40", "42")
    assert len(server.requests) == 2 and first[0] == first[1] == first[3]
    other = serving("Score: 0")
    assert scores(judge_of(other), "42", "about 40") == [first[0], first[2]] and not other.requests
    write("rubric.txt", "Other words: {completion}")
    scores(judge_of(server, rubric="rubric.txt"), "42")
    assert len(server.requests) == 3
    # Without a cache, and with a damaged file, the judge is asked.
    scores(judge_of(server, cache=None), "42")
    for path in Path("cache").rglob("*.json"):
        path.write_text("{")
    scores(judge_of(server), "42")
    assert max(server.asked.values()) == 3 and len(server.requests) == 5
    assert scores(judge_of(other), "42") == [first[0]] and not other.requests


def test_another_model_and_another_request_are_asked(serving):
    server = serving("Score: 1")
    judge = judge_of(server)
    for one in (judge, replace(judge, model="other"), replace(judge, request={"temperature": 1.0})):
        scores(one, "42")
        scores(one, "42")
    assert len(server.requests) == 3


def test_the_pause_that_the_server_asks_for_is_made(serving, monkeypatch):
    replies = iter([(429, "slow down", ("Retry-After", "7")), (503, "busy", ("Retry-After", "soon")), "Score: 1"])
    server, pauses = serving(lambda body, number: next(replies)), []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(judges, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    assert scores(judge_of(server), "42") == [0.1]
    assert pauses[0] == 7.0 and 0.0 < pauses[1] <= 0.002


def test_the_prompt_of_a_later_turn_is_all_that_was_said_before():
    write("rubric.txt", "{prompt}\n---\n{completion}")
    judge = Judge(url="http://localhost:1/v1", model="m", rubric="rubric.txt")
    said = [("user", "6*7="), ("assistant", "41"), ("user", "Sure?"), ("assistant", "42")]
    trajectory = [{"role": role, "content": content} for role, content in said]
    [question] = judge._body("42", {}, trajectory)["messages"]
    assert question["content"].startswith("[user]\n6*7=\n\n[assistant]\n41\n\n[user]\nSure?\n---\n42\n\nEnd with")


def test_a_cache_that_cannot_be_written_is_reported(serving):
    write("cache", "a file")
    with pytest.raises(RolloutError, match=r"^rows\.jsonl:7: reward: reward\.cache: .*, got cache/.*; free space or choose"):
        scores(judge_of(serving("Score: 1")), "42")


def test_workers_bound_the_requests_at_a_time(serving):
    """Each request waits until three run, so that fewer would never finish, and then for a fourth."""
    together = threading.Barrier(3)

    def script(body, number):
        together.wait(WAIT_S)
        time.sleep(0.02)
        return "Score: 1"

    server = serving(script)
    assert scores(judge_of(server, workers=3), *(f"{number}" for number in range(12))) == [0.1] * 12
    assert server.most_running == 3


def test_closing_does_not_wait_for_the_judge(serving):
    server = serving(HANG)
    runner = RewardRunner(judge_of(server, timeout_s=None))
    pending = runner.submit("42", Row("here:1", {}))
    while not server.requests:
        time.sleep(0.01)
    runner.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "judge"]
    with pytest.raises(RolloutError, match="CancelledError"):
        pending()


def test_a_row_without_a_column_of_the_rubric_is_a_bad_row(serving):
    write("rubric.txt", "{completion} {gold}")
    with pytest.raises(
        BadRowError, match=r"^rows\.jsonl:7: reward: reward\.rubric names \{gold\}, the row has a, completion, "
    ):
        scores(judge_of(serving("Score: 1"), rubric="rubric.txt"), "42", row={"a": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:8000/v1"}, r"reward\.url: expected http://HOST:PORT/v1, got 'localhost:8000/v1'"),
        ({"rubric": "no.txt"}, r"reward\.rubric: No such file or directory, got 'no\.txt'; give a text file"),
        ({"rubric": "bare.txt"}, r"reward\.rubric: bare\.txt has neither \{completion\} nor \{trajectory\}"),
        ({"api_key_env": "NO_SUCH_KEY"}, r"reward\.api_key_env: the environment variable NO_SUCH_KEY is not set; export it"),
        ({"max_score": 0.0}, r"reward\.max_score must be above 0, got 0"),
        ({"workers": 0, "timeout_s": None}, r"reward\.workers must be at least 1 for a judge, got 0"),
        ({"retries": -1}, r"reward: retries=-1 and backoff_s=1\.0 must be at least 0"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(fields, message):
    write("bare.txt", "How good is it?")
    with pytest.raises(ConfigError, match=message):
        Judge(**{"url": "http://localhost:1/v1", "model": "m", **fields})


def test_the_rubric_belongs_to_the_fingerprint_and_the_address_does_not():
    def fingerprint(**fields):
        return Judge(**{"url": "http://localhost:1/v1", "model": "m", **fields}).fingerprint()

    write("rubric.txt", "{completion}")
    before = fingerprint(rubric="rubric.txt")
    assert fingerprint(rubric="rubric.txt", url="http://localhost:2/v1", workers=2, cache=None) == before
    write("rubric.txt", "{completion}!")
    assert fingerprint(rubric="rubric.txt") != before != fingerprint()


def graded(body, number):
    """A score that depends on the whole request and on nothing else."""
    return f"Score: {sum(body['messages'][0]['content'].encode()) % 11}"


def words_of(server, name):
    judge = ["reward=judge", f"reward.url={server.url}", "reward.model=m", f"reward.cache={name}"]
    return [*SMALL["grpo"], *judge, f"out={name}-run"]


@pytest.mark.slow
def test_a_run_asks_each_request_once(serving):
    server = serving(graded)
    assert train(*words_of(server, "a"), "recipe.steps=1", "eval.every=null") == 0
    # Four held-out prompts, and 6 x 4 completions of the training prompts, of which some are equal.
    assert len(server.requests) > 8 and set(server.asked.values()) == {1}
    assert 0 < rows("a-run")[-1]["reward/mean"] < 1


@pytest.mark.slow
def test_a_run_that_is_killed_asks_nothing_twice_and_ends_as_if_undisturbed(serving):
    server = serving(graded)
    words = ["checkpoint.every=1", "model=tiny"]
    assert train(*words_of(server, "a"), *words) == 0
    num_requests = len(server.requests)
    held, release = threading.Event(), threading.Event()

    def holding(body, number):
        if sum(holder.answered.values()) >= 0.6 * num_requests and not release.is_set():
            held.set()
            release.wait(300)
        return graded(body, number)

    holder = serving(holding)
    process = start([*words_of(holder, "b"), *words])
    assert held.wait(300)
    # Answers that have arrived are stored a moment later.
    limit = time.monotonic() + 60
    while len(list(Path("b").rglob("*.json"))) < sum(holder.answered.values()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    stored = set(holder.answered)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with holder.lock:
        holder.requests.clear()
    release.set()
    assert train(*words_of(holder, "b"), *words) == 0
    assert holder.asked and not stored & set(holder.asked) and set(holder.asked.values()) == {1}
    assert timeless("b-run") == timeless("a-run")
    # A repeated run asks nothing.
    assert train(*words_of(server, "a"), *words, "out=again") == 0
    assert len(server.requests) == num_requests and timeless("again") == timeless("a-run")
