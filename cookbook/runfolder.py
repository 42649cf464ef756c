"""The run folder: which one, what stands in it before the first step, and whether an earlier run in it may go on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cookbook import __version__
from cookbook.checkpoints import manifest, store
from cookbook.errors import CheckpointError, ConfigError, CookbookError

log = logging.getLogger("cookbook")

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
# A checkpoint goes on only under the same values of these; everything else may change between two sittings.
IDENTITY = ("recipe.name", "seed", "model", "loss", "data", "reward")
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "hydra-core", "omegaconf", "numpy")


def choose(out: str | None, resume: str, recipe: str, new_id: str) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint to go on from (None: from the start).

    A checkpoint of another run starts a branch: it needs a folder of its own.

    Raises:
        ConfigError: the folder is taken and ``resume`` is not ``auto``; or it holds something that is not a run.
        CheckpointError: ``resume`` names a path that is not a checkpoint or a run, or not the newest of the run in the folder.
    """
    checkpoint = None if resume in ("auto", "never") else _checkpoint(Path(resume))
    own_run = _run_of(checkpoint)
    folder = Path(out) if out else own_run or Path("runs") / f"{recipe}-{new_id}"
    if not _taken(folder):
        return folder, checkpoint
    newest = store.newest(folder / "checkpoints")
    if checkpoint and own_run and own_run.resolve() == folder.resolve():
        if newest and newest.resolve() != checkpoint.resolve():
            raise CheckpointError(
                f"resume: {checkpoint} is not the newest of its run, which is {newest.name}; "
                "choose out=<new folder> to branch off there, or delete the later ones"
            )
        return folder, checkpoint
    if resume != "auto":
        raise ConfigError(f"out: {folder} holds a run already; choose another folder, or resume=auto to go on with it")
    return folder, newest


def _run_of(checkpoint: Path | None) -> Path | None:
    """The run a checkpoint stands in; None for one that was moved elsewhere."""
    return checkpoint.parent.parent if checkpoint and checkpoint.parent.name == "checkpoints" else None


def _taken(folder: Path) -> bool:
    """Whether a run is in the folder.

    Raises:
        ConfigError: something else is.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"out: {folder} exists and is not a run of cookbook; choose another folder")
    return True


def _checkpoint(path: Path) -> Path:
    """The checkpoint that ``resume=PATH`` means: the path itself, or the newest of a run folder."""
    if (path / manifest.NAME).is_file():
        return path
    newest = store.newest(path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"resume: {path} is neither a checkpoint nor a run with one; expected auto, never or such a path")
    return newest


@contextlib.contextmanager
def opened(out: Path, cfg: DictConfig, overrides: list[str], resume_from: Path | None) -> Iterator[None]:
    """The folder with ``config.yaml``, ``environment.json`` and a log, while it is entered.

    A mistake that shows before the first row of metrics, or Ctrl-C, leaves nothing behind of a folder made here.

    Raises:
        ConfigError: the folder cannot be written, or holds a run with other identity.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        prepare(out, cfg, overrides, resume_from)
        with logging_to(out):
            log.info("%s", json.dumps(environment(overrides)))
            yield
    except (CookbookError, KeyboardInterrupt):
        if out in made and not (out / METRICS).exists():
            shutil.rmtree(out, ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in made[1:]:
                    folder.rmdir()
        raise


def prepare(out: Path, cfg: DictConfig, overrides: list[str], resume_from: Path | None) -> None:
    """Makes the folder and writes ``config.yaml`` and ``environment.json``; in a folder that has a run, checks it is the same.

    Raises:
        ConfigError: the folder cannot be written, or holds a run with other identity.
    """
    for run in (out, _run_of(resume_from)):
        if run is not None:
            _same_run(run, cfg)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict)
    resolved.update(out=None, resume="auto")  # running it again makes a new folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / CONFIG, OmegaConf.to_yaml(OmegaConf.create(resolved)))
        if resume_from is None:  # of a run that goes on, the first sitting's stays and log.txt has the others
            _write(out / ENVIRONMENT, json.dumps(environment(overrides), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"out: cannot write to {out}: {error.strerror}; choose another folder with out=...") from None


def _same_run(run: Path, cfg: DictConfig) -> None:
    earlier_file = run / CONFIG
    if not earlier_file.is_file():
        return
    earlier = OmegaConf.load(earlier_file)
    for key in IDENTITY:
        then, now = OmegaConf.select(earlier, key), OmegaConf.select(cfg, key)
        difference = _first_difference(key, _plain(then), _plain(now))
        if difference:
            name, before, after = difference
            raise ConfigError(
                f"{name}: the run in {earlier_file.parent} was made with {before!r}, now it is {after!r}; "
                "set it back to go on, or choose another out= to start anew"
            )


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _first_difference(key: str, then: Any, now: Any) -> tuple[str, Any, Any] | None:
    if isinstance(then, dict) and isinstance(now, dict):
        found = (_first_difference(f"{key}.{name}", then.get(name), now.get(name)) for name in {**then, **now})
        return next((difference for difference in found if difference), None)
    return None if then == now else (key, then, now)


def environment(overrides: list[str]) -> dict[str, Any]:
    """What a result may depend on besides the configuration."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["cookbook", "train", *overrides],
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {"cookbook": __version__, **{name: _version(name) for name in PACKAGES}},
        "git": _git_state(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit and whether files differ from it, when the current folder is in a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed_files": git("status", "--porcelain").splitlines()[:50]}
    except (OSError, subprocess.SubprocessError):
        return None


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    aside = path.with_suffix(".tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """While it is entered, warnings of cookbook go to the terminal, and no message anywhere but where this module sends it."""
    terminal = logging.StreamHandler()
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
    file = logging.FileHandler(out / "log.txt", encoding="utf-8")
    file.handleError = lambda record: None  # type: ignore[method-assign]
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    try:
        yield
    except BaseException as error:
        log.info("ended by %s", type(error).__name__, exc_info=True)
        raise
    else:
        log.info("finished")
    finally:
        log.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()
