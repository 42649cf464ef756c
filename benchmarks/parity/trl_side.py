"""TRL's half, in TRL's own environment: its trainers, driven as its users drive them.

    HF_HUB_OFFLINE=1 CI=1 .venv-trl/bin/python benchmarks/parity/trl_side.py FOLDER

SFT and DPO go through ``Trainer.train()`` from the rows on. GRPO goes through ``compute_loss`` on the prepared rollouts,
because TRL would otherwise sample its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cases import BATCH_ROWS, CASES, MAX_COMPLETION, RUN_OPTIM, RUNS, Case, Folder, Run
from datasets import Dataset, disable_progress_bars
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

PLAIN = {  # float32 on the CPU, in the rows' order, and nothing written or reported
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class Recorder(TrainerCallback):
    """The gradient as the first optimizer step got it."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.gradients:
            self.gradients = gradients_of(model)


class _Recording:
    """Keeps what ``compute_loss`` returned, unrounded, one number a micro-batch."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("recorded", []).append(float(loss.detach()))
        return loss


class RecordingSFT(_Recording, SFTTrainer):
    pass


class RecordingDPO(_Recording, DPOTrainer):
    pass


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def rows_of(path: Path, count: int) -> Dataset:
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return Dataset.from_list([json.loads(line) for line in lines])


def trainer_of(method: str, model: Any, folder: Folder, rows: Dataset, reference: Any, **options: Any) -> Any:
    """An SFT or DPO trainer that records its losses."""
    common = {**PLAIN, "output_dir": tempfile.gettempdir(), **options}
    tokenizer = AutoTokenizer.from_pretrained(folder.reference)
    if method == "sft":
        return RecordingSFT(model=model, args=SFTConfig(**common), train_dataset=rows, processing_class=tokenizer)
    return RecordingDPO(
        model=model, ref_model=reference, args=DPOConfig(**common), train_dataset=rows, processing_class=tokenizer
    )


def one_batch(case: Case, folder: Folder) -> float:
    """The case's loss; its gradient goes to the folder."""
    if case.method == "grpo":
        return _one_batch_grpo(case, folder)
    rows, size = rows_of(folder.rows(case), BATCH_ROWS), BATCH_ROWS // case.micro_batches
    trainer = trainer_of(
        case.method,
        load(folder.policy),
        folder,
        rows,
        load(folder.reference),
        max_steps=1,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=case.micro_batches,
        max_grad_norm=0.0,
        **case.trl,
    )
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    save_file(recorder.gradients, folder.tensors("trl", case.name))
    # SFT divides every micro-batch by the tokens of the step; DPO's means are averaged by the trainer.
    return float(sum(trainer.recorded)) / (case.micro_batches if case.method == "dpo" else 1)


def _one_batch_grpo(case: Case, folder: Folder) -> float:
    rollouts = json.loads(folder.rollouts.read_text(encoding="utf-8"))
    size = len(rollouts) // case.micro_batches
    trainer = GRPOTrainer(
        model=load(folder.policy),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            **PLAIN,
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=case.micro_batches,
            num_generations=size,
            max_completion_length=MAX_COMPLETION,
            **case.trl,
        ),
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * len(rollouts)),
        processing_class=AutoTokenizer.from_pretrained(folder.reference),
    )
    trainer.current_gradient_accumulation_steps = case.micro_batches  # what train() would set
    trainer.model.train()
    total = sum(len(row["completion"]) for row in rollouts)
    loss = 0.0
    for start in range(0, len(rollouts), size):
        part = trainer.compute_loss(trainer.model, _inputs(rollouts[start : start + size], total))
        part.backward()
        loss += float(part.detach())
    save_file(gradients_of(trainer.model), folder.tensors("trl", case.name))
    return loss


def _inputs(rows: list[dict[str, Any]], num_tokens: int) -> dict[str, torch.Tensor]:
    """The tensors that ``_generate_and_score_completions`` makes: prompts padded on the left, everything else on the right."""

    def padded(values: list[list[Any]], dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
        width = max(map(len, values))
        blank = [[0] * (width - len(row)) for row in values]
        return torch.tensor([b + row if left else row + b for b, row in zip(blank, values, strict=True)], dtype=dtype)

    prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    return {
        "prompt_ids": padded(prompts, torch.long, left=True),
        "prompt_mask": padded([[1] * len(row) for row in prompts], torch.long, left=True),
        "completion_ids": padded(completions, torch.long),
        "completion_mask": padded([[1] * len(row) for row in completions], torch.long),
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float32),
        "old_per_token_logps": padded([row["old"] for row in rows], torch.float32),
        "ref_per_token_logps": padded([row["reference"] for row in rows], torch.float32),
        "num_items_in_batch": torch.tensor(num_tokens),
    }


def several_steps(run: Run, folder: Folder) -> list[float]:
    """The run's losses; its final weights go to the folder."""
    trainer = trainer_of(
        run.method,
        load(folder.reference),
        folder,
        rows_of(folder.rows(run), run.steps * run.batch_rows),
        None,  # DPO loads its reference from where the model came from
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_rows,
        learning_rate=run.lr,
        weight_decay=run.weight_decay,
        adam_beta1=RUN_OPTIM["beta1"],
        adam_beta2=RUN_OPTIM["beta2"],
        adam_epsilon=RUN_OPTIM["eps"],
        max_grad_norm=RUN_OPTIM["grad_clip_norm"],
        **({"assistant_only_loss": True} if run.method == "sft" else {}),
    )
    trainer.train()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(weights, folder.tensors("trl", run.name))
    return list(trainer.recorded)


def main(folder: Folder) -> None:
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    folder.write(
        "trl",
        versions={name: version(name) for name in ("trl", "torch", "transformers", "accelerate", "datasets")},
        values={case.name: one_batch(case, folder) for case in CASES},
        runs={run.name: several_steps(run, folder) for run in RUNS},
    )


if __name__ == "__main__":
    main(Folder(Path(sys.argv[1])))
