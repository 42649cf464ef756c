"""The README's claims that can drift: its table of recipes is made from the classes, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cookbook import recipe as recipes
from cookbook.cli import hydra_bridge
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
