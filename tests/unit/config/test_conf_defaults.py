"""Default values of a configuration, composed without Hydra."""

import pytest
from omegaconf import OmegaConf
from runtools import here  # noqa: F401 - a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra.bridge import ComposeRequest, show
from cookbook.cli.hydra.conf_files import composed
from cookbook.config.recipe import available

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("recipe", [found.name for found in available() if found.origin == "packaged"] + ["mine"])
def test_it_is_what_hydra_composes(recipe):
    if recipe == "mine":
        assert run(["fork", "sft", "mine"]) == 0
    shown = OmegaConf.to_container(OmegaConf.create(show(ComposeRequest([f"recipe={recipe}"]), "job", resolve=True)))
    del shown["recipe"]
    assert composed(recipe) == shown


def test_of_a_recipe_that_is_gone_it_is_what_the_top_file_says():
    assert composed("gone")["loss"]["_target_"].endswith("GRPO")
