"""Implementations of the output head: by name (``auto``, ``pytorch``, ``torch_compile``, ``cce``), or supplied by the user.

``pytorch`` is the code of this package, and ``auto`` selects it. Every other implementation is called as a
:class:`TargetLogprobs`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cookbook.config import python_file
from cookbook.engine.fast_path import FastPathError
from cookbook.engine.head.linear_logprobs.api import LinearLayer, LinearLogprobs, under_autocast
from cookbook.engine.head.linear_logprobs.compiled import compiled_logprobs
from cookbook.errors import BackendError, ConfigError

AUTO, PYTORCH, TORCH_COMPILE, CCE = "auto", "pytorch", "torch_compile", "cce"
IMPLEMENTATIONS = (AUTO, PYTORCH, TORCH_COMPILE, CCE)
SIGNATURE = "(hidden, weight, targets, *, bias, scale, softcap, temperature)"

TargetScores = Tensor | tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities, or ``(logprobs, entropy, hit)``; see :class:`TargetLogprobs`."""


class TargetLogprobs(Protocol):
    """Interface of an output layer: a function from hidden states to the log-probabilities of target tokens.

    It computes ``log softmax(z / temperature)`` at ``targets``, where ``z = scale * (hidden weight^T + bias)``, or with a soft
    cap ``c``, ``z = c * tanh(scale * (hidden weight^T + bias) / c)``. Shapes: ``N`` tokens, hidden size ``H``, vocabulary
    ``V``.
    """

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: Tensor | None,
    ) -> TargetScores | None:
        """Return the log-probabilities, in the shape of ``targets``, or ``(logprobs, entropy, hit)``.

        Arguments: ``hidden`` ``(N, H)`` and ``weight`` ``(V, H)``, of one dtype; ``bias`` ``(V,)``; ``targets`` ``(N,)`` or
        ``(N, K)`` int64, in ``[0, V)``; ``temperature`` ``(N,)``, positive, None is 1. N may be 0.

        Results: ``logprobs``, float32 (float64 if ``weight`` is float64), differentiable with respect to those of ``hidden``,
        ``weight`` and ``bias`` that require a gradient; ``entropy`` ``(N,)``, nats, floating point; ``hit`` ``(N,)`` bool,
        whether no token is more likely than the (first) target. Entropy and hit are metrics. If either is None, the trainer
        computes it with a second pass over the output layer.

        Return None if the arguments are not supported: the trainer then uses its own code and logs one warning.
        """


@runtime_checkable
class FusedOutputLoss(Protocol):
    """Interface of an output layer that is fused with its loss. A class is constructed with the output layer as argument.

    Cookbook's local trainer calls only ``target_logprobs``; other trainers (``transformers.Trainer``) call the object itself.
    """

    def __call__(self, hidden_states: Any, labels: Tensor) -> Tensor:
        """Return the mean loss, a scalar with its graph; ``labels`` ``(B, T)``, not shifted, -100 at tokens to ignore."""

    def forward_logits(self, hidden_states: Any) -> Tensor:
        """Return the logits ``(B, T, V)``, for inference."""

    def target_logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: Tensor | None,
    ) -> TargetScores | None:
        """Arguments and result of :class:`TargetLogprobs`."""


HeadImpl = str | TargetLogprobs | FusedOutputLoss | type
"""A name in ``IMPLEMENTATIONS``, ``file.py:name``, or a function, object or class with one of the two interfaces."""

log = logging.getLogger("cookbook")


@dataclass(frozen=True)
class Implementation:
    """An implementation other than ``pytorch``. ``where``: the option that selected it, for errors."""

    name: str
    logprobs: TargetLogprobs
    where: str = "impl"

    def scores(
        self,
        hidden: Tensor,
        layer: LinearLayer,
        targets: Tensor,
        temperature: Tensor | None = None,
    ) -> LinearLogprobs | None:
        """Return the scores of ``targets``, ``(N,)`` or ``(N, K)``; None if the implementation rejects the arguments.

        Raises:
            BackendError: the result does not follow :class:`TargetLogprobs`.
        """
        if layer.low_rank is not None:
            return self.decline("the output layer has a LoRA adapter")
        hidden, (weight, bias, _, transform) = under_autocast(hidden, layer)
        scale, softcap = transform.scale, transform.softcap
        try:
            result = self.logprobs(hidden, weight, targets, bias=bias, scale=scale, softcap=softcap, temperature=temperature)
        except FastPathError as error:
            return self.decline(str(error))
        if result is None:
            return self.decline("it returned None")
        logprobs, entropy, hit = result if isinstance(result, tuple) and len(result) == 3 else (result, None, None)
        graph = torch.is_grad_enabled() and any(
            operand is not None and operand.requires_grad for operand in (hidden, weight, bias)
        )
        work = torch.promote_types(weight.dtype, torch.float32)
        self._check("logprobs", logprobs, tuple(targets.shape), work, hidden.device)
        if graph and not logprobs.requires_grad:
            raise BackendError(
                f"{self.where}: {self.name} returned logprobs without a graph; compute them with differentiable operations of "
                "torch, outside torch.no_grad()"
            )
        for name, values, dtype in (("entropy", entropy, None), ("hit", hit, torch.bool)):
            if values is not None:
                self._check(name, values, (len(targets),), dtype, hidden.device)
        return LinearLogprobs(logprobs, None if entropy is None else entropy.detach(), hit)

    def decline(self, why: str) -> LinearLogprobs | None:
        """Return None, and log once per reason that ``pytorch`` is used instead of this implementation."""
        return _cannot(self.name, why)

    def _check(self, what: str, value: object, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> None:
        """Check type, shape, dtype and device of a result. ``dtype`` None: any floating point."""
        if not isinstance(value, Tensor):
            got = f"a {type(value).__name__}"
        elif tuple(value.shape) != shape:
            got = f"shape {tuple(value.shape)}"
        elif value.dtype != dtype and (dtype is not None or not value.is_floating_point()):
            got = f"dtype {value.dtype}"
        elif value.device != device:
            got = f"device {value.device}"
        else:
            return
        expected = f"a tensor of shape {shape} and dtype {dtype or 'float32'} on {device}"
        raise BackendError(
            f"{self.where}: {self.name} must return {what} as {expected}, got {got}; see cookbook.TargetLogprobs"
        )


def resolve(impl: Any, where: str = "impl") -> HeadImpl:
    """Check ``impl``, and load the function or class if it is ``file.py:name``.

    Raises:
        ConfigError: the name is unknown, the file or the name in it does not exist, or the signature does not match.
    """
    if isinstance(impl, str):
        if impl in IMPLEMENTATIONS:
            return impl
        if ":" not in impl and not impl.endswith(".py"):
            raise ConfigError(f"{where}: must be one of {', '.join(IMPLEMENTATIONS)}, or file.py:name, got {impl!r}")
        impl = python_file.named(impl, where, signature=SIGNATURE)
    if not callable(impl):
        raise ConfigError(f"{where}: must be a name, a function or a class, got {impl!r}; see cookbook.TargetLogprobs")
    if inspect.isclass(impl):
        if not any("__call__" in vars(base) for base in impl.__mro__):
            raise ConfigError(
                f"{where}: {impl.__name__} has no method __call__{SIGNATURE}; add it, see cookbook.TargetLogprobs"
            )
        _check_signature(impl.target_logprobs if issubclass(impl, FusedOutputLoss) else impl.__call__, impl, where, bound=False)
    else:
        _check_signature(impl.target_logprobs if isinstance(impl, FusedOutputLoss) else impl, impl, where, bound=True)
    return impl  # type: ignore[no-any-return]


def implementation(
    impl: HeadImpl, layer: torch.nn.Module | None, where: str = "impl", options: Mapping[str, Any] | None = None
) -> Implementation | None:
    """Return the implementation that ``impl`` selects, or None for ``pytorch``. ``options``: its keyword arguments.

    A class is constructed, a :class:`FusedOutputLoss` with ``layer``, any other class without arguments.

    Raises:
        ConfigError: :func:`resolve`'s conditions, an option that the implementation does not have, or a class that cannot be
            constructed.
    """
    chosen: Any = resolve(impl, where)
    options = dict(options or {})
    if isinstance(chosen, str):
        _check_options(chosen, options, where)
        built_in: dict[str, TargetLogprobs] = {TORCH_COMPILE: compiled_logprobs, CCE: cce_logprobs}
        return Implementation(chosen, functools.partial(built_in[chosen], **options), where) if chosen in built_in else None
    name = getattr(chosen, "__name__", type(chosen).__name__)
    if inspect.isclass(chosen):
        arguments = [layer] if issubclass(chosen, FusedOutputLoss) else []
        try:
            chosen = chosen(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"{where}: cannot construct {name} {'with the output layer' if arguments else 'without arguments'}: {error}; "
                "see cookbook.FusedOutputLoss"
            ) from error
    function: Any = chosen.target_logprobs if isinstance(chosen, FusedOutputLoss) else chosen
    return Implementation(name, functools.partial(function, **options) if options else function, where)


def cce_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: Tensor | None,
    filter_eps: float | str | None = None,
) -> Tensor:
    """Return log-probabilities computed by Apple's cut-cross-entropy kernels.

    ``filter_eps``: the kernels skip blocks of the gradient in which all entries are smaller than this; ``auto``: 1/32 of the
    dtype's precision; None: skip nothing, unlike the package's default. The kernels accumulate gradients in the dtype of
    ``hidden`` and in nondeterministic order, so runs with ``cce`` do not repeat bit for bit.

    Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009).

    Raises:
        FastPathError: the package is missing, or its kernels do not support the arguments.
    """
    if importlib.util.find_spec("cut_cross_entropy") is None:
        raise FastPathError("the package is not installed (pip install 'post-training-cookbook[cce]')")
    if hidden.device.type != "cuda":
        raise FastPathError(f"it needs a GPU, and the model is on the {hidden.device.type}")
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        raise FastPathError(f"it needs bfloat16, and the model is in {hidden.dtype}")
    if bias is not None or temperature is not None or targets.ndim != 1:
        raise FastPathError("it supports no bias, no temperature, and only one target per token")
    # The scale is multiplied into the hidden states, which is exact only for powers of two.
    if math.frexp(scale)[0] != 0.5:
        raise FastPathError(f"it supports no logit scale, and the model's is {scale}")
    try:
        # Imported here: the package is optional, and slow to import.
        package = importlib.import_module("cut_cross_entropy")
    except ImportError as error:
        raise FastPathError(f"the package cannot be imported: {error}") from error
    rows = hidden if scale == 1.0 else hidden * scale
    # The kernels fail without rows.
    if not len(targets):
        return (rows.sum(1) + 0 * weight.sum()).float()
    # Keywords only: the order of the parameters differs between releases.
    options = {"softcap": softcap, "reduction": "none", "shift": False, "filter_eps": filter_eps, "impl": "cce"}
    losses: Tensor = package.linear_cross_entropy(rows, weight, targets, **options)
    return -losses.float()


def check_filter_eps(value: float | str | None, where: str) -> float | str | None:
    """Return ``value``, with a number in a string converted to float.

    Raises:
        ConfigError: ``value`` is neither null, ``auto``, ``high`` nor a number between 0 and 1.
    """
    if value is None or value in ("auto", "high"):
        return value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise ConfigError(f"{where}: expected null, auto, high or a number between 0 and 1, got {value!r}")
    return number


def _check_options(name: str, options: dict[str, Any], where: str) -> None:
    known = {CCE: ("filter_eps",), TORCH_COMPILE: ("chunk_size",)}.get(name, ())
    for option in options:
        if option not in known:
            raise ConfigError(f"{where}: {name} has no option {option!r}; remove it (options: {', '.join(known) or 'none'})")
    if "filter_eps" in options:
        options["filter_eps"] = check_filter_eps(options["filter_eps"], "filter_eps")


def _check_signature(function: Callable[..., object], impl: object, where: str, *, bound: bool) -> None:
    """Raise ConfigError if ``function`` cannot be called with the arguments of :class:`TargetLogprobs`."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions written in C may have no signature.
        return
    try:
        signature.bind(*[None] * (3 if bound else 4), bias=None, scale=1.0, softcap=None, temperature=None)
    except TypeError as error:
        name = getattr(impl, "__name__", type(impl).__name__)
        raise ConfigError(
            f"{where}: {name} must take {SIGNATURE}, got {signature}: {error}; see cookbook.TargetLogprobs"
        ) from error


@functools.cache
def _cannot(name: str, why: str) -> None:
    log.warning("impl=%s does not run here: %s; impl=pytorch is used instead", name, why)
