"""TRL's half, in TRL's own environment: one workload under one setting, measured step by step.

HF_HUB_OFFLINE=1 CI=1 .venv-trl/bin/python benchmarks/peers/trl_side.py FOLDER WORKLOAD SETTING RESULT
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from meter import Meter
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from workloads import COMPLETION_TOKENS, CONTEXT, GROUP, Folder, Setting, Workload, find, letters

COMMON = {  # on the CPU, in the rows' order, and nothing written or reported
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class _Counting:
    """Adds up, over the micro-batches of a step, the loss that TRL computes and the tokens it computes it on."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        real, trained = _tokens(inputs)
        loss = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        found = self.__dict__.setdefault("found", {"loss": 0.0, "inputs": 0.0, "trained": 0.0})
        found["loss"] += float(loss.detach())
        found["inputs"] += real
        found["trained"] += trained
        return loss


def _tokens(inputs: dict[str, Any]) -> tuple[int, int]:
    """Of a micro-batch: how many are no padding, and how many have a loss."""
    if "completion_ids" in inputs:  # GRPO
        completion = int(inputs["completion_mask"].sum())
        return int(inputs["prompt_mask"].sum()) + completion, completion
    if "chosen_labels" in inputs:  # ORPO
        sides = ("chosen", "rejected")
        real = sum(int(inputs[f"{side}_attention_mask"].sum()) for side in sides)
        return real, sum(int((inputs[f"{side}_labels"] != -100).sum()) for side in sides)
    mask = inputs.get("attention_mask")
    real = int(inputs["input_ids"].numel() if mask is None else mask.sum())
    return real, int((inputs["labels"] != -100).sum()) if "labels" in inputs else int(inputs["completion_mask"].sum())


class CountingSFT(_Counting, SFTTrainer):
    pass


class CountingDPO(_Counting, DPOTrainer):
    pass


class CountingORPO(_Counting, ORPOTrainer):
    pass


class CountingGRPO(_Counting, GRPOTrainer):
    pass


class MeterCallback(TrainerCallback):
    """The meter at the end of every optimizer step. DPO and GRPO average their micro-batches' losses, SFT adds them."""

    def __init__(self, meter: Meter, trainer: Any, loss_divisor: int) -> None:
        self.meter, self.trainer, self.loss_divisor = meter, trainer, loss_divisor

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        found = self.trainer.__dict__.pop("found")
        self.meter.step(**{**found, "loss": found["loss"] / self.loss_divisor})


def trainer_of(workload: Workload, setting: Setting, folder: Folder) -> Any:
    """The trainer and the number of micro-batches of an optimizer step."""
    lines = folder.rows(workload, by_length=setting.sorted_rows).read_text(encoding="utf-8").splitlines()
    shared: dict[str, Any] = {
        "model": str(folder.model(workload.model)),
        "train_dataset": Dataset.from_list([json.loads(line) for line in lines]),
        "processing_class": AutoTokenizer.from_pretrained(folder.model(workload.model)),
    }
    passes = workload.sequences // setting.micro_rows
    arguments = {
        **COMMON,
        "learning_rate": workload.lr,
        "bf16": setting.precision == "autocast",
        "output_dir": tempfile.gettempdir(),
        "max_steps": workload.steps,
        "per_device_train_batch_size": setting.micro_rows,
        "gradient_accumulation_steps": passes,
        "model_init_kwargs": {"dtype": "float32"},
        **setting.options,
    }
    return MAKERS[workload.method](arguments, shared), passes


def _sft(arguments: dict[str, Any], shared: dict[str, Any]) -> Any:
    # Rows with a prompt of their own are trained on their completion by default.
    options = {"assistant_only_loss": True} if "messages" in shared["train_dataset"].column_names else {}
    return CountingSFT(args=SFTConfig(**arguments, **options, max_length=None), **shared)


def _dpo(arguments: dict[str, Any], shared: dict[str, Any]) -> Any:
    return CountingDPO(args=DPOConfig(**arguments, max_length=None), **shared)


def _orpo(arguments: dict[str, Any], shared: dict[str, Any]) -> Any:
    # Loaded here: with `model_init_kwargs`, ORPOTrainer would place the model by `device_map`.
    options = arguments.pop("model_init_kwargs")
    model = AutoModelForCausalLM.from_pretrained(shared.pop("model"), **options)
    return CountingORPO(args=ORPOConfig(**arguments, max_length=CONTEXT), model=model, **shared)


def _grpo(arguments: dict[str, Any], shared: dict[str, Any]) -> Any:
    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [letters(completion[0]["content"], None) for completion in completions]

    options = {"num_generations": GROUP, "max_completion_length": COMPLETION_TOKENS, "shuffle_dataset": False}
    return CountingGRPO(args=GRPOConfig(**arguments, **options), reward_funcs=reward, **shared)


MAKERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "sft": _sft,
    "dpo": _dpo,
    "orpo": _orpo,
    "grpo": _grpo,
}


def main(folder: Folder, workload: Workload, setting: Setting, result: Path) -> None:
    torch.set_num_threads(1)
    if setting.precision == "medium":
        torch.set_float32_matmul_precision("medium")
    disable_progress_bars()
    logging.disable_progress_bar()
    meter = Meter(result)
    trainer, passes = trainer_of(workload, setting, folder)
    trainer.add_callback(MeterCallback(meter, trainer, 1 if workload.method == "sft" else passes))
    trainer.train()
    meter.write()


if __name__ == "__main__":
    root, workload_name, setting_name, path = sys.argv[1:]
    main(Folder(Path(root)), *find(workload_name, setting_name), Path(path))
