"""A tiny random model, data for it, and what plain autograd makes of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cookbook.types import Datum, ModelInput
from cookbook.utils.paths import packaged

CONTEXT = 96
VOCABULARY = 259


def byte_tokenizer(max_length: int = 1024) -> Any:
    """The tokenizer of the shipped model, whose tokens are bytes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=max_length)


@functools.cache
def tokenizer() -> Any:
    return byte_tokenizer(CONTEXT)


def save(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Qwen3 with weights large enough for its predictions to differ, in ``folder``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer().eos_token_id,
        "pad_token_id": tokenizer().pad_token_id,
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes})).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def datums(count: int = 6, seed: int = 0, longest: int = 24) -> list[Datum]:
    """Random sequences of random lengths that carry what every built-in loss reads.

    The first tokens of each weigh 0. One advantage a sequence; logprobs near those of the random model.
    """
    rng = np.random.default_rng(seed)
    return [_datum(rng, int(rng.integers(4, longest + 1)), float(rng.normal())) for _ in range(count)]


def _datum(rng: np.random.Generator, length: int, advantage: float) -> Datum:
    tokens = rng.integers(0, VOCABULARY, length + 1)
    weights = rng.uniform(0.5, 1.5, length)
    weights[: length // 3] = 0.0
    logprobs = {f"{name}_logprobs": -rng.uniform(3, 9, length) for name in ("sampling", "reference", "old")}
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": weights, "advantages": np.full(length, advantage), **logprobs},
    )


def plain_logprobs(network: Any, data: Sequence[Datum]) -> list[Tensor]:
    """The logprobs of every datum's targets from the model's own logits, each datum alone."""
    found = []
    for datum in data:
        logits = network(input_ids=torch.tensor([datum.model_input.to_ints()]), use_cache=False).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().long()
        wanted = targets if targets.ndim == 2 else targets[:, None]
        found.append(logits.log_softmax(-1).gather(-1, wanted).reshape(targets.shape))
    return found


def plain_gradients(network: Any, data: Sequence[Datum], loss: Callable[..., Any]) -> list[Tensor]:
    """Return the gradient of ``loss`` by autograd through the whole model: one tensor per trained parameter."""
    value, _ = loss(data, plain_logprobs(network, data))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, trained, allow_unused=True)
    return [torch.zeros_like(parameter) if one is None else one for parameter, one in zip(trained, found, strict=True)]


def gradients(engine: Any) -> list[Tensor]:
    """The gradient that the engine has accumulated."""
    found = zip(engine.gradients.all(), engine.model.trainable(), strict=True)
    return [torch.zeros_like(parameter) if gradient is None else gradient.clone() for gradient, (_, parameter) in found]


def weights(engine: Any) -> list[Tensor]:
    return [p.detach().clone() for _, p in engine.model.trainable()]


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference relative to the norm of ``expected``, over all tensors together."""
    one, other = (torch.cat([tensor.double().ravel() for tensor in tensors]) for tensors in (found, expected))
    return float((one - other).norm() / other.norm())
