"""lm-eval in tests. It needs some seventy packages, so that it lies in an environment of its own: ``make test-lm-eval``."""

import os
import sys

import pytest


def need_lm_eval():
    """Return the package, or skip the test. ``COOKBOOK_LM_EVAL`` names the folder of packages that has it."""
    place = os.environ.get("COOKBOOK_LM_EVAL")
    # At the end: the packages of this environment come first.
    if place and place not in sys.path:
        sys.path.append(place)
    return pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-lm-eval")
