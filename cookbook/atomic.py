"""Text files that are there whole or as they were before, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` aside, in UTF-8, and renames it to ``path``.

    Raises:
        OSError: the disk refuses; ``path`` is as it was, and nothing stays beside it.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
