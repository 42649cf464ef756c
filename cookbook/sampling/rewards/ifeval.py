"""Instructions that a program can check, as in IFEval (Zhou et al. 2023, arXiv:2311.07911), checked by lm-eval's code."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cookbook.errors import ConfigError, DataError
from cookbook.sampling.rewards.builtin import Limits, cell
from cookbook.types import JsonObject
from cookbook.utils import packages


@dataclass(frozen=True)
class IFEval(Limits):
    """1 if the completion follows every instruction of its row; with ``fraction``, the share of them that it follows.

    A row has ``instruction_id_list``, ``kwargs`` (one mapping per instruction) and ``prompt``, as in the dataset google/IFEval.
    With ``loose``, a completion also counts without its first or last line and without asterisks (the paper's loose accuracy).
    """

    loose: bool = False
    fraction: bool = False

    def preflight(self, *_: object) -> None:
        """Raise ConfigError: the package lm-eval, or its part for IFEval, is not installed."""
        for module in ("lm_eval", "langdetect", "immutabledict", "nltk"):
            packages.need("reward=ifeval", module, "lm-eval")

    def __call__(self, completion: str, row: JsonObject) -> float:
        known, utils = _checkers()
        names, options = cell(row, "instruction_id_list"), cell(row, "kwargs")
        if not isinstance(names, Sequence) or not isinstance(options, Sequence) or len(names) != len(options):
            raise DataError(f'"instruction_id_list" and "kwargs" must be lists of one length, got {names!r} and {options!r}')
        for name, option in zip(names, options, strict=True):
            if name not in known or not isinstance(option, Mapping):
                raise DataError(f"unknown instruction {name!r} with {option!r}; lm-eval knows {', '.join(sorted(known))}")
        example = utils.InputExample(0, list(names), str(row.get("prompt", "")), [dict(option) for option in options])
        check = utils.test_instruction_following_loose if self.loose else utils.test_instruction_following_strict
        try:
            followed = check(example, completion).follow_instruction_list
        except LookupError as error:
            # NLTK raises the base class itself.
            if isinstance(error, KeyError | IndexError):
                raise
            raise ConfigError(
                "reward=ifeval: NLTK's data to count sentences are missing; run: python -m nltk.downloader punkt_tab"
            ) from error
        return sum(followed) / len(followed) if self.fraction else float(all(followed))


@functools.cache
def _checkers() -> tuple[dict[str, Any], Any]:
    """Return lm-eval's table of instructions and the module that checks them."""
    # The import downloads data of NLTK, and prints how that went.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from lm_eval.tasks.ifeval import instructions, instructions_registry, utils

    # Without a seed the same text may be of another language in the next call.
    instructions.langdetect.DetectorFactory.seed = 0
    return instructions_registry.INSTRUCTION_DICT, utils
