"""Rollouts per CPU second with an environment in the same process, on one thread: ``python benchmarks/rollouts.py``.

A step's rollouts of the shipped tiny model, with rewards, and without the training step: 32 prompts, 16 episodes each. After a
first step, which warms up, each step is timed alone. The table has the median over the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

from cookbook.backends.local import LocalConfig, LocalTrainer
from cookbook.data import DataConfig, Renderer
from cookbook.engine.model import ModelConfig
from cookbook.sampling import rollouts
from cookbook.sampling.environments import Arithmetic, EnvironmentConfig, EnvironmentRunner, numbered_rows, prompts
from cookbook.sampling.environments.ready import AGAIN
from cookbook.utils.paths import packaged

PROMPTS, GROUP, MAX_TOKENS = 32, 16, 16


class AllTurns:
    """A sum whose every answer is wrong, so that an episode has as many turns as ``max_turns`` allows."""

    def reset(self, index: int) -> str:
        return f"{index % 40}+{index % 9}="

    def step(self, text: str) -> tuple[str, float]:
        return AGAIN, float(len(text))


class Longest(EnvironmentConfig):
    """Configuration of :class:`AllTurns`."""

    def make(self) -> object:
        return AllTurns()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with contextlib.closing(LocalTrainer(ModelConfig(str(packaged("data") / "tiny")), LocalConfig())) as trainer:
        print(f"  {'environment':40s} {'turns':>6s} {'tokens':>7s} {'rollouts per CPU s':>19s}")
        configs = {"env=arithmetic": Arithmetic()}
        configs |= {
            f"{turns} turns in each episode": Longest(max_turns=turns, workers=0, timeout_s=None) for turns in (1, 2, 4)
        }
        for name, config in configs.items():
            print(f"  {name:40s} {measured(trainer, config, steps)}")


def measured(trainer: LocalTrainer, config: EnvironmentConfig, steps: int) -> str:
    """Return mean turns, mean sampled tokens, and the median of rollouts per CPU second, as a row of the table."""
    renderer = Renderer(trainer.tokenizer, trainer.max_length)
    rows = prompts(config, numbered_rows(config, "train", 0, None), renderer, DataConfig())
    rates = []
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        for step in range(steps + 1):
            started = time.process_time()
            found = rollouts.sample_groups(
                trainer.live_sampler(0).result(),
                rows[step * PROMPTS : (step + 1) * PROMPTS],
                GROUP,
                rollouts.RolloutConfig(max_tokens=MAX_TOKENS),
                renderer,
                seed=step,
                environment=environment,
            )
            rates.append(PROMPTS * GROUP / (time.process_time() - started))
    values = found.metrics()
    turns, tokens = values["rollout/turns_mean"], values["rollout/completion_tokens_mean"]
    return f"{turns:6.2f} {tokens:7.1f} {statistics.median(rates[1:]):19,.0f}"


if __name__ == "__main__":
    main()
