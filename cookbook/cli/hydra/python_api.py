"""``cookbook.train``: the command ``cookbook train``, called from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from cookbook import terminal
from cookbook.cli.hydra import bridge, conf_files
from cookbook.errors import ConfigError
from cookbook.run import builder
from cookbook.run.result import RunResult
from cookbook.utils.paths import import_from_here


def train(recipe: str | None = None, overrides: Sequence[str] = (), *, config: Path | str | None = None) -> RunResult:
    """Run a recipe as ``cookbook train`` does, in this process, and return its metrics, samples and checkpoints.

    Args:
        recipe: name of the recipe; None: that of ``overrides`` or of ``config``.
        overrides: the words after ``cookbook train``, such as ``"optim.lr=1e-5"`` or ``"model=qwen3_0p6b"``.
        config: ``config.yaml`` of an earlier run, to start from.

    Raises:
        CookbookError: an error that the user can fix.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop button. After the first one the run is saved.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"train: overrides is a list of texts, got {overrides!r}; pass [{overrides!r}]")
    import_from_here()
    words = [*([f"recipe={recipe}"] if recipe is not None else []), *overrides]
    results: list[RunResult] = []

    def job(cfg: DictConfig, composed: list[str]) -> None:
        results.append(builder.train(cfg, composed, lambda: conf_files.composed(cfg.recipe.name)))

    if any(word.startswith("hydra.mode=") for word in words):
        raise ConfigError("train: hydra.mode starts a sweep; call train once for each point, or use cookbook train -m")
    with terminal.shown():
        bridge.run(bridge.ComposeRequest(words, config_file=None if config is None else Path(config)), job)
    return results[0]
