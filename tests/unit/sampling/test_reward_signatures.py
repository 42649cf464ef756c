"""Arguments of reward functions, by the names of their parameters, those of TRL and verl included."""

from __future__ import annotations

from contextlib import closing

import pytest
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Row
from cookbook.data.formats import Plain
from cookbook.errors import BadRowError, ConfigError, RolloutError
from cookbook.sampling.rewards import Format, Python, RewardRunner, Score, Weighted
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Sample

pytestmark = pytest.mark.usefixtures("here")

INLINE = {"workers": 0, "timeout_s": None}
CHAT = [{"role": "user", "content": "2+3?"}]

FUNCTIONS = """
def of_trl(completions, **kwargs):
    assert kwargs["answer"] == ["5"] * len(completions) and kwargs["prompts"] == ["2+3="] * len(completions)
    assert kwargs["trainer_state"].global_step == 7 and len(kwargs["completion_ids"]) == len(completions)
    return [float(text == answer) for text, answer in zip(completions, kwargs["answer"])]

def of_trl_exact(prompts, completions, answer, completion_ids=None, trainer_state=None):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def of_trl_chat(prompts, completions, **kwargs):
    assert prompts[0] == [{"role": "user", "content": "2+3?"}]
    return [float(one[0]["content"] == "5" and one[0]["role"] == "assistant") for one in completions]

def of_trl_none(completions, **kwargs):
    return [None if "?" in text else 1.0 for text in completions]

def one_for_all(completions, **kwargs):
    return [1.0]

async def of_trl_async(completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer)]

def of_verl(solution_str, ground_truth):
    return float(solution_str == ground_truth)

def of_verl_whole(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

def of_answer(completion, answer):
    return float(completion == answer)

def everything(completion, prompt, row, trajectory, step, answer, scale=2.0):
    assert prompt == "2+3=" and row["answer"] == answer and trajectory[-1]["content"] == completion
    return scale * (completion == answer) + step

def all_of_one(completion, **rest):
    assert {"prompt", "row", "trajectory", "step", "answer"} <= set(rest)
    return float(completion == rest["answer"])

def group_and_column(group, answer, step):
    return [float(text == answer) + step for text in group]

def by_text(text, row):
    return float(text == row["answer"])

def unknown(completion, label):
    return 0.0

def typo(completion, anwser):
    return 0.0

def with_default(completion, answer, label=None):
    return float(completion == answer and label is None)

def of_environment(environments, **kwargs):
    return [0.0]

class Graded:
    def __call__(self, completion, answer):
        return float(completion == answer)
"""

SEES = """
def reward(completion, trajectory):
    assert trajectory[-1]["content"] == completion
    return float(completion == "5")
"""
ODD = """
def odd(completions, answer, **kwargs):
    assert len(answer) == len(completions)
    return [sum(map(ord, text)) % 2 for text in completions]
"""


def scores(reward, *completions, row=None, step=7):
    row = {"prompt": "2+3=", "answer": "5"} if row is None else row
    prompt = RenderedPrompt([1], Row("rows.jsonl:7", row), "2+3=", "2+3=", Plain("here:1", "2+3="))
    attempts = [Trajectory.single([1], "2+3=", Sample([5, 6], [-1.0, -1.0], "stop", 0), text) for text in completions]
    with closing(RewardRunner(reward)) as runner:
        runner.check(row)
        runner.step = step
        return runner.submit_attempts(prompt, attempts)()


def of(name, *completions, **more):
    write("mine.py", FUNCTIONS)
    return [one.value for one in scores(Python(f"mine.py:{name}", **INLINE), *completions, **more)]


@pytest.mark.parametrize(
    "name",
    [
        "of_trl",
        "of_trl_exact",
        "of_trl_async",
        "of_answer",
        "all_of_one",
        "by_text",
        "with_default",
        "Graded",
        "of_verl",
        "of_verl_whole",
    ],
)
def test_functions_of_each_project(name):
    assert of(name, "5", "6", "5") == [1.0, 0.0, 1.0]


def test_more_about_the_arguments():
    assert of("everything", "5", "6") == [9.0, 7.0]
    assert of("group_and_column", "5", "6") == [8.0, 7.0]
    # Conversations are lists of messages, as TRL gives them; the data's own answer is no part of the prompt.
    for row in ({"prompt": CHAT}, {"messages": [*CHAT, {"role": "assistant", "content": "5"}]}):
        assert of("of_trl_chat", "5", "6", row=row) == [1.0, 0.0]
    verl = {
        "prompt": "2+3=",
        "data_source": "sums",
        "reward_model": {"ground_truth": "5", "style": "rule"},
        "extra_info": {"index": 1},
    }
    assert of("of_verl", "5", "6", row=verl) == of("of_verl_whole", "5", "6", row=verl) == [1.0, 0.0]
    [one] = scores(Python("mine.py:of_verl_whole", **INLINE), "5", row=verl)
    assert one == Score(1.0, {"score": 1.0, "acc": 1.0})


def test_a_column_named_as_the_step_comes_first():
    row = {"prompt": "2+3=", "answer": "5", "step": 100}
    assert of("group_and_column", "5", "6", row=row) == [101.0, 100.0]


def test_workers_call_as_this_process_does():
    write("mine.py", FUNCTIONS)
    for name in ("of_trl", "of_verl_whole", "everything"):
        assert scores(Python(f"mine.py:{name}"), "5", "6") == scores(Python(f"mine.py:{name}", **INLINE), "5", "6")
    parts = {name: Python(f"mine.py:{name}") for name in ("of_trl_none", "of_answer")}
    assert scores(Weighted(parts), "5", "?") == [
        Score(2.0, {"of_trl_none": 1.0, "of_answer": 1.0}),
        Score(0.0, {"of_trl_none": None, "of_answer": 0.0}),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unknown",
            r"the function has the parameter 'label', which is neither an argument nor a column of the data; use completion, "
            r"prompt, row, trajectory, environment, step, solution_str, text, answer, or give label a default",
        ),
        ("typo", "Did you mean 'answer'"),
        ("of_environment", "the function has the parameter 'environments', and the run has no environment"),
    ],
)
def test_unknown_names_are_one_line_before_anything_is_sampled(name, message):
    with pytest.raises(ConfigError, match=f"reward: .*{message}"):
        of(name, "5")


def test_a_row_without_the_column_is_named():
    write("mine.py", FUNCTIONS)
    prompt = RenderedPrompt([1], Row("rows.jsonl:8", {"question": "?"}), "", "", Plain("here:1", ""))
    with closing(RewardRunner(Python("mine.py:of_answer", **INLINE))) as runner:
        attempt = Trajectory.single([1], "", Sample([5], [-1.0], "stop", 0), "5")
        with pytest.raises(BadRowError, match=r'rows\.jsonl:8: reward: no column "answer", the row has question'):
            runner.submit_attempts(prompt, [attempt])()


def test_none_means_that_one_of_several_rewards_does_not_apply():
    with pytest.raises(RolloutError, match=r"rows\.jsonl:7: the reward returned NoneType, not a number; return one float"):
        of("of_trl_none", "5", "?")
    parts = {"none": Python("mine.py:of_trl_none", **INLINE), "format": Format("5")}
    found = scores(Weighted(parts, {"format": 0.5}), "5", "?")
    assert found == [Score(1.5, {"none": 1.0, "format": 1.0}), Score(0.0, {"none": None, "format": 0.0})]
    with pytest.raises(RolloutError, match=r"rows\.jsonl:7: none of the rewards none applies, all returned None"):
        scores(Weighted({"none": Python("mine.py:of_trl_none", **INLINE)}), "?")
    # A list of another length is no list of rewards.
    with pytest.raises(RolloutError, match="the reward returned 1 values for a group of 2; return one per completion"):
        of("one_for_all", "5", "6")


@pytest.mark.parametrize(
    ("completion", "opened", "seen"),
    [
        ("<think>a</think>5", "", "5"),
        ("a</think>5", "<think>\n", "5"),
        ("5", "<think>\n", ""),
        ("<think>5", "", ""),
        ("5", "", "5"),
    ],
)
def test_answer_only_removes_the_reasoning_before_any_reward_sees_it(completion, opened, seen):
    write(
        "see.py",
        SEES,
    )
    prompt = RenderedPrompt([1], Row("rows.jsonl:7", {"answer": "5"}), "", "", Plain("here:1", ""))
    attempt = Trajectory.single([1], "", Sample([5], [-1.0], "stop", 0), completion, opened)
    for reward in (Python("see.py:reward", answer_only=True, **INLINE), Format(r"\A5\Z", answer_only=True)):
        with closing(RewardRunner(reward)) as runner:
            assert runner.submit_attempts(prompt, [attempt])()[0].value == float(seen == "5")


def test_check_config_explains_and_a_run_starts_with_the_check(capsys):
    write("mine.py", FUNCTIONS)
    words = [*SMALL["grpo"], "out=run", "reward=mine.py:unknown"]
    assert run(["check", "config", *words]) == 2
    assert "error: reward: the function has the parameter 'label'" in capsys.readouterr().err
    assert train(*words) == 2
    assert "error: reward: the function has the parameter 'label'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_function_of_trl_trains(capsys):
    write(
        "mine.py",
        ODD,
    )
    assert train(*SMALL["grpo"], "out=run", "reward=mine.py:odd", "reward.workers=0", "reward.timeout_s=null") == 0
    assert 0.0 < rows("run")[-1]["reward/mean"] < 1.0
