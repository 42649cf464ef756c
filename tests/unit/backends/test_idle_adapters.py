"""Adapters of idle trainers leave memory and return with the same bits."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.backends.local.idle_adapters import IdleAdapters
from cookbook.backends.worker import Account, Worker
from cookbook.engine.model import ModelConfig
from cookbook.types import AdamParams, Datum, datum_from_tokens_weights

ADAM = AdamParams(learning_rate=1e-2)


def rows(seed: int) -> list[Datum]:
    draw = np.random.default_rng(seed)
    return [datum_from_tokens_weights(draw.integers(0, tiny.VOCABULARY, 9), np.ones(9)) for _ in range(2)]


@pytest.fixture
def trainers(tiny_folder, tmp_path):
    """``trainers(idle, **model)`` returns three trainers of adapters on one worker."""
    workers = []

    def make(idle: IdleAdapters | None, **model: object) -> list[LocalTrainer]:
        workers.append(worker := Worker(1))
        config = ModelConfig(str(tiny_folder), **{"lora_rank": 4, **model})
        lanes = [worker.lane(Account(), pauses=True) for _ in range(3)]
        return [
            LocalTrainer(config, LocalConfig(), seed=number, folder=tmp_path / str(number), worker=lane, idle=idle)
            for number, lane in enumerate(lanes)
        ]

    yield make
    for worker in workers:
        worker.close()


def played(of: list[LocalTrainer]) -> list[object]:
    """Metrics and weights of two steps of each trainer, in turn, with a checkpoint and a sampler between them."""
    seen: list[object] = []
    for _ in range(2):
        for number, trainer in enumerate(of):
            seen.append(trainer.forward_backward(rows(number), "cross_entropy").result().metrics)
            seen.append(trainer.optim_step(ADAM).result().metrics)
    samplers = [trainer.snapshot_sampler().result() for trainer in of]
    for trainer, sampler in zip(of, samplers, strict=True):
        trainer.save_state("saved", overwrite=True).result()
        seen.append(sampler.compute_logprobs([1, 2, 3, 4]).result())
        trainer.optim_step(ADAM).result()
        trainer.load_state(str(trainer.folder / "saved")).result()
    for trainer in of:
        with trainer.in_memory():
            seen += [one.detach().numpy().tobytes() for _, one in trainer.engine.model.trainable()]
            seen += [one.numpy().tobytes() for one in trainer.engine.optimizer.state().values()]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}])
def test_adapters_that_leave_memory_have_the_same_bits(trainers, tmp_path, model):
    idle = IdleAdapters(0, tmp_path / "idle")
    expected = played(trainers(None, **model))
    assert played(of := trainers(idle, **model)) == expected
    assert idle.num_stored == 3
    assert idle.num_bytes == 0
    assert all(one.numel() == 0 for trainer in of for _, one in trainer.engine.model.trainable())
    assert len(list((tmp_path / "idle").iterdir())) == 3
    sizes = [one.stat().st_size for one in (tmp_path / "idle").iterdir()]
    # Weights and two moments.
    assert min(sizes) > 3 * 4 * sum(np.prod(shape) for shape in _shapes(of[0]))


def _shapes(trainer: LocalTrainer) -> list[tuple[int, ...]]:
    with trainer.in_memory():
        return [tuple(one.shape) for _, one in trainer.engine.model.trainable()]


def test_the_adapter_that_was_idle_longest_leaves_first(trainers, tmp_path):
    idle = IdleAdapters(1 << 40, tmp_path / "idle")
    of = trainers(idle)
    of[0].mark_errors_read()
    of[0].forward(rows(0), "cross_entropy").result()
    each = idle.num_bytes // 3
    assert idle.num_bytes == 3 * each > 0
    idle.max_bytes = 2 * each
    of[1].forward(rows(0), "cross_entropy").result()
    stored = [trainer.engine.model.trainable()[0][1].numel() == 0 for trainer in of]
    assert stored == [False, False, True]
    of[2].forward(rows(0), "cross_entropy").result()
    stored = [trainer.engine.model.trainable()[0][1].numel() == 0 for trainer in of]
    assert stored == [True, False, False]


def test_an_accumulated_gradient_keeps_an_adapter_in_memory(trainers, tmp_path):
    idle = IdleAdapters(0, tmp_path / "idle")
    of = trainers(idle)
    of[0].forward_backward(rows(0), "cross_entropy").result()
    of[1].forward(rows(0), "cross_entropy").result()
    assert of[0].engine.model.trainable()[0][1].numel()
    assert idle.num_stored == 2
    of[0].optim_step(ADAM).result()
    assert idle.num_stored == 3


def test_files_end_with_their_trainers_and_with_an_earlier_process(trainers, tmp_path):
    folder = tmp_path / "idle"
    folder.mkdir()
    (folder / "of a killed process").touch()
    of = trainers(IdleAdapters(0, folder))
    of[0].forward(rows(0), "cross_entropy").result()
    assert len(list(folder.iterdir())) == 3
    del of
    gc.collect()
    assert len(list(folder.iterdir())) == 0


def test_a_full_disk_leaves_adapters_in_memory(trainers, tmp_path, caplog):
    folder = Path("/dev/full/idle")
    of = trainers(idle := IdleAdapters(0, folder))
    assert torch.isfinite(torch.tensor(of[0].forward(rows(0), "cross_entropy").result().metrics["loss"]))
    assert idle.num_stored == 0
    assert "all adapters stay in memory" in caplog.text
