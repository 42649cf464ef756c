"""Samples from vLLM, in processes of its own, whose weights are replaced where they are while they go on serving."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cookbook.backends.local import LocalTrainer
from cookbook.checkpoints import manifest
from cookbook.checkpoints.chain import SamplerCheckpoints
from cookbook.deployments import holder, server
from cookbook.deployments.http import Client
from cookbook.deployments.manager import DeploymentManager
from cookbook.deployments.sampler import DeploymentSampler, Pool, Replica
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import Future, done
from cookbook.protocols import Sampler, TrainingClient
from cookbook.types import Datum, ModelInput
from cookbook.weight_sync import ChainSyncer
from cookbook.weight_sync import Replica as Report

log = logging.getLogger("cookbook")

RPC = "/collective_rpc"
POLL_S = 0.02
CHECKED_TOKENS = 24
PRIVATE = "run-"  # how names begin that are of one run only


@dataclass
class VllmConfig:
    """``conf/deployment/vllm.yaml`` says what each field means.

    The server of ``url`` must have been started as :func:`cookbook.deployments.server.command` does, with that function's
    :func:`~cookbook.deployments.server.environment`: with the routes for control, and with what loads checkpoints.
    """

    python: str = ".venv-vllm/bin/python"
    name: str | None = None
    url: str | None = None
    replicas: int = 1
    dtype: str | None = None
    max_length: int | None = None
    kv_cache_gb: float = 0.25
    threads: int = 1
    args: list[str] = field(default_factory=list)
    startup_s: float = 900.0
    timeout_s: float = 600.0
    retries: int = 6
    max_requests: int = 64
    on_exit: str = "delete"
    deltas: int = 50
    keep_chains: int = 1
    logprob_tolerance: float | None = 1e-3

    def __post_init__(self) -> None:
        if self.on_exit not in ("delete", "keep"):
            raise ConfigError(f"deployment.on_exit: expected delete or keep, got {self.on_exit!r}")
        if self.on_exit == "keep" and self.name is None and self.url is None:
            raise ConfigError("deployment.on_exit=keep needs deployment.name, by which the servers are found again")
        for key in ("replicas", "threads", "max_requests", "keep_chains"):
            if (value := getattr(self, key)) < 1:
                raise ConfigError(f"deployment.{key} must be at least 1, got {value}")
        if self.retries < 0 or self.deltas < 0:
            raise ConfigError("deployment: retries and deltas must be at least 0")
        if self.url is not None and self.replicas != 1:
            raise ConfigError("deployment.url names one running server; leave deployment.replicas=1")

    def deploy(self, trainer: TrainingClient, *, live: bool) -> VllmDeployment:
        """Starts the servers, or finds them.

        Raises:
            ConfigError: the trainer cannot be served so.
            RolloutError: a server does not come up.
        """
        if not isinstance(trainer, LocalTrainer):
            raise ConfigError("deployment=vllm needs backend=local: it serves checkpoints that a local trainer writes")
        if trainer.engine.model.is_lora:
            raise ConfigError("deployment=vllm serves full weights; set model.lora_rank=0, or use deployment=embedded")
        if not live:
            raise ConfigError("deployment=vllm holds one version of the weights; set weight_sync.every=1")
        if self.dtype is not None:
            trainer.sampler_checkpoints = SamplerCheckpoints(self.dtype)
        return VllmDeployment(self, trainer)

    def options(self, trainer: LocalTrainer) -> server.Options:
        model = trainer.engine.model.config
        return server.Options(
            # Not resolved: the link is what makes it the environment's Python.
            python=str(Path(self.python).absolute()),
            model=str(Path(model.name).absolute()) if Path(model.name).exists() else model.name,
            dtype=self.dtype or model.dtype,
            max_length=self.max_length or trainer.max_length,
            kv_cache_bytes=int(self.kv_cache_gb * (1 << 30)),
            threads=self.threads,
            args=tuple(self.args),
        )


class VllmDeployment:
    """A :class:`~cookbook.protocols.Deployment` on vLLM servers, its own or one that runs already."""

    def __init__(self, config: VllmConfig, trainer: LocalTrainer) -> None:
        self._config = config
        self._trainer = trainer
        self._end = contextlib.ExitStack()
        try:
            clients = self._clients()
            self.servers = Servers(clients, config, trainer.seed)
            self._end.callback(self.servers.close)
        except BaseException:
            self._end.close()
            raise
        self.syncer = ChainSyncer(trainer, self.servers, deltas=config.deltas, keep=config.keep_chains)

    def load(self, step: int) -> Future[Sampler]:
        """The weights are there when this returns, and a few logprobs have been compared with the trainer's."""
        sampler = self.syncer.sync(step)
        if self._config.logprob_tolerance is not None:
            check_logprobs(self._trainer, sampler, self._config.logprob_tolerance)
        return done(sampler)

    def close(self) -> None:
        self._end.close()

    def _clients(self) -> list[Client]:
        config = self._config
        if config.url is not None:
            client = Client(config.url.rstrip("/"), config.timeout_s, config.retries)
            server.wait_until_healthy(client, None, config.startup_s, _say)
            return [client]
        manager = DeploymentManager(say=_say)
        manager.reap(PRIVATE)
        name = config.name or f"{PRIVATE}{secrets.token_hex(4)}"
        self._end.enter_context(manager.held(name))
        if config.on_exit == "delete":
            self._end.callback(manager.delete, name)
        started = time.monotonic()
        running = manager.create(name, config.options(self._trainer), config.replicas, config.startup_s)
        for one in running:
            manager.warm_up(one)
        _say(f"deployment: {name} is ready after {time.monotonic() - started:.0f} s")
        return [manager.client(one, config.timeout_s, config.retries) for one in running]


class Servers:
    """The :class:`~cookbook.weight_sync.Replicas` behind a deployment."""

    def __init__(self, clients: Sequence[Client], config: VllmConfig, seed: int) -> None:
        self._clients = list(clients)
        self._startup_s = config.startup_s
        self._seed = seed
        self._version = ""
        replicas = [Replica(client, _max_length(client), config.max_requests) for client in clients]
        self._pool = Pool(replicas, config.max_requests)

    def report(self) -> list[Report]:
        """One line a worker of every server."""
        return [
            Report(f"{client.url} worker {rank}", str(one["incarnation"]), one["digest"])
            for client in self._clients
            for rank, one in enumerate(_status(client))
        ]

    def load(self, folder: Path, step: int) -> None:
        """All read it while they serve. Then each is paused, when what it is sampling has come to its end, and gets it."""
        for client in self._clients:
            client.once(RPC, {"method": "cookbook_prepare", "args": [str(folder.absolute())]})
        for client in self._clients:
            _wait_until_read(client)
        digest = manifest.read(folder)["weights"]
        version = f"step-{step}-{digest[:12]}"
        paused_s = max([_replace(client, version) for client in self._clients])
        log.info("loaded %s; the longest pause was %.3f s", version, paused_s)
        self._version = version

    def sampler(self, step: int) -> Sampler:
        return DeploymentSampler(self._pool, step, self._version, self._seed)

    def close(self) -> None:
        self._pool.close()


def _status(client: Client) -> list[dict[str, Any]]:
    answer = client.call(RPC, {"method": "cookbook_status"})
    return list(answer["results"])


def _wait_until_read(client: Client) -> None:
    """Raises RolloutError when a worker could not; it serves what it did."""
    while True:
        found = _status(client)
        if failed := next((one for one in found if one["state"] == holder.FAILED), None):
            raise RolloutError(f"weight sync: {client.url}: {failed['error']}; it goes on serving its earlier weights")
        if all(one["state"] == holder.READY for one in found):
            return
        time.sleep(POLL_S)


def _replace(client: Client, version: str) -> float:
    """Puts in what was read. The seconds for which nothing was sampled.

    Requests under way are finished first, and those that come meanwhile wait: no sample mixes versions.
    """
    try:
        client.once("/pause?mode=wait")
        started = time.monotonic()
        client.once(RPC, {"method": "cookbook_load"})
        client.once("/update_weight_version", {"new_version": version})
        if not client.once("/reset_prefix_cache")["success"]:
            raise RolloutError("the prefix cache could not be reset")
    except BaseException as error:
        with contextlib.suppress(RolloutError):  # it would hide the first
            client.once("/resume")
        if isinstance(error, RolloutError):
            problem = f"weight sync: {client.url} may serve old or new weights by now ({error})"
            raise RolloutError(f"{problem}; nothing may be sampled from it before the next sync") from None
        raise
    client.call("/resume")
    return time.monotonic() - started


def _max_length(client: Client) -> int:
    return min(int(model["max_model_len"]) for model in client.call("/v1/models", method="GET")["data"])


def check_logprobs(trainer: TrainingClient, sampler: Sampler, tolerance: float) -> None:
    """Compares what both say of the same tokens: equal digests do not tell whether a server computes with what it holds.

    Raises:
        RolloutError: they differ by more than ``tolerance``.
    """
    tokens = np.random.default_rng(0).integers(0, len(trainer.tokenizer), CHECKED_TOKENS).tolist()
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    own = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    served = np.array(sampler.compute_logprobs(tokens).result()[1:], dtype=np.float64)
    gap = float(np.abs(own - served).max())
    log.info("logprobs of the deployment differ from the trainer's by at most %.2g", gap)
    if not gap <= tolerance:
        raise RolloutError(
            f"weight sync: the deployment's logprobs differ from the trainer's by {gap:.3g}, more than {tolerance:g}: it does "
            "not compute with the weights it holds, or with other precision; for that raise deployment.logprob_tolerance"
        )


def _say(line: str) -> None:
    print(line, flush=True)
    log.info("%s", line)
