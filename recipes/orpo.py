"""ORPO: learn the chosen answer and push its odds above the rejected one's, with no reference model."""

from dataclasses import dataclass

from cookbook.evaluation import Evaluation
from cookbook.run import Run

DATA = "preferences"  # what the losses of this recipe read


@dataclass
class Config:
    """``conf/recipe/orpo.yaml`` says what each field means."""

    name: str = "orpo"
    steps: int | None = None
    epochs: int = 1
    batch_size: int = 32


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = [datum for pair in run.preferences("eval") for datum in pair]
    batches = run.batches(run.preferences("train"), cfg.batch_size, cfg.epochs)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_loss(held_out) | run.evaluate_answers(held_out[::2], step)

    for step in run.steps(len(batches) if cfg.steps is None else cfg.steps, evaluate):
        # 1. The pairs of this step, chosen and rejected side by side.
        data = [datum for pair in batches[step.index] for datum in pair]
        # 2. Both calls return at once; the update waits for the gradient by itself.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait, and write the step down.
        step.log(gradient, update)
