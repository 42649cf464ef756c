"""Sampling from a causal model: prompts read once, all their completions decoded side by side.

The draw of sample ``i`` at position ``t`` is a function of the request's seed, ``i`` and ``t`` alone, so what else is in the
batch does not matter (up to float rounding of the logits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cookbook.engine.model import LanguageModel
from cookbook.engine.requests import Piece, Request, check_prompt, lanes_of
from cookbook.types import Sample

if TYPE_CHECKING:
    from cookbook.engine.decoded_rows import Way

__all__ = ["Piece", "Request", "check_prompt", "decode", "sample", "stream"]

STREAMED_AT_ONCE = 4  # tokens


def sample(model: LanguageModel, requests: Sequence[Request], step: int, max_batch_tokens: int) -> list[list[Sample]]:
    """Answers all requests, with at most ``max_batch_tokens`` prompt and completion tokens under way at a time.

    A single completion that is larger than that is decoded alone.

    Raises:
        RolloutError: a prompt is empty or not of this vocabulary, or leaves no room for its completion; logits that are not
            numbers.
    """
    return decode(model, requests, step, max_batch_tokens)


def decode(
    model: LanguageModel, requests: Sequence[Request], step: int, max_batch_tokens: int, *, way: Way | None = None
) -> list[list[Sample]]:
    """Answers all requests as :func:`sample` does, in a given ``way`` to hold what the rows have read."""
    from cookbook.engine.decoding import Decoder  # it imports transformers: half a second, when a model is there anyway

    model.network.eval()
    lanes = [lanes_of(model, index, request) for index, request in enumerate(requests)]
    for _ in Decoder(model, [lane for group in lanes for lane in group], max_batch_tokens, way=way).rounds():
        pass
    return [[Sample(lane.tokens, lane.logprobs, lane.stop_reason or "length", step) for lane in group] for group in lanes]


def stream(model: LanguageModel, request: Request, max_batch_tokens: int) -> Iterator[Piece]:
    """The same samples as :func:`sample` gives, a few tokens at a time, as they come. Raises as it does."""
    from cookbook.engine.decoding import Decoder

    model.network.eval()
    told = [0] * request.num_samples
    for lanes in Decoder(model, lanes_of(model, 0, request), max_batch_tokens, STREAMED_AT_ONCE).rounds():
        for lane in lanes:
            start, told[lane.number] = told[lane.number], len(lane.tokens)
            yield Piece(lane.number, lane.tokens[start:], lane.logprobs[start:], lane.stop_reason)
