"""What <TAB> offers behind ``cookbook train``, in bash, zsh and fish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def complete_override(words: Sequence[str], incomplete: str, config_dirs: Sequence[Path]) -> list[str]:
    """The overrides the last word can become, as far as the shell itself asks for them."""
    from cookbook.cli.hydra_bridge import Request, complete

    before, head = rejoin(words, incomplete)
    found = complete(Request(before, config_dirs=config_dirs), head + incomplete)
    return [match[len(head) :] for match in found]


def rejoin(words: Sequence[str], incomplete: str) -> tuple[list[str], str]:
    """Undoes bash's splitting at ``=``: the whole words before the cursor, and the part of the last that bash keeps.

    ``["recipe", "=", "grpo", "optim.lr", "="]`` are ``["recipe=grpo"]`` and ``"optim.lr="``. Typer drops a lone ``=``
    under the cursor, so a word without one is waiting for it: no other override lacks it, but for ``~group``.
    """
    joined: list[str] = []
    for word in words:
        if joined and (word == "=" or joined[-1].endswith("=")):
            joined[-1] += word
        else:
            joined.append(word)
    last = joined[-1] if joined else ""
    if last.endswith("="):
        return joined[:-1], last
    if last and "=" not in last and not last.startswith("~") and not incomplete:
        return joined[:-1], f"{last}="
    return joined, ""
