"""Fast paths: each is tried once for a model, and given up for a slower one where it fails.

Every part of the engine that computes something in the place of a model's own code chooses here. So an architecture that no
fast path can follow still trains and samples, and the log names the part, the model and the reason in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from cookbook.errors import CookbookError

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

log = logging.getLogger("cookbook")
T = TypeVar("T")


class GivenUpError(Exception):
    """A fast path does not do what the model's own code does. The message is the reason, for the log."""


def first_working(model: LanguageModel, part: str, ways: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """Return what the first of ``ways`` returns that does not fail; log one line if that is not the first one.

    A way is a description, which continues the sentence "part: the model ...", and a function that tries it. The last way is
    the model's own code: its errors are raised. So are those of any way that have a remedy on the user's side, and a lack of
    memory.
    """
    reason: str | None = None
    for description, attempt in ways[:-1]:
        found, failure = tried(attempt)
        if failure is None:
            break
        log.debug("%s: it cannot be that the model %s: %s", part, description, failure)
        reason = failure
    else:
        description, attempt = ways[-1]
        found = [attempt()]
    if reason is not None:
        kind = getattr(model.network.config, "model_type", None) or "no model type"
        model.tell(part, f"{part}: {model.class_name} ({kind}) {description}, because {reason}")
    return found[0]


def tried(attempt: Callable[[], T]) -> tuple[list[T], str | None]:
    """Return the result in a list, or an empty list and why there is none."""
    try:
        return [attempt()], None
    except (CookbookError, torch.OutOfMemoryError, MemoryError):
        raise
    except GivenUpError as error:
        return [], str(error)
    except Exception as error:
        log.debug("the trial of a fast path failed", exc_info=True)
        first_line = (str(error).strip().splitlines() or [""])[0]
        return [], f"a trial of a faster way fails: {type(error).__name__}: {first_line[:160]}"
