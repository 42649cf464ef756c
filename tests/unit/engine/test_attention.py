"""Sequences in one row, and prefixes computed once, give the results of every sequence alone; architectures that would not are
refused."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import tiny
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import create_causal_mask

from cookbook.engine import attention, capabilities
from cookbook.engine.attention import AttentionBlock, AttentionLayout, AttentionParams, SharedPrefixKV
from cookbook.engine.batch.collate import collate
from cookbook.engine.batch.plan import PackingSupport, plan
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.estimate import _LiveBytes
from cookbook.engine.model import LanguageModel, ModelConfig
from cookbook.losses import DPO
from cookbook.types import Datum, ModelInput

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": tiny.CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "full": ("Qwen3", {}),
    "sliding": ("Qwen3", {**WINDOW, "use_sliding_window": True}),
    "soft-capped": ("Gemma2", {**WINDOW, "attn_logit_softcapping": 2.0}),
    "sinks": ("GptOss", {**WINDOW, **EXPERTS, "rope_parameters": {"rope_type": "default"}}),
}
# Qwen3 is float64 throughout here; the order of about a hundred sums still differs. The others compute softmax in float32.
EXACT = {"full": 1e-12, "sliding": 1e-12, "soft-capped": 2e-6, "sinks": 2e-6}
LAYOUTS = {"padded": PackingSupport(False, False), "packed": PackingSupport(True, False), "shared": PackingSupport()}


@functools.cache
def network(name):
    """With the attention of transformers, in float64."""
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in list(made.modules()):
        for child, norm in module.named_children():
            if type(norm).__name__ == "Qwen3RMSNorm":  # it computes in float32; torch's does not
                double = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
                double.weight = norm.weight
                setattr(module, child, double)
    return made


def ours(name):
    made = copy.deepcopy(network(name))
    attention.install(made)
    return made


def sequences(seed=0):
    """Ragged groups, a sequence that begins another, twins, loners."""
    rng = np.random.default_rng(seed)

    def draw(length):
        return rng.integers(0, tiny.VOCABULARY, length).tolist()

    prompts = [draw(length) for length in (20, 13, 30)]
    tokens = [prompts[0] + draw(length) for length in (3, 9, 1, 3)] + [prompts[1] + draw(5) for _ in range(2)]
    tokens += [prompts[2], prompts[2] + draw(4)] + [tokens[4]] + [draw(length) for length in (17, 1, 6)]
    rng.shuffle(tokens)
    return [Datum(ModelInput.from_ints(one), {"target_tokens": np.array(draw(len(one)))}) for one in tokens]


DATA = sequences()


def target_logprobs(logits, datum):
    return logits.log_softmax(-1).gather(-1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]


def alone(model):
    """Every datum in a pass of its own."""
    return [
        target_logprobs(model(input_ids=torch.tensor([datum.model_input.tokens]), use_cache=False).logits[0], datum)
        for datum in DATA
    ]


def together(model, layouts, budget, *, told=True):
    found = {}
    for batch in plan(DATA, budget, layouts).batches:
        inputs = collate(DATA, batch, CPU)
        arguments = inputs.arguments if told else {**inputs.arguments, "layout": None}
        with attention.skip_masks(told and inputs.layout is not None):
            logits = model(**arguments, use_cache=False).logits.flatten(0, 1)[inputs.flat_indices]
        parts = logits.split([DATA[index].model_input.length for index in batch.indices])
        found |= {index: target_logprobs(part, DATA[index]) for index, part in zip(batch.indices, parts, strict=True)}
    return [found[index] for index in range(len(DATA))]


def gradients(model, logprobs):
    """Of a sum that weighs every token of every datum differently, shared ones too."""
    weights = torch.randn(sum(map(len, logprobs)), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(torch.cat(logprobs) @ weights, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@functools.cache
def expected(name):
    logprobs = alone(network(name))
    return [row.detach() for row in logprobs], gradients(network(name), logprobs)


@pytest.mark.parametrize("budget", [70, 10_000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_layout_changes_nothing(name, layout, budget):
    assert plan(DATA, budget, LAYOUTS[layout]).layout == layout
    model = ours(name)
    logprobs = together(model, LAYOUTS[layout], budget)
    assert apart(logprobs, expected(name)[0]) < EXACT[name]
    assert tiny.difference(gradients(model, logprobs), expected(name)[1]) < EXACT[name]


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_recomputed_layers_read_the_same(layout):
    model = ours("sliding").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, together(model, LAYOUTS[layout], 10_000))
    assert tiny.difference(found, expected("sliding")[1]) < EXACT["sliding"]


def test_without_the_layout_it_would_show():
    """The tolerance can fail: the same passes with sequences that attend to each other exceed it."""
    found = together(ours("full"), LAYOUTS["shared"], 10_000, told=False)
    assert apart(found, expected("full")[0]) > 0.01


def apart(found, logprobs):
    return tiny.difference([row.detach() for row in found], logprobs)


# ---- the kernel for GPUs -----------------------------------------------------------------------------------------------

KEYS = torch.tensor([*range(10), *range(6, 12), *range(6, 10), 12, 13])  # the last two runs read the third
LAYOUT = AttentionLayout((AttentionBlock(2, 3, 3), AttentionBlock(1, 4, 4), AttentionBlock(2, 2, 6)), KEYS, CPU)


def varlen(query, key, value, starts, key_starts, max_queries, max_keys, *, scale, window_size, enable_gqa):
    """As torch.nn.attention.varlen documents: of every run, the last query sees up to the last key, and ``window_size[0]``
    keys before its own."""
    assert (int(starts.diff().max()), int(key_starts.diff().max())) == (max_queries, max_keys)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out = torch.empty_like(query)
    for run in range(len(starts) - 1):
        rows = slice(int(starts[run]), int(starts[run + 1]))
        columns = slice(int(key_starts[run]), int(key_starts[run + 1]))
        own = torch.arange(rows.stop - rows.start)[:, None] + (columns.stop - columns.start) - (rows.stop - rows.start)
        other = torch.arange(columns.stop - columns.start)
        seen = (other <= own + window_size[1]) & ((other >= own - window_size[0]) | (window_size[0] < 0))
        for head in range(query.shape[1]):
            of = head // (query.shape[1] // key.shape[1])
            scores = (query[rows, head] @ key[columns, of].T * scale).masked_fill(~seen, float("-inf"))
            out[rows, head] = scores.softmax(-1) @ value[columns, of]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_variable_length_kernel_is_told_the_same(window, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(14, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    rule = AttentionParams(0.3, 0.0, None, None)
    found = attention._attend(query, key, value, LAYOUT, window, rule)
    # No score reaches the cap.
    scored = attention._attend(query, key, value, LAYOUT, window, AttentionParams(0.3, 0.0, 1e9, None))
    assert torch.allclose(found, scored, rtol=0, atol=1e-12)
    monkeypatch.setattr(attention, "_supports_varlen", lambda *_: True)
    monkeypatch.setattr(attention, "_varlen_kernel", lambda: varlen)
    assert torch.allclose(found, attention._attend(query, key, value, LAYOUT, window, rule), rtol=0, atol=1e-14)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_the_variable_length_kernel_of_torch(window):
    if attention._varlen_kernel() is None:
        pytest.skip("this torch has none")
    layout = AttentionLayout(LAYOUT.blocks, LAYOUT.key_index.cuda(), torch.device("cuda"))
    stream = [torch.randn(14, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    rule = AttentionParams(0.125, 0.0, None, None)
    found = attention._attend(*stream, layout, window, rule)
    double = [x.detach().double().requires_grad_() for x in stream]
    own = attention._attend(*double, layout, window, rule)
    upstream = torch.randn_like(found)
    slopes = [torch.autograd.grad(out, x, upstream.to(out)) for out, x in ((found, stream), (own, double))]
    assert tiny.difference([found, *slopes[0]], [own, *slopes[1]]) < 1e-2  # bfloat16 has 8 bits


# ---- samples that continue a prompt -- ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["in order", "out of order", "padded", "soft-capped", "sinks"])
def test_samples_read_their_prompt_once_and_see_what_each_would_alone(change):
    """Four samples of two prompts, 4 heads on 2: as of every row by itself, its prompt copied in front of its own keys."""
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = draw(4, 4, 1, 8), draw(4, 2, 4, 8), draw(4, 2, 4, 8)  # of four columns, three are filled
    layer = draw(2, 2, 5, 8), draw(2, 2, 5, 8)
    of, members, places, mask = [0, 0, 1, 1], None, None, None
    if change != "in order":
        of, members, places = [1, 0, 0, 0], torch.tensor([1, 2, 3, 0, 0, 0]), torch.tensor([3, 0, 1, 2])
    if change == "padded":
        mask = torch.ones(4, 1, 1, 9, dtype=torch.bool)
        mask[0, ..., :2] = mask[0, ..., 5] = False
    rule = AttentionParams(0.3, 0.0, 2.0 if change == "soft-capped" else None, draw(4) if change == "sinks" else None)
    slots = 2 if members is None else 3
    found = SharedPrefixKV([layer], 3, slots, members, places, mask).attend(query, key, value, 0, rule)
    for row, prompt in enumerate(of):
        read = zip(layer, (key, value), strict=True)
        keys, values = (torch.cat([of_all[prompt], own[row, :, :3]], 1) for of_all, own in read)
        for head in range(4):
            scores = keys[head // 2] @ query[row, head, 0] * rule.scale
            scores = scores if rule.softcap is None else 2.0 * torch.tanh(scores / 2.0)
            weights = scores.exp() * (1 if mask is None else mask[row, 0, 0, :8])
            total = weights.sum() + (0 if rule.sinks is None else rule.sinks[head].exp())
            assert torch.allclose(found[row, head, 0], weights @ values[head // 2] / total, rtol=0, atol=1e-14)


# ---- what an architecture is trusted with ----------------------------------------------------------------------------


def language_model(name, **config):
    return LanguageModel(copy.deepcopy(network(name)), tiny.tokenizer(), ModelConfig(name, dtype="float64", **config), CPU)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_tried_and_kept(name):
    model = language_model(name)
    assert capabilities.packing_support(model) == PackingSupport(packed=True, shared=True)
    assert model.network.config._attn_implementation == attention.NAME
    assert attention.NAME not in model.network.config.to_json_string()  # a checkpoint says nothing of it


def masking_by_itself(model):
    """Give the model a sliding window that the attention function does not receive; it is too long for the trial to notice."""
    config = model.network.config
    config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 50
    model.network.model.has_sliding_layers = True
    return "would attend to each other"


def deaf(model):
    """Make the model drop the keyword arguments that it does not know."""
    inner = model.network.model.forward
    model.network.model.forward = lambda *args, layout=None, **kwargs: inner(*args, **kwargs)
    return "would attend to each other"


def carrying(model):
    """Add each token's MLP output to the next token of the row, across sequences."""
    before = torch.nn.ZeroPad2d((0, 0, 1, -1))
    model.network.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + before(out))
    return "would attend to each other"


def by_name(model):
    """One that knows its arguments by name."""
    inner = model.network.forward
    model.network.forward = lambda input_ids, position_ids=None, use_cache=None: inner(
        input_ids=input_ids, position_ids=position_ids, use_cache=use_cache
    )
    return "unexpected keyword argument 'layout'"


def chunked(model):
    model.network.config.layer_types = ["full_attention", "chunked_attention"]
    return "layers of chunked_attention"


def another_kernel(model):
    model.config = ModelConfig("full", dtype="float64", attn_implementation="flash_attention_2")
    return "flash_attention_2"


@pytest.mark.parametrize("change", [masking_by_itself, deaf, carrying, by_name, chunked, another_kernel])
def test_what_would_give_another_result_is_refused(change):
    model = language_model("full")
    reason = change(model)
    found = capabilities.packing_support(model)
    assert not found.packed
    assert not found.shared
    assert reason in found.reason
    assert model.network.config._attn_implementation == "sdpa"


def test_what_packs_may_still_not_share():
    """Every token but the first adds the token before it in the row: right in packed rows, wrong if the prompt is elsewhere."""
    model, positions = language_model("full"), []

    def hear(_, __, out):
        return torch.where(positions[-1][..., None] > 0, out + out.roll(1, 1), out)

    model.network.model.rotary_emb.register_forward_pre_hook(lambda _, args: positions.append(args[1]))
    model.network.model.layers[0].mlp.register_forward_hook(hear)
    found = capabilities.packing_support(model)
    assert (found.packed, found.shared) == (True, False)
    assert "does not support prefix sharing" in found.reason


def test_masks_a_model_makes_of_something_else_are_made():
    model = ours("full")
    arguments = {"config": model.config, "inputs_embeds": torch.zeros(1, 4, 32)}
    arguments |= {"attention_mask": None, "past_key_values": None}
    assert create_causal_mask(**arguments) is None
    mask = create_causal_mask(**arguments, or_mask_function=lambda batch, head, query, key: key == 3)
    assert mask[0, 0].tolist() == [[key <= query or key == 3 for key in range(4)] for query in range(4)]


# ---- in the engine ---------------------------------------------------------------------------------------------------


def pairs():
    """Return chosen and rejected answers of three prompts; in one pair, one answer is a prefix of the other."""
    data = []
    for number in range(3):
        one, other = tiny.datums(2, seed=number)
        prompt = list(range(50 * number, 50 * number + 30))
        for datum in (one, other) if number else (one, one):
            tokens = [*prompt, *datum.model_input.tokens, 7, 8][: -1 if datum is one and len(data) % 2 else None]
            length = len(tokens) - 1
            weights = np.r_[np.zeros(30), np.ones(length - 30)]
            inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights, "reference_logprobs": -np.ones(length)}
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


def test_neither_packing_nor_sharing_changes_what_is_learned(make_engine, caplog):
    caplog.set_level("INFO", logger="cookbook")
    plain = make_engine(dtype="float64", packing="padded", micro_batch_tokens=1)
    plain.forward_backward(pairs(), DPO())
    for options, layout in (({}, "shared"), ({"shared_prompts": False}, "packed"), ({"packing": "padded"}, "padded")):
        caplog.clear()
        engine = make_engine(dtype="float64", **options)
        for _ in range(2):
            engine.discard_gradient()
            engine.forward_backward(pairs(), DPO())
        assert tiny.difference(tiny.gradients(engine), tiny.gradients(plain)) < 1e-6  # the norms compute in float32
        told = [record.getMessage() for record in caplog.records if "sequences are" in record.getMessage()]
        assert len(told) == 1
        assert told[0].startswith(f"sequences are {layout}: ")


def test_what_drops_out_shares_nothing(make_engine):
    """Dropout on one shared prefix differs from independent dropout on each copy of it."""
    layouts = make_engine(lora_rank=2, lora_dropout=0.1).packing
    assert layouts.packed
    assert not layouts.shared
    assert make_engine(lora_rank=2).packing.shared


def test_turned_off_the_model_keeps_its_own_attention():
    model = language_model("full")
    Engine(model, EngineOptions(packing="padded"))
    assert model.network.config._attn_implementation == "sdpa"


def test_rows_that_positions_divide_are_kept_apart():
    """A call that is not the engine's: transformers tells several sequences in a row by positions that start again."""
    model = language_model("full")
    before = alone_logits = None
    ids, positions = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad():
        before = model.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert capabilities.packing_support(model).packed  # now it has cookbook's attention
        found = model.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone_logits = model.network(input_ids=ids[:, 3:], use_cache=False).logits
    assert (found - before).abs().max() < 1e-12
    assert (found[:, 3:] - alone_logits).abs().max() < 1e-12


# ---- long runs by blocks of queries ----------------------------------------------------------------------------------

LONG = 37  # tokens of a run


def attended_with_gradients(params: AttentionParams, window: int | None, dtype: torch.dtype, layout: AttentionLayout) -> list:
    """Return the output of attention over a row of two runs, and its gradients of queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 2 * LONG, 8) for heads in (4, 2, 2)]
    states = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    sinks = [] if params.sinks is None else [params.sinks]
    options = {"scaling": params.scale, "softcap": params.softcap, "s_aux": params.sinks}
    out, _ = attention.attend(torch.nn.Module(), *states, None, sliding_window=window, layout=layout, **options)
    upstream = torch.randn(*out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*states, *sinks], upstream)]


def some_params(kind: str, dtype: torch.dtype) -> AttentionParams:
    sinks = torch.linspace(-1, 2, 4, dtype=dtype).requires_grad_() if kind == "sinks" else None
    return AttentionParams(0.4, 0.0, 2.0 if kind == "soft-capped" else None, sinks)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", ["plain", "soft-capped", "sinks"])
def test_blocks_of_queries_give_the_results_of_whole_runs(kind, window, autocast, monkeypatch):
    dtype = torch.float32 if autocast else torch.float64
    prefix = torch.arange(2 * LONG)
    # The second run attends to itself, or also to the first 5 tokens of the first run.
    layouts = [
        AttentionLayout((AttentionBlock(2, LONG, LONG),), None, CPU),
        AttentionLayout(
            (AttentionBlock(1, LONG, LONG), AttentionBlock(1, LONG, LONG + 5)),
            torch.cat([prefix[:LONG], prefix[:5], prefix[LONG:]]),
            CPU,
        ),
    ]
    for layout in layouts:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            whole = attended_with_gradients(some_params(kind, dtype), window, dtype, layout)
            with monkeypatch.context() as patch:
                patch.setattr(attention, "SCORES_BYTES", 1)
                patch.setattr(attention, "LEAST_QUERIES", 5)
                blocks = attended_with_gradients(some_params(kind, dtype), window, dtype, layout)
        for one, other in zip(blocks, whole, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).abs().max() <= (2e-2 if autocast else 1e-12) * other.abs().max()


def test_the_gradient_of_sinks_is_summed_over_blocks_in_float32(monkeypatch):
    """128 blocks add to one number; a sum in bfloat16 loses small terms."""
    monkeypatch.setattr(attention, "SCORES_BYTES", 1)

    def of_sinks(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 8192, 4).bfloat16().to(dtype) for _ in range(3))
        sinks = torch.ones(2, dtype=dtype, requires_grad=True)
        params = attention.AttentionParams(0.5, 0.0, None, sinks)
        attention._ScoresInBlocks.apply(params, 64, q, k, v + 1, sinks).sum().backward()
        return sinks.grad.float()

    exact = of_sinks(torch.float32)
    # Single values are rounded to 8 bits.
    assert ((of_sinks(torch.bfloat16) - exact).abs() < 0.01 * exact.abs()).all()


@pytest.mark.parametrize(("kind", "window"), [("soft-capped", None), ("sinks", None), ("plain", 256), ("sinks", 256)])
def test_memory_is_linear_in_the_length(kind, window, monkeypatch):
    """Peak of a forward and a backward pass over fake tensors."""
    monkeypatch.setattr(attention, "SCORES_BYTES", 1 << 16)

    def peak(tokens: int) -> int:
        with FakeTensorMode(), _LiveBytes() as alive:
            q, k, v = (torch.empty(1, heads, tokens, 64, requires_grad=True) for heads in (8, 2, 2))
            params = some_params(kind, torch.float32)
            sinks = None if params.sinks is None else torch.empty(8, requires_grad=True)
            options = {"sliding_window": window, "softcap": params.softcap, "s_aux": sinks}
            out, _ = attention.attend(torch.nn.Module(), q, k, v, None, **options)
            out.sum().backward()
        return alive.peak

    assert peak(2048) < 2.2 * peak(1024)


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_the_scores_of_a_block_are_bounded(window):
    """Unless they are those of the fewest queries of a block."""
    query, key = (torch.empty(1, heads, 40_000, 64, device="meta") for heads in (64, 8))
    for queries, seen in attention._score_blocks(query, key, window):
        count = queries.stop - queries.start
        assert 64 * count * (seen.stop - seen.start) * 4 <= attention.SCORES_BYTES or count <= attention.LEAST_QUERIES
