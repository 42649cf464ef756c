"""Interface of a launcher, which starts and ends the processes of a trainer job, and the options that all launchers share."""

from __future__ import annotations

import abc
import enum
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cookbook.errors import BackendError, ConfigError

END_S = 60.0
"""Seconds that a trainer gets to finish accepted requests and exit, after the signal to stop."""


class LauncherUnavailableError(BackendError):
    """Error of a launcher that cannot answer now. The same call may succeed later."""


class JobPhase(enum.Enum):
    """Phase of an attempt, as its launcher reports it.

    ``preempted``: the launcher has ended it, and a new attempt may start. ``cancelled``: a user has ended it in the launcher.
    """

    queued = "queued"
    running = "running"
    ended = "ended"
    preempted = "preempted"
    cancelled = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether no process of the attempt is left."""
        return self not in (JobPhase.queued, JobPhase.running)


@dataclass(frozen=True)
class AttemptStatus:
    """Phase of an attempt, and the launcher's own word for it."""

    phase: JobPhase
    word: str


@dataclass(frozen=True)
class AttemptFiles:
    """Name of an attempt, unique for this user, and its files below ``folder``, which the node of the trainer can read."""

    name: str
    folder: Path

    @property
    def script(self) -> Path:
        """Shell script that the launcher runs."""
        return self.folder / "job.sh"

    @property
    def log(self) -> Path:
        """Output of the script."""
        return self.folder / "log.txt"

    @property
    def pid(self) -> Path:
        """Number of the script's process, on its node."""
        return self.folder / "pid"

    @property
    def url(self) -> Path:
        """Address of the trainer's server on its node. The file exists once the server listens."""
        return self.folder / "url"

    @property
    def idle(self) -> Path:
        """File that exists once the trainer ends because no client has used it for ``job.idle_h`` hours."""
        return self.folder / "idle"

    @property
    def failure(self) -> Path:
        """File with the error that has ended the trainer, if another attempt would meet it again."""
        return self.folder / "failure"

    @property
    def exit_code(self) -> Path:
        """Exit code of the trainer. The file exists once the trainer has ended, unless its node or script was killed."""
        return self.folder / "exit"

    def log_text(self) -> str:
        """Return the log; without a log an empty text."""
        try:
            return self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


@dataclass(frozen=True)
class NodesScript:
    """Parts of the script of an attempt on several nodes, in the words of its launcher.

    ``directives`` and ``setup`` are lines in front of ``command``; ``stop`` passes SIGTERM on to the ranks on all nodes.
    """

    directives: list[str]
    setup: list[str]
    command: str
    stop: str


@dataclass(kw_only=True)
class JobLauncher(abc.ABC):
    """Starts the script of an attempt somewhere: the base class of the entries of the group ``job``.

    A launcher has the five abstract methods. The fields are the options of every launcher, which the files of ``conf/job``
    explain. ``host``: address on which the trainer listens.
    """

    host: ClassVar[str] = "0.0.0.0"

    folder: str | None = None
    python: str | None = None
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    startup_s: float = 900.0
    idle_h: float | None = 4.0
    max_failures: int = 3

    def __post_init__(self) -> None:
        if self.idle_h is not None and not self.idle_h > 0:
            raise ConfigError(f"job.idle_h: expected a number above 0, got {self.idle_h}; null sets no limit")
        if not self.startup_s > 0:
            raise ConfigError(f"job.startup_s: expected a number above 0, got {self.startup_s}")
        if self.max_failures < 0:
            raise ConfigError(f"job.max_failures: expected 0 or more, got {self.max_failures}")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"job.port: expected 0 to 65535, got {self.port}; 0 chooses a free port")
        for name in self.environment:
            if not name.isidentifier():
                raise ConfigError(f"job.environment: expected the name of a variable, got {name!r}")

    @property
    def interpreter(self) -> str:
        """Python on the node."""
        return self.python or sys.executable

    @abc.abstractmethod
    def start(self, files: AttemptFiles) -> str:
        """Start the script and return the launcher's handle of the attempt, or the handle of an attempt of that name.

        Raises:
            ConfigError: the launcher refuses the job.
            LauncherUnavailableError: the launcher cannot answer now.
        """

    @abc.abstractmethod
    def status(self, handle: str) -> AttemptStatus:
        """Raises LauncherUnavailableError: the launcher cannot answer now."""

    @abc.abstractmethod
    def stop(self, handle: str) -> None:
        """Ask the processes of an attempt to end, end those that do not, and return when none is left.

        Raises:
            BackendError: a process is left.
        """

    @abc.abstractmethod
    def logs(self, files: AttemptFiles, handle: str) -> str:
        """Return the output of an attempt."""

    @abc.abstractmethod
    def address(self, handle: str) -> str:
        """Return the host of a running attempt, as this machine reaches it.

        Raises:
            BackendError: the launcher does not know it.
        """

    @property
    def pending_s(self) -> float:
        """Seconds that an attempt may wait in the launcher's queue."""
        return math.inf

    @property
    def nodes(self) -> int:
        """Number of nodes of an attempt, which train one model together."""
        return 1

    def on_nodes(self, command: str, ranks_per_node: int) -> NodesScript:
        """Return a script that starts ``command`` as every rank on several nodes, with the variables that torchrun sets."""
        raise NotImplementedError(f"{type(self).__name__} runs on one node")
