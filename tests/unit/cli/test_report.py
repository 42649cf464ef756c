"""The last line of a run: the next command to type, which works unchanged."""

from __future__ import annotations

import json
import shlex

import pytest
from runtools import SMALL, here, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.data import DataConfig, Row
from cookbook.run import report

pytestmark = pytest.mark.usefixtures("here")
USER, ANSWER = {"role": "user", "content": "What's 2+2?"}, {"role": "assistant", "content": "4"}


def prompt(values: dict[str, object], **config: object) -> str | None:
    return report._prompt(Row("here:1", values), DataConfig(path="x", **config))


def test_a_prompt_is_one_the_row_consists_of():
    assert prompt({"messages": [USER, ANSWER]}) == "What's 2+2?"
    assert prompt({"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]}) == "What's 2+2?"
    assert prompt({"prompt": "2+2=", "answer": "4"}) == "2+2="
    assert prompt({"prompt": "2+2=", "completion": "4"}, chat=False) == "2+2="
    assert prompt({"prompt": "2+2=", "chosen": "4", "rejected": "5"}) == "2+2="
    assert prompt({"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "5"}]}) == "What's 2+2?"


def test_a_row_of_another_form_gives_no_prompt():
    assert prompt({"messages": [USER, ANSWER, USER, ANSWER]}) is None
    assert prompt({"prompt": "x" * 60}) is None
    assert prompt({"prompt": "two\nlines"}) is None
    assert prompt({"text": "2+2=4"}, chat=False, format="text") is None
    assert prompt({"other": "2+2=4"}) is None


def last_line(capsys, *words: str) -> str:
    assert train(*SMALL["sft"], "recipe.steps=1", "data=jsonl", "data.path=mine.jsonl", "out=run", *words) == 0
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_the_next_command_asks_what_the_data_ask(capsys):
    rows = [{"messages": [{"role": "user", "content": f"-{n} is it's own number?"}, ANSWER]} for n in range(8)]
    write("mine.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    line = last_line(capsys, "model=tiny", "model.lora_rank=2", "data.eval_fraction=0")
    assert line == """next: cookbook sample run -- '-0 is it'"'"'s own number?'"""
    assert run(shlex.split(line.removeprefix("next: cookbook "))) == 0


@pytest.mark.slow
def test_conversations_of_several_turns_get_a_placeholder(capsys):
    write("mine.jsonl", (json.dumps({"messages": [USER, ANSWER, USER, ANSWER]}) + "\n") * 8)
    assert last_line(capsys, "data.eval_fraction=0") == "next: cookbook sample run 'your prompt'"


def test_a_run_without_a_checkpoint_has_nothing_to_sample_from(capsys):
    write("mine.jsonl", (json.dumps({"messages": [USER, ANSWER]}) + "\n") * 8)
    line = last_line(capsys, "checkpoint.every=null", "checkpoint.final=false")
    assert line == ("next: nothing to sample from, as no checkpoint was saved; set checkpoint.final=true or checkpoint.every")
