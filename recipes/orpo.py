"""ORPO: learn the chosen answer and raise its odds above those of the rejected one, without a reference model.

a is the mean log-probability of the tokens of an answer. The loss of a step is a mean over its pairs of chosen and rejected
answers; S is the logistic function:

    a(y)     = mean_t log p(y_t | x, y_<t)
    logit(a) = a - log(1 - exp(a))
    L        = mean over pairs of -a(chosen) - odds_weight log S(logit(a(chosen)) - logit(a(rejected)))

The first term is supervised fine-tuning on the chosen answer. L is a mean already: ``optim_step`` divides its gradient by
nothing.

Source: Hong et al., ORPO (arXiv:2403.07691), eq. 6 and 7.
"""

from dataclasses import dataclass

from cookbook.run import Run
from cookbook.sampling.evaluation import Evaluation

DATA = "preferences"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/orpo.yaml`` documents each field."""

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
        # 1. Take the pairs of this step; each chosen answer is followed by its rejected one.
        data = [datum for pair in batches[step.index] for datum in pair]
        # 2. Queue the backward pass and the optimizer step. Neither call blocks.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait for both results, and log the step.
        step.log(gradient, update)
