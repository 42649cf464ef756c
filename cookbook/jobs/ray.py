"""Launcher ``ray``: the trainer is a Ray job, over the REST interface of Ray Jobs. The package ``ray`` is not needed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from cookbook.errors import BackendError, ConfigError
from cookbook.jobs.launcher import END_S, AttemptFiles, AttemptStatus, JobLauncher, JobPhase, LauncherUnavailableError
from cookbook.types import JsonObject

PHASES = {"PENDING": JobPhase.queued, "RUNNING": JobPhase.running, "STOPPED": JobPhase.cancelled}
REQUEST_S, POLL_S = 30.0, 0.5


@dataclass(kw_only=True)
class RayJob(JobLauncher):
    """Jobs of a Ray cluster. A handle is a submission id. ``conf/job/ray.yaml`` explains the fields."""

    cluster: str = "http://127.0.0.1:8265"
    gpus: float | None = None
    cpus: float = 1
    pending_s: float = 172800.0

    def start(self, files: AttemptFiles) -> str:
        if self._job(files.name) is None:
            body = {
                "entrypoint": f"bash {files.script}",
                "submission_id": files.name,
                "entrypoint_num_cpus": self.cpus,
                "entrypoint_num_gpus": self.gpus or 0,
            }
            answer = self._ask("POST", "", body)
            if answer.status_code != httpx.codes.OK:
                raise ConfigError(f"job=ray: {self.cluster} refused the job: {' '.join(answer.text.split())[:300]}")
        return files.name

    def status(self, handle: str) -> AttemptStatus:
        job = self._job(handle)
        if job is None:
            return AttemptStatus(JobPhase.ended, "unknown to Ray")
        return AttemptStatus(PHASES.get(job["status"], JobPhase.ended), job["status"])

    def stop(self, handle: str) -> None:
        end = time.monotonic() + END_S
        self._ask("POST", f"{handle}/stop")
        while not (status := self.status(handle)).phase.is_over:
            if time.monotonic() > end:
                raise BackendError(f"jobs: Ray job {handle} does not end, it is {status.word}; see ray job status {handle}")
            time.sleep(POLL_S)

    def logs(self, files: AttemptFiles, handle: str) -> str:
        answer = self._ask("GET", f"{handle}/logs")
        return str(self._read(answer).get("logs", "")) if answer.status_code == httpx.codes.OK else ""

    def address(self, handle: str) -> str:
        agent = (self._job(handle) or {}).get("driver_agent_http_address")
        host = urlsplit(agent or "").hostname
        if host is None:
            raise BackendError(f"jobs: Ray does not say on which node job {handle} runs")
        return host

    def _job(self, handle: str) -> JsonObject | None:
        answer = self._ask("GET", handle)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code != httpx.codes.OK:
            raise LauncherUnavailableError(f"jobs: {self.cluster} answers with status {answer.status_code}")
        job = self._read(answer)
        if "status" not in job:
            raise self._is_not_ray()
        return job

    def _read(self, answer: httpx.Response) -> JsonObject:
        try:
            fields = answer.json()
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise self._is_not_ray()
        return fields

    def _is_not_ray(self) -> LauncherUnavailableError:
        return LauncherUnavailableError(
            f"job.cluster: the server at {self.cluster} is not Ray; set the address of Ray's dashboard"
        )

    def _ask(self, method: str, path: str, body: JsonObject | None = None) -> httpx.Response:
        try:
            return httpx.request(method, f"{self.cluster.rstrip('/')}/api/jobs/{path}", json=body, timeout=REQUEST_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LauncherUnavailableError(
                f"job.cluster: no answer from Ray at {self.cluster} ({str(error) or type(error).__name__}); start it "
                "with ray start --head, or correct the address"
            ) from None
