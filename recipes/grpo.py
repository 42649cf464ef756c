"""GRPO: sample a group of answers per prompt, reward each answer, reinforce the answers that beat their group.

Group relative policy optimization has no value model: the advantage A_i of answer i, with reward R_i, is relative to the G
answers to its prompt. The loss sums over all tokens t; the logprobs are p (trained model), q (sampler), f (reference model):

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)                      (std: divisor G - 1; recipe.advantage has other kinds)
    r_t = exp(p_t - q_t)    KL_t = exp(f_t - p_t) - (f_t - p_t) - 1                          (k3, estimates KL(p, f))
    L   = sum_t [ max(-r_t A_i, -clip(r_t, 1 - clip_low, 1 + clip_high) A_i) + kl_beta KL_t ]

``optim_step`` divides by N, the tokens of the step that have a gradient (``loss.normalization=num_loss_tokens``), then clips.
All tokens weigh the same in long and short answers, and in any micro-batch. With ``recipe.updates`` above 1, r_t is measured
from the logprobs before the first update with the same rollouts (``old_logprobs``). Options and metrics:
``cookbook/losses/grpo.py``.
Source: Shao et al., DeepSeekMath (arXiv:2402.03300), eq. 3 and 4; sum over tokens: Yu et al., DAPO (arXiv:2503.14476).
"""

from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.run import Run
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import Kind
from cookbook.sampling.evaluation import Evaluation

DATA = "rollouts"  # the kind of data that this recipe trains on


@dataclass
class Config:
    """``conf/recipe/grpo.yaml`` documents each field."""

    name: str = "grpo"
    steps: int = 200
    prompts_per_step: int = 16
    group_size: int = 8
    advantage: Kind = "zscore"
    updates: int = 1

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ConfigError(f"recipe.updates: must be at least 1, got {self.updates}; 1 makes one optimizer step per batch")
        if self.group_size < 2:
            raise ConfigError(f"recipe.group_size must be at least 2, got {self.group_size}: a group of one has no spread")


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = run.prompts("eval")
    batches = run.prompt_batches(run.prompts("train"), cfg.prompts_per_step)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_rewards(held_out, step)

    for step in run.steps(cfg.steps, evaluate):
        # With updates > 1, several steps train one batch of rollouts, a part each. Only the first of them samples.
        if not run.minibatches:
            # 1. Load the newest weights into the deployment, then sample and reward group_size completions of every prompt.
            sampler = run.sync(step.index)
            groups = run.sample_groups(sampler, batches[step.index // cfg.updates], cfg.group_size, step)
            # 2. Compute A_i. Groups whose rewards are all equal have no gradient and are left out.
            advantages = rollouts.advantages(groups, cfg.advantage, cfg.group_size)
            run.split(rollouts.datums(groups, advantages), cfg.updates)
        # 3. Queue the backward pass, with reference logprobs if kl_beta > 0, and the optimizer step. step.log waits for both.
        gradient = run.forward_backward(run.minibatches.pop(0))
        update = run.optim_step(step)
        step.log(gradient, update)
