"""Uploads of PEFT adapters that were made elsewhere. An upload becomes a checkpoint of a new run, which cannot be trained.

Nothing of an upload is trusted. The server writes its own configuration of the checkpoint, from checked numbers and the names
of the tensors. The tensors are read as safetensors, which contains no code, and are written to a new file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import time
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from cookbook.checkpoints import manifest, store
from cookbook.engine.model import LORA_FILE
from cookbook.errors import ConfigError
from cookbook.server.handlers.quotas import check_disk
from cookbook.server.keys import caller_name
from cookbook.server.state.catalog import Address, RunInfo
from cookbook.server.state.host import Host
from cookbook.server.state.service import Service
from cookbook.server.wire.limits import TooComplexError, check_json
from cookbook.types import JsonObject

# A body is the size of the configuration, as 8 little-endian bytes, the configuration, and the file of tensors, whose header
# has the same form.
SIZE_BYTES = 8
MAX_CONFIG_BYTES, MAX_HEADER_BYTES, MAX_RANK = 64 << 10, 4 << 20, 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Keys of adapter_config.json that do not change what the tensors compute, or that are checked by name below.
_KNOWN = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "init_lora_weights",
        "auto_mapping",
        "exclude_modules",
        "fan_in_fan_out",
    ]
)
# Initial values that do not change the weights of the base model. PiSSA and others change them.
_PLAIN_STARTS = (True, False, None, "gaussian")
_TENSOR = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,300})\.lora_([AB])\.weight")


async def upload(service: Service, name: str, body: bytes, key: str | None) -> Address:
    """Store an adapter, and return its address. A retry with the same idempotency key returns the same address.

    Args:
        key: idempotency key of the request; None: the client has sent none.

    Raises:
        CheckpointError: the name is invalid.
        ConfigError: the adapter does not fit the base model, or the quota of the disk is used up.
    """
    digest = secrets.token_hex(8) if key is None else hashlib.sha256(f"upload {caller_name()} {key}".encode()).hexdigest()[:16]
    run_id = f"s{digest}:train:0"
    address = Address(run_id, "weights", name)
    if service.catalog.saved_at(address) is not None:
        return address
    session_id = run_id.partition(":")[0]
    service.tenants.owners.setdefault(session_id, caller_name())
    try:
        check_disk(service, run_id, "upload_adapter")
        folder = service.catalog.folder_of(address)
        rank = await service.decoder.run(len(body), lambda: _store(service.host, folder, body))
    except BaseException:
        if not service.catalog.has_run(run_id):
            del service.tenants.owners[session_id]
        raise
    owner, base = service.tenants.owner_of(run_id), service.host.public
    service.catalog.add_run(RunInfo(run_id, base, True, rank, service.host.seed, time.time(), None, owner))
    service.catalog.add(address, None, None)
    return address


def _store(host: Host, folder: Path, body: bytes) -> int:
    """Check an upload, and write it as a checkpoint. Returns the rank. Raises ConfigError: the upload is invalid."""
    stated, data = _split(body)
    rank, alpha, dropout = _numbers(stated)
    tensors = _tensors(data)
    modules = _check_shapes(tensors, host.linear_sizes(), rank)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": host.name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        # Whole names: an ending such as q_proj would also match layers that the adapter does not have.
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
    }
    facts = {"kind": store.WEIGHTS_ONLY, "step": 0, "base_model": host.name, "dtype": host.dtype, "lora": True}
    if host.model.quantize:
        facts["quantize"] = host.model.quantize
    with store.appearing(folder, overwrite=True) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / LORA_FILE).write_text(json.dumps(config, indent=2) + "\n")
        host.write_tokenizer(temporary)
        manifest.write(temporary, facts)
    return rank


def _split(body: bytes) -> tuple[JsonObject, bytes]:
    """Return the configuration and the file of tensors. Raises ConfigError: the body has another form."""
    size = int.from_bytes(body[:SIZE_BYTES], "little")
    config, data = body[SIZE_BYTES : SIZE_BYTES + min(size, MAX_CONFIG_BYTES)], body[SIZE_BYTES + size :]
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(f"upload_adapter: {LORA_FILE} has {size:,} bytes, at most {MAX_CONFIG_BYTES:,} are accepted")
    try:
        check_json(config)
        stated = json.loads(config)
    except (ValueError, RecursionError, TooComplexError):
        stated = None
    if not isinstance(stated, dict):
        raise ConfigError(f"upload_adapter: {LORA_FILE} is not a JSON object; send the file that PEFT has written")
    return stated, data


def _numbers(stated: JsonObject) -> tuple[int, float, float]:
    """Return the rank, alpha and dropout of a configuration. Raises ConfigError: one is invalid, or a feature is unknown."""
    from peft import LoraConfig

    if stated.get("peft_type") != "LORA":
        raise ConfigError(f"upload_adapter: peft_type must be LORA, got {str(stated.get('peft_type'))[:40]!r}")
    if (start := stated.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ConfigError(
            f"upload_adapter: init_lora_weights = {str(start)[:40]} changes the weights of the base model; convert the adapter "
            "to a plain one with PEFT (path_initial_model_for_weight_conversion)"
        )
    defaults = LoraConfig().to_dict()
    for key in sorted(stated.keys() - _KNOWN):
        value = stated[key]
        if value and value != defaults.get(key):
            raise ConfigError(
                f"upload_adapter: {key[:60]} = {json.dumps(value)[:60]} of {LORA_FILE} is not supported; upload a plain LoRA "
                "adapter of one rank, or merge the adapter and serve the merged model"
            )
    rank, alpha, dropout = stated.get("r"), stated.get("lora_alpha"), stated.get("lora_dropout", 0.0)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ConfigError(f"upload_adapter: r must be an integer from 1 to {MAX_RANK}, got {str(rank)[:40]}")
    if not _is_number(alpha) or not 0 < alpha <= 1e6:
        raise ConfigError(f"upload_adapter: lora_alpha must be above 0 and at most 1e6, got {str(alpha)[:40]}")
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise ConfigError(f"upload_adapter: lora_dropout must be at least 0 and below 1, got {str(dropout)[:40]}")
    return rank, alpha, dropout


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and (type(value) is int or math.isfinite(value))


def _tensors(data: bytes) -> dict[str, Tensor]:
    """Read a file of tensors. Raises ConfigError: it is not safetensors, or a tensor has a wrong type or no finite values."""
    header = int.from_bytes(data[:SIZE_BYTES], "little")
    if not 2 <= header <= min(MAX_HEADER_BYTES, len(data)):
        raise ConfigError("upload_adapter: the tensors are not in the safetensors format; pickled files (.bin) are refused")
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"upload_adapter: the safetensors file is damaged ({reason}); send the file again") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"upload_adapter: {name[:120]!r} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"upload_adapter: {name[:120]!r} has values that are not finite; train the adapter again")
    return tensors


def _check_shapes(tensors: dict[str, Tensor], sizes: dict[str, tuple[int, int]], rank: int) -> list[str]:
    """Return the names of the layers with an adapter. Raises ConfigError: a tensor does not fit the base model.

    Args:
        sizes: numbers of input and output features of the linear layers of the base model.
    """
    factors: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in sizes:
            raise ConfigError(
                f"upload_adapter: {name[:120]!r} is no adapter of a layer of this model; upload an adapter of the served model "
                "that has no trained embeddings and none on the output layer"
            )
        num_in, num_out = sizes[match[1]]
        shape = (rank, num_in) if match[2] == "A" else (num_out, rank)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"upload_adapter: {name[:120]!r} must have shape {shape}, got {tuple(tensor.shape)[:8]}")
        factors.setdefault(match[1], set()).add(match[2])
    if not factors:
        raise ConfigError("upload_adapter: the adapter has no tensors; send adapter_model.safetensors of PEFT")
    for module, both in factors.items():
        if len(both) != 2:
            raise ConfigError(f"upload_adapter: {module[:120]!r} has only one of lora_A and lora_B; send the file again")
    return sorted(factors)
