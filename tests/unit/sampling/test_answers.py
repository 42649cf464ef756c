"""Answers as people and models write them: tables of cases for reward=number and reward=math_verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cookbook.errors import DataError
from cookbook.sampling.rewards import Number, answers

TABLES = Path(__file__).parent / "answers"


def cases(name: str) -> list[tuple[str, str, int]]:
    lines = (TABLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["completion"], row["gold"], row["reward"]) for row in rows]


def test_numbers():
    table = cases("number")
    assert len(table) >= 180
    reward = Number()
    assert [one for one in table if reward(one[0], {"answer": one[1]}) != one[2]] == []


@pytest.mark.slow
def test_mathematical_answers():
    pytest.importorskip("math_verify", reason="math-verify is an extra")
    from cookbook.sampling.rewards.math_verify import MathVerify

    table = cases("math")
    assert len(table) >= 350
    reward = MathVerify(workers=0)
    assert [one for one in table if reward(one[0], {"answer": one[1]}) != one[2]] == []
    with pytest.raises(DataError, match='"answer" holds no mathematical answer'):
        reward("1", {"answer": " "})
    # With the key, a base model's reasoning counts too.
    assert MathVerify(workers=0, answer_only=False)(r"<think>so \boxed{18}", {"answer": "18"}) == 1.0


def test_reasoning_may_be_read_on_request():
    assert Number(answer_only=False)("<think>18", {"answer": "18"}) == 1.0
    assert Number()("<think>18", {"answer": "18"}) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a", None),
        ("<think>a</think><think>b", None),
        ("<think>a</think>b\n <think>c", None),
        ("Sure.\n<think>a", None),
        ("the tag <think> opens it: 4", "the tag <think> opens it: 4"),
        ("<think>a</think>write `<think>` and 4", "write `<think>` and 4"),
        ("<think>a</think>", ""),
        ("use </thinks> and <thin>", "use </thinks> and <thin>"),
        ("<seed:think>a</seed:think>b", "b"),
        ("<|channel|>commentary<|message|>a", None),
        ("analysisWe add. assistantfinal18", "18"),
    ],
)
def test_the_text_after_the_reasoning(text, answer):
    assert answers.without_reasoning(text) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1}, \boxed{2}", "2"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed 5.", "5"),
        (r"\fbox{5}", "5"),
    ],
)
def test_the_last_box(text, content):
    box = answers.last_box(text)
    assert box is not None and box.content == content
    assert answers.last_box("no box") is None


def test_long_texts_of_digits_are_read_in_time():
    """A model that repeats a digit must not stop the run: no pattern may be quadratic."""
    for text in (
        "9" * 20_000,
        "1," * 20_000,
        "1 / " * 5_000,
        "-" * 20_000 + "7",
        "1:" * 5_000,
        "\\boxed{" * 5_000,
        "1e999 " * 5_000,
    ):
        answers.last_number(text)
        answers.last_box(text)
        answers.without_reasoning(text)
