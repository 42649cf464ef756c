"""A rehearsal of a GPU on torch's CPU build: tensors that say they are on ``cuda:0`` and compute on the CPU.

Like torch's fake tensors, an operation that mixes devices raises. Unlike them, the tensors have values, so the whole engine
runs, with its trials, its losses and its optimizer, and its results can be compared with those of the CPU. Every transfer is
recorded with the line of the package that causes it:

- ``sync``: the host waits for a result of the GPU (``item``, ``tolist``, ``bool``, ``nonzero``, a copy to the CPU).
- ``upload``: a copy from the CPU, which waits for queued kernels unless the memory is pinned.

Not rehearsed, because a CPU has other kernels: the choice of attention kernels and their numbers, Triton, streams, memory.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from places import ROOT
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
PACKAGE = ROOT / "cookbook"
aten = torch.ops.aten
# Operators of CUDA whose output shape depends on values, so that the host waits for the values.
SHAPED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.repeat_interleave}
# Operators that return a number or a bool to the host.
TO_HOST = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}


class DeviceError(AssertionError):
    """An operation mixes tensors of the GPU and the CPU."""


class Transfers:
    """Transfers by kind and line of the package."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def record(self, kind: str) -> None:
        self.counts[kind, _line_of_package()] += 1

    def of(self, kind: str) -> dict[str, int]:
        return {line: count for (one, line), count in sorted(self.counts.items()) if one == kind}

    def clear(self) -> None:
        self.counts.clear()


TRANSFERS = Transfers()
# Names of the functions of torch that Python has called and that have not returned. C++ fills the options of a tensor that it
# makes inside of an operator from another tensor, and takes a tensor of the GPU for one of the CPU.
_CALLS: list[str] = []
FACTORIES = {
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "from_numpy",
    "rand",
    "randn",
    "randint",
    "linspace",
}
# Storages of tensors that C++ has made inside of operators, on the device of whatever uses them.
_MADE_INSIDE: set[int] = set()


def _line_of_package() -> str:
    """The innermost line of the package in the stack, as ``file: function``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "tests"


class GpuTensor(Tensor):
    """A tensor whose ``device`` is ``cuda:0``. C++ sees the CPU, so that autograd runs on a build without CUDA."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self) -> str:
        return f"GpuTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        TRANSFERS.record("sync")
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("cannot convert a tensor on cuda:0 to numpy; use Tensor.cpu() to copy the tensor to host memory")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")


def compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the inner tensors. Raises DeviceError: it mixes devices."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    gpu = [one for one in tensors if isinstance(one, GpuTensor)]
    packet = func.overloadpacket
    if gpu and packet not in (aten.copy_, aten._to_copy):
        # CUDA accepts numbers of the CPU, and its indexing accepts indices of the CPU, which it uploads.
        cpu = [one for one in tensors if not isinstance(one, GpuTensor) and one.ndim and not _is_made_inside(one)]
        if cpu and packet in (aten.index, aten.index_put_, aten.index_put) and isinstance(args[0], GpuTensor):
            TRANSFERS.record("upload")
            cpu = [one for one in cpu if packet is not aten.index and one is args[2]]
        if cpu and packet is not aten.set_:
            on_gpu, on_cpu = ([tuple(one.shape) for one in group] for group in (gpu, cpu))
            raise DeviceError(f"{func} mixes devices: shapes {on_gpu} on the GPU, {on_cpu} on the CPU")
    result_on_gpu = bool(gpu)
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        # Options that C++ has copied from a tensor of the GPU name the CPU.
        is_copied = bool(gpu) and bool(_CALLS) and _CALLS[-1] != packet.__name__.split(".")[-1]
        result_on_gpu = is_copied or torch.device(kwargs["device"]).type == "cuda"
        kwargs["device"] = torch.device("cpu")
    _record(packet, args, result_on_gpu, gpu)
    args_, kwargs_ = tree_map_only(GpuTensor, lambda one: one.inner, (args, kwargs))
    if packet is aten._to_copy and result_on_gpu != bool(gpu):
        # A copy to another device is never an alias.
        out = func(*args_, **kwargs_)
        return GpuTensor(out) if result_on_gpu else out
    out = _run(func, packet, args_, kwargs_)
    if not tensors and isinstance(out, Tensor):
        storage = out.untyped_storage()
        # A storage that is freed gives its address to another.
        _MADE_INSIDE.discard(storage._cdata)
        if _CALLS and _CALLS[-1] not in FACTORIES:
            _MADE_INSIDE.add(storage._cdata)
            weakref.finalize(storage, _MADE_INSIDE.discard, storage._cdata)
    if result_on_gpu:
        out = tree_map_only(Tensor, lambda one: one if isinstance(one, GpuTensor) else GpuTensor(one), out)
    if not gpu:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)


def _is_made_inside(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _MADE_INSIDE


def _run(func: Any, packet: Any, args: Any, kwargs: Any) -> Any:
    # Products of bfloat16 with float32 results exist on GPUs only.
    if kwargs.get("out_dtype") is not None or str(func).endswith(("mm.dtype", "mm.dtype_out")):
        return _mixed_product(packet, args, kwargs)
    return func(*args, **kwargs)


def _mixed_product(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    rest = {key: value for key, value in kwargs.items() if key not in ("out_dtype", "out")}
    wide = [one.float() if isinstance(one, Tensor) else one for one in args if not isinstance(one, torch.dtype)]
    result = packet(*wide, **rest)
    return result if (out := kwargs.get("out")) is None else out.copy_(result)


def _record(packet: Any, args: Any, result_on_gpu: bool, gpu: Sequence[Tensor]) -> None:
    if (gpu and packet in TO_HOST | SHAPED_BY_VALUES) or (
        packet is aten.index and gpu and any(one is not None and one.dtype == torch.bool for one in args[1])
    ):
        TRANSFERS.record("sync")
    elif packet is aten._to_copy and bool(gpu) != result_on_gpu:
        TRANSFERS.record("upload" if result_on_gpu else "sync")
    elif packet is aten.copy_ and isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor):
        TRANSFERS.record("upload" if isinstance(args[0], GpuTensor) else "sync")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Calls of Python that C++ would answer without an operator, because it takes the tensors for tensors of the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        _CALLS.append(name)
        try:
            return self._call(func, name, args, dict(kwargs or {}))
        finally:
            _CALLS.pop()

    def _call(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is Tensor.cpu and isinstance(args[0], GpuTensor):
            return _Moved.apply(args[0], False)
        if func is Tensor.cuda:
            return _Moved.apply(args[0], True)
        if func is Tensor.to:
            return _to(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda" and name in ("tensor", "as_tensor"):
            made = func(*args, **{**kwargs, "device": "cpu"}) if not isinstance(args[0], GpuTensor) else args[0]
            if not isinstance(made, GpuTensor):
                TRANSFERS.record("upload")
                made = GpuTensor(made.detach())
            return made
        return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``Tensor.to``, which moves to another device first, and then converts."""
    source, rest = args[0], list(args[1:])
    target = kwargs.pop("device", None)
    for place, one in enumerate(rest):
        if isinstance(one, Tensor):
            target, rest[place] = one.device, one.dtype
        elif isinstance(one, torch.device | str):
            target = one
            del rest[place]
            break
    if target is not None and (torch.device(target).type == "cuda") != isinstance(source, GpuTensor):
        source = _Moved.apply(source, torch.device(target).type == "cuda")
    kwargs.pop("non_blocking", None)
    rest = [one for one in rest if one is not None]
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    return func(source, *rest, **kwargs) if rest or kwargs else source


class _Moved(torch.autograd.Function):
    """A copy on the other device."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, to_gpu: bool) -> Tensor:
        if to_gpu == isinstance(source, GpuTensor):
            return source
        ctx.was_gpu = isinstance(source, GpuTensor)
        TRANSFERS.record("upload" if to_gpu else "sync")
        return GpuTensor(source.detach().clone()) if to_gpu else source.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        TRANSFERS.record("upload" if ctx.was_gpu else "sync")
        if ctx.was_gpu == isinstance(gradient, GpuTensor):
            return gradient, None
        return (GpuTensor(gradient) if ctx.was_gpu else gradient.inner), None


class _Stream:
    """A stream that has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> Any:
        return self

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def pretended_gpu(patch: Any) -> Iterator[Transfers]:
    """Context in which ``cuda`` is a device. ``patch``: pytest's monkeypatch."""
    autocast = torch.autocast.__init__

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    patch.setattr(torch.autocast, "__init__", on_cpu)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 << 30, 80 << 30))
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    TRANSFERS.clear()
    with _Dispatch(), _Functions():
        yield TRANSFERS


def moved(network: torch.nn.Module) -> torch.nn.Module:
    """The network on the GPU, with parameters that stay the objects that tied layers share."""
    seen: dict[int, torch.nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, GpuTensor):
                if id(parameter) not in seen:
                    wrapped = GpuTensor(parameter.detach().clone())
                    seen[id(parameter)] = torch.nn.Parameter(wrapped, requires_grad=parameter.requires_grad)
                module._parameters[name] = seen[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, GpuTensor):
                module._buffers[name] = GpuTensor(buffer.detach().clone())
    return network
