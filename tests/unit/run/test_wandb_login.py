"""Weights & Biases without a login or a network: the run is recorded offline, and never refused or delayed."""

from types import SimpleNamespace

import pytest

from cookbook.trackers import reach
from cookbook.trackers.wandb import START_S, WandbTracker


@pytest.mark.parametrize(
    ("place", "warning"),
    [
        ("answers", "no API key configured; the run is recorded offline; log in with `wandb login`"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: Connection refused; the run is recorded offline"),
    ],
)
def test_what_keeps_it_from_the_server_is_recorded_offline(place, warning, monkeypatch, tmp_path, caplog, capsys):
    wandb = pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if place == "answers":
        monkeypatch.setattr(reach, "connect", lambda url: None)
    else:
        monkeypatch.setenv("WANDB_BASE_URL", place)
    calls = []

    def init(**options):
        calls.append((options["mode"], options["settings"].init_timeout))
        if options["mode"] != "offline":
            raise wandb.errors.AuthenticationError("no API key configured\nsecond line")
        settings = SimpleNamespace(mode="offline")
        return SimpleNamespace(id="abc", url=None, settings=settings, dir=str(tmp_path / "wandb" / "offline-run-1" / "files"))

    monkeypatch.setattr(wandb, "init", init)
    WandbTracker().start({}, str(tmp_path), "mine", 0)
    # A server that does not answer is not waited for.
    assert calls == [*([(None, START_S)] if place == "answers" else []), ("offline", START_S)]
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert logged == [f"tracker wandb: {warning}"]
    assert f"upload this run with: wandb sync {tmp_path}/wandb/offline-run-1\n" in capsys.readouterr().out


def test_a_server_behind_a_proxy_is_not_tried(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    reach.connect("http://wandb.invalid")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:1 does not answer"):
        reach.connect("http://127.0.0.1:1")
