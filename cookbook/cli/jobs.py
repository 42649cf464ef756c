"""``cookbook jobs``: trainers that run as jobs, started by runs with job=local|slurm|ray or by ``cookbook jobs create``."""

from __future__ import annotations

import contextlib
import shlex

from omegaconf import DictConfig

from cookbook import terminal
from cookbook.config.typed import TARGET, convert
from cookbook.errors import ConfigError
from cookbook.jobs.endpoint import JobEndpoint
from cookbook.jobs.manager import TrainerJobManager
from cookbook.jobs.store import JobState, TrainerJob
from cookbook.run.folder import quoted
from cookbook.run.settings import job_backend
from cookbook.utils import tables


def overrides(others: list[str]) -> list[str]:
    """Return the overrides of ``conf/train.yaml`` for a job; it reads the groups ``model``, ``backend`` and ``job``."""
    return others if any(other.startswith("job=") for other in others) else ["job=local", *others]


def create(name: str, cfg: DictConfig) -> None:
    """Start a job, or find it.

    Raises:
        ConfigError: a wrong value, or the launcher refuses the job.
        BackendError: the model does not exist.
    """
    seed = convert(cfg.seed, int, "seed")
    backend = job_backend(cfg, seed)
    if backend is None:
        raise ConfigError("jobs: job=none starts no job; choose job=local, job=slurm or job=ray")
    backend.check_model()
    manager = TrainerJobManager(say=print)
    job = manager.create(backend.config(name))
    print(f"trainer job {name}: {job.state.value}; next: {shlex.join(['cookbook', 'jobs', 'attach', name])}")


def print_list(*, table: bool) -> None:
    """Print one line per job that is not deleted."""
    manager = TrainerJobManager()
    rows = [_row(manager, job) for job in manager.list() if job.state is not JobState.DELETED]
    tables.show("jobs", ("job", "state", "launcher", "attempt", "process", "address", "model", "reason"), rows, table=table)


def print_logs(name: str, attempt: int | None) -> None:
    """Print the output of an attempt. Raises ConfigError: the job or the attempt is unknown."""
    print(TrainerJobManager().logs(name, attempt))


def stop(name: str) -> None:
    """End the processes of a job. Raises CookbookError: the job is unknown, or a process is left."""
    job = TrainerJobManager().pause(name)
    print(f"trainer job {name}: {job.state.value}; its processes have ended, its state is in {job.folder}")


def delete(name: str) -> None:
    """End the processes of a job, and remove it from the list. Raises CookbookError: as :func:`stop`."""
    job = TrainerJobManager().delete(name)
    print(f"trainer job {name}: {job.state.value}; its checkpoints stay in {job.folder}")


def attach(name: str, port: int) -> None:
    """Offer a job at a local address, and keep the job running, until a signal ends this process.

    Raises:
        CookbookError: the job is unknown, does not become ready, or is stopped.
    """
    manager = TrainerJobManager(say=lambda line: print(line, flush=True))
    with contextlib.ExitStack() as stack:
        with terminal.doing(f"waiting for the trainer job {name}"):
            endpoint = stack.enter_context(JobEndpoint(manager, name, port))
        key = quoted(str(manager.key_file(manager.get(name))))
        print(f"trainer job {name}: {endpoint.base_url} leads to it until Ctrl-C, which leaves the job running", flush=True)
        line = f"backend=remote backend.base_url={endpoint.base_url} backend.api_key_file={key}"
        print(f"next: cookbook train {line}", flush=True)
        endpoint.wait()


def _row(manager: TrainerJobManager, job: TrainerJob) -> tuple[str, ...]:
    kind = str(job.launcher[TARGET]).rpartition(".")[0].rpartition(".")[2]
    number = str(job.attempt.number) if job.attempt else "none"
    model = str(job.trainer["model"]["name"])
    return (job.job_id, job.state.value, kind, number, manager.observe(job), job.address or "none", model, job.reason)
