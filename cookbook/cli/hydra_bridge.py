"""The only module that knows Hydra: overrides go in, composed configurations come out, one run or a sweep of them.

Hydra's own ``@hydra.main`` parses ``sys.argv`` itself, puts the packaged conf before the user's, and answers a typing
error with eight lines. This adapter drives the object that stands behind it, which is why hydra-core is pinned below
1.4; a test compares what both compose.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.plugins.completion_plugin import DefaultCompletionPlugin
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from cookbook import config, paths  # noqa: F401 - config registers ${cookbook:...}
from cookbook.cli import conf_defaults, messages, names, objective, shadows, shorthand
from cookbook.environment import SWEEP
from cookbook.errors import ConfigError, CookbookError
from cookbook.suggest import did_you_mean
from cookbook.typed import TARGET

Job = Callable[[DictConfig, list[str]], float | None]
"""A function of the composed configuration and the overrides that led to it. A sweeper gets the number that it returns."""

RERUN = "config-of-an-earlier-run"
PROBLEMS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)

# The run's folder is the session's business: Hydra writes nothing, changes no folder and sets up no logging.
QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True)
class Request:
    """What was typed behind ``cookbook train``."""

    overrides: Sequence[str] = ()
    multirun: bool = False
    config_dirs: Sequence[Path] = ()
    config_name: str = "train"
    config_file: Path | None = None  # the resolved configuration of an earlier run, instead of config_name


@dataclass(frozen=True)
class Raised:
    """What a job returns for any other error. Hydra would put a line of its own before the trace."""

    error: Exception


@dataclass(frozen=True)
class Failed:
    """The return value of a job after an error that the user can fix, so that the other jobs of a sweep run.

    It has the error's text alone: the error's traceback would keep the run's model in memory until the sweep ends.
    """

    message: str


def run(request: Request, job: Job) -> None:
    """Composes and runs ``job``, once or for every point of a sweep.

    Raises:
        CookbookError: a wrong configuration (nothing has run then), or what the job raised; for a sweep a summary.
    """
    with _composer(request) as composer:
        shadows.note_conf([composer.name])
        with composer.explained():
            cfg = composer.compose(RunMode.MULTIRUN if composer.multirun else RunMode.RUN)
            multirun = composer.multirun or cfg.hydra.mode == RunMode.MULTIRUN
            if multirun:
                composer.refuse_shared_folder(cfg)
                objective.refuse_wrong_direction(cfg)
        for note in composer.notes:
            print(note, file=sys.stderr)
        shadows.note_conf(f"{group.partition('@')[0]}/{option}" for group, option in cfg.hydra.runtime.choices.items())
        shadows.note_recipe(OmegaConf.select(cfg, "recipe.name"))
        if composer.missing:
            print(f"{request.config_file} takes defaults for {', '.join(composer.missing)}", file=sys.stderr)
        if multirun:
            _sweep(composer, job, _is_optimizing(cfg.hydra))
        else:
            returned = composer.run(cfg, _Task(job))
            if isinstance(returned, Failed):
                raise CookbookError(returned.message)
            if isinstance(returned, Raised):
                raise returned.error


def show(request: Request, part: str, *, resolve: bool = False, package: str | None = None) -> str:
    """The composed configuration as YAML: ``part`` is ``job``, ``hydra`` or ``all``; ``package`` picks one node."""
    with _composer(request) as composer, composer.explained():
        cfg = composer.compose(RunMode.RUN)
        HydraConfig.instance().set_config(cfg)  # ${hydra:...} reads from there
        OmegaConf.set_readonly(cfg.hydra, None)
        node: Any = composer.hydra.get_sanitized_cfg(cfg, part)
        if package is not None and package != "_global_":
            node = OmegaConf.select(node, package)
            if node is None:
                raise ConfigError(messages.unknown_key(package, composer.keys))
        if not isinstance(node, Container):
            return f"{node}\n"
        header = f"# @package {package}\n" if package else ""
        return header + OmegaConf.to_yaml(node, resolve=resolve)


def info(request: Request, topic: str) -> None:
    """Prints how the configuration comes about: ``searchpath``, ``defaults``, ``defaults-tree``, ``plugins``, ..."""
    with _composer(request) as composer, composer.explained(), _logging_restored():
        mode = RunMode.MULTIRUN if composer.multirun else RunMode.RUN
        composer.compose(mode)  # it completes the overrides
        composer.hydra.show_info(topic, config_name=composer.name, overrides=composer.overrides, run_mode=mode)


def explain_options(arguments: Sequence[str], known: Mapping[str, bool], config_name: str) -> str | None:
    """One line for overrides that were typed as options, such as ``--optim.lr 1e-4``; None if no key answers to any of them.

    Args:
        arguments: the words behind the command's name.
        known: the command's own options; whether each is followed by a value.
    """
    options, plain = names.unknown_options(arguments, known)
    groups = [f"{name.lstrip('-')}={value}" for name, value in options.items()]
    for overrides in ([*plain, *groups], plain):  # with the groups that were typed as options, if they are groups
        with contextlib.suppress(CookbookError), _composer(Request(overrides, config_name=config_name)) as composer:
            return messages.unknown_options(options, composer.keys)
    return messages.unknown_options(options, messages.Keys(list))


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind ``error``: one that falls into OmegaConf's own clearing up comes out as an error of that."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def complete(request: Request, word: str) -> list[str]:
    """The overrides that ``word`` can become, given those before it. Empty when they make no configuration."""
    with contextlib.suppress(CookbookError, *PROBLEMS), _composer(request) as composer:
        # Hydra's own entry point parses the line with argparse, which Python 3.14 refuses; these two are behind it.
        plugin = DefaultCompletionPlugin(composer.hydra.config_loader)
        words = composer.overrides
        found, of_a_group = plugin._query_config_groups(word, config_name=composer.name, words=words)
        if not of_a_group:
            cfg = composer.hydra.compose_config(composer.name, words, RunMode.MULTIRUN)
            found = [*found, *plugin._get_matches(cfg, word)]
        hidden = tuple(group for group in ("hydra", "demo") if not word.startswith(group))
        return sorted({match for match in found if not match.startswith(hidden) and not match.endswith("._target_=")})
    return []


class _Composer:
    """One Hydra with our search path, and the messages that go with it."""

    def __init__(self, request: Request, hydra: Hydra) -> None:
        self.hydra = hydra
        self.overrides = list(request.overrides)
        self.name = request.config_name
        self.keys = messages.Keys(self.known_keys, "serve" if self.name == "serve" else "train", self.overrides)
        self.missing: dict[str, Any] = {}  # top-level keys that an earlier run's configuration does not have yet
        self.replaced: set[str] = set()  # groups whose component the command line writes out
        self.multirun = request.multirun or "hydra.mode=MULTIRUN" in request.overrides
        self.notes: list[str] = []  # what the command line was taken to mean
        with self.explained():
            self._spell_out()
            self.overrides = self._components_written_out()
            if self.replaced & set(shorthand.NEUTRAL) and request.config_file is None and self.name != "serve":
                self.overrides.append("demo@_global_=none")  # its file is named after a preset, and there is none
            if request.config_file is not None:
                self.name = RERUN
                self._store(request.config_file)

    def compose(self, mode: RunMode) -> DictConfig:
        """The configuration, once it is sure that every override means something."""
        self._refuse_added_keys()
        self._refuse_unknown_inside()
        cfg: DictConfig = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        found = self._replacements(cfg)
        self.notes += found.notes
        if found.overrides:
            self.overrides += found.overrides
            cfg = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        self._refuse_unknown_demo(cfg.hydra.runtime.choices.get("demo"))
        return cfg

    def run(self, cfg: DictConfig, task: _Task) -> Any:
        """What ``Hydra.run`` does with a configuration, without composing it once more: that takes a tenth of a second."""
        cfg.hydra.mode = RunMode.RUN
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=self.name)
        context = HydraContext(config_loader=self.hydra.config_loader, callbacks=callbacks)
        returned = run_job(task, cfg, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=cfg, config_name=self.name, job_return=returned)
        return returned.return_value

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong inside becomes a ConfigError of one line."""
        try:
            yield
        except CookbookError:
            raise
        except PROBLEMS as error:
            if _is_interrupt(error):
                raise KeyboardInterrupt from error
            raise ConfigError(messages.explain(error, self.keys)) from error

    def known_keys(self) -> list[str]:
        """Every key of the configuration that the chosen groups make, without the values that were typed."""
        with contextlib.suppress(*PROBLEMS):
            choices = [override.input_line for override in self._parsed() if self._is_choice(override)]
            for overrides in (choices, []):
                with contextlib.suppress(*PROBLEMS):
                    cfg = self.hydra.compose_config(self.name, overrides, RunMode.MULTIRUN)
                    return list(_flat(self.hydra.get_sanitized_cfg(cfg, "job")))
        return []

    def refuse_shared_folder(self, cfg: DictConfig) -> None:
        """In a sweep, a fixed ``out`` would make every run after the first go on with the first one's checkpoints."""
        swept = [override.key_or_group for override in self._parsed() if override.is_sweep_override()]
        out = OmegaConf.select(cfg, "out")
        if swept and out and "out" not in swept and not OmegaConf.is_interpolation(cfg, "out"):
            raise ConfigError(f"out: every run would write to {out}; drop it, or write 'out={out}/${{{swept[0]}}}'")

    def _refuse_unknown_demo(self, demo: str | None) -> None:
        """The demo's values are optional in the defaults list, so Hydra takes any name for them."""
        known = [shorthand.NO_DEMO.partition("=")[2], *self.hydra.config_loader.list_groups("demo")]
        if demo is not None and demo not in known:
            raise ConfigError(f"unknown demo {demo!r}.{did_you_mean(demo, known)} (choices: {', '.join(known)})")

    def _spell_out(self) -> None:
        """Write ``model=owner/name`` as ``model=hf model.name=owner/name``, and so on; see :mod:`cookbook.cli.shorthand`."""
        parsed = zip(self.overrides, self._parsed(), strict=True)
        words = [(word, one.key_or_group if self._is_choice(one) else "", _texts(one)) for word, one in parsed]
        self.overrides, self.notes = shorthand.spelled_out(words, self._is_preset)

    def _is_preset(self, group: str, value: str) -> bool:
        folder, _, name = f"{group}/{value}".rpartition("/")
        return name in self.hydra.config_loader.get_group_options(folder)

    def _replacements(self, cfg: DictConfig) -> shorthand.Replacements:
        """Return the overrides that keep every value of the shipped model and data from another model and other data."""
        parsed = self._parsed()
        nodes: dict[str, Any] = {
            group: OmegaConf.to_container(cfg[group]) for group in shorthand.NEUTRAL if isinstance(cfg.get(group), DictConfig)
        }
        typed = {override.key_or_group for override in parsed if self._is_choice(override) or override.key_or_group == "demo"}
        swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
        return shorthand.replacements(cfg.hydra.runtime.choices, nodes, typed, swept)

    def _refuse_added_keys(self) -> None:
        """Hydra takes any ``+key=value``; at the top level nothing would read it. Inside a group its class checks."""
        added = [override for override in self._parsed() if override.is_add() or override.is_force_add()]
        keys = [override.key_or_group for override in added if not self._is_group(override.key_or_group)]
        known = self.known_keys() if keys else []
        for key in keys:
            if known and key.partition(".")[0] not in {*known, "hydra"}:
                raise ConfigError(messages.unknown_key(key, self.keys))

    def _store(self, path: Path) -> None:
        """Makes an earlier run's configuration the top one. A group that is chosen anew replaces the file's."""
        if not path.is_file():
            raise ConfigError(f"--config: there is no file {path}; a run writes its own as <out>/config.yaml")
        try:
            loaded = OmegaConf.to_container(OmegaConf.load(path))
        except (UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
            _refuse_damaged(path)
            if not isinstance(error, UnicodeDecodeError):
                raise
            raise ConfigError(f"--config: {path} is damaged, it is not UTF-8 text; restore the file") from None
        if not isinstance(loaded, dict) or not isinstance(loaded.get("recipe"), dict):
            _refuse_damaged(path)
        if not isinstance(loaded, dict):
            raise ConfigError(f"--config: {path} holds no keys; a run writes its own as <out>/config.yaml")
        if not isinstance(loaded.get("recipe"), dict):
            raise ConfigError(f"--config: {path} has no key recipe; a run writes a whole configuration as <out>/config.yaml")
        groups = {override.key_or_group for override in self._parsed() if self._is_choice(override)} | self.replaced
        if "recipe" in groups:
            raise ConfigError("--config: recipe= chooses the other groups too, and they are settled here; drop one of them")
        kept = {str(key): value for key, value in loaded.items() if key not in groups}
        recipe = OmegaConf.select(OmegaConf.create(loaded), "recipe.name")
        self.missing = {key: value for key, value in conf_defaults.composed(str(recipe)).items() if key not in {*kept, *groups}}
        kept |= self.missing
        defaults = ["_self_", *({group: None} for group in sorted(groups))]
        ConfigStore.instance().store(RERUN, {"defaults": defaults, **kept})

    def _parsed(self) -> list[Override]:
        return list(OverridesParser.create().parse_overrides(self.overrides))

    def _is_choice(self, override: Override) -> bool:
        return _is_plain(override) and not isinstance(override.value(), dict) and self._is_group(override.key_or_group)

    def _components_written_out(self) -> list[str]:
        """The overrides, with components such as ``tracker={mine: {_target_: ...}}`` in the form that Hydra accepts.

        Hydra merges a mapping into the chosen option, whose keys are the only ones allowed. A component of its own class
        takes the option's place; named components, as of ``tracker`` and ``hook``, come in addition.
        """
        words = []
        for override in self._parsed():
            key, value, word = override.key_or_group, override.value(), override.input_line
            written_out = _is_plain(override) and isinstance(value, dict)
            if written_out and TARGET in value and self._is_group(key):
                self.replaced.add(key)
                words.append(f"~{key}")
            named = [item for item in value.values() if isinstance(item, dict) and TARGET in item] if written_out else []
            words.append(f"+{word}" if written_out and (TARGET in value or named) else word)
        return words

    def _refuse_unknown_inside(self) -> None:
        """Names the key of a mapping such as ``optim={lrr: 1}`` that nothing reads; Hydra names the group alone."""
        written_out = [override for override in self._parsed() if _is_plain(override) and isinstance(override.value(), dict)]
        known = set(self.known_keys()) if written_out else set()
        for override in written_out:
            inside = (f"{override.key_or_group}.{key}" for key in override.value())
            unknown = next((key for key in inside if known and key not in known), None)
            if unknown is not None and override.key_or_group in known:
                raise ConfigError(messages.unknown_key(unknown, self.keys))

    def _is_group(self, key: str) -> bool:
        return "." not in key and bool(self.hydra.config_loader.get_group_options(key))


def _refuse_damaged(path: Path) -> None:
    """Raise ConfigError if ``path`` is the damaged configuration of a run: the error says how to resume the run without it."""
    if path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
        from cookbook.runfolder import load_config  # imports torch

        load_config(path.parent)


def _is_plain(override: Override) -> bool:
    return not (override.is_add() or override.is_force_add() or override.is_delete())


def _texts(override: Override) -> list[str]:
    """The values of an override that are text: one, or those of a sweep over a list; none of any other."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return [text for one in values if isinstance(text := one.text if isinstance(one, QuotedString) else one, str)]


@contextlib.contextmanager
def _composer(request: Request) -> Iterator[_Composer]:
    version.setbase("1.3")  # without it Hydra warns, and changes into its run folder
    Plugins.instance()  # registers the sources of configuration
    try:
        yield _Composer(request, Hydra.create_main_hydra2("train", _search_path(request.config_dirs)))
    finally:
        GlobalHydra.instance().clear()


def _search_path(config_dirs: Sequence[Path]) -> ConfigSearchPathImpl:
    """The first folder that has a file wins: ``--config-dir``, then ``./conf``, then what ships with cookbook."""
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in config_dirs:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: there is no folder {folder}")
        path.append("command-line", f"file://{folder.resolve()}")
    for folder in paths.overlays("conf"):
        path.append("cookbook" if folder == paths.packaged("conf") else "user", f"file://{folder}")
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)
    path.append("schema", "structured://")
    return path


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


@dataclass
class _Task:
    """The function Hydra calls, here or in a launcher's process."""

    job: Job
    in_sweep: bool = False

    def __call__(self, cfg: DictConfig) -> float | Failed | Raised | None:
        settings = HydraConfig.get()
        overrides = list(settings.overrides.task)
        name = f"run {settings.job.num + 1}" if self.in_sweep else ""
        if self.in_sweep:
            print(f"{name}: {' '.join(overrides)}", file=sys.stderr, flush=True)
        optimizing = self.in_sweep and _is_optimizing(settings)
        try:
            value = self.job(_with_nulls(cfg, overrides), overrides)
            if optimizing:
                objective.check(cfg, value)
            return value
        except CookbookError as error:
            if self.in_sweep:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed = Failed(str(error))
        except Exception as error:
            if self.in_sweep:
                raise
            return Raised(error)
        if optimizing:
            raise CookbookError(failed.message)  # outside of `except`, so that it keeps no traceback of the run
        return failed


def _is_optimizing(settings: DictConfig) -> bool:
    """Whether a sweeper plugin reads the jobs' numbers. It has to see a failed job's error, by which Hydra's own would stop."""
    return bool(settings.sweeper[TARGET] != f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}")


def _with_nulls(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """A group dropped with ``~group`` is there as null: what reads it says so better than a missing key does."""
    for word in overrides:
        key = word.removeprefix("~").partition("=")[0]
        if word.startswith("~") and "." not in key and key not in cfg:
            with open_dict(cfg):
                cfg[key] = None
    return cfg


def _sweep(composer: _Composer, job: Job, optimizing: bool) -> None:
    folder = Path("runs") / f"sweep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    settings = [*QUIET, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    os.environ[SWEEP] = folder.name  # processes of a launcher inherit the variable
    try:
        batches = composer.hydra.multirun(composer.name, _Task(job, in_sweep=True), [*settings, *composer.overrides])
    except PROBLEMS as error:
        if not isinstance(error, HydraException | YAMLError) and not messages.is_hydras(error):
            raise  # a recipe's own ValueError is a bug, and keeps its trace
        raise ConfigError(messages.explain(error, composer.keys)) from error
    finally:
        del os.environ[SWEEP]
        _tidy(folder)
    if optimizing:  # a sweeper plugin judges failed jobs itself, and returns what it likes, mostly nothing
        if folder.is_dir():
            print(f"sweep: {folder} has {', '.join(sorted(path.name for path in folder.iterdir()))}", flush=True)
        return
    returned = [result.return_value for batch in batches for result in batch]
    failed = [outcome for outcome in returned if isinstance(outcome, Failed)]
    if failed:
        raise CookbookError(f"{len(failed)} of {len(returned)} runs failed: {failed[0].message}")


def _tidy(folder: Path) -> None:
    """Takes Hydra's record of the sweep away: every run keeps its own. A launcher's files stay."""
    (folder / "multirun.yaml").unlink(missing_ok=True)
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):
            empty.rmdir()


def _flat(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, those of nodes too."""
    for key, value in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(value, DictConfig):
            yield from _flat(value, f"{prefix}{key!s}.")
