"""Every feature on a real pretrained model, SmolLM2-135M-Instruct: what the shipped model of 0.6M parameters does not show.

CI runs the tests marked slow; ``make test-nightly ARGS=tests/system/real_model`` runs the others.
"""

from __future__ import annotations

import json
import math

import httpx
import pytest
import servertools
import torch
from exampletools import example
from runtools import checkpoint, here, rows, train, write  # noqa: F401 - here is a fixture
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import WAIT_S

from cookbook.cli.app import run
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.types import Datum, ModelInput, SamplingParams

pytestmark = pytest.mark.usefixtures("here")
nightly = pytest.mark.nightly
slow = pytest.mark.slow

QUESTIONS = ["What is the capital of France?", "Name three colors.", "What is 12 + 30? Reply with the number only."]
NO_CHECKPOINTS = ["checkpoint.every=null", "checkpoint.final=false"]
# One evaluation, of few rows, costs as much as a step.
LITTLE = ["recipe.steps=2", "eval.every=null", "eval.limit=4"]
GRPO = [
    *("recipe=grpo", "data=two_digits", "reward=number", "recipe.prompts_per_step=4", "recipe.group_size=4"),
    *("rollout.max_tokens=12", "eval.max_tokens=12", "rollout.temperature=0.7", "optim.lr=1e-5", "loss.kl_beta=0"),
]
LORA = ["model.lora_rank=8", "optim.lr=1e-4"]
# A log-probability of the sampler and of the training pass differ by rounding only, at every precision.
MOST_K3, MOST_CLIPPED = 1.5e-3, 0.01


@pytest.fixture(scope="module")
def tokenizer(real_model):
    return AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="module")
def reference(real_model):
    """The model in transformers' own code."""
    return AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()


def prompt_ids(tokenizer, question):
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def answer(network, tokenizer, question, tokens=16):
    """Return transformers' greedy completion."""
    ids = torch.tensor([prompt_ids(tokenizer, question)])
    out = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def sampled(model, tokenizer, question, tokens=16):
    """Return the greedy completion of cookbook's sampler."""
    request = SampleRequest(prompt_ids(tokenizer, question), 1, SamplingParams(max_tokens=tokens, temperature=0.0), seed=0)
    [[completion]] = sample(model, [request], step=0, max_batch_tokens=1024)
    return list(completion.tokens)


def text(network, tokenizer, question, tokens=16):
    return tokenizer.decode(answer(network, tokenizer, question, tokens), skip_special_tokens=True).strip()


def conversations(count=16):
    """Write conversations and pairs whose better answer is the sum, in words that the model would not choose."""
    chats, pairs = [], []
    for index in range(count):
        a, b = 11 + index, 40 - index
        prompt = [{"role": "user", "content": f"Add {a} and {b}."}]
        good, bad = ([{"role": "assistant", "content": reply}] for reply in (f"The sum is {a + b + index}.", "I cannot."))
        chats.append({"messages": prompt + good})
        pairs.append({"prompt": prompt, "chosen": good, "rejected": bad})
    write("chats.jsonl", "".join(json.dumps(row) + "\n" for row in chats))
    write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in pairs))


@slow
def test_logprobs_and_greedy_text_are_those_of_transformers(real_model, reference, tokenizer):
    model = load(ModelConfig(str(real_model)), torch.device("cpu"), 0)
    engine = Engine(model, EngineOptions(seed=0))
    tokens = tokenizer("The quick brown fox jumps over the lazy dog. " * 20, return_dict=True)["input_ids"]
    datum = Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
    found = engine.forward([datum]).loss_fn_outputs[0]["logprobs"].to_torch()
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[:-1]])).logits[0].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)

    for question in QUESTIONS:
        assert sampled(model, tokenizer, question) == answer(reference, tokenizer, question)


@slow
def test_sample_answers(real_model, capsys):
    assert run(["sample", str(real_model), QUESTIONS[0]]) == 0
    assert capsys.readouterr().out.strip() == "The capital of France is Paris."


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("backend.autocast=bfloat16", marks=slow),
        pytest.param("backend.autocast=null", marks=nightly),
        pytest.param("model.dtype=bfloat16", marks=nightly),
    ],
)
@pytest.mark.parametrize("weights", [pytest.param([], id="full"), pytest.param(LORA, id="lora", marks=nightly)])
def test_sampler_and_trainer_agree_after_updates(real_model, precision, weights):
    words = [*GRPO, *weights, precision, "recipe.steps=4", "eval.every=null", "eval.limit=4", *NO_CHECKPOINTS]
    assert train(f"model={real_model}", *words, "out=run") == 0
    steps = [row for row in rows("run") if "kl/sampler_trainer_k3" in row]
    # A step whose groups all tie has no update, so no ratios.
    assert len(steps) >= 2
    assert all(row["kl/sampler_trainer_k3"] < MOST_K3 for row in steps)
    # Four prompts of four completions are few tokens: the mean over the steps stands for a batch.
    assert sum(row["loss/clip_frac"] for row in steps) / len(steps) < MOST_CLIPPED


@nightly
@pytest.mark.parametrize("recipe", ["dpo", "orpo"])
def test_preferences_are_learned(real_model, recipe):
    conversations()
    words = [f"recipe={recipe}", "data=pairs.jsonl", "recipe.batch_size=8", "optim.lr=1e-5", *LITTLE, *NO_CHECKPOINTS]
    assert train(f"model={real_model}", *words, "recipe.steps=3", "out=run") == 0
    losses = [row["loss"] for row in rows("run") if "loss" in row]
    if recipe == "dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("quantize", [pytest.param("null", marks=slow), pytest.param("nf4", marks=nightly)])
def test_an_adapter_learns_resumes_and_exports(real_model, tokenizer, quantize):
    conversations()
    words = [
        "recipe=sft",
        "data=chats.jsonl",
        "recipe.batch_size=8",
        *LORA,
        f"model.quantize={quantize}",
        "eval.every=null",
        "eval.limit=4",
        "checkpoint.every=2",
    ]
    # A schedule that ends at zero would make the first steps depend on the number of steps. By default the free memory decides
    # whether activations are recomputed, which changes the last bits.
    words += ["schedule=constant", "backend.activation_checkpointing=false"]
    assert train(f"model={real_model}", *words, "recipe.steps=4", "out=whole") == 0
    losses = [row["loss"] for row in rows("whole") if "loss" in row]
    assert losses[-1] < losses[0]
    assert train(f"model={real_model}", *words, "recipe.steps=2", "out=parts") == 0
    assert train(f"model={real_model}", *words, "recipe.steps=4", "out=parts") == 0
    whole, parts = (checkpoint(folder, 4) / "adapter_model.safetensors" for folder in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()

    assert run(["weights", "export", str(checkpoint("whole", 4)), "merged", "--merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    completion = answer(merged, tokenizer, "Add 11 and 40.")
    model = load(ModelConfig(str(checkpoint("whole", 4))), torch.device("cpu"), 0)
    assert sampled(model, tokenizer, "Add 11 and 40.") == completion


@nightly
def test_the_form_of_an_order_is_learned(real_model):
    example("orders").main(training=48, held_out=4)
    words = [f"model.name={real_model}", "recipe.steps=6", "eval.answers=false", *NO_CHECKPOINTS]
    assert train("experiment=sft_orders", *words, "out=run") == 0
    before, after = (row["eval/loss"] for row in rows("run") if "eval/loss" in row)
    assert after < before / 2


@nightly
def test_a_full_run_is_a_model_in_every_command(real_model, tokenizer, capsys):
    conversations()
    words = ["recipe=sft", "data=chats.jsonl", "recipe.batch_size=8", "optim.lr=1e-5", *LITTLE]
    assert train(f"model={real_model}", *words, "out=sft") == 0
    trained = AutoModelForCausalLM.from_pretrained(checkpoint("sft"), dtype=torch.float32)
    expected = text(trained, tokenizer, QUESTIONS[0])
    capsys.readouterr()
    assert run(["sample", "sft", QUESTIONS[0], "--max-tokens", "16"]) == 0
    assert capsys.readouterr().out.strip() == expected
    assert run(["eval", "sft", "data=two_digits", "reward=number", "eval.limit=4", "eval.max_tokens=12"]) == 0
    assert "4" in capsys.readouterr().out
    assert run(["weights", "export", str(checkpoint("sft")), "exported"]) == 0
    exported = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), exported.parameters(), strict=True))
    # The newest checkpoint of a run starts the next run.
    assert train("model=sft", *GRPO, *LITTLE, *NO_CHECKPOINTS, "out=grpo") == 0
    assert len(rows("grpo")) >= 2


@nightly
def test_gguf_of_the_export_answers_as_transformers(real_model, tokenizer):
    conversations()
    words = ["recipe=sft", "data=chats.jsonl", "recipe.batch_size=8", "optim.lr=1e-5", *LITTLE]
    assert train(f"model={real_model}", *words, "out=sft") == 0
    assert run(["weights", "export", str(checkpoint("sft")), "exported", "--gguf"]) == 0
    trained = AutoModelForCausalLM.from_pretrained(checkpoint("sft"), dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained("exported", gguf_file="model.gguf", dtype=torch.float32)
    for question in QUESTIONS:
        assert answer(again, tokenizer, question) == answer(trained, tokenizer, question)


@nightly
def test_distillation_moves_the_student_to_its_teacher(real_model):
    conversations()
    words = ["recipe=sft", "data=chats.jsonl", "recipe.batch_size=16", "optim.lr=5e-5", *LITTLE]
    assert train(f"model={real_model}", *words, "recipe.steps=4", "out=teacher") == 0
    prompts = "".join(json.dumps({"prompt": [{"role": "user", "content": f"Add {a} and 7."}]}) + "\n" for a in range(16))
    write("prompts.jsonl", prompts)
    words = [
        "recipe=distill",
        "recipe.teacher=teacher",
        "data=prompts.jsonl",
        "recipe.prompts_per_step=8",
        "recipe.group_size=2",
    ]
    words += [
        "rollout.max_tokens=12",
        "eval.max_tokens=12",
        "optim.lr=2e-5",
        "eval.every=null",
        "eval.limit=2",
        *NO_CHECKPOINTS,
    ]
    assert train(f"model={real_model}", *words, "recipe.steps=6", "out=student") == 0
    distances = [row["kl/student_teacher_k1"] for row in rows("student") if "kl/student_teacher_k1" in row]
    assert distances[-1] < distances[0]


@nightly
def test_a_server_gives_the_numbers_of_the_embedded_trainer_and_answers_chats(real_model, tmp_path, reference, tokenizer):
    conversations()
    words = ["recipe=sft", "data=chats.jsonl", "recipe.batch_size=8", "optim.lr=1e-5", *LITTLE, *NO_CHECKPOINTS]
    assert train(f"model={real_model}", *words, "out=embedded") == 0
    with servertools.running(real_model, tmp_path / "server", names=["smollm2"]) as server:
        remote = ["backend=remote", f"backend.base_url={server.url}"]
        assert train(f"model={real_model}", *words, *remote, "out=remote") == 0
        body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 16, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
    embedded, remote_losses = ([row["loss"] for row in rows(folder) if "loss" in row] for folder in ("embedded", "remote"))
    assert embedded == remote_losses
    assert reply["choices"][0]["message"]["content"].strip() == text(reference, tokenizer, QUESTIONS[0])
    assert reply["choices"][0]["finish_reason"] == "stop"
