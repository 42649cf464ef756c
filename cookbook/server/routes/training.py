"""Training runs: making one, and the calls whose order counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from cookbook.server import making, messages, training
from cookbook.server.routes.common import Body, Here, parsed, promise

router = APIRouter()


@router.post("/create_model")
async def create_model(service: Here, body: Body) -> dict[str, Any]:
    return promise(making.create_model(service, parsed(messages.CreateModel, body), body))


@router.post("/get_info")
async def get_info(service: Here, body: Body) -> Mapping[str, Any]:
    run = service.run(parsed(messages.OfModel, body).model_id)
    return run.info(architecture=service.host.architecture, tokenizer=service.host.tokenizer_name)


@router.post("/forward_backward")
async def forward_backward(service: Here, body: Body) -> dict[str, Any]:
    return promise(training.forward_backward(service, body))


@router.post("/optim_step")
async def optim_step(service: Here, body: Body) -> dict[str, Any]:
    return promise(training.optim_step(service, parsed(messages.OptimStep, body), body))


@router.post("/save_weights")
async def save_weights(service: Here, body: Body) -> dict[str, Any]:
    return promise(training.save_weights(service, parsed(messages.SaveWeights, body), body))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(service: Here, body: Body) -> dict[str, Any]:
    return promise(training.save_weights_for_sampler(service, parsed(messages.SaveWeightsForSampler, body), body))


@router.post("/save_weights_external")
async def save_weights_external(service: Here, body: Body) -> dict[str, Any]:
    return promise(training.save_weights_external(service, parsed(messages.SaveWeightsExternal, body), body))


@router.post("/load_weights")
async def load_weights(service: Here, body: Body) -> dict[str, Any]:
    message = parsed(messages.LoadWeights, body)
    load = training.load_weights if message.session_id is None else making.create_from_weights
    return promise(load(service, message, body))


@router.post("/create_custom_loss")
async def create_custom_loss(service: Here, body: Body) -> dict[str, Any]:
    return promise(making.create_custom_loss(service, parsed(messages.CustomLoss, body), body))
