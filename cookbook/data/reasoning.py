"""Reasoning in the texts of models: where it ends, and the answer begins."""

from __future__ import annotations

import re

# Tags around reasoning, by family: Qwen, DeepSeek and most others; Magistral; Kimi; Seed-OSS.
_NAMES = r"think|thinking|thought|reasoning|seed:think"
_OPENING = rf"(?:<(?:{_NAMES})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>)"
# A model opens its reasoning at the start of a line, or its text is cut off behind the tag. Any other tag inside of a line is a
# word of the answer, such as in "the tag <think>".
OPENS = re.compile(rf"^[ \t]*{_OPENING}|{_OPENING}\s*\Z", re.IGNORECASE | re.MULTILINE)
# The tag at any place.
OPENING = re.compile(_OPENING, re.IGNORECASE)
CLOSES = re.compile(rf"</(?:{_NAMES})>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>", re.IGNORECASE)
# The channels of gpt-oss; and their marks without the special tokens around them.
FINAL_CHANNEL = re.compile(r"<\|channel\|>final[^<]*<\|message\|>|(?<=[\s.!?)}])assistantfinal(?=\s*\S)|<\|channel\|>final$")
ANALYSIS_CHANNEL = re.compile(r"<\|channel\|>(?:analysis|commentary)")
END_OF_CHANNEL = re.compile(r"<\|(?:return|end)\|>")


def without_reasoning(text: str) -> str | None:
    """Return the text after the reasoning; None if the reasoning is unfinished, so that there is no answer.

    Reasoning is the text inside of ``<think>``, or of the tags of another family. A text that only closes it, because the
    prompt has opened it, is reasoning up to there. A tag inside of a line does not open reasoning.
    """
    if finals := [*FINAL_CHANNEL.finditer(text)]:
        return END_OF_CHANNEL.sub("", text[finals[-1].end() :])
    if ANALYSIS_CHANNEL.search(text):
        return None
    closings = [*CLOSES.finditer(text)]
    answer = text[closings[-1].end() :] if closings else text
    return None if OPENS.search(answer) else answer
