"""Programs of a trainer, for one process and for the first rank of several: neither knows how many ranks there are."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tiny
import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.engine.engine import Engine
from cookbook.engine.model import ModelConfig
from cookbook.engine.parallel import led
from cookbook.errors import CookbookError
from cookbook.types import AdamParams, Datum

ADAM = AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)


def made(model: str, folder: Path, **options: Any) -> LocalTrainer:
    return LocalTrainer(ModelConfig(model, dtype="float64", **options), LocalConfig(micro_batch_tokens=40), folder=folder)


def closure(weight: float) -> Callable[..., Any]:
    """A loss that no other process can import."""

    def loss(data: Sequence[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -weight * torch.cat(list(logprobs)).mean(), {}

    return loss


def steps(trainer: LocalTrainer, count: int) -> list[float]:
    """Train ``count`` steps with two losses each; return the losses and the norms."""
    found = []
    for _ in range(count):
        outputs = [
            trainer.forward_backward(tiny.datums(7), "cross_entropy"),
            trainer.forward_backward_custom(tiny.datums(3, seed=5), closure(3.0)),
        ]
        step = trainer.optim_step(ADAM)
        found += [output.result().metrics["loss"] for output in outputs] + [step.result().metrics["optim/grad_norm"]]
    return found


def logprobs(trainer: LocalTrainer) -> list[float]:
    output = trainer.forward(tiny.datums(5, seed=2), "cross_entropy").result()
    return np.concatenate([row["logprobs"].array for row in output.loss_fn_outputs]).tolist()


def failure(call: Callable[[], Any]) -> str:
    """The one line of the error of a call."""
    try:
        call()
    except CookbookError as error:
        return str(error)
    return "no error"


# ---- programs --------------------------------------------------------------------------------------------------------


def checkpoints(model: str, folder: Path) -> dict[str, Any]:
    """Train, save in every way while training continues, and load again. A second trainer in the process changes nothing."""
    trainer = made(model, folder)
    other = made(model, folder / "other")
    found: dict[str, Any] = {"digests": trainer.digests()}
    trainer.save_weights_for_sampler_ext("base").result()
    reference = trainer.reference()
    found["losses"] = steps(trainer, 2)
    trainer.save_weights_for_sampler_ext("delta", checkpoint_type="delta").result()
    aside = trainer.save_state("aside", asynchronous=True)
    found["losses"] += steps(trainer, 1)
    aside.result()
    trainer.save_state("three").result()
    found["later"] = steps(trainer, 1)
    found["reference"] = np.concatenate(reference.logprobs(tiny.datums(5, seed=2)).result()).tolist()
    found["logprobs"] = logprobs(trainer)
    trainer.load_state(str(folder / "three")).result()
    found["again"] = steps(trainer, 1)
    trainer.close()
    other.close()
    return found


@led
def rescale(engine: Engine) -> None:
    """Change every weight to the same bits on any number of ranks, which a training step does not."""
    with torch.no_grad():
        for _, parameter in engine.model.trainable():
            engine.ranks.local(parameter).mul_(1.25)


def sampled_from(model: str, folder: Path) -> dict[str, Any]:
    """Save equal weights for sampling: bases, deltas of a base's files and of kept parts, and weights under an adapter."""
    for dtype in ("float64", "bfloat16"):
        trainer = made(model, folder / dtype)
        trainer.set_checkpoint_dtype(dtype)
        for name in ("base", "delta", "second", "other"):
            kind = {"base": "base", "other": "base"}.get(name, "delta")
            trainer.save_weights_for_sampler_ext(name, checkpoint_type=kind).result()
            rescale(trainer.engine)
        # The folder of the last checkpoint is gone.
        shutil.rmtree(folder / dtype / "other")
        gone = failure(trainer.save_weights_for_sampler_ext("none", checkpoint_type="delta").result)
        trainer.close()
    adapted = made(model, folder / "adapted", lora_rank=2)
    adapted.save_adapted_weights("under").result()
    adapted.close()
    return {"gone": gone}


def adapter(model: str, folder: Path) -> dict[str, Any]:
    """Train an adapter; its reference is the model without the adapter."""
    trainer = made(model, folder, lora_rank=4)
    reference = trainer.reference()
    found: dict[str, Any] = {"losses": steps(trainer, 2), "digests": trainer.digests()}
    found["reference"] = np.concatenate(reference.logprobs(tiny.datums(5, seed=2)).result()).tolist()
    trainer.save_weights_for_sampler_ext("adapter").result()
    trainer.save_state("two", asynchronous=True).result()
    trainer.close()
    return found


def resume(model: str, folder: Path) -> dict[str, Any]:
    """Continue from the checkpoint of another number of ranks."""
    trainer = made(model, folder)
    trainer.load_state(str(folder / "three")).result()
    found = {"again": steps(trainer, 1), "step": trainer.step}
    trainer.close()
    return found


def errors(model: str, folder: Path) -> dict[str, Any]:
    """Fail in every way that a caller can cause, and train on."""
    trainer = made(model, folder)
    nan = tiny.datums(4)
    nan[2] = nan[2].with_inputs(weights=np.full(nan[2].model_input.length, 1e308))
    unknown = [*tiny.datums(2), tiny.datums(1)[0].with_inputs(target_tokens=np.full(tiny.datums(1)[0].model_input.length, 999))]
    found = {
        "not finite": failure(lambda: trainer.forward_backward(nan, "cross_entropy").result()),
        "bad datum": failure(lambda: trainer.forward_backward(unknown, "cross_entropy").result()),
        "custom": failure(lambda: trainer.forward_backward_custom(tiny.datums(4), closure(float("nan"))).result()),
        "checkpoint": failure(lambda: trainer.load_state("nowhere").result()),
        "sampling": failure(lambda: trainer.live_sampler(0).result()),
        "optimizer": failure(lambda: LocalConfig(optimizer="adafactor").make_engine(ModelConfig(model), 0)),
    }
    trainer.mark_errors_read()
    # Longer than the time-out of the group's collective operations, where the test sets one.
    time.sleep(float(os.environ.get("IDLE_S", "0")))
    found["losses"] = steps(trainer, 1)
    trainer.close()
    return found


def out_of_memory(model: str, folder: Path) -> dict[str, Any]:
    """Continue training while the second rank, if it exists, gets no more memory; then without a limit."""
    trainer = LocalTrainer(ModelConfig(model, dtype="float64"), LocalConfig(), folder=folder)
    found = {}
    rank = folder / "pid-1"
    if rank.exists():
        other = psutil.Process(int(rank.read_text()))
        limits = other.rlimit(psutil.RLIMIT_AS)
        other.rlimit(psutil.RLIMIT_AS, (other.memory_info().vms + (8 << 20), limits[1]))
        found["refused"] = failure(lambda: trainer.forward_backward(tiny.datums(400, longest=80), "cross_entropy").result())
        other.rlimit(psutil.RLIMIT_AS, limits)
        trainer.mark_errors_read()
    found["losses"] = steps(trainer, 2)
    trainer.close()
    return found


def killed(model: str, folder: Path) -> dict[str, Any]:
    """Train until a rank is killed."""
    trainer = made(model, folder)
    (folder / "started").touch()
    for _ in range(100_000):
        steps(trainer, 1)
    return {}


PROGRAMS = {
    program.__name__: program for program in (checkpoints, sampled_from, adapter, resume, errors, out_of_memory, killed)
}
