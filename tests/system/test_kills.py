"""Runs that are killed at random moments end with the results of an undisturbed run. The full form: ``make kills``."""

from pathlib import Path

import kills
import pytest


@pytest.mark.nightly
def test_killed_runs_of_every_recipe_end_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = kills.campaign(tmp_path, kills=5, seed=15)
    assert counts.kills >= 5 and counts.trials >= 4
