"""Control API of a vLLM server: prepare new weights while it serves, replace the weights, and report which weights it serves.

These routes have no authentication, so the server listens on the loopback interface only. Each method of
:class:`~cookbook.deployments.vllm.worker.WeightWorker` runs on every worker of the server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from cookbook.deployments.vllm import weight_store
from cookbook.deployments.vllm.http import Client, RequestRefusedError
from cookbook.deployments.vllm.weight_store import StoreStatus
from cookbook.errors import RolloutError

RPC = "/collective_rpc"
POLL_S = 0.02


def status(client: Client) -> list[StoreStatus]:
    """Return the status of every worker."""
    return list(client.call(RPC, {"method": "cookbook_status"})["results"])


def prepare(clients: Iterable[Client], folder: Path) -> None:
    """Read a checkpoint on all servers in parallel, while they continue to serve.

    Raises:
        RolloutError: a worker could not read the checkpoint. It continues to serve its current weights.
    """
    clients = list(clients)
    for client in clients:
        client.once(RPC, {"method": "cookbook_prepare", "args": [str(folder.absolute())]})
    for client in clients:
        _wait_until_read(client)


def _wait_until_read(client: Client) -> None:
    while True:
        workers = status(client)
        if failed := next((worker for worker in workers if worker["state"] == weight_store.FAILED), None):
            raise RolloutError(f"weight sync: {client.url}: {failed['error']}; the server keeps its earlier weights")
        if all(worker["state"] == weight_store.READY for worker in workers):
            return
        time.sleep(POLL_S)


def replace(client: Client, version: str) -> float:
    """Replace the weights with the prepared ones, and return the length of the pause in seconds.

    The server finishes the requests in progress first, and new requests wait, so that no sample mixes versions.
    """
    try:
        client.once("/pause?mode=wait")
        started = time.monotonic()
        # Set the version before loading: if the load fails, samplers of the old version detect the change and refuse samples.
        client.once("/update_weight_version", {"new_version": version})
        client.once(RPC, {"method": "cookbook_load"})
        if not client.once("/reset_prefix_cache")["success"]:
            raise RolloutError("the prefix cache could not be reset")
    except BaseException as error:
        # Ignore an error here: it would hide the first one.
        with contextlib.suppress(RolloutError):
            client.once("/resume")
        if isinstance(error, RolloutError):
            problem = f"weight sync: {client.url} may now serve either old or new weights ({error})"
            raise RolloutError(f"{problem}; do not sample from it before the next sync") from None
        raise
    client.call("/resume")
    return time.monotonic() - started


def add_adapter(client: Client, name: str, folder: Path) -> None:
    """Serve the prepared adapter in addition to the others, without a pause.

    A name is never reused for other weights. vLLM can replace an adapter in place (``load_inplace``), but then reads it from
    disk repeatedly, crashes once the file is deleted, and keeps the prefix cache of the old weights.

    Raises:
        RolloutError: vLLM refuses the adapter, or has loaded other weights.
    """
    drop_adapter(client, name)
    path = str(folder.absolute())
    try:
        client.once("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, text=True)
        client.once(RPC, {"method": "cookbook_add_adapter", "args": [name, path]})
    except RolloutError as error:
        raise RolloutError(f"weight sync: {client.url} has not loaded the adapter ({error})") from None


def drop_adapter(client: Client, name: str) -> None:
    """Stop serving an adapter, once its requests in progress are finished. Ignore a name that is not served."""
    client.once(RPC, {"method": "cookbook_drop_adapter", "args": [name]})
    with contextlib.suppress(RequestRefusedError):
        client.once("/v1/unload_lora_adapter", {"lora_name": name}, text=True)


def adapters(client: Client) -> list[str]:
    """Return the names of the adapters that are served."""
    return [str(model["id"]) for model in client.call("/v1/models", method="GET")["data"] if model.get("parent")]


def max_length(clients: Iterable[Client]) -> int:
    """Return the longest sequence (prompt and completion, in tokens) that all servers support."""
    models = [model for client in clients for model in client.call("/v1/models", method="GET")["data"]]
    return min(int(model["max_model_len"]) for model in models if model.get("max_model_len"))
