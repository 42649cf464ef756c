"""``cookbook check data``: the trained tokens of a dataset as counts and as text, and the rejected rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omegaconf import DictConfig

from cookbook.check.dataset import Survey, TextSpan, WeightedSequence, lengths, survey, text_spans
from cookbook.data import RejectedRows, Renderer, load_rows
from cookbook.engine.model import ModelConfig, context_length, load_tokenizer
from cookbook.errors import ConfigError, CookbookError
from cookbook.run.settings import Settings, settings
from cookbook.utils import paths, tables
from cookbook.utils.words import counted

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

REFUSED_SHOWN = 10  # reasons, of each split
OPEN, CLOSE = "[[", "]]"  # marks around trained text
HEAD, TAIL = 240, 120  # pieces shown of a long sequence


def run(cfg: DictConfig, num_shown: int, *, table: bool) -> None:
    """Print counts of both splits, refused rows, and the first ``num_shown`` rows as tokens.

    Raises:
        CookbookError: the configuration is wrong, or a run would stop at one of the rows.
    """
    typed = settings(cfg)
    kind = typed.data_kind
    if kind is None:
        raise ConfigError(f"recipes/{cfg.recipe.name}.py: no DATA, the kind of data it reads; add DATA = 'conversations'")
    tokenizer = load_tokenizer(typed.model)
    renderer = Renderer(tokenizer, context(typed.model, tokenizer))
    surveys = {
        "training": _survey(typed, kind, renderer, "train", typed.rollout.max_tokens),
        "held out": _survey(typed, kind, renderer, "eval", typed.eval.max_tokens),
    }
    limit = typed.data.max_length or renderer.max_length
    model = paths.shown(Path(typed.model.name))
    print(f"recipe={cfg.recipe.name} learns from {kind}; tokens of {model}, {limit or 'any number'} at most per sequence\n")
    for split, split_survey in surveys.items():
        _print_counts(split, split_survey, kind)
    sampled = f"sampled, up to {typed.rollout.max_tokens} tokens" if kind == "rollouts" else ""
    _show(surveys["training"], tokenizer, num_shown, sampled, color=table)
    if not surveys["training"].sequences:
        raise CookbookError(
            f"check data: no row is left to train on; the first: {_near(surveys['training'].refused[0].reason)}"
        )
    fatal = [refusal for survey in surveys.values() for refusal in survey.refused if refusal.fatal]
    if fatal:
        raise CookbookError(
            f"check data: a run would stop at {counted(len(fatal), 'row')}; the first: {_near(fatal[0].reason)}"
        )


def context(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the model's longest sequence in tokens, from its configuration and tokenizer; None if no limit is known."""
    from transformers import AutoConfig

    architecture = None
    # An adapter's folder has a tokenizer and no configuration of the model.
    with contextlib.suppress(OSError, ValueError):
        architecture = AutoConfig.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    return context_length(architecture, tokenizer)


def _survey(typed: Settings, kind: str, renderer: Renderer, which: Literal["train", "eval"], max_tokens: int) -> Survey:
    refusals = RejectedRows(typed.data, collect=True)
    rows = load_rows(typed.data, which, typed.seed, typed.eval.limit, refusals)
    return survey(kind, rows, renderer, typed.data, max_tokens, refusals)


def _print_counts(split: str, counts: Survey, kind: str) -> None:
    if not counts.num_rows:
        print(f"{split}: no rows\n")
        return
    unused = counts.num_rows - counts.num_used
    note = f"{counted(unused, 'row')} cannot be used" if unused else "all can be used"
    total = sum(len(sequence.tokens) for sequence in counts.sequences)
    share = sum(sequence.num_trained for sequence in counts.sequences) / max(total, 1)
    trained = "" if kind == "rollouts" else f"; {share:.1%} of the tokens are trained"
    print(f"{split}: {counted(counts.num_rows, 'row')}, {note}{trained}")
    if counts.sequences:
        rows = _length_rows(counts.sequences, kind)
        head = ["", *rows[0][1]]
        body = [[name, *(f"{number:,}" for number in numbers.values())] for name, numbers in rows]
        print("\n".join(f"  {line}" for line in tables.aligned([head, *body], right=range(1, len(head)))))
    for sentence in counts.notes:
        print(f"  {sentence}")
    if counts.unused:
        print(f"  columns not used for training: {', '.join(counts.unused)}")
    for refusal in counts.refused[:REFUSED_SHOWN]:
        print(f"  {'stops the run' if refusal.fatal else 'left out'}: {_near(refusal.reason)}")
    if (more := len(counts.refused) - REFUSED_SHOWN) > 0:
        print(f"  and {more} more")
    print()


def _length_rows(sequences: Sequence[WeightedSequence], kind: str) -> list[tuple[str, dict[str, int]]]:
    """Return a row of numbers for each side: all tokens, and trained tokens."""

    def all_tokens(sequence: WeightedSequence) -> int:
        return len(sequence.tokens)

    measures: dict[str, Callable[[WeightedSequence], int]] = {"prompts": all_tokens}
    if kind != "rollouts":
        measures = {"all tokens": all_tokens, "trained tokens": attrgetter("num_trained")}
    sides = list(dict.fromkeys(sequence.side for sequence in sequences))
    return [
        (f"{side}, {name}" if side else name, lengths([sequence for sequence in sequences if sequence.side == side], length))
        for side in sides
        for name, length in measures.items()
    ]


def _show(sample: Survey, tokenizer: PreTrainedTokenizerBase, count: int, sampled: str, *, color: bool) -> None:
    """Print the first rows as text; ``sampled`` follows a prompt."""
    wheres = list(dict.fromkeys(sequence.where for sequence in sample.sequences))[:count]
    if wheres and not color:
        print(f"trained text is marked {OPEN} {CLOSE}\n")
    for sequence in sample.sequences:
        if sequence.where in wheres:
            side = f", {sequence.side}" if sequence.side else ""
            trained = "tokens of a prompt" if sampled else f"tokens, {sequence.num_trained} trained"
            title = f"{_near(sequence.where)}{side}: {len(sequence.tokens)} {trained}"
            show_tokens(title, text_spans(tokenizer, sequence.tokens, sequence.weights), sampled, color=color)


def _near(where: str) -> str:
    """Return a place relative to the current folder."""
    return where.removeprefix(f"{Path.cwd()}/")


def show_tokens(title: str, spans: Sequence[TextSpan], sampled: str, *, color: bool) -> None:
    """Print the text under its title, followed by ``sampled``, the note on the completion; "" for none."""
    (_print_colored if color else _print_marked)(title, _elided(spans), sampled)


def _elided(spans: Sequence[TextSpan]) -> Sequence[TextSpan]:
    if len(spans) <= HEAD + TAIL:
        return spans
    gap = TextSpan(f" ... {len(spans) - HEAD - TAIL} tokens ... ", 0.0)
    return [*spans[:HEAD], gap, *spans[-TAIL:]]


def _print_marked(title: str, spans: Sequence[TextSpan], sampled: str) -> None:
    text = ""
    for weight, run in groupby(spans, key=lambda piece: piece.weight):
        part = "".join(piece.text for piece in run)
        times = "" if weight in (0, 1) else f"x{weight:g}"
        text += f"{OPEN}{part}{CLOSE}{times}" if weight else part
    text += f"{OPEN}{sampled}{CLOSE}" if sampled else ""
    print(f"{title}\n{text.rstrip()}\n")


def _print_colored(title: str, spans: Sequence[TextSpan], sampled: str) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for index, piece in enumerate(spans):
        text.append_text(_styled(piece, index))
    text.append(f"<{sampled}>" if sampled else "", "green italic")
    text.rstrip()
    Console(highlight=False).print(Text(title, "bold"), text, "", sep="\n")


def _styled(piece: TextSpan, index: int) -> Text:
    """Return trained tokens in green, in two alternating shades; in yellow if their weight is below 1."""
    from rich.text import Text

    if not piece.weight:
        return Text(piece.text, "dim")
    shades = ("green", "rgb(120,220,120)") if piece.weight == 1 else ("yellow", "rgb(230,210,110)")
    # The model has to predict a trained line break, so the break is shown.
    visible = piece.text.replace("\n", "\u23ce\n")
    return Text(visible, f"bold {shades[index % 2]}")
