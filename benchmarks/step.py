"""Cost of a step: ``python benchmarks/step.py [--json FILE] [--precision | --scaling]``, or ``make bench``.

Candidates of one comparison run in turn, round after round, in one process on one thread, and are timed in CPU seconds; the
table gives medians and the ratio to the first candidate of each comparison. Ratios are what to quote: the machine is shared.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.memory import keep_freed_memory
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.engine.precision import DEFAULT, Precision, instructions
from cookbook.losses import get_loss
from cookbook.types import Datum, datum_from_tokens_weights
from cookbook.utils.paths import packaged

ROUNDS = 5
Candidates = dict[str, Callable[[], object]]
Rows = list[dict[str, Any]]


def main() -> None:
    def measured(folder: Path) -> Rows:
        small, larger = model(folder / "small", 128, 4), model(folder / "larger", 256, 4)
        return [
            *compare("custom loss, 4,096 tokens, H=256 L=4", custom_loss(larger)),
            *compare("layout, 64 sequences of 32..512 tokens, H=128 L=4", layouts(small)),
        ]

    def precisions(folder: Path) -> Rows:
        print(f"instructions: {instructions()}")
        return [
            *compare("precision, 4,096 tokens, H=128 L=4", precision(folder / "small", 128, 4, [256] * 16)),
            *compare("precision, 1,500 tokens, H=512 L=6", precision(folder / "mid", 512, 6, [1500])),
        ]

    command(__doc__, measured, precision=precisions, scaling=scaling)


def scaling(folder: Path) -> Rows:
    """Cost of a pass and its gradient against batch, length, width, and completions of one prompt."""
    small = model(folder / "128", 128, 4)
    widths = {width: model(folder / str(width), width, 4) for width in (128, 256, 512)}
    batch = {f"{rows} rows of 256 tokens": sft_pass(small, [256] * rows) for rows in (1, 4, 16, 64)}
    length = {f"{4096 // n} rows of {n} tokens": sft_pass(small, [n] * (4096 // n)) for n in (128, 512, 2048, 4096)}
    width = {f"H={n}": sft_pass(one, [512] * 4) for n, one in widths.items()}
    group = {f"{n} completions": sft_pass(small, [256 + 64] * n, prompt=256) for n in (1, 4, 16, 64)}
    comparisons = {
        "batch, H=128 L=4": batch,
        "length, 4,096 tokens, H=128 L=4": length,
        "width, 4 rows of 512 tokens, L=4": width,
        "group size, one prompt of 256 tokens, completions of 64, H=128 L=4": group,
    }
    return [row for what, candidates in comparisons.items() for row in compare(f"cost against {what}", candidates, 3)]


def sft_pass(language_model: LanguageModel, lengths: list[int], prompt: int = 0) -> Callable[[], None]:
    """One pass and its gradient; the first ``prompt`` tokens of all rows are equal and have no loss."""
    engine, draw = Engine(language_model, EngineOptions(token_metrics=False)), np.random.default_rng(0)
    first = draw.integers(0, 256, prompt)
    rows = [np.concatenate([first, draw.integers(0, 256, n - prompt)]) for n in lengths]
    data = [datum_from_tokens_weights(tokens, (np.arange(len(tokens)) >= prompt).astype(float)) for tokens in rows]
    loss = get_loss("cross_entropy")
    return without_gradient(engine, functools.partial(engine.forward_backward, loss.prepare(data), loss))


def precision(folder: Path, hidden: int, layers: int, lengths: list[int]) -> Candidates:
    """One pass and its gradient at each precision, and with bfloat16 weights."""
    model(folder, hidden, layers)
    data, loss = get_loss("cross_entropy").prepare(datums(lengths)), get_loss("cross_entropy")
    kinds = {"highest": DEFAULT, "medium": Precision("medium"), "autocast": Precision(autocast="bfloat16"), "dtype": DEFAULT}
    candidates: Candidates = {}
    for name, chosen in kinds.items():
        dtype = "bfloat16" if name == "dtype" else "float32"
        loaded = load(ModelConfig(str(folder), dtype=dtype), torch.device("cpu"), seed=0)
        chosen.prepare(loaded)
        engine = Engine(loaded, EngineOptions(token_metrics=False, precision=chosen))
        candidates[name] = without_gradient(engine, functools.partial(engine.forward_backward, data, loss))
    return candidates


def command(doc: str, measured: Callable[[Path], Rows], **others: Callable[[Path], Rows]) -> None:
    """A benchmark's command line. ``measured`` gets a folder for its models; its rows are shown, and ``--json`` keeps them.

    ``others`` are measured instead, if the option of their name is given.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for name in others:
        parser.add_argument(f"--{name}", action="store_true", help="measure this instead")
    arguments = parser.parse_args()
    measured = next((other for name, other in others.items() if getattr(arguments, name)), measured)
    torch.set_num_threads(1)
    keep_freed_memory()  # as a trainer's worker does
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def model(folder: Path, hidden: int, layers: int) -> LanguageModel:
    """A Qwen3 with fresh weights, from a folder as any other model."""
    tokenizer = AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=4096)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(ModelConfig(str(folder)), torch.device("cpu"), seed=0)


def datums(lengths: list[int]) -> list[Datum]:
    draw = np.random.default_rng(0)
    return [datum_from_tokens_weights(draw.integers(0, 256, n), np.ones(n)) for n in lengths]


def custom_loss(language_model: LanguageModel) -> Candidates:
    """The same objective by name, as a function, and as hosted services do it: forward, then forward_backward."""
    engine = Engine(language_model, EngineOptions(token_metrics=False))
    data = get_loss("cross_entropy").prepare(datums([257] * 16))
    loss = get_loss("cross_entropy")

    def function(rows: Any, logprobs: Any) -> Any:
        return -sum((lp * row.loss_fn_inputs["weights"].to_torch()).sum() for row, lp in zip(rows, logprobs, strict=True)), {}

    def twice() -> None:
        engine.forward(data)
        engine.forward_backward(data, loss)

    candidates: Candidates = {
        "built-in": lambda: engine.forward_backward(data, loss),
        "custom function": lambda: engine.forward_backward(data, function),
        "forward twice (as hosted services do)": twice,
    }
    return {name: without_gradient(engine, run) for name, run in candidates.items()}


def layouts(language_model: LanguageModel) -> Candidates:
    """One batch of lognormal lengths: padded at random, as most trainers do, and as `backend.packing` lays it out."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5.0, 0.7, 64), 32, 512).astype(int).tolist()
    data, loss = datums(lengths), get_loss("cross_entropy")

    def random_padding(engine: Engine) -> Callable[[], None]:
        def run() -> None:
            for start in range(0, len(data), 16):
                part = data[start : start + 16]
                width = max(datum.model_input.length for datum in part)
                engine.forward_backward([pad(datum, width) for datum in part], loss)

        return run

    candidates: Candidates = {}
    for name in ("random padding", "padded", "packed", "auto"):
        engine = Engine(language_model, EngineOptions(token_metrics=False, packing="padded" if "random" in name else name))
        run = random_padding(engine) if "random" in name else lambda engine=engine: engine.forward_backward(data, loss)  # type: ignore[misc]
        candidates[name] = without_gradient(engine, run)
    return candidates


def pad(datum: Datum, width: int) -> Datum:
    tokens = [*datum.model_input.tokens, *[0] * (width + 1 - datum.model_input.length)]
    weights = np.zeros(width + 1)
    weights[: datum.model_input.length] = 1
    return datum_from_tokens_weights(tokens, weights)


def without_gradient(engine: Engine, run: Callable[[], object]) -> Callable[[], None]:
    """Every round starts from the same state."""

    def once() -> None:
        run()
        engine.discard_gradient()

    return once


def compare(what: str, candidates: Candidates, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A candidate that returns a float says how many CPU seconds other processes have spent for it."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.process_time()
            elsewhere = run()
            if round_number:  # the first round warms up
                own = time.process_time() - start
                seconds[name].append(own + elsewhere if isinstance(elsewhere, float) else own)
    first = next(iter(seconds.values()))
    return [
        {
            "comparison": what,
            "candidate": name,
            "cpu_s": statistics.median(times),
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(times, first, strict=True)),
        }
        for name, times in seconds.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    previous = None
    for row in rows:
        if row["comparison"] != previous:
            print(f"\n{row['comparison']}\n  {'candidate':40s} {'CPU s':>8s} {'ratio':>7s}")
            previous = row["comparison"]
        print(f"  {row['candidate']:40s} {row['cpu_s']:8.3f} {row['ratio']:7.2f}")


if __name__ == "__main__":
    main()
