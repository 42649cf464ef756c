"""GRPO: sample a group of answers per prompt, reward each answer, reinforce the answers that beat their group.

Group relative policy optimization needs no value model. The advantage of answer i, with reward R_i, is relative to the
answers to the same prompt; the standard deviation has the divisor G - 1 (``recipe.advantage=centered`` omits it):

    A_i = (R_i - mean(R)) / (std(R) + 1e-6)

The loss is a sum over the tokens t of all answers. With logprobs p of the model in training, q of the sampler and f of the
reference model:

    ratio_t = exp(p_t - q_t)
    KL_t    = exp(f_t - p_t) - (f_t - p_t) - 1                                              (k3, estimates KL(p, f))
    L       = sum_t [ max(-ratio_t A_i, -clip(ratio_t, 1 - clip_low, 1 + clip_high) A_i) + kl_beta KL_t ]
    update  : the gradient of L / N, clipped                         (N: the tokens of the step that have a gradient)

``optim_step`` divides by N once (``loss.normalization=num_loss_tokens``), then clips. All tokens of a step weigh the same,
however long their answers are and however the step is split into micro-batches. Options and metrics:
``cookbook/losses/grpo.py``.

Source: Shao et al., DeepSeekMath (arXiv:2402.03300), eq. 3 and 4; sum over tokens: Yu et al., DAPO (arXiv:2503.14476).
"""

from dataclasses import dataclass

from cookbook.errors import ConfigError
from cookbook.run import Run
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import Kind, group_advantages
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

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"recipe.group_size must be at least 2, got {self.group_size}: a group of one has no spread")


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = run.prompts("eval")
    batches = run.prompt_batches(run.prompts("train"), cfg.prompts_per_step)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_rewards(held_out, step)

    for step in run.steps(cfg.steps, evaluate):
        # 1. Load the newest weights into the deployment.
        sampler = run.sync(step.index)
        # 2. Sample and reward group_size completions of every prompt.
        groups = run.sample_groups(sampler, batches[step.index], cfg.group_size, step)
        # 3. Compute A_i. Groups whose rewards are all equal have no gradient and are left out.
        advantages = group_advantages([group.rewards for group in groups], cfg.advantage)
        data = rollouts.datums(groups, advantages.tolist())
        # 4. Queue the backward pass, with reference logprobs if kl_beta > 0, and the optimizer step. Neither call blocks.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 5. Wait for both results, and log the step.
        step.log(gradient, update)
