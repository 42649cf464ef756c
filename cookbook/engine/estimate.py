"""What a step costs in memory and arithmetic, before any weight is loaded.

The model's own code runs on tensors that have shapes and no numbers, forward and backward, while what is alive and what is
multiplied is counted. So nothing is assumed about an architecture. Only the output layer's code looks at numbers; what it
allocates is stated here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.integrations import moe

from cookbook.engine import attention, layers
from cookbook.engine.attention import Block, Layout, by_layout, is_installed
from cookbook.engine.fast_path import GivenUpError
from cookbook.engine.gradients import Gradients
from cookbook.engine.head import CHUNK_BYTES
from cookbook.engine.linear_logprobs.projection import TILE_BYTES
from cookbook.engine.linear_logprobs.tokenwise import CHUNK_BYTES as FOLDED_BYTES
from cookbook.engine.linear_logprobs.tokenwise import CHUNK_ROWS
from cookbook.engine.model import ModelConfig, fresh_network, recompute_activations
from cookbook.engine.probe import KNOWN_LAYERS
from cookbook.engine.saved import SavedBytes
from cookbook.engine.update_rules import RULES, state_bytes

# What the C library loses in holes, of all that the forward half of a pass makes besides its graph, and the backward half.
# glibc (2.36 here) looks for more than an aligned block takes, so the hole that a tensor leaves between two that stay does not
# hold another of its size, and the heap grows past it. In the forward half tensors of the graph stay left and right of what
# passes, so that much is lost; the backward half frees those too. From the peak resident memory of eight cases of
# benchmarks/plan.py beyond that of the same steps with every tensor in pages of its own (MALLOC_MMAP_THRESHOLD_=131072, which
# costs a quarter more CPU time). A heap that keeps what is freed, as :mod:`cookbook.engine.heap` has it, loses about the same.
HOLES = 0.4, 0.06


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _experts(rows: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Of ``(S, H) -> (S, F)`` with one of the experts' weights ``(E, H, F)`` a row."""
    return 2 * rows[0] * weight[1] * weight[2]


def _experts_backward(rows: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * _experts(rows, weight)


# torch counts the attention of GPUs and leaves out that of CPUs; it does not know transformers' product of experts.
COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.transformers.grouped_mm_fallback: _experts,
    torch.ops.transformers.grouped_mm_fallback_backward: _experts_backward,
}


@dataclass(frozen=True)
class Estimate:
    """Bytes of what is there at the worst moment of a step, and the arithmetic of a token, forward and backward.

    ``moments``: what the optimizer keeps, with float32 copies of half precision weights; ``passing``: activations and what the
    backward pass makes of them, for a pass of ``pass_tokens``, or what an update needs besides, if that is more;
    ``allocator``: what the C library adds. ``saved_per_token``: bytes of a graph that is kept. ``recomputable``: whether
    activations could be computed again in the backward pass.
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
    recomputable: bool

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.moments + self.reference + self.passing + self.allocator


def estimate(
    config: ModelConfig,
    rows: int,
    width: int,
    *,
    step_tokens: int,
    apart: bool,
    retain_bytes: int,
    reference: bool,
    cpu: bool,
    optimizer: str = "adamw",
    checkpointing: bool = False,
) -> Estimate:
    """Of a step of ``step_tokens`` whose largest pass has ``rows`` sequences of ``width`` tokens.

    ``apart``: every pass goes backward before the next goes forward; else a loss needs the graphs of all at once, as far as
    ``retain_bytes`` go. ``reference``: with a frozen copy of the weights beside it. ``checkpointing``: activations are computed
    again in the backward pass.

    Raises:
        BackendError: no such model.
    """
    network = _network(config, checkpointing=checkpointing)
    tokens = rows * width
    several = step_tokens > tokens
    with FakeTensorMode(allow_non_fake_inputs=True), _experts_of_any_dtype(), _AliveBytes() as alive:
        _give_tensors(network)
        _keep_own_masks(network)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        summed = Gradients(trained)
        head = _Head(network.get_output_embeddings().weight, tokens, apart=apart, cpu=cpu)
        before = alive.now
        for _ in range(2 if apart and several else 1):  # the second finds the gradients of the first
            found = _pass(network, rows, width, head, alive)
        del summed
    weights = sum(parameter.nbytes for parameter in network.parameters())
    gradients = sum(parameter.numel() * max(parameter.element_size(), 4) for parameter in trained)
    passing = max(alive.peak - before - gradients, 0)
    if not apart:
        passing += int(min(max(step_tokens - tokens, 0) * found.saved / tokens, retain_bytes))
    rule = RULES[optimizer]
    update = max((rule.passing_bytes(one.shape, max(4, one.element_size()), cpu=cpu) for one in trained), default=0)
    total = sum(parameter.numel() for parameter in network.parameters())
    count = sum(parameter.numel() for parameter in trained)
    return Estimate(
        parameters=total,
        trained=count,
        weights=weights,
        gradients=gradients,
        moments=state_bytes(rule, trained),
        reference=weights if reference and count == total else 0,
        passing=max(passing, update),
        allocator=found.holes if cpu else 0,
        pass_tokens=tokens,
        saved_per_token=found.saved / tokens,
        flops_per_token=(found.flops + head.flops) / tokens,
        recomputable=bool(trained and network.supports_gradient_checkpointing),
    )


def _network(config: ModelConfig, *, checkpointing: bool) -> Any:
    """As the engine would set it up, of shapes alone."""
    with torch.device("meta"):
        network = fresh_network(config)
    layers.install(network)
    if _packs(network, config):
        attention.install(network)
    network.train()
    recompute_activations(network, checkpointing)
    return network


@contextmanager
def _experts_of_any_dtype() -> Iterator[None]:
    """While it is entered, mixtures of experts multiply by transformers' own operator.

    torch's ``grouped_mm`` refuses tensors without numbers unless they are bfloat16. Shapes and arithmetic are the same.
    """
    real = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = real


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


def _inputs(network: Any, rows: int, width: int) -> dict[str, Any]:
    """All sequences in one row, as the engine lays them out, where the attention has cookbook's in its place."""
    ids = torch.zeros(rows, width, dtype=torch.long)
    if not is_installed(network):
        return {"input_ids": ids}
    layout = Layout((Block(rows, width, width),), None, ids.device)
    return {"input_ids": ids.view(1, -1), "position_ids": torch.arange(width).repeat(rows)[None], "layout": layout}


def _packs(network: Any, config: ModelConfig) -> bool:
    """Whether the engine would pack. It tries that out; here there are no numbers to try it on."""
    kinds = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    asked = config.attn_implementation in ("auto", "sdpa")
    return asked and bool(getattr(network, "_supports_attention_backend", False)) and kinds <= KNOWN_LAYERS


def _keep_own_masks(network: Any) -> None:
    """Give a model that masks its attention by itself its own attention back, as the engine does."""
    inputs = _inputs(network, 1, 2)
    try:
        with torch.no_grad(), by_layout("layout" in inputs):
            network(**inputs, use_cache=False)
    except GivenUpError:
        attention.uninstall(network, "sdpa")


@dataclass(frozen=True)
class _PassFound:
    """Of one pass: bytes that the graph keeps, bytes that a heap loses in holes, and its arithmetic."""

    saved: int
    holes: int
    flops: int


def _pass(network: Any, rows: int, width: int, head: _Head, alive: _AliveBytes) -> _PassFound:
    """Forward and backward. The network's own output layer sees one position, and no gradient comes from it."""
    inputs = _inputs(network, rows, width)
    kept: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(args[0])
        return (args[0][:, -1:], *args[1:])

    saved = SavedBytes(network.parameters())
    born, now = alive.born, alive.now
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as flops:
        with network.get_output_embeddings().register_forward_pre_hook(keep), saved.counted(), by_layout("layout" in inputs):
            network(**inputs, use_cache=False)
        turn = alive.born
        passed = turn - born - (alive.now - now)
        states = kept.pop()
        with head.at_work(states) as slope:
            torch.autograd.backward(states, slope)
    holes = int(HOLES[0] * passed + HOLES[1] * (alive.born - turn))
    return _PassFound(saved.total + states.nbytes, holes, flops.get_total_flops())


@dataclass
class _Head:
    """What :mod:`cookbook.engine.head` allocates and multiplies for ``tokens`` rows of an output layer."""

    weight: Tensor
    tokens: int
    apart: bool
    cpu: bool
    _held: list[Tensor] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Products of the size of the logits: forward, and with respect to rows and weight; where recomputed, once more."""
        products = 2 if not self.weight.requires_grad else 4 if self._recomputes else 3
        return products * 2 * self.tokens * self.weight.numel()

    @property
    def _element(self) -> int:
        return max(4, self.weight.element_size())

    @property
    def _logits(self) -> int:
        return self.tokens * len(self.weight) * self._element

    @property
    def _folds(self) -> bool:
        """Whether it has computed its gradients when the forward pass is over."""
        return self.apart and self.weight.requires_grad and self._logits > CHUNK_BYTES

    @property
    def _recomputes(self) -> bool:
        return not self.apart and self._logits > CHUNK_BYTES

    @contextmanager
    def at_work(self, states: Tensor) -> Iterator[Tensor]:
        """Around the backward pass: brings the slope of the hidden states; what the layer made is there for as long."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        made = [torch.empty_like(states, dtype=wide)]
        if self.weight.requires_grad:
            made.append(torch.empty_like(self.weight, dtype=wide if self._folds else None))
        passing = [states.new_empty(self._passing, dtype=torch.uint8)]
        handed_over = [one.to(self.weight.dtype) for one in made]
        del made, passing[:]
        yield handed_over[0]
        handed_over.clear()

    @property
    def _passing(self) -> int:
        """Bytes of logits, or of what stands for them, and of tiles of them."""
        device = "cpu" if self.cpu else "cuda"
        tiles, row = 2 * min(TILE_BYTES[device], self._logits), self._element * len(self.weight)
        if self._folds:
            least, most = CHUNK_ROWS
            return tiles + row * min(max(FOLDED_BYTES[device] // row, least), most, self.tokens)
        if not self.weight.requires_grad:
            return tiles + self.tokens * self.weight.shape[1] * self._element
        return tiles if self._recomputes else tiles + self._logits


class _AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of every tensor that operations make, from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.born = 0  # of all that there ever was
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
            self.born += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._died, storage._cdata)

    def _died(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
