"""What a training client tells of its model, as Tinker's do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelData:
    """Which model it is: its architecture as the Hugging Face config names it, and where weights and tokenizer came from."""

    arch: str
    model_name: str
    tokenizer_id: str


@dataclass(frozen=True)
class ModelInfo:
    """``num_parameters`` is 0 where a server does not tell."""

    model_data: ModelData
    model_name: str
    lora_rank: int
    is_lora: bool
    num_parameters: int
    max_context_length: int
