"""The recipes as they ship, on the data that ships: they learn, for any of three seeds."""

import json
import math

import pytest
from marks import learning_seeds
from runtools import here, rows, train  # noqa: F401 - here is a fixture

from cookbook.utils.paths import packaged

pytestmark = pytest.mark.usefixtures("here")


def learn(recipe: str, seed: int) -> tuple[list[dict], list[dict]]:
    """All rows of a run, and those with an evaluation."""
    assert train(f"recipe={recipe}", f"seed={seed}", "out=run") == 0
    found = rows("run")
    return found, [row for row in found if any(key.startswith("eval/") for key in row)]


def test_what_is_evaluated_is_never_trained_on():
    folder = packaged("data") / "arithmetic"

    def questions(name):
        read = map(json.loads, (folder / name).read_text().splitlines())
        return {row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in read}

    trained = ["prompts_train.jsonl", "chat_train.jsonl", "pairs_train.jsonl", "rounded_train.jsonl"]
    held_out = ["prompts_eval.jsonl", "chat_eval.jsonl", "pairs_eval.jsonl"]
    assert not set().union(*map(questions, trained)) & set().union(*map(questions, held_out))


@pytest.mark.parametrize("seed", learning_seeds("grpo"))
def test_grpo_lifts_held_out_accuracy(seed):
    every, evaluated = learn("grpo", seed)
    assert evaluated[0]["eval/accuracy"] < 0.5
    assert evaluated[-1]["eval/accuracy"] >= 0.9
    rewards = [row["reward/mean"] for row in every[1:]]
    assert sum(rewards[-10:]) > 1.5 * sum(rewards[:3]) / 3 * 10  # of sampled completions of training prompts


@pytest.mark.parametrize("seed", learning_seeds("sft"))
def test_sft_learns_from_nothing(seed):
    _, evaluated = learn("sft", seed)
    assert evaluated[0]["eval/accuracy"] < 0.05
    assert evaluated[-1]["eval/accuracy"] >= 0.9
    assert evaluated[-1]["eval/loss"] < 0.1 * evaluated[0]["eval/loss"]


@pytest.mark.parametrize("seed", learning_seeds("dpo"))
def test_dpo_orders_held_out_pairs(seed):
    every, evaluated = learn("dpo", seed)
    assert every[1]["loss"] == pytest.approx(math.log(2), abs=1e-7)  # two float32 numbers from it, at most
    assert evaluated[0]["eval/rewards/accuracy"] == 0.5  # ties
    assert evaluated[-1]["eval/rewards/accuracy"] >= 0.9
    margins = [row["eval/rewards/margin"] for row in evaluated]
    assert margins[0] == 0.0 < margins[1] < margins[-1]


@pytest.mark.parametrize("seed", learning_seeds("orpo"))
def test_orpo_pushes_the_rejected_below_the_chosen(seed):
    _, evaluated = learn("orpo", seed)
    before, after = evaluated[0], evaluated[-1]
    assert before["eval/logprobs/chosen"] < before["eval/logprobs/rejected"]
    assert after["eval/logprobs/chosen"] > after["eval/logprobs/rejected"]
    assert after["eval/logprobs/rejected"] < before["eval/logprobs/rejected"]
    assert after["eval/rewards/accuracy"] >= 0.9
