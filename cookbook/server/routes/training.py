"""Training runs: making one, and the calls whose order counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from cookbook.server import making, messages, schema, training
from cookbook.server.routes.common import Body, Here, promise, takes

router = APIRouter()

PROTOBUF = {
    "requestBody": {"required": True, "content": {schema.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/create_model", openapi_extra=takes(messages.CreateModel))
async def create_model(service: Here, body: Body) -> dict[str, Any]:
    return await promise(making.create_model(service, messages.parsed(messages.CreateModel, body), body))


@router.post("/get_info", openapi_extra=takes(messages.OfModel))
async def get_info(service: Here, body: Body) -> Mapping[str, Any]:
    run = service.run(messages.parsed(messages.OfModel, body).model_id)
    return run.info(architecture=service.host.architecture, tokenizer=service.host.tokenizer_name)


@router.post("/forward_backward", openapi_extra=PROTOBUF)
async def forward_backward(service: Here, body: Body) -> dict[str, Any]:
    return await promise(training.accept(service, training.forward_backward(service, body), body))


@router.post("/optim_step", openapi_extra=takes(messages.OptimStep))
async def optim_step(service: Here, body: Body) -> dict[str, Any]:
    return await promise(training.accept(service, training.optim_step(service, body), body))


@router.post("/save_weights", openapi_extra=takes(messages.SaveWeights))
async def save_weights(service: Here, body: Body) -> dict[str, Any]:
    return await promise(training.accept(service, training.save_weights(service, body), body))


@router.post("/save_weights_for_sampler", openapi_extra=takes(messages.SaveWeightsForSampler))
async def save_weights_for_sampler(service: Here, body: Body) -> dict[str, Any]:
    return await promise(training.accept(service, training.save_weights_for_sampler(service, body), body))


@router.post("/save_weights_external", openapi_extra=takes(messages.SaveWeightsExternal))
async def save_weights_external(service: Here, body: Body) -> dict[str, Any]:
    return await promise(training.accept(service, training.save_weights_external(service, body), body))


@router.post("/load_weights", openapi_extra=takes(messages.LoadWeights))
async def load_weights(service: Here, body: Body) -> dict[str, Any]:
    message = messages.parsed(messages.LoadWeights, body)
    if message.session_id is not None:
        return await promise(making.create_from_weights(service, message, body))
    return await promise(training.accept(service, training.load_weights(service, body), body))


@router.post("/create_custom_loss", openapi_extra=takes(messages.CustomLoss))
async def create_custom_loss(service: Here, body: Body) -> dict[str, Any]:
    return await promise(making.create_custom_loss(service, messages.parsed(messages.CustomLoss, body), body))
