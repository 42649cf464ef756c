"""A supervised loop of your own, in the calls of Tinker's documentation. Swap the import for ``tinker`` and it trains there.

python examples/sft_loop.py
"""

import numpy as np

import cookbook as tinker
from cookbook import types

WORDS = {"cat": "atcay", "dog": "ogday", "banana": "ananabay", "sun": "unsay", "tree": "eetray", "cookbook": "ookbookcay"}
STEPS = 160


def main() -> None:
    service_client = tinker.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model="tiny", rank=32)
    tokenizer = training_client.get_tokenizer()
    data = [make_datum(tokenizer, word, answer) for word, answer in WORDS.items()]

    for step in range(STEPS):
        # Both calls return immediately; the trainer runs them in order.
        gradient = training_client.forward_backward(data, "cross_entropy")
        update = training_client.optim_step(types.AdamParams(learning_rate=3e-3))
        outputs = gradient.result().loss_fn_outputs
        update.result()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss per token {loss_per_token(data, outputs):.4f}")

    sampling_client = training_client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=16, temperature=0.0)
    futures = {}
    for word in WORDS:
        futures[word] = sampling_client.sample(prompt=prompt(tokenizer, word), num_samples=1, sampling_params=params)
    for word, future in futures.items():
        print(f"{word} -> {tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)}")


def prompt(tokenizer, word: str) -> types.ModelInput:
    return types.ModelInput.from_ints(tokenizer.encode(f"English: {word}\nPig Latin:"))


def make_datum(tokenizer, word: str, answer: str) -> types.Datum:
    """Input and targets shifted by one; weight 1 on the answer, 0 on the prompt."""
    start = prompt(tokenizer, word).to_ints()
    end = [*tokenizer.encode(f" {answer}"), tokenizer.eos_token_id]
    tokens = start + end
    weights = [0.0] * len(start) + [1.0] * len(end)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def loss_per_token(data, outputs) -> float:
    logprobs = np.concatenate([output["logprobs"].tolist() for output in outputs])
    weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in data])
    return -np.dot(logprobs, weights) / weights.sum()


if __name__ == "__main__":
    main()
