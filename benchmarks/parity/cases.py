"""Work of both sides, and the files of their results. The file imports the standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BATCH_ROWS = 6  # rows, pairs or completions of every one-batch case
MAX_COMPLETION = 40  # tokens; Dr. GRPO's constant divisor
DPO_BETA = 0.3  # 1/nats
SMOOTHING = 0.1  # share of labels that robust DPO takes to be flipped
CLIP: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
CLIP_SEQUENCE: dict[str, Any] = {"epsilon": 0.03, "epsilon_high": 0.04}  # means lie nearer to 1
CLIP_TWO_SIDED = 2.0
CLIP_CISPO = 1.2
KL = 0.04


@dataclass(frozen=True)
class Case:
    """One batch under one objective: the loss and the gradient of every parameter are compared.

    ``trl`` holds the fields of TRL's config that name the objective. ``ours`` is what cookbook is told on top of the same
    choice. TRL splits the batch into ``micro_batches`` equal parts; cookbook always gets it whole. ``differs`` says in a
    word why the numbers have to differ, and is empty where they have to agree.
    """

    name: str
    method: str  # sft | dpo | grpo
    trl: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    rows: str = ""  # the file of rows; empty: that of the method
    micro_batches: int = 1
    differs: str = ""


@dataclass(frozen=True)
class Run:
    """Some steps of AdamW from the same weights over the same rows in the same order; losses step by step."""

    name: str
    method: str
    weight_decay: float = 0.0
    differs: str = ""
    steps: int = 10
    batch_rows: int = 4
    lr: float = 1e-3


def _sft(
    name: str,
    loss_type: str,
    ours: dict[str, Any] | None = None,
    micro_batches: int = 1,
    answers_only: bool = True,
    differs: str = "",
) -> Case:
    options = {"loss_type": loss_type, "assistant_only_loss": answers_only}
    return Case(f"sft {name}", "sft", options, ours or {}, "", micro_batches, differs)


def _dpo(
    name: str,
    loss_type: str,
    ours: dict[str, Any] | None = None,
    rows: str = "",
    micro_batches: int = 1,
    differs: str = "",
    **more: Any,
) -> Case:
    options = {"loss_type": [loss_type], "beta": DPO_BETA, **more}
    return Case(f"dpo {name}", "dpo", options, ours or {}, rows, micro_batches, differs)


def _grpo(
    name: str,
    loss_type: str,
    ours: dict[str, Any] | None = None,
    micro_batches: int = 1,
    differs: str = "",
    **more: Any,
) -> Case:
    options = {"loss_type": loss_type, "beta": KL, "use_bias_correction_kl": False, **CLIP, **more}
    return Case(f"grpo {name}", "grpo", options, ours or {}, "", micro_batches, differs)


CHAT = "dpo_chat.jsonl"
SHIPPED = {"divide": "shipped"}  # cookbook's own divisor instead of TRL's

CASES = [
    _sft("nll", "nll"),
    _sft("nll, 3 micro-batches", "nll", micro_batches=3),
    _sft("nll, every token", "nll", {"train_on": "all"}, answers_only=False),
    _sft("dft", "dft"),
    _dpo("sigmoid", "sigmoid"),
    _dpo("sigmoid, 3 micro-batches", "sigmoid", micro_batches=3),
    _dpo("sigmoid, chat rows, TRL's mask", "sigmoid", {"mask": "past the turn"}, CHAT),
    _dpo("ipo", "ipo"),
    _dpo("hinge", "hinge"),
    _dpo("robust", "robust", label_smoothing=SMOOTHING),
    _grpo("dapo", "dapo", SHIPPED),
    _grpo("dapo, no KL", "dapo", beta=0.0),
    _grpo("dapo, two-sided clip", "dapo", delta=CLIP_TWO_SIDED),
    _grpo("dapo, TRL's KL", "dapo", {"kl": "bias_corrected"}, use_bias_correction_kl=True),
    _grpo("grpo", "grpo"),
    _grpo("grpo, sequence ratio (GSPO)", "grpo", importance_sampling_level="sequence", **CLIP_SEQUENCE),
    _grpo("dr_grpo", "dr_grpo"),
    _grpo("bnpo", "bnpo"),
    _grpo("bnpo, 2 micro-batches", "bnpo", micro_batches=2),
    _grpo("cispo", "cispo", beta=0.0, epsilon_high=CLIP_CISPO),
    # The same names and numbers given to both, where the two mean different things.
    # docs/evidence/parity.md says which is right.
    _sft("nll, as is", "nll", answers_only=False, differs="questions trained"),
    _dpo("sigmoid, label smoothing, as is", "sigmoid", label_smoothing=SMOOTHING, differs="smoothing ignored"),
    _dpo("sigmoid, chat rows, as is", "sigmoid", rows=CHAT, differs="end of the answer"),
    _grpo("dapo, no KL, as is", "dapo", SHIPPED, beta=0.0, differs="tokens counted"),
    _grpo("dapo, KL, as is", "dapo", SHIPPED, use_bias_correction_kl=True, differs="KL estimator"),
    _grpo("grpo, as is", "grpo", SHIPPED, differs="mean of means"),
]

RUNS = [
    Run("sft, 10 steps", "sft"),
    Run("dpo, 10 steps", "dpo"),
    Run("sft, 10 steps, weight decay 0.1", "sft", weight_decay=0.1, differs="norms decayed"),
]

RUN_OPTIM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "grad_clip_norm": 1.0}


@dataclass(frozen=True)
class Folder:
    """Where the three steps of the comparison meet."""

    root: Path

    @property
    def reference(self) -> Path:
        """The model that runs start from, and the reference of the one-batch cases."""
        return self.root / "reference"

    @property
    def policy(self) -> Path:
        """The model of the one-batch cases: the reference, moved, so that no log-ratio is 0."""
        return self.root / "policy"

    def rows(self, case: Case | Run) -> Path:
        return self.root / (getattr(case, "rows", "") or f"{case.method}.jsonl")

    @property
    def rollouts(self) -> Path:
        return self.root / "grpo.json"

    def side(self, side: str) -> Path:
        """Of ``trl``, ``cookbook`` or ``cookbook-rearranged``: its results and tensors."""
        folder = self.root / side
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def tensors(self, side: str, name: str) -> Path:
        return self.side(side) / f"{''.join(c if c.isalnum() else '_' for c in name)}.safetensors"

    def write(self, side: str, **values: Any) -> None:
        """Adds to the side's results."""
        found = {**self.read(side), **values}
        self._results(side).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def read(self, side: str) -> dict[str, Any]:
        path = self._results(side)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def _results(self, side: str) -> Path:
        return self.side(side) / "results.json"
