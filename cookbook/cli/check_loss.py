"""``cookbook check loss``: find a loss by name or in a file, check it, and print the results."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from omegaconf import OmegaConf

from cookbook.check.bench import CheckResult, LossFunction, State, described
from cookbook.check.loss import check_loss
from cookbook.cli.hydra import bridge, conf_files
from cookbook.config import python_file
from cookbook.config.nodes import build
from cookbook.errors import ConfigError, CookbookError
from cookbook.losses.base import Loss
from cookbook.losses.function import FunctionLoss
from cookbook.utils import paths
from cookbook.utils.suggest import did_you_mean

EXAMPLE = "for example: cookbook check loss dpo beta=0.2, or cookbook check loss my_file.py:my_loss"


def run(target: str, options: Sequence[str], *, table: bool) -> None:
    """Check the loss and print one result per check.

    Raises:
        ConfigError: the loss is unknown, or cannot be constructed with these options.
        CookbookError: a check failed.
    """
    loss, title = find(target, options)
    report("check loss", target, title, described(loss), check_loss(loss), table=table)


def report(command: str, target: str, title: str, declared: str, results: Sequence[CheckResult], *, table: bool) -> None:
    """Print one result per check. Raises CookbookError: a check failed."""
    (_print_table if table else _print_text)(title, declared, results)
    failed = [result.check for result in results if result.failed]
    if failed:
        raise CookbookError(f"{command}: {target} fails {len(failed)} of {len(results)} checks: {', '.join(failed)}")


def find(target: str, options: Sequence[str]) -> tuple[LossFunction, str]:
    """Return the loss that ``NAME``, ``file.py`` or ``file.py:name`` means, with its ``key=value`` options, and a title.

    Raises:
        ConfigError: no loss or several losses fit; or the loss does not have an option.
    """
    for option in options:
        if "=" not in option:
            raise ConfigError(f"check loss: expected key=value after the loss, got {option!r}; {EXAMPLE}")
    path, _, name = target.partition(":")
    if path.endswith(".py") or name:
        return _from_file(Path(path).expanduser(), name, options)
    fork = paths.user("losses") / f"{target}.py"
    if fork.is_file() and all(file.name != target for file in conf_files.options("loss")):
        return _from_file(fork, "", options)
    return _from_conf(target, options)


def _from_conf(name: str, options: Sequence[str]) -> tuple[LossFunction, str]:
    keys = [option if option.startswith("loss.") else f"loss.{option}" for option in options]
    loss = bridge.run(bridge.ComposeRequest([f"loss={name}", *keys]), lambda cfg, _: build(cfg.loss, "loss", Loss))
    assert isinstance(loss, Loss)
    return loss, f"{name}: {type(loss).__qualname__} of {paths.shown(conf_files.find('loss', name).path)}"


def _from_file(path: Path, name: str, options: Sequence[str]) -> tuple[LossFunction, str]:
    if not path.is_file():
        raise ConfigError(f"check loss: file not found, got {path}; {EXAMPLE}")
    module = python_file.run_beside(path, f"cookbook_loss_{path.stem}")
    loss = getattr(module, name, None) if name else _only(module, path)
    if not callable(loss):
        raise ConfigError(f"check loss: {paths.shown(path)} has no loss {name!r}.{did_you_mean(name, vars(module))}")
    title = f"{loss.__qualname__} of {paths.shown(path)}"
    if isinstance(loss, type):
        return build(OmegaConf.from_dotlist(list(options)), "loss", loss), title
    if options:
        raise ConfigError(f"check loss: {loss.__name__} is a function and takes no options, got {options[0]!r}; drop it")
    return loss, title


def _only(module: ModuleType, path: Path) -> Any:
    """Return the only loss of a file: its class, or else its function ``(data, logprobs)``."""
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    classes = [thing for thing in own if isinstance(thing, type) and issubclass(thing, Loss)]
    functions = [thing for thing in own if isinstance(thing, FunctionLoss) or (inspect.isfunction(thing) and _is_loss(thing))]
    candidates = classes or functions
    if len(candidates) != 1:
        names = ", ".join(getattr(thing, "__name__", "") for thing in candidates) or "none"
        raise ConfigError(f"check loss: {paths.shown(path)} has several losses or none ({names}); name it: {path}:name")
    return candidates[0]


def _is_loss(function: FunctionType) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) == 2 and not function.__name__.startswith("_")


def _print_text(title: str, declared: str, results: Sequence[CheckResult]) -> None:
    print(f"{title}\n{declared}\n")
    width = max(len(result.check) for result in results)
    indent = " " * (width + 10)
    for result in results:
        print(f"{result.state:<6}  {result.check:<{width}}  {result.found}")
        if result.failed:
            print(f"{indent}in training: {result.harm}\n{indent}change: {result.remedy}")
    print()


STYLES = {State.passed: "green", State.failed: "bold red", State.noted: "cyan", State.skipped: "dim"}


def _print_table(title: str, declared: str, results: Sequence[CheckResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for result in results:
        style = STYLES[result.state]
        cell = Text(result.found, style="" if result.failed else "dim")
        if result.failed:
            cell.append("\nin training: ", "bold").append(result.harm)
            cell.append("\nchange: ", "bold").append(result.remedy)
        table.add_row(Text(result.state, style), Text(result.check), cell)
    Console(highlight=False).print("", Text(title, "bold"), Text(declared, "dim"), "", table, "", sep="\n")
