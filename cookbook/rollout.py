"""Groups of completions sampled from one prompt each, and the datums they become."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cookbook import terminal
from cookbook.advantages import groups_without_spread
from cookbook.data import Refusals, RenderedPrompt, Renderer, RowDatum
from cookbook.errors import BadRowError, ConfigError
from cookbook.protocols import Sampler
from cookbook.resilience import Asker, Unanswered
from cookbook.rewards import Judge, Pending
from cookbook.types import Datum, ModelInput, Sample, SamplingParams

log = logging.getLogger("cookbook")


@dataclass
class RolloutConfig:
    """How completions are sampled. ``conf/rollout/default.yaml`` says what each field means."""

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] | None = None
    retries: int = 2
    max_consecutive_failures: int = 16
    log_samples: int = 8

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"rollout.retries must be at least 0, got {self.retries}")
        if self.max_consecutive_failures < 1:
            raise ConfigError(f"rollout.max_consecutive_failures must be at least 1, got {self.max_consecutive_failures}")
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature must be > 0, got {self.temperature}: a group of greedy completions is all alike"
            )
        self.sampling([])

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        stop: list[str | int] = [*stop_token_ids, *(self.stop or [])]
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=stop,
        )

    def asker(self) -> Asker:
        """What asks the samplers of one run."""
        return Asker(self.retries, self.max_consecutive_failures)


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


@dataclass(frozen=True)
class Rollouts:
    """What a step has sampled: a group of every prompt, but for those whose requests have failed.

    ``sampling_s``: seconds until the last completion was there; ``reward_s``: and from then until the last reward was.
    """

    groups: list[Group]
    unanswered: Unanswered
    sampling_s: float
    reward_s: float

    def metrics(self) -> dict[str, float]:
        """As :func:`metrics`; ``rollout/failed`` are the prompts left out, ``rollout/retries`` the requests made again."""
        found = metrics(self.groups)
        return {
            **found,
            "rollout/failed": float(len(self.unanswered.failed)),
            "rollout/retries": float(self.unanswered.num_retries),
            "time/sampled_tokens_per_s": found["rollout/tokens"] / self.sampling_s,
            "time/reward_s": self.reward_s,
        }


def sample_groups(
    sampler: Sampler,
    prompts: Sequence[RenderedPrompt],
    group_size: int,
    config: RolloutConfig,
    renderer: Renderer,
    seed: int,
    asker: Asker | None = None,
    judge: Judge | None = None,
    refusals: Refusals | None = None,
) -> Rollouts:
    """``group_size`` completions of every prompt. Every prompt is submitted before any result is waited for.

    The draws are a function of ``seed``, the prompt's place and the sample's place alone. With a ``judge``, the completions of
    a prompt are judged while others are still being sampled. A prompt whose row the reward finds at fault goes to
    ``refusals``, and its group is left out.

    Raises:
        BadRowError: there are no ``refusals``, ``data.on_bad_row`` fails, or no other prompt is left.
        RolloutError: as :meth:`Asker.ask <cookbook.resilience.Asker.ask>`; or a reward, which names its row.
    """
    params = config.sampling(renderer.stop_token_ids)
    requests = [
        functools.partial(
            sampler.sample, ModelInput.from_ints(prompt.tokens), group_size, replace(params, seed=seed * 100_003 + place)
        )
        for place, prompt in enumerate(prompts)
    ]
    groups: dict[int, Group] = {}
    pending: dict[int, list[Pending]] = {}

    def arrived(place: int, samples: list[Sample]) -> None:
        prompt = prompts[place]
        texts = [renderer.text(sample.tokens) for sample in samples]
        activity.count += 1
        groups[place] = Group(prompt, samples, texts, [], config.temperature)
        pending[place] = [judge.submit(text, prompt.row) for text in texts] if judge else []

    started = time.monotonic()
    with terminal.doing("sampling", total=len(prompts), noun="prompts") as activity:
        unanswered = (asker or config.asker()).ask(requests, arrived)
    sampled = time.monotonic()
    for place, error in unanswered.failed.items():
        log.info("%s: left out, its completions could not be sampled: %s", prompts[place].row.where, error)
    for place in sorted(groups):
        try:
            groups[place].rewards.extend(reward() for reward in pending[place])
        except BadRowError as error:
            if refusals is None or not refusals.skips_bad_rows or len(groups) == 1:
                raise
            refusals.add(prompts[place].row.where, "on_bad_row", str(error))
            del groups[place]
    in_order = [groups[place] for place in sorted(groups)]
    return Rollouts(in_order, unanswered, sampled - started, time.monotonic() - sampled)


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
        _of_row(datum(group.prompt.tokens, sample, advantage, group.temperature), group.prompt)
        for group, row in zip(groups, advantages, strict=True)
        if any(row)
        for sample, advantage in zip(group.samples, row, strict=True)
    ]


def _of_row(found: Datum, prompt: RenderedPrompt) -> RowDatum:
    return RowDatum(found.model_input, found.loss_fn_inputs, prompt.row.where, prompt.question)


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
