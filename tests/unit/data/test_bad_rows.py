"""``data.on_bad_row``: a row that is broken stops the run in one line, or is left out, counted and listed, once."""

import json
import shutil
from pathlib import Path

import pytest
from runtools import SMALL, bits, checkpoint, here, rows, timeless, train, write  # noqa: F401 - here is a fixture
from tiny import byte_tokenizer

from cookbook.cli.app import run
from cookbook.data import (
    DataConfig,
    RejectedRows,
    RenderedPrompt,
    Renderer,
    Row,
    conversation_datums,
    load_rows,
    preference_datums,
    prompts,
)
from cookbook.data.formats import Plain
from cookbook.errors import BadRowError, DataError
from cookbook.sampling.rollouts import RolloutGroup, _StepSampling
from cookbook.types import SamplingParams

pytestmark = pytest.mark.usefixtures("here")

RECIPES = ["sft", "grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "orpo"))]
KEYS = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected"), "orpo": ("prompt", "chosen", "rejected")}
KEYS["grpo"] = ("prompt", "answer")
READ = {"sft": conversation_datums, "dpo": preference_datums, "orpo": preference_datums, "grpo": prompts}
HALF = '"\\ud800"'  # of a surrogate pair, as JSON may spell it

# For every recipe: a line of the file, and the message that follows its file and number.
BROKEN = {
    "no JSON": ("{broken", "broken JSON at column 2"),
    "no object": ("[1]", "a row must be a JSON object with a key per column, got list"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    "a key twice": ('{"prompt": "a", "prompt": "b"}', 'the key "prompt" is given twice in one object'),
    "brackets that never close": ("[" * 100_000, "cannot be read: "),
    "a number of 5000 digits": ('{"prompt": ' + "9" * 5000 + "}", "cannot be read: "),
    "no prompt": ('{"completion": "a", "chosen": "b", "rejected": "c"}', ""),
    "a prompt of another type": ('{"prompt": 5.5, "completion": "a", "chosen": "b", "rejected": "c"}', '"prompt" must be'),
    "half a character": (
        f'{{"prompt": {HALF}, "completion": "a", "chosen": "b", "rejected": "c", "answer": "1"}}',
        "holds half of a surrogate pair",
    ),
    "tools that are none": (
        '{"prompt": "a", "completion": "a", "chosen": "b", "rejected": "c", "tools": 5}',
        '"tools" must be a list of tool schemas, got int',
    ),
    "a speaker that is none": (
        '{"prompt": [{"from": ["x"], "value": "a"}], "completion": "a", "chosen": "b", "rejected": "c"}',
        '"prompt"[0] is "from"',
    ),
}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), max_length=4096)


def good(recipe: str, number: int) -> str:
    row = {"prompt": f"{number}+1=", "completion": f"{number + 1}", "answer": f"{number + 1}"}
    row |= {"chosen": row["completion"], "rejected": "about 0"}
    return json.dumps({key: row[key] for key in KEYS[recipe]})


def rows_file(recipe: str, bad: dict[int, str | bytes], count: int = 24) -> list[str]:
    """The words that train on ``count`` rows, of which those in ``bad`` (by line) are replaced."""
    lines = [bad.get(number, good(recipe, number)) for number in range(1, count + 1)]
    Path("rows.jsonl").write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    sizes = [word for word in SMALL[recipe] if not word.startswith(("data.", "eval."))]
    return [*sizes, "model=tiny", "data=jsonl", "data.chat=true", "data.path=rows.jsonl", "eval.every=null"]


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_a_broken_row_fails_in_one_line_or_is_left_out(recipe, kind, renderer):
    line, message = BROKEN[kind]
    rows_file(recipe, {2: line}, count=3)

    def read(policy: str, refusals: RejectedRows | None = None) -> list:
        config = DataConfig(path="rows.jsonl", on_bad_row=policy, chat=True)
        return READ[recipe](load_rows(config, refusals=refusals), renderer, config, refusals=refusals)

    with pytest.raises(DataError, match=r"^rows\.jsonl:2: ") as caught:
        read("fail")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    refusals = RejectedRows(DataConfig(on_bad_row="skip"))
    left = [getattr(one, "where", None) or one.row.where for one in read("skip", refusals)]
    assert list(dict.fromkeys(left)) == ["rows.jsonl:1", "rows.jsonl:3"]
    [refusal] = refusals.found
    assert (refusal.where, refusal.reason) == ("rows.jsonl:2", str(caught.value))
    assert (refusal.policy, refusal.fatal) == ("on_bad_row", False)


def test_a_first_row_that_is_bad_does_not_say_how_the_others_are_read(renderer):
    data = [Row("a:1", {"foo": 1}), Row("a:2", {"prompt": "a", "completion": "b"})]
    with pytest.raises(DataError, match=r"^a:1: the columns are foo"):
        conversation_datums(data, renderer, DataConfig())
    config = DataConfig(on_bad_row="skip")
    refusals = RejectedRows(config)
    assert [datum.where for datum in conversation_datums(data, renderer, config, refusals)] == ["a:2"]
    assert [refusal.where for refusal in refusals.found] == ["a:1"]
    with pytest.raises(DataError, match=r"^a:1: the columns are foo"):  # no row says it
        conversation_datums(data[:1], renderer, config)


def test_that_nothing_is_left_is_an_error():
    write("rows.jsonl", "{\n{\n")
    with pytest.raises(DataError, match=r"^data: all 2 rows were left out; the first: rows\.jsonl:1: broken JSON"):
        load_rows(DataConfig(path="rows.jsonl", on_bad_row="skip"))


BAD = {4: "{broken", 9: '{"prompt": 5.5}', 20: BROKEN["half a character"][0]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dpo", "orpo"))])
def test_a_run_counts_what_it_leaves_out_and_lists_it_once(recipe, capsys):
    words = rows_file(recipe, BAD)
    assert train(*words, "out=run") == 2
    assert capsys.readouterr().err.startswith("error: rows.jsonl:4: broken JSON at column 2")
    assert train(*words, "data.on_bad_row=skip", "out=run") == 0
    out, err = capsys.readouterr()
    warnings = [line for line in err.splitlines() if "data: columns not used for training: " not in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("WARNING: data: left out 3 rows, listed in run/bad_rows.jsonl; the first: rows.jsonl:4: ")
    assert "left out 3 rows, each with the reason in run/bad_rows.jsonl\n" in out
    listed = rows("run", "bad_rows.jsonl")
    assert [row["row"] for row in listed] == ["rows.jsonl:4", "rows.jsonl:9", "rows.jsonl:20"]
    assert all(row["step"] == 0 and row["reason"].startswith(row["row"]) for row in listed)
    assert {row["policy"] for row in listed} == {"data.on_bad_row"}
    assert {row["data/bad_rows"] for row in rows("run")} == {3.0}
    if recipe != "sft":
        return
    # The same run on a file without them: leaving rows out is all that happens.
    lines = Path("rows.jsonl").read_bytes().split(b"\n")
    Path("rows.jsonl").write_bytes(b"\n".join(line for number, line in enumerate(lines, start=1) if number not in BAD))
    assert train(*words, "out=clean") == 0
    assert bits(checkpoint("run")) == bits(checkpoint("clean"))
    assert not Path("clean/bad_rows.jsonl").exists() and not any("data/bad_rows" in row for row in rows("clean"))


@pytest.mark.slow
def test_rows_that_other_policies_leave_out_are_listed_too():
    words = rows_file("sft", {2: '{"prompt": "a", "completion": ""}', 3: json.dumps({"prompt": "a", "completion": "b" * 99})})
    assert train(*words, "data.on_empty=skip", "data.on_long=skip", "data.max_length=60", "out=run") == 0
    listed = {row["row"]: row["policy"] for row in rows("run", "bad_rows.jsonl")}
    assert listed == {"rows.jsonl:2": "data.on_empty", "rows.jsonl:3": "data.on_long"}


# In the middle of a run: what a reward reads of a row is looked at when its prompt's turn comes.


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_row_that_no_reward_can_judge_is_left_out_where_it_is_met(workers):
    bad = dict.fromkeys((3, 14, 22), '{"prompt": "1+1=", "answer": "none"}')
    words = [*rows_file("grpo", bad), "recipe.prompts_per_step=4", "recipe.group_size=2", "recipe.steps=7"]
    words += ["checkpoint.every=1", f"reward.workers={workers}"]
    skipping = [*words, "data.on_bad_row=skip"]
    assert train(*skipping, "out=straight") == 0
    listed = rows("straight", "bad_rows.jsonl")
    assert sorted(row["row"] for row in listed) == ["rows.jsonl:14", "rows.jsonl:22", "rows.jsonl:3"]
    assert all(row["step"] > 0 for row in listed)
    assert rows("straight")[-1]["data/bad_rows"] == 3
    if workers:
        return
    # Resumed: the same rows in the same order, none of them listed twice.
    for steps in (3, 7):
        assert train(*skipping, f"recipe.steps={steps}", "out=stopped") == 0
    assert rows("stopped", "bad_rows.jsonl") == listed
    shown = [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in timeless("stopped")]
    assert shown == [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in timeless("straight")]
    assert bits(checkpoint("stopped")) == bits(checkpoint("straight"))


def test_the_last_group_of_a_step_is_not_left_out():
    """A step without rows would train on nothing, so the reward's error ends the run."""
    refusals = RejectedRows(DataConfig(on_bad_row="skip"))
    step = _StepSampling(None, None, 1, SamplingParams(), 1.0, refusals)
    for number in range(2):
        prompt = RenderedPrompt([1], Row(f"rows.jsonl:{number}", {}), "", "", Plain("here:1", ""))
        step.groups[number] = RolloutGroup(prompt, [], [])

    error = BadRowError("the row has no answer")
    step._reject(0, error)
    with pytest.raises(BadRowError, match="the row has no answer"):
        step._reject(1, error)
    assert list(step.groups) == [1] and [one.where for one in refusals.found] == ["rows.jsonl:0"]


@pytest.mark.slow
def test_a_run_that_failed_on_a_row_resumes_without_it(capsys):
    words = [*rows_file("grpo", {14: '{"prompt": "1+1=", "answer": "none"}'}), "recipe.prompts_per_step=4", "recipe.steps=6"]
    words += ["recipe.group_size=2", "checkpoint.every=1", "out=run"]
    assert train(*words, "data.shuffle=false") == 2
    error = "error: rows.jsonl:14: reward: \"answer\" holds no number, got 'none'; set reward.column to a column with numbers\n"
    assert capsys.readouterr().err == error
    assert [row["step"] for row in rows("run")][-1] == 3
    assert train(*words, "data.shuffle=false", "data.on_bad_row=skip") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4, 5, 6]
    assert [(row["step"], row["row"]) for row in rows("run", "bad_rows.jsonl")] == [(4, "rows.jsonl:14")]


# A kill between two rows, and the command that looks before a run does.


@pytest.mark.slow
def test_rows_met_after_the_checkpoint_are_listed_again_and_a_torn_line_is_repaired(capsys):
    words = rows_file("sft", BAD)
    assert train(*words, "data.on_bad_row=skip", "recipe.steps=1", "out=run") == 0
    listed = Path("run/bad_rows.jsonl").read_text()
    shutil.copytree("run", "torn")
    Path("run/bad_rows.jsonl").write_text(listed + '{"step": 2, "row": "rows.jsonl:7", "reason": "met after the checkpoint"}\n')
    Path("torn/bad_rows.jsonl").write_text(listed[:-30])
    capsys.readouterr()
    for out in ("run", "torn"):
        assert train(*words, "data.on_bad_row=skip", f"out={out}", "recipe.steps=2") == 0
        assert capsys.readouterr().err.count("left out") == (out == "torn")  # the other rows were reported before
        assert [row["row"] for row in rows(out, "bad_rows.jsonl")] == ["rows.jsonl:4", "rows.jsonl:9", "rows.jsonl:20"]


@pytest.mark.parametrize(("policy", "code", "said"), [("fail", 2, "stops the run"), ("skip", 0, "left out")])
def test_check_data_says_the_same(policy, code, said, capsys):
    words = [word for word in rows_file("sft", BAD) if word.startswith(("recipe=", "model", "data"))]
    assert run(["check", "data", *words, f"data.on_bad_row={policy}"]) == code
    out, err = capsys.readouterr()
    assert "training: 24 rows, 3 rows cannot be used" in out
    for number in BAD:
        assert f"  {said}: rows.jsonl:{number}: " in out
    assert err.startswith("error: check data: a run would stop at 3 rows; the first: rows.jsonl:4: ") is (policy == "fail")
