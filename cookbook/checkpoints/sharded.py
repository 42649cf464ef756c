"""Tensors on disk, written by any number of ranks and read by any other, through torch.distributed.checkpoint (DCP).

A folder holds safetensors files, of each rank its own, and in each of them DCP's note of where in the whole tensor a part
belongs: the format of torch's ``HuggingFaceStorageWriter``, which needs no pickle on disk. Imports much: import it when needed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from cookbook import atomic
from cookbook.checkpoints import ranks

# What DCP says of every save and load in a single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def save(tensors: Mapping[str, Tensor], folder: Path, max_bytes: int) -> None:
    """Writes ``tensors`` to ``folder``, of a DTensor this rank's part, in files of ``max_bytes`` at most, or of one tensor.

    Every rank calls it, with the same names.

    Raises:
        OSError, SafetensorError: the disk refuses, on any rank.
    """
    ranks.on_first(lambda: folder.mkdir(parents=True, exist_ok=True))
    _told(lambda: dcp_save(dict(tensors), storage_writer=_Writer(folder, max_bytes), **_among()))


def load(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills ``tensors``, of a DTensor this rank's part, with what ``folder`` has under their names, however it was cut up.

    Every rank calls it, with the same names. Any Hugging Face folder will do.

    Raises:
        OSError, SafetensorError: a file cannot be read, on any rank.
    """
    _fill(tensors, folder, **_among())


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of ``folder``, whole, in host memory. Asks nothing of other ranks."""
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in saved(folder).items()}
    _fill(tensors, folder, no_dist=True)
    return tensors


@dataclass(frozen=True)
class Saved:
    """A tensor on disk, whole."""

    shape: torch.Size
    dtype: torch.dtype


def saved(folder: Path) -> dict[str, Saved]:
    """Every tensor of ``folder``, from the files' headers; none where there is no such folder."""
    if not folder.is_dir():
        return {}
    found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: Saved(one.size, one.properties.dtype) for name, one in found.items()}


class _Writer(HuggingFaceStorageWriter):
    """Fills one file after another. torch's own holds them in memory before it writes, three times over."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder = folder
        self._max_bytes = max_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_by_file(plan.items, self._max_bytes)):
            path = self._folder / f"shard-{ranks.own():05d}-{number:05d}.safetensors"
            tensors = {item.index.fqn: torch.as_tensor(planner.resolve_data(item)).cpu().contiguous() for item in items}
            places = {item.index.fqn: {"saved_offsets": list(_written(item).chunk.offsets)} for item in items}
            # One key and no second, such as "format": safetensors writes those in any order, and equal states are equal files.
            save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
            atomic.sync(path)  # by the rank that wrote the file: another machine cannot force it to this disk
            results += [WriteResult(item.index, tensors[item.index.fqn].nbytes, path.name) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _by_file(items: Sequence[WriteItem], max_bytes: int) -> Iterator[list[WriteItem]]:
    """Cuts a rank's row of items. Where it holds two parts of one tensor, each goes to a file of its own."""
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
    """What is to be written of a tensor; an item of another kind there is not, for whatever is saved is a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def _fill(tensors: Mapping[str, Tensor], folder: Path, **among: Any) -> None:
    if tensors:
        _told(lambda: dcp_load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), **among))


def _told(job: Callable[[], object]) -> None:
    """Raises what went wrong, in place of DCP's list of tracebacks."""
    try:
        job()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _among() -> dict[str, Any]:
    return {"process_group": ranks.group()} if ranks.several() else {"no_dist": True}
