"""From text to tokens: prompts as the model sees them when it samples, conversations with a weight for every token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cookbook.data.formats import Chat, Example, Plain
from cookbook.data.messages import parse_messages
from cookbook.data.template import ChatTemplate
from cookbook.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
BATCH = 256  # texts tokenized at once: enough for the tokenizer's threads, and the offsets of a batch are small


@dataclass(frozen=True, eq=False)
class Rendered:
    """A sequence ready to train: ``tokens`` and ``weights``, both of length ``(T,)``."""

    tokens: list[int]
    weights: npt.NDArray[np.float32]


class Renderer:
    """What turns rows into tokens for one model.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        max_length: tokens the model's context holds; None when that is unknown.

    Raises:
        DataError: the tokenizer cannot say which characters a token came from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"model.name: {type(tokenizer).__name__} is not a fast tokenizer; ship a tokenizer.json")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._template = ChatTemplate(tokenizer)

    @property
    def unused_fields(self) -> Sequence[str]:
        """Fields of the messages rendered so far that the chat template does not print, and that say nothing to the model."""
        return self._template.unused_fields

    def prompt_tokens(self, prompt: Sequence[Mapping[str, Any]] | str) -> list[int]:
        """A prompt to sample from: text as it is, messages with the header of the answer to come."""
        if isinstance(prompt, str):
            return self.prompts([Plain("prompt", prompt)])[0][0]
        messages = parse_messages(prompt, "prompt", "messages")
        return self.prompts([Chat("prompt", messages, len(messages))])[0][0]

    def prompts(self, examples: Sequence[Example]) -> list[tuple[list[int], str]]:
        """Of each example's prompt, the tokens and the text they spell. A response in it is not read."""
        return _each_kind(examples, self._plain_prompts, self._chat_prompts)

    def conversation(self, messages: Sequence[Mapping[str, Any]], train_on: str = "assistant") -> Rendered:
        """One conversation, as :meth:`render` does many."""
        return self.render([Chat("conversation", parse_messages(messages, "conversation", "messages"))], train_on)[0]

    def render(self, examples: Sequence[Example], train_on: str = "assistant") -> list[Rendered]:
        """Each example whole, with its prompt weighted 0 and its answers, their end of turn included, as they ask.

        Args:
            train_on: ``assistant`` every answer, ``last_assistant`` the last, ``all`` every token. Text that has no
                prompt is trained whole.

        Raises:
            DataError: a conversation the chat template cannot show in one piece, naming its row.
        """
        return _each_kind(
            examples, lambda rows: self._render_plain(rows, train_on), lambda rows: self._render_chats(rows, train_on)
        )

    def text(self, tokens: Sequence[int]) -> str:
        """A completion as text, without the end of the turn and other special tokens."""
        end = len(tokens)
        while end and tokens[end - 1] in self.stop_token_ids:
            end -= 1
        return str(self.tokenizer.decode(tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def num_bytes(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """How many UTF-8 bytes the text of each row of tokens has, special tokens left out."""
        if not rows:  # of none, transformers would decode one
            return []
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [len(text.encode()) for text in texts]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion: end of text, and what the chat template closes an answer with."""
        stops = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        if self.tokenizer.chat_template:
            special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
            closing = self._encode([self._template.end_of_turn], [""])[0]
            closing = list(takewhile(special.__contains__, dropwhile(lambda token: token not in special, closing)))
            stops += closing[:1] if not set(stops) & set(closing) else []
        return tuple(stops)

    def _plain_prompts(self, examples: list[Plain]) -> list[tuple[list[int], str]]:
        encoded = self._encode([example.prompt for example in examples], _places(examples))
        return [(self._opening + tokens, example.prompt) for example, tokens in zip(examples, encoded, strict=True)]

    def _chat_prompts(self, chats: list[Chat]) -> list[tuple[list[int], str]]:
        texts = [self._template.prompt(chat) for chat in chats]
        return list(zip(self._encode(texts, _places(chats)), texts, strict=True))

    def _render_plain(self, examples: list[Plain], train_on: str) -> list[Rendered]:
        """Prompt and response are tokenized apart, so that training sees the very prompt that sampling sees."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("model.name: the tokenizer has no end-of-text token, so a text could not end; give it one")
        prompts = self._encode([example.prompt for example in examples], _places(examples))
        responses = self._encode([example.response for example in examples], _places(examples))
        rendered = []
        for prompt, response in zip(prompts, responses, strict=True):
            before = self._opening + prompt
            after = response if response[-1:] == [eos] else [*response, eos]
            weights = np.ones(len(before) + len(after), dtype=np.float32)
            if train_on != "all":
                weights[: len(before)] = 0.0
            rendered.append(Rendered(before + after, weights))
        return rendered

    def _render_chats(self, chats: list[Chat], train_on: str) -> list[Rendered]:
        shown = [self._template.conversation(chat, train_on) for chat in chats]
        encoded = self._tokenized([text for text, _ in shown], _places(chats), return_offsets_mapping=True)
        rendered = []
        for (_, spans), tokens, offsets in zip(shown, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            weights = np.full(len(tokens), 1.0 if train_on == "all" else 0.0, dtype=np.float32)
            for start, end, weight in spans:
                first, behind = self._with_end_of_turn(tokens, *_tokens_of(start, end, offsets))
                weights[first:behind] = weight
            rendered.append(Rendered(tokens, weights) if train_on == "all" else self._closed(tokens, weights))
        return rendered

    def _closed(self, tokens: list[int], weights: npt.NDArray[np.float32]) -> Rendered:
        """With the end-of-text token behind an answer that the template leaves open: the model would never learn to stop."""
        eos = self.tokenizer.eos_token_id
        if eos is None or not tokens or tokens[-1] in self.stop_token_ids or not weights[-1]:
            return Rendered(tokens, weights)
        return Rendered([*tokens, eos], np.append(weights, weights[-1]))

    def _with_end_of_turn(self, tokens: list[int], first: int, behind: int) -> tuple[int, int]:
        """An answer's tokens up to its stop token, which may stand right behind the span, or before the end of it.

        The model has to learn to stop, and never gets to write what the template puts after that.
        """
        if behind < len(tokens) and tokens[behind] in self.stop_token_ids:
            return first, behind + 1
        stop = next((index for index in range(first, behind) if tokens[index] in self.stop_token_ids), behind - 1)
        return first, stop + 1

    @cached_property
    def _opening(self) -> list[int]:
        """What the tokenizer puts before every text: the beginning-of-text token, or nothing."""
        tokens = list(self.tokenizer("")["input_ids"])
        return tokens[:-1] if tokens[-1:] == [self.tokenizer.eos_token_id] else tokens

    def _encode(self, texts: list[str], places: Sequence[str]) -> list[list[int]]:
        return list(self._tokenized(texts, places)["input_ids"])

    def _tokenized(self, texts: list[str], places: Sequence[str], **more: bool) -> Any:
        """Raises DataError, naming the place of a text that is none: JSON can spell halves of characters."""
        try:
            return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **more)
        except TypeError:
            for text, place in zip(texts, places, strict=True):
                if not _is_unicode(text):
                    message = "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; mend or remove it"
                    raise DataError(f"{place}: {message}") from None
            raise


def _places(examples: Sequence[Example]) -> list[str]:
    return [example.where for example in examples]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tokens_of(start: int, end: int, offsets: list[tuple[int, int]]) -> tuple[int, int]:
    """The range of tokens that hold any of the characters ``[start, end)``.

    ``offsets`` are each token's characters. Some tokenizers leave white space out of them, down to an empty range at
    the token's end; comparing both sides keeps such a token with what it ends.
    """
    first = bisect_right(offsets, start, key=itemgetter(1))
    behind = max(bisect_left(offsets, end, key=itemgetter(0)), bisect_right(offsets, end, key=itemgetter(1)))
    return first, max(first, behind)


def _each_kind(
    examples: Sequence[Example], plain: Callable[[list[Plain]], list[T]], chat: Callable[[list[Chat]], list[T]]
) -> list[T]:
    """``plain`` and ``chat`` over the examples of their kind, a batch at a time; results in the examples' order."""
    results: list[T] = []
    for batch in _batches(examples):
        texts = [example for example in batch if isinstance(example, Plain)]
        chats = [example for example in batch if isinstance(example, Chat)]
        done_texts, done_chats = iter(plain(texts) if texts else []), iter(chat(chats) if chats else [])
        results += [next(done_texts if isinstance(example, Plain) else done_chats) for example in batch]
    return results


def _batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    rest = iter(examples)
    while batch := list(islice(rest, BATCH)):
        yield batch
