"""Limits on the structure of request bodies, checked on the bytes before a parser builds objects from them.

A parser needs up to 1,000 times the bytes of a body for its objects: `{},` becomes an object of a few hundred bytes.
The limits also bound the time for which one call of a parser holds Python's interpreter lock, during which the server answers
no other client.
"""

from __future__ import annotations

import re

# Objects and lists of one JSON body, levels of nesting, commas, and quoted texts.
MAX_CONTAINERS, MAX_DEPTH, MAX_ELEMENTS, MAX_TEXTS = 20_000, 64, 1 << 19, 200_000
# Fields of one protobuf body at all levels. A datum has about 20.
MAX_FIELDS = 1 << 19
# Bytes of the shape of one tensor. A packed size of one byte becomes eight.
MAX_SHAPE_BYTES = 64

# A text of JSON, whose last quote may be missing. Possessive, because backtracking would take quadratic time.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = b"[{"

# Field numbers of messages.proto: the datums of a request, the tensors of a datum by name, the shape of a tensor.
_DATA, _INPUTS, _MAP_VALUE, _SHAPE = 3, 2, 2, 4


class TooComplexError(ValueError):
    """Error of a body that exceeds a limit on its structure. ``status``: HTTP status of the response."""

    status = 413


class TooDeepError(TooComplexError):
    """Error of a body with too many levels, which smaller requests would not remedy."""

    status = 400


def check_json(body: bytes) -> None:
    """Raise TooComplexError if a JSON body has too many values or too many levels. The body may be invalid JSON."""
    # Commas and quotes inside of texts count too, because telling them apart takes longer than the limit allows.
    for name, count, limit in (("commas", body.count(b","), MAX_ELEMENTS), ("quotes", body.count(b'"'), 2 * MAX_TEXTS)):
        if count > limit:
            raise TooComplexError(f"the body has more than {limit:,} {name}; send smaller requests")
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _TEXT.sub(b"", body).translate(None, _NOT_BRACKETS)
    if brackets.count(b"[") + brackets.count(b"{") > MAX_CONTAINERS:
        raise TooComplexError(f"the body has more than {MAX_CONTAINERS:,} objects and lists; send smaller requests")
    depth = 0
    for bracket in brackets[: 2 * MAX_CONTAINERS]:
        depth += 1 if bracket in _OPENING else -1
        if depth > MAX_DEPTH:
            raise TooDeepError(f"the body has more than {MAX_DEPTH} levels of objects and lists; send a flatter one")


def check_forward_backward(body: bytes) -> None:
    """Raise TooComplexError if the message of a forward and backward pass has too many fields. The message may be damaged."""
    try:
        _FieldCount(body).check()
    except IndexError:
        # The message ends inside of a field. The parser reports it.
        return


class _FieldCount:
    """Counts the fields of a message, down to the shapes of its tensors."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._left = MAX_FIELDS

    def check(self) -> None:
        self._walk(0, len(self._body), (_DATA, _INPUTS, _MAP_VALUE))

    def _walk(self, start: int, end: int, path: tuple[int, ...]) -> None:
        """Count the fields from ``start`` to ``end``, and enter those whose number is the first of ``path``."""
        while start < end:
            self._left -= 1
            if self._left < 0:
                raise TooComplexError(f"the request has more than {MAX_FIELDS:,} fields; send fewer datums per request")
            tag, start = self._varint(start)
            kind = tag & 7
            if kind == 0:
                _, start = self._varint(start)
            elif kind == 1:
                start += 8
            elif kind == 5:
                start += 4
            elif kind == 2:
                size, start = self._varint(start)
                if path and tag >> 3 == path[0]:
                    self._walk(start, min(start + size, end), path[1:])
                elif not path and tag >> 3 == _SHAPE and size > MAX_SHAPE_BYTES:
                    raise TooComplexError(f"the shape of a tensor has more than {MAX_SHAPE_BYTES} bytes; send fewer dimensions")
                start += size

    def _varint(self, start: int) -> tuple[int, int]:
        """Return the number at ``start``, and the place after it. Raises IndexError: the message ends before."""
        value = shift = 0
        while (byte := self._body[start]) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            start += 1
            if shift > 63:
                raise IndexError
        return value | byte << shift, start + 1
