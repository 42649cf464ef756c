"""What of a dataset would be trained: every row as tokens with weights, and the rows that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cookbook.data import (
    DataConfig,
    Refusal,
    Refusals,
    Renderer,
    Row,
    RowDatum,
    conversation_datums,
    preference_datums,
    prompts,
)
from cookbook.types import Array


@dataclass(frozen=True)
class Trained:
    """One sequence as the model reads it: ``weights[i]`` is how much predicting ``tokens[i]`` counts, ``(T,)`` both.

    ``side`` is ``chosen`` or ``rejected``, or empty.
    """

    where: str
    tokens: Sequence[int]
    weights: Array
    side: str = ""

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.weights))


@dataclass(frozen=True)
class Survey:
    """The rows of one split. ``unused`` names the columns, and the fields of messages, that train nothing."""

    num_rows: int
    num_used: int
    sequences: Sequence[Trained]
    refused: Sequence[Refusal]
    unused: Sequence[str] = ()


def survey(
    kind: str, rows: Sequence[Row], renderer: Renderer, config: DataConfig, max_tokens: int, refusals: Refusals | None = None
) -> Survey:
    """What a recipe that learns from ``kind`` makes of ``rows``.

    Args:
        kind: ``conversations``, ``preferences`` or ``rollouts``, a recipe's ``DATA``.
        max_tokens: of the completions of a rollout.
        refusals: has collected the rows that could not even be read.

    Raises:
        CookbookError: what concerns the dataset as a whole, such as columns that do not suit the recipe.
    """
    refusals = Refusals(config, collect=True) if refusals is None else refusals
    num_rows = len(rows) + len(refusals.found)
    if kind == "rollouts":
        found = prompts(rows, renderer, config, max_tokens, refusals)
        sequences = [Trained(one.row.where, one.tokens, np.zeros(len(one.tokens))) for one in found]
        return Survey(num_rows, len(found), sequences, refusals.found, list(refusals.unused))
    if kind == "preferences":
        datums = preference_datums(rows, renderer, config, refusals)
        sides = ["chosen", "rejected"] * (len(datums) // 2)
    else:
        datums = conversation_datums(rows, renderer, config, refusals)
        sides = [""] * len(datums)
    sequences = [_sequence(one, side) for one, side in zip(datums, sides, strict=True)]
    num_used = len({one.where for one in sequences})
    return Survey(num_rows, num_used, sequences, refusals.found, list(refusals.unused))


def _sequence(datum: RowDatum, side: str) -> Trained:
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.tokens, int(inputs["target_tokens"].array[-1])]
    return Trained(datum.where, tokens, np.concatenate([[0.0], inputs["weights"].array]), side)


def lengths(sequences: Sequence[Trained], length: Callable[[Trained], int]) -> dict[str, int]:
    """Count, sum and percentiles of a length over the sequences; at least one."""
    values = np.array([length(one) for one in sequences])
    percentiles = {f"{share}%": int(np.percentile(values, share, method="higher")) for share in (50, 90, 99)}
    ends = {"shortest": int(values.min()), **percentiles, "longest": int(values.max())}
    return {"sequences": len(values), "tokens": int(values.sum()), **ends}


@dataclass(frozen=True)
class Piece:
    """A stretch of text with one weight."""

    text: str
    weight: float


def pieces(tokenizer: Any, tokens: Sequence[int], weights: Array) -> list[Piece]:
    """The text token by token. Tokens that spell a character only together are one piece, as far as their weight is the same.

    A token is decoded behind the piece before it: alone, some tokenizers drop the space it begins with.
    """
    found: list[Piece] = []
    before, start = 0, 0
    for end in range(1, len(tokens) + 1):
        known, text = (_decoded(tokenizer, tokens[before:upto]) for upto in (start, end))
        unfinished = text.endswith("\ufffd") and end < len(tokens) and weights[end] == weights[start]
        if unfinished and end - start < 4:  # no character has more bytes
            continue
        found.append(Piece(text[len(known) :], float(weights[start])))
        before, start = start, end
    return found


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)) if len(tokens) else ""
