"""A run that goes on and on holds no more than at its beginning. The full form: ``python benchmarks/long_run.py``."""

import sys
from pathlib import Path

from runtools import ROOT, here  # noqa: F401 - here is a fixture

sys.path.append(str(ROOT / "benchmarks"))
import long_run


def test_nothing_grows_with_the_steps(here: Path) -> None:  # noqa: F811
    """Between steps 40 and 80: an evaluation every 10, a checkpoint every 20, one sync and one sampler a step."""
    seen = long_run.watched(here, steps=80, every=40)
    (_, _, early), (_, _, late) = seen
    assert (early.threads, early.files, early.tensors) == (late.threads, late.files, late.tensors)
    # Anything kept per step would be 40 objects at least; a few come and go with what other tests have left running.
    assert late.objects - early.objects < 20
