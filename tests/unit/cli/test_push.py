"""``cookbook weights push``, against an HTTP stand-in of the hub's API that huggingface_hub's own client talks to."""

from __future__ import annotations

import hashlib

import pytest
from hubtools import Handler, Hub, hub, push  # noqa: F401 - hub is a fixture
from runtools import ROOT, SMALL, checkpoint, here, train  # noqa: F401 - here is a fixture

from cookbook.cli.app import run


@pytest.mark.slow
def test_a_run_is_pushed_with_its_card(here, hub):  # noqa: F811
    assert train(*SMALL["sft"], "checkpoint.every=2", "out=mine") == 0
    done = push(hub, "mine", "me/mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{checkpoint('mine')} is at {hub.url}/me/mine"
    assert hub.private == {"me/mine": True} and hub.messages == ["Weights after 3 steps"]
    weights = (checkpoint("mine") / "model.safetensors").read_bytes()
    assert hashlib.sha256(hub.files["model.safetensors"]).digest() == hashlib.sha256(weights).digest()
    assert b"recipe" in hub.files["README.md"] and hub.files["README.md"].startswith(b"---\n")
    assert {"config.json", "tokenizer.json"} <= hub.files.keys()
    # The optimizer stays at home.
    assert not [name for name in hub.files if name.startswith("trainer")]
    hub.private["me/open"] = False
    refused = push(hub, "mine", "me/open")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith("error: weights push: me/open exists and is public; add --public, or make it private")
    wrong = push(hub, "mine", "me/other", token="wrong")
    assert wrong.returncode == 2 and wrong.stderr.endswith("log in with `hf auth login`, or set HF_TOKEN\n")


@pytest.mark.slow
def test_a_dry_run_needs_no_hub_and_an_adapter_a_base_that_others_have(here, capsys):  # noqa: F811
    assert train(*SMALL["sft"], "model.lora_rank=2", "model.random=false", "out=mine") == 0
    capsys.readouterr()
    assert run(["weights", "push", "mine", "me/mine", "--dry-run"]) == 2
    assert "which is not on the hub, so the adapter would be useless there; add --merged" in capsys.readouterr().err
    assert run(["weights", "push", "mine", "me/mine", "--merged", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "MB" in line] >= ["README.md"] and "model.safetensors" in "".join(lines)
    assert lines[-1] == f"dry run: {checkpoint('mine')} would be uploaded to me/mine (private)"
    assert run(["weights", "push", "mine", "me/mine", "--merged", "--dry-run", "--public"]) == 0
    assert capsys.readouterr().out.endswith("to me/mine (public, unless the repository exists and is private)\n")
    # HF_HUB_OFFLINE is set in tests.
    assert run(["weights", "push", "mine", "me/mine", "--merged"]) == 2
    assert capsys.readouterr().err == "error: weights push: HF_HUB_OFFLINE is set; unset it\n"


def test_what_is_not_supported_is_an_error(capsys):
    assert run(["weights", "push", "mine", "mine"]) == 2
    assert capsys.readouterr().err == "error: weights push: expected the name of a repository, user/name, got 'mine'\n"
    assert run(["weights", "export", "a", "b", "--precision=float16"]) == 2
    assert "--precision belongs to --gguf" in capsys.readouterr().err
