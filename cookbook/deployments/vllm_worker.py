"""What vLLM's workers learn on top of their own: to be given checkpoints of a chain, and to say whose weights they serve.

vLLM imports this in its own environment (``--worker-extension-cls``) and mixes the class into its worker; its server calls the
methods on every worker through ``/collective_rpc``. Names begin with ``cookbook_`` so that they meet none of vLLM's.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cookbook.deployments.holder import WeightHolder

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

    def _cookbook_repack_heads(self) -> None:
        """On CPUs vLLM multiplies with a packed copy of the output head, and its reload leaves that of a tied one as it was:
        the new body would go on with the old head, without a word."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
