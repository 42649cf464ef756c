"""Weights & Biases without a login or a network: the run is recorded offline, and never refused or delayed."""

from types import SimpleNamespace

import pytest

from cookbook.trackers.wandb import START_S, WandbTracker


def test_a_refused_login_is_recorded_offline(monkeypatch, tmp_path, caplog, capsys):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    calls = []

    def init(**options):
        calls.append((options["mode"], options["settings"].init_timeout))
        if options["mode"] != "offline":
            raise wandb.errors.AuthenticationError("no API key configured\nsecond line")
        settings = SimpleNamespace(mode="offline")
        return SimpleNamespace(id="abc", url=None, settings=settings, dir=str(tmp_path / "wandb" / "offline-run-1" / "files"))

    monkeypatch.setattr(wandb, "init", init)
    WandbTracker().start({}, str(tmp_path), "mine", 0)
    assert calls == [(None, START_S), ("offline", START_S)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "tracker wandb: no API key configured; the run is recorded offline; log in with `wandb login`"
    assert f"upload this run with: wandb sync {tmp_path}/wandb/offline-run-1\n" in capsys.readouterr().out
