"""Did you mean: the closest name to what was typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``" Did you mean 'grpo'?"`` for ``grop``; the empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(choices), n=3)
    swapped = [choice for choice in close if sorted(choice) == sorted(name)]  # GPRO is GRPO rather than GSPO
    return _question((swapped or close)[:1])


def did_you_mean_key(key: str, keys: Iterable[str]) -> str:
    """The same for a dotted key. ``lr`` finds ``optim.lr``: an equal last part says more than a similar spelling."""
    keys = list(keys)
    last = _last(key)
    same = [known for known in keys if _last(known) == last and known != key]
    return _question(same[:3]) if same else did_you_mean(key, keys)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _question(found: list[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""
