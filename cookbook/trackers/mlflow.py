"""MLflow: a tracking server, or the database ``mlflow.db`` in the current folder, which ``mlflow ui`` draws."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cookbook.errors import ConfigError, first_line
from cookbook.types import JsonObject
from cookbook.utils import files, packages, reachable

log = logging.getLogger("cookbook")

STATES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# The server's limit of one request.
PARAMETERS = 100
LONGEST_NAME = 250


@dataclass
class MLflowTracker:
    """A :class:`~cookbook.protocols.Tracker`. A resumed run continues under the same MLflow id.

    ``conf/tracker/mlflow.yaml`` says what each field means.
    """

    experiment: str | None = None
    uri: str | None = None
    tags: dict[str, str] = field(default_factory=dict)

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package mlflow is not installed."""
        packages.need("tracker", "mlflow", "mlflow", ", or leave tracker=mlflow out")

    def start(self, config: JsonObject, out: str, name: str, step: int) -> None:
        self.preflight()
        import mlflow
        from mlflow.entities import Param

        # Two lines about the tables of a new database would stand between those of the run.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)

        id_file = Path(out) / "mlflow_id.txt"
        known = id_file.read_text().strip() if id_file.exists() else ""
        place = self.uri or mlflow.get_tracking_uri()
        _check_place(place)
        # MLflow's own defaults are two minutes a request and seven retries.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        try:
            # Makes no request, so that an error is one of the address.
            self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        except mlflow.exceptions.MlflowException as error:
            raise ConfigError(f"tracker: mlflow: {first_line(error)}; see tracker.mlflow.uri, MLFLOW_TRACKING_URI") from None
        try:
            if known:
                known = self._resumed(known, mlflow.exceptions.MlflowException)
            if not known:
                run = self._client.create_run(self._experiment_id(), run_name=name, tags=self.tags)
                self._id = run.info.run_id
                parameters = [Param(key, value) for key, value in flattened(config)]
                for start in range(0, len(parameters), PARAMETERS):
                    self._client.log_batch(self._id, params=parameters[start : start + PARAMETERS])
        except mlflow.exceptions.MlflowException as error:
            raise ConnectionError(f"{first_line(error)}; see tracker.mlflow.uri and MLFLOW_TRACKING_URI") from None
        if not known:
            files.write_text(id_file, f"{self._id}\n")
        place = str(self._client.tracking_uri)
        location = f" at {place}" if place.startswith("http") else f"; show it with: mlflow ui --backend-store-uri {place}"
        print(f"mlflow: run {self._id}{location}", flush=True)

    def _resumed(self, known: str, error_type: type[Exception]) -> str:
        """Reopen the run of an earlier process. Return its id; "" if the server has no such run, which then gets a new id."""
        self._id = known
        try:
            self._client.update_run(known, status="RUNNING")
        except error_type as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("tracker: mlflow: run %s is gone; the run continues under a new id", known)
            return ""
        return known

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow refuses other characters in names.
        names = {key: re.sub(r"[^\w\-. /:]", "_", key)[-LONGEST_NAME:] for key in metrics}
        self._client.log_batch(self._id, metrics=[Metric(names[key], value, now, step) for key, value in metrics.items()])

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, STATES[state])

    def _experiment_id(self) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "cookbook"
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known else self._client.create_experiment(name))


def _check_place(uri: str) -> None:
    """Raise OSError if the server does not answer in a few seconds, or the folder cannot be written.

    It switches the tracker off, with one warning: MLflow itself would try again for minutes.
    """
    remedy = "see tracker.mlflow.uri and MLFLOW_TRACKING_URI"
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        if reason := reachable.no_answer(uri):
            raise ConnectionError(f"{reason}; {remedy}")
    elif parts.scheme in ("", "file", "sqlite"):
        path = Path(parts.path.removeprefix("/") if parts.scheme == "sqlite" else parts.path or uri)
        nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"{nearest} cannot be written; {remedy}")


def flattened(config: JsonObject, prefix: str = "") -> Iterator[tuple[str, str]]:
    """``("optim.lr", "0.001")`` of ``{"optim": {"lr": 0.001}}``."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
