"""Groups of completions sampled from one prompt each, and the datums they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cookbook.advantages import groups_without_spread
from cookbook.data import RenderedPrompt, Renderer
from cookbook.errors import ConfigError
from cookbook.protocols import Sampler
from cookbook.types import Datum, ModelInput, Sample, SamplingParams


@dataclass
class RolloutConfig:
    """How completions are sampled. ``conf/rollout/default.yaml`` says what each field means."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] | None = None
    log_samples: int = 8

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature must be > 0, got {self.temperature}: a group of greedy completions is all alike"
            )
        self.sampling([])

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        stop: list[str | int] = [*stop_token_ids, *(self.stop or [])]
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=stop
        )


@dataclass(frozen=True)
class Group:
    """A prompt, ``G`` completions of it as tokens and as text, and (once judged) their rewards.

    ``temperature`` is what their logits were divided by when they were drawn.
    """

    prompt: RenderedPrompt
    samples: list[Sample]
    texts: list[str]
    rewards: list[float]
    temperature: float = 1.0


def sample_groups(
    sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, config: RolloutConfig, renderer: Renderer, seed: int
) -> list[Group]:
    """``group_size`` completions of every prompt. Every prompt is submitted before any result is waited for.

    The draws are a function of ``seed``, the prompt's place and the sample's place alone.
    """
    params = config.sampling(renderer.stop_token_ids)
    futures = [
        sampler.sample(ModelInput.from_ints(prompt.tokens), group_size, replace(params, seed=seed * 100_003 + place))
        for place, prompt in enumerate(prompts)
    ]
    groups = []
    for prompt, future in zip(prompts, futures, strict=True):
        samples = future.result().sequences
        texts = [renderer.text(sample.tokens) for sample in samples]
        groups.append(Group(prompt, samples, texts, [], config.temperature))
    return groups


def datum(prompt: Sequence[int], sample: Sample, advantage: float, temperature: float = 1.0) -> Datum:
    """One completion, ready for a policy-gradient loss: arrays of length ``len(prompt) + len(completion) - 1``.

    ``weights`` is 0 on the prompt; ``sampling_logprobs`` has no meaning there and no influence. A ``temperature`` other than 1
    goes with them as a scalar: the policy that is trained is the one that was sampled, so its logits are divided alike.
    """
    tokens = [*prompt, *sample.tokens]
    start = len(prompt) - 1  # the position that predicts the first completion token
    weights = np.zeros(len(tokens) - 1, dtype=np.float32)
    weights[start:] = 1.0
    logprobs = np.zeros(len(tokens) - 1)
    logprobs[start:] = sample.logprobs
    inputs = {
        "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
        "weights": weights,
        "advantages": weights * np.float64(advantage),
        "sampling_logprobs": logprobs,
    }
    if temperature != 1.0:
        inputs["temperature"] = np.asarray(temperature, dtype=np.float64)
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def datums(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Datum]:
    """The datums of every group whose completions differ in reward; the others could teach nothing."""
    return [
        datum(group.prompt.tokens, sample, advantage, group.temperature)
        for group, row in zip(groups, advantages, strict=True)
        if any(row)
        for sample, advantage in zip(group.samples, row, strict=True)
    ]


def metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What a step's rollouts were like.

    ``reward/std`` is over all completions; ``reward/group_std`` the mean over groups of the standard deviation within one
    (divisor G - 1, as z-scored advantages have it), which TRL logs as ``reward_std``. ``reward/frac_groups_without_spread``
    are the groups that teach nothing. Lengths are in tokens; ``rollout/truncated_frac`` hit ``max_tokens``.
    """
    rewards = np.array([group.rewards for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/group_std": float(rewards.std(axis=1, ddof=1).mean()) if rewards.shape[1] > 1 else 0.0,
        "reward/frac_groups_without_spread": float(groups_without_spread(rewards).mean()),
        "rollout/completion_tokens_mean": float(lengths.mean()),
        "rollout/completion_tokens_max": float(lengths.max()),
        "rollout/truncated_frac": float(np.mean([sample.stop_reason == "length" for sample in samples])),
        "rollout/tokens": float(lengths.sum()),
    }


def log_rows(groups: Sequence[Group], count: int) -> list[Mapping[str, Any]]:
    """The first ``count`` rollouts, one of each group in turn, as ``samples.jsonl`` keeps them."""
    order = [(group, i) for i in range(max(len(group.samples) for group in groups)) for group in groups]
    return [
        {
            "row": group.prompt.row.where,
            "prompt": group.prompt.question,
            "completion": group.texts[i],
            "reward": group.rewards[i],
            "stop_reason": group.samples[i].stop_reason,
        }
        for group, i in order[:count]
    ]
