"""Unmodified recipes of tinker_cookbook against ``cookbook serve``, each checked for having learned: ``make tinker-cookbook``.

    python benchmarks/tinker_cookbook/run.py PYTHON [NAME ...]

PYTHON is the interpreter that has tinker_cookbook; the server runs with the one this runs with. No hub is asked: the recipes
run in a folder that holds the model and the data sets under the names they have there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hub
import tuned

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "tinker-cookbook"
CHAT, BASE = "Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"  # two names the recipes know, of the tiny model


@dataclass(frozen=True)
class Recipe:
    """One run of ``python -m tinker_cookbook.recipes.<module>``; ``metric`` must fall or rise by at least ``by``."""

    module: str
    arguments: str
    metric: str
    by: float
    falls: bool = False
    log: str | None = None  # name of the run to resume; None: a new run
    base: str = "tiny"  # the model that is served to it: the shipped one, or one of tuned.py


LEARN = "lora_rank=16 renderer_name=qwen3_instruct"
RL = f"{LEARN} env=arithmetic model_name={CHAT} groups_per_batch=16 group_size=8 max_steps=12 learning_rate=2e-3 eval_every=0"
RECIPES = {
    "sl_loop": Recipe(
        "sl_loop", f"model_name={CHAT} batch_size=16 max_steps=24 lora_rank=16 learning_rate=2e-3", "train_mean_nll", 0.3, True
    ),
    "chat_sl": Recipe(
        "chat_sl.train",
        f"{LEARN} model_name={CHAT} dataset=sums.jsonl batch_size=32 max_steps=100 learning_rate=3e-3 save_every=50 "
        "rolling_save_every=20 eval_every=0",
        "train_mean_nll",
        0.5,
        True,
    ),
    "chat_sl, resumed": Recipe(
        "chat_sl.train",
        f"{LEARN} model_name={CHAT} dataset=sums.jsonl batch_size=32 num_epochs=2 max_steps=138 learning_rate=3e-3 "
        "eval_every=0",
        "train_mean_nll",
        0.5,
        True,
        log="chat_sl",
    ),
    "sl_basic": Recipe(
        "sl_basic",
        # Its data set cannot be changed: batches of 128 chats.
        f"model_name={BASE} lora_rank=16 max_steps=8 learning_rate=3e-3 eval_every=0",
        "train_mean_nll",
        0.3,
        True,
    ),
    "preference.shorter": Recipe(
        "preference.shorter.train",
        f"model_name={BASE} renderer_name=role_colon batch_size=4 group_size=4 max_tokens=24 max_steps=10 learning_rate=1e-3 "
        "eval_every=0",
        "env/all/ac_tokens_per_turn",
        1.0,
        True,
    ),
    "math_rl": Recipe("math_rl.train", RL, "env/all/reward/total", 0.03),
    "math_rl, asynchronous": Recipe("math_rl.train", f"{RL} max_steps_off_policy=2", "env/all/reward/total", 0.03),
    "math_rl, streamed": Recipe(
        "math_rl.train",
        f"{RL} stream_minibatch_config.groups_per_batch=16 stream_minibatch_config.num_minibatches=2",
        "env/all/reward/total",
        0.03,
    ),
    "preference.dpo": Recipe(
        "preference.dpo.train",
        f"model_name={BASE} dataset=hhh renderer_name=role_colon batch_size=16 max_steps=12 learning_rate=1e-3",
        "dpo_loss",
        0.1,
        True,
    ),
    "prompt_distillation": Recipe(
        "prompt_distillation.train",
        f"{LEARN} model_name={CHAT} file_path=sums.jsonl batch_size=32 max_steps=20 learning_rate=3e-3 eval_every=0",
        "train_mean_nll",
        0.3,
        True,
    ),
    "on_policy_distillation": Recipe(
        # The teacher is what chat_sl has trained.
        "distillation.on_policy_distillation",
        f"{LEARN} model_name={CHAT} teacher_model={CHAT} teacher_checkpoint={{chat_sl}} groups_per_batch=16 group_size=4 "
        "max_tokens=8 max_steps=12 learning_rate=2e-3 eval_every=0",
        "teacher_kl",
        0.3,
        True,
    ),
    "on_policy_multi_teacher": Recipe(
        "distillation.on_policy_multi_teacher",
        f"{LEARN} model_name={CHAT} deepmath_teacher_model={CHAT} deepmath_teacher_checkpoint={{chat_sl}} "
        f"tulu3_teacher_model={CHAT} tulu3_teacher_checkpoint={{chat_sl}} deepmath_groups_per_batch=8 tulu3_groups_per_batch=8 "
        "group_size=4 max_tokens=8 max_steps=12 learning_rate=2e-3 eval_every=0",
        "teacher_kl",
        0.3,
        True,
    ),
    "off_policy_reasoning": Recipe(
        "distillation.off_policy_reasoning",
        f"{LEARN} model_name={CHAT} batch_size=32 buffer_size=64 max_prompts=640 max_steps=20 learning_rate=3e-3 eval_every=0",
        "train_mean_nll",
        0.3,
        True,
    ),
    "sdft, reverse": Recipe(
        "sdft.train",
        f"{LEARN} model_name={CHAT} dataset=toolalpaca groups_per_batch=16 max_tokens=8 max_steps=12 learning_rate=2e-3 "
        "reverse=true eval_every=0",
        "sdft/reverse_kl_mean",
        0.01,
        True,
    ),
    "rl_loop": Recipe(
        "rl_loop",
        f"model_name={BASE} batch_size=8 group_size=8 max_tokens=16 max_steps=8 lora_rank=16 learning_rate=2e-3",
        "reward/total",
        0.3,
        base="examinee",
    ),
    "rl_loop, importance_sampling": Recipe(
        "rl_loop",
        f"model_name={BASE} batch_size=8 group_size=8 max_tokens=16 max_steps=8 lora_rank=16 learning_rate=2e-3 "
        "loss_fn=importance_sampling",
        "reward/total",
        0.3,
        base="examinee",
    ),
    "rl_basic": Recipe(
        "rl_basic",
        # The builder again, with other sizes: by default a step has 128 x 16 samples.
        f"model_name={BASE} dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder "
        f"dataset_builder.batch_size=8 dataset_builder.group_size=8 dataset_builder.model_name_for_tokenizer={BASE} "
        "dataset_builder.renderer_name=role_colon max_tokens=24 max_steps=8 lora_rank=16 learning_rate=2e-3",
        "env/all/reward/total",
        0.3,
        base="examinee",
    ),
    "rubric": Recipe(
        # The grader is the same small model, whose scores hardly depend on the answer: the recipe has to finish, not to learn.
        "rubric.train",
        f"model_name={BASE} renderer_name=role_colon grader_llm_name={BASE} grader_renderer_name=role_colon groups_per_batch=8 "
        "train_group_size=8 train_jsonl_path=rubric_train.jsonl test_jsonl_path=rubric_test.jsonl lora_rank=16 max_tokens=16 "
        "max_steps=3 learning_rate=2e-3 eval_every=2",
        "env/all/reward/total",
        -1.0,
        base="examinee",
    ),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        f"model_name={BASE} renderer_name=role_colon batch_size=4 group_size=8 max_tokens=20 max_steps=10 learning_rate=5e-4 "
        "eval_every=0",
        "env/all/reward/total",
        1.0,
        base="guesser",
    ),
}


def main(python: str, names: list[str]) -> int:
    chosen = {name: RECIPES[name] for name in names} if names else RECIPES
    if not names:
        shutil.rmtree(FOLDER, ignore_errors=True)
    hub.prepare(FOLDER / "work", ROOT / "data", (CHAT, BASE))
    failed = 0
    print(f"{'recipe':24s} {'metric':22s} {'first':>8s} {'last':>8s} {'wall s':>7s}", flush=True)
    for base in dict.fromkeys(recipe.base for recipe in chosen.values()):
        with serving(base) as url:
            for name, recipe in chosen.items():
                failed += recipe.base == base and not run(python, url, name, recipe)
    return failed


@contextlib.contextmanager
def serving(base: str) -> Iterator[str]:
    model, names = ROOT / "data" / "tiny", f"server.names=[{CHAT},{BASE}]"
    if base != "tiny":
        model = tuned.prepare(FOLDER / "models", model, base)
    overrides = [f"model.name={model}", "server.port=0", names, f"out={FOLDER}/serve-{base}"]
    command = [sys.executable, "-m", "cookbook", "serve", *overrides]
    with (
        (FOLDER / f"server-{base}.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server,
    ):
        assert server.stdout is not None
        found = re.search(rb"http://\S+?:\d+", server.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start; see {FOLDER}/server-{base}.log")
        try:
            yield found[0].decode()
        finally:
            server.terminate()


def run(python: str, url: str, name: str, recipe: Recipe) -> bool:
    """Whether the recipe ended well and its metric moved as it should. Prints a line of the table."""
    log = FOLDER / "logs" / folder_name(recipe.log or name)
    exists = "resume" if recipe.log else "delete"
    arguments = [*recipe.arguments.replace("{chat_sl}", newest("chat_sl")).split(), f"log_path={log}"]
    if recipe.module not in ("sl_loop", "sl_basic", "rl_loop", "rl_basic"):
        arguments.append(f"behavior_if_log_dir_exists={exists}")
    else:
        shutil.rmtree(log, ignore_errors=True)
    environment = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-local",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(FOLDER / "datasets"),
    }
    start, before = time.monotonic(), len(series(log / "metrics.jsonl", recipe.metric)) if recipe.log else 0
    output = FOLDER / f"{folder_name(name)}.log"
    command = [python, "-m", f"tinker_cookbook.recipes.{recipe.module}", *arguments]
    with output.open("w") as written:
        code = subprocess.run(command, cwd=FOLDER / "work", env=environment, stdout=written, stderr=written).returncode
    values = series(log / "metrics.jsonl", recipe.metric)
    good = code == 0 and len(values) > before and learned(*ends(values, before), recipe)
    edges = [f"{value:8.3f}" for value in ends(values, before)] if len(values) > before else ["-", "-"]
    verdict = "" if good else f"  FAILED (exit {code}); see {output}"
    print(f"{name:24s} {recipe.metric:22s} {edges[0]:>8s} {edges[1]:>8s} {time.monotonic() - start:7.1f}{verdict}", flush=True)
    return good


def folder_name(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def newest(name: str) -> str:
    """Return the sampler's address of the newest checkpoint of an earlier run, if there is one."""
    rows = hub.read(file) if (file := FOLDER / "logs" / name / "checkpoints.jsonl").exists() else []
    return next((row["sampler_path"] for row in reversed(rows) if row.get("sampler_path")), "")


def series(file: Path, metric: str) -> list[float]:
    if not file.exists():
        return []
    return [row[metric] for row in map(json.loads, file.read_text().splitlines()) if metric in row]


def ends(values: list[float], before: int) -> tuple[float, float]:
    """Means of the first quarter, and of the last; of a run that was resumed after ``before`` values, of all since."""
    part = max(1, len(values) // 4)
    last = values[before:] if before else values[-part:]
    return statistics.fmean(values[:part]), statistics.fmean(last)


def learned(first: float, last: float, recipe: Recipe) -> bool:
    return (first - last if recipe.falls else last - first) >= recipe.by


if __name__ == "__main__":
    sys.exit(main(str(Path(sys.argv[1]).absolute()), sys.argv[2:]))
