"""Tokens per CPU second of the embedded sampler beside transformers' generate: ``python benchmarks/sampling.py [--json FILE]``.

The same prompts, 8 completions each of exactly 64 tokens, drawn at temperature 1 without filters. Timed as in ``step.py``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import Candidates, compare, show
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from cookbook.engine.model import LanguageModel, ModelConfig, load
from cookbook.engine.sampler import Request, sample
from cookbook.types import SamplingParams

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
PROMPTS, SAMPLES, TOKENS = 64, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="leave out the larger model, which takes ten minutes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    tiny = load(ModelConfig(str(TINY)), torch.device("cpu"), seed=0)
    work = f"{PROMPTS} prompts x {SAMPLES} x {TOKENS} tokens"
    rows = compare(f"{work}, data/tiny, prompts of 64", candidates(tiny, 64))
    rows += compare(f"{work}, data/tiny, prompts of 256", candidates(tiny, 256))
    if not arguments.tiny:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(f"{work}, 28M parameters, prompts of 64", candidates(larger(Path(folder)), 64))
    show(rows)
    rates(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def larger(folder: Path) -> LanguageModel:
    """A Qwen3 of 27 million fresh parameters and 4,096 tokens, with the tokenizer of data/tiny."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load(ModelConfig(str(TINY)), torch.device("cpu"), seed=0).tokenizer.save_pretrained(folder)
    return load(ModelConfig(str(folder)), torch.device("cpu"), seed=0)


def candidates(model: LanguageModel, length: int) -> Candidates:
    """Both on the same random prompts of ``length`` tokens."""
    prompts = np.random.default_rng(2).integers(0, 256, (PROMPTS, length))
    requests = [
        Request(prompt, SAMPLES, SamplingParams(max_tokens=TOKENS, stop=[]), seed)
        for seed, prompt in enumerate(prompts.tolist())
    ]
    ids = torch.from_numpy(prompts)

    def generate() -> None:
        drawn = model.network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            pad_token_id=0,
        )
        assert drawn.shape == (PROMPTS * SAMPLES, length + TOKENS)

    def cookbook() -> None:
        drawn = sample(model, requests, 0, 1 << 20)
        assert sum(len(one.tokens) for group in drawn for one in group) == PROMPTS * SAMPLES * TOKENS

    return {"transformers generate": torch.no_grad()(generate), "cookbook": cookbook}


def rates(rows: list[dict[str, Any]]) -> None:
    print("\nTokens per CPU second, and how many times the first")
    for row in rows:
        row["tokens_per_cpu_s"] = PROMPTS * SAMPLES * TOKENS / row["cpu_s"]
        print(f"  {row['comparison']:60s} {row['candidate']:24s} {row['tokens_per_cpu_s']:9,.0f} {1 / row['ratio']:6.2f}x")


if __name__ == "__main__":
    main()
