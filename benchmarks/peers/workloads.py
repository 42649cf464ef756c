"""Work of both sides, and the files of their results. The file imports the standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LR = 1e-3  # of untrained models; constant; the losses of the first step do not depend on it
COMPLETION_TOKENS = 64  # of a GRPO sample
GROUP = 8  # GRPO samples a prompt
CONTEXT = 4096  # tokens: neither side cuts a row
# Of products, by the same words on both sides: bfloat16 operands ("medium"), or bfloat16 activations as well ("autocast").
PRECISIONS = ("float32", "medium", "autocast")
DEFAULTS = "defaults"


@dataclass(frozen=True)
class Model:
    """An untrained Qwen3 with the byte tokenizer, its vocabulary padded to ``vocabulary``; with ``source``, a real model.

    ``source``: the folder of a pretrained chat model, relative to the root of the checkout.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: int
    source: str | None = None

    @property
    def heads(self) -> int:
        return max(4, self.hidden // 64)


SMALL = Model("small", 128, 512, 4)
WIDE = Model("wide", 256, 151_936, 2)
MID = Model("mid", 512, 512, 6)
REAL = Model("real", 576, 49_152, 30, source="build/smollm2")  # SmolLM2-135M-Instruct, of `make real-model`


@dataclass(frozen=True)
class Setting:
    """One way to run TRL. ``micro_rows``: rows of a forward pass. ``options``: arguments of TRL's configuration."""

    name: str
    micro_rows: int
    options: dict[str, Any] = field(default_factory=dict)
    sorted_rows: bool = False  # rows of similar length share a forward pass, like `group_by_length`
    precision: str = PRECISIONS[0]

    def at(self, precision: str) -> Setting:
        return replace(self, name=f"{self.name}, {precision}", precision=precision)


@dataclass(frozen=True)
class Workload:
    """``steps`` optimizer steps over ``rows`` rows each (conversations, pairs or prompts); the first one warms up.

    ``reach``: how many times as fast cookbook is to be, each side at its best precision and TRL in its best setting.
    ``least_bytes``: GSM8K's rows are joined until a row has this number of bytes. ``memory``: cookbook's peak at its defaults
    is to be at most this share of the peak of TRL's best float32 setting. ``lr``: a rate at which the model learns.
    ``trl_trains``: tokens of a row that only TRL trains, after the end of the last turn.
    """

    name: str
    method: str  # sft | dpo | orpo | grpo
    model: Model
    rows: int
    steps: int
    reach: float
    least_bytes: int = 0
    memory: float | None = None
    lr: float = LR
    trl_trains: int = 0

    @property
    def sequences(self) -> int:
        """Number of rows of a step as TRL counts them: for GRPO every sample is a row."""
        return self.rows * (GROUP if self.method == "grpo" else 1)

    @property
    def settings(self) -> list[Setting]:
        """Ways to run TRL, each at every precision; the last one is TRL's defaults."""
        candidates = REAL_CANDIDATES if self.model.source else CANDIDATES
        fitting = [setting for setting in candidates[self.method] if setting.micro_rows <= self.sequences]
        defaults = Setting(DEFAULTS, min(8, self.sequences), {"gradient_checkpointing": True})
        return [*(setting.at(precision) for setting in fitting for precision in self.precisions), defaults]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of both sides. The width of the real model gains nothing from "medium" on CPUs without AMX."""
        return ("float32", "autocast") if self.model.source else PRECISIONS

    @property
    def unit(self) -> str:
        return {"sft": "tokens", "grpo": "steps"}.get(self.method, "pairs")


WORKLOADS = [
    Workload("sft-small", "sft", SMALL, 16, 8, reach=1.5),
    Workload("sft-mid", "sft", MID, 4, 3, reach=1.5, least_bytes=1200),
    Workload("sft-wide", "sft", WIDE, 4, 3, reach=6.0, memory=0.5),
    Workload("dpo-small", "dpo", SMALL, 8, 6, reach=1.4),
    Workload("dpo-mid", "dpo", MID, 2, 3, reach=1.5, least_bytes=1200),
    Workload("dpo-wide", "dpo", WIDE, 2, 3, reach=4.0),
    Workload("orpo-small", "orpo", SMALL, 8, 6, reach=1.4),
    Workload("orpo-mid", "orpo", MID, 2, 3, reach=1.5, least_bytes=1200),
    Workload("grpo-small", "grpo", SMALL, 8, 5, reach=2.5),
    Workload("grpo-mid", "grpo", MID, 2, 3, reach=1.5, least_bytes=1200),
    # TRL also trains the line break that SmolLM2's template prints after the last turn.
    Workload("sft-real", "sft", REAL, 8, 4, reach=1.5, lr=2e-5, trl_trains=1),
    Workload("dpo-real", "dpo", REAL, 4, 4, reach=1.5, lr=1e-6),
    Workload("grpo-real", "grpo", REAL, 8, 4, reach=2.5, lr=1e-5),
]

# Ways to run TRL that might be its best: rows of similar length in a pass, or packed rows; activations are computed once.
PLAIN = {"gradient_checkpointing": False}
SORTED = [Setting(f"sorted, {n} a pass", n, PLAIN, sorted_rows=True) for n in (1, 2, 4, 8)]
CANDIDATES = {
    "sft": [*SORTED, *(Setting(f"padding-free, {n} a pass", n, {**PLAIN, "padding_free": True}) for n in (2, 4))],
    "dpo": SORTED,
    "orpo": SORTED,
    "grpo": [Setting(f"{n} a pass", n, PLAIN) for n in (8, 16, 32, 64)],
}
# Of the settings above, those that came near the best for models of this size.
REAL_CANDIDATES = {
    "sft": [*SORTED[:2], Setting("padding-free, 4 a pass", 4, {**PLAIN, "padding_free": True})],
    "dpo": SORTED[:2],
    "grpo": CANDIDATES["grpo"][1:3],
}


def letters(completion: str, row: Any) -> float:
    """The reward of GRPO: the share of letters. Samples of an untrained model differ in it, so that no group drops out."""
    return sum(character.isalpha() for character in completion) / max(len(completion), 1)


def find(workload: str, setting: str) -> tuple[Workload, Setting]:
    """By name."""
    found = next(one for one in WORKLOADS if one.name == workload)
    return found, next(one for one in found.settings if one.name == setting)


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
