"""Rewards: what counts as right, and that no mistake in one is ever a silent zero."""

import asyncio
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from marks import rest_slow
from places import ROOT
from waiting import WAIT_S, until

from cookbook.data import Row
from cookbook.errors import ConfigError, CookbookError, DataError, RolloutError
from cookbook.sampling.rewards import Exact, Format, Number, Python, RewardRunner


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("72", "48 + 24 = <<48+24=72>>72\n#### 72"),
        ("The answer is 72.", 72),
        ("48+24=72", "#### 72.0"),
        ("72.00", 72),
        ("$1,234", "#### 1234"),
        ("1234567", "#### 1,234,567"),
        ("that is -$5", -5),
        ("that is $-5", "-5"),
        ("\u22125 degrees", "-5"),
        ("50%", "#### 50"),
        (".5", 0.5),
        ("10-3", 3),
        ("10 - 3 = 7", 7),
        ("(4)-3", 3),
        ("one of 1,2,3", 3),
        ("0.1", 0.1),
        ("first 5, then 72!", "#### 72 of 100"),  # the mark's number, not the last
        ("x2y 9", "9"),
    ],
)
def test_number_right(completion, gold):
    assert Number()(completion, {"answer": gold}) == 1.0


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("", 72),
        ("seventy-two", 72),
        ("72 or 73", 72),
        ("172", "#### 72"),
        ("-72", 72),
        ("7.2", 72),
        ("72", "72 #### 73"),
        ("10-3", -3),
        ("1234", "1,2"),
        ("1,2345", 12345),
    ],
)
def test_number_wrong(completion, gold):
    assert Number()(completion, {"answer": gold}) == 0.0


def test_number_needs_a_gold_number():
    with pytest.raises(DataError, match=r'"answer" holds no number, got \'none\'; .*reward\.column'):
        Number()("72", {"answer": "none"})
    with pytest.raises(DataError, match=r'no column "answer", the row has solution; set reward\.column'):
        Number()("72", {"solution": 72})
    assert Number(column="solution")("72", {"solution": 72}) == 1.0


def test_exact():
    row = {"answer": "Paris"}
    assert Exact()(" Paris\n", row) == 1.0
    assert Exact()("paris", row) == 0.0
    assert Exact(strip=False)(" Paris", row) == 0.0
    assert Exact(ignore_case=True)("PARIS", row) == 1.0
    assert Exact(column="n")("7", {"n": 7}) == 1.0


def test_format():
    assert Format()("12 + 60\n#### 72\n", {}) == 1.0
    assert Format()("#### 72\nand more words", {}) == 0.0
    think = Format(pattern=r"<think>.*</think>.+", whole=True)
    assert think("<think>a\nb</think>72", {}) == 1.0
    assert think("so <think>a</think>72", {}) == 0.0
    with pytest.raises(ConfigError, match=r"reward\.pattern: .*, got '\('; fix the regular expression"):
        Format(pattern="(")


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Writes ``my_file.py`` in the current folder, beside a module it may import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_neighbor_of_rewards.py").write_text("HALF = 0.5\n")

    def write(source: str) -> None:
        (tmp_path / "my_file.py").write_text(source)

    return write


ROWS = [Row("train.jsonl:1", {"answer": 1}), Row("train.jsonl:2", {"answer": 0})]
INLINE = {"workers": 0, "timeout_s": None}


def score(reward, completions, rows):
    """The rewards of a run without workers."""
    with closing(RewardRunner(reward)) as runner:
        pending = [runner.submit(completion, row) for completion, row in zip(completions, rows, strict=True)]
        return [one() for one in pending]


def test_a_function_of_the_users(user_file):
    user_file(
        "from my_neighbor_of_rewards import HALF\ndef f(completion, row):\n    return HALF * row['answer'] * len(completion)\n"
    )
    assert score(Python("my_file.py:f", **INLINE), ["abcd", "ab"], ROWS) == [2.0, 0.0]


ASYNC = """
import asyncio

loops = set()

async def f(completion, row):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    if completion == "cancelled":
        raise asyncio.CancelledError
    return {"length": len(completion), "loops": len(loops)}

async def of_group(group, row):
    return [float(len(text)) for text in group]
"""


@pytest.mark.parametrize("limits", [INLINE, {"workers": 1}])
def test_an_async_function_is_awaited_in_one_loop(user_file, limits):
    user_file(ASYNC)
    with closing(RewardRunner(Python("my_file.py:f", **limits))) as runner:
        scores = [runner.submit_group([text], ROWS[0], [[]]) for text in ("abc", "a")]
        assert [[one.parts for one in pending()] for pending in scores] == [
            [{"length": 3.0, "loops": 1.0}],
            [{"length": 1.0, "loops": 1.0}],
        ]
        with pytest.raises(RolloutError, match=r"^train.jsonl:1: the reward raised asyncio.*CancelledError"):
            runner.submit("cancelled", ROWS[0])()
    with closing(RewardRunner(Python("my_file.py:of_group", **limits))) as runner:
        assert [one.value for one in runner.submit_group(["abc", "a"], ROWS[0], [[], []])()] == [3.0, 1.0]


def test_an_async_function_is_awaited_also_in_a_notebook(user_file):
    """The cell of a notebook runs in an event loop."""
    user_file(ASYNC)

    async def cell():
        return score(Python("my_file.py:f", **INLINE), ["abc", "a"], ROWS)

    assert asyncio.run(cell()) == [4.0, 2.0]


def test_a_coroutine_as_a_value_names_the_remedy(user_file):
    user_file("async def f(group, row):\n    async def one(): return 1.0\n    return [one() for _ in group]\n")
    with (
        closing(RewardRunner(Python("my_file.py:f", **INLINE))) as runner,
        pytest.raises(RolloutError, match=r"asyncio\.gather"),
    ):
        runner.submit_group(["a"], ROWS[0], [[]])()


def test_a_class_of_the_users_is_made_once(user_file):
    user_file(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Reward:\n    calls: int = 0\n"
        "    def __call__(self, completion, row):\n        self.calls += 1\n        return self.calls\n"
    )
    assert score(Python("my_file.py:Reward", **INLINE), ["a", "b"], ROWS) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_file", "expected file.py:function, got 'my_file'"),
        ("nothing.py:f", "nothing.py does not exist in"),
        ("my_file.py:g", "my_file.py has no function 'g'; define g"),
        ("my_file.py:NUMBER", "my_file.py has no function 'NUMBER'"),
    ],
)
def test_a_target_that_is_missing(user_file, target, message):
    user_file("NUMBER = 3\ndef f(completion, row):\n    return 1\n")
    with pytest.raises(ConfigError, match=rf"reward\.target: {message}"):
        Python(target)


def test_a_file_that_cannot_be_imported(user_file):
    user_file("def f(completion, row)\n    return 1\n")
    with pytest.raises(ConfigError, match=r"my_file\.py:1: not valid Python"):
        Python("my_file.py:f")
    user_file("import no_such_module_anywhere\n")
    with pytest.raises(ConfigError, match="imports 'no_such_module_anywhere', which cannot be found"):
        Python("my_file.py:f")
    user_file("1 / 0\n")  # a bug of the user's: it keeps its trace
    with pytest.raises(ZeroDivisionError):
        Python("my_file.py:f")


def test_a_reward_that_raises_names_the_row_and_keeps_its_trace(user_file, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)  # a run before this test may have changed it
    caplog.set_level(logging.INFO, "cookbook")
    user_file("def inner(row):\n    return 1 / row['answer']\ndef f(completion, row):\n    return inner(row)\n")
    with pytest.raises(RolloutError) as error:
        score(Python("my_file.py:f", **INLINE), ["a", "b"], ROWS)
    message = "train.jsonl:2: the reward raised ZeroDivisionError: division by zero (my_file.py:2); fix the reward or row"
    assert str(error.value) == message
    assert "return 1 / row['answer']" in caplog.text
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_shipped_reward_that_cannot_judge_names_the_row():
    with pytest.raises(RolloutError) as error:
        score(Number(column="solution"), ["1"], ROWS[:1])
    assert str(error.value) == 'train.jsonl:1: reward: no column "solution", the row has answer; set reward.column'
    assert isinstance(error.value.__cause__, DataError)


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(2), np.array(0.25)])
def test_numbers_of_any_kind_are_numbers(value):
    assert score(lambda completion, row: value, ["a"], ROWS[:1]) == [float(value)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned NoneType, not a number"),
        ("1.0", "returned str, not a number"),
        ([], "returned list, not a number"),
        ([[1.0]], "returned list at index 0, not a number"),
        (np.array([[1.0, 2.0]]), "returned ndarray, not a number"),
        (float("nan"), "returned nan; return a finite number"),
        (float("-inf"), "returned -inf; return a finite number"),
    ],
)
def test_anything_else_is_an_error_that_names_the_row(value, message):
    with pytest.raises(RolloutError, match=rf"^train\.jsonl:1: the reward {message}"):
        score(lambda completion, row: value, ["a"], ROWS[:1])


def test_only_errors_are_renamed():
    def interrupted(completion, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, ["a"], ROWS[:1])
    assert issubclass(RolloutError, CookbookError)

    # The run would end without a message.
    def leaves(completion, row):
        raise SystemExit(3)

    with pytest.raises(RolloutError, match=r"train.jsonl:1: the reward raised SystemExit: 3"):
        score(leaves, ["a"], ROWS[:1])


def test_the_shipped_configurations_are_the_classes_defaults():
    from omegaconf import OmegaConf

    from cookbook.config.typed import construct_target

    conf = ROOT / "conf" / "reward"
    for name, reward in (("number", Number()), ("exact", Exact()), ("format", Format())):
        values = OmegaConf.to_container(OmegaConf.load(conf / f"{name}.yaml"))
        assert construct_target(values, "reward") == reward
    values = OmegaConf.to_container(OmegaConf.load(conf / "python.yaml"))
    with pytest.raises(ConfigError, match=r"reward\.target: missing"):
        construct_target(values, "reward")


# Processes of their own

GRADE = """
import os, re, sys, time

def grade(completion, row):
    if completion == "hangs":
        re.match("(a+)+b", "a" * 60)  # holds the interpreter's lock for centuries
    if completion == "raises":
        return 1 / 0
    if completion == "ends":
        os._exit(7)
    if completion == "None":
        return None
    time.sleep(row["answer"])
    return len(completion) + row["answer"]
"""


@pytest.fixture
def judge(user_file):
    """``judge(**limits)``: of that function."""
    made = []
    user_file(GRADE)

    def make(**limits):
        made.append(RewardRunner(Python("my_file.py:grade", **limits)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", rest_slow([1, 3]))
def test_workers_return_the_functions_results_in_any_order(judge, workers):
    """The first calls take longest, so with three workers the last ones return first."""
    rows = [Row(f"here:{number}", {"answer": (12 - number) / 500}) for number in range(12)]
    texts = ["x" * (number % 5) for number in range(12)]
    inline = [judge(workers=0, timeout_s=None).submit(text, row)() for text, row in zip(texts, rows, strict=True)]
    pending = [judge(workers=workers).submit(text, row) for text, row in zip(texts, rows, strict=True)]
    assert [reward() for reward in pending] == inline == score(Python("my_file.py:grade", **INLINE), texts, rows)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        pytest.param(
            "hangs",
            "the reward has not returned after 3 s; fix the reward or row, or raise reward.timeout_s",
            marks=pytest.mark.slow,
        ),
        ("raises", "the reward raised ZeroDivisionError: division by zero (my_file.py:8); fix the reward or row"),
        ("ends", "the reward ended its process (exit code 7); fix the reward or row"),
        ("None", "the reward returned NoneType, not a number; return one float"),
    ],
)
def test_what_goes_wrong_in_a_worker_names_the_row(judge, completion, message, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("cookbook"), "propagate", True)
    caplog.set_level(logging.INFO, "cookbook")
    found = judge(workers=1, timeout_s=3.0 if completion == "hangs" else WAIT_S)
    bad, good = found.submit(completion, Row("train.jsonl:7", {"answer": 0})), found.submit("abc", ROWS[1])
    with pytest.raises(RolloutError) as error:
        bad()
    assert str(error.value) == f"train.jsonl:7: {message}"
    assert good() == 3.0  # the next call has a process that works
    if completion == "raises":
        assert "return 1 / 0" in caplog.text and "ZeroDivisionError" in str(error.value.__cause__)


def test_what_cannot_be_sent_to_a_worker_is_an_error(judge):
    found = judge(workers=1)
    with pytest.raises(RolloutError, match=r"^here:1: the row cannot be sent to a worker \(.*bytes.*\); set reward\.workers=0"):
        found.submit("a", Row("here:1", {"answer": b"1"}))()


def test_closing_ends_what_hangs(judge):
    found = judge(workers=2, timeout_s=None)
    started = [found.submit("abc", ROWS[1]), found.submit("abc", ROWS[1])]
    assert [reward() for reward in started] == [3.0, 3.0]
    processes = [one._running[0] for one in found._processes]
    for _ in range(4):
        found.submit("hangs", ROWS[1])
    found.close()
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_a_worker_does_not_outlive_its_run(user_file):
    """The run is killed while its reward hangs, so no parent process remains to stop the worker."""
    user_file("import time\ndef f(completion, row):\n    print(__import__('os').getpid(), flush=True)\n    time.sleep(600)\n")
    code = (
        "import os\nfrom cookbook.data import Row\nfrom cookbook.sampling.rewards import RewardRunner, Python\n"
        "RewardRunner(Python('my_file.py:f')).submit('a', Row('here:1', {}))()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    line = Path(f"/proc/{worker}/cmdline")
    until(lambda: not line.exists() or not line.read_bytes(), lambda: "it is still there")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"workers": -1}, r"reward\.workers must be at least 0, got -1"),
        ({"workers": 1, "timeout_s": 0}, r"reward\.timeout_s must be above 0, got 0; null sets no limit"),
        ({"timeout_s": 2.5}, r"reward\.timeout_s=2\.5 needs reward\.workers of at least 1"),
    ],
)
def test_limits_that_cannot_be_kept(limits, message):
    with pytest.raises(ConfigError, match=message):
        Number(**limits)
