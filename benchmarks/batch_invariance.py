"""Price of samples whose logprobs do not depend on their batch: ``python benchmarks/batch_invariance.py``.

The same samples of the shipped tiny model, decoded together and one by one, in CPU seconds on one thread. Prints how many
logprobs differ in a bit.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.types import Sample, SamplingParams

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NUM_SAMPLES, TOKENS, ROUNDS = (1, 8, 64), 32, 3


def main() -> None:
    torch.set_num_threads(1)
    model = Engine(load(ModelConfig(str(TINY)), torch.device("cpu"), seed=0), EngineOptions()).model

    def drawn(num_samples: int, max_batch_tokens: int) -> tuple[float, list[Sample]]:
        requests = [SampleRequest([5, 6, 7, 8], num_samples, SamplingParams(max_tokens=TOKENS, stop=[]), 0)]
        began = time.process_time()
        samples = sample(model, requests, 0, max_batch_tokens)[0]
        return time.process_time() - began, samples

    drawn(1, 1)
    for num_samples in NUM_SAMPLES:
        # A batch of at most one token has room for one sample.
        together, alone = ([drawn(num_samples, budget) for _ in range(ROUNDS)] for budget in (1 << 20, 1))
        ratio = min(seconds for seconds, _ in alone) / min(seconds for seconds, _ in together)
        pairs = list(zip(together[0][1], alone[0][1], strict=True))
        assert all(one.tokens == other.tokens for one, other in pairs)
        values = [pair for one, other in pairs for pair in zip(one.logprobs, other.logprobs, strict=True)]
        differ = sum(one != other for one, other in values)
        print(
            f"{num_samples} samples: {ratio:.1f} times the CPU seconds; {differ} of {len(values)} logprobs differ", flush=True
        )


if __name__ == "__main__":
    main()
