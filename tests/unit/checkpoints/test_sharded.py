"""Tensors that several ranks write, and any other number of ranks reads. The ranks are processes, and talk through gloo."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import rotating
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cookbook.checkpoints import manifest, sharded, store
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.errors import CheckpointError

LARGE = 1 << 30


RANKS = multiprocessing.get_context("forkserver")  # from a process without threads, which torch does not take through a fork
RANKS.set_forkserver_preload(["torch.distributed.tensor", "cookbook.checkpoints.sharded", "cookbook.engine.engine", "pytest"])


def on_ranks(count: int, folder: Path, job: Callable[..., None], *arguments: Any) -> None:
    """Runs ``job(*arguments)`` in ``count`` processes; all of them must come to its end."""
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    children = [RANKS.Process(target=rank_of, args=(rank, count, meeting, job, *arguments)) for rank in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count


def rank_of(rank: int, count: int, meeting: Path, job: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    job(*arguments)
    dist.barrier()
    dist.destroy_process_group()


# ---- tensors ---------------------------------------------------------------------------------------------------------


def example() -> dict[str, torch.Tensor]:
    """Return a tensor of every kind that has to be restored to the bit."""
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(5, 3),  # 5 rows are no multiple of 2 ranks
        "halves": torch.tensor([1.5, float("nan"), -0.0, float("inf")]).bfloat16(),
        "row": torch.randn(1, 4),  # nothing of it is on the second rank
        "count": torch.tensor(7.0),
        "integer": torch.tensor([2**62 + 1, -3]),
        "truth": torch.tensor([True, False, True]),
        "double": torch.randn(2, 2, 2, dtype=torch.float64),
        "none": torch.empty(0, 3),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    bits = [{name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for name, t in d.items()} for d in (one, other)]
    return bits[0] == bits[1]


def spread(tensors: dict[str, torch.Tensor], dim: int = 0) -> dict[str, torch.Tensor]:
    """Split ``tensors`` among the ranks; every rank keeps the scalar, and one tensor is a replicated DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, tensor in tensors.items():
        placement = Replicate() if name == "double" else Shard(min(dim, tensor.dim() - 1))
        found[name] = distribute_tensor(tensor, mesh, [placement]) if tensor.dim() else tensor
    return found


def save_spread(folder: Path, dim: int) -> None:
    sharded.save(spread(example(), dim), folder, LARGE)


def load_spread(folder: Path) -> None:
    room = spread({name: torch.zeros_like(tensor) for name, tensor in example().items()}, dim=1)
    sharded.load(room, folder)
    assert same(
        {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in room.items()}, example()
    )


@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_write_and_one_process_reads(tmp_path, dim):
    on_ranks(2, tmp_path, save_spread, tmp_path / "state", dim)
    assert same(sharded.read(tmp_path / "state"), example())
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "shard-00000-00000.safetensors",
        "shard-00001-00000.safetensors",
    ]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.slow
def test_one_process_writes_and_several_ranks_read(tmp_path, count):
    sharded.save(example(), tmp_path / "state", LARGE)
    on_ranks(count, tmp_path, load_spread, tmp_path / "state")


def test_files_are_of_bounded_size_and_equal_states_are_equal_files(tmp_path):
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(10)} | {"large": torch.zeros(1000)}
    for name in ("one", "two"):
        sharded.save(tensors, tmp_path / name, 1000)
    files = sorted((tmp_path / "one").iterdir())
    assert all(path.read_bytes() == (tmp_path / "two" / path.name).read_bytes() for path in files)
    held = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            held.append(sorted(file.keys()))
    assert held == [["t0", "t1"], ["t2", "t3"], ["t4", "t5"], ["t6", "t7"], ["t8", "t9"], ["large"]]
    assert same(sharded.read(tmp_path / "one"), tensors)


def save_as_torch_does(folder: Path) -> None:
    kept = {name: tensor for name, tensor in spread(example()).items() if name != "none"}  # its writer stumbles over it
    dcp_save(kept, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


@pytest.mark.slow
def test_torch_reads_what_is_written_and_the_other_way_round(tmp_path):
    """The format is torch's own, not one that looks like it."""
    on_ranks(2, tmp_path, save_spread, tmp_path / "ours", 0)
    room = {name: torch.zeros_like(tensor) for name, tensor in example().items()}
    dcp_load(room, storage_reader=HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert same(room, example())
    on_ranks(2, tmp_path, save_as_torch_does, tmp_path / "theirs")
    assert same(sharded.read(tmp_path / "theirs"), {name: one for name, one in example().items() if name != "none"})


# ---- whole checkpoints -----------------------------------------------------------------------------------------------

KINDS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "lora": {"lora_rank": 4}}


def engine_of(folder: Path, kind: str, *, spread_out: bool = False) -> Engine:
    """An engine, on request with every parameter cut up among the ranks by its first dimension; it only updates, then."""
    engine = Engine(load(ModelConfig(str(folder), **KINDS[kind]), torch.device("cpu"), 0), EngineOptions())
    if spread_out:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        made: dict[int, torch.nn.Parameter] = {}  # tied ones stay tied
        for module in engine.model.network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in made:
                    cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                    made[id(parameter)] = torch.nn.Parameter(cut, parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
    return engine


def steps(engine: Engine, *numbers: int) -> None:
    """Updates with made-up gradients, element by element: the same on any number of ranks."""
    optimizer = engine.optimizer
    for number in numbers:
        for index, master in enumerate(optimizer.masters):
            gradient = torch.sin(torch.arange(master.numel(), dtype=torch.float32) + index + 7 * number).view(master.shape)
            if isinstance(master, DTensor):
                gradient = distribute_tensor(gradient, master.device_mesh, master.placements)
            master.grad = gradient
        optimizer.inner.param_groups[0]["lr"] = 1e-2
        optimizer.inner.step()
        optimizer.copy_masters_to_weights()
        engine.step += 1


def held(engine: Engine) -> dict[str, torch.Tensor]:
    """All weights and all of the optimizer, whole."""
    found = {**dict(engine.model.network.named_parameters()), **engine.optimizer.state()}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def save_after_two(model: Path, kind: str, folder: Path) -> None:
    engine = engine_of(model, kind, spread_out=True)
    steps(engine, 0, 1)
    store.save(engine, folder, state=True)


def go_on_after_three(model: Path, kind: str, folder: Path) -> None:
    straight, engine = engine_of(model, kind), engine_of(model, kind, spread_out=True)
    steps(straight, 0, 1, 2)
    store.load(engine, folder, optimizer=True)
    assert engine.step == 3 and same(held(engine), held(straight))
    for one in (engine, straight):
        steps(one, 3)
    expected = held(straight)  # to the last bit but one: what is left of a row of vector registers is rounded otherwise
    assert all(torch.allclose(one, expected[name], rtol=1e-6, atol=1e-8) for name, one in held(engine).items())


@pytest.mark.parametrize("kind", rotating(KINDS, 1))
def test_a_checkpoint_of_two_ranks_resumes_in_one_process_and_then_in_three(tiny_folder, tmp_path, kind):
    on_ranks(2, tmp_path, save_after_two, tiny_folder, kind, tmp_path / "two")
    assert manifest.verify(tmp_path / "two")["step"] == 2
    assert (tmp_path / "two" / ("adapter_model.safetensors" if kind == "lora" else "model.safetensors")).is_file()
    assert len(list((tmp_path / "two" / store.TRAINER).iterdir())) == 2
    straight, one = engine_of(tiny_folder, kind), engine_of(tiny_folder, kind)
    steps(straight, 0, 1)
    store.load(one, tmp_path / "two", optimizer=True)
    assert one.step == 2 and same(held(one), held(straight))
    steps(one, 2)
    store.save(one, tmp_path / "three", state=True)
    on_ranks(3, tmp_path, go_on_after_three, tiny_folder, kind, tmp_path / "three")


def out_of_quota(*_: object, **__: object) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def fail_on_the_second(model: Path, runs: Path) -> None:
    engine = engine_of(model, "float32", spread_out=True)
    steps(engine, 0)
    store.save(engine, runs / "good", state=True)
    with pytest.raises(CheckpointError, match="exists already; choose another name"):
        store.save(engine, runs / "good", state=True)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(sharded, "save_file", out_of_quota)
        with pytest.raises(CheckpointError, match="could not be saved: Disk quota exceeded; earlier checkpoints are untouched"):
            store.save(engine, runs / "next", state=True)
    dist.barrier()
    assert [path.name for path in runs.iterdir()] == ["good"]
    dist.barrier()
    store.save(engine, runs / "next", state=True)  # there is room again
    if dist.get_rank() == 0:
        shutil.copytree(runs / "next", runs / "damaged")
        (runs / "damaged" / store.TRAINER / "shard-00001-00000.safetensors").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"trainer/shard-00001-00000.safetensors is missing"):
        store.load(engine, runs / "damaged", optimizer=True)


@pytest.mark.slow
def test_what_goes_wrong_on_one_rank_is_told_on_all(tiny_folder, tmp_path):
    on_ranks(2, tmp_path, fail_on_the_second, tiny_folder, tmp_path / "runs")
