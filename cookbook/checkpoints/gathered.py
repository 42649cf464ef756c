"""Sampler checkpoints of sharded weights. The ranks gather one tensor at a time, and the first rank writes and frees it.

So no rank holds the whole model. The files equal those that one process writes of the same weights, byte for byte. If
transformers joins several tensors of a layer in the file, the ranks gather one layer at a time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor

from cookbook.checkpoints import delta, tensor_digests
from cookbook.checkpoints.snapshots import tensors_once
from cookbook.checkpoints.tensor_digests import TensorInfo, as_integers, digest_of, tensor_info
from cookbook.engine.engine import Engine
from cookbook.engine.parallel import Ranks, led
from cookbook.engine.ranks.commands import PerRank
from cookbook.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest size of a file with several tensors; the default of transformers.
FILE_BYTES = 50 * 10**9
FILE = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
# File of a delta's codings until the header, which precedes the codings, is known.
CODINGS = ".codings"


@dataclass(frozen=True, eq=False)
class SavedVersion(PerRank):
    """The weights of a checkpoint, to which the next delta applies.

    Attributes:
        folder: folder of the checkpoint.
        parts: this rank's part of each tensor, in host memory, by name in memory; empty: the first rank reads the files of
            ``folder``, a base, in the place of the parts.
        infos: infos of the tensors by name on disk; empty on all ranks but the first.
    """

    folder: Path
    parts: dict[str, Tensor]
    infos: Mapping[str, TensorInfo]

    @property
    def digest(self) -> str:
        """Digest of the weights, on the first rank."""
        return digest_of(self.infos)


@led
def write_base(engine: Engine, temporary: Path, folder: Path, dtype: torch.dtype | None) -> SavedVersion:
    """Write the weights, without an adapter, as a Hugging Face folder without a tokenizer.

    Args:
        temporary: folder to write to, which becomes ``folder`` later.
        dtype: element type of the file; None: that of the model.
    """
    layout = _Layout.of(engine, dtype)
    infos: dict[str, TensorInfo] = {}
    with ExitStack() as opened:
        # Made by the first call of `write`, where an error is caught.
        files = functools.cache(lambda: _WeightFiles(temporary, layout, opened))

        def write(new: Mapping[str, Tensor], _: Mapping[str, Tensor]) -> None:
            for name, tensor in new.items():
                infos[name] = tensor_info(tensor)
                files().write(name, tensor)

        layout.gather(write)
    return SavedVersion(folder, {}, infos)


@led
def write_delta(engine: Engine, temporary: Path, folder: Path, dtype: torch.dtype | None, before: SavedVersion) -> SavedVersion:
    """Write the difference from ``before``, whose parts are replaced by those of the new weights.

    Raises:
        CheckpointError: the files of ``before`` are damaged, or hold another model. ``before`` cannot be used again.
    """
    layout = _Layout.of(engine, dtype)
    infos: dict[str, TensorInfo] = {}
    codings = temporary / CODINGS
    entries: list[tuple[delta.TensorDelta, int]] = []

    def write(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> None:
        with codings.open("ab") as file:
            for name, tensor in new.items():
                infos[name] = tensor_info(tensor)
                earlier = old[name] if old else _read(before, name)
                entry, coding = delta.coded(name, (before.infos[name], earlier), (infos[name], tensor))
                entries.append((entry, file.tell()))
                file.write(coding)

    def finish() -> None:
        entries.sort(key=lambda item: item[0].name)
        with codings.open("rb") as file, (temporary / delta.FILE).open("wb") as out:
            delta.write(out, [entry for entry, _ in entries], (_piece(file, start, entry.size) for entry, start in entries))
        codings.unlink()

    layout.gather(write, finish, before.parts)
    return SavedVersion(folder, before.parts, infos)


def _read(version: SavedVersion, name: str) -> Tensor:
    """Read a tensor of a base. Raises CheckpointError: the tensor is missing, or differs from the tensor that was written."""
    for file in sorted(version.folder.glob(tensor_digests.FILES)):
        # Opened for each tensor: as long as a file is open, the parts of it that were read stay in memory.
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 - `opened` is not iterable
                tensor: Tensor = opened.get_tensor(name)
                if tensor_info(tensor) == version.infos[name]:
                    return tensor
    raise CheckpointError(f"{version.folder}: {name} is missing or damaged; write a base first")


def _piece(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


# ---- gathering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Tensors of a network in memory, and the tensors on disk that they become.

    Attributes:
        tensors: this rank's part of each tensor, by name in memory.
        dtype: element type on disk; None: that of the model.
        groups: names in memory of tensors that are converted together.
        on_disk: tensors without memory (``meta``) by name on disk, in the order of one process.
    """

    ranks: Ranks
    network: PreTrainedModel
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None
    groups: list[list[str]]
    on_disk: Mapping[str, Tensor]

    @classmethod
    def of(cls, engine: Engine, dtype: torch.dtype | None) -> _Layout:
        model = engine.model
        network = model.network.get_base_model() if model.is_lora else model.network
        # PEFT wraps an adapted layer, and adds to the names.
        tensors = {
            re.sub(r"(\.base_layer)+\.", ".", name): tensor.detach()
            for name, tensor in tensors_once(network).items()
            if ".lora_" not in name
        }
        shapes = {
            name: torch.empty(tensor.shape, dtype=_dtype_of(tensor, dtype), device="meta") for name, tensor in tensors.items()
        }
        whole = _converted(network, shapes)
        for groups in ([[name] for name in shapes], _by_layer(shapes)):
            parts: dict[str, Tensor] = {}
            for group in groups:
                parts |= _converted(network, {name: shapes[name] for name in group})
            if {name: tensor.shape for name, tensor in parts.items()} == {
                name: tensor_info.shape for name, tensor_info in whole.items()
            }:
                return cls(engine.ranks, network, tensors, dtype, groups, whole)
        raise CheckpointError(
            "save_weights_for_sampler_ext: the file joins tensors of several layers, which sharded ranks cannot write; set "
            "backend.shard=none"
        )

    def gather(
        self,
        write: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None],
        finish: Callable[[], None] = lambda: None,
        copies: dict[str, Tensor] | None = None,
    ) -> None:
        """Call ``write`` on the first rank for each group, with its tensors by name on disk, and ``finish`` at the end.

        Args:
            copies: parts of earlier weights, whose tensors are the second argument of ``write``. Each part is replaced by the
                current one. None: keep no parts.
        """
        error: Exception | None = None
        for group in self.groups:
            # Until the end the other ranks wait for this rank's parts, even after an error here.
            error = self._gather(group, write if error is None else None, copies) or error
        if self.ranks.rank == 0:
            if error is not None:
                raise error
            finish()

    def _gather(
        self,
        group: list[str],
        write: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None] | None,
        copies: dict[str, Tensor] | None,
    ) -> Exception | None:
        """Gather one group, and return the error of ``write``."""
        # Without its copies a rank cannot take part: if its memory is full, the group ends, and the others do not wait for it.
        with self.ranks.lockstep():
            own = {name: self.tensors[name].to(_dtype_of(self.tensors[name], self.dtype)) for name in group}
            old: dict[str, Tensor] = {}
            if copies is not None:
                old = {name: copies.pop(name).to(own[name].device) for name in group if name in copies}
                copies |= {name: tensor.to("cpu", copy=True) for name, tensor in own.items()}
            gathered, earlier = ({name: self.ranks.whole(part) for name, part in parts.items()} for parts in (own, old))
        if self.ranks.rank == 0 and write is not None:
            try:
                write(self._on_disk(gathered), self._on_disk(earlier))
            except Exception as error:  # noqa: BLE001 - the caller raises the error
                return error
        return None

    def _on_disk(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.cpu().contiguous() for name, tensor in _converted(self.network, gathered).items()}


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _converted(network: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names, and in the parts, that ``save_pretrained`` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(network, dict(tensors))
    return converted


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name, []).append(name)
    return list(groups.values())


# ---- files -----------------------------------------------------------------------------------------------------------


class _WeightFiles:
    """The safetensors files of a base, in which tensors are written one at a time and in any order."""

    def __init__(self, folder: Path, layout: _Layout, opened: ExitStack) -> None:
        # This writes all files but the weights.
        layout.network.save_pretrained(folder, state_dict={}, save_original_format=False)
        tensors = dict(layout.on_disk)
        split = split_torch_state_dict_into_shards(tensors, filename_pattern=FILE, max_shard_size=FILE_BYTES)
        # File and offset of each tensor.
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        for file, names in split.filename_to_tensors.items():
            header, offsets = _header({name: tensors[name] for name in names})
            out = opened.enter_context((folder / file).open("wb"))
            out.write(header)
            self._places |= {name: (out, len(header) + offset) for name, offset in offsets.items()}
        if len(split.filename_to_tensors) > 1:
            count = sum(parameter.numel() for name, parameter in layout.network.named_parameters() if ".lora_" not in name)
            index = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        file, start = self._places[name]
        file.seek(start)
        file.write(as_integers(tensor).data)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset of each tensor after the header.

    safetensors itself writes a header for empty tensors, in the order of the file. Shapes and offsets are replaced here.
    """
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    written = safetensors.torch.save(empty, metadata={"format": "pt"})
    fields = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    offsets, end = {}, 0
    for name in (name for name in fields if name in tensors):
        start, end = end, end + tensors[name].nbytes
        fields[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        offsets[name] = start
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
