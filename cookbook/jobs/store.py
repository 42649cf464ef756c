"""Table of the trainer jobs of a user: one SQLite file, which any process may read and write at any time."""

from __future__ import annotations

import contextlib
import enum
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cookbook.errors import BackendError
from cookbook.types import JsonObject

BUSY_S = 30.0
TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, token TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, folder TEXT NOT NULL,
    cwd TEXT NOT NULL, launcher TEXT NOT NULL, trainer TEXT NOT NULL, created REAL NOT NULL, failures INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (
    job_id TEXT NOT NULL, number INTEGER NOT NULL, handle TEXT, address TEXT, started REAL NOT NULL, running REAL, ready REAL,
    ended REAL, outcome TEXT, PRIMARY KEY (job_id, number));
"""


class JobState(enum.Enum):
    """State of a trainer job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    DELETED = "DELETED"

    @property
    def is_active(self) -> bool:
        """Whether a manager keeps an attempt of the job running."""
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class JobAttempt:
    """One start of a job's trainer. Times are seconds since 1970.

    ``handle``: the launcher's name of the attempt, None while it is being started; ``address``: ``host:port`` of its server;
    ``running``, ``ready``, ``ended``: when the attempt was first seen in that condition; ``outcome``: why it has ended.
    """

    number: int
    handle: str | None
    address: str | None
    started: float
    running: float | None
    ready: float | None
    ended: float | None
    outcome: str | None


@dataclass(frozen=True)
class TrainerJob:
    """A trainer job, as it was when it was read.

    ``token``: random text, which distinguishes jobs of one id in different tables; ``launcher`` and ``trainer``: configuration;
    ``cwd``: folder that the trainer runs in; ``failures``: attempts in a row that have failed.
    """

    job_id: str
    token: str
    state: JobState
    reason: str
    folder: Path
    cwd: str
    launcher: JsonObject
    trainer: JsonObject
    created: float
    failures: int
    attempts: tuple[JobAttempt, ...]

    @property
    def attempt(self) -> JobAttempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def address(self) -> str | None:
        """URL of the server, if the newest attempt is ready, for ``ServiceClient(base_url=...)``."""
        newest = self.attempt
        return f"http://{newest.address}" if newest and newest.address and newest.ready and not newest.ended else None


class JobTable:
    """The table in the file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._opened() as connection:
            connection.executescript(TABLES)

    def insert(self, job: TrainerJob) -> bool:
        """Add a job without attempts. Return False if its id exists: of calls at the same moment, one adds the job."""
        row = (
            *(job.job_id, job.token, job.state.value, job.reason, str(job.folder), job.cwd),
            *(json.dumps(job.launcher), json.dumps(job.trainer), job.created, job.failures),
        )
        with self._opened() as connection:
            return connection.execute(f"INSERT OR IGNORE INTO jobs VALUES ({','.join('?' * len(row))})", row).rowcount == 1

    def replace(self, job: TrainerJob) -> None:
        """Set the configuration of a job that exists."""
        with self._opened() as connection:
            connection.execute(
                "UPDATE jobs SET folder = ?, cwd = ?, launcher = ?, trainer = ? WHERE job_id = ?",
                (str(job.folder), job.cwd, json.dumps(job.launcher), json.dumps(job.trainer), job.job_id),
            )

    def remove(self, job_id: str) -> None:
        """Remove a job and its attempts."""
        with self._opened() as connection:
            for name in ("jobs", "attempts"):
                connection.execute(f"DELETE FROM {name} WHERE job_id = ?", (job_id,))

    def read(self, job_id: str | None = None) -> list[TrainerJob]:
        """Return the jobs, the oldest first; with ``job_id`` that job alone."""
        chosen, values = ("WHERE job_id = ?", (job_id,)) if job_id is not None else ("", ())
        with self._opened() as connection:
            connection.execute("BEGIN")
            jobs = connection.execute(f"SELECT * FROM jobs {chosen} ORDER BY created, job_id", values).fetchall()
            attempts = connection.execute(f"SELECT * FROM attempts {chosen} ORDER BY number", values).fetchall()
        return [_job(row, [attempt for attempt in attempts if attempt["job_id"] == row["job_id"]]) for row in jobs]

    def set_state(self, job_id: str, state: JobState, reason: str = "", *, only_active: bool = False) -> bool:
        """Set the state of a job. ``only_active``: unless another process has stopped the job meanwhile.

        Returns:
            Whether the state was set.
        """
        active = " AND state IN ('PENDING', 'RUNNING')" if only_active else ""
        with self._opened() as connection:
            words = f"UPDATE jobs SET state = ?, reason = ? WHERE job_id = ?{active}"
            return connection.execute(words, (state.value, reason, job_id)).rowcount == 1

    def set_failures(self, job_id: str, failures: int) -> None:
        with self._opened() as connection:
            connection.execute("UPDATE jobs SET failures = ? WHERE job_id = ?", (failures, job_id))

    def add_attempt(self, job_id: str, number: int, started: float) -> None:
        with self._opened() as connection:
            connection.execute("INSERT INTO attempts (job_id, number, started) VALUES (?, ?, ?)", (job_id, number, started))

    def set_attempt(self, job_id: str, number: int, **values: str | float) -> None:
        """Set fields of an attempt."""
        names = ", ".join(f"{name} = ?" for name in values)
        with self._opened() as connection:
            connection.execute(
                f"UPDATE attempts SET {names} WHERE job_id = ? AND number = ?", (*values.values(), job_id, number)
            )

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Connect for one transaction. A connection belongs to one thread, and must not be open when the process forks.

        Raises:
            BackendError: the file cannot be read or written.
        """
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S)) as connection, connection:
                connection.row_factory = sqlite3.Row
                yield connection
        except sqlite3.Error as error:
            raise BackendError(f"jobs: {self._path} cannot be used ({error}); restore the file, or remove it") from None


def _job(row: sqlite3.Row, attempts: list[sqlite3.Row]) -> TrainerJob:
    fields = dict(row)
    fields |= {name: json.loads(fields[name]) for name in ("launcher", "trainer")}
    fields |= {"state": JobState(fields["state"]), "folder": Path(fields["folder"])}
    of_attempts = [{name: attempt[name] for name in JobAttempt.__dataclass_fields__} for attempt in attempts]
    return TrainerJob(**fields, attempts=tuple(JobAttempt(**fields_of_attempt) for fields_of_attempt in of_attempts))
