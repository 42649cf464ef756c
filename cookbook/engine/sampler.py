"""Sampling from a causal model: prompts prefilled once, all their completions decoded side by side.

The draw of sample ``i`` at position ``t`` is a function of the request's seed, ``i`` and ``t`` alone, so what else is in the
batch does not matter (up to float rounding of the logits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.engine.model import LanguageModel
from cookbook.errors import RolloutError
from cookbook.types import Array, Sample, SamplingParams

COMPACT_BELOW = 0.75  # finished sequences leave the batch once fewer than this share of it is alive
DRAWS_AT_ONCE = 256  # tokens' worth of random numbers made at a time


@dataclass(frozen=True)
class Request:
    """``num_samples`` completions of one prompt. ``seed`` decides the draws."""

    prompt: list[int]
    num_samples: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class _Share:
    """The samples ``start`` to ``start + count - 1`` of a request: what of it is decoded in one batch."""

    request: int
    start: int
    count: int


@dataclass
class _Lane:
    """One completion under way."""

    request: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str = "length"


def sample(model: LanguageModel, requests: Sequence[Request], step: int, max_batch_tokens: int) -> list[list[Sample]]:
    """Answers all requests, in batches of at most ``max_batch_tokens`` prompt and completion tokens.

    A request that is larger than that is answered in several; a single completion that is, alone.

    Raises:
        RolloutError: a prompt is empty or not of this vocabulary, or leaves no room for its completion; an architecture
            that cannot be sampled here; logits that are not numbers.
    """
    if requests and not model.decodes:
        raise RolloutError(
            f"sample: {type(model.network).__name__} keeps its cache where this sampler cannot follow; use another deployment"
        )
    return decode(model, requests, step, max_batch_tokens)


@torch.no_grad()
def decode(model: LanguageModel, requests: Sequence[Request], step: int, max_batch_tokens: int) -> list[list[Sample]]:
    """As :func:`sample`, on an architecture known to work."""
    model.network.eval()
    room = [check_prompt(model, request.prompt, request.params.max_tokens) for request in requests]
    answers: list[list[Sample]] = [[] for _ in requests]
    for batch in _batches(requests, room, max_batch_tokens):
        for lane in _Decoder(model, requests, batch, room).run():
            answers[lane.request].append(Sample(lane.tokens, lane.logprobs, lane.stop_reason, step))
    return answers


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


def _batches(requests: Sequence[Request], room: Sequence[int], budget: int) -> list[list[_Share]]:
    """Requests of similar prompt length together, so that little of a batch is padding."""
    batches: list[list[_Share]] = []
    tokens = 0
    for share in _shares(requests, room, budget):
        need = share.count * (len(requests[share.request].prompt) + room[share.request])
        if not batches or tokens + need > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(share)
        tokens += need
    return batches


def _shares(requests: Sequence[Request], room: Sequence[int], budget: int) -> Iterator[_Share]:
    """Every request, by length of prompt, in as few shares as the budget allows."""
    for index in sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), i)):
        at_once = max(1, budget // (len(requests[index].prompt) + room[index]))
        for start in range(0, requests[index].num_samples, at_once):
            yield _Share(index, start, min(at_once, requests[index].num_samples - start))


class _Decoder:
    """Decodes one batch of requests to its end."""

    def __init__(self, model: LanguageModel, requests: Sequence[Request], batch: list[_Share], room: Sequence[int]) -> None:
        self.model = model
        self.requests = requests
        self.batch = batch
        self.lanes = [_Lane(share.request, [], []) for share in batch for _ in range(share.count)]
        self.alive = list(range(len(self.lanes)))
        self.limits = np.array([room[lane.request] for lane in self.lanes])
        self.rule = _Rule(model, [requests[lane.request].params for lane in self.lanes])
        self.streams = [_stream(requests[share.request].seed, share.start + i) for share in batch for i in range(share.count)]
        self.draws = np.zeros((len(self.lanes), DRAWS_AT_ONCE))
        self.finished = np.zeros(len(self.lanes), dtype=bool)

    def run(self) -> list[_Lane]:
        cache, mask, positions, logits = self._prefill()
        for t in range(int(self.limits.max())):
            tokens, logprobs = self.rule.choose(logits, self.alive, self._uniform(t))
            self._record(tokens, logprobs, t)
            keep = np.flatnonzero(~self.finished)
            if not len(keep):
                break
            if len(keep) < COMPACT_BELOW * len(self.alive):
                rows = torch.from_numpy(keep).to(self.model.device)
                cache.reorder_cache(rows)
                tokens, positions = tokens[rows], positions[rows]
                mask = mask[rows] if mask is not None else None
                self.alive = [self.alive[row] for row in keep]
                self.finished = self.finished[keep]
            positions = positions + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1) if mask is not None else None
            logits = self._step(tokens[:, None], mask, positions, cache)
        return self.lanes

    def _prefill(self) -> tuple[Any, Tensor | None, Tensor, Tensor]:
        """Runs every prompt once, left-padded, then gives each of its completions a copy of the cache row."""
        from transformers import DynamicCache  # half a second: imported when a model is there anyway

        prompts = [self.requests[share.request].prompt for share in self.batch]
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        real = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            real[row, width - len(prompt) :] = 1
        device = self.model.device
        mask = None if real.all() else torch.from_numpy(real).to(device)
        positions = torch.from_numpy(np.maximum(real.cumsum(1) - 1, 0)).to(device)
        cache = DynamicCache(config=self.model.network.config.get_text_config())
        logits = self._step(torch.from_numpy(ids).to(device), mask, positions, cache)
        copies = torch.tensor([share.count for share in self.batch], device=device)
        rows = torch.repeat_interleave(torch.arange(len(prompts), device=device), copies)
        cache.reorder_cache(rows)
        return cache, mask[rows] if mask is not None else None, positions[rows, -1:], logits[rows]

    def _step(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        out = self.model.network(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _record(self, tokens: Tensor, logprobs: Tensor, t: int) -> None:
        """Appends one token to every lane that goes on, and notes in ``finished`` which rows ended with it."""
        chosen, scores = tokens.tolist(), logprobs.tolist()
        stops = self.rule.stops(tokens, self.alive)
        for row, number in enumerate(self.alive):
            if self.finished[row]:
                continue
            lane = self.lanes[number]
            lane.tokens.append(chosen[row])
            lane.logprobs.append(scores[row])
            if stops[row] or self.rule.ends_with_stop_string(number, lane.tokens):
                lane.stop_reason = "stop"
                self.finished[row] = True
            elif t + 1 >= self.limits[number]:
                self.finished[row] = True

    def _uniform(self, t: int) -> Array:
        """The living lanes' random numbers for position ``t``, ``(rows,)``."""
        if t % DRAWS_AT_ONCE == 0:
            for lane in self.alive:
                self.draws[lane] = self.streams[lane].random(DRAWS_AT_ONCE)
        return self.draws[self.alive, t % DRAWS_AT_ONCE]


def _stream(seed: int, number: int) -> np.random.Generator:
    """The random numbers of a request's ``number``-th sample: a counter-based generator keyed by both."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), number], dtype=np.uint64)))


class _Rule:
    """How tokens are chosen and where completions end, for the lanes of a batch."""

    def __init__(self, model: LanguageModel, params: list[SamplingParams]) -> None:
        self.tokenizer = model.tokenizer
        self.params = params
        self.device = model.device
        self.temperature = torch.tensor([p.temperature for p in params], device=self.device)
        self.greedy = all(p.temperature == 0 for p in params)
        self.top_k = [p.top_k for p in params]
        self.top_p = torch.tensor([p.top_p for p in params], device=self.device)
        self.stop_ids = [_stop_ids(model, p) for p in params]
        self.same_stops = torch.tensor(self.stop_ids[0], device=self.device) if len(set(self.stop_ids)) == 1 else None
        self.strings = [_stop_strings(p) for p in params]

    def choose(self, logits: Tensor, lanes: list[int], draws: Array) -> tuple[Tensor, Tensor]:
        """Tokens and their logprobs under the temperature, ``(rows,)`` each. The filters do not renormalize the logprobs."""
        temperature = self.temperature[lanes]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        logprobs = scaled.log_softmax(-1)
        if logprobs[:, 0].isnan().any():  # one bad logit spoils its row
            raise RolloutError("sample: the model's logits are not finite; its weights are broken, go back to a checkpoint")
        tokens = logits.argmax(-1)
        if not self.greedy:
            uniform = torch.from_numpy(draws).to(self.device)
            tokens = torch.where(temperature > 0, _inverse_cdf(self._filtered(logprobs, lanes), uniform), tokens)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]

    def _filtered(self, logprobs: Tensor, lanes: list[int]) -> Tensor:
        """Probabilities, set to 0 outside the top k, then outside the top p of what is left."""
        probabilities = logprobs.exp()
        top_k = [self.top_k[lane] for lane in lanes]
        top_p = self.top_p[lanes]
        if all(k <= 0 for k in top_k) and bool((top_p >= 1).all()):
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=self.device)
        limit = torch.tensor([k if k > 0 else ordered.shape[-1] for k in top_k], device=self.device)
        ordered = ordered.masked_fill(rank >= limit[:, None], 0.0)
        before = (ordered.cumsum(-1) - ordered) / ordered.sum(-1, keepdim=True)
        outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
        return torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))

    def stops(self, tokens: Tensor, lanes: list[int]) -> list[bool]:
        if self.same_stops is not None:
            return list(torch.isin(tokens, self.same_stops).tolist())
        return [token in self.stop_ids[lane] for token, lane in zip(tokens.tolist(), lanes, strict=True)]

    def ends_with_stop_string(self, lane: int, tokens: list[int]) -> bool:
        strings = self.strings[lane]
        if not strings:
            return False
        longest = max(map(len, strings))
        # A token decodes to at least a part of one character: this many tokens surely hold the longest stop string.
        tail = self.tokenizer.decode(tokens[-4 * longest - 4 :])
        return any(string in tail for string in strings)


def _inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds ``uniform`` of the total; never one of probability 0."""
    cumulated = probabilities.double().cumsum(-1)
    wanted = (uniform * cumulated[:, -1]).clamp(max=torch.nextafter(cumulated[:, -1], cumulated.new_zeros(())))
    return torch.searchsorted(cumulated, wanted[:, None], right=True)[:, 0]


def _stop_ids(model: LanguageModel, params: SamplingParams) -> tuple[int, ...]:
    """None: the model's own ends. ``[]``: nothing. Otherwise the ends and the given ids."""
    if params.stop is None or isinstance(params.stop, str):
        return tuple(sorted(end_token_ids(model)))
    given = {int(stop) for stop in params.stop if not isinstance(stop, str)}
    return tuple(sorted(end_token_ids(model) | given)) if len(params.stop) else ()


def _stop_strings(params: SamplingParams) -> list[str]:
    if isinstance(params.stop, str):
        return [params.stop]
    return [] if params.stop is None else [stop for stop in params.stop if isinstance(stop, str)]


def end_token_ids(model: LanguageModel) -> set[int]:
    """The tokens that end a text or a turn, as the tokenizer and the model's generation config name them."""
    ids = {model.tokenizer.eos_token_id}
    configured = getattr(getattr(model.network, "generation_config", None), "eos_token_id", None)
    ids |= set(configured) if isinstance(configured, list) else {configured}
    return {int(token) for token in ids if token is not None}
