"""The tokens that end a completion: the one place that decides them for training, sampling, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any

from cookbook.data.encoding import TextEncoder
from cookbook.data.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Attribute of a tokenizer: the end tokens of the generation config next to it.
CONFIGURED = "configured_stop_token_ids"


def configure(tokenizer: PreTrainedTokenizerBase, *eos_token_ids: object) -> None:
    """Keep the ``eos_token_id`` of a generation config with the tokenizer. Each is a token, a list of tokens, or None."""
    setattr(tokenizer, CONFIGURED, tuple(_unique([*configured(tokenizer), *_tokens(eos_token_ids)])))


def configured(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end tokens of the generation config."""
    tokens: tuple[int, ...] = getattr(tokenizer, CONFIGURED, ())
    return tokens


class StopTokens:
    """The stop tokens of a tokenizer and its chat template.

    Attributes:
        ids: end-of-text token, the token with which the template closes an answer, the token after which it prints the result
            of a call, the tokens of the generation config, and the tokens that begin the next turn if the template does not
            close answers.
        next_turns: of these, those that begin the turn after an answer and after a call. The models of such templates, as
            GLM-4, end an answer with the token that begins the next turn.
        answer_end: the token that a complete answer ends with; empty: the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, encoder: TextEncoder) -> None:
        self._encoder = encoder
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.next_turns: tuple[int, ...] = ()
        closing: list[int] = []
        calls: list[int] = []
        if tokenizer.chat_template:
            closing = self._closing(template)
            self.next_turns = tuple(_unique(token for text in template.next_turns for token in self._first_special(text)))
        # Several special tokens may close an answer together. The last is the stop token if it is the tokenizer's.
        own = [] if set(eos) & set(closing) else closing[:1]
        if tokenizer.chat_template:
            calls = self._end_of_calls(template, {*eos, *own})
        # An ordinary token is no end of a text: the file may belong to another tokenizer.
        stated = [token for token in configured(tokenizer) if token in encoder.added_ids]
        self.ids = tuple(_unique([*eos, *own, *self.next_turns, *calls, *stated]))
        self.answer_end = (*self.next_turns[:1], *own, *eos)[:1]

    def _end_of_calls(self, template: ChatTemplate, closing: Container[int]) -> list[int]:
        """Return the special token with which the template ends an answer that calls tools, if no token closes it as others.

        Examples are ``<|call|>`` of gpt-oss and ``<|tool_response>`` of Gemma 4. A token that every call has, such as
        ``</tool_call>``, ends no answer, because another call may follow.
        """
        if template.ends_of_calls is None:
            return []
        ending, two_endings = (self._encoder.raw([text.rstrip()], [""])[0].ids for text in template.ends_of_calls)
        if not ending or ending[-1] not in self._encoder.added_ids or any(token in closing for token in ending):
            return []
        return [ending[-1]] if two_endings.count(ending[-1]) <= 1 else []

    def _closing(self, template: ChatTemplate) -> list[int]:
        """Return the first special tokens with which the template closes an answer, without those that close its parts.

        Kimi-K3, for example, closes the reasoning, the response and the message with ``<|close|>``, and ends the message with
        ``<|end_of_msg|>``.
        """
        leading = self._leading_special(template.end_of_turn)
        prompt, text = template.probe(template.options) or ("", "")
        printed = self._encoder.raw([text.removeprefix(prompt)], [""])[0].ids if text.startswith(prompt) else []
        if once := [token for token in leading if printed.count(token) <= 1]:
            return once
        special = self._encoder.added_ids
        ends = self._encoder.raw([template.end_of_turn], [""])[0].ids
        return [token for token in ends if token in special and printed.count(token) <= 1][:1] or leading

    def _leading_special(self, text: str) -> list[int]:
        """Return the first special tokens of a text that follow each other."""
        special = self._encoder.added_ids
        tokens = self._encoder.raw([text], [""])[0].ids
        return list(takewhile(special.__contains__, dropwhile(lambda token: token not in special, tokens)))

    def _first_special(self, text: str) -> list[int]:
        return [token for token in self._encoder.raw([text], [""])[0].ids[:1] if token in self._encoder.added_ids]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the stop tokens of a tokenizer, which may be a slow one: then the chat template adds none."""
    if not tokenizer.is_fast:
        eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        return tuple(_unique([*eos, *configured(tokenizer)]))
    return StopTokens(tokenizer, ChatTemplate(tokenizer), TextEncoder(tokenizer)).ids


def ordinary_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end tokens of the generation config that are ordinary tokens of the tokenizer, and so do not end a text."""
    stops = stop_token_ids(tokenizer)
    return [token for token in configured(tokenizer) if token not in stops]


def for_generation_config(tokenizer: PreTrainedTokenizerBase, current: object) -> int | list[int] | None:
    """Return the ``eos_token_id`` of a generation config, with which transformers and vLLM stop where cookbook does.

    ``current``: its value so far, whose order stays. It stays as it is if it already has the stop tokens and no others.
    """
    before, stops = _tokens([current]), stop_token_ids(tokenizer)
    ids = _unique([*(token for token in before if token in stops), *stops])
    if set(ids) == set(before):
        configuration: Any = current
        return configuration  # type: ignore[no-any-return]
    return ids[0] if len(ids) == 1 else ids


def _tokens(values: Iterable[object]) -> list[int]:
    tokens: list[int] = []
    for value in values:
        tokens += [int(item) for item in value] if isinstance(value, Sequence) else [] if value is None else [int(value)]  # type: ignore[call-overload]
    return tokens


def _unique(tokens: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(tokens))
