"""The sampling sessions that have their weights in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from cookbook.backends.sampling import LocalSampler
from cookbook.server.samplers import SamplingSession

MAX_SAMPLERS = 1024  # of which most may share weights, and have no bytes of their own
REMEMBERED = 10_000  # of those that were let go, so that who asks is told what happened


class LiveSamplers:
    """By id. Those nobody has asked for longest are let go where all together hold more than ``max_bytes``; never one that
    somebody waits for. Samplers that share weights, those in flight, go together or stay: one alone would free nothing.

    Args:
        let_go: told of each that was let go.
        forgotten: told of its id when it is so long ago that nobody will ask.
    """

    def __init__(self, max_bytes: int, let_go: Callable[[SamplingSession], None], forgotten: Callable[[str], None]) -> None:
        self.max_bytes = max_bytes
        self.num_let_go = 0
        self._let_go = let_go
        self._forgotten = forgotten
        self._held: OrderedDict[str, SamplingSession] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._held

    def __getitem__(self, sampler_id: str) -> SamplingSession:
        return self._held[sampler_id]

    def asked(self, sampler_id: str) -> SamplingSession:
        """As ``[sampler_id]``; somebody needs it now."""
        self._held.move_to_end(sampler_id)
        return self._held[sampler_id]

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    @property
    def num_bytes(self) -> int:
        """Of weights that no run and no other sampler has."""
        return sum({id(one.sampler): one.num_bytes for one in self._held.values()}.values())

    def was_let_go(self, sampler_id: str) -> bool:
        return sampler_id in self._gone

    def add(self, sampler: SamplingSession) -> None:
        self._held[sampler.sampler_id] = sampler
        self._held.move_to_end(sampler.sampler_id)
        self._gone.pop(sampler.sampler_id, None)
        idle = [one for one in self._held.values() if one is not sampler and not one.waiting]
        for other in idle[: max(len(self._held) - MAX_SAMPLERS, 0)]:
            self._drop(other)
        self._free_weights(sampler)

    def remove(self, sampler_id: str) -> None:
        """It has ended with its client."""
        self._held.pop(sampler_id, None)

    def forget(self, session_id: str) -> None:
        """Nobody of that session will ask any more for what was let go."""
        for sampler_id in [one for one in self._gone if one.startswith(f"{session_id}:")]:
            del self._gone[sampler_id]

    def _free_weights(self, newest: SamplingSession) -> None:
        users: dict[int, list[SamplingSession]] = {}  # of each weights, in the order in which they were last asked
        for one in self._held.values():
            sharing = users.pop(id(one.sampler), [])
            sharing.append(one)
            users[id(one.sampler)] = sharing
        excess = self.num_bytes - self.max_bytes
        for sharing in users.values():
            if excess <= 0:
                return
            num_bytes = sharing[-1].num_bytes
            if num_bytes and not any(one is newest or one.waiting for one in sharing):
                excess -= num_bytes
                for one in sharing:
                    self._drop(one)

    def _drop(self, sampler: SamplingSession) -> None:
        del self._held[sampler.sampler_id]
        self._gone[sampler.sampler_id] = None
        self.num_let_go += 1
        self._let_go(sampler)
        if len(self._gone) > REMEMBERED:
            self._forgotten(self._gone.popitem(last=False)[0])


def own_bytes(sampler: LocalSampler) -> int:
    """What a copy of a run's weights holds: all that is trained; the rest is the base model's."""
    network = sampler.engine().model.network
    return sum(one.numel() * one.element_size() for one in network.parameters() if one.requires_grad)


def file_bytes(saved: Path) -> int:
    """What the weights in a folder will hold."""
    return sum(path.stat().st_size for path in saved.rglob("*.safetensors"))
