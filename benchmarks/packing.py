"""Savings of packed rows and shared prompts: ``python benchmarks/packing.py [--json FILE]``.

Against padding random batches, as most trainers do, against rows of similar length, and against the same rows with every
prompt computed as often as it occurs. Timed as in ``step.py``; the targets are those of the first column.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from step import Candidates, Rows, command, compare, datums, model, pad, without_gradient

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel
from cookbook.losses import get_loss
from cookbook.types import Datum, datum_from_tokens_weights

RANDOM_BATCH = 16  # sequences


def main() -> None:
    def measured(folder: Path) -> Rows:
        tiny, small = model(folder / "tiny", 128, 4), model(folder / "small", 256, 4)
        rows = compare("64 sequences of 32..512 tokens, H=256 L=4: packed at least 2.2 times as fast", lengths(small))
        rows += compare("256 sequences of 8..40 tokens, H=128 L=4", short(tiny))
        for count, target in ((2, 1.5), (8, 2.4)):
            what = f"16 sequences, {count} a prompt, 512 + 128 tokens, H=256 L=4: shared at least {target} times as fast"
            rows += compare(what, prompts(small, count))
        return rows

    command(__doc__, measured)


def lengths(language_model: LanguageModel) -> Candidates:
    drawn = np.clip(np.random.default_rng(1).lognormal(5.0, 0.7, 64), 32, 512).astype(int).tolist()
    data = datums(drawn)
    padded = Engine(language_model, EngineOptions(token_metrics=False, packing="padded"))

    def random_batches() -> None:
        for start in range(0, len(data), RANDOM_BATCH):
            part = data[start : start + RANDOM_BATCH]
            width = max(datum.model_input.length for datum in part)
            padded.forward_backward([pad(datum, width) for datum in part], get_loss("cross_entropy"))

    return {
        f"padded, random batches of {RANDOM_BATCH}": without_gradient(padded, random_batches),
        "padded, rows of similar length": step(language_model, data, packing="padded"),
        "packed": step(language_model, data, packing="packed"),
        "packed, passes of 512 tokens": step(language_model, data, packing="packed", micro_batch_tokens=512),
    }


def short(language_model: LanguageModel) -> Candidates:
    """Where packing has least to save and most sequences to attend to one by one: what ``auto`` must not lose."""
    data = datums(np.random.default_rng(1).integers(8, 40, 256).tolist())
    return {
        "padded, rows of similar length": step(language_model, data, packing="padded"),
        "packed": step(language_model, data, packing="packed"),
    }


def prompts(language_model: LanguageModel, count: int) -> Candidates:
    draw = np.random.default_rng(1)
    data: list[Datum] = []
    for _ in range(16 // count):
        prompt = draw.integers(0, 256, 512)
        weights = np.r_[np.zeros(512), np.ones(129)]
        data += [datum_from_tokens_weights(np.r_[prompt, draw.integers(0, 256, 129)], weights) for _ in range(count)]
    return {
        "each its own prompt": step(language_model, data, shared_prompts=False),
        "shared prompt": step(language_model, data),
    }


def step(language_model: LanguageModel, data: list[Datum], **options: Any) -> Callable[[], None]:
    """A call of forward_backward under these options."""
    engine = Engine(language_model, EngineOptions(token_metrics=False, **options))
    return without_gradient(engine, lambda: engine.forward_backward(data, get_loss("cross_entropy")))


if __name__ == "__main__":
    main()
