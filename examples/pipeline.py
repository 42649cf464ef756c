"""Pipeline parallelism: the shipped model in two stages, one process each, trained with a loss of your own.

python examples/pipeline.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoModelForCausalLM, AutoTokenizer

import cookbook
from cookbook.types import Datum, ModelInput
from cookbook.utils.paths import packaged

WORDS = {"cat": "atcay", "dog": "ogday", "banana": "ananabay", "sun": "unsay", "tree": "eetray", "cookbook": "ookbookcay"}
STAGES, MICRO_BATCHES, ROWS, TOKENS = 2, 4, 8, 48
STEPS = 60


class Part(torch.nn.Module):
    """Consecutive layers of a Hugging Face model; the first part embeds tokens, the last part has norm and output layer."""

    def __init__(self, model, index: int, num_parts: int) -> None:
        super().__init__()
        self.body, config = model.model, model.config
        bounds = [round(part * config.num_hidden_layers / num_parts) for part in (index, index + 1)]
        self.is_first, self.is_last = index == 0, index == num_parts - 1
        self.body.layers = self.body.layers[slice(*bounds)]
        config.layer_types = config.layer_types[slice(*bounds)]
        config.num_hidden_layers = len(self.body.layers)
        if not self.is_first:
            self.body.embed_tokens = None
        if not self.is_last:
            self.body.norm = torch.nn.Identity()
        # A tied output layer is a copy: the first part has the other one, in another process.
        self.lm_head = model.lm_head if self.is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        return self.body(**inputs, use_cache=False).last_hidden_state

    def tied_weight(self) -> torch.Tensor | None:
        """This part's copy of the matrix that is both embedding and output layer."""
        layer = self.body.embed_tokens if self.is_first else self.lm_head
        return None if layer is None else layer.weight


def my_loss(data, logprobs):
    """Mean over words of the mean over a word's letters, which no micro-batch can compute alone."""
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    loss = torch.stack([-(row * weight).sum() / weight.sum() for row, weight in zip(logprobs, weights, strict=True)]).mean()
    return loss, {"perplexity": loss.exp().item()}


def make_datum(tokenizer, word: str, answer: str) -> Datum:
    start = tokenizer.encode(f"English: {word}\nPig Latin:")
    end = [*tokenizer.encode(f" {answer}"), tokenizer.eos_token_id]
    weights = [0.0] * (len(start) - 1) + [1.0] * len(end)
    tokens = start + end
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


def train(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=STAGES)
    torch.set_num_threads(1)
    folder = packaged("data") / "tiny"
    data = [make_datum(AutoTokenizer.from_pretrained(folder), *pair) for pair in WORDS.items()]
    part = Part(AutoModelForCausalLM.from_pretrained(folder), rank, STAGES)
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))

    head = cookbook.LinearCrossEntropyLoss(part.lm_head) if part.is_last else None
    pipeline = cookbook.PipelineLoss(head, ROWS, TOKENS)
    # The loss is that of the whole batch, so its gradient is not divided by the number of micro-batches.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=pipeline, scale_grads=False)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    for step in range(STEPS):
        result = pipeline.forward_backward(schedule, data, my_loss)
        # Both copies of the tied weight get the sum of their gradients, so both optimizers make the same update. With
        # more than two stages, pass the group of the first and the last rank.
        dist.all_reduce(part.tied_weight().grad)
        optimizer.step()
        optimizer.zero_grad()
        if result is not None and (step % 20 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {result[0]:.4f}  perplexity {result[1]['perplexity']:.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    # The model is tiny: more threads per process are slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/rendezvous",), nprocs=STAGES)


if __name__ == "__main__":
    main()
