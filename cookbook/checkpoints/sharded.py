"""Tensors on disk, written by any number of ranks and read by any other number, with torch.distributed.checkpoint (DCP).

A folder holds safetensors files of each rank. Each file also holds DCP's metadata: the place of each part in its whole tensor.
This is the format of torch's ``HuggingFaceStorageWriter``, which needs no pickle. The import of DCP is slow, so other modules
import this one inside functions.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cookbook.checkpoints import ranks
from cookbook.utils import files

# DCP warns at every save and load in a single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int) -> dict[str, str]:
    """Write ``tensors`` to ``folder``; of a DTensor, only this rank's part. A file holds at most ``max_bytes``, or one tensor.

    Every rank makes this call, with the same names. Returns the SHA-256 of the files by their names; {} with several ranks.

    Raises:
        OSError, SafetensorError: a file cannot be written, on any rank.
    """
    ranks.on_first(lambda: folder.mkdir(parents=True, exist_ok=True))
    writer = _Writer(folder, max_bytes)
    _unwrapped(lambda: dcp_save(dict(tensors), storage_writer=writer, **_among()))
    return writer.digests


def load(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill ``tensors`` with the tensors of those names in ``folder``; of a DTensor, only this rank's part.

    Every rank makes this call, with the same names. ``folder`` may be any Hugging Face folder.

    Raises:
        OSError, SafetensorError: a file cannot be read, on any rank.
    """
    _fill(tensors, folder, **_among())


def read(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of ``folder``, whole, into host memory. One rank alone may make this call."""
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in saved(folder).items()}
    _fill(tensors, folder, no_dist=True)
    return tensors


def saved(folder: Path) -> dict[str, Tensor]:
    """Read shapes and types of all tensors of ``folder`` from the files' headers, as tensors without memory (``meta``).

    Empty if the folder does not exist.
    """
    if not folder.is_dir():
        return {}
    tensors: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta") for name, tensor in tensors.items()}


class _Writer(HuggingFaceStorageWriter):
    """Writes one file after another. torch's writer holds three copies of all files in memory before it writes them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_by_file(plan.items, self._max_bytes)):
            path = self._folder / f"shard-{ranks.own():05d}-{number:05d}.safetensors"
            tensors = {item.index.fqn: torch.as_tensor(planner.resolve_data(item)).cpu().contiguous() for item in items}
            places = {item.index.fqn: {"saved_offsets": list(_written(item).chunk.offsets)} for item in items}
            # A single key: safetensors writes several keys in any order, and equal states must give equal files.
            save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
            # By the rank that wrote the file: another machine cannot force the file to this disk.
            files.sync(path)
            if not ranks.several():
                # With several ranks, the first rank computes the digests.
                self.digests[path.name] = files.sha256(path)
                files.forget(path)
            results += [WriteResult(item.index, tensors[item.index.fqn].nbytes, path.name) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _by_file(items: Sequence[WriteItem], max_bytes: int) -> Iterator[list[WriteItem]]:
    """Split the items of a rank by file. Two parts of one tensor go to two files."""
    file: dict[str, WriteItem] = {}
    size = 0
    for item in items:
        nbytes = _written(item).chunk.sizes.numel() * _written(item).properties.dtype.itemsize
        if file and (size + nbytes > max_bytes or item.index.fqn in file):
            yield list(file.values())
            file, size = {}, 0
        file[item.index.fqn] = item
        size += nbytes
    if file:
        yield list(file.values())


def _written(item: WriteItem) -> TensorWriteData:
    """Data to write for one tensor; every saved item is a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def _fill(tensors: Mapping[str, Tensor], folder: Path, **among: Any) -> None:
    if tensors:
        _unwrapped(lambda: dcp_load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), **among))


def _unwrapped(job: Callable[[], object]) -> None:
    """Run ``job``. An error of DCP, a list of tracebacks, is replaced by its first cause."""
    try:
        job()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _among() -> dict[str, Any]:
    return {"process_group": ranks.group()} if ranks.several() else {"no_dist": True}
