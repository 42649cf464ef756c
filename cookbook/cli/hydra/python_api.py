"""``cookbook.train``: the command ``cookbook train``, called from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from cookbook import terminal
from cookbook.cli.hydra import bridge, conf_files
from cookbook.errors import ConfigError, DataError
from cookbook.run import builder
from cookbook.run.result import RunResult
from cookbook.utils.paths import import_from_here


def train(
    recipe: str | None = None, overrides: Sequence[str] = (), *, config: Path | str | None = None, **keys: object
) -> RunResult:
    """Run a recipe as ``cookbook train`` does, in this process, and return its metrics, samples and checkpoints.

    Args:
        recipe: name of the recipe; None: that of ``overrides`` or of ``config``.
        overrides: the words after ``cookbook train``, such as ``"optim.lr=1e-5"`` or ``"model=qwen3_0p6b"``.
        config: a YAML file as of ``cookbook train my.yaml``, or the ``config.yaml`` of an earlier run.
        keys: the same keys as arguments: ``model="./m"``, ``data="rows.jsonl"``, ``optim={"lr": 1e-4}``. ``overrides`` have
            precedence.

    Raises:
        CookbookError: an error that the user can fix.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop button. After the first one the run is saved.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"train: overrides is a list of texts, got {overrides!r}; pass [{overrides!r}]")
    if others := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError(f"train: overrides is a list of texts, got {others[0]!r} in it; pass texts such as 'optim.lr=1e-5'")
    import_from_here()
    words = [*([f"recipe={recipe}"] if recipe is not None else []), *overrides]
    results: list[RunResult] = []

    def job(cfg: DictConfig, composed: list[str]) -> None:
        results.append(builder.train(cfg, composed, lambda: conf_files.composed(cfg.recipe.name)))

    if any(word.startswith("hydra.mode=") for word in words):
        raise ConfigError("train: hydra.mode starts a sweep; call train once for each point, or use cookbook train -m")
    request = bridge.ComposeRequest(words, config_file=None if config is None else Path(config), values=_plain(keys))
    mistake: ConfigError | DataError | None = None
    with terminal.shown():
        try:
            bridge.run(request, job)
        except (ConfigError, DataError) as error:
            mistake = error
    if mistake is not None:
        # A mistake in the call is its line and this message, without twelve frames of cookbook between them.
        raise mistake.with_traceback(None) from None
    return results[0]


def _plain(value: Mapping[str, object]) -> dict[str, object]:
    """Return keys and values as YAML could hold them. Raises ConfigError: a value has another type."""

    def converted(name: str, one: object) -> object:
        if one is None or isinstance(one, bool | int | float | str):
            return one
        if isinstance(one, os.PathLike):
            # A bare name could be a preset.
            return text if os.sep in (text := os.fspath(one)) else f".{os.sep}{text}"
        if isinstance(one, Mapping):
            return {str(key): converted(f"{name}.{key}", inner) for key, inner in one.items()}
        if isinstance(one, list | tuple):
            return [converted(name, inner) for inner in one]
        raise ConfigError(
            f"train: {name}: expected a text, number, list or dict, got {type(one).__name__}; a class or function is named as "
            "file.py:name"
        )

    return {key: converted(key, one) for key, one in value.items()}
