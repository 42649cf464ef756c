"""Files of an attempt: the configuration of its server, the script that runs it, and the job's API key."""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from cookbook.errors import ConfigError
from cookbook.jobs.launcher import AttemptFiles, JobLauncher, NodesScript
from cookbook.types import JsonObject
from cookbook.utils import files

KEY = "key"
"""File with the job's API key, in the job's folder. Only its owner can read it."""
STATE = "state"
"""Folder of the server's state, in the job's folder. A new attempt restores its runs from it."""

# Keys of the server that a job does not pass on, and what to do instead.
_ENCRYPT = "remove it, and encrypt with SSH or with a TLS proxy in front of cookbook jobs attach"
_REFUSED = {
    "host": "remove it, the launcher chooses the address",
    "port": "set job.port",
    "keys_file": "remove it, the key is in the folder of the job",
    "address_file": "remove it, the address is in the table of jobs",
    "idle_h": "set job.idle_h",
    "idle_file": "remove it",
    "failure_file": "remove it",
    "tls_cert": _ENCRYPT,
    "tls_key": _ENCRYPT,
}


def check_server(server: JsonObject) -> None:
    """Raises ConfigError: ``job.server`` has a key that the job sets itself."""
    for name, remedy in _REFUSED.items():
        if name in server:
            raise ConfigError(f"job.server.{name}: the job sets this key of its server itself; {remedy}")


def trainer_command(python: str, config_folder: Path) -> list[str]:
    """Return the command line of a trainer, the only place that knows it."""
    return [python, "-m", "cookbook", "serve", "--config-dir", str(config_folder)]


def prepare(attempt: AttemptFiles, job_folder: Path, trainer: JsonObject, launcher: JobLauncher, cwd: str) -> None:
    """Write the files that ``attempt`` needs. ``trainer``: its model, backend, server and seed; ``cwd``: folder it runs in.

    Raises:
        OSError: the folder cannot be written.
    """
    attempt.folder.mkdir(parents=True, exist_ok=True)
    make_key(job_folder)
    listening = {
        "host": launcher.host,
        "port": launcher.port,
        "keys_file": str(job_folder / KEY),
        "address_file": str(attempt.url),
        "idle_h": launcher.idle_h,
        "idle_file": str(attempt.idle),
        "failure_file": str(attempt.failure),
    }
    config = {**trainer, "server": {**trainer["server"], **listening}, "out": str(job_folder / STATE)}
    files.write_text(attempt.folder / "serve.yaml", yaml.safe_dump(config, sort_keys=False))
    ranks_per_node = int(trainer["backend"].get("gpus") or trainer["backend"].get("ranks") or 1)
    files.write_text(attempt.script, _script(attempt, launcher, cwd, ranks_per_node))


def make_key(job_folder: Path) -> Path:
    """Return the file of the job's API key, and write a random key if the file does not exist."""
    path = job_folder / KEY
    if not path.exists():
        temporary = path.with_name(f".{KEY}.{secrets.token_hex(4)}")
        # The mode is set when the file is created: at no moment can another user read the key.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # The package `tinker` accepts keys with this prefix only.
            file.write(f"tml-{secrets.token_urlsafe(32)}\n")
        temporary.replace(path)
    return path


def _script(attempt: AttemptFiles, launcher: JobLauncher, cwd: str, ranks_per_node: int) -> str:
    """Return the script of an attempt.

    bash waits for the trainer, passes SIGTERM on and records the exit code, which not every launcher reports.
    """
    command = shlex.join(trainer_command(launcher.interpreter, attempt.folder))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launcher.environment.items()]
    trainer = NodesScript([], [], command, 'kill -TERM "$trainer"')
    if launcher.nodes > 1:
        trainer = launcher.on_nodes(command, ranks_per_node)
    temporary, code = shlex.quote(f"{attempt.exit_code}.tmp"), shlex.quote(str(attempt.exit_code))
    lines = [
        "#!/bin/bash",
        f"# {attempt.name}, written by cookbook.",
        *trainer.directives,
        f"echo $$ > {shlex.quote(str(attempt.pid))}",
        f"cd {shlex.quote(cwd)} || exit",
        *exports,
        *launcher.setup,
        *trainer.setup,
        f"{trainer.command} &",
        "trainer=$!",
        f"trap {shlex.quote(trainer.stop)} TERM INT",
        # A signal ends `wait` early.
        'while wait "$trainer"; kill -0 "$trainer" 2> /dev/null; do :; done',
        'wait "$trainer"',
        "code=$?",
        f'echo "$code" > {temporary} && mv {temporary} {code}',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
