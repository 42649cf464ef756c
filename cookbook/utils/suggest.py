"""Suggestions: the known name that is closest to a typed name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``" Did you mean 'grpo'?"`` for ``grop``; the empty string if no name is close."""
    return _question(_closest(name, choices)[:1])


def did_you_mean_key(key: str, keys: Iterable[str]) -> str:
    """Return the suggestion for a dotted key: an equal last part first, then a key of the same group, then a similar spelling.

    ``lr`` finds ``optim.lr``. No suggestion names ``_target_``: that is the class of a group, not one of its settings.
    """
    keys = [known for known in keys if _last(known) != "_target_" and known != key and not key.startswith(f"{known}.")]
    prefix, _, last = key.rpartition(".")
    if same := same_last_part(last, keys):
        return _question(same[:3])
    by_last = {_last(known): known for known in keys}
    siblings = {_last(known): known for known in keys if prefix and known.rpartition(".")[0] == prefix}
    near = (
        [siblings[close] for close in _closest(last, siblings)]
        or _closest(key, keys)
        or [by_last[close] for close in _closest(last, by_last)]
    )
    return _question(near[:1])


def same_last_part(last: str, keys: Iterable[str]) -> list[str]:
    """The dotted keys that end with ``last``."""
    return [known for known in keys if _last(known) == last]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _question(names: list[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def _closest(name: str, choices: Iterable[str]) -> list[str]:
    close = difflib.get_close_matches(name, list(choices), n=3)
    # GPRO is GRPO rather than GSPO
    return [choice for choice in close if sorted(choice) == sorted(name)] or close
