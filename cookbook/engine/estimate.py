"""Estimate of the memory and the floating-point operations of a step, before any weights are loaded.

The model's own code runs forward and backward on fake tensors, which have shapes but no data, while live bytes and operations
are counted. So nothing is assumed about the architecture. Only the output head branches on values, so its allocations and
operations are modeled by :class:`_Head`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from transformers.integrations import moe

from cookbook.engine import attention, layers, quantized
from cookbook.engine.attention import AttentionBlock, AttentionLayout, is_installed, skip_masks
from cookbook.engine.capabilities import KNOWN_LAYERS
from cookbook.engine.fast_path import FastPathError
from cookbook.engine.head.linear_logprobs import scan, tokenwise
from cookbook.engine.head.linear_logprobs.api import captured_input
from cookbook.engine.head.output_head import CHUNK_BYTES
from cookbook.engine.heap import Heap
from cookbook.engine.loss_gradient import SavedBytes
from cookbook.engine.memory import LARGEST_RECOMPUTED_BLOCK
from cookbook.engine.model import ModelConfig, fresh_network, recompute_activations
from cookbook.engine.optimizer import RULES, GradientBuffer, state_bytes
from cookbook.engine.precision import DEFAULT, Precision
from cookbook.engine.shape import kv_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _experts(rows: Sequence[int], weight: Sequence[int], *rest: object, **options: object) -> int:
    """Return the operations of ``(S, H) -> (S, F)`` with experts' weights ``(E, H, F)``, one expert per row."""
    return 2 * rows[0] * weight[1] * weight[2]


def _experts_backward(rows: Sequence[int], weight: Sequence[int], *rest: object, **options: object) -> int:
    return 2 * _experts(rows, weight)


# Operators that torch's counter lacks: attention on a CPU, and transformers' product of experts.
COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: inspect.unwrap(sdpa_flop),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: inspect.unwrap(sdpa_backward_flop),
    torch.ops.transformers.grouped_mm_fallback: _experts,
    torch.ops.transformers.grouped_mm_fallback_backward: _experts_backward,
}


@dataclass(frozen=True)
class Estimate:
    """Bytes in memory at the peak of a step, and floating-point operations per token, forward and backward.

    ``parameters`` and ``trained`` are counts. ``moments``: optimizer state, with float32 master weights. ``reference``: weights
    of the reference model. ``copies``: of the trained weights, to sample from. ``temporary``: activations and temporary tensors
    of a pass of ``pass_tokens`` tokens, or temporary tensors of the optimizer update if these are larger. ``allocator``:
    overhead of the C library. ``sampling``: keys, values and logits of the completions that are sampled at a time.
    ``saved_per_token``: bytes of saved activations. ``recomputable``: whether the model supports activation checkpointing.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    moments: int
    reference: int
    copies: int
    temporary: int
    allocator: int
    sampling: int
    pass_tokens: int
    saved_per_token: float
    flops_per_token: float
    recomputable: bool

    @property
    def peak(self) -> int:
        # Sampling does not run during a pass, but its large tensors do not fit into the gaps that passes leave in the heap.
        state = self.weights + self.gradients + self.moments + self.reference + self.copies
        return state + self.temporary + self.allocator + self.sampling


def estimate(
    config: ModelConfig,
    rows: int,
    width: int,
    *,
    step_tokens: int,
    interleaved: bool,
    retain_bytes: int,
    reference: bool,
    cpu: bool,
    num_copies: int = 0,
    sampled: Sequence[tuple[int, int]] = (),
    optimizer: str = "adamw",
    checkpointing: bool = False,
    precision: Precision = DEFAULT,
) -> Estimate:
    """Estimate a step of ``step_tokens`` tokens whose largest pass has ``rows`` sequences of ``width`` tokens.

    ``interleaved``: each micro-batch runs forward and backward before the next one; otherwise the loss needs the whole batch,
    and the graphs of all micro-batches are kept, up to ``retain_bytes``. ``reference``: a frozen copy of the weights is in
    memory. ``num_copies``: copies of the trained weights that are sampled from. ``sampled``: batches of completions, as numbers
    of rows and of tokens of a row, prompt included. ``checkpointing``: activation checkpointing is on. ``precision``: of the
    products, which determines what is saved.

    Raises:
        BackendError: the model's configuration cannot be loaded.
    """
    network, tokens = _network(config, checkpointing=checkpointing), rows * width
    used = precision.used(network, torch.device("cpu" if cpu else "cuda"))
    rule = RULES[optimizer]
    with FakeTensorMode(allow_non_fake_inputs=True), _substitutes(cpu=cpu), _LiveBytes() as alive:
        network.to_empty(device="cpu")
        # to_empty has given tied parameters separate tensors.
        network.tie_weights()
        _restore_own_attention(network)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        summed = GradientBuffer(trained)
        head = _Head(network.get_output_embeddings().weight, tokens, interleaved=interleaved, cpu=cpu)
        before = alive.now
        alive.heap = Heap(LARGEST_RECOMPUTED_BLOCK if checkpointing else None)
        # With several passes, the peak is in the second, when the gradients of the first exist.
        passes = 2 if interleaved and step_tokens > tokens else 1
        for _ in range(passes):
            saved, flops = _pass(network, rows, width, head, alive, used)
        peak = alive.peak
        # The moments are allocated between the blocks that the first step has left.
        moments = [torch.empty(state_bytes(rule, [parameter]), dtype=torch.uint8) for parameter in trained] if cpu else []
        summed.clear()
        for _ in range(passes if cpu else 0):
            _pass(network, rows, width, head, alive, used)
        extent = alive.heap.extent
        del summed, moments
    weights = quantized.weight_bytes(network)
    gradients = sum(parameter.numel() * max(parameter.element_size(), 4) for parameter in trained)
    temporary = max(peak - before - gradients, 0)
    if not interleaved:
        temporary += int(min(max(step_tokens - tokens, 0) * saved / tokens, retain_bytes))
    update = max(
        (rule.temporary_bytes(parameter.shape, max(4, parameter.element_size()), cpu=cpu) for parameter in trained), default=0
    )
    temporary = max(temporary, update)
    lost = max(extent - gradients - state_bytes(rule, trained) - temporary, 0)
    total, count = (sum(parameter.numel() for parameter in group) for group in (network.parameters(), trained))
    total += quantized.num_weights(network)
    return Estimate(
        parameters=total,
        trained=count,
        weights=weights,
        gradients=gradients,
        moments=state_bytes(rule, trained),
        reference=weights if reference and count == total else 0,
        copies=num_copies * sum(parameter.nbytes for parameter in trained),
        temporary=temporary,
        allocator=lost if cpu else 0,
        sampling=max((_sampling_bytes(network, *batch) for batch in sampled), default=0),
        pass_tokens=tokens,
        saved_per_token=saved / tokens,
        flops_per_token=(flops + head.flops) / tokens,
        recomputable=bool(trained and network.supports_gradient_checkpointing),
    )


def _sampling_bytes(network: PreTrainedModel, rows: int, tokens: int) -> int:
    """Return the bytes of keys, values and logits while ``rows`` completions are sampled, ``tokens`` each with their prompt.

    Keys and values count twice: they are copied when the batch grows. So do the logits, which are sorted.
    """
    element = int(network.get_output_embeddings().weight.element_size())
    of_row = tokens * kv_numbers(network.config) * element + int(network.config.get_text_config().vocab_size) * 4
    return 2 * rows * of_row


def _network(config: ModelConfig, *, checkpointing: bool) -> PreTrainedModel:
    """Return the network on the meta device, configured as the engine configures it."""
    with torch.device("meta"):
        network = fresh_network(config)
    layers.install(network)
    if _packs(network, config):
        attention.install(network)
    network.train()
    recompute_activations(network, checkpointing)
    return network


@contextmanager
def _substitutes(*, cpu: bool) -> Iterator[None]:
    """Context that adapts the model's code to fake tensors, which are always on a CPU.

    Mixtures of experts use transformers' fallback operator, because torch's ``grouped_mm`` rejects fake tensors unless they are
    bfloat16; shapes and operations are the same. Without ``cpu``, attention is that of a GPU.
    """
    with ExitStack() as stack:
        replaced: list[tuple[object, str]] = [(moe, "_can_use_grouped_mm")]
        replaced += [] if cpu else [(attention, "_is_precision_set")]
        for module, name in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda *_: False)
        yield


def _inputs(network: PreTrainedModel, rows: int, width: int) -> dict[str, object]:
    """Return the network's arguments: with cookbook's attention all sequences packed in one row, otherwise one per row."""
    ids = torch.zeros(rows, width, dtype=torch.long)
    if not is_installed(network):
        return {"input_ids": ids}
    layout = AttentionLayout((AttentionBlock(rows, width, width),), None, ids.device)
    return {"input_ids": ids.view(1, -1), "position_ids": torch.arange(width).repeat(rows)[None], "layout": layout}


def _packs(network: PreTrainedModel, config: ModelConfig) -> bool:
    """Whether the engine would pack sequences. The engine verifies the values of packed rows, which fake tensors lack."""
    kinds = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    is_packable = config.attn_implementation in ("auto", "sdpa")
    return is_packable and bool(getattr(network, "_supports_attention_backend", False)) and kinds <= KNOWN_LAYERS


def _restore_own_attention(network: PreTrainedModel) -> None:
    """Restore the model's own attention if the model builds its own attention mask, as the engine does."""
    inputs = _inputs(network, 1, 2)
    try:
        with torch.no_grad(), skip_masks("layout" in inputs):
            network(**inputs, use_cache=False)
    except FastPathError:
        network.set_attn_implementation("sdpa")


def _pass(
    network: PreTrainedModel, rows: int, width: int, head: _Head, alive: _LiveBytes, precision: Precision
) -> tuple[int, int]:
    """Run one pass forward and backward. The network's own output layer computes one position and gets no gradient.

    Returns:
        Bytes of saved activations, and floating-point operations without the output layer.
    """
    inputs = _inputs(network, rows, width)
    saved, flops = SavedBytes(network.parameters()), alive.flops
    with (
        captured_input(network.get_output_embeddings()) as captured,
        saved.counted(),
        skip_masks("layout" in inputs),
        precision.forward(head.weight.device, network),
    ):
        network(**inputs, use_cache=False)
    states = captured.pop()
    with head.allocations(states) as gradient:
        torch.autograd.backward(states, gradient)
    return saved.total + states.nbytes, alive.flops - flops


class _Head:
    """Model of :mod:`cookbook.engine.head.output_head`: its allocations and matrix products for ``tokens`` tokens."""

    def __init__(self, weight: Tensor, tokens: int, *, interleaved: bool, cpu: bool) -> None:
        self.weight = weight
        self.tokens = tokens
        self.device = "cpu" if cpu else "cuda"
        self.element = max(4, weight.element_size())
        self.logits_bytes = tokens * len(weight) * self.element
        large = self.logits_bytes > CHUNK_BYTES
        # Whether the forward pass computes the gradients of the layer.
        self.fuses_gradient = large and interleaved and weight.requires_grad
        self.recomputes = large and not interleaved

    @property
    def flops(self) -> int:
        """Operations of the matrix products: logits, gradient of the hidden states, gradient of the weight, recomputation."""
        products = 2 if not self.weight.requires_grad else 4 if self.recomputes else 3
        return products * 2 * self.tokens * self.weight.numel()

    @contextmanager
    def allocations(self, states: Tensor) -> Iterator[Tensor]:
        """Context of the backward pass. Allocates what the layer allocates, and yields the gradient of the hidden states."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        gradients = [torch.empty_like(states, dtype=wide)]
        if self.weight.requires_grad:
            gradients.append(torch.empty_like(self.weight, dtype=wide if self.fuses_gradient else None))
        temporary = [states.new_empty(self._temporary, dtype=torch.uint8)]
        # The gradients are converted while the temporary tensors still exist.
        returned = [gradient.to(self.weight.dtype) for gradient in gradients]
        del gradients, temporary[:]
        yield returned[0]
        returned.clear()

    @property
    def _temporary(self) -> int:
        """Bytes of logits, or of the mixtures that replace them, and of tiles of logits."""
        tiles, row = 2 * min(scan.TILE_BYTES[self.device], self.logits_bytes), len(self.weight) * self.element
        if self.fuses_gradient:
            least, most = tokenwise.CHUNK_ROWS
            return tiles + row * min(max(tokenwise.CHUNK_BYTES[self.device] // row, least), most, self.tokens)
        if not self.weight.requires_grad:
            return tiles + self.tokens * self.weight.shape[1] * self.element
        return tiles if self.recomputes else tiles + self.logits_bytes


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of all storages that operations allocate, and replays the allocations in ``heap`` if it is set.

    ``now``: live bytes. ``peak``: largest ``now``. ``flops``: floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.heap: Heap | None = None
        self.flops = 0
        # Only the formulas are used: torch's counter itself keeps all tensors that activation checkpointing recomputes.
        self._formulas = FlopCounterMode(display=False, custom_mapping=COUNTED).flop_registry
        # Bytes of each live storage, and its address in the heap.
        self._sizes: dict[int, int] = {}
        self._addresses: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._record_allocation(tensor.untyped_storage())
        return out

    def _record_allocation(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            if self.heap is not None:
                self._addresses[key] = self.heap.allocate(size)
            weakref.finalize(storage, self._record_free, key)

    def _record_free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        address = self._addresses.pop(key, None)
        if self.heap is not None and address is not None:
            self.heap.free(address)
