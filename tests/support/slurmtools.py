"""Slurm in a folder: munged, slurmctld and two slurmd as processes of the test. Debian: slurm-wlm and munge."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
# Debian has the daemons where only root's PATH looks.
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin"
NODES = ("node1", "node2")
CONF = """
ClusterName=cookbook
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
ReturnToService=2
KillWait=10
MinJobAge=300
SlurmdTimeout=300
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """The first program that is not installed; None if Slurm can be started."""
    return next((name for name in NEEDED if shutil.which(name, path=SEARCH) is None), None)


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    """A cluster of two nodes on this machine. Yields the path of slurm.conf, for SLURM_CONF."""
    # The socket's path must be short, and the folder of a test is not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []
    try:
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        port, *of_nodes = [free_port() for _ in range(1 + len(NODES))]
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs=2 Gres=gpu:1 State=UNKNOWN"
            for name, own in zip(NODES, of_nodes, strict=True)
        )
        conf = folder / "slurm.conf"
        # One GPU a node, as far as Slurm knows.
        (folder / "gres.conf").write_text("NodeName=node1,node2 Name=gpu File=/dev/null\n")
        user = os.environ.get("USER") or "root"
        conf.write_text(CONF.format(host=host, port=port, user=user, folder=folder, nodes=nodes))
        environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": SEARCH}
        munge = [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        ]
        for command in (munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)):
            log = (folder / f"{command[0]}-{len(started)}.out").open("wb")
            started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            if command is munge:
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _idle(environment), folder)
        yield conf
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _idle(environment: dict[str, str]) -> bool:
    shown = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], env=environment, capture_output=True, text=True, check=False)
    return sorted(shown.stdout.split("\n")[:-1]) == [f"{name} idle" for name in NODES]


def _wait(ready: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + 60
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in folder.glob("*.[ol][ou][tg]"))
            raise AssertionError(f"Slurm did not start\n{logs}")
        time.sleep(0.1)
