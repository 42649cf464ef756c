"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from cookbook.server import messages, sampling
from cookbook.server.routes.common import Body, Here, promise, takes

router = APIRouter()


@router.post("/create_sampling_session", openapi_extra=takes(messages.CreateSamplingSession))
async def create_sampling_session(service: Here, body: Body) -> dict[str, Any]:
    made = await sampling.create_sampling_session(service, messages.parsed(messages.CreateSamplingSession, body))
    return {"type": "create_sampling_session", "sampling_session_id": made.sampler_id}


@router.post("/join_sampling_session", openapi_extra=takes(messages.OfSampler))
async def join_sampling_session(service: Here, body: Body) -> dict[str, int]:
    return {"client_counter": sampling.join(service, messages.parsed(messages.OfSampler, body).sampling_session_id)}


@router.get("/samplers/{sampler_id}")
async def sampler(service: Here, sampler_id: str) -> dict[str, Any]:
    found = service.sampler(sampler_id)
    return {"sampler_id": found.sampler_id, "base_model": found.base_model, "model_path": found.model_path}


@router.post("/asample", openapi_extra=takes(messages.Sample))
async def asample(service: Here, body: Body) -> dict[str, Any]:
    message = messages.parsed(messages.Sample, body)
    answer = sampling.sample(service, message, body)
    return await promise(answer, sample_sequence_ids=[f"{answer.request_id}/{i}" for i in range(message.num_samples)])
