"""Token capture: the calls of an agent, recorded as branches of tokens.

A call that extends an earlier call and its answer begins with exactly the tokens of that call and the tokens that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat, Plain
from cookbook.data.messages import parse_messages
from cookbook.sampling.environments.conversation import Conversation
from cookbook.sampling.trajectory import Branch, Segment
from cookbook.types import JsonObject, Sample, SamplingParams


@dataclass(frozen=True)
class AgentCall:
    """A call of the model: messages of a chat with tools, or a text to complete, and the limits of the answer.

    ``options``: of the chat template.
    """

    prompt: str | list[JsonObject]
    tools: tuple[JsonObject, ...] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    options: JsonObject = field(default_factory=dict)

    def extends(self, earlier: AgentCall, answer: JsonObject) -> str | list[JsonObject] | None:
        """Return the messages or text after the earlier call and its ``answer``; None if the call does not extend them."""
        if isinstance(self.prompt, str) or isinstance(earlier.prompt, str):
            if not isinstance(self.prompt, str) or not isinstance(earlier.prompt, str):
                return None
            begun = earlier.prompt + str(answer["content"])
            return self.prompt[len(begun) :] or None if self.prompt.startswith(begun) else None
        begun_with = _with_answer(earlier.prompt, answer)
        count = len(begun_with)
        if (self.tools, self.options) != (earlier.tools, earlier.options) or list(map(_facts, self.prompt[:count])) != list(
            map(_facts, begun_with)
        ):
            return None
        return self.prompt[count:] or None


@dataclass(eq=False)
class _Answered:
    """An answered call. Its answer is the end of ``conversation`` until ``is_extended``; ``end`` is a copy that stays."""

    call: AgentCall
    answer: JsonObject
    conversation: Conversation
    end: Conversation
    is_extended: bool = False


@dataclass(eq=False)
class Capture:
    """All calls of one program."""

    renderer: Renderer
    _call: AgentCall | None = None
    _current: Conversation | None = None
    _answered: list[_Answered] = field(default_factory=list)
    # Conversations by the time of their last completion.
    _conversations: list[Conversation] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The prompt of the current call, and later its answer. A check that records no calls has none."""
        return [] if self._current is None else self._current.tokens

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches. The last completion of the last one answers the last call."""
        return tuple(branch for conversation in self._conversations for branch in conversation.branches)

    def observe(self, call: AgentCall) -> None:
        """Begin a call. Raises DataError: its messages cannot be rendered."""
        self._call, self._current = call, self._extended(call) or self._opened(call)

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the run's parameters with the limits of the call."""
        assert self._call is not None
        if self._call.max_tokens is not None:
            limit = self._call.max_tokens if params.max_tokens is None else min(self._call.max_tokens, params.max_tokens)
            params = replace(params, max_tokens=limit)
        return replace(params, stop=[*(params.stop or []), *self._call.stop]) if self._call.stop else params

    def add(self, sample: Sample) -> Segment:
        """Add the completion of the call."""
        assert self._current is not None
        turn = self._current.add(sample)
        others = [conversation for conversation in self._conversations if conversation is not self._current]
        self._conversations = [*others, self._current]
        return turn

    def answered(self, answer: JsonObject) -> None:
        """Record the message that the program got, which later calls may begin with."""
        if self._call is None or self._current is None:
            return
        self._answered.append(_Answered(self._call, answer, self._current, self._current.fork()))

    def _extended(self, call: AgentCall) -> Conversation | None:
        """Return the conversation that the call extends by the most messages; None if it extends none."""
        match: tuple[_Answered, str | list[JsonObject]] | None = None
        for earlier in reversed(self._answered):
            further = call.extends(earlier.call, earlier.answer)
            if further is not None and (match is None or len(further) < len(match[1])):
                match = earlier, further
        if match is None:
            return None
        earlier, further = match
        # If another call has continued the tokens, this one has them as its prompt.
        conversation = earlier.end.fork() if earlier.is_extended else earlier.conversation
        earlier.is_extended = True
        conversation.observe(further)
        return conversation

    def _opened(self, call: AgentCall) -> Conversation:
        if isinstance(call.prompt, str):
            example: Chat | Plain = Plain("call", call.prompt)
        else:
            messages = parse_messages(call.prompt, "call", "messages")
            example = Chat("call", messages, len(messages), call.tools or None, call.options)
        return Conversation(self.renderer, RenderedPrompt([], Row("call", {}), "", "", example), None, [])


def _with_answer(prompt: Sequence[JsonObject], answer: JsonObject) -> list[JsonObject]:
    """Return the messages after an answer, which continues an answer that the prompt begins."""
    last = prompt[-1] if prompt else {}
    begun = last.get("content")
    if last.get("role") != "assistant" or not isinstance(begun, str) or not begun or last.get("tool_calls"):
        return [*prompt, answer]
    return [*prompt[:-1], {**answer, "content": begun + str(answer.get("content") or "")}]


def _facts(message: JsonObject) -> str:
    """Return the content of a message. Programs may change white space at its ends, and leave out ids and empty fields."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    named = [(call.get("name"), _arguments(call.get("arguments"))) for call in calls if isinstance(call, dict)]
    content = message.get("content")
    text = (
        content
        if isinstance(content, str)
        else "".join(str(part.get("text")) for part in content or () if isinstance(part, dict))
    )
    return json.dumps([message.get("role"), text.strip(), named], sort_keys=True, default=str)


def _arguments(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
