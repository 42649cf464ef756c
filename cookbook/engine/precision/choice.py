"""Precision of the products of an engine: float32 products as torch rounds them, and mixed precision with bfloat16.

Training passes, reference passes and sampling have one precision. Trials at load and probes compute exactly: a rounding of
0.4% would look like a fast path that fails.

Exact products on a CPU are computed by MKL, which does not use AVX-512 on AMD's CPUs. torch calls oneDNN for products at medium
precision, and without AMX oneDNN does not round their operands. So on an AMD CPU with AVX512-BF16, wide models are trained and
sampled with torch set to medium, and their products are still exact.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cookbook.engine.fast_path import FastPathError, plain_logits, probe_tokens, trial
from cookbook.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cookbook.engine.model import LanguageModel

Half = Callable[[], AbstractContextManager[None]]
EXACT = "highest"
MATMULS = (EXACT, "high", "medium")
AUTOCASTS = {"bfloat16": torch.bfloat16}
# Instructions that multiply bfloat16, as torch.cpu.get_capabilities names them, and how many times as fast as exact products
# those of bfloat16 are, on one thread: amx_bf16 on a Xeon, avx512_bf16 on two generations of EPYC.
INSTRUCTIONS = {"amx_bf16": "7", "avx512_bf16": "2 to 4.5"}
# Least width of a model, and least tokens of a sampler's forward pass, for exact products by oneDNN. From 32 tokens and weights
# of 256 x 256 on, a product takes 0.44 to 0.8 of the time of MKL's (EPYC of family 26); with few tokens it takes more. oneDNN
# compiles a product for every new shape: GRPO takes 0.83 of the time at a width of 256, and 1.1 with the shipped model, at 128.
LEAST_HIDDEN, LEAST_TOKENS = 256, 16
# Caches of oneDNN and torch for products that are compiled for their shapes, 0.7 MB each, and the number that they keep: a
# pass with a row of 1,500 tokens has 60 shapes. torch's own number is 1,024. Both are read at the process's first such product.
CACHES, COMPILED = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 128


@dataclass(frozen=True)
class Precision:
    """``matmul``: precision of float32 products, in the words of ``torch.set_float32_matmul_precision``.

    ``autocast``: dtype of products and of the activations between them; None: that of the weights.

    Raises:
        ConfigError: an unknown word.
    """

    matmul: str = EXACT
    autocast: str | None = None

    def __post_init__(self) -> None:
        if self.matmul not in MATMULS:
            raise ConfigError(f"backend.matmul_precision: expected one of {', '.join(MATMULS)}, got {self.matmul!r}")
        if self.autocast is not None and self.autocast not in AUTOCASTS:
            raise ConfigError(f"backend.autocast: expected null or {', '.join(AUTOCASTS)}, got {self.autocast!r}")

    def __str__(self) -> str:
        return self.matmul if self.autocast is None else f"{self.matmul}, autocast {self.autocast}"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return None if self.autocast is None else AUTOCASTS[self.autocast]

    def refuse_half(self, dtype: str) -> None:
        """Raise ConfigError: ``autocast`` is set for weights of a ``dtype`` other than float32."""
        if self.autocast is not None and dtype != "float32":
            raise ConfigError(
                f"backend.autocast: {self.autocast} products need float32 weights, got model.dtype={dtype}; set "
                "model.dtype=float32, or leave backend.autocast out"
            )

    def prepare(self, model: LanguageModel) -> None:
        """Check the precision against the weights, and limit the memory of compiled products, before the first product.

        Raises:
            ConfigError: ``autocast`` is set for weights that are not float32.
        """
        self.refuse_half(model.config.dtype)
        if model.device.type == "cpu" and (model.config.dtype == "bfloat16" or self != DEFAULT):
            _limit_compiled()

    def on(self, device: torch.device) -> Precision:
        """Return the precision that ``device`` has instructions for: exact on a CPU that multiplies float32 only."""
        return self if device.type != "cpu" or instructions() else DEFAULT

    def used(self, network: PreTrainedModel, device: torch.device) -> Precision:
        """Return the precision of passes: that of :meth:`on`, or medium if that is exact and faster here.

        On a CPU, weights of bfloat16 are computed under autocast, which keeps the sums of the layers in float32. With sums in
        bfloat16, the logprobs of two passes that add in another order differ twice as much.
        """
        precision = self.on(device)
        if device.type == "cpu" and network.dtype == torch.bfloat16:
            return Precision(precision.matmul, "bfloat16")
        if precision.autocast or device.type != "cpu" or network.dtype != torch.float32:
            return precision
        is_wide = getattr(network.config.get_text_config(), "hidden_size", 0) >= LEAST_HIDDEN
        return Precision("medium") if is_wide and is_amd() and medium_is_exact() else precision

    def tried(self, model: LanguageModel) -> Precision:
        """Return the precision of the passes of ``model``, after a trial of mixed precision.

        Raises:
            ConfigError: the model's code cannot compute in mixed precision, which the configuration requests.
        """
        if self.on(model.device) != self:
            model.log_once("precision", f"products are exact, not {self}: this CPU has no bfloat16 instructions")
        precision = self.used(model.network, model.device)
        if not precision.autocast:
            return precision
        try:
            with torch.no_grad(), trial(), precision.forward(model.device, model.network):
                plain_logits(model, probe_tokens(model, 0, 8))
        except FastPathError as error:
            if self.autocast is None:
                model.log_once("precision", f"the sums of the layers are bfloat16: {model.class_name} needs one dtype: {error}")
                return self.on(model.device)
            raise ConfigError(
                f"backend.autocast: {model.class_name} cannot compute in mixed precision: {error}; leave it out, or set "
                "model.dtype=bfloat16"
            ) from None
        return precision

    def contexts(self, model: LanguageModel) -> tuple[Half, Half]:
        """Return the contexts of the two halves of a pass at this precision, which :meth:`tried` has returned."""
        if self == DEFAULT:
            # Attention of 16-bit weights has a precision of its own, and an error may end its part of the backward pass early.
            return contextlib.nullcontext, contextlib.nullcontext if model.config.dtype == "float32" else restored
        return functools.partial(self.forward, model.device, model.network), self.backward

    @contextlib.contextmanager
    def forward(self, device: torch.device, network: PreTrainedModel | None = None) -> Iterator[None]:
        """Context of the forward half of a pass. Under autocast, the sums of the layers of ``network`` are float32."""
        dtype = self.autocast_dtype
        mixed = contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
        sums = contextlib.nullcontext() if dtype is None or network is None else _float32_embedding(network)
        with self.backward(), mixed, sums:
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context of the backward half. Mixed precision needs none: gradients have the dtypes of the forward half."""
        with restored():
            torch.set_float32_matmul_precision(self.matmul)
            yield

    def described(self, device: torch.device, dtype: str = "float32") -> str:
        """Describe the precision of products with weights of ``dtype``, and the gain of autocast on ``device``."""
        if device.type != "cpu":
            return f"{self}, which is TF32 for products of float32" if self.matmul == "high" else str(self)
        name = instructions()
        if name is None:
            return EXACT if self == DEFAULT else f"{EXACT}: this CPU has no bfloat16 instructions for {self}"
        if self.autocast is not None or dtype != "float32":
            return str(self)
        return f"{self}; backend.autocast=bfloat16 is {INSTRUCTIONS[name]} times as fast on this CPU, but rounds"


DEFAULT = Precision()


@contextlib.contextmanager
def _float32_embedding(network: PreTrainedModel) -> Iterator[None]:
    """Context in which the embedding of tokens is float32. The sums of the layers begin with it, and keep its dtype."""
    if network.dtype == torch.float32:
        yield
        return
    with network.get_input_embeddings().register_forward_hook(lambda _, args, embedded: embedded.float()):
        yield


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Context that restores torch's precision at its end."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def sampling_precision(precision: Precision, model: LanguageModel, num_tokens: int) -> AbstractContextManager[None]:
    """Context of a forward pass of ``num_tokens`` tokens in sampling, at the ``precision`` of the training passes.

    Exact products are computed by the faster library.
    """
    if precision.autocast:
        return precision.forward(model.device, model.network)
    if precision.matmul != EXACT and not (model.device.type == "cpu" and medium_is_exact()):
        return precision.backward()
    if num_tokens < LEAST_TOKENS:
        return contextlib.nullcontext()
    default = DEFAULT.used(model.network, model.device)
    return contextlib.nullcontext() if default == DEFAULT else default.backward()


@functools.cache
def instructions() -> str | None:
    """Return the name of the CPU's fastest instructions for products of bfloat16; None if the CPU has none."""
    capabilities = torch.cpu.get_capabilities()
    return next((name for name in INSTRUCTIONS if capabilities.get(name)), None)


@functools.cache
def is_amd() -> bool:
    """Whether the CPU is one of AMD."""
    return str(torch.cpu.get_capabilities().get("cpu_name")).startswith("AMD")


@functools.cache
def medium_is_exact() -> bool:
    """Whether products at medium precision keep float32 operands on this CPU. Rounding them would give an error of 2e-3."""
    if instructions() is None:
        return False
    _limit_compiled()
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu") for shape in ((64, 512), (512, 64)))
    with Precision("medium").backward():
        product = left @ right
    expected = left.double() @ right.double()
    return bool((product - expected).norm() < 1e-6 * expected.norm())


@functools.cache
def _limit_compiled() -> None:
    """Limit the number of compiled products that oneDNN and torch keep, before the first of the process."""
    missing = [name for name in CACHES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, str(COMPILED)))
    torch.ones(64, 64, dtype=torch.bfloat16).mm(torch.ones(64, 64, dtype=torch.bfloat16))
    for name in missing:
        # Processes that this one starts have limits of their own.
        del os.environ[name]
