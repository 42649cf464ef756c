"""Backend of a run with ``job=local|slurm|ray``: the model trains in a job, and everything else runs in this process."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cookbook import terminal
from cookbook.backends.group import start
from cookbook.backends.remote.connection import refuse_adapter, require_tinker
from cookbook.config import typed
from cookbook.engine.model import AUTO, ModelConfig
from cookbook.engine.optimizer import update_rule
from cookbook.errors import ConfigError
from cookbook.jobs.endpoint import LOOPBACK, JobEndpoint
from cookbook.jobs.launcher import JobLauncher
from cookbook.jobs.manager import TrainerJobConfig, TrainerJobManager
from cookbook.jobs.store import JobState
from cookbook.protocols import (
    Backend,
    CheckpointBackend,
    EngineBackend,
    OptimizerBackend,
    Preflight,
    RankBackend,
    Trainer,
)
from cookbook.types import JsonObject


@dataclass(frozen=True)
class JobBackend:
    """A backend that starts a trainer job for a run.

    Args:
        engine: the backend with which the trainer computes. ``backend_node``, ``model_node``: configuration of the trainer.
    """

    launcher: JobLauncher
    engine: Backend
    backend_node: JsonObject
    model_node: JsonObject
    seed: int

    def __post_init__(self) -> None:
        if not isinstance(self.engine, EngineBackend):
            raise ConfigError(
                f"job: the trainer of a job computes with backend=local, got {type(self.engine).__name__}; leave backend= out"
            )
        if self._shard not in ("none", AUTO):
            update_rule(self.optimizer).require_sharding()

    @property
    def optimizer(self) -> str:
        """The optimizer of the trainer."""
        return self.engine.optimizer if isinstance(self.engine, OptimizerBackend) else "adamw"

    @property
    def writes_checkpoints(self) -> bool:
        """See :class:`~cookbook.protocols.CheckpointBackend`. This process copies what the trainer writes to its folder."""
        return isinstance(self.engine, CheckpointBackend) and self.engine.writes_checkpoints

    @property
    def is_here(self) -> bool:
        """Whether the trainer is a process of this machine."""
        return self.launcher.host == LOOPBACK

    @property
    def asks_for_gpus(self) -> bool:
        """Whether the configuration asks for GPUs. Without, the trainer still takes a GPU if its machine has one."""
        gpus = self.backend_node.get("gpus") or getattr(self.launcher, "gpus", 0)
        return bool(gpus) or str(self.backend_node.get("device")).startswith("cuda")

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs of this machine with which the trainer computes, if it is a process of this machine."""
        return self.engine.gpu_numbers() if self.is_here and isinstance(self.engine, RankBackend) else ()

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return self.launcher.nodes

    @property
    def num_ranks(self) -> int:
        """Number of processes of the trainer, on all nodes of its job."""
        return self.nodes * (self.engine.num_ranks if isinstance(self.engine, RankBackend) else 1)

    def shard_of(self, model: ModelConfig) -> str:
        """Return how the trainer is configured to hold the model. The trainer's machine decides about ``auto``."""
        return "none" if self._shard == AUTO else self._shard

    @property
    def _shard(self) -> str:
        return str(self.backend_node.get("shard", AUTO))

    def check_model(self) -> None:
        """Check that the model exists, if the trainer loads it as this process would. Raises CookbookError.

        Another machine or environment may have other models.
        """
        launcher = self.launcher
        if self.is_here and launcher.interpreter == sys.executable and not (launcher.setup or launcher.environment):
            start.check_model(typed.construct_target(self.model_node, "model"))

    def preflight(self, model: ModelConfig, backend: Backend) -> None:
        """Raises ConfigError: a package or a command is missing, or the trainer cannot make the adapter."""
        require_tinker()
        refuse_adapter(model)
        if isinstance(self.launcher, Preflight):
            self.launcher.preflight(model, backend)

    def config(self, job_id: str, folder: Path | None = None, *, one_client: bool = False) -> TrainerJobConfig:
        """Return the description of the job."""
        return TrainerJobConfig(
            base_model=str(self.model_node["name"]),
            launcher=self.launcher,
            requested_job_id=job_id,
            model=self.model_node,
            backend=self.backend_node,
            seed=self.seed,
            folder=folder,
            one_client=one_client,
        )

    def make_trainer(self, model: ModelConfig, *, seed: int, folder: Path) -> Trainer:
        """Return a trainer of this process, as ``cookbook eval`` uses it. A run trains with the backend of :meth:`started`.

        Raises:
            CookbookError: the model cannot be loaded.
        """
        return self.engine.make_trainer(model, seed=seed, folder=folder)

    @contextlib.contextmanager
    def started(self, folder: Path) -> Iterator[Backend]:
        """Yield a backend on the trainer of a job that is ready. The job is COMPLETED at the end, PAUSED after an error.

        A job of the same run whose driver was killed is found again.

        Args:
            folder: of the run.

        Raises:
            ConfigError: the launcher refuses the job.
            BackendError: the model does not exist, or no attempt of the job becomes ready.
        """
        self.check_model()
        manager, gpus = TrainerJobManager(say=terminal.say), self.gpus
        job_id = _job_id(manager, folder)
        try:
            manager.create(self.config(job_id, None if self.launcher.folder else folder / "trainer", one_client=True))
            with contextlib.ExitStack() as stack:
                with terminal.doing("waiting for the trainer job"):
                    all_logprobs = bool(self.backend_node.get("all_logprobs", False))
                    endpoint = JobEndpoint(manager, job_id, all_logprobs=all_logprobs, gpus=gpus)
                    stack.enter_context(endpoint)
                yield endpoint
        except BaseException:
            if manager.try_get(job_id) is not None:
                manager.pause(job_id, "its run has stopped; the same command resumes both")
            raise
        manager.complete(job_id)


def _job_id(manager: TrainerJobManager, folder: Path) -> str:
    """Return the id of the job of the run in ``folder``, the same for every process of the run."""
    place = folder.absolute()
    name = re.sub(r"[^\w-]", "-", place.name, flags=re.ASCII)[:40]
    base = f"{name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"
    for number in itertools.count(1):
        job_id = base if number == 1 else f"{base}-{number}"
        job = manager.try_get(job_id)
        if job is None or job.state is not JobState.DELETED:
            break
    return job_id
