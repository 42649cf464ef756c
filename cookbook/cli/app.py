"""The command ``cookbook``. Only typer and the standard library are imported at the top, because ``--help`` must be fast."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cookbook import terminal
from cookbook.cli import subcommands
from cookbook.cli.subcommands import Overrides, importing
from cookbook.errors import CookbookError
from cookbook.utils.paths import import_from_here
from cookbook.utils.signals import Stopped, exit_code
from cookbook.utils.suggest import did_you_mean
from cookbook.utils.version import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

# As shells count: 128 and the signal's number.
SIGNALLED = 128
INTERRUPTED = 130
# Commands that continue if the reader of their output closes the pipe.
OUTLIVE_READER = ("train", "serve")

app = typer.Typer(
    name="cookbook",
    help="Post-training of language models: one readable loop, any trainer.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# Parts of the configuration that --cfg prints, and topics that --info prints.
Part = Literal["job", "hydra", "all"]
Topic = Literal["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
# Kinds that `cookbook list` prints.
KINDS = ("all", "recipes", "losses", "models", "data", "rewards", "envs", "experiments")


ShowConfig = Annotated[Part | None, typer.Option("--cfg", "-c", help="Print the configuration, unchecked.")]
ConfigDirs = Annotated[list[Path] | None, typer.Option("--config-dir", "-cd", help="A folder searched before ./conf.")]
Target = Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, checkpoint, or model.")]


# Typer offers only those of the returned names that begin with the typed word.
def _complete_recipe() -> list[str]:
    from cookbook.config.recipe import available

    return [recipe.name for recipe in available()]


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    import_from_here()
    if version:
        print(f"cookbook {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def train(
    overrides: Overrides = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help="Sweep: one run for each list of values.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="The same as the file as first word.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every key, print the configuration, stop.")] = False,
    cfg: ShowConfig = None,
    all_keys: Annotated[bool, typer.Option("--all", help="With --cfg: every key, even on a terminal.")] = False,
    resolve: Annotated[bool, typer.Option("--resolve", help="With --cfg: resolve ${...}.")] = False,
    package: Annotated[str | None, typer.Option("--package", "-p", help="With --cfg: print one node only.")] = None,
    info: Annotated[Topic | None, typer.Option("--info", "-i", help="Print the sources of the configuration.")] = None,
    config_dir: ConfigDirs = None,
    config_name: Annotated[str, typer.Option("--config-name", "-cn", help="The top-level file of conf/.")] = "train",
) -> None:
    """Run a recipe.

    The configuration is a YAML file (cookbook init writes one), overrides, or both. An override sets any key, or picks a
    file of a group:

    \b
      cookbook train my.yaml                             your file; its keys are those of the command line
      cookbook train my.yaml optim.lr=1e-5               a value in place of the file's
      cookbook train recipe=sft                          one of the recipes (cookbook list)
      cookbook train recipe=sft model=owner/name data=chats.jsonl
                                                         your model (hub id or folder), your data
      cookbook train recipe=grpo optim.lr=1e-5           a value
      cookbook train recipe=grpo model=qwen3_0p6b        a file of a group: conf/model/qwen3_0p6b.yaml
      cookbook train recipe=grpo optim.lr=1e-5,1e-6 -m   one run for each value
      cookbook train recipe=grpo --cfg job               every key and its value
      cookbook train runs/mine/config.yaml               the configuration of an earlier run
    """
    with importing():
        from cookbook.cli.hydra import bridge

    request = bridge.ComposeRequest(overrides or (), multirun, config_dir or (), config_name, config)
    if cfg is not None:
        # A pipe or a file gets everything, because a program or a later run reads it.
        folded = cfg == "job" and package is None and not all_keys and sys.stdout.isatty()
        text = bridge.show(request, cfg, resolve=resolve, package=package)
        if folded:
            from cookbook.cli.hydra import main_keys

            text = main_keys.folded(text)
        print(text, end="")
    elif info is not None:
        bridge.info(request, info)
    else:
        try:
            bridge.run(request, _dry_run if dry_run else _train)
        except Stopped as stop:
            # Typer would answer every interrupt with the code of Ctrl-C.
            raise typer.Exit(exit_code(stop)) from None


def _train(cfg: DictConfig, overrides: list[str]) -> float | None:
    from cookbook.cli.hydra import conf_files

    with importing():
        from cookbook.run.builder import train

    return train(cfg, overrides, lambda: conf_files.composed(cfg.recipe.name)).objective


def _dry_run(cfg: DictConfig, overrides: list[str]) -> None:
    from cookbook.cli import check_config

    check_config.dry_run(cfg, overrides)


@app.command()
def serve(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="OVERRIDE", help="key=value or group=name, of conf/serve.yaml.")
    ] = None,
    cfg: ShowConfig = None,
    config_dir: ConfigDirs = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file in out=..., and do not serve.")] = False,
) -> None:
    """Serve the trainer over HTTP, for Tinker's client and cookbook's."""
    from cookbook.cli import serve as serving
    from cookbook.cli.hydra import bridge

    request = bridge.ComposeRequest(overrides or (), config_dirs=config_dir or (), config_name="serve")
    if cfg is not None:
        print(bridge.show(request, cfg), end="")
    else:
        bridge.run(request, serving.verify if verify else serving.run)


@app.command()
def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="As cookbook list prints them.", autocompletion=_complete_recipe)
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE] [OVERRIDE]...", help="File to write; keys that it sets.")
    ] = None,
) -> None:
    """Write a commented YAML file for a recipe, to edit and to train with.

    \b
      cookbook init sft                                   writes sft.yaml
      cookbook init sft my.yaml model=./m data=rows.jsonl writes my.yaml with your model and data
      cookbook train my.yaml                              trains
    """
    from cookbook.cli.hydra import main_keys

    print(main_keys.init(recipe, words or []))


@app.command()
def fork(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="NAME NEW_NAME, or loss NAME NEW_NAME.", autocompletion=_complete_recipe),
    ],
) -> None:
    """Copy a recipe or a loss into the current folder under a new name, for you to change."""
    from cookbook.cli import catalogue

    kind, (name, new) = _kind_and_names(names, 2, "cookbook fork grpo my_grpo")
    print(catalogue.fork(kind, name, new))


@app.command()
def diff(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="NAME, or loss NAME.", autocompletion=_complete_recipe)],
) -> None:
    """Show the differences between a fork and its origin."""
    from cookbook.cli import catalogue

    kind, (name,) = _kind_and_names(names, 1, "cookbook diff my_grpo")
    print(catalogue.diff(kind, name, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ), end="")


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.", autocompletion=lambda: list(KINDS))] = "all",
) -> None:
    """List recipes, losses, models, data, rewards and environments, with their origin."""
    from cookbook.cli import catalogue

    if kind not in KINDS:
        raise CookbookError(f"list: unknown kind {kind!r}.{did_you_mean(kind, KINDS)} (choices: {', '.join(KINDS)})")
    catalogue.print_list(kind, table=sys.stdout.isatty())


@app.command()
def sample(
    target: Target,
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens of a completion, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    num_samples: Annotated[int, typer.Option(help="Number of completions.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed draws the same completions.")] = 0,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help='Options of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = None,
) -> None:
    """Sample completions of a prompt."""
    from cookbook.cli import catalogue

    # An unknown name fails before the slow imports.
    weights = catalogue.resolve(target, "sample")
    with importing():
        from cookbook.run import builder

    for completion in builder.sample(
        weights,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        num_samples=num_samples,
        seed=seed,
        chat_template_kwargs=_template_options(chat_template_kwargs),
    ):
        print(completion)


@app.command()
def chat(
    target: Target,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Let the base model answer too.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same answers.")] = 0,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help='Options of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = None,
) -> None:
    """Talk with a run or a model. Without a terminal: one answer for each line of the input."""
    from cookbook.cli import catalogue

    options = _template_options(chat_template_kwargs)
    weights = catalogue.resolve(target, "chat")
    with importing():
        from cookbook.cli import chat as chatting

    chatting.run(weights, chatting.ChatOptions(system, base, max_tokens, temperature, seed, options))


@app.command("eval")
def eval_(
    target: Target,
    overrides: Overrides = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval in place of held-out rows: names with commas.")] = None,
    task_folder: Annotated[str | None, typer.Option(help="Folder with task files of your own.")] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples in each prompt. Default: the task's.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Render prompts as conversations.")] = False,
) -> None:
    """Evaluate a run or a model on held-out rows, or on tasks of lm-eval.

    A run is evaluated with its own configuration, a model with that of cookbook train; overrides change both:

    \b
      cookbook eval runs/mine                                  its newest checkpoint; the result goes into its folder
      cookbook eval runs/mine 'eval.pass_at=[1,8]'             pass@k too, from drawn completions
      cookbook eval qwen3_0p6b data=gsm8k reward=number        a model of conf/model, a folder or a hub id
      cookbook eval runs/mine env=arithmetic                   in an environment
      cookbook eval tiny out=result.json                       the result as a file, every row's completion in it
      cookbook eval runs/mine --tasks gsm8k,ifeval             tasks of lm-eval, eval.limit documents of each
    """
    with importing():
        from cookbook.cli import evaluate

    evaluate.evaluate(target, overrides or (), evaluate.TaskOptions(tasks, task_folder, fewshot, chat_template))


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Folders of two or more runs.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with curves and completions side by side.")] = None,
) -> None:
    """Compare the configuration and final metrics of runs."""
    from cookbook.cli import evaluate

    if html is None:
        evaluate.compare(runs, table=sys.stdout.isatty())
        return
    from cookbook.cli import compare_page

    compare_page.write(runs, html)
    print(f"wrote {html}")


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folder of a run, or of two runs.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: view.html in the first run.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on this machine; it follows a live run.")] = False,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port of --serve. Default, and 0: any free port.")
    ] = None,
) -> None:
    """Show metrics and rollouts in a browser, with the tokens of every turn.

    \b
      cookbook view runs/mine                 writes runs/mine/view.html, which needs no other file and no network
      cookbook view runs/mine runs/other      two runs side by side
      cookbook view runs/mine --serve         a page that follows the run while it trains
    """
    from cookbook.cli.view import command

    command.run(runs, out, serve, port)


@app.command()
def plan(overrides: Overrides = None) -> None:
    """Estimate the memory and arithmetic of a step, without loading weights."""
    with importing():
        from cookbook.cli import plan as planning
        from cookbook.cli.hydra import bridge

    bridge.run(bridge.ComposeRequest(overrides or ()), planning.run)


@app.command()
def calibrate(
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts to sample.")] = 32,
    completions: Annotated[int, typer.Option(help="Completions of a prompt.")] = 8,
    price: Annotated[float | None, typer.Option(help="Price of an hour of this machine, for the cost of the run.")] = None,
) -> None:
    """Sample some prompts, make one step, and say what to change before a run of reinforcement learning.

    \b
      cookbook calibrate recipe=grpo model=./m data=rows.jsonl reward=number --price 2.5
    """
    with importing():
        from cookbook.cli import calibrate as calibrating
        from cookbook.cli.hydra import bridge

    request = bridge.ComposeRequest(overrides or ())
    bridge.run(request, lambda cfg, typed: calibrating.run(cfg, typed, prompts, completions, price))


for group in (subcommands.check, subcommands.weights, subcommands.deployments, subcommands.jobs, subcommands.cache):
    app.add_typer(group)


def _template_options(text: str | None) -> dict[str, Any] | None:
    """Return the options of the chat template. Raises ConfigError: the text is not an object in JSON."""
    from cookbook.errors import ConfigError
    from cookbook.utils.template_options import checked_options

    try:
        return checked_options(text) or None
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs: {error}") from None


def _kind_and_names(words: Sequence[str], count: int, example: str) -> tuple[str, Sequence[str]]:
    kind = "loss" if len(words) == count + 1 and words[0] == "loss" else "recipe"
    names = words[1:] if kind == "loss" else words
    if len(names) != count:
        raise CookbookError(f"expected {count} name{'s' * (count > 1)}, got {len(words)}; for example: {example}")
    return kind, names


def run(arguments: Sequence[str]) -> int:
    """Return the exit code of one command line: 0 done, 2 the user's input (one line on stderr), 130 Ctrl-C, 143 SIGTERM.

    ``train`` and ``serve`` continue if the reader of their output closes the pipe; any other command then ends with 0.
    A bug raises, so that Python prints its trace and exits with 1.
    """
    try:
        with terminal.shown(outlives_reader=arguments[0] in OUTLIVE_READER if arguments else False):
            return app(list(arguments), prog_name="cookbook", standalone_mode=False) or 0
    except CookbookError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        # pydantic begins with "Value error", which does not help the user.
        return _refuse(_override_typed_as_option(error, arguments) or error.format_message().replace("Value error, ", ""))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:
        if error.filename is None and not _can_print():
            terminal.write_nowhere(1)
            return _refuse(f"standard output cannot be written: {error.strerror}; free the disk, or choose another file")
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(f"{str(error.filename)[:40]}...: the name of a file or folder is too long; choose a shorter one")
    except SystemExit as stop:
        # Typer exits at any broken pipe, which need not be that of the standard output.
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        if not _reader_has_left():
            raise stop.__context__ from None
        return 0


def _override_typed_as_option(error: typer.TyperException, arguments: Sequence[str]) -> str | None:
    """Return the message for ``--optim.lr 1e-4`` and for options of other libraries; None for any other error."""
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or not any(param.name == "overrides" for param in context.command.params):
        return None
    from cookbook.cli.hydra import bridge

    # Number of words of the command's own name, such as `check config`.
    depth = len(context.command_path.split()) - 1
    options = [param for param in context.command.params if param.param_type_name == "option"]
    known = {name: not param.is_flag for param in options for name in param.opts}
    return bridge.explain_options(list(arguments[depth:]), known, "serve" if arguments[0] == "serve" else "train")


def _can_print() -> bool:
    """Whether the standard output accepts what Python has buffered for it."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return False
    return True


def _reader_has_left() -> bool:
    """Whether the broken pipe is the standard output, as of ``cookbook ... | head``."""
    poll = select.poll()
    poll.register(1, 0)
    if any(state & select.POLLERR for _, state in poll.poll(0)):
        terminal.write_nowhere(1)
        return True
    return False


def _refuse(message: str) -> int:
    # Without a terminal, the exit code has to do.
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> None:
    """The entry point of the installed command."""
    if sys.platform == "win32":
        sys.exit(_refuse("cookbook runs on Linux and macOS; on Windows, install it in WSL (wsl --install)"))
    if sys.argv[1:2] in (["train"], ["sample"], ["chat"], ["eval"]):
        # Start-up makes a million objects that stay; the garbage collector took a fifth of the time to look through them.
        gc.disable()
    terminal.make_writable()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.write_nowhere(1)
    except OSError as error:
        terminal.write_nowhere(1)
        code = code or _refuse(f"standard output cannot be written: {error.strerror}; free the disk, or choose another file")
    if code > SIGNALLED:
        # The trainer's thread may still compute, and would crash while the interpreter shuts down.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
