"""A server that is killed at random moments, and a client that notices nothing: :mod:`killing` at two lengths."""

from __future__ import annotations

import pytest
import servertools

killing = pytest.importorskip("killing", reason="needs the package tinker")


@pytest.fixture
def play(tiny_folder, tmp_path):
    """``play(kills, ranks, steps, one_session)``: the differences from an undisturbed play."""
    server = servertools.Mortal()

    def both(kills, ranks, steps, one_session=False):
        calm, killed = (
            killing.played(
                server, tiny_folder, tmp_path / f"{times}-kills", ranks, steps=steps, kills=times, one_session=one_session
            )
            for times in (0, kills)
        )
        assert len(calm) == len(killed) == len(ranks)
        return killing.differences(calm, killed)

    yield both
    server.close()


@pytest.mark.slow
def test_a_run_whose_server_is_killed(play):
    assert play(kills=3, ranks=[4], steps=10) == []


@pytest.mark.nightly
def test_two_runs_whose_server_is_killed(play):
    assert play(kills=6, ranks=killing.RANKS, steps=30) == []


@pytest.mark.nightly
def test_two_runs_of_one_session_whose_server_is_killed(play):
    assert play(kills=6, ranks=killing.RANKS, steps=30, one_session=True) == []
