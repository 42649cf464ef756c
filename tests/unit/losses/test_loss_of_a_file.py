"""``loss=FILE.py:NAME``: a class or a declared function of the user's file, as for rewards."""

import pytest
from runtools import here, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra import bridge
from cookbook.cli.hydra.bridge import ComposeRequest
from cookbook.config.nodes import build
from cookbook.losses.base import Loss
from cookbook.losses.normalization import Normalization, Reduction

pytestmark = pytest.mark.usefixtures("here")
FILE = """
from dataclasses import dataclass
from typing import ClassVar

from cookbook.losses import returns
from cookbook.losses.cross_entropy import SupervisedLoss


@dataclass(frozen=True)
class Focal(SupervisedLoss):
    name: ClassVar[str] = "focal"
    normalization: None = None
    gamma: float = 2.0

    def terms(self, logprobs):
        return -((1 - logprobs.exp()) ** self.gamma) * logprobs


@returns("token_sum")
def summed(data, logprobs):
    return -sum(row.sum() for row in logprobs), {}


def undeclared(data, logprobs):
    return -sum(row.sum() for row in logprobs), {}
"""


def built(*words):
    return bridge.run(ComposeRequest(["recipe=sft", *words]), lambda cfg, _: build(cfg.loss, "loss", Loss))


def test_a_class_and_a_declared_function_are_losses():
    write("focal.py", FILE)
    assert built("loss=focal.py:Focal").gamma == 2.0
    assert built("loss={_target_: 'focal.py:Focal', gamma: 1.0}").gamma == 1.0
    loss = built("loss=focal.py:summed")
    assert (loss.name, loss.reduction, loss.normalization) == ("summed", Reduction.token_sum, Normalization.num_loss_tokens)
    write("my.yaml", "recipe: sft\nloss: focal.py:Focal\n")
    assert type(bridge.run(ComposeRequest(["my.yaml"]), lambda cfg, _: build(cfg.loss, "loss", Loss))).__name__ == "Focal"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("focal.py:undeclared", "focal.py:undeclared is a function that declares nothing; put @cookbook.losses.returns("),
        ("focal.py:Fokal", "loss: focal.py has no function 'Fokal'"),
        ("other.py:Focal", "loss: other.py does not exist in "),
    ],
)
def test_a_file_without_such_a_loss_is_one_line(loss, message, capsys):
    write("focal.py", FILE)
    assert run(["train", "recipe=sft", f"loss={loss}"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_function_of_a_file_trains(capsys):
    write("focal.py", FILE)
    words = ["recipe=sft", "model=tiny", "recipe.steps=1", "data.limit=8", "eval.every=null", "eval.limit=2", "out=run"]
    assert run(["train", *words, "eval.answers=false", "loss=focal.py:summed"]) == 0
    assert "step 1/1  loss " in capsys.readouterr().out
