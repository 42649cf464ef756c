"""The model that ships is the one that ``make tiny-model`` makes."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from runtools import ROOT, here, rows, train  # noqa: F401 - here is a fixture

from cookbook.utils.paths import packaged

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("here")]
SAME_ACCURACY = 0.1  # between platforms: rounding differs, and 900 steps carry it on


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def accuracy(model: Path, out: str) -> float:
    """Of greedy answers to the held-out prompts."""
    assert (
        train(
            "recipe=grpo", "model=tiny", "demo=grpo", f"model.name={model}", "recipe.steps=1", "eval.limit=null", f"out={out}"
        )
        == 0
    )
    return rows(out)[0]["eval/accuracy"]


def test_the_shipped_model_can_be_rebuilt():
    shipped, made = packaged("data") / "tiny", Path("made").resolve()
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tiny_model.py", made], check=True, cwd=ROOT)
    assert {path.name for path in made.iterdir()} == {path.name for path in shipped.iterdir()}
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        assert (made / name).read_bytes() == (shipped / name).read_bytes()
    if digest(made / "model.safetensors") != digest(shipped / "model.safetensors"):
        assert accuracy(made, "of_made") == pytest.approx(accuracy(shipped, "of_shipped"), abs=SAME_ACCURACY)
