"""Work of both sides, and the files of their results. The file imports the standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LR = 1e-3  # constant; the losses of the first step do not depend on it
COMPLETION_TOKENS = 64  # of a GRPO sample
GROUP = 8  # GRPO samples a prompt


@dataclass(frozen=True)
class Model:
    """An untrained Qwen3 with the byte tokenizer, its vocabulary padded to ``vocabulary``."""

    name: str
    hidden: int
    vocabulary: int
    layers: int


SMALL = Model("small", 128, 512, 4)
WIDE = Model("wide", 256, 151_936, 2)


@dataclass(frozen=True)
class Setting:
    """One way to run TRL. ``micro_rows``: rows of a forward pass. ``reach``: how many times as fast cookbook is to be."""

    name: str
    micro_rows: int
    options: dict[str, Any] = field(default_factory=dict)
    reach: float = 0.0
    sorted_rows: bool = False  # rows of similar length share a forward pass, like `group_by_length`


@dataclass(frozen=True)
class Workload:
    """``steps`` optimizer steps over ``rows`` rows each (conversations, pairs or prompts); the first one warms up."""

    name: str
    method: str  # sft | dpo | grpo
    model: Model
    rows: int
    steps: int
    settings: tuple[Setting, ...]
    memory: float | None = None  # cookbook's peak is to be at most this share of TRL's

    @property
    def sequences(self) -> int:
        """Number of rows of a step as TRL counts them: for GRPO every sample is a row."""
        return self.rows * (GROUP if self.method == "grpo" else 1)

    @property
    def candidates(self) -> list[Setting]:
        """Ways to run TRL that might be its best: what ``compare.py --tune`` tries."""
        return [one for one in CANDIDATES[self.method] if one.micro_rows <= self.sequences]

    @property
    def unit(self) -> str:
        return {"sft": "tokens", "dpo": "pairs", "grpo": "steps"}[self.method]


# What TRL does unless it is told otherwise, but for bfloat16: eight rows as they come, activations computed twice.
DEFAULTS = {"gradient_checkpointing": True}
PLAIN = {"gradient_checkpointing": False}


def _best(reach: float) -> Setting:
    """The fastest setting of TRL on a CPU by ``compare.py --tune``: one row per pass needs neither padding nor a mask."""
    return Setting("best", 1, PLAIN, reach)


WORKLOADS = [
    Workload("sft-small", "sft", SMALL, 16, 8, (_best(1.8), Setting("defaults", 8, DEFAULTS, 2.5))),
    Workload("sft-wide", "sft", WIDE, 4, 3, (_best(6.0), Setting("defaults", 4, DEFAULTS, 6.0)), memory=0.5),
    Workload("dpo-small", "dpo", SMALL, 8, 6, (_best(1.4), Setting("defaults", 8, DEFAULTS, 1.4))),
    Workload("dpo-wide", "dpo", WIDE, 2, 3, (_best(4.0), Setting("defaults", 2, DEFAULTS, 4.0))),
    Workload("grpo-small", "grpo", SMALL, 8, 5, (Setting("best", 16, PLAIN, 2.5), Setting("defaults", 8, DEFAULTS, 2.5))),
]

CANDIDATES = {
    "sft": [
        *(Setting(f"sorted, {n} a pass", n, PLAIN, sorted_rows=True) for n in (1, 2, 4, 8)),
        *(Setting(f"padding-free, {n} a pass", n, {**PLAIN, "padding_free": True, "max_length": None}) for n in (2, 4)),
    ],
    "dpo": [Setting(f"sorted, {n} a pass", n, PLAIN, sorted_rows=True) for n in (1, 2, 4, 8)],
    "grpo": [Setting(f"{n} a pass", n, PLAIN) for n in (8, 16, 32, 64)],
}


def letters(completion: str, row: Any) -> float:
    """The reward of GRPO: the share of letters. Samples of an untrained model differ in it, so that no group drops out."""
    return sum(character.isalpha() for character in completion) / max(len(completion), 1)


def find(workload: str, setting: str) -> tuple[Workload, Setting]:
    """By name, a candidate of ``--tune`` among them."""
    found = next(one for one in WORKLOADS if one.name == workload)
    settings = [*found.settings, *found.candidates]
    return found, next(one for one in settings if one.name == setting)


@dataclass(frozen=True)
class Folder:
    """Where the benchmark's processes meet."""

    root: Path

    def model(self, model: Model) -> Path:
        return self.root / model.name

    def rows(self, workload: Workload, *, by_length: bool = False) -> Path:
        """The steps' rows; within every step as they come, or ``by_length``."""
        return self.root / f"{workload.name}{'-by-length' if by_length else ''}.jsonl"

    def result(self, name: str) -> Path:
        return self.root / "results" / f"{name}.json"

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.result(name).read_text(encoding="utf-8"))
        return found
