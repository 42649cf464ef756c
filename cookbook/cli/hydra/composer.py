"""Composition: overrides of the command line become one configuration, and problems become one line each."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus, run_job
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

import cookbook.config.nodes  # noqa: F401 - registers ${cookbook:...}
from cookbook.cli.hydra import conf_files, errors, own_file, shorthand
from cookbook.cli.hydra.own_file import Entry, Groups, OwnFile
from cookbook.config import received
from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError, CookbookError
from cookbook.utils import paths
from cookbook.utils.signals import is_interrupt
from cookbook.utils.suggest import did_you_mean

RERUN = "config-of-an-earlier-run"
# Groups whose files set keys of the whole configuration.
PLAIN_GROUPS = ("local", "experiment", "debug")
PROBLEMS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)

# The run manages its own folder: Hydra writes no file, changes no folder and configures no logging.
QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True)
class ComposeRequest:
    """Arguments of ``cookbook train``."""

    # Overrides, and YAML files of the user, whose keys come before all overrides.
    overrides: Sequence[str] = ()
    multirun: bool = False
    config_dirs: Sequence[Path] = ()
    config_name: str = "train"
    # The same as a YAML file among the overrides. The configuration of an earlier run replaces config_name.
    config_file: Path | None = None
    # Whether config_file is of a folder that another person may have made: it is refused if it names foreign code.
    is_received: bool = False
    # Keys from Python, as those of a file.
    values: Mapping[str, object] = field(default_factory=dict)


@contextlib.contextmanager
def opened(request: ComposeRequest) -> Iterator[Composer]:
    # Without a version, Hydra warns and changes into its run folder.
    version.setbase("1.3")
    # Registers the sources of configuration.
    Plugins.instance()
    try:
        yield Composer(request, Hydra.create_main_hydra2("train", _search_path(request.config_dirs)))
    finally:
        GlobalHydra.instance().clear()


def _search_path(config_dirs: Sequence[Path]) -> ConfigSearchPathImpl:
    """Return the search path: ``--config-dir``, then ``./conf``, then the packaged conf. The first folder with a file wins."""
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in config_dirs:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: folder not found, got {folder}")
        path.append("command-line", f"file://{folder.resolve()}")
    for folder in paths.overlays("conf"):
        path.append("cookbook" if folder == paths.packaged("conf") else "user", f"file://{folder}")
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)
    path.append("schema", "structured://")
    return path


class Composer:
    """One Hydra with cookbook's search path and error messages."""

    def __init__(self, request: ComposeRequest, hydra: Hydra) -> None:
        self.hydra = hydra
        files = [Path(word) for word in request.overrides if own_file.is_file(word)]
        self.overrides = [shorthand.quoted(word) for word in request.overrides if not own_file.is_file(word)]
        self.name = request.config_name
        # Configuration of an earlier run that the run starts from.
        self.config_file: Path | None = None
        # Places of keys in the user's files, such as my.yaml:4, without those that the command line overrides.
        self.origins: dict[str, str] = {}
        self.keys = errors.Keys(self.known_keys, "serve" if self.name == "serve" else "train", self.overrides)
        # Top-level keys that the configuration of an earlier run lacks.
        self.missing: conf_files.Node = {}
        # Groups whose component the command line writes out.
        self.replaced: set[str] = set()
        self.multirun = request.multirun or "hydra.mode=MULTIRUN" in request.overrides
        # Overrides in place of a list of options.
        self._combined: list[str] = []
        # Interpretations of the command line, to print.
        self.notes: list[str] = []
        with self.explained():
            stored = self._add_files([*([request.config_file] if request.config_file else []), *files], request.values)
            self._spell_out()
            self.overrides = self._components_written_out()
            if self.replaced & set(shorthand.NEUTRAL) and stored is None and self.name != "serve":
                # The demo's file is named after presets, and a component that is written out has no preset.
                self.overrides.append("demo@_global_=none")
            if stored is not None:
                self.name = RERUN
                self._store(stored, is_received=request.is_received)
            elif request.is_received:
                raise ConfigError(f"{request.config_file}: is not the configuration of a run; restore the file")

    def compose(self, mode: RunMode) -> DictConfig:
        """Return the configuration. Raise ConfigError if an override has no effect."""
        self._refuse_unknown_keys()
        cfg: DictConfig = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        self._note_places(cfg)
        self._refuse_fresh_weights()
        overrides, notes = self._replacements(cfg)
        self.notes += notes
        if added := overrides + self._without_warmup(cfg):
            self.overrides += added
            cfg = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        self._refuse_unknown_demo(cfg.hydra.runtime.choices.get("demo"))
        self._refuse_unread_keys(cfg)
        return cfg

    def run(self, cfg: DictConfig, task: TaskFunction) -> object:
        """Run the task as ``Hydra.run`` does, but with a configuration that is already composed: composing takes 0.1 s.

        Return the task's result. Its errors are raised unchanged.
        """
        cfg.hydra.mode = RunMode.RUN
        callbacks = Callbacks(cfg)
        callbacks.on_run_start(config=cfg, config_name=self.name)
        context = HydraContext(config_loader=self.hydra.config_loader, callbacks=callbacks)
        returned = run_job(task, cfg, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=cfg, config_name=self.name, job_return=returned)
        # Hydra's property `return_value` would print a line above the error's trace.
        if returned.status == JobStatus.FAILED:
            raise returned._return_value
        return returned.return_value

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn every problem inside into a ConfigError of one line."""
        try:
            yield
        except ConfigError as error:
            if (text := self.located(str(error))) == str(error):
                raise
            raise ConfigError(text) from error
        except CookbookError:
            raise
        except AttributeError as error:
            # OmegaConf's error for a mapping as the value of a key that has none, such as hydra.sweeper.params.
            if (match := re.search(r"full_key: (hydra\S*)", str(error))) is None:
                raise
            raise ConfigError(
                f"{match[1]}: this sweeper has no such mapping; write lists as overrides, such as optim.lr=1e-4,2e-4 -m, or "
                "choose hydra/sweeper=optuna"
            ) from error
        except PROBLEMS as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            raise ConfigError(self._with_top_level(self.located(errors.explain(error, self.keys)))) from error

    def _with_top_level(self, message: str) -> str:
        """Return the message, and the user's file in place of the packaged top-level file, which may be another project's."""
        with contextlib.suppress(*PROBLEMS):
            if self.name != RERUN and (path := self._user_file(self.name)) is not None and path.name not in message:
                name = paths.shown(path)
                return f"{message}; {name} replaces the packaged file: rename it, or run the command in another folder"
        return message

    def located(self, message: str) -> str:
        """Return the message of an error with the file and line of the key that the message begins with, if a file set it."""
        return errors.located(message, self.origins)

    def known_keys(self) -> list[str]:
        """Return every key of the configuration of the chosen groups, without the overrides of single values."""
        with contextlib.suppress(*PROBLEMS):
            parsed = self._parsed()
            choices = [
                override.input_line for override in parsed if self._is_choice(override) or override.input_line in self._combined
            ]
            recipe = [word for word in choices if word.startswith("recipe=")]
            for overrides in (choices, recipe, []):
                with contextlib.suppress(*PROBLEMS):
                    cfg = self.hydra.compose_config(self.name, overrides, RunMode.MULTIRUN)
                    return list(_flat(self.hydra.get_sanitized_cfg(cfg, "job")))
        return []

    def refuse_shared_folder(self, cfg: DictConfig) -> None:
        """Raise ConfigError for a sweep with a fixed ``out``: every later run would resume the first run's checkpoints."""
        swept = [override.key_or_group for override in self._parsed() if override.is_sweep_override()]
        out = OmegaConf.select(cfg, "out")
        named = next(
            (
                _texts(override)
                for override in self._parsed()
                if override.key_or_group == "out" and override.is_sweep_override()
            ),
            [],
        )
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ConfigError(f"out: two runs of the sweep would write to {', '.join(twice)}; name each folder once")
        if swept and out and "out" not in swept and not OmegaConf.is_interpolation(cfg, "out"):
            raise ConfigError(f"out: every run would write to {out}; drop it, or write 'out={out}/${{{swept[0]}}}'")

    def _refuse_unknown_demo(self, demo: str | None) -> None:
        """Raise ConfigError for an unknown demo: it is optional in the defaults list, so Hydra accepts any name."""
        known = [shorthand.NO_DEMO.partition("=")[2], *self.hydra.config_loader.list_groups("demo")]
        if demo is not None and demo not in known:
            raise ConfigError(f"unknown demo {demo!r}.{did_you_mean(demo, known)} (choices: {', '.join(known)})")

    def _spell_out(self) -> None:
        """Write ``model=owner/name`` as ``model=hf model.name=owner/name``, and so on; see ``shorthand.py``."""
        words: list[tuple[str, str, Sequence[str]]] = []
        parsed = self._parsed()
        # A mapping of weights is merged into those of the parts; a list replaces them.
        replaced = {override.key_or_group for override in parsed if not isinstance(override.value(), dict)}
        for word, override in zip(self.overrides, parsed, strict=True):
            group, value = override.key_or_group if self._is_choice(override) else "", override.value()
            if group in shorthand.COMBINED and _has_list(value):
                options = [_text(option) for option in value] if isinstance(value, list) else None
                self._combined += shorthand.combined(group, options, f"{group}.weights" in replaced)
            else:
                words.append((word, group, _texts(override)))
        overrides, self.notes = shorthand.spelled_out(words, self._is_preset)
        # First, so that the command line may override values of the parts.
        self.overrides = [*self._combined, *overrides]

    def _is_preset(self, group: str, value: str) -> bool:
        folder, _, name = f"{group}/{value}".rpartition("/")
        return name in self._options(folder)

    def _replacements(self, cfg: DictConfig) -> tuple[list[str], list[str]]:
        """Return the overrides that keep the values of the shipped model and data from others, and notes for the user."""
        parsed = self._parsed()
        groups = [group for group in shorthand.NEUTRAL if isinstance(cfg.get(group), DictConfig)]
        nodes = {group: dict(cfg[group].items_ex(resolve=False)) for group in groups}
        typed = {override.key_or_group for override in parsed if self._is_choice(override) or override.key_or_group == "demo"}
        swept = {override.key_or_group for override in parsed if override.is_sweep_override()}
        return shorthand.replacements(cfg.hydra.runtime.choices, nodes, typed, swept)

    def _refuse_fresh_weights(self) -> None:
        """Raise ConfigError if one recipe of a sweep over recipes would train the demo's fresh weights on the user's data.

        A single run replaces them by the shipped weights; the overrides of a sweep are the same for all its recipes.
        """
        swept = next(
            (override for override in self._parsed() if override.key_or_group == "recipe" and override.is_sweep_override()),
            None,
        )
        settled = [override.input_line for override in self._parsed() if not override.is_sweep_override()]
        for name in _texts(swept) if swept else []:
            cfg = self.hydra.compose_config(self.name, [*QUIET, *settled, f"recipe={name}"], RunMode.MULTIRUN)
            if shorthand.SHIPPED_WEIGHTS in self._replacements(cfg)[0]:
                raise ConfigError(
                    f"model: recipe={name} starts from fresh weights, which suit its own data alone; add "
                    f"{shorthand.SHIPPED_WEIGHTS}, or {shorthand.YOURS}"
                )

    def _without_warmup(self, cfg: DictConfig) -> list[str]:
        """Return the override by which ``schedule.warmup_steps=0`` also switches off the recipe's ``warmup_ratio``.

        In a file, 0 steps leave the choice to the ratio: it is the default of the key, and in the files of earlier runs.
        """
        typed = {override.key_or_group: override for override in self._parsed()}
        steps, ratio = typed.get("schedule.warmup_steps"), "schedule.warmup_ratio"
        if steps is None or ratio in typed or not OmegaConf.select(cfg, ratio):
            return []
        return [f"{ratio}=null"] if steps.is_sweep_override() or steps.value() == 0 else []

    def _add_files(self, files: Sequence[Path], values: Mapping[str, object]) -> OwnFile | None:
        """Put the overrides of the user's files before those of the command line. Return the configuration of a run, if given.

        Of several files, a later one has precedence.
        """
        read = [own_file.read(path) if path.name != paths.RUN_CONFIG else _read_stored(path) for path in files]
        stored = read[0] if read and read[0].is_stored else None
        if stored is not None:
            self.config_file = files[0]
        own = [file for file in read if file is not stored]
        if any(file.is_stored for file in own):
            raise ConfigError(f"{own[0].name}: the configuration of a run comes first; put it before the other files")
        if values:
            own.append(OwnFile("", dict(values)))
        typed = self._parsed()
        if stored is not None:
            keys = {override.key_or_group for override in typed}
            self.origins |= {key: stored.where(key) for key in stored.lines if key not in keys}
        groups = Groups(self._is_group, lambda group: [name for name in self._options(group) if not name.startswith("_")])
        if self.name != "serve":
            own = [*self._plain_files(typed, groups, stored), *own]
        if own:
            self._add(own, groups)
        return stored

    def _plain_files(self, typed: Sequence[Override], groups: Groups, stored: OwnFile | None) -> list[OwnFile]:
        """Return the user's files of ``local``, ``experiment`` and ``debug`` whose keys are written as on the command line.

        Hydra would put such keys below a key ``experiment``, which nothing reads. Their choice is removed from the overrides.
        """
        plain = []
        for group in PLAIN_GROUPS:
            chosen = next(
                (override for override in typed if override.key_or_group == group and self._is_choice(override)), None
            )
            names = _texts(chosen) if chosen else ["default"] if group == "local" and stored is None else []
            for name in names:
                path = self._user_file(f"{group}/{name}")
                if path is None or not _is_plain_file(file := own_file.read(path), groups):
                    continue
                if chosen is not None and chosen.is_sweep_override():
                    raise ConfigError(
                        f"{file.name}:1: a sweep over {group} needs files that begin with '# @package _global_' and choose "
                        f"groups in a defaults list; or run each file: cookbook train {file.name}"
                    )
                plain.append(file)
                if chosen is not None:
                    self.overrides.remove(chosen.input_line)
                else:
                    self.overrides.append("~local")
        return plain

    def _user_file(self, name: str) -> Path | None:
        """Return the user's file ``conf/NAME.yaml``, or that of a ``--config-dir``; None if the packaged one is used."""
        packaged = paths.packaged("conf")
        for source in self.hydra.config_loader.get_sources():
            if source.scheme() == "file" and (path := Path(source.path) / f"{name}.yaml").is_file():
                return None if Path(source.path) == packaged else path
        return None

    def _add(self, files: Sequence[OwnFile], groups: Groups) -> None:
        """Put the keys of files before the overrides, without those that a later file or the command line sets."""
        typed = list(self.overrides)
        parsed = self._parsed()
        keys = {override.key_or_group.partition("@")[0] for override in parsed}
        replaced = {override.key_or_group for override in parsed if self._is_choice(override) or override.is_delete()}
        split = [(file, *own_file.split(file, groups)) for file in files]
        choices: list[Entry] = []
        for _, chosen, _ in reversed(split):
            own_file.refuse_twice(chosen)
            new = [entry for entry in chosen if entry.key not in replaced]
            choices[:0] = new
            replaced |= {entry.key for entry in new}
        self.origins |= {entry.key: entry.where for entry in choices if entry.where}
        self.overrides = [shorthand.quoted(own_file.word(entry)) for entry in choices] + typed
        self._spell_out()
        known = self.known_keys()
        self.notes = []
        leaves: list[Entry] = []
        for place, (file, _, others) in reversed(list(enumerate(split))):
            own = own_file.flat(others, file, known)
            own_file.refuse_twice(own)
            # A group that a later file or the command line chooses takes no name, path or class of this file.
            later = {entry.key for _, chosen, _ in split[place + 1 :] for entry in chosen}
            later |= {override.key_or_group for override in parsed if self._is_choice(override)}
            deleted = {override.key_or_group for override in parsed if override.is_delete()}
            new = [entry for entry in own if entry.key not in keys and not _is_replaced(entry, later, deleted)]
            leaves[:0] = new
            keys |= {entry.key for entry in new}
        self.origins |= {entry.key: entry.where for entry in leaves if entry.where}
        self.overrides = [shorthand.quoted(own_file.word(entry)) for entry in (*choices, *leaves)] + typed
        self.keys = replace(self.keys, typed=self.overrides)
        self._combined = []

    def _refuse_unread_keys(self, cfg: DictConfig) -> None:
        """Raise ConfigError for a top-level key of a user's file that nothing reads: neither a class nor an interpolation."""
        known = {*conf_files.top_level("serve" if self.name == "serve" else "train"), "hydra"}
        unread = [str(key) for key in cfg if key not in known]
        if not unread:
            return
        text = OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
        for key in unread:
            if re.search(rf"\$\{{[^}}]*\b{re.escape(key)}\b", text):
                continue
            where = self.origins.get(key) or next(self._places_of(key, cfg), None)
            if where is None:
                continue
            if key in PLAIN_GROUPS or key in cfg.hydra.runtime.choices:
                raise ConfigError(f"{where}: its keys apply to nothing; begin the file with '# @package _global_'")
            others = [key for key in self.known_keys() if key.partition(".")[0] not in unread]
            raise ConfigError(f"{where}: {errors.unknown_key(key, errors.Keys(others.copy, self.keys.command))}")

    def _note_places(self, cfg: DictConfig) -> None:
        """Add the places of the keys in the user's files of ``conf`` that the configuration consists of."""
        typed = {override.key_or_group for override in self._parsed()}
        for group, file in self._user_files(cfg):
            prefix = "" if group is None or file.package == "_global_" else f"{group}."
            if prefix and file.lines:
                self.origins.setdefault(str(group), f"{file.name}:1")
            for key in file.lines:
                if f"{prefix}{key}" not in typed:
                    self.origins.setdefault(f"{prefix}{key}", file.where(key))

    def _user_files(self, cfg: DictConfig) -> Iterator[tuple[str | None, OwnFile]]:
        """Yield the group, None for the top-level file, and the keys of each chosen file that is the user's."""
        for group, option in cfg.hydra.runtime.choices.items():
            name = group.partition("@")[0]
            if (path := self._user_file(f"{name}/{option}")) is not None:
                yield name, own_file.read(path)
        if (path := self._user_file(self.name)) is not None:
            yield None, own_file.read(path)

    def _places_of(self, key: str, cfg: DictConfig) -> Iterator[str]:
        """Yield file and line of a top-level key in the user's files that the configuration consists of."""
        for group, file in self._user_files(cfg):
            if (group is None or file.package == "_global_") and key in file.lines:
                yield file.where(key)
            elif group == key:
                yield f"{file.name}:1"

    def _store(self, file: OwnFile, *, is_received: bool) -> None:
        """Make an earlier run's configuration the top-level one. A group on the command line replaces the file's group.

        Raises:
            ConfigError: the command line chooses a recipe, or a received file names foreign code.
        """
        loaded = dict(file.values)
        groups = {override.key_or_group for override in self._parsed() if self._is_choice(override)} | self.replaced
        if "recipe" in groups:
            typed = next(word for word in self.overrides if word.startswith("recipe="))
            raise ConfigError(f"recipe: {file.name} has settled the recipe and all that it chooses; drop {typed}")
        settings = {str(key): value for key, value in loaded.items() if key not in groups}
        if is_received:
            self._refuse_foreign_code(settings, file)
        recipe = OmegaConf.select(OmegaConf.create(loaded), "recipe.name")
        self.missing = {
            key: value for key, value in conf_files.composed(str(recipe)).items() if key not in {*settings, *groups}
        }
        settings |= self.missing
        defaults = ["_self_", *({group: None} for group in sorted(groups))]
        ConfigStore.instance().store(RERUN, {"defaults": defaults, **settings})

    def _refuse_foreign_code(self, values: Mapping[str, object], file: OwnFile) -> None:
        """Raise ConfigError for a value that would run code, or send data away, and that the command line does not repeat."""
        named: set[str] = set()
        for override in self._parsed():
            key, value = override.key_or_group.partition("@")[0], own_file.plain_value(override.value())
            # The values of a chosen group are gone already.
            if override.is_delete() or not (
                override.is_sweep_override() or (self._is_group(key) and not isinstance(value, Mapping))
            ):
                named |= set(_set_keys(key, value))

        def is_named(key: str) -> bool:
            return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in named)

        if (foreign := received.first_foreign(values, is_named)) is None:
            return
        key, value, reason = foreign
        group = key.partition(".")[0]
        remedy = f"remove the key from {file.name}"
        # The command line cannot set these keys.
        if group not in ("hydra", "defaults") and "[" not in key:
            is_plain_word = isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value)
            word = f"{key}={value}" if is_plain_word else shlex.quote(own_file.word(Entry(key, value)))
            remedy = f"if you trust it, add {word} to the command"
            if group in ("reward", "env", "job", "loss", "deployment", "backend"):
                remedy += f", or choose another with {group}=NAME"
        raise ConfigError(f"{key}: {reason}, got {value!r}; {remedy}")

    def _parsed(self) -> list[Override]:
        return list(OverridesParser.create().parse_overrides(self.overrides))

    def _is_choice(self, override: Override) -> bool:
        return _is_plain(override) and not isinstance(override.value(), dict) and self._is_group(override.key_or_group)

    def _components_written_out(self) -> list[str]:
        """Return the overrides, with components such as ``tracker={mine: {_target_: ...}}`` in the form that Hydra accepts.

        Hydra merges a mapping into the chosen option, whose keys are the only ones allowed. A component of its own class
        takes the option's place; named components, as of ``tracker`` and ``hook``, come in addition, as do the keys of an
        option that has none, such as ``data.curriculum``.
        """
        words = []
        for override in self._parsed():
            key, value, word = override.key_or_group, override.value(), override.input_line
            written_out = _is_plain(override) and isinstance(value, dict)
            if written_out and TARGET in value and self._is_group(key):
                self.replaced.add(key)
                words.append(f"~{key}")
            named = [item for item in value.values() if isinstance(item, dict) and TARGET in item] if written_out else []
            added = written_out and (TARGET in value or named or (value and self._is_leaf(key)))
            words.append(f"+{word}" if added else word)
        return words

    def _is_leaf(self, key: str) -> bool:
        """Whether the key is known and has no keys below it."""
        known = self.known_keys() if "." in key else []
        return key in known and not any(other_key.startswith(f"{key}.") for other_key in known)

    def _refuse_unknown_keys(self) -> None:
        """Raise ConfigError for an unknown key that Hydra lets through, or explains too briefly.

        No class would check ``+key=value`` at the top level. Of ``optim={lrr: 1}``, Hydra's error names the group only.
        """
        added, inside = [], []
        for override in self._parsed():
            key, value = override.key_or_group, override.value()
            if (override.is_add() or override.is_force_add()) and not self._is_group(key):
                added.append(key)
            elif _is_plain(override) and isinstance(value, dict):
                inside += [(key, f"{key}.{name}") for name in value]
        known = self.known_keys() if added or inside else []
        unknown = [key for key in added if key.partition(".")[0] not in {*known, "hydra"}]
        unknown += [name for key, name in inside if key in known and name not in known]
        if known and unknown:
            raise ConfigError(errors.unknown_key(unknown[0], self.keys))

    def _is_group(self, key: str) -> bool:
        return "." not in key and bool(self._options(key))

    def _options(self, group: str) -> list[str]:
        """Return the names of the group's options. Hydra's get_group_options copies every source of configuration first."""
        sources = (source for source in self.hydra.config_loader.get_sources() if source.is_group(group))
        return [name for source in sources for name in source.list(group, ObjectType.CONFIG)]


def _read_stored(path: Path) -> OwnFile:
    """Return the keys of a file called ``config.yaml``. If a run's is damaged, the error says how to resume the run."""
    try:
        return own_file.read(path)
    except (ConfigError, YAMLError):
        if (path.parent / paths.CHECKPOINTS).is_dir():
            # The module imports torch.
            from cookbook.run.folder import load_config

            load_config(path.parent)
        raise


def _is_plain_file(file: OwnFile, groups: Groups) -> bool:
    """Whether the keys of a file are written as on the command line: no ``# @package``, or a preset in place of a mapping."""
    presets = (groups.is_group(key) and not isinstance(value, Mapping) for key, value in file.values.items())
    return file.package is None or (file.package == "_global_" and any(presets)) or any("." in key for key in file.values)


def _is_replaced(entry: Entry, chosen: Collection[str], deleted: Collection[str]) -> bool:
    """Whether a choice of the command line, or of a later file, takes the place of this key of an earlier file."""
    group, _, name = entry.key.partition(".")
    if group in deleted:
        return True
    is_component = not name and isinstance(entry.value, Mapping) and TARGET in entry.value
    names = {*shorthand.NEUTRAL.get(group, ()), *shorthand.CODE.get(group, ()), TARGET}
    return group in chosen and (is_component or name in names)


def _set_keys(key: str, value: object) -> Iterator[str]:
    """Yield the keys that an override sets. A mapping is merged, so it sets the keys inside only."""
    if not isinstance(value, Mapping):
        yield key
        return
    for name, inner in value.items():
        yield from _set_keys(f"{key}.{name}", inner)


def _is_plain(override: Override) -> bool:
    return not (override.is_add() or override.is_force_add() or override.is_delete())


def _texts(override: Override) -> list[str]:
    """Return the text values of an override: its value, those of a list, or those of a sweep; other values are left out."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    return [text for item in values if isinstance(text := _text(item), str)]


def _has_list(value: object) -> bool:
    """Whether an override's value is a list, or a sweep over lists."""
    return isinstance(value, list) or (isinstance(value, ChoiceSweep) and any(isinstance(item, list) for item in value.list))


def _text(value: object) -> object:
    """Return a value of an override, without the quotes of a text."""
    return value.text if isinstance(value, QuotedString) else value


def _flat(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, also those of nodes."""
    for key, value in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(value, DictConfig):
            yield from _flat(value, f"{prefix}{key!s}.")
