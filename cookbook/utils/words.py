"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return ``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
