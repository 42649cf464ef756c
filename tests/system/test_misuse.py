"""Mistakes of users: one line with place, problem, value and remedy; exit code 2; no files left behind."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import refusing
import torch
import yaml
from children import in_child, limit_files
from marks import rest_slow
from runtools import BRIEF, ROOT, SMALL, checkpoint, files, here, rows, timeless, train, write  # noqa: F401 - here is a fixture
from safetensors.torch import load_file, save_file

from cookbook.checkpoints import manifest
from cookbook.cli.app import run
from cookbook.utils.files import write_text
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")
T = TypeVar("T")
TINY = packaged("data") / "tiny"
TALK = '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}\n'


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line a run is refused with. It has left nothing of its own in the current folder."""
    before = files(Path())
    assert train(*words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "Traceback" not in out + err
    assert files(Path()) == before
    assert not Path("runs").exists() and not Path("run").exists()
    return err.removeprefix("error: ").rstrip("\n")


def copy_of_tiny(name: str, *without: str) -> Path:
    shutil.copytree(TINY, name)
    for file in without:
        Path(name, file).unlink()
    return Path(name)


# What is typed. Every other slip of the command line is in test_cli.py; here the real job stands behind it.


# Each case is a command of half a second: CI runs those marked slow.
@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            ("optin.lr=1", "unknown key 'optin.lr'; write optim.lr=1"),
            ("recipe.name=grop", "recipe.name: unknown recipe 'grop'. Did you mean 'grpo'? (choices: distill, dpo"),
            ("recipe.steps=2.5", "recipe.steps: expected a whole number, got 2.5"),
            (
                "backend.optimizer=adafactor",
                "backend.optimizer: adafactor has no first moment and computes the decay of the second moment itself",
            ),
            (
                "optim=adafactor",
                "optim: beta1=0 and beta2=0 are for backend.optimizer=adafactor; with adamw every step would be ",
            ),
            ("recipe.steps=0", "recipe.steps must be at least 1, got 0"),
            ("recipe.group_size=1", "recipe.group_size must be at least 2, got 1: a group of one has no spread"),
            ("recipe.advantage=zscor", "recipe.advantage: expected one of zscore, centered, rloo, maxrl, got 'zscor'"),
            ("recipe.prompts_per_step=0", "recipe.prompts_per_step must be at least 1, got 0"),
            ("eval.limit=0", "eval.limit must be at least 1, got 0; null takes all rows"),
            ("rollout.temperature=0", "rollout.temperature must be > 0, got 0.0: "),
            ("resume=null", "resume: expected text, got null"),
            (
                "resume=always",
                "resume: always is neither a checkpoint nor a run with one; expected auto, force, never or such a path",
            ),
            ("loss=dpo", "loss: recipe=grpo trains on rollouts, and DPO compares pairs; choose another loss "),
            ("recipe=sft loss=ppo", "loss: recipe=sft trains on conversations, and PPO needs advantages, sampling_logprobs; "),
            (
                "recipe=dpo loss=cross_entropy",
                "loss: recipe=dpo trains on preferences, and CrossEntropy does not compare pairs; ",
            ),
            ("~reward", "reward: recipe=grpo learns from rewards; choose one, for example reward=number"),
            ("reward=python", "reward.target: missing; Python needs text"),
            ("reward=python reward.target=mine.py:f", "reward.target: mine.py does not exist in "),
            (
                "+hook.mine._target_=no_hooks.Mine",
                "hook.mine._target_: the module 'no_hooks' is neither in this folder ",
            ),
            ("backend.device=cuda:99", "backend.device: "),
            ("backend.device=mps", "backend.device: the GPU of a Mac does not support float64"),
            ("backend.device=meta", "backend.device: expected auto, cpu or cuda"),
            ("model.lora_rank=-1", "model.lora_rank must be >= 0, got -1; 0 trains every parameter"),
        ]
        + [
            pytest.param(words, message, marks=pytest.mark.slow)
            for words, message in (
                (
                    "optim.lrr=1",
                    "unknown key 'optim.lrr'. Did you mean 'optim.lr'? (cookbook train --cfg job prints every key)",
                ),
                ("recipe=grop", "unknown recipe 'grop'. Did you mean 'grpo'? (choices: distill, dpo, grpo, kto, orpo, sft)"),
                ("loss._target_=cookbook.losses.GPRO", "loss._target_: 'cookbook.losses' has no 'GPRO'. Did you mean 'GRPO'?"),
                ("optim.lr=fast", "optim.lr: expected a number, got 'fast'"),
                ("recipe=sft recipe.steps=0", "recipe.steps must be at least 1, got 0"),
                (
                    "model.lora_rank=2 model.lora_target_modules=[nope]",
                    "model.lora_target_modules: Target modules {'nope'} not found",
                ),
            )
        ],
        fast=3,
    ),
)
def test_a_slip_in_the_configuration(words, message, capsys):
    assert refused(capsys, *words.split()).startswith(message)


def test_a_slip_in_a_recipe_of_ones_own(capsys):
    assert run(["fork", "sft", "mine"]) == 0
    capsys.readouterr()
    code = Path("recipes/mine.py").read_text()
    write("recipes/mine.py", code + "def broken(:\n")
    assert refused(capsys, "recipe=mine").startswith(f"recipes/mine.py:{code.count(chr(10)) + 1}: not valid Python: ")
    write("recipes/mine.py", code.replace("batch_size: int = 32", "batches: int = 32"))
    assert refused(capsys, "recipe=mine").startswith(
        "conf/recipe/mine.yaml:16: unknown key 'recipe.batch_size'. Did you mean 'batches'? "
    )


# Data


@pytest.mark.parametrize(
    ("text", "message"),
    rest_slow(
        [
            ("", "rows.jsonl: holds no rows; give a file with at least one"),
            (TALK * 16 + '{"messages": [\n' + TALK, "rows.jsonl:17: broken JSON at column "),
            (
                TALK + '{"messages": [{"role": "user", "content": "hm"}]}\n',
                'rows.jsonl:2: "messages" has no assistant turn, so nothing would be trained on; remove the row or set ',
            ),
            (json.dumps({"text": "1" * 5000}), "rows.jsonl:1: 5001 tokens, and 4096 fit; shorten it, "),
            (
                '{"words": "a"}\n',
                "rows.jsonl:1: the columns are words, and this recipe reads messages or prompt+completion or ",
            ),
        ],
        fast=2,
    ),
    ids=["empty", "broken", "no-assistant", "long", "columns"],
)
def test_a_slip_in_the_data(text, message, capsys):
    write("rows.jsonl", text)
    assert refused(capsys, "recipe=sft", "model=tiny", "recipe.batch_size=1", "data=jsonl", "data.path=rows.jsonl").startswith(
        message
    )


@pytest.mark.slow
def test_data_that_is_missing(capsys):
    write("rows.jsonl", TALK)
    missing = refused(capsys, "recipe=sft", "model=tiny", "data=jsonl", "data.path=row.jsonl")
    assert missing == "data.path: row.jsonl does not exist; give a file or folder. Did you mean 'rows.jsonl'?"
    # Reported before the model is loaded, which would fail because its folder is missing.
    assert refused(capsys, "recipe=sft", "data=jsonl", "data.path=row.jsonl", "model.name=./none") == missing
    columns = refused(capsys, "recipe=dpo", "data=jsonl", "data.path=rows.jsonl", "model.name=./none")
    assert columns.startswith("rows.jsonl:1: the columns are messages, and this recipe reads ")
    missing = refused(capsys, "recipe=sft", "model=tiny", "data=jsonl")
    assert missing == "data: no data given; pass data.path=<file or folder> or data.name=<hub id>"


@pytest.mark.slow
def test_a_prompt_longer_than_the_context(capsys):
    write("rows.jsonl", json.dumps({"prompt": "1" * 4090, "answer": "2"}))
    words = ["recipe=grpo", "model=tiny", "recipe.prompts_per_step=1", "data=jsonl", "data.path=rows.jsonl"]
    message = refused(capsys, *words)
    assert message.startswith("rows.jsonl:1: a prompt of 4090 tokens and a completion of up to 512 do not fit in 4096; lower ")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", rest_slow(["sft", "grpo", "dpo", "orpo"]))
def test_no_held_out_rows_is_no_mistake(recipe):
    row = {"prompt": "1+1=", "answer": "2", "completion": "2", "chosen": "2", "rejected": "about 0"}
    if recipe in ("sft", "grpo"):
        row = {key: row[key] for key in ("prompt", "answer", "completion")}
    write("rows.jsonl", (json.dumps(row) + "\n") * 8)
    code = 2 if recipe == "grpo" else 0  # the model answers 1+1= equally each time, so that run has no gradient
    assert train(*SMALL[recipe], "data=jsonl", "data.path=rows.jsonl", "data.chat=true", *BRIEF, "out=run") == code
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]
    assert not any(key.startswith("eval/") for row in rows("run") for key in row)


# Models


@pytest.mark.slow
def test_a_model_folder_that_is_not_whole(capsys):
    copy_of_tiny("no_weights", "model.safetensors")
    copy_of_tiny("no_template", "chat_template.jinja")
    copy_of_tiny("no_config", "config.json")
    torn = copy_of_tiny("torn") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    save_file({}, copy_of_tiny("less") / "model.safetensors", {"format": "pt"})
    expected = {
        "no_weights": "model.name: cannot load the weights in '{}': ",
        "no_template": "model.chat_template: the tokenizer of {} has no chat template, and the data are ",
        "no_config": "model.name: cannot load the configuration in '{}': ",
        "torn": "model.name: cannot load the weights in '{}': ",
        "less": "model.name: '{}' lacks 47 of the model's weights, the first is lm_head.weight; use a complete causal ",
        "no_folder": "model.name: no such folder '{}'; pass a local folder or a Hugging Face hub id",
    }
    for name, message in expected.items():
        place = str(Path(name).resolve())
        assert refused(capsys, *SMALL["sft"], "model=tiny", f"model.name={place}").startswith(message.format(place))


def test_weights_that_are_not_numbers(capsys):
    folder = copy_of_tiny("broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "not finite" in refused(capsys, *SMALL["sft"], "model=tiny", "model.name=broken")


# Rewards


@pytest.mark.parametrize(
    ("body", "message"),
    rest_slow(
        [
            ("1 / 0", "the reward raised ZeroDivisionError: division by zero (mine.py:4); fix the reward or row"),
            ("None", "the reward returned NoneType, not a number; return one float"),
            ("float('nan')", "the reward returned nan; return a finite number"),
        ]
    ),
)
def test_a_reward_that_fails_names_the_row_and_is_never_a_zero(body, message, capsys):
    """The 24 held-out rewards pass; the run fails at the first training row, and keeps what it had."""
    write("mine.py", f"def grade(completion, row):\n    if row['held_out']:\n        return 0\n    return {body}\n")
    with (packaged("data") / "arithmetic/prompts_train.jsonl").open() as file:
        train_rows = [json.loads(next(file)) for _ in range(8)]
    write("prompts_eval.jsonl", "".join(json.dumps({**row, "held_out": True}) + "\n" for row in train_rows))
    write("prompts_train.jsonl", "".join(json.dumps({**row, "held_out": False}) + "\n" for row in train_rows))
    data = ["model=tiny", "data.path=prompts_train.jsonl", "data.eval_path=prompts_eval.jsonl", "data.shuffle=false"]
    assert train(*SMALL["grpo"], *data, "reward=python", "reward.target=mine.py:grade", "out=run") == 2
    err = capsys.readouterr().err
    assert err == f"error: prompts_train.jsonl:1: {message}\n"
    if "ZeroDivisionError" in message:
        assert 'mine.py", line 4, in grade' in Path("run/log.txt").read_text()
    assert [row["step"] for row in rows("run")] == [0]


# Numbers that run away


def test_a_loss_that_is_not_a_number_stops_the_run(capsys):
    """The weights that the last checkpoint holds are good: a gradient that is not finite never reaches them."""
    words = ["model=tiny", "optim.lr=1e30", "recipe.steps=9", "checkpoint.every=1", "out=run"]
    assert train(*SMALL["sft"], *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "nan" in err or "inf" in err
    assert "datum" in err or "lower optim.lr" in err
    last = rows("run")[-1]["step"]
    assert last < 9 and checkpoint("run").name == f"step-{last:06d}"
    assert all(torch.isfinite(tensor).all() for tensor in load_file(checkpoint("run") / "model.safetensors").values())


# Disks


def with_full_disk(num_bytes: int, function: Callable[[], T]) -> T:
    """Call the function in a process whose files do not grow beyond ``num_bytes``."""
    return in_child(lambda: (limit_files(num_bytes), function())[1])


def test_an_out_that_cannot_be_written(capsys):
    write("file", "")
    message = "out: cannot write to file/run: Not a directory; choose another folder with out=..."
    assert refused(capsys, *SMALL["sft"], "out=file/run") == message
    assert refused(capsys, *SMALL["sft"], "out=file") == "out: file exists and is not a run of cookbook; choose another folder"
    message = "out: cannot write to run: File too large; choose another folder with out=..."
    assert with_full_disk(1000, lambda: refused(capsys, *SMALL["sft"], "out=run")) == message


def test_a_file_that_cannot_be_rewritten_is_unchanged():
    write("config.yaml", "seed: 0\n")

    def rewrite():
        with pytest.raises(OSError, match="File too large"):
            write_text(Path("config.yaml"), "x" * 200)

    with_full_disk(100, rewrite)
    assert [(path.name, path.read_text()) for path in Path().iterdir()] == [("config.yaml", "seed: 0\n")]


@pytest.mark.parametrize("aside", ["false", "true"])
@pytest.mark.slow
def test_a_disk_that_is_full_while_saving(aside, capsys):
    words = [*SMALL["orpo"], "recipe.steps=4", "checkpoint.every=2", f"checkpoint.asynchronous={aside}", "out=run"]
    assert train(*SMALL["orpo"], "recipe.steps=4", "out=whole") == 0
    assert train(*words, "recipe.steps=2") == 0
    before = files(checkpoint("run", 2))
    capsys.readouterr()
    code, err = with_full_disk(1_000_000, lambda: (train(*words), capsys.readouterr().err))
    assert code == 2
    assert err.startswith("error: run/checkpoints/step-000004: could not be saved: ") and err.count("\n") == 1
    assert err.endswith("; earlier checkpoints are untouched\n")
    assert files(checkpoint("run", 2)) == before
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000002"]
    assert train(*words) == 0
    assert timeless("run")[3:] == timeless("whole")[3:]


FULL_DISK = """
set -e
mount -t tmpfs -o size="$1" tmpfs disk
shift
set +e
"$@"
code=$?
cp -r disk kept
exit $code
"""


@pytest.mark.nightly
def test_a_disk_that_really_is_full_while_saving():
    """A file system of 12 MB, which holds the checkpoint of step 1 and half of the one after it."""
    words = [*SMALL["orpo"], "eval.every=null", "checkpoint.every=1", "out=disk/run"]
    command = [sys.executable, "-m", "cookbook.cli.app", "train", *words]
    done = refusing.with_mounts(FULL_DISK, "12m", *command)
    assert done.returncode == 2
    *others, last = done.stderr.splitlines()
    assert last.startswith("error: disk/run/checkpoints/step-000002: could not be saved: ")
    # A status line may come before the error.
    assert "No space left on device" in last and not any("error" in line.lower() for line in others)
    assert [path.name for path in Path("kept/run/checkpoints").iterdir()] == ["step-000001"]
    manifest.verify(Path("kept/run/checkpoints/step-000001"))
    assert json.loads(Path("kept/run/status.json").read_text())["state"] == "failed"
    shutil.copytree("kept/run", "run")
    assert train(*words[:-1], "out=run") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights away and take them back")
def test_a_folder_that_becomes_read_only(capsys):
    """After step 1; the metrics of step 2 still go into their open file, its checkpoint does not."""
    write(
        "locking.py",
        "import os\nfrom cookbook import Hook\n\n\nclass Lock(Hook):\n    def on_step(self, run, step, metrics):\n"
        "        if step == 2:\n            os.chmod('run/checkpoints', 0o555)\n            os.seteuid(65534)\n",
    )
    words = [*SMALL["orpo"], "eval.every=null", "checkpoint.every=1", "out=run"]
    Path.cwd().chmod(0o777)
    try:
        assert train(*words, "+hook.lock._target_=locking.Lock") == 2
    finally:
        os.seteuid(0)
    message = "run/checkpoints/step-000002: could not be saved: Permission denied; earlier checkpoints are untouched"
    assert capsys.readouterr().err.endswith(f"error: {message}\n")
    manifest.verify(checkpoint("run", 1))
    Path("run/checkpoints").chmod(0o755)
    assert train(*words) == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_disk_that_is_full_while_noting_metrics(capsys):
    words = [*SMALL["dpo"], "recipe.steps=9", "eval.every=null", "out=run"]
    # The configuration fits, a few rows too.
    code, err = with_full_disk(4000, lambda: (train(*words), capsys.readouterr().err))
    message = "out: cannot write to run/metrics.jsonl: File too large; free disk space and run the same command to resume"
    assert (code, err) == (2, f"error: {message}\n")
    assert train(*words) == 0
    assert [row["step"] for row in rows("run")] == list(range(10))


# cookbook sample


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./no_folder", "1+1="], "sample: no folder and no model is called './no_folder'; give a run's folder, a "),
        (["run", "1+1="], "run: this run has no checkpoint yet; wait for one, or lower checkpoint.every"),
        (["tiny", "1" * 5000], "prompt: 5019 tokens and max_tokens=64 exceed the context of 4096; shorten the prompt"),
        (["tiny", "1+1=", "--max-tokens", "0"], "sampling: max_tokens must be at least 1, got 0"),
        (["tiny", "1+1=", "--num-samples", "0"], "sample: num_samples must be at least 1, got 0"),
        (["tiny", "1+1=", "--temperature", "-1"], "sampling: temperature must be >= 0, got -1.0"),
    ],
)
def test_sampling_what_cannot_be_sampled(words, message, capsys):
    Path("run").mkdir()
    write("run/config.yaml", "seed: 0\n")
    assert run(["sample", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.slow
def test_named_weights_are_not_silently_ignored(here, capsys):  # noqa: F811
    """SFT's demo starts from random weights; if the user names a model, its weights are loaded."""
    short = ["recipe.steps=1", "recipe.batch_size=2", "eval.limit=2", "data.limit=4"]
    assert train("recipe=sft", *short, "out=a") == 0
    copied = copy_of_tiny("copied")
    assert train("recipe=sft", f"model.name={copied}", *short, "out=b") == 0
    assert not yaml.safe_load(Path("b/config.yaml").read_text())["model"]["random"]
    capsys.readouterr()
    assert train("--config", "a/config.yaml", f"model.name={copied}", "out=c") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: model.name: this recipe initializes random weights") and err.count("\n") == 1
