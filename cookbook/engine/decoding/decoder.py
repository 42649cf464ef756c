"""Sampling with continuous batching: each prompt is prefilled once, and all completions are decoded in one batch.

The random number of sample ``i`` at position ``t`` is a function of the request's seed, ``i`` and ``t``. So a sample does not
depend on the rest of the batch, up to float rounding of the logits.

The batch decodes in rounds of :data:`ROUND_TOKENS` steps; a round ends early if many rows have ended. During a round, all
tokens stay in tensors on the device. After a round, the tokens are added to their samples, rows that have ended leave the
batch, and waiting samples are prefilled and enter.

A batch is computed in slices: it pauses after every step, and after every part of the prompts (:func:`prefill_parts`), so that
other work of the process may run in between. A pause changes no number, because the batch keeps its state.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cookbook.engine import attention, capabilities
from cookbook.engine.decoding.requests import (
    SampleRequest,
    SampleState,
    StopConditions,
    TokenChooser,
    TokenChunk,
    sample_states,
)
from cookbook.engine.decoding.sampler_pass import SamplerPass
from cookbook.engine.fast_path import FastPathError, first_working, probe_tokens
from cookbook.engine.model import LanguageModel, Lineage
from cookbook.errors import RolloutError
from cookbook.types import Sample, SamplingParams

if TYPE_CHECKING:
    # Its import of transformers' caches takes half a second.
    from cookbook.engine.decoding.rows import DecodingMethod, Rows

ROUND_TOKENS = 16
# Tokens of prompts, with their padding, that one forward pass prefills. Larger passes are not faster, and delay other work. If
# prompts are longer than LONG_TOKENS, a pass prefills fewer tokens, because the cost of attention grows with the length.
PREFILL_TOKENS = 16384
LONG_TOKENS = 1024
# Steps of a round for streaming: a stream yields this number of tokens at a time.
STREAM_TOKENS = 4
# A round ends early when this fraction of its rows has ended.
LEAVE_AT = 0.25
# Steps between two checks of a GPU for rows that have ended.
GPU_CHECK_STEPS = 4
_END = object()


def sample(
    model: LanguageModel,
    requests: Sequence[SampleRequest],
    step: int,
    max_batch_tokens: int,
    forward: SamplerPass | None = None,
) -> list[list[Sample]]:
    """Complete all requests. At most ``max_batch_tokens`` tokens of prompts and completions are in the batch at a time.

    A larger sample is decoded in a batch of its own. ``step``: the optimizer step of the weights, stored in the samples.
    ``forward``: the forward pass, at the precision of an engine; None: one with exact products.

    Raises:
        RolloutError: a prompt is empty, holds an invalid token, or leaves no space for its completion; or the model's logits
            are not finite.
    """
    sampling = SlicedSampling(model, requests, step, max_batch_tokens, forward)
    while sampling.advance(ROUND_TOKENS):
        pass
    return sampling.samples()


class SlicedSampling:
    """The completion of all ``requests`` in slices; see :func:`sample` for the arguments and errors."""

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[SampleRequest],
        step: int,
        max_batch_tokens: int,
        forward: SamplerPass | None = None,
    ) -> None:
        self._step = step
        self._states = [sample_states(model, index, request) for index, request in enumerate(requests)]
        samples = [row for of_request in self._states for row in of_request]
        method = decoding_method(model, max((row.num_tokens for row in samples), default=0))
        self._decoder = Decoder(model, samples, max_batch_tokens, method, forward=forward)
        self._pauses = self._decoder.steps()

    @property
    def num_drawn(self) -> int:
        """Tokens that are drawn, up to the last complete round."""
        return sum(len(row.tokens) for of_request in self._states for row in of_request)

    def advance(self, steps: int) -> bool:
        """Compute the next ``steps`` steps, or fewer at the end or after a prefill. Return whether more follow."""
        for _ in range(steps):
            if next(self._pauses, _END) is _END:
                return False
            if self._decoder.has_prefilled:
                break
        return True

    def drop(self, requests: Iterable[int]) -> None:
        """Stop the samples of ``requests``: waiting ones now, those in the batch at the end of the round."""
        self._decoder.drop(frozenset(requests))

    def samples(self) -> list[list[Sample]]:
        """Return the samples of each request. Those of dropped requests are incomplete."""
        return _samples(self._states, self._step)


def stream(
    model: LanguageModel, request: SampleRequest, max_batch_tokens: int, forward: SamplerPass | None = None
) -> Iterator[TokenChunk]:
    """Yield the tokens of the samples that :func:`sample` would return, :data:`STREAM_TOKENS` at a time.

    Raises:
        RolloutError: the prompt is empty, holds an invalid token, or leaves no space for its completion; or the model's logits
            are not finite.
    """
    states = sample_states(model, 0, request)
    method = decoding_method(model, max((row.num_tokens for row in states), default=0))
    sent = [0] * request.num_samples
    for rows in Decoder(model, states, max_batch_tokens, method, STREAM_TOKENS, forward=forward).rounds():
        for row in rows:
            start, sent[row.number] = sent[row.number], len(row.tokens)
            yield TokenChunk(row.number, row.tokens[start:], row.logprobs[start:], row.stop_reason)


def decode(
    model: LanguageModel, requests: Sequence[Sequence[SampleState]], step: int, max_batch_tokens: int, method: DecodingMethod
) -> list[list[Sample]]:
    """Complete the samples of all ``requests`` with the decoding ``method``.

    Raises:
        RolloutError: the model's logits are not finite.
    """
    for _ in Decoder(model, [sample for request in requests for sample in request], max_batch_tokens, method).steps():
        pass
    return _samples(requests, step)


def _samples(requests: Sequence[Sequence[SampleState]], step: int) -> list[list[Sample]]:
    return [[Sample(row.tokens, row.logprobs, row.stop_reason or "length", step) for row in request] for request in requests]


class Decoder:
    """Decoding loop over ``samples``. The number of rows times the longest row is at most ``max_batch_tokens``."""

    def __init__(
        self,
        model: LanguageModel,
        samples: Sequence[SampleState],
        max_batch_tokens: int,
        method: DecodingMethod,
        round_tokens: int = ROUND_TOKENS,
        *,
        forward: SamplerPass | None = None,
    ) -> None:
        model.network.eval()
        self.forward = forward or SamplerPass(model)
        self.model = model
        self.budget = max_batch_tokens
        self.round_tokens = round_tokens
        # Sorted by length and prompt, so that a batch needs little padding, and a prompt is prefilled once for all its samples.
        self.waiting = deque(sorted(samples, key=lambda row: (row.num_tokens, row.prompt, row.request, row.number)))
        self.rows: list[SampleState] = []
        self.past: Rows = method.rows(self.forward)
        # (rows, V), next-token logits of every row.
        self.logits: Tensor
        self._dropped: frozenset[int] = frozenset()
        # Whether the last forward pass was a prefill.
        self.has_prefilled = False

    @torch.no_grad()
    def steps(self) -> Iterator[list[SampleState]]:
        """Yield after each forward pass: after a round the samples that got tokens in it, else an empty list.

        Finished samples have a ``stop_reason``.
        """
        yield from self._admit()
        while self.rows:
            tokens, unfinished = yield from self._round()
            yield list(self.rows)
            self._remove_finished(tokens, unfinished)
            yield []
            yield from self._admit()

    def rounds(self) -> Iterator[list[SampleState]]:
        """Yield after each round the samples that got tokens in it."""
        return (rows for rows in self.steps() if rows)

    def drop(self, requests: frozenset[int]) -> None:
        """Stop the samples of ``requests``: waiting ones now, those in the batch at the end of the round."""
        self._dropped |= requests
        self.waiting = deque(sample for sample in self.waiting if sample.request not in self._dropped)

    def _round(self) -> Generator[list[SampleState], None, tuple[Tensor, Tensor]]:
        """Decode one round. Return the last token of each row, and the mask of unfinished rows, ``(rows,)`` each."""
        rows, steps = len(self.rows), self.round_tokens
        chooser = TokenChooser([sample.params for sample in self.rows], self.model.device)
        stops = StopConditions(self.model, [sample.stop for sample in self.rows], self.model.device)
        uniform = torch.from_numpy(np.stack([sample.draws(steps) for sample in self.rows])).to(self.model.device)
        left = torch.tensor([sample.max_new_tokens - len(sample.tokens) for sample in self.rows], device=self.model.device)
        tokens, logprobs = left.new_empty(rows, steps), self.logits.new_empty(rows, steps)
        counts, stopped = torch.zeros_like(left), torch.zeros_like(left, dtype=torch.bool)
        unfinished = ~stopped
        most = max(sample.max_new_tokens - len(sample.tokens) for sample in self.rows)
        # On a GPU the host waits for the answer, so it asks less often.
        check_every = 1 if self.model.device.type == "cpu" else GPU_CHECK_STEPS
        for step in range(steps):
            tokens[:, step], logprobs[:, step] = chosen, _ = chooser.choose(self.logits, uniform[:, step])
            counts += unfinished
            stopped |= unfinished & (stops.reached(chosen) | self._completes_string(stops, tokens[:, : step + 1], unfinished))
            unfinished = ~stopped & (counts < left)
            is_last = step + 1 == min(steps, most)
            if is_last or ((step + 1) % check_every == 0 and int(unfinished.sum()) <= (1 - LEAVE_AT) * rows):
                break
            self._step(chosen, unfinished)
            yield []
        self._add_tokens(tokens[:, : step + 1], logprobs[:, : step + 1], counts, stopped)
        return chosen, unfinished

    def _completes_string(self, stops: StopConditions, tokens: Tensor, unfinished: Tensor) -> Tensor:
        """Return the mask of the rows whose newest token completes a stop string."""
        completed = torch.zeros_like(unfinished)
        if stops.has_strings:
            for row in (unfinished & stops.suspected(tokens[:, -1])).nonzero()[:, 0].tolist():
                sample = self.rows[row]
                completed[row] = sample.stop.is_reached(self.model.tokenizer, sample.tokens + tokens[row].tolist())
        return completed

    def _add_tokens(self, tokens: Tensor, logprobs: Tensor, counts: Tensor, stopped: Tensor) -> None:
        if logprobs.isnan().any():
            raise RolloutError(
                "sample: the model's logits are not finite, so its weights are broken; load an earlier checkpoint"
            )
        results = zip(tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True)
        for sample, (chosen, scores, count, stop) in zip(self.rows, results, strict=True):
            sample.add(chosen[:count], scores[:count], stop)

    def _remove_finished(self, tokens: Tensor, unfinished: Tensor) -> None:
        """Remove the rows that have ended or are dropped, and run the step for the last token of the others."""
        stays = [more and row.request not in self._dropped for more, row in zip(unfinished.tolist(), self.rows, strict=True)]
        rows = _compacted(stays)
        self.rows = [self.rows[row] for row in rows]
        self.past.keep(rows)
        if rows:
            self._step(tokens[rows], unfinished[rows])

    def _step(self, tokens: Tensor, unfinished: Tensor) -> None:
        with self.forward.context(len(tokens)):
            self.logits = self.past.step(tokens, unfinished)

    def _admit(self) -> Iterator[list[SampleState]]:
        """Prefill waiting prompts, each once, and add a row for each of their samples. Yield after each part of the prompts."""
        entering = self._next_samples()
        # If rows cannot enter while others are decoded, all prompts are one part.
        parts = prefill_parts([sample.prompt for sample in entering]) if self.past.in_place else [slice(None)]
        for part in parts:
            samples = [sample for sample in entering[part] if sample.request not in self._dropped]
            if samples:
                prompts = list(dict.fromkeys(tuple(sample.prompt) for sample in samples))
                prompt_index = {prompt: index for index, prompt in enumerate(prompts)}
                with self.forward.context(sum(map(len, prompts))):
                    logits = self.past.enter(prompts, [prompt_index[tuple(sample.prompt)] for sample in samples])
                self.logits = torch.cat([self.logits, logits]) if self.rows else logits
                self.rows += samples
                self.has_prefilled = True
                yield []
                self.has_prefilled = False

    def _next_samples(self) -> list[SampleState]:
        """Take the samples from the queue that fit into the batch now; at least one if the batch is empty."""
        if self.rows and not self.past.in_place:
            return []
        admitted: list[SampleState] = []
        widest = max((sample.num_tokens for sample in self.rows), default=0)
        while self.waiting:
            widest = max(widest, self.waiting[0].num_tokens)
            free = self.budget // widest - len(self.rows) - len(admitted)
            if not (self.rows or admitted):
                free = max(free, 1)
            _, same_prompt = next(itertools.groupby(self.waiting, key=lambda sample: sample.prompt))
            similar = len(list(same_prompt))
            # Wait until all samples of a prompt fit, if that is possible, so that the prompt is prefilled only once.
            if free < 1 or (similar > free and similar * widest <= self.budget):
                break
            admitted += [self.waiting.popleft() for _ in range(min(similar, free))]
        return admitted


def prefill_parts(prompts: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Split ``prompts`` into parts of at least one prompt and at most :data:`PREFILL_TOKENS` tokens, with padding.

    Equal prompts of a part count once. A part with prompts longer than :data:`LONG_TOKENS` has a lower limit: its tokens times
    the length of its longest prompt are at most ``PREFILL_TOKENS * LONG_TOKENS``.
    """
    start, part, longest = 0, set[tuple[int, ...]](), 0
    for index, prompt in enumerate(prompts):
        part.add(tuple(prompt))
        longest = max(longest, len(prompt))
        if len(part) > 1 and len(part) * longest * max(longest, LONG_TOKENS) > PREFILL_TOKENS * LONG_TOKENS:
            yield slice(start, index)
            start, part, longest = index, {tuple(prompt)}, len(prompt)
    if part:
        yield slice(start, len(prompts))


def _compacted(stays: list[bool]) -> list[int]:
    """Return the rows to keep, in their new order: the last rows fill the gaps of rows that leave."""
    count = sum(stays)
    movers = iter([row for row in range(count, len(stays)) if stays[row]])
    return [row if stays[row] else next(movers) for row in range(count)]


_methods: weakref.WeakKeyDictionary[Lineage, dict[bool, DecodingMethod]] = weakref.WeakKeyDictionary()


def decoding_method(model: LanguageModel, longest: int) -> DecodingMethod:
    """Return the fastest method for rows of up to ``longest`` tokens whose logprobs equal those of plain forward passes.

    Each method is verified once for a model and its copies.
    """
    # Imported here, because the import of transformers' caches takes half a second.
    from cookbook.engine.decoding.rows import METHODS, SHARED_PROMPTS

    known, shares = _methods.setdefault(model.lineage, {}), _supports_shared_prompts(model, longest)
    if shares not in known:
        *faster, last = (SHARED_PROMPTS, *METHODS) if shares else METHODS
        candidates: list[tuple[str, Callable[[], DecodingMethod]]]
        candidates = [(method.description, functools.partial(_verified_method, model, method)) for method in faster]
        # The last method needs no verification: it runs plain forward passes.
        known[shares] = first_working(model, "sampling", [*candidates, (last.description, lambda: last)])
    return known[shares]


def _supports_shared_prompts(model: LanguageModel, longest: int) -> bool:
    """Whether rows of up to ``longest`` tokens may share one copy of their prompt.

    The model must use cookbook's attention and support prefix sharing, and no sliding window may be shorter than a row. Half
    precision on a GPU is excluded, because the products here would be float32. Models in which layers share keys and values
    are excluded, too.
    """
    from cookbook.engine.decoding.kv_cache import empty_states

    network = model.network
    half_on_gpu = network.dtype not in (torch.float32, torch.float64) and model.device.type != "cpu"
    # Verified once per model, and asked for at every batch.
    support = capabilities.PACKING.get(model.lineage) or capabilities.packing_support(model)
    if half_on_gpu or not (attention.is_installed(network) and support.shared):
        return False
    layers = empty_states(network).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    own_states = len(layers) == network.config.get_text_config().num_hidden_layers
    return own_states and all(window is None or window >= longest for window in windows)


@torch.no_grad()
def _verified_method(model: LanguageModel, method: DecodingMethod) -> DecodingMethod:
    """Return ``method`` if its logprobs, with its cache and its padding, equal those of plain forward passes.

    Raises:
        FastPathError: the logprobs differ, or are not finite.
    """
    # Eight tokens, because the caches of some architectures have small errors from the second token on.
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    prompts = [probe_tokens(model, start, start + 3) for start in (0, 2)]
    try:
        states = [sample_states(model, index, SampleRequest(text, 2, params, seed=0)) for index, text in enumerate(prompts)]
        completions = decode(model, states, 0, max_batch_tokens=1000, method=method)
    except RolloutError:
        # Either the weights are broken, or the model's own code gives NaN with padding.
        if not all(capabilities.plain_logprobs(model, prompt).isfinite().all() for prompt in prompts):
            raise
        raise FastPathError("its logits are not finite with a cache") from None
    for prompt, samples in zip(prompts, completions, strict=True):
        for sample in samples:
            logprobs = capabilities.plain_logprobs(model, prompt + sample.tokens[:-1])[-len(sample.tokens) :]
            expected = logprobs.gather(-1, torch.tensor(sample.tokens, device=model.device)[:, None])[:, 0]
            if not capabilities.are_close(model, torch.tensor(sample.logprobs, device=model.device), expected):
                raise FastPathError("its logprobs with a cache differ from those of a plain forward pass")
    return method
