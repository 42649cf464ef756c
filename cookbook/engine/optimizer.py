"""The optimizer: accumulated gradients, update rules, and float32 master weights."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cookbook.engine.model import LanguageModel
from cookbook.engine.parallel import Ranks, RanksLostError
from cookbook.errors import ConfigError
from cookbook.types import AdamParams

# Elements whose float64 copy fits into the CPU cache.
CHUNK = 1 << 16
# Bytes of gradients that one all-reduce of replicas adds up.
BUCKET_BYTES = 16 << 20


class GradientBuffer:
    """Accumulated gradients of ``parameters``, in their shapes; None for a parameter without a gradient.

    Gradients of 16-bit parameters are accumulated in float32: a bfloat16 sum over hundreds of passes would lose every term
    smaller than 1/256 of the sum. A hook moves each gradient into the float32 sum right after autograd has computed it, so the
    16-bit gradients of all parameters never exist at the same time.

    On replicas the gradients are views of buckets, and :meth:`add_up` sums the buckets over the ranks in every call of
    forward_backward: optim_step may follow any call. The sum of a bucket starts once the last backward pass of the call has
    computed its gradients, while that pass computes the other buckets. All ranks start the sums in the same order. So buckets
    behind a parameter without a gradient, and all buckets of a rank without a datum, wait for the end of the passes.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks | None = None) -> None:
        self.parameters = list(parameters)
        self._ranks = ranks or Ranks()
        self._sums: dict[int, Tensor] = {}
        self._half = {index for index, parameter in enumerate(self.parameters) if parameter.element_size() < 4}
        # Of replicas: indices of the parameters by bucket, and the gradients of each bucket as one tensor.
        self._members = list(_buckets(self.parameters)) if self._ranks.replicas else []
        self._bucket_of = {index: number for number, members in enumerate(self._members) for index in members}
        self._buckets: list[Tensor] = []
        # Parameters with a gradient on any rank, and whether each rank holds the sum over the ranks.
        self._reached: set[int] = set()
        self._is_sum = False
        # Of one call: backward passes to come; parameters that the last one has not reached, by bucket; sums that have started.
        self._passes_left = 0
        self._missing: list[set[int]] = []
        self._waits: list[Callable[[], None]] = []
        for index in self._bucket_of or self._half:
            hook = functools.partial(self._add, index)
            self.parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _add(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if index in self._half:
            if index in self._sums:
                self._sums[index] += parameter.grad
            else:
                self._sums[index] = parameter.grad.float()
            parameter.grad = None
        self._reached.add(index)
        if self._missing:
            bucket = self._bucket_of[index]
            if bucket < len(self._waits):
                raise RanksLostError(f"rank {self._ranks.rank}: a backward pass computed a gradient twice")
            self._missing[bucket].discard(index)
            while len(self._waits) < len(self._missing) and not self._missing[len(self._waits)]:
                self._start_sum()

    def _start_sum(self) -> None:
        self._waits.append(self._ranks.add_up(self._buckets[len(self._waits)]))

    def allocate(self) -> None:
        """Allocate the buckets of replicas. The ranks agree on an error of this call, before a sum over the ranks starts."""
        if self._buckets or not self._members:
            return
        buckets = []
        for members in self._members:
            parameters = [self.parameters[index] for index in members]
            sizes, first = [parameter.numel() for parameter in parameters], parameters[0]
            buckets.append(torch.zeros(sum(sizes), dtype=_wide(first), device=first.device))
            for index, parameter, part in zip(members, parameters, torch.split(buckets[-1], sizes), strict=True):
                view = part.as_strided(parameter.shape, parameter.stride())
                if index in self._half:
                    self._sums[index] = view
                else:
                    parameter.grad = view
        self._buckets = buckets

    @contextlib.contextmanager
    def accumulation(self, num_passes: int) -> Iterator[None]:
        """Context of the backward passes of a call, on every rank. Every replica then has the sum over all ranks.

        If the block fails on a rank, the rank still takes part in the sums, which the other ranks wait for.
        """
        with self._ranks.agreement():
            self._passes_left, self._missing, self._waits = num_passes, [], []
            if self._is_sum and self._ranks.rank:
                # Rank 0 adds to the sum of the earlier calls.
                for bucket in self._buckets:
                    bucket.zero_()
            self._is_sum = False
            try:
                yield
            except RanksLostError:
                raise
            except BaseException:
                self._finish_sums()
                raise
            self._finish_sums()

    def next_pass(self) -> None:
        """Begin one of the backward passes of a call; the gradients of the last one are final."""
        self._passes_left -= 1
        if not self._passes_left:
            self._missing = [set(members) for members in self._members]

    def skip_passes(self, count: int) -> None:
        """Expect ``count`` backward passes of the call no longer."""
        self._passes_left -= count

    def _finish_sums(self) -> None:
        self._missing = []
        if not self._members:
            return
        while len(self._waits) < len(self._buckets):
            self._start_sum()
        for wait in self._waits:
            wait()
        reached = self._ranks.totals([float(index in self._reached) for index in range(len(self.parameters))])
        self._reached = {index for index, count in enumerate(reached) if count}
        self._is_sum = True

    def all(self) -> list[Tensor | None]:
        """Return one gradient or None per parameter, in order."""
        gradients = [
            self._sums.get(index) if index in self._half else parameter.grad for index, parameter in enumerate(self.parameters)
        ]
        if not self._members:
            return gradients
        return [gradient if index in self._reached else None for index, gradient in enumerate(gradients)]

    def norm(self) -> float:
        """Return the global L2 norm over all parameters and ranks; 0.0 without gradients."""
        norms = [_norm(self._ranks.local(gradient)) for gradient in self.all() if gradient is not None]
        return self._ranks.norm(float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0)

    def clear(self) -> None:
        self._sums.clear()
        self._buckets, self._reached, self._is_sum = [], set(), False
        for parameter in self.parameters:
            parameter.grad = None


def _wide(parameter: Tensor) -> torch.dtype:
    """Return the element type of a gradient."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Return the indices of the parameters of each bucket: one element type and at most BUCKET_BYTES, or one larger tensor.

    The last parameters come first, because the backward pass reaches them first.
    """
    bucket: list[int] = []
    num_bytes = 0
    for index, parameter in reversed(list(enumerate(parameters))):
        size = parameter.numel() * _wide(parameter).itemsize
        if bucket and (num_bytes + size > BUCKET_BYTES or _wide(parameter) != _wide(parameters[bucket[0]])):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(index)
        num_bytes += size
    if bucket:
        yield bucket


def _norm(gradient: Tensor) -> Tensor:
    """Return the L2 norm of one tensor, summed in float64.

    A float32 sum of squares loses small terms: the norm of 155.6 million numbers was 2% too small. On a CPU the tensor is
    cast in chunks, which takes 0.11 s for 155.6 million numbers on one core, a sixth of ``vector_norm(dtype=float64)``.
    """
    if gradient.is_cuda:
        exact: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return exact
    if gradient.numel() <= CHUNK:
        # The bits of one chunk: the square root of a square is exact.
        small: Tensor = torch.linalg.vector_norm(gradient.double())
        return small
    norms = [torch.linalg.vector_norm(chunk.double()) for chunk in torch.split(gradient.reshape(-1), CHUNK)]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


class UpdateRule(ABC):
    """An optimizer of torch or of another library. Hyper-parameters are passed with every step."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    """Names of the state tensors of a parameter, besides ``step``, the number of its updates."""

    library: ClassVar[str | None] = None
    """Library that the rule needs besides torch."""

    shards: ClassVar[bool] = False
    """Whether updating shards of a parameter on several ranks gives the same result as updating the whole parameter."""

    def require(self) -> None:
        """Raise ConfigError if the library is not installed."""
        if self.library is not None and importlib.util.find_spec(self.library) is None:
            raise ConfigError(
                f"backend.optimizer: {self.name} needs {self.library}, which is not installed; "
                "run: pip install 'post-training-cookbook[lowbit]', or choose adafactor"
            )

    def require_sharding(self) -> None:
        """Raise ConfigError if the rule does not support sharded parameters."""
        if not self.shards:
            raise ConfigError(
                f"backend.optimizer: {self.name} cannot update weights that are sharded over ranks; use adamw, or "
                "backend.shard=none"
            )

    @abstractmethod
    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Construct the optimizer of ``parameters``, which are float32 or float64."""

    @abstractmethod
    def options(self, adam: AdamParams) -> dict[str, object]:
        """Return the options of the parameter group for one step.

        Raises:
            ConfigError: the rule does not support a value of ``adam``.
        """

    @abstractmethod
    def parameter_state_bytes(self, shape: Sequence[int], element: int) -> int:
        """Return the bytes of optimizer state for a parameter of this ``shape``, with ``element`` bytes per element."""

    def temporary_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        """Return the temporary bytes that the update of such a parameter needs."""
        return 0

    def restored(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, object]:
        """Return the optimizer's state of a parameter, from the tensors of a checkpoint."""
        return dict(tensors)


class AdamW(UpdateRule):
    """Decoupled weight decay. Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2."""

    name = "adamw"
    keys = ("exp_avg", "exp_avg_sq")
    shards = True

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.0, foreach=None, fused=True)

    def options(self, adam: AdamParams) -> dict[str, object]:
        return _adam_options(adam)

    def parameter_state_bytes(self, shape: Sequence[int], element: int) -> int:
        return 2 * element * math.prod(shape)

    def restored(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, object]:
        """Return the state with ``step`` on the device of the moments, where the fused kernel reads it."""
        return {**tensors, "step": tensors["step"].to(tensors["exp_avg"].device, torch.float32)}


class AdamW8bit(UpdateRule):
    """AdamW of bitsandbytes: moments in 8 bits, with a float32 scale per block of 256 values.

    Parameters with fewer than 4,096 elements have float32 moments. Slow on a CPU: an update of 4 million elements took 0.24 s,
    against 0.008 s for torch's fused AdamW and 0.08 s for Adafactor. Not measured on GPUs, for which bitsandbytes has kernels.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
    """

    name = "adamw8bit"
    keys = ("state1", "state2", "absmax1", "absmax2")
    library = "bitsandbytes"
    BLOCK = 256
    LEAST = 4096

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit as Library

        optimizer: torch.optim.Optimizer = Library(parameters, lr=0.0, min_8bit_size=self.LEAST)
        return optimizer

    def options(self, adam: AdamParams) -> dict[str, object]:
        return _adam_options(adam)

    def parameter_state_bytes(self, shape: Sequence[int], element: int) -> int:
        count = math.prod(shape)
        return 2 * 4 * count if count < self.LEAST else 2 * (count + 4 * -(-count // self.BLOCK))

    def temporary_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        # On a CPU five float32 tensors of this shape exist: both moments, the gradient, and two steps of the denominator.
        return 5 * 4 * math.prod(shape) if cpu else 0

    def restored(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, object]:
        """Return the state with the dequantization tables: constants of the library, the same for all parameters."""
        state: dict[str, object] = {**tensors, "step": int(tensors["step"])}
        if tensors["state1"].dtype == torch.uint8:
            tables = optimizer.name2qmap  # type: ignore[attr-defined]
            for number, name in ((1, "dynamic"), (2, "udynamic")):
                tables[name] = tables[name].to(tensors["state1"].device)
                state[f"qmap{number}"] = tables[name]
        return state


class Adafactor(UpdateRule):
    """torch's Adafactor: a factored second moment, one value per row and one per column of a matrix; no first moment.

    The step size is relative to the weights, ``min(lr, 1/sqrt(t)) * max(1e-3, RMS(weights))``. The second moment decays with
    ``1 - t^-0.8`` at step t. An update with an RMS above 1 is scaled down to 1. ``eps`` is the lower bound of the square root
    of the second moment. Weight decay is decoupled.

    Source: Shazeer & Stern, Adafactor (arXiv 1804.04235), algorithms 4 and 5.
    """

    name = "adafactor"
    keys = ("row_var", "col_var", "variance")

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        # One parameter at a time: ``foreach`` needs temporary tensors for all parameters together.
        return torch.optim.Adafactor(parameters, lr=0.0, foreach=False)

    def options(self, adam: AdamParams) -> dict[str, object]:
        if adam.beta1 or adam.beta2:
            raise ConfigError(
                "backend.optimizer: adafactor has no first moment and computes the decay of the second moment itself, got "
                f"beta1={adam.beta1} and beta2={adam.beta2}; set both to 0, as optim=adafactor does"
            )
        return {"lr": adam.learning_rate, "eps": (adam.eps, 1e-3), "weight_decay": adam.weight_decay}

    def parameter_state_bytes(self, shape: Sequence[int], element: int) -> int:
        count = math.prod(shape)
        return element * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)

    def temporary_bytes(self, shape: Sequence[int], element: int, *, cpu: bool) -> int:
        return element * math.prod(shape)


RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (AdamW(), AdamW8bit(), Adafactor())}


def update_rule(name: str) -> UpdateRule:
    """Return the update rule with this name. Raise ConfigError if the name is unknown."""
    if name not in RULES:
        raise ConfigError(f"backend.optimizer: expected one of {', '.join(RULES)}, got {name!r}")
    return RULES[name]


def state_bytes(rule: UpdateRule, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of optimizer state: the tensors of ``rule``, and float32 master weights of 16-bit ``parameters``."""
    return sum(
        rule.parameter_state_bytes(parameter.shape, max(parameter.element_size(), 4))
        + (4 * parameter.numel() if parameter.element_size() < 4 else 0)
        for parameter in parameters
    )


def _adam_options(adam: AdamParams) -> dict[str, object]:
    betas = (adam.beta1, adam.beta2)
    return {"lr": adam.learning_rate, "betas": betas, "eps": adam.eps, "weight_decay": adam.weight_decay}


class Optimizer:
    """Applies an update rule to the accumulated gradients. Holds the optimizer state and the master weights.

    With any rule, bfloat16 parameters have float32 master weights: at RL learning rates most updates are smaller than the
    spacing of bfloat16 numbers, and would be lost.

    ``offload``: the state and the master weights of all parameters are in host memory, and the CPU computes the update.
    """

    def __init__(self, model: LanguageModel, gradients: GradientBuffer, rule: UpdateRule, *, offload: bool = False) -> None:
        self.names = [name for name, _ in model.trainable()]
        self.parameters = [parameter for _, parameter in model.trainable()]
        self.gradients = gradients
        self.rule = rule
        self.masters = [_master(parameter, offload=offload) for parameter in self.parameters]
        self.inner = rule.make(self.masters)

    def step(self, adam: AdamParams, scale: float) -> None:
        """Update the weights with the gradient times ``scale``; a missing gradient counts as zero.

        Raises:
            ConfigError: the rule does not support a value of ``adam``; nothing has changed.
        """
        options = self.rule.options(adam)
        for gradient, master in zip(self.gradients.all(), self.masters, strict=True):
            master.grad = torch.zeros_like(master) if gradient is None else gradient.to(master.device)
            if scale != 1.0:
                master.grad.mul_(scale)
        for group in self.inner.param_groups:
            group.update(options)
        self.inner.step()
        self.copy_masters_to_weights()

    def copy_masters_to_weights(self) -> None:
        """Round the master weights into the parameters of the model."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the state that an exact resume needs besides the weights, as named tensors on the CPU."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            for key, value in self.inner.state.get(master, {}).items():
                if key in self._keys:
                    tensors[f"{key}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
            if master.dtype != parameter.dtype:
                tensors[f"master.{name}"] = master.detach().cpu().contiguous()
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`. Tensors with other names are ignored; moments are used without a copy."""
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if master is not parameter and f"master.{name}" in tensors:
                master.data.copy_(tensors[f"master.{name}"])
            saved_state = {key: tensors[f"{key}.{name}"] for key in self._keys if f"{key}.{name}" in tensors}
            if saved_state:
                on_device = {key: value if key == "step" else value.to(master.device) for key, value in saved_state.items()}
                self.inner.state[master] = self.rule.restored(self.inner, on_device)

    def reset(self) -> None:
        """Clear the optimizer state, and copy the master weights from the parameters."""
        self.inner.state.clear()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.data.copy_(parameter)

    @property
    def _keys(self) -> tuple[str, ...]:
        return ("step", *self.rule.keys)


def _master(parameter: torch.nn.Parameter, *, offload: bool) -> torch.nn.Parameter:
    """Return the weights that the rule updates: float32 or wider, and with ``offload`` in host memory."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    if offload:
        return torch.nn.Parameter(parameter.detach().to("cpu", wide, copy=True))
    if parameter.dtype == wide:
        return parameter
    return torch.nn.Parameter(parameter.detach().to(wide, copy=True))
