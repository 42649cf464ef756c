"""Reuse of composed configurations between tests: most commands of the tests choose the same files of ``conf``.

Hydra reads and merges some thirty files for each command, in 0.07 s of CPU time. The merged files depend on the chosen files
alone, so each choice is merged once per process. Hydra still sets every single value, on a copy. Commands that see a ``conf``
folder of the user compose as usual. Parsed overrides and Typer's tree of commands depend on their arguments alone: both are
made once too, which halves the time of a command that only composes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer.main
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.override_parser.overrides_parser import OverridesParser

from cookbook.cli.hydra import conf_files
from cookbook.cli.hydra.composer import RERUN
from cookbook.utils.paths import packaged

_choices: dict[Any, DefaultsList] = {}
_merged: dict[Any, Any] = {}
_parsed: dict[tuple[str, str], Any] = {}
_files: dict[Any, Any] = {}


def reuse() -> None:
    """Make Hydra reuse merged files of the packaged ``conf``."""
    choose, loader = config_loader_impl.create_defaults_list, config_loader_impl.ConfigLoaderImpl
    merge, parse = loader._compose_config_from_defaults_list, OverridesParser.parse_rule
    read = CachingConfigRepository.load_config

    def chosen(repo: Any, config_name: str, overrides_list: Sequence[Any], **options: Any) -> DefaultsList:
        values = Overrides(repo, overrides_list).config_overrides
        choices = [one.input_line for one in overrides_list if one not in values and not one.is_sweep_override()]
        key = (config_name, *choices, *options.items(), *_sources(repo))
        if config_name == RERUN or not _is_packaged(repo):
            return choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **options)
        if key not in _choices:
            _choices[key] = choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **options)
        known = _choices[key]
        return DefaultsList(copy.deepcopy(known.defaults), known.defaults_tree, values, known.overrides)

    def merged(self: Any, defaults: Sequence[Any], repo: Any) -> Any:
        key = (*map(repr, defaults), *_sources(repo))
        if not _is_packaged(repo) or any(one.config_path == RERUN for one in defaults):
            return merge(self, defaults=defaults, repo=repo)
        if key not in _merged:
            _merged[key] = merge(self, defaults=defaults, repo=repo)
        return copy.deepcopy(_merged[key])

    def parsed(self: Any, s: str, rule_name: str) -> Any:
        if (s, rule_name) not in _parsed:
            _parsed[s, rule_name] = parse(self, s, rule_name)
        return copy.deepcopy(_parsed[s, rule_name])

    def loaded_file(self: Any, config_path: str) -> Any:
        name = f"config_path={config_path}"
        if name not in self.cache and config_path != RERUN and _is_packaged(self):
            key = (name, *_sources(self))
            if key not in _files:
                _files[key] = read(self, config_path)
            self.cache[name] = copy.deepcopy(_files[key])
        return read(self, config_path)

    def cached(self: Any, delegate: Any) -> None:
        # Hydra copies the sources too, in 5 ms. None of them changes: a search path of the user replaces the list.
        self.delegate, self.cache = copy.copy(delegate), {}

    load_file, loaded = conf_files._loaded, functools.cache(conf_files._loaded)

    def values(path: Path) -> conf_files.Node:
        return copy.deepcopy(loaded(path)) if path.is_relative_to(packaged("conf")) else load_file(path)

    CachingConfigRepository.__init__ = cached
    CachingConfigRepository.load_config = loaded_file
    conf_files._loaded = values
    config_loader_impl.create_defaults_list = chosen
    loader._compose_config_from_defaults_list = merged
    OverridesParser.parse_rule = parsed
    typer.main.get_command = functools.cache(typer.main.get_command)


def _sources(repo: Any) -> list[str]:
    """Return where configurations are read from. A folder that is absent adds nothing, and each test has its own."""
    return [source.full_path() for source in repo.get_sources() if not _is_folder(source) or Path(source.path).exists()]


def _is_packaged(repo: Any) -> bool:
    """Whether every folder of configurations is the packaged one or absent."""
    folders = [Path(source.path) for source in repo.get_sources() if _is_folder(source)]
    return all(folder == packaged("conf") or not folder.exists() for folder in folders)


def _is_folder(source: Any) -> bool:
    # By its scheme, not by its class: Hydra executes its plugins a second time, so that its classes exist twice.
    return bool(source.scheme() == "file")
