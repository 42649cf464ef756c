"""Trajectories: what model and environment said in turn, as tokens, and the datums that a policy-gradient loss reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cookbook.sampling.credit import Credit, Float
from cookbook.types import Datum, JsonObject, ModelInput, Sample

Author = Literal["prompt", "model", "environment"]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one author, and their text.

    Tokens of the model have ``logprobs`` (one per token, under the temperature of the draw), the reason why sampling stopped
    (``stop`` or ``length``), ``step``, the version of the weights, and ``opened``, the tag at the end of the prompt that opens
    the reasoning, if there is one. Tokens of other authors have none of these.
    """

    author: Author
    tokens: list[int]
    text: str
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""
    step: int = 0
    opened: str = ""

    @classmethod
    def sampled(cls, sample: Sample, text: str, opened: str = "") -> Segment:
        """Return the segment of a completion."""
        return cls("model", sample.tokens, text, sample.logprobs, sample.stop_reason, sample.step, opened)


Branch = tuple[Segment, ...]
"""Segments whose tokens follow one another. The first is the prompt."""


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a prompt, of one turn or several.

    Every completion is in exactly one of ``branches``. There is one branch, unless the chat template rewrites earlier turns
    (Qwen3 removes earlier reasoning): the tokens of the next turn then do not begin with those that were sampled. The prompt of
    a later branch has the tokens of the whole rewritten conversation; its text is that of the last observation.

    ``ended``: the stop reason of the only turn; with an environment ``done``, ``max_turns``, ``context`` (no token is left),
    ``error`` or ``timeout``. ``reward`` is the environment's, with its named ``parts``; None if it gives none. ``calls`` counts
    calls of tools, ``malformed_calls`` those that could not be read, and ``failed_calls`` those that raised.
    """

    branches: tuple[Branch, ...]
    ended: str
    reward: float | None = None
    calls: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    # Rewards that the environment's step has returned, one per turn; empty if it gave the reward in another way.
    turn_rewards: Sequence[float] = ()

    @classmethod
    def single(cls, prompt: Sequence[int], prompt_text: str, sample: Sample, text: str, opened: str = "") -> Trajectory:
        """Return the trajectory of one completion without an environment."""
        branch = (Segment("prompt", list(prompt), prompt_text), Segment.sampled(sample, text, opened))
        return cls((branch,), sample.stop_reason)

    @property
    def has_failed(self) -> bool:
        """Whether the environment has ended the episode by an error or a time limit."""
        return self.ended in ("error", "timeout")

    @property
    def turns(self) -> list[Segment]:
        """The completions, in order."""
        return [segment for branch in self.branches for segment in branch if segment.author == "model"]

    @property
    def opening(self) -> str:
        """The text of the first prompt, with the first observation."""
        return self.branches[0][0].text if self.branches else ""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def is_truncated(self) -> bool:
        """Whether a completion has reached ``max_tokens``."""
        return any(turn.stop_reason == "length" for turn in self.turns)

    @property
    def text(self) -> str:
        """The text of the last completion; empty if the environment has failed before the first."""
        turns = self.turns
        return turns[-1].text if turns else ""

    def messages(self) -> list[JsonObject]:
        """Return who said what, in order: ``{"role": "prompt" | "assistant" | "environment", "content": text}``."""
        said: list[JsonObject] = []
        for segment in (segment for branch in self.branches for segment in branch):
            role = {"model": "assistant", "prompt": "environment" if said else "prompt"}.get(segment.author, segment.author)
            said.append({"role": role, "content": segment.text})
        return said

    def by_turn(self, steps: Sequence[float], *, of_tokens: bool) -> list[list[float]]:
        """Return rewards of turns or tokens as one list per turn: with one number, or ``of_tokens`` with one per token.

        The reward of a turn is that of its last token. An attempt without a turn has the sum of its rewards.
        """
        lengths = [len(turn.tokens) for turn in self.turns]
        if not lengths:
            return [[float(sum(steps))]]
        if len(steps) == len(lengths):
            return [
                [*[0.0] * (length - 1), reward] if of_tokens else [reward]
                for length, reward in zip(lengths, steps, strict=True)
            ]
        ends = np.cumsum(lengths).tolist()
        return [list(steps[end - length : end]) for length, end in zip(lengths, ends, strict=True)]

    def datums(self, advantage: Credit, temperature: float = 1.0) -> list[Datum]:
        """Return one datum per branch for a policy-gradient loss; a branch of n tokens gives arrays of length n - 1.

        ``weights`` is 1 on sampled tokens and 0 elsewhere: tokens of the environment have exactly zero gradient, and
        ``sampling_logprobs`` has no effect there. A ``temperature`` other than 1 is added as a scalar: training divides the
        logits by it as sampling did, so that it trains the policy that was sampled.

        Args:
            advantage: one number, or per turn an array of one number or of one number per token.
        """
        by_turn: list[float | Float] = [*advantage] if isinstance(advantage, list) else [advantage] * len(self.turns)
        own = iter(by_turn)
        sampled = [branch for branch in self.branches if any(segment.author == "model" for segment in branch)]
        return [_datum(branch, own, temperature) for branch in sampled]


def _datum(branch: Branch, advantages: Iterator[float | Float], temperature: float) -> Datum:
    """Return the datum of a branch. ``advantages`` has those of its turns first, and keeps those of later branches."""
    # What follows the last completion has no gradient, and may exceed the context.
    last = max(index for index, segment in enumerate(branch) if segment.author == "model")
    branch = branch[: last + 1]
    tokens = [token for segment in branch for token in segment.tokens]
    weights = np.zeros(len(tokens), dtype=np.float32)
    logprobs, credit = np.zeros(len(tokens)), np.zeros(len(tokens))
    start = 0
    for segment in branch:
        end = start + len(segment.tokens)
        if segment.author == "model":
            weights[start:end] = 1.0
            logprobs[start:end] = segment.logprobs
            credit[start:end] = next(advantages)
        start = end
    # Nothing predicts the first token.
    inputs = {
        "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
        "weights": weights[1:],
        "advantages": credit[1:],
        "sampling_logprobs": logprobs[1:],
    }
    if temperature != 1.0:
        inputs["temperature"] = np.asarray(temperature, dtype=np.float64)
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)
