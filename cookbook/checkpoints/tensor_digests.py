"""Named tensors with digests of their bytes: two processes hold the same weights if the digests are equal.

vLLM's workers import this module in their own environment, so it needs torch, numpy and safetensors only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cookbook.errors import CheckpointError
from cookbook.types import Array

R = TypeVar("R")

FILES = "model*.safetensors"
ADAPTER_FILES = "adapter_model*.safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """Element type and shape of a tensor, and the SHA-256 of its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Weights:
    """Contiguous tensors in host memory, with their infos. The tensors must not be written to: infos are computed once."""

    tensors: Mapping[str, Tensor]
    infos: Mapping[str, TensorInfo]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Compute the infos of ``tensors``, without a copy of those that are contiguous and in host memory already."""
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return cls(own, in_parallel(lambda name: tensor_info(own[name]), own))

    @property
    def digest(self) -> str:
        """Digest of all names, element types, shapes and bytes."""
        return digest_of(self.infos)


def digest_of(infos: Mapping[str, TensorInfo]) -> str:
    """Digest of weights, from the infos of their tensors."""
    rows = [[name, info.dtype, list(info.shape), info.digest] for name, info in sorted(infos.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Info of a contiguous tensor in host memory."""
    return TensorInfo(dtype_name(tensor), tuple(tensor.shape), hashlib.sha256(as_integers(tensor).data).hexdigest())


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_integers(tensor: Tensor) -> Array:
    """Bit patterns of the elements as unsigned integers, shape ``(numel,)``, in the tensor's own memory.

    Integers have no rounding and a single zero, and they keep the payload of a NaN.
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def read(folder: Path, names: str = FILES) -> Weights:
    """Read all tensors of a Hugging Face folder, from files whose names match the pattern ``names``.

    The tensors are copied: safetensors maps the file into memory, so its tensors would change with the file after hashing.

    Raises:
        CheckpointError: no file matches, or a file is damaged.
    """
    files = sorted(folder.glob(names))
    if not files:
        what = "full weights" if names == FILES else "an adapter"
        raise CheckpointError(f"{folder}: holds no {names}; pass a folder of {what}")
    return Weights.of({name: tensor.clone() for file in files for name, tensor in tensors_in(file)})


def tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a safetensors file.

    Raises:
        CheckpointError: the file is damaged, or is not a safetensors file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - `opened` is not iterable
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); use another checkpoint") from None


def in_parallel(work: Callable[[str], R], tensors: Mapping[str, Tensor]) -> dict[str, R]:
    """Compute ``work(name)`` for every tensor on every core, large tensors first, so that all cores finish at about one time.

    For hashing, comparing and compressing, which release Python's global lock.
    """
    order = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    # macOS has no affinity.
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    with ThreadPoolExecutor(num_cores) as pool:
        results = dict(zip(order, pool.map(work, order), strict=True))
    return {name: results[name] for name in tensors}
