"""Collation: the tensors of one forward pass from the datums of a micro-batch, and the selection of tokens to score.

Pass 1 of the shared layout in the example of :mod:`cookbook.engine.batch.plan`, datums 0, 2, 4 and 3. Runs are sorted by
shape::

    row             e   c c   d d d   a a a   P P P P
    position_ids    4   4 5   0 1 2   4 5 6   0 1 2 3
    flat index      0   1 2   3 4 5   6 7 8   9 10 11 12

    run             keys
    e               P P P P e
    c c             P P P P c c
    d d d           d d d
    a a a           P P P P a a a
    P P P P         P P P P

    flat_indices    datum 0: 9 10 11 12 6 7 8   datum 2: 9 10 11 12 1 2   datum 4: 9 10 11 12 0   datum 3: 3 4 5
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cookbook.engine.attention import AttentionBlock, AttentionLayout
from cookbook.engine.batch.plan import MicroBatch, token_ids
from cookbook.errors import DataError
from cookbook.types import Array, Datum, ModelInput


def check_data(data: Sequence[Datum], vocabulary: int, max_length: int) -> None:
    """Check inputs that would otherwise fail inside the model, or give wrong numbers without an error.

    ``max_length``: context length of the model, tokens.

    Raises:
        DataError: a datum lacks ``target_tokens``, is empty or too long, or holds an invalid target, temperature or token.
    """
    for index, datum in enumerate(data):
        _check_datum(datum, index, vocabulary, max_length)


def _check_datum(datum: Datum, index: int, vocabulary: int, max_length: int) -> None:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise DataError(
            f"datum {index}: missing required field 'target_tokens'; build it with datum_from_tokens_weights, or add the "
            "input tokens shifted by one"
        )
    length = datum.model_input.length
    targets = datum.loss_fn_inputs["target_tokens"].array
    if length == 0:
        raise DataError(f"datum {index}: model_input is empty; give at least one token")
    if length > max_length:
        raise DataError(f"datum {index}: {length} tokens exceed the model's context of {max_length}; shorten it")
    if targets.dtype.kind not in "iu" or targets.ndim not in (1, 2):
        raise DataError(
            f"datum {index}: target_tokens must be integers of shape (T,) or (T, K), got {targets.dtype} {targets.shape}; give "
            "one token id per position"
        )
    if "temperature" in datum.loss_fn_inputs:
        temperature = datum.loss_fn_inputs["temperature"].array
        if temperature.ndim or not 0 < float(temperature) < float("inf"):
            raise DataError(
                f"datum {index}: temperature must be one number > 0, got {temperature.tolist()}; pass the temperature that the "
                "tokens were sampled with"
            )
    if not targets.size:
        raise DataError(f"datum {index}: target_tokens of shape {targets.shape} hold no target; give at least one per position")
    if (low := int(targets.min())) < 0:
        position = int(targets.argmin()) // (targets.size // len(targets))
        raise DataError(
            f"datum {index}: target_tokens holds {low} at position {position}, which is not a token id; to mask the position, "
            "set its weight to 0 and its target to any token id"
        )
    for key, low, high in (
        ("model_input", min(datum.model_input.tokens), max(datum.model_input.tokens)),
        ("target_tokens", int(targets.min()), int(targets.max())),
    ):
        if low < 0 or high >= vocabulary:
            invalid = low if low < 0 else high
            raise DataError(
                f"datum {index}: {key} holds token {invalid}, but the vocabulary has {vocabulary} tokens; use this model's "
                "tokenizer"
            )


# ---- tensors of a pass -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassInputs:
    """Tensors of one forward pass.

    ``input_ids`` and ``position_ids``: ``(B, T)``; a packed row has ``B = 1``. ``flat_indices``, on the CPU: the index of every
    token of every datum in the flattened output ``(B * T, ...)``, datum by datum in the order of the micro-batch. The index of
    a shared prefix token is repeated for each datum that has the token. ``layout``: attention layout of a packed row; None:
    one datum per row.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    flat_indices: Tensor
    layout: AttentionLayout | None

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of the network for this pass."""
        if self.layout is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "layout": self.layout}


def collate(data: Sequence[Datum], batch: MicroBatch, device: torch.device) -> PassInputs:
    """Return the tensors for the datums of ``batch``; ``data`` holds all datums of the call."""
    sequences = {index: token_ids(data[index]) for index in batch.indices}
    return _packed(sequences, batch, device) if batch.width is None else _padded(sequences, device)


def _padded(sequences: Mapping[int, Array], device: torch.device) -> PassInputs:
    """One datum per row. With causal attention, padding at the end of a row needs no mask.

    Any token can be the padding. Token 0 always exists, while a tokenizer's padding token may be outside the vocabulary.
    """
    rows = [torch.from_numpy(sequence) for sequence in sequences.values()]
    ids = pad_sequence(rows, batch_first=True)
    flat_indices = [torch.arange(len(tokens)) + row * ids.shape[1] for row, tokens in enumerate(rows)]
    return PassInputs(ids.to(device), None, torch.cat(flat_indices), None)


@dataclass
class _TokenRun:
    """Consecutive tokens of a datum: the prefix of a group, or the remaining tokens of a member.

    ``index``: a datum that contains the run. ``start`` and ``stop``: positions in the datum. ``flat_indices``: indices in the
    row.
    """

    index: int
    start: int
    stop: int
    prefix: _TokenRun | None = None
    flat_indices: Array = field(init=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries, and of keys: each run attends to all earlier tokens of its datum."""
        return self.stop - self.start, self.stop


def _packed(sequences: Mapping[int, Array], batch: MicroBatch, device: torch.device) -> PassInputs:
    """All runs in one row. Runs of one shape are adjacent, because the attention computes them as one batch.

    The runs of one of the batch's ``parts`` stay together.
    """
    prefixes, branches = [], []
    of_datum: dict[int, list[_TokenRun]] = {}
    for group in batch.groups:
        prefixes.append(prefix := _TokenRun(group.members[0], 0, group.prefix))
        for index in group.members:
            of_datum[index] = [prefix]
            if len(sequences[index]) > group.prefix:
                branches.append(_TokenRun(index, group.prefix, len(sequences[index]), prefix))
                of_datum[index].append(branches[-1])
    runs = sorted([*prefixes, *branches], key=lambda run: (batch.parts.get(run.index, 0), run.shape))
    end = 0
    for run in runs:
        run.flat_indices = np.arange(end, end := end + run.stop - run.start)
    shapes = itertools.groupby(run.shape for run in runs)
    blocks = tuple(AttentionBlock(len(list(same)), *shape) for shape, same in shapes)
    keys = [
        part for run in runs for part in ((run.prefix.flat_indices, run.flat_indices) if run.prefix else (run.flat_indices,))
    ]
    ids = np.concatenate([sequences[run.index][run.start : run.stop] for run in runs])
    positions = np.concatenate([np.arange(run.start, run.stop) for run in runs])
    flat_indices = np.concatenate([run.flat_indices for index in batch.indices for run in of_datum[index]])
    layout = AttentionLayout(blocks, _tensor(np.concatenate(keys), device) if branches else None, device)
    return PassInputs(_tensor(ids[None], device), _tensor(positions[None], device), torch.from_numpy(flat_indices), layout)


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


# ---- tokens to score -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenSelection:
    """Tokens of a pass whose logprobs are computed, datum by datum, in the order of the pass.

    ``positions``: by datum, the selected positions, ``(n,)`` int64, ascending. ``lengths``: by datum, the number of tokens.
    """

    positions: dict[int, Tensor]
    lengths: dict[int, int]

    @classmethod
    def of(cls, data: Sequence[Datum], indices: Sequence[int], *, weighted_only: bool) -> TokenSelection:
        """Select all tokens; with ``weighted_only``, only the tokens with nonzero weight of the datums that have weights."""
        lengths = {index: data[index].model_input.length for index in indices}
        return cls({index: _positions(data[index], weighted_only) for index in indices}, lengths)

    def __len__(self) -> int:
        return sum(map(len, self.positions.values()))

    @property
    def datum_ends(self) -> list[int]:
        """End offset of each datum, counted in selected tokens."""
        return list(itertools.accumulate(map(len, self.positions.values())))

    def rows(self) -> Tensor:
        """Indices of the selected tokens among all tokens of the pass's datums, ``(len(self),)``."""
        starts = itertools.accumulate(self.lengths.values(), initial=0)
        return torch.cat([positions + start for positions, start in zip(self.positions.values(), starts, strict=False)])

    def targets(self, data: Sequence[Datum]) -> Tensor:
        """Targets of the selected tokens, ``(len(self),)`` or ``(len(self), K)``."""
        return self.gather({index: data[index].loss_fn_inputs["target_tokens"].to_torch().long() for index in self.positions})

    def temperatures(self, data: Sequence[Datum]) -> Tensor | None:
        """Temperatures of the selected tokens, ``(len(self),)``; None if no datum has a temperature."""
        inputs = [data[index].loss_fn_inputs for index in self.positions]
        if not any("temperature" in fields for fields in inputs):
            return None
        values = [float(fields["temperature"].array) if "temperature" in fields else 1.0 for fields in inputs]
        counts = torch.tensor([len(positions) for positions in self.positions.values()])
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), counts)

    def parts(self, data: Sequence[Datum], rows: slice) -> Iterator[tuple[int, Datum]]:
        """Yield index and datum for each datum that has tokens among the selected ``rows``, cut down to these tokens."""
        start = 0
        for index, positions in self.positions.items():
            first, last = max(rows.start - start, 0), min(rows.stop - start, len(positions))
            if first < last:
                yield index, _at_positions(data[index], positions[first:last])
            start += len(positions)

    def scatter(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Scatter ``(len(self), ...)`` into one ``(T, ...)`` per datum, with 0 at tokens that are not selected."""
        parts = torch.split(values, [len(positions) for positions in self.positions.values()])
        for (index, positions), part in zip(self.positions.items(), parts, strict=True):
            if len(positions) == self.lengths[index]:
                yield index, part
            else:
                yield index, values.new_zeros(self.lengths[index], *values.shape[1:]).index_copy(0, positions, part)

    def gather(self, columns: Mapping[int, Tensor]) -> Tensor:
        """Gather the selected tokens from one ``(T, ...)`` per datum into ``(len(self), ...)``."""
        return torch.cat([columns[index][positions] for index, positions in self.positions.items()])

    def unselected_masks(self) -> dict[int, Tensor]:
        """Return masks of the tokens that are not selected, ``(T,)`` bool, for the datums that have such tokens."""
        masks = {}
        for index, positions in self.positions.items():
            if len(positions) < self.lengths[index]:
                masks[index] = torch.ones(self.lengths[index], dtype=torch.bool)
                masks[index][positions] = False
        return masks


def _positions(datum: Datum, weighted_only: bool) -> Tensor:
    weights = datum.loss_fn_inputs["weights"].array if weighted_only and "weights" in datum.loss_fn_inputs else None
    if weights is None or weights.ndim == 0:
        return torch.arange(datum.model_input.length)
    return torch.from_numpy(np.flatnonzero(weights.reshape(len(weights), -1).any(-1)))


def _at_positions(datum: Datum, positions: Tensor) -> Datum:
    """Return ``datum`` with only the tokens at ``positions`` and their loss inputs, for a loss with independent terms."""
    if len(positions) == datum.model_input.length:
        return datum
    places = positions.numpy()
    tokens = np.asarray(datum.model_input.tokens)[places]
    arrays = {key: value.array for key, value in datum.loss_fn_inputs.items()}
    inputs = {key: array[places] if array.ndim else array for key, array in arrays.items()}
    return Datum(ModelInput.from_ints(tokens), inputs)
