"""A YAML file of the user: its keys are those of the command line, and no key of a file is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import cookbook
from cookbook.cli.app import run
from cookbook.cli.hydra import main_keys, own_file
from cookbook.cli.hydra.bridge import ComposeRequest, complete_override, show
from cookbook.cli.hydra.bridge import run as run_job
from cookbook.config import recipe as recipes
from cookbook.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def composed(*words: str, values: dict | None = None) -> dict:
    """Return the configuration as a run gets it, by dotted key."""
    seen = []
    run_job(ComposeRequest(words, values=values or {}), lambda cfg, _: seen.append(OmegaConf.to_container(cfg, resolve=True)))
    return seen[0]


MINE = """# A file as people write it.
recipe: sft
model: ./m
model.lora_rank: 4
data: rows (2).jsonl
reward: null
tracker: off
optim:
  lr: 1e-4
  beta2: 0.99
recipe.steps: 3
model.chat_template_kwargs: {enable_thinking: false}
"""
SAME = [
    "recipe=sft", "model=./m", "model.lora_rank=4", "data='rows (2).jsonl'", "reward=none", "tracker=none", "optim.lr=1e-4",
    "optim.beta2=0.99", "recipe.steps=3", "model.chat_template_kwargs={enable_thinking: false}",
]  # fmt: skip


def test_the_keys_of_a_file_are_those_of_the_command_line():
    write("my.yaml", MINE)
    assert composed("my.yaml") == composed(*SAME)
    assert composed("my.yaml", "optim.lr=3", "model=tiny", "seed=7") == composed(
        *[word for word in SAME if not word.startswith(("optim.lr", "model="))], "optim.lr=3", "model=tiny", "seed=7"
    )
    # The option of earlier releases, and Python's arguments.
    seen = []
    run_job(ComposeRequest(config_file=Path("my.yaml")), lambda cfg, _: seen.append(OmegaConf.to_container(cfg, resolve=True)))
    assert seen[0] == composed(*SAME) == composed(values=yaml.safe_load(MINE.replace("1e-4", "0.0001")))


def test_a_choice_of_the_command_line_takes_the_place_of_the_files():
    write("my.yaml", "recipe: {name: dpo, steps: 2}\nmodel: {name: ./m, lora_rank: 2}\ndata: {path: rows.jsonl}\n")
    assert composed("my.yaml", "model=./other", "data=arithmetic_pairs", "recipe=orpo") == composed(
        "recipe=orpo", "recipe.steps=2", "model=./other", "model.lora_rank=2", "data=arithmetic_pairs"
    )


def test_several_files_and_a_component():
    write("base.yaml", "recipe: grpo\noptim: {lr: 1, beta1: 0.5}\nreward: [number, format]\n")
    write("own.yaml", "optim.lr: 2\noptim.eps: 1e-3\nschedule: {_target_: my.Schedule, warmup_steps: 3}\n")
    cfg = composed("base.yaml", "own.yaml", "optim.eps=1")
    assert (cfg["optim"]["lr"], cfg["optim"]["beta1"], cfg["optim"]["eps"]) == (2, 0.5, 1)
    assert cfg["schedule"] == {"_target_": "my.Schedule", "warmup_steps": 3}
    assert list(cfg["reward"]["parts"]) == ["number", "format"]
    assert composed("own.yaml", "schedule=cosine")["schedule"]["_target_"].endswith("Cosine")


def test_the_configuration_of_a_run_is_a_file(capsys):
    write("runs/a/config.yaml", show(ComposeRequest(["recipe=dpo", "optim.lr=0.25"]), "job", resolve=True))
    again = yaml.safe_load(show(ComposeRequest(["runs/a/config.yaml", "seed=3"]), "job"))
    assert again == {**yaml.safe_load(Path("runs/a/config.yaml").read_text()), "seed": 3}
    # A copy in which a group is a preset again.
    changed = {**again, "model": "hf", "model.name": "./m"}
    write("copy.yaml", yaml.safe_dump(changed))
    cfg = composed("copy.yaml")
    assert (cfg["model"]["name"], cfg["optim"]["lr"]) == ("./m", 0.25)
    write("runs/a/config.yaml", yaml.safe_dump(again) + "sede: 4\n")
    assert run(["train", "runs/a/config.yaml", "--cfg", "job"]) == 2
    line = Path("runs/a/config.yaml").read_text().count("\n")
    assert f"runs/a/config.yaml:{line}: unknown key 'sede'. Did you mean 'seed'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: sft\noptim:\n  lrr: 1\n", "my.yaml:3: unknown key 'optim.lrr'. Did you mean 'optim.lr'?"),
        ("recipe: sft\nlearning_rate: 1e-4\n", "my.yaml:2: unknown key 'learning_rate'; write optim.lr: 0.0001"),
        ("recipe: stf\n", "my.yaml:1: unknown recipe 'stf'. Did you mean 'sft'?"),
        ("recipe: sft\n\nmodel: nope\n", "my.yaml:3: unknown model 'nope'."),
        ("recipe: sft\noptim.lr: fast\n", "my.yaml:2: optim.lr: expected a number, got 'fast'"),
        ("recipe: sft\noptim: {lr: -1}\n", "my.yaml:2: optim: lr must be >= 0 and finite, got -1"),
        ("recipe: sft\noptim: null\n", "my.yaml:2: optim: expected a name, got nothing; choose one of"),
        ("optim.lr: 1\noptim: {lr: 2}\n", "my.yaml:2: optim.lr is set twice; drop one of them"),
        ("recipe: sft\nrecipe.steps: 010\n", "my.yaml:2: 010 is the number 8 in YAML, which reads it in base 8; write 10,"),
        ("a: [1:30]\n", "my.yaml:1: 1:30 is the number 90 in YAML, which reads it in base 60; write"),
        ("recipe: sft\n  steps: 3\n", "my.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("recipe:\n\tsteps: 3\n", "my.yaml:2: not valid YAML: found character '\\t' that cannot start any token; indent with"),
        ("seed: 1\nseed: 2\n", "my.yaml:2: not valid YAML: found duplicate key seed"),
        ("- 1\n", "my.yaml: holds no keys; write keys as on the command line, such as recipe: sft"),
        ("# only a comment\n", "my.yaml: is empty; write keys"),
        ("defaults: [base]\n", "my.yaml:1: defaults: expected 'override /GROUP: NAME', got 'base'; write GROUP: NAME as a key"),
    ],
)
def test_a_slip_in_a_file_names_its_line(text, message, capsys):
    write("my.yaml", text)
    assert run(["train", "my.yaml", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_file_that_is_absent_or_not_text(capsys):
    Path("bytes.yaml").write_bytes(b"recipe: \xff\n")
    Path("folder.yaml").mkdir()
    for name, message in {
        "no.yaml": "no.yaml: not found; write one with: cookbook init sft no.yaml",
        "bytes.yaml": "bytes.yaml: is not UTF-8 text; save it as UTF-8",
        "folder.yaml": "folder.yaml: is a folder; name the file, such as folder.yaml/config.yaml",
    }.items():
        assert run(["train", name]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    "value",
    [
        "a", "true", "10", "it's", "back\\", "a\\'b", "x\\\\'", "new\nline", "ünï (2).jsonl", "a,b", "[x]", "{x}", "", "~",
        "~/x", "a=b", "#x", "a;b&c!d^e", [1, "x", None, {"a": 1.5}], {"X-Api-Key": "v", "a b": 1, "a:b": 2}, 1e-05, True,
    ],
)  # fmt: skip
def test_every_value_of_yaml_reaches_the_configuration(value):
    write("my.yaml", yaml.safe_dump({"recipe": "sft", "model.chat_template_kwargs": {"x": value}}, allow_unicode=True))
    assert composed("my.yaml")["model"]["chat_template_kwargs"] == {"x": value}


# Files of ./conf


def test_plain_keys_of_an_experiment_work():
    write("conf/experiment/mine.yaml", "recipe: sft\nmodel: tiny\noptim: {lr: 2}\n")
    write("conf/local/default.yaml", "seed: 7\noptim: {lr: 1, eps: 1}\n")
    cfg = composed("experiment=mine", "recipe.steps=3")
    assert (cfg["recipe"]["name"], cfg["recipe"]["steps"], cfg["model"]["random"]) == ("sft", 3, False)
    assert (cfg["seed"], cfg["optim"]["lr"], cfg["optim"]["eps"]) == (7, 2, 1)
    assert not {"experiment", "local"} & set(cfg)
    write("conf/experiment/mine.yaml", "# @package _global_\nrecipe: dpo\noptim.lr: 2\n")
    assert composed("experiment=mine")["recipe"]["name"] == "dpo"
    write(
        "conf/experiment/hydras.yaml",
        "# @package _global_\ndefaults:\n  - override /recipe: sft\nbase: 4\neval: {limit: '${base}'}\n",
    )
    cfg = composed("experiment=hydras")
    assert (cfg["recipe"]["name"], cfg["eval"]["limit"]) == ("sft", 4)


@pytest.mark.parametrize(
    ("path", "text", "words", "message"),
    [
        ("conf/experiment/a.yaml", "recipe: sft\noptimm: {lr: 1}\n", ["experiment=a"], "conf/experiment/a.yaml:2: unknown key"),
        (
            "conf/experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /recipe: sft\nsede: 3\n",
            ["experiment=a"],
            "conf/experiment/a.yaml:4: unknown key 'sede'. Did you mean 'seed'?",
        ),
        ("conf/experiment/a.yaml", "seed: 1\n", ["experiment=a,sft_chat", "-m"], "conf/experiment/a.yaml:1: a sweep over"),
        (
            "conf/optim/a.yaml",
            "_target_: cookbook.config.OptimConfig\nlrr: 3\n",
            ["optim=a"],
            "conf/optim/a.yaml:2: unknown key 'optim.lrr'. Did you mean 'lr'?",
        ),
        (
            "conf/local/default.yaml",
            "# @package _global_\noptim:\n  lr: fast\n",
            [],
            "conf/local/default.yaml:3: optim.lr: expected a number, got 'fast'",
        ),
    ],
)
def test_no_key_of_a_file_in_conf_is_ignored(path, text, words, message, capsys):
    write(path, text)
    assert run(["check", "config", *words] if "-m" not in words else ["train", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


# cookbook init, --cfg job, completion, Python


@pytest.mark.parametrize("recipe", [info.name for info in recipes.available()])
def test_init_writes_the_defaults(recipe, capsys):
    words = ["recipe.teacher=./t"] if recipe == "distill" else []
    assert run(["init", recipe, "my file.yaml", "model=./m", "data=rows.jsonl", *words]) == 0
    assert "cookbook train 'my file.yaml'" in capsys.readouterr().out
    text = Path("my file.yaml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 132
    own = ["my file.yaml"]
    defaults = [f"recipe={recipe}", "model=./m", "data=rows.jsonl", *words]
    assert composed(*own) == composed(*defaults)
    # Every line that states a default does so, with a value that YAML reads back.
    uncommented = "\n".join(line.removeprefix("# ") for line in text.splitlines() if not line.startswith("#   "))
    write("all.yaml", uncommented.partition("key to change it.")[2] + f"\nrecipe: {recipe}\nmodel: ./m\ndata: rows.jsonl\n")
    assert uncommented.count(": ") > 20
    assert composed("all.yaml", *words) == composed(*defaults)
    assert run(["init", recipe, "my file.yaml"]) == 2
    assert "my file.yaml exists; name another file" in capsys.readouterr().err


def test_init_without_a_recipe_or_with_an_unknown_key(capsys):
    assert run(["init"]) == 2
    assert "choices: distill, dpo, grpo, kto, orpo, sft" in capsys.readouterr().err
    assert run(["init", "sft", "lr=1"]) == 2
    assert "unknown key 'lr'; write optim.lr=1" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_init_reads_the_words_as_train_does(capsys):
    assert run(["init", "sft", "my.yaml", "data=support chats (2).jsonl"]) == 0
    assert "\ndata: support chats (2).jsonl\n" in Path("my.yaml").read_text(encoding="utf-8")
    assert run(["init", "sft", "other.yaml", "optim.lr=[1,"]) == 2
    assert "error: cannot read 'optim.lr=[1,'" in capsys.readouterr().err
    assert not Path("other.yaml").exists()


def test_the_folded_configuration_fits_a_screen():
    for recipe in ("sft", "grpo", "dpo"):
        whole = show(ComposeRequest([f"recipe={recipe}"]), "job")
        text = main_keys.folded(whole)
        assert len(text.splitlines()) <= 50
        folded = len(list(leaves(yaml.safe_load(whole)))) - len(list(leaves(yaml.safe_load(text))))
        assert text.splitlines()[-1] == f"# {folded} more keys: add --all"
        kept = yaml.safe_load(text)
        assert {group: kept[group] for group in ("seed", "out")} == {"seed": 0, "out": None}
        assert kept["optim"]["lr"] == yaml.safe_load(whole)["optim"]["lr"]


def leaves(node: dict):
    for group, value in node.items():
        yield from ([f"{group}.{key}" for key in value] or [group]) if isinstance(value, dict) else [group]


def test_files_are_completed():
    write("my.yaml", MINE)
    assert "my.yaml" in complete_override([], "m", [])
    assert "model.lora_rank=" in complete_override(["my.yaml"], "model.lora_r", [])


def test_arguments_of_python_that_yaml_cannot_hold():
    with pytest.raises(ConfigError, match=r"train: optim.lr: expected a text, number, list or dict, got object; a class"):
        cookbook.train(recipe="sft", optim={"lr": object()})
    with pytest.raises(ConfigError, match=r"unknown key 'optim.lrr'. Did you mean 'optim.lr'\?"):
        cookbook.train(recipe="sft", model=Path("m"), optim={"lrr": 1})
    with pytest.raises(ConfigError, match=r"^train: overrides is a list of texts, got 3 in it"):
        cookbook.train(recipe="sft", overrides=[3])
    with pytest.raises(ConfigError, match=r"^model: expected a name, got nothing"):
        cookbook.train(recipe="sft", model=None)
    with pytest.raises(DataError, match=r"no.jsonl does not exist") as info:
        cookbook.train(recipe="sft", model="tiny", data="no.jsonl")
    assert [Path(entry.path).name for entry in info.traceback] == ["test_own_file.py", "python_api.py"]


def test_a_word_with_an_equals_sign_is_an_override_unless_it_is_a_file():
    assert not own_file.is_file("data=rows.yaml")
    write("lr=1/my.yaml", MINE)
    assert own_file.is_file("lr=1/my.yaml")
