"""Options of the engine, from the configuration of the local backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cookbook.engine.batch.plan import PACKINGS
from cookbook.engine.head.linear_logprobs import HeadImpl
from cookbook.engine.precision import DEFAULT, Precision
from cookbook.errors import ConfigError


@dataclass(frozen=True)
class EngineOptions:
    """Options for memory and speed. All but ``optimizer``, ``precision`` and ``seed`` change gradients by rounding only.

    Attributes:
        micro_batch_tokens: token budget of a forward pass.
        packing: auto, padded or packed.
        shared_prompts: with packing, compute the common prefix of several sequences once.
        fused_layers: use cookbook's norms, gated MLPs and rotary embeddings; False: use the model's own code.
        trim_last_layer: skip tokens of the last layer whose outputs are not used; False: compute all tokens.
        head_impl: auto, pytorch, torch_compile, cce, file.py:name, or a function or class.
        head_options: keyword arguments of ``head_impl``.
        retain_bytes: memory for the graphs of micro-batches, kept for a loss that needs the whole batch.
        activation_checkpointing: recompute activations in the backward pass; None: only if a pass does not fit into memory.
        kept_tokens: with activation checkpointing, passes of at most this number of tokens keep their activations, one
            graph at a time.
        activation_offloading: keep saved activations in CPU memory.
        optimizer: a name in ``optimizer.RULES``.
        optimizer_offload: keep optimizer state and master weights in host memory, where the CPU updates them.
        token_metrics: compute tokens/accuracy and tokens/entropy in every pass.
        precision: precision of the products of training passes.
        all_logprobs: return the logprobs of all tokens; False: NaN at tokens of weight 0, if the loss ignores these tokens.
        seed: seed of dropout.
    """

    micro_batch_tokens: int = 8192
    packing: str = "auto"
    shared_prompts: bool = True
    fused_layers: bool = True
    trim_last_layer: bool = True
    head_impl: HeadImpl = "auto"
    head_options: Mapping[str, object] = field(default_factory=dict)
    retain_bytes: int = 4 << 30
    activation_checkpointing: bool | None = False
    kept_tokens: int = 0
    activation_offloading: bool = False
    optimizer: str = "adamw"
    optimizer_offload: bool = False
    token_metrics: bool = True
    precision: Precision = DEFAULT
    all_logprobs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"backend.packing: expected one of {', '.join(PACKINGS)}, got {self.packing!r}")
