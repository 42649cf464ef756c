"""Sizes of a vLLM server: its longest sequence, and its memory for keys and values.

vLLM starts only if the keys and values of one sequence of the maximum length fit into the memory that it has for them. All
sizes here are upper bounds: a layer with a sliding window counts as one that keeps every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from cookbook.engine.model import ModelConfig
from cookbook.engine.shape import Shape, is_adapter
from cookbook.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
# The maximum length is rounded up to a multiple of this number of tokens.
ROUNDED_TO = 256
# The largest block of keys and values, in tokens: 16 on GPUs, 128 on CPUs. vLLM keeps one block for itself.
BLOCK = 128
# Part of a GPU that vLLM takes by default.
GPU_SHARE = 0.92
# Part of the memory left by weights, gradients and moments that servers may fill with keys and values if they share it with the
# trainer. The trainer's activations need the other half.
SHARED_PART = 0.5
# Copies of the weights in the host memory of a CPU server: the copy that computes, and the verified copies of the version that
# is served and of the version that is read next.
HOST_COPIES = 3
# Resident memory of a server's three processes without weights, keys and values: 0.6 + 0.6 + 0.7 GB, measured with vLLM 0.32.
PROCESS_BYTES = 2_000_000_000
# Memory for keys and values of a model whose configuration is not on this machine.
UNKNOWN_BYTES = 4 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Memory for the servers that share a device.

    ``free``: bytes that are free now, or of which vLLM takes its own share. ``reserved``: bytes that the trainer still
    allocates. ``servers``: number of servers. ``device``: name for errors. ``cpu``: whether the device is the CPU.
    ``shared``: whether the trainer computes on the device too.
    """

    free: int
    reserved: int
    servers: int
    device: str
    cpu: bool
    shared: bool


@dataclass(frozen=True)
class ServerSize:
    """Size of one server. ``kv_cache_bytes``: None means the share of a GPU that vLLM takes by default.

    ``row_bytes``: keys and values of a sequence of ``max_length`` tokens; 0: unknown. ``weight_bytes``: of all copies of the
    weights on its device.
    """

    max_length: int
    kv_cache_bytes: int | None
    row_bytes: int
    weight_bytes: int

    @property
    def total_bytes(self) -> int | None:
        """Bytes on the server's device; None if vLLM takes a share of a GPU."""
        return None if self.kv_cache_bytes is None else self.kv_cache_bytes + self.weight_bytes


def row_bytes(kv_numbers: int, element: int, length: int) -> int:
    """Return the bytes of the keys and values of ``length`` tokens, in whole blocks, with the block that vLLM keeps for itself.

    ``kv_numbers``: numbers per token. ``element``: bytes of a number.
    """
    return (-(-length // BLOCK) + 1) * BLOCK * kv_numbers * element


def lasting_bytes(model: ModelConfig, shape: Shape) -> int:
    """Return the bytes of the gradients and AdamW moments of the trained weights, with master weights, at most."""
    if shape.trained is None:
        return 0
    gradient, moments, master = 4, 8, 4 if ELEMENT_BYTES.get(model.dtype, 4) < 4 and not is_adapter(model) else 0
    return shape.trained.trained * (gradient + moments + master)


def sized(
    shape: Shape | None,
    dtype: str,
    memory: Memory,
    *,
    max_length: int | None,
    longest: int | None,
    kv_cache_bytes: int | None,
    max_requests: int,
    gpus_per_server: int = 1,
) -> ServerSize:
    """Return the size of each server.

    Args:
        shape: of the model; None if its configuration is not on this machine.
        dtype: of the served weights, and of the keys and values.
        max_length: ``deployment.max_length``; None: from the next two.
        longest: tokens of the longest sequence that the run samples; None if only the model limits it.
        kv_cache_bytes: from ``deployment.kv_cache_gb``; None: as many as ``max_requests`` sequences need, or as are free.

    Raises:
        ConfigError: the keys and values of one sequence do not fit into the memory.
    """
    element = ELEMENT_BYTES.get(dtype, 4)
    context = shape.max_length if shape is not None else None
    numbers = shape.kv_numbers if shape is not None else 0
    weights = 0 if shape is None else shape.weight_bytes * element // ELEMENT_BYTES.get(shape.dtype, element)
    copies = weights * HOST_COPIES + PROCESS_BYTES if memory.cpu else weights // gpus_per_server
    length = max_length or _rounded(longest, context) or context
    if length is None:
        raise ConfigError("deployment.max_length: the model does not state its maximum sequence length; set the key")
    available = max(0, _available(memory, copies)) * gpus_per_server
    room = kv_cache_bytes if kv_cache_bytes is not None else available
    row = row_bytes(numbers, element, length)
    if row > room:
        fitting = max(0, room // row_bytes(numbers, element, 0) - 1) * BLOCK
        # Without a key and without data, the model's context is an upper limit only.
        if max_length is not None or longest is not None or fitting < ROUNDED_TO:
            raise ConfigError(_too_small(length, row, kv_cache_bytes, available, fitting, memory))
        length, row = fitting, row_bytes(numbers, element, fitting)
    if kv_cache_bytes is None and (memory.cpu or memory.shared):
        size = available if memory.shared and not memory.cpu else min(max_requests * row or UNKNOWN_BYTES, available)
        kv_cache_bytes = -(-max(row, size) // MIB) * MIB
    return ServerSize(length, kv_cache_bytes, row, copies)


def _rounded(longest: int | None, context: int | None) -> int | None:
    if longest is None:
        return None
    length = -(-longest // ROUNDED_TO) * ROUNDED_TO
    return length if context is None else min(length, context)


def _available(memory: Memory, copies: int) -> int:
    """Return the bytes that a server may fill with keys and values, on each of its GPUs."""
    if not memory.cpu and not memory.shared:
        return int(GPU_SHARE * memory.free) - copies
    return int(SHARED_PART * (memory.free - memory.reserved - memory.servers * copies)) // memory.servers


def _too_small(length: int, row: int, configured: int | None, available: int, fitting: int, memory: Memory) -> str:
    lower = f"set deployment.max_length={fitting} or less" if fitting else "choose a smaller model"
    needs = f"one sequence of {length:,} tokens needs {row / 2**30:.2f} GiB of keys and values"
    if configured is not None:
        return (
            f"deployment.kv_cache_gb: {needs}, got {configured / 2**30:g}; raise deployment.kv_cache_gb, remove it to have it "
            f"computed, or {lower}"
        )
    return (
        f"deployment: {needs}, and {max(available, 0) / 2**30:.2f} GiB of {memory.device} are left for them on each "
        f"server; {lower}, or lower deployment.replicas or the length of prompts and completions"
    )
