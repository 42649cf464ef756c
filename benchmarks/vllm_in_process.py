"""vLLM in a process of its own, driven by lines: run by its own Python from ``sampling.py --vllm``, never by hand.

Reads one JSON line that says what to load and complete, then for every further line completes it all and answers with the CPU
seconds that took.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: nothing is spent on talking to it
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever vLLM prints must not look like an answer


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(sys.stdin.readline())
    llm = LLM(
        model=asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=2 << 30,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    tokens = asked["tokens"]
    params = SamplingParams(
        n=asked["samples"], max_tokens=tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
    )
    tell({"ready": True})
    for _ in sys.stdin:
        start = time.process_time()
        drawn = llm.generate(prompts, params, use_tqdm=False)
        assert sum(len(one.token_ids) for found in drawn for one in found.outputs) == len(prompts) * asked["samples"] * tokens
        tell({"cpu_s": time.process_time() - start})


def tell(answer: dict[str, object]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
