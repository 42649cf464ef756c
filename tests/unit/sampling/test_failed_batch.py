"""A loss or gradient that is NaN or infinite stops the run before the update, and leaves its batch to look at."""

import json
from pathlib import Path

import pytest
import torch
from marks import rest_slow
from runtools import SMALL, checkpoint, here, rows, train, write  # noqa: F401 - here is a fixture
from safetensors.torch import load_file

from cookbook.cli.app import run
from cookbook.data import RowDatum
from cookbook.engine import loss_gradient
from cookbook.errors import BackendError, NonFiniteError
from cookbook.futures import Future
from cookbook.losses import CrossEntropy
from cookbook.run.diagnostics import TrackedCall, TrackedCalls

pytestmark = pytest.mark.usefixtures("here")

# A loss that differs from its parent in its second gradient only.
LOSS = """
import torch
from cookbook.losses import {parent}


class Breaking({parent}):
    name = "breaking"
    calls = 0

    def __call__(self, data, logprobs):
        value, metrics = super().__call__(data, logprobs)
        if torch.is_grad_enabled():
            type(self).calls += 1
            if type(self).calls == 2:
                value = value + {more}
        return value, metrics
"""
RECIPES = ["sft", "grpo", "dpo", "orpo"]
PARENTS = {"sft": "CrossEntropy", "dpo": "DPO", "orpo": "ORPO", "grpo": "GRPO"}


def breaking(recipe: str, more: str) -> list[str]:
    """The words of a run whose second step's loss has ``more`` in it."""
    write("breaks.py", LOSS.format(parent=PARENTS[recipe], more=more))
    write("dice.py", "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n")
    rewarded = ["reward=python", "reward.target=dice.py:odd"] if recipe == "grpo" else []
    return [*SMALL[recipe], "model=tiny", "eval.every=null", "checkpoint.every=1", *rewarded, "loss._target_=breaks.Breaking"]


@pytest.mark.parametrize("recipe", rest_slow(RECIPES))
def test_the_batch_of_a_loss_that_is_nan_is_kept(recipe, capsys):
    assert train(*breaking(recipe, "logprobs[3].sum() * float('nan')"), "out=run") == 2
    error = capsys.readouterr().err
    batch = rows("run", "failed_batch/step-000002.jsonl")
    place = batch[3]["row"]
    assert error == (
        "error: step 2: loss breaking: returned nan for datum 3; check the logprobs and loss inputs of these datums "
        f"({place}; the batch is in run/failed_batch/step-000002.jsonl)\n"
    )
    assert json.loads(Path("run/status.json").read_text())["error"] == error.removeprefix("error: ").rstrip("\n")
    assert [row["datum"] for row in batch if row["blamed"]] == [3]
    assert [row["step"] for row in rows("run")] == [0, 1] and checkpoint("run").name == "step-000001"
    name, _, number = place.rpartition(":")
    asked = json.loads(Path(name).read_text().splitlines()[int(number) - 1])
    prompt = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
    for row in batch:
        length = len(row["tokens"])
        assert {len(row[key]) for key in ("target_tokens", "weights", "logprobs")} == {length}
        if recipe == "grpo":
            assert len(row["advantages"]) == len(row["sampling_logprobs"]) == length
        if recipe in ("dpo", "grpo"):
            assert len(row["reference_logprobs"]) == length
    assert prompt in batch[3]["text"]
    if recipe == "grpo":
        check_logprobs(batch)


def check_logprobs(batch):
    """They are those before the update: the samples come from these very weights, so sampler and trainer agree."""
    for row in batch:
        columns = zip(row["logprobs"], row["sampling_logprobs"], row["weights"], strict=True)
        pairs = [pair for *pair, weight in columns if weight]
        assert pairs and all(now == pytest.approx(then, abs=1e-4) for now, then in pairs)  # float32, through a cache or not


@pytest.mark.slow
def test_a_gradient_that_overflows_names_all_rows(capsys):
    """The loss and its slope of 3e38 are finite; the gradient that the network computes from them is not."""
    words = breaking("sft", "(logprobs[1] - logprobs[1].detach()).sum() * 3e38")
    assert train(*words, "out=run") == 2
    batch = rows("run", "failed_batch/step-000002.jsonl")
    shown = ", ".join(row["row"] for row in batch[:4])
    assert capsys.readouterr().err == (
        "error: step 2: optim_step: the gradient norm is nan after 1 step; lower optim.lr, or inspect the batch "
        f"(6 datums of {shown}, ...; the batch is in run/failed_batch/step-000002.jsonl)\n"
    )
    assert len(batch) == 6 and not any(row["blamed"] for row in batch)
    weights = load_file(checkpoint("run") / "model.safetensors")
    assert checkpoint("run").name == "step-000001" and all(torch.isfinite(one).all() for one in weights.values())


def test_micro_batches_that_are_finite_one_by_one(make_engine, monkeypatch):
    """Every micro-batch is finite, but their sum is not."""
    import tiny

    engine = make_engine()
    monkeypatch.setattr(type(engine), "_forward_backward", lambda *_: engine.forward(tiny.datums(), infinite))

    def infinite(data, logprobs):
        return torch.tensor(float("inf")), {}

    with pytest.raises(NonFiniteError, match="the loss of the whole batch is inf"):
        engine.forward_backward(tiny.datums(), CrossEntropy())


@pytest.mark.slow
def test_what_a_loss_refuses_is_kept_too(capsys):
    """An infinite advantage: the engine does not even call the loss."""
    assert run(["fork", "grpo", "mine"]) == 0
    code = Path("recipes/mine.py").read_text()
    data = "run.split(rollouts.datums(groups, advantages), cfg.updates)\n"
    assert data in code
    infinite = "advantages = [[float('inf') if step.index else 1.0] * len(row) for row in advantages]\n            "
    Path("recipes/mine.py").write_text(code.replace(data, infinite + data))
    assert train("recipe=mine", *SMALL["grpo"][1:], "eval.every=null", "out=run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: step 2: datum 0: advantages holds ") and error.endswith("step-000002.jsonl)")
    batch = rows("run", "failed_batch/step-000002.jsonl")
    assert batch[0]["blamed"] and {"inf", "nan"} & {str(value) for value in batch[0]["advantages"]}


@pytest.mark.slow
def test_a_recipe_that_never_waits_gets_the_error_anyway(capsys):
    assert run(["fork", "sft", "mine"]) == 0
    code = Path("recipes/mine.py").read_text()
    assert "        step.log(gradient, update)\n" in code
    Path("recipes/mine.py").write_text(code.replace("        step.log(gradient, update)\n", ""))
    words = breaking("sft", "logprobs[3].sum() * float('nan')")
    assert train("recipe=mine", *words[1:], "checkpoint.every=3", "out=run") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: step 2: loss breaking: returned nan for datum 3; ") and error.count("\n") == 1
    assert len(rows("run", "failed_batch/step-000002.jsonl")) == 6


@pytest.mark.slow
def test_a_batch_that_cannot_be_written_hides_nothing(capsys):
    write("breaks.py", "")
    words = breaking("sft", "logprobs[3].sum() * float('nan')")
    hook = "from cookbook import Hook\n\n\nclass Occupy(Hook):\n    def on_start(self, run):\n"
    write("occupy.py", hook + "        (run.out / 'failed_batch').write_text('')\n")
    assert train(*words, "+hook.occupy._target_=occupy.Occupy", "out=run") == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("WARNING: run/failed_batch/step-000002.jsonl: cannot be written: ")
    assert error.startswith("error: step 2: loss breaking: returned nan for datum 3; ") and "the batch is in" not in error


def test_only_calls_that_may_still_fail_are_kept():
    calls, futures = TrackedCalls(), [Future() for _ in range(4)]
    for number, future in enumerate(futures):
        calls.add(TrackedCall(number // 2, [], future, update=number % 2 == 1))
    assert calls.failed() is None and len(calls._calls) == 4
    futures[0].set_result(None)
    for future in futures[1:]:
        future.set_exception(BackendError("x"))
    calls.add(TrackedCall(2, [], Future()))
    assert len(calls._calls) == 4  # without the one that succeeded
    found = calls.failed()
    assert found is not None and found.future is futures[1]
    update: Future[None] = Future()
    calls.add(TrackedCall(2, [], update, update=True))
    update.set_result(None)  # the caller has read the error, and training continues
    calls.add(TrackedCall(3, [], Future()))
    assert calls.failed() is None and len(calls._calls) == 1


def test_a_datum_of_a_rollout_knows_its_row():
    from cookbook.data import RenderedPrompt, Row
    from cookbook.sampling import rollouts
    from cookbook.sampling.rollouts import RolloutGroup
    from cookbook.sampling.trajectory import Trajectory
    from cookbook.types import Sample

    prompt = RenderedPrompt([1, 2], Row("here:1", {}), "text", "what?")
    attempts = [Trajectory.single([1, 2], "text", Sample([token], [-1.0], "stop", 0), "") for token in (5, 6)]
    group = RolloutGroup(prompt, attempts, [0.0, 1.0])
    data = rollouts.datums([group], [[-1.0, 1.0]])
    assert all(isinstance(datum, RowDatum) and (datum.where, datum.question) == ("here:1", "what?") for datum in data)


def test_the_blamed_datums_come_with_the_error():
    leaves = {3: torch.zeros(2), 7: torch.zeros(2)}

    def loss(data, logprobs):
        return logprobs[1].sum() * float("inf") + logprobs[0].sum(), {}

    with pytest.raises(NonFiniteError) as caught:
        loss_gradient.loss_gradient(loss, [], leaves)
    assert caught.value.datums == (7,)
