"""Creation of training runs, on the base model or from a checkpoint, and of custom losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

from cookbook.backends import worker
from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.shared_calls import PassSharing
from cookbook.backends.remote.connection import DROPOUT
from cookbook.errors import ConfigError, CookbookError
from cookbook.server.handlers.quotas import check_disk, check_runs
from cookbook.server.journal.log import Log, NoLog, Record
from cookbook.server.state.catalog import Address, RunInfo
from cookbook.server.state.host import RunGraphs, target_modules
from cookbook.server.state.requests import Request
from cookbook.server.state.run import TrainingRun
from cookbook.server.state.service import Service, Session
from cookbook.server.wire.bodies import CreateModel, CustomLoss, LoadWeights, LoraConfig, check_optimizer, parse
from cookbook.server.wire.encode import StoredResult, failure, from_json
from cookbook.server.wire.loss_graph import GraphLoss
from cookbook.types import JsonObject

MAX_LOSSES = 1000
# Refused requests of a session whose results are kept.
MAX_REFUSED = 1000
# Training counts half: next to one busy sampler, a training step takes 1.5 times its time alone instead of twice.
TRAINING_SHARE = 0.5
# Suffix of a model name that requests training of all parameters. A rank of 0 has the same effect.
FULL_SUFFIX = ":full"
# Creates the trainer of a run; blocks while the weights are loaded. Its arguments are ``graphs``, the run's view of the kept
# graphs, ``lane``, the queue of the trainer's calls, and ``sharing``, whether they share passes with those of other runs.
MakeTrainer = Callable[..., LocalTrainer]


def create(service: Service, kind: str, fields: CreateModel | LoadWeights, body: bytes) -> Request:
    """Accept a request to create a run from the base model or a checkpoint, and create the run unless the request is a retry.

    Raises:
        Refused: the session or the model is unknown, or the disk is full.
    """
    session = service.session(fields.session_id or "")
    if isinstance(fields, CreateModel):
        service.host.public_name(fields.base_model)
    run_id = _run_id(session, fields.model_seq_id)
    request = Request(run_id, 0, kind, body)
    if not service.requests.is_known(request):
        try:
            if service.catalog.has_run(run_id):
                # The new run would get the description of the copy: its model, rank and seed.
                raise ConfigError(f"{kind}: {run_id} has copies of checkpoints; choose another model_seq_id")
            _check_fields(service, fields)
            _check_limits(service, session, kind)
        except CookbookError as error:
            return _refuse(service, session, request, body, error)
    log = service.durability.log(
        session.session_id, run_log_name(fields.model_seq_id), Record({"what": "run", "kind": kind}, body)
    )
    request, is_new = service.requests.accept(log, request, body)
    if not is_new:
        return request
    service.loading_runs.add(run_id)
    request.start()
    service.spawn(_create(service, session, request, body))
    return request


def _check_fields(service: Service, fields: CreateModel | LoadWeights) -> None:
    """Raise CookbookError if the run cannot be created. What only the load of the weights shows is reported as its result."""
    if fields.optimizer_config is not None:
        check_optimizer("optimizer_config", fields.optimizer_config.type)
    _dropout(_as_strings(fields.user_metadata))
    if isinstance(fields, LoadWeights):
        service.readable_checkpoint(Address.parse(fields.path))


def _check_limits(service: Service, session: Session, kind: str) -> None:
    """Raise ConfigError if another run would exceed a limit of the server or a quota of its owner."""
    num_runs = len(service.runs.keys() | service.loading_runs)
    if num_runs >= service.config.max_runs:
        raise ConfigError(
            f"{kind}: {num_runs} training runs are in memory; close some of their clients, or raise server.max_runs"
        )
    check_runs(service, session)
    check_disk(service, session.session_id, kind)


def _refuse(service: Service, session: Session, request: Request, body: bytes, error: CookbookError) -> Request:
    """Accept a request that fails, without logging it: it changes nothing, and must not fill the disk."""
    request, is_new = service.requests.accept(NoLog(), request, body)
    if is_new:
        service.requests.settle(request, failure(error))
        session.refused.append(request.request_id)
        if len(session.refused) > MAX_REFUSED:
            service.requests.remove([session.refused.popleft()])
    return request


async def _create(service: Service, session: Session, request: Request, body: bytes) -> None:
    try:
        with worker.purpose(request.request_id):
            service.add_run(await load_run(service, session, request.kind, body, request.log))
        result = creation_result(request.kind, request.scope)
    except BaseException as error:  # noqa: BLE001 - reported as the result of the request
        result = failure(error)
    service.loading_runs.discard(request.scope)
    service.requests.settle(request, result)


async def load_run(service: Service, session: Session, kind: str, body: bytes, log: Log) -> TrainingRun:
    """Create the run that a request describes. A description recorded by an earlier process takes precedence.

    Raises:
        CookbookError: the optimizer is unknown, or the checkpoint does not exist.
    """
    if kind == "create_model":
        info, make = _from_base_model(service, session, parse(CreateModel, body))
    else:
        info, make = _from_checkpoint(service, session, parse(LoadWeights, body))
    graphs = RunGraphs(service.host.graphs)
    lane = service.host.worker.lane(session.account, TRAINING_SHARE, pauses=service.host.can_pause)
    sharing = PassSharing(service.config.share_passes)
    trainer = await asyncio.to_thread(make, graphs=graphs, lane=lane, sharing=sharing)
    info = service.catalog.add_run(info)
    gap_s = service.config.gap_timeout_s
    return TrainingRun(info, session.session_id, trainer, lane, graphs, sharing, service.requests, log, gap_s)


def create_custom_loss(service: Service, fields: CustomLoss, body: bytes) -> Request:
    """Validate the graph of a custom loss, and accept it. Raises Refused: the session is unknown, or the disk is full."""
    session = service.session(fields.session_id)
    request = Request(f"{session.session_id}:loss", fields.custom_loss_seq_id, "create_custom_loss", body)
    if service.requests.is_known(request):
        return service.requests.accept(session.log, request, body)[0]
    try:
        loss = _custom_loss(session, fields)
    except CookbookError as error:
        return _refuse(service, session, request, body, error)
    request, is_new = service.requests.accept(session.log, request, body)
    if is_new:
        session.losses[request.request_id] = loss
        service.requests.settle(request, _loss_result(request.request_id))
    return request


def add_custom_loss(session: Session, fields: CustomLoss, loss_id: str) -> StoredResult:
    """Add a custom loss of an earlier process to its session, and return the result of its request."""
    try:
        session.losses[loss_id] = _custom_loss(session, fields)
    except CookbookError as error:
        return failure(error)
    return _loss_result(loss_id)


def _custom_loss(session: Session, fields: CustomLoss) -> GraphLoss:
    """Return a custom loss. Raises ConfigError: its graph is invalid, or the session has too many losses."""
    if len(session.losses) >= MAX_LOSSES:
        raise ConfigError(f"create_custom_loss: a session may have {MAX_LOSSES} losses; create each loss once")
    return GraphLoss(wire=fields)


def _loss_result(loss_id: str) -> StoredResult:
    return from_json({"type": "create_custom_loss", "loss_id": loss_id})


def _from_base_model(service: Service, session: Session, fields: CreateModel) -> tuple[RunInfo, MakeTrainer]:
    check_optimizer("optimizer_config", fields.optimizer_config.type)
    lora = fields.lora_config or LoraConfig(rank=0)
    rank = 0 if fields.base_model.endswith(FULL_SUFFIX) else lora.rank
    base = service.host.public_name(fields.base_model)
    run_id = _run_id(session, fields.model_seq_id)
    # The default seed is fixed, not random, so that a run is reproducible unless the client chooses a seed.
    metadata, owner = _as_strings(fields.user_metadata), service.tenants.owner_of(run_id)
    info = RunInfo(run_id, base, rank > 0, rank or None, lora.seed or 0, time.time(), metadata, owner)
    modules = target_modules(attention=lora.train_attn, mlp=lora.train_mlp)
    folder = service.catalog.run_folder(run_id)
    dropout = _dropout(metadata)
    return info, partial(service.host.new_trainer, folder, rank=rank, seed=info.seed, modules=modules, dropout=dropout)


def _from_checkpoint(service: Service, session: Session, fields: LoadWeights) -> tuple[RunInfo, MakeTrainer]:
    if fields.optimizer_config is not None:
        check_optimizer("optimizer_config", fields.optimizer_config.type)
    run_id = _run_id(session, fields.model_seq_id)
    address = Address.parse(fields.path)
    origin = service.catalog.run(address.run_id)
    log_folder = service.durability.session_folder(session.session_id) / run_log_name(fields.model_seq_id)
    checkpoint = service.linked_checkpoint(address, log_folder / "origin", session.session_id)
    base = origin.base_model if fields.base_model is None else service.host.public_name(fields.base_model)
    metadata, owner = _as_strings(fields.user_metadata), service.tenants.owner_of(run_id)
    info = RunInfo(run_id, base, origin.is_lora, origin.lora_rank, origin.seed, time.time(), metadata, owner)
    folder, optimizer = service.catalog.run_folder(run_id), fields.optimizer
    make = partial(service.host.trainer_from_checkpoint, folder, checkpoint, optimizer=optimizer, seed=origin.seed)
    return info, partial(make, dropout=_dropout(metadata))


def _dropout(metadata: Mapping[str, str] | None) -> float | None:
    """Return the dropout that the client of a run states; None: the server's. Raises ConfigError: it is not a number."""
    text = (metadata or {}).get(DROPOUT)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ConfigError(f"user_metadata: {DROPOUT} must be a number, got {text!r}") from None


def run_log_name(number: int | None) -> str:
    """Return the name of the log of a run, which is also the name of the log's folder."""
    return f"run-{number}"


def creation_result(kind: str, run_id: str) -> StoredResult:
    return from_json({"type": kind, "model_id": run_id})


def _run_id(session: Session, number: int | None) -> str:
    """Return the id of a run. The format is fixed: clients that load weights construct the id themselves."""
    return f"{session.session_id}:train:{number}"


def _as_strings(metadata: JsonObject | None) -> dict[str, str] | None:
    """Convert the values of user metadata to strings, as the protocol requires."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
