"""``cookbook eval``: how good a run or a model is on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from cookbook import evaluate_alone, runfolder
from cookbook.cli import conf_files, tables
from cookbook.cli import hydra_bridge as bridge
from cookbook.comparison import spelled
from cookbook.errors import ConfigError
from cookbook.evaluate_alone import Result, Target
from cookbook.evaluation import FINGERPRINT, SHOWN
from cookbook.report import one_line


def run(name: str, overrides: Sequence[str]) -> None:
    """Evaluates a run's newest checkpoint, a checkpoint or a model, and prints what was found.

    Raises:
        CookbookError: there is no such thing, or the configuration does not suit it.
    """
    if "=" in name:
        raise ConfigError(f"eval: expected a run or a model before {name!r}, for example: cookbook eval tiny {name}")
    named_in_conf = name in {file.name for file in conf_files.options("model")} and not Path(name).exists()
    target = Target(None) if named_in_conf else evaluate_alone.find(name)

    def job(cfg: DictConfig, words: list[str]) -> None:
        show(name, evaluate_alone.evaluate(cfg, target))

    bridge.run(_request(name, target, overrides), job)


def _request(name: str, target: Target, overrides: Sequence[str]) -> bridge.Request:
    """A run is evaluated as it was configured; a model as ``cookbook train`` would be. Overrides change either."""
    if target.run is not None:
        return bridge.Request(overrides, config_file=target.run / runfolder.CONFIG)
    own = [f"model={name}"] if target.model is None else ["model=hf", f"model.name={runfolder.quoted(name)}"]
    return bridge.Request([*own, *overrides])


def show(name: str, result: Result) -> None:
    """Prints what was asked, the metrics, and a few completions."""
    facts = result.facts
    after = "" if facts["step"] is None else f" after {facts['step']} steps"
    first = facts["rows"]["first"].removeprefix(f"{Path.cwd()}/")
    judged = facts["reward"] or "comparison with the row's answer"
    print(f"{name}{after} on {facts['rows']['count']} rows from {first}, judged by {judged}\n")
    metrics = [(key, spelled(key, value)) for key, value in result.found.metrics.items() if key != FINGERPRINT]
    print("\n".join(tables.aligned(metrics, right=[1])))
    for example in result.found.examples[:SHOWN]:
        print(f"  {one_line(example)}")
    if result.file is not None:
        print(f"written to {result.file}")
