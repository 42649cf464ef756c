"""``cookbook eval`` and ``cookbook compare``: the metrics of a run or model on held-out rows, and tables of several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cookbook.cli.hydra import conf_files
from cookbook.errors import ConfigError
from cookbook.run import folder as run_folder
from cookbook.run import report
from cookbook.sampling.evaluation import FINGERPRINT, NUM_EXAMPLES, Evaluation
from cookbook.types import JsonObject
from cookbook.utils import packages, tables
from cookbook.utils.words import counted

if TYPE_CHECKING:
    from cookbook.run.standalone_eval import NamedData

LONGEST = 40  # characters of a value in a table


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-eval by name, separated by commas, and the options that belong to them.

    Raises:
        ConfigError: an option without tasks.
    """

    names: str | None
    folder: str | None
    num_fewshot: int | None
    chat: bool

    def __post_init__(self) -> None:
        if self.names is None and (self.folder, self.num_fewshot, self.chat) != (None, None, False):
            raise ConfigError("eval: --task-folder, --fewshot and --chat-template belong to --tasks; add --tasks=NAME")


def evaluate(name: str, overrides: Sequence[str], tasks: TaskOptions) -> None:
    """Evaluate a run's newest checkpoint, a checkpoint or a model, on its rows or on tasks of lm-eval, and print the result.

    Raises:
        CookbookError: no run or model has this name, or the configuration does not suit it.
    """
    # Comparing runs needs neither.
    from cookbook.cli.hydra import bridge
    from cookbook.run import standalone_eval

    if "=" in name:
        raise ConfigError(f"eval: expected a run or a model before {name!r}, for example: cookbook eval tiny {name}")
    named_in_conf = name in {file.name for file in conf_files.options("model")} and not Path(name).exists()
    target = standalone_eval.Target(None) if named_in_conf else standalone_eval.find(name)
    # A run is evaluated with its own configuration, a model with that of `cookbook train`. The folder may be another person's.
    if target.run is not None:
        request = bridge.ComposeRequest(overrides, config_file=target.run / run_folder.CONFIG, is_received=True)
    else:
        own = [f"model={name}"] if named_in_conf else ["model=hf", f"model.name={run_folder.quoted(name)}"]
        request = bridge.ComposeRequest([*own, *overrides])
    if tasks.names is None:
        rows = _named_data(overrides)
        bridge.run(request, lambda cfg, _: _show_result(name, *standalone_eval.evaluate(cfg, target, rows)))
        return
    packages.need("--tasks", "lm_eval", "lm-eval")
    from cookbook.sampling.lm_eval_tasks import Tasks

    names = tuple(word.strip() for word in tasks.names.split(",") if word.strip())
    chosen = Tasks(names, tasks.folder, tasks.num_fewshot, tasks.chat)
    # A wrong name is refused before a model is loaded.
    _ = chosen.manager
    bridge.run(request, lambda cfg, _: _show_result(name, *standalone_eval.evaluate_tasks(cfg, target, chosen)))


def _named_data(overrides: Sequence[str]) -> NamedData:
    """Return how the command line names the rows to evaluate."""
    from cookbook.run.standalone_eval import NamedData

    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in overrides)}
    if any(key.startswith("data.eval_") for key in values):
        return NamedData.no
    if values.keys() & {"data.path", "data.name", "data.mix"}:
        return NamedData.rows
    if "data" not in values:
        return NamedData.no
    return NamedData.preset if values["data"] in {file.name for file in conf_files.options("data")} else NamedData.rows


def _show_result(name: str, facts: JsonObject, evaluation: Evaluation, file: Path | None) -> None:
    """Print the evaluated model and rows, the metrics, and a few completions."""
    after = "" if facts["step"] is None else f" after {counted(facts['step'], 'step')}"
    first = facts["rows"]["first"].removeprefix(f"{Path.cwd()}/")
    judge = report.judge_of_result(facts, evaluation.metrics)
    print(f"{name}{after} on {counted(facts['rows']['count'], 'row')} from {first}, judged by {judge}\n")
    metrics = [
        (key, report.spelled(key, value), report.error_of(key, evaluation.metrics))
        for key, value in evaluation.metrics.items()
        if key != FINGERPRINT
    ]
    print("\n".join(tables.aligned(metrics, right=[1])))
    for example in evaluation.examples[:NUM_EXAMPLES]:
        print(f"  {report.one_line(example, judge)}")
    if file is not None:
        print(f"written to {file}")


def compare(folders: Sequence[str], *, table: bool) -> None:
    """Print the configuration keys that differ, the final metrics, and the results of ``cookbook eval``; warnings go to stderr.

    Raises:
        ConfigError: a folder is not a run, or there are fewer than two.
    """
    runs = report.read_runs(folders)
    names = [run.name for run in runs]
    if differing := report.differing(runs):
        _show_table("configuration", "differs in", names, differing, table=table)
    else:
        print("the configurations are the same\n")
    _show_table("while training", "metric", names, report.outcomes(runs), table=table)
    for title, lines in report.evaluated(runs):
        print(f"cookbook eval: {title}")
        _show_table("", "metric", names, lines, table=table)
    for warning in report.warnings(runs):
        print(f"warning: {warning}", file=sys.stderr)


def _show_table(title: str, subject: str, names: Sequence[str], lines: Sequence[report.Cells], *, table: bool) -> None:
    tables.show(title, [subject, *names], [[about, *map(_short, cells)] for about, cells in lines], table=table)


def _short(cell: str) -> str:
    """Return the end of a long value, where paths differ."""
    return cell if len(cell) <= LONGEST else f"...{cell[3 - LONGEST :]}"
