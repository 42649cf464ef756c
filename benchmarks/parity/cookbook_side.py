"""Cookbook's half: the engine for the one-batch cases, the command itself for the runs.

    .venv/bin/python benchmarks/parity/cookbook_side.py FOLDER

Every one-batch case is computed twice, the second time a row at a time: how far the two are apart is what float32 makes of
another order of summation, and what a difference to TRL has to be seen against.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from cases import BATCH_ROWS, CASES, MAX_COMPLETION, RUN_OPTIM, RUNS, Case, Folder, Run
from safetensors.torch import load_file, save_file
from torch import Tensor

import cookbook
from cookbook.data import DataConfig, Renderer, conversation_datums, load_rows, preference_datums
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.losses import GRPO, Loss, LossBatch, get_loss
from cookbook.losses.base import Metrics, kept, weights_to_mean
from cookbook.losses.policy import RolloutArrays, bounded_exp, k3
from cookbook.types import Datum, datum_from_tokens_weights

ONE_ROW_AT_A_TIME = EngineOptions(micro_batch_tokens=1, packing="padded")


@dataclass(frozen=True)
class BiasCorrectedKL(GRPO):
    """GRPO with TRL's KL: k3 times the ratio, whose expected gradient is that of KL(policy || reference) itself.

    The custom loss that a user who wants it would write.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556, section 3.1.
    """

    def terms(self, batch: LossBatch, tokens: RolloutArrays) -> tuple[Tensor, Metrics]:
        terms, metrics = super().terms(batch, tokens)  # has the k3 itself
        reference = kept(batch.read("reference_logprobs"), tokens.weights)
        ratio = bounded_exp(tokens.logprobs - tokens.sampling_logprobs)
        return terms + self.kl_beta * (ratio - 1) * k3(reference - tokens.logprobs) / self.length_divisor, metrics


def objective(case: Case) -> Loss:
    """Our loss for what the case asks of TRL."""
    asked = case.trl
    if case.method == "sft":
        return get_loss({"nll": "cross_entropy", "dft": "dft"}[asked["loss_type"]])
    if case.method == "dpo":
        smoothing = asked.get("label_smoothing", 0.0)
        return get_loss("dpo", {"variant": asked["loss_type"][0], "beta": asked["beta"], "label_smoothing": smoothing})
    kind = asked["loss_type"]
    if kind == "cispo":
        return get_loss("cispo", {"clip_high_threshold": asked["epsilon_high"], "normalization": None})
    options = {
        "clip_low": asked["epsilon"],
        "clip_high": asked["epsilon_high"],
        "clip_max": asked.get("delta"),
        "kl_beta": asked["beta"],
        "ratio": asked.get("importance_sampling_level", "token"),
    }
    if kind == "dr_grpo":  # as conf/loss/dr_grpo.yaml
        options |= {"length_divisor": float(MAX_COMPLETION), "normalization": "num_sequences"}
    elif not _as_shipped(case):
        options |= {"normalization": None}  # the weights of the datums make the mean
    return BiasCorrectedKL(**options) if case.ours.get("kl") == "bias_corrected" else GRPO(**options)


def batch_of(case: Case, folder: Folder, model: LanguageModel, reference: Engine) -> Sequence[Datum]:
    if case.method == "grpo":
        return _weighted(case, _rollouts(folder))
    train_on = case.ours.get("train_on", "assistant")
    config = DataConfig(path=str(folder.rows(case)), limit=BATCH_ROWS, train_on=train_on)
    rows, renderer = load_rows(config, "train", 0), Renderer(model.tokenizer, model.max_length)
    if case.method == "sft":
        return conversation_datums(rows, renderer, config)
    data = preference_datums(rows, renderer, config)
    if case.ours.get("mask") == "past the turn":  # from the answer's first token to the end of the sequence
        data = [one.with_inputs(weights=np.maximum.accumulate(one.loss_fn_inputs["weights"].array)) for one in data]
    outputs = reference.forward(data).loss_fn_outputs
    return [one.with_inputs(reference_logprobs=out["logprobs"]) for one, out in zip(data, outputs, strict=True)]


def _rollouts(folder: Folder) -> list[Datum]:
    data = []
    for row in json.loads(folder.rollouts.read_text(encoding="utf-8")):
        before, length = len(row["prompt"]), len(row["completion"])
        datum = datum_from_tokens_weights(row["prompt"] + row["completion"], [0.0] * before + [1.0] * length)
        values = {"advantages": [row["advantage"]] * length}
        values |= {"sampling_logprobs": row["old"], "reference_logprobs": row["reference"]}
        blank = [0.0] * (before - 1)  # nothing was sampled there; the weights are 0
        data.append(datum.with_inputs(**{key: np.array(blank + v, dtype=np.float32) for key, v in values.items()}))
    return data


def _as_shipped(case: Case) -> bool:
    """Whether the division is that of cookbook's presets: by the tokens that have a gradient."""
    return case.ours.get("divide") == "shipped"


def _weighted(case: Case, data: list[Datum]) -> Sequence[Datum]:
    """TRL's means as weights: of each sequence's tokens, or of each micro-batch's."""
    kind = case.trl["loss_type"]
    if _as_shipped(case) or kind == "dr_grpo":
        return data
    size = 1 if kind == "grpo" else len(data) // case.micro_batches
    return _mean_of_means([data[start : start + size] for start in range(0, len(data), size)])


def _mean_of_means(parts: Sequence[Sequence[Datum]]) -> list[Datum]:
    means = [datum for part in parts for datum in weights_to_mean(part)]
    return [datum.with_inputs(weights=datum.loss_fn_inputs["weights"].array / len(parts)) for datum in means]


def one_batch(case: Case, folder: Folder, engine: Engine, reference: Engine, side: str) -> tuple[float, float]:
    """The case's loss and its :func:`scale`, both divided as the gradient; the gradient goes to the folder."""
    loss = objective(case)
    data = loss.prepare(batch_of(case, folder, engine.model, reference))
    output = engine.forward_backward(data, loss)
    divisor = engine.counts.divisor(loss.normalization)
    gradients = {name: p.grad / divisor for name, p in engine.model.trainable() if p.grad is not None}
    save_file(gradients, folder.tensors(side, case.name))
    engine.discard_gradient()
    logprobs = [found["logprobs"].to_torch().clone() for found in output.loss_fn_outputs]
    return output.metrics["loss"] / divisor, scale(loss, data, logprobs) / divisor


def scale(loss: Loss, data: Sequence[Datum], logprobs: list[Tensor]) -> float:
    """``sum |dL/dlogp * logp|``: what the loss moves by, per unit of relative error in every logprob."""
    value, _ = loss(data, [row.requires_grad_() for row in logprobs])
    slopes = torch.autograd.grad(value, logprobs)
    return sum(float((slope * row.detach()).abs().sum()) for slope, row in zip(slopes, logprobs, strict=True))


def several_steps(run: Run, folder: Folder) -> list[float]:
    """The run's losses, by the command; its final weights go to the folder."""
    out = folder.side("cookbook") / f"run-{run.method}-{run.weight_decay:g}"
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "model.name": folder.reference,
        "data": "jsonl",
        "data.path": folder.rows(run),
        "data.shuffle": "false",
        "recipe.batch_size": run.batch_rows,
        "recipe.steps": run.steps,
        "schedule": "constant",
        "schedule.warmup_ratio": "null",
        "optim.lr": run.lr,
        "optim.weight_decay": run.weight_decay,
        **{f"optim.{name}": value for name, value in RUN_OPTIM.items()},
        "backend.device": "cpu",
        "out": out,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "cookbook", "train", f"recipe={run.method}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    weights = out / "checkpoints" / f"step-{run.steps:06d}" / "model.safetensors"
    save_file(load_file(weights), folder.tensors("cookbook", run.name))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main(folder: Folder) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    reference = Engine(load(ModelConfig(str(folder.reference)), cpu, 0), EngineOptions())
    versions = {"cookbook": cookbook.__version__, **{name: version(name) for name in ("torch", "transformers")}}
    for side, options in (("cookbook", EngineOptions()), ("cookbook-rearranged", ONE_ROW_AT_A_TIME)):
        engine = Engine(load(ModelConfig(str(folder.policy)), cpu, 0), options)
        found = {case.name: one_batch(case, folder, engine, reference, side) for case in CASES}
        values = {name: value for name, (value, _) in found.items()}
        folder.write(side, versions=versions, values=values, scales={name: scale for name, (_, scale) in found.items()})
    folder.write("cookbook", runs={run.name: several_steps(run, folder) for run in RUNS})


if __name__ == "__main__":
    main(Folder(Path(sys.argv[1])))
