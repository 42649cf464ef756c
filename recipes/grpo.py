"""GRPO: sample a group of answers per prompt, reward each, push up what beat its group.

The advantage of a completion is its reward against its own group's: no value model. The loss sums over tokens and
``optim_step`` divides by the tokens that carry gradient, so the step's size does not depend on how long completions are.

Source: Shao et al., DeepSeekMath (arXiv:2402.03300), section 4.1.
"""

from dataclasses import dataclass

from cookbook import rollout
from cookbook.advantages import Kind, group_advantages
from cookbook.errors import ConfigError
from cookbook.evaluation import Evaluation
from cookbook.run import Run

DATA = "rollouts"  # what the losses of this recipe read


@dataclass
class Config:
    """``conf/recipe/grpo.yaml`` says what each field means."""

    name: str = "grpo"
    steps: int = 200
    prompts_per_step: int = 16
    group_size: int = 8
    advantage: Kind = "zscore"

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"recipe.group_size must be at least 2, got {self.group_size}: a group is its own measure")


def train(run: Run) -> None:
    cfg: Config = run.cfg
    held_out = run.prompts("eval")
    batches = run.batches(run.prompts("train"), cfg.prompts_per_step)

    def evaluate(step: int) -> Evaluation:
        return run.evaluate_rewards(held_out, step)

    for step in run.steps(cfg.steps, evaluate):
        # 1. The deployment gets the newest weights.
        sampler = run.sync(step.index)
        # 2. A group of completions per prompt, each with its reward.
        groups = run.sample_groups(sampler, batches[step.index], cfg.group_size, step)
        # 3. What beat its group, and by how much. Groups whose rewards are all equal drop out.
        advantages = group_advantages([group.rewards for group in groups], cfg.advantage)
        data = rollout.datums(groups, advantages.tolist())
        # 4. Reference logprobs are added by the way; then the gradient and the update, both under way at once.
        gradient = run.forward_backward(data)
        update = run.optim_step(step)
        # 5. Wait, and write the step down.
        step.log(gradient, update)
