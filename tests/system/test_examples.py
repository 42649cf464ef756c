"""The examples run with fewer steps, with cookbook's types and, if the package `tinker` is installed, with its types."""

from __future__ import annotations

from pathlib import Path

import pytest
from exampletools import example, losses
from marks import rest_slow


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_slow(["sft_loop", "custom_loss"]))
def test_an_example_learns(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    module = example(name)
    monkeypatch.setattr(module, "STEPS", 12)
    module.main()
    found = losses(capsys.readouterr().out)
    assert len(found) >= 2 and found[-1] < 0.8 * found[0]


@pytest.mark.slow
def test_the_loop_takes_tinkers_own_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The same file with `types` from the tinker package: what a program written for Tinker hands over."""
    install = "pip install 'post-training-cookbook[tinker]'"
    tinker = pytest.importorskip("tinker", reason=f"the tinker package is not installed ({install})")
    monkeypatch.chdir(tmp_path)
    module = example("sft_loop")
    monkeypatch.setattr(module, "STEPS", 12)
    monkeypatch.setattr(module, "types", tinker.types)
    module.main()
    found = losses(capsys.readouterr().out)
    assert found[-1] < 0.8 * found[0]
