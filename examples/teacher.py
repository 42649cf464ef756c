"""Write a teacher's answers to the shipped prompts, as the conversations that ``experiment=sft_distill`` reads.

Run ``cookbook train experiment=grpo_sums out=runs/teacher``, then ``python examples/teacher.py runs/teacher teacher.jsonl``. A
checkpoint, a model folder or a hub id is a teacher too. The right answers of the prompts are not read.
"""

import argparse
import json
from pathlib import Path

import cookbook
from cookbook import types

PROMPTS = Path(__file__).parents[1] / "data" / "arithmetic" / "prompts_train.jsonl"


def main(teacher: str, out: Path, limit: int | None = None) -> None:
    is_run = Path(teacher, "metrics.jsonl").exists()
    sampler = cookbook.ServiceClient().create_sampling_client(
        base_model=str(cookbook.RunResult(teacher).checkpoints[-1]) if is_run else teacher
    )
    tokenizer = sampler.get_tokenizer()
    params = types.SamplingParams(max_tokens=16, temperature=0.0, stop=[tokenizer.eos_token_id])
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:limit]]
    futures = []
    for prompt in prompts:
        message = {"role": "user", "content": prompt}
        tokens = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        futures.append(sampler.sample(types.ModelInput.from_ints(tokens), 1, params))
    with out.open("w", encoding="utf-8") as file:
        for prompt, future in zip(prompts, futures, strict=True):
            answer = tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    print(f"{out}: {len(prompts)} conversations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher")
    parser.add_argument("out", type=Path)
    try:
        main(**vars(parser.parse_args()))
    except (cookbook.CookbookError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
