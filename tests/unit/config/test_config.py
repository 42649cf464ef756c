"""Typing a node: what fits, what is converted, and the one line that says what does not."""

import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from omegaconf import OmegaConf

from cookbook.config import OptimConfig, recipe
from cookbook.config.nodes import build
from cookbook.config.typed import convert, resolve_target
from cookbook.errors import ConfigError
from cookbook.utils.suggest import did_you_mean, did_you_mean_key


class Color(StrEnum):
    red = "red"
    dark_red = "dark-red"


@dataclass(frozen=True)
class Inner:
    x: int = 1


@dataclass(frozen=True)
class Everything:
    kind: ClassVar[str] = "everything"
    needed: int
    rate: float = 1e-5
    color: Color | None = None
    mode: Literal["auto", "on"] | bool = "auto"
    names: str | list[str] = "all"
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    table: dict[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    path: Path | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must be >= 0, got {self.rate}")


class Plain:
    """Not a dataclass: a hook, say."""

    def __init__(self, every: int, name: str = "x") -> None:
        self.every, self.name = every, name


def made(**values: Any) -> Everything:
    return build(OmegaConf.create({"needed": 1, **values}), "node", Everything)


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**values)
    return str(caught.value)


def test_values_become_what_the_annotations_say():
    got = made(
        rate="1e-4",  # as an environment variable spells it
        color="dark-red",
        mode=True,
        names=["q", "v"],
        sizes=[1, 2],
        pair=[3, "a"],
        table={"a": 1},
        inner={"x": 5},
        path="runs/a",
        anything={"deep": [1, {"_target_": f"{__name__}.Inner", "x": 2}]},
    )
    assert got == Everything(
        1, 1e-4, Color.dark_red, True, ["q", "v"], (1, 2), (3, "a"), {"a": 1.0}, Inner(5), Path("runs/a"),
        {"deep": [1, Inner(2)]},
    )  # fmt: skip
    assert type(got.sizes) is tuple and type(got.table["a"]) is float
    assert made(needed=1e3).needed == 1000 and type(made(needed=1e3).needed) is int
    assert made(color="dark_red").color is Color.dark_red  # by name, too
    assert math.isnan(made(rate=float("nan")).rate)  # the class has the last word
    assert convert(7, str, "a name") == "7"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": "fast"}, "node.rate: expected a number, got 'fast'; write 1e-05, for example"),
        ({"rate": None}, "node.rate: expected a number, got null"),
        ({"rate": True}, "node.rate: expected a number, got true"),
        ({"needed": 1.5}, "node.needed: expected a whole number, got 1.5"),
        ({"needed": math.inf}, "node.needed: expected a whole number, got inf"),
        ({"needed": True}, "node.needed: expected a whole number, got true"),
        ({"color": "dark_rad"}, "node.color: expected one of red, dark-red, got 'dark_rad'. Did you mean 'dark-red'?"),
        ({"color": "blue"}, "node.color: expected one of red, dark-red, got 'blue'"),
        ({"mode": "off"}, "node.mode: expected one of auto, on or true or false, got 'off'"),
        ({"names": {"a": 1}}, "node.names: expected text or a list, got {'a': 1}"),
        ({"sizes": 3}, "node.sizes: expected a list, got 3; write [3]"),
        ({"sizes": [1, "x"]}, "node.sizes[1]: expected a whole number, got 'x'"),
        ({"pair": [1]}, "node.pair: expected a list, got [1]"),
        ({"table": {"a": "x"}}, "node.table.a: expected a number, got 'x'"),
        ({"inner": {"x": "y"}}, "node.inner.x: expected a whole number, got 'y'"),
        ({"inner": {"y": 1}}, "unknown key 'node.inner.y'. (Inner has x)"),
        ({"inner": 3}, "node.inner: expected keys and values, got 3"),
        ({"rates": 1}, "unknown key 'node.rates'. Did you mean 'rate'? (Everything has needed, rate, color, mode, "
         "names, sizes, pair, table, inner, path, anything)"),
        ({"kind": "x"}, "unknown key 'node.kind'."),
        ({"needed": "???"}, "node.needed: missing; Everything needs a whole number"),
        ({"rate": -1}, "node: rate must be >= 0, got -1.0"),
        ({"rate": "${nope}"}, "node.rate: Interpolation key 'nope' not found"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_that_names_the_key(values, message):
    whole = OmegaConf.create({"node": {"needed": 1, **values}})
    with pytest.raises(ConfigError) as caught:
        build(whole.node, "node", Everything)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_missing_key_and_a_missing_node():
    with pytest.raises(ConfigError, match=r"node.needed: missing; Everything needs a whole number"):
        build({}, "node", Everything)
    with pytest.raises(ConfigError, match="optim: expected keys and values, got nothing; choose a file of conf/optim/"):
        build(None, "optim")
    with pytest.raises(ConfigError, match="optim: no _target_, the class these keys belong to; choose a file of conf/optim/"):
        build({"lr": 1}, "optim")


def test_a_plain_class_is_typed_by_its_init():
    got = build({"_target_": f"{__name__}:Plain", "every": "3"}, "hook.mine")
    assert (got.every, got.name) == (3, "x")
    with pytest.raises(ConfigError, match=r"unknown key 'hook.mine.evry'. Did you mean 'every'\? \(Plain has every, name"):
        build({"_target_": f"{__name__}.Plain", "evry": 3}, "hook.mine")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cookbook.losses.GPRO", "loss._target_: 'cookbook.losses' has no 'GPRO'. Did you mean 'GRPO'?"),
        ("cookbook.losses.grop.GRPO", "loss._target_: 'cookbook.losses' has no 'grop'. Did you mean 'grpo'?"),
        ("no_such_module.Loss", "loss._target_: the module 'no_such_module' is neither in this folder nor installed"),
        ("GRPO", "loss._target_: expected package.module.Class, got 'GRPO'"),
        (3, "loss._target_: expected package.module.Class, got 3"),
        ("math.sqrt", "loss._target_: 'math.sqrt' is a builtin_function_or_method; name a class"),
    ],
)
def test_a_target_that_cannot_be_used(target, message):
    with pytest.raises(ConfigError) as caught:
        resolve_target(target, "loss._target_")
    assert str(caught.value) == message


def test_a_target_in_the_users_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "mine_ok.py").write_text("from dataclasses import dataclass\n@dataclass\nclass Mine:\n    a: int = 1\n")
    (tmp_path / "mine_broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "mine_needs.py").write_text("import module_nobody_has\nclass Mine: ...\n")
    assert build({"_target_": "mine_ok.Mine", "a": 2}, "loss").a == 2
    with pytest.raises(ConfigError, match=r"mine_broken.py:2: not valid Python: "):
        build({"_target_": "mine_broken.Mine"}, "loss")
    with pytest.raises(ConfigError, match="mine_needs needs the module 'module_nobody_has', which is not installed"):
        build({"_target_": "mine_needs.Mine"}, "loss")


def test_a_target_must_be_of_the_class_that_is_asked_for():
    node = {"_target_": "cookbook.config.OptimConfig"}
    assert build(node, "optim", OptimConfig) == OptimConfig()
    with pytest.raises(ConfigError, match=r"node._target_: expected Everything or a child"):
        build(node, "node", Everything)


def test_optim_makes_adam_params_and_checks_itself():
    adam = OptimConfig(lr=2.0, weight_decay=0.1).adam(scale=0.5)
    assert (adam.learning_rate, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm) == (1, 0.95, 1e-8, 0.1, 1)
    with pytest.raises(ConfigError, match=r"optim: lr must be >= 0 and finite, got -1.0"):
        OptimConfig(lr=-1.0)
    with pytest.raises(ConfigError, match="optim: beta1 must be"):
        OptimConfig(beta1=1.0)


def test_the_data_resolver():
    assert Path(OmegaConf.create({"path": "${cookbook:data}/x"}).path).parent.name in ("data", "_data")


def test_suggestions():
    assert did_you_mean("grop", ["grpo", "sft"]) == " Did you mean 'grpo'?"
    assert did_you_mean("zzz", ["grpo", "sft"]) == ""
    assert did_you_mean_key("lr", ["seed", "optim.lr"]) == " Did you mean 'optim.lr'?"
    assert did_you_mean_key("max_tokens", ["a.max_tokens", "b.max_tokens"]) == " Did you mean 'a.max_tokens' or 'b.max_tokens'?"
    assert did_you_mean_key("optim.lrr", ["optim.lr", "seed"]) == " Did you mean 'optim.lr'?"


RECIPE = '"""Mine: it does nothing."""\nfrom dataclasses import dataclass\n@dataclass\nclass Config:\n    steps: int = 1\n'


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path / "recipes"


def test_the_users_recipe_comes_first_and_listing_runs_nothing(recipes):
    (recipes / "mine.py").write_text(RECIPE + "def train(run): pass\n")
    (recipes / "sft.py").write_text('"""My own."""\nraise RuntimeError("listing must not run this")\n')
    (recipes / "broken.py").write_text("def f(:\n")
    (recipes / "__init__.py").write_text("")
    found = {one.name: one for one in recipe.available()}
    assert (found["mine"].origin, found["mine"].summary) == ("user", "Mine: it does nothing.")
    assert (found["sft"].origin, found["sft"].summary) == ("user", "My own.")
    assert found["grpo"].origin == "packaged"
    assert found["broken"].summary == "(line 1 is not valid Python)"
    assert "__init__" not in found
    module = recipe.load("mine")
    assert module.Config().steps == 1
    assert sys.modules["cookbook_recipes.mine"] is module


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = (", r"recipes/mine.py:1: not valid Python: "),
        (RECIPE, r"recipes/mine.py: no function 'train\(run\)'"),
        ("def train(run): ...", r"recipes/mine.py: no dataclass 'Config'"),
        ("import module_nobody_has", r"recipes/mine.py: imports 'module_nobody_has', which cannot be found"),
    ],
)
def test_a_file_that_is_no_recipe(recipes, code, message):
    (recipes / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        recipe.load("mine")


@pytest.mark.parametrize("name", ["sfft", "../sft", ""])
def test_an_unknown_recipe(recipes, name):
    with pytest.raises(ConfigError, match=r"recipe.name: unknown recipe .* \(choices: distill, dpo, grpo, kto, orpo, sft\)"):
        recipe.load(name)
