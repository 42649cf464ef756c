"""New training runs: of the base model, or of saved weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.errors import ConfigError, CookbookError
from cookbook.server.catalogue import Address, RunFacts
from cookbook.server.futures import Answer
from cookbook.server.graph_loss import GraphLoss
from cookbook.server.host import target_modules
from cookbook.server.log import Log
from cookbook.server.messages import CreateModel, CustomLoss, LoadWeights, LoraConfig, OptimizerConfig
from cookbook.server.records import Record
from cookbook.server.results import Result, failure, from_json
from cookbook.server.run_graphs import RunGraphs
from cookbook.server.runs import TrainingRun
from cookbook.server.service import Service, Session

MAX_LOSSES = 1000
FULL = ":full"  # behind a model's name: train every parameter. So does a rank of 0.


@dataclass(frozen=True)
class Plan:
    """A run to be made. ``make`` blocks, and loads its weights; it may be called in another process, for the same run."""

    facts: RunFacts
    make: Callable[[RunGraphs], LocalTrainer]


def create_model(service: Service, message: CreateModel, body: bytes) -> Answer:
    """Raises Refused: the session, or the model, is not one of ours; the disk is full."""
    session = service.session(message.session_id)
    service.host.public_name(message.base_model)
    answer, log = _claim(service, session, message.model_seq_id, body, "create_model")
    if log is not None:
        _make(service, session, answer, log, lambda: model_plan(service, session, message))
    return answer


def create_from_weights(service: Service, message: LoadWeights, body: bytes) -> Answer:
    """Raises Refused: no such session, the disk is full."""
    session = service.session(message.session_id or "")
    answer, log = _claim(service, session, message.model_seq_id, body, "load_weights")
    if log is not None:
        _make(service, session, answer, log, lambda: weights_plan(service, session, message))
    return answer


def create_custom_loss(service: Service, message: CustomLoss, body: bytes) -> Answer:
    """Raises Refused: no such session, the disk is full."""
    session = service.session(message.session_id)
    kind, number = "create_custom_loss", message.custom_loss_seq_id
    answer, new = service.answers.claim(session.log, session.losses_scope, number, body, kind)
    if new:
        service.answers.settle(answer, make_loss(session, message, answer.request_id))
    return answer


def make_loss(session: Session, message: CustomLoss, loss_id: str) -> Result:
    try:
        if len(session.losses) >= MAX_LOSSES:
            raise ConfigError(f"create_custom_loss: {MAX_LOSSES} losses are enough for a session; make each once")
        session.losses[loss_id] = GraphLoss(wire=message)
    except CookbookError as error:
        return failure(error)
    return from_json({"type": "create_custom_loss", "loss_id": loss_id})


def model_plan(service: Service, session: Session, message: CreateModel) -> Plan:
    """Raises ConfigError: an optimizer that there is not."""
    _check_optimizer(message.optimizer_config)
    lora = message.lora_config or LoraConfig(rank=0)
    rank = 0 if message.base_model.endswith(FULL) else lora.rank
    base = service.host.public_name(message.base_model)
    run_id = _run_id(session, message.model_seq_id)
    # No seed given is seed 0: a run repeats unless its owner wants another one.
    facts = RunFacts(run_id, base, rank > 0, rank or None, lora.seed or 0, time.time(), _texts(message.user_metadata))
    modules = target_modules(attention=lora.train_attn, mlp=lora.train_mlp)
    folder = service.catalogue.run_folder(run_id)

    def make(graphs: RunGraphs) -> LocalTrainer:
        return service.host.new_trainer(folder, rank=rank, seed=facts.seed, modules=modules, graphs=graphs)

    return Plan(facts, make)


def weights_plan(service: Service, session: Session, message: LoadWeights) -> Plan:
    """Raises CheckpointError: there is no such checkpoint."""
    _check_optimizer(message.optimizer_config)
    run_id = _run_id(session, message.model_seq_id)
    address = Address.parse(message.path)
    origin = service.catalogue.run(address.run_id)
    saved = _kept(service, session, message, address)
    base = origin.base_model if message.base_model is None else service.host.public_name(message.base_model)
    metadata = _texts(message.user_metadata)
    facts = RunFacts(run_id, base, origin.is_lora, origin.lora_rank, origin.seed, time.time(), metadata)
    folder = service.catalogue.run_folder(run_id)

    def make(graphs: RunGraphs) -> LocalTrainer:
        return service.host.saved_trainer(folder, saved, optimizer=message.optimizer, seed=origin.seed, graphs=graphs)

    return Plan(facts, make)


def run_part(number: int | None) -> str:
    """Where a run's log is, in its session's folder."""
    return f"run-{number}"


def made(service: Service, session: Session, plan: Plan, trainer: LocalTrainer, graphs: RunGraphs, log: Log) -> TrainingRun:
    """The run, around its trainer. ``plan`` may come from a process before: what is known of the run already stays."""
    facts = service.catalogue.run(plan.facts.run_id) if service.catalogue.knows(plan.facts.run_id) else plan.facts
    service.catalogue.add_run(facts)
    return TrainingRun(facts, session.session_id, trainer, graphs, service.answers, log, service.config.gap_timeout_s)


def created(kind: str, run_id: str) -> Result:
    return from_json({"type": kind, "model_id": run_id})


def _claim(service: Service, session: Session, number: int | None, body: bytes, kind: str) -> tuple[Answer, Log | None]:
    """The answer to a request for a run, and the log of the run where the request is a new one."""
    log = service.durability.log(session.session_id, run_part(number), Record({"what": "run", "kind": kind}, body))
    answer, new = service.answers.claim(log, _run_id(session, number), 0, body, kind)
    return answer, log if new else None


def _make(service: Service, session: Session, answer: Answer, log: Log, plan_of: Callable[[], Plan]) -> None:
    graphs = RunGraphs(service.host.graphs)
    try:
        taken = len(service.runs.keys() | service.making_runs)
        if taken >= service.config.max_runs:
            raise ConfigError(
                f"{answer.kind}: {taken} training runs are in memory; close the clients of some, or raise server.max_runs"
            )
        plan = plan_of()
    except CookbookError as error:
        service.answers.settle(answer, failure(error))
        return

    def known(trainer: LocalTrainer) -> Result:
        service.add_run(made(service, session, plan, trainer, graphs, log))
        return created(answer.kind, plan.facts.run_id)

    run_id = plan.facts.run_id
    service.making_runs.add(run_id)
    task = service.in_thread(functools.partial(plan.make, graphs), answer, known)
    task.add_done_callback(lambda _: service.making_runs.discard(run_id))


def _kept(service: Service, session: Session, message: LoadWeights, address: Address) -> Path:
    """The checkpoint's files; where runs are kept, links to them, for it may be deleted while the run is not.

    Raises:
        CheckpointError: it is not there.
    """
    place = service.durability.place(session.session_id) / run_part(message.model_seq_id) / "origin"
    if place.exists():
        return place
    service.catalogue.find(address)
    saved = service.catalogue.place(address)
    return service.durability.keep(saved, place) if service.durability.is_on else saved


def _check_optimizer(optimizer: OptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise ConfigError(
            f"optimizer_config: a client can ask for adamw only, got {optimizer.type!r}; the server's is backend.optimizer"
        )


def _run_id(session: Session, number: int | None) -> str:
    """Clients put it together by themselves when they load weights, so it has to be this."""
    return f"{session.session_id}:train:{number}"


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the protocol gives it back: texts."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
