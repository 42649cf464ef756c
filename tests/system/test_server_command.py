"""``cookbook serve`` as a process of its own, from its configuration to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import servertools
from places import ROOT
from preloaded import Forked
from waiting import WAIT_S

from cookbook.backends.local import LocalConfig
from cookbook.cli import app
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.config import typed
from cookbook.config.nodes import build
from cookbook.engine.model import ModelConfig
from cookbook.server.config import ServerConfig

tinker = pytest.importorskip("tinker")


def test_serve_yaml_restates_the_defaults():
    from omegaconf import OmegaConf

    cfg = OmegaConf.create(show(ComposeRequest(config_name="serve"), "job", resolve=True))
    assert build(cfg.server, "server") == ServerConfig()
    assert build(cfg.backend, "backend") == LocalConfig()
    assert isinstance(build(cfg.model, "model"), ModelConfig)
    assert set(cfg.server) - {typed.TARGET} == set(ServerConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("server.host=0.0.0.0", "is reachable from other machines, and no API keys are set"),
        ("server.port=70000", "server.port: expected 0 to 65535"),
        ("server.prot=1", "Did you mean 'server.port'?"),
        ("model.lora_rank=4", "clients choose the rank of each run"),
    ],
)
def test_a_mistake_is_one_line(override, problem, tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COOKBOOK_API_KEYS", raising=False)
    assert app.run(["serve", f"model.name={tiny_folder}", "server.port=0", override]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.nightly
def test_a_server_in_a_process_of_its_own_is_killed_resumes_and_ends_on_request(tmp_path, tiny_folder):
    port = servertools.free_port()
    command = [sys.executable, "-m", "cookbook", "serve", f"model.name={tiny_folder}", f"server.port={port}", "out=out"]
    environment = {**os.environ, "COOKBOOK_API_KEYS": "tml-secret", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start():
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)
        assert f"http://127.0.0.1:{port}" in server.stdout.readline()
        return server

    server, url = start(), f"http://127.0.0.1:{port}"
    try:
        with pytest.raises(tinker.AuthenticationError):
            tinker.ServiceClient(base_url=url, api_key="tml-wrong").create_lora_training_client(str(tiny_folder))
        with tinker.ServiceClient(base_url=url, api_key="tml-secret") as service:
            training = service.create_lora_training_client(str(tiny_folder), rank=2).result()
            _train(training)
            server.kill()
            server.communicate()
            server = start()
            _train(training)  # what came before is repeated in the new process, and is the same byte by byte
    finally:
        server.send_signal(signal.SIGTERM)
    _, told = server.communicate(timeout=WAIT_S)
    assert server.returncode == 0
    assert "\nfinishing accepted requests and saving runs; press Ctrl-C again to stop immediately\n" in told


@pytest.mark.slow
def test_ctrl_c_at_the_first_line_stops_in_order(tmp_path, tiny_folder):
    """The signal comes before Uvicorn handles signals."""
    with Forked("serve", f"model.name={tiny_folder}", "server.port=0", "out=out", cwd=tmp_path) as server:
        try:
            assert server.stdout.readline().startswith("serving ")
            server.send_signal(signal.SIGINT)
            _, told = server.communicate(timeout=300)
        finally:
            server.kill()
    assert server.returncode == 130
    assert told.endswith("finishing accepted requests and saving runs; press Ctrl-C again to stop immediately\n")
    assert "Warning" not in told and "Traceback" not in told


def _train(training):
    tokens = list(range(40, 60))
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 19}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams()).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    assert sampler.sample(datum.model_input, 2, tinker.SamplingParams(max_tokens=3)).result().sequences
