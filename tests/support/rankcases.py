"""Cases of training on several ranks, and when they differ from one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from families import network

# Relative to one process. Sums in another order lose some of the 16 or 7 digits.
SAME = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-2}

# Of the update, which AdamW makes of gradients near zero: their sign decides.
SAME_UPDATE = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 1.0}

UNTIED = {"model": "untied"}

MOE = {"model": "moe"}

LORA = {"options": {"lora_rank": 4}}


def case(shard: str, loss: str, **fields: Any) -> dict[str, Any]:
    options = {"dtype": "float64", **fields.pop("options", {})}
    chosen = {"model": "tied", "shard": shard, "loss": loss, **fields, "options": options}
    extras = [str(value) for value in {**fields, **options}.values() if value != "float64"]
    return {**chosen, "name": " ".join([shard, loss, *extras])}


LOSSES = ("sft", "grpo", "dft", "dpo", "orpo", "custom")

# With these datums no division into equal shares exists.
UNEQUAL = {"one", "longest"}

# With these, a rank may have no backward pass.
WITHOUT_PASS = {*UNEQUAL, "pair"}


def save_models(folder: Path) -> dict[str, str]:
    """Save models of three layers, tied and untied, and a mixture of experts. Return their folders."""
    network("qwen3_moe").save_pretrained(folder / "moe")
    tiny.tokenizer().save_pretrained(folder / "moe")
    return {
        "tied": str(tiny.save(folder / "tied", num_hidden_layers=3)),
        "untied": str(tiny.save(folder / "untied", num_hidden_layers=3, tie_word_embeddings=False)),
        "moe": str(folder / "moe"),
    }


def differs(one: dict[str, Any], found: dict[str, Any], count: int) -> bool:
    """Whether the ranks differ from one process in a case, or do not share the work."""
    dtype = one["options"]["dtype"]
    fits = found["metrics"] < SAME[dtype] and found["weights"] < SAME[dtype] and found["updates"] < SAME_UPDATE[dtype]
    least, most = (0.0, 1.0) if one.get("data") in UNEQUAL else (0.6 / count, 1.4 / count)
    shared = all(least <= share <= most for share in found["shares"])
    # Most sums of gradients start during a backward pass: of replicas by bucket, of shards (FSDP2) by layer.
    counts = one["shard"] != "none" or one.get("data") not in WITHOUT_PASS
    # FSDP2 scatters nothing if a node has a single rank.
    counts &= (one["shard"], count) != ("node", 2)
    shared &= not counts or min(found["overlap"]) >= 0.5
    return not (fits and shared and found["ranks agree"] and found["repeats"] in (None, True))
