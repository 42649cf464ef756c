"""The environment of vLLM."""

from __future__ import annotations

import os

import pytest
from places import ROOT

from cookbook.deployments.vllm import process
from cookbook.errors import ConfigError

PYTHON = os.environ.get("COOKBOOK_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))


def has_vllm() -> bool:
    try:
        process.check_python(PYTHON)
    except ConfigError:
        return False
    return True


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif("not has_vllm()", reason=f"{PYTHON} has no vLLM; run `make test-vllm`"),
]
