"""A long run needs no more memory than at its start. The full form: ``python benchmarks/long_run.py``."""

import json
import subprocess
import sys

import pytest
from runtools import ROOT

# In a process of its own: what other tests have left running comes and goes.
WATCHED = """
import dataclasses, json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
import long_run
seen = long_run.watched(Path.cwd(), steps=80, every=40)
print(json.dumps([dataclasses.asdict(size) for _, _, size in seen]))
"""


@pytest.mark.nightly
def test_nothing_grows_with_the_steps(tmp_path):
    """Between steps 40 and 80: an evaluation every 10, a checkpoint every 20, one sync and one sampler a step."""
    command = [sys.executable, "-c", WATCHED, str(ROOT / "benchmarks")]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    early, late = json.loads(done.stdout.splitlines()[-1])
    for name in ("threads", "files", "tensors"):
        assert early[name] == late[name]
    assert late["objects"] - early["objects"] < 20  # anything kept per step would be 40 objects at least
