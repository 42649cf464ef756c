"""Every recipe from the command line to the run folder, a few steps each."""

import contextlib
import io
import json
import math
import shlex
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from marks import rest_slow, tracker
from places import GSM8K
from runtools import (  # noqa: F401 - here is a fixture
    BRIEF,
    LITTLE,
    SMALL,
    bits,
    checkpoint,
    here,
    rows,
    timeless,
    train,
    write,
)
from safetensors.torch import load_file

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.sampling import rollouts
from cookbook.sampling.evaluation import split_answer
from cookbook.sampling.rollouts import RolloutConfig, RolloutGroup
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import Sample, datum_from_tokens_weights
from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")
LN2 = math.log(2)
FLOAT32_AT_LN2 = 1e-7  # two steps between adjacent float32 numbers at 0.69

EVERY_STEP = {
    "loss", "tokens/trained", "tokens/entropy", "optim/lr", "optim/grad_norm", "optim/num_loss_tokens",
    "optim/num_sequences", "data/rows_crc32", "time/step_s", "time/tokens_per_s",
}  # fmt: skip
PREFERENCE = {"rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"}
ROLLOUT = {
    "reward/mean", "reward/std", "reward/group_std", "reward/frac_groups_without_spread", "rollout/completion_tokens_mean",
    "rollout/completion_tokens_max", "rollout/truncated_frac", "time/sampled_tokens_per_s",
}  # fmt: skip
POLICY = {"kl/sampler_trainer_k1", "kl/sampler_trainer_k3", "kl/reference", "loss/clip_frac", "loss/ratio_mean"}
STEP_METRICS = {
    "sft": EVERY_STEP | {"tokens/accuracy"},
    "dpo": EVERY_STEP | PREFERENCE,
    "orpo": EVERY_STEP | PREFERENCE | {"loss/nll", "loss/odds_ratio"},
    "grpo": EVERY_STEP | {"tokens/accuracy"} | ROLLOUT | POLICY,
}
EVAL_METRICS = {
    "sft": {"eval/loss", "eval/accuracy", "eval/tokens/accuracy"},
    "dpo": {"eval/loss", "eval/rewards/accuracy", "eval/rewards/margin", "eval/accuracy"},
    "orpo": {"eval/loss", "eval/rewards/accuracy", "eval/rewards/margin", "eval/accuracy"},
    "grpo": {"eval/reward", "eval/accuracy"},
}


# What a run leaves and says


@pytest.mark.parametrize("recipe", rest_slow(reversed(SMALL)))
def test_a_run_leaves_a_whole_folder_and_says_where(recipe, capsys):
    assert train(*SMALL[recipe], "out=run") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert {path.name for path in Path("run").iterdir()} == {
        "config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "log.txt", "curves.svg",
        "rollouts.jsonl.gz", "status.json", ".lock",
    }  # fmt: skip
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000003"]
    assert yaml.safe_load(Path("run/config.yaml").read_text())["recipe"]["name"] == recipe
    environment = json.loads(Path("run/environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["command"][:3] == ["cookbook", "train", f"recipe={recipe}"]
    log = Path("run/log.txt").read_text()
    assert "saved run/checkpoints/step-000003" in log and log.endswith("INFO finished\n")
    assert ElementTree.parse("run/curves.svg").getroot().tag.endswith("svg")
    check_metrics(recipe)
    check_summary(recipe, out, capsys)


def check_metrics(recipe):
    assert all(line.startswith('{"step": ') for line in Path("run/metrics.jsonl").read_text().splitlines())
    found = rows("run")
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in found for value in row.values())
    for row in found[1:]:
        trained = row["tokens/trained"] > 0
        assert STEP_METRICS[recipe] - (set() if trained else POLICY | {"tokens/accuracy", "tokens/entropy"}) <= set(row)
    if recipe in ("dpo", "orpo"):  # over both sides of the pairs it would mean nothing
        assert not any(key.endswith("tokens/accuracy") for row in found for key in row)
    evaluated = [row["step"] for row in found if EVAL_METRICS[recipe] <= set(row)]
    assert evaluated == [0, 2, 3]  # before training, every second step, at the end
    assert not EVAL_METRICS[recipe] & set(found[1])


def check_summary(recipe, out, capsys):
    assert "step 3/3" in out
    assert "run folder: run  (metrics.jsonl, samples.jsonl, curves.svg, checkpoints)\n" in out
    judge = "reward=number" if recipe == "grpo" else "token equality"
    assert f"\naccuracy on 4 held-out prompts, by {judge}: " in out and " after 0 steps -> " in out
    # Lines of the progress and of the result are in the log too.
    log = Path("run/log.txt").read_text()
    assert " INFO step 3/3  loss " in log and f" INFO accuracy on 4 held-out prompts, by {judge}: " in log
    assert sum(" -> '" in line for line in out.splitlines()) == 3
    assert {"step", "prompt", "completion", "reward"} <= set(rows("run", "samples.jsonl")[0])
    command = shlex.split(out.rpartition("next: ")[2])
    assert command[:3] == ["cookbook", "sample", "run"]
    assert run(command[1:]) == 0
    assert capsys.readouterr().out.count("\n") >= 1


@pytest.mark.slow
def test_rollouts_are_kept_with_their_rewards():
    assert train(*SMALL["grpo"], "out=run", "rollout.log_samples=5") == 0
    samples = [row for row in rows("run", "samples.jsonl") if row.get("split") != "eval"]
    assert [row["step"] for row in samples] == [1] * 5 + [2] * 5 + [3] * 5
    assert all(row["row"].partition(":")[0].endswith("prompts_train.jsonl") for row in samples)
    assert {row["reward"] for row in samples} <= {0.0, 1.0}


@pytest.mark.slow
def test_on_a_terminal_the_display_is_live(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    # The time left is shown from step 3 on, and the display is drawn a few times a second.
    assert train(*SMALL["dpo"], "recipe.steps=60", "eval.every=null", "out=run") == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out and "60/60" in out and " left" in out  # all of it fits
    assert "margin" in out and "tokens/s" in out
    assert "step 1/3" not in out  # the plain lines of a file or a pipe


# Numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "tiny",
        "tiny model.lora_rank=2",
        pytest.param("tiny model.dtype=bfloat16", marks=pytest.mark.slow),
        pytest.param("tiny_random", marks=pytest.mark.nightly),
    ],
)
def test_dpo_starts_at_ln_2_whatever_it_starts_from(model):
    assert train(*SMALL["dpo"], *f"model={model}".split(), "out=run") == 0
    before, first, *_ = rows("run")
    assert before["eval/loss"] == pytest.approx(LN2, abs=FLOAT32_AT_LN2)
    assert first["loss"] == pytest.approx(LN2, abs=FLOAT32_AT_LN2)
    assert first["rewards/margin"] == 0.0


@pytest.mark.slow
def test_dpo_from_an_earlier_run_starts_at_ln_2_too():
    assert train(*SMALL["sft"], "model=tiny", "out=sft") == 0
    assert train(*SMALL["dpo"], "model=tiny", "demo=dpo", f"model.name={checkpoint('sft')}", "out=run") == 0
    assert rows("run")[1]["loss"] == pytest.approx(LN2, abs=FLOAT32_AT_LN2)
    assert rows("run")[2]["loss"] < LN2


@pytest.mark.slow
def test_groups_without_spread_are_counted_and_teach_nothing():
    """Of three rewards that are 0 or 1 and not all equal, none is their mean: every completion of such a group counts."""
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = ["reward=python", "reward.target=dice.py:odd", "recipe.prompts_per_step=8", "recipe.group_size=3"]
    assert train(*SMALL["grpo"], *words, "out=run") == 0
    for row in rows("run")[1:]:
        without = round(row["reward/frac_groups_without_spread"] * 8)
        assert 0 < without < 8
        assert row["optim/num_sequences"] == 3 * (8 - without)


@pytest.mark.slow
def test_a_step_without_any_spread_has_a_row_and_moves_nothing():
    write("same.py", "def same(completion, row):\n    return 1\n")
    assert train(*SMALL["grpo"], "reward=python", "reward.target=same.py:same", "out=run") == 2
    for row in rows("run")[1:]:
        assert row["reward/frac_groups_without_spread"] == 1.0
        assert row["loss"] == row["tokens/trained"] == row["optim/grad_norm"] == row["time/tokens_per_s"] == 0.0
        assert row["reward/std"] == row["reward/group_std"] == 0.0 < row["time/sampled_tokens_per_s"]
    before, after = (load_file(folder / "model.safetensors") for folder in (packaged("data") / "tiny", checkpoint("run")))
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.slow
def test_samples_may_lag_behind_the_weights():
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = ["reward=python", "reward.target=dice.py:odd", "recipe.steps=4", "weight_sync.every=2"]
    assert train(*SMALL["grpo"], *words, "out=run") == 0
    drift = [row["kl/sampler_trainer_k3"] for row in rows("run")[1:]]
    # Fresh weights: sampler and trainer differ by rounding in float32, squared. One update of lr 3e-4 later: by far more.
    assert max(drift[0], drift[2]) < 1e-9 < 1e-6 < min(drift[1], drift[3])


@pytest.mark.slow
def test_what_is_said_of_rewards():
    prompt = RenderedPrompt([1], Row("here:1", {}), "", "")
    attempts = [Trajectory.single([1], "", Sample([5], [-1.0], "stop", 0), "")] * 2
    found = rollouts.metrics([RolloutGroup(prompt, attempts, rewards) for rewards in ([0.3, 0.1 + 0.2], [0.0, 1.0])])
    assert found["reward/frac_groups_without_spread"] == 0.5  # as the advantages see it, rounding is no spread
    assert found["reward/group_std"] == pytest.approx(math.sqrt(0.5) / 2)  # of 0 and 1, divisor G - 1: sqrt(1/2)
    assert found["reward/std"] == pytest.approx(np.std([0.3, 0.3, 0.0, 1.0]))


@pytest.mark.parametrize("temperature", rest_slow([1.0, 0.5]))
def test_training_sees_the_policy_at_the_temperature_of_the_samples(temperature, make_trainer):
    trainer = make_trainer()
    renderer = Renderer(trainer.tokenizer, trainer.max_length)
    prompt = RenderedPrompt([5, 6, 7], Row("here:1", {}), "", "")
    config = RolloutConfig(max_tokens=4, temperature=temperature)
    (group,) = rollouts.sample_groups(trainer.live_sampler(0).result(), [prompt], 2, config, renderer, seed=0).groups
    data = rollouts.datums([group], [[1.0, -1.0]])
    told = [datum.loss_fn_inputs.get("temperature") for datum in data]
    assert [None if one is None else one.tolist() for one in told] == [None if temperature == 1.0 else temperature] * 2
    for datum, output in zip(data, trainer.forward(data, "grpo", {"kl_beta": 0.0}).result().loss_fn_outputs, strict=True):
        trained = datum.loss_fn_inputs["weights"].array > 0
        sampled = datum.loss_fn_inputs["sampling_logprobs"].array
        # The same float32 model through a cache and without one: a few rounding errors of logprobs around -5.
        assert output["logprobs"].array[trained] == pytest.approx(sampled[trained], abs=1e-5)


@pytest.mark.slow
def test_evaluation_stops_where_rollouts_do():
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = [*SMALL["grpo"], "recipe.steps=1", "reward=python", "reward.target=dice.py:odd"]
    assert train(*words, "out=plain") == 0
    assert train(*words, "rollout.stop=['1','2','3','4','5']", "out=stopping") == 0
    plain, stopping = (
        [row["completion"] for row in rows(out, "samples.jsonl") if "split" in row] for out in ("plain", "stopping")
    )
    assert any(any(digit in text[:-1] for digit in "12345") for text in plain)
    assert not any(digit in text[:-1] for digit in "12345" for text in stopping)


def test_text_that_is_trained_whole_asks_nothing():
    tokens = [7, 8, 9, 3]
    assert split_answer(datum_from_tokens_weights(tokens, [1.0, 1.0, 1.0, 1.0])) is None
    assert split_answer(datum_from_tokens_weights(tokens, [0.0, 0.0, 1.0, 1.0])) == ([7, 8], [9, 3])
    write("text.jsonl", '{"text": "1+1=2"}\n' * 8)
    words = ["data=jsonl", "data.path=text.jsonl", "data.eval_path=text.jsonl"]
    assert train(*SMALL["sft"], *words, "recipe.steps=1", "out=run") == 0
    assert "eval/loss" in rows("run")[-1] and "eval/accuracy" not in rows("run")[-1]


@pytest.mark.nightly
def test_held_out_rows_may_fill_the_context():
    def row(length):
        return json.dumps({"prompt": "1" * length, "completion": "22"}) + "\n"

    write("train.jsonl", row(10) * 8)
    write("eval.jsonl", row(10) + row(4093))  # with its answer and the end of text, all of the 4096 tokens
    words = ["model=tiny", "data=jsonl", "data.path=train.jsonl", "data.eval_path=eval.jsonl"]
    assert train(*SMALL["sft"], *words, "out=run") == 0
    assert rows("run")[-1]["eval/answers"] == 2


# Reproducibility


@pytest.mark.parametrize("recipe", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_seed_repeats_bit_by_bit_and_another_differs(recipe):
    words = [*SMALL[recipe], "recipe.steps=2"]
    assert train(*words, "out=one") == 0
    assert run(["train", "--config", "one/config.yaml", "out=two"]) == 0
    assert train(*words, "eval.every=null", "out=other", "seed=1") == 0
    assert timeless("one") == timeless("two")
    assert bits(checkpoint("one")) == bits(checkpoint("two"))
    assert bits(checkpoint("one")) != bits(checkpoint("other"))


@pytest.mark.slow
def test_the_config_of_a_run_starts_a_run_of_its_own(capsys):
    assert train(*SMALL["orpo"], "out=one") == 0
    before = timeless("one")
    assert run(["train", "--config", "one/config.yaml"]) == 0
    (new,) = Path("runs").iterdir()
    assert new.name.startswith("orpo-")
    assert timeless("one") == before == timeless(new)


# Models


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("sft", marks=pytest.mark.slow), "grpo"])
def test_lora_trains_an_adapter_that_peft_loads(recipe, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert train(*SMALL[recipe], "model=tiny", "model.lora_rank=4", "optim.lr=1e-2", "out=run") == 0
    adapter = load_file(checkpoint("run") / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    assert not (checkpoint("run") / "model.safetensors").exists()
    base = yaml.safe_load(Path("run/config.yaml").read_text())["model"]["name"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("run"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), checkpoint("run"))
    chat = [{"role": "user", "content": "12+30="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    capsys.readouterr()
    assert run(["sample", "run", "12+30=", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(answer, skip_special_tokens=True).rstrip("\n")


@pytest.mark.slow
def test_bfloat16_trains_and_stays_bfloat16():
    assert train(*SMALL["sft"], "model.dtype=bfloat16", "out=run") == 0
    before, *_, last = rows("run")
    assert last["eval/loss"] < before["eval/loss"]
    assert {tensor.dtype for tensor in load_file(checkpoint("run") / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_sampling_from_a_run_a_checkpoint_and_a_model(capsys):
    assert train(*SMALL["dpo"], "out=run") == 0
    capsys.readouterr()
    answers = []
    for target in ("run", str(checkpoint("run")), "tiny"):
        assert run(["sample", target, "12+30="]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert all(answer.count("\n") == 1 and any(map(str.isdigit, answer)) for answer in answers)
    words = ["sample", "run", "12+30=", "--num-samples", "3", "--temperature", "1", "--seed"]
    drawn = []
    for seed in ("1", "1", "2"):
        assert run([*words, seed]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].count("\n") == 3


# The user's own


@pytest.mark.slow
def test_hooks_of_ones_own_see_every_moment():
    write(
        "my_hooks.py",
        "from dataclasses import dataclass\n"
        "from cookbook import Hook\n\n\n"
        "@dataclass\n"
        "class Note(Hook):\n"
        "    path: str\n\n"
        "    def note(self, *words):\n"
        "        with open(self.path, 'a') as file:\n"
        "            print(*words, file=file)\n\n"
        "    def on_start(self, run):\n        self.note('start', run.name, run.first_step)\n\n"
        "    def on_step(self, run, step, metrics):\n        self.note('step', step, 'reward/mean' in metrics)\n\n"
        "    def on_checkpoint(self, run, checkpoint):\n        self.note('checkpoint', checkpoint.step)\n\n"
        "    def on_weight_sync(self, run, sampler):\n        self.note('sync', sampler.step)\n\n"
        "    def on_eval(self, run, step, metrics):\n        self.note('eval', step, 'eval/accuracy' in metrics)\n\n"
        "    def on_end(self, run, state):\n        self.note('end', state)\n",
    )
    words = ["+hook.mine._target_=my_hooks.Note", "+hook.mine.path=notes.txt", "recipe.steps=2", "checkpoint.every=1"]
    assert train(*SMALL["grpo"], *words, "out=run") == 0
    assert Path("notes.txt").read_text().splitlines() == [
        "start grpo 0", "sync 0", "eval 0 True", "step 1 True", "checkpoint 1",
        "sync 1", "sync 2", "eval 2 True", "step 2 True", "checkpoint 2", "end finished",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_hook_that_fails_at_the_end_keeps_no_other_from_hearing_of_it():
    write(
        "my_hooks.py",
        "from cookbook import Hook\n\n\n"
        "class Fail(Hook):\n"
        "    def on_end(self, run, state):\n"
        "        print('told', state)\n"
        "        raise ZeroDivisionError\n",
    )
    words = ["recipe.steps=1", "+hook.one._target_=my_hooks.Fail", "+hook.two._target_=my_hooks.Fail"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train(*SMALL["orpo"], *words, "out=run") == 2
    assert out.getvalue().count("told ") == 2 and out.getvalue().count("told finished\n") == 1  # the run has failed by then


@pytest.mark.slow
def test_a_reward_of_ones_own():
    write("my_reward.py", "def brief(completion, row):\n    return -len(completion) / 10 + ('+' in row['prompt'])\n")
    assert train(*SMALL["grpo"], "reward=python", "reward.target=my_reward.py:brief", "out=run") == 0
    samples = rows("run", "samples.jsonl")
    assert samples
    assert all(row["reward"] == pytest.approx(1 - len(row["completion"]) / 10) for row in samples)


@pytest.mark.slow
def test_a_fork_runs_from_its_folder_and_does_what_it_says(capsys):
    assert run(["fork", "grpo", "my_grpo"]) == 0
    mine = Path("recipes/my_grpo.py")
    mine.write_text(mine.read_text().replace("step.log(gradient, update)", 'step.log(gradient, update, {"mine": 7.0})'))
    words = [word for word in SMALL["grpo"] if not word.startswith(("recipe=", "recipe.steps="))]
    assert train("recipe=my_grpo", "recipe.steps=1", *words) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("my_grpo-")
    assert rows(folder)[1]["mine"] == 7.0
    capsys.readouterr()
    assert run(["diff", "my_grpo"]) == 0
    assert '+        step.log(gradient, update, {"mine": 7.0})' in capsys.readouterr().out


def fork_of_sft(*changes):
    """The words that run recipes/mine.py: the SFT recipe with every first text replaced by the second."""
    if not Path("recipes/mine.py").exists():
        assert run(["fork", "sft", "mine"]) == 0
    code = (packaged("recipes") / "sft.py").read_text()
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    Path("recipes/mine.py").write_text(code.replace('"sft"', '"mine"'))
    return ["recipe=mine", *SMALL["sft"][1:], "checkpoint.final=false", "eval.every=null"]


LOGGED = "        step.log(gradient, update)\n"
AT_ONCE = "        # 1. Take the rows of this step."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "way"),
    rest_slow(
        [
            ((LOGGED, f"{LOGGED}        if step.index == 1:\n            break\n"), "break behind the step"),
            pytest.param(
                (LOGGED, f"{LOGGED}        if step.index == 1:\n            return\n"),
                "return behind the step",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                (AT_ONCE, f"        if step.index == 2:\n            break\n{AT_ONCE}"),
                "break before the next",
                marks=pytest.mark.slow,
            ),
        ]
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_may_leave_its_loop_and_loses_nothing(place, way, capsys):
    words = [*fork_of_sft(place), "out=run"]
    assert train(*words) == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2]
    assert ("eval/loss" in rows("run")[2]) is (way != "break before the next")
    assert "loss" in rows("run")[2] and checkpoint("run").name == "step-000002"
    assert "the recipe left its loop after step 2 of 3; all of it is saved\n" in capsys.readouterr().out
    assert Path("run/log.txt").read_text().endswith("INFO finished\n")
    fork_of_sft()
    assert train(*words) == 0  # and resumes
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_what_goes_wrong_after_a_loop_was_left_is_not_swallowed(capsys):
    """As Python does where it takes a generator down."""
    write("my_hooks.py", "from cookbook import Hook\n\n\nclass Fail(Hook):\n    def on_step(self, *_):\n        1 / 0\n")
    words = [*fork_of_sft((LOGGED, f"{LOGGED}        break\n")), "+hook.fail._target_=my_hooks.Fail", "out=run"]
    assert train(*words) == 2
    assert "on_step raised ZeroDivisionError: division by zero (my_hooks.py:6); step 1 is saved" in capsys.readouterr().err
    assert "ended by HookError" in Path("run/log.txt").read_text()


@pytest.mark.slow
def test_a_second_loop_resumes_where_the_first_was_left():
    head, tail = "    for step in run.steps(", "        step.log(gradient, update)\n"
    code = (packaged("recipes") / "sft.py").read_text()
    loop = code[code.index(head) :]
    first = loop.replace(tail, f"{tail}        if step.index == 0:\n            break\n")
    assert train(*fork_of_sft((loop, first + loop)), "out=run") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]
    assert train(*SMALL["sft"], "eval.every=1", "out=straight") == 0
    assert [row["loss"] for row in rows("run")[1:]] == [row["loss"] for row in rows("straight")[1:]]


@pytest.mark.slow
def test_a_loss_of_ones_own_trains_like_the_one_it_came_from():
    assert run(["fork", "loss", "dpo", "my_dpo"]) == 0
    assert train(*SMALL["dpo"], "out=shipped") == 0
    assert train(*SMALL["dpo"], "loss=my_dpo", "out=mine") == 0
    assert timeless("mine") == timeless("shipped")


# Sweeps and trackers


@pytest.mark.slow
def test_a_sweep_continues_after_a_failed_run(capsys):
    assert train(*SMALL["sft"], "recipe.steps=1", "optim.lr=-1,1e-4", "-m") == 2
    err = capsys.readouterr().err
    assert "run 1 failed: optim: lr must be >= 0" in err
    assert err.endswith("error: 1 of 2 runs failed: optim: lr must be >= 0 and finite, got -1.0\n")
    (folder,) = Path("runs").iterdir()
    assert [row["step"] for row in rows(folder)] == [0, 1]
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["lr"] == 1e-4


@tracker("wandb")
def test_wandb_offline_is_read_back(monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert train(*SMALL["grpo"], "tracker=wandb", "out=run") == 0
    wandb.teardown()  # as the end of a process does: its writer is a process of its own, and may still be writing
    (file,) = Path("run/wandb").glob("offline-run-*/*.wandb")
    history, config, _ = wandb_records(file)
    place = f"wandb: offline; upload this run with: wandb sync {file.parent.resolve()}\n"
    assert place in capsys.readouterr().out and place in Path("run/log.txt").read_text()
    assert [row["_step"] for row in history] == [0, 1, 2, 3]
    for told, row in zip(history, rows("run"), strict=True):
        assert {key: told[key] for key in row if key != "step"} == {key: value for key, value in row.items() if key != "step"}
    assert config["recipe"]["group_size"] == 4
    tables = [json.loads((file.parent / "files" / row["samples/path"]).read_text()) for row in history if "samples/path" in row]
    assert [row["_step"] for row in history if "samples/path" in row] == [0, 2, 3]  # the steps that are evaluated
    columns = tables[0]["columns"]
    told = [dict(zip(columns, values, strict=True)) for table in tables for values in table["data"]]
    kept = [{column: row.get(column) for column in columns} for row in rows("run", "samples.jsonl")]
    kept = [{**row, "split": row["split"] or "train"} for row in kept]
    assert told == kept and told[0]["split"] == "eval" and told[0]["completion"]


@pytest.mark.nightly
def test_wandb_runs_of_a_sweep_share_a_group(monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*SMALL["sft"], "recipe.steps=1", "eval.every=null", "tracker=wandb"]
    options = ["tracker.wandb.notes=a note", "tracker.wandb.tags=[a]", "tracker.wandb.samples=1"]
    assert train(*words, *options, "seed=0,1", "-m") == 0
    own = ["tracker.wandb.group=mine", "tracker.wandb.job_type=test", "tracker.wandb.samples=0"]
    assert train(*words, *own, "out=runs/single") == 0
    wandb.teardown()
    found = [(path, wandb_records(path)) for path in Path("runs").glob("*/wandb/offline-run-*/*.wandb")]
    swept = [one for path, (_, _, one) in found if "single" not in str(path)]
    ((history, _, single),) = [one for path, one in found if "single" in str(path)]
    (group,) = {one.run_group for one in swept}
    assert len(swept) == 2 and group.startswith("sweep-")
    assert {(one.job_type, one.notes, *one.tags) for one in swept} == {("sft", "a note", "a")}
    assert (single.run_group, single.job_type) == ("mine", "test")
    assert not any("samples/path" in row for row in history)
    assert all(json.loads(path.read_text())["sweep"] == group for path in Path("runs").glob("sft-*/environment.json"))
    assert json.loads(Path("runs/single/environment.json").read_text())["sweep"] is None
    sizes = [row["samples/nrows"] for path, (history, _, _) in found for row in history if "samples/path" in row]
    assert sizes == [1] * 4  # before and after each run of the sweep, the newest row alone


@pytest.mark.parametrize(
    ("moment", "code"),
    rest_slow([("missing", 2), ("key", 0), pytest.param("network", 0, marks=pytest.mark.slow), ("later", 0)]),
)
def test_wandb_that_fails_is_one_line(moment, code, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")

    def fails(*_, **__):
        raise wandb.errors.UsageError("no key") if moment == "key" else wandb.errors.CommError("no network")

    if moment == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb.Run if moment == "later" else wandb, "log" if moment == "later" else "init", fails)
    assert train(*SMALL["orpo"], "tracker=wandb", "out=run") == code
    assert capsys.readouterr().err == {
        "missing": (
            "error: tracker: wandb is not installed; pip install 'post-training-cookbook[wandb]', or leave tracker=wandb out\n"
        ),
        "key": OFF.format("start").replace("CommError: no network", "UsageError: no key"),
        "network": OFF.format("start"),
        "later": OFF.format("log"),
    }[moment].replace("LINE", str(fails.__code__.co_firstlineno + 1))
    assert Path("run").exists() is (code == 0)
    # The run that was never finished would lend its id to the next one of this process.
    wandb.teardown()


OFF = (
    "WARNING: tracker WandbTracker: {} raised wandb.errors.errors.CommError: no network (test_runs.py:LINE); the tracker is "
    "off, the run continues\n"
)


def wandb_records(path):
    """History rows, configuration and run of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    history, config, run_record = [], {}, None
    for data in leveldb_log(path.read_bytes()[7:], first_block=32768 - 7):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if items:
            history.append(items)
        config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        run_record = record.run if record.run.run_id else run_record
    return history, config, run_record


def leveldb_log(data, first_block):
    """The records of a log in LevelDB's format, behind the file's own 7 bytes: wandb ships no reader any more.

    Blocks of 32 KiB; in each, fragments of checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last).
    """
    parts, block_end, place = [], first_block, 0
    while place + 7 <= len(data):
        if block_end - place < 7:  # too short for a fragment: filled with zeros
            place, block_end = block_end, block_end + 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


@tracker("tensorboard")
def test_tensorboard_is_read_back():
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module, reason="tensorboard is an extra")
    assert train(*SMALL["grpo"], "tracker=tensorboard", "out=run") == 0
    events = accumulator.EventAccumulator("run/tensorboard").Reload()
    for key in ("reward/mean", "loss", "eval/accuracy"):
        told = [(event.step, event.value) for event in events.Scalars(key)]
        assert told == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows("run") if key in row]  # float32 there


@tracker("trackio")
def test_trackio_is_read_back(monkeypatch, capsys):
    trackio = pytest.importorskip("trackio.sqlite_storage", reason="trackio is an extra")
    monkeypatch.setattr(trackio, "TRACKIO_DIR", Path("trackio").resolve())
    for out in ("run", "other/run"):  # one name, two runs
        assert train(*SMALL["grpo"], "tracker=trackio", f"out={out}") == 0
        shown = capsys.readouterr().out
        name = (Path(out) / "trackio_name.txt").read_text().strip()
        assert f"trackio: run {name}; show it with: trackio show --project cookbook\n" in shown and "* Trackio" not in shown
        told = trackio.SQLiteStorage.get_logs("cookbook", name)
        assert [row["step"] for row in told] == [0, 1, 2, 3]
        for row, kept in zip(told, rows(out), strict=True):
            assert {key: row[key] for key in kept} == kept


@tracker("mlflow")
def test_mlflow_is_read_back(capsys):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra")
    words = [*SMALL["grpo"], "tracker=mlflow", "out=run", "tracker.mlflow.tags={team: a}"]
    assert train(*words, "tracker.mlflow.uri=sqlite:///own.db", "tracker.mlflow.experiment=mine") == 0
    client = mlflow.MlflowClient("sqlite:///own.db")
    told = client.get_run(Path("run/mlflow_id.txt").read_text().strip())
    assert told.info.status == "FINISHED" and told.data.tags["team"] == "a"
    found = capsys.readouterr()
    line = f"mlflow: run {told.info.run_id}; show it with: mlflow ui --backend-store-uri sqlite:///own.db\n"
    assert line in found.out and "INFO mlflow" not in found.err
    assert client.get_experiment(told.info.experiment_id).name == "mine"
    assert told.data.params["recipe.group_size"] == "4"
    kept = [row for row in rows("run") if "eval/accuracy" in row]
    history = client.get_metric_history(told.info.run_id, "eval/accuracy")
    assert [(one.step, one.value) for one in history] == [(row["step"], row["eval/accuracy"]) for row in kept]
    capsys.readouterr()
    assert train(*SMALL["grpo"], "tracker=mlflow", "tracker.mlflow.uri=nowhere://x", "out=second") == 2
    assert capsys.readouterr().err.startswith("error: tracker: mlflow: ")


# Real data


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K files in {GSM8K}")
@pytest.mark.parametrize(
    "words",
    [
        ["recipe=sft", "recipe.batch_size=4", "model=tiny_random", "optim.lr=3e-3"],
        pytest.param(
            ["recipe=grpo", "recipe.prompts_per_step=2", "recipe.group_size=2", "reward=number"], marks=pytest.mark.slow
        ),
    ],
    ids=["sft", "grpo"],
)
@pytest.mark.slow
def test_real_gsm8k(words):
    limits = ["data.limit=16", "eval.limit=4", "recipe.steps=2", "eval.every=null", *BRIEF]
    # The tiny model solves none of these problems, so a run on their rewards has no gradient.
    assert train(*words, *limits, "data=gsm8k", f"data.path={GSM8K}", "out=run") == (2 if "recipe=grpo" in words else 0)
    found = rows("run")
    assert [row["step"] for row in found] == [0, 1, 2]
    if "recipe=sft" in words:
        assert found[-1]["eval/loss"] < found[0]["eval/loss"]
        assert found[1]["tokens/trained"] > 400  # four answers of a hundred bytes and more
    else:
        assert "eval/accuracy" in found[-1] and "reward/mean" in found[1]
        assert all("train.jsonl:" in row["row"] for row in rows("run", "samples.jsonl") if row.get("split") != "eval")
