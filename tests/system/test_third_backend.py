"""A backend of a user's folder: recipes, ``plan``, ``serve``, deployments and the Python API work with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import servertools
from runtools import SMALL, here, rows, train, write  # noqa: F401

import cookbook
from cookbook import ServiceClient
from cookbook.cli import app
from cookbook.config import typed
from cookbook.deployments.vllm.deployment import VllmConfig
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError

MODULE = '''
"""Cookbook's engine behind a trainer that counts its optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.clients import LocalClients
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import load


class CountingTrainer:
    def __init__(self, inner: LocalTrainer) -> None:
        self.inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def optim_step(self, *args: Any) -> Any:
        self.count += 1
        return self.inner.optim_step(*args)

    def close(self) -> None:
        self.inner.close()
        Path("count").write_text(str(self.count))


@dataclass
class Config:
    micro_batch_tokens: int = 4096
    optimizer: str = "adafactor"
    threads: int = 1
    shard_gb: float = 1.0
    retain_gb: float = 0.0
    recomputes: bool | None = False
    writes_checkpoints: bool = True

    def make_trainer(self, model, *, seed, folder):
        return CountingTrainer(LocalTrainer(model, self, seed=seed, folder=folder))

    def clients(self, folder):
        return LocalClients(self, folder)

    def torch_device(self):
        return torch.device("cpu")

    def make_engine(self, model, seed, base=None):
        loaded = load(model, self.torch_device(), seed, base)
        tokens, rule = self.micro_batch_tokens, self.optimizer
        return Engine(loaded, EngineOptions(micro_batch_tokens=tokens, optimizer=rule, all_logprobs=True, seed=seed))

    def for_serving(self, *, trains):
        return self
'''
ADAFACTOR = "optim=adafactor"


@pytest.fixture
def mine(here, monkeypatch):  # noqa: F811
    """The user's folder, with the backend and its file of conf/."""
    write("my_backend.py", MODULE)
    monkeypatch.syspath_prepend(here)
    Path("conf/backend").mkdir(parents=True)
    write("conf/backend/mine.yaml", "_target_: my_backend.Config\nmicro_batch_tokens: 2048\n")
    return here


def test_a_recipe_trains_and_resumes(mine):
    """It also samples. The optimizer is the backend's: with AdamW its options would be refused."""
    words = [*SMALL["grpo"], "backend=mine", ADAFACTOR, "out=run", "checkpoint.every=1"]
    assert train(*words, "recipe.steps=1") == 0
    assert Path("count").read_text() == "1" and len(rows("run")) >= 1
    assert train(*words, "recipe.steps=2") == 0
    assert Path("count").read_text() == "1"


@pytest.mark.slow
def test_check_config_and_plan_read_its_settings(mine, capsys):
    assert app.run(["check", "config", "recipe=sft", "backend=mine", ADAFACTOR, "data.limit=640"]) == 0
    assert "Adafactor" in capsys.readouterr().out
    assert app.run(["check", "config", "recipe=sft", "backend=mine", "optim.beta1=2", "data.limit=640"]) == 2
    assert app.run(["plan", "recipe=sft", "recipe.batch_size=2", "backend=mine", ADAFACTOR]) == 0
    assert "adafactor" in capsys.readouterr().out


@pytest.mark.slow
def test_serve_shares_its_engine(mine, tiny_folder, monkeypatch):
    """The command hands the backend on, and clients of that server train with it, as the backend itself does."""
    tinker = pytest.importorskip("tinker")
    given = []
    monkeypatch.setattr("cookbook.server.serve.serve", lambda model, backend, server, **_: given.append(backend))
    assert app.run(["serve", f"model.name={tiny_folder}", "backend=mine", "out=served"]) == 0
    (backend,) = given
    assert type(backend).__module__ == "my_backend" and backend.micro_batch_tokens == 2048

    def trained(client, types):
        data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs(types))]
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2, beta1=0.0, beta2=0.0)).result()
        return client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()

    def inputs(types):
        numbers = {"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, dtype=np.float32)}
        return {key: types.TensorData.from_numpy(value) for key, value in numbers.items()}

    with servertools.running(tiny_folder, mine / "served", backend=backend, names=["tiny"]) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        served = trained(service.create_lora_training_client("tiny", rank=4, seed=3, train_unembed=False), tinker)
    with ServiceClient(backend=backend) as service:
        local = trained(service.create_lora_training_client(str(tiny_folder), rank=4, seed=3), cookbook)
    assert np.array_equal(served, local)


def test_a_deployment_serves_its_checkpoints(mine, tiny_folder, monkeypatch):
    """Up to the servers themselves: the backend is accepted, and the options are those of the trainer's model."""
    # Not what this machine has left now.
    monkeypatch.setattr("cookbook.deployments.vllm.deployment.free_bytes", lambda _: 8 << 30)
    backend = typed.construct_target({"_target_": "my_backend.Config"}, "backend")
    config = VllmConfig(url="http://127.0.0.1:9", dtype="bfloat16")
    model = ModelConfig(str(tiny_folder))
    trainer = backend.make_trainer(model, seed=0, folder=mine)
    config.preflight(model, backend)
    options = VllmConfig(dtype="bfloat16").options(trainer)
    assert options.dtype == "bfloat16" and options.model == str(tiny_folder)
    backend.writes_checkpoints = False
    with pytest.raises(ConfigError, match="needs backend=local"):
        config.preflight(model, backend)
    trainer.close()


class Elsewhere:
    """A backend that can only train."""

    def make_trainer(self, model, *, seed, folder):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["plan", "recipe=sft"], "backend: plan estimates the embedded trainer's work; use backend=local"),
        (["serve", "out=served"], "backend: serve needs a backend that computes in this process, got Elsewhere; use"),
        (["train", "recipe=grpo", "deployment=vllm"], "deployment=vllm needs backend=local"),
    ],
)
def test_a_backend_without_a_capability_is_refused_in_one_line(mine, capsys, command, problem):
    write("conf/backend/elsewhere.yaml", f"_target_: {__name__}.Elsewhere\n")
    assert app.run([*command, "backend=elsewhere"]) == 2
    assert problem in capsys.readouterr().err


def test_the_python_api_refuses_a_backend_without_clients():
    with pytest.raises(ConfigError, match="backend: Elsewhere has no method `clients`; use LocalConfig"):
        ServiceClient(backend=Elsewhere())
