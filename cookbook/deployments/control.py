"""What is asked of a vLLM server besides samples: to read weights while it serves, to put them in, and to say which it has.

Its routes for control ask nobody for a password, so it listens on this machine only. Every method of
:class:`~cookbook.deployments.vllm_worker.WeightWorker` runs on each of its workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cookbook.deployments import holder
from cookbook.deployments.http import Client, RequestRefusedError
from cookbook.errors import RolloutError

RPC = "/collective_rpc"
POLL_S = 0.02


def status(client: Client) -> list[dict[str, Any]]:
    """What every worker says of itself, as :meth:`~cookbook.deployments.holder.WeightHolder.status` has it."""
    return list(client.call(RPC, {"method": "cookbook_status"})["results"])


def prepare(clients: Iterable[Client], folder: Path) -> None:
    """All of them read a checkpoint, side by side, and go on serving.

    Raises:
        RolloutError: a worker could not; it serves what it did.
    """
    clients = list(clients)
    for client in clients:
        client.once(RPC, {"method": "cookbook_prepare", "args": [str(folder.absolute())]})
    for client in clients:
        _wait_until_read(client)


def _wait_until_read(client: Client) -> None:
    while True:
        found = status(client)
        if failed := next((one for one in found if one["state"] == holder.FAILED), None):
            raise RolloutError(f"weight sync: {client.url}: {failed['error']}; it goes on serving its earlier weights")
        if all(one["state"] == holder.READY for one in found):
            return
        time.sleep(POLL_S)


def replace(client: Client, version: str) -> float:
    """Puts in the weights that were prepared. The seconds for which nothing was sampled.

    Requests under way are finished first, and those that come meanwhile wait: no sample mixes versions.
    """
    try:
        client.once("/pause?mode=wait")
        started = time.monotonic()
        client.once("/update_weight_version", {"new_version": version})  # first: should loading fail, older samplers see it
        client.once(RPC, {"method": "cookbook_load"})
        if not client.once("/reset_prefix_cache")["success"]:
            raise RolloutError("the prefix cache could not be reset")
    except BaseException as error:
        with contextlib.suppress(RolloutError):  # it would hide the first
            client.once("/resume")
        if isinstance(error, RolloutError):
            problem = f"weight sync: {client.url} may serve old or new weights by now ({error})"
            raise RolloutError(f"{problem}; nothing may be sampled from it before the next sync") from None
        raise
    client.call("/resume")
    return time.monotonic() - started


def add_adapter(client: Client, name: str, folder: Path) -> None:
    """Puts the adapter that was prepared into service beside others, without a pause.

    A name stands for one content for ever. vLLM could replace an adapter under its name (``load_inplace``), but would go on
    reading it from the disk from then on, and end when it is gone; it would also keep what it has cached for the old one.

    Raises:
        RolloutError: vLLM does not take it, or has taken something else.
    """
    drop_adapter(client, name)
    path = str(folder.absolute())
    try:
        client.once("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, text=True)
        client.once(RPC, {"method": "cookbook_add_adapter", "args": [name, path]})
    except RolloutError as error:
        raise RolloutError(f"weight sync: {client.url} has not taken the adapter ({error})") from None


def drop_adapter(client: Client, name: str) -> None:
    """Nobody can ask for it any more; requests under way are finished with it. One that is not there is fine."""
    client.once(RPC, {"method": "cookbook_drop_adapter", "args": [name]})
    with contextlib.suppress(RequestRefusedError):
        client.once("/v1/unload_lora_adapter", {"lora_name": name}, text=True)


def adapters(client: Client) -> list[str]:
    """The names of those it has."""
    return [str(model["id"]) for model in client.call("/v1/models", method="GET")["data"] if model.get("parent")]


def max_length(client: Client) -> int:
    """Prompt and completion together, tokens."""
    found = client.call("/v1/models", method="GET")["data"]
    return min(int(model["max_model_len"]) for model in found if model.get("max_model_len"))
