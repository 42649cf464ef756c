"""``cookbook check data``: what of a dataset a run would train, as counts and as text, and which rows it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cookbook import paths
from cookbook.check.rows import Survey, Trained, lengths, pieces, survey
from cookbook.cli import tables, token_text
from cookbook.data import Refusals, Renderer, load_rows
from cookbook.engine.model import ModelConfig, context_length, load_tokenizer
from cookbook.errors import ConfigError, CookbookError
from cookbook.session import Settings, settings

REFUSED_SHOWN = 10  # reasons, of each split


def run(cfg: DictConfig, num_shown: int, *, table: bool) -> None:
    """Prints counts of both splits, refused rows, and the first ``num_shown`` rows as tokens.

    Raises:
        CookbookError: the configuration is wrong, or a run would stop at one of the rows.
    """
    typed = settings(cfg)
    kind = getattr(typed.module, "DATA", None)
    if kind is None:
        raise ConfigError(f"recipes/{cfg.recipe.name}.py: no DATA, the kind of data it reads; add DATA = 'conversations'")
    tokenizer = load_tokenizer(typed.model)
    renderer = Renderer(tokenizer, context(typed.model, tokenizer))
    found = {
        "training": _survey(typed, kind, renderer, "train", typed.rollout.max_tokens),
        "held out": _survey(typed, kind, renderer, "eval", typed.eval.max_tokens),
    }
    limit = typed.data.max_length or renderer.max_length
    model = paths.shown(Path(typed.model.name))
    print(f"recipe={cfg.recipe.name} learns from {kind}; tokens of {model}, {limit or 'any number'} at most a sequence\n")
    for split, one in found.items():
        _print_counts(split, one, kind)
    sampled = f"sampled, up to {typed.rollout.max_tokens} tokens" if kind == "rollouts" else ""
    _show(found["training"], tokenizer, num_shown, sampled, colour=table)
    if not found["training"].sequences:
        raise CookbookError(f"check data: no row is left to train on; the first: {_near(found['training'].refused[0].reason)}")
    fatal = [refusal for one in found.values() for refusal in one.refused if refusal.fatal]
    if fatal:
        raise CookbookError(
            f"check data: a run would stop at {_counted(len(fatal), 'row')}; the first: {_near(fatal[0].reason)}"
        )


def context(config: ModelConfig, tokenizer: Any) -> int | None:
    """The longest sequence of the model, tokens, from its configuration and tokenizer alone; None: no limit is known."""
    from transformers import AutoConfig

    architecture = None
    with contextlib.suppress(OSError, ValueError):  # an adapter's folder has a tokenizer and no configuration of the model
        architecture = AutoConfig.from_pretrained(
            config.name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    return context_length(architecture, tokenizer)


def _survey(typed: Settings, kind: str, renderer: Renderer, which: Any, max_tokens: int) -> Survey:
    refusals = Refusals(typed.data, collect=True)
    rows = load_rows(typed.data, which, typed.seed, typed.eval.limit, refusals)
    return survey(kind, rows, renderer, typed.data, max_tokens, refusals)


def _print_counts(split: str, found: Survey, kind: str) -> None:
    if not found.num_rows:
        print(f"{split}: no rows\n")
        return
    unused = found.num_rows - found.num_used
    note = f"{_counted(unused, 'row')} cannot be used" if unused else "all can be used"
    total = sum(len(one.tokens) for one in found.sequences)
    share = sum(one.num_trained for one in found.sequences) / max(total, 1)
    trained = "" if kind == "rollouts" else f"; {share:.1%} of the tokens are trained"
    print(f"{split}: {_counted(found.num_rows, 'row')}, {note}{trained}")
    if found.sequences:
        rows = _length_rows(found.sequences, kind)
        head = ["", *rows[0][1]]
        body = [[name, *(f"{number:,}" for number in numbers.values())] for name, numbers in rows]
        print("\n".join(f"  {line}" for line in tables.aligned([head, *body], right=range(1, len(head)))))
    if found.unused:
        print(f"  columns not used for training: {', '.join(found.unused)}")
    for refusal in found.refused[:REFUSED_SHOWN]:
        print(f"  {'stops the run' if refusal.fatal else 'left out'}: {_near(refusal.reason)}")
    if (more := len(found.refused) - REFUSED_SHOWN) > 0:
        print(f"  and {more} more")
    print()


def _length_rows(sequences: Sequence[Trained], kind: str) -> list[tuple[str, dict[str, int]]]:
    """A line of numbers for each side, of all tokens and of those trained."""

    def all_tokens(one: Trained) -> int:
        return len(one.tokens)

    measures: dict[str, Callable[[Trained], int]] = {"all tokens": all_tokens, "trained tokens": lambda one: one.num_trained}
    if kind == "rollouts":
        measures = {"prompts": all_tokens}
    sides = list(dict.fromkeys(one.side for one in sequences))
    return [
        (f"{side}, {name}" if side else name, lengths([one for one in sequences if one.side == side], length))
        for side in sides
        for name, length in measures.items()
    ]


def _show(found: Survey, tokenizer: Any, count: int, sampled: str, *, colour: bool) -> None:
    """The first rows as text; behind a prompt, what is ``sampled`` there."""
    wheres = list(dict.fromkeys(one.where for one in found.sequences))[:count]
    if wheres and not colour:
        print(f"what is trained stands in {token_text.OPEN} {token_text.CLOSE}\n")
    for one in found.sequences:
        if one.where in wheres:
            side = f", {one.side}" if one.side else ""
            trained = "tokens of a prompt" if sampled else f"tokens, {one.num_trained} trained"
            title = f"{_near(one.where)}{side}: {len(one.tokens)} {trained}"
            token_text.show(title, pieces(tokenizer, one.tokens, one.weights), sampled, colour=colour)


def _near(where: str) -> str:
    """A place as seen from the current folder."""
    return where.removeprefix(f"{Path.cwd()}/")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
