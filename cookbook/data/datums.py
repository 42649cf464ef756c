"""Turn rows into datums and prompts that keep the name of their row, and draw batches in a seeded order."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cookbook import terminal
from cookbook.data import cache, datum_table
from cookbook.data.datum_table import EncodedRow, EncodedTable, RenderedPrompt, RowDatum
from cookbook.data.formats import (
    Example,
    Preference,
    RowReader,
    conversation_reader,
    label_reader,
    preference_reader,
    prompt_reader,
    question_of,
    separate_answers,
)
from cookbook.data.render import Rendered, Renderer
from cookbook.data.row_table import RowTable
from cookbook.data.rows import DataConfig, EmptyRowError, Policy, RejectedRows, Row
from cookbook.data.source import first_rows
from cookbook.errors import ConfigError, DataError
from cookbook.types import Datum, datum_from_tokens_weights

__all__ = [
    "RenderedPrompt",
    "RowDatum",
    "check_columns",
    "conversation_datums",
    "label_datums",
    "mismatched",
    "preference_datums",
    "prompts",
]

T = TypeVar("T")
# Texts per call of the tokenizer: enough for its threads, with offsets that need little memory.
BATCH = 256
Reader = Callable[[Row, DataConfig], RowReader[T]]
"""Chooses the reader of a dataset from its first row."""

# Stages at which a row may be rejected. A run stops at the first row that fails the earliest stage.
READ, RENDER, FIT = range(3)
# Keys of `data` that change neither the tokens of a row nor whether it is used: those that say which rows are read, and others.
# A key that is not named here changes the name of the cached table.
WITHOUT_EFFECT = frozenset(
    {
        "name",
        "path",
        "subset",
        "split",
        "eval_name",
        "eval_path",
        "eval_split",
        "eval_fraction",
        "limit",
        "shuffle",
        "curriculum",
        "streaming",
        "shuffle_buffer",
    }
    | {"cache"}
)


def conversation_datums(
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    refusals: RejectedRows | None = None,
    reader: RowReader[Sequence[Example]] | None = None,
) -> Sequence[RowDatum]:
    """Return one datum per row, in the order of the rows; with ``train_on=each_assistant``, one per answer.

    A pair has two with ``format=comparisons``: the better answer is the first, then the second.

    A conversation has several datums if the chat template rewrites earlier turns, so that one datum cannot train all answers
    as they are sampled.

    Each has ``num_bytes``, the bytes of the text of its trained tokens. The datums of a :class:`RowTable` are cached on disk.

    Args:
        refusals: receives the rows that are left out; None: the log gets their number.
        reader: reader of the dataset that ``rows`` are a part of; then all of them may be left out. None: they are the whole.

    Raises:
        DataError: a row that cannot be read or rendered, has nothing to train on, or is too long, as ``on_bad_row``,
            ``on_empty`` and ``on_long`` say; or no row is left.
    """
    sieve = _RowFilter(config, renderer, len(rows), refusals, reader)
    each = config.train_on == "each_assistant"
    train_on = "assistant" if each else config.train_on

    def keep(index: int, row: Row, _: Any, parts: Sequence[tuple[Example, list[Rendered] | None]]) -> Iterator[EncodedRow]:
        for example, sequences in parts:
            for rendered in sequences or ():
                if (fitting := sieve.fit(rendered, row.where)) is not None:
                    question = question_of(example, rendered.num_messages)
                    yield EncodedRow(index, question, np.asarray(fitting.tokens, np.int32), fitting.weights)

    steps = _Steps(
        conversation_reader,
        lambda found: [part for example in found for part in (separate_answers(example) if each else [example])],
        lambda examples: renderer.sequences(examples, train_on, empty_reasoning=config.train_empty_reasoning),
        keep,
    )
    return _datums("conversations", rows, sieve, steps, lambda encoded: _with_num_bytes(encoded, renderer))


def preference_datums(
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    refusals: RejectedRows | None = None,
    reader: RowReader[Preference] | None = None,
) -> Sequence[RowDatum]:
    """Return two datums per row, chosen then rejected; weights are 1 on the answer and 0 on the prompt.

    Args:
        refusals, reader: as of :func:`conversation_datums`.

    Raises:
        DataError: as :func:`conversation_datums`. A pair is left out as a whole.
    """
    sieve = _RowFilter(config, renderer, len(rows), refusals, reader)

    def keep(index: int, row: Row, pair: Any, parts: Sequence[tuple[Example, Rendered | None]]) -> Iterator[EncodedRow]:
        (_, chosen), (_, rejected) = parts
        fit_chosen = sieve.fit(chosen, row.where, "chosen")
        fit_rejected = fit_chosen and sieve.fit(rejected, row.where, "rejected")
        if fit_chosen and fit_rejected and not sieve.are_equal(fit_chosen, fit_rejected, row.where):
            for side in (fit_chosen, fit_rejected):
                yield EncodedRow(index, pair.chosen.question, side.tokens, side.weights)

    steps = _Steps(
        preference_reader,
        lambda pair: [pair.chosen, pair.rejected],
        lambda examples: renderer.render(examples, empty_reasoning=config.train_empty_reasoning),
        keep,
    )
    return _datums("preferences", rows, sieve, steps)


def label_datums(
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    refusals: RejectedRows | None = None,
    reader: RowReader[Any] | None = None,
) -> Sequence[RowDatum]:
    """Return one datum per labelled answer; weights are 1 on the answer and 0 on the prompt. A pair has two answers.

    Every token has the answer's label in ``labels``: 1 if it is desirable, else -1.

    Args:
        refusals, reader: as of :func:`conversation_datums`.

    Raises:
        DataError: as :func:`conversation_datums`.
    """
    sieve = _RowFilter(config, renderer, len(rows), refusals, reader)

    def keep(index: int, row: Row, answers: Any, parts: Sequence[tuple[Example, Rendered | None]]) -> Iterator[EncodedRow]:
        for answer, (example, rendered) in zip(answers, parts, strict=True):
            if (fit := sieve.fit(rendered, row.where)) is not None:
                # The table has no column for labels: undesirable answers have negative weights in it.
                yield EncodedRow(index, example.question, fit.tokens, fit.weights if answer.desirable else -fit.weights)

    steps = _Steps(
        label_reader,
        lambda answers: [answer.example for answer in answers],
        lambda examples: renderer.render(examples, empty_reasoning=config.train_empty_reasoning),
        keep,
    )
    place = datum_table.places(rows)

    def make(encoded: EncodedRow) -> RowDatum:
        datum = encoded.datum(place(encoded.row))
        weights = datum.loss_fn_inputs["weights"].array
        label = -1.0 if (weights < 0).any() else 1.0
        return datum.with_inputs(weights=np.abs(weights), labels=np.full(len(weights), label, np.float32))

    return sieve.kept("labels", rows, sieve.encode(rows, steps), datum_table.DATUMS, make)


def mismatched(data: Sequence[Datum], max_length: int | None) -> list[Datum]:
    """Return every prompt of ``data`` with the answer of another datum, whose prompt differs if possible.

    Each answer is used once: that of the datum before, or of the last for the first. If neighbors share their prompt, as the
    two answers of a pair do, the answers are exchanged between groups of equal prompts instead. An answer remains with its own
    prompt only if more than half of the datums share that prompt; if all do, the result says nothing about other prompts.

    The answer of a datum begins at its first token with a weight. ``labels`` are 0. Sequences longer than ``max_length`` tokens
    are cut off. A single datum has no answer of another, so the result is empty.

    Source: the estimate of the divergence in arXiv:2402.01306, section 4.1, with the rotation of its code and of TRL.
    """
    if len(data) < 2:
        return []
    prompts: list[tuple[int, ...]] = []
    answers: list[list[int]] = []
    for datum in data:
        tokens = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].array[-1])]
        # Target t is token t + 1.
        start = int(np.flatnonzero(datum.loss_fn_inputs["weights"].array)[0]) + 1
        prompts.append(tuple(tokens[:start]))
        answers.append(tokens[start:])
    mismatches = []
    for prompt, source in zip(prompts, _rotation(prompts), strict=True):
        # At least one token of the answer remains.
        prompt_start = prompt if max_length is None else prompt[: max_length - 1]
        answer = answers[source]
        mismatch = datum_from_tokens_weights(
            [*prompt_start, *answer], [0.0] * len(prompt_start) + [1.0] * len(answer), max_length
        )
        mismatches.append(mismatch.with_inputs(labels=np.zeros(mismatch.model_input.length, np.float32)))
    return mismatches


def _rotation(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return for each place the place whose answer it gets, a permutation without fixed points; see :func:`mismatched`."""
    count = len(prompts)
    previous = [(place - 1) % count for place in range(count)]
    if all(prompts[place] != prompts[source] for place, source in enumerate(previous)):
        return previous
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(place)
    order = [place for places in groups.values() for place in places]
    # A shift by the size of the largest group leaves every group. One group only has no other answers.
    shift = max(map(len, groups.values())) if len(groups) > 1 else 1
    sources = dict(zip(order, [*order[-shift:], *order[:-shift]], strict=True))
    return [sources[place] for place in range(count)]


def prompts(
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    max_tokens: int = 0,
    refusals: RejectedRows | None = None,
    reader: RowReader[Example] | None = None,
    key: str = "rollout.max_tokens",
) -> Sequence[RenderedPrompt]:
    """Return one prompt per row, in the order of the rows. The tokens of a :class:`RowTable` are cached on disk.

    Args:
        max_tokens: tokens of a completion, which must fit after the prompt.
        key: the key of ``max_tokens``, for errors.
        refusals, reader: as of :func:`conversation_datums`.

    Raises:
        DataError: as :func:`conversation_datums`. A prompt is never truncated: ``on_long=truncate`` has the effect of ``fail``.
    """
    sieve = _RowFilter(config, renderer, len(rows), refusals, reader)

    def keep(
        index: int, row: Row, example: Example, parts: Sequence[tuple[Example, tuple[list[int], str] | None]]
    ) -> Iterator[EncodedRow]:
        for _, rendered in parts:
            if rendered is not None and sieve.leaves_room(rendered[0], max_tokens, row.where, key):
                yield EncodedRow(index, example.question, rendered[0], text=rendered[1])

    steps = _Steps(prompt_reader, lambda example: [example], renderer.prompts, keep)

    @functools.cache
    def read() -> RowReader[Example]:
        return _reading(rows, prompt_reader, config, sieve.refusals) if reader is None else reader

    def make(encoded: EncodedRow) -> RenderedPrompt:
        row = rows[encoded.row]
        # An example is not kept in the table.
        return encoded.prompt(row, config, read()(row))

    encoded = sieve.encode(rows, steps)
    # Rejected rows are cached with their messages, which name the key.
    named = "" if key == "rollout.max_tokens" else f" {key}"
    return sieve.kept(f"prompts {max_tokens}{named}", rows, encoded, datum_table.PROMPTS, make)


@dataclass(frozen=True)
class _Steps(Generic[T]):
    """The way from a row to datums or prompts: read it, take its examples, render them, and keep what fits."""

    reader: Reader[Any]
    examples: Callable[[Any], Sequence[Example]]
    render: Callable[[Sequence[Example]], Sequence[T]]
    keep: Callable[[int, Row, Any, Sequence[tuple[Example, T | None]]], Iterable[EncodedRow]]


def _datums(
    kind: str,
    rows: Sequence[Row],
    sieve: _RowFilter,
    steps: _Steps[Any],
    finish: Callable[[Iterator[EncodedRow]], Iterator[EncodedRow]] = iter,
) -> Sequence[RowDatum]:
    place = datum_table.places(rows)
    encoded = finish(sieve.encode(rows, steps))
    return sieve.kept(kind, rows, encoded, datum_table.DATUMS, lambda item: item.datum(place(item.row)))


def _with_num_bytes(encoded: Iterator[EncodedRow], renderer: Renderer) -> Iterator[EncodedRow]:
    while block := list(itertools.islice(encoded, BATCH)):
        ends = np.cumsum([len(row.tokens) for row in block])
        tokens, weights = (np.concatenate([getattr(row, name) for row in block]) for name in ("tokens", "weights"))
        # Nothing predicts the first token.
        trained = weights != 0
        trained[np.append(0, ends[:-1])] = False
        ends_of_trained = np.append(0, trained.cumsum())[ends]
        sizes = renderer.num_bytes(tokens[trained], ends_of_trained)
        for row, size in zip(block, sizes, strict=True):
            yield EncodedRow(row.row, row.question, row.tokens, row.weights, size)


_READERS: Mapping[str, Reader[Any]] = {
    "conversations": conversation_reader,
    "preferences": preference_reader,
    "labels": label_reader,
    "rollouts": prompt_reader,
}


def check_columns(kind: str, rows: Sequence[Row], config: DataConfig) -> None:
    """Check that the rows have the columns of a kind of data, a recipe's ``DATA``: ``conversations``, ``labels``, ...

    Raises:
        DataError: a column is missing.
    """
    if rows:
        _reading(rows, _READERS[kind], config, RejectedRows(config))


def stream_reader(kind: str, config: DataConfig) -> RowReader[Any]:
    """Return the reader of a stream of rows, which does not depend on the order in which the rows are used.

    Raises:
        DataError: a source has no rows, or its first row lacks a column.
    """
    # The run itself reports bad rows, when it meets them.
    refusals = RejectedRows(config)
    first, *others = (_reading(rows, _READERS[kind], config, refusals) for rows in first_rows(config, refusals))
    for other in others:
        first.add_formats(other)
    return first


def _reading(rows: Iterable[Row], reader: Reader[T], config: DataConfig, refusals: RejectedRows) -> RowReader[T]:
    """Return the reader for the first row; if bad rows are skipped, for the first row that has a reader.

    Raises:
        DataError: the first row cannot be read; the error says why.
    """
    stream = iter(rows)
    first = next(stream)
    for row in itertools.chain([first], stream if refusals.skips_bad_rows else ()):
        with contextlib.suppress(DataError):
            return reader(row, config)
    return reader(first, config)


class _RowFilter:
    """Keep rows that can be trained on; record the others as rejected."""

    def __init__(
        self,
        config: DataConfig,
        renderer: Renderer,
        num_rows: int,
        refusals: RejectedRows | None = None,
        reader: RowReader[Any] | None = None,
    ) -> None:
        context = renderer.max_length
        if config.max_length is not None and context is not None and config.max_length > context:
            raise ConfigError(f"data.max_length={config.max_length} is above the model's context of {context} tokens; lower it")
        self.config = config
        self.renderer = renderer
        self.max_length = config.max_length or context
        self.num_rows = num_rows
        self.reader = reader
        self.tells = refusals is None
        self.refusals = RejectedRows(config) if refusals is None else refusals
        self.since = len(self.refusals.found)
        self.unused: dict[str, None] = {}  # columns
        self._rejected: list[list[tuple[str, Policy, str]]] = [[], [], []]
        # The last stage whose result is needed: after a row that stops the run, only earlier stages can name another row.
        self._last_stage = FIT

    def encode(self, rows: Sequence[Row], steps: _Steps[T]) -> Iterator[EncodedRow]:
        """Yield the tokens of the rows that can be used, in the order of the rows. Few rows are in memory at a time.

        Raises:
            DataError: a row stops the run. It is the first of all rows that cannot be read; else the first that cannot be
                rendered; else the first that does not fit. Rejected rows are recorded in the same order.
        """
        if not rows:
            return
        read = self.reader or _reading(rows, steps.reader, self.config, self.refusals)
        waiting: deque[tuple[int, Row, Any, Sequence[Example]]] = deque()
        examples: list[Example] = []
        results: deque[T | None] = deque()
        with terminal.doing("tokenizing", total=len(rows), noun="rows") as activity:
            for index, row in enumerate(rows):
                activity.count = index
                try:
                    value = read(row)
                    self.unused.update(dict.fromkeys(read.unused(row)))
                except DataError as error:
                    self._reject_error(READ, row.where, error)
                    continue
                if self._last_stage >= RENDER:
                    waiting.append((index, row, value, parts := steps.examples(value)))
                    examples += parts
                while len(examples) >= BATCH:
                    results += self._batch(examples[:BATCH], steps.render)
                    del examples[:BATCH]
                    yield from self._complete(waiting, results, steps)
            if examples and self._last_stage >= RENDER:
                results += self._batch(examples, steps.render)
            yield from self._complete(waiting, results, steps)
        self._record()

    def _complete(
        self, waiting: deque[tuple[int, Row, Any, Sequence[Example]]], results: deque[T | None], steps: _Steps[T]
    ) -> Iterator[EncodedRow]:
        """Yield what fits of the rows whose examples have all been rendered."""
        while waiting and len(waiting[0][3]) <= len(results):
            index, row, value, parts = waiting.popleft()
            rendered = [(part, results.popleft()) for part in parts]
            if self._last_stage >= FIT:
                yield from steps.keep(index, row, value, rendered)

    def _batch(self, examples: Sequence[Example], render: Callable[[Sequence[Example]], Sequence[T]]) -> Sequence[T | None]:
        """Render the examples. If the call fails, render them one by one to find the faulty ones."""
        try:
            return render(examples)
        except DataError as error:
            if len(examples) > 1:
                return [result for example in examples for result in self._batch([example], render)]
            self._reject_error(RENDER, examples[0].where, error)
            return [None]

    def _reject_error(self, stage: int, where: str, error: DataError) -> None:
        self._reject(stage, where, "on_empty" if isinstance(error, EmptyRowError) else "on_bad_row", str(error))

    def _reject(self, stage: int, where: str, policy: Policy, reason: str) -> None:
        self._rejected[stage].append((where, policy, reason))
        if self.refusals.stops_at(policy):
            self._last_stage = min(self._last_stage, stage - 1)
            # No later row can be named instead.
            if self._last_stage < READ:
                self._record()

    def _record(self) -> None:
        """Record the rejected rows. Raise DataError for the first that stops the run."""
        for where, policy, reason in itertools.chain(*self._rejected):
            self.refusals.add(where, policy, reason)

    def fit(self, rendered: Rendered | None, where: str, side: str = "") -> Rendered | None:
        """Return ``rendered``, truncated if configured; None if the row is left out. ``side``: chosen or rejected."""
        if rendered is None:
            return None
        place = f"{where}: {side}" if side else where
        if self._has_unknown_id(rendered.tokens, where, place):
            return None
        length, limit = len(rendered.tokens), self.max_length
        cut = limit is not None and length > limit
        if cut and self.config.on_long != "truncate":
            remedy = "shorten it, raise data.max_length if the model allows, or set data.on_long=skip or truncate"
            self._reject(FIT, where, "on_long", f"{place}: {length} tokens, and {limit} fit; {remedy}")
            return None
        if cut:
            rendered = Rendered(rendered.tokens[:limit], rendered.weights[:limit])
        if rendered.weights[1:].any():  # nothing predicts the first token
            return rendered
        reason = f"nothing to train on in the first {limit} tokens" if cut else "nothing to train on, all weights are 0"
        self._reject(FIT, where, "on_empty", f"{place}: {reason}; remove the row or set data.on_empty=skip")
        return None

    def _has_unknown_id(self, tokens: Sequence[int], where: str, place: str) -> bool:
        """Whether a token has no embedding in the model. Then the row is left out."""
        known = self.renderer.known_ids
        if known is None or (unknown := next((token for token in tokens if token >= known), None)) is None:
            return False
        text = self.renderer.tokenizer.convert_ids_to_tokens(int(unknown))
        self._reject(
            FIT,
            where,
            "on_bad_row",
            f"{place}: token {unknown} ({text!r}) is beyond the model's vocabulary of {known}; use the model's own tokenizer, "
            "or add the token in model.add_tokens to the model's original folder",
        )
        return True

    def are_equal(self, chosen: Rendered, rejected: Rendered, where: str) -> bool:
        """Whether both sides of a pair are the same tokens, so that neither is preferred. Then the pair is left out."""
        if list(chosen.tokens) != list(rejected.tokens):
            return False
        limit = f" in the first {self.max_length}" if len(chosen.tokens) == self.max_length else ""
        reason = f"chosen and rejected are the same tokens{limit}, so neither is preferred"
        self._reject(FIT, where, "on_empty", f"{where}: {reason}; remove the row or set data.on_empty=skip")
        return True

    def leaves_room(self, tokens: list[int], max_tokens: int, where: str, key: str = "rollout.max_tokens") -> bool:
        """Whether prompt and completion fit. If they do not, the prompt is left out."""
        if self._has_unknown_id(tokens, where, where):
            return False
        if self.max_length is None or len(tokens) + max_tokens <= self.max_length:
            return True
        self._reject(
            FIT,
            where,
            "on_long",
            f"{where}: a prompt of {len(tokens)} tokens and a completion of up to {max_tokens} do not fit in "
            f"{self.max_length}; lower {key}, shorten the prompt, or set data.on_long=skip",
        )
        return False

    def kept(
        self,
        kind: str,
        rows: Sequence[Row],
        encoded: Iterator[EncodedRow],
        columns: Mapping[str, str],
        make: Callable[[EncodedRow], T],
    ) -> Sequence[T]:
        """Return the result of ``make`` for each of ``encoded``, after checking that rows are left and logging the others.

        Many rows become a table of the cache, or come from there: then nothing is taken from ``encoded``.

        Raises:
            DataError: a row stops the run, or every row was left out.
        """
        items: Sequence[T]
        if isinstance(rows, RowTable) and not self.refusals.collects:
            items = EncodedTable(self._table(kind, rows, encoded, columns), make)
        else:
            items = [make(row) for row in encoded]
        self.refusals.note_unused(self.unused, self.renderer.unused_fields)
        self.refusals.add_notes(self.renderer.notes)
        if self.reader is None:
            self.refusals.check_left(self.since, self.num_rows, len(items))
        if self.tells:
            self.refusals.warn(self.num_rows)
        return items

    def _table(
        self, kind: str, rows: RowTable, encoded: Iterator[EncodedRow], columns: Mapping[str, str]
    ) -> Mapping[str, npt.NDArray[Any]]:
        """Return the columns of the encoded rows, from the cache if possible."""
        root = cache.location(self.config.cache)
        options = {name: value for name, value in asdict(self.config).items() if name not in WITHOUT_EFFECT}
        renderer = self.renderer
        limits = (renderer.max_length, renderer.known_ids) if renderer.known_ids else renderer.max_length
        key = cache.key_of("tokens", kind, rows.identity, options, limits, renderer.identity())
        if root is not None and (table := cache.find(root, key)) is not None:
            self._rejected[READ] = [(where, policy, reason) for where, policy, reason in table.facts["rejected"]]
            self._record()
            self.unused.update(dict.fromkeys(table.facts["unused"]))
            renderer.restore(**table.facts["renderer"])
            return table.arrays
        writer = cache.TableWriter(root, columns)
        with renderer.recording() as effect:
            datum_table.write(writer, encoded, columns)
        arrays = writer.arrays()
        facts = {"rows": len(arrays["row"]), "first": rows.place(0), "unused": list(self.unused), "renderer": effect}
        writer.commit(key, {**facts, "rejected": list(itertools.chain(*self._rejected))})
        return arrays
