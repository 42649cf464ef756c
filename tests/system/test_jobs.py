"""Trainers as jobs: created once, found again, restarted, ended. Slurm's and Ray's tests start the real programs, or skip."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import kill_ranks
import psutil
import pytest
import servertools
from jobtools import LONG_S, answers, until
from marks import rest_slow
from omegaconf import OmegaConf
from places import ROOT
from ranktools import long_run
from runtools import LITTLE, here, rows, same_numbers, timeless  # noqa: F401 - here is a fixture
from waiting import WAIT_S

import cookbook
from cookbook.backends.remote import pointers
from cookbook.cli.app import run
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.config.nodes import build
from cookbook.errors import BackendError, ConfigError
from cookbook.jobs import endpoint, local
from cookbook.jobs.endpoint import JobEndpoint, Relay
from cookbook.jobs.launcher import JobPhase, LauncherUnavailableError
from cookbook.jobs.local import LocalJob
from cookbook.jobs.manager import TrainerJobConfig, TrainerJobManager, is_healthy
from cookbook.jobs.ray import RayJob
from cookbook.jobs.slurm import SlurmJob
from cookbook.jobs.store import JobAttempt, JobState, TrainerJob

# A run of a few seconds, with a checkpoint in the middle.
RUN = [
    *("recipe=grpo", "recipe.steps=12", "recipe.prompts_per_step=4", "recipe.group_size=4", "data.limit=24", "eval.limit=4"),
    *("eval.every=6", "checkpoint.every=5"),
]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerJobManager]:
    """A manager of a new table, in an empty folder. No process of its jobs is left at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manager = TrainerJobManager(say=print)
    yield manager
    for job in manager.list():
        manager.delete(job.job_id)
    assert not processes(tmp_path)


def processes(folder: Path) -> list[int]:
    """Return the processes whose command line names a file below ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def trainer_of(job: TrainerJob, number: int) -> psutil.Process:
    """The process of `cookbook serve` in an attempt."""
    script = psutil.Process(int((job.folder / f"attempt-{number}" / "pid").read_text()))
    return script.children()[0]


def program(folder: Path, *lines: str) -> str:
    """Write a program that stands where the Python of a trainer does, and return its path."""
    path = folder / "program"
    path.write_text("\n".join(("#!/bin/bash", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command refuses with."""
    assert run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_the_model_of_a_job_is_resolved_as_by_a_service_client_and_its_address_is_a_url(tmp_path):
    trainer = TrainerJobConfig(base_model="tiny", launcher=LocalJob()).trainer()
    assert trainer["model"]["name"] == cookbook.ServiceClient(checkpoint_dir=tmp_path)._clients.model("tiny", {}).name
    assert (Path(trainer["model"]["name"]) / "config.json").is_file()
    assert TrainerJobConfig(base_model="Qwen/Qwen3-8B", launcher=LocalJob()).trainer()["model"]["name"] == "Qwen/Qwen3-8B"
    attempt = JobAttempt(1, handle="h", started=1.0, running=2.0, ready=3.0, ended=None, address="node:8000", outcome="")
    job = TrainerJob("mine", "t", JobState.RUNNING, "", tmp_path, "", {}, {}, 0.0, 0, (attempt,))
    assert job.address == "http://node:8000"
    ended = replace(job, attempts=(replace(attempt, ended=4.0),))
    assert ended.address is None


# ---- the life of a job -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_is_created_once_found_again_restarted_under_its_client_and_deleted(manager, tiny_folder, tmp_path):
    config = TrainerJobConfig(base_model=str(tiny_folder), launcher=LocalJob(), requested_job_id="mine")
    others = [TrainerJobManager() for _ in range(4)]
    threads = [threading.Thread(target=other.create, args=[config]) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(job.attempts) for job in manager.list()] == [1]

    job = manager.wait_until_ready("mine")
    assert job.state is JobState.RUNNING and job.address is not None
    key = manager.key_file(job).read_text().strip()
    assert stat.S_IMODE(manager.key_file(job).stat().st_mode) == 0o600
    assert is_healthy(job.address, key) and not is_healthy(job.address, "tml-other")
    assert not any(key in " ".join(psutil.Process(pid).cmdline()) for pid in processes(tmp_path))
    with pytest.raises(ConfigError, match="runs with another trainer; choose another id"):
        manager.create(TrainerJobConfig(base_model=str(tiny_folder), launcher=LocalJob(), requested_job_id="mine", seed=1))

    # A manager of another process: the first has been killed.
    again = TrainerJobManager(say=print)
    with JobEndpoint(again, "mine") as address:
        training = cookbook.ServiceClient(backend=address).create_lora_training_client(str(tiny_folder), rank=2)
        datum = cookbook.datum_from_tokens_weights([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0])

        def step() -> float:
            loss = training.forward_backward([datum], "cross_entropy")
            training.optim_step(cookbook.AdamParams(learning_rate=1e-2)).result()
            return float(loss.result().metrics["loss"])

        losses = [step(), step()]
        trainer_of(job, 1).kill()
        losses += [step(), step()]
        assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
        second = again.get("mine")
        assert [one.outcome for one in second.attempts] == ["ended, exit code 137", None]
        assert second.address != job.address

        assert again.pause("mine").state is JobState.PAUSED
        assert not processes(tmp_path)
        until(address.lost)
        with pytest.raises(BackendError, match="trainer job mine is PAUSED: stopped by cookbook jobs stop"):
            address.wait()
        with pytest.raises(BackendError, match="trainer job mine is PAUSED"):
            training.forward_backward([datum], "cross_entropy").result()
    assert again.delete("mine").state is JobState.DELETED
    assert not manager.key_file(job).exists()
    with pytest.raises(ConfigError, match="mine was deleted"):
        manager.create(config)


def test_an_attempt_whose_manager_was_killed_while_it_started_is_adopted(manager, tmp_path):
    launcher = LocalJob(python=program(tmp_path, "sleep 1000"))
    job = manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    handle = job.attempts[0].handle
    manager._table.set_attempt("mine", 1, handle=None)
    assert [one.handle for one in manager.advance("mine").attempts] == [handle]


def test_a_trainer_without_its_script_still_runs_and_one_that_ignores_sigterm_is_killed(manager, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "END_S", 0.5)
    launcher = LocalJob(python=program(tmp_path, f"trap '' TERM; touch {tmp_path}/here", "while :; do sleep 0.1; done"))
    job = manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    handle = job.attempts[0].handle
    until((tmp_path / "here").exists)
    os.kill(int(handle.partition(":")[0]), signal.SIGKILL)
    assert launcher.status(handle).phase is JobPhase.running
    launcher.stop(handle)
    assert launcher.status(handle).phase is JobPhase.ended and not processes(tmp_path)


def test_the_number_of_an_ended_process_means_no_other_process():
    launcher = LocalJob()
    assert launcher.status(f"{os.getpid()}:1.0").phase is JobPhase.ended
    launcher.stop(f"{os.getpid()}:1.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "attempts", "reason"),
    [
        (["exit 2"], 1, r"attempt 1 has ended \(ended, exit code 2\): its log is empty"),
        (["echo 'error: server.port: wrong' >&2; echo done", "exit 2"], 1, "exit code 2\\): error: server.port: wrong"),
        (["echo no memory", "exit 1"], 2, r"attempt 2 has ended \(ended, exit code 1\): no memory"),
    ],
)
def test_a_trainer_that_fails_is_tried_again_unless_that_cannot_help(lines, attempts, reason, manager, tmp_path):
    launcher = LocalJob(python=program(tmp_path, *lines), max_failures=1)
    manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    with pytest.raises(BackendError, match=reason):
        manager.wait_until_ready("mine", poll_interval_s=0.05)
    job = manager.get("mine")
    assert job.state is JobState.FAILED and len(job.attempts) == attempts
    # It was not ready in time, or the cause has been corrected: the next call tries again.
    assert manager.resume("mine").state.is_active


def test_a_trainer_that_does_not_get_ready_in_time_is_replaced(manager, tmp_path):
    launcher = LocalJob(python=program(tmp_path, "sleep 1000"), startup_s=0.1, max_failures=0)
    manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    with pytest.raises(BackendError, match=r"not ready after 0.1 s \(job.startup_s\)"):
        manager.wait_until_ready("mine", poll_interval_s=0.05)


def test_setup_lines_and_variables_reach_the_trainer(manager, tmp_path):
    python = program(tmp_path, f'echo "$A|$B|$PWD" > {tmp_path}/seen', "exit 2")
    launcher = LocalJob(python=python, setup=["B='set up'", "export B"], environment={"A": "it's $HOME"})
    manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    until((tmp_path / "seen").exists)
    until(lambda: (tmp_path / "seen").read_text() == f"it's $HOME|set up|{tmp_path}\n")


# ---- the parts -------------------------------------------------------------------------------------------------------


class Echo:
    """A server that answers every chunk with its own name."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(self._name + data)


def test_the_relay_follows_its_target_and_closes_old_connections():
    one, two, relay = Echo(b"one "), Echo(b"two "), Relay()

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", relay.port), timeout=WAIT_S)

    try:
        with connect() as early:
            assert early.recv(10) == b""
        relay.lead_to(one.address)
        with connect() as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"one hello"
            relay.lead_to(two.address)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
        with connect() as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"two hello"
        with pytest.raises(ConfigError, match=f"cannot listen on port {relay.port}"):
            Relay(relay.port)
    finally:
        relay.close()
    with pytest.raises(ConnectionRefusedError):
        connect()


def test_the_presets_restate_the_defaults(tmp_path, monkeypatch):
    for name, cls in (("local", LocalJob), ("slurm", SlurmJob), ("ray", RayJob)):
        cfg = OmegaConf.create(show(ComposeRequest([f"job={name}"]), "job", resolve=True))
        assert build(cfg.job, "job") == cls()
        assert set(cfg.job) - {"_target_"} == {field.name for field in fields(cls)}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert TrainerJobManager().folder == tmp_path / "cookbook" / "jobs"


def test_a_pointer_names_the_folder_that_the_server_writes(tmp_path):
    from cookbook.server.state.catalog import Address, Catalog

    address = Address("s12:train:0", "weights", "step-000003")
    server = {"url": f"file://{tmp_path}", "path": address.path}
    assert pointers.on_disk(server) is None
    Catalog(tmp_path).folder_of(address).mkdir(parents=True)
    assert pointers.on_disk(server) == Catalog(tmp_path).folder_of(address)
    assert pointers.on_disk({**server, "url": "http://127.0.0.1:8000"}) is None


def test_a_damaged_table_is_one_line(tmp_path):
    (tmp_path / "jobs.sqlite").write_text("no table")
    with pytest.raises(BackendError, match=r"jobs\.sqlite cannot be used"):
        TrainerJobManager(tmp_path)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "problem"),
    rest_slow(
        [
            (["job=local", "backend=remote", "backend.base_url=http://127.0.0.1:1"], "job: the trainer of a job computes with"),
            (["job=slurm"], "job=slurm: sbatch is not on PATH; run this command on a login node"),
            (["job=ray", "job.cluster=http://127.0.0.1:1"], "job.cluster: no answer from Ray at http://127.0.0.1:1"),
            (["job=local", "job.max_failures=-1"], "job.max_failures: expected 0 or more, got -1"),
            (["job=local", "job.startup_s=0"], "job.startup_s: expected a number above 0"),
            (["job=local", "job.idle_h=0"], "job.idle_h: expected a number above 0, got 0.0; null sets no limit"),
            (["job=local", "job.port=70000"], "job.port: expected 0 to 65535"),
            (["job=slurm", "job.partion=gpu"], "Did you mean 'job.partition'?"),
            (["job=local", "+job.environment.A-B=1"], "job.environment: expected the name of a variable, got 'A-B'"),
            (["job=local", "+job.server.tls_cert=c.pem"], "job.server.tls_cert: the job sets this key of its server itself"),
            (["job=local", "+job.server.port=80"], "job.server.port: the job sets this key of its server itself; set job.port"),
            (["job=pbs"], "pbs"),
            (["job=local", "deployment=vllm"], "deployment"),
        ],
        fast=3,
    ),
)
def test_a_mistake_is_one_line_before_anything_starts(words, problem, manager, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert problem in refusal(capsys, "train", "recipe=grpo", "debug=fast", "out=run", *words)


@pytest.mark.parametrize("command", [("train", "recipe=grpo", "debug=fast"), ("jobs", "create", "mine")])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model.name=./nowhere"], "model.name: no such folder './nowhere'"),
        (["backend.ranks=2", "backend.shard=all", "backend.optimizer=adamw8bit"], "adamw8bit cannot update weights"),
    ],
)
def test_a_mistake_of_the_trainer_creates_no_job(command, words, problem, manager, capsys):
    assert problem in refusal(capsys, *command, "job=local", *words)
    assert not manager.list()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}"])
def test_a_web_server_that_is_not_ray_is_one_line(body):
    with (
        servertools.web_server(200, body) as url,
        pytest.raises(LauncherUnavailableError, match=r"^job\.cluster: .* is not Ray"),
    ):
        RayJob(cluster=url).status("mine")


@pytest.mark.nightly
def test_a_port_that_is_taken_is_one_line(manager, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(capsys, "train", "recipe=grpo", "debug=fast", "out=run", "job=local", f"job.port={port}")
    assert f"cannot listen on 127.0.0.1:{port}" in line and "is FAILED" in line


@pytest.mark.slow
def test_jobs_are_listed_read_and_ended_by_name(manager, tmp_path, capsys):
    words = [f"job.python={program(tmp_path, 'echo here; sleep 1000')}", "model.name=any", "+job.server.checkpoint_s=30"]
    assert run(["jobs", "create", "mine", *words]) == 0
    assert run(["jobs", "create", "mine", *words]) == 0
    assert capsys.readouterr().out.count("submitted") == 1
    until((manager.get("mine").folder / "attempt-1" / "pid").exists)
    config = OmegaConf.load(manager.get("mine").folder / "attempt-1" / "serve.yaml")
    assert config.server.checkpoint_s == 30 and config.model.name == "any"
    until(lambda: manager.logs("mine"))
    assert run(["jobs", "logs", "mine"]) == 0 and capsys.readouterr().out.startswith("here")
    assert run(["jobs", "list"]) == 0
    assert "mine  RUNNING  local     1        running" in capsys.readouterr().out
    assert run(["jobs", "stop", "mine"]) == 0 and run(["jobs", "list"]) == 0
    assert "stopped by cookbook jobs stop" in capsys.readouterr().out
    assert "no job is called 'mien'; choose one of these: mine" in refusal(capsys, "jobs", "stop", "mien")
    assert "has attempts 1 to 1, got 7" in refusal(capsys, "jobs", "logs", "mine", "--attempt", "7")
    assert "job=none starts no job" in refusal(capsys, "jobs", "create", "other", "job=none")
    assert "an id has at most 64" in refusal(capsys, "jobs", "create", "a/b")
    assert run(["jobs", "delete", "mine"]) == 0 and "mine was deleted" in refusal(capsys, "jobs", "attach", "mine")
    assert run(["jobs", "list"]) == 0 and "mine" not in capsys.readouterr().out.partition("choose")[0].splitlines()[-1]


# ---- runs that are interrupted ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run([sys.executable, "-m", "cookbook", "train", *RUN, "out=run"], cwd=folder, env=driver_env(), check=True)
    return folder / "run"


def driver_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Driver:
    """`cookbook train ... job=...` as a process, with its output in a file."""

    def __init__(self, *words: str, recipe: Sequence[str] = RUN) -> None:
        self._words = [*recipe, "out=run", *words]
        self.run = Path("run")
        self.start()

    def start(self) -> None:
        with Path("driver.txt").open("ab") as output:
            command = [sys.executable, "-m", "cookbook", "train", *self._words]
            self.process = subprocess.Popen(command, env=driver_env(), stdout=output, stderr=output)

    def output(self) -> str:
        return Path("driver.txt").read_text()

    def reach(self, step: int) -> None:
        """Wait until the run has finished `step` steps."""

        def reached() -> bool:
            assert self.process.poll() is None, self.output()
            return (self.run / "metrics.jsonl").exists() and rows(self.run)[-1]["step"] >= step

        until(reached, self.output)

    def job(self) -> TrainerJob:
        return TrainerJobManager().list()[-1]

    def wait(self) -> None:
        assert self.process.wait(LONG_S) == 0, self.output()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.nightly
def test_a_run_outlives_its_trainer_and_its_driver(manager, undisturbed, tmp_path, capsys):
    driver = Driver("job=local")
    driver.reach(3)
    trainer_of(driver.job(), 1).kill()
    driver.reach(6)
    driver.kill()
    assert driver.job().state is JobState.RUNNING
    driver.start()
    driver.wait()
    assert same_numbers(driver.run, undisturbed)
    job = driver.job()
    assert job.state is JobState.COMPLETED and len(job.attempts) == 2 and not processes(tmp_path)
    assert "attempt 1 has ended (ended, exit code 137); attempt 2 starts in 2 s and restores its state" in driver.output()
    # Its weights are on this disk.
    assert "next: cookbook sample run " in driver.output()
    assert run(["sample", "run", "26+10="]) == 0 and capsys.readouterr().out.strip()
    assert run(["eval", "run", "eval.limit=2"]) == 0 and "accuracy" in capsys.readouterr().out
    assert run(["weights", "export", str(sorted(Path("run/checkpoints").iterdir())[-1]), "exported"]) == 0
    assert Path("exported/model.safetensors").exists()


@pytest.mark.nightly
def test_a_job_whose_driver_was_killed_saves_its_state_and_ends(manager, undisturbed, tmp_path, capsys):
    driver = Driver("job=local", "job.idle_h=0.006")
    driver.reach(3)
    driver.kill()
    until(lambda: manager.list()[0].state is JobState.PAUSED)
    assert run(["jobs", "list"]) == 0
    assert "no client used it for 0.006 h (job.idle_h); the same command resumes it" in capsys.readouterr().out
    log = manager.logs(driver.job().job_id)
    assert "no client has sent a request for 0.006 h (server.idle_h); saving runs and ending\n" in log
    assert '"event": "saved"' in (driver.job().folder / "state" / "requests.jsonl").read_text()
    assert driver.job().attempts[0].outcome == "ended, exit code 0" and not processes(tmp_path)
    driver.start()
    driver.wait()
    assert same_numbers(driver.run, undisturbed)
    assert driver.job().state is JobState.COMPLETED and len(driver.job().attempts) == 2


@pytest.mark.nightly
def test_an_endpoint_keeps_a_job_that_no_client_uses(manager, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "CONTACT_S", 1.0)
    launcher = LocalJob(idle_h=40 / 3600)
    manager.create(TrainerJobConfig(base_model=str(tiny_folder), launcher=launcher, requested_job_id="mine"))
    with JobEndpoint(manager, "mine") as address:
        # Longer than a job stays without a client.
        time.sleep(60)
        assert address.lost() is None and manager.list()[0].state is JobState.RUNNING
    until(lambda: manager.list()[0].state is JobState.PAUSED)
    assert not processes(tmp_path)


@pytest.mark.nightly
def test_a_job_trains_on_several_ranks_and_starts_lost_ones_again(manager, tmp_path):
    assert run(["train", *RUN, "backend.ranks=2", "out=private"]) == 0
    driver = Driver("job=local", "backend.ranks=2")
    driver.reach(3)
    for number in (1, 0):
        ranks = kill_ranks.ranks_of(trainer_of(driver.job(), 1))
        assert len(ranks) == 2
        ranks[number].kill()
        driver.reach(6 if number else 8)
    driver.wait()
    assert timeless(driver.run) == timeless("private")
    assert len(driver.job().attempts) == 1
    kill_ranks.gone(ranks)


@pytest.mark.nightly
def test_a_run_that_is_stopped_pauses_its_job_and_resumes_it(manager, undisturbed, tmp_path):
    driver = Driver("job=local")
    driver.reach(2)
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(LONG_S) == 130, driver.output()
    job = driver.job()
    assert job.state is JobState.PAUSED and not processes(tmp_path)
    driver.start()
    driver.reach(4)
    assert run(["jobs", "stop", job.job_id]) == 0
    assert driver.process.wait(LONG_S) == 2
    assert driver.output().splitlines()[-1].startswith(f"error: job: trainer job {job.job_id} is PAUSED: stopped by cookbook")
    driver.start()
    driver.wait()
    assert same_numbers(driver.run, undisturbed)


# ---- a driver on a laptop --------------------------------------------------------------------------------------------

SSHD_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/laptop.pub
PidFile none
StrictModes no
UsePAM no
SetEnv PATH={path} PYTHONPATH={root} OMP_NUM_THREADS=1 XDG_STATE_HOME={state}
"""


@contextlib.contextmanager
def ended(command: list, **options) -> Iterator[subprocess.Popen]:
    """The command runs beside the body, and ends with it: an error in the body is seen, not waited on."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture
def login(manager, tmp_path) -> Iterator[list[str]]:
    """The command that connects to an SSH server of this machine, and whose commands have the manager's table."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or os.geteuid() != 0:
        pytest.skip("needs sshd, of Debian's package openssh-server, and root")
    Path("/run/sshd").mkdir(exist_ok=True)
    folder, port = tmp_path / "ssh", servertools.free_port()
    folder.mkdir()
    for name in ("host", "laptop"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    values = {"port": port, "folder": folder, "path": path, "root": ROOT, "state": os.environ["XDG_STATE_HOME"]}
    (folder / "config").write_text(SSHD_CONFIG.format(**values))
    options = ["StrictHostKeyChecking=no", f"UserKnownHostsFile={folder}/known", "BatchMode=yes", "LogLevel=ERROR"]
    client = ["ssh", "-i", str(folder / "laptop"), "-p", str(port), *(word for one in options for word in ("-o", one))]
    with ended([sshd, "-D", "-e", "-f", folder / "config"], stderr=(folder / "log").open("wb")):
        until(lambda: subprocess.run([*client, "127.0.0.1", "true"], check=False).returncode == 0, (folder / "log").read_text)
        yield client


@pytest.mark.nightly
def test_a_laptop_trains_a_job_through_ssh(login, undisturbed, tmp_path):
    """The commands of docs/operate/jobs.md, with a job of this machine in place of one of Slurm."""
    near, far = servertools.free_port(), servertools.free_port()
    at_login = f"cd {tmp_path} && cookbook jobs"
    subprocess.run([*login, "127.0.0.1", f"{at_login} create mine model=tiny job=local"], check=True)
    forward = [*login, "-L", f"{near}:127.0.0.1:{far}", "127.0.0.1", f"{at_login} attach mine --port {far}"]
    with ended(forward, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as tunnel:
        # Before attach listens, ssh takes a connection and closes it.
        assert any(line.startswith("next: cookbook train") for line in tunnel.stdout)
        key = subprocess.run([*login, "127.0.0.1", f"cat {tmp_path}/runs/jobs/mine/key"], check=True, capture_output=True)
        Path("key").write_bytes(key.stdout)
        Path("key").chmod(0o600)
        driver = Driver("backend=remote", f"backend.base_url=http://127.0.0.1:{near}", "backend.api_key_file=key")
        driver.wait()
    assert same_numbers(driver.run, undisturbed)


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def shell(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.nightly
def test_a_run_on_slurm_does_not_notice_preemptions(slurm, manager, undisturbed):
    driver = Driver("job=slurm", "job.partition=main")
    driver.reach(2)
    # As Slurm does before a time limit, and when it preempts a job that has a grace time.
    shell("scancel", "--batch", "--signal=TERM", str(driver.job().attempts[0].handle))
    driver.reach(5)
    shell("scontrol", "requeue", str(driver.job().attempts[1].handle))
    driver.reach(8)
    trainer_of(driver.job(), 3).kill()
    driver.wait()
    assert same_numbers(driver.run, undisturbed)
    job = driver.job()
    completed, requeued, killed = (one.outcome for one in job.attempts[:3])
    assert (completed, killed) == ("COMPLETED, exit code 0", "FAILED, exit code 137")
    # Slurm adds the exit code of the requeued attempt if its trainer has ended by then.
    assert requeued in ("REQUEUED", "REQUEUED, exit code 143")
    assert job.state is JobState.COMPLETED and len(job.attempts) == 4
    assert not shell("squeue", "-h")


@pytest.mark.nightly
def test_one_job_trains_on_two_nodes_and_survives_a_lost_rank(slurm, manager, tmp_path):
    assert run(["train", *RUN, "backend.ranks=2", "out=private"]) == 0
    driver = Driver("job=slurm", "job.nodes=2")
    driver.reach(3)
    assert "NumNodes=2" in shell("scontrol", "show", "job", "-o", str(driver.job().attempts[0].handle))
    ranks = {one.environ()["RANK"]: one for one in map(psutil.Process, processes(tmp_path)) if one.environ().get("RANK")}
    assert {name: one.environ()["SLURMD_NODENAME"] for name, one in ranks.items()} == {"0": "node1", "1": "node2"}
    ranks["1"].kill()
    driver.reach(6)
    shell("scancel", "--batch", "--signal=TERM", str(driver.job().attempts[1].handle))
    driver.wait()
    assert timeless(driver.run) == timeless("private")
    assert [one.outcome for one in driver.job().attempts[:2]] == ["FAILED, exit code 137", "COMPLETED, exit code 0"]
    assert driver.job().state is JobState.COMPLETED and not processes(tmp_path)


@pytest.mark.nightly
def test_two_nodes_of_two_ranks_shard_the_weights_within_a_node(slurm, manager, tmp_path):
    """Two nodes compute, bit for bit, what four ranks of one machine compute if LOCAL_WORLD_SIZE makes a node of every two."""
    import ranktools

    sft = ["recipe=sft", "recipe.steps=4", "recipe.batch_size=6", *LITTLE, "eval.answers=false"]
    driver = Driver("job=slurm", "job.nodes=2", "backend.ranks=2", "backend.shard=node", recipe=sft)
    driver.reach(2)
    ranks = {one.environ()["RANK"]: one for one in map(psutil.Process, processes(tmp_path)) if one.environ().get("RANK")}
    nodes = {name: one.environ()["SLURMD_NODENAME"] for name, one in ranks.items()}
    assert nodes == {"0": "node1", "1": "node1", "2": "node2", "3": "node2"}
    assert {one.environ()["LOCAL_WORLD_SIZE"] for one in ranks.values()} == {"2"}
    driver.wait()
    folder = driver.job().folder
    serve = ["-m", "cookbook", "serve", "--config-dir", folder / "attempt-1"]
    own = ["server.host=127.0.0.1", f"server.address_file={tmp_path}/url", f"out={tmp_path}/server"]
    four = ranktools.start(4, [*serve, *own], LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    until(Path("url").exists, lambda: [one.poll() for one in four])
    server = ["backend=remote", f"backend.base_url={Path('url').read_text().strip()}", f"backend.api_key_file={folder}/key"]
    assert run(["train", *sft, *server, "out=alone"]) == 0
    four[0].terminate()
    assert all(code == 0 for code, _ in ranktools.finish(four))
    assert timeless(driver.run) == timeless("alone")
    # As one process, up to the order of additions.
    assert run(["train", *sft, "out=one"]) == 0
    losses = [[row["loss"] for row in rows(out) if "loss" in row] for out in (driver.run, "one")]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["job=local backend.ranks=2", "job=slurm backend.ranks=2", "job=slurm job.nodes=2"])
def test_a_sharded_rank_that_runs_out_of_memory_ends_the_job_in_one_line(words, slurm, manager, tmp_path):
    recipe = long_run(tmp_path)
    driver = Driver(*words.split(), "backend.shard=all", f"+job.environment.PYTHONPATH={tmp_path}:{ROOT}", recipe=recipe)
    assert driver.process.wait(LONG_S) == 2, driver.output()
    job = driver.job()
    assert job.state is JobState.FAILED and len(job.attempts) == 1, driver.output()
    line = driver.output().splitlines()[-1]
    assert line == f"error: job: trainer job {job.job_id} is FAILED: {job.reason}"
    assert "error: out of memory: " in line and "backend.micro_batch_tokens" in line
    # The processes of another node may end later.
    until(lambda: not processes(tmp_path))


# The node of the second rank cannot load the model.
UNREADABLE = """
import os
if os.environ.get("RANK") == "1":
    from unittest.mock import Mock

    import cookbook.engine.ranks.loading
    from cookbook.errors import BackendError

    cookbook.engine.ranks.loading._architecture = Mock(side_effect={error})
"""


@pytest.mark.nightly
@pytest.mark.parametrize("error", ["BackendError('model.name: unreadable here')", "OSError(5, 'Input/output error', 'model')"])
def test_a_node_that_cannot_load_the_model_ends_the_job(error, slurm, manager, tiny_folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(UNREADABLE.format(error=error))
    launcher = SlurmJob(nodes=2, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    config = TrainerJobConfig(base_model=str(tiny_folder), launcher=launcher, requested_job_id="mine", backend={"shard": "all"})
    manager.create(config)
    with pytest.raises(BackendError) as failure:
        manager.wait_until_ready("mine")
    job = manager.get("mine")
    assert job.state is JobState.FAILED and len(job.attempts) == 1
    assert str(failure.value).startswith("trainer job mine is FAILED: attempt 1 has ended (FAILED, exit code ")
    assert eval(error).args[-1] in str(failure.value)
    # The failure belongs to the attempt.
    (tmp_path / "sitecustomize.py").unlink()
    assert manager.reconnect("mine").attempt.number == 2


@pytest.mark.nightly
def test_slurm_refuses_a_job_in_one_line(slurm, manager, capsys):
    line = refusal(capsys, "train", "recipe=grpo", "debug=fast", "out=run", "job=slurm", "job.partition=mian")
    assert "job.partition: Slurm has no partition 'mian' for this job. Did you mean 'main'? (choices: main;" in line
    assert "sbatch refused the job" in refusal(capsys, "jobs", "create", "big", "job=slurm", "backend.gpus=4")
    assert "sbatch refused the job" in refusal(capsys, "jobs", "create", "long", "job=slurm", "job.time=soon")
    assert not manager.list()


@pytest.mark.nightly
def test_slurm_gets_the_options_of_a_job(slurm, manager, tmp_path):
    launcher = SlurmJob(
        python=program(tmp_path, "env; sleep 1000"), partition="main", gpus=1, cpus=2, time="30", args=["--comment=mine"]
    )
    job = manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    handle = str(job.attempts[0].handle)
    until(lambda: launcher.status(handle).phase is JobPhase.running)
    shown = shell("scontrol", "show", "job", "-o", handle)
    for fact in ("Partition=main", "NumCPUs=2", "TimeLimit=00:30:00", "Comment=mine", "gres:gpu:1", "NumNodes=1"):
        assert fact in shown
    until(lambda: f"SLURM_JOB_ID={handle}" in manager.logs("mine"))
    # A user who cancels the job with Slurm's own command does not want another attempt.
    shell("scancel", handle)
    until(lambda: not manager.advance("mine").state.is_active)
    job = manager.get("mine")
    assert job.state is JobState.PAUSED and "cancelled with the commands of the launcher" in job.reason
    assert not processes(tmp_path)


@pytest.mark.nightly
def test_slurm_gets_the_container_of_a_job(slurm, manager, tmp_path):
    launcher = SlurmJob(python=program(tmp_path, "sleep 1000"), container=str(tmp_path), args=["--hold"])
    job = manager.create(TrainerJobConfig(base_model="any", launcher=launcher, requested_job_id="mine"))
    assert f"Container={tmp_path}" in shell("scontrol", "show", "job", "-o", str(job.attempts[0].handle))


@pytest.mark.nightly
def test_an_attempt_ends_before_its_time_limit_and_a_new_one_follows(slurm, manager, tiny_folder):
    launcher = SlurmJob(time="2", signal_s=60, max_failures=100)
    manager.create(TrainerJobConfig(base_model=str(tiny_folder), launcher=launcher, requested_job_id="mine"))
    until(lambda: len(manager.advance("mine").attempts) > 1, lambda: manager.get("mine"))
    first = manager.get("mine").attempts[0]
    assert first.outcome is not None and first.outcome.startswith(("COMPLETED, exit code 0", "FAILED, exit code 143"))
    assert manager.wait_until_ready("mine").attempts[-1].number > 1


# ---- Ray -------------------------------------------------------------------------------------------------------------

RAY = os.environ.get("COOKBOOK_RAY") or shutil.which("ray")


@pytest.fixture
def ray(manager, tmp_path) -> Iterator[str]:
    """Ray on this machine; yields the address of its dashboard."""
    if RAY is None:
        pytest.skip("ray is not installed: pip install 'ray[default]', into any environment, and set COOKBOOK_RAY to its `ray`")
    port, gcs = servertools.free_port(), servertools.free_port()
    # The path of Ray's sockets must be short.
    folder = Path("/tmp") / f"ray-{os.getpid()}"
    ports = [f"--port={gcs}", f"--dashboard-port={port}", "--min-worker-port=30000", "--max-worker-port=30100"]
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats", f"--temp-dir={folder}", *ports]
    with (tmp_path / "ray.txt").open("wb") as output:
        head = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(f"{url}/api/jobs/"), (tmp_path / "ray.txt").read_text)
        yield url
        for job in manager.list():
            manager.delete(job.job_id)
    finally:
        children = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(LONG_S)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
def test_a_run_on_ray_does_not_notice_a_killed_trainer(ray, manager, undisturbed):
    driver = Driver("job=ray", f"job.cluster={ray}", f"+job.environment.PYTHONPATH={ROOT}", "job.cpus=0.5")
    driver.reach(3)
    trainer_of(driver.job(), 1).kill()
    driver.wait()
    assert same_numbers(driver.run, undisturbed)
    job = driver.job()
    assert [one.outcome for one in job.attempts] == ["FAILED, exit code 137", "completed"]
    assert "serving" in manager.logs(job.job_id)
    # A user who stops the job with Ray's own command does not want another attempt.
    manager.resume(job.job_id)
    RayJob(cluster=ray).stop(str(manager.get(job.job_id).attempts[-1].handle))
    until(lambda: not manager.advance(job.job_id).state.is_active)
    assert manager.get(job.job_id).state is JobState.PAUSED
