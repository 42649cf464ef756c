"""The requests whose order counts: passes, optimizer steps, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.backends.remote.facts import FAILURES_READ
from cookbook.errors import ConfigError
from cookbook.server.calls import CUSTOM, Call, call_of, parse
from cookbook.server.catalogue import Address, check_ttl
from cookbook.server.errors import Refused
from cookbook.server.futures import Answer
from cookbook.server.graph_loss import GraphLoss
from cookbook.server.live import own_bytes
from cookbook.server.messages import (
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    Sequenced,
    parsed,
)
from cookbook.server.results import Result, from_json, passed
from cookbook.server.runs import Begin, Request
from cookbook.server.samplers import SamplingSession
from cookbook.server.service import Service
from cookbook.server.states import loaded_folder
from cookbook.types import AdamParams


def forward_backward(service: Service, body: bytes) -> Request:
    """Raises Refused: not such a message."""
    message = parse(body)

    def begin(trainer: LocalTrainer) -> Any:
        call = call_of(message)
        service.metrics.trained_tokens += sum(datum.model_input.length for datum in call.data)
        if call.loss_fn == CUSTOM:
            return trainer.forward_backward_custom(call.data, _custom_loss(service, call))
        if call.forward_only:
            return trainer.forward(call.data, call.loss_fn, call.loss_fn_config)
        return trainer.forward_backward(call.data, call.loss_fn, call.loss_fn_config, all_logprobs=call.all_logprobs)

    kind = "forward" if message.forward_only else "forward_backward"
    return Request(message.model_id, message.seq_id, kind, begin, passed)


def _custom_loss(service: Service, call: Call) -> GraphLoss:
    """Raises ConfigError: the session has made no such loss, or only its value is wanted."""
    session_id = service.run(call.model_id).session_id
    loss_id = call.loss_fn_config.get("loss_id")
    losses = service.session(session_id).losses
    if loss_id not in losses:
        raise ConfigError(f"forward_backward: this session has made no custom loss {loss_id!r}; call create_custom_loss first")
    if call.forward_only:
        raise ConfigError("forward: a custom loss is computed by forward_backward only")
    return losses[loss_id]


def optim_step(_: Service, body: bytes) -> Request:
    """A client of ours says what it has read: ``failures_read`` is true or false. To any other an error is reported once."""
    message = parsed(OptimStep, body)
    fields = message.optimizer_params if message.adam_params is None else message.adam_params
    failures_read = (fields or {}).get(FAILURES_READ)

    def begin(trainer: LocalTrainer) -> Any:
        adam, normalization = _adam(message)
        if failures_read == "true":
            trainer.forgive()
        return trainer.optim_step(adam, normalization)

    request = _request(message, "optim_step", begin, lambda output: from_json({"metrics": output.metrics}))
    return replace(request, reports_once=failures_read is None)


def save_weights(service: Service, body: bytes) -> Request:
    message = parsed(SaveWeights, body)
    name = message.path or f"seq-{message.seq_id}"

    def begin(trainer: LocalTrainer) -> Any:
        check_ttl(message.ttl_seconds)
        return trainer.save_state(Address(message.model_id, "weights", name).folder_name, overwrite=message.overwrite)

    def saved(_: Any) -> Result:
        address = Address(message.model_id, "weights", name)
        service.catalogue.add(address, message.ttl_seconds, message.user_metadata, message.seq_id)
        return from_json({"type": "save_weights", "path": address.path})

    return _request(message, "save_weights", begin, saved, _is_saved(service, message, "weights", name))


def save_weights_for_sampler(service: Service, body: bytes) -> Request:
    message = parsed(SaveWeightsForSampler, body)
    if message.path is None:
        return _publish(service, message)
    return _sampler_checkpoint(service, message, "sampler_weights", message.path, message.user_metadata)


def save_weights_external(service: Service, body: bytes) -> Request:
    message = parsed(SaveWeightsExternal, body)
    request = _sampler_checkpoint(service, message, "external_weights", message.path, None)

    def checked(trainer: LocalTrainer) -> Any:
        if message.age_encryption_recipients:
            raise ConfigError("save_weights_external: this server does not encrypt; leave age_encryption_recipients out")
        return request.begin(trainer)

    return replace(request, begin=checked)


def load_weights(service: Service, body: bytes) -> Request:
    """Into a run that exists already. Raises Refused, 422: it is not said which."""
    message = parsed(LoadWeights, body)
    if message.model_id is None or message.seq_id is None:
        raise Refused(422, "load_weights: needs model_id and seq_id, or session_id and model_seq_id")
    run_id, number = message.model_id, message.seq_id
    loaded = {"type": "load_weights", "path": message.path, "model_id": run_id}

    def begin(trainer: LocalTrainer) -> Any:
        address = Address.parse(message.path)
        kept = loaded_folder(service.run(run_id).log.folder, number)
        if service.durability.is_on and kept.exists():
            return trainer.load_state(str(kept), optimizer=message.optimizer)
        service.catalogue.find(address)
        saved = service.catalogue.place(address)
        if service.durability.is_on:  # it may be deleted before what this does is on the disk
            saved = service.durability.keep(saved, kept)
        return trainer.load_state(str(saved), optimizer=message.optimizer)

    return Request(run_id, number, "load_weights", begin, lambda _: from_json(loaded))


def _sampler_checkpoint(
    service: Service,
    message: SaveWeightsForSampler | SaveWeightsExternal,
    kind: str,
    name: str,
    user_metadata: dict[str, str] | None,
) -> Request:
    """Saves weights to sample from under a name."""

    def begin(trainer: LocalTrainer) -> Any:
        check_ttl(message.ttl_seconds)
        return trainer.save_weights_for_sampler_ext(Address(message.model_id, kind, name).folder_name)

    def saved(_: Any) -> Result:
        address = Address(message.model_id, kind, name)
        found = service.catalogue.add(address, message.ttl_seconds, user_metadata, message.seq_id)
        return from_json({"path": address.path, "size_bytes": found.size_bytes})

    called = "save_weights_external" if kind == "external_weights" else "save_weights_for_sampler"
    return _request(message, called, begin, saved, _is_saved(service, message, kind, name))


def _is_saved(service: Service, message: Sequenced, kind: str, name: str) -> Callable[[], bool]:
    return lambda: service.catalogue.was_saved_by(Address(message.model_id, kind, name), message.seq_id)


def _publish(service: Service, message: SaveWeightsForSampler) -> Request:
    """Puts the weights into a sampling session."""
    run = service.run(message.model_id)
    sampler_id = f"{run.session_id}:sample:{message.sampling_session_seq_id}"

    def published(sampler: Any) -> Result:
        service.session(run.session_id)  # it may have ended while this waited; then nothing is to be held
        facts, number = run.facts, message.seq_id
        session = SamplingSession(
            sampler_id, run.session_id, facts.base_model, None, sampler, facts.seed, number, own_bytes(sampler)
        )
        run.published[sampler_id] = number
        if message.kind == "inflight":
            run.inflight.append(session)
            run.follow(sampler, number)
        service.add_sampler(session)
        return from_json({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

    def begin(trainer: LocalTrainer) -> Any:
        place = message.sampling_session_seq_id
        if place is None or not 0 <= place < 10**9:
            raise ConfigError(f"save_weights_for_sampler: needs a path, or a sampling_session_seq_id from 0, got {place}")
        return trainer.snapshot_sampler()

    return replace(_request(message, "save_weights_for_sampler", begin, published), publishes=sampler_id)


def _request(
    message: Sequenced,
    kind: str,
    begin: Begin,
    encode: Callable[[Any], Result],
    is_saved: Callable[[], bool] | None = None,
) -> Request:
    return Request(message.model_id, message.seq_id, kind, begin, encode, is_saved)


READERS: dict[str, Callable[[Service, bytes], Request]] = {
    "forward": forward_backward,
    "forward_backward": forward_backward,
    "optim_step": optim_step,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "load_weights": load_weights,
}
"""From the bytes of a request to what is to be done, by the kind of request that a log names."""


def accept(service: Service, request: Request, body: bytes) -> Answer:
    """A request that is repeated gets the answer it had, and runs once.

    Raises:
        Refused: no such run, another request under that number, too much is pending, the disk is full.
    """
    run = service.run(request.run_id)
    is_due = request.number == run.order.following and run.order.waiting > 0
    answer, new = service.answers.claim(run.log, request.run_id, request.number, body, request.kind, is_due=is_due)
    if new:
        run.accept(answer, request)
    return answer


def _adam(message: OptimStep) -> tuple[AdamParams, str | None]:
    """The step's numbers, and its normalization, which plain clients carry among the optimizer's extra fields.

    Raises:
        ConfigError: another optimizer, an unknown field, or no number where one is wanted.
    """
    given = dict(message.adam_params if message.adam_params is not None else message.optimizer_params or {})
    kind = given.pop("type", "adamw")
    given.pop(FAILURES_READ, None)
    normalization = given.pop("grad_accumulation_normalization", message.grad_accumulation_normalization)
    known = AdamParams.__dataclass_fields__
    if kind != "adamw":
        raise ConfigError(f"optim_step: a client can ask for adamw only, got {kind!r}; the server's is backend.optimizer")
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"optim_step: unknown field {unknown[0]!r}; there are {', '.join(known)}")
    return AdamParams(**{name: _number(name, value) for name, value in given.items()}), normalization


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise ConfigError(f"optim_step: {name} must be a number, got {str(value)[:100]!r}")
