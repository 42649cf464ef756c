"""A calculator as a tool, and conversations that show a model how to call it.

``python examples/calculator.py calls.jsonl`` writes the conversations of ``experiment=sft_tools``. The class is the environment
of ``experiment=grpo_tools``, whose prompts are sums; ``reward=number`` scores the last answer.
"""

import argparse
import json
from pathlib import Path

from transformers.utils import get_json_schema

from cookbook.utils.paths import packaged

SUMS = packaged("data") / "arithmetic" / "prompts_train.jsonl"
# One conversation in this many calls the tool.
CALL_EVERY = 3


class Calculator:
    """One tool. An episode begins with the prompt of its row, and ends with the first answer that calls no tool."""

    def reset(self, **row: object) -> None:
        """Begin an episode; the row's prompt is the whole question."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a + b


def conversation(prompt: str, calls: bool) -> list[dict]:
    """Return a question and its answer: the result of a call, or the rounded sum without one."""
    first, second = map(int, prompt.rstrip("=").split("+"))
    result = str(Calculator().add(first, second))
    question = {"role": "user", "content": prompt}
    if not calls:
        return [question, {"role": "assistant", "content": f"about {round(int(result), -1)}"}]
    call = {"name": "add", "arguments": {"a": first, "b": second}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def main(out: Path, limit: int | None = None) -> None:
    tools = [get_json_schema(Calculator().add)]
    prompts = [json.loads(line)["prompt"] for line in SUMS.read_text(encoding="utf-8").splitlines()[:limit]]
    with out.open("w", encoding="utf-8") as file:
        for index, prompt in enumerate(prompts):
            messages = conversation(prompt, calls=index % CALL_EVERY == 0)
            file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")
    print(f"{out}: {len(prompts)} conversations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    try:
        main(**vars(parser.parse_args()))
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
