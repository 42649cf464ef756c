"""TRL's half, in TRL's own environment: one shape, a step timed as cookbook's. Prints one line of JSON.

    .venv-trl/bin/python benchmarks/gpu/trl_side.py SHAPE ROWS

Its SFTTrainer with bfloat16 autocast over float32 weights, ROWS sequences of similar length a pass, nothing computed twice:
what was its fastest on the CPU (`benchmarks/peers`) with the GPU's precision.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from shapes import LR, ROUNDS, WARM_UP, Shape, find
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

CUDA = torch.cuda.is_available()


class Clock(TrainerCallback):
    """When every optimizer step ended. The first ``WARM_UP`` do not count, in time or in memory."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if CUDA:
            torch.cuda.synchronize()
            if len(self.ends) + 1 == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:], strict=False)]


def trainer_of(shape: Shape, rows_a_pass: int, folder: Path, clock: Clock) -> SFTTrainer:
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape.config()).save_pretrained(folder)
    rows = sorted(shape.sequences(), key=len)
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=WARM_UP + ROUNDS,
        per_device_train_batch_size=rows_a_pass,
        gradient_accumulation_steps=shape.rows // rows_a_pass,
        max_length=shape.context,
        learning_rate=LR,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=not CUDA,
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return SFTTrainer(
        model=str(folder),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": tokens} for tokens in rows] * (WARM_UP + ROUNDS)),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>"),
        callbacks=[clock],
    )


def main(shape: Shape, rows_a_pass: int) -> None:
    disable_progress_bars()
    logging.disable_progress_bar()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(shape, rows_a_pass, Path(folder), clock).train()
    found = {"s": statistics.median(clock.seconds()), "peak GB": torch.cuda.max_memory_allocated() / 1e9 if CUDA else None}
    print(json.dumps(found))


if __name__ == "__main__":
    main(find(sys.argv[1]), int(sys.argv[2]))
