"""Rewards with named parts, weighted sums, and functions that see a group or a trajectory."""

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from runtools import SMALL, here, rows, timeless, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.data import RenderedPrompt, Row
from cookbook.data.formats import Chat, Plain
from cookbook.data.messages import ChatMessage
from cookbook.errors import BadRowError, ConfigError, RolloutError
from cookbook.sampling.rewards import Format, Number, Python, RewardRunner, Score, Weighted, part_means
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.types import Sample

pytestmark = pytest.mark.usefixtures("here")

INLINE = {"workers": 0, "timeout_s": None}
SAMPLE = Sample([5], [-1.0], "stop", 0)


def scores(reward, *completions, row=None, example=None, attempts=None):
    """The scores of completions of one prompt, as a run asks for them."""
    prompt = RenderedPrompt([1], Row("rows.jsonl:7", row or {}), "<s>ask", "ask", example or Plain("here:1", "ask"))
    attempts = attempts or [Trajectory.single([1], "<s>ask", SAMPLE, text) for text in completions]
    with closing(RewardRunner(reward)) as runner:
        return runner.submit_attempts(prompt, attempts)()


def test_a_mapping_is_the_sum_of_its_parts():
    found = scores(lambda completion, row: {"correct": 1, "format": np.float32(0.25)}, "a", "b")
    assert found == [Score(1.25, {"correct": 1.0, "format": 0.25})] * 2
    assert scores(lambda completion, row: 1, "a") == [Score(1.0)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "the reward returned no parts; return one number or at least one part"),
        ({"correct": None}, "the reward returned NoneType as 'correct', not a number; return one float"),
        ({"correct": float("nan")}, "the reward returned nan as 'correct'; return a finite number"),
        ({"a": 1e308, "b": 1e308}, "the reward returned inf as the sum of its parts; return a finite number"),
        ({"two words": 1.0}, "the reward's parts have the name 'two words'; use a text without spaces"),
        ({1: 1.0}, "the reward's parts have the name 1; use a text without spaces"),
    ],
)
def test_parts_that_are_no_numbers_name_the_row(value, message):
    with pytest.raises(RolloutError) as error:
        scores(lambda completion, row: value, "a")
    assert str(error.value) == f"rows.jsonl:7: {message}"


def test_means_of_parts_add_up_to_the_mean_reward():
    """A part that one completion lacks counts as 0 there."""
    assert part_means([{"a": 1.0, "b": 0.5}, {"b": 0.25}], "x/") == {"x/a": 0.5, "x/b": 0.375}
    assert part_means([{}, {}], "x/") == {} == part_means([], "x/")


FUNCTIONS = """
def rank(group, row):
    return [sorted(group).index(text) + row["more"] for text in group]

def both(group, trajectory, row):
    assert [one[-1]["content"] for one in trajectory] == group
    return [{"length": len(text), "turns": len(one)} for text, one in zip(group, trajectory)]

def turns(trajectory):
    return sum(one["role"] == "assistant" for one in trajectory)

def shout(completion, row, trajectory, scale=10):
    return scale * (completion == trajectory[-1]["content"].upper())

def too_few(group):
    return [1.0]

def one_number(group):
    return 1.0

def an_array(group):
    import numpy
    return numpy.arange(len(group))

def parts(completion, row):
    return {"even": len(completion) % 2 == 0, "long": 0.5 * (len(completion) > 2)}

def unknown(group, answer):
    return [0.0] * len(group)

def of_one(group, completion):
    return [0.0] * len(group)
"""


def test_a_function_gets_what_its_parameters_name():
    write("mine.py", FUNCTIONS)

    def of(name, *completions, **more):
        return scores(Python(f"mine.py:{name}", **INLINE), *completions, **more)

    assert [one.value for one in of("rank", "b", "c", "a", row={"more": 0.5})] == [1.5, 2.5, 0.5]
    assert of("both", "b", "cc") == [Score(3.0, {"length": 1.0, "turns": 2.0}), Score(4.0, {"length": 2.0, "turns": 2.0})]
    assert of("an_array", "b", "c") == [Score(0.0), Score(1.0)]
    assert [one.value for one in of("shout", "A", "b")] == [10.0, 0.0]
    assert of("parts", "ab", "abc") == [Score(1.0, {"even": 1.0, "long": 0.0}), Score(0.5, {"even": 0.0, "long": 0.5})]
    for name, message in (
        ("too_few", "the reward returned 1 values for a group of 2; return one per completion"),
        ("one_number", "the reward returned float for a group of 2; return a list of 2 numbers"),
    ):
        with pytest.raises(RolloutError, match=rf"^rows\.jsonl:7: {message}$"):
            of(name, "a", "b")


def test_workers_return_the_same_parts():
    write("mine.py", FUNCTIONS)
    found = [scores(Python("mine.py:both", **limits), "b", "cc", row={"x": 1}) for limits in (INLINE, {"workers": 1})]
    assert found[0] == found[1] and found[0][1].parts == {"length": 2.0, "turns": 2.0}


def test_a_trajectory_has_the_prompts_own_messages_and_all_turns():
    seen = []

    def reward(trajectory):
        seen.append(trajectory)
        return 0.0

    chat = Chat("here:1", (ChatMessage("system", "s"), ChatMessage("user", "u")))
    branch = (Segment("prompt", [1], "<s>s u"), Segment.sampled(SAMPLE, "one"), Segment("environment", [2], "hint"))
    scores(reward, attempts=[Trajectory(((*branch, Segment.sampled(SAMPLE, "two")),), "done")], example=chat)
    assert [(one["role"], one["content"]) for one in seen[0]] == [
        ("system", "s"), ("user", "u"), ("assistant", "one"), ("environment", "hint"), ("assistant", "two"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unknown",
            "the function has the parameter 'answer', which is neither an argument nor a column of the data; use group, ",
        ),
        ("of_one", "the function has the parameters 'group' and 'completion', which are for different calls; use one"),
    ],
)
def test_a_parameter_that_cookbook_does_not_know_is_an_error_at_the_start(name, message):
    write("mine.py", FUNCTIONS)
    with pytest.raises(ConfigError, match=f"reward: {message}"):
        RewardRunner(Python(f"mine.py:{name}")).check(["question"])


def test_functions_without_a_signature_get_completion_and_row_by_place():
    # The signature of a built-in function cannot be read.
    with pytest.raises(RolloutError, match="the reward raised TypeError"):
        scores(max, "ab")


def test_a_weighted_sum_logs_its_parts_before_their_weights():
    write("mine.py", FUNCTIONS)
    parts = {"number": Number(), "format": Format("#"), "python": Python("mine.py:parts", **INLINE)}
    found = scores(Weighted(parts, {"format": 0.5, "python": -1.0}), "#7", "7", row={"answer": 7})
    unweighted = {"number": 1.0, "format": 1.0, "python": 1.0, "python/even": 1.0, "python/long": 0.0}
    assert found[0] == Score(1.0 + 0.5 - 1.0, unweighted)
    assert found[1] == Score(1.0 + 0.0 - 0.0, {**unweighted, "format": 0.0, "python": 0.0, "python/even": 0.0})
    assert scores(Weighted(parts, [0.0, 1.0, 0.0]), "#8", row={"answer": 7})[0].value == 1.0


def test_errors_of_a_part_name_its_key():
    with pytest.raises(BadRowError) as error:
        scores(Weighted({"number": Number(column="x"), "format": Format()}), "1", row={"a": 1})
    said = 'rows.jsonl:7: reward: no column "x", the row has a; set reward.parts.number.column'
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ({}, None, r"reward\.parts: no reward given; write 'reward=\[number,format\]'"),
        ({"a b": Number()}, None, r"reward\.parts: invalid name 'a b'; use letters, digits"),
        ({"a": Number(), "b": Format()}, [1.0], r"reward\.weights: expected one weight for each of a, b, got \[1\.0\]"),
        ({"number": Number()}, {"numbr": 1.0}, r"reward\.weights: no reward is named 'numbr'\. Did you mean 'number'\?"),
        ({"a": Number()}, [float("inf")], r"reward\.weights: the weight of a must be finite, got inf"),
    ],
)
def test_weights_that_do_not_fit_the_parts(parts, weights, message):
    with pytest.raises(ConfigError, match=message):
        Weighted(parts, weights)


def test_fingerprints_of_sums_differ_by_weights_and_parts_and_not_by_workers():
    def fingerprint(weights=None, **number):
        with closing(RewardRunner(Weighted({"number": Number(**number), "format": Format()}, weights))) as runner:
            return runner.fingerprint()

    assert fingerprint() == fingerprint([1.0, 1.0]) == fingerprint({"format": 1.0}, workers=1)
    assert len({fingerprint(), fingerprint([1.0, 0.2]), fingerprint(column="x")}) == 3


def test_the_functions_of_the_page_do_what_it_says():
    page = (ROOT / "docs/guide/rewards.md").read_text(encoding="utf-8")
    mine: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, mine)
    found = scores(mine["reward"], "It is 42.", "9" * 200, row={"answer": "42"})
    assert [one.parts for one in found] == [{"correct": 1.0, "short": 0.2}, {"correct": 0.0, "short": 0.0}]
    assert [one.value for one in scores(mine["shortest"], "abc", "a", "b")] == [0.0, 1.0, 1.0]


# Runs

BOTH = [*SMALL["grpo"], "recipe.steps=1", "model=tiny"]


@pytest.mark.slow
def test_a_sum_with_one_weight_is_the_reward_itself_and_its_parts_are_metrics():
    """Weight 0 only logs: all other numbers are those of a run with the plain reward, bit for bit."""
    assert train(*BOTH, "out=plain") == 0
    odd = ["reward=[number,format]", "reward.weights.format=0", "reward.parts.format.pattern='[13579]$'"]
    assert train(*BOTH, "out=sum", *odd) == 0
    plain, summed = timeless("plain"), timeless("sum")
    added = {"reward/part/number", "reward/part/format", "eval/reward/part/number", "eval/reward/part/format"}
    for before, after in zip(plain, summed, strict=True):
        same = after.keys() - added - {"eval/crc32"}
        assert {name: after[name] for name in same} == {name: value for name, value in before.items() if name != "eval/crc32"}
    last = summed[-1]
    assert added <= last.keys() and last["reward/part/number"] == last["reward/mean"]
    assert last["eval/reward/part/number"] == last["eval/reward"]
    samples = rows("sum", "samples.jsonl")
    trained = [one for one in samples if one.get("split") != "eval"]
    assert all(one["parts"]["number"] == one["reward"] for one in samples) and len(trained) < len(samples)
    assert all(one["parts"]["format"] == float(one["completion"][-1:] in "13579") for one in samples)
    assert "parts" not in rows("plain", "samples.jsonl")[0]


@pytest.mark.slow
def test_a_function_of_the_group_trains_and_evaluates():
    write("mine.py", "def longest(group, row):\n    return [len(text) == max(map(len, group)) for text in group]\n")
    assert train(*BOTH, "out=run", "reward=python", "reward.target=mine.py:longest") == 0
    # Each group has a longest completion, and an evaluation's group is its greedy completion.
    assert all(row["reward/mean"] >= 0.25 for row in rows("run") if "reward/mean" in row)
    assert rows("run")[-1]["eval/reward"] == 1.0


@pytest.mark.slow
def test_a_run_resumes_with_other_workers_in_a_part_and_not_with_other_weights(capsys):
    words = [*BOTH, "reward=[number,format]", "out=run"]
    assert train(*words) == 0
    more = ["recipe.steps=2", "reward.parts.number.workers=1", "reward.parts.number.timeout_s=60"]
    assert train(*words, *more, "reward.weights.format=0.5") == 2
    assert "reward.weights.format: " in capsys.readouterr().err
    assert train(*words, *more) == 0
    assert rows("run")[-1]["step"] == 2


def composed(capsys, *words):
    code = run(["train", "recipe=grpo", *words, "--cfg", "job", "--package", "reward"])
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


@pytest.mark.slow
def test_rewards_are_combined_on_the_command_line(capsys):
    from omegaconf import OmegaConf

    def shown(*words):
        return OmegaConf.to_container(OmegaConf.create(composed(capsys, *words)))

    found = shown("reward.weights.format=0.2", "reward=[number,format]", "reward.parts.number.column=gold")
    assert found["_target_"] == "cookbook.sampling.rewards.Weighted" and found["weights"] == {"number": 1.0, "format": 0.2}
    assert list(found["parts"]) == ["number", "format"] and found["parts"]["number"]["column"] == "gold"
    assert shown("reward=[number,format]", "reward.weights=[2,0.5]")["weights"] == [2, 0.5]
    assert shown("reward=[number,format]", "reward.weights={number: 2}")["weights"] == {"number": 2, "format": 1.0}
    assert list(shown("reward=['number']")["parts"]) == ["number"]
    for file in ("./my rewards/own.py", "a,b/own.py", "x=y/own.py", "p (1)/own.py", "~/it's.py"):
        escaped = file.replace("'", "\\'")
        words = [f"reward=[number,'{escaped}:short']", "reward.weights.short=0.1", "reward.parts.short.workers=2"]
        found = shown(*words)
        assert found["weights"] == {"number": 1.0, "short": 0.1}
        assert found["parts"]["short"]["target"] == f"{file}:short" and found["parts"]["short"]["workers"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reward=[number,number]", "reward: number occurs twice; rename a function, or write ./conf/reward/NAME.yaml"),
        ("reward=[own.py:number,number]", "reward: number occurs twice; rename a function, or write ./conf/reward/NAME.yaml"),
        ("reward=[]", "reward: expected names of conf/reward or FILE.py:FUNCTION, got []; write, for example, 'reward=["),
        ("reward=[number,3]", "reward: expected names of conf/reward or FILE.py:FUNCTION, got [number, 3]; write"),
        ("reward=[number,own.py:]", "reward: expected names of conf/reward or FILE.py:FUNCTION, got [number, own.py:]; write"),
        ("reward=[own.py:1f]", "reward: expected names of conf/reward or FILE.py:FUNCTION, got [own.py:1f]; write"),
        ("reward=[number,fromat]", "unknown reward 'fromat'. Did you mean 'format'?"),
        ("reward=[number,format] reward.weights.frmat=1", "Did you mean 'reward.weights.format'?"),
        ("reward=[number,format] reward.parts.format.patern=1", "Did you mean 'reward.parts.format.pattern'?"),
    ],
)
def test_a_slip_in_a_list_of_rewards_is_one_line(capsys, words, message):
    error = composed(capsys, *words.split())
    assert message in error and error.count("\n") == 1


def test_a_sweep_over_lists_of_rewards_is_refused(capsys):
    assert train("recipe=grpo", "reward=[number],[format]", "-m") == 2
    assert "reward: a sweep over lists is not supported; write ./conf/reward/NAME.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_parts_are_in_the_file_of_an_evaluation(capsys):
    assert run(["eval", "tiny", "reward=[number,format]", "eval.limit=2", "out=found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert [set(one["parts"]) for one in found["completions"]] == [{"number", "format"}] * 2
    assert found["metrics"]["eval/reward/part/number"] == np.mean([one["parts"]["number"] for one in found["completions"]])
