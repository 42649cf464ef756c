"""Shapes that both sides train on a GPU, and their arithmetic. The file imports neither cookbook nor TRL."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from transformers import Qwen3Config

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16, by the vendor's datasheets
LR = 1e-5
CONTEXT = 4096
WARM_UP, ROUNDS = 2, 5  # steps: what compiles and allocates, and what is measured


@dataclass(frozen=True)
class Shape:
    """A Qwen3 and what it is trained on: ``rows`` sequences of about ``length`` tokens a step.

    ``equal``: every sequence has exactly ``length`` tokens. ``loss``: ``grpo`` trains with an advantage for each sequence.
    ``recompute``: activation checkpointing is on.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool
    rows: int
    length: int
    micro_batch_tokens: int
    context: int = CONTEXT
    equal: bool = False
    loss: str = "cross_entropy"
    lora_rank: int = 0
    recompute: bool = False

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=128,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
        )

    def sequences(self) -> list[list[int]]:
        """Random tokens, of lognormal lengths unless ``equal``; the first of each is no target."""
        draw = np.random.default_rng(0)
        lengths = np.clip(draw.lognormal(np.log(self.length), 0.6, self.rows), 32, self.context - 1).astype(int)
        if self.equal:
            lengths = np.full(self.rows, self.length - 1)
        return [draw.integers(0, self.vocabulary, length + 1).tolist() for length in lengths]

    def inputs(self) -> list[int]:
        """Tokens the model reads, by sequence: what no implementation can do without."""
        return [len(tokens) - 1 for tokens in self.sequences()]

    def flops(self) -> float:
        """Operations of a step: 6 per token and per multiplied parameter, and the causal half of attention.

        Recomputed or additional work of an implementation does not count; the embedding is a lookup. Under an adapter, the
        gradients of the frozen matrices are not needed: 4 operations in place of 6, and those of the adapter are left out.
        """
        wide, narrow = self.heads * 128, self.key_heads * 128
        layer = self.hidden * (2 * wide + 2 * narrow + 3 * self.intermediate)
        multiplied = self.layers * layer + self.hidden * self.vocabulary
        lengths = np.array(self.inputs(), dtype=np.float64)
        attention = 12 * self.layers * wide * float((lengths * (lengths + 1) / 2).sum())  # 2 products, 3 times, 2 FLOPs each
        return (4 if self.lora_rank else 6) * multiplied * float(lengths.sum()) + attention


SHAPES = [
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 151_936, True, 128, 512, 16_384),
    Shape("Qwen3-8B, 4 of its layers", 4096, 12_288, 4, 32, 8, 151_936, False, 64, 512, 16_384),
]
# The rows that prime-rl reports for one H100: sequences of 16k tokens, activations recomputed.
LONG = Shape(
    "Qwen3-0.6B, SFT 16k", 1024, 3072, 28, 16, 8, 151_936, True, 8, 16_384, 16_384, context=16_384, equal=True, recompute=True
)
SHAPES += [
    LONG,
    replace(LONG, name="Qwen3-0.6B, RL 16k", loss="grpo"),
    replace(LONG, name="Qwen3-0.6B, RL 16k, LoRA rank 16", loss="grpo", lora_rank=16),
]
SMALL = [
    Shape("small", 64, 128, 2, 2, 1, 1000, True, 8, 64, 512),
    Shape("small, RL, LoRA", 64, 128, 2, 2, 1, 1000, True, 4, 64, 512, equal=True, loss="grpo", lora_rank=4, recompute=True),
]


def find(name: str) -> Shape:
    return next(shape for shape in [*SHAPES, *SMALL] if shape.name == name)
