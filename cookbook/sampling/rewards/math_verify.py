r"""Mathematical answers, compared by the package math-verify.

The package compares expressions well, and reads answers of people badly: ``18 dollars`` becomes a product of 18 and letters.
So this module first reads both answers: it removes delimiters and units, and compares numbers as numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from cookbook.errors import DataError
from cookbook.sampling.rewards import answers
from cookbook.sampling.rewards.builtin import GOLD_MARK, Limits, cell, gold_text
from cookbook.types import JsonObject
from cookbook.utils import packages

# Seconds that math-verify gives one expression. Its alarm needs the main thread of a process.
ALARM_S = 5

DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)"), ("**", "**"), ("__", "__"), ("`", "`"))
# A text inside of a formula, with its command.
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}")
SPACES = re.compile(r"\\[,;:!> ]|\\q?quad(?![a-z])|~|\\(?:left|right)(?![a-z])|\s+")
# The end of an answer that is a number with a unit: words, and powers and quotients of units.
UNIT = re.compile(
    r"(?:[^\W\d_]+\.?(?:\s*\^\s*\{?-?[123]\}?)?|[°µΩ%'\"²³/(),.;·\s-]|\^?\s*\{?\\circ\}?|\\degree|\\%|\\cdot|\\times)*"
)
WORD = re.compile(r"[^\W\d_]+")
# Words that are part of an expression or join two answers.
_MATHEMATICS = (
    "pi sqrt sin cos tan cot sec csc log ln exp theta phi alpha beta inf infinity e i mod and or to x y z n k a b c dozen"
)
MATHEMATICS = frozenset(_MATHEMATICS.split())
MULTIPLES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Units of one letter, and those that are written without a space after the number.
LETTERS = frozenset("mghslLWVJNKCFAd")
_JOINED = (
    "km cm mm nm kg mg ml mL cl ft in hr hrs min sec mins secs mph kph lb lbs oz yd mi kW kWh MW Hz kHz MHz GHz GB MB KB TB "
    "am pm AM PM th st nd rd m g s h L USD EUR"
)
JOINED = frozenset(_JOINED.split())
# The number, as people write it, and its command in LaTeX.
PI_COMMAND = r"\pi"
PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
CURRENCY = re.compile(r"^(?:\\?[$€£¥₹]|US\s?\\?\$|Rs\.?|USD|EUR)\s*(?=[-\d.])|(?<=^-)\\?[$€£¥₹]\s*(?=[\d.])")
# Letters that are printed upright, such as the e of exponentials.
UPRIGHT = re.compile(r"\\(?:mathrm|text|operatorname|rm)\s*\{\s*([a-zA-Z])\s*\}")
# A root with round brackets, which LaTeX does not read as one.
ROUND_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
DOTS = re.compile(r"\\[lcd]?dots[bcimo]?(?![a-z])|\.\.\.|\u2026")
# A number in another base: 1010_2.
BASED = re.compile(r"(?P<digits>[\dA-Fa-f]+)_\{?(?P<base>\d+)\}?")
# Largest difference of equal numbers, relative to the larger.
NEAR = 1e-5
CHOICE = re.compile(r"\(?([A-Ja-j])\)?(?:\s*[.:)]\s*\S.*)?")


@dataclass(frozen=True)
class Quantity:
    """A number with or without a unit. ``is_percent``: it is followed by a percent sign, so that 50% is 50 and 0.5."""

    value: answers.Value
    is_percent: bool = False

    def equals(self, other: Quantity) -> bool:
        """Whether both have the same number. A unit that only one of the two has makes no difference."""
        if self.value == other.value:
            return True
        mine, others = self._as_share(), other._as_share()
        return (mine is not None and mine == other.value) or (others is not None and others == self.value)

    def _as_share(self) -> Fraction | None:
        return self.value / 100 if self.is_percent and isinstance(self.value, Fraction) else None


def expression(text: str) -> str:
    r"""Return an answer without the delimiters around it, the commands of texts in it, and the full stop at its end."""
    text, before = text.strip(), ""
    while text != before:
        before = text
        text = text.strip().rstrip(".").strip()
        for opening, closing in DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inner
            ):
                text = inner.strip()
        if (box := answers.last_box(text)) is not None and box.content is not None and answers.BOX.match(text):
            text = box.content
    return text


def quantity(text: str) -> Quantity | None:
    """Return the number of an answer that is one number, possibly with a unit; None: it is something else."""
    words = SPACES.sub(lambda match: match[0] if match[0] in (r"\,", r"\;", r"\:", r"\!") else " ", text)
    words = CURRENCY.sub("", TEXT.sub(r" \1 ", words).strip())
    rewritten = answers.plain(words)
    found = answers.numbers(rewritten)
    if not found:
        return None
    first = found[0]
    before, after = rewritten[: first.start].strip(), rewritten[first.end :]
    value = first.value
    # A minus before a space is a sign here, as in LaTeX: nothing else precedes the number.
    if before in ("-", "\u2212") and isinstance(value, Fraction) and value > 0:
        value = -value
    if before not in ("", "-", "\u2212", "+") or not UNIT.fullmatch(after):
        return None
    is_joined = bool(after) and after[0].isalpha()
    units = WORD.findall(after)
    if is_joined and units[0] not in JOINED:
        return None
    if units and units[0].lower() in MULTIPLES and isinstance(value, Fraction):
        value *= MULTIPLES[units.pop(0).lower()]
    if any(one.lower() in MATHEMATICS and one not in LETTERS for one in units):
        return None
    if any(len(one) == 1 and one not in LETTERS for one in units):
        return None
    return Quantity(value, after.lstrip(" \\").startswith("%") or units[:1] == ["percent"])


def words_of(text: str) -> str | None:
    """Return an answer that is a word or several words, in lower case; None: it is something else. A letter is a choice."""
    bare = " ".join(TEXT.sub(r" \1 ", text).split()).strip(" .")
    if (choice := CHOICE.fullmatch(bare)) is not None:
        return choice[1].lower()
    bare = bare.strip("()")
    is_words = bool(re.fullmatch(r"[^\W\d_]{2,}(?:[ '\u2019-][^\W\d_]+)*", bare))
    return bare.casefold() if is_words and bare.lower() not in MATHEMATICS else None


@dataclass(frozen=True)
class MathVerify(Limits):
    r"""1 if the completion's answer equals the gold answer as mathematics: ``\boxed{\frac{1}{2}}`` is 0.5, ``x=3`` is 3.

    The gold answer is the column's text after ``####``, else its last box, else all of it; with a unit or without. The answer
    of a completion is its last box, else what math-verify finds in it. Finished reasoning is dropped, and unfinished reasoning
    has no answer. In a worker process an expression that takes more than ``ALARM_S`` seconds counts as wrong.
    """

    column: str = "answer"
    answer_only: bool = field(default=True, kw_only=True)
    workers: int = field(default=1, repr=False, kw_only=True)

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package math-verify is not installed."""
        packages.need("reward=math_verify", "math_verify", "math-verify")

    def __call__(self, completion: str, row: JsonObject) -> float:
        # It warns about every call without an alarm.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        gold = self._gold(cell(row, self.column))
        answer = answers.without_reasoning(completion) if self.answer_only else completion
        if answer is None:
            return 0.0
        box = answers.last_box(answer)
        if box is not None and (box.content is None or not box.content.strip()):
            return 0.0
        return float(self._equal(gold, answer if box is None else box.content or "", is_answer=box is not None))

    def _gold(self, value: object) -> str:
        text = gold_text(value)
        box = answers.last_box(text)
        text = expression(text if box is None or box.content is None else box.content)
        if quantity(text) is None and words_of(text) is None and not self._parsed(f"${text}$"):
            raise DataError(
                f'"{self.column}" holds no mathematical answer, got {value!r}; set reward.column to a column with answers'
            )
        return text

    def _equal(self, gold: str, found: str, *, is_answer: bool) -> bool:
        """Whether an answer is right. ``is_answer``: it is the content of a box, else a text that contains the answer."""
        from math_verify import verify

        if not is_answer and GOLD_MARK in found:
            # The form of GSM8K: the answer is on the line of the mark.
            marked = found.rpartition(GOLD_MARK)[2].strip().partition("\n")[0]
            found, is_answer = (marked, True) if marked else (found, False)
        answer = expression(found)
        of_gold, of_answer = quantity(gold), quantity(answer)
        if of_gold is not None and of_answer is not None and of_gold.equals(of_answer):
            return True
        if (word := words_of(gold)) is not None and of_gold is None:
            return words_of(answer if is_answer else answer.rpartition(" ")[2]) == word
        exact = _compared_as_text(gold, answer) if is_answer else None
        if exact is not None:
            return exact
        alarm = ALARM_S if self.workers else None
        if is_answer or of_answer is not None:
            candidates = [self._parsed(_wrapped(answer, of_answer))]
        else:
            # Emphasis would be read as part of the answer.
            candidates = [self._parsed(found.replace("**", "").replace("__", "")), self._parsed(_wrapped(answer, None))]
        if of_answer is not None and "." in answer:
            # A decimal may be a rounded fraction.
            candidates.append(self._parsed(_wrapped(answer, None)))
        right = self._parsed(_wrapped(gold, of_gold))
        return any(bool(verify(right, one, timeout_seconds=alarm)) and _are_near(right, one) for one in candidates if one)

    def _parsed(self, text: str) -> list[object]:
        from math_verify import parse

        return list(parse(text, parsing_timeout=ALARM_S if self.workers else None))


def _compared_as_text(gold: str, answer: str) -> bool | None:
    """Return whether the texts of two answers with dots, or in another base, are equal. None: they are other answers."""
    if DOTS.search(gold) or DOTS.search(answer):
        one, other = ("".join(DOTS.sub("...", SPACES.sub("", text)).split()) for text in (gold, answer))
        return one == other
    right = BASED.fullmatch(gold.replace(" ", ""))
    if right is None:
        return None
    found = BASED.fullmatch(answer.replace(" ", ""))
    if found is None:
        # The base may be left out.
        return answer.replace(" ", "") == right["digits"]
    return (found["digits"], found["base"]) == (right["digits"], right["base"])


def _are_near(gold: Sequence[object], answer: Sequence[object]) -> bool:
    """Whether a reading of the answer is near to one of the gold answer, relative to its size.

    math-verify compares a number of digits after the point, so that all tiny numbers are equal to it. True for other
    expressions than real numbers.
    """
    from sympy import Expr

    def sizes(readings: Sequence[object]) -> list[Any]:
        numbers = [one for one in readings if isinstance(one, Expr) and one.is_number]
        try:
            return [number for one in numbers if (number := one.evalf(15)).is_real]
        except (TypeError, ValueError, ArithmeticError, RecursionError):
            return []

    right, found = sizes(gold), sizes(answer)
    if not (right and found):
        return True
    # Zero has no size to compare with.
    return any(
        not one or not other or bool(abs(one - other) <= NEAR * max(abs(one), abs(other))) for one in right for other in found
    )


def _wrapped(text: str, number: Quantity | None) -> str:
    """Return an expression as math-verify reads it; a number without its unit."""
    if number is None:
        text = ROUND_ROOT.sub(r"\\sqrt{\1}", UPRIGHT.sub(r"\1", text))
        return f"${PI.sub(lambda _: PI_COMMAND, text)}$"
    if isinstance(number.value, tuple):
        return f"${':'.join(map(str, number.value))}$"
    top, bottom = number.value.numerator, number.value.denominator
    return f"${top}$" if bottom == 1 else rf"$\frac{{{top}}}{{{bottom}}}$"
