"""LinearCrossEntropyLoss as another library's trainer uses it, against transformers' own loss."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from cookbook.engine.head.fused_loss import FusedOutputLoss, LinearCrossEntropyLoss, hidden_states_of, without_logits
from cookbook.engine.head.linear_logprobs import implementations, low_rank_of
from cookbook.engine.head.linear_logprobs.api import LinearLayer
from cookbook.errors import ConfigError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.fixture(params=["untied", "tied and capped"])
def model(request):
    torch.manual_seed(0)
    if request.param == "untied":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).double()
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=2.0, tie_word_embeddings=True)).double()


@pytest.fixture
def batch():
    tokens = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, :4] = -100
    labels[1, 7:] = -100
    return tokens, labels


def fused(model, **options) -> LinearCrossEntropyLoss:
    capping = getattr(model.config, "final_logit_softcapping", None)
    return LinearCrossEntropyLoss(model.get_output_embeddings(), softcap=capping, **options)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_it_is_transformers_own_loss(model, batch, chunk_size):
    tokens, labels = batch
    mine = fused(model, chunk_size=chunk_size)(model.model(tokens), labels)
    mine.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    theirs = model(tokens, labels=labels).loss
    theirs.backward()
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)  # transformers computes its loss in float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_logits_for_inference_are_the_models(model, batch):
    tokens, _ = batch
    assert torch.allclose(fused(model).forward_logits(model.model(tokens)), model(tokens).logits, atol=1e-12)


def test_the_weight_is_read_at_call_time(model, batch):
    tokens, labels = batch
    loss = fused(model)
    before = loss(model.model(tokens), labels)
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight * 2)
    assert loss(model.model(tokens), labels) != before


def test_a_bias_belongs_to_the_layer():
    layer = torch.nn.Linear(4, 9)
    hidden, labels = torch.randn(2, 5, 4), torch.randint(0, 9, (2, 5))
    loss = LinearCrossEntropyLoss(layer)(hidden, labels)
    logits = layer(hidden)[:, :-1].reshape(-1, 9)
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)))


def test_nothing_to_learn_is_a_zero_with_a_graph():
    layer = torch.nn.Linear(4, 9)
    loss = LinearCrossEntropyLoss(layer)(torch.randn(2, 5, 4), torch.full((2, 5), -100))
    loss.backward()
    assert loss == 0
    assert not layer.weight.grad.any()


HIDDEN = torch.randn(2, 5, 4)


@pytest.mark.parametrize(
    "output",
    [
        HIDDEN,
        (HIDDEN, None),
        SimpleNamespace(last_hidden_state=HIDDEN, hidden_states=None),
        SimpleNamespace(logits=torch.zeros(1), hidden_states=(torch.zeros(1), HIDDEN)),
        (SimpleNamespace(last_hidden_state=HIDDEN), None),
    ],
)
def test_whatever_holds_hidden_states(output):
    assert hidden_states_of(output) is HIDDEN


@pytest.mark.parametrize("output", [[1.0], None, (), SimpleNamespace(logits=HIDDEN), {"a": 1}])
def test_anything_else_is_an_error_naming_its_type(output):
    with pytest.raises(ValueError, match=f"got a {type(output).__name__}"):
        hidden_states_of(output)


def test_labels_must_match():
    with pytest.raises(ConfigError, match=r"hidden states' shape \(2, 5\), got \(2, 4\)"):
        LinearCrossEntropyLoss(torch.nn.Linear(4, 9))(HIDDEN, torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (-1, r"labels\[1, 3\]: must be a token of the vocabulary, in \[0, 9\), or the ignore index -100, got -1; pass -100"),
        (9, r"labels\[1, 3\]: .* got 9;"),
        (1 << 40, r"labels\[1, 3\]: .* got 1099511627776;"),
    ],
)
@pytest.mark.parametrize("kind", ["linear", "other"])
def test_a_label_outside_the_vocabulary_is_an_error(label, message, kind):
    layer = torch.nn.Linear(4, 9) if kind == "linear" else Doubled(4, 9)
    labels = torch.randint(0, 9, (2, 5))
    labels[0, 1:3] = -100
    LinearCrossEntropyLoss(layer)(HIDDEN, labels)
    labels[1, 3] = label
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(layer)(HIDDEN, labels)


@pytest.mark.parametrize("labels", [None, torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.bool)])
def test_labels_are_whole_numbers(labels):
    with pytest.raises(ConfigError, match=r"^labels: "):
        LinearCrossEntropyLoss(torch.nn.Linear(4, 9))(HIDDEN, labels)


def test_labels_may_be_int32():
    layer, labels = torch.nn.Linear(4, 9), torch.randint(0, 9, (2, 5))
    assert LinearCrossEntropyLoss(layer)(HIDDEN, labels.int()) == LinearCrossEntropyLoss(layer)(HIDDEN, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "fast"}, "impl: must be one of auto, pytorch, torch_compile, cce, or file.py:name, got 'fast'"),
        ({"chunk_size": 0}, "chunk_size: must be at least 1"),
        ({"filter_eps": "auto"}, "impl: auto has no option 'filter_eps'"),
        (
            {"impl": "cce", "filter_epsilon": 0.1},
            r"impl: cce has no option 'filter_epsilon'; remove it \(options: filter_eps\)",
        ),
        ({"impl": "cce", "filter_eps": 2.0}, "filter_eps: expected null, auto, high or a number between 0 and 1, got 2.0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        LinearCrossEntropyLoss(torch.nn.Linear(4, 9), **options)


def test_weight_and_bias_are_the_layers_own():
    layer = torch.nn.Linear(4, 9)
    loss = LinearCrossEntropyLoss(layer, impl="cce", chunk_size=64, filter_eps="auto")
    assert loss.weight is layer.weight
    assert loss.bias is layer.bias
    layer.weight = torch.nn.Parameter(torch.zeros(9, 4))
    assert loss.weight is layer.weight
    assert LinearCrossEntropyLoss(torch.nn.Linear(4, 9, bias=False)).bias is None


def test_a_missing_package_falls_back_with_one_warning(caplog):
    if importlib.util.find_spec("cut_cross_entropy"):
        pytest.skip("cut-cross-entropy is installed")
    implementations._cannot.cache_clear()
    layer, labels = torch.nn.Linear(4, 9, bias=False), torch.randint(0, 9, (2, 5))
    with caplog.at_level(logging.WARNING, logger="cookbook"):
        losses = [LinearCrossEntropyLoss(layer, impl="cce")(HIDDEN, labels) for _ in range(2)]
    assert losses[0] == LinearCrossEntropyLoss(layer)(HIDDEN, labels)
    assert [record.message for record in caplog.records] == [
        "impl=cce does not run here: the package is not installed (pip install 'post-training-cookbook[cce]'); "
        "impl=pytorch is used instead"
    ]


@pytest.mark.parametrize("num_items", [7, 7.0, torch.tensor(7)])
@pytest.mark.parametrize("kind", ["linear", "other", "supplied"])
def test_num_items_in_batch_divides_the_sum(num_items, kind):
    layer = Doubled(4, 9) if kind == "other" else torch.nn.Linear(4, 9)
    loss = LinearCrossEntropyLoss(layer, impl=plain if kind == "supplied" else "auto")
    labels = torch.randint(0, 9, (2, 5))
    labels[0, :3] = -100
    assert loss(HIDDEN, labels, num_items_in_batch=num_items).item() == pytest.approx(loss(HIDDEN, labels).item() * 6 / 7)


def plain(hidden, weight, targets, *, bias, scale, softcap, temperature):
    return (scale * (hidden @ weight.T + bias)).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("num_items", [0, torch.tensor(0)])
def test_a_batch_without_labels_adds_nothing(num_items):
    """If prompts fill all rows, transformers counts 0 labels."""
    layer = torch.nn.Linear(4, 9)
    found = LinearCrossEntropyLoss(layer)(HIDDEN, torch.full((2, 5), -100), num_items_in_batch=num_items)
    found.backward()
    assert found == 0 and not layer.weight.grad.any()


def trained(model, tmp_path, accumulation, **options):
    """Losses and weights of three steps of transformers' own Trainer, on rows with different numbers of labels."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for index in range(6 * accumulation):
        tokens = torch.randint(1, 97, (11,), generator=draw)
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(11) < 2 + index % 7, -100)})
    # Its imports take two seconds, in every process that collects the tests.
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, **options)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], list(model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("accumulation", "logits"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_it_is_a_loss_of_transformers_trainer(model, tmp_path, accumulation, logits):
    model = model.float()
    mine = copy.deepcopy(model)
    losses, weights = trained(model, tmp_path, accumulation)
    if logits:
        mine.config.output_hidden_states = True
    with contextlib.nullcontext() if logits else without_logits(mine):
        found, moved = trained(mine, tmp_path, accumulation, compute_loss_func=fused(mine))
    assert len(found) == 3
    assert found == pytest.approx(losses, rel=1e-5)
    for ours, theirs in zip(moved, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_an_adapted_model_without_its_logits(batch):
    model, (tokens, labels) = adapted(), batch
    with without_logits(model):
        loss = LinearCrossEntropyLoss(model.get_output_embeddings())(model(tokens), labels)
    assert loss.item() == pytest.approx(model(tokens, labels=labels).loss.item(), rel=1e-6)


def test_a_model_without_its_logits(model, batch):
    tokens, labels = batch
    hidden = model.model(tokens).last_hidden_state
    with without_logits(model):
        output = model(tokens)
    assert output.logits.shape == (3, 1, 97)
    assert torch.equal(hidden_states_of(output), hidden)
    assert torch.equal(fused(model)(output, labels), fused(model)(hidden, labels))
    assert model(tokens).logits.shape == (3, 11, 97)
    assert model(tokens).hidden_states is None


def test_another_implementation_takes_its_place():
    layer, labels = torch.nn.Linear(4, 9, bias=False), torch.randint(0, 9, (2, 5))

    def plain(hidden, weight, targets, *, bias, scale, softcap, temperature):
        return (scale * hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0].float()

    expected = LinearCrossEntropyLoss(layer, scale=0.5)(HIDDEN, labels)
    torch.testing.assert_close(LinearCrossEntropyLoss(layer, plain, scale=0.5)(HIDDEN, labels), expected)
    refused = LinearCrossEntropyLoss(layer, lambda *_, **__: None, scale=0.5)(HIDDEN, labels)
    torch.testing.assert_close(refused, expected)


def adapted(**options):
    """A model with PEFT's LoRA on its head, no longer at its start, where B is 0."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).double()
    wrapped = get_peft_model(model, LoraConfig(r=3, target_modules=["lm_head"], **options), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return wrapped


@pytest.mark.parametrize(
    ("options", "linear"),
    [
        ({}, True),
        ({"use_rslora": True}, True),
        ({"use_dora": True}, False),
        ({"lora_bias": True}, False),
        ({"lora_dropout": 1e-9}, False),  # a dropout is recognized, though too rare to change the result
    ],
)
def test_an_adapter_on_the_head_is_part_of_it(options, linear, batch):
    model, (tokens, labels) = adapted(**options), batch
    assert (low_rank_of(model.get_output_embeddings()) is not None) == linear
    hidden = model.base_model.model.model(tokens).last_hidden_state
    LinearCrossEntropyLoss(model.get_output_embeddings(), chunk_size=5)(hidden, labels).backward()
    mine = {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}
    model.zero_grad()
    model(tokens, labels=labels).loss.backward()
    assert len(mine) >= 2
    for name, gradient in mine.items():  # transformers computes its loss in float32
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


def test_an_adapter_is_as_it_is_now():
    model = adapted(lora_dropout=0.5)
    layer = model.get_output_embeddings()
    assert low_rank_of(layer) is None
    model.eval()
    assert low_rank_of(layer).low_rank.scaling == layer.scaling["default"]
    with model.disable_adapter():
        assert low_rank_of(layer) == LinearLayer(layer.base_layer.weight)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["lm_head"]))
    model.base_model.set_adapter(["default", "other"])
    assert low_rank_of(layer) is None
    model.base_model.set_adapter("default")
    layer.merge()
    assert low_rank_of(layer) is None


def test_a_float32_adapter_on_a_bfloat16_head():
    model = adapted().bfloat16()
    layer = model.get_output_embeddings()
    layer.lora_A.float()
    layer.lora_B.float()
    hidden, labels = torch.randn(2, 5, 16).bfloat16(), torch.randint(0, 97, (2, 5))
    loss = LinearCrossEntropyLoss(layer)(hidden, labels)
    loss.backward()
    logits = layer(hidden)[:, :-1].float().reshape(-1, 97)
    # bfloat16 rounds a logit to 0.4%; they are of the size of 10 here, eight tokens are averaged.
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)).item(), abs=0.02)
    assert layer.lora_B["default"].weight.grad.dtype == torch.float32


class Doubled(torch.nn.Linear):
    """Stands for a quantized layer: its output is not its weight's. ``seen`` are the rows of its calls."""

    def forward(self, x):
        self.seen = [*getattr(self, "seen", []), len(x)]
        return 2 * super().forward(x)


def test_a_layer_of_another_kind_is_run_itself():
    torch.manual_seed(0)
    layer, labels = Doubled(4, 9), torch.randint(0, 9, (2, 5))
    loss = LinearCrossEntropyLoss(layer, chunk_size=3, scale=0.5, softcap=3.0)
    loss(HIDDEN, labels)
    assert layer.seen == [3, 3, 2]
    logits = loss.forward_logits(HIDDEN)[:, :-1].reshape(-1, 9)
    assert torch.equal(loss.forward_logits(HIDDEN), 3.0 * torch.tanh(layer(HIDDEN) * 0.5 / 3.0))
    assert torch.allclose(loss(HIDDEN, labels), torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1)))
    assert loss(HIDDEN, torch.full((2, 5), -100)) == 0


def test_a_forward_written_over_the_layers_own_counts():
    layer = torch.nn.Linear(4, 9)
    assert low_rank_of(layer) == LinearLayer(layer.weight, layer.bias)
    layer.forward = lambda x: x
    assert low_rank_of(layer) is None


def test_it_satisfies_the_protocol_that_others_may_implement():
    assert isinstance(LinearCrossEntropyLoss(torch.nn.Linear(4, 9)), FusedOutputLoss)
