"""Price of samples whose logprobs do not depend on their batch: ``python benchmarks/batch_invariance.py``.

The same samples of the shipped tiny model, decoded together and one by one, in CPU seconds on one thread. Then the trainer's
logprobs of these samples, in packed passes and in a pass per sample. Prints how many logprobs differ in a bit.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from cookbook.engine.decoding.decoder import sample
from cookbook.engine.decoding.requests import SampleRequest
from cookbook.engine.engine import Engine, EngineOptions
from cookbook.engine.model import ModelConfig, load
from cookbook.types import Datum, ModelInput, Sample, SamplingParams

TINY = Path(__file__).resolve().parent.parent / "data" / "tiny"
NUM_SAMPLES, TOKENS, ROUNDS = (1, 8, 64), 32, 3
PROMPT = [5, 6, 7, 8]


def main() -> None:
    torch.set_num_threads(1)
    engine = Engine(load(ModelConfig(str(TINY)), torch.device("cpu"), seed=0), EngineOptions())
    model = engine.model

    def drawn(num_samples: int, max_batch_tokens: int) -> tuple[float, list[Sample]]:
        requests = [SampleRequest(PROMPT, num_samples, SamplingParams(max_tokens=TOKENS, stop=[]), 0)]
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
    compare_trainer(engine, together[0][1])


def compare_trainer(engine: Engine, samples: list[Sample]) -> None:
    """Print how the trainer's logprobs of the samples differ from the sampler's, and between passes of different size."""
    texts = [PROMPT + one.tokens for one in samples]
    data = [Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:]}) for text in texts]

    def scored(batches: list[list[Datum]]) -> tuple[float, torch.Tensor]:
        began = time.process_time()
        outputs = [output for batch in batches for output in engine.forward(batch).loss_fn_outputs]
        seconds = time.process_time() - began
        return seconds, torch.tensor([output["logprobs"].tolist()[len(PROMPT) - 1 :] for output in outputs]).double()

    packed, alone = ([scored(batches) for _ in range(ROUNDS)] for batches in ([data], [[one] for one in data]))
    ratio = min(seconds for seconds, _ in alone) / min(seconds for seconds, _ in packed)
    trainer, sampler = packed[0][1], torch.tensor([one.logprobs for one in samples]).double()
    print(
        f"trainer, a pass per sample: {ratio:.1f} times the CPU seconds of packed passes; {_difference(alone[0][1], trainer)}"
    )
    print(f"sampler and trainer: {_difference(sampler, trainer)}", flush=True)


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    gap = one - other
    largest, mean = float(gap.abs().max()), float(gap.mean())
    return f"{int((gap != 0).sum())} of {gap.numel()} logprobs differ, by {largest:.1e} at most, {mean:.0e} in the mean"


if __name__ == "__main__":
    main()
