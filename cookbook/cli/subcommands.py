"""Commands of ``cookbook check``, ``weights``, ``deployments``, ``jobs`` and ``cache``. ``--help`` imports only typer."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from cookbook import terminal
from cookbook.errors import CookbookError

check = typer.Typer(
    name="check", help="Examine a loss, an environment, a dataset or a configuration, without training.", rich_markup_mode=None
)
weights = typer.Typer(
    name="weights", help="List, verify, reconstruct, export, push, upload and prune checkpoints.", rich_markup_mode=None
)
deployments = typer.Typer(
    name="deployments", help="Start, list, scale, warm up and end vLLM servers that outlive a run.", rich_markup_mode=None
)
jobs = typer.Typer(name="jobs", help="Start, list, attach to and end trainers that run as jobs.", rich_markup_mode=None)
cache = typer.Typer(name="cache", help="List and clear the rows and tokens that runs keep on disk.", rich_markup_mode=None)


def _complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    from cookbook.cli.hydra.bridge import complete_override

    return complete_override(ctx.params.get("overrides") or [], incomplete, ctx.params.get("config_dir") or [])


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDE", help="key=value or group=name, as for cookbook train.", autocompletion=_complete_override
    ),
]
Folder = Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run, or a checkpoint.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of one checkpoint of a run.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the deployment, as in deployment.name.")]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--folder", help="Folder of the cache; default: $COOKBOOK_CACHE, $HF_HOME/cookbook or ~/.cache/cookbook."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job; cookbook jobs list prints it.")]


@check.callback(invoke_without_command=True)
@weights.callback(invoke_without_command=True)
@deployments.callback(invoke_without_command=True)
@jobs.callback(invoke_without_command=True)
@cache.callback(invoke_without_command=True)
def show_help(ctx: typer.Context) -> None:
    """Print the help of a group of commands that was called without a command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def importing() -> contextlib.AbstractContextManager[object]:
    """Show on a terminal that the command starts; a file or a pipe gets no line."""
    return terminal.doing("starting", plain_after_s=terminal.NEVER_S)


def _complete_loss() -> list[str]:
    from cookbook.cli.hydra import conf_files

    return [file.name for file in conf_files.options("loss")]


@check.command("loss")
def check_loss(
    target: Annotated[
        str, typer.Argument(metavar="LOSS", help="A name, file.py, or file.py:name; see above.", autocompletion=_complete_loss)
    ],
    options: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the loss.")] = None,
) -> None:
    """Measure a loss against its declarations, on small random batches.

    \b
      cookbook check loss dpo                       a loss of conf/loss, yours or packaged
      cookbook check loss dpo variant=ipo beta=0.2  with other options
      cookbook check loss my_file.py                the one loss of a file: a class, or a function (data, logprobs)
      cookbook check loss my_file.py:my_loss        one of several
    """
    with importing():
        from cookbook.cli import check_loss as checking

    with terminal.doing("measuring the loss"):
        checking.run(target, options or (), table=sys.stdout.isatty())


@check.command("env")
def check_env(
    target: Annotated[str, typer.Argument(metavar="ENV", help="FILE.py:CLASS, or a name of cookbook list envs.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the environment, as in conf/env.")
    ] = None,
) -> None:
    """Test an environment before a run: play three episodes with made-up answers. No model is needed.

    \b
    plays        no call raises or hangs
    repeats      the same row and answers give the same observations and rewards, which resume relies on
    independent  episodes that are played in turn do not change each other
    tokens       the tokens of every turn begin with those of the turn before
    rewards      the rewards of the episodes, within the class's reward_range; or none if the run needs reward=
    time         the slowest call, and the time limit

    \b
      cookbook check env my_env.py:MyClass                    your own class (docs/guide/environments.md)
      cookbook check env my_env.py:MyClass data=rows.jsonl    with the first rows of the data, if reset reads columns
      cookbook check env arithmetic limit=10                  an environment of conf/env, with an option
      cookbook check env reasoning_gym task=chain_sum
      cookbook check env textarena game=GuessTheNumber-v0
    """
    with importing():
        from cookbook.cli import check_env as checking

    with terminal.doing("playing the environment"):
        checking.run(target, options or (), table=sys.stdout.isatty())


@check.command("data")
def check_data(
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows shown as tokens.")] = 3,
) -> None:
    """Show which tokens of a dataset are trained on, and which rows are rejected."""
    with importing():
        from cookbook.cli import check_data as checking
        from cookbook.cli.hydra import bridge

    bridge.run(bridge.ComposeRequest(overrides or ()), lambda cfg, _: checking.run(cfg, rows, table=sys.stdout.isatty()))


@check.command("config")
def check_config(overrides: Overrides = None) -> None:
    """Validate every key and describe the run."""
    with importing():
        from cookbook.cli import check_config as checking
        from cookbook.cli.hydra import bridge

    bridge.run(bridge.ComposeRequest(overrides or ()), checking.run)


@weights.command("list")
def list_weights(folder: Folder) -> None:
    """List checkpoints with kind, step, size and the digest of their weights."""
    from cookbook.cli import weights as work

    work.print_list(folder, table=sys.stdout.isatty())


@weights.command("verify")
def verify_weights(folder: Folder) -> None:
    """Read every file, and reconstruct the weights of every delta."""
    from cookbook.cli import weights as work

    work.verify(folder)


@weights.command("reconstruct")
def reconstruct_weights(checkpoint: Checkpoint, out: Out) -> None:
    """Rebuild full weights from a chain of deltas, as a Hugging Face folder."""
    from cookbook.cli import weights as work

    work.reconstruct(checkpoint, out)


@weights.command("export")
def export_weights(
    checkpoint: Checkpoint,
    out: Out,
    merged: Annotated[bool, typer.Option("--merged", help="Merge a LoRA adapter into its base model.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write model.gguf for llama.cpp, and a Modelfile for Ollama.")] = False,
    precision: Annotated[
        str | None, typer.Option(help="With --gguf: float32, float16 or bfloat16. Default: that of the weights.")
    ] = None,
) -> None:
    """Write a folder for transformers, PEFT or vLLM, or for llama.cpp and Ollama, without the optimizer."""
    from cookbook.cli import weights as work

    if gguf:
        work.export_gguf(checkpoint, out, merged=merged, precision=precision)
    elif precision is not None:
        raise CookbookError("weights export: --precision belongs to --gguf; add --gguf, or leave it out")
    else:
        work.export(checkpoint, out, merged=merged)


@weights.command("push")
def push_weights(
    folder: Folder,
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the hub; it is created if needed.")],
    merged: Annotated[bool, typer.Option("--merged", help="Merge a LoRA adapter into its base model.")] = False,
    public: Annotated[bool, typer.Option("--public/--private", help="Who can see a new repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the files, list them, and upload nothing.")] = False,
) -> None:
    """Upload the weights and a model card to the Hugging Face hub. A run: its newest checkpoint.

    A new repository is private, unless --public.
    """
    from cookbook.cli import weights as work

    work.push(folder, repository, merged=merged, public=public, dry_run=dry_run)


@weights.command("upload")
def upload_weights(
    folder: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter.")],
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    name: Annotated[str, typer.Option("--name", help="Name of the checkpoint.")] = "uploaded",
) -> None:
    """Upload a PEFT adapter to a server of cookbook, and print its address. The API key is TINKER_API_KEY."""
    from cookbook.cli import weights as work

    work.upload(folder, url, name)


@weights.command("prune")
def prune_weights(
    folder: Folder, keep: Annotated[int, typer.Option(min=0, help="Number of newest checkpoints to keep.")]
) -> None:
    """Delete old sampler checkpoints. Training checkpoints stay; checkpoint.keep limits those."""
    from cookbook.cli import weights as work

    work.prune(folder, keep)


@deployments.command("create")
def create_deployment(
    name: Name,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDE", help="As for cookbook train: model=..., deployment.replicas=2, ..."),
    ] = None,
) -> None:
    """Start servers, for runs of the same model with deployment=vllm deployment.name=NAME."""
    from cookbook.cli import deployments as work
    from cookbook.cli.hydra import bridge

    bridge.run(bridge.ComposeRequest(work.overrides(name, overrides or [])), work.create)


@deployments.command("list")
def list_deployments() -> None:
    """List the servers that run, with their health."""
    from cookbook.cli import deployments as work

    work.print_list(table=sys.stdout.isatty())


@deployments.command("scale")
def scale_deployment(
    name: Name,
    replicas: Annotated[int, typer.Argument(min=1, help="Number of servers.")],
    startup_s: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 900.0,
) -> None:
    """Start more servers with the same options, or end some servers."""
    from cookbook.cli import deployments as work

    work.scale(name, replicas, startup_s)


@deployments.command("warm-up")
def warm_up_deployment(name: Name) -> None:
    """Let every server sample one token, to show that the server works and to make its next request fast."""
    from cookbook.cli import deployments as work

    work.warm_up(name)


@deployments.command("delete")
def delete_deployment(name: Name) -> None:
    """End a deployment's servers."""
    from cookbook.cli import deployments as work

    work.delete(name)


@jobs.command("create")
def create_job(
    name: JobName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="OVERRIDE", help="As for cookbook train: model=..., backend....=..., job=slurm, ..."),
    ] = None,
) -> None:
    """Start a trainer as a job that clients attach to. cookbook train job=... creates a job of its own."""
    from cookbook.cli import jobs as work
    from cookbook.cli.hydra import bridge

    bridge.run(bridge.ComposeRequest(work.overrides(overrides or [])), lambda cfg, _: work.create(name, cfg))


@jobs.command("list")
def list_jobs() -> None:
    """List the jobs with their state, and the state of their processes as the launcher reports it."""
    from cookbook.cli import jobs as work

    work.print_list(table=sys.stdout.isatty())


@jobs.command("logs")
def job_logs(
    name: JobName,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of the attempt. Default: the newest.")] = None,
) -> None:
    """Print the output of a job's trainer."""
    from cookbook.cli import jobs as work

    work.print_logs(name, attempt)


@jobs.command("attach")
def attach_job(
    name: JobName, port: Annotated[int, typer.Option(min=0, max=65535, help="Local port. 0: any free port.")] = 0
) -> None:
    """Forward a local address to a job until Ctrl-C, and restart the job's trainer if it ends."""
    from cookbook.cli import jobs as work

    work.attach(name, port)


@jobs.command("stop")
def stop_job(name: JobName) -> None:
    """End a job's processes. Its run, and cookbook jobs attach, can resume it."""
    from cookbook.cli import jobs as work

    work.stop(name)


@jobs.command("delete")
def delete_job(name: JobName) -> None:
    """End a job's processes, and remove the job from the list. Its checkpoints stay."""
    from cookbook.cli import jobs as work

    work.delete(name)


@cache.command("list")
def list_cache(folder: CacheFolder = None) -> None:
    """List the tables of rows and tokens, with their size and last use."""
    from cookbook.cli import cache as work

    work.print_list(folder, table=sys.stdout.isatty())


@cache.command("clear")
def clear_cache(
    folder: CacheFolder = None,
    unused_days: Annotated[
        float, typer.Option(min=0, help="Remove only tables that were not used for this number of days.")
    ] = 0.0,
) -> None:
    """Remove rows and tokens from the disk. Later runs read and tokenize their data again."""
    from cookbook.cli import cache as work

    work.clear(folder, unused_days)
