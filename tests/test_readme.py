"""The README's claims that can drift: its table of recipes is made from the classes, its files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from omegaconf import OmegaConf

from cookbook import recipe as recipes
from cookbook.cli import deployments, evaluate, hydra_bridge
from cookbook.cli.app import app, run
from cookbook.evaluate_alone import Target
from cookbook.session import settings

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def table_row(name: str) -> str:
    """A recipe's line, from its module, its loss's class, and nothing else."""
    composed = hydra_bridge.show(hydra_bridge.Request([f"recipe={name}"]), "job", resolve=True)
    typed = settings(OmegaConf.create(composed))
    returns = str(typed.loss.reduction).replace("_", " ")
    divides = f"`{typed.loss.normalization}`" if typed.loss.normalization else "nothing"
    return f"| `{name}` | {typed.module.DATA} | `{typed.loss.name}` | {returns} | {divides} |"


@pytest.mark.parametrize("name", sorted(found.name for found in recipes.available() if found.origin == "packaged"))
def test_the_table_says_what_the_classes_say(name: str) -> None:
    assert table_row(name) in README.splitlines()


def test_linked_files_exist() -> None:
    root = Path(__file__).parents[1]
    links = re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(r"`((?:examples|tests|docs|cookbook)/[\w./-]+\.\w+)`", README)
    assert links and not [link for link in links if not (root / link).exists()]


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README


# Commands

PAGES = [Path(__file__).parents[1] / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
QWEN = {"model.name": "Qwen/Qwen3-0.6B", "model.random": False, "model.dtype": "auto"}
SFT = {"optim.lr": 2e-5, "recipe.epochs": 3, "schedule.warmup_steps": 0, "schedule.warmup_ratio": 0.03, "eval.max_tokens": 512}
CHATS = {**QWEN, **SFT, "data.path": "chats.jsonl", "data.chat": False}
DEMO = {"optim.lr": 1e-4, "recipe.steps": 50, "rollout.max_tokens": 16, "eval.max_tokens": 16, "schedule.warmup_steps": 0}
CREATED = {"deployment._target_": "cookbook.deployments.vllm.VllmConfig", "deployment.name": "mine"}
# Every command that composes a configuration, and what it composes to; text: the error that the page shows.
COMPOSED: dict[str, dict[str, object] | str] = {
    "train recipe=grop": "error: unknown recipe 'grop'.",
    "train lr=1e-3": "error: unknown key 'lr'; write optim.lr=1e-3",
    "train recipe=sft loss=dpo": "error: loss: recipe=sft trains on conversations",
    "train recipe=dpo loss.normalization=num_sequences": "error: loss: DPO already returns a mean",
    "train recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "train recipe=grpo model=./my-model model.lora_rank=16 data=gsm8k reward=number": {
        "model.name": "./my-model", "optim.lr": 1e-5, "recipe.steps": 200, "rollout.max_tokens": 512, "eval.max_tokens": 512,
        "data.name": "openai/gsm8k", "schedule.warmup_ratio": None,
    },
    "train recipe=dpo model=HuggingFaceTB/SmolLM2-135M-Instruct data=trl-lib/ultrafeedback_binarized": {
        "model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "data.name": "trl-lib/ultrafeedback_binarized", "data.path": None,
        "optim.lr": 1e-6, "recipe.epochs": 1, "schedule.warmup_ratio": 0.1, "eval.max_tokens": 512,
    },
    "train recipe=grpo optim.lr=1e-4,2e-4 seed=0,1 -m": DEMO,
    "train recipe=my_grpo": DEMO,
    "train recipe=dpo --cfg job": {"optim.lr": 5e-5, "recipe.epochs": 1, "eval.max_tokens": 16, "schedule.warmup_ratio": None},
    "train --config RUN/config.yaml": DEMO,
    "check data recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "check config recipe=grpo": DEMO,
    "plan recipe=sft model=Qwen/Qwen3-0.6B data=chats.jsonl": CHATS,
    "eval runs/mine": DEMO,
    "eval runs/mine eval.pass_at=[1,8]": {**DEMO, "eval.pass_at": [1, 8]},
    "eval runs/mine data=gsm8k reward=number eval.max_tokens=512 eval.pass_at=[1,8] eval.limit=null": {
        "data.name": "openai/gsm8k", "eval.max_tokens": 512, "eval.limit": None,
    },
    "eval qwen3_0p6b data=gsm8k out=base.json": {**QWEN, "model.dtype": "bfloat16", "eval.max_tokens": 512},
    "deployments create mine": {**CREATED, "deployment.replicas": 1},
    "deployments create mine model=tiny deployment.replicas=2": {**CREATED, "deployment.replicas": 2},
    "serve model=tiny": {"model.random": False},
    "train recipe=grpo backend=remote backend.base_url=http://127.0.0.1:8000": DEMO,
    "train recipe=grpo deployment=vllm": DEMO,
    "train recipe=grpo deployment=vllm model.lora_rank=16 weight_sync.every=4": DEMO,
    "train recipe=grpo deployment=vllm deployment.name=mine deployment.on_exit=keep": DEMO,
}  # fmt: skip


def commands() -> dict[str, str]:
    """Each command of the pages as its words, and the line below it."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line, below in re.findall(r"^\$ cookbook (.*)\n(?=(.*))", text, re.MULTILINE):
            found[" ".join(shlex.split(line, comments=True))] = below
        for line in re.findall(r"`cookbook ((?:train|eval|plan|serve|check \w+|deployments \w+) [^`]+)`", text):
            found[" ".join(shlex.split(line))] = ""
    return found


FOUND = commands()


def parsed(command: str) -> dict[str, Any]:
    """The arguments as the command line takes them; it raises for one that is missing."""
    words, place = command.split(), typer.main.get_command(app)
    context = place.make_context("cookbook", words[:1], resilient_parsing=True)
    while hasattr(place, "resolve_command"):
        _, place, words = place.resolve_command(context, words)
        group = hasattr(place, "resolve_command")
        context = place.make_context(str(place.name), list(words), parent=context, resilient_parsing=group)
    return context.params


def request(command: str, config: Path) -> hydra_bridge.Request:
    given = parsed(command)
    overrides = given.get("overrides") or []
    if command.startswith("deployments"):
        return hydra_bridge.Request(deployments.overrides(given["name"], overrides))
    if command.startswith("eval"):
        return (
            hydra_bridge.Request(overrides, config_file=config)
            if given["target"] == "runs/mine"
            else evaluate._request(given["target"], Target(None), overrides)
        )
    name = "serve" if command.startswith("serve") else "train"
    return hydra_bridge.Request(
        overrides, bool(given.get("multirun")), config_name=name, config_file=config if given.get("config") else None
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of an earlier run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(hydra_bridge.show(hydra_bridge.Request(["recipe=grpo"]), "job", resolve=True), encoding="utf-8")
    return path


@pytest.mark.parametrize("command", FOUND)
def test_a_command_can_be_typed(command: str) -> None:
    assert parsed(command) is not None


def test_every_command_that_composes_is_in_the_table() -> None:
    composing = {one for one in FOUND if "overrides" in parsed(one)}
    assert composing == set(COMPOSED)


@pytest.mark.parametrize("command", COMPOSED)
def test_a_command_means_what_the_table_says(command: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = COMPOSED[command]
    if isinstance(expected, str):
        assert run(command.split()) == 2
        assert capsys.readouterr().err == FOUND[command] + "\n"
        assert FOUND[command].startswith(expected)
        return
    if "my_grpo" in command:
        assert run(["fork", "grpo", "my_grpo"]) == 0
    asked = request(command, config)
    seen: list[Any] = []
    hydra_bridge.run(asked, lambda cfg, _: seen.append(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))))
    assert {key: OmegaConf.select(seen[0], key) for key in expected} == expected
