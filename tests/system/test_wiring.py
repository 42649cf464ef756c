"""Values that a run passes to its parts: learning rates, seeds and weights of the right step, recomputed by hand."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import tiny
import torch
from runtools import SMALL, checkpoint, here, rows, train, write  # noqa: F401 - here is a fixture
from waiting import until

from cookbook.backends.local import LocalTrainer
from cookbook.checkpoints import manifest
from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.datum_table import Batches
from cookbook.futures import done
from cookbook.losses import CrossEntropy
from cookbook.losses.pairs import reward_metrics
from cookbook.sampling import rollouts
from cookbook.sampling.evaluation import EvalConfig, Evaluator
from cookbook.sampling.rewards import RewardRunner
from cookbook.sampling.rollouts import RolloutConfig, RolloutGroup
from cookbook.sampling.trajectory import Trajectory
from cookbook.types import AdamParams, Sample, SampleResponse

pytestmark = pytest.mark.usefixtures("here")


def test_every_step_has_its_own_learning_rate(monkeypatch):
    """Warm-up over four steps: a quarter, a half, three quarters, all of it, from the first update on."""
    real, given = LocalTrainer.optim_step, []

    def recording(trainer, adam_params, *args):
        given.append(adam_params.learning_rate)
        return real(trainer, adam_params, *args)

    monkeypatch.setattr(LocalTrainer, "optim_step", recording)
    words = ["recipe.steps=5", "optim.lr=1e-3", "schedule=constant", "schedule.warmup_steps=4"]
    assert train(*SMALL["sft"], *words, "out=run") == 0
    expected = [1e-3 * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)]
    assert given == pytest.approx(expected, rel=1e-15)
    assert [row["optim/lr"] for row in rows("run") if row["step"]] == pytest.approx(expected, rel=1e-15)


def test_an_update_uses_the_learning_rate_it_was_given(make_trainer):
    """Adam's first step moves every weight by the learning rate, for any gradient; a later one by the later rate."""
    trainer = make_trainer()
    moved = []
    for lr in (1e-3, 0.0, 5e-4):
        before = {name: one.detach().clone() for name, one in trainer.engine.model.trainable()}
        trainer.forward_backward(tiny.datums(), "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=lr, beta1=0.0, beta2=0.0, eps=1e-30)).result()
        steps = [(one.detach() - before[name]).abs() for name, one in trainer.engine.model.trainable()]
        moved.append(max(float(one.max()) for one in steps))
    # Without moments the step is lr times the gradient's sign; weights near 1 are rounded to 6e-8.
    assert moved == pytest.approx([1e-3, 0.0, 5e-4], abs=2e-7)


def test_every_step_samples_with_its_own_seed():
    """Same weights, same prompts: equal samples would repeat the same lesson in every step."""
    write("zero.py", "def zero(completion, row):\n    return 0.0 if len(completion) % 2 else 1e-9\n")
    words = ["recipe.steps=3", "recipe.prompts_per_step=4", "data.limit=4", "data.shuffle=false", "optim.lr=1e-30"]
    words += ["model.random=true", "rollout.log_samples=16", "eval.every=null"]
    assert train(*SMALL["grpo"], *words, "reward=python", "reward.target=zero.py:zero", "out=run") == 0
    drawn = {}
    for row in rows("run", "samples.jsonl"):
        if row.get("split") != "eval":
            drawn.setdefault(row["step"], []).append((row["prompt"], row["completion"]))
    assert sorted(drawn) == [1, 2, 3]
    assert [prompt for prompt, _ in drawn[1]] == [prompt for prompt, _ in drawn[2]] == [prompt for prompt, _ in drawn[3]]
    completions = [[completion for _, completion in drawn[step]] for step in (1, 2, 3)]
    assert completions[0] != completions[1] != completions[2] != completions[0]
    # Nor do the prompts of a step share draws: from nearly uniform fresh weights two of 16 would hardly ever be the same.
    assert len(set(completions[0])) == len(completions[0])


def test_every_pass_of_every_step_drops_by_a_mask_of_its_own(make_engine):
    """Same weights and data at every pass, so that only the masks make a difference; the same ones when a run is repeated."""

    def gradients():
        engine = make_engine(lora_rank=4, lora_dropout=0.5)
        found = []
        for _ in range(2):
            before = 0.0
            for _ in range(2):
                engine.forward_backward(tiny.datums(), CrossEntropy())
                total = torch.cat([one.grad.flatten() for _, one in engine.model.trainable()])
                found.append(total - before)
                before = total
            engine.optim_step(AdamParams(learning_rate=0.0), None)
        return found

    first, again = gradients(), gradients()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for place, one in enumerate(first):
        # Half of what goes into the adapter is dropped: gradients of two masks differ by more than their own size.
        assert all((one - other).norm() > 0.3 * one.norm() for other in first[:place])


def test_metrics_of_rollouts_are_what_they_are_called():
    """One of four completions was cut off; lengths 1, 2, 3 and 6."""

    def attempt(length, reason):
        return Trajectory.single([1], "", Sample([5] * length, [-1.0] * length, reason, 0), "")

    prompt = RenderedPrompt([1], Row("here:1", {}), "", "")
    groups = [
        RolloutGroup(prompt, [attempt(1, "stop"), attempt(2, "stop")], [0.0, 1.0]),
        RolloutGroup(prompt, [attempt(3, "stop"), attempt(6, "length")], [1.0, 1.0]),
    ]
    found = rollouts.metrics(groups)
    assert found["rollout/truncated_frac"] == 0.25
    assert found["rollout/completion_tokens_mean"] == 3.0
    assert found["rollout/completion_tokens_max"] == 6.0
    assert found["rollout/tokens"] == 12.0
    assert found["reward/mean"] == 0.75
    assert found["reward/frac_groups_without_spread"] == 0.5
    assert found["reward/group_std"] == pytest.approx(0.5**0.5 / 2)  # divisor G - 1; the second group has none
    assert found["reward/std"] == pytest.approx(0.1875**0.5)


def test_a_rollout_becomes_a_datum_of_the_completion_alone():
    """A prompt of three tokens: its weights are 0, and a better completion than the group's is pushed up."""
    sample = Sample([8, 9], [-0.5, -0.25], "stop", 0)
    [found] = Trajectory.single([5, 6, 7], "", sample, "").datums(2.0)
    assert found.model_input.to_ints() == [5, 6, 7, 8]
    values = {name: one.tolist() for name, one in found.loss_fn_inputs.items()}
    assert values == {
        "target_tokens": [6, 7, 8, 9],
        "weights": [0, 0, 1, 1],
        "advantages": [0, 0, 2, 2],
        "sampling_logprobs": [0, 0, -0.5, -0.25],
    }


class _Sampler:
    """Answers with completions known beforehand, and records what was asked."""

    def __init__(self, *answers, step=0):
        self.answers, self.step, self.params = list(answers), step, []

    def sample(self, prompt, num_samples, params):
        self.params.append(params)
        return done(SampleResponse([Sample([token], [-1.0], "stop", self.step) for token in self.answers[prompt.to_ints()[0]]]))


def test_a_reward_stays_with_its_completion():
    """The reward of a completion is its token's number."""
    renderer = Renderer(tiny.tokenizer())
    texts = {renderer.text([token]): float(token) for token in (40, 41, 42, 43)}
    judge = RewardRunner(lambda completion, row: texts[completion])
    prompts = [RenderedPrompt([place], Row(f"here:{place}", {}), "", "") for place in (0, 1)]
    sampler = _Sampler([40, 41], [43, 42])
    found = rollouts.sample_groups(sampler, prompts, 2, RolloutConfig(), renderer, seed=0, runner=judge).groups
    assert [group.rewards for group in found] == [[40.0, 41.0], [43.0, 42.0]]


def test_an_evaluation_counts_a_whole_reward_and_draws_each_prompt_by_a_seed_of_its_own():
    renderer = Renderer(tiny.tokenizer())
    config = EvalConfig(pass_at=[1])
    rewards = iter([1.0, 0.5, 1.0, 0.0])
    judge = RewardRunner(lambda completion, row: next(rewards))
    evaluator = Evaluator(config, renderer, RolloutConfig().retrier(), judge, (), seed=0)
    prompts = [RenderedPrompt([place], Row(f"here:{place}", {}), "", "") for place in (0, 1)]
    sampler = _Sampler([40], [41])
    metrics = evaluator.rewards(sampler, prompts).metrics
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/reward"] == 0.75 and metrics["eval/pass@1"] == 0.5
    greedy, drawn = sampler.params[:2], sampler.params[2:]
    assert [params.temperature for params in greedy] == [0.0, 0.0]
    assert drawn[0].seed != drawn[1].seed


@pytest.mark.parametrize(("recipe", "method"), [("sft", "answers"), ("grpo", "rewards")])
def test_an_evaluation_samples_from_the_newest_weights(recipe, method, monkeypatch):
    """Also between two weight syncs, when the rollouts come from older weights."""
    real, seen = getattr(Evaluator, method), []

    def recording(evaluator, sampler, asked):
        seen.append(sampler.step)
        return real(evaluator, sampler, asked)

    monkeypatch.setattr(Evaluator, method, recording)
    assert train(*SMALL[recipe], "recipe.steps=2", "weight_sync.every=5", "eval.every=1", "eval.limit=2", "out=run") == 0
    assert seen == [0, 1, 2]


def test_effects_of_a_step_come_in_order():
    """The file has the row before trackers get it; hooks come after both, and see the step as done; then it is saved."""
    write("noting.py", NOTING)
    words = ["+hook.mine._target_=noting.Noting", "+tracker.mine._target_=noting.Noting", "eval.every=null"]
    words += ["eval.limit=1", "checkpoint.every=1"]
    assert train(*SMALL["sft"], *words, "recipe.steps=2", "out=run") == 0
    assert Path("order.txt").read_text().split() == (
        ["start:0", "log:0:0", "log:1:1", "step:1:1:1", "saved:1:1", "log:2:2", "step:2:2:2", "saved:2:2"]
    )
    # A resumed run tells its trackers and its progress where it stands.
    tokens = manifest.read(checkpoint("run", 2))["run"]["progress"]["tokens"]
    assert train(*SMALL["sft"], *words, "recipe.steps=3", "out=run") == 0
    assert Path("order.txt").read_text().split()[8:] == ["start:2", "log:3:3", "step:3:3:3", "saved:3:3"]
    per_step = [manifest.read(checkpoint("run", step))["run"]["progress"]["tokens"] for step in (1, 2, 3)]
    assert per_step[1] == tokens and per_step[0] < per_step[1] / 1.5 < per_step[2] / 2


NOTING = """
import json
from pathlib import Path
from cookbook import Hook


def note(*words):
    with open("order.txt", "a") as file:
        file.write(":".join(map(str, words)) + "\\n")


def newest():
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"]


class Noting(Hook):
    def start(self, config, out, name, step):
        note("start", step)

    def log(self, step, metrics):
        note("log", step, newest())

    def end(self, state):
        pass

    def on_step(self, run, step, metrics):
        note("step", step, run.done, newest())

    def on_checkpoint(self, run, checkpoint):
        note("saved", checkpoint.step, int((Path(checkpoint.path) / "checkpoint.json").is_file()) and run.done)
"""


def test_a_tie_counts_as_half():
    """A win, a loss, two equal rewards, and two that differ by less than rounding noise."""
    chosen, rejected = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 1.01]), torch.tensor([1.0, 5.0, 1.0, 3.0, 1.01, 1.0])
    found = reward_metrics(chosen, rejected, torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5, 0.001]))
    assert found["rewards/accuracy"] == pytest.approx((1 + 0 + 0.5 + 0.5 + 0.5 + 1) / 6)


def test_every_epoch_has_an_order_of_its_own():
    """Every row once an epoch; the order changes with the epoch and with the seed, and a resumed run finds the same one."""
    epochs = [[row for place in range(2) for row in Batches(range(8), 4, 3, seed=0)[2 * epoch + place]] for epoch in range(3)]
    assert all(sorted(one) == list(range(8)) for one in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other, again = Batches(range(8), 4, 3, seed=1), Batches(range(8), 4, 3, seed=0)
    assert other[0] + other[1] != epochs[0]
    assert again[4] + again[5] == epochs[2]


def test_an_update_divides_as_its_loss_asks(monkeypatch):
    """A loss that is a sum over tokens is divided by them, in the gradient and in the row that shows the loss."""
    real, given = LocalTrainer.optim_step, []

    def recording(trainer, adam_params, normalization=None):
        given.append(normalization)
        return real(trainer, adam_params, normalization)

    monkeypatch.setattr(LocalTrainer, "optim_step", recording)
    write("coin.py", "def even(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = ["reward=python", "reward.target=coin.py:even", "recipe.steps=1", "eval.every=null", "eval.limit=1", "loss=ppo"]
    words += ["rollout.log_samples=24"]
    assert train(*SMALL["grpo"], *words, "out=run") == 0
    assert given == ["num_loss_tokens"]
    row = rows("run")[-1]
    assert row["optim/divisor"] == row["optim/num_loss_tokens"] > 1
    # Ratios of the first step are 1: the loss is the mean of -advantage over the tokens, at most the largest advantage.
    assert abs(row["loss"]) < 2
    assert [one["step"] for one in rows("run", "samples.jsonl") if one.get("split") != "eval"] == [1] * 24


def test_the_lag_of_samples_is_told_in_optimizer_steps():
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    words = ["reward=python", "reward.target=dice.py:odd", "recipe.steps=5", "weight_sync.every=3"]
    assert train(*SMALL["grpo"], *words, "out=run") == 0
    assert [row["sync/version_lag"] for row in rows("run") if row["step"]] == [0, 1, 2, 0, 1]


# ---- what must not be deleted ----------------------------------------------------------------------------------------


def test_weights_on_the_server_stay_while_a_sampler_holds_them(tiny_folder, tmp_path):
    """Hosted servers keep only saved checkpoints, so deleting one would end its sampler."""
    pytest.importorskip("tinker")
    import servertools

    from cookbook.backends.remote.config import RemoteConfig
    from cookbook.engine.model import ModelConfig
    from cookbook.errors import CheckpointError
    from cookbook.server.state.catalog import Address

    with servertools.running(tiny_folder, tmp_path / "server") as server:
        config = RemoteConfig(server.url, patience_s=30.0)
        trainer = config.make_trainer(ModelConfig(str(tiny_folder), lora_rank=2), seed=0, folder=tmp_path / "checkpoints")
        try:
            sampler = trainer.lagging_sampler(0).result()
            (saved,) = trainer._garbage._samplers
            trainer.save_state("one").result()
            server.service.catalog.find(Address.parse(saved))  # raises if it is gone
            del sampler
            gc.collect()
            trainer.save_state("two").result()
            with pytest.raises(CheckpointError):
                server.service.catalog.find(Address.parse(saved))
        finally:
            trainer.close()


def test_a_published_sampler_outlives_the_states_saved_after_it(tiny_folder, tmp_path):
    """The sampler keeps the weights of its time; the state that a restart loads has newer ones."""
    pytest.importorskip("tinker")
    import servertools
    from sessions import Client, passing, stepping

    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"], checkpoint_s=1e-9) as server:
        client = Client(server)
        run = client.run()
        asked = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
        published = json.loads(client.result("save_weights_for_sampler", asked))["sampling_session_id"]
        for number in (2, 4, 6):
            client.result("forward_backward", passing(run, number, number))
            client.result("optim_step", stepping(run, number + 1))
        until(lambda: (server.service.snapshots[run].newest or 0) > 2)
        drawn = client.sample(published, 0, seed=3)
        newest = {"model_id": run, "seq_id": 8, "sampling_session_seq_id": 1}
        current = json.loads(client.result("save_weights_for_sampler", newest))["sampling_session_id"]
        assert client.sample(current, 0, seed=3) != drawn
    with servertools.running(tiny_folder, tmp_path / "out", names=["tiny"]) as server:
        assert Client(server, client.session).sample(published, 1, seed=3) == drawn


def test_every_mutant_still_fits_the_code():
    """``python tools/mutants.py`` runs them, which takes minutes; here only that it could."""
    import mutants

    for name, old, new, tests in mutants.MUTANTS:
        assert (mutants.ROOT / "cookbook" / name).read_text().count(old) == 1, (name, old)
        assert old != new
        assert all((mutants.ROOT / test).is_file() for test in tests.split())
