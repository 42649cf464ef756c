"""Messages between ranks, as bytes: pickles whose reader makes only objects of an explicit list of classes.

A process that reaches the port of the ranks could otherwise send a pickle that calls any function of any module.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.errors import BackendError

PROTOCOL = pickle.HIGHEST_PROTOCOL
PACKAGE = "cookbook"
# Top-level modules of all classes of messages.
MODULES = frozenset({PACKAGE, "builtins", "collections", "datetime", "numpy", "pathlib", "torch"})
# Top-level modules of tokenizers. Those of a model's own code are in the last.
TOKENIZERS = frozenset({"tokenizers", "transformers", "transformers_modules"})
# Mark of functions that ranks may call; see :func:`~cookbook.engine.parallel.led`.
LED = "is_led"
BUILTINS = frozenset(
    {"bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range", "set", "slice"}
    | {"str", "tuple"}
)
CLASSES = frozenset(
    {collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter, timedelta}
    | {pathlib.Path, pathlib.PosixPath, pathlib.PurePath, pathlib.PurePosixPath, torch.Size, torch.device, np.ndarray, np.dtype}
)
# Functions with which numpy and torch rebuild arrays, tensors and parameters.
REBUILDERS = frozenset(
    {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")}
    | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    | {("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_parameter")}
)


def packed(message: object) -> bytes:
    """Return a message as bytes."""
    return pickle.dumps(message, protocol=PROTOCOL)


def unpacked(data: bytes) -> Any:
    """Return the message. Raises BackendError: it has an object of a class that messages do not have."""
    return Unpickler(io.BytesIO(data)).load()


class Unpickler(pickle.Unpickler):
    """Reads a message."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        # Checked before the import, because the import of a module runs its code.
        if module.partition(".")[0] not in MODULES and module not in sys.modules:
            raise _refusal(module, name)
        value = super().find_class(module, name)
        if not _is_allowed(module, name, value):
            raise _refusal(module, name)
        return value


def _is_allowed(module: str, name: str, value: object) -> bool:
    root = module.partition(".")[0]
    if isinstance(value, types.FunctionType) and value.__dict__.get(LED):
        return True
    if root == PACKAGE:
        return isinstance(value, type) and _is_of(PACKAGE, value)
    if root == "builtins":
        return name in BUILTINS or _is_error(value)
    if (module, name) in REBUILDERS:
        return True
    if root == "torch":
        return (
            isinstance(value, torch.dtype | torch.layout) or _is_error(value) or (isinstance(value, type) and value in CLASSES)
        )
    if root in TOKENIZERS:
        # The classes of the package tokenizers are the parts of a tokenizer.
        return isinstance(value, type) and ((root == "tokenizers" and _is_of(root, value)) or _is_tokenizer(value))
    is_number = isinstance(value, type) and issubclass(value, np.generic | np.dtype)
    return (root == "numpy" and is_number) or (isinstance(value, type) and value in CLASSES)


def _is_of(package: str, cls: type) -> bool:
    """Whether a class is of a package itself. A message could also name a class that a module of the package imports."""
    return cls.__module__.partition(".")[0] == package


def _is_tokenizer(cls: type) -> bool:
    from transformers import PreTrainedTokenizerBase

    return issubclass(cls, PreTrainedTokenizerBase)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _refusal(module: str, name: str) -> BackendError:
    return BackendError(f"ranks: a message has an object of {module}.{name}, which ranks do not exchange; it was dropped")


def _load_storage(data: bytes) -> Any:
    """Rebuild the storage of a tensor. Torch's own function would read any pickle."""
    return torch.load(io.BytesIO(data), weights_only=True)


def broadcast(message: object, is_sender: bool, send: Callable[[Tensor], object]) -> Any:
    """Return the message of the sender. ``send`` broadcasts a tensor of the sender to all ranks, in place."""
    data = torch.frombuffer(bytearray(packed(message)), dtype=torch.uint8) if is_sender else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)], dtype=torch.int64)
    send(size)
    if not is_sender:
        data = torch.empty(int(size), dtype=torch.uint8)
    send(data)
    return message if is_sender else unpacked(data.numpy().tobytes())


def gather(value: object, num_ranks: int, all_gather: Callable[[list[Tensor], Tensor], object]) -> list[Any]:
    """Return the values of all ranks, by rank. ``all_gather`` fills a list with the tensors of all ranks."""
    data = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
    longest = max(map(int, sizes))
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_ranks)]
    all_gather(rows, torch.nn.functional.pad(data, (0, longest - len(data))))
    return [unpacked(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
