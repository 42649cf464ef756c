"""Survey of a dataset: every row as tokens with training weights, and the rows that cannot be used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cookbook.data import (
    DataConfig,
    RejectedRow,
    RejectedRows,
    Renderer,
    Row,
    RowDatum,
    conversation_datums,
    label_datums,
    preference_datums,
    prompts,
)
from cookbook.types import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WeightedSequence:
    """One sequence of the model: ``weights[i]`` is the weight of predicting ``tokens[i]``, both ``(T,)``.

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
    """The rows of one split. ``unused`` names the columns, and the fields of messages, that train nothing.

    ``notes``: what the user should know about the chat template.
    """

    num_rows: int
    num_used: int
    sequences: Sequence[WeightedSequence]
    refused: Sequence[RejectedRow]
    unused: Sequence[str] = ()
    notes: Sequence[str] = ()


def survey(
    kind: str,
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    max_tokens: int,
    refusals: RejectedRows | None = None,
    key: str = "rollout.max_tokens",
) -> Survey:
    """Return the sequences that a recipe with data of this ``kind`` trains on, and the rejected rows.

    Args:
        kind: ``conversations``, ``preferences``, ``labels`` or ``rollouts``, a recipe's ``DATA``.
        max_tokens: of the completions of a rollout; ``key`` is their key, for errors.
        refusals: holds the rows that could not be read.

    Raises:
        CookbookError: what concerns the dataset as a whole, such as columns that do not suit the recipe.
    """
    refusals = RejectedRows(config, collect=True) if refusals is None else refusals
    num_rows = len(rows) + len(refusals.found)
    if kind == "rollouts":
        rendered = prompts(rows, renderer, config, max_tokens, refusals, key=key)
        num_used = len(rendered)
        sequences = [WeightedSequence(prompt.row.where, prompt.tokens, np.zeros(len(prompt.tokens))) for prompt in rendered]
    else:
        pairs = kind == "preferences"
        make = {"preferences": preference_datums, "labels": label_datums}.get(kind, conversation_datums)
        datums = make(rows, renderer, config, refusals)
        sides = ["chosen", "rejected"] if pairs else [""]
        sequences = [_sequence(datum, side) for datum, side in zip(datums, itertools.cycle(sides), strict=False)]
        used = {sequence.where for sequence in sequences}
        # A mixture may have a row several times.
        num_used = sum(row.where in used for row in rows)
    return Survey(num_rows, num_used, sequences, refusals.found, list(refusals.unused), list(refusals.notes))


def _sequence(datum: RowDatum, side: str) -> WeightedSequence:
    inputs = datum.loss_fn_inputs
    tokens = [*datum.model_input.tokens, int(inputs["target_tokens"].array[-1])]
    return WeightedSequence(datum.where, tokens, np.concatenate([[0.0], inputs["weights"].array]), side)


def lengths(sequences: Sequence[WeightedSequence], length: Callable[[WeightedSequence], int]) -> dict[str, int]:
    """Count, sum and percentiles of a length over the sequences; at least one."""
    values = np.array([length(sequence) for sequence in sequences])
    percentiles = {f"{share}%": int(np.percentile(values, share, method="higher")) for share in (50, 90, 99)}
    ends = {"shortest": int(values.min()), **percentiles, "longest": int(values.max())}
    return {"sequences": len(values), "tokens": int(values.sum()), **ends}


@dataclass(frozen=True)
class TextSpan:
    """Consecutive text of one weight."""

    text: str
    weight: float


def text_spans(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], weights: Array) -> list[TextSpan]:
    """The text token by token. Tokens that spell a character only together are one piece, as far as their weight is the same.

    A token is decoded after the piece before it: alone, some tokenizers drop the space it begins with.
    """
    spans: list[TextSpan] = []
    before, start = 0, 0
    for end in range(1, len(tokens) + 1):
        known, text = (_decoded(tokenizer, tokens[before:upto]) for upto in (start, end))
        unfinished = text.endswith("\ufffd") and end < len(tokens) and weights[end] == weights[start]
        # No character has more than four bytes.
        if unfinished and end - start < 4:
            continue
        spans.append(TextSpan(text[len(known) :], float(weights[start])))
        before, start = start, end
    return spans


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)) if len(tokens) else ""
