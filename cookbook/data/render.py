"""From text to tokens: prompts for sampling, and conversations with a weight for every token."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from cookbook.data.channels import channel_texts, json_or_text, names_channels
from cookbook.data.contents import Contents
from cookbook.data.encoding import Encoded, TextEncoder, without_breaks
from cookbook.data.formats import Chat, Example, Plain
from cookbook.data.messages import ChatMessage, is_prefill, parse_messages
from cookbook.data.stop_tokens import StopTokens
from cookbook.data.template import ChatTemplate, all_sources, answer_weights, missing_text
from cookbook.data.turns import OTHER_TOKENS, SampledTurns, TrainedText, reasoning_tag, without_empty_reasoning
from cookbook.errors import DataError
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# A tokenizer prints this character for the bytes of a character that is not complete.
PART_OF_A_CHARACTER = "\ufffd"
# Number of tokens at the end of a prompt in which the tag that opens the reasoning is looked for.
TAG_TOKENS = 16
OPEN_ANSWERS = (
    "the chat template does not close answers with a special token; answers in front of others are trained in their own "
    "sequence, which ends with the end-of-text token"
)
NO_END = (
    "the tokenizer has no end-of-text token, and no special token of the chat template closes answers, so completions end at "
    "their limit of tokens only; give the tokenizer an eos_token"
)
# In place of a token's number of bytes: not decoded yet, and part of a character or dependent on other tokens.
NOT_DECODED, UNKNOWN = -2, -1


@dataclass(frozen=True, eq=False)
class Rendered:
    """A sequence ready to train: ``tokens`` and ``weights``, both of length ``(T,)``.

    ``num_messages``: messages of the conversation that the sequence has; None: all.
    """

    tokens: list[int]
    weights: npt.NDArray[np.float32]
    num_messages: int | None = None


class Renderer:
    """Renderer of conversations and texts to the tokens of one model.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        max_length: tokens of the model's context; None: unknown.
        vocabulary_size: number of the model's embeddings; None: unknown.

    Raises:
        DataError: the tokenizer cannot map tokens to characters.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None, vocabulary_size: int | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"model.name: {type(tokenizer).__name__} is not a fast tokenizer; ship a tokenizer.json")
        self.tokenizer = tokenizer
        self.max_length = max_length
        # The number of known token ids, if the tokenizer has ids that the model lacks; else None.
        self.known_ids = vocabulary_size if vocabulary_size is not None and len(tokenizer) > vocabulary_size else None
        self._template = ChatTemplate(tokenizer)
        self._turns = SampledTurns(self._template)
        self._encoder = TextEncoder(tokenizer)
        self._bytes_of_token = np.empty(0, dtype=np.int64)
        # Kinds of the rows rendered so far: "chat", "text".
        self._kinds: dict[str, None] = {}
        # Whether white space at the end of a prompt has other tokens in front of an answer, by the characters around its end.
        self._divided: dict[str, bool] = {}
        # Whether a token is white space.
        self._space_tokens: dict[int, bool] = {}

    @property
    def unused_fields(self) -> Sequence[str]:
        """Fields of the messages rendered so far that the chat template does not print, and that the model does not need."""
        return self._template.unused_fields

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of the rows rendered so far: ``chat`` for conversations, ``text`` for texts without a chat template."""
        return list(self._kinds)

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the chat template that the user should know, from the rows rendered so far."""
        return self._template.notes

    def identity(self) -> str:
        """Return a digest of the tokenizer, its chat template, and the effect of earlier rows on the template.

        Some templates print the date; then it is a part of the digest.
        """
        tokenizer = self.tokenizer
        prints_date = "strftime_now" in all_sources(tokenizer)
        parts = [
            f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            self._template.options,
            tokenizer.special_tokens_map,
            tokenizer.all_special_ids,
            tokenizer.split_special_tokens,
            self.stop_token_ids,
            self._template.arguments_as_text,
            datetime.date.today().isoformat() if prints_date else None,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def state(self) -> JsonObject:
        """Return the effect of all rows rendered so far, for :meth:`restore`."""
        effect = {"unused_fields": list(self.unused_fields), "notes": list(self.notes), "kinds": list(self.kinds)}
        return {**effect, "arguments_as_text": self._template.arguments_as_text}

    @contextlib.contextmanager
    def recording(self) -> Iterator[JsonObject]:
        """Collect the effect of the rows that are rendered inside the block, for :meth:`restore`; complete at its end."""
        effect: dict[str, object] = {}
        earlier, self._kinds = self._kinds, {}
        try:
            with self._template.recording() as (unused, notes):
                yield effect
            effect.update(unused_fields=list(unused), notes=list(notes), kinds=list(self._kinds))
            effect.update(arguments_as_text=self._template.arguments_as_text)
        finally:
            self._kinds = earlier | self._kinds

    def restore(
        self, unused_fields: Sequence[str], arguments_as_text: bool, notes: Sequence[str] = (), kinds: Sequence[str] = ()
    ) -> None:
        """Continue as after the rows that had this effect."""
        self._template.restore(unused_fields, arguments_as_text, notes)
        self._kinds |= dict.fromkeys(kinds)

    def prompt_tokens(self, prompt: Sequence[JsonObject] | str, options: JsonObject | None = None) -> list[int]:
        """Return the tokens of a prompt to sample from: of text, or of messages with the header of the answer to sample.

        ``options``: of the chat template, for this prompt.
        """
        if isinstance(prompt, str):
            return self.prompts([Plain("prompt", prompt)])[0][0]
        messages = parse_messages(prompt, "prompt", "messages")
        return self.prompts([Chat("prompt", messages, len(messages), options=options or {})])[0][0]

    def prompts(self, examples: Sequence[Example]) -> list[tuple[list[int], str]]:
        """Return tokens and text of each example's prompt. A response in the example is ignored."""
        return self._each_kind(examples, self._plain_prompts, self._chat_prompts)

    def conversation(self, messages: Sequence[JsonObject], train_on: str = "assistant") -> Rendered:
        """Render one conversation."""
        return self.render([Chat("conversation", parse_messages(messages, "conversation", "messages"))], train_on)[0]

    def render(
        self, examples: Sequence[Example], train_on: str = "assistant", *, empty_reasoning: bool = True
    ) -> list[Rendered]:
        """Render each example as one sequence.

        The prompt has weight 0; answers, with their end of turn, have the weights of their messages. If the chat template
        rewrites earlier turns, answers before the last are trained as the template prints them before the last.

        Args:
            train_on: ``assistant`` every answer, ``last_assistant`` the last, ``all`` every token. Text without a
                prompt is trained as a whole.
            empty_reasoning: whether a block of reasoning without text at the start of an answer is trained.

        Raises:
            DataError: the chat template cannot render a conversation; the error names its row.
        """
        return [sequence for [sequence] in self._rendered(examples, train_on, empty_reasoning, split=False)]

    def sequences(
        self, examples: Sequence[Example], train_on: str = "assistant", *, empty_reasoning: bool = True
    ) -> list[list[Rendered]]:
        """Render each example as one sequence, or as several if one cannot train all answers as they are sampled.

        Args, Raises: as :meth:`render`.
        """
        return self._rendered(examples, train_on, empty_reasoning, split=True)

    def _rendered(self, examples: Sequence[Example], train_on: str, empty_reasoning: bool, split: bool) -> list[list[Rendered]]:
        return self._each_kind(
            examples,
            lambda rows: [[sequence] for sequence in self._render_plain(rows, train_on)],
            lambda rows: self._render_chats(rows, train_on, empty_reasoning, split),
        )

    def _each_kind(
        self, examples: Sequence[Example], plain: Callable[[list[Plain]], list[T]], chat: Callable[[list[Chat]], list[T]]
    ) -> list[T]:
        """Apply ``plain`` and ``chat`` to the examples of their kind; results are in the examples' order."""
        texts = [example for example in examples if isinstance(example, Plain)]
        chats = [example for example in examples if isinstance(example, Chat)]
        done_texts, done_chats = iter(plain(texts) if texts else []), iter(chat(chats) if chats else [])
        self._kinds |= dict.fromkeys((*(["chat"] if chats else []), *(["text"] if texts else [])))
        return [next(done_texts if isinstance(example, Plain) else done_chats) for example in examples]

    def text(
        self, tokens: Sequence[int], *, continues: bool = False, with_special: bool = False, with_stop: bool = False
    ) -> str:
        """Return a completion as text, without the end of the turn and other special tokens.

        The marks of channels stay (:mod:`cookbook.data.channels`): without them, reasoning and answer would be one text.

        Args:
            continues: the completion continues a text, so a space at its start counts. Tokenizers that put a space before every
                text drop it when they decode.
            with_special: print special tokens too.
            with_stop: print the token that ends the turn too, if it is not special or special tokens are printed.
        """
        end = len(tokens)
        while end and not with_stop and tokens[end - 1] in self.stop_token_ids:
            end -= 1
        before = self._text_before if continues and self._encoder.prefixes else ([], "")
        skip = not (with_special or self.has_channels)
        whole = self.tokenizer.decode([*before[0], *tokens[:end]], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return str(whole)[len(before[1]) :]

    @cached_property
    def _text_before(self) -> tuple[list[int], str]:
        """Tokens and text of some text that a completion can follow."""
        tokens = self._encoder.raw(["a"], [""])[0].ids
        return tokens, str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def unread_options(self, options: JsonObject) -> list[str]:
        """Return the options of a chat that the chat template does not read, so that they have no effect."""
        return self._template.unread(options)

    def printed(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, with special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def opened_reasoning(self, prompt: Sequence[int]) -> str:
        """Return the end of a prompt that opens the reasoning, such as ``<think>``; empty if the prompt does not open it.

        A sampled answer continues it, so that the complete text of the answer begins with it.
        """
        return reasoning_tag(self.printed(prompt[-TAG_TOKENS:]))

    def encode(self, text: str, before: Sequence[int] = ()) -> list[int]:
        """Return the tokens of a text that continues the tokens ``before``, or others: no special tokens are added."""
        return self._encoder.continuation(text, before).ids

    def encode_observation(self, text: str, before: Sequence[int]) -> list[int]:
        """Return the tokens of a plain text of an environment, in which control tokens are text. It follows ``before``."""
        return self.encode(self._contents.quoted(text), before)

    def spells_control_tokens(self, text: str) -> bool:
        """Whether a plain text of an environment spells control tokens."""
        return self._contents.quoted(text) != text

    def chat_text(self, chat: Chat, *, header: bool) -> str:
        """Return all messages as the chat template prints them, with the header of the next answer if ``header``.

        Control tokens in contents are marked as text, for :meth:`encode` and :meth:`chat_tokens`.
        """
        return self._template.printed(self._contents.prepared(chat), header=header)

    def chat_tokens(self, text: str) -> list[int]:
        """Return the tokens of a whole text of :meth:`chat_text`."""
        return self._encoder.whole([text], ["text"])[0].ids

    @cached_property
    def has_channels(self) -> bool:
        """Whether the chat template prints channels, as that of gpt-oss."""
        return names_channels(all_sources(self.tokenizer))

    def answer_message(self, text: str) -> ChatMessage:
        """Return the text of a completion as a message: with channels, its reasoning, answer and calls in their fields."""
        texts = channel_texts(text) if self.has_channels else None
        if texts is None:
            return ChatMessage("assistant", text)
        extra: dict[str, object] = {}
        if texts.calls:
            extra["tool_calls"] = [
                {"id": f"call{place:05d}", "type": "function", "function": {"name": name, "arguments": json_or_text(arguments)}}
                for place, (name, arguments) in enumerate(texts.calls)
            ]
        # The template of gpt-oss prints text beside a call as reasoning, and refuses both.
        content = "" if texts.calls and texts.reasoning else texts.content
        if texts.reasoning:
            extra["thinking"] = "\n".join(filter(None, [texts.reasoning, texts.content])) if texts.calls else texts.reasoning
        return ChatMessage("assistant", content, extra=extra)

    @cached_property
    def end_of_calls(self) -> str:
        """The text that the chat template prints from the stop token of an answer with a call on; empty without calls."""
        ending, _ = self._template.ends_of_calls or ("", "")
        places = [place for token in self.stop_token_ids if (place := ending.find(self.printed([token]))) >= 0]
        return ending[min(places) :] if places else ""

    @property
    def end_of_turn(self) -> str:
        """The text that the chat template prints after an answer."""
        return self._template.end_of_turn

    @property
    def prints_tools(self) -> bool:
        """Whether the chat template prints tools."""
        return self._template.prints_tools

    def num_bytes(self, tokens: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> list[int]:
        """Return the number of UTF-8 bytes of the text of each row of tokens, without special tokens.

        ``tokens``: those of all rows, in order. ``ends``: for each row, the number of tokens up to its end.
        """
        counts = self._token_bytes(tokens)
        sums, unknown = (np.diff(np.append(0, column.cumsum())[ends], prepend=0) for column in (counts, counts == UNKNOWN))
        undecided = unknown.nonzero()[0]
        starts = np.append(0, ends[:-1])
        rows = [tokens[starts[row] : ends[row]].tolist() for row in undecided]
        sums[undecided] = [len(text.encode()) for text in self._texts(rows)]
        return list(sums.tolist())

    def _token_bytes(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the number of bytes that each token adds to a text, in the shape of ``tokens``."""
        # Other decoders change a token's text by its place, such as the first space of a text.
        if not self._decodes_bytes:
            return np.full(len(tokens), UNKNOWN)
        missing = max(int(tokens.max(initial=0)) + 1 - len(self._bytes_of_token), 0)
        self._bytes_of_token = np.append(self._bytes_of_token, np.full(missing, NOT_DECODED))
        new = np.unique(tokens[self._bytes_of_token[tokens] == NOT_DECODED])
        texts = self._texts([[token] for token in new.tolist()])
        self._bytes_of_token[new] = [UNKNOWN if PART_OF_A_CHARACTER in text else len(text.encode()) for text in texts]
        return self._bytes_of_token[tokens]

    def _texts(self, rows: list[list[int]]) -> list[str]:
        if not rows:  # transformers would decode no row as one row
            return []
        # The model's tokenizer looks at every token in Python before it calls the library's.
        decode = self.tokenizer.backend_tokenizer.decode_batch if self._decodes_as_standard else self._decoded
        return list(decode(rows, skip_special_tokens=True))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion (:mod:`cookbook.data.stop_tokens`)."""
        return self._stops.ids

    @property
    def answer_end(self) -> tuple[int, ...]:
        """The token that a complete answer ends with; empty: the tokenizer has none."""
        return self._stops.answer_end

    @cached_property
    def _stops(self) -> StopTokens:
        return StopTokens(self.tokenizer, self._template, self._encoder)

    def _note_missing_end(self) -> None:
        if not self.stop_token_ids:
            self._template.note(NO_END)

    @cached_property
    def _contents(self) -> Contents:
        return Contents(self.tokenizer, self._template, self.stop_token_ids)

    def _plain_prompts(self, examples: list[Plain]) -> list[tuple[list[int], str]]:
        encoded = self._raw([example.prompt for example in examples], examples)
        return [(self._encoder.opened(tokens), example.prompt) for example, tokens in zip(examples, encoded, strict=True)]

    def _chat_prompts(self, chats: list[Chat]) -> list[tuple[list[int], str]]:
        self._note_missing_end()
        texts = self._turns.prompts([self._contents.prepared(chat) for chat in chats])
        return [(tokens, without_breaks(text)) for tokens, text in zip(self._encode(texts, chats), texts, strict=True)]

    def _render_plain(self, examples: list[Plain], train_on: str) -> list[Rendered]:
        """Tokenize prompt and response separately, so that training and sampling see the same prompt tokens."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("model.name: the tokenizer has no end-of-text token, so a text could not end; give it one")
        prompts = self._raw([example.prompt for example in examples], examples)
        responses = self._responses(examples, prompts)
        rendered = []
        for prompt, response in zip(prompts, responses, strict=True):
            before = self._encoder.opened(prompt) if prompt else []
            after = self._closed_text(response if prompt else self._encoder.opened(response))
            weights = np.ones(len(before) + len(after), dtype=np.float32)
            if train_on != "all":
                # Text without a prompt is trained as a whole, except for the token that begins every text.
                weights[: len(before) if prompt else len(self._encoder.opening)] = 0.0
            rendered.append(Rendered(before + after, weights))
        return rendered

    def _responses(self, examples: list[Plain], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens of the responses, each as a text that continues its prompt."""
        if not self._encoder.prefixes:
            return self._raw([example.response for example in examples], examples)
        return [
            self._encoder.raw_continuation(example.response, prompt, example.where).ids
            if prompt
            else self._raw([example.response], [example])[0]
            for example, prompt in zip(examples, prompts, strict=True)
        ]

    def _closed_text(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a text with the end-of-text token, unless the text has a stop token at its end.

        White space after the stop token does not count: chat templates print a line end there.
        """
        eos = self.tokenizer.eos_token_id
        behind = next((place for place in range(len(tokens) - 1, -1, -1) if not self._is_space(tokens[place])), -1)
        return tokens if behind >= 0 and tokens[behind] in self.stop_token_ids else [*tokens, int(eos or 0)]

    def _is_space(self, token: int) -> bool:
        if token not in self._space_tokens:
            self._space_tokens[token] = token not in self.stop_token_ids and not self.printed([token]).strip()
        return self._space_tokens[token]

    def _render_chats(self, chats: list[Chat], train_on: str, empty_reasoning: bool, split: bool) -> list[list[Rendered]]:
        self._note_missing_end()
        chats = [self._contents.prepared(chat) for chat in chats]
        wanted = [answer_weights(chat, train_on) for chat in chats]
        texts = self._turns.sequences(chats, wanted, train_on, split=split)
        # The tokenizer encodes many texts in one call with several threads.
        encodings = iter(
            self._encodings(
                [sequence.text for sequences in texts for sequence in sequences],
                [c for c, t in zip(chats, texts, strict=True) for _ in t],
            )
        )
        rendered = []
        for chat, weights, sequences in zip(chats, wanted, texts, strict=True):
            pairs = [(sequence, next(encodings)) for sequence in sequences]
            rendered.append(self._weighted(chat, weights, pairs, train_on, empty_reasoning, split))
        return rendered

    def _weighted(
        self,
        chat: Chat,
        wanted: Mapping[int, float],
        pairs: Sequence[tuple[TrainedText, Encoded]],
        train_on: str,
        empty_reasoning: bool,
        split: bool,
    ) -> list[Rendered]:
        """Return the sequences of one conversation with the weights of their tokens."""
        rendered: list[tuple[TrainedText, list[int], list[tuple[int, int]]]] = []
        for sequence, encoding in pairs:
            partial = train_on != "all"
            apart = partial and any(self._has_other_tokens(sequence, encoding, place) for place in sequence.prompts)
            is_open = partial and split and self._leaves_open(sequence, encoding)
            if not apart and not is_open:
                rendered.append((sequence, encoding.ids, encoding.offsets if sequence.spans else []))
                continue
            self._template.note(OTHER_TOKENS if apart else OPEN_ANSWERS)
            alone = [sequence]
            if split and len(sequence.spans) > 1:
                alone = self._turns.separate(chat, {index: wanted[index] for index in sequence.answers})
            rendered += [(sequence, *self._encoded_apart(chat, sequence)) for sequence in alone]
        return [self._with_weights(chat, *item, train_on, empty_reasoning) for item in rendered]

    def _leaves_open(self, sequence: TrainedText, encoding: Encoded) -> bool:
        """Whether an answer in front of others has no stop token at its end, so the sequence would not teach to stop there."""
        tokens = encoding.ids
        for start, end, _ in sequence.spans[:-1]:
            first, behind = _tokens_of(start, end, encoding.offsets)
            ended = tokens[first:behind] + tokens[behind : behind + 1]
            if not any(token in self.stop_token_ids for token in ended):
                return True
        return False

    def _has_other_tokens(self, sequence: TrainedText, encoding: Encoded, place: int) -> bool:
        """Whether the text up to ``place``, a prompt, has other tokens than the whole text begins with."""
        offsets = encoding.offsets
        first = bisect_right(offsets, place, key=itemgetter(1))
        if first == len(offsets):
            return False
        # White space that a tokenizer leaves out of the offsets may belong to either side.
        start, before = offsets[first][0], offsets[first - 1][1] if first else 0
        if start < place:
            return True
        if before < place == start:
            return self._encode([sequence.text[:place]], [Plain("", "")])[0] != encoding.ids[:first]
        # Tokenizers of the GPT-2 kind divide several characters of white space by what follows them: two line ends are one
        # token at the end of a prompt, and two tokens in front of a word. The same characters are compared once.
        if not sequence.text[max(place - 2, 0) : place].isspace():
            return False
        around = sequence.text[max(place - 32, 0) : place + 1]
        if around not in self._divided:
            alone = self._encode([sequence.text[:place]], [Plain("", "")])[0]
            self._divided[around] = alone != encoding.ids[:first]
        return self._divided[around]

    def _encoded_apart(self, chat: Chat, sequence: TrainedText) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of the first prompt, followed by those of the text after it, with their characters."""
        place = sequence.prompts[0]
        [before] = self._encodings([sequence.text[:place]], [chat])
        after = self._encoder.continuation(sequence.text[place:], before.ids, chat.where)
        return before.ids + after.ids, before.offsets + [(start + place, end + place) for start, end in after.offsets]

    def _with_weights(
        self,
        chat: Chat,
        sequence: TrainedText,
        tokens: list[int],
        offsets: list[tuple[int, int]],
        train_on: str,
        empty_reasoning: bool,
    ) -> Rendered:
        weights = np.full(len(tokens), 1.0 if train_on == "all" else 0.0, dtype=np.float32)
        if not empty_reasoning:
            sequence = without_empty_reasoning(sequence)
        for index, (start, end, weight) in zip(sequence.answers, sequence.spans, strict=True):
            first, behind = self._with_end_of_turn(tokens, *_tokens_of(start, end, offsets), chat.messages[index])
            weights[first:behind] = weight
        if train_on == "all":
            return Rendered(tokens, weights, sequence.num_messages)
        closed = self._closed(tokens, weights, calls=sequence.ends_with_call)
        return replace(closed, num_messages=sequence.num_messages)

    def _closed(self, tokens: list[int], weights: npt.NDArray[np.float32], *, calls: bool = False) -> Rendered:
        """Add a stop token after an answer that the template leaves open: otherwise the model never learns to stop.

        It is the token that begins the next turn, or the end-of-text token. ``calls``: the answer calls tools.
        """
        next_turns = self._stops.next_turns
        eos = next_turns[-1 if calls else 0] if next_turns else self.tokenizer.eos_token_id
        if eos is None or not tokens or tokens[-1] in self.stop_token_ids or not weights[-1]:
            return Rendered(tokens, weights)
        return Rendered([*tokens, eos], np.append(weights, weights[-1]))

    def _with_end_of_turn(self, tokens: list[int], first: int, behind: int, message: ChatMessage) -> tuple[int, int]:
        """Return an answer's tokens up to its stop token, which may follow the span or be inside it.

        The model must learn to stop, and never writes the text that the template puts after the stop token. A stop token that
        the template prints in front of a part of the message does not end the answer.
        """
        stops = [index for index in range(first, behind) if tokens[index] in self.stop_token_ids]
        for stop in stops:
            after_stop = tokens[stop + 1 : behind]
            if all(token in self._encoder.added_ids or self._is_space(token) for token in after_stop):
                return first, stop + 1
            if not missing_text(message.call_texts(), without_breaks(self.printed(tokens[first : stop + 1]))):
                return first, stop + 1
            self._template.note(
                f"the chat template prints {self.printed([tokens[stop]])!r} inside of answers that call tools, and completions "
                "end there; such answers are trained whole"
            )
        return first, behind + (not stops and behind < len(tokens) and tokens[behind] in self.stop_token_ids)

    def _raw(self, texts: list[str], examples: Sequence[Plain]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encoder.raw(texts, [example.where for example in examples])]

    def _encode(self, texts: list[str], examples: Sequence[Example]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(texts, examples)]

    def _encodings(self, texts: list[str], examples: Sequence[Example]) -> Sequence[Encoded]:
        return self._encoder.whole(texts, [example.where for example in examples])

    @cached_property
    def _decodes_as_standard(self) -> bool:
        """Whether the class of the model's tokenizer decodes tokens as all fast tokenizers do."""
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        own, base = type(self.tokenizer), PreTrainedTokenizerBase
        is_standard = own.batch_decode is base.batch_decode and own.decode is base.decode
        return is_standard and own._decode is PreTrainedTokenizerFast._decode

    @cached_property
    def _decodes_bytes(self) -> bool:
        """Whether a text is its tokens' bytes, in order, as with the tokenizers of GPT-2, Llama 3 and Qwen."""
        from tokenizers.decoders import ByteLevel

        return self._decodes_as_standard and isinstance(self.tokenizer.backend_tokenizer.decoder, ByteLevel)

    def _decoded(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(
            rows, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return texts


def _tokens_of(start: int, end: int, offsets: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the range of tokens that hold any of the characters ``[start, end)``.

    ``offsets`` are each token's characters. Some tokenizers leave white space out of them, down to an empty range at
    the token's end; comparing both ends keeps such a token with the text that it ends.
    """
    first = bisect_right(offsets, start, key=itemgetter(1))
    behind = max(bisect_left(offsets, end, key=itemgetter(0)), bisect_right(offsets, end, key=itemgetter(1)))
    return first, max(first, behind)


def continues_text(example: Example | None) -> bool:
    """Whether a completion of a prompt continues a text: a plain text, or the start of an answer."""
    if isinstance(example, Chat):
        return bool(example.prefill) or is_prefill(example.messages[: example.start])
    return example is not None


def completed_text(
    renderer: Renderer,
    tokens: Sequence[int],
    stops: Sequence[str],
    *,
    continues: bool = False,
    with_special: bool = False,
    with_stop: bool = False,
) -> str:
    """Return the text of a completion before its stop string, or with it if ``with_stop``. Options: of :meth:`Renderer.text`.

    If several stop strings begin at the same place, the shortest counts.
    """
    text = renderer.text(tokens, continues=continues, with_special=with_special, with_stop=with_stop)
    places = [(place, len(stop)) for stop in stops if (place := text.find(stop)) >= 0]
    if not places:
        return text
    place, length = min(places)
    return text[: place + length] if with_stop else text[:place]


class TextStream:
    """The text of a completion that is sent in parts. Parts of a character, or of a stop string, are kept back.

    ``options``: as of :func:`completed_text`.
    """

    def __init__(self, renderer: Renderer, stops: Sequence[str], **options: bool) -> None:
        self._renderer = renderer
        self._options = options
        self._stops = stops
        self._tokens: list[int] = []
        # Characters that were sent.
        self.num_sent = 0

    def add(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """Add tokens, and return the text that can be sent now."""
        self._tokens += tokens
        text = completed_text(self._renderer, self._tokens, self._stops, **self._options)
        if not is_last:
            text = text.rstrip(PART_OF_A_CHARACTER)
            text = text[: len(text) - _kept_back(text, self._stops)]
        part = text[self.num_sent :]
        self.num_sent = max(self.num_sent, len(text))
        return part


def _kept_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` with which a stop string begins."""
    lengths = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(lengths, default=0)
