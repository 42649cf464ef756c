"""Owners of sessions: which objects the current request may use."""

from __future__ import annotations

from cookbook.server.keys import CALLER, KeyRing, caller_name


def session_of(object_id: str) -> str:
    """Return the id of the session of an object: a session, run, sampler, loss or request. All their ids begin with it."""
    return object_id.partition("/")[0].partition(":")[0]


class Tenants:
    """The owner of each session, and with it of the session's runs, samplers, losses, requests and results.

    An object of another key is answered exactly like an unknown one, so that no response reveals that it exists.
    """

    def __init__(self, keys: KeyRing) -> None:
        self.keys = keys
        # By session id, also of sessions that are silent, could not be recovered, or have ended recently.
        self.owners: dict[str, str | None] = {}

    def owner_of(self, object_id: str) -> str | None:
        return self.owners.get(session_of(object_id))

    def sharer_of(self, object_id: str) -> str | None:
        """Return the key whose share of the server's limits an object counts towards; None: there are no several keys."""
        return self.owner_of(object_id) if self.has_several else None

    def sharer_of_caller(self) -> str | None:
        """Return the key of the current request as its share of the server's limits; None: there are no several keys."""
        return caller_name() if self.has_several else None

    @property
    def has_several(self) -> bool:
        """Whether the keys of the server have several names, which share its limits."""
        return len({key.name for key in self.keys.keys}) > 1

    def hides(self, object_id: str) -> bool:
        """Whether an object belongs to a session of another key. False for unknown objects."""
        session_id = session_of(object_id)
        return session_id in self.owners and not self.may_use(self.owners[session_id])

    def may_use(self, owner: str | None) -> bool:
        """Whether the current request may use the objects of ``owner``."""
        caller = CALLER.get()
        return caller is None or self.keys.may_use(caller.name, owner)
