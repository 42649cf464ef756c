"""Servers to be killed: loads once, and forks a server for every line of input, JSON of ``model``, ``out`` and ``options``.

Each line kills the server before, and so does the end of the input. A server says that it listens, as ever.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from cookbook.backends.local import LocalConfig
from cookbook.engine.model import ModelConfig
from cookbook.server.config import ServerConfig
from cookbook.server.serve import serve

PRELOADED = ("peft", "transformers.models.qwen3.modeling_qwen3", "torch.distributed.checkpoint.hf_storage", "fastapi.routing")


def main() -> None:
    for name in PRELOADED:
        __import__(name)
    assert threading.active_count() == 1, "a thread would not be there after the fork"
    child = 0
    for line in sys.stdin:
        _end(child)
        child = os.fork()
        if not child:
            _serve(**json.loads(line))
    _end(child)


def _serve(model: str, out: str, options: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    torch.set_num_threads(1)
    serve(ModelConfig(model), LocalConfig(), ServerConfig(**options), seed=0, out=Path(out))
    os._exit(0)


def _end(child: int) -> None:
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
