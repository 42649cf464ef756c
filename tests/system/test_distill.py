"""On-policy distillation: the teacher's grades against transformers, exact resume, where the teacher may be, and refusals."""

import gzip
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import servertools
import tiny
import torch
from marks import learning_seeds, rest_slow
from runtools import bits, checkpoint, here, rows, same_numbers, timeless, train, write  # noqa: F401 - here is a fixture
from transformers import AutoModelForCausalLM

from cookbook.cli.app import run
from cookbook.errors import RolloutError
from cookbook.sampling.teacher import Teacher, reverse_kl

pytestmark = pytest.mark.usefixtures("here")
LITTLE = ["recipe=distill", "recipe.prompts_per_step=4", "recipe.group_size=2", "data.limit=24", "eval.limit=4"]
SMALL = [*LITTLE, "recipe.steps=3", "rollout.max_tokens=8", "eval.max_tokens=8"]


@pytest.fixture
def student(here):  # noqa: F811
    return tiny.save(Path("student"), seed=1)


@pytest.fixture
def teacher(here):  # noqa: F811
    return tiny.save(Path("teacher"), seed=2)


def test_advantages_and_gradient_are_those_of_autograd(student, teacher, make_trainer):
    data = tiny.datums(6)
    trainer, frozen = (make_trainer(name=folder, dtype="float64") for folder in (student, teacher))
    logprobs = Teacher(frozen.live_sampler(0).result()).logprobs(data).result()
    graded = [datum.with_inputs(reference_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]
    taught, metrics = reverse_kl(graded)

    with torch.no_grad():
        expected = tiny.plain_logprobs(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64), data)
    total, count = 0.0, 0
    for datum, found, row in zip(taught, logprobs, expected, strict=True):
        np.testing.assert_allclose(found, row, rtol=1e-6)  # a sampler returns float32
        weights, sampling = (datum.loss_fn_inputs[name].to_numpy() for name in ("weights", "sampling_logprobs"))
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()
        np.testing.assert_allclose(advantages[weights != 0], (row.numpy() - sampling)[weights != 0], atol=1e-5)
        assert not advantages[weights == 0].any()
        total, count = total + float(np.where(weights != 0, sampling - row.numpy(), 0).sum()), count + int((weights != 0).sum())
    assert metrics == {"kl/student_teacher_k1": pytest.approx(total / count, abs=1e-6)}

    def surrogate(data, logprobs):
        terms = [
            (
                -datum.loss_fn_inputs["weights"].to_torch()
                * (row - datum.loss_fn_inputs["sampling_logprobs"].to_torch()).exp()
                * datum.loss_fn_inputs["advantages"].to_torch()
            ).sum()
            for datum, row in zip(data, logprobs, strict=True)
        ]
        return torch.stack(terms).sum(), {}

    trainer.forward_backward(taught, "importance_sampling").result()
    own = tiny.plain_gradients(trainer.engine.model.network, taught, surrogate)
    assert tiny.difference(tiny.gradients(trainer.engine), own) < 1e-12


def test_a_token_that_the_teacher_excludes_is_an_error_that_names_it():
    datum = tiny.datums(1)[0]
    length = datum.model_input.length
    with pytest.raises(
        RolloutError, match=rf"recipe.teacher: gives token {int(datum.loss_fn_inputs['target_tokens'].to_numpy()[-1])},"
    ):
        reverse_kl([datum.with_inputs(reference_logprobs=np.array([*[-1.0] * (length - 1), -math.inf]))])
    # Before the first sampled token it is of no importance.
    reverse_kl([datum.with_inputs(reference_logprobs=np.array([-math.inf, *[-1.0] * (length - 1)]))])


def test_a_run_trains_on_the_teachers_grades(student, teacher):
    assert train(*SMALL, f"model.name={student}", f"recipe.teacher={teacher}", "reward=none", "out=run") == 0
    network = AutoModelForCausalLM.from_pretrained(teacher)
    divergences = []
    with gzip.open("run/rollouts.jsonl.gz", "rt") as stored:
        for line in map(json.loads, stored):
            if "trajectories" not in line:
                divergences.append([])
                continue
            for trajectory in line["trajectories"]:
                (segments,) = trajectory["branches"]
                (said,) = (one for one in segments if one["author"] == "model")
                ids = [*line["prompt"], *said["tokens"]]
                with torch.no_grad():
                    scores = network(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                grades = [float(scores[at - 1, ids[at]]) for at in range(len(line["prompt"]), len(ids))]
                expected = np.array(grades) - np.array(said["logprobs"])
                np.testing.assert_allclose(said["advantage"], expected, atol=2e-4)  # stored with 4 digits after the point
                divergences[-1] += (-expected).tolist()
    found = rows("run")
    assert [row["kl/student_teacher_k1"] for row in found[1:]] == pytest.approx(
        [float(np.mean(one)) for one in divergences], abs=1e-4
    )
    # Nothing is measured without a reward.
    assert not [key for row in found for key in row if key.startswith(("reward/", "eval/"))]
    assert "reward" not in rows("run", "samples.jsonl")[0]


@pytest.mark.slow
def test_a_stopped_run_continues_exactly(student, teacher):
    words = [*SMALL, f"model.name={student}", f"recipe.teacher={teacher}", "eval.every=null", "checkpoint.every=1"]
    assert train(*words, "out=whole") == 0
    assert train(*words, "out=parts", "recipe.steps=2") == 0
    assert train(*words, "out=parts") == 0
    assert timeless("whole")[-1] == timeless("parts")[-1]
    assert bits(checkpoint("whole")) == bits(checkpoint("parts"))


@pytest.mark.slow
def test_another_teacher_of_the_same_name_does_not_continue_a_run(student, teacher, capsys):
    words = [*SMALL, f"model.name={student}", f"recipe.teacher={teacher}", "out=run"]
    assert train(*words, "recipe.steps=1") == 0
    shutil.rmtree(teacher)
    tiny.save(teacher, seed=3)
    capsys.readouterr()
    assert train(*words) == 2
    assert "recipe.teacher: the digest of its weights: the run that saved" in capsys.readouterr().err


@pytest.mark.slow
def test_a_teacher_on_a_server_gives_the_same_numbers(student, teacher):
    words = [*SMALL, f"model.name={student}"]
    assert train(*words, f"recipe.teacher={teacher}", "out=here") == 0
    with servertools.running(teacher, Path("server"), names=["wise"]) as server:
        assert train(*words, "recipe.teacher=wise", f"recipe.teacher_url={server.url}", "out=there") == 0
        assert train(*words, "recipe.teacher=wise", f"recipe.teacher_url={server.url}/", "recipe.steps=4", "out=there") == 0
    assert timeless("here") == timeless("there")[:4]


@pytest.mark.slow
def test_a_remote_run_has_its_teacher_on_its_server(student):
    words = [*SMALL, f"model.name={student}", "recipe.teacher=student"]
    with servertools.running(student, Path("server"), names=["student"]) as server:
        assert train(*words, "backend=remote", "model.dtype=float32", f"backend.base_url={server.url}", "out=there") == 0
    assert train(*words, "model.dtype=float32", "out=here") == 0
    assert same_numbers("here", "there")


@pytest.mark.slow
def test_a_run_with_an_adapter_is_a_teacher(student, capsys):
    grpo = [
        "recipe=grpo",
        "recipe.steps=2",
        "recipe.prompts_per_step=4",
        "recipe.group_size=4",
        "data.limit=24",
        "eval.limit=4",
    ]
    limits = ["rollout.max_tokens=8", "eval.max_tokens=8", "reward=own.py:reward", "optim.lr=0.01"]
    write("own.py", "def reward(completion, row):\n    return sum(map(ord, completion)) % 7\n")
    assert train(*grpo, *limits, f"model.name={student}", "model.lora_rank=2", "out=taught") == 0
    words = [*SMALL, f"model.name={student}", "model.lora_rank=2", "recipe.teacher=taught", "out=run"]
    assert train(*words, "recipe.steps=2") == 0
    # The teacher's adapter is the only difference from the student.
    assert rows("run")[1]["kl/student_teacher_k1"] != 0
    assert train(*grpo, *limits, f"model.name={student}", "model.lora_rank=2", "out=taught", "recipe.steps=3") == 0
    capsys.readouterr()
    assert train(*words) == 2
    assert "recipe.teacher: the digest of its weights: the run that saved" in capsys.readouterr().err


def test_a_teacher_with_a_short_context_is_named_in_the_error(student, here, capsys):  # noqa: F811
    tiny.save(Path("short"), seed=2, max_position_embeddings=4)
    assert train(*SMALL, f"model.name={student}", "recipe.teacher=short", "out=run") == 2
    assert "error: recipe.teacher: prompt: " in capsys.readouterr().err


@pytest.mark.parametrize("seed", learning_seeds("distill"))
def test_the_student_learns_what_the_teacher_knows(seed):
    assert train("recipe=sft", "model=tiny", "recipe.steps=200", "eval.every=null", "out=taught") == 0
    assert train("recipe=distill", "recipe.teacher=taught", "reward=number", f"seed={seed}", "out=run") == 0
    found = rows("run")
    evaluated = [row["eval/accuracy"] for row in found if "eval/accuracy" in row]
    assert evaluated[0] < 0.2 and evaluated[-1] >= 0.9
    divergences = [row["kl/student_teacher_k1"] for row in found[1:]]
    assert np.mean(divergences[-5:]) < 0.2 * np.mean(divergences[:3])


REFUSED = [
    ([], "recipe.teacher: missing; give a run, a checkpoint, a model folder or a hub id"),
    (["recipe.teacher=./nowhere"], "recipe.teacher: no such folder './nowhere'; pass a local folder or a Hugging Face hub id"),
    (["recipe.teacher=other"], "recipe.teacher: other has another tokenizer, so it cannot grade the model's tokens; choose"),
    (
        ["recipe.teacher=teacher", "rollout.temperature=0.5"],
        "rollout.temperature: a teacher computes logprobs at temperature 1",
    ),
    (["recipe.teacher=teacher", "backend.ranks=2"], "recipe.teacher: a teacher is loaded into this process, and the model"),
    (["recipe.teacher=teacher", "rollout.refill=2"], "rollout.refill: replaces groups whose rewards are equal, and with"),
    (["recipe.teacher=teacher", "reward=none", "data.curriculum={}"], "data.curriculum: chooses prompts by their rewards, and"),
    (
        ["recipe.teacher=teacher", "recipe.teacher_url=8731"],
        "recipe.teacher_url: expected http://host:port or https://..., got",
    ),
    (
        ["recipe.teacher=tinker://a:train:0/weights/b"],
        "recipe.teacher: tinker://a:train:0/weights/b is a checkpoint on a server;",
    ),
    (["recipe.teacher=teacher", "recipe.group_size=0"], "recipe.group_size must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("words", "message"), rest_slow(REFUSED, fast=4), ids=[message.partition(":")[0] for _, message in REFUSED]
)
def test_a_teacher_is_refused_in_one_line(student, teacher, words, message, capsys):
    if "recipe.teacher=other" in words:
        shutil.copytree(teacher, "other")
        path = Path("other/tokenizer.json")
        path.write_text(path.read_text().replace('"<|im_start|>"', '"<|begin|>"').replace('"<|im_end|>"', '"<|end|>"'))
        assert path.read_bytes() != (teacher / "tokenizer.json").read_bytes()
    for command in (["train"], ["check", "config"]):
        assert run([*command, *SMALL, f"model.name={student}", *words, *(["out=run"] if command == ["train"] else [])]) == 2
        err = capsys.readouterr().err
        assert err.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("name", "url", "message"),
    [
        ("unknown", "{}", "recipe.teacher: {} does not serve 'unknown'; choose one of these: wise"),
        ("wise", "http://127.0.0.1:9", "recipe.teacher_url: no answer from http://127.0.0.1:9"),
    ],
)
def test_errors_of_a_remote_teacher_name_its_keys(student, teacher, name, url, message, capsys):
    with servertools.running(teacher, Path("server"), names=["wise"]) as server:
        words = [f"recipe.teacher={name}", f"recipe.teacher_url={url.format(server.url)}"]
        assert train(*SMALL, f"model.name={student}", *words, "out=run") == 2
        assert f"error: {message.format(server.url)}" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_and_check_config_know_the_teacher(student, teacher, capsys):
    words = [*SMALL, f"model.name={student}", f"recipe.teacher={teacher}"]
    assert run(["plan", *words]) == 0
    network = AutoModelForCausalLM.from_pretrained(teacher)
    size = sum(parameter.nbytes for parameter in network.parameters())
    assert f"reference     {size / 1e6:.1f} MB, frozen" in capsys.readouterr().out
    assert run(["check", "config", *words]) == 0
    assert "teacher      teacher grades every sampled token; frozen" in capsys.readouterr().out
