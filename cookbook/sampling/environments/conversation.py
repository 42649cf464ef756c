"""The tokens of an episode: a later turn begins with exactly the tokens that were sampled, and is never tokenized again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from cookbook.data import RenderedPrompt, Renderer
from cookbook.data.encoding import without_breaks
from cookbook.data.formats import Chat, Example, Plain
from cookbook.data.messages import ChatMessage, is_prefill, parse_messages
from cookbook.data.turns import opened_reasoning, reasoning_tag
from cookbook.sampling.environments.tool_calls import described_tools
from cookbook.sampling.trajectory import Branch, Segment
from cookbook.types import JsonObject, Sample, SamplingParams

Observation = str | list[JsonObject] | None

# A conversation that shows how the chat template continues after an answer.
QUESTION, ANSWER = ChatMessage("user", "question"), ChatMessage("assistant", "\u241eanswer\u241e")
# Characters at the end of a prompt that may be a tag which opens the reasoning.
OPENING = 64
# Some templates print the result of a tool only after the call of one.
CALL = {"tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {}}}]}


class Transcript(Protocol):
    """Tokens of an episode: ``tokens`` are the prompt of the next turn."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def branches(self) -> tuple[Branch, ...]: ...

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the next turn."""

    def add(self, sample: Sample) -> Segment:
        """Add a completion to the last turn, and return it with its text."""


class Conversation:
    """One episode's text and tokens so far.

    The next turn's prompt is the tokens so far, the completion, and what the chat template prints between the completion and
    the header of the next answer. Where the template prints earlier turns differently from how they were sampled, the
    conversation is rendered as a whole and begins a new branch.
    """

    def __init__(self, renderer: Renderer, prompt: RenderedPrompt, observation: Observation, tools: list[JsonObject]) -> None:
        self.renderer = renderer
        if tools and not renderer.prints_tools:
            observation, tools = _with_tools(observation, tools), []
        self._example, first = _opening(prompt, observation, tools)
        if isinstance(self._example, Plain) and not renderer.spells_control_tokens(first):
            self._example, first = replace(self._example, prompt=self._example.prompt + first), ""
        [(tokens, text)] = renderer.prompts([self._example])
        self.tokens = [*tokens, *renderer.encode_observation(first, tokens)]
        text += first
        # Messages so far, of a chat; and the text that they were sampled after, with its special tokens.
        self._messages = list(self._example.messages) if isinstance(self._example, Chat) else []
        # Whether the next completion continues the last message, the start of an answer.
        self._is_begun = is_prefill(self._messages)
        self._text = text
        first_text = "\n".join(message.content for message in self._messages) if self._messages else text
        self._segments = [Segment("prompt", self.tokens.copy(), first_text)]
        self._earlier: list[Branch] = []
        self._answer: Segment | None = None

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (*self._earlier, tuple(self._segments))

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the next turn."""
        return params

    def add(self, sample: Sample) -> Segment:
        """Add a completion to the last turn, and return it with its text."""
        continues = self._is_begun or isinstance(self._example, Plain)
        text = self.renderer.text(sample.tokens, continues=continues)
        self._answer = Segment.sampled(sample, text, reasoning_tag(self._text[-OPENING:]))
        self._segments.append(self._answer)
        self.tokens += sample.tokens
        if self._is_begun:
            begun = self._messages.pop()
            self._messages.append(replace(begun, content=begun.content + text))
            self._is_begun = False
        else:
            # A prompt that opens the reasoning has printed the start of the message.
            self._messages.append(self.renderer.answer_message(opened_reasoning(self._text, text) + text))
        self._text += self.renderer.printed(sample.tokens)
        return self._answer

    def fork(self) -> Conversation:
        """Return a conversation with the same tokens, all of which are its prompt."""
        other = copy.copy(self)
        other.tokens, other._messages, other._earlier = self.tokens.copy(), self._messages.copy(), []
        other._segments = [Segment("prompt", self.tokens.copy(), "\n".join(segment.text for segment in self._segments))]
        return other

    def observe(self, observation: str | list[JsonObject]) -> None:
        """Add what the environment says, and the header of the next answer."""
        if isinstance(self._example, Plain):
            text = (
                observation if isinstance(observation, str) else "".join(f"\n{message['content']}\n" for message in observation)
            )
            self._continue(self.renderer.encode_observation(text, self.tokens), text, text)
            return
        said = _messages(observation, self._example.where)
        segment_text = "\n".join(message.content for message in said)
        self._messages += said
        between = self._between(said)
        text = self.renderer.chat_text(replace(self._example, messages=tuple(self._messages)), header=True)
        if between is not None and _squeezed(text) == _squeezed(self._text + between):
            self._continue(self.renderer.encode(between, self.tokens), between, segment_text)
            return
        self._earlier.append(tuple(self._segments))
        self.tokens = self.renderer.chat_tokens(text)
        self._text = text
        self._segments = [Segment("prompt", self.tokens.copy(), segment_text)]

    def _continue(self, tokens: list[int], text: str, segment_text: str) -> None:
        self._segments.append(Segment("environment", tokens, segment_text))
        self.tokens += tokens
        self._text += text

    def _between(self, said: Sequence[ChatMessage]) -> str | None:
        """Return what the chat template prints between a completion and the next; None if it prints no such text."""
        last = self._answer
        assert last is not None
        assert isinstance(self._example, Chat)
        closing = _after_answer(self.renderer, self._example, tuple(said))
        if closing is None:
            return None
        stop = self.renderer.printed(last.tokens[-1:]) if last.stop_reason == "stop" else ""
        head, stop_mark, tail = closing.partition(stop) if stop else ("", "", closing)
        # A completion that was cut off, or ended by a text, has not closed its turn.
        return tail if stop_mark and not head.strip() else closing


def _after_answer(renderer: Renderer, chat: Chat, said: tuple[ChatMessage, ...]) -> str | None:
    """Return the text from the end of an answer to the header of the next answer, with ``said`` between."""
    answer = replace(ANSWER, extra=CALL) if said and said[0].role == "tool" else ANSWER
    before = replace(chat, messages=(QUESTION, answer))
    text = renderer.chat_text(replace(before, messages=(*before.messages, *said)), header=True)
    ended = renderer.chat_text(before, header=False)
    if not text.startswith(ended):
        # The template prints the last answer differently from an earlier one. What follows the answer is the same.
        before_answer, answer_text, after = text.rpartition(ANSWER.content)
        return after if answer_text and answer is ANSWER and before_answer else None
    # The end of an answer with a call follows the call. It may be another token than that of other answers.
    closed = next((mark for mark in (renderer.end_of_turn, renderer.end_of_calls) if mark and ended.endswith(mark)), None)
    return closed + text[len(ended) :] if closed is not None else None


def _opening(prompt: RenderedPrompt, observation: Observation, tools: list[JsonObject]) -> tuple[Example, str]:
    """Return the row's prompt with the first observation at its end, and the first observation of a plain text."""
    example = prompt.example
    if isinstance(example, Plain):
        text = (
            observation if isinstance(observation, str) else "".join(str(message["content"]) for message in observation or ())
        )
        return example, text
    assert isinstance(example, Chat)
    messages = list(example.messages[: example.start])
    if example.prefill:
        messages.append(ChatMessage("assistant", example.prefill))
    if isinstance(observation, str) and messages and messages[-1].role == "user":
        messages[-1] = replace(messages[-1], content=f"{messages[-1].content}\n{observation}")
    else:
        messages += _messages(observation, example.where)
    tools_shown = example.tools or tuple(tools) or None
    return replace(example, messages=tuple(messages), start=len(messages), tools=tools_shown, prefill=""), ""


def _with_tools(observation: Observation, tools: list[JsonObject]) -> Observation:
    """Return the first observation, with a description of the tools before it."""
    text = described_tools(tools)
    if isinstance(observation, list):
        return [{"role": "user", "content": text}, *observation]
    return f"{text}\n{observation}" if observation else text


def _messages(observation: Observation, where: str) -> tuple[ChatMessage, ...]:
    if isinstance(observation, str):
        return (ChatMessage("user", observation),)
    return parse_messages(observation, where, "observation") if observation else ()


def _squeezed(text: str) -> str:
    """The text without white space, which templates may trim, and without the marks of control tokens in contents."""
    return "".join(without_breaks(text).split())
