"""Functions of the commands over Hydra: run a job or a sweep, show a configuration, complete a word.

Hydra's own ``@hydra.main`` parses ``sys.argv`` itself, ranks the packaged conf above the user's, and answers a mistyped
key with eight lines. This package calls the object behind it, so hydra-core is pinned below 1.4; a test compares what both
compose.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cookbook.cli.hydra import conf_files, errors, own_file
from cookbook.cli.hydra.composer import PLAIN_GROUPS, PROBLEMS, QUIET, Composer, ComposeRequest, opened
from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError, CookbookError
from cookbook.utils.paths import SWEEP

__all__ = ["ComposeRequest", "complete", "complete_override", "explain_options", "info", "run", "show"]

FAILURE_RATE = "hydra.sweeper.max_failure_rate"
Job = Callable[[DictConfig, list[str]], object]
"""A function of the composed configuration and the overrides that led to it. A sweeper gets the number that it returns."""


@dataclass(frozen=True)
class Failed:
    """The return value of a sweep's job after an error that the user can fix, so that the other jobs run.

    It has the error's text alone: the error's traceback would keep the run's model in memory until the sweep ends.
    """

    message: str


def _called(job: Job, cfg: DictConfig) -> object:
    overrides = _typed(HydraConfig.get())
    _refuse_unresolved(cfg)
    return job(_with_nulls(cfg, overrides), overrides)


def _typed(settings: DictConfig) -> list[str]:
    """Return the overrides of a job as typed: an override may hold an interpolation, which is not one of this list."""
    return list(OmegaConf.to_container(settings.overrides.task, resolve=False))  # type: ignore[arg-type]


def _refuse_unresolved(cfg: DictConfig) -> None:
    """Raise ConfigError for an interpolation that does not resolve, and for a top-level key without a value."""
    try:
        OmegaConf.to_container(cfg, resolve=True)
        missing = next((str(key) for key in cfg if OmegaConf.is_missing(cfg, key)), None)
    except OmegaConfBaseException as error:
        raise ConfigError(errors.unresolved(error)) from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"an interpolation of the configuration does not resolve: {error}; check its ${{...}}") from None
    if missing is not None:
        raise ConfigError(f"{missing}: no value, got ???; write {missing}=VALUE")


@dataclass
class SweepTask:
    """The function that Hydra calls for each job of a sweep, in this process or in a launcher's."""

    job: Job
    # Of the jobs in this process.
    finished: int = 0
    failed: int = 0

    def __call__(self, cfg: DictConfig) -> object:
        settings = HydraConfig.get()
        name = f"run {settings.job.num + 1}"
        print(f"{name}: {' '.join(_typed(settings))}", file=sys.stderr, flush=True)
        optimizing = _is_optimizing(settings)
        try:
            value = _called(self.job, cfg)
            if optimizing:
                _check_objective(cfg, value)
            self.finished += 1
            return value
        except CookbookError as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed = Failed(str(error))
            self.failed += 1
        if optimizing:
            # Outside of `except`, so that the error keeps no traceback of the run.
            raise CookbookError(failed.message)
        return failed

    def check_finished(self) -> None:
        """Raise CookbookError if every trial has failed."""
        if self.failed and not self.finished:
            raise CookbookError(f"all {self.failed} trials failed; see the error of each above") from None


def _is_optimizing(settings: DictConfig) -> bool:
    """Whether a sweeper plugin reads the jobs' numbers. It has to see a failed job's error, by which Hydra's own would stop."""
    return bool(settings.sweeper[TARGET] != f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}")


def _with_nulls(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Set a group dropped with ``~group`` to null, so that its reader reports it in better words than a missing key."""
    for word in overrides:
        key = word.removeprefix("~").partition("=")[0]
        if word.startswith("~") and "." not in key and key not in (*cfg, *PLAIN_GROUPS):
            with open_dict(cfg):
                cfg[key] = None
    return cfg


def run(request: ComposeRequest, job: Job) -> object:
    """Compose the configuration and run ``job``, once or for every point of a sweep. Return the result of a single run.

    Raises:
        CookbookError: the configuration is wrong (then no job has run), or a job failed; for a sweep, a summary.
    """
    with opened(request) as composer:
        conf_files.note_shadowed("conf", [f"{composer.name}.yaml"])
        with composer.explained():
            cfg = composer.compose(RunMode.MULTIRUN if composer.multirun else RunMode.RUN)
            multirun = composer.multirun or cfg.hydra.mode == RunMode.MULTIRUN
            if multirun:
                composer.refuse_shared_folder(cfg)
                _refuse_wrong_direction(cfg)
        for note in composer.notes:
            print(note, file=sys.stderr)
        choices = cfg.hydra.runtime.choices.items()
        conf_files.note_shadowed("conf", (f"{group.partition('@')[0]}/{option}.yaml" for group, option in choices))
        conf_files.note_shadowed("recipes", [f"{OmegaConf.select(cfg, 'recipe.name')}.py"])
        if composer.missing:
            print(f"{composer.config_file} takes defaults for {', '.join(composer.missing)}", file=sys.stderr)
        if not multirun:
            with _located(composer):
                return composer.run(cfg, functools.partial(_called, job))
        _sweep(composer, cfg, job, _is_optimizing(cfg.hydra))
        return None


def _is_set(key: str, overrides: Sequence[str]) -> bool:
    return any(word.lstrip("+").partition("=")[0] == key for word in overrides)


@contextlib.contextmanager
def _located(composer: Composer) -> Iterator[None]:
    """Add the file and line of a key to an error about the key's value."""
    try:
        yield
    except ConfigError as error:
        text = composer.located(str(error))
        if text == str(error) or type(error) is not ConfigError:
            raise
        raise ConfigError(text) from error


def _sweep(composer: Composer, cfg: DictConfig, job: Job, optimizing: bool) -> None:
    folder = Path("runs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    settings = [*QUIET, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    if optimizing and cfg.hydra.sweeper.get("max_failure_rate") == 0 and not _is_set(FAILURE_RATE, composer.overrides):
        # A trial that has diverged is recorded as failed, and the study continues.
        settings.append(f"{FAILURE_RATE}=1.0")
    task = SweepTask(job)
    # Processes of a launcher inherit the variable.
    os.environ[SWEEP] = folder.name
    try:
        batches = composer.hydra.multirun(composer.name, task, [*settings, *composer.overrides])
    except PROBLEMS as error:
        if optimizing:
            # A study without a finished trial has no best one, which its sweeper reports in its own words.
            task.check_finished()
        if not isinstance(error, HydraException | YAMLError) and not errors.is_hydras(error):
            # A recipe's own ValueError is a bug, and keeps its trace.
            raise
        raise ConfigError(errors.explain(error, composer.keys)) from error
    except OSError as error:
        # An error in a file of a run is a bug, and keeps its trace.
        if not isinstance(error.filename, str) or not folder.is_relative_to(error.filename):
            raise
        raise ConfigError(f"sweep: cannot write to {folder}: {error.strerror}; run the command in a writable folder") from None
    finally:
        del os.environ[SWEEP]
        _tidy(folder)
    if optimizing:
        # A sweeper plugin handles failed jobs itself, and its return value is not defined.
        if folder.is_dir():
            print(f"sweep: {folder} has {', '.join(sorted(path.name for path in folder.iterdir()))}", flush=True)
        task.check_finished()
        return
    returned = [result.return_value for batch in batches for result in batch]
    failed = [outcome for outcome in returned if isinstance(outcome, Failed)]
    if failed:
        raise CookbookError(f"{len(failed)} of {len(returned)} runs failed: {failed[0].message}")


def _tidy(folder: Path) -> None:
    """Delete Hydra's record of the sweep, because every run has its own. A launcher's files stay."""
    with contextlib.suppress(OSError):
        (folder / "multirun.yaml").unlink()
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):
            empty.rmdir()


def _refuse_wrong_direction(cfg: DictConfig) -> None:
    """Raise ConfigError if the sweeper would look for the worst run: Optuna minimizes by default, most metrics should grow."""
    direction = OmegaConf.select(cfg, "hydra.sweeper.direction")
    if direction is None:
        return
    # This module imports numpy, which only a sweep may load.
    from cookbook.sampling.evaluation import is_better_higher

    direction = getattr(direction, "name", direction)
    metric = OmegaConf.select(cfg, "eval.objective")
    higher = metric is None or is_better_higher(metric)
    if higher and direction == "minimize":
        raise ConfigError(
            f"hydra.sweeper.direction: minimize would look for the lowest {metric or 'accuracy'}; "
            "set hydra.sweeper.direction=maximize, or eval.objective=eval/loss"
        )
    if metric == "eval/loss" and direction == "maximize":
        raise ConfigError("hydra.sweeper.direction: maximize would look for the highest eval/loss; set it to minimize")


def _check_objective(cfg: DictConfig, value: object) -> None:
    """Raise ConfigError for a job without a finite number: Optuna's sweeper breaks at NaN, and no sweeper can use None."""
    name = OmegaConf.select(cfg, "eval.objective") or "an accuracy, a reward or a margin of held-out rows"
    if not isinstance(value, float | int):
        raise ConfigError(f"eval.objective: the run has not reported {name}; choose another metric")
    if not math.isfinite(value):
        raise ConfigError(f"eval.objective: the last value of {name} is {value}, so the sweeper cannot use the run")


def show(request: ComposeRequest, part: str, *, resolve: bool = False, package: str | None = None) -> str:
    """Return the composed configuration as YAML: ``part`` is ``job``, ``hydra`` or ``all``; ``package`` picks one node."""
    with opened(request) as composer, composer.explained():
        cfg = composer.compose(RunMode.RUN)
        # ${hydra:...} reads from there.
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_readonly(cfg.hydra, None)
        node = composer.hydra.get_sanitized_cfg(cfg, part)
        if package is not None and package != "_global_":
            node = OmegaConf.select(node, package)
            if node is None:
                raise ConfigError(errors.unknown_key(package, composer.keys))
        if not isinstance(node, Container):
            return f"{node}\n"
        header = f"# @package {package}\n" if package else ""
        return header + OmegaConf.to_yaml(node, resolve=resolve)


def info(request: ComposeRequest, topic: str) -> None:
    """Print the sources of the configuration: ``searchpath``, ``defaults``, ``defaults-tree``, ``plugins``, ..."""
    with opened(request) as composer, composer.explained(), _logging_restored():
        mode = RunMode.MULTIRUN if composer.multirun else RunMode.RUN
        # Completes the overrides of the composer.
        composer.compose(mode)
        composer.hydra.show_info(topic, config_name=composer.name, overrides=composer.overrides, run_mode=mode)


def explain_options(arguments: Sequence[str], known: Mapping[str, bool], config_name: str) -> str | None:
    """Return one line for overrides that were typed as options, such as ``--optim.lr 1e-4``; None if no key fits any of them.

    Args:
        arguments: the words after the command's name.
        known: the command's own options; whether each is followed by a value.
    """
    options, plain = errors.split_options(arguments, known)
    groups = [f"{name.lstrip('-')}={value}" for name, value in options.items()]
    # Options may be groups, such as --model tiny. If they are not, the configuration does not compose with them.
    for overrides in ([*plain, *groups], plain):
        with contextlib.suppress(CookbookError), opened(ComposeRequest(overrides, config_name=config_name)) as composer:
            return errors.unknown_options(options, composer.keys)
    return errors.unknown_options(options, errors.Keys(list))


def complete(request: ComposeRequest, word: str) -> list[str]:
    """Return the overrides that ``word`` can become, given those before it; empty if these do not compose."""
    with contextlib.suppress(CookbookError, *PROBLEMS), opened(request) as composer:
        # Hydra's own entry point parses the line with argparse, which Python 3.14 refuses; these two are behind it.
        plugin = DefaultCompletionPlugin(composer.hydra.config_loader)
        words = composer.overrides
        matches, of_a_group = plugin._query_config_groups(word, config_name=composer.name, words=words)
        if not of_a_group:
            cfg = composer.hydra.compose_config(composer.name, words, RunMode.MULTIRUN)
            matches = [*matches, *plugin._get_matches(cfg, word)]
        hidden = tuple(group for group in ("hydra", "demo") if not word.startswith(group))
        visible = {match for match in matches if not match.startswith(hidden)}
        return sorted(match for match in visible if not match.endswith("._target_=") and "=_" not in match)
    return []


def complete_override(words: Sequence[str], incomplete: str, config_dirs: Sequence[Path]) -> list[str]:
    """Return the rest of each override that the last word can become, in the form that the shell expects."""
    before, head = rejoin(words, incomplete)
    matches = complete(ComposeRequest(before, config_dirs=config_dirs), head + incomplete)
    return [match[len(head) :] for match in matches] + ([] if head or "=" in incomplete else _own_files(incomplete))


def _own_files(incomplete: str) -> list[str]:
    """Return the YAML files whose path begins with the word."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    candidates = (str(path) for suffix in own_file.SUFFIXES for path in folder.glob(f"*{suffix}"))
    return sorted(path for path in candidates if path.startswith(incomplete))


def rejoin(words: Sequence[str], incomplete: str) -> tuple[list[str], str]:
    """Undo bash's splitting at ``=``: the whole words before the cursor, and the part of the last that bash keeps.

    ``["recipe", "=", "grpo", "optim.lr", "="]`` are ``["recipe=grpo"]`` and ``"optim.lr="``. Typer drops a lone ``=``
    under the cursor, so a word without ``=`` is followed by one: only ``~group`` is an override without ``=``.
    """
    joined: list[str] = []
    for word in words:
        if joined and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
    last = joined[-1] if joined else ""
    if last.endswith("="):
        return joined[:-1], last
    if last and "=" not in last and not last.startswith("~") and not incomplete:
        return joined[:-1], f"{last}="
    return joined, ""


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    """Hydra prints its info through the root logger, and leaves its handler there, which would report a broken pipe."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    reports, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = reports
        root.handlers[:] = handlers
        root.setLevel(level)
