"""Makes what both sides read: two tiny Qwen3 models, rows, and one batch of rollouts.

    python benchmarks/parity/prepare.py FOLDER

Nothing is downloaded and nothing of ``data/`` is read, so the numbers stand however the shipped model changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cases import BATCH_ROWS, CLIP, CLIP_CISPO, CLIP_SEQUENCE, CLIP_TWO_SIDED, RUNS, Folder
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cookbook.utils.paths import packaged

SPREAD = 0.15  # standard deviation of fresh weights: enough that probabilities are far from uniform
MOVED = 0.04  # of the noise between reference and policy: hinge pairs on both sides of the margin
AWAY_FROM_EDGE = 1e-3  # no ratio lies nearer to a clip bound, so that rounding decides no clip
ADVANTAGES = [1.2, -0.7, 0.4, -1.1, 0.9, 0.0]  # hand-made; one completion teaches nothing
LENGTHS = [9, 31, 17, 5, 24, 13]  # tokens of the completions


def main(folder: Folder) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder.root.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=1024)
    reference = Qwen3ForCausalLM(_architecture(tokenizer)).eval()
    policy = Qwen3ForCausalLM(reference.config).eval()
    policy.load_state_dict({name: w + MOVED * torch.randn_like(w) for name, w in reference.state_dict().items()})
    policy.tie_weights()
    for model, path in ((reference, folder.reference), (policy, folder.policy)):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    count = max(run.steps * run.batch_rows for run in RUNS)
    _write(folder.root / "sft.jsonl", (_conversation(i) for i in range(count)))
    pairs = [_pair(i) for i in range(count)]
    _write(folder.root / "dpo.jsonl", pairs)
    _write(folder.root / "dpo_chat.jsonl", (_as_chat(pair) for pair in pairs[:BATCH_ROWS]))
    folder.rollouts.write_text(json.dumps(_rollouts(tokenizer, policy, reference)), encoding="utf-8")


def _architecture(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=SPREAD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _conversation(index: int) -> dict[str, Any]:
    """Of one or two turns, with answers of very different lengths."""
    a, b = 17 + 7 * index % 80, 12 + 11 * index % 70
    messages = [{"role": "user", "content": f"What is {a} plus {b}?"}]
    messages += [{"role": "assistant", "content": f"{a + b}" + ", and no other number" * (index % 3)}]
    if index % 4 == 1:
        messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": f"Yes: {a} + {b} = {a + b}."}]
    return {"messages": messages}


def _pair(index: int) -> dict[str, str]:
    """Two answers of unequal length. Some share a prefix, and sometimes one continues the other."""
    a, b = 17 + 7 * index % 80, 12 + 11 * index % 70
    exact = f"{a + b}" + " exactly" * (index % 2)
    rejected = [f"{a + b} or so, I guess", f"about {(a + b) // 10 * 10}", f"{a + b}" + " exactly" * 2][index % 3]
    return {"prompt": f"{a}+{b}=", "chosen": exact, "rejected": rejected}


def _as_chat(pair: dict[str, str]) -> dict[str, Any]:
    speakers = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {key: [{"role": speakers[key], "content": text}] for key, text in pair.items()}


def _rollouts(tokenizer: PreTrainedTokenizerFast, policy: PreTrainedModel, reference: PreTrainedModel) -> list[dict[str, Any]]:
    """Completions with the logprobs they were sampled with, some far from what the policy says now.

    All logprobs are float32; JSON keeps them exactly.
    """
    draw = torch.Generator().manual_seed(1)
    rows = []
    for index, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        prompt = tokenizer(f"{index // 3 * 1234 + 5}+{10 ** (index // 3)}=")["input_ids"]
        completion = torch.randint(0, 256, (length,), generator=draw).tolist()
        now = _logprobs(policy, prompt, completion)
        old = _away_from_edges(now, torch.randn(length, generator=draw) * 0.4 + 0.3 * (index % 2))
        row = {"prompt": prompt, "completion": completion, "advantage": advantage}
        rows.append({**row, "old": old.tolist(), "reference": _logprobs(reference, prompt, completion).tolist()})
    return rows


def _away_from_edges(now: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """``now - log_ratio``, a token moved where its ratio, or its sequence's, would lie on a clip bound."""

    def edges(*clips: dict[str, float]) -> list[float]:
        return [bound for clip in clips for bound in (1 - clip["epsilon"], 1 + clip["epsilon_high"])]

    tokens, sequence = [*edges(CLIP), CLIP_TWO_SIDED, CLIP_CISPO], edges(CLIP_SEQUENCE)
    for _ in range(100):
        near = ((log_ratio.exp()[:, None] - torch.tensor(tokens)).abs() < AWAY_FROM_EDGE).any(-1)
        if not near.any() and all(abs(float(log_ratio.mean().exp()) - edge) > AWAY_FROM_EDGE for edge in sequence):
            return now - log_ratio
        log_ratio = log_ratio + torch.where(near, 0.01, 0.001)
    raise RuntimeError("the ratios do not leave the clip bounds; draw others")


@torch.no_grad()
def _logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Of the completion's tokens, ``(T,)``."""
    logits: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Folder(Path(sys.argv[1])))
