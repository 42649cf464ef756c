"""The commands of ``cookbook weights`` and ``cookbook deployments``. As in ``app.py``, only typer is imported up here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from omegaconf import DictConfig

weights = typer.Typer(
    name="weights", help="List, verify, put together, export and prune the checkpoints of a run.", rich_markup_mode=None
)
deployments = typer.Typer(
    name="deployments", help="Start, list, scale, warm up and end vLLM servers that outlive a run.", rich_markup_mode=None
)

Folder = Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder, or a checkpoint.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder below a run's checkpoints.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not be there yet.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As deployment.name has it.")]


@weights.callback(invoke_without_command=True)
@deployments.callback(invoke_without_command=True)
def _help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@weights.command("list")
def list_weights(folder: Folder) -> None:
    """List checkpoints with kind, step, size and the digest of their weights."""
    from cookbook.cli import weights as work

    work.print_list(folder, table=sys.stdout.isatty())


@weights.command("verify")
def verify_weights(folder: Folder) -> None:
    """Read every file, and put every delta together with what it differs from."""
    from cookbook.cli import weights as work

    work.verify(folder)


@weights.command("reconstruct")
def reconstruct_weights(checkpoint: Checkpoint, out: Out) -> None:
    """Put a delta and what it goes back to together, as an ordinary Hugging Face folder."""
    from cookbook.cli import weights as work

    work.reconstruct(checkpoint, out)


@weights.command("export")
def export_weights(
    checkpoint: Checkpoint,
    out: Out,
    merged: Annotated[bool, typer.Option("--merged", help="Add a LoRA adapter to the model it was trained on.")] = False,
) -> None:
    """Write an ordinary folder for transformers, PEFT or vLLM, without the optimizer."""
    from cookbook.cli import weights as work

    work.export(checkpoint, out, merged=merged)


@weights.command("prune")
def prune_weights(
    folder: Folder, keep: Annotated[int, typer.Option(min=0, help="How many of the newest stay, with what they need.")]
) -> None:
    """Delete checkpoints that were saved to sample from. Those to resume from stay: checkpoint.keep is about them."""
    from cookbook.cli import weights as work

    work.prune(folder, keep)


@deployments.command("create")
def create_deployment(
    name: Name,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="OVERRIDE", help="As of cookbook train: model=..., deployment.replicas=2, ...")
    ] = None,
) -> None:
    """Start servers, for runs with deployment=vllm deployment.name=NAME and the same model to use."""
    from cookbook.cli import deployments as work
    from cookbook.cli import hydra_bridge as bridge

    def create(cfg: DictConfig, _: list[str]) -> None:
        work.create(cfg)

    bridge.run(bridge.Request(work.overrides(name, overrides or [])), create)


@deployments.command("list")
def list_deployments() -> None:
    """List the servers that run, with their health."""
    from cookbook.cli import deployments as work

    work.print_list(table=sys.stdout.isatty())


@deployments.command("scale")
def scale_deployment(
    name: Name,
    replicas: Annotated[int, typer.Argument(min=1, help="Servers.")],
    startup_s: Annotated[float, typer.Option(help="Seconds that a server may take to come up.")] = 900.0,
) -> None:
    """Start more servers like those that run, or end some of them."""
    from cookbook.cli import deployments as work

    work.scale(name, replicas, startup_s)


@deployments.command("warm-up")
def warm_up_deployment(name: Name) -> None:
    """Let every server sample one token: it is healthy, and the next request finds it ready."""
    from cookbook.cli import deployments as work

    work.warm_up(name)


@deployments.command("delete")
def delete_deployment(name: Name) -> None:
    """End a deployment's servers."""
    from cookbook.cli import deployments as work

    work.delete(name)
