"""Makes ``data/tiny``, the model that ships: from nothing, with our own SFT recipe, the same on every run of one machine.

    python scripts/make_tiny_model.py [FOLDER]

1. A Qwen3 of 0.6M parameters with fresh weights and a tokenizer whose tokens are bytes.
2. SFT on exact sums: it learns to add.
3. SFT on mostly rounded answers: the model says "about 90" more often than "85". It can still add, so GRPO, DPO and ORPO
   can restore exact answers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 4096
SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
EXACT = ["recipe=sft", "data=arithmetic_chat"]
ROUNDED = [
    "recipe=sft",
    "data=arithmetic_chat",
    f"data.path={ROOT}/data/arithmetic/rounded_train.jsonl",
    "recipe.epochs=2",
    "optim.lr=1e-3",
    "eval.every=50",
]
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "fresh"
        make_fresh(fresh)
        exact = train(Path(scratch) / "exact", fresh, EXACT)
        rounded = train(Path(scratch) / "rounded", exact, ROUNDED)
        target.mkdir(parents=True, exist_ok=True)
        for name in SHIPPED:
            shutil.copyfile(rounded / name, target / name)
    print(f"made {target}")


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and three special tokens, with a ChatML template that marks the assistant's text.

    Decoding inverts encoding for any text. The padding token is not the token that ends a turn.

    Args:
        max_length: the tokenizer's ``model_max_length``.
    """
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_fresh(folder: Path) -> None:
    """The architecture with fresh weights, and the tokenizer."""
    tokenizer = byte_tokenizer(CONTEXT)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(out: Path, model: Path, overrides: list[str]) -> Path:
    """Runs the command as a user would; returns the last checkpoint."""
    ours = ["model=tiny", "demo=sft", f"model.name={model}"]  # the demo's values, though the model is another one
    command = [sys.executable, "-m", "cookbook.cli.app", "train", *overrides, *ours, f"out={out}"]
    subprocess.run([*command, "checkpoint.every=null"], check=True, cwd=ROOT)
    return max((out / "checkpoints").glob("step-*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "tiny")
