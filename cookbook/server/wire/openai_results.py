"""Responses of the endpoint: texts, calls of tools and log-probabilities in OpenAI's formats, and token ids in vLLM's."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.data import Renderer
from cookbook.data.channels import ChannelTexts, channel_texts
from cookbook.data.render import PART_OF_A_CHARACTER, TextStream, completed_text
from cookbook.engine.decoding.requests import TokenChunk
from cookbook.sampling.environments.tool_calls import ToolCall, parse_calls, text_before_calls
from cookbook.server.wire.openai import ChatBody, CompletionBody
from cookbook.types import JsonObject, Sample

# Bytes of the longest character, and so the largest number of tokens that share one character.
CHARACTER_TOKENS = 4
# The most likely tokens at one position, by id, most likely first; None at the first token of a prompt.
TopRow = dict[int, float] | None


@dataclass(frozen=True)
class Answer:
    """Completions of one prompt.

    Attributes:
        prompt_logprobs: one value per prompt token, the first None; None if they were not requested.
        tops: per completion, the most likely tokens at each position of the prompt and of the completion; None if they were not
            requested.
    """

    prompt: list[int]
    sequences: list[Sample]
    prompt_logprobs: list[float | None] | None = None
    tops: list[list[TopRow]] | None = None

    def top(self, number: int, count: int, *, start: int) -> list[TopRow] | None:
        """Return the ``count`` most likely tokens at the positions from ``start``. None: ``count`` is 0."""
        if self.tops is None or not count:
            return None
        return [None if row is None else dict(list(row.items())[:count]) for row in self.tops[number][start:]]


class Head:
    """Fields that all parts of one response share."""

    def __init__(self, prefix: str, kind: str, model: str, fingerprint: str) -> None:
        self.request_id = f"{prefix}-{secrets.token_hex(12)}"
        self._fields = {"object": kind, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def response(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> JsonObject:
        head = {"id": self.request_id, **self._fields, "choices": list(choices)}
        return head if usage is None else {**head, "usage": usage}


def usage(answers: Sequence[Answer]) -> JsonObject:
    prompt = sum(len(answer.prompt) for answer in answers)
    completion = sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# ---- texts -----------------------------------------------------------------------------------------------------------


def opening(renderer: Renderer, fields: ChatBody | CompletionBody, prompt: Sequence[int]) -> str:
    """Return the text of the prompt with which the answer begins: the tag that opens the reasoning, or nothing.

    The client does not see the prompt. It needs the tag to separate the reasoning from the answer. The start of an answer that
    the client has sent is not repeated.
    """
    return renderer.opened_reasoning(prompt) if isinstance(fields, ChatBody) and not fields.continues_answer else ""


def message(text: str, tools: Sequence[JsonObject], *, channels: bool = False) -> JsonObject:
    """Return a message of the assistant. A text stays text if a call cannot be read or names none of the ``tools``.

    The parser is that of environments. Without ``tools``, the model may call none. ``text`` begins with what the prompt has
    printed of the answer, so that a call inside reasoning is not taken for one. ``channels``: the text may have the channels of
    gpt-oss, whose reasoning is ``reasoning_content``.
    """
    calls = parse_calls(text, tools) if tools else []
    known = {tool.get("function", tool).get("name") for tool in tools}
    read = [call for call in calls if isinstance(call, ToolCall) and call.name in known]
    said: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if channels and (texts := channel_texts(text)) is not None and len(texts.calls) == len(read):
        said["content"] = (texts.content or None) if read else texts.content
        if texts.reasoning:
            said["reasoning_content"] = texts.reasoning
    elif calls and len(read) == len(calls):
        said["content"] = text_before_calls(text, tools) or None
    else:
        return said
    return {**said, "tool_calls": [_call(call) for call in read]} if read else said


def _call(call: ToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


# ---- whole responses -------------------------------------------------------------------------------------------------


def chat(renderer: Renderer, fields: ChatBody, head: Head, answer: Answer) -> JsonObject:
    """Return the response of ``POST /v1/chat/completions``."""
    logprobs = LogprobFormat(renderer)
    begun = opening(renderer, fields, answer.prompt)
    choices = []
    for number, sequence in enumerate(answer.sequences):
        text = completed_text(
            renderer, sequence.tokens, fields.stop_strings, continues=fields.continues_answer, **fields.text_options
        )
        said = message(begun + text, fields.callable_tools, channels=renderer.has_channels)
        top = answer.top(number, fields.top_logprobs, start=len(answer.prompt))
        scores = logprobs.chat(sequence.tokens, sequence.logprobs, top) if fields.logprobs else None
        reason = "tool_calls" if "tool_calls" in said else sequence.stop_reason
        choices.append({"index": number, "message": said, "finish_reason": reason, "logprobs": scores})
    return head.response(choices, usage([answer]))


def completions(renderer: Renderer, fields: CompletionBody, head: Head, answers: Sequence[Answer]) -> JsonObject:
    """Return the response of ``POST /v1/completions``: the choices of each prompt in the order of the prompts."""
    logprobs = LogprobFormat(renderer, fields.text_options)
    choices: list[JsonObject] = []
    for prompt, answer in zip(fields.prompts, answers, strict=True):
        text = prompt if isinstance(prompt, str) else renderer.printed(prompt)
        for number in range(len(answer.sequences)):
            choice = _completion(renderer, fields, logprobs, text, answer, number)
            choices.append({"index": len(choices), **choice})
    return head.response(choices, usage(answers))


def _completion(
    renderer: Renderer, fields: CompletionBody, logprobs: LogprobFormat, prompt_text: str, answer: Answer, number: int
) -> JsonObject:
    sequence, start = answer.sequences[number], len(answer.prompt)
    text = completed_text(renderer, sequence.tokens, fields.stop_strings, continues=True, **fields.text_options)
    tokens, values = sequence.tokens, list[float | None](sequence.logprobs)
    if fields.echo:
        text = prompt_text + text
        tokens, values, start = answer.prompt + tokens, (answer.prompt_logprobs or []) + values, 0
    logprobs_of_choice = None
    if fields.logprobs is not None:
        logprobs_of_choice = logprobs.completion(tokens, values, answer.top(number, fields.logprobs, start=start))
    return {"text": text, "finish_reason": sequence.stop_reason, "logprobs": logprobs_of_choice}


# ---- streams ---------------------------------------------------------------------------------------------------------


class CompletionParts:
    """Choices of the chunks of a streamed completion."""

    def __init__(self, renderer: Renderer, fields: CompletionBody, num_prompts: int) -> None:
        options, count = fields.text_options, num_prompts * fields.n
        self._texts = [TextStream(renderer, fields.stop_strings, continues=True, **options) for _ in range(count)]
        self._logprobs = None if fields.logprobs is None else LogprobFormat(renderer, options)

    def opening(self) -> list[JsonObject]:
        return []

    def next(self, index: int, chunk: TokenChunk) -> JsonObject | None:
        """Return choice ``index`` with the newest tokens."""
        logprobs_of_chunk = None
        if self._logprobs is not None:
            logprobs_of_chunk = self._logprobs.completion(chunk.tokens, chunk.logprobs, None, self._texts[index].num_sent)
        text = self._texts[index].add(chunk.tokens, is_last=chunk.stop_reason is not None)
        return {"index": index, "text": text, "logprobs": logprobs_of_chunk, "finish_reason": chunk.stop_reason}


class ChatParts:
    """Choices of the chunks of a streamed chat. With tools, a choice is sent at its end, because its text may be a call."""

    def __init__(self, renderer: Renderer, fields: ChatBody, prompt: Sequence[int]) -> None:
        self._begun = opening(renderer, fields, prompt)
        options = {"continues": fields.continues_answer, **fields.text_options}
        self._texts = [TextStream(renderer, fields.stop_strings, **options) for _ in range(fields.n)]
        self._logprobs = LogprobFormat(renderer) if fields.logprobs else None
        self._tools = fields.callable_tools
        self._channels = [_ChannelParts() for _ in range(fields.n)] if renderer.has_channels else None
        self._waiting: list[tuple[list[int], list[float]]] = [([], []) for _ in range(fields.n)]

    def opening(self) -> list[JsonObject]:
        """Return a choice per answer that names the role of its author, with the start that the prompt has printed."""
        delta = {"role": "assistant", "content": self._begun}
        return [_part(index, delta, None, None) for index in range(len(self._texts))]

    def next(self, index: int, chunk: TokenChunk) -> JsonObject | None:
        """Return choice ``index`` with the newest tokens; None: the choice waits for its end."""
        tokens, logprobs = self._waiting[index]
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        reason = chunk.stop_reason
        if self._tools and reason is None:
            return None
        self._waiting[index] = [], []
        text = self._texts[index].add(tokens, is_last=reason is not None)
        delta: JsonObject = {"content": text}
        logprobs_of_chunk = None if self._logprobs is None else self._logprobs.chat(tokens, logprobs, None)
        said = message(self._begun + text, self._tools, channels=self._channels is not None) if self._tools else {}
        if self._channels is not None and "tool_calls" not in said:
            delta = self._channels[index].add(text, is_last=reason is not None)
        if "tool_calls" in said:
            calls = [{"index": place, **call} for place, call in enumerate(said["tool_calls"])]
            # The first part has sent the start that the prompt has printed.
            content = (said["content"] or "").removeprefix(self._begun) or None
            thought = {name: said[name] for name in ("reasoning_content",) if name in said}
            delta, reason = {**thought, "content": content, "tool_calls": calls}, "tool_calls"
        return _part(index, delta, logprobs_of_chunk, reason)


class _ChannelParts:
    """The new reasoning and answer of a completion with channels that is sent in parts."""

    def __init__(self) -> None:
        self._text = ""
        self._sent = ChannelTexts("", "", ())

    def add(self, text: str, *, is_last: bool) -> JsonObject:
        """Return what the text adds to the message. Before the first mark, it is not known whether the text is a header."""
        self._text += text
        texts = channel_texts(self._text)
        if texts is None:
            return {"content": self._text if is_last else ""}
        if is_last and texts.calls and self._sent == ChannelTexts("", "", ()):
            # Without tools, or with calls that cannot be read, the whole text is the answer.
            return {"content": self._text}
        sent, self._sent = self._sent, texts
        delta: JsonObject = {"content": texts.content[len(sent.content) :]}
        reasoning = texts.reasoning[len(sent.reasoning) :]
        return {"reasoning_content": reasoning, **delta} if reasoning else delta


def _part(index: int, delta: JsonObject, logprobs: JsonObject | None, reason: str | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


# ---- log-probabilities -----------------------------------------------------------------------------------------------


class LogprobFormat:
    """Log-probabilities of tokens in the formats of the endpoint. ``options``: of the text, for the places of tokens in it."""

    def __init__(self, renderer: Renderer, options: Mapping[str, bool] | None = None) -> None:
        self._renderer = renderer
        self._options = dict(options or {})
        if self._options.get("with_special"):
            # A special token inside of a text ends no turn.
            self._options["with_stop"] = True
        self._name = functools.cache(self._uncached_name)

    def chat(self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[TopRow] | None) -> JsonObject:
        """Return the format of chat completions."""
        content = []
        for token, logprob, row in zip(tokens, logprobs, _rows(top, tokens), strict=True):
            likely = (
                [self._entry(likely_token, value) for likely_token, value in with_token(row, token, logprob).items()]
                if row
                else []
            )
            content.append({**self._entry(token, logprob), "top_logprobs": likely})
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], top: Sequence[TopRow] | None, start: int = 0
    ) -> JsonObject:
        """Return the format of completions. ``start``: characters of the text before the tokens."""
        tops = [
            None if row is None or logprob is None else self._named(with_token(row, token, logprob), token)
            for token, logprob, row in zip(tokens, logprobs, _rows(top, tokens), strict=True)
        ]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": None if top is None else tops,
            "text_offset": self._offsets(tokens, start),
        }

    def _named(self, row: dict[int, float], token: int) -> dict[str, float]:
        """Return the values by name. Of tokens with the same name, the most likely one counts, or ``token`` itself."""
        named: dict[str, float] = {}
        for likely_token, value in row.items():
            named.setdefault(self._name(likely_token), value)
        return {**named, self._name(token): row[token]}

    def _entry(self, token: int, logprob: float) -> JsonObject:
        name = self._name(token)
        whole = not name.startswith("token_id:")
        return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if whole else None}

    def _uncached_name(self, token: int) -> str:
        """Return the text of a token; ``token_id:N`` if the token is a part of a character, which has no text."""
        text = self._renderer.printed([token])
        return f"token_id:{token}" if PART_OF_A_CHARACTER in text else text

    def _offsets(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return the place of each token in the text, in characters. Tokens of one character have one place."""
        offsets, place, parts = [], start, list[int]()
        for token in tokens:
            offsets.append(place)
            parts.append(token)
            text = self._renderer.text(parts, **self._options)
            if PART_OF_A_CHARACTER not in text or len(parts) == CHARACTER_TOKENS:
                place += len(text)
                parts = []
        return offsets


def with_token(row: dict[int, float], token: int, logprob: float) -> dict[int, float]:
    """Return the most likely tokens together with ``token``.

    Its value is the one of the sampler. The values of ``row`` come from another forward pass, whose last bits may differ, and
    evaluations compare both values to learn whether the token is the most likely one.
    """
    return {**row, token: logprob}


# ---- vLLM's generate -------------------------------------------------------------------------------------------------


def generated(head: JsonObject, answer: Answer, logprobs: int | None, prompt_logprobs: int | None) -> JsonObject:
    """Return the response of ``POST /inference/v1/generate``.

    ``sampled_mask`` has one value per token of the prompt and of the completion together: 1 if the model has sampled the token.

    Args:
        logprobs, prompt_logprobs: number of most likely tokens per position; None: no log-probabilities.
    """
    prompt = answer.prompt
    choices = [
        {
            "index": number,
            "token_ids": sequence.tokens,
            "sampled_mask": [*[0] * len(prompt), *[1] * len(sequence.tokens)],
            "logprobs": None if logprobs is None else _by_id(sequence, answer.top(number, logprobs, start=len(prompt))),
            "finish_reason": sequence.stop_reason,
        }
        for number, sequence in enumerate(answer.sequences)
    ]
    scores = None if prompt_logprobs is None else _prompt_logprobs(answer, prompt_logprobs)
    return {**head, "choices": choices, "prompt_token_ids": prompt, "prompt_logprobs": scores, "usage": usage([answer])}


def _by_id(sequence: Sample, top: Sequence[TopRow] | None) -> JsonObject:
    content = []
    for token, logprob, row in zip(sequence.tokens, sequence.logprobs, _rows(top, sequence.tokens), strict=True):
        likely = (
            [_id_entry(likely_token, value) for likely_token, value in with_token(row, token, logprob).items()] if row else []
        )
        content.append({**_id_entry(token, logprob), "top_logprobs": likely})
    return {"content": content}


def _id_entry(token: int, logprob: float) -> JsonObject:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None}


def _prompt_logprobs(answer: Answer, count: int) -> list[JsonObject | None]:
    """Return, per token of the prompt, the log-probabilities of the token and of the most likely tokens, by id."""
    assert answer.prompt_logprobs is not None
    rows = _rows(answer.top(0, count, start=0), answer.prompt)[: len(answer.prompt)]
    return [
        None
        if logprob is None
        else {str(likely_token): {"logprob": value} for likely_token, value in with_token(row or {}, token, logprob).items()}
        for token, logprob, row in zip(answer.prompt, answer.prompt_logprobs, rows, strict=True)
    ]


def _rows(top: Sequence[TopRow] | None, tokens: Sequence[int]) -> Sequence[TopRow]:
    return [None] * len(tokens) if top is None else top
