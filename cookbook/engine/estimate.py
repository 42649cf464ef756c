"""What a step costs in memory and arithmetic, before any weight is loaded.

The model's own code runs on tensors that have shapes and no numbers, forward and backward, while what is alive and what is
multiplied is counted. So nothing is assumed about an architecture.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cookbook.engine import layers
from cookbook.engine.head import CHUNK_BYTES
from cookbook.engine.memory import MOMENT_BYTES
from cookbook.engine.model import DTYPES, ModelConfig, fresh_network
from cookbook.engine.saved import SavedBytes

# What the C library holds beside what is alive: freed blocks between living ones. Peak resident memory over the count, on
# random models of 20 to 80 million parameters and passes of 2,048 and 4,096 tokens: 1.21 to 1.26.
CPU_ALLOCATOR = 1.24


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


# torch counts the attention of GPUs and leaves out that of CPUs.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of what is there at the worst moment of a step, and the arithmetic of a token, forward and backward.

    ``moments``: the optimizer's, with float32 copies of half precision weights; ``passing``: activations and what the backward
    pass makes of them, for a pass of ``pass_tokens``; ``allocator``: what the C library adds. ``saved_per_token``: bytes of a
    graph that is kept.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    moments: int
    reference: int
    passing: int
    allocator: int
    pass_tokens: int
    saved_per_token: float
    flops_per_token: float

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.moments + self.reference + self.passing + self.allocator


def estimate(
    config: ModelConfig, rows: int, width: int, *, step_tokens: int, retain_bytes: int, reference: bool, cpu: bool
) -> Estimate:
    """Of a step whose largest pass has ``rows`` sequences of ``width`` tokens.

    ``step_tokens``: of all passes whose graphs a loss needs at once, as far as ``retain_bytes`` go; 0: none but the pass's.
    ``reference``: with a frozen copy of the weights beside it.

    Raises:
        BackendError: no such model.
    """
    with torch.device("meta"):
        network = fresh_network(config)
    layers.install(network)
    network.train()
    with FakeTensorMode(allow_non_fake_inputs=True), _AliveBytes() as alive:
        _give_tensors(network)
        parameters = list(network.parameters())
        before = alive.now
        saved = SavedBytes(parameters)
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as flops:
            _pass(network, rows, width, saved)
        # Gradients stay, and are counted beside it.
        made = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        passing = alive.peak - before - made
    element = DTYPES[config.dtype].itemsize
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    weights, gradients = total * element, trained * max(element, 4)
    moments = trained * (max(MOMENT_BYTES, 2 * element) + (4 if element < 4 else 0))
    head_flops, head_bytes = _head(network, rows * width)
    saved_per_token = saved.total / (rows * width)
    passing += head_bytes + int(min(max(step_tokens - rows * width, 0) * saved_per_token, retain_bytes))
    counted = weights + gradients + moments + passing
    return Estimate(
        parameters=total,
        trained=trained,
        weights=weights,
        gradients=gradients,
        moments=moments,
        reference=weights if reference and trained == total else 0,
        passing=passing,
        allocator=int((CPU_ALLOCATOR - 1) * counted) if cpu else 0,
        pass_tokens=rows * width,
        saved_per_token=saved_per_token,
        flops_per_token=(flops.get_total_flops() + head_flops) / (rows * width),
    )


def _give_tensors(network: Any) -> None:
    """Tensors of this device in the place of those of no device, tied ones once."""
    given: dict[int, Tensor] = {}
    for module in network.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in given:
                    empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    trained = tensor.requires_grad
                    given[id(tensor)] = torch.nn.Parameter(empty, trained) if own is module._parameters else empty
                if tensor is not None:
                    own[name] = given[id(tensor)]


def _pass(network: Any, rows: int, width: int, saved: SavedBytes) -> None:
    """Forward and backward of one pass up to the hidden states; the output layer sees one position."""
    ids = torch.zeros(rows, width, dtype=torch.long)
    kept: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(args[0])
        return (args[0][:, -1:], *args[1:])

    with network.get_output_embeddings().register_forward_pre_hook(keep), saved.counted():
        network(input_ids=ids, use_cache=False)
    torch.autograd.backward(kept.pop().sum())


def _head(network: Any, tokens: int) -> tuple[int, int]:
    """Multiplications and additions of the output layer, and what it keeps: its logits, or a tile of them."""
    layer = network.get_output_embeddings()
    vocabulary, hidden = layer.weight.shape
    products = 3 if layer.weight.requires_grad else 2
    return products * 2 * tokens * vocabulary * hidden, min(tokens * vocabulary * 4, CHUNK_BYTES)


class _AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of every tensor that operations make, from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._born(tensor.untyped_storage())
        return out

    def _born(self, storage: Any) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._died, storage._cdata)

    def _died(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
