"""Win rates by a preference model: the log-probabilities of transformers, both orders, equal and lone answers, and refusals."""

import itertools
import math

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from cookbook.data import Renderer, Row
from cookbook.errors import ConfigError, RolloutError
from cookbook.sampling.rewards import RewardRunner, Weighted
from cookbook.sampling.rewards.builtin import Exact
from cookbook.sampling.rewards.compare import Compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tiny.save(tmp_path_factory.mktemp("model") / "preferences", seed=5, max_position_embeddings=512)
    tiny.byte_tokenizer(512).save_pretrained(found)
    return found


@pytest.fixture
def reward(folder, make_trainer):
    trainer = make_trainer(name=folder, dtype="float64")
    one = Compare("preferences")
    one.connect(trainer.live_sampler(0).result(), Renderer(trainer.tokenizer, trainer.max_length), chat=True)
    return one


def probability(network, conversation, first, second):
    """The probability of A by transformers, for the tokens of the chat template."""
    text = (
        f"Which of two answers to this conversation is better?\n\n{conversation}\n\n[answer A]\n{first}\n\n[answer B]\n{second}"
    )
    prompt = f"<|im_start|>user\n{text}\n\nReply with A or B.<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tiny.byte_tokenizer(512)
    with torch.no_grad():
        logprobs = network(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1].log_softmax(-1)
    a, b = (logprobs[tokenizer.convert_tokens_to_ids(letter)].item() for letter in "AB")
    return 1 / (1 + math.exp(b - a))


def messages(*turns):
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


def rates(reward, answers, question="2+3="):
    trajectories = [messages(question, answer) for answer in answers]
    return RewardRunner(reward).submit_group(answers, Row("rows:1", {"chosen": "5"}), trajectories)()


def test_win_rates_are_those_of_transformers_in_both_orders(reward, folder):
    answers = ["5", "about 10", "six"]
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = []
    for mine in answers:
        wins = [
            (probability(network, "[user]\n2+3=", mine, other) + 1 - probability(network, "[user]\n2+3=", other, mine)) / 2
            for other in answers
            if other != mine
        ]
        expected.append(sum(wins) / len(wins))
    found = [score.value for score in rates(reward, answers)]
    # A sampler returns float32.
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 1e-3
    assert sum(found) / len(found) == pytest.approx(0.5, abs=1e-12)


def test_equal_answers_are_ties_and_the_others_are_compared_once(reward, monkeypatch):
    found = [score.value for score in rates(reward, ["5", "5", "6"])]
    assert found[0] == found[1] and found[2] == pytest.approx(1 - (2 * found[0] - 0.5))
    assert [score.value for score in rates(reward, ["5", "5", "5"])] == [0.5] * 3


def test_groups_of_a_step_are_computed_together(reward, monkeypatch):
    preferences = reward.__dict__["_preferences"]
    batches = []
    plain = preferences._answers
    monkeypatch.setattr(preferences, "_answers", lambda questions: batches.append(len(questions)) or plain(questions))
    runner = RewardRunner(reward)
    pending = [
        runner.submit_group(["5", answer], Row("rows:1", {}), [messages("2+3=", "5"), messages("2+3=", answer)])
        for answer in ("6", "7")
    ]
    found = [[score.value for score in one()] for one in pending]
    assert batches == [4]
    # A batch in another order has the same numbers.
    again = [
        runner.submit_group(["5", answer], Row("rows:1", {}), [messages("2+3=", "5"), messages("2+3=", answer)])
        for answer in ("7", "6")
    ]
    assert [[score.value for score in one()] for one in again] == found[::-1]


def test_a_lone_completion_is_compared_with_the_answer_of_its_row(reward):
    [alone] = rates(reward, ["six"])
    both = rates(reward, ["six", "5"])
    assert alone.value == pytest.approx(both[0].value, abs=1e-6)
    conversation = {"chosen": [*messages("2+3=", "5")]}
    [score] = RewardRunner(reward).submit_group(["six"], Row("rows:1", conversation), [messages("2+3=", "six")])()
    assert score.value == pytest.approx(alone.value, abs=1e-6)


def test_episodes_share_the_messages_before_they_differ(reward):
    first, second = messages("2+3=", "4", "Again.", "5"), messages("2+3=", "4", "Again.", "6")
    found = RewardRunner(reward).submit_group(["5", "6"], Row("rows:1", {}), [first, second])()
    expected = RewardRunner(reward).submit_group(["5", "6"], Row("rows:1", {}), [first, second])()
    assert found == expected and found[0].value != 0.5
    # A longer episode is shown as a whole from the first message that differs.
    one, other = messages("2+3=", "4", "Again.", "5"), messages("2+3=", "5")
    scores = RewardRunner(reward).submit_group(["5", "5"], Row("rows:1", {}), [one, other])()
    assert scores[0].value + scores[1].value == pytest.approx(1)


def test_reasoning_is_not_compared(reward):
    found = rates(reward, ["<think>2 and 3</think>5", "<think>long</think>5"])
    assert [score.value for score in found] == [0.5, 0.5]


def test_it_is_one_of_several_rewards(reward):
    both = Weighted({"compare": reward, "exact": Exact("answer")}, weights=[1.0, 2.0])
    trajectories = [messages("2+3=", answer) for answer in ("5", "6")]
    scores = RewardRunner(both).submit_group(["5", "6"], Row("rows:1", {"answer": "5"}), trajectories)()
    alone = rates(reward, ["5", "6"])
    assert scores[0].value == pytest.approx(alone[0].value + 2) and scores[1].value == pytest.approx(alone[1].value)


def test_a_comparison_beyond_the_context_names_its_row(reward):
    with pytest.raises(RolloutError, match=r"rows:1: reward: a comparison has 1,\d+ tokens, and the context .* 512; lower"):
        rates(reward, ["5" * 500, "6" * 500])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "reward.model: missing"),
        ({"model": "a", "workers": 2}, "reward.workers=2: the reward model has its own thread"),
        ({"model": "a", "url": "8731"}, "reward.url: expected http://host:port"),
    ],
)
def test_invalid_fields_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Compare(**options)


def test_held_out_rows_need_an_answer():
    with pytest.raises(ConfigError, match=r'reward.against: held-out rows have no column "chosen", .* choose one of answer'):
        Compare("a").check_held_out({"answer": "5"})
    Compare("a", against="answer").check_held_out({"answer": "5"})
