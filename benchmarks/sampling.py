"""Tokens per CPU second of the embedded sampler beside transformers' generate: ``python benchmarks/sampling.py``.

The same prompts, 8 completions each of exactly 64 tokens, drawn at temperature 1 without filters. Timed as in ``step.py``;
``--prompts 1 --samples 1`` times a single request. With ``--vllm PYTHON``, the Python of an environment that has vLLM, also
beside a vLLM server over HTTP and, on the larger model, in process: one thread each, in CPU seconds of all processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm_peer
from step import ROUNDS, Candidates, Rows, compare, show
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load, load_tokenizer
from cookbook.types import Array, SamplingParams

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="leave out the larger model, which takes ten minutes")
    parser.add_argument("--larger", action="store_true", help="leave out the tiny one")
    # vLLM starts in a folder of its own.
    parser.add_argument("--vllm", metavar="PYTHON", type=lambda path: str(Path(path).absolute()), help="compare with its vLLM")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path, lengths in models(Path(folder), arguments):
            for length in lengths:
                what = f"{arguments.prompts} prompts x {arguments.samples} x {TOKENS} tokens, {name}, prompts of {length}"
                rows += measured(what, path, length, arguments)
    show(rows)
    rates(rows, arguments.prompts * arguments.samples * TOKENS)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def models(folder: Path, arguments: argparse.Namespace) -> list[tuple[str, Path, tuple[int, ...]]]:
    """Return the measured models: names, folders, and lengths of prompts."""
    tiny = [] if arguments.larger else [("data/tiny", TINY, (64, 256))]
    return tiny if arguments.tiny else [*tiny, ("34M parameters", larger(folder / "larger"), (64,))]


def measured(what: str, path: Path, length: int, arguments: argparse.Namespace) -> Rows:
    """All candidates on the same random prompts of ``length`` tokens."""
    prompts = np.random.default_rng(2).integers(0, 256, (arguments.prompts, length))
    with contextlib.ExitStack() as running:
        found = candidates(path, prompts, arguments.samples)
        if arguments.vllm:
            asked = (prompts.tolist(), arguments.samples, TOKENS)
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            found["vLLM over HTTP"] = running.enter_context(vllm_peer.over_http(arguments.vllm, path, folder, *asked))
            if path != TINY:
                found["vLLM in process"] = running.enter_context(vllm_peer.in_process(arguments.vllm, path, *asked))
        return compare(what, found, arguments.rounds)


def larger(folder: Path) -> Path:
    """A Qwen3 of 34 million fresh parameters and 4,096 tokens, with the tokenizer of data/tiny."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load_tokenizer(ModelConfig(str(TINY))).save_pretrained(folder)
    return folder


def candidates(path: Path, prompts: Array, samples: int) -> Candidates:
    """Samplers in this process: the model of transformers, and an engine."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = Engine(load(ModelConfig(str(path)), torch.device("cpu"), seed=0), EngineOptions()).model
    requests = [
        SampleRequest(prompt, samples, SamplingParams(max_tokens=TOKENS, stop=[]), seed)
        for seed, prompt in enumerate(prompts.tolist())
    ]
    ids = torch.from_numpy(prompts)

    def generate() -> None:
        drawn = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            pad_token_id=0,
        )
        assert drawn.shape == (len(prompts) * samples, prompts.shape[1] + TOKENS)

    def cookbook() -> None:
        drawn = sample(model, requests, 0, 1 << 20)
        assert sum(len(one.tokens) for group in drawn for one in group) == len(prompts) * samples * TOKENS

    return {"transformers generate": torch.no_grad()(generate), "cookbook": cookbook}


def rates(rows: list[dict[str, Any]], tokens: int) -> None:
    print("\nTokens per CPU second, and how many times the first")
    for row in rows:
        row["tokens_per_cpu_s"] = tokens / row["cpu_s"]
        print(f"  {row['comparison']:60s} {row['candidate']:24s} {row['tokens_per_cpu_s']:9,.0f} {1 / row['ratio']:6.2f}x")


if __name__ == "__main__":
    main()
