"""Claims of the pages that can drift: the table of recipes, links, named files, and every command."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from marks import rest_slow
from omegaconf import OmegaConf
from pages import COMPOSED, FOUND, PAGES
from places import ROOT

from cookbook.cli import deployments, evaluate, jobs
from cookbook.cli.app import app, run
from cookbook.cli.hydra import bridge
from cookbook.config import recipe as recipes
from cookbook.run.settings import settings

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs/guide/recipes.md").read_text(encoding="utf-8")


def table_row(name: str) -> str:
    """A recipe's line, from its module, its loss's class, and nothing else."""
    composed = bridge.show(bridge.ComposeRequest([f"recipe={name}"]), "job", resolve=True)
    typed = settings(OmegaConf.create(composed))
    returns = str(typed.loss.reduction).replace("_", " ")
    divides = f"`{typed.loss.normalization}`" if typed.loss.normalization else "nothing"
    return f"| `{name}` | {typed.module.DATA} | `{typed.loss.name}` | {returns} | {divides} |"


@pytest.mark.parametrize("name", sorted(found.name for found in recipes.available() if found.origin == "packaged"))
def test_the_table_says_what_the_classes_say(name: str) -> None:
    assert table_row(name) in RECIPES.splitlines()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text, missing = page.read_text(encoding="utf-8"), set()
    for link, anchor in re.findall(r"\]\((?!https:)([\w./-]+)?(?:#([\w-]+))?\)", text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.add(f"{link}#{anchor}")
    named = re.findall(r"`(?:python )?((?:examples|tests|tools|docs|cookbook|conf|recipes|benchmarks)/[\w./-]+\.\w+)\b", text)
    missing |= {name for name in named if not (ROOT / name).exists() and not re.search("[A-Z]{4}", name)}
    assert missing == set()


def test_the_map_of_promises_names_every_test_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| promise |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`([\w/]+)`", "".join(row.split("|")[2:]))}
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert named == files


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README


# Commands


def parsed(command: str) -> dict[str, Any]:
    """The arguments as the command line takes them; it raises for one that is missing."""
    words, place = FOUND[command].words, typer.main.get_command(app)
    context = place.make_context("cookbook", words[:1], resilient_parsing=True)
    while hasattr(place, "resolve_command"):
        _, place, words = place.resolve_command(context, words)
        group = hasattr(place, "resolve_command")
        context = place.make_context(str(place.name), list(words), parent=context, resilient_parsing=group)
    return context.params


def request(command: str, config: Path) -> bridge.ComposeRequest:
    given = parsed(command)
    overrides = given.get("overrides") or []
    if command.startswith("deployments"):
        return bridge.ComposeRequest(deployments.overrides(given["name"], overrides))
    if command.startswith("jobs"):
        return bridge.ComposeRequest(jobs.overrides(overrides))
    if command.startswith("eval") and given["target"] == "runs/mine":
        return bridge.ComposeRequest(overrides, config_file=config, is_received=True)
    if command.startswith("eval"):
        asked: list[bridge.ComposeRequest] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bridge, "run", lambda request, job: asked.append(request))
            evaluate.evaluate(given["target"], overrides, evaluate.TaskOptions(None, None, None, False))
        return asked[0]
    name = "serve" if command.startswith("serve") else "train"
    return bridge.ComposeRequest(
        overrides, bool(given.get("multirun")), config_name=name, config_file=config if given.get("config") else None
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of an earlier run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(composed_grpo(), encoding="utf-8")
    return path


@cache
def composed_grpo() -> str:
    return bridge.show(bridge.ComposeRequest(["recipe=grpo"]), "job", resolve=True)


@pytest.mark.parametrize("command", FOUND)
def test_a_command_can_be_typed(command: str) -> None:
    assert parsed(command) is not None


def test_every_command_that_composes_is_in_the_table() -> None:
    composing = {one for one in FOUND if "overrides" in parsed(one)}
    assert composing == set(COMPOSED)


@pytest.mark.parametrize("command", rest_slow(COMPOSED, fast=6))
def test_a_command_means_what_the_table_says(command: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = COMPOSED[command]
    text = (ROOT / "docs/guide/configuration.md").read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    Path("my.yaml").write_text(text, encoding="utf-8")
    Path("typo.yaml").write_text("recipe: sft\n\n\noptim:\n  lrr: 1e-4\n", encoding="utf-8")
    if isinstance(expected, str):
        printed = FOUND[command]
        assert run(printed.words) == 2
        assert capsys.readouterr().err == printed.below + "\n"
        assert printed.below.startswith(expected)
        return
    if "my_loss" in command:
        assert run(["fork", "loss", "grpo", "my_loss"]) == 0
    if "my_grpo" in command:
        assert run(["fork", "grpo", "my_grpo"]) == 0
    if "backend=mine" in command:
        Path("conf/backend").mkdir(parents=True)
        Path("conf/backend/mine.yaml").write_text("_target_: my_backend.MyBackend\n")
    asked = request(command, config)
    seen: list[Any] = []
    bridge.run(asked, lambda cfg, _: seen.append(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))))
    assert {key: OmegaConf.select(seen[0], key) for key in expected} == expected
