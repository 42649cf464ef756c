"""``cookbook weights``: what is in a run's folder, whether it is whole, and what can be made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
import torch
from manifests import rewritten
from safetensors.torch import load_file, save_file
from scoring import TOKENS, logprobs_of

from cookbook.cli.app import run
from cookbook.types import AdamParams
from cookbook.utils import files


def train(trainer, lr=1e-3) -> None:
    trainer.forward_backward(tiny.datums(4, seed=trainer.step), "dpo")
    trainer.optim_step(AdamParams(learning_rate=lr)).result()


@pytest.fixture
def folder(make_trainer, tmp_path, monkeypatch) -> Path:
    """A run's: two chains, a state and something else."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(dtype="bfloat16")
    trainer.folder = tmp_path / "run" / "checkpoints"
    for name, kind in (("v0", "base"), ("v1", "delta"), ("v2", "delta"), ("w0", "base"), ("w1", "delta")):
        trainer.save_weights_for_sampler_ext(name, checkpoint_type=kind).result()
        train(trainer)
    trainer.save_state("step-000005").result()
    (tmp_path / "run" / "config.yaml").write_text("{}\n")
    (tmp_path / "run" / "checkpoints" / "notes").mkdir()
    return tmp_path / "run"


def cookbook(capsys, *words: object) -> tuple[int, list[str], list[str]]:
    code = run(["weights", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_list(folder, capsys):
    code, (head, *rows), _ = cookbook(capsys, "list", folder)
    assert code == 0 and head.split()[:3] == ["checkpoint", "kind", "step"]
    found = [row.split() for row in rows if row]
    assert [row[:4] for row in found] == [
        *(["v0", "base", "0", "bfloat16"], ["v1", "delta", "1", "bfloat16"], ["v2", "delta", "2", "bfloat16"]),
        *(["w0", "base", "3", "bfloat16"], ["w1", "delta", "4", "bfloat16"], ["step-000005", "state", "5", "bfloat16"]),
    ]
    assert [row[-1] for row in found[:5] if row[1] == "delta"] == ["v0", "v1", "w0"]
    assert len({row[5] for row in found[:5]}) == 5  # digests
    assert cookbook(capsys, "list", folder / "checkpoints" / "v1")[1][1].split()[0] == "v1"


def test_verify(folder, capsys):
    code, lines, _ = cookbook(capsys, "verify", folder)
    assert code == 0 and [line.split()[0] for line in lines] == ["whole"] * 6
    path = folder / "checkpoints" / "v1" / "weights.delta"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    code, lines, errors = cookbook(capsys, "verify", folder)
    # What comes after it goes back to it, and what comes before does not.
    assert code == 2 and [line.split()[0] for line in lines] == ["whole", "damaged", "damaged", "whole", "whole", "whole"]
    assert all("v1: weights.delta is damaged" in line for line in lines[1:3])
    assert errors == [f"error: {folder}: 2 of 6 checkpoints cannot be used; see above"]


def test_from_inside(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder / "checkpoints" / "v1")
    assert cookbook(capsys, "verify", ".")[1] == [f"whole    {folder / 'checkpoints' / 'v1'}"]
    assert cookbook(capsys, "reconstruct", ".", "../full")[0] == 0
    assert len(cookbook(capsys, "list", "..")[1]) == len(cookbook(capsys, "list", folder)[1]) == 7 + 2


def test_verify_computes_what_a_delta_gives(folder, capsys):
    """Files that are as they were written may still belong to something else."""
    rewritten(folder / "checkpoints" / "w1", weights="0" * 64)
    code, lines, _ = cookbook(capsys, "verify", folder)
    assert code == 2 and any("w1: holds other weights than its manifest says" in line for line in lines)
    (folder / "checkpoints" / "w1" / "checkpoint.json").write_text("{")
    assert "damaged" in next(line for line in cookbook(capsys, "list", folder)[1] if line.startswith("w1"))
    assert "cannot be read" in next(line for line in cookbook(capsys, "verify", folder)[1] if "/w1" in line)


def test_reconstruct(folder, capsys, make_trainer):
    from transformers import AutoModelForCausalLM

    out = folder / "full"
    code, lines, _ = cookbook(capsys, "reconstruct", folder / "checkpoints" / "v2", out)
    assert code == 0 and lines[0].startswith(f"{out}  step 2, weights ")
    again = make_trainer(dtype="bfloat16")
    for _ in range(2):
        train(again)
    own, found = again.engine.model.network.state_dict(), AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(own[name], found[name]) for name in own)
    for words, expected in [
        (("v2", out), "full: exists already"),
        (("v0", folder / "new"), "v0: expected a delta, got a checkpoint of kind base; use cookbook weights export"),
        (("none", folder / "new"), "none: is not a checkpoint"),
    ]:
        code, _, errors = cookbook(capsys, "reconstruct", folder / "checkpoints" / words[0], words[1])
        assert code == 2 and len(errors) == 1 and expected in errors[0]


def test_export_leaves_the_optimizer_out(folder, capsys):
    # The files of the export can be written, also if those of the checkpoint cannot.
    (folder / "checkpoints" / "step-000005" / "config.json").chmod(0o444)
    assert cookbook(capsys, "export", folder / "checkpoints" / "step-000005", folder / "model")[0] == 0
    assert (folder / "model" / "config.json").stat().st_mode & 0o200
    before, after = (
        {path.name for path in one.iterdir()} for one in (folder / "checkpoints" / "step-000005", folder / "model")
    )
    assert before - after and {"model.safetensors", "config.json", "tokenizer.json", "checkpoint.json"} <= after <= before
    assert not any("optim" in name or "trainer" in name for name in after)
    assert cookbook(capsys, "verify", folder / "model")[0] == 0


@pytest.fixture
def adapted(make_trainer, tmp_path, monkeypatch):
    """A trainer of a trained adapter, and its state as a run saves it."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(lora_rank=4)
    measured = {"run": {"identity": {"measured": {"weights": trainer.digests()["weights"]}}}}
    train(trainer, lr=1e-2)
    trainer.save_state("step-000001", facts=measured).result()
    return trainer


def test_export_of_an_adapter(adapted, capsys, tmp_path):
    """The adapter alone for PEFT and vLLM, merged for all programs. 1e-5: float32, added up once."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    expected = logprobs_of(adapted.engine.model.network, TOKENS)
    assert cookbook(capsys, "export", "step-000001", "alone")[0] == 0
    assert cookbook(capsys, "export", "step-000001", "full", "--merged")[0] == 0
    base = AutoModelForCausalLM.from_pretrained(adapted.engine.model.config.name)
    assert (logprobs_of(base, TOKENS) - expected).abs().max() > 0.05
    assert (logprobs_of(AutoModelForCausalLM.from_pretrained("full"), TOKENS) - expected).abs().max() < 1e-5
    assert (logprobs_of(PeftModel.from_pretrained(base, "alone"), TOKENS) - expected).abs().max() < 1e-5
    (row,) = [line.split() for line in cookbook(capsys, "list", "alone")[1][1:] if line]
    assert row[1:3] == ["base,", "adapter"]


def test_an_adapter_is_not_merged_with_another_model(adapted, capsys, tmp_path, tiny_folder):
    moved = shutil.copytree(tiny_folder, tmp_path / "moved")
    config = Path("step-000001/adapter_config.json")
    tensors = load_file(moved / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, moved / "model.safetensors", metadata={"format": "pt"})
    config.write_text(config.read_text().replace(str(tiny_folder), str(moved)))
    rewritten(Path("step-000001"))
    code, _, errors = cookbook(capsys, "export", "step-000001", "full", "--merged")
    assert code == 2 and len(errors) == 1 and "its adapter was trained on other weights than" in errors[0]
    assert not Path("full").exists()


def test_prune(folder, capsys):
    code, lines, _ = cookbook(capsys, "prune", folder, "--keep", "3")  # w1, w0 and v2, which goes back to v1 and v0
    assert code == 0 and lines[-1] == "0 deleted, 0.0 MB; 6 left"
    code, lines, _ = cookbook(capsys, "prune", folder, "--keep", "1")
    assert code == 0 and lines[-1].startswith("3 deleted, ")
    assert names(folder) == ["notes", "step-000005", "w0", "w1"]
    assert cookbook(capsys, "verify", folder)[0] == 0
    assert cookbook(capsys, "prune", folder, "--keep", "0")[0] == 0
    assert names(folder) == ["notes", "step-000005"]


def test_a_run_without_a_lock_is_not_pruned(folder, capsys):
    """As in a folder that is write-protected, which root would not notice."""
    (folder / ".lock").mkdir()
    code, _, errors = cookbook(capsys, "prune", folder, "--keep", "1")
    assert code == 2 and errors == [f"error: weights: cannot write to {folder}: Is a directory; make the folder writable"]


def test_a_run_under_way_is_not_pruned(folder, capsys):
    with files.locked(folder):
        for place in (folder, folder / "checkpoints"):
            code, _, errors = cookbook(capsys, "prune", place, "--keep", "0")
            assert code == 2 and len(errors) == 1 and "another process" in errors[0]
    assert "v0" in names(folder)


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_where_there_is_nothing(command, capsys, tmp_path):
    options = ["--keep", "1"] if command == "prune" else []
    for place in (tmp_path, tmp_path / "none"):
        code, _, errors = cookbook(capsys, command, place, *options)
        assert code == 2 and errors == [f"error: {place}: holds no checkpoint; pass a run's folder, or one of its checkpoints"]


def test_full_weights_have_nothing_to_merge(folder, capsys):
    code, _, errors = cookbook(capsys, "export", folder / "checkpoints" / "w1", folder / "new", "--merged")
    assert code == 2 and len(errors) == 1 and "no adapter that could be merged; leave out --merged" in errors[0]
