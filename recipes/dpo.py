"""DPO: prefer the chosen answer over the rejected one, measured against the weights the run started from.

The reference is whatever the run started from, a resumed run included; so the first step's loss is ln 2 for any model.
"""

from dataclasses import dataclass

from cookbook.evaluation import Evaluation
from cookbook.run import Run

DATA = "preferences"  # what the losses of this recipe read


@dataclass
class Config:
    """``conf/recipe/dpo.yaml`` says what each field means."""

    name: str = "dpo"
    steps: int | None = None
    epochs: int = 1
    batch_size: int = 32


def train(run: Run) -> None:
    cfg: Config = run.cfg
    # The reference never changes, so its logprobs of the held-out pairs are computed once.
    held_out = run.with_reference([datum for pair in run.preferences("eval") for datum in pair])
    pairs = run.preferences("train")
    batches = run.batches(pairs, cfg.batch_size, cfg.epochs)
    steps = len(batches) if cfg.steps is None else cfg.steps
    if steps > batches.per_epoch:  # pairs come again
        run.remember_reference([datum for pair in pairs for datum in pair])

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_loss(held_out) | run.evaluate_answers(held_out[::2], step)

    for step in run.steps(steps, evaluate):
        # 1. The pairs of this step, chosen and rejected side by side.
        data = [datum for pair in batches[step.index] for datum in pair]
        # 2. Reference logprobs are added by the way; then the gradient and the update, both under way at once.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait, and write the step down.
        step.log(gradient, update)
