"""New training runs: of the base model, or of saved weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.errors import ConfigError, CookbookError
from cookbook.server.catalogue import Address, RunFacts
from cookbook.server.futures import Answer
from cookbook.server.graph_loss import GraphLoss
from cookbook.server.host import target_modules
from cookbook.server.messages import CreateModel, CustomLoss, LoadWeights, LoraConfig, OptimizerConfig
from cookbook.server.results import Result, failure, from_json
from cookbook.server.runs import TrainingRun
from cookbook.server.service import Service, Session

MAX_LOSSES = 1000
FULL = ":full"  # behind a model's name: train every parameter. So does a rank of 0.


def create_model(service: Service, message: CreateModel, body: bytes) -> Answer:
    """Raises Refused: the session, or the model, is not one of ours."""
    session = service.session(message.session_id)
    base = service.host.public_name(message.base_model)
    lora = message.lora_config or LoraConfig(rank=0)
    rank = 0 if message.base_model.endswith(FULL) else lora.rank
    run_id = _run_id(session, message.model_seq_id)
    answer, new = service.answers.claim(run_id, 0, body, "create_model")
    if new:
        # No seed given is seed 0: a run repeats unless its owner wants another one.
        facts = RunFacts(run_id, base, rank > 0, rank or None, lora.seed or 0, time.time(), _texts(message.user_metadata))
        make = functools.partial(
            service.host.new_trainer,
            service.catalogue.run_folder(run_id),
            rank=rank,
            seed=facts.seed,
            modules=target_modules(attention=lora.train_attn, mlp=lora.train_mlp),
        )
        _make(service, session, facts, answer, make, message.optimizer_config)
    return answer


def create_from_weights(service: Service, message: LoadWeights, body: bytes) -> Answer:
    """Raises Refused: no such session."""
    session = service.session(message.session_id or "")
    run_id = _run_id(session, message.model_seq_id)
    answer, new = service.answers.claim(run_id, 0, body, "load_weights")
    if not new:
        return answer
    try:
        address = Address.parse(message.path)
        service.catalogue.find(address)
        origin = service.catalogue.run(address.run_id)
    except CookbookError as error:
        service.answers.settle(answer, failure(error))
        return answer
    base = origin.base_model if message.base_model is None else service.host.public_name(message.base_model)
    metadata = _texts(message.user_metadata)
    facts = RunFacts(run_id, base, origin.is_lora, origin.lora_rank, origin.seed, time.time(), metadata)
    make = functools.partial(
        service.host.saved_trainer,
        service.catalogue.run_folder(run_id),
        service.catalogue.place(address),
        optimizer=message.optimizer,
        seed=origin.seed,
    )
    _make(service, session, facts, answer, make, message.optimizer_config)
    return answer


def create_custom_loss(service: Service, message: CustomLoss, body: bytes) -> Answer:
    """Raises Refused: no such session."""
    session = service.session(message.session_id)
    answer, new = service.answers.claim(session.losses_scope, message.custom_loss_seq_id, body, "create_custom_loss")
    if new:
        try:
            if len(session.losses) >= MAX_LOSSES:
                raise ConfigError(f"create_custom_loss: {MAX_LOSSES} losses are enough for a session; make each once")
            session.losses[answer.request_id] = GraphLoss(wire=message)
            result = from_json({"type": "create_custom_loss", "loss_id": answer.request_id})
        except CookbookError as error:
            result = failure(error)
        service.answers.settle(answer, result)
    return answer


def _make(
    service: Service,
    session: Session,
    facts: RunFacts,
    answer: Answer,
    make: Callable[[], LocalTrainer],
    optimizer: OptimizerConfig | None,
) -> None:
    def made() -> LocalTrainer:
        if optimizer is not None and optimizer.type != "adamw":
            raise ConfigError(f"optimizer_config: this trainer has adamw only, got {optimizer.type!r}")
        return make()

    def known(trainer: LocalTrainer) -> Result:
        service.catalogue.add_run(facts)
        service.add_run(TrainingRun(facts, session.session_id, trainer, service.answers, service.config.gap_timeout_s))
        return from_json({"type": answer.kind, "model_id": facts.run_id})

    service.in_thread(made, answer, known)


def _run_id(session: Session, number: int | None) -> str:
    """Clients put it together by themselves when they load weights, so it has to be this."""
    return f"{session.session_id}:train:{number}"


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the protocol gives it back: texts."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
