"""Composition: overrides of the command line become one configuration, and problems become one line each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from omegaconf import DictConfig, DictKeyType, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

import cookbook.config.nodes  # noqa: F401 - registers ${cookbook:...}
from cookbook.cli.hydra import conf_files, errors, shorthand
from cookbook.config.typed import TARGET
from cookbook.errors import ConfigError, CookbookError
from cookbook.utils import paths
from cookbook.utils.signals import is_interrupt
from cookbook.utils.suggest import did_you_mean

RERUN = "config-of-an-earlier-run"
PROBLEMS = (HydraException, OmegaConfBaseException, YAMLError, ValueError)

# The run manages its own folder: Hydra writes no file, changes no folder and configures no logging.
QUIET = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


@dataclass(frozen=True)
class ComposeRequest:
    """Arguments of ``cookbook train``."""

    overrides: Sequence[str] = ()
    multirun: bool = False
    config_dirs: Sequence[Path] = ()
    config_name: str = "train"
    # The resolved configuration of an earlier run, which replaces config_name.
    config_file: Path | None = None


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
        self.overrides = [shorthand.quoted(word) for word in request.overrides]
        self.name = request.config_name
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
            self._spell_out()
            self.overrides = self._components_written_out()
            if self.replaced & set(shorthand.NEUTRAL) and request.config_file is None and self.name != "serve":
                # The demo's file is named after presets, and a component that is written out has no preset.
                self.overrides.append("demo@_global_=none")
            if request.config_file is not None:
                self.name = RERUN
                self._store(request.config_file)

    def compose(self, mode: RunMode) -> DictConfig:
        """Return the configuration. Raise ConfigError if an override has no effect."""
        self._refuse_unknown_keys()
        cfg: DictConfig = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        self._refuse_fresh_weights()
        overrides, notes = self._replacements(cfg)
        self.notes += notes
        if added := overrides + self._without_warmup(cfg):
            self.overrides += added
            cfg = self.hydra.compose_config(self.name, [*QUIET, *self.overrides], mode)
        self._refuse_unknown_demo(cfg.hydra.runtime.choices.get("demo"))
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
        except CookbookError:
            raise
        except PROBLEMS as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from error
            raise ConfigError(errors.explain(error, self.keys)) from error

    def known_keys(self) -> list[str]:
        """Return every key of the configuration of the chosen groups, without the overrides of single values."""
        with contextlib.suppress(*PROBLEMS):
            parsed = self._parsed()
            choices = [one.input_line for one in parsed if self._is_choice(one) or one.input_line in self._combined]
            for overrides in (choices, []):
                with contextlib.suppress(*PROBLEMS):
                    cfg = self.hydra.compose_config(self.name, overrides, RunMode.MULTIRUN)
                    return list(_flat(self.hydra.get_sanitized_cfg(cfg, "job")))
        return []

    def refuse_shared_folder(self, cfg: DictConfig) -> None:
        """Raise ConfigError for a sweep with a fixed ``out``: every later run would resume the first run's checkpoints."""
        swept = [override.key_or_group for override in self._parsed() if override.is_sweep_override()]
        out = OmegaConf.select(cfg, "out")
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
        replaced = {one.key_or_group for one in parsed if not isinstance(one.value(), dict)}
        for word, one in zip(self.overrides, parsed, strict=True):
            group, value = one.key_or_group if self._is_choice(one) else "", one.value()
            if group in shorthand.COMBINED and _has_list(value):
                options = [_text(option) for option in value] if isinstance(value, list) else None
                self._combined += shorthand.combined(group, options, f"{group}.weights" in replaced)
            else:
                words.append((word, group, _texts(one)))
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
        swept = next((one for one in self._parsed() if one.key_or_group == "recipe" and one.is_sweep_override()), None)
        settled = [one.input_line for one in self._parsed() if not one.is_sweep_override()]
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

    def _store(self, path: Path) -> None:
        """Make an earlier run's configuration the top-level one. A group on the command line replaces the file's group."""
        loaded = _loaded(path)
        groups = {override.key_or_group for override in self._parsed() if self._is_choice(override)} | self.replaced
        if "recipe" in groups:
            typed = next(word for word in self.overrides if word.startswith("recipe="))
            raise ConfigError(f"recipe: {paths.shown(path)} has settled the recipe and all that it chooses; drop {typed}")
        kept = {str(key): value for key, value in loaded.items() if key not in groups}
        recipe = OmegaConf.select(OmegaConf.create(loaded), "recipe.name")
        self.missing = {key: value for key, value in conf_files.composed(str(recipe)).items() if key not in {*kept, *groups}}
        kept |= self.missing
        defaults = ["_self_", *({group: None} for group in sorted(groups))]
        ConfigStore.instance().store(RERUN, {"defaults": defaults, **kept})

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
        return key in known and not any(one.startswith(f"{key}.") for one in known)

    def _refuse_unknown_keys(self) -> None:
        """Raise ConfigError for an unknown key that Hydra lets through, or explains too briefly.

        No class would check ``+key=value`` at the top level. Of ``optim={lrr: 1}``, Hydra's error names the group only.
        """
        added, inside = [], []
        for one in self._parsed():
            key, value = one.key_or_group, one.value()
            if (one.is_add() or one.is_force_add()) and not self._is_group(key):
                added.append(key)
            elif _is_plain(one) and isinstance(value, dict):
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


def _loaded(path: Path) -> dict[DictKeyType, Any]:
    """Return the keys of an earlier run's configuration. Raise ConfigError if the file is missing, or no configuration."""
    try:
        if not path.is_file():
            raise ConfigError(f"--config: file not found, got {path}; a run writes its configuration to <out>/config.yaml")
        loaded = OmegaConf.to_container(OmegaConf.load(path))
        if isinstance(loaded, dict) and isinstance(loaded.get("recipe"), dict):
            return loaded
        lacks = "has no key recipe" if isinstance(loaded, dict) else "holds no keys"
        raise ConfigError(f"--config: {path} {lacks}; a run writes its own as <out>/config.yaml")
    except (ConfigError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        if path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
            # Raises an error that says how to resume the run without the file. The module imports torch.
            from cookbook.run.folder import load_config

            load_config(path.parent)
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"--config: {path} is damaged, it is not UTF-8 text; restore the file") from None
        raise


def _is_plain(override: Override) -> bool:
    return not (override.is_add() or override.is_force_add() or override.is_delete())


def _texts(override: Override) -> list[str]:
    """Return the text values of an override: its value, those of a list, or those of a sweep; other values are left out."""
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    return [text for one in values if isinstance(text := _text(one), str)]


def _has_list(value: object) -> bool:
    """Whether an override's value is a list, or a sweep over lists."""
    return isinstance(value, list) or (isinstance(value, ChoiceSweep) and any(isinstance(one, list) for one in value.list))


def _text(value: object) -> object:
    """Return a value of an override, without the quotes of a text."""
    return value.text if isinstance(value, QuotedString) else value


def _flat(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, also those of nodes."""
    for key, value in node.items_ex(resolve=False):
        yield f"{prefix}{key!s}"
        if isinstance(value, DictConfig):
            yield from _flat(value, f"{prefix}{key!s}.")
