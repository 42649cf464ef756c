"""A run that was stopped in any way resumes, and ends with exactly the results of an undisturbed run."""

import contextlib
import importlib
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml
from marks import TRACKERS, rest_slow, rotating
from preloaded import Forked
from runtools import (  # noqa: F401
    FOUR,
    SMALL,
    bits,
    checkpoint,
    files,
    here,
    resume_words,
    rows,
    same_as_undisturbed,
    start,
    stop_at,
    timeless,
    train,
    write,
)
from safetensors.torch import load_file, save_file
from waiting import WAIT_S, until

from cookbook.checkpoints import manifest
from cookbook.cli.app import run
from cookbook.utils.paths import packaged
from cookbook.utils.signals import ONE_REQUEST_S

pytestmark = pytest.mark.usefixtures("here")


# Exactly


ASIDE = ["checkpoint.every=1", "checkpoint.asynchronous=true"]
VARIANTS = {
    **SMALL,
    "sft-lora-dropout-cosine": [*SMALL["sft"], "model=tiny", "model.lora_rank=4", "model.lora_dropout=0.3", "schedule=cosine"],
    "dpo-bfloat16-saved-aside": [*SMALL["dpo"], "model.dtype=bfloat16", *ASIDE],
    "dpo-lora-bfloat16": [*SMALL["dpo"], "model.lora_rank=4", "model.dtype=bfloat16", "optim.lr=1e-2"],
}

REST = [pytest.param(words, id=name) for name, words in VARIANTS.items() if name not in ("orpo", "grpo")]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(SMALL["orpo"], id="orpo"),
        pytest.param(SMALL["grpo"], id="grpo", marks=pytest.mark.slow),
        *rotating(REST, 2),
    ],
)
def test_two_processes_equal_one(words, capsys):
    assert train(*words, *FOUR, "out=straight") == 0
    assert train(*words, *FOUR, "out=stopped", *stop_at(2)) == 130
    assert [row["step"] for row in rows("stopped")] == [0, 1, 2]
    capsys.readouterr()
    assert train(*words, *FOUR, "out=stopped") == 0
    assert "resuming after step 2, from stopped/checkpoints/step-000002" in capsys.readouterr().out
    same_as_undisturbed()
    if (samples := Path("straight/samples.jsonl")).exists():
        assert Path("stopped/samples.jsonl").read_bytes() == samples.read_bytes()


@pytest.mark.slow
def test_between_two_weight_syncs_samples_still_come_from_the_older_weights():
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = [*SMALL["grpo"], "recipe.steps=5", "reward=python", "reward.target=dice.py:odd", "optim.lr=1e-3"]
    words += ["weight_sync.every=3", "checkpoint.every=3", "eval.every=null"]
    assert train(*words, "out=straight") == 0
    stop = stop_at(1, 2, 4)
    for step in (1, 2, 4):  # between two syncs, there once more, and behind the next one
        assert train(*words, "out=stopped", *stop) == 130
        assert (checkpoint("stopped", step) / "sampler").is_dir()
    assert train(*words, "out=stopped") == 0
    same_as_undisturbed()
    assert not (checkpoint("stopped", 3) / "sampler").exists()  # where a sync is due, the older weights are of no use
    # Step 5 learned from samples of the weights after step 3: with fresh ones sampler and trainer differ by rounding alone.
    assert rows("stopped")[5]["kl/sampler_trainer_k3"] > 1e-6


@pytest.mark.parametrize("moment", rotating(["on_eval", "on_checkpoint"], 1))
def test_asked_at_any_moment_of_the_step_it_stops_saved(moment):
    """While it evaluates, the same step is the last; while it saves already, the next one is. Either is saved."""
    words = [*SMALL["orpo"], *FOUR, "checkpoint.every=2", "out=stopped"]
    assert train(*words, *stop_at(2, moment=moment)) == 130
    last = rows("stopped")[-1]["step"]
    assert last == (2 if moment == "on_eval" else 3)
    assert checkpoint("stopped").name == f"step-{last:06d}"
    assert train(*words) == 0
    assert train(*SMALL["orpo"], *FOUR, "checkpoint.every=2", "out=straight") == 0
    same_as_undisturbed()


@pytest.mark.slow
def test_at_an_epochs_end_with_accumulated_gradients_and_calls_without_a_waiter():
    """Each step makes two calls and reads no result: both are under way when the checkpoint starts."""
    assert run(["fork", "sft", "mine"]) == 0
    code = Path("recipes/mine.py").read_text()
    split = "run.forward_backward(data[:5])\n        run.forward_backward(data[5:])\n        run.optim_step(step)\n"
    head = code[: code.index("gradient = run.forward_backward(data)")]
    Path("recipes/mine.py").write_text(head + split)
    words = ["recipe=mine", "recipe.batch_size=12", *FOUR, "data.limit=24", "eval.limit=4", "eval.every=null"]
    assert train(*words, "out=straight") == 0
    assert train(*words, "out=stopped", *stop_at(2)) == 130
    assert train(*words, "out=stopped") == 0
    same_as_undisturbed()
    order = [row["data/rows_crc32"] for row in rows("stopped")[1:]]
    assert len(set(order)) == 4  # every epoch in an order of its own


@pytest.mark.slow
def test_stopping_saves_even_where_nothing_else_would():
    words = [*SMALL["orpo"], *FOUR, "checkpoint.every=null", "checkpoint.final=false", "eval.every=null", "out=stopped"]
    assert train(*words, *stop_at(1)) == 130
    assert checkpoint("stopped").name == "step-000001"


@pytest.mark.slow
def test_terminate_is_the_same_and_the_printed_command_resumes(capsys):
    words = [*SMALL["sft"], *FOUR]
    assert train(*words, "out=straight") == 0
    capsys.readouterr()
    assert train(*words, "out='its place/a=b'", *stop_at(2, number=signal.SIGTERM)) == 143
    again = resume_words(capsys.readouterr().out)
    assert run(again) == 0
    same_as_undisturbed("its place/a=b")


@pytest.mark.parametrize("tracker", rotating(TRACKERS, 1))
def test_a_tracker_resumes_in_the_same_place(tracker, monkeypatch):
    pytest.importorskip(tracker, reason=f"{tracker} is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    if tracker == "trackio":
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", Path("trackio").resolve())
    words = [*SMALL["orpo"], *FOUR, "eval.every=null", f"tracker={tracker}", "out=run"]
    assert train(*words, *stop_at(2)) == 130
    assert train(*words) == 0
    if tracker == "wandb":  # two offline runs of one id, which the server joins
        assert len({path.name.rpartition("-")[2] for path in Path("run/wandb").glob("offline-run-*")}) == 1
    elif tracker == "trackio":
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        (name,) = storage.get_runs("cookbook")
        assert sorted({row["step"] for row in storage.get_logs("cookbook", name)}) == [0, 1, 2, 3, 4]
    elif tracker == "mlflow":
        client = importlib.import_module("mlflow").MlflowClient()
        (told,) = client.search_runs([client.get_experiment_by_name("cookbook").experiment_id])
        assert told.info.status == "FINISHED"
        assert sorted({one.step for one in client.get_metric_history(told.info.run_id, "loss")}) == [1, 2, 3, 4]
    else:
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator("run/tensorboard").Reload()
        assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


# A process of its own


def wait_for_step(process: Forked, folder: Path, step: int) -> None:
    """Until the run has written that step's row."""
    metrics = folder / "metrics.jsonl"

    def written() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return metrics.exists() and metrics.read_text().count("\n") > step

    until(written, limit_s=300)


@pytest.mark.slow
def test_ctrl_c_once_at_the_keyboard():
    words = [*SMALL["grpo"], "recipe.steps=3000", "eval.every=null", "checkpoint.every=null"]
    process = start(words)
    (folder,) = until(lambda: list(Path("runs").glob("*")))
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    # A busy machine adds lines about what takes more than two seconds.
    assert err.endswith("\nstopping after this step; the second signal stops immediately\n")
    step = rows(folder)[-1]["step"]
    assert f"stopped after step {step}, saved; resume with: cookbook train --config {folder}/config.yaml out={folder}\n" in out
    assert checkpoint(folder).name == f"step-{step:06d}"
    assert run([*resume_words(out), f"recipe.steps={step + 1}"]) == 0
    assert rows(folder)[-1]["step"] == step + 1


@pytest.mark.slow
def test_ctrl_c_twice_stops_immediately():
    """In the middle of a step of millions of tokens, which would take a minute."""
    write("long.jsonl", ('{"text": "' + "7" * 4000 + '"}\n') * 1024)
    words = ["recipe=sft", "data=jsonl", "data.path=long.jsonl", "recipe.batch_size=1024", "recipe.steps=9", "out=run"]
    process = start(words)
    wait_for_step(process, Path("run"), 0)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "stopping after this step; the second signal stops immediately\n" not in process.stderr.readline():
        assert process.poll() is None
    # A second signal within this time would count as the same request.
    time.sleep(2 * ONE_REQUEST_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and err == ""
    # The step did not end, and nothing was saved.
    assert rows("run")[-1]["step"] == 0
    assert not Path("run/checkpoints").exists()


# What resume decides


def test_a_finished_run_is_left_alone(finished, capsys):
    shutil.copytree(finished / "run", "run")
    before = files(Path("run"))
    capsys.readouterr()
    assert train(*SMALL["dpo"], "out=run") == 0
    assert "nothing to do: run is finished, with 3 of 3 steps; raise recipe.steps to resume" in capsys.readouterr().out
    after = files(Path("run"))
    assert {name for name in before if after[name] != before[name]} <= {"run/log.txt", "run/curves.svg", "run/status.json"}
    assert set(after) == set(before)
    assert after["run/curves.svg"][1] == before["run/curves.svg"][1]
    # Settings that train nothing do not become those of the run.
    assert train(*SMALL["dpo"], "out=run", "recipe.steps=2", "optim.lr=0.5") == 0
    out = capsys.readouterr().out
    assert "nothing to do: run is finished" in out and "changed:" not in out
    assert files(Path("run"))["run/config.yaml"] == before["run/config.yaml"]


@pytest.mark.slow
def test_a_branch_that_would_train_nothing_is_refused(finished, capsys):
    """A copy of another run under a new name would look like a run."""
    shutil.copytree(finished / "run", "run")
    capsys.readouterr()
    assert train(*SMALL["dpo"], "resume=run", "out=branch") == 2
    error = "error: recipe.steps: branch starts after 3 of 3 steps, so no step is left to train; raise recipe.steps\n"
    assert capsys.readouterr().err == error
    assert not Path("branch").exists()
    assert train(*SMALL["dpo"], "resume=run") == 0  # its own folder: that it is finished is no mistake
    assert "nothing to do: run is finished" in capsys.readouterr().out


@pytest.mark.slow
def test_more_steps_continue_from_the_end():
    words = [*SMALL["orpo"], "checkpoint.every=2"]  # the learning rate is constant, so it does not depend on the total
    assert train(*words, *FOUR, "out=straight") == 0
    assert train(*words, "recipe.steps=2", "out=stopped") == 0
    assert train(*words, *FOUR, "out=stopped") == 0
    same_as_undisturbed()
    assert yaml.safe_load(Path("stopped/config.yaml").read_text())["recipe"]["steps"] == 4


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_over(capsys):
    """As a run that was killed before its first one."""
    words = [*SMALL["dpo"], "checkpoint.final=false", "out=stopped"]
    assert train(*words) == 0
    with Path("stopped/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')
    before = files(Path("stopped"))
    assert train(*words, "loss.beta=0.3") == 2
    assert "loss.beta: the run in stopped was made with 0.1, now it is 0.3" in capsys.readouterr().err
    assert files(Path("stopped")) == before
    assert train(*words, "checkpoint.final=true") == 0
    assert "stopped has no checkpoint to resume from; starting it over" in capsys.readouterr().out
    assert train(*SMALL["dpo"], "out=straight") == 0
    same_as_undisturbed()


@pytest.mark.slow
def test_never_refuses_a_folder_with_a_run(capsys):
    words = [*SMALL["orpo"], "recipe.steps=1", "eval.every=null", "out=run", "resume=never"]
    assert train(*words) == 0
    before = files(Path("run"))
    assert train(*words) == 2
    message = "error: out: run holds a run already; choose another folder, or resume=auto to resume it\n"
    assert capsys.readouterr().err == message
    assert files(Path("run")) == before


@pytest.mark.slow
def test_a_path_branches_off_into_a_folder_of_its_own(capsys):
    words = [*SMALL["orpo"], *FOUR, "checkpoint.every=2"]
    assert train(*words, "out=run") == 0
    before = files(Path("run"))
    assert train(*words, "resume=run/checkpoints/step-000002", "out=branch", "optim.lr=1e-3") == 0
    assert [row["step"] for row in rows("branch")] == [3, 4]
    assert rows("branch")[0]["loss"] == rows("run")[3]["loss"]  # before the first update with the new learning rate
    assert rows("branch")[1]["loss"] != rows("run")[4]["loss"]
    capsys.readouterr()
    refused = {
        "resume=run/checkpoints/step-000002": "resume: run/checkpoints/step-000002 is not the newest of its run, which ",
        "resume=run/checkpoints/step-000002 out=branch": "out: branch holds a run already; choose another folder, or ",
        "resume=nowhere": "resume: nowhere is neither a checkpoint nor a run with one; expected auto, force, never or ",
        "resume=null": "resume: expected text, got null",
        "resume=run loss=simpo": "loss._target_: the run in run was made with 'cookbook.losses.orpo.ORPO', now it is",
    }
    for more, message in refused.items():
        assert train(*words, *more.split()) == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert files(Path("run")) == before
    assert train(*words, "resume=run", "recipe.steps=5") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which a run of DPO has finished."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert train(*SMALL["dpo"], "out=run") == 0
    return folder


@pytest.mark.parametrize(
    ("change", "difference"),
    rest_slow(
        [
            ("seed=1", "seed: the run in run was made with 0, now it is 1"),
            pytest.param("loss.beta=0.5", "loss.beta: the run in run was made with 0.1, now it is 0.5", marks=pytest.mark.slow),
            ("loss=simpo", "loss.variant: the run in run was made with 'sigmoid', now it is 'simpo'"),
            pytest.param(
                "model.dtype=bfloat16",
                "model.dtype: the run in run was made with 'float32', now it is 'bfloat16'",
                marks=pytest.mark.slow,
            ),
            ("model=tiny_random", "model.random: the run in run was made with False, now it is True"),
            pytest.param("data.limit=23", "data.limit: the run in run was made with 24, now it is 23", marks=pytest.mark.slow),
            pytest.param(
                "recipe.batch_size=5", "recipe.batch_size: the run in run was made with 4, now it is 5", marks=pytest.mark.slow
            ),
            ("rollout.max_tokens=9", "rollout.max_tokens: the run in run was made with 16, now it is 9"),
            ("recipe=orpo", "recipe.name: the run in run was made with 'dpo', now it is 'orpo'"),
        ],
        fast=2,
    ),
)
def test_another_run_is_not_resumed(change, difference, capsys, finished, monkeypatch):
    monkeypatch.chdir(finished)
    before = files(Path("run"))
    group, _, name = change.partition("=")
    assert train(*(SMALL[name] if group == "recipe" else [*SMALL["dpo"], change]), "out=run") == 2
    advice = "restore the old value to resume, or set another out= to start a new run"
    assert capsys.readouterr().err == f"error: {difference}; {advice}\n"
    assert files(Path("run")) == before


@pytest.mark.slow
def test_other_rows_in_the_same_file_are_other_data(capsys):
    rows_of = '{{"prompt": "1+{0}=", "completion": "{1}"}}\n'.format
    write("rows.jsonl", "".join(rows_of(i, i + 1) for i in range(8)))
    words = [
        "recipe=sft",
        "model=tiny",
        "recipe.batch_size=4",
        "eval.every=null",
        "data=jsonl",
        "data.path=rows.jsonl",
        "out=run",
    ]
    assert train(*words, "recipe.steps=1") == 0
    write("rows.jsonl", "".join(rows_of(i, i + 2) for i in range(8)))
    before = files(Path("run/checkpoints"))
    assert train(*words, "recipe.steps=2") == 2
    assert capsys.readouterr().err.startswith(
        "error: data: the digest of the training rows: the run that saved run/checkpoints/step-000001 was made with '"
    )
    assert files(Path("run/checkpoints")) == before
    assert train(*words, "recipe.steps=2", "resume=force") == 0
    warning = capsys.readouterr().err
    assert warning.startswith("WARNING: data: the digest of the training rows: ") and warning.count("\n") == 1
    assert [row["step"] for row in rows("run")] == [0, 1, 2]
    assert train(*words, "recipe.steps=3") == 0  # the checkpoint now knows the new rows
    assert yaml.safe_load(Path("run/config.yaml").read_text())["resume"] == "auto"


@pytest.mark.parametrize(
    ("file", "subject"),
    [
        ("model.safetensors", "model.name: the digest of the initial weights"),
        pytest.param("tokenizer.json", "model.name: the digest of its tokenizer", marks=pytest.mark.slow),
        pytest.param("chat_template.jinja", "model.chat_template: the digest of its text", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_another_model_of_the_same_name_is_another_run(file, subject, capsys):
    shutil.copytree(packaged("data") / "tiny", "model")
    words = [*SMALL["dpo"], "model=tiny", "demo=dpo", "model.name=./model", "eval.every=null", "out=run"]
    assert train(*words, "recipe.steps=1") == 0
    change = {
        "model.safetensors": lambda path: save_file({k: v * 2 for k, v in load_file(path).items()}, path, {"format": "pt"}),
        "tokenizer.json": lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens": []})),
        "chat_template.jinja": lambda path: path.write_text("{# #}" + path.read_text()),
    }
    change[file](Path("model", file))
    capsys.readouterr()
    assert train(*words, "recipe.steps=2") == 2
    assert capsys.readouterr().err.startswith(
        f"error: {subject}: the run that saved run/checkpoints/step-000001 was made with '"
    )


@pytest.mark.slow
def test_a_key_that_is_new_had_its_default_before(finished, monkeypatch, tmp_path, capsys):
    """As in a run made by a version that did not know ``data.train_on``, ``data.columns.text`` and ``loss.beta`` yet."""
    shutil.copytree(finished / "run", "run")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    facts = manifest.read(checkpoint("run"))
    for one in (config, facts["run"]["identity"]):
        del one["data"]["train_on"], one["data"]["columns"]["text"], one["loss"]["beta"]
    Path("run/config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (checkpoint("run") / manifest.NAME).unlink()
    manifest.write(checkpoint("run"), {key: value for key, value in facts.items() if key not in ("format", "files")})
    assert train(*SMALL["dpo"], *FOUR, "loss.beta=0.3", "out=run") == 2
    assert capsys.readouterr().err.startswith("error: loss.beta: the run in run was made with 0.1, now it is 0.3; ")
    assert train(*SMALL["dpo"], *FOUR, "out=run") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("by", ["words", "config"])
@pytest.mark.slow
def test_a_group_that_is_new_had_its_default_before(by, finished, capsys):
    """A run whose configuration has no ``deployment``, and no ``rollout`` in the identity of the run."""
    shutil.copytree(finished / "run", "run")
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    facts = manifest.read(checkpoint("run"))
    del config["deployment"], config["rollout"], facts["run"]["identity"]["rollout"]
    Path("run/config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (checkpoint("run") / manifest.NAME).unlink()
    manifest.write(checkpoint("run"), {key: value for key, value in facts.items() if key not in ("format", "files")})
    words = SMALL["dpo"] if by == "words" else ["--config", "run/config.yaml"]
    assert train(*words, *FOUR, "rollout.max_tokens=9", "out=run") == 2
    assert "rollout.max_tokens: the run in run was made with 16, now it is 9; " in capsys.readouterr().err
    assert train(*words, *FOUR, "out=run") == 0
    told = "run/config.yaml takes defaults for rollout, deployment\n"
    assert capsys.readouterr().err == (told if by == "config" else "")
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]
    log = Path("run/log.txt").read_text()
    for group in ("rollout", "deployment"):
        assert f"INFO {group}: not in the run's configuration, so it had its default; " in log
    assert {"rollout", "deployment"} <= set(yaml.safe_load(Path("run/config.yaml").read_text()))


@pytest.mark.slow
def test_what_is_harmless_may_change_and_is_noted(finished, monkeypatch, tmp_path, capsys):
    shutil.copytree(finished / "run", "run")
    more = [
        "recipe.steps=4",
        "eval.every=1",
        "checkpoint.keep=1",
        "backend.micro_batch_tokens=64",
        "tracker=none",
        "optim.lr=1e-3",
    ]
    capsys.readouterr()
    assert train(*SMALL["dpo"], *more, "out=run") == 0
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed: ")]
    assert len(told) == 1
    assert set(told[0].removeprefix("changed: ").split(", ")) == {
        "recipe.steps 3 -> 4",
        "eval.every 2 -> 1",
        "checkpoint.keep 3 -> 1",
        "backend.micro_batch_tokens 8192 -> 64",
        "optim.lr 5e-05 -> 0.001",
    }
    log = Path("run/log.txt").read_text()
    for change in ("recipe.steps: 3 before, now 4", "backend.micro_batch_tokens: 8192 before, now 64"):
        assert f"INFO {change}\n" in log
    assert "data.limit:" not in log


@pytest.mark.slow
def test_a_checkpoint_that_was_moved_knows_its_run(finished, capsys):
    shutil.copytree(checkpoint(finished / "run"), "moved")
    words = [*SMALL["dpo"], *FOUR, "resume=moved", "out=branch"]
    assert train(*words, "recipe.batch_size=3") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: recipe.batch_size: the run that saved moved was made with 4, now it is 3; restore the old value to "
    )
    assert train(*words) == 0
    assert [row["step"] for row in rows("branch")] == [4]
    assert capsys.readouterr().err == ""
    facts = {key: value for key, value in manifest.read(Path("moved")).items() if key not in ("run", "format", "files")}
    Path("moved", manifest.NAME).unlink()
    manifest.write(Path("moved"), facts)  # as the Python API saves, which knows no configuration
    assert train(*SMALL["dpo"], *FOUR, "resume=moved", "out=unknown") == 0
    assert "moved does not say which run saved it" in capsys.readouterr().err


@pytest.mark.parametrize(("schedule", "warned"), [("linear", True), ("wsd", False)])
@pytest.mark.slow
def test_another_total_is_told_where_it_changes_the_steps_that_are_done(schedule, warned, capsys):
    """Of a schedule that stays until its last tenth, the first two steps are the same of 3 and of 30."""
    words = [*SMALL["orpo"], f"schedule={schedule}", "eval.every=null", "out=run"]
    assert train(*words, "recipe.steps=30", *stop_at(2)) == 130
    capsys.readouterr()
    assert train(*words, "recipe.steps=3") == 0
    err = capsys.readouterr().err
    told = "WARNING: recipe.steps: 2 steps had the learning rates of a run of 30 steps, and the run now has 3; "
    assert err.startswith(told) and err.count("\n") == 1 if warned else err == ""


@pytest.mark.slow
def test_a_torn_checkpoint_is_ignored_with_a_warning(capfd):
    words = [*SMALL["dpo"], *FOUR, "checkpoint.every=1"]
    assert train(*words, "out=straight") == 0
    shutil.copytree("straight", "stopped")
    torn = checkpoint("stopped") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    (checkpoint("stopped", 3) / "trainer" / "shard-00000-00000.safetensors").unlink()
    capfd.readouterr()
    assert train(*words, "out=stopped") == 0
    out, err = capfd.readouterr()
    assert "ignored a damaged checkpoint: stopped/checkpoints/step-000004: model.safetensors is damaged" in err
    assert (
        "ignored a damaged checkpoint: stopped/checkpoints/step-000003: trainer/shard-00000-00000.safetensors is missing" in err
    )
    assert "resuming after step 2, from stopped/checkpoints/step-000002" in out
    same_as_undisturbed()
    assert [row["step"] for row in rows("stopped")] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_torn_checkpoint_named_by_hand_is_refused(capsys):
    assert train(*SMALL["dpo"], "out=run") == 0
    torn = checkpoint("run") / "trainer" / "shard-00000-00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert train(*SMALL["dpo"], f"resume={checkpoint('run')}", "out=branch") == 2
    name = str(torn.relative_to(checkpoint("run")))
    assert f"{name} is damaged (its digest differs); use another checkpoint\n" in capsys.readouterr().err
    assert not Path("branch").exists()
