"""DPO: prefer the chosen answer to the rejected one, relative to the weights the run started from.

For an answer y to the prompt x, s is the difference between the log-probabilities under the model p and under the reference f.
The loss of a step is a mean over its pairs of chosen and rejected answers; S is the logistic function:

    s(y) = log p(y | x) - log f(y | x)                                 (sums over the tokens of the answer)
    L    = mean over pairs of -log S(beta (s(chosen) - s(rejected)))

The reference is the model at the start of the run, also after a resume, so L is ln 2 at the first step for every model. L is
a mean already: ``optim_step`` divides its gradient by nothing. Variants (IPO, hinge, SimPO, ...): ``cookbook/losses/dpo.py``.

Source: Rafailov et al., Direct Preference Optimization (arXiv:2305.18290), eq. 7.
"""

from dataclasses import dataclass

from cookbook.run import Run
from cookbook.sampling.evaluation import Evaluation

DATA = "preferences"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/dpo.yaml`` documents each field."""

    name: str = "dpo"
    steps: int | None = None
    epochs: int = 1
    batch_size: int = 32


def train(run: Run) -> None:
    cfg: Config = run.cfg
    # The reference is constant, so its logprobs of the held-out pairs are computed once.
    held_out = run.with_reference([datum for pair in run.preferences("eval") for datum in pair])
    pairs = run.preferences("train")
    batches = run.batches(pairs, cfg.batch_size, cfg.epochs)
    steps = len(batches) if cfg.steps is None else cfg.steps
    if steps > batches.per_epoch:
        # Later epochs see the same pairs: keep their reference logprobs.
        run.remember_reference([datum for pair in pairs for datum in pair])

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_loss(held_out) | run.evaluate_answers(held_out[::2], step)

    for step in run.steps(steps, evaluate):
        # 1. Take the pairs of this step; each chosen answer is followed by its rejected one.
        data = [datum for pair in batches[step.index] for datum in pair]
        # 2. Add reference logprobs, and queue the backward pass and the optimizer step. Neither call blocks.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 3. Wait for both results, and log the step.
        step.log(gradient, update)
