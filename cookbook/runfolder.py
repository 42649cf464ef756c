"""The run folder: which one, what stands in it before the first step, and whether an earlier run in it may go on."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cookbook import atomic, lock
from cookbook import status as statuses
from cookbook.checkpoints import manifest, store
from cookbook.environment import environment
from cookbook.errors import CheckpointError, ConfigError, CookbookError, HookError
from cookbook.identity import MISSING, Identity, differences
from cookbook.status import Status

log = logging.getLogger("cookbook")

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
NEW = "<time>-<id>"  # stands for the end of a new run's folder
GOES_ON = ("auto", "force")  # values of `resume` that go on with the run in the folder


def choose(out: str | None, resume: str, recipe: str, new_id: str) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to go on from (None: from the start).

    A checkpoint of another run starts a branch: it needs a folder of its own.

    Raises:
        ConfigError: the folder is taken and ``resume`` is neither ``auto`` nor ``force``; or what it holds is not a run.
        CheckpointError: ``resume`` names a path that is not a checkpoint or a run, or not the newest of the run in the folder.
    """
    named = _named(resume)
    folder = _folder(out, named, recipe, new_id)
    return folder, _resume_point(folder, resume, named)


def _folder(out: str | None, named: Path | None, recipe: str, new_id: str) -> Path:
    folder = Path(out) if out else _run_of(named) or Path("runs") / f"{recipe}-{new_id}"
    _taken(folder)
    return folder


def _resume_point(folder: Path, resume: str, named: Path | None) -> Path | None:
    if not _taken(folder):
        return named
    own_run = _run_of(named)
    is_own = named is not None and own_run is not None and own_run.resolve() == folder.resolve()
    last = statuses.read(folder) or {}
    origin = Path(last["started_from"]) if last.get("started_from") else None
    repeats = named is not None and origin == named.resolve()  # the command of a branch, a second time
    if not (is_own or repeats or resume in GOES_ON):
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
            f"out: {folder} has no checkpoint left, and its {statuses.NAME} says that step {last['saved_step']} was saved; "
            f"restore {folder / 'checkpoints'}, choose another out=, or delete {folder} to start the run over"
        )
    return named if is_own else newest


def examine(out: str | None, resume: str, cfg: DictConfig, identity: Identity) -> tuple[Path, Path | None]:
    """The folder and checkpoint of :func:`choose`, if a run could be opened there.

    Writes nothing, but for the lock of a run that is in the folder.

    Raises:
        CookbookError: as :func:`opened`.
    """
    folder, resume_from = choose(out, resume, cfg.recipe.name, NEW)
    if (folder / lock.NAME).is_file():
        with lock.held(folder):
            pass
    _compared(folder, resume_from, identity)
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    for code, wrong in ((errno.ENOTDIR, not nearest.is_dir()), (errno.EACCES, not os.access(nearest, os.W_OK))):
        if wrong:
            raise _unwritable(folder, OSError(code, os.strerror(code)))
    return folder, resume_from


def _named(resume: str) -> Path | None:
    """The checkpoint that ``resume`` names, if it does: the path itself, or the newest of a run folder."""
    if resume in (*GOES_ON, "never"):
        return None
    path = Path(resume)
    if (path / manifest.NAME).is_file():
        return path
    newest = store.newest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"resume: {path} is neither a checkpoint nor a run with one; expected auto, force, never or such a path"
        )
    return newest


def _run_of(checkpoint: Path | None) -> Path | None:
    """The run a checkpoint stands in; None for one that was moved elsewhere."""
    return checkpoint.parent.parent if checkpoint and checkpoint.parent.name == "checkpoints" else None


def _taken(folder: Path) -> bool:
    """Whether a run is in the folder. Hidden files make none: a run that was killed at once leaves its lock.

    Raises:
        ConfigError: something else is.
    """
    if not folder.exists() or (folder.is_dir() and all(entry.name.startswith(".") for entry in folder.iterdir())):
        return False
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"out: {folder} exists and is not a run of cookbook; choose another folder")
    return True


@dataclass(frozen=True)
class Opened:
    """A run folder that this process has to itself. ``resume_from`` is the checkpoint to go on from; None: from the start."""

    folder: Path
    resume_from: Path | None
    status: Status


@contextlib.contextmanager
def opened(out: str | None, resume: str, cfg: DictConfig, overrides: list[str], identity: Identity) -> Iterator[Opened]:
    """The run's folder with ``config.yaml``, ``environment.json``, ``status.json`` and a log.

    No other process can open the folder meanwhile. A mistake that shows before the first row of metrics, or Ctrl-C, leaves
    nothing behind of a folder made here.

    Raises:
        CookbookError: as :func:`choose`; another process is in the folder; it cannot be written; the run in it, or the
            checkpoint, has another identity.
    """
    new_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    named = _named(resume)
    folder = _folder(out, named, cfg.recipe.name, new_id)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with _entered(folder):
        try:
            resume_from = _resume_point(folder, resume, named)  # only now: nobody adds a checkpoint any more
            is_branch = resume_from is not None and resume_from.resolve().parent.parent != folder.resolve()
            damage = [] if is_branch else list(_damage(folder, resume_from))
            notes, changes = prepare(folder, cfg, overrides, resume_from, identity)
            if resume_from is not None and not is_branch:
                damage += store.set_aside(resume_from)
            origin = str(resume_from.resolve()) if resume_from is not None and is_branch else None
            status = Status(folder, resume_command(folder), started_from=origin)
            with logging_to(folder), _kept(status):
                for note in notes:
                    log.info("%s", note)
                for line in damage:
                    log.warning("%s", line)
                if changes:
                    print(f"changed: {', '.join(changes)}", flush=True)
                yield Opened(folder, resume_from, status)
        except (CookbookError, KeyboardInterrupt) as error:
            # The trace of a failed hook is in log.txt.
            if folder in made and not (folder / METRICS).exists() and not isinstance(error, HookError):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    for path in made[1:]:
                        path.rmdir()
            raise


def _damage(folder: Path, resume_from: Path | None) -> Iterator[str]:
    """Yield a line for each file of the run that is missing or damaged, and that the run can do without."""
    if resume_from is not None and not (folder / METRICS).exists():
        yield f"{folder / METRICS} is missing: the rows up to {resume_from.name} are lost; the run resumes and writes the rest"
        (folder / METRICS).touch()
    for name, use in ((statuses.NAME, "it is written again"), (ENVIRONMENT, "it is left as it is; log.txt has newer ones")):
        file = folder / name
        try:
            if file.exists():
                json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            yield f"{file} is damaged; {use}"


@contextlib.contextmanager
def _kept(status: Status) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(status.kept())
        except OSError as error:
            raise _unwritable(status.folder, error) from None
        yield


@contextlib.contextmanager
def _entered(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            atomic.make_folders(folder)
            stack.enter_context(lock.held(folder))
        except OSError as error:
            raise _unwritable(folder, error) from None
        yield


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"out: cannot write to {folder}: {error.strerror}; choose another folder with out=...")


def prepare(
    out: Path, cfg: DictConfig, overrides: list[str], resume_from: Path | None, identity: Identity
) -> tuple[list[str], list[str]]:
    """Writes ``config.yaml`` and ``environment.json``, once it is sure that an earlier run goes on as the same run.

    Returns:
        What the log should say of this sitting: its environment, and what has changed since the one before; and the changes
        of what the one before knew, as the terminal should have them.

    Raises:
        ConfigError: the folder cannot be written, or the run in it, or the checkpoint, has another identity.
    """
    resolved = plain(cfg) | {"out": None, "resume": "auto"}  # running it again makes a new folder
    earlier = _compared(out, resume_from, identity)
    found = environment(overrides)
    try:
        if earlier != resolved:
            atomic.write_text(out / CONFIG, OmegaConf.to_yaml(OmegaConf.create(resolved)))
        if resume_from is None:  # of a run that goes on, the first sitting's stays and log.txt has the others
            atomic.write_text(out / ENVIRONMENT, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise _unwritable(out, error) from None
    before = earlier or resolved
    with contextlib.suppress(ConfigError):  # of the run that this one branches off: its checkpoint has been compared
        before = earlier or _config_of(_run_of(resume_from)) or resolved
    changes = list(differences("", before, resolved))
    notes = [json.dumps(found), *_last_sitting(out), *(_change(*change) for change in changes)]
    return notes, [f"{name} {_short(then)} -> {_short(now)}" for name, then, now in changes if then is not MISSING]


def _compared(out: Path, resume_from: Path | None, identity: Identity) -> dict[str, Any] | None:
    """The configuration of the run in ``out``, if there is one.

    Raises:
        ConfigError: that run, or the checkpoint, has another identity.
    """
    earlier = _config_of(out)
    if earlier is not None:
        identity.compare_config(f"the run in {out}", earlier)
    if resume_from is not None:
        identity.compare_checkpoint(resume_from)
    return earlier


def _change(name: str, then: Any, now: Any) -> str:
    if then is MISSING:
        return f"{name}: not in the run's configuration, which an earlier version wrote, so it had its default; now {now!r}"
    return f"{name}: {then!r} before, now {now!r}"


def _short(value: Any) -> str:
    """A value for one line among others."""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _last_sitting(out: Path) -> list[str]:
    """How it ended. Nobody but this process is in the folder, so one that says it is running was killed."""
    last = statuses.read(out)
    if last is None:
        return []
    ended = "killed" if last.get("state") == statuses.RUNNING else last.get("state")
    return [f"the last sitting here (pid {last.get('pid')}) was {ended} after step {last.get('step')}"]


def plain(cfg: Any) -> dict[str, Any]:
    """A configuration as dicts and lists, interpolations resolved."""
    found = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _config_of(run: Path | None) -> dict[str, Any] | None:
    return load_config(run) if run and (run / CONFIG).is_file() else None


def load_config(run: Path) -> dict[str, Any]:
    """Return the configuration of the run in the folder ``run``.

    Raises:
        ConfigError: the file is damaged, or not the configuration of a run.
    """
    file = run / CONFIG
    try:
        found = OmegaConf.load(file)
        if not isinstance(found, DictConfig) or not OmegaConf.select(found, "recipe.name"):
            raise ValueError("recipe.name is missing")
        return plain(found)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{file}: is damaged: {reason}; restore the file, or resume the run in another folder: "
            f"resume={run} out=<new folder>"
        ) from None


def resume_command(out: Path) -> str:
    """How to go on with the run in ``out``, whatever made it."""
    return shlex.join(["cookbook", "train", "--config", str(out / CONFIG), f"out={quoted(str(out))}"])


def quoted(value: str) -> str:
    """The text as the value of an override: Hydra needs quotes around anything but plain words and paths."""
    return value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "\\'") + "'"


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment: a live display replaces the stream, to keep its own lines below."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """While it is entered, warnings of cookbook go to the terminal, and no message anywhere but where this module sends it."""
    terminal = _Terminal()
    terminal.setLevel(logging.WARNING)
    terminal.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(terminal)
    try:
        yield
    finally:
        log.removeHandler(terminal)
        log.propagate = True


@contextlib.contextmanager
def logging_to(out: Path) -> Iterator[None]:
    """While it is entered, messages of cookbook go to ``log.txt``. A disk that is full stops the run elsewhere, in one line."""
    try:
        file = logging.FileHandler(out / "log.txt", encoding="utf-8")
    except OSError as error:
        raise _unwritable(out / "log.txt", error) from None
    file.handleError = lambda record: None  # type: ignore[method-assign]
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    except BaseException as error:
        log.info("ended by %s", type(error).__name__, exc_info=not isinstance(error, KeyboardInterrupt | HookError))
        raise
    else:
        log.info("finished")
    finally:
        log.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()
