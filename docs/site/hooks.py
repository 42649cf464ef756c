"""Hooks of MkDocs: pages that the navigation does not name, and roles of docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDES = "Guide"
# :meth:`prepare` and :class:`~cookbook.types.Datum`, after the Markdown of the backquotes.
ROLE = re.compile(r":(?:meth|class|func|attr|data|mod|exc):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_config(config: Any) -> Any:
    """Add pages of docs/ that the navigation does not name to the end of the guide."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    guides = next(entry[GUIDES] for entry in config.nav if GUIDES in entry)
    guides.extend(page for page in pages if page not in named)
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Print the roles of docstrings as code."""
    return ROLE.sub(r"<code>\1</code>", html)
