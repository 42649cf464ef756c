"""Sampling requests: stop conditions, the state of each sample during decoding, and the choice of the next token."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cookbook.errors import RolloutError
from cookbook.types import Array, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cookbook.engine.model import LanguageModel

# Tokenizers decode bytes that are not a complete UTF-8 character to this one.
PART_OF_A_CHARACTER = "\ufffd"
_texts: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, list[str | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class StopCondition:
    """Stop tokens and stop strings of a request."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, model: LanguageModel, params: SamplingParams) -> StopCondition:
        """Return the stop condition of ``params``.

        ``params.stop``: stop strings and token ids besides the model's end tokens. None: the end tokens only; ``[]``: none at
        all.
        """
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        if stops is not None and len(stops) == 0:
            return cls((), ())
        strings = tuple(stop for stop in stops or () if isinstance(stop, str))
        ids = {int(stop) for stop in (stops if stops is not None else ()) if not isinstance(stop, str)}
        return cls(tuple(sorted(end_token_ids(model) | ids)), strings)

    def is_reached(self, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> bool:
        """Whether the last tokens contain a stop string."""
        longest = max(map(len, self.strings), default=0)
        # A token decodes to at least one byte of a character of up to 4 bytes, so this number of tokens holds any stop string.
        tail = tokenizer.decode(tokens[-4 * longest - 4 :])
        return any(string in tail for string in self.strings)


class StopConditions:
    """Stop conditions of all rows of a batch, as tensors."""

    def __init__(self, model: LanguageModel, conditions: Sequence[StopCondition], device: torch.device) -> None:
        width = max(len(condition.ids) for condition in conditions)
        self.ids = torch.tensor(
            [[*condition.ids, *[-1] * (width - len(condition.ids))] for condition in conditions], device=device
        )
        kinds = list(dict.fromkeys(condition.strings for condition in conditions))
        self.has_strings = kinds != [()]
        if self.has_strings:
            self.kind = torch.tensor([kinds.index(condition.strings) for condition in conditions], device=device)
            self.completing = torch.stack([completing_tokens(model, strings) for strings in kinds]).to(device)

    def reached(self, tokens: Tensor) -> Tensor:
        """Return the mask of the rows whose newest token is a stop token, ``(rows,)``."""
        return (self.ids == tokens[:, None]).any(-1)

    def suspected(self, tokens: Tensor) -> Tensor:
        """Return the mask of the rows whose newest token may complete a stop string, ``(rows,)``. Requires ``has_strings``."""
        return self.completing[self.kind, tokens]


def completing_tokens(model: LanguageModel, strings: Sequence[str]) -> Tensor:
    """Return the mask of tokens that may complete one of ``strings``, ``(V,)``.

    These are tokens whose text contains the last character of a string, or an incomplete character.
    """
    vocabulary = model.vocabulary_size
    if not strings:
        return torch.zeros(vocabulary, dtype=torch.bool)
    lasts = {string[-1:] for string in strings} | {PART_OF_A_CHARACTER}
    texts = _token_texts(model.tokenizer)[:vocabulary]
    may_complete = [text is None or any(last in text for last in lasts) for text in texts]
    return torch.tensor(may_complete + [True] * (vocabulary - len(may_complete)))


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """Return the text that each token appends, by id; None if the token changes the text before it. Cached per tokenizer."""
    if tokenizer not in _texts:
        # Decode after another token, because some tokenizers drop a leading space of the text.
        before = tokenizer.encode("a", add_special_tokens=False)
        start = tokenizer.decode(before)
        written = tokenizer.batch_decode([[*before, token] for token in range(len(tokenizer))])
        _texts[tokenizer] = [text[len(start) :] if text.startswith(start) else None for text in written]
    return _texts[tokenizer]


def end_token_ids(model: LanguageModel) -> set[int]:
    """Return the stop tokens (:mod:`cookbook.data.stop_tokens`), of which the network's generation config has a copy."""
    ids = {model.tokenizer.eos_token_id}
    configured = getattr(getattr(model.network, "generation_config", None), "eos_token_id", None)
    ids |= set(configured) if isinstance(configured, list) else {configured}
    return {int(token) for token in ids if token is not None}


@dataclass(frozen=True)
class SampleRequest:
    """Request for ``num_samples`` completions of one prompt. ``seed`` determines the random numbers."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class TokenChunk:
    """The newest tokens of sample ``number``, and their logprobs. ``stop_reason`` None: more tokens follow."""

    number: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str | None


@dataclass
class SampleState:
    """A completion during decoding: sample ``number`` of request ``request``, with at most ``max_new_tokens`` tokens."""

    request: int
    number: int
    prompt: list[int]
    params: SamplingParams
    stop: StopCondition
    max_new_tokens: int
    stream: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str | None = None
    _ahead: Array = field(default_factory=lambda: np.empty(0))

    @property
    def num_tokens(self) -> int:
        """Largest number of tokens of prompt and completion together."""
        return len(self.prompt) + self.max_new_tokens

    def draws(self, count: int) -> Array:
        """Return the random numbers of the next ``count`` positions, ``(count,)``, in [0, 1)."""
        if len(self._ahead) < count:
            self._ahead = np.concatenate([self._ahead, self.stream.random(count - len(self._ahead))])
        return self._ahead[:count]

    def add(self, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self._ahead = self._ahead[len(tokens) :]
        if stopped or len(self.tokens) >= self.max_new_tokens:
            self.stop_reason = "stop" if stopped else "length"


def sample_states(model: LanguageModel, index: int, request: SampleRequest) -> list[SampleState]:
    """Return the initial states of a request's samples.

    Raises:
        RolloutError: the prompt is empty, holds an invalid token, or leaves no space for a completion.
    """
    max_new_tokens = check_prompt(model, request.prompt, request.params.max_tokens)
    stop = StopCondition.of(model, request.params)
    return [
        SampleState(index, number, request.prompt, request.params, stop, max_new_tokens, _stream(request.seed, number))
        for number in range(request.num_samples)
    ]


def check_prompt(model: LanguageModel, prompt: Sequence[int], max_tokens: int | None) -> int:
    """Return the largest number of tokens of a completion: ``max_tokens``, or if None, the rest of the context.

    Raises:
        RolloutError: the prompt is empty, holds an invalid token, or leaves no space for a completion.
    """
    vocabulary = model.vocabulary_size
    if not prompt:
        raise RolloutError("prompt: is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        invalid = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RolloutError(
            f"prompt: holds token {invalid}, but the vocabulary has {vocabulary} tokens; use this model's tokenizer"
        )
    left = model.max_length - len(prompt)
    limit = max(left, 1) if max_tokens is None else max_tokens
    if left < limit:
        raise RolloutError(
            f"prompt: {len(prompt)} tokens and max_tokens={max_tokens} exceed the context of {model.max_length}; "
            "shorten the prompt or lower max_tokens"
        )
    return limit


def _stream(seed: int, number: int) -> np.random.Generator:
    """Return the random number generator of sample ``number``: counter-based, keyed by the seed and the number."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), number], dtype=np.uint64)))


# draw() searches blocks of this number of tokens first, unless the vocabulary is small.
BLOCK = 128
SMALL_VOCABULARY = 1024


class TokenChooser:
    """Chooses the next token of every row of a batch, with the temperature, top-k, top-p and min-p of each row.

    The constructor determines which of these no row uses, so that the steps skip them.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        cold = [p.temperature == 0 for p in params]
        divisors = [p.temperature or 1.0 for p in params]
        filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
        self.greedy = torch.tensor(cold, device=device) if any(cold) else None
        self.draws = not all(cold)
        self.divisor = column(divisors) if set(divisors) != {1.0} else None
        self.filtered = torch.tensor(filtered, device=device) if self.draws and filtered else None
        self.top_k = [params[row].top_k for row in filtered]
        self.top_p = column([params[row].top_p for row in filtered])
        self.min_p = column([params[row].min_p for row in filtered])

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token per row.

        ``logits``: ``(rows, V)`` float32. ``uniform``: ``(rows,)`` float64 random numbers in [0, 1).

        Returns:
            Tokens and logprobs, ``(rows,)`` each. Logprobs include the temperature, but not the filters: the probabilities are
            not renormalized. For greedy rows (temperature 0), they are logprobs at temperature 1.
        """
        probabilities = (logits if self.divisor is None else logits / self.divisor).softmax(-1)
        tokens = draw(self._allowed(probabilities), uniform) if self.draws else logits.argmax(-1)
        if self.draws and self.greedy is not None:
            tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log()

    def _allowed(self, probabilities: Tensor) -> Tensor:
        """Set the probabilities of tokens to 0 that the row's filters exclude."""
        if self.filtered is None:
            return probabilities
        if len(self.filtered) == len(probabilities):
            return self._filter(probabilities)
        return probabilities.index_copy(0, self.filtered, self._filter(probabilities[self.filtered]))

    def _filter(self, probabilities: Tensor) -> Tensor:
        """Apply top-k, then top-p, then min-p, which keeps tokens with at least min_p times the largest probability."""
        vocabulary = probabilities.shape[-1]
        limits = [k if 0 < k < vocabulary else vocabulary for k in self.top_k]
        if max(limits) < vocabulary:
            ordered, order = probabilities.topk(max(limits))
        elif bool((self.top_p < 1).any()) or min(limits) < vocabulary:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        else:
            return probabilities.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), 0.0)
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= torch.tensor(limits, device=ordered.device)[:, None], 0.0)
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        outside = ((before >= self.top_p) & (self.top_p < 1)) | (ordered < self.min_p * ordered[:, :1])
        return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index per row by inverse transform sampling: the first whose cumulative weight exceeds ``uniform * total``.

    Never draws an index of weight 0. With a large vocabulary, find the block first, then the index in it, so that a cumulative
    sum is computed over the blocks and one block only.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= SMALL_VOCABULARY:
        return _search(weights, uniform)[0]
    whole = vocabulary - vocabulary % BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    block, position = _search(sums, uniform)
    indices = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, indices.clamp(max=vocabulary - 1)).masked_fill(indices >= vocabulary, 0.0)
    return block * BLOCK + _search(inside, position)[0]


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index that ``uniform`` selects, and the relative position inside its interval, in [0, 1]: ``(rows,)`` each."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1]
    # Strictly below the total, so that the search cannot select an index of weight 0 at the end.
    point = (uniform * total).clamp(min=0.0).minimum(torch.nextafter(total, torch.zeros_like(total)))
    # The clamp is for NaN, which sorts after all numbers.
    index = torch.searchsorted(cumulative, point[:, None], right=True).clamp(max=weights.shape[-1] - 1)
    width = weights.gather(-1, index).double()
    position = (point[:, None] - (cumulative.gather(-1, index) - width)) / width
    return index[:, 0], position[:, 0].clamp(0.0, 1.0)
