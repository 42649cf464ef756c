"""The tokenizer of the base model, as the Hugging Face hub serves files, for clients that do not have the model's folder.

``HF_ENDPOINT=http://host:port/hub`` makes ``transformers`` load the tokenizer from here, and with it ``get_tokenizer()``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from cookbook.backends.remote.connection import HUB_PATH
from cookbook.data.template import template_sources
from cookbook.server.routes.common import CurrentService
from cookbook.server.state.service import Service
from cookbook.server.wire.encode import JSON
from cookbook.types import JsonObject

router = APIRouter(prefix=HUB_PATH)
# Files that transformers reads to load a tokenizer. Weights are not served.
FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
# Folder of transformers for the chat templates of a tokenizer that has several.
CHAT_TEMPLATES = "additional_chat_templates"
# Fields of JSON files with the folder from which the model was once loaded.
PATH_FIELDS = ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file")


async def _is_served(service: CurrentService, repo: str) -> bool:
    return service.host.is_name(repo)


Served = Annotated[bool, Depends(_is_served)]


@router.get("/{repo:path}/resolve/{revision}/{file:path}")
@router.head("/{repo:path}/resolve/{revision}/{file:path}")
async def file(service: CurrentService, is_served: Served, file: str) -> Response:
    """Return a file of the tokenizer. The revision is ignored: a server has one."""
    content = _content(service, file) if is_served else None
    if content is None:
        return _missing("EntryNotFound" if is_served else "RepoNotFound")
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": _commit(service)}
    return Response(content, media_type=JSON if file.endswith(".json") else "application/octet-stream", headers=headers)


@router.get("/api/models/{repo:path}/tree/{revision}/{folder:path}")
async def tree(service: CurrentService, is_served: Served, folder: str) -> Response:
    """List the folder of chat templates, for which transformers looks. No other folder exists."""
    files = _templates(service) if is_served and folder == CHAT_TEMPLATES else {}
    if not files:
        return _missing("EntryNotFound" if is_served else "RepoNotFound")
    entries = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest()}
        for name, content in files.items()
    ]
    return Response(json.dumps(entries), media_type=JSON)


# The last decorator registers first.
@router.get("/api/models/{repo:path}", response_model=None)
@router.get("/api/models/{repo:path}/revision/{revision}", response_model=None)
async def model(service: CurrentService, is_served: Served, repo: str) -> Response | JsonObject:
    """List the files of the tokenizer."""
    if not is_served:
        return _missing("RepoNotFound")
    files = [{"rfilename": name} for name in (*FILES, *_templates(service)) if _content(service, name) is not None]
    return {"id": repo, "sha": _commit(service), "siblings": files}


def _missing(code: str) -> Response:
    return Response(status_code=404, headers={"X-Error-Code": code})


def _commit(service: Service) -> str:
    """Return an id of the tokenizer, which is the name of a folder in the caches of clients."""
    digest = hashlib.sha256()
    for name in (*FILES, *_templates(service)):
        digest.update(_content(service, name) or b"")
    return digest.hexdigest()[:40]


def _templates(service: Service) -> dict[str, bytes]:
    """Return the named chat templates of a tokenizer that has several, by their files."""
    sources = template_sources(service.host.renderer.tokenizer)
    return {f"{CHAT_TEMPLATES}/{name}.jinja": text.encode() for name, text in sources.items() if name != "default"}


def _content(service: Service, file: str) -> bytes | None:
    """Return a file of the tokenizer without paths of this machine; None: the model has no such file."""
    if file.startswith(f"{CHAT_TEMPLATES}/"):
        return _templates(service).get(file)
    path: Path | None = service.host.tokenizer_file(file) if file in FILES else None
    if path is None:
        return None
    content = path.read_bytes()
    if not file.endswith("config.json"):
        return content
    fields = {key: value for key, value in json.loads(content).items() if key not in PATH_FIELDS}
    return json.dumps(fields, indent=2, ensure_ascii=False).encode()
