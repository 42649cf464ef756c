"""Saves that the disk refuses: told in one line, the last good checkpoint stays, and there is a next one when there is room."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
import refusing
import tiny
from runtools import ROOT, SMALL, checkpoint, files, here, rows, timeless, train  # noqa: F401

from cookbook.checkpoints import manifest, store
from cookbook.errors import CheckpointError
from cookbook.types import AdamParams

ERRNOS = (errno.EDQUOT, errno.ENOSPC, errno.EROFS, errno.EIO)
pytestmark = pytest.mark.skipif(not refusing.possible(), reason="system calls are filtered on Linux only")


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_the_kernels_reason_is_told_and_nothing_stays_behind(make_engine, tmp_path, number):
    engine = make_engine()
    store.save(engine, tmp_path / "good", state=True)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError) as caught:
            name = "good" if overwrite else "next"
            refusing.under(number, lambda name=name, o=overwrite: store.save(engine, tmp_path / name, state=True, overwrite=o))
        told = str(caught.value)
        assert "could not be saved: " in told and os.strerror(number) in told and "\n" not in told
        assert told.endswith("; earlier checkpoints are untouched")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    manifest.verify(tmp_path / "good")
    store.save(engine, tmp_path / "next", state=True)  # there is room again


def test_a_trainer_saves_again_once_there_is_room(make_trainer, tmp_path):
    """A caller that has read the error of an asynchronous save continues to train and to save."""
    trainer = make_trainer()
    first = trainer.save_state("first", asynchronous=True)  # starts the thread that writes
    first.result()
    (tmp_path / "file").write_text("text")
    trainer.folder = tmp_path / "file"
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        trainer.save_state("second", asynchronous=True).result()
    trainer.folder = tmp_path
    trainer.forward_backward(tiny.datums(2), "dpo").result()
    trainer.optim_step(AdamParams(learning_rate=1e-3)).result()
    assert trainer.save_state("second", asynchronous=True).result().step == 1
    for name in ("first", "second"):
        manifest.verify(tmp_path / name)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("aside", ["false", "true"])
@pytest.mark.slow
def test_a_run_out_of_quota_keeps_its_last_good_checkpoint_and_resumes_with_space(aside, capsys):
    words = [*SMALL["orpo"], "checkpoint.every=2", f"checkpoint.asynchronous={aside}", "eval.every=null", "out=run"]
    assert train(*words, "recipe.steps=2") == 0
    before = files(checkpoint("run", 2))
    capsys.readouterr()
    assert refusing.under(errno.EDQUOT, lambda: train(*words, "recipe.steps=6")) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run/checkpoints/step-000004: could not be saved: ") and err.count("\n") == 1
    assert "Disk quota exceeded" in err and err.endswith("; earlier checkpoints are untouched\n")
    assert files(checkpoint("run", 2)) == before
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-000002"]
    assert train(*words, "recipe.steps=6") == 0
    assert [path.name for path in store.all_steps(Path("run/checkpoints"))] == [f"step-{step:06d}" for step in (2, 4, 6)]
    assert [row["step"] for row in rows("run")] == list(range(7))


READ_ONLY = """
set -e
mount -t tmpfs tmpfs disk
"$@" recipe.steps=1
mount -o remount,ro disk
set +e
"$@" recipe.steps=3
code=$?
cp -r disk kept
exit $code
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("here")
def test_a_disk_that_became_read_only():
    """A file system that was remounted read-only, as after a fault, between two processes of a run."""
    command = [sys.executable, "-m", "cookbook.cli.app", "train", *SMALL["orpo"], "eval.every=null", "out=disk/run"]
    done = refusing.with_mounts(READ_ONLY, *command)
    assert done.returncode == 2
    # A busy machine adds lines about what takes more than two seconds.
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("starting", "loading the model "))]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Read-only file system" in lines[0]
    manifest.verify(Path("kept/run/checkpoints/step-000001"))
    shutil.copytree("kept/run", "run")
    assert train(*SMALL["orpo"], "eval.every=null", "recipe.steps=3", "out=run") == 0
    assert [row["step"] for row in timeless("run")] == [0, 1, 2, 3]
