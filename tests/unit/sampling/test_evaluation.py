"""Evaluation: pass@k, the same while training and by itself, and runs beside each other."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from marks import rest_slow
from runtools import checkpoint, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import main, run
from cookbook.data import DataConfig, Row
from cookbook.data.row_view import with_answer
from cookbook.errors import ConfigError
from cookbook.run import report
from cookbook.sampling.evaluation import CORRECT_REWARD, FINGERPRINT, EvalConfig, Evaluator, pass_at_k
from cookbook.sampling.rewards import Exact, Number, Python, RewardRunner
from cookbook.utils.paths import packaged

TINY = ["eval.limit=6", "eval.every=null", "eval.pass_at=[1,3]", "eval.num_samples=5"]
SMALLEST = {
    "sft": ["recipe=sft", "recipe.steps=1", "recipe.batch_size=4", "model=tiny", "data.limit=8", *TINY],
    "dpo": ["recipe=dpo", "recipe.steps=1", "recipe.batch_size=2", "reward=number", "data.limit=8", *TINY],
    "orpo": ["recipe=orpo", "recipe.steps=1", "recipe.batch_size=2", "data.limit=8", *TINY],
    "grpo": [
        "recipe=grpo",
        "recipe.steps=1",
        "seed=1",
        "recipe.prompts_per_step=4",
        "recipe.group_size=4",
        "data.limit=8",
        *TINY,
    ],
}
SMALLEST["lora"] = [*SMALLEST["sft"], "model.lora_rank=4", "optim.lr=3e-1", "schedule.warmup_steps=0"]
MEASURED = ("eval/accuracy", "eval/reward", "eval/pass@1", "eval/pass@3", "eval/failed", "eval/answers", FINGERPRINT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """``trained(recipe)``: the folder of one step of it on the shipped model, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("trained")

    def make(recipe: str) -> Path:
        if not (folder / recipe).exists():
            assert train(*SMALLEST[recipe], f"out={folder / recipe}") == 0
        return folder / recipe

    return make


@pytest.fixture
def changed(trained, tmp_path):
    """A copy of the run of grpo with another learning rate in its configuration, and better marks."""
    folder = tmp_path / "changed"
    shutil.copytree(trained("grpo"), folder, ignore=shutil.ignore_patterns("evals"))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("lr: 0.0001", "lr: 0.01"))
    better = [{**row, "eval/accuracy": 0.9 - row["step"] / 10} for row in rows(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in better))
    return folder


# pass@k


def test_pass_at_k_is_the_share_of_all_draws_with_a_correct_one():
    """Every way to draw k of n completions, counted one by one."""
    for num_samples in range(1, 9):
        for num_correct in range(num_samples + 1):
            completions = [place < num_correct for place in range(num_samples)]
            for k in range(1, num_samples + 1):
                draws = list(itertools.combinations(completions, k))
                share = Fraction(sum(map(any, draws)), len(draws))
                assert pass_at_k(num_samples, num_correct, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_is_without_bias():
    """Its mean over all outcomes of n completions, weighted by how likely each is, is that of k completions: 1 - (1 - p)^k."""
    num_samples, chance = 6, 0.3
    for k in range(1, num_samples + 1):
        mean = 0.0
        for outcome in itertools.product([0, 1], repeat=num_samples):
            likely = np.prod([chance if one else 1 - chance for one in outcome])
            mean += float(likely) * pass_at_k(num_samples, sum(outcome), k)
        assert mean == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


def test_pass_at_k_of_many_samples_overflows_nothing():
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-12)
    assert pass_at_k(10_000, 5_000, 5_000) == 1.0 and pass_at_k(10_000, 0, 10_000) == 0.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pass_at": [0]}, r"eval\.pass_at: every k must be at least 1, got \[0\]"),
        ({"pass_at": [1, 8], "num_samples": 4}, r"eval\.num_samples=4 is less than the largest k of eval\.pass_at=\[1, 8\]"),
        ({"temperature": 0.0}, r"eval\.temperature must be > 0, got 0\.0"),
    ],
)
def test_what_cannot_be_drawn(values, message):
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**values)
    assert EvalConfig(pass_at=[2, 8]).num_drawn == 8 and EvalConfig().num_drawn == 0


# By itself, as while training


@pytest.mark.slow
@pytest.mark.parametrize("recipe", rest_slow(["sft", "grpo", "dpo", "orpo", "lora"]))
def test_a_run_evaluated_again_says_what_it_said(trained, recipe, capsys):
    folder = trained(recipe)
    assert run(["eval", str(folder)]) == 0
    out = capsys.readouterr().out
    before, after = rows(folder)
    assert {key for key in MEASURED if key in before} == {key for key in MEASURED if key in after}
    (file,) = (folder / "evals").iterdir()
    assert f"written to {file}\n" in out and "after 1 step on 6 rows from " in out
    found = json.loads(file.read_text())
    assert {key: value for key, value in found["metrics"].items() if key in MEASURED} == {
        key: after[key] for key in MEASURED if key in after
    }
    # Without pairs and a reference, the loss needs nothing that only the run has.
    if recipe in ("sft", "lora"):
        assert found["metrics"]["eval/loss"] == after["eval/loss"]
    assert found["step"] == 1 and file.name.startswith("step-000001-")
    if recipe == "lora":
        assert before["eval/pass@1"] != after["eval/pass@1"]  # it is the adapter that was asked


@pytest.mark.slow
def test_pass_at_k_of_a_run_counts_what_was_drawn(trained, tmp_path):
    assert run(["eval", str(trained("grpo")), f"out={tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    correct = [one["num_correct"] for one in found["completions"]]
    assert len(correct) == 6 and len(set(correct)) > 1
    for k in (1, 3):
        draws = [list(itertools.combinations([place < one for place in range(5)], k)) for one in correct]
        expected = np.mean([np.mean([any(draw) for draw in one]) for one in draws])
        assert found["metrics"][f"eval/pass@{k}"] == pytest.approx(expected, abs=1e-12)
    rewards = [one["reward"] for one in found["completions"]]
    assert found["metrics"]["eval/accuracy"] == np.mean([reward >= CORRECT_REWARD for reward in rewards])
    assert [one["row"].rpartition(":")[2] for one in found["completions"]] == list("123456")


@pytest.mark.slow
def test_recipes_that_learn_from_answers_are_asked_the_same_as_one_that_is_rewarded(trained, tmp_path, capsys):
    """Rows with an answer in another form have its text as a column, so that a reward judges them as it judges others."""
    for recipe in ("sft", "dpo"):
        folder = trained(recipe)
        capsys.readouterr()  # of the training, where this test is the first that needs it
        for data in ([], ["data=arithmetic"]):
            words = [*data, "reward=number", "eval.pass_at=[]", f"out={tmp_path}/found.json"]
            assert run(["eval", str(folder), *words]) == 0
        own, other = capsys.readouterr().out.split("written to ")[:2]
        shown = [line for line in own.splitlines() if " -> " in line]
        assert len(shown) == 3 and shown == [line for line in other.splitlines() if " -> " in line]


def test_a_run_of_another_recipe_is_evaluated_in_an_environment(trained, tmp_path):
    assert run(["eval", str(trained("sft")), "env=arithmetic", f"out={tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["env"].startswith("Arithmetic(") and len(found["completions"]) == 6
    assert found["rows"]["first"].startswith("env[eval]:") and "eval/reward" in found["metrics"]


@pytest.mark.slow
def test_a_checkpoint_and_a_model_are_evaluated_too(trained, capsys):
    folder = trained("dpo")
    assert run(["eval", str(checkpoint(folder)), "eval.pass_at=[2]"]) == 0
    assert "eval/pass@2" in capsys.readouterr().out
    assert any("eval/pass@2" in path.read_text() for path in (folder / "evals").iterdir())
    assert run(["eval", str(folder), "recipe=sft"]) == 2
    error = "config.yaml has settled the recipe and all that it chooses; drop recipe=sft\n"
    assert capsys.readouterr().err.endswith(error)
    for model in ("tiny", str(packaged("data") / "tiny")):
        assert run(["eval", model, "eval.limit=6"]) == 0
        out = capsys.readouterr().out
        assert "written to" not in out and "judged by Number(answer_only=True, column='answer')" in out
        accuracy = next(line.split()[1] for line in out.splitlines() if line.startswith("eval/accuracy"))
        assert accuracy == f"{rows(trained('grpo'))[0]['eval/accuracy']:.1%}"  # where the run started from


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (
                "reward=number",
                "eval: expected a run or a model before 'reward=number', for example: cookbook eval tiny reward=number",
            ),
            ("./nothing", "model.name: no such folder './nothing'; pass a local folder or a Hugging Face hub id"),
            ("empty", "empty: this run has no checkpoint yet; wait for one, or lower checkpoint.every"),
            ("tiny data.eval_path=null", "data: there are no held-out rows to evaluate on; name rows with data=FILE, "),
            ("tiny rewrd=number", "unknown key 'rewrd'. Did you mean 'reward'? (cookbook train --cfg job prints every key)"),
            ("tiny ~reward", "reward: recipe=grpo learns from rewards; choose one, for example reward=number"),
            (
                "tiny reward.column=x",
                '{data}/arithmetic/prompts_eval.jsonl:1: reward: no column "x", the row has prompt, answer; set ',
            ),
            (
                "tiny recipe=sft eval.max_tokens=1",
                "eval: no row has a question and an answer of up to eval.max_tokens=1 tokens; ",
            ),
            ("tiny out=folder", "out: cannot write to folder: Is a directory; give a file, for example out=result.json"),
        ],
        fast=2,
    ),
)
def test_what_cannot_be_evaluated(words, message, capsys):
    Path("empty").mkdir()
    Path("folder").mkdir()
    write("empty/config.yaml", "seed: 0\n")
    assert run(["eval", *words.split(), "eval.limit=2"] if "nothing" not in words else ["eval", words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: " + message.format(data=packaged("data"))) and err.count("\n") == 1


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_data_that_the_command_names_are_evaluated_whole(trained, capsys):
    folder = str(trained("sft"))
    lines = [json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) for n in range(7)]
    write("test.jsonl", "\n".join(lines) + "\n")
    whole = "7 rows from test.jsonl:1, judged by token equality"
    for words in (["data=test.jsonl"], ["data.path=test.jsonl"], ["data=jsonl", "data.path=test.jsonl", "data.format=auto"]):
        assert run(["eval", folder, *words, "eval.limit=null", "out=x.json"]) == 0
        out = capsys.readouterr().out
        assert whole in out and "eval/loss " in out
    assert run(["eval", folder, "data=test.jsonl", "eval.limit=2", "out=x.json"]) == 0
    assert "2 rows from test.jsonl:1" in capsys.readouterr().out
    # A key that says which rows are held out keeps its meaning.
    assert run(["eval", folder, "data=test.jsonl", "data.eval_fraction=0.3", "out=x.json"]) == 0
    assert "2 rows from test.jsonl:" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_reward_that_hangs_ends_an_evaluation_and_names_the_row(capsys):
    write(
        "mine.py",
        "import time\n\n\ndef hang(completion, row):\n    time.sleep(600 if row['prompt'] == '8+41=' else 0)\n    return 1\n",
    )
    words = ["reward=python", "reward.target=mine.py:hang", "reward.timeout_s=3", "eval.limit=4"]
    assert run(["eval", "tiny", *words]) == 2
    where = f"{packaged('data')}/arithmetic/prompts_eval.jsonl:3"
    message = f"error: {where}: the reward has not returned after 3 s; fix the reward or row, or raise reward.timeout_s\n"
    assert capsys.readouterr().err == message


@pytest.mark.usefixtures("here")
def test_evaluations_that_ask_the_same_have_the_same_fingerprint():
    write("mine.py", "def f(completion, row):\n    return 1\n")

    def fingerprint(reward=None, rows="a", stop=(), **values):
        judge = None if reward is None else RewardRunner(reward)
        return Evaluator(EvalConfig(**values), None, None, judge, stop, 0).fingerprint(rows)

    same = [fingerprint(Number()), fingerprint(Number(workers=2, timeout_s=1)), fingerprint(Number(), pass_at=[2], every=1)]
    assert len(set(same)) == 1
    own = Python("mine.py:f")
    others = [fingerprint(), fingerprint(Number("x")), fingerprint(Exact()), fingerprint(own), fingerprint(lambda *_: 1)]
    others += [fingerprint(Number(), "b"), fingerprint(Number(), max_tokens=9), fingerprint(Number(), stop=["x"])]
    write("mine.py", "def f(completion, row):\n    return 0\n")
    others.append(fingerprint(own))
    assert len({same[0], *others}) == 1 + len(others)


# The answer of a row


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}, "2"),
        ({"messages": [{"role": "user", "content": "1+1="}]}, None),
        ({"prompt": "1+1=", "completion": "2"}, "2"),
        ({"prompt": "1+1=", "completion": [{"role": "assistant", "content": "2"}]}, "2"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "2"),
        ({"chosen": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], "rejected": "3"}, "2"),
        ({"prompt": "1+1=", "completion": "two", "answer": 2}, 2),
        ({"prompt": "1+1="}, None),
        ({"prompt": "1+1=", "completion": 7}, "7"),
    ],
)
def test_what_a_reward_gets_as_the_answer(values, answer):
    row = with_answer(Row("here:1", values), DataConfig())
    assert row.values.get("answer") == answer and row.where == "here:1"
    assert {**values, "answer": answer} == {"answer": None, **row.values}


# Beside each other


@pytest.mark.slow
def test_runs_are_compared(trained, changed, capsys):
    folders = [str(trained("grpo")), str(changed)]
    for folder in folders:
        assert run(["eval", folder, "eval.pass_at=[2]", "eval.max_tokens=8"]) == 0
    capsys.readouterr()
    assert run(["compare", *folders]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split() for line in out.splitlines() if line]
    assert lines[:2] == [["differs", "in", "grpo", "changed"], ["optim.lr", "0.0001", "0.01"]]
    before, after = (f"{row['eval/accuracy']:.1%}" for row in rows(folders[0]))
    place = lines.index(["eval/accuracy", "by", "reward=number", after, "80.0%"])
    best = [before, "(step", "0)"] if float(before[:-1]) >= float(after[:-1]) else [after, "(step", "1)"]
    assert lines[place + 1] == ["at", "best", *best, "90.0%", "(step", "0)"]
    assert sum(line.startswith("cookbook eval: 6 rows from ") for line in out.splitlines()) >= 1
    assert any(line[0] == "eval/pass@2" and "-" not in line for line in lines)  # the same weights: both were asked


@pytest.mark.slow
def test_runs_with_other_questions_are_not_compared_silently(trained, changed, capsys):
    assert run(["compare", str(trained("sft")), str(trained("dpo"))]) == 0
    err = capsys.readouterr().err
    assert err.startswith(
        "warning: the runs were not evaluated on the same rows with the same reward while they trained (sft: "
    )
    assert "they differ in data.eval_path, reward" in err and err.count("\n") == 1
    runs = report.read_runs([str(trained("grpo")), str(changed)])
    assert report.warnings(runs) == []
    cooler = {**runs[1].config, "eval.temperature": 0.5}
    (warning,) = report.warnings([runs[0], report.RunSummary("b", cooler, "", runs[1].rows, [])])
    assert warning == "pass@k was drawn with eval.temperature of 0.5 and 1.0, and depends on it"
    moved = [{**row, FINGERPRINT: row["step"]} for row in runs[1].rows]
    told = report.warnings([runs[0], report.RunSummary("b", runs[0].config, "", moved, [])])
    assert "their configurations agree there, so the rows themselves have changed" in told[0]
    assert told[1] == "b: from step 1 on, evaluated on other rows or with another reward than before"
    (silent,) = report.warnings([runs[0], report.RunSummary("b", runs[0].config, "", [], [])])
    assert silent == "b: not evaluated while training; cookbook eval RUN does it now"


@pytest.mark.usefixtures("here")
def test_what_is_no_run_cannot_be_compared(trained, capsys):
    for words, message in (
        ([str(trained("sft"))], "compare: expected two runs or more, got 1; for example: cookbook compare runs/a runs/b"),
        (
            [str(trained("sft")), f"{trained('grpo')}o"],
            f"compare: {trained('grpo')}o is not a run (no config.yaml). Did you mean 'grpo'?",
        ),
    ):
        assert run(["compare", *words]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("words", [["sample", "tiny", "1+1=", "--max-tokens", "2"], ["eval", "tiny", "eval.limit=2"]])
@pytest.mark.slow
def test_the_garbage_collector_runs_again_after_start_up(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cookbook", *words])
    try:
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0 and gc.isenabled()
    finally:
        gc.enable()
