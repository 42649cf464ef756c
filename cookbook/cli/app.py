"""The command ``cookbook``. Only typer and the standard library are imported up here: ``--help`` must be quick."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cookbook import __version__, terminal
from cookbook.cli import serving
from cookbook.errors import CookbookError
from cookbook.suggest import did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

OVERRIDE_HELP = """
An override sets any key of the configuration, or picks a file of a group:

\b
  cookbook train recipe=sft                          one of the recipes (cookbook list)
  cookbook train recipe=sft model=owner/name data=chats.jsonl
                                                     your model (hub id or folder), your data
  cookbook train recipe=grpo optim.lr=1e-5           a value
  cookbook train recipe=grpo model=qwen3_0p6b        a group's file, conf/model/qwen3_0p6b.yaml
  cookbook train recipe=grpo optim.lr=1e-5,1e-6 -m   one run after the other
  cookbook train recipe=grpo --cfg job               every key and its value
  cookbook train --config runs/mine/config.yaml      an earlier run again
"""

LOSS_HELP = """
\b
  cookbook check loss dpo                       a loss of conf/loss, yours or ours
  cookbook check loss dpo variant=ipo beta=0.2  with other options
  cookbook check loss my_file.py                the one loss of a file: a class, or a function (data, logprobs)
  cookbook check loss my_file.py:my_loss        one of several
"""

EVAL_HELP = """
A run is evaluated as it was configured, a model as cookbook train is; an override changes either:

\b
  cookbook eval runs/mine                                  its newest checkpoint; the result goes into its folder
  cookbook eval runs/mine 'eval.pass_at=[1,8]'             pass@k too, from drawn completions
  cookbook eval qwen3_0p6b data=gsm8k reward=number        a model of conf/model, a folder or a hub id
  cookbook eval tiny out=result.json                       the result as a file, every row's completion in it
"""

# As shells count: 128 and the signal's number.
INTERRUPTED = 130
OUTLIVE_READER = ("train", "serve")  # commands whose work is worth more than their output

app = typer.Typer(
    name="cookbook",
    help="Post-training of language models: one readable loop, any trainer.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Part(StrEnum):
    """What ``--cfg`` prints."""

    job = "job"
    hydra = "hydra"
    all = "all"


class Topic(StrEnum):
    """What ``--info`` prints."""

    all = "all"
    config = "config"
    defaults = "defaults"
    defaults_tree = "defaults-tree"
    plugins = "plugins"
    searchpath = "searchpath"


KINDS = ("all", "recipes", "losses", "models", "data", "rewards")  # what `cookbook list` lists


def _complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    from cookbook.cli.completion import complete_override

    return complete_override(ctx.params.get("overrides") or [], incomplete, ctx.params.get("config_dir") or [])


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDE", help="As of cookbook train.", autocompletion=_complete_override),
]


def _complete_loss(incomplete: str) -> list[str]:
    from cookbook.cli import conf_files

    return [file.name for file in conf_files.options("loss") if file.name.startswith(incomplete)]


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _complete_recipe(incomplete: str) -> list[str]:
    from cookbook.recipe import available

    return [found.name for found in available() if found.name.startswith(incomplete)]


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False
) -> None:
    if version:
        print(f"cookbook {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(epilog=OVERRIDE_HELP)
def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDE", help="key=value or group=name; see below.", autocompletion=_complete_override),
    ] = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="Sweep: one run for each list of values.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="Start from an earlier run's config.yaml.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every key, print the configuration, stop.")] = False,
    cfg: Annotated[Part | None, typer.Option("--cfg", "-c", help="Print the configuration, unchecked.")] = None,
    resolve: Annotated[bool, typer.Option("--resolve", help="With --cfg: fill ${...} in.")] = False,
    package: Annotated[str | None, typer.Option("--package", "-p", help="With --cfg: one node of it.")] = None,
    info: Annotated[Topic | None, typer.Option("--info", "-i", help="Print where the configuration is from.")] = None,
    config_dir: Annotated[
        list[Path] | None, typer.Option("--config-dir", "-cd", help="A folder that comes before ./conf.")
    ] = None,
    config_name: Annotated[str, typer.Option("--config-name", "-cn", help="The top file of conf/.")] = "train",
) -> None:
    """Run a recipe."""
    with _importing():
        from cookbook.cli import hydra_bridge as bridge

    _import_from_here()
    request = bridge.Request(overrides or (), multirun, config_dir or (), config_name, config)
    if cfg is not None:
        print(bridge.show(request, cfg, resolve=resolve, package=package), end="")
    elif info is not None:
        bridge.info(request, info)
    else:
        bridge.run(request, _dry_run if dry_run else _train)


def _train(cfg: DictConfig, overrides: list[str]) -> float | None:
    from cookbook.cli import conf_defaults

    with _importing():
        from cookbook.session import train

    return train(cfg, overrides, lambda: conf_defaults.composed(cfg.recipe.name))


def _dry_run(cfg: DictConfig, overrides: list[str]) -> None:
    from cookbook.cli import check_config

    check_config.dry_run(cfg, overrides)


@app.command()
def serve(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="OVERRIDE", help="key=value or group=name, of conf/serve.yaml.")
    ] = None,
    cfg: Annotated[Part | None, typer.Option("--cfg", "-c", help="Print the configuration, unchecked.")] = None,
) -> None:
    """Serve the trainer over HTTP, to Tinker's client and ours."""
    from cookbook.cli import hydra_bridge as bridge
    from cookbook.cli import serve as serving

    _import_from_here()
    request = bridge.Request(overrides or (), config_name="serve")
    if cfg is not None:
        print(bridge.show(request, cfg), end="")
    else:
        bridge.run(request, serving.run)


@app.command()
def fork(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="NAME NEW_NAME, or loss NAME NEW_NAME.", autocompletion=_complete_recipe),
    ],
) -> None:
    """Copy a recipe, or a loss, into the current folder under a new name, to change it."""
    from cookbook.cli import fork as forking

    _import_from_here()
    kind, name, new = _kind_and_names(names, 2, "cookbook fork grpo my_grpo")
    print(forking.fork(kind, name, new))


@app.command()
def diff(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="NAME, or loss NAME.", autocompletion=_complete_recipe)],
) -> None:
    """Show what a fork changed."""
    from cookbook.cli import fork as forking

    _import_from_here()
    kind, name = _kind_and_names(names, 1, "cookbook diff my_grpo")
    print(forking.diff(kind, name, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.", autocompletion=_complete_kind)] = "all",
) -> None:
    """List what can be chosen, with where it comes from."""
    from cookbook.cli import listing

    if kind not in KINDS:
        raise CookbookError(f"list: unknown kind {kind!r}.{did_you_mean(kind, KINDS)} (choices: {', '.join(KINDS)})")
    _import_from_here()
    listing.print_list(kind, table=sys.stdout.isatty())


@app.command()
def sample(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a checkpoint, or a model.")],
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    max_tokens: Annotated[int, typer.Option(help="Length of a completion, tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    num_samples: Annotated[int, typer.Option(help="Completions.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed draws the same completions.")] = 0,
) -> None:
    """Sample completions of a prompt."""
    from cookbook.cli import sample_target

    found = sample_target.resolve(target)  # before anything slow
    with _importing():
        from cookbook import session

    _import_from_here()
    for completion in session.sample(
        found, prompt, max_tokens=max_tokens, temperature=temperature, num_samples=num_samples, seed=seed
    ):
        print(completion)


@app.command("eval", epilog=EVAL_HELP)
def eval_(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a checkpoint, or a model.")],
    overrides: Overrides = None,
) -> None:
    """Evaluate a run or a model on held-out rows."""
    with _importing():
        from cookbook.cli import evaluate as evaluating

    _import_from_here()
    evaluating.run(target, overrides or ())


@app.command()
def compare(runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The folders of two runs or more.")]) -> None:
    """Show in what runs differ, and how they came out."""
    from cookbook.cli import compare as comparing

    comparing.run(runs, table=sys.stdout.isatty())


@app.command()
def plan(
    overrides: Overrides = None,
) -> None:
    """Estimate the memory and arithmetic of a step, before any weight is loaded."""
    with _importing():
        from cookbook.cli import hydra_bridge as bridge
        from cookbook.cli import plan as planning

    _import_from_here()
    bridge.run(bridge.Request(overrides or ()), planning.run)


check = typer.Typer(name="check", help="Examine a loss, a dataset or a configuration, without training.", rich_markup_mode=None)
app.add_typer(check)
app.add_typer(serving.weights)
app.add_typer(serving.deployments)


@check.callback(invoke_without_command=True)
def _check(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@check.command("loss", epilog=LOSS_HELP)
def check_loss(
    target: Annotated[
        str, typer.Argument(metavar="LOSS", help="A name, file.py, or file.py:name; see below.", autocompletion=_complete_loss)
    ],
    options: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the loss.")] = None,
) -> None:
    """Measure an objective against what it declares, on small random batches."""
    with _importing():
        from cookbook.cli import check_loss as checking

    _import_from_here()
    with terminal.doing("measuring the loss"):
        checking.run(target, options or (), table=sys.stdout.isatty())


@check.command("data")
def check_data(
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows shown as tokens.")] = 3,
) -> None:
    """Show what of a dataset would be trained, and the rows that cannot be used."""
    with _importing():
        from cookbook.cli import check_data as checking
        from cookbook.cli import hydra_bridge as bridge

    _import_from_here()
    bridge.run(bridge.Request(overrides or ()), lambda cfg, _: checking.run(cfg, rows, table=sys.stdout.isatty()))


@check.command("config")
def check_config(
    overrides: Overrides = None,
) -> None:
    """Type every key, and say what the run would do."""
    with _importing():
        from cookbook.cli import check_config as checking
        from cookbook.cli import hydra_bridge as bridge

    _import_from_here()
    bridge.run(bridge.Request(overrides or ()), checking.run)


def _kind_and_names(words: Sequence[str], count: int, example: str) -> tuple[Any, ...]:
    kind = "loss" if len(words) == count + 1 and words[0] == "loss" else "recipe"
    names = words[1:] if kind == "loss" else words
    if len(names) != count:
        raise CookbookError(f"expected {count} name{'s' * (count > 1)}, got {len(words)}; for example: {example}")
    return kind, *names


def _importing() -> contextlib.AbstractContextManager[object]:
    """Show on a terminal that the command starts; a file or a pipe gets no line."""
    return terminal.doing("starting", plain_after_s=terminal.NEVER)


def _import_from_here() -> None:
    """Lets ``_target_: my_module.MyLoss`` find the user's file. Last, so that a file here hides nothing installed."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def run(arguments: Sequence[str]) -> int:
    """Return the exit code of one command line: 0 done, 2 the user's input (one line on stderr), 130 interrupted.

    ``train`` and ``serve`` continue if the reader of their output closes the pipe; any other command then ends with 0.
    A bug raises, so that Python prints its trace and exits with 1.
    """
    try:
        with terminal.shown(outlives_reader=arguments[0] in OUTLIVE_READER if arguments else False):
            return app(list(arguments), prog_name="cookbook", standalone_mode=False) or 0
    except CookbookError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        # pydantic begins with "Value error", which tells a user nothing
        return _refuse(_override_typed_as_option(error, arguments) or error.format_message().replace("Value error, ", ""))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as stop:  # typer's answer to any broken pipe, which need not be the terminal's
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        if not _reader_has_left():
            raise stop.__context__ from None
        return 0


def _override_typed_as_option(error: typer.TyperException, arguments: Sequence[str]) -> str | None:
    """The line for ``--optim.lr 1e-4`` and for options of other libraries; None for any other error."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or not any(param.name == "overrides" for param in context.command.params):
        return None
    from cookbook.cli import hydra_bridge as bridge

    depth = len(context.command_path.split()) - 1  # words of the command's own name, such as `check config`
    options = [param for param in context.command.params if param.param_type_name == "option"]
    known = {name: not param.is_flag for param in options for name in param.opts}
    return bridge.explain_options(list(arguments[depth:]), known, "serve" if arguments[0] == "serve" else "train")


def _reader_has_left() -> bool:
    """Whether the broken pipe is the standard output, as of ``cookbook ... | head``."""
    poll = select.poll()
    poll.register(1, 0)
    if any(state & select.POLLERR for _, state in poll.poll(0)):
        terminal.write_nowhere(1)
        return True
    return False


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """The entry point of the installed command."""
    if sys.platform == "win32":
        sys.exit(_refuse("cookbook runs on Linux and macOS; on Windows, install it in WSL (wsl --install)"))
    if sys.argv[1:2] == ["train"]:
        gc.disable()  # start-up makes a million objects that stay, and looking through them took a fifth of it
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.write_nowhere(1)
    if code == INTERRUPTED:  # the trainer's thread may still compute, and would crash in an interpreter that takes itself down
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
