r"""Answers in texts: the last box, and numbers as people and models write them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from cookbook.data.reasoning import without_reasoning

__all__ = [
    "BOX",
    "Box",
    "FoundNumber",
    "Value",
    "first_number",
    "last_box",
    "last_number",
    "numbers",
    "plain",
    "without_reasoning",
]

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?P<bare>[^\s{$\\]+))")


@dataclass(frozen=True)
class Box:
    """Content of the last box of a text; None if the box is not closed."""

    content: str | None


def last_box(text: str) -> Box | None:
    r"""Return the last ``\boxed{...}`` of a text, with its braces counted; None without a box."""
    boxes = [*BOX.finditer(text)]
    if not boxes:
        return None
    if boxes[-1]["bare"] is not None:
        return Box(boxes[-1]["bare"].rstrip(".,;"))
    depth, start = 1, boxes[-1].end()
    escaped = False
    for place in range(start, len(text)):
        mark = text[place]
        if escaped:
            escaped = False
        elif mark == "\\":
            escaped = True
        else:
            depth += (mark == "{") - (mark == "}")
            if depth == 0:
                return Box(text[start:place])
    return Box(None)


# ---- numbers -------------------------------------------------------------------------------------------------------------

Value = Fraction | tuple[Fraction, ...]
"""A number; or the parts of a time or a ratio such as 4:30, which are equal only together."""

# Between groups of three digits: a comma, also in the forms of LaTeX; spaces, also those of LaTeX and narrow ones; apostrophes.
_THOUSANDS = r"(?:\{,\}|\\!,\\!|,\\!|\\[,;:! ]|~|[ \u00a0\u2007\u2009\u202f]|['\u2019_]|,)"
DECIMAL = re.compile(
    # An exponent or an index belongs to a unit or a term: cm^2, x_1. A digit after a digit and a point continues a version.
    r"(?<![\d^_])(?<!\d\.)(?<!\^-)(?<![\^_]\{)(?<!\^\{-)"
    rf"(?P<digits>\d{{1,3}}(?P<separator>{_THOUSANDS})\d{{3}}(?:(?P=separator)\d{{3}})*(?!\d)(?:\.\d+)?"
    # Groups of two and three, as in India: 1,00,000.
    r"|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)(?:\.\d+)?"
    r"|\d+(?:\.\d+)?|(?<!\w)\.\d+)"
    r"(?:[eE](?P<exponent>[+-]?\d{1,3})(?![\w.])|\s?(?:\\times|\\cdot|[\u00d7x*\u00b7])\s?10\s?\^\s?\{?(?P<power>-?\d{1,3})\}?)?"
)
# Characters of a text that are read first.
TAIL = 1000
_MINUS = r"[-\u2212\u2013\u2011]"
_CURRENCY = r"\\?[$€£¥₹]"
# The sign of the number that follows the text, possibly with a currency between.
SIGN = re.compile(rf"{_MINUS}(?P<space>\s?)(?:{_CURRENCY}\s?)?$")
# Before a minus: the end of a word, a number or a bracket. The minus is then a hyphen, a dash or a subtraction.
BINARY = re.compile(r"(?:[\w.)\]}%°\u2212\u2013\u2011-]|[\d)\]}%]\s)$")
# Before a minus that is followed by a space: only here is the minus a sign, as in "x = - 3".
OPENED = re.compile(r"[={($]\s?$")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")


@dataclass(frozen=True)
class FoundNumber:
    """A number in a text, and its place."""

    value: Value
    start: int
    end: int


def numbers(text: str) -> list[FoundNumber]:
    """Return the numbers of a text that :func:`plain` has rewritten, in order.

    A sign counts only if no word or number ends before it: "10-3" is 10 and 3. Thousands come in groups of three: "1,2,3" is
    three numbers and "1,234" one. "1/2", "1 1/2" and "4:30" are one value each. Currency and percent signs are ignored.
    """
    result = list[FoundNumber]()
    tokens = [*DECIMAL.finditer(text)]
    place = 0
    while place < len(tokens):
        run = [tokens[place]]
        joints = list[str]()
        while place + len(run) < len(tokens):
            between = text[run[-1].end() : tokens[place + len(run)].start()]
            if between.strip(" ") not in ("/", ":") or (between != ":" and ":" in between) or len(between) > 3:
                break
            joints.append(between.strip(" "))
            run.append(tokens[place + len(run)])
        place += len(run)
        result += _values(text, run, joints, result)
    return result


def _values(text: str, run: list[re.Match[str]], joints: list[str], earlier: list[FoundNumber]) -> list[FoundNumber]:
    """Return the values of numbers that are joined by slashes or colons: one value, or, as in a date, one of each."""
    start, end = run[0].start(), run[-1].end()
    sign = -1 if _is_negative(text[max(0, start - 8) : start]) else 1
    parts = [_decimal(token) for token in run]
    if joints == ["/"] and parts[1] != 0:
        value = parts[0] / parts[1]
        before = earlier[-1] if earlier else None
        # 1 1/2
        if before is not None and text[before.end : start] == " " and _is_whole(before.value) and value < 1:
            assert isinstance(before.value, Fraction)
            earlier.pop()
            is_minus = before.value < 0 or _is_negative(text[max(0, before.start - 8) : before.start])
            return [FoundNumber(before.value - value if is_minus else before.value + value, before.start, end)]
        return [FoundNumber(sign * value, start, end)]
    if joints and set(joints) == {":"}:
        return [FoundNumber((sign * parts[0], *parts[1:]), start, end)]
    values = [sign * parts[0], *parts[1:]]
    return [FoundNumber(value, token.start(), token.end()) for value, token in zip(values, run, strict=True)]


def _is_whole(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _is_negative(before: str) -> bool:
    """Whether the number after a text has a minus sign."""
    match = SIGN.search(before)
    if match is None:
        return False
    prefix = before[: match.start()]
    return bool(OPENED.search(prefix)) if match["space"] else not BINARY.search(prefix)


def _decimal(token: re.Match[str]) -> Fraction:
    digits = token["digits"]
    if token["separator"] is not None:
        digits = digits.replace(token["separator"], "")
    exponent = int(token["exponent"] or token["power"] or 0)
    return Fraction(Decimal(digits.replace(",", ""))) * Fraction(10) ** exponent


def last_number(text: str) -> Value | None:
    """Return the value of the last number of a text; None without a number."""
    # The end of a long text is enough, unless a number begins before it.
    values = numbers(plain(text[-TAIL:]))
    if len(text) > TAIL and (not values or values[-1].start == 0):
        values = numbers(plain(text))
    return values[-1].value if values else None


def first_number(text: str) -> Value | None:
    """Return the value of the first number of a text; None without a number."""
    values = numbers(plain(text))
    return values[0].value if values else None


def plain(text: str) -> str:
    r"""Return the text with fractions as ``1/2``: those of LaTeX, and signs such as ½."""
    text = FRACTION.sub(_slashed, text) if "frac" in text else text
    if text.isascii():
        return text
    return "".join(_spelled(text, place, mark) for place, mark in enumerate(text))


def _slashed(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2], match[3] or match[4]
    follows_digit = match.string[: match.start()].rstrip()[-1:].isdigit()
    return f"{' ' if follows_digit and not match.string[match.start() - 1].isspace() else ''}{top}/{bottom}"


def _spelled(text: str, place: int, mark: str) -> str:
    """Return a sign such as ½ as 1/2, after a space if it follows a digit; other characters unchanged."""
    if not unicodedata.decomposition(mark).startswith("<fraction>"):
        # The slash of fractions.
        return "/" if mark == "\u2044" else mark
    top, _, bottom = unicodedata.normalize("NFKC", mark).partition("\u2044")
    if not bottom:
        return mark
    return f"{' ' if place and text[place - 1].isdigit() else ''}{top}/{bottom}"
