"""When a run is saved, and which of its checkpoints stay: by steps, tokens or minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from runtools import SMALL, checkpoint, here, rows, stop_at, train  # noqa: F401

from cookbook.checkpoints import CheckpointConfig, inventory, manifest, store
from cookbook.checkpoints.schedule import Progress, SaveInterval
from cookbook.engine.model import ModelConfig, load
from cookbook.errors import ConfigError
from cookbook.run import folder as run_folder
from cookbook.run import run as runs


def saved(folder: Path, *progress: Progress) -> None:
    """Checkpoints as a run leaves them, but without tensors."""
    for one in progress:
        path = folder / store.step_name(one.steps)
        path.mkdir(parents=True)
        stated = {"tokens": one.tokens, "minutes": one.minutes}
        manifest.write(path, {"kind": "state", "step": one.steps, "run": {"progress": stated}})


def left(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.all_steps(folder)]


def test_due_is_what_a_multiple_lies_before():
    by_steps = SaveInterval(steps=10)
    due = [number for number in range(1, 41) if by_steps.due(Progress(number - 1), Progress(number))]
    assert due == [10, 20, 30, 40]
    assert by_steps.due(Progress(9), Progress(35)) and not by_steps.due(Progress(10), Progress(19))
    both = SaveInterval(tokens=1000, minutes=0.5)
    assert not both.due(Progress(1, 1999, 0.9), Progress(99, 1999, 0.99))
    assert both.due(Progress(1, 1999, 0.9), Progress(2, 2000, 0.9)) and both.due(Progress(1, 1999, 0.9), Progress(2, 1999, 1.0))
    assert not SaveInterval().due(Progress(), Progress(10**9, 10**15, 1e9))


@pytest.mark.parametrize(
    ("cadence", "stay"),
    [
        (SaveInterval(), [7, 8]),
        (SaveInterval(steps=3), [3, 6, 7, 8]),
        (SaveInterval(tokens=250), [3, 5, 7, 8]),  # the first that have seen 250 and 500
        (SaveInterval(minutes=2.0), [4, 7, 8]),
        (SaveInterval(steps=5, minutes=2.0), [4, 5, 7, 8]),
    ],
)
def test_old_ones_stay_by_steps_tokens_or_minutes(tmp_path, cadence, stay):
    """Whether it is pruned once at the end or after every save makes no difference."""
    progress = [Progress(step, 100 * step, 0.5 * step) for step in range(1, 9)]
    saved(tmp_path / "once", *progress)
    store.prune(tmp_path / "once", 2, 8, cadence)
    for one in progress:
        saved(tmp_path / "often", one)
        store.prune(tmp_path / "often", 2, one.steps, cadence)
    assert left(tmp_path / "once") == left(tmp_path / "often") == stay


def test_the_last_good_one_is_never_removed(tmp_path):
    """Damaged checkpoints with higher numbers do not count, and one without a readable manifest is not kept permanently."""
    saved(tmp_path, *(Progress(step) for step in range(1, 8)))  # the first after 4 steps is torn, and 5 is the newest good one
    for step in (4, 6, 7):
        (tmp_path / store.step_name(step) / manifest.NAME).write_text("torn")
    assert store.newest(tmp_path) == tmp_path / store.step_name(5)
    store.prune(tmp_path, 1, 5, SaveInterval(steps=4))
    assert left(tmp_path) == [5, 6, 7]
    assert store.newest(tmp_path) == tmp_path / store.step_name(5)


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_run_saves_by_tokens_and_resumes_the_count():
    words = [*SMALL["orpo"], "recipe.steps=6", "eval.every=null", "checkpoint.every=null", "checkpoint.keep=null"]
    assert train(*words, "checkpoint.every_tokens=1", "out=all") == 0
    facts = [manifest.read(path)["run"]["progress"] for path in store.all_steps(Path("all/checkpoints"))]
    tokens = [fact["tokens"] for fact in facts]
    assert len(tokens) == 6 and tokens == sorted(set(tokens)) and tokens[0] > 0
    minutes = [fact["minutes"] for fact in facts]
    assert minutes == sorted(minutes) and 0 < minutes[0] < 2
    every = tokens[2] - 1  # reached by step 3
    expected = [
        number
        for number, (one, other) in enumerate(zip([0, *tokens], tokens, strict=False), 1)
        if one // every < other // every
    ]
    words += [f"checkpoint.every_tokens={every}"]
    assert train(*words, "out=some") == 0
    assert left(Path("some/checkpoints")) == sorted({*expected, 6}) and len(expected) < 4
    shutil.copytree("some", "cut")
    for step in left(Path("cut/checkpoints"))[1:]:
        shutil.rmtree(checkpoint("cut", step))
    assert train(*words, "out=cut") == 0  # resumes from its first checkpoint
    assert left(Path("cut/checkpoints")) == left(Path("some/checkpoints"))
    assert manifest.read(checkpoint("cut"))["run"]["progress"]["tokens"] == tokens[-1]


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_run_saves_by_minutes(monkeypatch):
    """Of a clock that moves on by 20 s whenever it is read for the run's progress."""
    read = iter(range(0, 10**6, 20))
    monkeypatch.setattr(runs.Run, "progress", property(lambda run: Progress(run.done, 0, next(read) / 60)))
    words = [*SMALL["orpo"], "recipe.steps=8", "eval.every=null", "checkpoint.every=null", "checkpoint.final=false"]
    assert train(*words, "checkpoint.every_minutes=1", "checkpoint.keep=1", "checkpoint.keep_every_minutes=2", "out=run") == 0
    assert left(Path("run/checkpoints")) == [7]
    assert [row["step"] for row in rows("run")] == list(range(9))


@pytest.mark.parametrize("name", ["every", "keep_every"])
def test_options_out_of_range(name):
    for unit, wrong, least in (("", 0, "at least 1"), ("_tokens", 0, "at least 1"), ("_minutes", 0.0, "above 0")):
        with pytest.raises(ConfigError, match=f"checkpoint.{name}{unit} must be {least}, got {wrong}; null "):
            CheckpointConfig(**{name + unit: wrong})
    assert CheckpointConfig(every=None, keep=None, every_minutes=0.5)


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_the_last_checkpoint_may_hold_weights_only(capsys):
    words = [*SMALL["orpo"], "eval.every=null", "checkpoint.every=2", "checkpoint.final_state=false"]
    assert train(*words, "out=run") == 0
    assert [manifest.read(path)["kind"] for path in store.all_steps(Path("run/checkpoints"))] == ["state", store.WEIGHTS_ONLY]
    before, last = checkpoint("run", 2), checkpoint("run", 3)
    assert (before / store.TRAINER).is_dir() and not (last / store.TRAINER).exists()
    assert load(ModelConfig(run_folder.sampling_target("run")), torch.device("cpu"), seed=0).max_length
    # It belongs to the run, and not to the checkpoints for samplers.
    assert not any(entry.is_sampled_from for entry in inventory.entries(Path("run")))
    for more in (["out=run"], ["recipe.steps=5", "out=run"], ["recipe.steps=5", "resume=run", "out=branch"]):
        capsys.readouterr()
        assert train(*words, *more) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "step-000003 holds weights only, because of checkpoint.final_state=false" in error
    assert train(*words, "recipe.steps=4", f"resume={before}", "out=branch") == 0


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_stopped_run_can_resume_with_a_last_checkpoint_of_weights_only():
    words = [*SMALL["orpo"], "eval.every=null", "checkpoint.every=null", "checkpoint.final_state=false"]
    assert train(*words, "out=run", *stop_at(2)) == 130
    assert manifest.read(checkpoint("run", 2))["kind"] == "state"
    assert train(*words, "out=run") == 0
    assert manifest.read(checkpoint("run", 3))["kind"] == store.WEIGHTS_ONLY
