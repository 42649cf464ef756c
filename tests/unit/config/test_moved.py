"""Runs and files from before modules moved: run_700e00b/ was made by commit 700e00b, which had other names for them."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from runtools import here, rows, train, write

from cookbook.config import python_file
from cookbook.config.moved import moved_names, new_name
from cookbook.config.typed import resolve_target
from cookbook.errors import ConfigError, CookbookError
from cookbook.run import Run

__all__ = ["here"]

OLD = ROOT / "tests" / "support" / "run_700e00b"
COMMAND = ["--config", "run/config.yaml", "out=run"]


@pytest.fixture
def old_run(here: Path) -> Path:
    """A GRPO run of three steps, with its model and data, and the rows of the same run without the interruption."""
    shutil.copytree(OLD, here, dirs_exist_ok=True)
    return here / "run"


def test_a_run_of_700e00b_resumes_and_its_metrics_continue(old_run, capsys):
    assert "_target_: cookbook.rollout.RolloutConfig" in (old_run / "config.yaml").read_text()
    assert train(*COMMAND, "recipe.steps=4") == 0
    shown = capsys.readouterr()
    assert "_target_" not in shown.out + shown.err
    resumed, whole = rows(old_run), rows(".", "whole.jsonl")
    assert [row["step"] for row in resumed] == [0, 1, 2, 3, 4]
    numbers = {key: value for key, value in whole[4].items() if not key.startswith("time/")}
    # The stored rows come from another machine: float sums may differ there.
    assert {key: resumed[4][key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-6)
    saved = json.loads((old_run / "checkpoints/step-000004/checkpoint.json").read_text())
    assert saved["run"]["identity"]["rollout"]["_target_"] == new_name("cookbook.rollout.RolloutConfig")


# The command that made the run; today's presets have the new names.
WORDS = [
    "recipe=grpo",
    "model=tiny",
    "model.name=model",
    "data=jsonl",
    "data.path=rows.jsonl",
    "data.columns.prompt=question",
    "data.columns.completion=answer",
    "data.eval_fraction=0.25",
    "reward=format",
    "reward.pattern='[a-m]'",
    "rollout.max_tokens=6",
    "eval.max_tokens=6",
    "eval.every=2",
    "recipe.prompts_per_step=4",
    "recipe.group_size=4",
    "schedule=constant",
    "loss.kl_beta=0.1",
    "weight_sync.every=2",
    "optim.lr=0.01",
    "checkpoint.every=1",
]


def test_a_composed_command_resumes_a_run_of_700e00b(old_run, capsys):
    assert train(*WORDS, "recipe.steps=4", "out=run", "resume=auto") == 0
    changed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed: "))
    assert "recipe.steps 3 -> 4" in changed and "_target_" not in changed


def test_another_reward_is_another_run(old_run, capsys):
    words = [word for word in WORDS if not word.startswith("reward")]
    assert train(*words, "reward=exact", "out=run", "resume=auto") == 2
    assert "reward._target_: the run in run was made with 'cookbook.sampling.rewards.Format'" in capsys.readouterr().err


MOVED = {old: new for old, new in moved_names().items() if old.startswith("cookbook.")}
RUN_ATTRIBUTES = {old.removeprefix("run."): new for old, new in moved_names().items() if old not in MOVED}


def test_every_moved_module_is_found():
    for old, new in MOVED.items():
        if "/" in new:
            assert (ROOT / new).is_file(), f"{old} -> {new}"
            continue
        module, _, name = new.rpartition(".")
        assert new_name(new) == new, f"{new} is taken for an old name"
        try:
            importlib.import_module(new)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), f"{old} -> {new}"


def test_todays_targets_are_not_taken_for_old_names():
    targets = {
        target for file in ROOT.glob("conf/**/*.yaml") for target in re.findall(r"_target_: *([\w.:]+)", file.read_text())
    }
    assert len(targets) > 20
    assert {new_name(target) for target in targets} == targets


def test_the_table_is_read_only_for_names_of_cookbook():
    """Start-up imports the module ``moved``, but must not read the table."""
    code = """
import cookbook.cli.app, cookbook.config.typed, cookbook.config.python_file
from cookbook.config.moved import moved_names, new_name
new_name("mine.Reward")
assert moved_names.cache_info().misses == 0
assert new_name("cookbook.rollout") == "cookbook.sampling.rollouts"
assert moved_names.cache_info().misses == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_an_old_target_is_followed():
    for old in ("cookbook.rewards.Number", "cookbook.rewards:Number", "cookbook.rewards.shipped.Number"):
        assert resolve_target(old) is resolve_target("cookbook.sampling.rewards.Number")


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        ("from cookbook.rollout import RolloutConfig", "cookbook.rollout", "cookbook.sampling.rollouts"),
        ("from cookbook import rollout", "cookbook.rollout", "cookbook.sampling.rollouts"),
        ("import cookbook.rewards.worker", "cookbook.rewards", "cookbook.sampling.rewards"),
    ],
)
def test_a_file_that_imports_an_old_module_gets_the_new_name(here, line, old, new):
    write("mine.py", f"{line}\n\nclass Mine:\n    pass\n")
    expected = f"imports {old}, which is now {new}; change the import"
    with pytest.raises(ConfigError) as caught:
        python_file.named("mine.py:Mine", "reward.target", signature="()")
    assert str(caught.value) == f"mine.py: {expected}"
    with pytest.raises(ConfigError) as caught:
        resolve_target("mine.Mine", "hook.mine._target_")
    assert str(caught.value) == f"hook.mine._target_: mine {expected}"


def test_other_import_errors_stay(here):
    write("mine.py", "from cookbook.errors import NothingLikeIt\n")
    with pytest.raises(ImportError, match="NothingLikeIt"):
        python_file.run(Path("mine.py"), "mine")


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        ("from cookbook.run import Evaluate", "cookbook.run.Evaluate", "cookbook.run.run.Evaluate"),
        ("from cookbook.run import Batches", "cookbook.run.Batches", "cookbook.data.datum_table.Batches"),
        (
            "from cookbook.deployments.vllm import VllmDeployment",
            "cookbook.deployments.vllm.VllmDeployment",
            "cookbook.deployments.vllm.deployment.VllmDeployment",
        ),
        ("from cookbook.losses import Batch", "cookbook.losses.Batch", "cookbook.losses.LossBatch"),
        ("from cookbook.protocols import TrainingClient", "cookbook.protocols.TrainingClient", "cookbook.protocols.Trainer"),
        *(
            (f"from cookbook.{old.rpartition('.')[0]} import {old.rpartition('.')[2]}", f"cookbook.{old}", f"cookbook.{new}")
            for old, new in {
                "check.Verdict": "check.CheckResult",
                "check.bench.Passport": "losses.base.Loss",
                "checkpoints.Cadence": "checkpoints.schedule.SaveInterval",
                "checkpoints.delta.Entry": "checkpoints.delta.TensorDelta",
                "checkpoints.inventory.Entry": "checkpoints.inventory.CheckpointEntry",
                "checkpoints.store.Remembering": "engine.engine.Engine",
                "checkpoints.store.Trained": "engine.engine.Engine",
                "data.Refusal": "data.RejectedRow",
                "data.Refusals": "data.RejectedRows",
            }.items()
        ),
        # Second step of a user who has followed the module to its new place.
        ("from cookbook.data.rows import Refusals", "cookbook.data.rows.Refusals", "cookbook.data.rows.RejectedRows"),
        (
            "from cookbook.sampling.rewards.worker import Workers",
            "cookbook.sampling.rewards.worker",
            "cookbook.sampling.rewards.runner",
        ),
        (
            "from cookbook.data.byte_tokenizer import byte_tokenizer",
            "cookbook.data.byte_tokenizer",
            "scripts/make_tiny_model.py",
        ),
    ],
)
def test_an_import_of_an_old_name_gets_its_new_place(here, line, old, new):
    write("mine.py", f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        python_file.run(Path("mine.py"), "mine")
    assert str(caught.value) == f"mine.py: imports {old}, which is now {new}; change the import"


def test_an_attribute_of_the_run_that_has_moved_names_the_new_one():
    run = object.__new__(Run)
    for name in RUN_ATTRIBUTES:
        with pytest.raises(CookbookError, match=rf"^run\.{name} has moved; use "):
            getattr(run, name)
        assert not hasattr(run, name)
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'nonsense'"):
        run.nonsense()
