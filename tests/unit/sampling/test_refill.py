"""Groups without spread are replaced, prompts are drawn by pass rate, and both resume exactly."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import tiny
from omegaconf import OmegaConf
from runtools import SMALL, bits, checkpoint, here, rows, stop_at, timeless, train, write  # noqa: F401 - here is a fixture

from cookbook.cli.app import run
from cookbook.cli.hydra import bridge
from cookbook.data import Curriculum, DataConfig, RenderedPrompt, Renderer, Row
from cookbook.data.datum_table import Batches
from cookbook.errors import ConfigError, RolloutError, SampleRefusedError
from cookbook.futures import done
from cookbook.sampling import rollouts
from cookbook.sampling.prompt_queue import PromptQueue
from cookbook.sampling.rewards import Python, RewardRunner
from cookbook.sampling.rollouts import RolloutConfig, RolloutGroup
from cookbook.types import Sample, SampleResponse

pytestmark = pytest.mark.usefixtures("here")

PROMPTS = [RenderedPrompt([10 + index], Row(f"here:{index}", {"index": index}), "", "") for index in range(40)]
DICE = "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n"
IN_PROCESS = ["reward=python", "reward.workers=0", "reward.timeout_s=null"]
DICED = [*SMALL["grpo"], *IN_PROCESS, "reward.target=dice.py:odd", "recipe.prompts_per_step=4", "recipe.group_size=2"]


class Sampler:
    """Notes the seeds; the completions of a prompt in ``spread`` differ, and a prompt in ``refused`` is refused."""

    step = 0

    def __init__(self, spread, refused=()):
        self.spread, self.refused, self.seeds = spread, refused, []

    def sample(self, prompt, num_samples, params):
        index = prompt.to_ints()[0] - 10
        if index in self.refused:
            raise SampleRefusedError("too long")
        self.seeds.append(params.seed)
        texts = [[20 + number % 2 if index in self.spread else 20] for number in range(num_samples)]
        return done(SampleResponse([Sample(one, [-0.5], "stop") for one in texts]))


def refilled(spread, refill, refused=(), count=4):
    """Sample steps of four prompts; return what was sampled, and how many further prompts each round took."""
    write("letters.py", "def first(completion, row):\n    return float(ord(completion[0]))\n")
    rest, taken = iter(PROMPTS[count:]), []

    def further(number):
        taken.append(number)
        return [next(rest) for _ in range(number)]

    sampler, judge = Sampler(spread, refused), RewardRunner(Python("letters.py:first", workers=0, timeout_s=None))
    renderer, config = Renderer(tiny.tokenizer(), tiny.CONTEXT), RolloutConfig(max_tokens=4, refill=refill)
    found = rollouts.sample_groups(sampler, PROMPTS[:count], 2, config, renderer, 7, runner=judge, further=further)
    return found, taken, sampler


def test_groups_without_spread_are_replaced_until_there_are_enough():
    found, taken, sampler = refilled({0, 5, 6, 7, 8}, 3.0)
    # Of the first four one has spread; of the next three two; of the next one, one.
    assert taken == [3, 1]
    assert [group.prompt.row.where for group in found.groups] == [f"here:{index}" for index in range(8)]
    metrics = found.metrics()
    assert [metrics[f"refill/{name}"] for name in ("groups", "groups_dropped", "rounds")] == [8.0, 4.0, 2.0]
    assert metrics["reward/frac_groups_without_spread"] == 0.5 and metrics["rollout/tokens"] == 16.0
    # Every prompt has the seed of its place in the step, as without refill.
    assert sampler.seeds == [7 * 100_003 + index for index in range(8)]
    advantages = [[1.0, -1.0] if index in (0, 5, 6, 7) else [0.0, 0.0] for index in range(8)]
    assert len(rollouts.datums(found.groups, advantages)) == 8


@pytest.mark.parametrize(("refill", "expected"), [(1.0, []), (1.5, [2]), (2.0, [4]), (3.3, [4, 4, 1])])
def test_refill_is_bounded(refill, expected):
    found, taken, _ = refilled((), refill)
    assert taken == expected and len(found.groups) == int(4 * refill)
    assert found.metrics()["refill/groups_dropped"] == len(found.groups)


def test_prompts_that_cannot_be_sampled_are_replaced_too():
    """A round in which every request fails ends no run that has other groups."""
    found, taken, _ = refilled(set(range(40)) - {1}, 3.0, refused={2, 4, 5})
    assert taken == [2, 2] and len(found.groups) == 5 and sorted(found.requests.failed) == [2, 4, 5]
    assert found.metrics()["rollout/failed"] == 3.0
    with pytest.raises(RolloutError, match="all 4 requests were refused"):
        refilled(set(range(40)), 3.0, refused=range(4))


@pytest.mark.parametrize("value", [0.5, -1.0, float("inf"), float("nan")])
def test_a_factor_below_one_is_refused(value):
    with pytest.raises(ConfigError, match=f"rollout.refill must be a number >= 1, got {value}"):
        RolloutConfig(refill=value)


@pytest.mark.slow
def test_a_run_fills_its_steps_and_resumes_bit_for_bit():
    """Every number and weight is that of the undisturbed run, with the prompts beyond each step consumed."""
    write("dice.py", DICE)
    words = [*DICED, "rollout.refill=4", "data.curriculum={}", "recipe.steps=4", "optim.lr=1e-3", "weight_sync.every=3"]
    assert train(*words, "out=straight") == 0
    assert train(*words, "out=stopped", *stop_at(2)) == 130
    assert train(*words, "out=stopped") == 0
    assert timeless("stopped") == timeless("straight")
    assert bits(checkpoint("stopped")) == bits(checkpoint("straight"))
    assert Path("stopped/samples.jsonl").read_bytes() == Path("straight/samples.jsonl").read_bytes()
    steps = rows("straight")[1:]
    assert any(row["refill/groups"] > 4 for row in steps)
    for row in steps:
        kept = row["refill/groups"] - row["refill/groups_dropped"]
        assert row["optim/num_sequences"] == 2 * kept and (kept == 4 or row["refill/groups"] == 16)
        assert sum(row[f"curriculum/{name}"] for name in ("new", "easy", "medium", "hard", "retired")) == 24


@pytest.mark.slow
def test_without_any_spread_a_run_ends_with_one_warning():
    write("same.py", "def same(completion, row):\n    return row['answer'] > '4'\n")
    words = [*SMALL["grpo"], "recipe.steps=4", *IN_PROCESS, "reward.target=same.py:same", "rollout.refill=1.5"]
    assert train(*words, "out=run") == 2
    assert [row["refill/groups"] for row in rows("run")[1:]] == [9.0] * 4
    (line,) = [line for line in Path("run/log.txt").read_text().splitlines() if " WARNING " in line and "tied" in line]
    assert "though rollout.refill sampled 9 groups in this one, so these steps taught nothing; raise recipe.group_size" in line


@pytest.mark.slow
def test_a_recipe_without_a_queue_is_refused(capsys):
    assert run(["fork", "grpo", "mine"]) == 0
    code = Path("recipes/mine.py").read_text()
    Path("recipes/mine.py").write_text(code.replace("run.prompt_batches(", "run.batches("))
    words = ["recipe=mine", *SMALL["grpo"][1:]]
    for key in ("rollout.refill=2", "data.curriculum={}"):
        capsys.readouterr()
        assert train(*words, key) == 2
        error = capsys.readouterr().err
        assert f"error: {key.partition('=')[0]}: the recipe mine has no queue of prompts; call run.prompt_batches" in error
    assert train(*words, "recipe.steps=1") == 0


# The queue


def queue(curriculum=None, count=10, size=4, seed=3):
    return PromptQueue(PROMPTS[:count], size, seed, DataConfig(curriculum=curriculum))


def graded(prompts, rate):
    """Groups of four in which each prompt has the pass rate that ``rate`` gives for its index."""
    rates = [rate(prompt.row.values["index"]) for prompt in prompts]
    return [
        RolloutGroup(prompt, [], [1.0] * round(4 * share) + [0.0] * round(4 - 4 * share))
        for prompt, share in zip(prompts, rates, strict=True)
    ]


def places(prompts):
    return [prompt.row.where for prompt in prompts]


def test_without_a_curriculum_the_order_is_that_of_the_data():
    taken, own = queue(), Batches(PROMPTS[:10], 10, 3, 3)
    found = places([*taken[0], *taken.further(3), *taken[1], *taken.further(1), *taken[2], *taken[3]])
    assert found == places([*own[0], *own[1]])
    assert taken[3] is taken[3]


def test_a_checkpoint_has_the_state_after_the_last_finished_step():
    first = queue()
    _ = [*first[0], *first.further(2)]
    first.finish_step()
    # A step that is not finished is repeated.
    lost = places([*first[1], *first.further(1)])
    second = queue()
    second.restore(first.state(), 1)
    assert places([*second[1], *second.further(1)]) == lost
    # A checkpoint of a run without a queue has no state.
    third = queue()
    third.restore(None, 1)
    assert places(third[1]) == places(queue().further(8)[4:])


def test_shares_of_the_classes():
    """Of 4,000 draws the shares of the classes differ from the configured ones by less than 4 standard deviations."""
    rates = [0.0, 0.5, 1.0]
    drawn = queue(Curriculum(new=0.0, easy=0.2, medium=0.7, hard=0.1, retire_after=None), count=40, size=40)
    drawn.observe(graded(drawn[0], lambda index: rates[index % 3]))
    assert drawn.metrics() == {
        "curriculum/new": 0, "curriculum/easy": 13, "curriculum/medium": 13, "curriculum/hard": 14, "curriculum/retired": 0,
    }  # fmt: skip
    counts: Counter[int] = Counter()
    for _ in range(1000):
        # A step of four draws, of which each finds prompts of every class.
        batch = drawn.further(4)
        drawn._step_start = drawn._taken
        counts.update(prompt.row.values["index"] % 3 for prompt in batch)
    assert sum(counts.values()) == 4000
    for kind, share in enumerate((0.1, 0.7, 0.2)):
        assert abs(counts[kind] - 4000 * share) < 4 * (4000 * share * (1 - share)) ** 0.5


def test_prompts_that_are_always_solved_are_retired_and_return_if_no_other_is_left(caplog):
    drawn = queue(Curriculum(retire_after=2), count=6, size=3)
    for step in range(4):
        drawn.observe(graded(drawn[step], lambda index: 1.0))
    assert drawn.metrics()["curriculum/retired"] == 6.0
    with caplog.at_level(logging.WARNING, "cookbook"):
        batches = [drawn[step] for step in range(4, 8)]
    assert [len(set(places(batch))) for batch in batches] == [3] * 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("data.curriculum: every attempt at all 6 prompts is solved")


def test_a_prompt_without_a_group_has_the_class_of_its_level():
    """Of three levels in equal parts, the medium one gets nearly all draws once its first groups are known."""
    prompts = [RenderedPrompt([1], Row(f"here:{index}", {"index": index, "level": index % 3}), "", "") for index in range(300)]
    config = DataConfig(curriculum=Curriculum(easy=0.05, medium=0.9, hard=0.05, by="level"))
    drawn, rates = PromptQueue(prompts, 20, 3, config), [0.0, 0.5, 1.0]
    for step in range(5):
        batch = drawn[step]
        drawn.observe(graded(batch, lambda index: rates[index % 3]))
        drawn.finish_step()
        levels = Counter(prompt.row.values["level"] for prompt in batch)
        assert levels[1] < 15 if step == 0 else levels[1] >= 15
    assert len(set(places([*drawn[4], *batch]))) == 20 and drawn.metrics()["curriculum/new"] == 0
    again = PromptQueue(prompts, 20, 3, config)
    again.restore(drawn.state(), 5)
    assert places(again[5]) == places(drawn[5])
    # A level follows its recent groups, and not its first.
    for step in range(5, 9):
        drawn.observe(graded(drawn[step], lambda index: 0.0))
    assert drawn.metrics()["curriculum/hard"] >= 250
    with pytest.raises(
        ConfigError, match=r"data\.curriculum\.by: expected a column of the data, got 'kind'; here:0 has index, level"
    ):
        PromptQueue(prompts, 20, 3, DataConfig(curriculum=Curriculum(by="kind")))


def test_a_step_draws_no_prompt_twice_unless_there_are_too_few():
    drawn = queue(Curriculum(), count=8, size=3)
    for step in range(6):
        places_of_step = places([*drawn[step], *drawn.further(5)])
        assert sorted(places_of_step) == sorted(places(PROMPTS[:8]))
        drawn.observe(graded(drawn[step], lambda index: index / 10))
    assert len(places([*drawn[7], *drawn.further(9)])) == 12


def test_the_pass_rates_resume_exactly():
    first, second = queue(Curriculum(), count=40, size=5), queue(Curriculum(), count=40, size=5)
    for step in range(6):
        first.observe(graded(first[step], lambda index: index / 40))
        first.finish_step()
    second.restore(first.state(), 6)
    assert second.metrics() == first.metrics()
    for step in range(6, 12):
        assert places([*second[step], *second.further(step)]) == places([*first[step], *first.further(step)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new": -0.1}, "data.curriculum.new must be a share of at least 0, got -0.1"),
        ({"new": 0, "easy": 0, "medium": 0, "hard": 0}, "all shares are 0"),
        ({"hard_below": 0.95}, "expected 0 <= hard_below <= easy_above <= 1"),
        ({"retire_after": 0}, "retire_after must be at least 1, or null, got 0"),
    ],
)
def test_a_curriculum_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Curriculum(**options)


def test_shares_are_typed_on_the_command_line(capsys):
    """The key is null by default, so that Hydra alone would know no key below it."""
    shown = bridge.show(bridge.ComposeRequest(["recipe=grpo", "data.curriculum={medium: 0.9, hard: 0.1}"]), "job", resolve=True)
    assert OmegaConf.create(shown).data.curriculum == {"medium": 0.9, "hard": 0.1}
    assert train(*SMALL["grpo"], "data.curriculum={medum: 0.9}") == 2
    assert "unknown key 'data.curriculum.medum'. Did you mean 'medium'?" in capsys.readouterr().err


def test_a_recipe_without_rollouts_has_no_curriculum(capsys):
    assert train(*SMALL["sft"], "data.curriculum={}") == 2
    assert "error: data.curriculum: recipe=sft samples no prompts, so that they have no pass rate" in capsys.readouterr().err
