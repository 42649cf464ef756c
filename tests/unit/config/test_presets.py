"""Defaults follow the model and the data: today's demo for the shipped ones, values for real models for any other."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from marks import rest_slow
from omegaconf import OmegaConf
from runtools import here, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra import conf_files
from cookbook.cli.hydra.bridge import ComposeRequest
from cookbook.cli.hydra.bridge import run as run_job
from cookbook.config.nodes import build
from cookbook.errors import ConfigError
from cookbook.run.settings import settings
from cookbook.utils import paths

pytestmark = pytest.mark.usefixtures("here")

RECIPES = ("sft", "grpo", "dpo", "orpo", "distill")
CONSTANT, LINEAR = "cookbook.config.optim.Constant", "cookbook.config.optim.Linear"
# What the commands `cookbook train recipe=...` and `make train` run.
TINY = {"model.dtype": "float32", "model.lora_rank": 0, "rollout.max_tokens": 16, "eval.max_tokens": 16, "eval.limit": 200}
PAIRS = {"recipe.steps": None, "recipe.epochs": 1, "recipe.batch_size": 32, "data.chat": True, "schedule.warmup_steps": 0}
DEMO: dict[str, dict[str, Any]] = {
    "sft": {
        **TINY, "model.random": True, "recipe.steps": None, "recipe.epochs": 18, "recipe.batch_size": 64, "optim.lr": 3e-3,
        "schedule._target_": LINEAR, "schedule.warmup_steps": 40, "schedule.warmup_ratio": None, "eval.every": 100,
    },
    "grpo": {
        **TINY, "model.random": False, "recipe.steps": 50, "recipe.prompts_per_step": 32, "recipe.group_size": 8,
        "optim.lr": 1e-4, "schedule._target_": CONSTANT, "schedule.warmup_steps": 0, "schedule.warmup_ratio": None,
        "eval.every": 10, "data.chat": True,
    },
    "dpo": {
        **TINY, **PAIRS, "model.random": False, "optim.lr": 5e-5, "schedule._target_": CONSTANT, "schedule.warmup_ratio": None,
        "eval.every": 20,
    },
    "orpo": {
        **TINY, **PAIRS, "model.random": False, "optim.lr": 3e-4, "schedule._target_": CONSTANT, "schedule.warmup_ratio": None,
        "eval.every": 20,
    },
    "distill": {
        **TINY, "model.random": False, "recipe.steps": 20, "recipe.prompts_per_step": 32, "recipe.group_size": 4,
        "optim.lr": 2e-4, "schedule._target_": CONSTANT, "schedule.warmup_steps": 0, "schedule.warmup_ratio": None,
        "eval.every": 5,
    },
}  # fmt: skip
LONG = {"rollout.max_tokens": 512, "eval.max_tokens": 512, "schedule.warmup_steps": 0}
EPOCHS = {**LONG, "recipe.batch_size": 32, "eval.every": 100}
# TRL 1.16 trains every parameter with 2e-5 (SFT) and 1e-6 (the others).
REAL: dict[str, dict[str, Any]] = {
    "sft": {**EPOCHS, "recipe.epochs": 3, "optim.lr": 2e-5, "schedule.warmup_ratio": 0.03},
    "grpo": {
        **LONG, "recipe.steps": 200, "recipe.prompts_per_step": 16, "optim.lr": 1e-6, "schedule.warmup_ratio": None,
        "eval.every": 20,
    },
    "dpo": {**EPOCHS, "recipe.epochs": 1, "optim.lr": 1e-6, "schedule.warmup_ratio": 0.1},
    "orpo": {**EPOCHS, "recipe.epochs": 1, "optim.lr": 1e-6, "schedule.warmup_ratio": 0.1},
    "distill": {
        **LONG, "recipe.steps": 200, "recipe.prompts_per_step": 32, "optim.lr": 1e-5, "schedule.warmup_ratio": None,
        "eval.every": 20,
    },
}  # fmt: skip
SHIPPED = {  # model and data that the demo's values are for
    "sft": {("tiny_random", "arithmetic_chat"), ("tiny", "arithmetic_chat")},
    "grpo": {("tiny", "arithmetic")},
    "distill": {("tiny", "arithmetic")},
    "dpo": {("tiny", "arithmetic_pairs")},
    "orpo": {("tiny", "arithmetic_pairs")},
}
MODELS = [file.name for file in conf_files.options("model") if file.origin == "packaged"]
DATA = [file.name for file in conf_files.options("data") if file.origin == "packaged"]
NAMED = {"hf": ["model.name=a/b"], "hub": ["data.name=a/b"], "jsonl": ["data.path=rows.jsonl"]}


def composed(*words: str) -> Any:
    """The configuration that a run of the command gets."""
    seen: list[Any] = []
    run_job(ComposeRequest(words), lambda cfg, _: seen.append(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))))
    return seen[0]


def values(cfg: Any, keys: Any) -> dict[str, Any]:
    return {key: OmegaConf.select(cfg, key) for key in keys}


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    return str(caught.value)


def check_pair(recipe: str, model: str, data: str) -> None:
    cfg = composed(f"recipe={recipe}", f"model={model}", f"data={data}", *NAMED.get(model, []), *NAMED.get(data, []))
    expected = dict(REAL[recipe])
    if (model, data) in SHIPPED[recipe]:
        expected = {key: DEMO[recipe][key] for key in expected}
    assert values(cfg, expected) == expected
    assert cfg.model.random is (model == "tiny_random")


# The demo


@pytest.mark.parametrize("recipe", rest_slow(RECIPES, fast=2))
def test_the_bare_recipe_is_todays_demo(recipe):
    assert values(composed(f"recipe={recipe}"), DEMO[recipe]) == DEMO[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_a_fork_is_the_same_demo_in_two_files(recipe, capsys):
    assert run(["fork", recipe, "mine"]) == 0
    written = [path for path in Path().rglob("*") if path.is_file()]
    assert len(written) == 2
    assert values(composed("recipe=mine"), DEMO[recipe]) == DEMO[recipe]
    assert values(composed("recipe=mine", "model=qwen3_0p6b"), REAL[recipe]) == REAL[recipe]


def test_a_fork_from_before_there_was_a_demo_still_composes():
    write_conf("recipe/old.yaml", "# @package _global_\nrecipe:\n  name: grpo\noptim:\n  lr: 0.5\n")
    assert composed("recipe=old").optim.lr == 0.5


def write_conf(name: str, text: str) -> None:
    path = Path("conf") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# Any other model or data


@pytest.mark.parametrize("recipe", RECIPES)
def test_demo_values_exist_for_the_shipped_pairs_alone(recipe):
    stems = {file.name for file in conf_files.options(f"demo/{recipe}")}
    assert stems == {f"{model}_{data}" for model, data in SHIPPED[recipe]}
    others = {f"{model}_{data}" for model, data in product(MODELS, DATA) if (model, data) not in SHIPPED[recipe]}
    assert not stems & others  # two names may make the same stem


# Three pairs per recipe: together every model once and every data preset twice. Composing all pairs takes a minute.
@pytest.mark.parametrize(("recipe", "place"), rest_slow([(recipe, place) for recipe in RECIPES for place in range(3)], fast=2))
def test_no_demo_value_outside_of_the_demo(recipe, place):
    shift = RECIPES.index(recipe)
    check_pair(recipe, MODELS[(4 * place + shift) % len(MODELS)], DATA[(2 * place + shift) % len(DATA)])


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_demo_value_outside_of_the_demo_in_all_pairs(recipe):
    for model, data in product(MODELS, DATA):
        check_pair(recipe, model, data)


@pytest.mark.slow
def test_no_steps_of_warmup_switch_off_the_recipes_share():
    words = ["recipe=sft", "model=hf", "model.name=a/b"]
    steps, ratio = keys = ("schedule.warmup_steps", "schedule.warmup_ratio")
    assert values(composed(*words, f"{steps}=0"), keys) == {steps: 0, ratio: None}
    assert values(composed(*words, f"{steps}=0", f"{ratio}=0.5"), keys) == {steps: 0, ratio: 0.5}
    seen = []
    run_job(
        ComposeRequest([*words, f"{steps}=0,7"], multirun=True),
        lambda cfg, _: seen.append(build(cfg.schedule, "schedule").warmup(1000)),
    )
    assert seen == [0, 7]
    write("old.yaml", yaml.safe_dump(OmegaConf.to_container(composed(*words), resolve=True)))
    seen.clear()
    for typed in ([], [f"{steps}=0"]):  # the file of an earlier run has the default steps, 0, beside its ratio
        run_job(
            ComposeRequest(typed, config_file=Path("old.yaml")),
            lambda cfg, _: seen.append(build(cfg.schedule, "schedule").warmup(1000)),
        )
    assert seen == [30, 0]


@pytest.mark.parametrize("recipe", rest_slow(RECIPES))
def test_an_adapter_learns_ten_times_as_fast(recipe):
    cfg = composed(f"recipe={recipe}", "model=hf", "model.name=a/b", "model.lora_rank=16")
    assert cfg.optim.lr == pytest.approx(10 * REAL[recipe]["optim.lr"], rel=1e-12)
    assert composed(f"recipe={recipe}", "model=qwen3_8b", "model.lora_rank=16", "optim.lr=7").optim.lr == 7


# What people type. Each line: the words, and what it has to mean.

HF, JSONL, HUB = (
    {"model.dtype": "auto", "model.random": False},
    {"data.chat": False, "data.eval_path": None},
    {"data.path": None},
)
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("recipe=sft model=Qwen/Qwen3-0.6B", {**HF, "model.name": "Qwen/Qwen3-0.6B"}),
    ("recipe=sft model=./folder", {**HF, "model.name": "./folder"}),
    ("recipe=sft model=folder", {**HF, "model.name": "folder"}),
    ("recipe=sft model=gpt2", {**HF, "model.name": "gpt2"}),
    ("recipe=sft model='with space'", {**HF, "model.name": "with space"}),
    ("recipe=sft model.name=./folder", {**HF, "model.name": "./folder"}),
    ("recipe=orpo model.name=./folder", {**HF, "model.name": "./folder"}),
    ("recipe=sft model=tiny model.name=./folder", {"model.random": False, "model.name": "./folder"}),
    ("recipe=sft data=chats.jsonl", {**JSONL, "data.path": "chats.jsonl", "model.random": False}),
    ("recipe=dpo data=none/there.parquet", {**JSONL, "data.path": "none/there.parquet"}),
    ("recipe=sft data=folder", {**JSONL, "data.path": "folder"}),
    ("recipe=sft data=folder/slip", {**JSONL, "data.path": "folder/slip"}),
    ("recipe=sft data=trl-lib/Capybara", {**HUB, "data.name": "trl-lib/Capybara", "model.random": False}),
    ("recipe=grpo data.path=chats.jsonl", {**JSONL, "data.path": "chats.jsonl"}),
    ("recipe=grpo data.name=trl-lib/tldr", {**HUB, "data.name": "trl-lib/tldr"}),
    ("recipe=sft data=arithmetic_chat data.path=chats.jsonl", {"data.path": "chats.jsonl"}),
    ("recipe=grpo data=gsm8k data.path=folder", {"data.path": "folder", "data.columns.prompt": "question"}),
    ("recipe=grpo env=a/my.py:Game data.path=folder", {"env.target": "a/my.py:Game", "env.workers": 1}),
    ("recipe=grpo reward=my.py:score data.path=folder", {"reward.target": "my.py:score", "reward.workers": 1}),
    ("experiment=grpo_gsm8k data.path=folder", {"data.columns.prompt": "question", "model.name": "Qwen/Qwen3-0.6B"}),
]


@pytest.mark.parametrize(("words", "expected"), rest_slow(FORMS, fast=5), ids=[words for words, _ in FORMS])
def test_a_name_in_place_of_a_preset(words, expected):
    Path("folder").mkdir()
    Path("with space").mkdir()
    write("chats.jsonl", "{}\n")
    typed = ["recipe=sft", "model='with space'"] if "with space" in words else words.split()
    cfg = composed(*typed)
    assert values(cfg, expected) == expected
    rate = {} if cfg.model.lora_rank == 0 else {"optim.lr": 1e-5}
    assert values(cfg, REAL[cfg.recipe.name]) == REAL[cfg.recipe.name] | rate


@pytest.mark.slow
def test_a_name_in_a_file_of_the_user():
    write_conf("experiment/mine.yaml", "# @package _global_\nmodel:\n  name: ./folder\n")
    cfg = composed("recipe=sft", "experiment=mine")
    assert values(cfg, REAL["sft"]) == REAL["sft"] and cfg.model.random is False


def test_presets_come_first():
    Path("tiny").mkdir()
    assert composed("recipe=grpo", "model=tiny").model.name == f"{paths.packaged('data')}/tiny"
    preset = (paths.packaged("conf") / "model" / "_base.yaml").read_text()
    write_conf("model/mine/big.yaml", preset.replace("???", "a/b").replace("lora_rank: 0", "lora_rank: 5"))
    assert composed("recipe=grpo", "model=mine/big").model.lora_rank == 5


def test_data_of_a_class_of_its_own_are_not_the_demo():
    cfg = composed("recipe=grpo", "data={_target_: mine.Data, path: rows.jsonl}")
    assert cfg.data._target_ == "mine.Data" and values(cfg, REAL["grpo"]) == REAL["grpo"]


@pytest.mark.slow
def test_a_sweep_over_names():
    seen = []
    words = ["recipe=sft", "model=a/b,c/d"]
    run_job(ComposeRequest(words, multirun=True), lambda cfg, _: seen.append((cfg.model.name, cfg.model.random, cfg.optim.lr)))
    assert seen == [("a/b", False, 2e-5), ("c/d", False, 2e-5)]
    seen.clear()
    run_job(ComposeRequest(["model.name=a/b,c/d"], multirun=True), lambda cfg, _: seen.append((cfg.model.name, cfg.optim.lr)))
    assert seen == [("a/b", 1e-6), ("c/d", 1e-6)]
    seen.clear()
    run_job(ComposeRequest(["model=tiny,qwen3_0p6b"], multirun=True), lambda cfg, _: seen.append(cfg.optim.lr))
    assert seen == [1e-4, 1e-6]


@pytest.mark.slow
def test_a_sweep_over_recipes_never_trains_fresh_weights_on_other_data():
    line = "model: recipe=sft starts from fresh weights, which suit its own data alone; add model=tiny, or choose yours with "
    for data in ("data=rows.jsonl", "data=rows.jsonl,others.jsonl", "data.path=rows.jsonl"):
        with pytest.raises(ConfigError, match=f"^{line}"):
            run_job(ComposeRequest(["recipe=dpo,sft", data], multirun=True), lambda *_: None)
    seen = []
    for words in (["data=rows.jsonl", "model=tiny"], ["data.limit=9"]):
        run_job(ComposeRequest(["recipe=dpo,sft", *words], multirun=True), lambda cfg, _: seen.append(cfg.model.random))
    assert seen == [False, False, False, True]


def test_of_an_earlier_run_the_model_alone_changes():
    write("old.yaml", yaml.safe_dump(OmegaConf.to_container(composed("recipe=grpo", "optim.lr=0.25"))))
    seen = []
    run_job(ComposeRequest(["model=./folder"], config_file=Path("old.yaml")), lambda cfg, _: seen.append(cfg))
    assert seen[0].model.name == "./folder" and seen[0].optim.lr == 0.25


def test_serve_takes_a_name_too(capsys):
    assert run(["serve", "--cfg", "job", "model=Qwen/Qwen3-0.6B"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["name"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (["model=qwen3_0p6"], "unknown model 'qwen3_0p6'. Did you mean 'qwen3_0p6b'? (choices: "),
            (["model="], "model: no option given (choices: "),
            (["data=gsm8"], "unknown data 'gsm8'. Did you mean 'gsm8k'? (choices: "),
            (["model=a/b", "model.name=c/d"], "model: model=a/b and model.name=... both name one; drop one of them"),
            (["model=a/b,c/d"], "'model.name=a/b,c/d' is a list of values: add -m to sweep over them"),
            (
                ["model=tiny,a/b"],
                "model: a sweep takes files of conf/model, or names, or paths, and no mixture, got tiny,a/b; ",
            ),
            (["demo=gpro"], "unknown demo 'gpro'. Did you mean 'grpo'? (choices: none, distill, dpo, grpo, kto, orpo, sft)"),
            (["~demo"], "~demo: write demo=none"),
            (["~data"], "data: expected keys and values, got nothing; choose a file of conf/data/"),
        ],
        fast=2,
    ),
    ids=" ".join,
)
def test_a_word_that_names_nothing_is_one_line(words, message):
    assert refusal(*words).startswith(message)


def test_a_typo_in_the_name_of_your_folder_or_file():
    Path("my-model").mkdir()
    write("my-model/config.json", "{}")
    write("chats.jsonl", "{}\n")
    model, data = refusal("model=my-modle"), refusal("data=chats")
    assert model.startswith("unknown model 'my-modle'. Did you mean 'my-model'? (choices: ")
    assert model.endswith("tiny_random; model=owner/name or model=./folder)")
    assert data.startswith("unknown data 'chats'. Did you mean 'chats.jsonl'? (choices: ")
    assert data.endswith("two_digits; data=FILE or data=owner/name)")


@pytest.mark.slow
def test_what_was_understood_is_said_where_it_is_not_obvious(capsys):
    Path("folder").mkdir()
    composed("recipe=sft", "model=folder", "data=a/b")
    assert capsys.readouterr().err == "model=folder means model=hf model.name=folder\ndata=a/b means data=hub data.name=a/b\n"
    composed("recipe=sft", "data=rows/chats.jsonl")
    said = "model: uses model=tiny, the shipped one of 0.6M parameters; choose yours with model=owner/name or model=./folder\n"
    assert capsys.readouterr().err == said
    composed("recipe=sft", "model=Qwen/Qwen3-0.6B", "data=./chats.jsonl")
    assert capsys.readouterr().err == ""


# The type of the weights


@pytest.mark.parametrize(("stored", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_weights_are_loaded_as_they_are_stored(stored, expected):
    import torch
    from transformers import AutoModelForCausalLM

    from cookbook.engine.model import ModelConfig, fresh_network, load

    shipped = paths.packaged("data") / "tiny"
    AutoModelForCausalLM.from_pretrained(shipped, dtype=getattr(torch, stored)).save_pretrained("stored")
    for file in shipped.glob("*token*"):
        Path("stored", file.name).write_bytes(file.read_bytes())
    loaded = load(ModelConfig("stored", dtype="auto"), torch.device("cpu"), 0)
    assert loaded.config.dtype == expected
    assert {one.dtype for one in loaded.network.parameters()} == {getattr(torch, expected)}
    assert next(fresh_network(ModelConfig("stored", dtype="auto")).parameters()).dtype == getattr(torch, expected)
    assert settings(composed("recipe=sft", "model=./stored")).model.dtype == "auto"
