"""Texts as Hydra reads them in an override: with or without quotes. Loads no Hydra."""

from __future__ import annotations

import re

# Text that Hydra reads as a text without quotes.
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)
_NOT_TEXT = ("true", "false", "null", "nan", "inf")

# A text in Hydra's single quotes: backslashes count only before a quote.
_BEFORE_QUOTE = re.compile(r"(\\*)'")


def in_quotes(text: str) -> str:
    """Return a text in single quotes, as Hydra reads it."""
    escaped = _BEFORE_QUOTE.sub(lambda match: match[1] * 2 + "\\'", text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def is_plain(text: str) -> bool:
    """Whether Hydra reads the text without quotes as a text."""
    return _PLAIN.fullmatch(text) is not None and text.lower() not in _NOT_TEXT
