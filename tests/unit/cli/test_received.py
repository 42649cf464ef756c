"""A folder of a run that another person made: no command runs code that only the folder's configuration names."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from runtools import checkpoint, inside, write

from cookbook.cli.app import run
from cookbook.config import received
from cookbook.config.recipe import load
from cookbook.run.identity import Identity

WORDS = ["recipe=sft", "recipe.steps=1", "recipe.batch_size=2", "data.limit=4", "eval.limit=2", "eval.every=null"]
EVIL = "from pathlib import Path\nPath('ran').touch()\nclass Evil:\n    pass\ndef evil(*words):\n    return 1.0\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with inside(tmp_path_factory.mktemp("own")) as folder:
        assert run(["train", *WORDS, "out=run"]) == 0
        yield folder / "run"


@pytest.fixture
def folder(own, tmp_path):
    """A copy of a run in the current folder, which holds a Python file besides."""
    with inside(tmp_path):
        shutil.copytree(own, "run")
        write("evil.py", EVIL)
        # As the command does.
        sys.path.append(str(tmp_path))
        yield Path("run")


def popen() -> dict[str, Any]:
    return {"_target_": "subprocess.Popen", "args": ["touch", "ran"]}


def change(folder: Path, key: str, value: object) -> None:
    """Set a dotted key of the stored configuration."""
    file = folder / "config.yaml"
    config = yaml.safe_load(file.read_text())
    *groups, last = key.split(".")
    node = config
    for group in groups:
        node[group] = node.get(group) or {}
        node = node[group]
    node[last] = value
    file.write_text(yaml.safe_dump(config, sort_keys=False))


def refused(capsys, words: list[str], key: str) -> str:
    capsys.readouterr()
    assert run(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert not Path("ran").exists()
    assert "run/config.yaml" in error and f" {key}: " in error
    return error


REWARD = "cookbook.sampling.rewards"
PYTHON = {"_target_": f"{REWARD}.Python", "target": "evil.py:evil"}
WEIGHTED = {"_target_": f"{REWARD}.Weighted", "parts": {"a": PYTHON}}
JUDGE = {"_target_": f"{REWARD}.judge.Judge", "url": "http://example.com/v1", "model": "m"}
ENV = {"_target_": "cookbook.sampling.environments.PythonEnvironment", "target": "evil.py:Evil"}
AGENT = {"_target_": "cookbook.sampling.environments.AgentEnvironment", "command": "touch ran"}
JOB = {"_target_": "cookbook.jobs.local.LocalJob", "setup": ["touch ran"]}
VLLM = {"_target_": "cookbook.deployments.vllm.deployment.VllmConfig", "python": "./evil.py"}


@pytest.mark.parametrize(
    ("key", "value", "refused_key"),
    [
        *((key, popen(), f"{key}._target_") for key in ("reward", "env", "job", "backend", "deployment", "loss", "optim.lr")),
        ("hook.mine", popen(), "hook.mine._target_"),
        ("tracker.mine", popen(), "tracker.mine._target_"),
        ("data.path", [popen()], "data.path[0]._target_"),
        ("loss._target_", "evil.Evil", "loss._target_"),
        ("checkpoint._target_", "cookbook.utils.files.write_text", "checkpoint._target_"),
        ("weight_sync._target_", "cookbook.server.rank:run", "weight_sync._target_"),
        ("hydra.callbacks.mine", popen(), "hydra"),
        ("defaults", ["train"], "defaults"),
        ("out", "ran", "out"),
        ("recipe.name", "../run/sft", "recipe.name"),
        ("model.trust_remote_code", True, "model.trust_remote_code"),
        ("model.revision", "${oc.env:HOME}", "model.revision"),
        ("backend.head_impl", "evil.py:evil", "backend.head_impl"),
        ("model.attn_implementation", "owner/kernel", "model.attn_implementation"),
        ("env", ENV, "env.target"),
        ("env", AGENT, "env.command"),
        ("reward", PYTHON, "reward.target"),
        ("reward", WEIGHTED, "reward.parts.a.target"),
        ("reward", JUDGE, "reward.url"),
        ("job", JOB, "job.setup"),
        ("deployment", VLLM, "deployment.python"),
    ],
)
def test_eval_refuses_code_that_the_folder_names(folder, capsys, key, value, refused_key):
    change(folder, key, value)
    refused(capsys, ["eval", "run"], refused_key)


def test_every_way_to_a_run_is_guarded(folder, capsys):
    change(folder, "reward", popen())
    step = checkpoint(folder)
    for words in (["run"], [str(step)], ["run@step-1"], ["run", "eval.limit=1"], ["run", "reward={args: [true]}"]):
        error = refused(capsys, ["eval", *words], "reward._target_")
    assert error.endswith(
        "a folder of a run may name only cookbook's own configuration classes, got 'subprocess.Popen'; if you trust it, add "
        "reward._target_=subprocess.Popen to the command, or choose another with reward=NAME"
    )


@pytest.mark.parametrize(
    "words", [["sample", "run", "1+1=", "--max-tokens=1"], ["chat", "run"], ["view", "run"], ["compare", "run", "run2"]]
)
def test_commands_that_need_no_configuration_run_none(folder, capsys, monkeypatch, words):
    for group in ("reward", "env", "backend", "deployment", "hydra"):
        change(folder, group, popen())
    shutil.copytree("run", "run2")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(words) == 0
    assert not Path("ran").exists()


def test_resuming_imports_no_class_that_only_the_folder_names(folder, capsys):
    change(folder, "loss._target_", "evil.Evil")
    capsys.readouterr()
    assert run(["train", *WORDS, "out=run"]) == 2
    assert "loss._target_: the run in run was made with 'evil.Evil'" in capsys.readouterr().err
    assert not Path("ran").exists()


def test_a_class_of_the_own_configuration_is_compared_with_its_defaults(folder):
    write("own.py", "from dataclasses import dataclass\n@dataclass\nclass Own:\n    a: int = 1\n")
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"reward": {"_target_": "own.Own", "a": 1}}
    identity = Identity(config, load("sft").Config)
    identity.compare_config("a run", config | {"reward": {"_target_": "own.Own"}})


def test_the_user_names_code_again(folder, capsys):
    change(folder, "reward", {**PYTHON, "workers": 0, "timeout_s": None})
    change(folder, "hook.mine._target_", "evil.Evil")
    hook = "hook.mine._target_=evil.Evil"
    # The refused line says what to write.
    assert "add reward.target=evil.py:evil to the command" in refused(capsys, ["eval", "run", hook], "reward.target")
    assert f"add {hook} to the command" in refused(capsys, ["eval", "run", "reward=number"], "hook.mine._target_")
    assert run(["eval", "run", hook, "reward.target=evil.py:evil", "eval.max_tokens=1", "out=a.json"]) == 0
    assert Path("ran").exists() and json.loads(Path("a.json").read_text())["metrics"]["eval/reward"] == 1.0


def test_a_choice_of_the_command_line_replaces_refused_code(folder):
    change(folder, "reward", popen())
    change(folder, "hook.mine", popen())
    assert run(["eval", "run", "reward=number", "~hook.mine", "eval.max_tokens=1", "out=a.json"]) == 0
    assert not Path("ran").exists() and Path("a.json").exists()


def test_a_recipe_of_the_current_folder_is_named_again(folder, capsys):
    assert run(["fork", "sft", "mine"]) == 0
    change(folder, "recipe.name", "mine")
    refused(capsys, ["eval", "run"], "recipe.name")
    assert run(["eval", "run", "recipe.name=mine", "out=a.json"]) == 0


def test_a_file_that_is_not_the_configuration_of_a_run_is_refused(folder, capsys):
    Path("run/config.yaml").write_text(yaml.safe_dump({"recipe": "sft", "reward": popen()}))
    assert run(["eval", "run"]) == 2
    assert capsys.readouterr().err == "error: run/config.yaml: is not the configuration of a run; restore the file\n"
    assert not Path("ran").exists()


def test_classes_of_conf_are_the_packages_own():
    names = received.packaged_targets()
    assert "cookbook.losses.grpo.GRPO" in names and all(name.startswith("cookbook.") for name in names)
