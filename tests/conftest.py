"""A tiny random model on disk, and engines and trainers on it."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may reach the network
import composing
import httpx._transports.default as transports
import marks
import pytest
import tiny
import torch

from cookbook import terminal
from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.decoding.decoder import Decoder
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load

# No test writes to the cache of the user; processes that a test starts inherit the folder.
_CACHE = tempfile.TemporaryDirectory(prefix="cookbook-cache-")
os.environ["COOKBOOK_CACHE"] = _CACHE.name
torch.set_num_threads(1)
terminal.PLAIN_AFTER_S = terminal.NEVER_S  # on a busy machine any test might last long enough for a plain line


composing.reuse()
# Each client of httpx reads the certificates of all authorities, in 24 ms of CPU time. No test talks to an address outside.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

MODEL_FIELDS = {"dtype", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seed that chose which cases of the rotating tests ran in CI: with it the same cases run again."""
    terminalreporter.write_line(f"{marks.SEED}={marks.seed()}")


def pytest_collection_finish() -> None:
    """Exempt the imported modules from garbage collection: a full collection over them takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of random weights with the byte tokenizer, as a Hugging Face folder."""
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the model's config, and the rest."""
    model = {key: value for key, value in options.items() if key in MODEL_FIELDS}
    return model, {key: value for key, value in options.items() if key not in MODEL_FIELDS}


@pytest.fixture
def make_engine(tiny_folder: Path) -> Callable[..., Engine]:
    """``make_engine(**options)``: fields of ``ModelConfig`` and ``EngineOptions`` in one row."""

    def make(seed: int = 0, name: Path = tiny_folder, **options: Any) -> Engine:
        model, rest = _split(options)
        loaded = load(ModelConfig(str(name), **model), torch.device("cpu"), seed)
        return Engine(loaded, EngineOptions(seed=seed, **rest))

    return make


@pytest.fixture
def make_trainer(tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[..., LocalTrainer]]:
    """``make_trainer(**options)``: fields of ``ModelConfig`` and ``LocalConfig``; checkpoints go to ``tmp_path``."""
    made: list[LocalTrainer] = []

    def make(seed: int = 0, name: Path = tiny_folder, **options: Any) -> LocalTrainer:
        model, rest = _split(options)
        made.append(LocalTrainer(ModelConfig(str(name), **model), LocalConfig(**rest), seed=seed, folder=tmp_path))
        return made[-1]

    yield make
    for trainer in made:
        trainer._worker.close()


@pytest.fixture
def endless(monkeypatch):
    """Decoding of more than 50 rows lasts until the event is set."""
    free, original = threading.Event(), Decoder._round

    def slow(decoder):
        while len(decoder.rows) > 50 and not free.is_set():
            yield []
        return (yield from original(decoder))

    monkeypatch.setattr(Decoder, "_round", slow)
    yield free
    free.set()
