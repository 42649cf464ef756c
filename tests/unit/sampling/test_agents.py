"""Agents: token capture, programs that fail, what is left of killed runs, and runs that repeat."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtools import SMALL, here, rows, start, timeless, train, write  # noqa: F401 - here is a fixture
from transformers import AutoTokenizer
from waiting import WAIT_S, until

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import done
from cookbook.run.builder import episode_runner
from cookbook.sampling.environments import AgentEnvironment
from cookbook.sampling.environments.capture import AgentCall, Capture
from cookbook.sampling.episodes import Draw, Episodes, Retrier
from cookbook.sampling.trajectory import Trajectory
from cookbook.server import agents
from cookbook.types import Sample, SampleResponse, SamplingParams
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")

# The example without the package openai, which takes a second to import.
CALLS = """
import json, os, sys, time, urllib.error, urllib.request

def post(path, **body):
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))

def chat(messages, **more):
    return post("/chat/completions", model="policy", messages=messages, **more)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

row = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
"""
TWICE = """
messages = [user(row["prompt"])]
for reward in (1.0, 0.5):
    message = chat(messages)
    if message["content"].strip() == row["answer"]:
        break
    messages += [message, user("Try again.")]
else:
    reward = 0.0
print(json.dumps({"reward": reward, "tries": len(messages)}))
"""


def renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(packaged("data") / "tiny"))


def says(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answers(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_call_that_extends_another_has_its_tokens_and_shares_them_with_a_second_one():
    render = renderer()
    capture = Capture(render)
    stop = render.stop_token_ids[0]

    def called(messages: list[dict[str, str]], sampled: list[int]) -> list[int]:
        capture.observe(AgentCall(messages))
        prompt = list(capture.tokens)
        text = capture.add(Sample(sampled, [-1.0] * len(sampled), "stop")).text
        capture.answered(answers(text))
        return prompt

    # Half of a character: a tokenizer would write its text with other tokens.
    half = render.encode("é")[:1]
    text = render.text(half)
    assert render.encode(text) != half
    first = called([says("5+7=")], [*half, stop])
    second = called([says("5+7="), answers(f" {text}\n"), says("Sure?")], [*render.encode("yes"), stop])
    assert second[: len(first) + 2] == [*first, *half, stop]
    # A second call extends the first one: it has the same tokens as its prompt.
    third = called([says("5+7="), answers(text), says("Why?")], [*render.encode("so"), stop])
    assert third[: len(first) + 2] == [*first, *half, stop]
    fourth = called([says("5+7="), answers("13"), says("Sure?")], [stop])
    assert render.printed(fourth).count("13") == 1
    assert [len(branch) for branch in capture.branches] == [4, 3, 2]
    # Each completion is trained in one branch.
    weights = [float(sum(one.loss_fn_inputs["weights"].data)) for one in Trajectory(capture.branches, "done").datums(1.0)]
    assert weights == [2.0 + 4.0, 3.0, 1.0]
    other_tools = AgentCall([says("5+7="), answers("12"), says("Why?")], ({"type": "function"},))
    assert other_tools.extends(AgentCall([says("5+7=")]), answers("12")) is None
    plain = AgentCall("ab cd ef")
    assert plain.extends(AgentCall("ab"), answers(" cd")) == " ef" and plain.extends(AgentCall("ac"), answers(" cd")) is None


def test_a_call_continues_the_longest_call_that_it_extends():
    """It extends both earlier calls; the tokens of the later one include the answer in the middle as it was sampled."""
    render = renderer()
    capture = Capture(render)
    stop = render.stop_token_ids[0]
    half = render.encode("é")[:1]
    messages: list[dict[str, str]] = []
    prompts: list[list[int]] = []
    for question in ("1?", "2?", "3?"):
        messages = [*messages, says(question)]
        capture.observe(AgentCall(list(messages)))
        prompts.append(list(capture.tokens))
        text = capture.add(Sample([*half, stop], [-1.0] * (len(half) + 1), "stop")).text
        capture.answered(answers(text))
        messages = [*messages, answers(text)]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier) + len(half) + 1] == [*earlier, *half, stop]
    assert len(capture.branches) == 1


@contextlib.contextmanager
def played(program: str, **options: object) -> Iterator[Trajectory]:
    """Play two episodes of a program. All answers are ``one``. Yields the first trajectory; the second has to be equal."""
    Path("agent.py").write_text(CALLS + program)
    settings = {"timeout_s": WAIT_S, "max_turns": 3, **options}
    config = AgentEnvironment(command=f"{sys.executable} agent.py {{row}}", **settings)
    render = renderer()

    class Same:
        step = 3

        def sample(self, prompt: object, num_samples: int, params: SamplingParams) -> object:
            tokens = render.encode("one")[: params.max_tokens]
            return done(SampleResponse([Sample(tokens, [-1.0] * len(tokens), "length", 3)] * num_samples, None))

    row = Row("here:1", {"prompt": 'say; it\'s "one" $(exit 1)', "answer": "one"})
    prompt = RenderedPrompt([], row, "", "", Chat("here:1", ()))
    found: list[Trajectory] = []
    with contextlib.closing(episode_runner(config, render)) as runner:
        episodes = Episodes(render, Retrier(0, 4), None, runner)
        params = SamplingParams(max_tokens=8, seed=1, temperature=1.0, stop=list(render.stop_token_ids))
        episodes.play(Same(), [Draw(prompt, 2, params)], lambda _, trajectories: found.extend(trajectories))
    assert found[0].branches == found[1].branches and found[0].ended == found[1].ended
    yield found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "ended", "reward", "logged"),
    [
        (TWICE, "done", 1.0, ""),
        ("print(chat([user('a')])['content']); print('{\"reward\": 2, \"part\": 1}')", "done", 2.0, ""),
        ("chat([user('a')])\nraise ValueError('mine')", "error", -1.0, "exit code 1: ValueError: mine"),
        ("chat([user('a')]); print('good')", "error", -1.0, "has printed no reward, but 'good'"),
        ("chat([user('a')]); print('{\"reward\": NaN}')", "error", -1.0, "has printed no reward"),
        ("print(1)", "error", -1.0, "without a call of the model"),
        ("chat([{'role': 'user', 'content': [1]}]); print(1)", "error", -1.0, "HTTP Error 400"),
        ("for _ in range(5): chat([user('a')])", "max_turns", -1.0, ""),
        ("try:\n    for _ in range(5): chat([user('a')])\nexcept urllib.error.HTTPError: print(0.25)", "max_turns", 0.25, ""),
    ],
)
def test_a_program_ends_its_rollout_with_a_reason(program, ended, reward, logged, caplog):
    with played(program, on_error="end", error_reward=-1.0) as trajectory:
        assert (trajectory.ended, trajectory.reward) == (ended, reward)
        assert dict(trajectory.parts) == ({"part": 1.0} if "part" in program else {"tries": 1.0} if program is TWICE else {})
    assert logged in caplog.text


@pytest.mark.slow
def test_a_program_that_sleeps_ends_at_its_limit(monkeypatch, caplog):
    """The clock of the limit moves when both programs sleep."""
    clock = SimpleNamespace(monotonic=lambda: 3.1 if len(list(Path.cwd().glob("*.asleep"))) == 2 else 0.0, sleep=time.sleep)
    monkeypatch.setattr(agents, "time", clock)
    with played(
        "chat([user('a')])\nopen(f'{os.getpid()}.asleep', 'w')\ntime.sleep(600)",
        on_error="end",
        error_reward=-1.0,
        timeout_s=3.0,
    ) as trajectory:
        assert (trajectory.ended, trajectory.reward, dict(trajectory.parts)) == ("timeout", -1.0, {})
    assert "neither called the model nor ended in 3 s" in caplog.text


@pytest.mark.slow
def test_fail_ends_the_run_and_limits_of_a_call_count():
    with (
        pytest.raises(RolloutError, match=r"exit code 3; fix the environment, or set env\.on_error=drop"),
        played("chat([user('a')]); sys.exit(3)", on_error="fail"),
    ):
        pass
    with played("chat([user('a')], max_tokens=1)\nprint(1)") as trajectory:
        assert [len(turn.tokens) for turn in trajectory.turns] == [1] and trajectory.turns[0].step == 3
    with pytest.raises(ConfigError, match="no program 'nothing'"):
        AgentEnvironment(command="nothing {row}")


@pytest.mark.slow
def test_the_openai_package_calls_tools_streams_and_completes():
    pytest.importorskip("openai")
    program = """
import openai
client = openai.OpenAI(max_retries=0)
assert client.models.list().data[0].id == "policy"
parts = client.chat.completions.create(model="m", messages=[user("a")], stream=True, stream_options={"include_usage": True})
parts = list(parts)
said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert said == "one" and parts[-1].usage.completion_tokens > 0, said
answer = client.completions.create(model="m", prompt="a b", max_tokens=8, logprobs=0).choices[0]
assert answer.text == "one" and len(answer.logprobs.tokens) > 0
client.completions.create(model="m", prompt="a bone c", max_tokens=8)
for wrong in ({"n": 2}, {"top_logprobs": 2, "logprobs": True}, {"best": 1}):
    try:
        client.chat.completions.create(model="m", messages=[user("a")], extra_body=wrong)
    except openai.BadRequestError as error:
        assert "training rollout" in str(error) or "best" in str(error), error
    else:
        raise AssertionError(wrong)
print(1)
"""
    with played(program, timeout_s=60.0) as trajectory:
        assert trajectory.ended == "done" and [len(branch) for branch in trajectory.branches] == [2, 4]


AGENT = ["env=agent", f"env.command={sys.executable} agent.py {{row}}", "recipe.steps=2", "recipe.prompts_per_step=2"]


def words(*more: str) -> list[str]:
    quoted = [f'env.command="{sys.executable} agent.py {{row}}"' if word.startswith("env.command") else word for word in AGENT]
    return [*SMALL["grpo"], *quoted, "recipe.group_size=3", "eval.limit=1", "eval.every=null", "env.workers=4", *more]


@pytest.mark.slow
def test_a_run_repeats_and_resumes_bit_for_bit():
    write("agent.py", CALLS + TWICE)
    assert train(*words("out=whole")) == 0
    assert train(*words("recipe.steps=1", "out=parts")) == 0
    assert train(*words("out=parts")) == 0
    whole, parts = timeless("whole"), timeless("parts")
    assert whole[-1] == parts[-1] and len(whole) == len(parts) == 3
    last = whole[-1]
    assert last["rollout/turns_max"] == 2.0 and last["env/errors"] == 0.0 and last["rollout/branches"] == 0.0
    assert last["reward/part/tries"] >= 1.0
    assert all(abs(row["kl/sampler_trainer_k1"]) < 1e-6 for row in whole[1:])


@pytest.mark.nightly
def test_agents_that_play_the_next_batch_repeat_bit_for_bit():
    write("agent.py", CALLS + TWICE)
    for out in ("one", "two"):
        assert train(*words("rollout.ahead=1", f"out={out}")) == 0
    assert timeless("one") == timeless("two")
    assert [row["sync/version_lag"] for row in rows("one")[1:]] == [0.0, 1.0]
    assert rows("one")[-1]["rollout/turns_max"] == 2.0 and rows("one")[-1]["env/errors"] == 0.0


@pytest.mark.slow
def test_a_killed_run_leaves_no_process():
    write(
        "agent.py",
        CALLS
        + """
import subprocess
child = subprocess.Popen(["sleep", "600"])
open(f"{os.getpid()}.pid", "w").write(f"{os.getpid()} {child.pid}")
chat([user(row["prompt"])])
time.sleep(600)
""",
    )
    process = start(words("out=killed", "eval.every=null"))
    try:
        until(lambda: [one for one in Path.cwd().glob("*.pid") if one.read_text()] or process.poll() is not None, limit_s=300)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    numbers = [int(number) for file in Path.cwd().glob("*.pid") for number in file.read_text().split()]
    assert numbers
    until(lambda: not any(map(is_running, numbers)))


def is_running(number: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_check_env_plays_a_program_and_plan_refuses_it(capsys):
    write("agent.py", CALLS + 'message = chat([user(os.environ["COOKBOOK_SEED"])])\nprint(len(message["content"]))\n')
    command = f'command="{sys.executable} agent.py"'
    assert run(["check", "env", "agent", command, "max_turns=2"]) == 0
    assert "played on env[train]:0 and the next rows" in capsys.readouterr().out
    assert run(["plan", "recipe=grpo", "env=agent", f"env.{command}"]) == 2
    assert "env: plan cannot know the calls of a program" in capsys.readouterr().err
