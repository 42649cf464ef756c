"""The ranks of a group of processes, which have initialized torch.distributed; see :mod:`cookbook.engine.parallel`.

This is the only module of the engine that imports torch.distributed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from cookbook.engine.parallel import SHARDS, Ranks, RanksLostError, Sliceable
from cookbook.engine.ranks import messages
from cookbook.errors import BackendError, ConfigError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

log = logging.getLogger("cookbook")
T = TypeVar("T")
# Environment variables that torchrun sets.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Seconds that a rank waits in a collective operation of a pass for the slowest rank.
COMPUTE_TIMEOUT_S = 1800.0
# Seconds that the other ranks wait for the next command. The first rank may be idle for as long.
COMMAND_TIMEOUT_S = 3.2e8
# Seconds that the other ranks wait while the first rank writes the whole model.
SAVING_TIMEOUT_S = 86400.0


def join(shard: str = "none", device: torch.device | None = None, *, timeout_s: float = COMPUTE_TIMEOUT_S) -> Ranks:
    """Join the group that the environment names, with the variables that torchrun sets; without them, a single process.

    Every process of the group makes this call once, with the same arguments.

    Raises:
        ConfigError: ``shard`` is unknown, or the nodes have different numbers of ranks.
    """
    if shard not in SHARDS:
        raise ConfigError(f"backend.shard: expected one of {', '.join(SHARDS)}, got {shard!r}")
    if any(name not in os.environ for name in VARIABLES) or int(os.environ["WORLD_SIZE"]) == 1:
        return Ranks()
    import torch.distributed as dist

    device = device or torch.device("cpu")
    if device.type == "cuda":
        # A rank that sees only its own GPU counts that GPU as 0.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        store, size, rank = _store(timeout), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=store, world_size=size, rank=rank)
    ProcessRanks.joined = ProcessRanks(shard, device)
    return ProcessRanks.joined


def _store(timeout: timedelta) -> TCPStore | None:
    """Return a store that listens on the address MASTER_ADDR only; None: torchrun has a store.

    torch's own store would listen on all interfaces, and has no password.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    host, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    is_first = os.environ["RANK"] == "0"
    listener = _listener(host, port) if is_first else None
    tcp_store: type[TCPStore] = dist.TCPStore  # type: ignore[attr-defined]
    return tcp_store(host, port, size, is_first, timeout, master_listen_fd=listener)


def _listener(host: str, port: int) -> int | None:
    """Return a socket that listens on the address of ``host``; None if ranks of other nodes could not connect to it."""
    with contextlib.suppress(socket.gaierror):
        address = socket.gethostbyname(host)
        # Linux distributions often give the machine's own name an address of the loopback interface.
        is_own_name = address != host and ipaddress.ip_address(address).is_loopback
        if not is_own_name or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            try:
                return socket.create_server((address, port)).detach()
            except OSError as error:
                # An address that a router translates belongs to no interface of this machine.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    log.warning(
        "the ranks find each other through port %d on all interfaces: %s is no IPv4 address of an interface here", port, host
    )
    return None


def joined() -> Ranks:
    """Return the ranks that this process has joined; without a group, a single process."""
    return ProcessRanks.joined or Ranks()


def all_present() -> bool:
    """Whether other ranks make the same calls as this thread. A first rank that leads is alone between its commands."""
    return ProcessRanks.leader is None or ProcessRanks.leader.all_present


@functools.lru_cache(maxsize=1)
def saving_group() -> ProcessGroup:
    """Return the group that writes checkpoints, on the CPU: the ranks may compute at the same time."""
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVING_TIMEOUT_S))
    return group


class Agreement(NamedTuple):
    """The message of a rank at the end of a common job: whether the job was a whole command, and the error that ended it."""

    ends_command: bool
    error: BaseException | None


class ProcessRanks(Ranks):
    """One of several processes that have initialized torch.distributed.

    Small things go over gloo on the CPU. ``commands`` is a group of its own with a time-out of years: the followers wait there
    while the first rank is idle.
    """

    # Of this process: the first rank's end of the commands, once the first rank leads.
    leader: ClassVar[Commander | None] = None
    # Of this process: called before it ends because the group is lost.
    on_lost: ClassVar[Callable[[RanksLostError], None] | None] = None
    # Of this process, once it has joined a group.
    joined: ClassVar[ProcessRanks | None] = None

    def __init__(self, shard: str, device: torch.device) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shards = shard != "none"
        self.device: torch.device = device
        self.commands: ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_TIMEOUT_S))
        self._mesh = _mesh(shard, device.type, self.size) if self.shards else None
        # All ranks must create a group together, so the thread that writes a checkpoint cannot create one.
        saving_group()
        self._root: nn.Module | None = None
        self._weights: list[Tensor] = []

    # ---- commands ------------------------------------------------------------------------------------------------

    def lead(self, function: Callable[..., T], name: Callable[..., T], *args: object, **kwargs: object) -> T:
        if self.leader is None:
            return function(*args, **kwargs)
        return self.leader.call(False, function, name, *args, **kwargs)

    @property
    def in_background(self) -> Ranks:
        return _BackgroundRanks(self)

    def send(self, message: object) -> None:
        """Send a message from the first rank to the others, which wait for it."""
        with self.lockstep():
            broadcast(message, group=self.commands)

    def receive(self) -> Any:
        """Wait for the next message of the first rank."""
        with self.lockstep():
            return broadcast(None, group=self.commands)

    # ---- agreements ----------------------------------------------------------------------------------------------

    def on_first(self, job: Callable[[], T], shared: Callable[[T], T] | None = None) -> T:
        answer: list[object] = [None, None]
        result: T | None = None
        error: BaseException | None = None
        if self.rank == 0:
            try:
                result = job()
                answer[0] = shared(result) if shared else result
            except RanksLostError:
                raise
            except BaseException as caught:  # noqa: BLE001 - it is raised below
                error, answer[1] = caught, portable(caught)
        with self.lockstep():
            answer = broadcast(answer)
        if isinstance(answer[1], BaseException):
            raise error or answer[1]
        value: T = result if self.rank == 0 else answer[0]  # type: ignore[assignment]
        return value

    def together(self, job: Callable[[], T], *, ends_command: bool = False) -> T:
        with self.agreement(ends_command=ends_command):
            return job()

    @contextlib.contextmanager
    def agreement(self, *, ends_command: bool = False) -> Iterator[None]:
        own: BaseException | None = None
        try:
            yield
        except RanksLostError:
            raise
        except BaseException as caught:  # noqa: BLE001 - it is raised below, on all ranks
            own = caught
        answers = self.gathered(Agreement(ends_command, None if own is None else portable(own)))
        if errors := [answer.error for answer in answers if answer.error is not None]:
            raise own or errors[0]

    def gathered(self, value: T) -> list[T]:
        with self.lockstep():
            values: list[T] = messages.gather(value, self.size, self._dist.all_gather)
        agreements = [value if isinstance(value, Agreement) else None for value in values]
        if len({agreement and agreement.ends_command for agreement in agreements}) > 1:
            # An error has taken one rank out of what the other ranks are still computing.
            cause = next((agreement.error for agreement in agreements if agreement and agreement.error), None)
            raise RanksLostError(f"rank {self.rank} of {self.size}: one rank alone failed: {cause}") from cause
        return values

    def totals(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        with self.lockstep():
            self._dist.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def in_step(self, flags: Sequence[bool]) -> list[bool]:
        return [count > 0 for count in self.totals([float(flag) for flag in flags])] if self.shards else list(flags)

    @contextlib.contextmanager
    def lockstep(self) -> Iterator[None]:
        try:
            yield
        except RanksLostError:
            raise
        except Exception as error:
            raise RanksLostError(f"rank {self.rank} of {self.size}: {type(error).__name__}: {first_line(error)}") from error

    # ---- sharded passes ------------------------------------------------------------------------------------------

    def inside(self, job: Callable[[], T]) -> T:
        if self._root is None:
            return job()
        with self.lockstep():
            result: T = self._root(job)
            return result

    def spread(self, network: PreTrainedModel) -> None:
        if not self.shards:
            return
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # No result of a pass is written to.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        dtypes = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
        is_half = any(dtype.itemsize < 4 for dtype in dtypes)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
        root = _Root(network)
        # The root is resharded after its forward pass too. Otherwise it would keep the weights from before the optimizer step.
        for module in [*layers_of(network), root]:
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # The engine's gradients are sums; FSDP2 divides by the number of ranks.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._root = root
        if any(parameter.is_meta for parameter in network.parameters()):
            root.to_empty(device=self.device)

    def try_pass(self, network: PreTrainedModel) -> None:
        """Run a first pass, in which FSDP2 creates the gathered parameters and records which of them get a gradient.

        The adapter must be on: while it is switched off, PEFT marks its parameters differently.
        """
        if self._root is None:
            return
        parameters: dict[int, Tensor] = {}

        def keep(module: nn.Module, _: object) -> None:
            parameters.update({id(parameter): parameter for parameter in module.parameters(recurse=False)})

        hooks = [module.register_forward_pre_hook(keep) for module in network.modules()]
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        network.eval()
        with torch.no_grad():
            self.inside(lambda: (network(input_ids=tokens, use_cache=False).logits,))
        for hook in hooks:
            hook.remove()
        self._weights = list(parameters.values())

    def weights(self, network: nn.Module) -> Iterable[Tensor]:
        return network.parameters() if self._root is None else self._weights

    # ---- tensors -------------------------------------------------------------------------------------------------

    def add_up(self, tensor: Tensor) -> Callable[[], None]:
        with self.lockstep():
            work = self._dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with self.lockstep():
                work.wait()

        return wait

    def local(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def fill(self, tensor: Tensor, whole: Sliceable) -> None:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            tensor.copy_(whole[:])
            return
        if len(local := tensor.to_local()):
            local.copy_(whole[self._rows(tensor.shape[0])])

    def part(self, whole: Tensor) -> Tensor:
        return whole[self._rows(len(whole))]

    def _rows(self, count: int) -> slice:
        """The rows that this rank holds. FSDP2 divides as torch.chunk does: less or nothing is left for the last ranks."""
        if self._mesh is None:
            return slice(count)
        size = -(-count // self._mesh.size(self._mesh.ndim - 1))
        start = min(size * self._mesh.get_local_rank(self._mesh.ndim - 1), count)
        return slice(start, min(start + size, count))

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor
        with self.lockstep():
            return tensor.full_tensor()

    def norm(self, own: float) -> float:
        if self._mesh is None:
            return own
        square = torch.tensor([own * own], dtype=torch.float64, device=self.device)
        with self.lockstep():
            self._dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        return float(square.sqrt())

    def held_share(self) -> float:
        return 1.0 if self._mesh is None else 1.0 / self._mesh.size(self._mesh.ndim - 1)


class Commander(Protocol):
    """The first rank's end of the commands."""

    @property
    def all_present(self) -> bool: ...
    def call(
        self, background: bool, function: Callable[..., T], name: Callable[..., T], *args: object, **kwargs: object
    ) -> T: ...


class _BackgroundRanks(Ranks):
    """Ranks that write a checkpoint on a thread of its own."""

    def __init__(self, ranks: ProcessRanks) -> None:
        self.rank, self.size, self.shards = ranks.rank, ranks.size, ranks.shards

    def lead(self, function: Callable[..., T], name: Callable[..., T], *args: object, **kwargs: object) -> T:
        leader = ProcessRanks.leader
        return function(*args, **kwargs) if leader is None else leader.call(True, function, name, *args, **kwargs)


class _Root(nn.Module):
    """Root of the sharded modules. A whole pass runs inside of its forward, so that the output head has its weights there."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, job: Callable[[], T]) -> T:
        return job()


def layers_of(network: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: those that transformers never splits, inner ones first."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    return [module for module in network.modules() if type(module).__name__ in names][::-1]


def _mesh(shard: str, device_type: str, size: int) -> DeviceMesh:
    """Return the mesh of the ranks; the last dimension holds one copy of the model."""
    from torch.distributed.device_mesh import init_device_mesh

    local = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if shard == "node" else size
    if size % local:
        raise ConfigError(
            f"backend.shard: node needs equal numbers of ranks on all nodes, got {size} ranks, {local} here; start the same "
            "number on each node, or set backend.shard=all"
        )
    if local == size:
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(device_type, (size // local, local), mesh_dim_names=("replicas", "shards"))


def broadcast(message: object, group: ProcessGroup | None = None) -> Any:
    """Return the message of the first rank on every rank. On the CPU, in a group with gloo."""
    import torch.distributed as dist

    return messages.broadcast(message, dist.get_rank() == 0, functools.partial(dist.broadcast, src=0, group=group))


def portable(error: BaseException) -> BaseException:
    """Return an error that another process can read: ``error`` itself, or a BackendError with its message."""
    try:
        messages.unpacked(messages.packed(error))
    except Exception:  # noqa: BLE001 - an error of any class of the user
        return BackendError(f"{type(error).__name__}: {error}")
    return error
