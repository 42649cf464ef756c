"""From rows to what a trainer takes. Every datum remembers its row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cookbook import terminal
from cookbook.data.answers import with_answer
from cookbook.data.config import DataConfig
from cookbook.data.formats import (
    Chat,
    Example,
    RowReader,
    conversation_reader,
    preference_reader,
    prompt_reader,
    question,
    separate_answers,
)
from cookbook.data.refusals import Refusals
from cookbook.data.render import BATCH, Rendered, Renderer
from cookbook.data.rows import Row
from cookbook.errors import ConfigError, DataError
from cookbook.types import Datum, ModelInput, datum_from_tokens_weights

T = TypeVar("T")
Reader = Callable[[Row, DataConfig], RowReader[T]]
"""From a dataset's first row to the reader of all its rows."""


@dataclass(frozen=True, eq=False, init=False)
class RowDatum(Datum):
    """A datum that names the row it came from, and what that row asks."""

    where: str
    question: str

    def __init__(
        self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None, where: str = "", question: str = ""
    ) -> None:
        super().__init__(model_input, loss_fn_inputs)
        object.__setattr__(self, "where", where)
        object.__setattr__(self, "question", question)

    def with_inputs(self, **inputs: Any) -> RowDatum:
        return RowDatum(self.model_input, {**self.loss_fn_inputs, **inputs}, self.where, self.question)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowDatum, (self.model_input, dict(self.loss_fn_inputs), self.where, self.question)


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """A prompt to sample from: its tokens, the row a reward reads, the text the tokens spell, and what it asks.

    The row is as it was read; with its answer as text, in a column ``answer``, where it has one in another form.
    """

    tokens: list[int]
    row: Row
    text: str
    question: str


def conversation_datums(
    rows: Sequence[Row], renderer: Renderer, config: DataConfig, refusals: Refusals | None = None
) -> list[RowDatum]:
    """One datum per row, in the order of the rows; one per answer with ``train_on=each_assistant``.

    Each knows ``num_bytes``, the bytes of the text its trained tokens spell.

    Args:
        refusals: gets the rows that are left out. Without it the log tells how many there are.

    Raises:
        DataError: a row that cannot be read or rendered, has nothing to train on, or is too long, as ``on_bad_row``,
            ``on_empty`` and ``on_long`` say; or no row is left.
    """
    sieve = _Sieve(config, renderer, len(rows), refusals)
    examples = [example for _, example in sieve.read(rows, conversation_reader)]
    train_on = config.train_on
    if train_on == "each_assistant":
        train_on = "assistant"
        examples = [part for example in examples for part in _parts(example)]
    datums = []
    for example, rendered in zip(examples, sieve.render(examples, train_on), strict=True):
        if (kept := sieve.fit(rendered, example.where)) is not None:
            datums.append(_datum(kept, example.where, question(example)))
    sizes = renderer.num_bytes([_trained_tokens(datum) for datum in datums])
    return sieve.kept([datum.with_inputs(num_bytes=size) for datum, size in zip(datums, sizes, strict=True)])


def preference_datums(
    rows: Sequence[Row], renderer: Renderer, config: DataConfig, refusals: Refusals | None = None
) -> list[RowDatum]:
    """Two datums per row, chosen then rejected; the weights of each are 1 on its answer and 0 on the prompt.

    Args:
        refusals: as of :func:`conversation_datums`.

    Raises:
        DataError: as :func:`conversation_datums`. A row is left out whole: never half a pair.
    """
    sieve = _Sieve(config, renderer, len(rows), refusals)
    pairs = sieve.read(rows, preference_reader)
    rendered = iter(sieve.render([side for _, pair in pairs for side in (pair.chosen, pair.rejected)]))
    datums = []
    for row, pair in pairs:
        chosen, rejected = next(rendered), next(rendered)
        fit_chosen = sieve.fit(chosen, row.where, "chosen")
        fit_rejected = fit_chosen and sieve.fit(rejected, row.where, "rejected")
        if fit_chosen and fit_rejected:
            datums += [_datum(side, row.where, question(pair.chosen)) for side in (fit_chosen, fit_rejected)]
    return sieve.kept(datums)


def prompts(
    rows: Sequence[Row],
    renderer: Renderer,
    config: DataConfig,
    max_tokens: int = 0,
    refusals: Refusals | None = None,
) -> list[RenderedPrompt]:
    """One prompt per row, in the order of the rows.

    Args:
        max_tokens: of the completions, which have to fit behind the prompt.
        refusals: as of :func:`conversation_datums`.

    Raises:
        DataError: as :func:`conversation_datums`. A prompt is never cut: ``on_long=truncate`` fails as ``fail`` does.
    """
    sieve = _Sieve(config, renderer, len(rows), refusals)
    examples = sieve.read(rows, prompt_reader)
    found = []
    for (row, example), rendered in zip(examples, sieve.prompts([example for _, example in examples]), strict=True):
        if rendered is not None and sieve.leaves_room(rendered[0], max_tokens, row.where):
            tokens, text = rendered
            found.append(RenderedPrompt(tokens, with_answer(row, config), text, question(example)))
    return sieve.kept(found)


_READERS: Mapping[str, Reader[Any]] = {
    "conversations": conversation_reader,
    "preferences": preference_reader,
    "rollouts": prompt_reader,
}


def check_columns(kind: str, rows: Sequence[Row], config: DataConfig) -> None:
    """Whether the rows have the columns of what a recipe learns from: ``conversations``, ``preferences`` or ``rollouts``.

    Raises:
        DataError: they have not.
    """
    if rows:
        _reading(rows, _READERS[kind], config, Refusals(config))


def _reading(rows: Sequence[Row], reader: Reader[T], config: DataConfig, refusals: Refusals) -> RowReader[T]:
    """Return the reader that suits the first row; if bad rows are left out, the first row that a reader suits.

    Raises:
        DataError: what is wrong with the first row.
    """
    for row in rows if refusals.skips_bad_rows else rows[:1]:
        with contextlib.suppress(DataError):
            return reader(row, config)
    return reader(rows[0], config)


def _parts(example: Example) -> Sequence[Example]:
    return separate_answers(example) if isinstance(example, Chat) else [example]


def _datum(rendered: Rendered, where: str, question: str) -> RowDatum:
    try:
        datum = datum_from_tokens_weights(rendered.tokens, rendered.weights)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return RowDatum(datum.model_input, datum.loss_fn_inputs, where, question)


def _trained_tokens(datum: Datum) -> list[int]:
    inputs = datum.loss_fn_inputs
    tokens: list[int] = inputs["target_tokens"].array[inputs["weights"].array != 0].tolist()
    return tokens


class _Sieve:
    """Parts the rows that can be trained from those that cannot."""

    def __init__(self, config: DataConfig, renderer: Renderer, num_rows: int, refusals: Refusals | None = None) -> None:
        context = renderer.max_length
        if config.max_length is not None and context is not None and config.max_length > context:
            raise ConfigError(f"data.max_length={config.max_length} is above the model's context of {context} tokens; lower it")
        self.config = config
        self.renderer = renderer
        self.max_length = config.max_length or context
        self.num_rows = num_rows
        self.tells = refusals is None
        self.refusals = Refusals(config) if refusals is None else refusals
        self.since = len(self.refusals.found)
        self.unused: dict[str, None] = {}  # columns

    def read(self, rows: Sequence[Row], reader: Reader[T]) -> list[tuple[Row, T]]:
        """The rows that are not empty, each with what ``reader`` makes of it."""
        if not rows:
            return []
        read = _reading(rows, reader, self.config, self.refusals)
        found = []
        for row in rows:
            try:
                found.append((row, read(row)))
                self.unused.update(dict.fromkeys(read.unused(row)))
            except DataError as error:
                self.refusals.add_error(row.where, error)
        return found

    def render(self, examples: Sequence[Example], train_on: str = "assistant") -> list[Rendered | None]:
        """Each example with weights; None where it cannot be shown."""
        return self._each(examples, lambda some: self.renderer.render(some, train_on))

    def prompts(self, examples: Sequence[Example]) -> list[tuple[list[int], str] | None]:
        """Each example's prompt, as tokens and text; None where it cannot be shown."""
        return self._each(examples, self.renderer.prompts)

    def fit(self, rendered: Rendered | None, where: str, side: str = "") -> Rendered | None:
        """``rendered``, cut if that is asked for; None when it is left out. ``side`` of a pair it is."""
        if rendered is None:
            return None
        place = f"{where}: {side}" if side else where
        length, limit = len(rendered.tokens), self.max_length
        cut = limit is not None and length > limit
        if cut and self.config.on_long != "truncate":
            remedy = "shorten it, raise data.max_length if the model allows, or set data.on_long=skip or truncate"
            self.refusals.add(where, "on_long", f"{place}: {length} tokens, and {limit} fit; {remedy}")
            return None
        if cut:
            rendered = Rendered(rendered.tokens[:limit], rendered.weights[:limit])
        if np.any(rendered.weights[1:]):  # nothing predicts the first token
            return rendered
        reason = f"nothing to train on in the first {limit} tokens" if cut else "nothing to train on, all weights are 0"
        self.refusals.add(where, "on_empty", f"{place}: {reason}; remove the row or set data.on_empty=skip")
        return None

    def leaves_room(self, tokens: list[int], max_tokens: int, where: str) -> bool:
        """Whether prompt and completion fit; False when the prompt is left out."""
        if self.max_length is None or len(tokens) + max_tokens <= self.max_length:
            return True
        self.refusals.add(
            where,
            "on_long",
            f"{where}: a prompt of {len(tokens)} tokens and a completion of up to {max_tokens} do not fit in "
            f"{self.max_length}; lower rollout.max_tokens, shorten the prompt, or set data.on_long=skip",
        )
        return False

    def kept(self, items: list[T]) -> list[T]:
        """``items``, all of them.

        Raises:
            DataError: there are none, because every row was left out.
        """
        self.refusals.note_unused(self.unused, self.renderer.unused_fields)
        self.refusals.check_left(self.since, self.num_rows, len(items))
        if self.tells:
            self.refusals.warn(self.num_rows)
        return items

    def _each(self, examples: Sequence[Example], render: Callable[[Sequence[Example]], list[T]]) -> list[T | None]:
        """A batch at a time; one by one, to find those that cannot be shown, where that fails."""
        found: list[T | None] = []
        with terminal.doing("tokenizing", total=len(examples), noun="examples") as activity:
            for start in range(0, len(examples), BATCH):
                batch = examples[start : start + BATCH]
                try:
                    found += render(batch)
                except DataError:
                    found += (self._one(example, render) for example in batch)
                activity.count = len(found)
        return found

    def _one(self, example: Example, render: Callable[[Sequence[Example]], list[T]]) -> T | None:
        try:
            return render([example])[0]
        except DataError as error:
            self.refusals.add_error(example.where, error)
            return None
