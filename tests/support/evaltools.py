"""lm-eval in tests. It needs some seventy packages, so that it lies in an environment of its own: ``make test-lm-eval``."""

import os
import sys
from pathlib import Path

import pytest


def need_lm_eval():
    """Return the package, or skip the test. ``COOKBOOK_LM_EVAL`` names the folder it is installed in."""
    place = os.environ.get("COOKBOOK_LM_EVAL")
    if place:
        # A test may change the current folder; a relative path would then name no package and skip the test.
        assert Path(place).is_absolute() and Path(place, "lm_eval").is_dir(), f"COOKBOOK_LM_EVAL={place} holds no lm_eval"
        # At the end: the packages of this environment come first.
        if place not in sys.path:
            sys.path.append(place)
    return pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-lm-eval")
