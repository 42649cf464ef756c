"""What vLLM's workers learn on top of their own: to be given checkpoints of a chain, and to say whose weights they serve.

vLLM imports this in its own environment (``--worker-extension-cls``) and mixes the class into its worker; its server calls the
methods on every worker through ``/collective_rpc``. Names begin with ``cookbook_`` so that they meet none of vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cookbook.deployments.holder import WeightHolder
from cookbook.errors import CheckpointError

NAME = f"{__name__}.WeightWorker"


class WeightWorker:
    """Mixed into vLLM's worker: ``model_runner`` and ``vllm_config`` are that one's."""

    model_runner: Any
    vllm_config: Any

    @functools.cached_property
    def cookbook_holder(self) -> WeightHolder:
        return WeightHolder()

    def cookbook_status(self) -> dict[str, Any]:
        return self.cookbook_holder.status()

    def cookbook_prepare(self, folder: str) -> None:
        """Serving goes on meanwhile."""
        self.cookbook_holder.prepare(Path(folder))

    def cookbook_load(self) -> dict[str, Any]:
        """Puts what was prepared into the model. The server must be paused, or samples would mix versions."""
        from vllm.config import set_current_vllm_config

        new = self.cookbook_holder.begin()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(new.tensors.items()))
            self._cookbook_repack_heads()
        self.cookbook_holder.finish()
        return self.cookbook_status()

    def cookbook_add_adapter(self, name: str, folder: str) -> dict[str, Any]:
        """Takes the adapter that vLLM has loaded last for the one of ``folder`` that was prepared, once it is sure of that.

        Raises:
            CheckpointError: it is another one.
        """
        loaded, expected = self._cookbook_newest_adapter(), self._cookbook_as_vllm_has_it(Path(folder))
        if loaded is None or not _same(loaded.loras, expected.loras):
            raise CheckpointError(f"{folder}: vLLM has loaded another adapter than the one that was read and verified")
        self.cookbook_holder.add_adapter(name)
        return self.cookbook_status()

    def cookbook_drop_adapter(self, name: str) -> None:
        """It is served no more."""
        self.cookbook_holder.drop_adapter(name)

    def _cookbook_newest_adapter(self) -> Any:
        adapters = self.model_runner.lora_manager._adapter_manager
        return adapters.get_adapter(max(adapters.list_adapters(), default=0))

    def _cookbook_as_vllm_has_it(self, folder: Path) -> Any:
        """What was prepared, renamed, packed and scaled as vLLM does it when it reads an adapter."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapters = self.model_runner.lora_manager._adapter_manager
        names = getattr(adapters.model, "hf_to_vllm_mapper", None)
        found = LoRAModel.from_lora_tensors(
            1,
            {key: tensor.clone() for key, tensor in self.cookbook_holder.prepared.tensors.items()},  # for it scales in place
            PEFTHelper.from_local_dir(str(folder), None),
            device="cpu",
            dtype=adapters.lora_config.lora_dtype,
            weights_mapper=names and names.get_rename_mapper(),
            skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
        )
        adapters._create_merged_loras_inplace(found)
        return found

    def _cookbook_repack_heads(self) -> None:
        """On CPUs vLLM multiplies with a packed copy of the output head, and its reload leaves that of a tied one as it was:
        the new body would go on with the old head, without a word."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two adapters have the same factors for the same layers, bit by bit."""
    return one.keys() == other.keys() and all(
        len(found := _factors(one[name])) == len(wanted := _factors(other[name])) and all(map(_equal, found, wanted))
        for name in one
    )


def _factors(layer: Any) -> list[Tensor | None]:
    """A layer's two, or of several that vLLM has packed into one, all; None where one of those has none."""
    sides = (layer.lora_a, layer.lora_b)
    return [factor for side in sides for factor in (side if isinstance(side, list) else [side])]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
