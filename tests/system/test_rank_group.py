"""``backend.ranks=2`` trains as one process does; lost ranks are started again, and mistakes start none."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import forkedranks
import kill_ranks
import psutil
import pytest
from forkedranks import forked_ranks  # noqa: F401 - a fixture
from kill_ranks import gone
from marks import rest_nightly, rest_slow
from omegaconf import OmegaConf
from preloaded import Forked
from ranktools import long_run
from runtools import LITTLE, SMALL, bits, checkpoint, here, rows, start, train  # noqa: F401 - here is a fixture
from waiting import until

from cookbook import Hook
from cookbook.backends.group import supervisor
from cookbook.backends.group.supervisor import RankSupervisor
from cookbook.cli import serve
from cookbook.cli.app import run
from cookbook.engine.parallel import RanksLostError
from cookbook.errors import BackendError

pytest.importorskip("tinker", reason="needs the package tinker")
pytestmark = pytest.mark.usefixtures("here")

SFT = ["recipe=sft", "recipe.steps=3", "recipe.batch_size=6", *LITTLE]
RANKS = "backend.ranks=2"


def assert_close(one: str, other: str) -> None:
    """Compare metrics. The absolute tolerance is for differences of float32 log-probabilities, which are kl/... in GRPO."""
    for row, row_too in zip(rows(one), rows(other), strict=True):
        assert row.keys() == row_too.keys()
        values = {key: value for key, value in row.items() if isinstance(value, float) and not key.startswith("time/")}
        assert {key: row_too[key] for key in values} == pytest.approx(values, rel=1e-5, abs=1e-6), row["step"]


class KillRank(Hook):
    """Kill the second rank after the second step."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            forkedranks.STARTED[1].kill()


# GRPO does everything that the other recipes do but for their losses, which test_ranks.py compares.
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("recipe", rest_nightly(["grpo", "sft", "dpo", "orpo"]))
def test_two_ranks_one_of_which_is_killed_train_as_one_process(recipe, capsys):
    assert train(*SMALL[recipe], "out=one") == 0
    assert train(*SMALL[recipe], RANKS, f"+hook.kill._target_={__name__}.KillRank", "out=two") == 0
    assert "starting the 2 ranks again" in capsys.readouterr().err and len(forkedranks.STARTED) == 4
    assert_close("one", "two")
    names = {str(path.relative_to("one")) for path in Path("one").rglob("*") if path.is_file()}
    names_too = {str(path.relative_to("two")) for path in Path("two").rglob("*") if path.is_file()}
    # Each rank writes a part of the optimizer's state.
    assert names_too - names == {"checkpoints/step-000003/trainer/shard-00001-00000.safetensors"}
    assert names <= names_too


@pytest.mark.parametrize(
    ("words", "error"),
    rest_slow(
        [
            (["backend.rank=2"], "unknown key 'backend.rank'"),
            (["model.name=./nowhere"], "no such folder './nowhere'"),
            (["model.name=unknown/nothing"], "model.name: "),
            (["model.lora_rank=4", "model.lora_target_modules=[q_proj]"], "model.lora_target_modules"),
            (["backend.shard=every"], "backend.shard: expected one of auto, none, node, all, got 'every'"),
            (["backend.shard=all"], "set eval.answers=false to evaluate the loss only, deployment=vllm, or backend.shard=none"),
            (["backend.shard=all", "job=local"], "got all; set eval.answers=false to evaluate the loss only"),
            (
                ["backend.shard=all", "eval.answers=false", "backend.optimizer=adafactor", "optim=adafactor"],
                "adafactor cannot update",
            ),
            (
                ["backend.shard=all", "eval.answers=false", "backend.optimizer=adamw8bit", "job=local"],
                "adamw8bit cannot update",
            ),
            (["deployment=vllm", "deployment.gpus=[1000]"], "deployment.gpus: this machine has "),
            (["deployment=vllm", "deployment.gpus=[0,0]"], "deployment.gpus: expected different numbers of GPUs, got [0, 0]"),
            (["deployment=vllm", "deployment.gpus=[0,1,2]", "deployment.replicas=2"], "deployment.gpus: every server needs as"),
            (["deployment=vllm", "backend.shard=all", "deployment.python=none"], "deployment.python: "),
            (["backend.gpus=2"], "gpus and ranks both set the number of processes"),
            (
                ["backend.ranks=null", "backend.shard=all", "eval.answers=false"],
                "backend.shard: a single process holds the whole model",
            ),
            (["backend.ranks=null", "backend.gpus=1000"], "backend.gpus: this machine has"),
            (["backend.ranks=null", "backend.gpus=2", "backend.device=foo"], "requires backend.device=auto or cuda, got 'foo'"),
        ],
        fast=2,
    ),
)
def test_a_mistake_starts_no_rank(words, error, monkeypatch, capsys):
    monkeypatch.setattr(RankSupervisor, "_start", lambda _: pytest.fail("ranks were started"))
    assert train(*SFT, RANKS, *words, "out=bad") == 2
    lines = capsys.readouterr().err.splitlines()
    assert error in lines[-1]
    assert [line for line in lines if line.startswith("error:")] == lines[-1:]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # 624,384 parameters in float32: the run's weights, the server's, gradients and two moments.
        ([], "2 replicas; each holds 12.5 MB of weights, twice, gradients and optimizer state"),
        (["backend.shard=all", "eval.answers=false"], "2 shards; each holds 6.2 MB of weights, twice, gradients"),
    ],
)
@pytest.mark.slow
def test_plan_names_what_a_rank_holds(words, line, capsys):
    assert run(["plan", *SFT, "model=tiny", RANKS, *words]) == 0
    assert line in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "lines"),
    rest_slow(
        [
            (["job=local", RANKS], ["precision highest", "2 replicas; each holds 12.5 MB of weights, twice"]),
            (
                ["job=slurm", RANKS, "job.nodes=2"],
                ["machine a CPU of the job", "4 replicas; each holds 12.5 MB of weights, twice"],
            ),
            # This machine has no GPU.
            (["job=slurm", "job.gpus=1"], ["machine a GPU of the job"]),
            (
                ["job=slurm", "backend.gpus=8"],
                [
                    "machine a GPU of the job",
                    "8 replicas; each holds 12.5 MB",
                    "If a replica fills over half of a GPU: 8 shards; each holds 1.6 MB",
                ],
            ),
            # Each node holds a whole copy.
            (
                ["job=slurm", RANKS, "job.nodes=2", "backend.shard=node", "eval.answers=false"],
                ["4 shards, 2 on each node; each holds 6.2 MB of weights, twice"],
            ),
            (["job=slurm", RANKS, "job.nodes=2", "backend.shard=all", "eval.answers=false"], ["4 shards; each holds 3.1 MB"]),
            (["job=ray", "backend.gpus=8", "backend.shard=all", "eval.answers=false"], ["ranks 8 shards; each holds 1.6 MB"]),
        ]
    ),
)
def test_plan_of_a_job_is_that_of_its_trainer(words, lines, capsys):
    assert run(["plan", *SFT, "model=tiny", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in told] == []


def test_a_recipe_with_rollouts_is_not_sharded(capsys):
    assert train("recipe=grpo", RANKS, "backend.shard=node", "eval.answers=false", "out=bad") == 2
    error = "a recipe with rollouts does not sample from sharded weights, got node; set deployment=vllm, or backend.shard=none"
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(75)", "failed 5 times without finishing a request, the last time because rank 0 has ended"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL, as if memory had run out"),
        (
            "from cookbook.backends.group.supervisor import RankChannel; RankChannel().lost('rank 0 of 2: why'); exit(75)",
            "failed 5 times without finishing a request, the last time because rank 0 of 2: why",
        ),
        (
            "from cookbook.backends.group.supervisor import RankChannel; RankChannel().error('model: too large'); exit(2)",
            "model: too large",
        ),
    ],
)
def test_ranks_that_cannot_run_end_in_one_line(code, error, monkeypatch):
    monkeypatch.setattr(supervisor, "MAIN", "import sys; sys.path[:] = {path!r}; " + code)
    monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(BackendError, match=error):
        RankSupervisor(1, {}, listener).run()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("words", rest_nightly([SMALL["sft"], SMALL["dpo"], [*SMALL["sft"], "model.lora_rank=4"]]))
def test_sharded_ranks_train_as_one_process(words):
    assert train(*words, "eval.answers=false", "out=one") == 0
    assert train(*words, "eval.answers=false", RANKS, "backend.shard=all", "out=two") == 0
    assert len(forkedranks.STARTED) == 2
    assert_close("one", "two")
    assert train("recipe=sft", "eval.limit=4", "recipe.steps=1", "model.name=two/checkpoints/step-000003", "out=three") == 0


@pytest.mark.nightly
def test_another_number_of_ranks_resumes():
    longer = [word.replace("steps=3", "steps=6") for word in SFT]
    assert train(*longer, "out=whole", "checkpoint.every=3", "checkpoint.keep=null") == 0
    assert train(*SFT, "out=up", "schedule=constant") == 0
    assert train(*longer, RANKS, "out=up", "schedule=constant") == 0
    assert train(*SFT, RANKS, "out=down", "schedule=constant") == 0
    assert train(*longer, "out=down", "schedule=constant") == 0
    assert_close("up", "down")
    assert len(bits(checkpoint("down"))) == 2


@pytest.mark.nightly
def test_a_diverged_run_ends_in_one_line(capsys):
    assert train(*SFT, RANKS, "optim.lr=1e30", "optim.grad_clip_norm=0", "out=diverged") == 2
    assert "optim_step: the gradient norm is nan" in capsys.readouterr().err.splitlines()[-1]
    assert not kill_ranks.ranks_of(psutil.Process())


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (BackendError("model.name: unreadable"), "model.name: unreadable\n"),
        (OSError("no disk"), "rank 1 failed: OSError: no disk\n"),
        (RanksLostError("closed by peer"), None),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_rank_records_its_own_failure_and_not_that_others_are_lost(error, recorded, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr(serve, "_serve", fails)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(type(error)):
        serve.run(OmegaConf.create({"server": {"failure_file": "failure"}}), [])
    assert (Path("failure").read_text() if Path("failure").exists() else None) == recorded


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize("shard", ["none", "all"])
def test_a_rank_that_runs_out_of_memory_ends_the_run_in_one_line(shard, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert train(*long_run(tmp_path), RANKS, f"backend.shard={shard}", "out=run") == 2
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith("error: out of memory: ") and "backend.micro_batch_tokens" in errors
    assert "starting the 2 ranks again" not in errors and not kill_ranks.ranks_of(psutil.Process())


# `python tools/kill_ranks.py` has the other recipes and more kills.
@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "kills"), [("grpo", 3), ("sharded", 3)])
def test_killed_ranks_change_nothing(recipe, kills, tmp_path):
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    kill_ranks.played(calm, recipe, 12, 0, kill_ranks.VICTIMS)
    campaign = kill_ranks.played(killed, recipe, 12, kills, kill_ranks.VICTIMS)
    assert kill_ranks.differences(calm, killed) == []
    assert len(campaign.killed) == kills


class Idle(Hook):
    """Is idle for longer than the time-out of the ranks' collective operations."""

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        time.sleep(32.0 if step == 1 else 0.0)


@pytest.mark.nightly
def test_ranks_that_were_idle_for_longer_than_their_time_out_take_the_next_step(monkeypatch, capsys):
    shorter = "from cookbook.engine.ranks.processes import join; join.__kwdefaults__['timeout_s'] = 30.0; from cookbook.server"
    monkeypatch.setattr(supervisor, "MAIN", supervisor.MAIN.replace("from cookbook.server", shorter))
    assert train(*SFT, RANKS, f"+hook.idle._target_={__name__}.Idle", "out=idle") == 0
    assert "again" not in capsys.readouterr().err


# A rank without a model.
WAITING = """
import os, sys
sys.path[:] = {path!r}
from cookbook.backends.group.supervisor import RankChannel
channel = RankChannel()
with open("rank-" + os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()))
channel.end_with_supervisor()
"""
SUPERVISOR = f"""
import socket
from cookbook.backends.group import supervisor
supervisor.MAIN = {WAITING!r}
with socket.create_server(("127.0.0.1", 0)) as listener:
    supervisor.RankSupervisor(2, {{}}, listener).run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_supervisor(number):
    with Forked(code=SUPERVISOR, errors="inherited") as process:
        files = [Path(f"rank-{rank}") for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        ranks = [psutil.Process(int(file.read_text())) for file in files]
        process.send_signal(number)
    gone(ranks)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_saves_and_leaves_no_rank(number):
    words = [*SFT, RANKS, "out=stopped", "recipe.steps=1000", "recipe.epochs=1000"]
    with start(words) as command:
        metrics = Path("stopped/metrics.jsonl")
        until(lambda: (metrics.exists() and metrics.read_bytes().count(b"\n") > 3) or command.poll() is not None, limit_s=300)
        ranks = kill_ranks.ranks_of(psutil.Process(command.pid))
        assert len(ranks) == 2
        sockets = [one for rank in ranks for one in rank.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert sockets and {one.laddr.ip for one in sockets} == {"127.0.0.1"}
        command.send_signal(number)
        output, _ = command.communicate()
    assert command.returncode == 130
    assert "saved; resume with" in output
    gone(ranks)
