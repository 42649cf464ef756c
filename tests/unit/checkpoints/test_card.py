"""The model card of a checkpoint: what the hub reads of it, and that it tells the facts of the run."""

import json
import os
import stat
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from marks import rest_slow
from runtools import checkpoint, here, rows, train  # noqa: F401

from cookbook.checkpoints import card, manifest, store
from cookbook.cli.app import run

QUICK = ["recipe.steps=2", "recipe.batch_size=6", "data.limit=24", "eval.limit=4", "eval.every=2", "out=run"]
FACTS = {"kind": "base", "step": 7, "dtype": "bfloat16", "lora": False, "base_model": "Qwen/Qwen3-0.6B"}


def loaded(folder: Path) -> ModelCard:
    """The card as the hub's library reads it; its metadata are plain YAML of plain values."""
    found = ModelCard.load(folder / "README.md")
    assert found.data.to_dict() == yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    return found


def table(text: str) -> dict[str, str]:
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {name.strip(): value.strip() for name, value in cells}


@pytest.mark.parametrize("lora", rest_slow([False, True]))
def test_a_run_writes_the_card_of_what_it_trained(here, capsys, lora):  # noqa: F811
    before = os.umask(0o027)
    try:
        assert train("recipe=sft", "model=tiny", *QUICK, *(["model.lora_rank=4"] if lora else [])) == 0
    finally:
        os.umask(before)
    folder = checkpoint("run")
    found = loaded(folder)
    tags = ["cookbook", "sft", *(["lora"] if lora else [])]
    assert (found.data.library_name, found.data.tags) == ("peft" if lora else "transformers", tags)
    assert (found.data.base_model, found.data.license) == (None, None)  # a folder is none of the hub's
    values, row = table(found.text), rows("run")[-1]
    assert values["optimizer steps"] == "2 of 2" and values["data"] == "chat_train.jsonl" and values["recipe.batch_size"] == "6"
    assert values["loss"] == f"{row['loss']:.6g}" and values["eval/accuracy"] == f"{row['eval/accuracy']:.6g}"
    assert float(values["optim.lr"]) == 3e-3 and values.get("lora.r") == ("4" if lora else None)
    assert not any(name.startswith("time/") for name in values) and "More Information" not in found.text
    assert ("AutoPeftModelForCausalLM" in found.text) == lora and "vllm serve" in found.text
    # All files of a checkpoint have the mode that the umask asks for.
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o640}
    # A user may edit a model card: nothing computes with it.
    (folder / "README.md").write_text("edited")
    assert store.newest(folder.parent) == folder


@pytest.mark.slow
def test_an_export_has_the_card_of_the_run(here, capsys):  # noqa: F811
    assert train("recipe=sft", "model=tiny", *QUICK, "model.lora_rank=4", "eval.every=null") == 0
    for out, merged in (("out", False), ("merged", True)):
        assert run(["weights", "export", str(checkpoint("run")), out, *(["--merged"] if merged else [])]) == 0
        found = loaded(Path(out))
        assert found.data.library_name == ("transformers" if merged else "peft")
        assert found.text.lstrip().startswith("# tiny, sft, step 2") and "The folder `trainer`" not in found.text
        ours, runs = table(found.text), table(loaded(checkpoint("run")).text)
        own = {"optimizer"} | {name for name in runs if name.startswith("lora.") and merged}
        assert ours == {name: value for name, value in runs.items() if name not in own or name in ours}
        assert ours["optim.beta2"] == "0.95"
        manifest.verify(Path(out))


@pytest.mark.slow
def test_equal_runs_have_equal_cards(here):  # noqa: F811
    texts = []
    for name in ("one", "two"):
        assert train("recipe=sft", "model=tiny", *QUICK, "recipe.steps=1", f"out={name}") == 0
        texts.append((checkpoint(name) / "README.md").read_text())
    assert texts[0] == texts[1]


def test_metadata_for_the_hub(tmp_path):
    run_facts = {"identity": {"recipe": {"name": "grpo"}, "data": {"name": "openai/gsm8k", "path": None, "split": "train"}}}
    card.write(tmp_path, {**FACTS, "run": run_facts})
    found = loaded(tmp_path).data
    assert (found.base_model, found.base_model_relation, found.datasets) == ("Qwen/Qwen3-0.6B", "finetune", ["openai/gsm8k"])
    card.write(tmp_path, {**FACTS, "lora": True})
    assert loaded(tmp_path).data.base_model_relation == "adapter"
    assert "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 8 " in loaded(tmp_path).text
    fresh = {"identity": {"model": {"random": True}, "data": {"name": "openai/gsm8k", "path": "/secret/place/train.jsonl"}}}
    card.write(tmp_path, {**FACTS, "run": fresh})
    found = loaded(tmp_path)
    assert (found.data.base_model, found.data.datasets) == (None, None) and "from fresh weights" in found.text
    assert "secret" not in found.text and table(found.text)["data"] == "train.jsonl"
    card.write(tmp_path, {**FACTS, "base_model": "/home/me/runs/sft-1/checkpoints/step-000100"})
    assert loaded(tmp_path).text.lstrip().startswith("# sft-1/step-000100, trained, step 7")


def test_a_single_step_is_singular(tmp_path):
    for step, words in ((1, "after 1 optimizer step with"), (2, "after 2 optimizer steps with")):
        card.write(tmp_path, {**FACTS, "step": step})
        assert words in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("stated", "license"), [("---\nlicense: apache-2.0\n---\n", "apache-2.0"), ("---\n: [\n---\n", None), ("no metadata", None)]
)
def test_the_license_is_the_base_models_if_its_card_states_one(tmp_path, stated, license):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text(stated)
    card.write(tmp_path, {**FACTS, "base_model": str(tmp_path / "base")})
    assert loaded(tmp_path).data.license == license


def test_values_of_any_kind_stay_in_their_cells(tmp_path):
    identity = {"reward": {"_target_": "mine:Reward", "pattern": "a|b\nc", "none": None}, "rollout": {"max_tokens": 9}}
    row = {"loss": float("nan"), "reward": 0.5, "reward/std": None}
    card.write(
        tmp_path, {**FACTS, "run": {"identity": identity, "metrics": json.loads(json.dumps(row)), "schedule": "<X at 0x1>"}}
    )
    values = table(loaded(tmp_path).text)
    assert values["reward"] == "0.5" and values["reward.pattern"] == "a\\|b c" and values["rollout.max_tokens"] == "9"
    assert "schedule" not in values and "reward/std" not in values
