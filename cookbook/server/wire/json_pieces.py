"""JSON of large responses, encoded in pieces.

``json.dumps`` holds Python's lock until it has encoded the whole value, even on another thread: 1.3 million logprobs stop the
event loop for half a second. Between two pieces other threads run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Items of a list that are encoded at a time, and levels of nesting that are taken apart.
PIECE_ITEMS = 256
LEVELS = 5


def dumps(value: Any) -> str:
    """Return the text of ``json.dumps(value)``."""
    return "".join(_pieces(value, LEVELS))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not levels or not isinstance(value, dict | list) or not value:
        yield json.dumps(value)
    elif isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            # The key alone as an object, because json.dumps converts keys that are not strings.
            yield ("{" if not number else ", ") + json.dumps({key: 0})[1:-2]
            yield from _pieces(item, levels - 1)
        yield "}"
    elif any(isinstance(item, dict | list) and _is_nested(item) for item in value):
        for number, item in enumerate(value):
            yield "[" if not number else ", "
            yield from _pieces(item, levels - 1)
        yield "]"
    else:
        for start in range(0, len(value), PIECE_ITEMS):
            yield "[" if not start else ", "
            yield json.dumps(value[start : start + PIECE_ITEMS])[1:-1]
        yield "]"


def _is_nested(value: dict[Any, Any] | list[Any]) -> bool:
    """Whether a container holds other containers."""
    return any(isinstance(item, dict | list) for item in (value.values() if isinstance(value, dict) else value))
