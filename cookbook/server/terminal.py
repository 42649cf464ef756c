"""One line on the terminal that tells how the server is doing."""

from __future__ import annotations

import asyncio
import sys
import time

from cookbook.server.service import Service

EVERY_S = 1.0


async def show(service: Service) -> None:
    """Rewrites the line until cancelled; writes nothing where nobody looks."""
    if not sys.stderr.isatty():
        return
    before, since = 0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            now, tokens = time.monotonic(), service.metrics.trained_tokens + service.metrics.sampled_tokens
            print(f"\r\x1b[K{line(service, (tokens - before) / (now - since))}", end="", file=sys.stderr, flush=True)
            before, since = tokens, now
    finally:
        print(file=sys.stderr)


def line(service: Service, tokens_a_second: float) -> str:
    """``1 sessions, 2 runs (12, 3 steps), 0 samplers, 4 calls waiting, 5,120 tokens/s``."""
    steps = ", ".join(str(run.trainer.step) for run in service.runs.values())
    runs = f"{len(service.runs)} runs" + (f" ({steps} steps)" if steps else "")
    waiting = service.answers.pending
    return (
        f"{len(service.sessions)} sessions, {runs}, {len(service.samplers)} samplers, {waiting} calls waiting, "
        f"{tokens_a_second:,.0f} tokens/s"
    )
