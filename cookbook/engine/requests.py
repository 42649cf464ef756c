"""What is asked of a sampler, and what becomes of it while it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cookbook.engine.stopping import Ending
from cookbook.errors import RolloutError
from cookbook.types import Array, SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel


@dataclass(frozen=True)
class Request:
    """``num_samples`` completions of one prompt. ``seed`` decides the draws."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class Piece:
    """Tokens of sample ``number`` that have just been drawn, and their logprobs. ``stop_reason`` None: more will come."""

    number: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str | None


@dataclass
class Lane:
    """One completion under way: sample ``number`` of request ``request``, of at most ``room`` tokens."""

    request: int
    number: int
    prompt: list[int]
    params: SamplingParams
    ending: Ending
    room: int
    stream: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str | None = None
    _ahead: Array = field(default_factory=lambda: np.empty(0))

    @property
    def need(self) -> int:
        """Tokens of prompt and completion at most."""
        return len(self.prompt) + self.room

    def draws(self, count: int) -> Array:
        """The random numbers of the next ``count`` positions, ``(count,)``."""
        if len(self._ahead) < count:
            self._ahead = np.concatenate([self._ahead, self.stream.random(count - len(self._ahead))])
        return self._ahead[:count]

    def add(self, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self._ahead = self._ahead[len(tokens) :]
        if stopped or len(self.tokens) >= self.room:
            self.stop_reason = "stop" if stopped else "length"


def lanes_of(model: LanguageModel, index: int, request: Request) -> list[Lane]:
    """A lane for every sample of a request.

    Raises:
        RolloutError: as :func:`check_prompt`.
    """
    room = check_prompt(model, request.prompt, request.params.max_tokens)
    ending = Ending.of(model, request.params)
    return [
        Lane(index, number, request.prompt, request.params, ending, room, _stream(request.seed, number))
        for number in range(request.num_samples)
    ]


def check_prompt(model: LanguageModel, prompt: Sequence[int], max_tokens: int | None) -> int:
    """How many tokens a completion of ``prompt`` may have: ``max_tokens``, or all that the context leaves.

    Raises:
        RolloutError: the prompt is empty or not of this vocabulary, or leaves no room.
    """
    vocabulary = model.network.config.get_text_config().vocab_size
    if not prompt:
        raise RolloutError("prompt: is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RolloutError(f"prompt: holds token {wrong}, and the vocabulary has {vocabulary}; use this model's tokenizer")
    left = model.max_length - len(prompt)
    wanted = max(left, 1) if max_tokens is None else max_tokens
    if left < wanted:
        raise RolloutError(
            f"prompt: {len(prompt)} tokens and max_tokens={max_tokens} exceed the context of {model.max_length}; "
            "shorten the prompt or lower max_tokens"
        )
    return wanted


def _stream(seed: int, number: int) -> np.random.Generator:
    """The random numbers of a request's ``number``-th sample: a counter-based generator keyed by both."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), number], dtype=np.uint64)))
