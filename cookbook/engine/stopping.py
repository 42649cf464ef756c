"""Where completions end: stop tokens, compared as tensors, and stop strings, looked for where a token may complete one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cookbook.types import SamplingParams

if TYPE_CHECKING:
    from cookbook.engine.model import LanguageModel

PART_OF_A_CHARACTER = "\ufffd"  # what tokenizers write for bytes that are no character yet
_texts: weakref.WeakKeyDictionary[Any, list[str | None]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ending:
    """What ends the completions of a request, besides their length."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, model: LanguageModel, params: SamplingParams) -> Ending:
        """``stop`` None: the model's own ends. ``[]``: nothing. Otherwise the ends and what is given."""
        given = [params.stop] if isinstance(params.stop, str) else params.stop
        if given is not None and len(given) == 0:
            return cls((), ())
        strings = tuple(stop for stop in given or () if isinstance(stop, str))
        ids = {int(stop) for stop in (given if given is not None else ()) if not isinstance(stop, str)}
        return cls(tuple(sorted(end_token_ids(model) | ids)), strings)

    def is_reached(self, tokenizer: Any, tokens: Sequence[int]) -> bool:
        """Whether one of the strings is there."""
        longest = max(map(len, self.strings), default=0)
        # A token decodes to at least a part of one character: this many tokens surely hold the longest stop string.
        tail = tokenizer.decode(tokens[-4 * longest - 4 :])
        return any(string in tail for string in self.strings)


class Endings:
    """The endings of a batch's rows."""

    def __init__(self, model: LanguageModel, endings: Sequence[Ending], device: torch.device) -> None:
        width = max(len(ending.ids) for ending in endings)
        self.ids = torch.tensor([[*ending.ids, *[-1] * (width - len(ending.ids))] for ending in endings], device=device)
        kinds = list(dict.fromkeys(ending.strings for ending in endings))
        self.has_strings = kinds != [()]
        if self.has_strings:
            self.kind = torch.tensor([kinds.index(ending.strings) for ending in endings], device=device)
            self.completing = torch.stack([completing_tokens(model, strings) for strings in kinds]).to(device)

    def reached(self, tokens: Tensor) -> Tensor:
        """Which rows end with these stop tokens, ``(rows,)``."""
        return (self.ids == tokens[:, None]).any(-1)

    def suspected(self, tokens: Tensor) -> Tensor:
        """Which rows' newest token may have completed a stop string, ``(rows,)``. Only where ``has_strings``."""
        return self.completing[self.kind, tokens]


def completing_tokens(model: LanguageModel, strings: Sequence[str]) -> Tensor:
    """``(V,)``: true for tokens whose text holds the last character of one of the strings, or a part of a character."""
    vocabulary = int(model.network.config.get_text_config().vocab_size)
    if not strings:
        return torch.zeros(vocabulary, dtype=torch.bool)
    lasts = {string[-1:] for string in strings} | {PART_OF_A_CHARACTER}
    texts = _token_texts(model.tokenizer)[:vocabulary]
    found = [text is None or any(last in text for last in lasts) for text in texts]
    return torch.tensor(found + [True] * (vocabulary - len(found)))


def _token_texts(tokenizer: Any) -> list[str | None]:
    """What every token adds to a text, by id; None where the tokenizer rewrites what stands before. Read once a tokenizer."""
    if tokenizer not in _texts:
        before = tokenizer.encode("a", add_special_tokens=False)  # some drop the space of a token that stands first
        start = tokenizer.decode(before)
        written = tokenizer.batch_decode([[*before, token] for token in range(len(tokenizer))])
        _texts[tokenizer] = [text[len(start) :] if text.startswith(start) else None for text in written]
    return _texts[tokenizer]


def end_token_ids(model: LanguageModel) -> set[int]:
    """The tokens that end a text or a turn, as the tokenizer and the model's generation config name them."""
    ids = {model.tokenizer.eos_token_id}
    configured = getattr(getattr(model.network, "generation_config", None), "eos_token_id", None)
    ids |= set(configured) if isinstance(configured, list) else {configured}
    return {int(token) for token in ids if token is not None}
