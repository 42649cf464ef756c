"""Selection of fast paths: each is verified once per model, and replaced by a slower path if it fails.

Every part of the engine that replaces a model's own code is selected here. So an architecture that no fast path supports still
trains and samples, and the log names the part, the model and the reason in one line.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from cookbook.errors import CookbookError, first_line

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

log = logging.getLogger("cookbook")
T = TypeVar("T")


class FastPathError(Exception):
    """A fast path does not support the model, or computes other numbers. The message is the reason, for the log."""


def first_working(model: LanguageModel, part: str, candidates: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """Return the result of the first candidate that succeeds. Log one line if that is not the first candidate.

    A candidate is a description, which completes the sentence "part: the model ...", and a function that tries it. The last
    candidate is the model's own code, and its errors are raised. Errors that the user can fix, and out-of-memory errors, are
    raised for any candidate.
    """
    reason: str | None = None
    for description, attempt in candidates[:-1]:
        try:
            with trial():
                result = attempt()
            break
        except FastPathError as error:
            log.debug("%s: rejected that the model %s: %s", part, description, error)
            reason = str(error)
    else:
        description, attempt = candidates[-1]
        result = attempt()
    if reason is not None:
        kind = getattr(model.network.config, "model_type", None) or "no model type"
        model.log_once(part, f"{part}: {model.class_name} ({kind}) {description}, because {reason}")
    return result


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Context that converts any error into a FastPathError with the reason.

    Errors that the user can fix, and out-of-memory errors, pass unchanged.
    """
    try:
        yield
    except (CookbookError, FastPathError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        log.debug("the trial of a fast path failed", exc_info=True)
        raise FastPathError(f"a trial of a faster path fails: {type(error).__name__}: {first_line(error)[:160]}") from error


def probe_tokens(model: LanguageModel, start: int, count: int) -> list[int]:
    """Return ``count`` token ids of a fixed sequence, from index ``start``; adjacent tokens differ."""
    return [(index * 7 + 3) % model.vocabulary_size for index in range(start, start + count)]


def plain_logits(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Return the next-token logits at each of the ``tokens``, ``(T, V)``, from a forward pass of the model's own code."""
    logits: Tensor = model.network(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return logits[0]
