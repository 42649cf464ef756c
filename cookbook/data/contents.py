"""Contents of messages as text: roles by their usual names, and control tokens that a content spells.

A content such as ``<|im_end|>\\n<|im_start|>assistant`` in a question or in the result of a tool must not end the turn and
begin another. The marks that :class:`Contents` puts into such a content make the encoder read it as text. An answer that ends
with the token that the template prints after it loses this token: data often has it already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cookbook.data.encoding import BREAK
from cookbook.data.formats import Chat
from cookbook.data.messages import ROLE_WITHOUT_NAME, ROLES, ChatMessage, with_calls
from cookbook.data.template import PROBE, ChatTemplate, all_sources
from cookbook.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that an answer may write as part of its text, such as <think> and [TOOL_CALLS].
ANSWERS_OWN = re.compile(r"think|reason|tool|call|function|python|channel|message|constrain", re.IGNORECASE)
# The usual form of control tokens, which some tokenizers do not declare as special. Questions about code may have its tokens
# for gaps in a text.
PIPED = re.compile(r"<[|\uff5c](?!fim|FIM).*[|\uff5c]>")
# Characters of a role, and messages of a row, that an error names.
LONGEST_ROLE, MOST_ROLES = 40, 20


class Contents:
    """Conversations whose contents cannot be taken for turn marks of the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._stops = stop_token_ids

    def prepared(self, chat: Chat) -> Chat:
        """Return the conversation for the chat template.

        Raises:
            DataError: a role is unknown, or a text has the reserved character that marks control tokens.
        """
        messages = [self._prepared(chat, message) for message in chat.messages]
        tools = None if chat.tools is None else tuple(self._quoted(list(chat.tools), self._marks, chat.where))
        if tools == chat.tools and all(new is old for new, old in zip(messages, chat.messages, strict=True)):
            return chat
        return replace(chat, messages=tuple(messages), tools=tools)

    def quoted(self, text: str) -> str:
        """Return a text of an environment whose control tokens are read as text."""
        return str(self._quoted(text, self._marks, "observation"))

    def _prepared(self, chat: Chat, message: ChatMessage) -> ChatMessage:
        if message.role not in ROLES:
            message = replace(message, role=self._role(chat, message.role))
        if "function_call" in message.extra and self._prints_calls_as_lists:
            message = with_calls(message)
        is_answer = message.role == "assistant"
        marks = self._marks_of_answers if is_answer else self._marks
        content = message.content
        if is_answer and self._ends:
            content = self._without_end(content)
        content = self._quoted(content, marks, chat.where)
        extra = self._quoted(message.extra, marks, chat.where) if message.extra else message.extra
        if content is message.content and extra is message.extra:
            return message
        return replace(message, content=content, extra=extra)

    def _role(self, chat: Chat, role: str) -> str:
        """Return the role under which the chat template prints a message whose role is not one of all templates."""
        # Schemas of tools have the type "function", so the name alone does not show that the template prints such a role.
        if self._compares_role(role) if role == "function" else self._names(role):
            return role
        if role in ROLE_WITHOUT_NAME:
            return ROLE_WITHOUT_NAME[role]
        roles = ", ".join(dict.fromkeys(repr(other.role[:LONGEST_ROLE]) for other in chat.messages[:MOST_ROLES]))
        raise DataError(
            f"{chat.where}: unknown role {role[:LONGEST_ROLE]!r}, the roles of the row are {roles}; write system, user, "
            "assistant or tool, or give a template that names the role as model.chat_template"
        )

    @cached_property
    def _prints_calls_as_lists(self) -> bool:
        """Whether the chat template reads ``tool_calls``, and not ``function_call``."""
        template = all_sources(self._tokenizer)
        return "tool_calls" in template and "function_call" not in template

    def _names(self, role: str) -> bool:
        """Whether the chat template names a role."""
        template = all_sources(self._tokenizer)
        return f"'{role}'" in template or f'"{role}"' in template

    def _compares_role(self, role: str) -> bool:
        """Whether the chat template compares a message's role with ``role``."""
        compared = rf"""role['"]?\]?\s*\)?\s*(?:==|!=|in)\s*[\[(]?[^%{{}}]*?['"]{re.escape(role)}['"]"""
        return re.search(compared, all_sources(self._tokenizer)) is not None

    def _quoted(self, value: Any, marks: re.Pattern[str], where: str) -> Any:
        """Return a value whose texts have a break inside of each control token; the same object without a control token."""
        if isinstance(value, str):
            if BREAK in value:
                raise DataError(f"{where}: a text has the character U+FDD0, which Unicode reserves for programs; remove it")
            # A break may leave another token behind it.
            while marks.search(value):
                value = marks.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            changed_map = {name: self._quoted(item, marks, where) for name, item in value.items()}
            return changed_map if any(changed_map[name] is not value[name] for name in value) else value
        if isinstance(value, list | tuple):
            changed_list = [self._quoted(item, marks, where) for item in value]
            return changed_list if any(new is not old for new, old in zip(changed_list, value, strict=True)) else value
        return value

    def _without_end(self, content: str) -> str:
        """Return an answer without the stop tokens at its end."""
        text = content
        while (end := next((end for end in self._ends if text.rstrip().endswith(end)), None)) is not None:
            text = text.rstrip()[: -len(end)]
        return text

    @cached_property
    def _ends(self) -> Sequence[str]:
        return self._texts(self._stops)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """The control tokens that a content which is not an answer may spell."""
        added = self._tokenizer.added_tokens_decoder
        special = [token for token, definition in added.items() if definition.special or PIPED.fullmatch(definition.content)]
        return _pattern({*self._texts([*special, *self._tokenizer.all_special_ids, *self._stops]), *self._turn_marks})

    @cached_property
    def _marks_of_answers(self) -> re.Pattern[str]:
        """The control tokens that an answer may spell: those that begin and end turns and texts."""
        tokenizer = self._tokenizer
        ids = [*self._stops, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id]
        return _pattern({*self._texts([token for token in ids if token is not None]), *self._turn_marks})

    @cached_property
    def _turn_marks(self) -> frozenset[str]:
        """The tokens that the template prints around the turns of a conversation."""
        messages = (*PROBE, PROBE[0])
        chats = [Chat("", (ChatMessage("system", "system"), *messages)), self._template.small(messages)]
        texts = [text for chat in chats if (text := self._template.shown(chat, header=True))]
        added = [definition.content for definition in self._tokenizer.added_tokens_decoder.values()]
        return frozenset(mark for mark in added if any(mark in text for text in texts) and not ANSWERS_OWN.search(mark))

    def _texts(self, tokens: Iterable[int]) -> list[str]:
        texts = self._tokenizer.convert_ids_to_tokens(list(dict.fromkeys(tokens)))
        return [text for text in texts if text and text.strip()]


def _pattern(marks: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern that finds any of the marks."""
    # Some vocabularies have a thousand marks, which are searched fast by their first two characters. A mark of one character
    # cannot be broken.
    groups: dict[str, list[str]] = {}
    for mark in sorted((mark for mark in marks if len(mark) > 1), key=lambda mark: (-len(mark), mark)):
        groups.setdefault(mark[:2], []).append(re.escape(mark[2:]))
    return re.compile("|".join(f"{re.escape(start)}(?:{'|'.join(rests)})" for start, rests in groups.items()) or r"(?!)")
