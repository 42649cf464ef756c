"""Extension of vLLM's workers: they load checkpoints and deltas, and report which weights they serve.

vLLM imports this module in its own environment (``--worker-extension-cls``) and adds the class to the bases of its worker. The
server calls the methods on every worker through ``/collective_rpc``. The prefix ``cookbook_`` distinguishes them from vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.deployments.vllm.weight_store import StoreStatus, WeightStore
from cookbook.errors import CheckpointError

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

NAME = f"{__name__}.WeightWorker"


class WeightWorker:
    """Base class of vLLM's worker, whose ``model_runner`` and ``vllm_config`` it uses."""

    model_runner: Any
    vllm_config: Any

    @functools.cached_property
    def cookbook_store(self) -> WeightStore:
        return WeightStore()

    def cookbook_status(self) -> StoreStatus:
        return self.cookbook_store.status()

    def cookbook_prepare(self, folder: str) -> None:
        """Start to read a checkpoint, while the worker continues to serve."""
        self.cookbook_store.prepare(Path(folder))

    def cookbook_load(self) -> None:
        """Load the prepared weights into the model. The server must be paused, or samples would mix versions."""
        from vllm.config import set_current_vllm_config

        new = self.cookbook_store.begin()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(new.tensors.items()))
            self._cookbook_repack_heads()
        self.cookbook_store.finish()

    def cookbook_add_adapter(self, name: str, folder: str) -> None:
        """Record that the prepared adapter of ``folder`` is served, after a comparison with vLLM's newest adapter.

        Raises:
            CheckpointError: vLLM has loaded another adapter.
        """
        loaded, expected = self._cookbook_newest_adapter(), self._cookbook_expected_adapter(Path(folder))
        if loaded is None or not _same(loaded.loras, expected.loras):
            raise CheckpointError(f"{folder}: vLLM has loaded another adapter than the one that was read and verified")
        self.cookbook_store.add_adapter(name)

    def cookbook_drop_adapter(self, name: str) -> None:
        """Record that an adapter is no longer served."""
        self.cookbook_store.drop_adapter(name)

    def _cookbook_newest_adapter(self) -> LoRAModel | None:
        adapters = self.model_runner.lora_manager._adapter_manager
        return adapters.get_adapter(max(adapters.list_adapters(), default=0))

    def _cookbook_expected_adapter(self, folder: Path) -> LoRAModel:
        """Return the prepared adapter, renamed, packed and scaled as vLLM does when it reads an adapter."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters = self.model_runner.lora_manager._adapter_manager
        names = getattr(adapters.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            1,
            # Clones, because vLLM scales in place.
            {key: tensor.clone() for key, tensor in self.cookbook_store.prepared.tensors.items()},
            PEFTHelper.from_local_dir(str(folder), None),
            device="cpu",
            dtype=adapters.lora_config.lora_dtype,
            weights_mapper=names and names.get_rename_mapper(),
            skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
        )
        adapters._create_merged_loras_inplace(adapter)
        return adapter

    def _cookbook_repack_heads(self) -> None:
        """Pack the output head again. On CPUs vLLM multiplies with a packed copy of the head, and its reload does not update
        the copy of a tied head: the new body would silently continue with the old head.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _same(first: Mapping[str, LoRALayerWeights], second: Mapping[str, LoRALayerWeights]) -> bool:
    """Whether two adapters have the same factors for the same layers, bit for bit."""
    return first.keys() == second.keys() and all(
        len(ours := _factors(first[name])) == len(theirs := _factors(second[name])) and all(map(_equal, ours, theirs))
        for name in first
    )


def _factors(layer: LoRALayerWeights) -> list[Tensor | None]:
    """The two factors of a layer. If vLLM has packed several layers into one: those of all, None for a layer without one."""
    sides = (layer.lora_a, layer.lora_b)
    return [factor for side in sides for factor in (side if isinstance(side, list) else [side])]


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)
