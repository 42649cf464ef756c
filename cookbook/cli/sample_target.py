"""What ``cookbook sample NAME`` means: a folder, a model of ``conf/model``, or a model of the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cookbook import paths
from cookbook.cli import conf_files
from cookbook.errors import ConfigError
from cookbook.suggest import did_you_mean
from cookbook.typed import MISSING

# The hub has given no name without an owner for years; these are the language models that were there before.
WITHOUT_OWNER = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt")
SHIPPED = "${cookbook:data}"


def resolve(name: str) -> str:
    """The folder or hub id to sample from.

    Raises:
        ConfigError: a name that is neither, with the nearest of the runs and models there are. The hub is not asked: that
            takes a minute where there is no network.
    """
    models = _models()
    if Path(name).exists() or name in WITHOUT_OWNER or _is_cached(name):
        return name
    if name in models:
        return models[name]
    if "/" in name and not Path(name).parent.is_dir():
        return name  # of the hub; or a path that the loader will not find either
    raise ConfigError(
        f"sample: there is no folder {name!r} here and no such model; give a run's folder, a checkpoint, a model of "
        f"`cookbook list models`, or a hub id as owner/name.{_hint(name, models)}"
    )


def _hint(name: str, models: Iterable[str]) -> str:
    """The nearest of the runs and models; a run is found without its folder, too."""
    folder = Path(name).parent if "/" in name else Path("runs")
    runs = {path.name: str(path) for path in folder.glob("*") if path.is_dir()}
    last = Path(name).name
    near = f" Did you mean {last!r}?" if last in runs else did_you_mean(last, [*runs, *models])
    for run, path in runs.items():
        near = near.replace(repr(run), repr(path))
    return near


def _models() -> dict[str, str]:
    """Name or folder of each model of ``conf/model`` that has weights to sample from."""
    found = {file.name: conf_files.values(file) for file in conf_files.options("model")}
    data = str(paths.packaged("data"))
    named = {name: str(node["name"]) for name, node in found.items() if not node.get("random") and node["name"] != MISSING}
    return {preset: name.replace(SHIPPED, data) for preset, name in named.items()}


def _is_cached(name: str) -> bool:
    """Whether the hub's own cache has a model of that name, as it lays it out."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"
    return (Path(cache) / f"models--{name}").is_dir()
