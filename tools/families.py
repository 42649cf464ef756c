"""Architectures of the Hugging Face zoo, tiny and random, and a check of all that cookbook does with one.

    python tools/families.py               # a table of all families
    python tools/families.py mamba llama   # of some

A family is trained and sampled as a whole and under an adapter. Each number is compared with the model's own code: its plain
forward pass over one sequence at a time, and plain autograd through that.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np
import tiny
import torch

from cookbook.engine.decoding import decoder
from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.layers.install import PatchedForward
from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.losses import GRPO, CrossEntropy
from cookbook.types import AdamParams, Datum, ModelInput, SamplingParams

SHAPE = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": tiny.CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **ROUTED, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": tiny.CONTEXT, **NO_DROPOUT}


@dataclass(frozen=True)
class Family:
    """Differences from :data:`SHAPE`, names that the config does not take, and the known behavior of cookbook.

    ``rows``: what a row of a pass holds, padded (one sequence), packed (several) or shared (common prefixes computed once).
    """

    changes: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    rows: str = "shared"
    sampling: str = "shared prompts"
    std: float = 0.3  # of the weights
    dtype: str = "float64"
    noise: float = 1.0  # times the tolerances: layers that carry a state in float32 amplify roundings


def dense(**changes: Any) -> Family:
    return Family(changes)


def windows(**changes: Any) -> Family:
    """SharedPrefixKV are not shared if a window ends inside the rows."""
    return Family(changes, sampling="prompt copies")


PADDED = {"rows": "padded", "sampling": "prompt copies"}
WHOLE = {"rows": "padded", "sampling": "whole batches"}
OWN = {"rows": "padded", "sampling": "own states"}
NOTHING = {"rows": "padded", "sampling": "no states"}
COPIES = {"sampling": "prompt copies"}
# fmt: off
FAMILIES = {
    "apertus": dense(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "arcee": dense(),
    "bamba": Family({**MAMBA2, "attn_layer_indices": [1]}, **WHOLE),
    "biogpt": dense(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layerdrop=0.0, activation_dropout=0.0),
    "bitnet": dense(),
    "bloom": Family({"n_layer": 2, "n_head": 2}, dtype="float32", **PADDED),
    "codegen": Family({**GPT, "n_head": 4, "rotary_dim": 8}, without=("num_attention_heads",), **PADDED),
    "cohere": dense(logit_scale=0.25),
    "cohere2": windows(logit_scale=0.25, sliding_window=6),
    "ctrl": dense(**GPT, dff=48),
    "dbrx": dense(
        d_model=32, n_heads=2, n_layers=2, max_seq_len=tiny.CONTEXT,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek_v2": Family(LATENT, **COPIES),
    "deepseek_v3": Family(LATENT, **COPIES),
    "diffllama": Family({"num_key_value_heads": 2}, **PADDED),
    "doge": Family(**PADDED),
    "dots1": dense(**ROUTED),
    "ernie4_5": dense(),
    "ernie4_5_moe": dense(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=1, moe_layer_start_index=1
    ),
    "exaone4": windows(sliding_window=6, sliding_window_pattern=2),
    "falcon": Family({"new_decoder_architecture": False}, without=("head_dim",), **PADDED),
    "falcon_h1": Family({**MAMBA2, "mamba_d_ssm": 64}, **WHOLE),
    "falcon_mamba": Family({"state_size": 4}, **OWN),
    "flex_olmo": dense(**EXPERTS),
    "gemma": dense(),
    "gemma2": windows(sliding_window=6, final_logit_softcapping=3.0),
    "gemma3_text": windows(sliding_window=6),
    "gemma3n_text": Family(
        {
            "num_hidden_layers": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny.VOCABULARY,
            "laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 2, "sliding_window": 6,
            "activation_sparsity_pattern": None,
        },
        sampling="whole batches",
    ),
    "gemma4_text": windows(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=tiny.VOCABULARY, global_head_dim=16,
        num_global_key_value_heads=1, num_kv_shared_layers=0, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm": dense(),
    "glm4": dense(),
    "glm4_moe": dense(**ROUTED),
    "glm4_moe_lite": Family(LATENT, **COPIES),
    "gpt2": dense(**GPT),
    "gpt_bigcode": dense(**GPT),
    "gpt_neo": Family(
        {
            "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6,
            "attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0,
        },
        **PADDED,
    ),
    "gpt_neox": dense(),
    "gpt_oss": windows(**EXPERTS, num_local_experts=4, sliding_window=6, rope_parameters={"rope_type": "default"}),
    "gptj": Family({**GPT, "rotary_dim": 8}, **PADDED),
    "granite": dense(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5),
    # Its logprobs are larger than 10.
    "granitemoe": Family(LOCAL, noise=2.0),
    "granitemoehybrid": Family(
        {**LOCAL, **MAMBA2, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]}, **WHOLE, noise=10.0
    ),
    "granitemoeshared": dense(**LOCAL, shared_intermediate_size=16),
    "helium": dense(),
    "hunyuan_v1_dense": dense(),
    "hunyuan_v1_moe": dense(num_experts=4, moe_topk=2),
    "hyperclovax": dense(logits_scaling=3.0),
    "jamba": Family(
        {
            "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
        },
        **WHOLE,
    ),
    "jetmoe": dense(kv_channels=16, **LOCAL),
    "lfm2": Family({"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, **WHOLE),
    "lfm2_moe": Family({**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, **WHOLE),
    "llama": dense(),
    "llama4_text": Family({**LOCAL, "intermediate_size_mlp": 48, "attention_chunk_size": 8}, **PADDED),
    "mamba": Family({"state_size": 4}, **OWN),
    "mamba2": Family(
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 8}, **OWN
    ),
    "mimo_v2_flash": dense(**EXPERTS),
    "minicpm3": Family(LATENT, **COPIES),
    "minimax": Family({**LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}, **NOTHING),
    "minimax_m2": dense(**LOCAL),
    "ministral": windows(sliding_window=6),
    "mistral": windows(sliding_window=6),
    "mixtral": dense(num_local_experts=4),
    "mpt": Family({"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": tiny.CONTEXT}, dtype="float32", **PADDED),
    "nanochat": dense(),
    "nemotron": Family(**PADDED),
    "nemotron_h": Family(
        {
            **ROUTED, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        },
        **NOTHING,
    ),
    "olmo": dense(),
    "olmo2": dense(),
    "olmo3": windows(sliding_window=6),
    "olmo_hybrid": Family({**LINEAR, "num_hidden_layers": 4}, **WHOLE, std=0.1, noise=10.0),
    "olmoe": dense(**EXPERTS),
    "openai-gpt": Family(GPT, **NOTHING),
    "opt": dense(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "persimmon": dense(),
    "phi": dense(),
    "phi3": dense(),
    "phimoe": dense(**LOCAL, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "qwen2": dense(tie_word_embeddings=True),
    "qwen2_moe": dense(**EXPERTS, shared_expert_intermediate_size=16),
    "qwen3": dense(),
    "qwen3_5_text": Family({**LINEAR, "num_hidden_layers": 4}, **WHOLE, std=0.1, noise=10.0),
    "qwen3_moe": dense(**EXPERTS),
    "qwen3_next": Family(
        {**EXPERTS, **LINEAR, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16}, **WHOLE, std=0.1, noise=10.0
    ),
    "recurrent_gemma": Family(
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "logits_soft_cap": 3.0}, **NOTHING
    ),
    "rwkv": Family({"attention_hidden_size": 32, "context_length": tiny.CONTEXT}, **NOTHING),
    "seed_oss": dense(attention_dropout=0.0, residual_dropout=0.0),
    "smollm3": dense(),
    "solar_open": dense(**EXPERTS),
    "stablelm": Family(**PADDED),
    "starcoder2": windows(sliding_window=6, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0),
    "vaultgemma": windows(sliding_window=6),
    "xglm": Family(
        {
            "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
            "layerdrop": 0.0,
        },
        dtype="float32", **PADDED,
    ),
    "xlstm": Family({"embedding_dim": 32, "num_heads": 2, "num_blocks": 2, "chunk_size": 8}, **NOTHING, std=0.1, noise=10.0),
    "youtu": Family(LATENT, **COPIES),
    "zamba2": Family(
        {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_ngroups": 1,
            "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8, "num_mem_blocks": 1, "use_mem_rope": True,
            "adapter_rank": 4,
        },
        **NOTHING, noise=10.0,
    ),
}
# The families that most tests go through.
CORE = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2",
    "granite", "cohere", "olmo2", "smollm3", "hyperclovax", "opt", "gpt_oss", "qwen3_5_text", "recurrent_gemma", "mamba",
]  # fmt: skip
# What transformers loads as a causal language model although each token reads all others.
NOT_CAUSAL = {
    "bert": Family(without=("head_dim", "num_key_value_heads")),
    "cpmant": Family({"dim_ff": 48, "dim_head": 16}),
    "xlm": Family(without=("head_dim", "num_key_value_heads")),
}
# fmt: on
# Of logprobs of size 10, and of gradients, relative to their norm: most families normalize in float32 whatever their dtype.
EXACT, GRADIENT = 3e-5, 5e-5


def network(family: str) -> Any:
    """A model with random weights so large that it predicts something in particular."""
    import transformers

    one = {**FAMILIES, **NOT_CAUSAL}[family]
    shape = {name: value for name, value in {**SHAPE, **one.changes}.items() if name not in one.without}
    config = transformers.AutoConfig.for_model(family, **shape)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=one.std)
    return made


def language_model(family: str) -> LanguageModel:
    return LanguageModel(network(family), tiny.tokenizer(), ModelConfig(family), torch.device("cpu"))


# ---- the check -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """The fast paths that cookbook used for a family, and the distance of its numbers from those of the model's own code.

    ``differences``: by what was computed, logprobs as the largest difference, gradients relative to their norm.
    """

    rows: str
    fused: dict[str, int]
    sampling: str
    differences: dict[str, float] = field(default_factory=dict)

    def failed(self, family: Family) -> list[str]:
        return [
            f"{name}: {value:.1e}"
            for name, value in self.differences.items()
            if not value <= family.noise * (GRADIENT if "gradient" in name else EXACT)
        ]


def loaded(folder: Path, rank: int, dtype: str) -> LanguageModel:
    """As a run loads it. The factors of an adapter are drawn: the half that begins as zeros would hide the other half."""
    model = load(ModelConfig(str(folder), lora_rank=rank, dtype=dtype), torch.device("cpu"), seed=0)
    torch.manual_seed(1)
    for name, parameter in model.trainable():
        if rank and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def check(model: LanguageModel) -> Result:
    """SFT and GRPO: a step of each, and of GRPO the samples that it learns from."""
    own = copy.deepcopy(model.network)  # before cookbook changes anything in it
    if model.network.dtype == torch.float64 and getattr(own.config, "_experts_implementation", None):
        own.set_experts_implementation("eager")  # the only one there is in float64
    engine = Engine(model, EngineOptions())
    fused: dict[str, int] = {}
    for module in model.network.modules():
        if isinstance(vars(module).get("forward"), PatchedForward):
            fused[type(module).__name__] = fused.get(type(module).__name__, 0) + 1
    layouts = engine.packing
    rows = "shared" if layouts.shared else "packed" if layouts.packed else "padded"
    found = Result(rows, fused, "")
    data = list(CrossEntropy().prepare(tiny.datums(5)))
    _step(found, "SFT", engine, own, data, CrossEntropy())
    data = _rollouts(found, engine, own)
    _step(found, "GRPO", engine, own, data, GRPO(kl_beta=0.0))
    found.sampling = decoder.decoding_method(model, tiny.CONTEXT).name
    return found


def _step(found: Result, name: str, engine: Engine, own: Any, data: Sequence[Datum], loss: Any) -> None:
    """One step, of which everything is compared: logprobs and gradient before, and logprobs under the new weights."""
    own.train()
    out = engine.forward_backward(data, loss)
    expected = tiny.plain_logprobs(own, data)
    found.differences[f"{name} logprobs"] = _apart([row["logprobs"].array for row in out.loss_fn_outputs], expected)
    gradients = tiny.plain_gradients(own, data, loss)
    found.differences[f"{name} gradient"] = tiny.difference(tiny.gradients(engine), gradients)
    engine.optim_step(AdamParams(learning_rate=1e-3), None)
    trained = dict(engine.model.trainable())
    moved = 0.0
    with torch.no_grad():
        for key, parameter in own.named_parameters():
            if parameter.requires_grad:
                moved = max(moved, float((parameter - trained[key]).abs().max()))
                parameter.copy_(trained[key])
    assert moved > 5e-4, f"{name}: the step moved nothing"
    own.eval()
    with torch.no_grad():
        expected = tiny.plain_logprobs(own, data)
    after = [row["logprobs"].array for row in engine.forward(data).loss_fn_outputs]
    found.differences[f"{name} logprobs after the step"] = _apart(after, expected)


def _rollouts(found: Result, engine: Engine, own: Any) -> list[Datum]:
    """Samples of prompts of several lengths, two of each, and how far the sampler's logprobs are from the trainer's."""
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3, 1, 4, 1, 5, 9, 2, 6]]
    requests = [
        SampleRequest(prompt, 2, SamplingParams(max_tokens=5 + 2 * place, stop=[]), seed=place)
        for place, prompt in enumerate(prompts)
    ]
    data, sampled = [], []
    for request, samples in zip(requests, sample(engine.model, requests, 0, 10_000), strict=True):
        for number, one in enumerate(samples):
            tokens, before = [*request.prompt, *one.tokens], len(request.prompt) - 1
            logprobs = np.r_[np.zeros(before), one.logprobs]
            inputs = {
                "target_tokens": np.array(tokens[1:]),
                "weights": np.r_[np.zeros(before), np.ones(len(one.tokens))],
                "sampling_logprobs": logprobs,
                "advantages": np.full(len(tokens) - 1, 1.0 - 1.5 * number),
            }
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
            sampled.append((before, np.array(one.logprobs)))
    assert any(len(request.prompt) + request.params.max_tokens > 16 for request in requests)  # longer than any window here
    trainers = [row["logprobs"].array for row in engine.forward(data).loss_fn_outputs]
    with torch.no_grad():
        plain = tiny.plain_logprobs(own, data)
    for name, logprobs in (("trainer's", trainers), ("own", plain)):
        parts = [torch.as_tensor(row[before:]) for row, (before, _) in zip(logprobs, sampled, strict=True)]
        found.differences[f"sampled logprobs, {name}"] = _apart([values for _, values in sampled], parts)
    return data


def _apart(found: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, or NaN if a value is NaN."""
    return float(np.max([np.abs(one - other.detach().numpy()).max() for one, other in zip(found, expected, strict=True)]))


def check_family(family: str, folder: Path, dtype: str | None = None) -> tuple[Result, Result]:
    """Return the results of the full model and of an adapter. ``dtype`` None: the dtype in FAMILIES."""
    dtype = dtype or FAMILIES[family].dtype
    network(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return check(loaded(folder, 0, dtype)), check(loaded(folder, 2, dtype))


# ---- the tables ----------------------------------------------------------------------------------------------------------


# Families with which real servers of vLLM and groups of ranks were run, by test.
VLLM = ("llama", "qwen3")
RANKS = ("llama", "qwen3", "qwen3_moe")


def support_table() -> str:
    """Return the table of docs/reference/support.md: what works with which family. Tests check its cells."""
    lines = [
        "| family | SFT, DPO, ORPO | GRPO, distillation | LoRA | packing | shared prompts | vLLM | ranks |",
        "|---" * 8 + "|",
    ]
    for name, family in FAMILIES.items():
        packing = "yes" if family.rows in ("packed", "shared") else "padded rows"
        shared = "yes" if family.rows == "shared" else "no"
        sampled = "yes" if family.sampling in ("shared prompts", "prompt copies") else f"yes, {family.sampling}"
        served, group = ("run" if name in names else "not run" for names in (VLLM, RANKS))
        lines.append(f"| `{name}` | yes | {sampled} | yes | {packing} | {shared} | {served} | {group} |")
    return "\n".join(lines)


def main(names: Sequence[str], dtype: str | None) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    bad = 0
    print("| family | rows | fused layers | sampling | SFT full, LoRA | GRPO full, LoRA | sampler from trainer | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = check_family(name, Path(folder), dtype)
            except Exception as error:
                bad += 1
                print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} |", flush=True)
                if len(names) == 1:
                    raise
                continue
        full, _ = results
        fused = ", ".join(f"{count} {kind}" for kind, count in full.fused.items()) or "none"
        columns = [_worst(result, kind) for kind in ("SFT", "GRPO", "sampled") for result in results]
        failed = [
            f"{how} {one}"
            for how, result in zip(("full", "LoRA"), results, strict=True)
            for one in result.failed(FAMILIES[name])
        ]
        expected = FAMILIES[name].rows, FAMILIES[name].sampling
        failed += [f"expected {expected}"] if (full.rows, full.sampling) != expected else []
        bad += bool(failed)
        took = time.perf_counter() - start
        print(
            f"| {name} | {full.rows} | {fused} | {full.sampling} | {columns[0]}, {columns[1]} | {columns[2]}, {columns[3]} "
            f"| {columns[4]}, {columns[5]} | {took:.1f} |{' ' + '; '.join(failed) if failed else ''}",
            flush=True,
        )
    print(f"\n{len(names)} families, {bad} that fail")
    return bool(bad)


def _worst(result: Result, kind: str) -> str:
    return f"{np.max([value for name, value in result.differences.items() if name.startswith(kind)]):.0e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names; all without any")
    parser.add_argument("--dtype", choices=["float32", "float64"], help="float64, but for families that cannot compute in it")
    asked = parser.parse_args()
    sys.exit(main(asked.families or list(FAMILIES), asked.dtype))
