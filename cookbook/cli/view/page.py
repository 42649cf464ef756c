"""The page of ``cookbook view``: facts and stored steps of runs, in one HTML file without external parts."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from cookbook.errors import ConfigError
from cookbook.run.hooks import STATUS
from cookbook.run.stored_steps import ROLLOUTS, StoredSteps
from cookbook.types import JsonObject

PARTS = Path(__file__).parent
# Names of cookbook.run.folder, whose import loads torch.
CONFIG, METRICS = "config.yaml", "metrics.jsonl"


@dataclass(frozen=True)
class ViewedRun:
    """A run's folder. Every call reads the files, because the run may be in progress.

    Raises:
        ConfigError: the folder holds no run.
    """

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / CONFIG).is_file():
            raise ConfigError(f"view: {self.folder} is not a run (no {CONFIG}); pass the folder of a run, such as runs/mine")

    def facts(self, steps: Iterable[int], known: str = "") -> JsonObject:
        """Return name, configuration, status, rows of metrics as text, and the stored steps.

        Args:
            steps: the stored steps.
            known: ``metricsEnd`` of an earlier call; only the rows after that place are returned.
        """
        rows, end = self._metrics(known)
        config = yaml.safe_load((self.folder / CONFIG).read_text(encoding="utf-8"))
        return {
            "name": self.folder.resolve().name,
            "config": dict(_flat(config)),
            "status": _json(self.folder / STATUS),
            "metrics": rows,
            "metricsEnd": end,
            "steps": list(steps),
        }

    def stored(self) -> StoredSteps:
        """Return the stored steps of this moment, to be closed."""
        return StoredSteps(self.folder / ROLLOUTS)

    def _metrics(self, known: str) -> tuple[str, str]:
        """Return the rows after the place ``known``, and the place after them: inode and offset."""
        try:
            file = (self.folder / METRICS).open("rb")
        except FileNotFoundError:
            return "", ""
        with file:
            # A resumed run replaces the file, which then has another inode.
            inode, _, offset = known.partition("-")
            identity = os.fstat(file.fileno()).st_ino
            file.seek(int(offset) if inode == str(identity) else 0)
            rows = file.read()
            # The last row may be incomplete.
            whole = rows[: rows.rfind(b"\n") + 1]
            return whole.decode(errors="replace"), f"{identity}-{file.tell() - len(rows) + len(whole)}"


def whole_page(runs: Sequence[ViewedRun]) -> tuple[str, int]:
    """Return a page that holds all data of the runs, and the number of its steps."""
    before, after = empty_page().split("<!-- data -->")
    with ExitStack() as opened:
        stores = [opened.enter_context(run.stored()) for run in runs]
        steps = {
            (number, step): content
            for number, stored in enumerate(stores)
            for step in stored.blocks
            if (content := stored.member(step)) is not None
        }
    facts = [run.facts(step for own, step in steps if own == number) for number, run in enumerate(runs)]
    elements = [_element(f"run{number}-step{step}", content) for (number, step), content in steps.items()]
    packed = _element("facts", gzip.compress(json.dumps(facts).encode(), mtime=0))
    return "".join([before, packed, *elements, after]), len(steps)


def empty_page() -> str:
    """Return the page without data, which asks its server for them."""
    page, program = ((PARTS / name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    return page.replace("/* program */", program)


def _element(name: str, content: bytes) -> str:
    """Return an element that browsers do not run. Base64 holds no character that could end the element."""
    return f'<script type="text/plain" id="{name}">{base64.b64encode(content).decode()}</script>\n'


def _flat(node: JsonObject, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _json(path: Path) -> JsonObject:
    """Return a JSON object; an empty one if the file is missing or damaged, as during a write."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
