"""Named tensors with the digests of their bytes: what it means for two places to hold the same weights.

Runs inside vLLM's workers too, so it needs nothing but torch and numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cookbook.errors import CheckpointError
from cookbook.types import Array

T = TypeVar("T")
R = TypeVar("R")

FILES = "model*.safetensors"
ADAPTER_FILES = "adapter_model*.safetensors"


@dataclass(frozen=True)
class Fact:
    """A tensor's element type, shape, and the SHA-256 of its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Weights:
    """Tensors in host memory, contiguous, and a fact for each. Nobody may write to them: the facts were taken once."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Fact]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Takes the facts of ``tensors`` without copying them."""
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        return cls(own, dict(zip(own, in_parallel(fact, own.values(), _bytes_of(own)), strict=True)))

    @property
    def digest(self) -> str:
        """One digest of all names, element types, shapes and bytes."""
        return digest_of(self.facts)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def digest_of(facts: Mapping[str, Fact]) -> str:
    rows = [[name, one.dtype, list(one.shape), one.digest] for name, one in sorted(facts.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def fact(tensor: Tensor) -> Fact:
    """The fact of a contiguous tensor in host memory."""
    return Fact(dtype_name(tensor), tuple(tensor.shape), hashlib.sha256(as_integers(tensor).data).hexdigest())


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_integers(tensor: Tensor) -> Array:
    """The elements' bit patterns as unsigned integers, shape ``(numel,)``, in the tensor's own memory.

    Integers know of no rounding, of one zero only, and keep what a NaN carries.
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def read(folder: Path, names: str = FILES) -> Weights:
    """All tensors of a Hugging Face folder, from one file or several, called ``names``.

    They are copied: as safetensors gives them they are the file itself, and would change with it after they were hashed.

    Raises:
        CheckpointError: there are none, or a file is damaged.
    """
    files = sorted(folder.glob(names))
    if not files:
        what = "full weights" if names == FILES else "an adapter"
        raise CheckpointError(f"{folder}: holds no {names}; pass a folder of {what}")
    return Weights.of({name: tensor.clone() for file in files for name, tensor in tensors_in(file)})


def tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file.

    Raises:
        CheckpointError: it is none, or damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); use another checkpoint") from None


def in_parallel(work: Callable[[T], R], items: Iterable[T], sizes: Iterable[int]) -> list[R]:
    """``[work(item) for item in items]`` on every core, the largest first, so that no core ends up alone with one.

    Worth it for hashing, comparing and compressing, which let go of Python's lock.
    """
    todo = list(items)
    order = sorted(range(len(todo)), key=list(sizes).__getitem__, reverse=True)
    # macOS has no affinity.
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    with ThreadPoolExecutor(num_cores) as pool:
        found = dict(zip(order, pool.map(lambda place: work(todo[place]), order), strict=True))
    return [found[place] for place in range(len(todo))]


def _bytes_of(tensors: Mapping[str, Any]) -> list[int]:
    return [tensor.nbytes for tensor in tensors.values()]
