"""Requests of a training run, executed in the order of their numbers: passes, optimizer steps, saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from cookbook.backends.local import LocalTrainer
from cookbook.backends.local.sample_queue import LocalSampler
from cookbook.backends.remote.connection import ADAPTED_WEIGHTS, DTYPE, FAILURES_READ, KIND, PREDECESSOR
from cookbook.errors import ConfigError
from cookbook.server.handlers.quotas import check_disk, check_tokens
from cookbook.server.state.catalog import Address, check_ttl
from cookbook.server.state.requests import Request, Work
from cookbook.server.state.samplers import SamplingSession, trained_bytes
from cookbook.server.state.service import Service
from cookbook.server.state.snapshots import loaded_folder
from cookbook.server.state.tenants import session_of
from cookbook.server.wire import bodies
from cookbook.server.wire import messages_pb2 as pb
from cookbook.server.wire.decode import CUSTOM_LOSS, forward_backward_input, parse_forward_backward
from cookbook.server.wire.encode import StoredResult, forward_backward_result, from_json
from cookbook.server.wire.loss_graph import GraphLoss
from cookbook.types import AdamParams, Checkpoint, ForwardBackwardOutput, JsonObject, OptimStepOutput


@dataclass(frozen=True)
class ParsedRequest:
    """A body after parsing. ``message`` is the protobuf message of a pass, or the fields of another kind of request."""

    kind: str
    body: bytes
    message: Any
    num_tokens: int = 0


def accept(service: Service, kind: str, body: bytes) -> Request:
    """Parse a body, and accept the request as :func:`accept_parsed`."""
    return accept_parsed(service, parse(kind, body))


def accept_parsed(service: Service, parsed: ParsedRequest) -> Request:
    """Accept a request and run it in its turn. A retry returns the earlier request and does not run again.

    Raises:
        Refused: the run is unknown, a different request has this number, too many bytes are pending, or the disk is full.
    """
    request = _request(service, parsed)
    # The request that all waiting ones need must be accepted even if too many bytes are pending, or none could ever run.
    run = service.run(request.scope)
    is_due = request.number == run.order.next_number and run.order.num_waiting > 0
    session = service.sessions[run.session_id]
    if not is_due and not service.requests.is_known(request):
        check_tokens(service, session, request.kind, request.num_tokens)
    request, is_new = service.requests.accept(run.log, request, parsed.body, is_due=is_due)
    if is_new:
        session.training_tokens += request.num_tokens
        run.accept(request)
    return request


def read(service: Service, kind: str, body: bytes) -> Request:
    """Build a request from its kind, as recorded in logs, and its body. Raises Refused (422): the body is invalid."""
    return _request(service, parse(kind, body))


def parse(kind: str, body: bytes) -> ParsedRequest:
    """Parse a body. The function uses no state of the server, so it may run on any thread.

    Raises:
        Refused: 422, the body is invalid.
    """
    if kind in ("forward", "forward_backward"):
        message = parse_forward_backward(body)
        kind = "forward" if message.forward_only else "forward_backward"
        num_tokens = sum(len(chunk.encoded_text.tokens) // 4 for datum in message.data for chunk in datum.model_input)
        return ParsedRequest(kind, body, message, num_tokens)
    fields = bodies.parse(BODY_BY_KIND[kind][0], body)
    if fields.model_id is None or fields.seq_id is None:
        raise bodies.Refused(422, f"{kind}: model_id or seq_id is missing; send both, or session_id and model_seq_id")
    return ParsedRequest(kind, body, fields)


def _request(service: Service, parsed: ParsedRequest) -> Request:
    message, kind = parsed.message, parsed.kind
    work_of = _forward_backward if kind in ("forward", "forward_backward") else BODY_BY_KIND[kind][1]
    work = work_of(service, message)
    return Request(message.model_id, message.seq_id, kind, parsed.body, work, num_tokens=parsed.num_tokens)


def _forward_backward(service: Service, message: pb.ForwardBackwardRequest) -> Work:
    def begin(trainer: LocalTrainer) -> Future[ForwardBackwardOutput]:
        inputs = forward_backward_input(message)
        service.metrics.trained_tokens += sum(datum.model_input.length for datum in inputs.data)
        if inputs.loss_fn == CUSTOM_LOSS:
            return trainer.forward_backward_custom(inputs.data, _custom_loss(service, message, inputs.loss_fn_config))
        if message.forward_only:
            return trainer.forward(inputs.data, inputs.loss_fn, inputs.loss_fn_config)
        return trainer.forward_backward(inputs.data, inputs.loss_fn, inputs.loss_fn_config, all_logprobs=inputs.all_logprobs)

    return Work(begin, forward_backward_result)


def _custom_loss(service: Service, message: pb.ForwardBackwardRequest, options: JsonObject) -> GraphLoss:
    """Return a custom loss of the session.

    Raises:
        ConfigError: the session has not created the loss, or the request is a forward pass.
    """
    loss_id = options.get("loss_id")
    losses = service.open_session(session_of(message.model_id)).losses
    if not isinstance(loss_id, str) or loss_id not in losses:
        raise ConfigError(f"forward_backward: unknown custom loss {loss_id!r}; call create_custom_loss in this session first")
    if message.forward_only:
        raise ConfigError("forward: got a custom loss; call forward_backward")
    return losses[loss_id]


def _optim_step(_: Service, fields: bodies.OptimStep) -> Work:
    """Return the work of an optimizer step.

    Cookbook's client sends ``failures_read``, ``true`` or ``false``: whether its caller has seen the errors of earlier
    requests. For other clients each error is reported once, by the next optimizer step.
    """
    params = fields.optimizer_params if fields.adam_params is None else fields.adam_params
    failures_read = (params or {}).get(FAILURES_READ)

    def begin(trainer: LocalTrainer) -> Future[OptimStepOutput]:
        adam, normalization = _adam(params or {}, fields.grad_accumulation_normalization)
        if failures_read == "true":
            trainer.mark_errors_read()
        return trainer.optim_step(adam, normalization)

    return Work(begin, lambda output: from_json({"metrics": output.metrics}), reports_once=failures_read is None)


def _save_weights(service: Service, fields: bodies.SaveWeights) -> Work:
    return _save(service, fields, "weights", fields.path or f"seq-{fields.seq_id}", fields.user_metadata)


def _save_weights_for_sampler(service: Service, fields: bodies.SaveWeightsForSampler) -> Work:
    if fields.path is None:
        return _publish(service, fields)
    return _save(service, fields, "sampler_weights", fields.path, fields.user_metadata)


def _save_weights_external(service: Service, fields: bodies.SaveWeightsExternal) -> Work:
    return _save(service, fields, "external_weights", fields.path, None)


def _save(service: Service, fields: bodies.SaveBody, kind: str, name: str, user_metadata: dict[str, str] | None) -> Work:
    """Return the work of saving a checkpoint. Only ``SaveWeights`` also saves the optimizer's state."""

    def begin(trainer: LocalTrainer) -> Future[Checkpoint]:
        if isinstance(fields, bodies.SaveWeightsExternal) and fields.age_encryption_recipients:
            raise ConfigError(
                "save_weights_external: this server does not support encryption; leave out age_encryption_recipients"
            )
        check_ttl(fields.ttl_seconds)
        try:
            bodies.check_metadata(user_metadata)
        except ValueError as error:
            raise ConfigError(f"save: {error}") from None
        check_disk(service, fields.model_id, "save")
        folder = Address(fields.model_id, kind, name).folder_name
        if isinstance(fields, bodies.SaveWeights):
            return trainer.save_state(folder, overwrite=fields.overwrite)
        return _save_weights_to_sample(trainer, fields.model_id, folder, user_metadata or {})

    def result(checkpoint: Checkpoint) -> StoredResult:
        address = Address(fields.model_id, kind, name)
        actual = {KIND: checkpoint.kind} if KIND in (user_metadata or {}) else {}
        saved = service.catalog.add(address, fields.ttl_seconds, {**(user_metadata or {}), **actual}, fields.seq_id)
        if isinstance(fields, bodies.SaveWeights):
            return from_json({"type": "save_weights", "path": address.path})
        return from_json({"path": address.path, "size_bytes": saved.size_bytes})

    def is_saved() -> bool:
        return service.catalog.was_saved_by(Address(fields.model_id, kind, name), fields.seq_id)

    return Work(begin, result, is_saved)


def _save_weights_to_sample(trainer: LocalTrainer, run_id: str, folder: str, metadata: dict[str, str]) -> Future[Checkpoint]:
    """Save a base, or what the client of a rank group has selected."""
    if (dtype := metadata.get(DTYPE)) is not None:
        trainer.set_checkpoint_dtype(dtype)
    kind, predecessor = metadata.get(KIND, "base"), metadata.get(PREDECESSOR)
    if kind == ADAPTED_WEIGHTS:
        return trainer.save_adapted_weights(folder)
    before = None if predecessor is None else Address(run_id, "sampler_weights", predecessor).folder_name
    return trainer.save_weights_for_sampler_ext(folder, checkpoint_type=kind, predecessor=before)


def _publish(service: Service, fields: bodies.SaveWeightsForSampler) -> Work:
    """Return the work of creating a sampling session on a copy of the weights."""
    run = service.run(fields.model_id)
    # Seeds are derived from this id, so it must be the same for every attempt. The client's sampling_session_seq_id is
    # incremented at each attempt; the number of the request is not.
    sampler_id = f"{run.session_id}:sample:{run.info.run_id.rpartition(':')[2]}.{fields.seq_id}"

    def begin(trainer: LocalTrainer) -> Future[LocalSampler]:
        index = fields.sampling_session_seq_id
        if index is None or not 0 <= index < 10**9:
            raise ConfigError(
                f"save_weights_for_sampler: sampling_session_seq_id: expected 0 to {10**9 - 1}, got {index}; send it, or a path"
            )
        return trainer.snapshot_sampler()

    def result(sampler: LocalSampler) -> StoredResult:
        # Raises if the session has ended meanwhile. Without this check the weights would stay in memory.
        sampler = sampler.on(service.open_session(run.session_id).queue)
        info, number = run.info, fields.seq_id
        session = SamplingSession(
            sampler_id, run.session_id, info.base_model, None, sampler, info.seed, number, trained_bytes(sampler)
        )
        run.published[sampler_id] = number
        if fields.kind == "inflight":
            run.inflight.append(session)
            run.follow(sampler, number)
        service.add_sampler(session)
        return from_json({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

    return Work(begin, result, publishes=sampler_id)


def _load_weights(service: Service, fields: bodies.LoadWeights) -> Work:
    """Return the work of loading a checkpoint into an existing run."""
    run_id, number = fields.model_id, fields.seq_id
    assert run_id is not None and number is not None
    # Not in ``begin``: a queued request that begins is no sign of the client.
    log_folder = service.run(run_id).log.folder

    def begin(trainer: LocalTrainer) -> Future[None]:
        address = Address.parse(fields.path)
        # A replay loads the checkpoint again, but the client may delete it before a snapshot covers this request: link it.
        checkpoint = service.linked_checkpoint(address, loaded_folder(log_folder, number), run_id)
        return trainer.load_state(str(checkpoint), optimizer=fields.optimizer)

    result = {"type": "load_weights", "path": fields.path, "model_id": run_id}
    return Work(begin, lambda _: from_json(result))


# By kind of request, as recorded in logs: the type of the body, and the function that returns the work.
BODY_BY_KIND: dict[str, tuple[type[Any], Callable[[Service, Any], Work]]] = {
    "optim_step": (bodies.OptimStep, _optim_step),
    "save_weights": (bodies.SaveWeights, _save_weights),
    "save_weights_for_sampler": (bodies.SaveWeightsForSampler, _save_weights_for_sampler),
    "save_weights_external": (bodies.SaveWeightsExternal, _save_weights_external),
    "load_weights": (bodies.LoadWeights, _load_weights),
}


def _adam(params: JsonObject, normalization: str | None) -> tuple[AdamParams, str | None]:
    """Return the optimizer's parameters and the normalization, which clients may send among the optimizer's fields.

    Raises:
        ConfigError: the optimizer or a field is unknown, or a value is not a number.
    """
    remaining = dict(params)
    kind = remaining.pop("type", "adamw")
    remaining.pop(FAILURES_READ, None)
    normalization = remaining.pop("grad_accumulation_normalization", normalization)
    known = AdamParams.__dataclass_fields__
    bodies.check_optimizer("optim_step", kind)
    if unknown := sorted(remaining.keys() - known):
        raise ConfigError(f"optim_step: unknown field {unknown[0]!r}; choose one of {', '.join(known)}")
    return AdamParams(**{name: _number(name, value) for name, value in remaining.items()}), normalization


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    if value is None:
        raise ConfigError(
            f"optim_step: {name}: expected a finite number, got null, as clients send infinity and NaN; pass a finite number"
        )
    raise ConfigError(f"optim_step: {name}: expected a number, got {str(value)[:100]!r}")
