"""Files, to those who have a signed address."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import FileResponse

from cookbook.server.routes.common import Here

router = APIRouter()


@router.get("/download/{token}/{file:path}", name="download")
async def download(service: Here, token: str, file: str) -> FileResponse:
    return FileResponse(service.downloads.open(token, file))
