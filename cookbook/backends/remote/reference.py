"""Logprobs under frozen weights on a server, and what a run there begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.backends.remote import surrogate, wire
from cookbook.backends.remote.server import Server
from cookbook.engine.model import ModelConfig
from cookbook.futures import Future
from cookbook.types import Datum, as_datum


@dataclass(frozen=True)
class Start:
    """What a run begins with: the base model, or saved weights (``path``)."""

    server: Server
    model: ModelConfig
    seed: int
    path: str | None = None
    optimizer: bool = False

    def make(self) -> Any:
        """A training client. Waits for it."""
        if self.path is None:
            return self.server.new_run(self.model, self.seed)
        return self.server.run_of(self.path, optimizer=self.optimizer)


class RemoteReference:
    """Logprobs under frozen weights: a run of its own on the server, made when first asked."""

    def __init__(self, call: Callable[..., Future[Any]], start: Start, wired: Callable[..., list[Any]]) -> None:
        self._call = call
        self._start = start
        self._wired = wired
        self._client: Any = None

    def logprobs(self, data: Sequence[Datum]) -> Future[list[Any]]:
        batch = self._wired(own(data), ("target_tokens", "temperature"))

        def ask(_: Any) -> Any:
            if self._client is None:
                self._client = self._start.make()
            return self._start.server.follow(self._client.forward(batch, surrogate.LINEAR))

        def receive(found: Any) -> list[Any]:
            return [row["logprobs"].to_numpy() for row in wire.outputs(found)]

        return self._call(ask, receive, needs_client=False)


def own(data: Sequence[Any]) -> list[Datum]:
    return [as_datum(datum, index) for index, datum in enumerate(data)]
