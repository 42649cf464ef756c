"""The run folder: its choice, its files before the first step, and the checks before an earlier run in it is resumed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cookbook.backends.model_source import sampling_target as sampling_target
from cookbook.checkpoints import manifest, store
from cookbook.errors import CheckpointError, ConfigError, CookbookError, HookError
from cookbook.run import hooks
from cookbook.run.hooks import Status, logging_to, writing_to
from cookbook.run.identity import MISSING, Identity, differences
from cookbook.types import JsonObject
from cookbook.utils import files
from cookbook.utils.paths import RUN_CONFIG, SWEEP
from cookbook.utils.version import __version__

log = logging.getLogger("cookbook")

CONFIG = RUN_CONFIG
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
# Results of `cookbook eval`, below the run's folder.
EVALS = "evals"
# Placeholder for the end of the name of a new run's folder.
NEW = "<time>-<id>"
# Values of `resume` that resume the run in the folder.
RESUMING = ("auto", "force")
# Packages whose versions environment.json records.
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "hydra-core", "omegaconf", "numpy")


def _folder(out: str | None, named: Path | None, recipe: str, new_id: str) -> Path:
    folder = Path(out).expanduser() if out else _run_of(named) or Path("runs") / f"{recipe}-{new_id}"
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(
            f"out: {folder} is a link to {folder.readlink()}, which does not exist; remove the link, or create that"
        )
    _holds_run(folder)
    return folder


def _resume_point(folder: Path, resume: str, named: Path | None) -> Path | None:
    """Return the checkpoint to resume from; None: the run starts at step 0.

    Raises:
        ConfigError: as :func:`_checkpoint_to_resume`.
        CheckpointError: the checkpoint holds weights only, or as :func:`_checkpoint_to_resume`.
    """
    checkpoint = _checkpoint_to_resume(folder, resume, named)
    if checkpoint is not None and manifest.read(checkpoint)["kind"] == store.WEIGHTS_ONLY:
        raise CheckpointError(
            f"resume: {checkpoint} holds weights only, because of checkpoint.final_state=false, so its run cannot be resumed "
            "or extended; branch off from an older checkpoint with resume=PATH, or start a new run with "
            f"model.name={checkpoint}"
        )
    return checkpoint


def _checkpoint_to_resume(folder: Path, resume: str, named: Path | None) -> Path | None:
    """Return the checkpoint that ``resume`` chooses for the run in ``folder``; None if the run starts at step 0.

    A checkpoint of another run starts a branch, which needs a folder of its own.

    Raises:
        ConfigError: the folder holds a run and ``resume`` is neither ``auto`` nor ``force``, or it holds something else.
        CheckpointError: no checkpoint is left, or ``resume`` names an older checkpoint of the run in the folder.
    """
    if not _holds_run(folder):
        return named
    own_run = _run_of(named)
    is_own = named is not None and own_run is not None and own_run.resolve() == folder.resolve()
    last = hooks.read_status(folder) or {}
    origin = Path(last["started_from"]) if last.get("started_from") else None
    # The command that started a branch is repeated.
    repeats = named is not None and origin == named.resolve()
    if not (is_own or repeats or resume in RESUMING):
        raise ConfigError(f"out: {folder} holds a run already; choose another folder, or resume=auto to resume it")
    newest = store.newest(folder / "checkpoints")
    if is_own and newest and named and newest.resolve() != named.resolve():
        raise CheckpointError(
            f"resume: {named} is not the newest of its run, which is {newest.name}; "
            "choose out=<new folder> to branch off there, or delete the later ones"
        )
    if newest is None and origin is not None:
        manifest.verify(origin)
        return origin
    if newest is None and last.get("saved_step"):
        raise CheckpointError(
            f"out: {folder} has no checkpoint left, and its {hooks.STATUS} says that step {last['saved_step']} was saved; "
            f"restore {folder / 'checkpoints'}, choose another out=, or delete {folder} to start the run over"
        )
    return named if is_own else newest


def examine(out: str | None, resume: str, cfg: DictConfig, identity: Identity) -> tuple[Path, Path | None]:
    """Return the run's folder and the checkpoint to resume from, if a run could be opened there.

    Nothing is written but the lock file of a run in the folder.

    Raises:
        CookbookError: the errors of :func:`opened`.
    """
    named = _named(resume)
    folder = _folder(out, named, cfg.recipe.name, NEW)
    resume_from = _resume_point(folder, resume, named)
    if (folder / files.LOCK).is_file():
        with files.locked(folder):
            pass
    _compared(folder, resume_from, identity)
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    with writing_to(folder):
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            code = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
            raise OSError(code, os.strerror(code))
    return folder, resume_from


def _named(resume: str) -> Path | None:
    """Return the checkpoint that ``resume`` names: the path itself, or the newest of a run folder. None: it names no path."""
    if resume in (*RESUMING, "never"):
        return None
    path = Path(resume).expanduser()
    if (path / manifest.NAME).is_file():
        return path
    newest = store.newest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"resume: {path} is neither a checkpoint nor a run with one; expected auto, force, never or such a path"
        )
    return newest


def _run_of(checkpoint: Path | None) -> Path | None:
    """Return the folder of the run that a checkpoint is in; None if the checkpoint was moved elsewhere."""
    return checkpoint.parent.parent if checkpoint and checkpoint.parent.name == "checkpoints" else None


def _holds_run(folder: Path) -> bool:
    """Whether the folder holds a run. Hidden files do not count: a run that was killed early leaves its lock file.

    Raises:
        ConfigError: the folder holds something else.
    """
    if not folder.exists() or (folder.is_dir() and all(entry.name.startswith(".") for entry in folder.iterdir())):
        return False
    if not (folder / CONFIG).is_file():
        if (folder / "checkpoints").is_dir():
            load_config(folder)
        raise ConfigError(f"out: {folder} exists and is not a run of cookbook; choose another folder")
    return True


@contextlib.contextmanager
def opened(
    out: str | None, resume: str, cfg: DictConfig, overrides: list[str], identity: Identity
) -> Iterator[tuple[Status, Path | None]]:
    """Open the run's folder, with ``config.yaml``, ``environment.json``, ``status.json`` and ``log.txt``.

    Yield the status, which names the folder, and the checkpoint to resume from; None: the run starts at step 0.

    No other process can open the folder meanwhile. If the user's error or Ctrl-C ends the block before the first row of
    metrics, a folder made here is deleted.

    Raises:
        CookbookError: the folder or the checkpoint is unsuitable (see :func:`_resume_point`); another process has the folder
            open; the folder cannot be written; the run in it, or the checkpoint, has another identity.
    """
    new_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    named = _named(resume)
    folder = _folder(out, named, cfg.recipe.name, new_id)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with contextlib.ExitStack() as stack:
        with writing_to(folder):
            files.make_folders(folder)
            stack.enter_context(files.locked(folder))
        try:
            # Under the lock no other process adds a checkpoint.
            resume_from = _resume_point(folder, resume, named)
            is_branch = resume_from is not None and resume_from.resolve().parent.parent != folder.resolve()
            damage = [] if is_branch else list(_damage(folder, resume_from))
            notes, changes = _prepare(folder, cfg, overrides, resume_from, identity)
            if resume_from is not None and not is_branch:
                damage += store.set_aside(resume_from)
            origin = str(resume_from.resolve()) if resume_from is not None and is_branch else None
            status = Status(folder, resume_command(folder), started_from=origin)
            with logging_to(folder), status.kept():
                for note in notes:
                    log.info("%s", note)
                for line in damage:
                    log.warning("%s", line)
                if changes:
                    print(f"changed: {', '.join(changes)}", flush=True)
                yield status, resume_from
        except (CookbookError, KeyboardInterrupt) as error:
            # The trace of a failed hook is in log.txt.
            if folder in made and not (folder / METRICS).exists() and not isinstance(error, HookError):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    for path in made[1:]:
                        path.rmdir()
            raise


def _damage(folder: Path, resume_from: Path | None) -> Iterator[str]:
    """Yield a line for each missing or damaged file without which the run can resume."""
    if resume_from is not None and not (folder / METRICS).exists():
        yield f"{folder / METRICS} is missing: the rows up to {resume_from.name} are lost; the run resumes and writes the rest"
        (folder / METRICS).touch()
    for name, use in ((hooks.STATUS, "it is written again"), (ENVIRONMENT, "it stays unchanged; log.txt has newer ones")):
        file = folder / name
        try:
            if file.exists():
                json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            yield f"{file} is damaged; {use}"


def _prepare(
    out: Path, cfg: DictConfig, overrides: list[str], resume_from: Path | None, identity: Identity
) -> tuple[list[str], list[str]]:
    """Write ``config.yaml`` and ``environment.json`` after checking that the run to resume is the same run.

    Returns:
        Lines for the log (the environment, and all changes since the previous process of the run), and texts for the terminal
        (changes of keys that the previous configuration had).

    Raises:
        ConfigError: the folder cannot be written, or the run in it, or the checkpoint, has another identity.
    """
    # The stored configuration makes a new folder when it is run again.
    resolved = plain(cfg) | {"out": None, "resume": "auto"}
    earlier = _compared(out, resume_from, identity)
    facts = environment(overrides)
    # A finished run keeps the configuration that it was trained with.
    if earlier is not None and _is_finished(cfg, resume_from):
        return [json.dumps(facts), *_previous_process(out)], []
    with writing_to(out):
        if earlier != resolved:
            files.write_text(out / CONFIG, OmegaConf.to_yaml(OmegaConf.create(resolved)))
        # environment.json describes the run's first process; log.txt has the environment of each later process.
        if resume_from is None:
            files.write_text(out / ENVIRONMENT, json.dumps(facts, indent=2) + "\n")
    before = earlier or resolved
    # The configuration of the run that this run branches from may be damaged; the checkpoint has been compared.
    with contextlib.suppress(ConfigError):
        before = earlier or _config_of(_run_of(resume_from)) or resolved
    changes = list(differences("", before, resolved))
    notes = [json.dumps(facts), *_previous_process(out), *(_change(*change) for change in changes)]
    return notes, [f"{name} {_short(then)} -> {_short(now)}" for name, then, now in changes if then is not MISSING]


def _is_finished(cfg: DictConfig, resume_from: Path | None) -> bool:
    """Whether the checkpoint has all steps that the configuration asks for; False if the data decide their number."""
    steps = OmegaConf.select(cfg, "recipe.steps")
    return isinstance(steps, int) and resume_from is not None and int(manifest.read(resume_from)["step"]) >= steps


def _compared(out: Path, resume_from: Path | None, identity: Identity) -> dict[str, object] | None:
    """Return the configuration of the run in ``out``; None if ``out`` holds no run.

    Raises:
        ConfigError: that run, or the checkpoint, has another identity.
    """
    earlier = _config_of(out)
    if earlier is not None:
        identity.compare_config(f"the run in {out}", earlier)
    if resume_from is not None:
        identity.compare_checkpoint(resume_from)
    return earlier


def _change(name: str, then: object, now: object) -> str:
    if then is MISSING:
        return f"{name}: not in the run's configuration, so it had its default; now {now!r}"
    return f"{name}: {then!r} before, now {now!r}"


def _short(value: object) -> str:
    """Return a short text for a value, for a line with several changes."""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _previous_process(out: Path) -> list[str]:
    """Return a line that says how the previous process ended. It was killed if its state is still ``running``."""
    last = hooks.read_status(out)
    if last is None:
        return []
    ended = "killed" if last.get("state") == hooks.RUNNING else last.get("state")
    return [f"the previous process of this run (pid {last.get('pid')}) was {ended} after step {last.get('step')}"]


def plain(cfg: DictConfig) -> dict[str, object]:
    """Return a configuration as dicts and lists, with interpolations resolved."""
    return cast("dict[str, object]", OmegaConf.to_container(cfg, resolve=True))


def _config_of(run: Path | None) -> dict[str, object] | None:
    return load_config(run) if run and (run / CONFIG).is_file() else None


def load_config(run: Path) -> dict[str, object]:
    """Return the configuration of the run in the folder ``run``.

    Raises:
        ConfigError: the file is missing or damaged, or not the configuration of a run.
    """
    file = run / CONFIG
    try:
        cfg = OmegaConf.load(file)
        if not isinstance(cfg, DictConfig) or not OmegaConf.select(cfg, "recipe.name"):
            raise ValueError("recipe.name is missing")
        return plain(cfg)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{file}: {problem}; restore the file, or resume the run in another folder: resume={run} out=<new folder>"
        ) from None


def resume_command(out: Path) -> str:
    """Return the command that resumes the run in ``out``."""
    return shlex.join(["cookbook", "train", "--config", str(out / CONFIG), f"out={quoted(str(out))}"])


def quoted(value: str) -> str:
    """Return a text as the value of an override: Hydra needs quotes around all but plain words and paths."""
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"


def check_steps(out: Path, done: int, total: int) -> None:
    """Raise ConfigError if there is no step to train, or if a branch would only copy the checkpoint that it starts from."""
    if total < 1:
        raise ConfigError(f"recipe.steps must be at least 1, got {total}")
    if done >= total and not (out / METRICS).exists():
        seen = f"{done} of {total} steps"
        raise ConfigError(f"recipe.steps: {out} starts after {seen}, so no step is left to train; raise recipe.steps")


@functools.cache
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


def environment(overrides: list[str]) -> JsonObject:
    """Return facts besides the configuration that a result may depend on, JSON-compatible."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["cookbook", "train", *overrides],
        "sweep": os.environ.get(SWEEP),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {"cookbook": __version__, **_versions()},
        "git": _git_state(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _git_state() -> JsonObject | None:
    """Return the state of the git checkout that the current folder is in; None if it is in none."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": git("status", "--porcelain").splitlines()[:50]}
    except (OSError, subprocess.SubprocessError):
        return None
