"""An agent of two turns: it asks for a sum, and repeats the question after a wrong answer.

    cookbook train recipe=grpo env=agent env.command='python examples/agent.py {row}'

The last line that it prints is its reward: 1 for a right first answer, 0.5 for a right second one.
"""

import json
import sys

import openai


def main(row: dict[str, str]) -> float:
    # The address and the key are in OPENAI_BASE_URL and OPENAI_API_KEY.
    client = openai.OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        response = client.chat.completions.create(model="policy", messages=messages)
        answer = response.choices[0].message.content
        if answer.strip() == row["answer"]:
            return reward
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "That is not right. Try again."},
        ]
    return 0.0


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
