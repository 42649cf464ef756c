"""A server that is killed at random moments, and a client that notices nothing: :mod:`killing` at two lengths."""

from __future__ import annotations

import pytest
import servertools

killing = pytest.importorskip("killing", reason="needs the package tinker")


@pytest.fixture
def play(tiny_folder, tmp_path):
    """``play(kills, ranks, steps, apart_s)``: the differences from an undisturbed play, and how often it was killed."""
    server = servertools.Mortal()

    def both(kills, ranks, **options):
        calm, _ = killing.played(server, tiny_folder, tmp_path / "calm", ranks, kills=0, **options)
        killed, done = killing.played(server, tiny_folder, tmp_path / "killed", ranks, kills=kills, **options)
        assert len(calm) == len(killed) == len(ranks)
        return killing.differences(calm, killed), done

    yield both
    server.close()


@pytest.mark.slow
def test_a_run_whose_server_is_killed(play):
    differences, kills = play(3, [4], steps=10, apart_s=0.6)
    assert differences == [] and kills >= 2


@pytest.mark.slow
def test_two_runs_whose_server_is_killed(play):
    differences, kills = play(6, [4, 0], steps=30, apart_s=2.0)
    assert differences == [] and kills >= 4
