"""KTO: raise answers that are labelled as desirable, and lower the others, without pairs.

A row is one answer with a label. For an answer y to the prompt x, s is the difference between the log-probabilities under the
model p and under the reference f; S is the logistic function:

    s(y) = log p(y | x) - log f(y | x)                                 (sums over the tokens of the answer)
    z    = max(0, mean over the step of s(y'))                         (y' answers another prompt; z has no gradient)
    L    = mean over rows of  desirable_weight   (1 - S(beta (s(y) - z)))    if y is desirable
                              undesirable_weight (1 - S(beta (z - s(y))))    if it is not

z estimates how far the model has moved from the reference for any answer. y' of a row is the answer of the row before
it in the step; if neighbors share their prompt, as in pairs, the answers of a prompt change to another prompt. The reference
is the model at the start of the run. L is a mean already: ``optim_step`` divides its gradient by nothing. Options and metrics:
``cookbook/losses/kto.py``.

Source: Ethayarajh et al., KTO (arXiv:2402.01306), eq. 7 and 8.
"""

from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.run import Run
from cookbook.sampling.evaluation import Evaluation

DATA = "labels"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/kto.yaml`` documents each field."""

    name: str = "kto"
    steps: int | None = None
    epochs: int = 1
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ConfigError(f"recipe.batch_size must be at least 2, got {self.batch_size}; z needs the answer of another row")


def train(run: Run) -> None:
    cfg: Config = run.cfg
    rows = run.labelled("eval")
    # The reference is constant, so its logprobs of the held-out answers are computed once.
    held_out = run.with_reference([*rows, *run.mismatched(rows)])
    desirable = [datum for datum in rows if datum.loss_fn_inputs["labels"].array[0] > 0]
    batches = run.batches(run.labelled("train"), cfg.batch_size, cfg.epochs)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_loss(held_out) | run.evaluate_answers(desirable, step)

    for step in run.steps(len(batches) if cfg.steps is None else cfg.steps, evaluate):
        # 1. Take the rows of this step, and the answers that do not belong to their prompts, for z.
        data = batches[step.index]
        data = [*data, *run.mismatched(data)]
        # 2. Add reference logprobs, and queue the backward pass and the optimizer step. Neither call blocks.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait for both results, and log the step.
        step.log(gradient, update)
