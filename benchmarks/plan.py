"""Memory and time of a step, estimated by ``cookbook plan`` and measured: ``python benchmarks/plan.py [--real MODEL]``.

Random models of several architectures and sizes on the CPU. Each is trained for two steps in a process of its own, whose peak
of resident memory, Python and torch included, is compared with the estimate that is made from the shapes alone. Arithmetic is
compared with what torch counts while the step runs. Both are to agree within 15%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import plan_real
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from cookbook.cli.plan import PYTHON
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.estimate import COUNTED, estimate
from cookbook.engine.memory import keep_freed_memory
from cookbook.engine.model import ModelConfig, load
from cookbook.engine.precision import Precision
from cookbook.losses import get_loss
from cookbook.types import AdamParams, datum_from_tokens_weights
from cookbook.utils.paths import packaged

REACH = 0.15


@dataclass(frozen=True)
class Case:
    """``rows`` sequences of ``width`` tokens in one pass. ``autocast``: products of bfloat16 over float32 weights."""

    name: str
    kind: str
    rows: int
    width: int
    shape: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    autocast: str | None = None

    @property
    def precision(self) -> Precision:
        return Precision(autocast=self.autocast)


def _decoder(hidden: int, layers: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    return {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        **heads,
        **more,
    }


WIDE = _decoder(512, 8, 32_000, tie_word_embeddings=True)
CASES = [
    Case("Qwen3, 40M parameters", "qwen3", 4, 512, WIDE),
    Case("Qwen3, 40M, twice the tokens", "qwen3", 8, 512, WIDE),
    Case("Qwen3, 40M, LoRA", "qwen3", 4, 512, WIDE, {"lora_rank": 16}),
    Case("Qwen3, 40M, bfloat16", "qwen3", 4, 512, WIDE, {"dtype": "bfloat16"}),
    Case("Qwen3, 40M, autocast", "qwen3", 4, 512, WIDE, autocast="bfloat16"),
    Case(
        "Qwen3, 18M, autocast, long rows",
        "qwen3",
        2,
        1536,
        _decoder(512, 6, 512, tie_word_embeddings=True),
        autocast="bfloat16",
    ),
    Case("Qwen3, vocabulary of 151,936", "qwen3", 2, 512, _decoder(256, 2, 151_936, tie_word_embeddings=True)),
    Case("Llama, untied", "llama", 4, 512, _decoder(384, 12, 8_192, tie_word_embeddings=False)),
    Case("Gemma 3", "gemma3_text", 4, 512, _decoder(384, 8, 16_000)),
    Case(
        "GPT-2",
        "gpt2",
        4,
        512,
        {"n_embd": 384, "n_layer": 8, "n_head": 6, "vocab_size": 16_000, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    # These two had no part in what estimate.py says of the C library.
    Case("Mistral, short rows", "mistral", 24, 96, _decoder(512, 6, 24_000)),
    Case("Llama, LoRA of rank 64", "llama", 2, 768, _decoder(640, 6, 24_000), {"lora_rank": 64}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names of the cases")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--real", type=Path, help="folder of a chat model; compare whole runs of the command on it instead")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    if arguments.train:
        name, folder = arguments.train
        train(next(case for case in CASES if case.name == name), Path(folder))
        return
    if arguments.real:
        finish(plan_real.compare(arguments.real, arguments.only), ["memory off by"], arguments.json)
        return
    columns = f"{'estimated MB':>14s}{'measured MB':>14s}{'off by':>8s}{'estimated TFLOP':>17s}{'counted':>10s}{'off by':>8s}"
    print(f"{'':32s}{columns}")
    rows = []
    for case in (case for case in CASES if arguments.only in case.name):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(case, Path(folder)))
    finish(rows, ["memory off by", "arithmetic off by"], arguments.json)


def finish(rows: list[dict[str, Any]], keys: list[str], file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(abs(row[key]) for row in rows for key in keys)
    print(f"\nworst: {worst:.0%}, within {REACH:.0%}: {worst <= REACH}")


def compared(case: Case, folder: Path) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    AutoConfig.for_model(case.kind, **ends, **case.shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(packaged("data") / "tiny", model_max_length=4096).save_pretrained(folder)
    found = estimate(
        ModelConfig(str(folder), random=True, **case.model),
        case.rows,
        case.width,
        step_tokens=case.rows * case.width,
        interleaved=True,
        retain_bytes=0,
        reference=False,
        cpu=True,
        precision=case.precision,
    )
    command = [sys.executable, __file__, "--train", case.name, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, flops = map(float, done.stdout.split()[-2:])
    estimated, arithmetic = found.peak + PYTHON, found.flops_per_token * case.rows * case.width
    row = {
        "case": case.name,
        "estimated bytes": estimated,
        "measured bytes": peak,
        "memory off by": estimated / peak - 1,
        "estimated flops": arithmetic,
        "counted flops": flops,
        "arithmetic off by": arithmetic / flops - 1,
    }
    memory = f"{estimated / 1e6:14,.0f}{peak / 1e6:14,.0f}{row['memory off by']:8.0%}"
    print(f"{case.name:32s}{memory}{arithmetic / 1e12:17.3f}{flops / 1e12:10.3f}{row['arithmetic off by']:8.0%}", flush=True)
    return row


def train(case: Case, folder: Path) -> None:
    """Two steps; prints the peak of resident memory, bytes, and the operations of matrix products in a step."""
    keep_freed_memory()  # as a trainer does
    model = load(ModelConfig(str(folder), random=True, **case.model), torch.device("cpu"), seed=0)
    engine = Engine(model, EngineOptions(micro_batch_tokens=case.rows * case.width, precision=case.precision))
    draw = np.random.default_rng(0)
    loss = get_loss("cross_entropy")
    tokens = [draw.integers(0, 250, case.width + 1) for _ in range(case.rows)]
    data = loss.prepare([datum_from_tokens_weights(one, np.ones(len(one))) for one in tokens])
    for _ in range(2):
        engine.forward_backward(data, loss)
        engine.optim_step(AdamParams(learning_rate=1e-4), None)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    print(peak, counted(engine, data, loss))


def counted(engine: Engine, data: Any, loss: Any) -> int:
    # Torch leaves out products in place, and does not look into the head's operators.
    ours = {torch.ops.aten.addmm_: _added_product, torch.ops.cookbook.linear_logprobs: _frozen_head}
    with FlopCounterMode(display=False, custom_mapping=COUNTED | ours) as flops:
        engine.forward_backward(data, loss)
    return int(flops.get_total_flops())


def _added_product(into: Any, a: Any, b: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * int(a[0] * a[1] * b[1])


def _frozen_head(hidden: Any, weight: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    """Two products in the forward pass, none in the backward pass: LoRA does not train the output layer."""
    return 2 * 2 * int(hidden[0] * weight[0] * weight[1])


if __name__ == "__main__":
    main()
