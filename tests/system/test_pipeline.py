"""Losses in torch's pipeline schedules, on gloo stages, against one process whose model computes all its logits.

The processes start once for all cases: importing torch and transformers takes most of their time.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from exampletools import example, losses
from places import ROOT
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import AutoModelForCausalLM

import cookbook
from cookbook import DPO, GRPO, CrossEntropy, FusedOutputLoss, LinearCrossEntropyLoss, PipelineLoss
from cookbook.errors import BackendError, ConfigError, DataError
from cookbook.types import Datum

ROWS, MICRO_BATCHES, TOKENS = 8, 8, 24
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
PRELOADED = [
    "torch.distributed.pipelining",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "cookbook.engine.head.pipeline",
]
# float32 rounds to 6e-8; the largest difference of these tests, measured, is 2.4e-6.
TOLERANCE = 1e-5


class PlainLoss:
    """A FusedOutputLoss of a user: it makes all logits."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        return labelled_sum(self.forward_logits(hidden_states), labels) / (labels[:, 1:] != -100).sum()

    def forward_logits(self, hidden_states: Tensor) -> Tensor:
        return self.layer(hidden_states)

    def target_logprobs(self, hidden, weight, targets, *, bias, scale, softcap, temperature):
        assert temperature is None
        return (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def labelled_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def labelled(equal: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a batch; rows with equal numbers of labels, or with none to all of their tokens."""
    tokens = torch.randint(0, tiny.VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    first = torch.full((ROWS, 1), 5) if equal else torch.arange(ROWS)[:, None] * 4
    return tokens, tokens.masked_fill(torch.arange(TOKENS) < first, -100)


class Ranked:
    """A user's loss with a parameter of its own, in which every datum's slope depends on all datums."""

    def __init__(self) -> None:
        self.scale = torch.tensor(0.7, requires_grad=True)

    def __call__(self, data: Sequence[Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        means = torch.stack([row.mean() for row in logprobs])
        value = -(self.scale * means.softmax(0) * means).sum()
        return value, {"best": means.argmax().item()}


def several_targets() -> list[Datum]:
    """Datums with two targets per position, or three."""
    data = []
    for index, datum in enumerate(tiny.datums(ROWS, seed=3, longest=TOKENS)):
        targets = datum.loss_fn_inputs["target_tokens"].array[:, None] + np.arange(2 + index % 2)
        weights = np.random.default_rng(index).uniform(0, 1, targets.shape)
        data.append(Datum(datum.model_input, {"target_tokens": targets % tiny.VOCABULARY, "weights": weights}))
    return data


def heated() -> list[Datum]:
    return [datum.with_inputs(temperature=0.5 + 0.25 * index) for index, datum in enumerate(tiny.datums(ROWS, longest=TOKENS))]


def few() -> list[Datum]:
    return tiny.datums(6, longest=TOKENS)


# Two rounds: schedule, data, loss, options of the head.
LOSSES: dict[str, tuple[str, Callable[[], list[Datum]], Callable[[], Any], dict[str, Any]]] = {
    "ranked": ("gpipe", few, Ranked, {}),
    "dpo": ("1f1b", few, lambda: DPO(normalization=None), {}),
    "grpo": ("interleaved", heated, lambda: GRPO(kl_beta=0.05, entropy_coef=0.1), {}),
    "several targets": ("interleaved", several_targets, CrossEntropy, {}),
    "own head": ("1f1b", few, Ranked, {"impl": PlainLoss}),
    "other layer": ("gpipe", few, Ranked, {"other": True}),
}


class OtherLinear(torch.nn.Linear):
    """A layer that cookbook calls, since its forward might be any function."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Stages:
    """This rank's parts of one copy of the model, and a schedule's arguments."""

    def __init__(self, model: Any, rank: int, world: int, schedule: str, part_class: type) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = range(rank, world * 2, world) if schedule == "interleaved" else [rank]
        total = world * len(own)
        # A part keeps its layers of a model and changes the config, so each part has a model of its own, with shared weights.
        memo = {id(parameter): parameter for parameter in model.parameters()}
        self.parts = [part_class(copy.deepcopy(model, dict(memo)), index, total) for index in own]
        stages = [PipelineStage(part, index, total, torch.device("cpu")) for part, index in zip(self.parts, own, strict=True)]
        self.first = stages if schedule == "interleaved" else stages[0]
        self.schedule_class = SCHEDULES[schedule]
        self.layer = next((part.lm_head for part in self.parts if part.lm_head is not None), None)

    def schedule(self, loss_fn: Any, **options: Any) -> Any:
        return self.schedule_class(self.first, MICRO_BATCHES, loss_fn=loss_fn, **options)

    def gradients(self, group: Any, tied: bool) -> dict[str, Tensor | None]:
        """Gradients of this rank's parameters, by the names of the whole model."""
        for part in self.parts:
            if tied and part.tied_weight() is not None:
                dist.all_reduce(part.tied_weight().grad, group=group)
        return {self.names[id(one)]: one.grad for part in self.parts for one in part.parameters()}


def run_page(part: str, stages: Stages, **names: Any) -> dict[str, Any]:
    """Run the block of docs/guide/python-api.md that contains ``part``, and return its variables."""
    page = (ROOT / "docs/guide/python-api.md").read_text(encoding="utf-8")
    block = next(text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if part in text)
    names |= {"cookbook": cookbook, "part": stages.parts[-1], "stage": stages.first, "n_microbatches": MICRO_BATCHES}
    names |= {"Schedule1F1B": stages.schedule_class, "num_rows": ROWS, "num_tokens": TOKENS}
    exec(compile(block, "docs/guide/python-api.md", "exec"), names)
    return names


def unused(*_: object) -> Tensor:
    raise AssertionError("a loss function was called on a rank without the last stage")


def one_round(stages: Stages, kind: str) -> None:
    """Cross-entropy: the head itself is the schedule's loss function."""
    tokens, labels = labelled(equal=kind == "own")
    if kind == "own":
        # Means of micro-batches with equal numbers of labels: the schedule's division makes the mean of the batch.
        loss = unused if stages.layer is None else PlainLoss(stages.layer)
        stages.schedule(loss).step(tokens, target=labels)
        return
    run_page("num_items_in_batch", stages, tokens=tokens, labels=labels, num_labels=int((labels[:, 1:] != -100).sum()))


def two_rounds(stages: Stages, name: str) -> dict[str, Any]:
    _, make_data, make_loss, options = LOSSES[name]
    options, data, loss = dict(options), make_data(), make_loss()
    if name == "dpo":
        result = run_page("pipeline.forward_backward", stages, data=data, my_loss=loss)["result"]
        return {} if result is None else {"value": result[0], "metrics": result[1], "own": None}
    head = None
    if stages.layer is not None:
        if options.pop("other", False):
            stages.layer.__class__ = OtherLinear
        head = LinearCrossEntropyLoss(stages.layer, chunk_size=7, **options)
    pipeline = PipelineLoss(head, ROWS, TOKENS)
    schedule = stages.schedule(pipeline, scale_grads=False)
    # A step before: the switch between forward and training must leave nothing behind.
    assert (pipeline.forward(schedule, data[:3]) is None) == (head is None)
    result = pipeline.forward_backward(schedule, data, loss)
    assert (result is None) == (head is None)
    own = getattr(loss, "scale", None)
    return {} if result is None else {"value": result[0], "metrics": result[1], "own": own is not None and own.grad}


def work(rank: int, world: int, folder: str, cases: Sequence[tuple[str, str, bool]]) -> None:
    """One rank: run every case and save its gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    group = dist.new_group([0, world - 1])
    part_class = example("pipeline").Part
    models = {tied: AutoModelForCausalLM.from_pretrained(f"{folder}/{tied}") for tied in (True, False)}
    found = {}
    for schedule, name, tied in cases:
        stages = Stages(copy.deepcopy(models[tied]), rank, world, schedule, part_class)
        result = two_rounds(stages, name) if name in LOSSES else one_round(stages, name)
        found[schedule, name, tied] = (result, stages.gradients(group, tied))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def expected(model: Any, name: str) -> tuple[float, Tensor | None, dict[str, Tensor]]:
    """One process: value, gradient of the loss's own parameter, and every parameter's gradient, all from the model's logits."""
    model.zero_grad()
    loss = None
    if name in LOSSES:
        _, make_data, make_loss, _ = LOSSES[name]
        data, loss = make_data(), make_loss()
        columns = plain_scores(model, data)
        value, _ = loss(data, *columns[: 1 + getattr(loss, "needs_entropy", False)])
    else:
        tokens, labels = labelled(equal=name == "own")
        value = labelled_sum(model(tokens).logits, labels) / (labels[:, 1:] != -100).sum()
    value.backward()
    own = getattr(loss, "scale", None)
    return value.item(), None if own is None else own.grad, {key: one.grad.clone() for key, one in model.named_parameters()}


def plain_scores(model: Any, data: Sequence[Datum]) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies at each datum's temperature, each datum alone."""
    logprobs, entropies = [], []
    for datum in data:
        fields = datum.loss_fn_inputs
        logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        scores = (logits / float(fields["temperature"].array if "temperature" in fields else 1.0)).log_softmax(-1)
        targets = fields["target_tokens"].to_torch().long()
        logprobs.append(scores.gather(-1, targets.reshape(len(targets), -1)).view(targets.shape))
        entropies.append(-(scores.exp() * scores).sum(-1))
    return logprobs, entropies


def run(world: int, folder: Path, cases: Sequence[tuple[str, str, bool]]) -> SimpleNamespace:
    for tied in (True, False):
        tiny.save(folder / str(tied), num_hidden_layers=2 * world, tie_word_embeddings=tied)
    # The server of the forks imports these modules once for all ranks.
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(work, args=(world, str(folder), cases), nprocs=world, start_method="forkserver")
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    models = {tied: AutoModelForCausalLM.from_pretrained(folder / str(tied)) for tied in (True, False)}
    return SimpleNamespace(ranks=ranks, models=models)


def check(done: SimpleNamespace, case: tuple[str, str, bool]) -> None:
    _, name, tied = case
    value, own, gradients = expected(done.models[tied], name)
    results = [rank[case] for rank in done.ranks]
    found: dict[str, list[Tensor]] = {}
    for _, by_name in results:
        for key, gradient in by_name.items():
            assert gradient is not None, key
            found.setdefault(key, []).append(gradient)
    assert found.keys() == gradients.keys()
    for key, copies in found.items():
        assert gradients[key].any(), key
        assert tiny.difference(copies[:1], [gradients[key]]) < TOLERANCE, key
        assert len(copies) == (2 if tied and "embed_tokens" in key else 1)
        assert all(torch.equal(one, copies[0]) for one in copies)
    if name in LOSSES:
        assert not any(result for result, _ in results[:-1])
        assert results[-1][0]["value"] == pytest.approx(value, rel=1e-5)
        assert own is None or results[-1][0]["own"] == pytest.approx(float(own), rel=1e-5)


# Schedule, cross-entropy in one round or a loss in two, tied embeddings.
CASES: list[tuple[str, str, bool]] = [
    ("gpipe", "head", True),
    ("1f1b", "head", False),
    ("interleaved", "head", True),
    ("gpipe", "own", False),
    ("1f1b", "own", True),
    *((LOSSES[name][0], name, index % 2 == 0) for index, name in enumerate(LOSSES)),
]
FOUR_STAGES = [
    (schedule, name, index % 2 == 0) for schedule in SCHEDULES for index, name in enumerate(("head", "ranked", "dpo", "grpo"))
]


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return run(2, tmp_path_factory.mktemp("two"), CASES)


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return run(4, tmp_path_factory.mktemp("four"), FOUR_STAGES)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
def test_two_stages_are_one_process(two_stages: SimpleNamespace, case: tuple[str, str, bool]) -> None:
    check(two_stages, case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", FOUR_STAGES, ids=str)
def test_four_stages_are_one_process(four_stages: SimpleNamespace, case: tuple[str, str, bool]) -> None:
    check(four_stages, case)


@pytest.mark.nightly
def test_the_example_learns() -> None:
    command = [sys.executable, str(ROOT / "examples" / "pipeline.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = losses(done.stdout)
    assert len(found) == 4 and found[-1] < 0.2 * found[0]


class OneStage:
    """The schedule of a pipeline that is one stage long: it calls the model and the loss function, as torch's do."""

    def __init__(self, model: Any, loss_fn: Any, scale_grads: bool = False) -> None:
        self.model, self.loss_fn, self.scale_grads = model, loss_fn, scale_grads

    def eval(self, tokens: Tensor, *, target: Tensor, return_outputs: bool) -> None:
        for part, numbers in zip(tokens.split(4), target.split(4), strict=True):
            self.loss_fn(self.model(part), numbers)

    def step(self, tokens: Tensor, *, target: Tensor, return_outputs: bool) -> None:
        for part, numbers in zip(tokens.split(4), target.split(4), strict=True):
            self.loss_fn(self.model(part), numbers).backward()


@pytest.fixture
def stage() -> tuple[PipelineLoss, OneStage]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(tiny.VOCABULARY, 4), torch.nn.Linear(4, tiny.VOCABULARY))
    pipeline = PipelineLoss(LinearCrossEntropyLoss(model[1]), ROWS, TOKENS)
    return pipeline, OneStage(model[0], pipeline)


def test_what_does_not_fit_the_schedule_is_an_error(stage: tuple[PipelineLoss, OneStage]) -> None:
    pipeline, schedule = stage
    loss = CrossEntropy()
    with pytest.raises(DataError, match=r"data: must hold 1 to num_rows=8 datums, got 9;"):
        pipeline.forward_backward(schedule, tiny.datums(9, longest=TOKENS), loss)
    with pytest.raises(DataError, match=r"data: must hold 1 to num_rows=8 datums, got 0;"):
        pipeline.forward(schedule, [])
    with pytest.raises(DataError, match=r"datum \d: must have at most num_tokens=24 tokens, got \d\d;"):
        pipeline.forward_backward(schedule, tiny.datums(8, longest=60), loss)
    bare = [Datum(datum.model_input) for datum in few()]
    with pytest.raises(DataError, match=r"datum 0: target_tokens must have \d+ positions, got nothing"):
        pipeline.forward_backward(schedule, bare, Ranked())
    with pytest.raises(DataError, match="datum 0: missing required field 'advantages'"):
        pipeline.forward_backward(schedule, several_targets(), GRPO(kl_beta=0.0))
    schedule.scale_grads = True
    with pytest.raises(ConfigError, match="schedule: scale_grads must be False, got True"):
        pipeline.forward_backward(schedule, few(), loss)


def test_a_schedule_with_another_loss_function_is_an_error(stage: tuple[PipelineLoss, OneStage]) -> None:
    pipeline, schedule = stage
    schedule.loss_fn = lambda hidden, _: hidden.sum()
    with pytest.raises(ConfigError, match="schedule: loss_fn is another object"):
        pipeline.forward(schedule, few())
    schedule.loss_fn = PipelineLoss(None, ROWS, TOKENS)
    with pytest.raises(ConfigError, match="head: must be a LinearCrossEntropyLoss on the rank of the last stage, got None"):
        pipeline.forward(schedule, few())


def test_after_a_loss_that_fails_the_next_call_works(stage: tuple[PipelineLoss, OneStage]) -> None:
    pipeline, schedule = stage

    def constant(data: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        return torch.tensor(1.0), {}

    with pytest.raises(BackendError, match="loss constant: does not depend on the logprobs"):
        pipeline.forward_backward(schedule, few(), constant)
    result = pipeline.forward_backward(schedule, few(), GRPO(kl_beta=0.0, entropy_coef=0.1))
    found = pipeline.forward(schedule, few())
    assert result is not None and found is not None
    assert [row.shape for row in found] == [(len(datum.loss_fn_inputs["target_tokens"]),) for datum in few()]


def test_own_heads_are_fused_output_losses() -> None:
    assert isinstance(PlainLoss(torch.nn.Linear(4, 9)), FusedOutputLoss)
