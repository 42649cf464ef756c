"""SFT: raise the probability of the answers in the data.

Every step takes ``batch_size`` rows. The loss is the mean negative log-probability of the trained tokens of all of them, so a
long answer weighs more than a short one, and the update does not depend on how the batch is cut into micro-batches.
"""

from dataclasses import dataclass

from cookbook.evaluation import Evaluation
from cookbook.run import Run

DATA = "conversations"  # what the losses of this recipe read


@dataclass
class Config:
    """``conf/recipe/sft.yaml`` says what each field means."""

    name: str = "sft"
    steps: int | None = None
    epochs: int = 3
    batch_size: int = 32


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = run.conversations("eval")
    batches = run.batches(run.conversations("train"), cfg.batch_size, cfg.epochs)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_loss(held_out) | run.evaluate_answers(held_out, step)

    for step in run.steps(len(batches) if cfg.steps is None else cfg.steps, evaluate):
        # 1. The rows of this step: batches[i] depends on the seed and i alone.
        data = batches[step.index]
        # 2. Both calls return at once; the update waits for the gradient by itself.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait, and write the step down.
        step.log(gradient, update)
