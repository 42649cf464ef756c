"""From text to tokens and the characters of each token: whole texts, and texts that continue tokens.

Tokenizers of the Llama-2 kind put a space before every text that they encode, which belongs to the start of a text only. A text
that follows other tokens, such as the answer to a prompt, is encoded without this space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from cookbook.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

SURROGATE = re.compile("[\ud800-\udfff]")
# Separates the first character of a control token from its other characters where a row's content spells the token, so that the
# tokenizer reads text. Unicode reserves this code point for the inside of programs.
BREAK = "\ufdd0"
# Steps of a tokenizer that may put a space before a text, and the field for the space, with its value for no space.
PREFIXES: dict[str, tuple[str, object]] = {"Metaspace": ("prepend_scheme", "never"), "ByteLevel": ("add_prefix_space", False)}


class Encoded(Protocol):
    """Tokens of a text, and the characters ``[start, end)`` of each."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


@dataclass(frozen=True)
class JoinedText:
    """Tokens of consecutive parts of a text that were encoded separately. ``offsets`` are places in the whole text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def without_breaks(text: str) -> str:
    """Return the text without the marks that keep contents from being control tokens."""
    return text.replace(BREAK, "")


class TextEncoder:
    """The tokens of texts by one tokenizer. No special tokens are added, except by :meth:`opened`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def whole(self, texts: Sequence[str], places: Sequence[str]) -> list[Encoded]:
        """Encode texts of a chat template, each from its start. ``places``: their rows, for errors.

        Raises:
            DataError: a text is not valid Unicode.
        """
        is_broken = [BREAK in text for text in texts]
        if not any(is_broken):
            return self.raw(texts, places)
        pairs = [(text, place) for text, place, broken in zip(texts, places, is_broken, strict=True) if not broken]
        plain = iter(self.raw(*map(list, zip(*pairs, strict=True))) if pairs else [])
        return [
            self._in_parts(text, place) if broken else next(plain)
            for text, place, broken in zip(texts, places, is_broken, strict=True)
        ]

    def raw(self, texts: Sequence[str], places: Sequence[str]) -> list[Encoded]:
        """Encode plain texts, each from its start. All special tokens that a text spells are special tokens.

        Raises:
            DataError: a text is not valid Unicode.
        """
        try:
            # The model's tokenizer also makes lists that are not needed, which takes as long again.
            if self._can_bypass:
                return list(self.tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False))
            return list(self._tokenized(list(texts)))
        except TypeError:
            # JSON can contain half of a surrogate pair.
            for text, place in zip(texts, places, strict=True):
                _check_unicode(text, place)
            raise

    def continuation(self, text: str, before: Sequence[int], place: str = "text") -> Encoded:
        """Encode a text of a chat template that follows the tokens ``before``."""
        (start, part), *others = _parts(text)
        first = self.raw_continuation(part, before, place)
        return _joined([(start, first), *((at, self._continued(part, place)) for at, part in others)])

    def raw_continuation(self, text: str, before: Sequence[int], place: str = "text") -> Encoded:
        """Encode a plain text that follows the tokens ``before``."""
        return self._continued(text, place, is_after_special=bool(before) and before[-1] in self.added_ids)

    def opened(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a text after those that the tokenizer puts before every text, which are not repeated."""
        opening = self.opening
        return tokens if tokens[: len(opening)] == opening else opening + tokens

    @cached_property
    def opening(self) -> list[int]:
        """Tokens that the tokenizer puts before every text: the beginning-of-text token, or none."""
        text = "a"
        bare = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer(text)["input_ids"])
        # The same token may begin and end texts, as with OPT, so its id does not say which of the two it is.
        starts = range(len(whole) - len(bare) + 1)
        return next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), [])

    @cached_property
    def prefixes(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        return tuple(map(_without_prefix, self._steps)) != self._steps

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the special tokens and of other tokens that are whole words of the tokenizer."""
        return frozenset({*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder})

    def _in_parts(self, text: str, place: str) -> Encoded:
        (start, first), *others = _parts(text)
        [encoded] = self.raw([first], [place])
        return _joined([(start, encoded), *((at, self._continued(part, place)) for at, part in others)])

    def _continued(self, text: str, place: str, *, is_after_special: bool = False) -> Encoded:
        """Encode a text that follows others. Its sections after special tokens are encoded as in every text."""
        if not self.prefixes or (is_after_special and self._prefixes_sections):
            return self.raw([text], [place])[0]
        _check_unicode(text, place)
        encoded: Encoded = self._unprefixed.encode(text, add_special_tokens=False)
        first = next((index for index, token in enumerate(encoded.ids) if token in self.added_ids), None)
        if first is None or not self._prefixes_sections:
            return encoded
        at = encoded.offsets[first][0]
        head = JoinedText(encoded.ids[:first], encoded.offsets[:first])
        return _joined([(0, head), (at, self.raw([text[at:]], [place])[0])])

    @cached_property
    def _steps(self) -> tuple[object, object]:
        """The tokenizer's normalizer and its division into words, as JSON objects."""
        backend = self.tokenizer.backend_tokenizer
        first, second = (
            None if step is None else json.loads(step.__getstate__()) for step in (backend.normalizer, backend.pre_tokenizer)
        )
        return first, second

    @cached_property
    def _prefixes_sections(self) -> bool:
        """Whether the tokenizer also puts a space before the text after a special token."""
        return any(_prefixes_sections(step) for step in self._steps)

    @cached_property
    def _unprefixed(self) -> Tokenizer:
        """The tokenizer without a space before the text."""
        from tokenizers import Tokenizer

        normalizer, words = map(_without_prefix, self._steps)
        whole = json.loads(self.tokenizer.backend_tokenizer.to_str())
        changed = {**whole, "normalizer": normalizer, "pre_tokenizer": words, "padding": None, "truncation": None}
        made = Tokenizer.from_str(json.dumps(changed))
        made.encode_special_tokens = self.tokenizer.split_special_tokens
        return made

    @property
    def _can_bypass(self) -> bool:
        """Whether the library's tokenizer returns the same tokens as the model's tokenizer, which calls it.

        Another caller may have left its padding or truncation switched on. A call of the model's tokenizer switches both off.
        """
        backend = self.tokenizer.backend_tokenizer
        is_plain = backend.padding is None and backend.truncation is None
        return self._is_standard and is_plain and backend.encode_special_tokens == self.tokenizer.split_special_tokens

    @cached_property
    def _is_standard(self) -> bool:
        """Whether the class of the model's tokenizer encodes text as all fast tokenizers do."""
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        own = type(self.tokenizer)
        return own.__call__ is PreTrainedTokenizerBase.__call__ and own._encode_plus is PreTrainedTokenizerFast._encode_plus

    def _tokenized(self, texts: list[str]) -> Sequence[Encoded]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        return encoded.encodings or []


def _check_unicode(text: str, place: str) -> None:
    if SURROGATE.search(text):
        message = "holds half of a surrogate pair (\\ud800 to \\udfff), which is not a character; fix or remove it"
        raise DataError(f"{place}: {message}")


def _parts(text: str) -> list[tuple[int, str]]:
    """Return the parts of a text between its breaks, each with its place in the text."""
    parts, start = [], 0
    for part in text.split(BREAK):
        parts.append((start, part))
        start += len(part) + len(BREAK)
    return parts


def _joined(parts: Sequence[tuple[int, Encoded]]) -> Encoded:
    """Return the tokens of consecutive parts of a text. ``parts``: each with its place in the text."""
    if len(parts) == 1:
        return parts[0][1]
    ids = [token for _, part in parts for token in part.ids]
    return JoinedText(ids, [(start + at, end + at) for at, part in parts for start, end in part.offsets])


def _without_prefix(step: Any) -> Any:
    """Return a step of a tokenizer without the space that it puts before a text; None if that was all it did."""
    if not isinstance(step, dict):
        return step
    kind = step.get("type")
    if kind == "Prepend":
        return None
    if kind in PREFIXES and PREFIXES[kind][0] in step:
        return {**step, PREFIXES[kind][0]: PREFIXES[kind][1]}
    for members in ("normalizers", "pretokenizers"):
        if members in step:
            members_without_prefix = [changed for member in step[members] if (changed := _without_prefix(member)) is not None]
            return {**step, members: members_without_prefix}
    return step


def _prefixes_sections(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    kind = step.get("type")
    if kind == "Prepend" or (kind == "ByteLevel" and step.get("add_prefix_space")):
        return True
    if kind == "Metaspace":
        return bool(step.get("prepend_scheme") == "always")
    return any(_prefixes_sections(member) for members in ("normalizers", "pretokenizers") for member in step.get(members, ()))
