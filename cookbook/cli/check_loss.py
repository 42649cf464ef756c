"""``cookbook check loss``: finds a loss by its name or in a file, examines it, and prints what was found."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cookbook import paths, pyfile, typed
from cookbook.check.bench import described
from cookbook.check.loss import check_loss
from cookbook.check.verdict import State, Verdict
from cookbook.cli import conf_files, hydra_bridge
from cookbook.config import build
from cookbook.errors import ConfigError, CookbookError
from cookbook.losses.base import Loss
from cookbook.losses.function import FunctionLoss
from cookbook.suggest import did_you_mean

EXAMPLE = "for example: cookbook check loss dpo beta=0.2, or cookbook check loss my_file.py:my_loss"


def run(target: str, options: Sequence[str], *, table: bool) -> None:
    """Examines the loss and prints a verdict per check.

    Raises:
        ConfigError: there is no such loss, or it cannot be made with these options.
        CookbookError: a check failed.
    """
    loss, title = find(target, options)
    verdicts = check_loss(loss)
    (_print_table if table else _print_text)(title, described(loss), verdicts)
    failed = [verdict.check for verdict in verdicts if verdict.failed]
    if failed:
        raise CookbookError(f"check loss: {target} fails {len(failed)} of {len(verdicts)} checks: {', '.join(failed)}")


def find(target: str, options: Sequence[str]) -> tuple[Any, str]:
    """The loss that ``NAME``, ``file.py`` or ``file.py:name`` means, made with ``key=value`` options, and a title for it.

    Raises:
        ConfigError: there is none, or several; an option it does not have.
    """
    for option in options:
        if "=" not in option:
            raise ConfigError(f"check loss: expected key=value behind the loss, got {option!r}; {EXAMPLE}")
    path, _, name = target.partition(":")
    if path.endswith(".py") or name:
        return _from_file(Path(path).expanduser(), name, options)
    fork = paths.user("losses") / f"{target}.py"
    if fork.is_file() and all(file.name != target for file in conf_files.options("loss")):
        return _from_file(fork, "", options)
    return _from_conf(target, options)


def _from_conf(name: str, options: Sequence[str]) -> tuple[Any, str]:
    found: list[Loss] = []

    def job(cfg: DictConfig, _: list[str]) -> None:
        found.append(build(cfg.loss, "loss", Loss))

    keys = [option if option.startswith("loss.") else f"loss.{option}" for option in options]
    hydra_bridge.run(hydra_bridge.Request([f"loss={name}", *keys]), job)
    return found[0], f"{name}: {type(found[0]).__qualname__} of {paths.shown(conf_files.find('loss', name).path)}"


def _from_file(path: Path, name: str, options: Sequence[str]) -> tuple[Any, str]:
    if not path.is_file():
        raise ConfigError(f"check loss: there is no file {path}; {EXAMPLE}")
    module = pyfile.run_beside(path, f"cookbook_loss_{path.stem}")
    found = _named(module, name, path) if name else _only(module, path)
    title = f"{found.__qualname__} of {paths.shown(path)}"
    if isinstance(found, type):
        return typed.construct(found, _values(options), "loss"), title
    if options:
        raise ConfigError(f"check loss: {found.__name__} is a function and takes no options, got {options[0]!r}; drop it")
    return found, title


def _named(module: ModuleType, name: str, path: Path) -> Any:
    if not callable(found := getattr(module, name, None)):
        raise ConfigError(f"check loss: {paths.shown(path)} has no loss {name!r}.{did_you_mean(name, vars(module))}")
    return found


def _only(module: ModuleType, path: Path) -> Any:
    """The one loss of a file: its class, or else its function ``(data, logprobs)``."""
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", None) == module.__name__]
    classes = [thing for thing in own if isinstance(thing, type) and issubclass(thing, Loss)]
    functions = [thing for thing in own if isinstance(thing, FunctionLoss) or (inspect.isfunction(thing) and _is_loss(thing))]
    found = classes or functions
    if len(found) != 1:
        names = ", ".join(getattr(thing, "__name__", "") for thing in found) or "none"
        raise ConfigError(f"check loss: {paths.shown(path)} has several losses or none ({names}); name it: {path}:name")
    return found[0]


def _is_loss(function: Any) -> bool:
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) == 2 and not function.__name__.startswith("_")


def _values(options: Sequence[str]) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(options)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _print_text(title: str, declared: str, verdicts: Sequence[Verdict]) -> None:
    print(f"{title}\n{declared}\n")
    width = max(len(verdict.check) for verdict in verdicts)
    indent = " " * (width + 10)
    for verdict in verdicts:
        print(f"{verdict.state:<6}  {verdict.check:<{width}}  {verdict.found}")
        if verdict.failed:
            print(f"{indent}in training: {verdict.harm}\n{indent}change: {verdict.remedy}")
    print()


STYLES = {State.passed: "green", State.failed: "bold red", State.noted: "cyan", State.skipped: "dim"}


def _print_table(title: str, declared: str, verdicts: Sequence[Verdict]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for verdict in verdicts:
        style = STYLES[verdict.state]
        found = Text(verdict.found, style="" if verdict.failed else "dim")
        if verdict.failed:
            found.append("\nin training: ", "bold").append(verdict.harm)
            found.append("\nchange: ", "bold").append(verdict.remedy)
        table.add_row(Text(verdict.state, style), Text(verdict.check), found)
    console = Console(highlight=False)
    console.print()
    console.print(Text(title, "bold"))
    console.print(Text(declared, "dim"))
    console.print()
    console.print(table)
    console.print()
