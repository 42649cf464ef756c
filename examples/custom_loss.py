"""An objective of your own: any differentiable function of the log-probabilities, at the price of a built-in loss.

    python examples/custom_loss.py

The loss is unlikelihood training: raise the right answer's probability, and lower the wrong one's.
"""

import torch

import cookbook as tinker
from cookbook import types

QUESTIONS = {  # the right answer and the wrong one
    "12+30=": ("42", "about 40"),
    "35+18=": ("53", "about 50"),
    "9+43=": ("52", "about 50"),
    "44+27=": ("71", "about 70"),
}
STEPS = 30


def unlikelihood(data, logprobs_list):
    """``data`` holds right and wrong answers in turn; one tensor of shape (T,) per datum comes in, a scalar goes out."""
    right, wrong = torch.zeros(()), torch.zeros(())
    for index, (datum, logprobs) in enumerate(zip(data, logprobs_list, strict=True)):
        weights = datum.loss_fn_inputs["weights"].to_torch()
        mean_logprob = (logprobs * weights).sum() / weights.sum()
        if index % 2 == 0:
            right = right - mean_logprob
        else:
            wrong = wrong - torch.log1p(-mean_logprob.exp().clamp(max=1 - 1e-6))
    pairs = len(data) / 2
    return (right + wrong) / pairs, {"right": right.item() / pairs, "wrong": wrong.item() / pairs}


def main() -> None:
    with tinker.ServiceClient() as service_client:
        training_client = service_client.create_training_client(base_model="tiny")
        tokenizer = training_client.get_tokenizer()
        data = [make_datum(tokenizer, ask, answer) for ask, answers in QUESTIONS.items() for answer in answers]
        for step in range(STEPS):
            gradient = training_client.forward_backward_custom(data, unlikelihood)
            update = training_client.optim_step(types.AdamParams(learning_rate=2e-4))
            metrics = gradient.result().metrics
            update.result()
            if step % 10 == 0 or step == STEPS - 1:
                print(f"step {step:2d}  loss {metrics['loss']:.4f}  right {metrics['right']:.4f}  wrong {metrics['wrong']:.4f}")

        sampling_client = training_client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, temperature=0.0)
        futures = {ask: sampling_client.sample(prompt(tokenizer, ask), 1, params) for ask in QUESTIONS}
        for ask, future in futures.items():
            print(ask, tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True))


def prompt(tokenizer, ask: str) -> types.ModelInput:
    messages = [{"role": "user", "content": ask}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return types.ModelInput.from_ints(tokenizer.encode(text))


def make_datum(tokenizer, ask: str, answer: str) -> types.Datum:
    start = prompt(tokenizer, ask).to_ints()
    end = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    return tinker.datum_from_tokens_weights(start + end, [0.0] * len(start) + [1.0] * len(end))


if __name__ == "__main__":
    main()
