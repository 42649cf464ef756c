"""One rank of a server with several ranks. The first rank serves HTTP and broadcasts commands, which the others execute.

:func:`main` is the entry point of a rank that :class:`~cookbook.backends.group.supervisor.RankSupervisor` starts. Under
torchrun, ``cookbook serve`` calls :func:`serve_on_ranks` directly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from cookbook.backends.group.supervisor import RankChannel
from cookbook.engine.model import ModelConfig
from cookbook.engine.parallel import RanksLostError
from cookbook.errors import CookbookError
from cookbook.protocols import RankBackend
from cookbook.server.config import ServerConfig, record_failure
from cookbook.utils import gpus


def main() -> None:
    """Run one rank with the configuration that the supervisor sends."""
    channel = RankChannel()
    # Start before the imports below: they take seconds, and the supervisor may end meanwhile.
    threading.Thread(target=channel.end_with_supervisor, name="cookbook-supervisor", daemon=True).start()
    config = channel.config
    if config["key"] is not None:
        os.environ[ServerConfig().keys_env] = config["key"]
    choose_gpu()
    from cookbook.config.nodes import build

    try:
        model: ModelConfig = build(config["model"], "model", ModelConfig)
        backend: RankBackend = build(config["backend"], "backend")
        server: ServerConfig = build(config["server"], "server", ServerConfig)
        serve_on_ranks(model, backend, server, config["shard"], seed=config["seed"], out=Path(config["out"]), channel=channel)
    except CookbookError as error:
        channel.error(str(error))
        exit_now(2)
    except Exception as error:  # noqa: BLE001 - the supervisor reports it; a restart would fail in the same way
        traceback.print_exc()
        channel.error(f"rank {os.environ['RANK']} failed: {type(error).__name__}: {error}")
        exit_now(1)
    exit_now(0)


def serve_on_ranks(
    model: ModelConfig,
    backend: RankBackend,
    server: ServerConfig,
    shard: str,
    *,
    seed: int,
    out: Path,
    channel: RankChannel | None = None,
) -> None:
    """Join the process group that the environment variables describe, and serve on rank 0. The other ranks do not return.

    Raises:
        ConfigError: the address is in use or needs API keys that are missing; another server uses ``out``.
        BackendError: the model cannot be loaded.
    """
    import torch

    from cookbook.engine.ranks import commands
    from cookbook.engine.ranks.processes import join

    torch.set_num_threads(backend.threads)
    device = backend.torch_device()
    try:
        ranks = join(shard, device)
    except CookbookError:
        raise
    except Exception as error:  # noqa: BLE001 - torch raises various errors if another rank has ended or the port is in use
        print(f"error: the ranks cannot connect to each other: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        exit_now(commands.EXIT_LOST)
    if ranks.rank > 0:
        # Rank 0 finishes accepted requests, which needs all ranks, before it ends the others.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    leader = commands.start(ranks, functools.partial(report_lost, server, channel))
    from cookbook.server.serve import serve

    serve(model, backend, server, seed=seed, out=out, channel=channel)
    if leader is not None:
        leader.end()


def report_lost(server: ServerConfig, channel: RankChannel | None, error: RanksLostError) -> None:
    """Report why the ranks are lost, to the supervisor or to the manager of the job.

    The server of one client is not restarted after a lack of memory.
    """
    from cookbook.backends.worker import with_remedy

    known = with_remedy(error.__cause__ or error)
    # A restart would run out of memory again. A server for several clients starts again, and refuses the request that ends its
    # ranks a second time.
    if isinstance(known, CookbookError) and server.one_client:
        record_failure(server.failure_file, str(known))
        if channel is not None:
            channel.error(str(known))
    elif channel is not None:
        channel.lost(str(error))


def choose_gpu() -> None:
    """Restrict this process to the GPU of its local rank. Call this before CUDA is initialized."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # A launcher may have restricted the process to one GPU already.
    with contextlib.suppress(IndexError):
        os.environ[gpus.VARIABLE] = gpus.visible([local_rank])


def exit_now(code: int) -> NoReturn:
    """Exit without running destructors: those of a communication library could wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
