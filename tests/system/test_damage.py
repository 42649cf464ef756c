"""Files of a run folder that are missing or damaged: one line each, and no file that could be rescued is overwritten."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from marks import rest_slow
from runtools import SMALL, bits, checkpoint, files, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.run import hooks

ORPO = [*SMALL["orpo"], "eval.every=null"]
TORN = b'{"step": 2, "lo\x00\xff'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert train(*ORPO, "checkpoint.every=1", "out=run") == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def folder(here: Path, finished: Path) -> Path:  # noqa: F811
    """A copy of the finished run, in the current folder."""
    shutil.copytree(finished, "run")
    return Path("run")


def resumed(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """Errors and warnings on the terminal while the run takes a fourth step."""
    capfd.readouterr()
    assert train(*ORPO, "recipe.steps=4", "out=run", *words) == 0
    return capfd.readouterr().err


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command that changes no file."""
    before = files(Path("run"))
    capfd.readouterr()
    assert run(list(words) or ["train", *ORPO, "recipe.steps=4", "out=run"]) == 2
    assert files(Path("run")) == before
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


def damage_checkpoint(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


# Checkpoints


@pytest.mark.slow
def test_all_checkpoints_damaged(capfd):
    for step in (1, 2, 3):
        damage_checkpoint(checkpoint("run", step))
    reason = (
        "run/checkpoints: every checkpoint is damaged, the newest: run/checkpoints/step-000003: model.safetensors is damaged "
        "(its digest differs); restore one of them, choose another out=, or move run away to start the run over"
    )
    assert refused(capfd) == reason
    assert refused(capfd, "train", *ORPO, "resume=run", "out=branch") == reason
    assert refused(capfd, "sample", "run", "1+1=") == reason
    assert refused(capfd, "eval", "run") == reason
    shutil.move("run", "kept")  # as the error says
    assert resumed(capfd) == ""
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]


def test_the_newest_checkpoint_damaged(capfd):
    """The rest of a damaged file may be useful, so the run does not overwrite it."""
    damage_checkpoint(checkpoint("run", 3))
    left = (checkpoint("run", 3) / "model.safetensors").read_bytes()
    line = "run/checkpoints/step-000003 is damaged and is now called step-000003.damaged-1; the run saves this step again"
    assert line in resumed(capfd)
    assert Path("run/checkpoints/step-000003.damaged-1/model.safetensors").read_bytes() == left
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]


def test_checkpoints_deleted(capfd):
    shutil.rmtree("run/checkpoints")
    assert refused(capfd) == (
        "out: run has no checkpoint left, and its status.json says that step 3 was saved; restore run/checkpoints, choose "
        "another out=, or delete run to start the run over"
    )


@pytest.mark.slow
def test_a_branch_that_was_killed_before_its_first_checkpoint_starts_again_where_it_branched_off(capfd):
    hook = "from cookbook import Hook\n\n\nclass Stop(Hook):\n    def on_step(self, *_):\n        raise KeyboardInterrupt\n"
    write("stopping.py", hook)
    words = [*ORPO, "resume=run/checkpoints/step-000002", "out=branch"]
    assert train(*words, "+hook.stop._target_=stopping.Stop") == 130
    assert hooks.read_status(Path("branch"))["saved_step"] == 2 and not Path("branch/checkpoints").exists()
    assert train(*words) == 0
    assert bits(checkpoint("branch")) == bits(checkpoint("run"))
    assert [row["step"] for row in rows("branch")] == [3]
    assert hooks.read_status(Path("branch"))["started_from"] is None
    assert train(*words) == 2  # the branch has checkpoints of its own now
    assert "out: branch holds a run already; " in capfd.readouterr().err


# Rows


@pytest.mark.slow
def test_metrics_deleted(capfd):
    Path("run/metrics.jsonl").unlink()
    line = "run/metrics.jsonl is missing: the rows up to step-000003 are lost; the run resumes and writes the rest"
    assert resumed(capfd) == f"WARNING: {line}\n"
    assert [row["step"] for row in rows("run")] == [4]


@pytest.mark.slow
def test_metrics_of_a_finished_run_deleted(capfd):
    Path("run/metrics.jsonl").unlink()
    assert train(*ORPO, "out=run") == 0
    out, err = capfd.readouterr()
    assert "nothing to do: run is finished" in out and "run/metrics.jsonl is missing" in err


@pytest.mark.parametrize("name", rest_slow(["metrics.jsonl", "samples.jsonl", "bad_rows.jsonl"]))
def test_rows_damaged(name, capfd):
    path = Path("run", name)
    steps = range(4)
    lines = path.read_bytes().splitlines() if path.exists() else [b'{"step": %d, "row": "a:%d"}' % (n, n) for n in steps]
    steps = [json.loads(line)["step"] for line in lines]
    lines[1] = TORN
    damaged = b"\n".join([*lines, b"[1]", b'{"step": 4, "half'])
    path.write_bytes(damaged)
    told = f"{path}: damaged in 2 lines (line 2 is the first); the other rows are used, and {path}.damaged-1 is a copy"
    assert resumed(capfd) == f"WARNING: {told}\n"
    assert Path(f"{path}.damaged-1").read_bytes() == damaged
    assert [row["step"] for row in rows("run", name)][: len(steps) - 1] == [steps[0], *steps[2:]]
    path.write_bytes(TORN + b"\n" + path.read_bytes())
    assert f"{path}.damaged-2 is a copy" in resumed(capfd)  # the first copy stays


def test_a_last_row_that_a_kill_cut_short_is_no_damage(capfd):
    with Path("run/metrics.jsonl").open("ab") as file:
        file.write(TORN)
    assert resumed(capfd) == ""
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3, 4]
    assert not list(Path("run").glob("*.damaged*"))


# Other files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "recipe.name is missing"),
        (b"seed: 0\nmodel:\n  name: tiny\n", "recipe.name is missing"),
        (b"seed: [0", "while parsing a flow sequence"),
        (b"seed: 0\x00\x00", "unacceptable character #x0000"),
        (b"\xff\x00\x01", "'utf-8' codec can't decode byte 0xff"),
        (b"- a\n- b\n", "recipe.name is missing"),
    ],
)
@pytest.mark.slow
def test_config_torn(content, reason, capfd):
    Path("run/config.yaml").write_bytes(content)
    found = refused(capfd)
    assert found.startswith(f"run/config.yaml: is damaged: {reason}")
    remedy = "; restore the file, or resume the run in another folder: resume=run out=<new folder>"
    assert found.endswith(remedy)
    assert refused(capfd, "train", "--config", "run/config.yaml", "out=run") == found
    assert refused(capfd, "compare", "run", "run") == found
    if not content:
        refused(capfd, "eval", "run")
        assert train(*ORPO, "recipe.steps=4", "resume=run", "out=branch") == 0  # as the error says
        assert [row["step"] for row in rows("branch")] == [4]


def test_config_deleted(capfd):
    Path("run/config.yaml").unlink()
    remedy = "restore the file, or resume the run in another folder: resume=run out=<new folder>"
    assert refused(capfd) == f"run/config.yaml: is missing; {remedy}"
    assert refused(capfd, "train", "--config", "run/config.yaml", "out=run") == f"run/config.yaml: is missing; {remedy}"


@pytest.mark.parametrize(
    ("name", "use"),
    [("status.json", "it is written again"), ("environment.json", "it stays unchanged; log.txt has newer ones")],
)
@pytest.mark.slow
def test_facts_torn(name, use, capfd):
    Path("run", name).write_bytes(TORN)
    assert resumed(capfd) == f"WARNING: run/{name} is damaged; {use}\n"
    assert f"{name} is damaged" in Path("run/log.txt").read_text()
    assert (Path("run", name).read_bytes() == TORN) is (name == "environment.json")


@pytest.mark.slow
def test_log_and_lock_damaged(capfd):
    Path("run/log.txt").write_bytes(TORN)
    Path("run/.lock").write_bytes(TORN)  # stale: the kernel holds the lock, and ignores the file's text
    assert resumed(capfd) == ""
    assert Path("run/log.txt").read_bytes().startswith(TORN)  # only appended to
    for name in ("log.txt", ".lock"):
        Path("run", name).unlink()
        Path("run", name).mkdir()
        where = "run/log.txt" if name == "log.txt" else "run"
        assert train(*ORPO, "out=run") == 2
        assert (
            capfd.readouterr().err
            == f"error: out: cannot write to {where}: Is a directory; choose another folder with out=...\n"
        )
        Path("run", name).rmdir()


def test_a_result_of_eval_damaged(capfd):
    shutil.copytree("run", "other")
    Path("run/evals").mkdir()
    Path("run/evals/step-000003-1.json").write_bytes(TORN)
    assert refused(capfd, "compare", "run", "other") == (
        "compare: run/evals/step-000003-1.json is damaged; delete the file and run `cookbook eval` again"
    )
