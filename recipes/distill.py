"""On-policy distillation: sample answers from the model, and let a teacher grade every token of them.

The student p samples answers. The advantage of token t is the teacher's logprob f minus the logprob q of the weights that
sampled the token. The mean advantage is an estimate of the reverse KL divergence KL(q, f), with the sign changed; the loss is
the policy gradient of that divergence, a sum over all sampled tokens:

    A_t = f_t - q_t                                                     (logprobs of the sampled token, at temperature 1)
    L   = sum_t -exp(p_t - q_t) A_t

``optim_step`` divides by N, the tokens of the step that have a gradient (``loss.normalization=num_loss_tokens``). A reward is
not needed; with one, the held-out prompts are evaluated. Options and metrics: ``cookbook/losses/importance_sampling.py``.
Source: Agarwal et al., On-Policy Distillation of Language Models (arXiv:2306.13649); Lu, On-Policy Distillation (2025).
"""

from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.run import Run
from cookbook.sampling import rollouts
from cookbook.sampling.evaluation import Evaluation
from cookbook.sampling.teacher import reverse_kl

DATA = "rollouts"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/distill.yaml`` documents each field."""

    name: str = "distill"
    teacher: str | None = None
    teacher_url: str | None = None
    steps: int = 200
    prompts_per_step: int = 32
    group_size: int = 4

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"recipe.group_size must be at least 1, got {self.group_size}")


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = run.prompts("eval") if run.has_reward else []
    batches = run.prompt_batches(run.prompts("train"), cfg.prompts_per_step)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_rewards(held_out, step)

    for step in run.steps(cfg.steps, evaluate):
        # 1. Load the newest weights into the deployment, then sample group_size completions of every prompt.
        sampler = run.sync(step.index)
        groups = run.sample_groups(sampler, batches[step.index], cfg.group_size, step)
        # 2. Add the teacher's logprobs, the reference of this recipe, and compute A_t of every sampled token.
        data, divergence = reverse_kl(run.with_reference(rollouts.datums(groups)))
        # 3. Queue the backward pass and the optimizer step. step.log waits for both.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        step.log(gradient, update, divergence)
