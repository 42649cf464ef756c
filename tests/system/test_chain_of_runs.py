"""A run is a model: SFT, then DPO, then GRPO; LoRA continues as LoRA, at the learning rate of an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from marks import rotating
from omegaconf import OmegaConf
from runtools import LITTLE, checkpoint, here, rows, train  # noqa: F401 - here is a fixture

import cookbook
from cookbook.backends.model_source import sampling_target
from cookbook.cli.app import run
from cookbook.cli.hydra import bridge
from cookbook.errors import CheckpointError
from cookbook.utils.paths import holds_adapter


def lay_out(name: str, *steps: int, lora: bool = False) -> Path:
    """Write the folder of a run as far as names are looked up in it."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: {name: sft}\n")
    for step in steps:
        place = folder / "checkpoints" / f"step-{step:06d}"
        place.mkdir(parents=True)
        if lora:
            (place / "adapter_config.json").write_text("{}")
    return folder


def composed(*overrides: str) -> float:
    seen: list[float] = []
    bridge.run(
        bridge.ComposeRequest(overrides), lambda cfg, _: seen.append(OmegaConf.to_container(cfg, resolve=True)["optim"]["lr"])
    )
    return seen[0]


def test_a_continued_adapter_has_the_learning_rate_of_an_adapter(here: Path) -> None:  # noqa: F811
    lay_out("runs/lora", 25, lora=True)
    lay_out("runs/full", 25)
    words = ["recipe=dpo", "data=arithmetic_pairs"]
    for name in ("runs/lora", "runs/lora@step-25", "runs/lora/checkpoints/step-000025"):
        assert holds_adapter(name) and composed(*words, f"model={name}") == 1e-5
    for name in ("runs/full", "runs/full@step-25", "runs/missing@step-25", "owner/name"):
        assert not holds_adapter(name) and composed(*words, f"model={name}") == 1e-6


def test_the_checkpoint_of_a_step_is_named(here: Path) -> None:  # noqa: F811
    lay_out("runs/s1", 25)
    with pytest.raises(CheckpointError, match=r"runs/s1: has no checkpoint of step 50; choose one of these: step-000025"):
        sampling_target("runs/s1@step-50")
    lay_out("runs/new")
    with pytest.raises(CheckpointError, match=r"runs/new: this run has no checkpoint yet"):
        sampling_target("runs/new")
    assert sampling_target("owner/name@main") == "owner/name@main"


@pytest.mark.parametrize("rank", rotating([0, 4], 1))
def test_sft_then_dpo_then_grpo(rank: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    short = [*LITTLE, "recipe.steps=2", "eval.max_tokens=8", "checkpoint.every=1"]
    sft = ["recipe=sft", "model=tiny", "data=arithmetic_chat", "recipe.batch_size=4", f"model.lora_rank={rank}"]
    assert train(*sft, *short, "out=runs/sft") == 0
    dpo = ["recipe=dpo", "data=arithmetic_pairs", "recipe.batch_size=4", *short]
    assert run(["check", "config", *dpo, "model=runs/sft"]) == 0
    told = capsys.readouterr().out
    assert ("trains the LoRA adapter in this folder, which continues" in told) == bool(rank)
    assert f"learning rate {'1e-05' if rank else '1e-06'}" in told
    assert train(*dpo, "model=runs/sft", "out=runs/dpo") == 0
    assert ("trains a LoRA adapter: " in capsys.readouterr().out) == bool(rank)
    # The reference is the model that the run starts from.
    assert rows("runs/dpo")[1]["loss"] == pytest.approx(0.693147, abs=1e-4)
    start = "runs/sft/checkpoints/step-000002"
    assert OmegaConf.load("runs/dpo/config.yaml").model.name == start
    grpo = ["recipe=grpo", "data=arithmetic", "recipe.prompts_per_step=4", "recipe.group_size=4", "rollout.max_tokens=8"]
    assert train(*grpo, *short, "model=runs/dpo@step-2", "out=runs/grpo") == 0
    assert (checkpoint("runs/grpo") / "adapter_config.json").exists() == bool(rank)
    if rank:
        base = json.loads((checkpoint("runs/grpo") / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert base.endswith("data/tiny")
    # Everywhere else.
    assert run(["weights", "export", "runs/grpo", "exported"]) == run(["plan", *dpo, "model=runs/sft@step-1"]) == 0
    assert run(["sample", "runs/grpo@step-1", "2+2="]) == run(["eval", "runs/grpo@step-1", "eval.limit=2"]) == 0
    assert list(Path("runs/grpo/evals").glob("step-000001-*.json"))
    distill = ["recipe=distill", "recipe.teacher=runs/sft@step-2", *grpo[1:], *LITTLE, "recipe.steps=1", "eval.max_tokens=8"]
    assert train(*distill, "out=runs/taught") == 0
    client = cookbook.ServiceClient()
    assert client.create_training_client("runs/sft").get_info().is_lora == bool(rank)
    client.create_sampling_client(base_model="runs/sft@step-1")
    client.create_sampling_client("runs/sft")
    client.close()
    # A later checkpoint of the first run does not change the second.
    assert train(*sft, *short, "recipe.steps=3", "out=runs/sft") == 0
    assert train("--config", "runs/dpo/config.yaml", "out=runs/dpo", "recipe.steps=3") == 0
    assert OmegaConf.load("runs/dpo/config.yaml").model.name == start
