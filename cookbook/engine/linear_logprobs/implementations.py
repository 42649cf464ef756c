"""Implementations of the output head: by name (``pytorch``, ``torch_compile``, ``cce``, ``auto``), or supplied by the user.

``auto`` is ``pytorch``, the code of this package. Every other implementation is a
:class:`~cookbook.protocols.TargetLogprobs`: no name is known beyond this module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cookbook import pyfile
from cookbook.engine.linear_logprobs.api import LinearLogprobs, under_autocast
from cookbook.engine.linear_logprobs.layers import LinearLayer
from cookbook.errors import BackendError, ConfigError
from cookbook.protocols import FusedOutputLoss, TargetLogprobs

AUTO, PYTORCH, TORCH_COMPILE, CCE = "auto", "pytorch", "torch_compile", "cce"
IMPLEMENTATIONS = (AUTO, PYTORCH, TORCH_COMPILE, CCE)
SIGNATURE = "(hidden, weight, targets, *, bias, scale, softcap, temperature)"

HeadImpl = str | TargetLogprobs | FusedOutputLoss | type
"""A name of ``IMPLEMENTATIONS``, ``file.py:name``, a function or object, or a class of either kind."""

log = logging.getLogger("cookbook")


@dataclass(frozen=True)
class Implementation:
    """Code that replaces ``pytorch``; ``where`` is the option that chose it, for errors."""

    name: str
    logprobs: TargetLogprobs
    where: str = "impl"

    def scores(
        self,
        hidden: Tensor,
        layer: LinearLayer,
        targets: Tensor,
        *,
        scale: float,
        softcap: float | None,
        temperature: Tensor | None,
    ) -> LinearLogprobs | None:
        """Scores of ``targets``, ``(N,)`` or ``(N, K)``, of ``hidden`` ``(N, H)``; None if it does not support the arguments.

        Raises:
            BackendError: the result is not as :class:`~cookbook.protocols.TargetLogprobs` demands.
        """
        weight, bias, low_rank = layer
        if low_rank is not None:
            return _cannot(self.name, "the output layer has a LoRA adapter")
        hidden, weight, bias, _ = under_autocast(hidden, weight, bias, None)
        found = self.logprobs(hidden, weight, targets, bias=bias, scale=scale, softcap=softcap, temperature=temperature)
        if found is None:
            return None if self.name in IMPLEMENTATIONS else _cannot(self.name, "it returned None")
        logprobs, entropy, hit = found if isinstance(found, tuple) and len(found) == 3 else (found, None, None)
        graph = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (hidden, weight, bias))
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

    def _check(self, what: str, found: Any, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> None:
        """``dtype`` None: any floating point."""
        if not isinstance(found, Tensor):
            got = f"a {type(found).__name__}"
        elif tuple(found.shape) != shape:
            got = f"shape {tuple(found.shape)}"
        elif found.dtype != dtype and (dtype is not None or not found.is_floating_point()):
            got = f"dtype {found.dtype}"
        elif found.device != device:
            got = f"device {found.device}"
        else:
            return
        wanted = f"a tensor of shape {shape} and dtype {dtype or 'float32'} on {device}"
        raise BackendError(f"{self.where}: {self.name} must return {what} as {wanted}, got {got}; see cookbook.TargetLogprobs")


def resolve(impl: Any, where: str = "impl") -> HeadImpl:
    """``impl`` after its checks, with a ``file.py:name`` replaced by the function or class it names.

    Raises:
        ConfigError: the name is unknown, the file or its content does not exist, or the signature is another.
    """
    if isinstance(impl, str):
        if impl in IMPLEMENTATIONS:
            return impl
        if ":" not in impl and not impl.endswith(".py"):
            raise ConfigError(f"{where}: must be one of {', '.join(IMPLEMENTATIONS)}, or file.py:name, got {impl!r}")
        impl = pyfile.named(impl, where, signature=SIGNATURE)
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
    impl: HeadImpl, layer: Any, where: str = "impl", options: Mapping[str, Any] | None = None
) -> Implementation | None:
    """The code for ``impl``; None is ``pytorch``. ``options`` are keyword arguments of the implementation.

    A class is constructed: a :class:`FusedOutputLoss` with ``layer``, any other without arguments.

    Raises:
        ConfigError: :func:`resolve`'s conditions, an option that the implementation does not have, or a class that cannot be
            constructed.
    """
    chosen: Any = resolve(impl, where)
    options = dict(options or {})
    if isinstance(chosen, str):
        _check_options(chosen, options, where)
        built_in: dict[str, TargetLogprobs] = {TORCH_COMPILE: torch_compile_logprobs, CCE: cce_logprobs}
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
    given: Any = chosen.target_logprobs if isinstance(chosen, FusedOutputLoss) else chosen
    return Implementation(name, functools.partial(given, **options) if options else given, where)


def torch_compile_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: Tensor | None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Scores by kernels of ``torch.compile``; None, and one warning, if it fails or does not support the arguments."""
    from cookbook.engine.linear_logprobs.compiled import compiled_logprobs

    if targets.ndim != 1:
        return _cannot(TORCH_COMPILE, "it takes one target per token")
    if hidden.device.type == "cpu" and hidden.dtype not in (torch.float32, torch.float64):
        return _cannot(TORCH_COMPILE, f"on a CPU it needs float32 or float64, and the model is in {hidden.dtype}")
    options: dict[str, Any] = {"bias": bias, "scale": scale, "softcap": softcap, "temperature": temperature}
    try:
        return compiled_logprobs(hidden, weight, targets, chunk_rows=chunk_size, **options)
    except BackendError as error:
        return _cannot(TORCH_COMPILE, str(error))


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
) -> Tensor | None:
    """Log-probabilities by Apple's cut-cross-entropy; None, and one warning, if it does not support the arguments.

    ``filter_eps``: the kernels skip blocks of the gradient whose entries are all smaller; ``auto``: 1/32 of the dtype's
    precision; None: they skip nothing. The package's own default skips. The kernels add up gradients in the dtype of
    ``hidden``, in an order that differs from call to call, so a run with ``cce`` does not repeat bit for bit.
    """
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return _cannot(CCE, "the package is not installed (pip install 'post-training-cookbook[cce]')")
    if hidden.device.type != "cuda":
        return _cannot(CCE, f"it needs a GPU, and the model is on the {hidden.device.type}")
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return _cannot(CCE, f"it needs bfloat16, and the model is in {hidden.dtype}")
    if bias is not None or temperature is not None or targets.ndim != 1:
        return _cannot(CCE, "it takes no bias, no temperature, and one target per token")
    if math.frexp(scale)[0] != 0.5:  # hidden states times a power of two are exact
        return _cannot(CCE, f"it knows no scale of logits, and the model's is {scale}")
    try:
        package = importlib.import_module("cut_cross_entropy")  # an extra, and slow to import
    except ImportError as error:
        return _cannot(CCE, f"the package cannot be imported: {error}")
    rows = hidden if scale == 1.0 else hidden * scale
    return by_cut_cross_entropy(package.linear_cross_entropy, rows, weight, targets, softcap, filter_eps)


def by_cut_cross_entropy(
    function: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, filter_eps: float | str | None
) -> Tensor:
    """Call ``cut_cross_entropy.linear_cross_entropy``. Every option is a keyword: their order differs between releases."""
    if not len(targets):  # its kernels need a row
        return (hidden.sum(1) + 0 * weight.sum()).float()
    losses: Tensor = function(
        hidden, weight, targets, softcap=softcap, reduction="none", shift=False, filter_eps=filter_eps, impl="cce"
    )
    return -losses.float()


def check_filter_eps(value: float | str | None, where: str) -> float | str | None:
    """``value`` with a number spelled as text made one. Raises: ConfigError: it is neither a name nor in (0, 1)."""
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
            raise ConfigError(f"{where}: {name} has no option {option!r} (it has {', '.join(known) or 'none'}); leave it out")
    if "filter_eps" in options:
        options["filter_eps"] = check_filter_eps(options["filter_eps"], "filter_eps")


def _check_signature(function: Any, impl: Any, where: str, *, bound: bool) -> None:
    """Raises: ConfigError: ``function`` cannot be called with the arguments of :class:`TargetLogprobs`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C shows none
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
