"""SFT: raise the probability of the answers in the data.

The loss of a step is the mean negative log-probability of the trained tokens of all its rows:

    L = -sum_t w_t log p(y_t | y_<t) / sum_t w_t          w_t = 1 for a token of an answer, 0 for a token of its prompt

Both sums run over the ``batch_size`` rows of the step, so a long answer weighs more than a short one, and the loss does not
depend on how the step is split into micro-batches. L is a mean already: ``optim_step`` divides its gradient by nothing.
"""

from dataclasses import dataclass

from cookbook.run import Run
from cookbook.sampling.evaluation import Evaluation

DATA = "conversations"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/sft.yaml`` documents each field."""

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
        # 1. Take the rows of this step. batches[i] depends only on the seed and on i.
        data = batches[step.index]
        # 2. Queue the backward pass and the optimizer step. Neither call blocks.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait for both results, and log the step.
        step.log(gradient, update)
