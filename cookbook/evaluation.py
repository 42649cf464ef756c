"""How good the policy is on rows it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cookbook.errors import ConfigError
from cookbook.protocols import Sampler
from cookbook.types import Datum, ModelInput, Sample, SamplingParams

CORRECT = 1.0  # a completion with at least this reward counts as correct


@dataclass
class EvalConfig:
    """When and on how much a run is evaluated. ``conf/eval/default.yaml`` says what each field means."""

    every: int | None = 20
    limit: int | None = 200
    max_tokens: int = 16

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"eval.every must be at least 1, got {self.every}; null evaluates before and after only")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"eval.limit must be at least 1, got {self.limit}; null takes all rows")


@dataclass(frozen=True)
class Example:
    """One greedy completion, for people to read."""

    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True)
class Evaluation:
    """Metrics named ``eval/...``, and a few completions. ``a | b`` joins two."""

    metrics: Mapping[str, float]
    examples: list[Example] = field(default_factory=list)

    def __or__(self, other: Evaluation) -> Evaluation:
        return Evaluation({**self.metrics, **other.metrics}, [*self.examples, *other.examples])


def greedy(sampler: Sampler, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sample]:
    """One completion of temperature 0 for every prompt."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    futures = [sampler.sample(ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    return [future.result().sequences[0] for future in futures]


def rewarded(rewards: Sequence[float]) -> dict[str, float]:
    """``eval/reward``, the mean, and ``eval/accuracy``, the share of completions rewarded with at least ``CORRECT``."""
    values = np.asarray(rewards, dtype=np.float64)
    return {"eval/reward": float(values.mean()), "eval/accuracy": float((values >= CORRECT).mean())}


def split_answer(datum: Datum) -> tuple[list[int], list[int]] | None:
    """Prompt and answer of a supervised datum: the last run of trained tokens, and what comes before it.

    None when nothing is trained, or nothing comes before.
    """
    trained = np.flatnonzero(datum.loss_fn_inputs["weights"].array)
    if not len(trained):
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    start, stop = int(trained[gaps[-1] + 1] if len(gaps) else trained[0]), int(trained[-1]) + 1
    prompt = datum.model_input.to_ints()[: start + 1]
    return prompt, datum.loss_fn_inputs["target_tokens"].array[start:stop].tolist()


def answers(
    sampler: Sampler, data: Sequence[Datum], max_tokens: int, text: Callable[[Sequence[int]], str]
) -> Evaluation:
    """The share of held-out answers that greedy decoding reproduces token by token, ``eval/accuracy``.

    Rows without a prompt before their last answer are left out, and so are answers longer than ``max_tokens``.
    """
    pairs = [pair for datum in data if (pair := split_answer(datum)) is not None and len(pair[1]) <= max_tokens]
    if not pairs:
        return Evaluation({})
    samples = greedy(sampler, [prompt for prompt, _ in pairs], max_tokens)
    hits = [float(sample.tokens == answer) for sample, (_, answer) in zip(samples, pairs, strict=True)]
    shown = zip(pairs[:3], samples, hits, strict=False)
    examples = [Example(text(prompt), text(sample.tokens), hit) for (prompt, _), sample, hit in shown]
    return Evaluation({"eval/accuracy": float(np.mean(hits)), "eval/answers": float(len(hits))}, examples)
