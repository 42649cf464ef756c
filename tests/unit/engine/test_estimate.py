"""Estimates of `cookbook plan`, against closed forms and against the memory of a real pass."""

from __future__ import annotations

import os
from pathlib import Path

import families
import numpy as np
import pytest
import tiny
from marks import rest_slow

from cookbook.cli import plan
from cookbook.cli.app import run
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.estimate import _LiveBytes, estimate
from cookbook.engine.heap import Heap
from cookbook.engine.model import ModelConfig
from cookbook.engine.precision import DEFAULT, Precision
from cookbook.losses import CrossEntropy
from cookbook.types import SamplingParams, datum_from_tokens_weights

ROWS, WIDTH = 4, 32


def found(folder, reference=False, passes=1, interleaved=True, retain_bytes=0, cpu=True, checkpointing=False, **model):
    options = {
        "interleaved": interleaved,
        "retain_bytes": retain_bytes,
        "reference": reference,
        "cpu": cpu,
        "checkpointing": checkpointing,
    }
    options |= {"precision": model.pop("precision", DEFAULT)}
    return estimate(ModelConfig(str(folder), **model), ROWS, WIDTH, step_tokens=passes * ROWS * WIDTH, **options)


@pytest.mark.slow
def test_arithmetic_is_that_of_the_matrix_products(tiny_folder, make_engine):
    config = make_engine().model.network.config
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    attention = hidden * head_dim * (2 * heads + 2 * config.num_key_value_heads)  # q and o, k and v
    layer = attention + 3 * hidden * config.intermediate_size
    products = 6 * (config.num_hidden_layers * layer + hidden * config.vocab_size)
    # Scores and mixing forward; both again for either factor and the scores once more backward: 7 products of T x T x D.
    scores = config.num_hidden_layers * 7 * 2 * WIDTH * heads * head_dim
    per_token = found(tiny_folder).flops_per_token
    # Besides: the one position of a pass that the network's own head sees, forward.
    assert per_token == pytest.approx(products + scores + 2 * hidden * config.vocab_size / (ROWS * WIDTH), rel=1e-3)
    again = found(tiny_folder, checkpointing=True).flops_per_token - per_token
    # The backward pass does not read the result of a layer's last product.
    recomputed = layer - hidden * config.intermediate_size
    # The last layer keeps its activations.
    share = (config.num_hidden_layers - 1) / config.num_hidden_layers
    assert again == pytest.approx(share * (config.num_hidden_layers * 2 * recomputed + 2 / 7 * scores), rel=1e-3)


def test_sampling_counts_keys_values_and_logits(tiny_folder, make_engine):
    """The estimate is between the bytes that a sampler holds at least and twice what it allocates at its worst moment."""
    rows, prompt, new = 16, 24, 8
    engine = make_engine()
    config = engine.model.network.config
    request = SampleRequest(list(range(prompt)), rows, SamplingParams(max_tokens=new, seed=0, stop=[]), 0)
    with _LiveBytes() as alive:
        before = alive.now
        sample(engine.model, [request], 0, 4096)
    sampled = [(rows, prompt + new), (1, 2)]
    options = {"interleaved": True, "retain_bytes": 0, "reference": False, "cpu": True, "sampled": sampled}
    estimated = estimate(ModelConfig(str(tiny_folder)), ROWS, WIDTH, step_tokens=ROWS * WIDTH, **options)
    held = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * rows * (prompt + new)
    assert held < estimated.sampling < 2 * (alive.peak - before)
    assert estimated.peak - found(tiny_folder).peak == estimated.sampling


@pytest.mark.parametrize(("family", "caches"), [("mamba", False), ("deepseek_v3", True)])
def test_sampling_is_counted_for_models_without_ordinary_heads(tmp_path, family, caches):
    """A recurrent model caches nothing per token, latent attention one vector."""
    config = families.network(family).config
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    rows, tokens = 4, 16
    options = {"interleaved": True, "retain_bytes": 0, "reference": False, "cpu": True, "sampled": [(rows, tokens)]}
    sampling = estimate(ModelConfig(str(tmp_path)), ROWS, WIDTH, step_tokens=ROWS * WIDTH, **options).sampling
    logits = 2 * rows * config.vocab_size * 4
    assert (sampling > logits) == caches and sampling >= logits


@pytest.mark.slow
def test_states_are_counted_by_their_bytes(tiny_folder, make_engine):
    count = make_engine().model.network.num_parameters()
    full = found(tiny_folder, reference=True)
    assert (full.parameters, full.trained) == (count, count)
    assert (full.weights, full.gradients, full.moments, full.reference) == (4 * count, 4 * count, 8 * count, 4 * count)
    half = found(tiny_folder, dtype="bfloat16")
    assert (half.weights, half.gradients, half.moments) == (2 * count, 4 * count, 12 * count)
    engine = make_engine(lora_rank=4)
    adapter = sum(parameter.numel() for _, parameter in engine.model.trainable())
    lora = found(tiny_folder, lora_rank=4, reference=True)
    assert (lora.trained, lora.moments, lora.reference) == (adapter, 8 * adapter, 0)  # the base model is the reference
    states = full.weights + full.gradients + full.moments + full.reference
    assert full.peak == states + full.temporary + full.allocator
    assert found(tiny_folder, cpu=False).allocator == 0  # a GPU's has blocks of its own


def test_kept_graphs_are_those_of_a_real_pass(tiny_folder, make_engine):
    engine = make_engine(token_metrics=False)
    tokens = np.arange(ROWS * (WIDTH + 1)).reshape(ROWS, -1) % tiny.VOCABULARY
    loss = CrossEntropy()
    data = loss.prepare([datum_from_tokens_weights(row, np.ones(WIDTH + 1)) for row in tokens])
    engine.forward_backward(data, loss)
    logits = 4 * tiny.VOCABULARY
    # Besides logits, the output layer keeps a few numbers a token. One hidden state, 128 bytes, was saved for a part of the
    # graph without effect: the count of a real pass includes it, unless another storage reuses its address.
    assert found(tiny_folder).saved_per_token == pytest.approx(engine.passes.bytes_per_token - logits, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"precision": Precision(autocast="bfloat16")}], ids=str)
def test_attention_keeps_its_weights_on_a_cpu_that_multiplies_bfloat16(tiny_folder, make_engine, monkeypatch, options):
    """Two bytes for each head and each key of a block, and none on a GPU."""
    monkeypatch.setattr("cookbook.engine.precision.attention.instructions", lambda: "avx512_bf16")
    monkeypatch.setattr("cookbook.engine.precision.choice.instructions", lambda: "avx512_bf16")
    monkeypatch.setattr("cookbook.engine.precision.attention.LEAST_OF_NARROW_HEADS", 0)
    gpu, kept = (found(tiny_folder, cpu=cpu, **options).saved_per_token for cpu in (False, True))
    assert gpu < kept
    monkeypatch.setattr("cookbook.engine.precision.attention.MOST_KEYS_KEPT", 0)
    config = make_engine().model.network.config
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    assert kept - found(tiny_folder, **options).saved_per_token == layers * heads * WIDTH * 2
    assert found(tiny_folder, cpu=False, **options).saved_per_token == gpu


@pytest.mark.slow
def test_what_a_loss_keeps_is_added_up_to_the_budget(tiny_folder):
    alone = found(tiny_folder, interleaved=False)
    kept = ROWS * WIDTH * alone.saved_per_token
    twice = found(tiny_folder, interleaved=False, passes=2, retain_bytes=1 << 30)
    assert twice.temporary - alone.temporary == pytest.approx(kept, abs=1)
    assert found(tiny_folder, interleaved=False, passes=2, retain_bytes=100).temporary - alone.temporary == 100
    assert found(tiny_folder, interleaved=False, passes=1, retain_bytes=1 << 30).temporary == alone.temporary


@pytest.mark.slow
def test_a_second_pass_meets_the_gradients_of_the_first(tiny_folder):
    """At the worst moment of the first, when nearly all activations are alive, few gradients are."""
    more = found(tiny_folder, passes=3).temporary - found(tiny_folder).temporary
    assert 0 < more <= found(tiny_folder).gradients


@pytest.mark.slow
def test_recomputing_activations_saves_memory(tiny_folder):
    kept, again = found(tiny_folder), found(tiny_folder, checkpointing=True)
    # Of the two layers, the last one keeps its activations.
    assert again.saved_per_token < 0.6 * kept.saved_per_token
    assert again.temporary < kept.temporary


def test_a_gap_is_too_small_for_another_aligned_block_of_its_size():
    heap = Heap()
    blocks = [heap.allocate(1000) for _ in range(4)]
    grown = heap.extent
    heap.free(blocks[1])
    heap.allocate(1000)
    assert heap.extent > grown  # glibc 2.36 searches for 1,000 bytes and room to align them
    grown = heap.extent
    heap.free(blocks[2])
    again = heap.allocate(1500)  # both gaps are one now
    assert again == blocks[1] and heap.extent == grown


def test_the_end_of_the_heap_is_used_again():
    heap = Heap()
    kept, freed = heap.allocate(1000), heap.allocate(5000)
    heap.free(freed)
    assert heap.allocate(4000) == freed and heap.extent == 1008 + 5008
    heap.free(kept)
    assert heap.allocate(10) == kept


def test_a_large_block_is_returned_when_it_is_freed_unless_the_heap_has_space():
    heap = Heap(largest=4000)
    small, large = heap.allocate(1000), heap.allocate(5000)
    assert large < 0 <= small and heap.extent == 1008 + 5008
    heap.free(large)
    # The next block grows the heap by less than the freed block had.
    assert heap.allocate(3000) == 1008 and heap.extent == 1008 + 5008
    # A large block in a gap, or at the free end, is a part of the heap.
    heap.free(1008)
    assert heap.allocate(2900) == 1008
    free = Heap(largest=4000)
    free.free([free.allocate(3000), free.allocate(3000)][0])
    assert free.allocate(5000) < 0


def test_completions_of_a_prompt_share_it():
    assert plan._computed(71, 24, 8) == 47 + 8 * 24
    assert plan._computed(71, 24, 1) == 71
    assert plan._computed(100, 95, 8) == 800  # too little is shared
    assert plan._computed(71, 0, 8) == 8 * 71


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_no_weight_is_allocated(tmp_path):
    """A model of 6 GB is planned in the memory of its shapes."""
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=2).save_pretrained(tmp_path)
    before = resident()
    planned = found(tmp_path)
    assert planned.weights > 6e9
    assert resident() - before < 3e8


@pytest.mark.slow
def test_the_command_says_it_in_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "recipe=dpo", "recipe.batch_size=2", "data.limit=50"]) == 0
    out = capsys.readouterr().out
    assert "624,384, of which 624,384 are trained" in out
    assert "reference" in out and "GB of Python and torch" in out
    assert "7.5 MB each on the disk, of which 5.0 MB are optimizer state" in out
    assert dict(line.split(None, 1) for line in out.splitlines())["recomputed"].startswith("no")
    assert run(["plan", "recipe=sft", "data.limit=50", "backend.activation_checkpointing=true"]) == 0
    assert dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())["recomputed"] == "yes: as configured"
    assert run(["plan", "recipe=sft", "model.name=./nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# The engine is asked about a pass of the whole budget, 4,096 tokens on a CPU; the plan about the passes of its step.
@pytest.mark.parametrize(
    ("free", "budget", "recomputed", "planned"),
    [(16, 8192, True, "no;"), (16, 1000, False, "no;"), (100, 8192, False, "no;"), (0, 8192, True, "yes")],
)
@pytest.mark.slow
def test_it_decides_on_recomputing_as_the_engine_does(
    capsys, monkeypatch, make_engine, tiny_folder, free, budget, recomputed, planned
):
    weights = make_engine().model.network.num_parameters() * 4
    monkeypatch.setattr("cookbook.engine.memory.free_bytes", lambda device: free * 10**6 - weights)
    engine = make_engine(activation_checkpointing=None, micro_batch_tokens=budget)
    assert engine.options.activation_checkpointing is recomputed
    monkeypatch.setattr("cookbook.cli.plan.free_bytes", lambda device: free * 10**6)
    words = ["recipe=sft", "recipe.batch_size=2", "data.limit=50", f"model.name={tiny_folder}"]
    assert run(["plan", *words, f"backend.micro_batch_tokens={budget}"]) == 0
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert told["recomputed"][:3] == planned


@pytest.mark.slow
def test_a_model_that_masks_its_attention_by_itself_is_counted_unpacked(tmp_path):
    families.network("doge").config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert found(tmp_path).temporary > 0


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16"]))
def test_a_mixture_counts_the_experts_that_a_token_is_sent_to(tmp_path, dtype):
    network = families.network("mixtral")
    network.config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = network.config
    head_dim = config.hidden_size // config.num_attention_heads
    attention = config.hidden_size * head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    router = config.hidden_size * config.num_local_experts
    experts = config.num_experts_per_tok * 3 * config.hidden_size * config.intermediate_size
    products = 6 * (config.num_hidden_layers * (attention + router + experts) + config.hidden_size * config.vocab_size)
    scores = config.num_hidden_layers * 7 * 2 * WIDTH * config.num_attention_heads * head_dim
    per_token = found(tmp_path, dtype=dtype).flops_per_token
    assert per_token == pytest.approx(products + scores + 2 * config.hidden_size * config.vocab_size / (ROWS * WIDTH), rel=1e-2)


def test_a_plan_without_usable_rows_is_one_line(tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "completion": ""}\n')
    words = ["plan", "recipe=sft", "model=tiny", f"data={tmp_path / 'rows.jsonl'}"]
    assert run(words) == 2
    assert "error: data: no row can be used, so there is no step to plan; the first: " in capsys.readouterr().err
