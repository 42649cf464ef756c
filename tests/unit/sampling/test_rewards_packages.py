"""Rewards of other packages: math-verify, and the checkers of IFEval."""

import json

import pytest
from evaltools import need_lm_eval
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.errors import ConfigError, DataError

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.slow]


@pytest.fixture
def math_verify():
    pytest.importorskip("math_verify", reason="math-verify is an extra")
    from cookbook.sampling.rewards.math_verify import MathVerify

    return MathVerify(workers=0)


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("x=3", "3", 1.0),
        ("the answer is 72", "36 + 36 = 72 #### 72", 1.0),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        ("$(1, 2)$", "(1,2)", 1.0),
        ("$(2, 1)$", "(1,2)", 0.0),
        ("7", "8", 0.0),
        ("", "3", 0.0),
    ],
)
def test_answers_are_compared_as_mathematics(completion, gold, reward, math_verify):
    assert math_verify(completion, {"answer": gold}) == reward


def test_a_row_without_an_answer_is_named(math_verify, capsys):
    with pytest.raises(DataError, match='"answer" holds no mathematical answer'):
        math_verify("1", {"answer": ""})


def test_a_run_with_math_verify_equals_one_with_number(capsys):
    """The sums of data/arithmetic are numbers, so that both rewards give the same values, in a worker process too."""
    pytest.importorskip("math_verify", reason="math-verify is an extra")
    for name in ("number", "math_verify"):
        assert train(*SMALL["grpo"], f"reward={name}", f"out={name}") == 0
    assert [row["reward/mean"] for row in rows("math_verify") if "reward/mean" in row] == [
        row["reward/mean"] for row in rows("number") if "reward/mean" in row
    ]


def test_instructions_are_checked():
    need_lm_eval()
    from cookbook.sampling.rewards.ifeval import IFEval

    row = {
        "prompt": "Say hello",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": 3, "relation": "at least"}],
    }
    assert IFEval()("hello to you", row) == 1.0
    assert IFEval()("hello, to you", row) == IFEval()("hello", row) == 0.0
    assert IFEval(fraction=True)("hello", row) == 0.5
    lines = {**row, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert IFEval()("Sure, here:\nhello", lines) == 0.0 and IFEval(loose=True)("Sure, here:\nhello", lines) == 1.0
    with pytest.raises(DataError, match="unknown instruction 'a:b'"):
        IFEval()("hello", {**row, "instruction_id_list": ["a:b"], "kwargs": [{}]})
    with pytest.raises(DataError, match="lists of one length"):
        IFEval()("hello", {**row, "kwargs": [{}]})
    # The hub's rows name every option of every instruction.
    empty = {"num_words": None, "relation": None, "keywords": None}
    assert IFEval()("hello to you", {**row, "kwargs": [empty, {**row["kwargs"][1], "keywords": None}]}) == 1.0


def test_data_of_nltk_that_are_missing_are_named(monkeypatch):
    """Its import tries to download them."""
    need_lm_eval()
    import nltk

    from cookbook.sampling.rewards.ifeval import IFEval

    monkeypatch.setattr(nltk.data, "path", [])
    row = {
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": 2, "relation": "at least"}],
    }
    with pytest.raises(ConfigError, match=r"run: python -m nltk\.downloader punkt_tab"):
        IFEval()("Hello there. Again.", row)


def test_an_evaluation_with_instructions(capsys):
    need_lm_eval()
    instructions = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    write("rows.jsonl", "".join(json.dumps({"prompt": f"{n}+1=", **instructions}) + "\n" for n in range(4)))
    assert run(["eval", "tiny", "data=jsonl", "data.path=rows.jsonl", "data.eval_path=rows.jsonl", "reward=ifeval"]) == 0
    assert "eval/reward         1\n" in capsys.readouterr().out
