"""Launcher ``slurm``: the trainer is a batch job. The commands of Slurm run on this machine, a login node of the cluster."""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, field

from cookbook.engine.model import ModelConfig
from cookbook.errors import BackendError, ConfigError
from cookbook.jobs.launcher import (
    END_S,
    AttemptFiles,
    AttemptStatus,
    JobLauncher,
    JobPhase,
    LauncherUnavailableError,
    NodesScript,
)
from cookbook.protocols import Backend
from cookbook.utils.suggest import did_you_mean

RUNNING_STATES = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING")
PREEMPTED_STATES = ("PREEMPTED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "REQUEUED")
PHASES = {
    **dict.fromkeys(("PENDING", "CONFIGURING"), JobPhase.queued),
    **dict.fromkeys(RUNNING_STATES, JobPhase.running),
    **dict.fromkeys(PREEMPTED_STATES, JobPhase.preempted),
    "CANCELLED": JobPhase.cancelled,
}
UNREACHABLE_ERRORS = (
    "Unable to contact",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "not responding",
)
COMMAND_S, POLL_S = 60.0, 0.5


@dataclass(kw_only=True)
class SlurmJob(JobLauncher):
    """Batch jobs of Slurm. A handle is the number of a job. ``conf/job/slurm.yaml`` explains the fields."""

    partition: str | None = None
    gpus: int | None = None
    cpus: int = 1
    nodes: int = 1
    time: str | None = None
    signal_s: int = 120
    container: str | None = None
    args: list[str] = field(default_factory=list)
    pending_s: float = 172800.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("gpus", 0), ("cpus", 1), ("nodes", 1), ("signal_s", 1)):
            if (count := getattr(self, name)) is not None and count < least:
                raise ConfigError(f"job.{name}: expected {least} or more, got {count}")

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: the commands of Slurm are not installed here."""
        if shutil.which("sbatch") is None:
            raise _not_installed("sbatch")

    def start(self, files: AttemptFiles) -> str:
        queued = _slurm("squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-n", files.name, "-o", "%i")
        if queued.stdout.split():
            return queued.stdout.split()[0]
        done = _slurm("sbatch", "--parsable", *self._options(files), str(files.script))
        if done.returncode:
            raise self._refused(done.stderr)
        # With several clusters, the name of the cluster follows.
        return done.stdout.strip().partition(";")[0]

    def _options(self, files: AttemptFiles) -> list[str]:
        """Arguments of sbatch. The trainer gets SIGTERM before its time limit, so that a new attempt can follow in time."""
        named = {"partition": self.partition, "time": self.time, "container": self.container}
        return [
            *(["--nodes=1", "--ntasks=1"] if self.nodes == 1 else []),
            *(f"--cpus-per-task={self.cpus}", f"--job-name={files.name}", f"--output={files.log}"),
            *(f"--signal=B:TERM@{self.signal_s}", "--open-mode=append"),
            *(f"--{name}={value}" for name, value in named.items() if value is not None),
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *self.args,
        ]

    def on_nodes(self, command: str, ranks_per_node: int) -> NodesScript:
        # Rank 0 runs on the node of the script. Its address is the one that the driver connects to; see `address`.
        port = shlex.join(
            [self.interpreter, "-c", "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1])"]
        )
        rank = shlex.join(["bash", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"', "rank"])
        # A lost rank ends the others, so that a new attempt can restore the state.
        srun = f"srun --ntasks-per-node={ranks_per_node} --cpus-per-task={self.cpus} --kill-on-bad-exit=1"
        return NodesScript(
            directives=[f"#SBATCH --nodes={self.nodes}", f"#SBATCH --ntasks-per-node={ranks_per_node}"],
            setup=[
                'export MASTER_ADDR=$(scontrol show node -o "$SLURMD_NODENAME" | sed -E "s/.* NodeAddr=([^ ]+).*/\\1/")',
                f"export MASTER_PORT=$({port})",
                f"export WORLD_SIZE={self.nodes * ranks_per_node} LOCAL_WORLD_SIZE={ranks_per_node}",
            ],
            command=f"{srun} {rank} {command}",
            # srun itself would kill the ranks when it gets SIGTERM.
            stop='scancel --signal=TERM "$SLURM_JOB_ID.0"',
        )

    def _refused(self, answer: str) -> ConfigError:
        reason = "; ".join(line.partition("error: ")[2] or line for line in answer.splitlines())
        if self.partition is not None and "partition" in reason.lower():
            known = sorted(set(_slurm("sinfo", "-h", "-o", "%R").stdout.split()))
            return ConfigError(
                f"job.partition: Slurm has no partition {self.partition!r} for this job.{did_you_mean(self.partition, known)} "
                f"(choices: {', '.join(known)}; sbatch: {reason})"
            )
        return ConfigError(f"job=slurm: sbatch refused the job ({reason}); correct the keys of job, or job.args")

    def status(self, handle: str) -> AttemptStatus:
        listing = _slurm("squeue", "-h", "-j", handle, "-t", "all", "-O", "State:40,RestartCnt:20")
        words = listing.stdout.split()
        if not words:
            return self._past_status(handle)
        state, restarts = words[0], int(words[1])
        if restarts:
            # Slurm would start the same job again, minutes later; a new attempt starts immediately.
            state = "REQUEUED"
        return _status(state)

    def _past_status(self, handle: str) -> AttemptStatus:
        """Return the state of a job that slurmctld has forgotten, from the accounting data if the cluster has any."""
        words = _slurm("sacct", "-n", "-X", "-P", "-j", handle, "-o", "State").stdout.split()
        return _status(words[0]) if words else AttemptStatus(JobPhase.ended, "unknown to Slurm")

    def stop(self, handle: str) -> None:
        _slurm("scancel", handle)
        end = time.monotonic() + 2 * END_S
        while not (status := self.status(handle)).phase.is_over:
            if time.monotonic() > end:
                raise BackendError(
                    f"jobs: Slurm job {handle} does not end, it is {status.word}; see scontrol show job {handle}"
                )
            time.sleep(POLL_S)

    def logs(self, files: AttemptFiles, handle: str) -> str:
        return files.log_text()

    def address(self, handle: str) -> str:
        node = _slurm("squeue", "-h", "-j", handle, "-t", "all", "-o", "%B").stdout.strip()
        address = re.search(r"\bNodeAddr=(\S+)", _slurm("scontrol", "show", "node", "-o", node).stdout)
        if address is None:
            raise BackendError(f"jobs: Slurm does not say on which node job {handle} runs")
        return address[1]


def _status(state: str) -> AttemptStatus:
    return AttemptStatus(PHASES.get(state, JobPhase.ended), state)


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm.

    Raises:
        ConfigError: the command is not installed.
        LauncherUnavailableError: Slurm does not answer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise _not_installed(command[0]) from None
    except subprocess.TimeoutExpired:
        raise LauncherUnavailableError(f"jobs: {command[0]} has not answered for {COMMAND_S:g} s") from None
    if done.returncode and any(words in done.stderr for words in UNREACHABLE_ERRORS):
        raise LauncherUnavailableError(f"jobs: {' '.join(done.stderr.split())}")
    return done


def _not_installed(name: str) -> ConfigError:
    return ConfigError(f"job=slurm: {name} is not on PATH; run this command on a login node of the cluster, or use job=local")
