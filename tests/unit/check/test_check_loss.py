"""The bench for losses: it passes every loss we ship under every option, and finds each fault planted in tests/faults."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from marks import rest_slow, rotating
from places import ROOT

from cookbook.check import State, bench, check_loss
from cookbook.check.batches import USUAL_KEYS, RecordedDatum, datum, padded, random_batch, repeated, stretched, unchecked
from cookbook.check.bench import CheckResult
from cookbook.check.loss import FIRST_CHECKS, LATER_CHECKS
from cookbook.cli.app import run
from cookbook.cli.check_loss import _print_table as print_table
from cookbook.cli.check_loss import find
from cookbook.config import python_file
from cookbook.losses import (
    DPO,
    GRPO,
    LOSSES,
    ORPO,
    PPO,
    CrossEntropy,
    Loss,
    Scope,
    get_loss,
)
from cookbook.losses.normalization import Normalization, Reduction

FAULTS = Path(__file__).parent / "faults"
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "loss").glob("*.yaml"))
OPTIONS: dict[str, Loss] = {
    "grpo, dual clip": GRPO(clip_max=3.0, kl_beta=0.05),
    "grpo, trainer": GRPO(anchor="trainer", kl_beta=0.05),
    "grpo, icepop": GRPO(icepop_threshold=1.3, length_divisor=7.0),
    "grpo, sequence weights": GRPO(importance_level="sequence", anchor="trainer"),
    "grpo, sequence ratio": GRPO(ratio="sequence", kl_beta=0.05),
    "grpo, undivided": GRPO(normalization=None),
    "grpo, by sequences": GRPO(normalization=Normalization.num_sequences),
    "grpo, entropy bonus": GRPO(entropy_coef=0.1),
    "ppo, wide": PPO(0.5, 3.0),
    **{f"dpo, {name}": DPO(variant=name) for name in ("robust", "hinge", "ipo", "ipo_sum", "simpo")},
    "dpo, conservative": DPO(label_smoothing=0.1),
    "dpo, without a reference": DPO(reference_free=True),
    "orpo, nll alone": ORPO(odds_weight=0.0),
}
QUICK = ("dpo, ipo",)  # the others are tested beside the slow tests


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Run in an empty folder, and forget the modules imported from it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name == "losses" or name.startswith("losses.")]:
        del sys.modules[name]


def failures(loss, seed: int = 0) -> dict[str, str]:
    return {verdict.check: str(verdict) for verdict in check_loss(loss, seed) if verdict.failed}


@cache
def shipped(name: str) -> list[CheckResult]:
    return check_loss(get_loss(name))


# What is right passes


@pytest.mark.parametrize("name", rest_slow(sorted(LOSSES, key=["dpo", "cross_entropy"].__contains__, reverse=True), 2))
def test_every_shipped_loss_passes(name):
    verdicts = shipped(name)
    assert [verdict.check for verdict in verdicts] == [*FIRST_CHECKS, *LATER_CHECKS]
    assert not [str(verdict) for verdict in verdicts if verdict.failed]
    assert State.skipped not in {verdict.state for verdict in verdicts}


@pytest.mark.parametrize("name", rest_slow(PRESETS, fast=3))
def test_every_preset_is_found_under_its_name(name):
    loss, title = find(name, [])
    assert title == f"{name}: {type(loss).__name__} of {ROOT}/conf/loss/{name}.yaml"


@pytest.mark.parametrize("name", rotating(PRESETS, len(PRESETS) // 3))
def test_every_preset_passes(name):
    loss, _ = find(name, [])
    if loss != (get_loss(name) if name in LOSSES else None):  # which has passed above
        assert failures(loss) == {}


@pytest.mark.parametrize(
    ("seed", "name"),
    [pytest.param(seed, name, marks=[] if name in QUICK else pytest.mark.slow) for seed, name in enumerate(OPTIONS, start=1)],
)
def test_every_option_passes_on_batches_of_its_own(seed, name):
    """Another seed each: a verdict must not be a matter of luck."""
    assert failures(OPTIONS[name], seed) == {}


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("name", ["nll", "in_single_precision", "own_key"])
def test_plain_functions_without_a_fault_pass(name):
    verdicts = {verdict.check: verdict for verdict in check_loss(find(f"{FAULTS}/good.py:{name}", [])[0])}
    assert not [str(verdict) for verdict in verdicts.values() if verdict.failed]
    advice = {"own_key": "normalization=None)"}.get(name, "normalization='num_loss_tokens')")
    assert verdicts["normalization"].found.endswith(advice)


@pytest.mark.slow
def test_declared_stops_are_noted_and_named():
    for verdicts, words in (
        (shipped("dft"), "exp(logp)"),
        (shipped("cispo"), "clipped ratio"),
        (shipped("gspo"), "shared among its tokens"),
        (check_loss(GRPO(anchor="trainer", importance_cap=1.05)), "the policy the ratio is measured from"),
    ):
        [verdict] = [verdict for verdict in verdicts if verdict.check == "gradient = slope"]
        assert verdict.state is State.noted and words in verdict.found
    assert GRPO().stop_gradient is None and CrossEntropy().stop_gradient is None


# What is wrong is found, and nothing else is blamed

PLANTED = {
    "detached_term.py": {"gradient = slope"},
    "item.py": {"differentiable"},
    "double_normalization.py": {"reduction", "normalization", "micro-batches"},
    "divided_by_length.py": {"reduction", "normalization"},
    "off_by_one.py": {"every token trained", "weight 0 is inert", "padding"},
    "first_token_lost.py": {"every token trained"},
    "truncation.py": {"misaligned inputs"},
    "mean_over_all_tokens.py": {"padding"},
    "kl_without_gradient.py:Unheld": {"gradient = slope"},
    "kl_without_gradient.py:Excused": {"gradient = slope"},
    "padded_reference.py": {"missing inputs"},
    "padded_to_length.py": {"misaligned inputs"},
}


@pytest.mark.parametrize("target", rest_slow(PLANTED, fast=4))
def test_planted_faults_are_found(target):
    found = failures(find(f"{FAULTS}/{target}", [])[0])
    assert set(found) == PLANTED[target], found


def test_every_file_of_faults_is_used():
    assert {path.name for path in FAULTS.glob("*.py")} == {target.partition(":")[0] for target in PLANTED} | {"good.py"}


def terms(data, logprobs, change=lambda row, weights: -row * weights):
    return [change(row, one.loss_fn_inputs["weights"].to_torch()) for one, row in zip(data, logprobs, strict=True)]


def summed(change):
    return lambda data, logprobs: (sum(row.sum() for row in terms(data, logprobs, change)), {})


def writes_into_the_datum(data, logprobs):
    for one in data:
        one.loss_fn_inputs["weights"].to_torch().mul_(0.9)
    return sum(row.sum() for row in terms(data, logprobs)), {}


def random_numbers(data, logprobs):
    return torch.rand(()) * sum(row.sum() for row in terms(data, logprobs)), {}


def order_matters(data, logprobs):
    return sum((index + 1) * row.sum() for index, row in enumerate(terms(data, logprobs))), {}


def ignores_weights(data, logprobs):
    return -sum(row.sum() for row in logprobs), {}


def divided_twice(data, logprobs):
    rows = terms(data, logprobs)
    return sum(row.sum() for row in rows) / sum((row != 0).sum() for row in rows) ** 2, {}


def swallows_nan(data, logprobs):
    return sum(row.sum() for row in terms(data, logprobs, lambda row, weights: -row * torch.nan_to_num(weights))), {}


def named(*metrics):
    return lambda data, logprobs: (sum(row.sum() for row in terms(data, logprobs)), dict(metrics))


@pytest.mark.parametrize(
    ("loss", "check", "words"),
    [
        (lambda data, logprobs: torch.stack([row.sum() for row in logprobs]), "scalar and finite", "not (scalar, metrics)"),
        (lambda data, logprobs: (torch.cat(terms(data, logprobs)), {}), "scalar and finite", "the value has shape"),
        (lambda data, logprobs: (1.0, {}), "scalar and finite", "a float, not a tensor"),
        (lambda data, logprobs: (torch.tensor(np.inf), {}), "scalar and finite", "inf for an ordinary batch"),
        (summed(lambda row, weights: 0 * row), "differentiable", "zero everywhere"),
        (summed(lambda row, weights: (row * weights).sqrt()), "scalar and finite", "nan"),
        (summed(lambda row, weights: (0 * row).sqrt() + weights * row), "differentiable", "not finite"),
        (writes_into_the_datum, "repeatable", "writes into the datum's weights"),
        (random_numbers, "repeatable", "draw no random numbers"),
        (order_matters, "order", "another order of the pairs"),
        (ignores_weights, "keys", "never weights"),
        (ignores_weights, "weight 0 is inert", "have a gradient"),
        (divided_twice, "reduction", "0.5 times the loss"),
        (swallows_nan, "NaN", "finite result"),
        (named(("ratio", torch.ones(3))), "metrics", "'ratio' is a tensor of shape (3,)"),
        (named(("kl", float("nan"))), "metrics", "'kl' is nan"),
        (named(("name", "sft")), "metrics", "'name' is a str"),
        (summed(lambda row, weights: weights * (row.exp() + 1e8) - weights * 1e8), "float32", "expm1"),
        (lambda data, logprobs: data[0].loss_fn_inputs["rarity"], "scalar and finite", "my_loss.needs = {'key'}"),
    ],
)
def test_other_faults(loss, check, words):
    found = failures(loss)
    assert words in found.get(check, "nothing"), found


def test_what_comes_first_hides_the_rest():
    verdicts = check_loss(lambda data, logprobs: (1.0, {}))
    assert [verdict.state for verdict in verdicts] == [State.failed, *[State.skipped] * (len(verdicts) - 1)]
    assert verdicts[-1].found == "not examined: 'scalar and finite' comes first"


@dataclass(frozen=True)
class Undeclared(Loss):
    """A loss that reads an undeclared input, declares an unread one, and is not a sum over tokens."""

    name: ClassVar[str] = "undeclared"
    reduction: ClassVar[Reduction] = Reduction.token_sum
    needs: ClassVar[frozenset[str]] = frozenset({"target_tokens", "advantages"})
    scope = Scope.token
    normalization: Normalization | None = None
    key: str = "old_logprobs"

    def __call__(self, data, logprobs):
        rows = [row * self.factor(one) for one, row in zip(data, terms(data, logprobs), strict=True)]
        return sum(row.sum() for row in rows) ** 2, {}

    def factor(self, one):
        return one.loss_fn_inputs[self.key].to_torch().exp() if self.key in one.loss_fn_inputs else 1.0


def test_declarations_are_compared_with_the_facts():
    found = failures(Undeclared())
    assert "reads old_logprobs, which it does not declare" in found["keys"]
    assert "4 times" in found["reduction"] and "parts of one token" in found["micro-batches"]
    assert "works without advantages" in found["missing inputs"]
    [keys] = [verdict for verdict in check_loss(Undeclared(key="")) if verdict.check == "keys"]
    assert keys.state is State.noted and "never advantages" in keys.found


# What it is made of


def test_draws_are_what_the_checks_assume():
    draw = random_batch(np.random.default_rng(0), USUAL_KEYS)
    for one, mask in zip(draw.data, draw.masked, strict=True):
        first = int(np.flatnonzero(~mask)[0])
        assert mask[0] and first <= 2 and one.loss_fn_inputs["weights"].array[first] == 1.0
        assert set(one.loss_fn_inputs) == USUAL_KEYS | {"target_tokens"}
        assert one.loss_fn_inputs["logprobs"].tolist() == one.loss_fn_inputs["sampling_logprobs"].tolist()
    lengths = [len(row) for row in draw.logprobs]
    assert [len(row) for row in repeated(draw).logprobs] == lengths * 2
    assert [one.model_input.length for one in stretched(draw).data] == [2 * length for length in lengths]
    wide = padded(draw, np.random.default_rng(1))
    assert [mask[[0, -2, -1]].all() and len(mask) == n + 3 for mask, n in zip(wide.masked, lengths, strict=True)] == [True] * 4
    changed = draw.mapped("advantages", lambda values, mask: np.where(mask, 9.0, values))
    for one, mask in zip(changed.data, draw.masked, strict=True):
        assert ((one.loss_fn_inputs["advantages"].array == 9.0) == mask).all()


def test_reading_is_noted_and_asking_is_not():
    read: set[str] = set()
    one = RecordedDatum(datum(3, weights=[0.0, 1.0, 1.0], advantages=[1.0] * 3), read)
    assert "advantages" in one.loss_fn_inputs and list(one.loss_fn_inputs) and one.loss_fn_inputs.get("nothing") is None
    assert one.with_inputs(weights=[1.0] * 3).model_input.length == 3 and read == set()
    _ = one.with_inputs(more=[1.0] * 3).loss_fn_inputs["weights"], one.loss_fn_inputs.get("advantages")
    assert read == {"weights", "advantages"}
    loose = unchecked(datum(3), weights=datum(2, weights=[1.0, 1.0]).loss_fn_inputs["weights"])
    assert loose.loss_fn_inputs["weights"].shape == [2] and loose.model_input.length == 3


def test_faults_of_the_code_and_of_the_table_are_the_same():
    folder = Path(bench.__file__).parent
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    calls = [
        node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failed"
    ]
    named = {node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)}
    table = yaml.safe_load((folder / "faults.yaml").read_text())
    assert len(named) > 20 and named <= set(table)
    assert {tuple(texts) for texts in table.values()} == {("harm", "remedy")}
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    # Two checks put the name together: the measured reduction, and what is wrong with it.
    of_reductions = {f"{kind} {what}" for kind in Reduction for what in ("declared otherwise", "divided")}
    assert set(table) - of_reductions <= words and {" declared otherwise", " divided"} <= words


# As a command


def test_the_command_says_what_was_found(capsys):
    assert run(["check", "loss", "dpo", "variant=ipo", "beta=0.5"]) == 0
    out = capsys.readouterr().out
    assert "returns a mean, divided by nothing; terms of one pair each; reads reference_logprobs, target_tokens" in out
    assert out.count("\nok ") + out.count("\nnote ") == len(FIRST_CHECKS) + len(LATER_CHECKS) and "FAILED" not in out
    assert run(["check", "loss", f"{FAULTS}/off_by_one.py"]) == 2
    got = capsys.readouterr()
    assert "FAILED  every token trained  the first token of a response never gets a gradient\n" in got.out
    assert "in training: the model never learns how an answer begins\n" in got.out and "change: weights[t] belongs" in got.out
    names = "every token trained, weight 0 is inert, padding"
    assert got.err == f"error: check loss: {FAULTS}/off_by_one.py fails 3 of 17 checks: {names}\n"


@pytest.mark.slow
def test_a_fork_is_examined_under_its_name(capsys):
    assert run(["fork", "loss", "cispo", "mine"]) == 0
    assert run(["check", "loss", "mine", "clip_high_threshold=2"]) == 0
    code = Path("losses/mine.py")
    code.write_text(code.read_text().replace("* tokens.advantages, {", "* tokens.advantages.detach() * ratio, {"))
    Path("conf/loss/mine.yaml").unlink()  # the file alone will do
    capsys.readouterr()
    assert run(["check", "loss", "mine"]) == 0
    assert capsys.readouterr().out.startswith("CISPO of losses/mine.py\n")


@pytest.mark.parametrize(
    ("words", "message"),
    rest_slow(
        [
            (["grop"], "unknown loss 'grop'. Did you mean 'grpo'? (choices: cispo, "),
            (["dpo", "bta=1"], "unknown key 'loss.bta'. Did you mean 'loss.beta'? (cookbook train --cfg job prints every key)"),
            (["dpo", "beta=-1"], "loss.beta must be > 0, got -1.0"),
            (
                ["dpo", "ipo"],
                "check loss: expected key=value after the loss, got 'ipo'; for example: cookbook check loss dpo beta=0.2",
            ),
            (["nope.py"], "check loss: file not found, got nope.py; for example: "),
            (["two.py"], "check loss: two.py has several losses or none (one, two); name it: two.py:name"),
            (["two.py:on"], "check loss: two.py has no loss 'on'. Did you mean 'one'?"),
            (["two.py:one", "beta=1"], "check loss: one is a function and takes no options, got 'beta=1'; drop it"),
            (["broken.py"], "broken.py:1: not valid Python: "),
            (["bare.py"], "loss: Bare declares no reduction; "),
        ]
    ),
)
def test_what_cannot_be_examined_is_one_line(capsys, words, message):
    Path("two.py").write_text("def one(data, logprobs): ...\n\ndef two(data, logprobs): ...\n\ndef _helper(a, b): ...\n")
    Path("broken.py").write_text("def (\n")
    Path("bare.py").write_text(
        "from dataclasses import dataclass\nfrom cookbook.losses import Loss\n\n@dataclass(frozen=True)\nclass Bare(Loss):\n"
        "    name = 'bare'\n"
    )
    assert run(["check", "loss", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_table_on_a_terminal(capsys):
    """rich adds colors and wraps lines; cookbook has to call it, and to escape markup in texts."""
    print_table("t[b]itle", "declares [1:]", [CheckResult("NaN", State.failed, "no [1:] here", "harm", "change")])
    out = capsys.readouterr().out
    assert "t[b]itle" in out and "no [1:] here" in out and "in training: harm" in out


def test_files_are_run_again(tmp_path):
    file = tmp_path / "mine.py"
    for number in (1, 2):
        file.write_text(f"value = {number}{' ' * number}\n")
        assert python_file.run_beside(file, "mine_anew").value == number
