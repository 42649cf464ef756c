"""How good the policy is on rows it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cookbook.errors import ConfigError
from cookbook.protocols import Sampler
from cookbook.types import Datum, ModelInput, Sample, SamplingParams

SHOWN = 3  # completions kept for people to read
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


def greedy(
    sampler: Sampler, prompts: Sequence[Sequence[int]], params: SamplingParams, context: int | None = None
) -> list[Sample]:
    """One completion for every prompt, so short that both fit into ``context`` tokens."""

    def fitting(length: int) -> SamplingParams:
        if context is None or params.max_tokens is None:
            return params
        return replace(params, max_tokens=min(params.max_tokens, context - length))

    futures = [sampler.sample(ModelInput.from_ints(prompt), 1, fitting(len(prompt))) for prompt in prompts]
    return [future.result().sequences[0] for future in futures]


def rewarded(rewards: Sequence[float]) -> dict[str, float]:
    """``eval/reward``, the mean, and ``eval/accuracy``, the share of completions rewarded with at least ``CORRECT``."""
    values = np.asarray(rewards, dtype=np.float64)
    return {"eval/reward": float(values.mean()), "eval/accuracy": float((values >= CORRECT).mean())}


def split_answer(datum: Datum) -> tuple[list[int], list[int]] | None:
    """Prompt and answer of a supervised datum: the last run of trained tokens, and what comes before it.

    None when nothing is trained, or everything is: then the token before the first target is the text's own beginning, or the
    one that begins every text, and nothing has been asked.
    """
    trained = np.flatnonzero(datum.loss_fn_inputs["weights"].array)
    if not len(trained):
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    start, stop = int(trained[gaps[-1] + 1] if len(gaps) else trained[0]), int(trained[-1]) + 1
    if start == 0:
        return None
    prompt = datum.model_input.to_ints()[: start + 1]
    return prompt, datum.loss_fn_inputs["target_tokens"].array[start:stop].tolist()


def answers(
    sampler: Sampler,
    data: Sequence[Datum],
    questions: Sequence[str],
    params: SamplingParams,
    context: int | None,
    text: Callable[[Sequence[int]], str],
) -> Evaluation:
    """The share of held-out answers that greedy decoding reproduces token by token, ``eval/accuracy``.

    Rows without a prompt before their last answer are left out, and so are answers longer than ``params.max_tokens``.
    ``questions`` are shown to people beside the completions.
    """
    asked = [(question, *pair) for question, datum in zip(questions, data, strict=True) if (pair := split_answer(datum))]
    asked = [row for row in asked if params.max_tokens is None or len(row[2]) <= params.max_tokens]
    if not asked:
        return Evaluation({})
    # A row that fills the context leaves less room than `max_tokens`, and always enough for its answer.
    samples = greedy(sampler, [prompt for _, prompt, _ in asked], params, context)
    hits = [float(sample.tokens == answer) for sample, (_, _, answer) in zip(samples, asked, strict=True)]
    shown = zip(asked[:SHOWN], samples, hits, strict=False)
    examples = [Example(question, text(sample.tokens), hit) for (question, _, _), sample, hit in shown]
    return Evaluation({"eval/accuracy": float(np.mean(hits)), "eval/answers": float(len(hits))}, examples)
