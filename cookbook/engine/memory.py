"""Memory of the process: settings of the CPU allocator, and the decision for activation checkpointing.

glibc requests each block of over 32 MiB from the kernel, and returns it to the kernel when it is freed. The kernel zeroes every
page of a new block when the page is first touched, which costs more than most operations on activations. Keeping freed memory
avoids the cost: the product in a gated MLP, of 4,096 x 3,072 numbers, takes 22 ms instead of 49 ms, and an SFT step with a
vocabulary of 151,936 (`benchmarks/peers`) 4.7 to 5.1 s instead of 5.6 to 6.1 s. Peak memory is 6% higher.

With activation checkpointing, gaps between kept blocks cost more: layers that are recomputed allocate and free tensors of other
sizes between tensors that stay. So large blocks are returned then.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import psutil
import torch

from cookbook.engine.attention import is_installed
from cookbook.engine.model import LanguageModel
from cookbook.engine.optimizer import state_bytes, update_rule
from cookbook.engine.precision import kept_bytes_per_token

# Parameters of mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# Largest block that is kept, bytes, in order of preference: old versions of glibc accept only the second.
LARGEST_BLOCKS = (1 << 30, 32 << 20)
# Free bytes at the end of the heap that the process keeps: the largest value that mallopt accepts.
KEPT = (1 << 31) - 1
# Bytes: with activation checkpointing, larger blocks are returned to the kernel when they are freed.
LARGEST_RECOMPUTED_BLOCK = 4 << 20
# Share of the free memory that activations, gradients and optimizer state may use. The rest is for temporary tensors of the
# backward pass, and for other processes.
USABLE_SHARE = 0.8


def keep_freed_memory() -> bool:
    """Configure glibc malloc to keep freed memory in the process. Return whether that worked.

    Nothing changes with another C library, or if the user has set options of the allocator in the environment. All threads use
    one arena: the arenas of other threads are limited to 64 MiB, and larger tensors would be separate blocks again.

    Source: mallopt(3).
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    takes_blocks = any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_BLOCKS)
    return all([takes_blocks, mallopt(TRIM_THRESHOLD, KEPT), mallopt(ARENA_MAX, 1)])


def return_large_blocks() -> bool:
    """Configure glibc malloc to return freed blocks of over 4 MiB to the kernel. Return whether that worked.

    For activation checkpointing, where a smaller peak matters more than time: a row of 4,289 tokens through four layers of
    SmolLM2-135M takes 0.99 GB instead of 1.22 GB, and 26.7 instead of 24.5 CPU seconds for two steps. The setting is that of
    the process, and does not change with another C library, or if the user has set options of the allocator.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST_RECOMPUTED_BLOCK))


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's function for options of malloc; None with another C library or if the user has set such options."""
    own_settings = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if own_settings or sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    return mallopt


def fitting_tokens(
    model: LanguageModel,
    bytes_per_token: Callable[[], float],
    pass_tokens: int,
    optimizer: str,
    share: float = 1.0,
    *,
    offload: bool = False,
) -> int | None:
    """Return the largest pass whose activations fit into memory, tokens; None if those of ``pass_tokens`` tokens fit.

    Larger passes need activation checkpointing. None for a frozen model, and for a model that does not support checkpointing.
    Logs the reason once. ``share``: the fraction of the gradients and optimizer state that this process holds. ``offload``:
    optimizer state is in host memory.
    """
    trained = [parameter for _, parameter in model.trainable()]
    if not (trained and model.network.supports_gradient_checkpointing):
        return None
    state = 0 if offload and model.device.type != "cpu" else state_bytes(update_rule(optimizer), trained)
    lasting = share * (sum(p.numel() * 4 for p in trained) + state)
    per_token, free = bytes_per_token() + _kept_by_attention(model, pass_tokens), free_bytes(model.device)
    why = shortage_of(per_token * pass_tokens, pass_tokens, lasting, free)
    if why is None:
        return None
    fitting = max(0, int((USABLE_SHARE * free - lasting) / per_token)) if model.ranks.size == 1 else 0
    above = f" for passes of over {fitting:,} tokens" if fitting else ""
    model.log_once("checkpointing", f"activation checkpointing is on{above}: {why}")
    return fitting


def _kept_by_attention(model: LanguageModel, pass_tokens: int) -> int:
    """Return the bytes per token that attention of bfloat16 weights keeps in long runs, and not in a trial of few tokens."""
    config = model.network.config.get_text_config()
    if model.network.dtype != torch.bfloat16 or model.device.type != "cpu" or not is_installed(model.network):
        return 0
    return int(config.num_hidden_layers) * kept_bytes_per_token(int(config.num_attention_heads), pass_tokens)


def shortage_of(activation_bytes: float, pass_tokens: int, lasting: float, free: float) -> str | None:
    """Return the reason why a pass does not fit into memory, for the log; None if it fits.

    All in bytes. ``activation_bytes``: saved activations of a pass. ``lasting``: gradients and optimizer state. ``free``: free
    memory, with the weights already loaded.
    """
    if lasting + activation_bytes <= USABLE_SHARE * free:
        return None
    activations = f"{activation_bytes / 1e9:.1f} GB of activations for a pass of {pass_tokens:,} tokens"
    return (
        f"{activations} and {lasting / 1e9:.1f} GB of gradients and moments do not fit into {free / 1e9:.1f} GB of free memory"
    )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on ``device``; on the CPU, without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
