"""Rewards: what counts as right, and that no mistake in one is ever a silent zero."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from cookbook.data import Row
from cookbook.errors import ConfigError, CookbookError, DataError, RolloutError
from cookbook.rewards import Exact, Format, Number, Python, score


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
    with pytest.raises(ConfigError, match=r"reward\.pattern: .*, got '\('; mend the regular expression"):
        Format(pattern="(")


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """Writes ``my_file.py`` in the current folder, beside a module it may import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_neighbour_of_rewards.py").write_text("HALF = 0.5\n")

    def write(source: str) -> None:
        (tmp_path / "my_file.py").write_text(source)

    return write


ROWS = [Row("train.jsonl:1", {"answer": 1}), Row("train.jsonl:2", {"answer": 0})]


def test_a_function_of_the_users(user_file):
    user_file(
        "from my_neighbour_of_rewards import HALF\ndef f(completion, row):\n    return HALF * row['answer'] * len(completion)\n"
    )
    assert score(Python("my_file.py:f"), ["abcd", "ab"], ROWS) == [2.0, 0.0]


def test_a_class_of_the_users_is_made_once(user_file):
    user_file(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Reward:\n    calls: int = 0\n"
        "    def __call__(self, completion, row):\n        self.calls += 1\n        return self.calls\n"
    )
    assert score(Python("my_file.py:Reward"), ["a", "b"], ROWS) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_file", "expected file.py:function, got 'my_file'"),
        ("nothing.py:f", "nothing.py does not exist in"),
        ("my_file.py:g", "my_file.py has no function 'g'; define g"),
        ("my_file.py:NUMBER", "my_file.py has no function 'NUMBER'"),
    ],
)
def test_a_target_that_is_not_there(user_file, target, message):
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
    user_file("def inner(row):\n    return 1 / row['answer']\ndef f(completion, row):\n    return inner(row)\n")
    with pytest.raises(RolloutError) as error:
        score(Python("my_file.py:f"), ["a", "b"], ROWS)
    message = "train.jsonl:2: the reward raised ZeroDivisionError: division by zero (my_file.py:2); mend the reward or row"
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
        ([1.0], "returned list, not a number"),
        (np.array([1.0, 2.0]), "returned ndarray, not a number"),
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
    with pytest.raises(ValueError, match="zip"):
        score(Number(), ["1"], ROWS)
    assert issubclass(RolloutError, CookbookError)


def test_the_shipped_configurations_are_the_classes_defaults():
    from omegaconf import OmegaConf

    from cookbook.typed import construct_target

    conf = Path(__file__).parents[1] / "conf" / "reward"
    for name, reward in (("number", Number()), ("exact", Exact()), ("format", Format())):
        values = OmegaConf.to_container(OmegaConf.load(conf / f"{name}.yaml"))
        assert construct_target(values, "reward") == reward
    values = OmegaConf.to_container(OmegaConf.load(conf / "python.yaml"))
    with pytest.raises(ConfigError, match=r"reward\.target: missing"):
        construct_target(values, "reward")
