"""Manager of trainer jobs: it creates, finds, watches, restarts, stops and deletes them.

A manager has no state of its own: everything is in one SQLite file and in the folders of the jobs. So a manager that was killed
loses nothing, and several managers may manage the same job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import filelock

from cookbook.config import typed
from cookbook.errors import BackendError, ConfigError, CookbookError
from cookbook.jobs import command
from cookbook.jobs.launcher import (
    AttemptFiles,
    AttemptStatus,
    JobLauncher,
    JobPhase,
    LauncherUnavailableError,
)
from cookbook.jobs.store import JobAttempt, JobState, JobTable, TrainerJob
from cookbook.types import JsonObject
from cookbook.utils import paths

log = logging.getLogger("cookbook")

ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
POLL_S = 1.0
HEALTH_S = 5.0
LOCK_S = 300.0
# Seconds that a launcher may be unreachable before a caller that waits gets its error.
UNREACHABLE_S = 120.0
# A failure of an attempt that was ready for longer than this counts as the first one.
SETTLED_S = 60.0
MAX_BACKOFF_S = 60.0
# Exit codes of a trainer that another attempt would repeat: a mistake of the user; a command that the shell does not find.
FINAL_EXIT_CODES = (2, 126, 127)
# Exit codes after SIGTERM.
TERMINATED_EXIT_CODES = (0, 143)
# Fields of a model that clients of a server choose, so that the server has their defaults.
OF_CLIENTS = ("lora_rank", "lora_target_modules")


@dataclass(frozen=True, kw_only=True)
class TrainerJobConfig:
    """Description of a trainer job.

    Args:
        base_model: Hugging Face hub id, a folder that the trainer's node can read, or ``tiny``, as of ``ServiceClient``.
        launcher: where the trainer runs: ``LocalJob()``, ``SlurmJob(partition="gpu", gpus=1)``, ``RayJob()``.
        requested_job_id: name of the job; None chooses a random name.
        model: further keys of ``conf/model``. ``backend``: keys of ``conf/backend/local.yaml``.
        seed: of sampling from the base model.
        folder: folder of the job, which the trainer's node can write; None: named by the id, in ``launcher.folder``, or in
            ``runs/jobs`` without one.
        one_client: the job has a single client. It then fails if a rank with a shard of the model runs out of memory; with
            several clients the ranks start again, and only the request that ends them twice fails.
    """

    base_model: str
    launcher: JobLauncher
    requested_job_id: str | None = None
    model: JsonObject = field(default_factory=dict)
    backend: JsonObject = field(default_factory=dict)
    seed: int = 0
    folder: str | Path | None = None
    one_client: bool = False

    def trainer(self) -> JsonObject:
        """Return the configuration of ``cookbook serve``, without its address and its folder."""
        # Imported here: it loads torch, which the commands over jobs do without.
        from cookbook.backends.model_source import sampling_target

        model = {key: value for key, value in self.model.items() if key not in OF_CLIENTS}
        target = "cookbook.server.config.ServerConfig"
        return {
            "model": {typed.TARGET: "cookbook.engine.model.ModelConfig", **model, "name": sampling_target(self.base_model)},
            "backend": {typed.TARGET: "cookbook.backends.local.LocalConfig", **self.backend},
            "server": {typed.TARGET: target, "one_client": self.one_client, **self.launcher.server},
            "seed": self.seed,
        }


class TrainerJobManager:
    """Creates, finds, watches, restarts, stops and deletes trainer jobs.

    Args:
        folder: of the table of jobs; None: ``~/.local/state/cookbook/jobs``.
        say: called with one line for every change of a job.
    """

    def __init__(self, folder: str | Path | None = None, *, say: Callable[[str], None] = log.info) -> None:
        self.folder = Path(folder) if folder is not None else paths.state("jobs")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._table = JobTable(self.folder / "jobs.sqlite")
        self._say = say

    # ---- finding -------------------------------------------------------------------------------------------------

    def try_get(self, job_id: str) -> TrainerJob | None:
        """Return the job, as its last change left it; None if the id is unknown."""
        return next(iter(self._table.read(job_id)), None)

    def get(self, job_id: str) -> TrainerJob:
        """Return the job, as its last change left it. Raises ConfigError: the id is unknown."""
        job = self.try_get(job_id)
        if job is None:
            known = ", ".join(job.job_id for job in self._table.read()) or "none"
            raise ConfigError(f"jobs: no job is called {job_id!r}; choose one of these: {known}")
        return job

    def list(self) -> list[TrainerJob]:
        """Return all jobs, the oldest first. A job whose trainer has ended because no client used it is PAUSED from now on."""
        for job in self._table.read():
            attempt = job.attempt
            if attempt is not None and attempt.ended is None and _files(job, attempt.number).idle.exists():
                with contextlib.suppress(LauncherUnavailableError):
                    self.advance(job.job_id)
        return self._table.read()

    def observe(self, job: TrainerJob) -> str:
        """Return the launcher's word for the newest attempt of a job, as the launcher has it now."""
        attempt = job.attempt
        if attempt is None or attempt.ended is not None or attempt.handle is None:
            return "none"
        try:
            return self._launcher(job).status(attempt.handle).word
        except CookbookError:
            return "unknown"

    def key_file(self, job: TrainerJob) -> Path:
        """Return the file with the job's API key. Only its owner can read it."""
        return job.folder / command.KEY

    def logs(self, job_id: str, attempt: int | None = None) -> str:
        """Return the output of an attempt; None: of the newest.

        Raises:
            ConfigError: the job or the attempt is unknown.
            LauncherUnavailableError: the launcher has the output, and cannot answer.
        """
        job = self.get(job_id)
        chosen = next((candidate for candidate in reversed(job.attempts) if attempt in (None, candidate.number)), None)
        if chosen is None:
            raise ConfigError(f"jobs: {job_id} has attempts 1 to {len(job.attempts)}, got {attempt}")
        files = _files(job, chosen.number)
        return self._launcher(job).logs(files, chosen.handle) if chosen.handle is not None else ""

    # ---- changing ------------------------------------------------------------------------------------------------

    def create(self, config: TrainerJobConfig) -> TrainerJob:
        """Create a job and start its first attempt, or return the job of that id. A job that has failed starts again.

        Raises:
            ConfigError: the launcher refuses the job; the id is invalid, is of a deleted job, or is of a job with another
                configuration that still runs.
            LauncherUnavailableError: the launcher cannot answer now. The job is PENDING; :meth:`wait_until_ready` starts it.
        """
        job = self._described(config)
        if not self._table.insert(job):
            with self._locked(job.job_id):
                self._reuse(self.get(job.job_id), job)
        return self._begun(job.job_id)

    def _begun(self, job_id: str) -> TrainerJob:
        """Start an attempt. Raises ConfigError: the launcher refuses it; a job that never had an attempt is removed."""
        job = self.advance(job_id)
        if job.state is not JobState.FAILED:
            return job
        if all(attempt.handle is None for attempt in job.attempts):
            self._table.remove(job_id)
        raise ConfigError(job.reason)

    def _reuse(self, there: TrainerJob, request: TrainerJob) -> None:
        """Give a job without a process the requested configuration. Raises ConfigError: see :meth:`create`."""
        if there.state is JobState.DELETED:
            raise ConfigError(f"jobs: {there.job_id} was deleted; choose another id")
        names = ("folder", "launcher", "trainer")
        different = [name for name in names if getattr(there, name) != getattr(request, name)]
        if different and there.state.is_active:
            raise ConfigError(
                f"jobs: {there.job_id} runs with another {different[0]}; choose another id, or end the job with "
                f"cookbook jobs stop {there.job_id}"
            )
        if different:
            self._table.replace(request)
        if there.state is JobState.FAILED:
            self._table.set_failures(there.job_id, 0)
            self._table.set_state(there.job_id, JobState.PENDING)

    def resume(self, job_id: str) -> TrainerJob:
        """Start a new attempt of a job that is PAUSED, FAILED or COMPLETED. It restores the state of the earlier attempts.

        Raises:
            ConfigError: the job is unknown or deleted, or the launcher refuses it.
        """
        with self._locked(job_id):
            job = self.get(job_id)
            if job.state is JobState.DELETED:
                raise ConfigError(f"jobs: {job_id} was deleted; create a job of another id")
            if not job.state.is_active:
                self._table.set_failures(job_id, 0)
                self._table.set_state(job_id, JobState.PENDING)
        return self._begun(job_id)

    def reconnect(self, job_id: str, *, timeout_s: float | None = None) -> TrainerJob:
        """Return the job once its server answers. A job without a process is resumed.

        Raises:
            ConfigError: the job is unknown or deleted.
            BackendError: no attempt has become ready.
        """
        if not self.get(job_id).state.is_active:
            self.resume(job_id)
        return self.wait_until_ready(job_id, timeout_s=timeout_s)

    def wait_until_ready(self, job_id: str, *, timeout_s: float | None = None, poll_interval_s: float = POLL_S) -> TrainerJob:
        """Wait until the server of the job answers with the job's key. An attempt that ends meanwhile is replaced by a new one.

        Args:
            timeout_s: seconds to wait; None: the limits of the launcher, ``pending_s`` in the queue and ``startup_s`` after it.

        Raises:
            BackendError: the job has failed, is stopped by another process, or is not ready in time.
        """
        started = answered = time.monotonic()
        while True:
            with contextlib.suppress(LauncherUnavailableError):
                job = self.advance(job_id)
                answered = time.monotonic()
                if job.address is not None:
                    return job
                if not job.state.is_active:
                    raise BackendError(lost(job))
            if time.monotonic() - answered > UNREACHABLE_S:
                # Raises the launcher's own error.
                self.advance(job_id)
            if timeout_s is not None and time.monotonic() - started > timeout_s:
                raise BackendError(f"jobs: {job_id} is not ready after {timeout_s:g} s; see cookbook jobs logs {job_id}")
            time.sleep(poll_interval_s)

    def pause(self, job_id: str, reason: str = "stopped by cookbook jobs stop") -> TrainerJob:
        """End the processes of a job. :meth:`resume` continues it. Raises BackendError: a process is left."""
        return self._stop(job_id, JobState.PAUSED, reason)

    def complete(self, job_id: str) -> TrainerJob:
        """End the processes of a job that is no longer needed. Raises BackendError: a process is left."""
        return self._stop(job_id, JobState.COMPLETED, "")

    def delete(self, job_id: str) -> TrainerJob:
        """End the processes of a job, and delete its key. The checkpoints in its folder stay, and its id is not free again.

        Raises:
            ConfigError: the job is unknown.
            BackendError: a process is left.
        """
        job = self._stop(job_id, JobState.DELETED, "")
        self.key_file(job).unlink(missing_ok=True)
        return job

    def _stop(self, job_id: str, state: JobState, reason: str) -> TrainerJob:
        job = self.get(job_id)
        if job.state is not JobState.DELETED and (job.state.is_active or state is not JobState.PAUSED):
            # Set first: a manager that sees the attempt end must not start another one.
            self._table.set_state(job_id, state, reason)
        with self._locked(job_id):
            job = self.get(job_id)
            launcher = self._launcher(job)
            for attempt in job.attempts:
                if attempt.ended is None:
                    handle = attempt.handle
                    # An interrupted call may have started it.
                    if handle is None and _files(job, attempt.number).script.exists():
                        handle = launcher.start(_files(job, attempt.number))
                    if handle is not None:
                        launcher.stop(handle)
                    self._table.set_attempt(job_id, attempt.number, ended=time.time(), outcome=state.value.lower())
            return self.get(job_id)

    # ---- watching ------------------------------------------------------------------------------------------------

    def advance(self, job_id: str) -> TrainerJob:
        """Poll the newest attempt once, and act: start it, record that it is ready, or replace it with a new attempt.

        Raises:
            ConfigError: the job is unknown.
            LauncherUnavailableError: the launcher cannot answer now.
        """
        with self._locked(job_id):
            job = self.get(job_id)
            if job.state.is_active:
                try:
                    self._advance(job, self._launcher(job))
                except LauncherUnavailableError:
                    raise
                except (CookbookError, OSError) as error:
                    self._finish(job, JobState.FAILED, str(error))
            return self.get(job_id)

    def _advance(self, job: TrainerJob, launcher: JobLauncher) -> None:
        attempt = job.attempt
        if attempt is None or attempt.ended is not None:
            if attempt is None or time.time() >= (attempt.ended or 0.0) + _backoff_s(job.failures):
                number = attempt.number + 1 if attempt else 1
                shutil.rmtree(_files(job, number).folder, ignore_errors=True)
                self._table.add_attempt(job.job_id, number, time.time())
                self._start(job, launcher, number)
        elif attempt.handle is None:
            # The manager that wanted to start it was killed.
            self._start(job, launcher, attempt.number)
        else:
            status = launcher.status(attempt.handle)
            if status.phase.is_over:
                launcher.stop(attempt.handle)
                self._ended(job, launcher, attempt, status)
            elif status.phase is JobPhase.running:
                self._watch(job, launcher, attempt, attempt.handle)
            elif time.time() - attempt.started > launcher.pending_s:
                launcher.stop(attempt.handle)
                self._finish(
                    job, JobState.FAILED, f"jobs: {job.job_id} has waited for {launcher.pending_s:g} s (job.pending_s)"
                )

    def _start(self, job: TrainerJob, launcher: JobLauncher, number: int) -> None:
        files = _files(job, number)
        if not files.script.exists():
            try:
                command.prepare(files, job.folder, job.trainer, launcher, job.cwd)
            except OSError as error:
                raise ConfigError(
                    f"job.folder: cannot write to {job.folder}: {error.strerror}; choose another folder"
                ) from None
        handle = launcher.start(files)
        self._table.set_attempt(job.job_id, number, handle=handle)
        kind = type(launcher).__module__.rpartition(".")[2]
        self._say(f"trainer job {job.job_id}: attempt {number} submitted ({kind} {handle})")

    def _watch(self, job: TrainerJob, launcher: JobLauncher, attempt: JobAttempt, handle: str) -> None:
        """Record that an attempt runs, and then that its server answers. End an attempt that is not ready in time."""
        if attempt.running is None:
            self._table.set_attempt(job.job_id, attempt.number, running=time.time())
            self._table.set_state(job.job_id, JobState.RUNNING, only_active=True)
        if attempt.ready is not None:
            return
        files = _files(job, attempt.number)
        if files.url.exists():
            port = files.url.read_text(encoding="utf-8").strip().rpartition(":")[2]
            address = f"{launcher.address(handle)}:{port}"
            if is_healthy(f"http://{address}", self.key_file(job).read_text(encoding="utf-8").strip()):
                self._table.set_attempt(job.job_id, attempt.number, address=address, ready=time.time())
                self._say(f"trainer job {job.job_id}: attempt {attempt.number} is ready at {address}")
                return
        if attempt.running is not None and time.time() - attempt.running > launcher.startup_s:
            launcher.stop(handle)
            word = f"not ready after {launcher.startup_s:g} s (job.startup_s)"
            self._ended(job, launcher, attempt, AttemptStatus(JobPhase.ended, word))

    def _ended(self, job: TrainerJob, launcher: JobLauncher, attempt: JobAttempt, status: AttemptStatus) -> None:
        """Follow up on an attempt that has ended: start a new one, with a delay if it has failed, or end the job."""
        files, now = _files(job, attempt.number), time.time()
        code = _exit_code(files)
        outcome = status.word + (f", exit code {code}" if code is not None else "")
        self._table.set_attempt(job.job_id, attempt.number, ended=now, outcome=outcome)
        if status.phase is JobPhase.cancelled:
            self._finish(job, JobState.PAUSED, f"its attempt {attempt.number} was cancelled with the commands of the launcher")
            return
        if files.idle.exists():
            self._finish(
                job, JobState.PAUSED, f"no client used it for {launcher.idle_h} h (job.idle_h); the same command resumes it"
            )
            return
        interrupted = status.phase is JobPhase.preempted or code in TERMINATED_EXIT_CODES
        settled = attempt.ready is not None and (interrupted or now - attempt.ready > SETTLED_S)
        failures = 0 if settled else job.failures + 1
        self._table.set_failures(job.job_id, failures)
        failure = _text(files.failure)
        if failure or code in FINAL_EXIT_CODES or failures > launcher.max_failures:
            reason = f"error: {failure}" if failure else _last_line(launcher, files, attempt)
            self._finish(job, JobState.FAILED, f"attempt {attempt.number} has ended ({outcome}): {reason}")
            return
        self._table.set_state(job.job_id, JobState.PENDING, only_active=True)
        delay = f" in {_backoff_s(failures):g} s" if failures else ""
        self._say(
            f"trainer job {job.job_id}: attempt {attempt.number} has ended ({outcome}); attempt {attempt.number + 1} "
            f"starts{delay} and restores its state"
        )

    def _finish(self, job: TrainerJob, state: JobState, reason: str) -> None:
        """End a job for a reason of its own. Its newest attempt no longer has a process."""
        if self._table.set_state(job.job_id, state, reason, only_active=True):
            newest = self.get(job.job_id).attempt
            if newest is not None and newest.ended is None:
                self._table.set_attempt(job.job_id, newest.number, ended=time.time(), outcome=state.value.lower())

    # ---- inside --------------------------------------------------------------------------------------------------

    def _described(self, config: TrainerJobConfig) -> TrainerJob:
        job_id = config.requested_job_id or f"trainer-{secrets.token_hex(4)}"
        if not 0 < len(job_id) <= 64 or set(job_id) - ID_CHARACTERS or job_id.startswith("."):
            raise ConfigError(f"jobs: an id has at most 64 letters, digits, '-', '_' and '.', got {job_id!r}")
        cls, launcher = type(config.launcher), config.launcher
        command.check_server(launcher.server)
        options = {field.name: getattr(launcher, field.name) for field in dataclasses.fields(cls)}
        return TrainerJob(
            job_id=job_id,
            token=secrets.token_hex(3),
            state=JobState.PENDING,
            reason="",
            folder=Path(config.folder or Path(launcher.folder or "runs/jobs") / job_id).absolute(),
            cwd=str(Path.cwd()),
            launcher={typed.TARGET: f"{cls.__module__}.{cls.__qualname__}", **options},
            trainer=config.trainer(),
            created=time.time(),
            failures=0,
            attempts=(),
        )

    def _launcher(self, job: TrainerJob) -> JobLauncher:
        launcher: JobLauncher = typed.construct_target(job.launcher, "job")
        return launcher

    @contextlib.contextmanager
    def _locked(self, job_id: str) -> Iterator[None]:
        """Hold the lock of one job, among all managers. The operating system frees the lock of a killed process."""
        path = self.folder / f"{job_id}.lock"
        try:
            with filelock.FileLock(path, timeout=LOCK_S):
                yield
        except filelock.Timeout:
            raise BackendError(f"jobs: another process holds {path} for {LOCK_S:g} s; end that process") from None


def lost(job: TrainerJob) -> str:
    """Message about a job that has no process and will get none."""
    reason = f": {job.reason}" if job.reason else ""
    return f"trainer job {job.job_id} is {job.state.value}{reason}"


def is_healthy(url: str, key: str) -> bool:
    """Whether the server at ``url`` answers and knows the key. Proxies of the environment are not used."""
    import httpx

    try:
        response = httpx.get(f"{url}/api/v1/cookbook", headers={"X-API-Key": key}, timeout=HEALTH_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


def _files(job: TrainerJob, number: int) -> AttemptFiles:
    return AttemptFiles(f"cookbook-{job.job_id}-{job.token}-{number}", job.folder / f"attempt-{number}")


def _last_line(launcher: JobLauncher, files: AttemptFiles, attempt: JobAttempt) -> str:
    """Return the last line of an attempt's output that reports an error; if none does, the last line."""
    text = launcher.logs(files, attempt.handle or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["its log is empty"]
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])


def _backoff_s(failures: int) -> float:
    """Seconds between an attempt and the next one."""
    return min(2.0**failures, MAX_BACKOFF_S) if failures else 0.0


def _exit_code(files: AttemptFiles) -> int | None:
    try:
        return int(_text(files.exit_code))
    except ValueError:
        return None


def _text(path: Path) -> str:
    """Return the line in a file; empty if the file does not exist."""
    try:
        return " ".join(path.read_text(encoding="utf-8").split())
    except OSError:
        return ""
