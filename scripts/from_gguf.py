"""Converts a GGUF file to a Hugging Face folder that ``cookbook train model=FOLDER`` accepts.

    python scripts/from_gguf.py FILE FOLDER

transformers reads the architecture, the tokenizer, the chat template and the weights from the file, and turns quantized weights
into float32. Needs the package ``gguf``.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging


def main(words: list[str]) -> None:
    if len(words) != 2:
        sys.exit("usage: python scripts/from_gguf.py FILE FOLDER")
    source, folder = map(Path, words)
    if not source.is_file():
        sys.exit(f"from_gguf: file not found, got {str(source)!r}; pass a GGUF file")
    if folder.exists():
        sys.exit(f"from_gguf: {str(folder)!r} exists; pass a folder that does not")
    convert(source, folder)
    print(f"wrote {folder}")


def convert(source: Path, folder: Path) -> None:
    """Read a GGUF file and write a Hugging Face folder with float32 weights."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    forget_quantization(model)
    # transformers does not read the end of a turn from the file, only the tokenizer with its end of sequence.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def forget_quantization(model: PreTrainedModel) -> None:
    """Remove the marks of a quantized model: the weights are float32 by now, and ``save_pretrained`` refuses marked models."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("quantization_method", "_is_quantized_training_enabled"):
        vars(model).pop(name, None)


if __name__ == "__main__":
    main(sys.argv[1:])
