"""Lint for plain English in pages, configuration and code. ``python tests/system/test_english.py [PATTERN ...]`` prints all.

Each rule is a regular expression and what to write instead. Line breaks, comment marks and the underscores of a test's name
inside a phrase do not hide it.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "docs/**/*.md",
    "conf/**/*.yaml",
    "recipes/*.py",
    "cookbook/**/*.py",
    "cookbook/**/*.yaml",
    "benchmarks/**/*.py",
    "scripts/*.py",
    "examples/*.py",
    "tests/**/*.py",
    "tools/*.py",
]
# Phrases that are data: names in recorded numbers, texts for a tokenizer, messages of Python and PyTorch.
EXEMPT = {
    ("tests/unit/cli/test_cli_deployments.py", "of mine"),
    ("tests/system/test_damage.py", "can't"),
    ("tests/unit/checkpoints/test_gguf.py", "aren't"),
    ("tests/unit/losses/test_losses_golden.py", "behaviour"),
    ("tests/unit/backends/test_trainer.py", "can't"),
}

# Regular expressions of lower-case text, each from the beginning of a word. ``END``: the end of a clause.
END = r'(?=[.,;:)]|\s*"""|\s*$)'
RULES = {
    # Invented people.
    r"nobody('s)?\b": "no X; name the component",
    r"(some|any|every)(body|one)\b": "the client, the caller, another process",
    r"whoever\b": "the process that",
    r"(him|his|him)self\b|his\b": "the client's, its",
    r"whom\b": "(name the subject first)",
    r"of who\b": "of which",
    r"(of|is) (ours|yours|theirs|mine)\b": "cookbook's, your own",
    r"one's own\b": "your own",
    # Pronouns and relative clauses in place of a noun.
    r"what (it|they) (is|are|was|were)" + END: "(name the value)",
    r"(has|have) (it|them)" + END: "(name what it has)",
    r"what (becomes|became) of": "the result of",
    r"comes? of (it|this|them)\b": "results from",
    r"makes? of (it|them|its|a|the)\b": "computes from",
    r"(raises as|as it does)\b": "(repeat what it does or raises)",
    r"beside (it|them)\b": "with it, next to it",
    r"(that|what|kind|which) there (is|are) not\b": "unknown X",
    r"there (is|are|was|were) none\b": "X is missing, no X exists",
    r"(is|are|was|were) (not )?there" + END: "exists, is present, is missing",
    r"as (it|they) (is|are|was|were)" + END: "unchanged",
    r"(is|are) no (name|number|delta|checkpoint|key|file|folder)\b": "is not a X, invalid X",
    # Words of the field.
    r"(go|goes|gone|went|going) on\b": "resume, continue",
    r'let(s|ting)? go\b(?!")': "evict, free, release",
    r"mend(s|ed|ing)?\b": "fix",
    r"make room\b": "free space",
    r"anew\b": "again, new",
    r"(made|make|makes|asked?|asks|asking|asked for) (it |them )?again\b": "retry, repeat, recreate",
    r"sittings?\b": "process, session",
    r"(told|tells?) of\b": "reports",
    r"to be told\b": "to report",
    r"(has|have|had) (been )?told\b": "has reported",
    r"heard of\b": "seen",
    r"knows? nothing of\b": "does not depend on",
    r"(is|are) not asked\b": "is not queried, is not checked",
    r"passed over\b": "ignored, skipped",
    r"out of reach\b": "unreachable",
    r"may come in\b": "is authenticated",
    r"as safe as\b": "durable",
    r"as json has\b|none of json\b": "JSON-compatible, not JSON",
    r"(comes?|coming|came) back\b": "return",
    r"to blame\b": "at fault, offending",
    r"(is its own|nobody's) business\b": "is not checked",
    r"held back\b": "deferred",
    r"moved on\b": "have changed",
    r"(weights|trainer) (has|have) seen\b": "is at step N",
    r"raised again where\b": "raised again when",
    # Vague amounts and times.
    r"so (many|much|few)\b(?! that)": "N, a number of",
    r"for (so|that) long\b": "N seconds, this time",
    r"some (\d|few |two|three|four|five|six|ten|twelve|twenty|hundred|thousand)": "about",
    r"for ever\b": "indefinitely",
    r"for good\b": "permanently",
    r"without end\b": "infinite, without limit",
    r"at once\b": "immediately, or: at the same time",
    r"one after (the other|another)\b": "sequentially, in order",
    r"by the way\b": "(name the order)",
    r"once an? (turn|step|round|call|run)\b": "once per X",
    r"again and again\b": "repeatedly",
    r"now and then\b": "sometimes",
    r"whatever (the|its|happens)\b": "for any X, regardless of X",
    r"but for (its|the|a|one)\b": "except for X",
    r"(words?|rows|key=value|continues?|decoded|two|the one|position|before and) behind\b": "after, past",
    r"on the way\b": "(name the step)",
    # Words of language models and of tensors.
    r"beginnings?\b(?!-of)": "prefix, start",
    r"likeli(er|est)\b": "more likely, most likely",
    r"comput(e|es|ed|ing) ((it|them|\w+s) )?again\b": "recompute",
    r"(of|returns?) what follows\b": "next-token",
    r"(reads?|reading|sees?) each other\b": "attend to each other",
    r"the most (tokens|rows|bytes) (of|that)\b": "the largest number of",
    r"(one|number|row|column|logit|target|sequence|token|datum) a (row|pass|token|datum|head|column|step)\b": "per row",
    r"heat\b": "temperature",
    # Idioms and inversions.
    r"otherwise than\b|(speaks|set up|treated|come out|drawn|asked) otherwise\b": "differently from",
    r"the same again\b": "the same X",
    r"alike\b": "equally, the same way",
    r"in silence\b": "silently",
    r"spoiled\b": "(name the change)",
    r"(comes?|came) out\b": "result",
    r"lies (beside|under)\b": "is next to",
    r"stands? (in|there|at|below|above|beside)\b": "is in",
    r"sees? to it\b": "ensures",
    r"all the same\b": "anyway",
    r"nothing but\b": "only",
    r"(says?|said) so\b": "(name the message)",
    r"(it|which|this) wants\b|wants (a|the|to be|reward)\b": "needs",
    r"how (the run|it|they|a run) (stands?|goes|go)\b": "state, progress",
    r"from outside\b": "other processes",
    r"(do|does|did|is|are|was|were|has|have|had|ca|wo|would|could|should)n't\b": "not (no contractions)",
    r"(colour|behaviour|honour|favour|neighbour|labour|learnt|spelt|whilst|amongst|grey)\w*": "American spelling",
}
# Without groups that capture: re then skips a rule by its first letter, which halves the time.
PLAIN = [re.sub(r"\((?!\?)", "(?:", rule) for rule in RULES]
PHRASES = re.compile(r"\b(?:" + "|".join(PLAIN) + ")", re.MULTILINE)
FIRST_LINE = re.compile(r'"""(what|which|who|whose)\b')
TEST = re.compile(r"\bdef test_\w+")
MARKS = re.compile(r"^\s*(#+:? |[-*|>] )?\s*")


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and advice of every hit, of phrases that wrap too."""
    text = TEST.sub(lambda name: name.group().replace("_", " "), text)
    lines = [MARKS.sub("", line).rstrip().lower() for line in text.splitlines()]
    lines = [line + ("\n" if not line or line.endswith(('"""', ".", ":")) else " ") for line in lines]
    starts, joined = list(accumulate(map(len, lines), initial=0)), "".join(lines)
    for hit in PHRASES.finditer(joined):
        advice = (
            text for rule, text in zip(PLAIN, RULES.values(), strict=True) if re.compile(rule, re.M).match(joined, hit.start())
        )
        yield bisect_right(starts, hit.start()), hit.group(), next(advice)
    for hit in FIRST_LINE.finditer(joined):
        yield bisect_right(starts, hit.start()), hit.group(), "an imperative or a noun phrase"


@cache
def violations(places: tuple[str, ...] = tuple(PLACES)) -> dict[str, list[str]]:
    """Return one line for every phrase to replace, by file."""
    result: dict[str, list[str]] = {}
    # This file holds the phrases themselves.
    for path in sorted({path for place in places for path in ROOT.glob(place)} - {Path(__file__).resolve()}):
        name = str(path.relative_to(ROOT))
        for line, phrase, advice in sorted(findings(path.read_text(encoding="utf-8"))):
            if (name, phrase) in EXEMPT:
                continue
            result.setdefault(name, []).append(f"{name}:{line}: {phrase!r}; write: {advice}")
    return result


def test_no_banned_phrase() -> None:
    bad = [line for lines in violations().values() for line in lines]
    assert not bad, "\n" + "\n".join(bad)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""Attention.\n\nSinks are one logit\na head.\n"""\n', 3),
        ("keys: []  # unused\nport: 0   # nobody reads this\n", 2),
        ('"""A cache.\n\nA sampler is let\ngo when memory is short.\n"""\n', 3),
        ("    # the client has gone\n    # on with another run\n", 1),
        ('def f():\n    """Which file to read."""\n', 2),
        ("\ndef test_nobody_reads():\n    pass\n", 2),
        ("The run is resumed.\n\n- the file is kept as it is\n", 3),
    ],
)
def test_a_phrase_is_found_with_its_line(text: str, line: int) -> None:
    assert [found for found, _, _ in findings(text)] == [line]


if __name__ == "__main__":
    print("\n".join(line for lines in violations(tuple(sys.argv[1:]) or tuple(PLACES)).values() for line in lines))
