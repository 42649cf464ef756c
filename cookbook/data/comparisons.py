"""Comparisons: two answers to one conversation as a question, whose answer is the letter of the better one.

A preference model is trained on these texts (``data.format=comparisons``), and the reward ``compare`` asks the same question.
"""

from __future__ import annotations

from collections.abc import Sequence

from cookbook.types import JsonObject

# The answer that is better: the first, or the second.
LETTERS = ("A", "B")
QUESTION = """\
Which of two answers to this conversation is better?

{conversation}

[answer A]
{first}

[answer B]
{second}

Reply with A or B."""
# Plain text has no turns, so that its last line asks for the letter.
TEXT_ENDS_WITH = "\n\nThe better answer is"


def question(conversation: Sequence[JsonObject], first: str, second: str) -> str:
    """Return the question which of two answers is better. ``conversation``: messages with ``role`` and ``content``."""
    return QUESTION.format(conversation=transcript(conversation), first=first, second=second)


def transcript(messages: Sequence[JsonObject]) -> str:
    """Return messages as text, each below its role in brackets."""
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def answer_text(messages: Sequence[JsonObject]) -> str:
    """Return an answer as text: one message as its content, several with their roles."""
    return str(messages[0]["content"]) if len(messages) == 1 else transcript(messages)
