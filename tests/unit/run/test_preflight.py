"""``cookbook check config`` refuses what ``cookbook train`` refuses before its first step, and warns of the same values."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from marks import rest_slow
from runtools import SMALL, checkpoint, here, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.utils import files
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")

TINY = packaged("data") / "tiny"


def check(*words: str) -> int:
    return run(["check", "config", *words])


def refusals(capsys, *words: str) -> tuple[str, str]:
    """The last line of both commands on stderr, each of which must refuse."""
    found = []
    for command in (check, train):
        assert command(*words) == 2
        found.append(capsys.readouterr().err.splitlines()[-1])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (["recipe=sft", "model.name=./m"], "model.name: no such folder './m'"),
            (["recipe=sft", "model.name=empty"], "model.name: cannot load the tokenizer in 'empty': no config.json; "),
            (
                ["recipe=sft", "model.lora_rank=500"],
                "model.lora_rank: must be at most the model's hidden size of 128, got 500",
            ),
            (["recipe=sft", "model.lora_rank=2", "model.lora_target_modules=[nope]"], "model.lora_target_modules: "),
            (["recipe=sft", "model.attn_implementation=none"], "model.attn_implementation: "),
            (
                ["recipe=sft", "model.chat_template=none.jinja"],
                "model.chat_template: cannot read 'none.jinja'",
            ),
            (["recipe=sft", "recipe.steps=0"], "recipe.steps must be at least 1, got 0"),
            (
                ["recipe=sft", "recipe.batch_size=0"],
                "recipe.batch_size must be at least 1, got 0",
            ),
            (["recipe=sft", "recipe.epochs=0"], "recipe.epochs must be at least 1, got 0"),
            (
                ["recipe=sft", "data.max_length=5000"],
                "data.max_length=5000 is above the model's context of 4096 tokens",
            ),
            (["recipe=sft", "data.max_length=5"], f"{packaged('data')}/arithmetic/chat_eval.jsonl:1: 29 tokens, and 5 fit"),
            (["recipe=sft", "data.path=none.jsonl"], "data.path: "),
            (
                ["recipe=dpo", "data=arithmetic_chat"],
                f"{packaged('data')}/arithmetic/chat_train.jsonl:1: the columns are messages",
            ),
            (
                ["recipe=grpo", "rollout.max_tokens=5000"],
                f"{packaged('data')}/arithmetic/prompts_train.jsonl:1: a prompt of 25",
            ),
            (
                ["recipe=grpo", "reward.column=gold"],
                f"{packaged('data')}/arithmetic/prompts_eval.jsonl:1: reward: no column",
            ),
            (["recipe=sft", "deployment=vllm", "deployment.python=none"], "deployment.python: "),
            (
                ["recipe=sft", "deployment=vllm", "model.dtype=float64"],
                "deployment.dtype: vLLM serves float32 or bfloat16",
            ),
            (
                ["recipe=grpo", "deployment=vllm", "deployment.name=shared", "deployment.max_length=20"],
                "deployment.max_length: completions may have ",
            ),
            (
                ["recipe=sft", "deployment=vllm", "deployment.name=shared", "deployment.max_length=20"],
                "deployment.max_length: completions may have ",
            ),
            (["recipe=sft", "out=file/run"], "out: cannot write to file/run: Not a directory"),
        ],
        fast=3,
    ),
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_what_train_refuses_check_config_refuses_too(words, message, capsys):
    Path("empty").mkdir()
    Path("file").write_text("")
    checked, trained = refusals(capsys, "data.limit=50", *words)
    assert checked == trained and checked.startswith(f"error: {message}")


@pytest.mark.slow
def test_a_device_and_packages_that_are_not_here(monkeypatch, capsys):
    import importlib.util

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else found(name, *rest))
    gone = {"wandb", "tensorboard", "trackio", "mlflow", "math_verify", "lm_eval", "torchao"}
    for words, message in (
        (["backend.device=cuda"], "backend.device: this machine has no usable GPU"),
        (["tracker=wandb"], "tracker: wandb is not installed"),
        (["tracker=tensorboard"], "tracker: tensorboard is not installed"),
        (["tracker=trackio"], "tracker: trackio is not installed; pip install 'post-training-cookbook[trackio]'"),
        (["reward=math_verify"], "reward=math_verify: math-verify is not installed"),
        (["reward=[number,ifeval]"], "reward=ifeval: lm-eval is not installed"),
        (["tracker=mlflow"], "tracker: mlflow is not installed; pip install 'post-training-cookbook[mlflow]'"),
    ):
        checked, trained = refusals(capsys, "recipe=sft", *words)
        assert checked == trained and checked.startswith(f"error: {message}")


@pytest.mark.slow
def test_weights_that_are_missing_or_torn(capsys):
    for name in ("none", "torn"):
        shutil.copytree(TINY, name)
    Path("none/model.safetensors").unlink()
    torn = Path("torn/model.safetensors")
    torn.write_bytes(torn.read_bytes()[:100])
    for name, message in (("none", "model.name: 'none' has no weights"), ("torn", "model.name: cannot read 'torn/model.")):
        checked, trained = refusals(capsys, "recipe=grpo", f"model.name={name}")
        assert checked.startswith(f"error: {message}")
        assert trained.startswith("error: model.name: cannot load the weights in ") and f"/{name}'" in trained
    assert check("recipe=grpo", "model.name=none", "model.random=true") == 0


@pytest.mark.slow
def test_a_run_that_cannot_be_resumed(capsys):
    assert train(*SMALL["dpo"], "out=run") == 0
    capsys.readouterr()
    branch = f"resume={checkpoint('run')}"
    for words, message in (
        (["out=run", "model.lora_rank=2"], "model.lora_rank: the run in run was made with 0, now it is 2"),
        (["out=run", "resume=never"], "out: run holds a run already"),
        (["out=branch", branch], "recipe.steps: branch starts after 3 of 3 steps"),
        (["out=run", "data.limit=8"], "data.limit: the run in run was made with 24, now it is 8"),
    ):
        checked, trained = refusals(capsys, *SMALL["dpo"], *words)
        assert checked == trained and checked.startswith(f"error: {message}")
    with files.locked(Path("run")):
        assert refusals(capsys, *SMALL["dpo"], "out=run")[0].startswith("error: out: another process")
    write("mine.jsonl", '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 40)
    words = [*SMALL["dpo"], "data=jsonl", "data.path=mine.jsonl", "eval.limit=4", "out=mine"]
    assert train(*words) == 0
    write("mine.jsonl", '{"prompt": "1+1=", "chosen": "2", "rejected": "4"}\n' * 40)
    capsys.readouterr()
    checked, trained = refusals(capsys, *words, "recipe.steps=4")
    assert checked == trained and checked.startswith("error: data: the digest of the training rows: ")


def test_a_model_of_the_hub_is_not_read_and_the_network_not_asked(monkeypatch, capsys):
    def refuse(*address, **options):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert check("recipe=sft", "model.name=some/where") == 0
    found = capsys.readouterr()
    line = "some/where, its weights, the type of its files; trains every parameter; of the hub, not read"
    assert f"\nmodel        {line}\n" in found.out
    assert found.err == ""
    assert check("recipe=grpo", "model=qwen3_0p6b", "data=gsm8k") == 0


@pytest.mark.slow
def test_a_model_of_a_server_need_not_be_here(capsys):
    words = ["recipe=sft", "model.name=./there", "model.random=false", "backend=remote", "backend.base_url=http://localhost:1"]
    assert check(*words, "optim.lr=1e-5") == 0
    assert "; of the server, not read\n" in capsys.readouterr().out
    assert check(*words, "model.lora_rank=2", "model.lora_target_modules=[q_proj]") == 2
    assert capsys.readouterr().err.startswith("error: model.lora_target_modules: a server supports adapters on attention")
    assert check(*words, "deployment=vllm") == 2
    assert capsys.readouterr().err.startswith("error: deployment=vllm needs backend=local")


# Values that do not fit


def warnings(capsys, *words: str) -> list[str]:
    assert check(*words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("WARNING: ") for line in lines)
    return [line.removeprefix("WARNING: ") for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", rest_slow(["sft", "dpo", "orpo", "grpo"]))
def test_the_demo_fits(recipe, capsys):
    assert warnings(capsys, f"recipe={recipe}") == []


def wide(folder: str) -> str:
    """The tiny model's configuration with the numbers of a model of 170M parameters, and no weights."""
    shutil.copytree(TINY, folder)
    Path(folder, "model.safetensors").unlink()
    Path(folder, "model.bin").write_text("")  # never opened
    config = Path(folder, "config.json")
    numbers = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}
    config.write_text(json.dumps({**json.loads(config.read_text()), **numbers}))
    return f"model.name={folder}"


@pytest.mark.slow
def test_a_learning_rate_far_above_what_is_usual(capsys):
    big = [wide("big"), "model.random=false", "data.limit=64", "eval.limit=8"]
    for words, key, usual in (
        (["recipe=sft", "optim.lr=3e-4"], "optim.lr=0.0003: 15 times the 2e-5 that is usual for SFT of all parameters", "2e-5"),
        (["recipe=dpo", "optim.lr=5e-5"], "optim.lr=5e-05: 50 times the 1e-6 that is usual for preference training", "1e-6"),
        (["recipe=grpo", "optim.lr=2e-4", "model.lora_rank=4"], "optim.lr=0.0002: 20 times the 1e-5 that is usual", "1e-5"),
    ):
        (line,) = warnings(capsys, *words, *big)
        assert line.startswith(key) and f"; set optim.lr={usual}, " in line
    assert warnings(capsys, "recipe=sft", *big, "optim.lr=2e-4") == []
    assert warnings(capsys, "recipe=sft", *big, "optim.lr=2e-3", "model.lora_rank=4") == []
    assert warnings(capsys, "recipe=sft", *big[:1], *big[2:], "optim.lr=3e-3", "model.random=true") == []
    assert warnings(capsys, "recipe=sft", *big, "backend.optimizer=adafactor", "optim=adafactor", "optim.lr=3e-3") == []


@pytest.mark.parametrize(
    ("words", "rate"),
    [(["recipe=sft"], "2e-05"), (["recipe=dpo"], "1e-06"), (["recipe=grpo", "model.lora_rank=2"], "1e-05")],
)
@pytest.mark.slow
def test_the_rate_of_a_recipe_is_for_adamw(capsys, words, rate):
    words = [*words, "demo=none", "recipe.steps=10", "rollout.max_tokens=16", "eval.max_tokens=32", "data.limit=640"]
    adafactor = ["backend.optimizer=adafactor", "optim=adafactor"]
    (line,) = warnings(capsys, *words, *adafactor)
    assert line.startswith(f"optim.lr={rate}: the recipe's rate for AdamW, ") and "; set optim.lr=1e-3, as conf/optim" in line
    assert warnings(capsys, *words, *adafactor, "optim.lr=1e-3") == []
    assert warnings(capsys, *words) == []


@pytest.mark.slow
def test_completions_shorter_than_the_answers_of_the_data(capsys):
    long = "one two three four five six"  # 27 bytes, and the end of the turn
    write("long.jsonl", "".join(json.dumps({"prompt": f"{n}+1=", "answer": long}) + "\n" for n in range(40)))
    words = [
        "recipe=grpo",
        "model=tiny",
        "data=jsonl",
        "data.path=long.jsonl",
        "data.eval_path=long.jsonl",
        "reward=exact",
        "recipe.steps=2",
    ]
    sizes = ["recipe.prompts_per_step=4", "optim.lr=1e-6", "rollout.max_tokens=16", "eval.max_tokens=28"]
    (line,) = warnings(capsys, *words, *sizes)
    assert line == (
        "rollout.max_tokens=16: 95% of the data's own answers have up to 28 tokens, and longer ones earn no reward; "
        "set rollout.max_tokens=28 or more"
    )
    assert warnings(capsys, *words, *sizes, "rollout.max_tokens=28") == []
    (line,) = warnings(capsys, *words, *sizes, "rollout.max_tokens=28", "eval.max_tokens=27")
    assert line.startswith("eval.max_tokens=27: 95% ")


def test_answers_of_a_large_data_set_are_counted_in_a_sample(capsys):
    rows = [{"prompt": f"{n}+1=", "answer": "x" * 40} for n in range(900)]
    write("many.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "recipe=grpo",
        "model=tiny",
        "data=jsonl",
        "data.path=many.jsonl",
        "reward=exact",
        "recipe.steps=2",
        "optim.lr=1e-6",
    ]
    (line,) = warnings(capsys, *words, "rollout.max_tokens=16", "data.eval_fraction=0")
    assert "up to 41 tokens (in a sample of 500 of 900 rows), and longer" in line


@pytest.mark.slow
def test_evaluation_longer_than_training_and_rows_fewer_than_a_batch(capsys):
    words = ["recipe=dpo", "recipe.steps=null", "recipe.epochs=1", "data.limit=320", "recipe.batch_size=16"]
    assert warnings(capsys, *words, "eval.every=10", "eval.limit=20") == []
    (line,) = warnings(capsys, *words, "eval.every=1", "eval.limit=300")
    assert line.startswith("eval.every=1: 21 evaluations of 300 rows take about ") and line.endswith("eval.max_tokens")
    (line,) = warnings(capsys, *words, "eval.every=1", "data.limit=10", "recipe.steps=3")  # a trial: no word of evaluation
    assert line == (
        "recipe.batch_size=16: the data have 10 rows to train on, so no step gets more than 10; add rows, or lower "
        "recipe.batch_size"
    )


@pytest.mark.slow
def test_train_says_the_same_in_its_first_lines(capsys):
    words = [*SMALL["orpo"], "data.limit=3", "recipe.steps=1", "out=run"]
    lines = warnings(capsys, *words)
    assert len(lines) == 1 and train(*words) == 0
    assert capsys.readouterr().err == f"WARNING: {lines[0]}\n"
    log = Path("run/log.txt").read_text()
    assert log.index(lines[0]) < log.index("saved run/checkpoints")
