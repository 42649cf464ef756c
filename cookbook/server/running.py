"""The server's life: it answers until it is told to stop, finishes what it has accepted, saves what runs have learnt."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from types import FrameType

import uvicorn

from cookbook.errors import CookbookError
from cookbook.server import terminal
from cookbook.server.catalogue import Address
from cookbook.server.observed import event
from cookbook.server.runs import TrainingRun
from cookbook.server.service import Service

AT_THE_END = "shutdown"  # what the checkpoints are called that are saved then


class Server(uvicorn.Server):
    """The first signal lets accepted work finish, for at most ``drain_s``; another interrupt ends that."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        told = "stopping at once" if self.force_exit else "finishing accepted work, saving runs; once more stops at once"
        print(f"\n{told}", file=sys.stderr, flush=True)
        if self.force_exit and self._draining is not None:
            self._draining.get_loop().call_soon_threadsafe(self._draining.cancel)

    async def main_loop(self) -> None:
        showing = asyncio.create_task(terminal.show(self.service))
        try:
            await super().main_loop()
        finally:
            showing.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The listener stays open meanwhile: clients come and fetch what they were promised."""
        self._draining = asyncio.create_task(drain(self.service, self.service.config.drain_s))
        with contextlib.suppress(asyncio.CancelledError):
            await self._draining
        await super().shutdown(sockets)


async def drain(service: Service, limit_s: float) -> None:
    """Takes no new work, waits for what is under way, and saves every run that has learnt something."""
    service.answers.closing = True
    pending = service.answers.unsettled()
    event("shutdown", pending=len(pending), runs=len(service.runs))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(answer.settled.wait() for answer in pending)), limit_s)
    for run in service.runs.values():
        if run.trainer.step:
            await _save(service, run)


async def _save(service: Service, run: TrainingRun) -> None:
    address = Address(run.facts.run_id, "weights", AT_THE_END)
    try:
        await asyncio.wrap_future(run.trainer.save_state(address.folder_name, overwrite=True))
    except CookbookError as error:
        event("not saved", path=address.path, error=str(error))
        return
    service.catalogue.add(address, None, None)
    event("saved", path=address.path, step=run.trainer.step)
