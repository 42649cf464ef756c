"""Credit of turns and tokens, and rewards that are normalized one by one, against independent code in float64."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import tiny
from runtools import SMALL, here, rows, train, write  # noqa: F401 - here is a fixture

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.formats import Chat
from cookbook.errors import ConfigError, RolloutError
from cookbook.futures import done
from cookbook.sampling import rollouts
from cookbook.sampling.advantages import group_advantages
from cookbook.sampling.credit import credits_of, normalized_each, returns
from cookbook.sampling.environments import EnvironmentRunner, PythonEnvironment
from cookbook.sampling.rewards import RewardRunner, Weighted
from cookbook.sampling.rollouts import RolloutConfig
from cookbook.types import Sample, SampleResponse

# A turn earns the number of its letters a; the episode ends after the number of turns in the row, or with an answer of x.
TURNS = """
class Turns:
    def reset(self, turns=3):
        self.left = turns
        return "begin"

    def step(self, text):
        self.left -= 1
        done = self.left == 0 or "x" in text
        return (None if done else "next"), float(text.count("a"))
"""


class Scripted:
    """Sampler whose i-th completion of a round is the i-th text of that round."""

    step = 0

    def __init__(self, *texts):
        self.tokenizer, self.rounds = tiny.tokenizer(), [list(one) for one in texts]

    def sample(self, prompt, num_samples=1, sampling_params=None):
        while not self.rounds[0]:
            self.rounds.pop(0)
        texts = [self.rounds[0].pop(0) for _ in range(num_samples)]
        tokens = [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id] for text in texts]
        return done(SampleResponse([Sample(one, [-0.5] * len(one), "stop") for one in tokens]))


def prompts(*values):
    found = [Row(f"here:{number}", one) for number, one in enumerate(values)]
    return [RenderedPrompt([65], row, "A", "", Chat(row.where, ())) for row in found]


def played(sampler, size, **options):
    write("turns.py", TURNS)
    config = PythonEnvironment(target="turns.py:Turns", workers=0, timeout_s=None, **options)
    with contextlib.closing(EnvironmentRunner(config)) as environment:
        renderer = Renderer(tiny.tokenizer(), 256)
        step = rollouts.sample_groups(
            sampler, prompts({}), size, RolloutConfig(max_tokens=8), renderer, 3, environment=environment
        )
    return step.groups


# ---- turns -----------------------------------------------------------------------------------------------------------


def zscore(values):
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1))
    return [(one - mean) / (deviation + 1e-6) if deviation else 0.0 for one in values]


def independent_credits(rewards, gamma):
    """Rewards per turn of each attempt of a group, of any numbers of turns -> advantages per turn."""
    from_turn = [
        [sum(gamma**later * one for later, one in enumerate(own[turn:])) for turn in range(len(own))] for own in rewards
    ]
    found = [[0.0] * len(own) for own in rewards]
    for turn in range(max(map(len, rewards))):
        column = zscore([own[min(turn, len(own) - 1)] for own in from_turn])
        for attempt, own in enumerate(rewards):
            if turn < len(own):
                found[attempt][turn] = column[attempt]
    return found


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
def test_credit_per_turn_is_that_of_independent_code(gamma):
    draws = np.random.default_rng(4)
    for _ in range(20):
        rewards = [draws.integers(-2, 3, size=draws.integers(1, 5)).astype(float).tolist() for _ in range(5)]
        found = credits_of([returns([[one] for one in own], gamma) for own in rewards])
        for own, expected in zip(found, independent_credits(rewards, gamma), strict=True):
            assert np.concatenate(own).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_golden_values_by_hand():
    """Two attempts with rewards 1, 0, 2 and 0, 1, and gamma 0.5."""
    first, second = (returns([[one] for one in own], 0.5) for own in ([1.0, 0.0, 2.0], [0.0, 1.0]))
    assert np.concatenate(first).tolist() == [1.5, 1.0, 2.0] and np.concatenate(second).tolist() == [0.5, 1.0]
    [one, other] = credits_of([first, second], "centered")
    # The third turn compares 2 with the last return of the attempt that has ended, 1.
    assert np.concatenate(one).tolist() == [0.5, 0.0, 0.5] and np.concatenate(other).tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("kind", ["zscore", "centered", "rloo", "maxrl"])
def test_a_reward_of_the_last_turn_is_a_reward_of_the_attempt(kind):
    """Groups of attempts with different numbers of turns, gamma 1: the advantage of the whole attempt, bit for bit."""
    rewards = [0.25, 1.0, 0.0, 0.75]
    steps = [returns([[0.0]] * turns + [[reward]]) for turns, reward in zip((0, 2, 1, 5), rewards, strict=True)]
    whole = group_advantages(rewards, kind)
    for attempt, expected in zip(credits_of(steps, kind), whole, strict=True):
        assert np.concatenate(attempt).tolist() == [expected] * len(attempt)


@pytest.mark.usefixtures("here")
def test_rewards_of_turns_reach_the_tokens_of_their_turns():
    # Attempt 0 earns 1, 0, 2; attempt 1 earns 0, 1 and ends.
    groups = played(Scripted(["a", "b"], ["b", "ax"], ["aa"]), 2, gamma=0.5)
    [group] = groups
    assert group.rewards == [3.0, 1.0] and [list(one.turn_rewards) for one in group.trajectories] == [
        [1.0, 0.0, 2.0],
        [0.0, 1.0],
    ]
    found = rollouts.datums(groups, rollouts.advantages(groups, "centered", 2))
    for datum, by_turn in zip(found, ([0.5, 0.0, 0.5], [-0.5, 0.0]), strict=True):
        inputs = {name: tensor.array for name, tensor in datum.loss_fn_inputs.items()}
        starts = np.flatnonzero(np.diff(inputs["weights"], prepend=0.0) == 1)
        assert inputs["advantages"][starts].tolist() == by_turn
        for start, credit in zip(starts, by_turn, strict=True):
            length = int(np.argmin(inputs["weights"][start:])) or len(inputs["weights"]) - start
            assert set(inputs["advantages"][start : start + length].tolist()) == {credit}
        assert not inputs["advantages"][inputs["weights"] == 0].any()


@pytest.mark.usefixtures("here")
def test_without_gamma_the_rewards_of_turns_are_one_reward():
    groups = played(Scripted(["a", "b"], ["b", "ax"], ["aa"]), 2)
    assert groups[0].returns == [] and rollouts.advantages(groups, "zscore", 2) == [group_advantages([3.0, 1.0]).tolist()]
    # Equal sums at different turns are spread with gamma alone.
    tied = ["a", "b"], ["bx", "ax"]
    assert not played(Scripted(*tied), 2)[0].has_spread
    assert played(Scripted(*tied), 2, gamma=1.0)[0].has_spread


@pytest.mark.usefixtures("here")
def test_gamma_out_of_range_is_refused():
    for gamma in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"env.gamma must be between 0 and 1"):
            PythonEnvironment(target="turns.py:Turns", workers=0, timeout_s=None, gamma=gamma)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def scored(function, texts, penalties=None):
    """The group of one prompt whose completions are scored by a reward function."""
    options = RolloutConfig(max_tokens=8) if penalties is None else RolloutConfig(max_tokens=4, overlong=penalties)
    with contextlib.closing(RewardRunner(function)) as runner:
        renderer = Renderer(tiny.tokenizer(), 256)
        return rollouts.sample_groups(
            Scripted(texts), prompts({"answer": ""}), len(texts), options, renderer, 3, runner=runner
        ).groups


def of_tokens(completion):
    """1 for each letter a; the last token ends the turn."""
    return [float(letter == "a") for letter in completion] + [0.0]


def test_rewards_of_tokens_reach_the_tokens():
    groups = scored(of_tokens, ["ab", "a", "bba"])
    assert groups[0].rewards == [1.0, 1.0, 1.0] and groups[0].has_spread
    # Returns from each token on: 1 0 0, 1 0, 1 1 1 0. A completion that has ended takes part with its last return, 0.
    expected = independent_credits([[1.0, 0.0, 0.0], [1.0, 0.0], [0.0, 0.0, 1.0, 0.0]], 1.0)
    found = rollouts.datums(groups, rollouts.advantages(groups, "zscore", 3))
    for datum, own in zip(found, expected, strict=True):
        assert datum.loss_fn_inputs["advantages"].array[-len(own) :].tolist() == pytest.approx(own, rel=1e-9, abs=1e-12)


def test_a_list_of_one_number_is_the_reward_of_the_only_turn():
    lists, numbers = (
        scored(lambda completion: [len(completion)], ["ab", "a"]),
        scored(lambda completion: len(completion), ["ab", "a"]),
    )
    assert rollouts.advantages(lists, "zscore", 2)[0] == [
        [pytest.approx(one)] for one in rollouts.advantages(numbers, "zscore", 2)[0]
    ]
    with pytest.raises(RolloutError, match=r"here:0: the reward returned 2 numbers for a completion of 4 tokens in 1 turn; "):
        scored(lambda completion: [1.0, 2.0], ["abc", "abc"])
    with pytest.raises(RolloutError, match=r"the reward returned str at index 1, not a number"):
        scored(lambda completion: [1.0, "2", 1.0], ["ab", "ab"])


def test_an_overlong_penalty_counts_at_the_last_token():
    [group] = scored(of_tokens, ["ab", "aab"], penalties=2)
    assert group.rewards == [0.5, 1.0]
    assert [np.concatenate(one).tolist() for one in group.returns] == [[0.5, -0.5, -0.5], [1.0, 0.0, -1.0, -1.0]]


def test_a_weighted_sum_of_rewards_of_tokens_and_of_completions():
    reward = Weighted({"tokens": of_tokens, "length": lambda completion: len(completion)}, {"tokens": 2.0, "length": 0.5})
    [group] = scored(reward, ["ab", "a"])
    assert group.rewards == [3.0, 2.5]
    assert [np.concatenate(one).tolist() for one in group.returns] == [[3.0, 1.0, 1.0], [2.5, 0.5]]
    mixed = Weighted({"tokens": of_tokens, "turns": lambda completion: [1.0]})
    with pytest.raises(RolloutError, match="the rewards tokens, turns have lists of 1 and 3 numbers"):
        scored(mixed, ["ab", "ab"])


# ---- several rewards -------------------------------------------------------------------------------------------------


def independent_each(parts, weights):
    """GDPO (arXiv:2601.05242): z-scores of each reward within its group, the weighted sum, and z-scores of it in the batch."""
    sums = []
    for group in parts:
        total = [0.0] * len(group)
        for name, weight in weights.items():
            applies = [place for place, one in enumerate(group) if one[name] is not None]
            values = zscore([group[place][name] for place in applies]) if len(applies) > 1 else [0.0] * len(applies)
            for place, value in zip(applies, values, strict=True):
                total[place] += weight * value
        sums.append(total)
    flat = [one for group in sums for one in group]
    mean = math.fsum(flat) / len(flat)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in flat) / (len(flat) - 1))
    return [[(one - mean) / (deviation + 1e-6) for one in group] for group in sums]


def test_each_reward_is_normalized_as_in_gdpo():
    draws = np.random.default_rng(5)
    weights = {"right": 1.0, "short": 0.25, "polite": -0.5}
    for _ in range(20):
        parts = [
            [
                {name: None if name == "polite" and draws.random() < 0.2 else float(draws.integers(0, 3)) for name in weights}
                for _ in range(size)
            ]
            for size in draws.integers(2, 6, size=4)
        ]
        found, expected = normalized_each(parts, weights), independent_each(parts, weights)
        for own, wanted in zip(found, expected, strict=True):
            assert own == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_rewards_that_differ_in_scale_keep_their_order_and_ties_are_exact():
    """The paper's example: the sums (0, 1) and (0, 2) have the same z-scores, and two rewards that rise teach more than one."""
    one_rises, both_rise = [{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], [{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}]
    tied = [{"a": 0.1 + 0.2, "b": 1.0}, {"a": 0.3, "b": 1.0}]
    found = normalized_each([one_rises, both_rise, tied], {"a": 1.0, "b": 1.0})
    assert found[1][1] == pytest.approx(2 * found[0][1]) and found[0][1] > 0
    assert found[2] == [0.0, 0.0]
    assert normalized_each([tied], {"a": 1.0, "b": 1.0}) == [[0.0, 0.0]]
    assert np.std([one for group in found for one in group], ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_a_group_uses_the_weights_of_its_rewards():
    parts = {"letters": lambda completion: completion.count("a"), "length": lambda completion: len(completion)}
    reward = Weighted(
        {**parts, "logged": lambda completion: 9.0}, {"letters": 1.0, "length": -1.0, "logged": 0.0}, normalize="each"
    )
    groups = scored(reward, ["ab", "aa", "b"])
    assert groups[0].normalized == {"letters": 1.0, "length": -1.0}
    [found] = rollouts.advantages(groups, "zscore", 3)
    values = [{"letters": 1.0, "length": 2.0}, {"letters": 2.0, "length": 2.0}, {"letters": 0.0, "length": 1.0}]
    assert found == pytest.approx(independent_each([values], {"letters": 1.0, "length": -1.0})[0], rel=1e-6)
    # The sums -1, 0 and -1 would tie the first and the last.
    assert groups[0].rewards == [-1.0, 0.0, -1.0] and found[0] != found[2]
    with pytest.raises(ConfigError, match=r"reward.normalize=each divides by standard deviations"):
        rollouts.advantages(groups, "centered", 3)


def test_equal_sums_have_spread_if_their_parts_differ():
    reward = {"a": lambda completion: completion.count("a"), "b": lambda completion: completion.count("b")}
    assert scored(Weighted(reward, normalize="each"), ["a", "b"])[0].has_spread
    assert not scored(Weighted(reward), ["a", "b"])[0].has_spread
    assert not scored(Weighted(reward, normalize="each"), ["ab", "ba"])[0].has_spread


def test_a_list_of_rewards_cannot_be_normalized_one_by_one():
    with pytest.raises(ConfigError, match=r"reward\.normalize=each: .* a reward returned a list; return one number"):
        scored(Weighted({"letters": of_tokens}, normalize="each"), ["ab", "b"])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipe.advantage=rloo"], "recipe.advantage=rloo: reward.normalize=each divides by standard deviations; use zscore"),
        (["rollout.overlong=4", "rollout.max_tokens=8"], "rollout.overlong: reward.normalize=each normalizes the rewards of "),
        (["env=arithmetic", "env.gamma=1.0"], "env.gamma: reward.normalize=each compares whole episodes"),
    ],
)
def test_options_that_change_the_sum_are_refused(words, line, capsys):
    grpo = [word for word in SMALL["grpo"] if not word.startswith("data")]
    assert train(*grpo, "reward=[number,format]", "reward.normalize=each", *words) == 2
    assert line in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_runs_with_each_kind_of_credit():
    write("reward.py", "def of_tokens(completion, completion_tokens=None):\n    return [float(len(completion))]\n")
    grpo = [*SMALL["grpo"], "recipe.steps=1", "eval.every=null", "eval.limit=2"]
    assert train(*grpo, "reward=[number,format]", "reward.normalize=each", "out=each") == 0
    write("turns.py", TURNS)
    rest = [word for word in grpo if not word.startswith("data")]
    assert train(*rest, "env=turns.py:Turns", "env.gamma=0.9", "env.workers=0", "env.timeout_s=null", "out=turns") == 0
    assert train(*grpo, "reward=reward.py:of_tokens", "reward.workers=0", "reward.timeout_s=null", "out=tokens") == 0
    for folder in ("turns", "tokens"):
        assert rows(folder)[-1]["optim/grad_norm"] > 0.0
