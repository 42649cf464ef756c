"""Groups of rollouts with several turns, and run folders that hold them."""

from pathlib import Path

import yaml
from runtools import ROOT
from transformers import AutoTokenizer

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.futures import done
from cookbook.run.rollout_store import RolloutStore
from cookbook.sampling import rollouts
from cookbook.sampling.rollouts import RolloutGroup
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.types import ForwardBackwardOutput, TensorData

# Text that would become a tag, and characters that several tokens spell.
HOSTILE = "<img src=x onerror=alert(1)></script> é 数"


def renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(ROOT / "data/tiny"))


def segment(one: Renderer, author: str, text: str, logprob: float = -0.5) -> Segment:
    tokens = one.tokenizer(text, add_special_tokens=False)["input_ids"]
    if author != "model":
        return Segment(author, tokens, text)
    return Segment("model", tokens, text, [logprob / (index + 1) for index in range(len(tokens))], "stop", 4)


def group(one: Renderer, where: str = "games.jsonl:7") -> RolloutGroup:
    """A prompt with a trajectory of two turns and a tool, one of two branches, and one that was cut short."""
    prompt = segment(one, "prompt", "Guess a number: ")
    question = RenderedPrompt(prompt.tokens, Row(where, {}), prompt.text, prompt.text)
    call, answer, final = (
        segment(one, "model", "call(3)"),
        segment(one, "environment", " too low\n"),
        segment(one, "model", HOSTILE),
    )
    again = segment(one, "prompt", "Guess a number: call(3) too low")
    trajectories = [
        Trajectory(((prompt, call, answer, final),), "done", calls=2, malformed_calls=1),
        Trajectory(((prompt, call), (again, segment(one, "model", "5", -3.0))), "max_turns"),
        Trajectory(((prompt, segment(one, "model", "no idea")),), "length"),
    ]
    parts = [{"correct": 0.8, "format": 0.2}, {"correct": 0.25, "format": float("nan")}, {}]
    return RolloutGroup(question, trajectories, [1.0, 0.25, 0.0], parts=parts)


def write_run(folder: Path, steps: int = 3) -> Path:
    """Write a run folder whose steps have two groups each; the trainer's logprobs are 0.01 above the sampler's."""
    folder.mkdir()
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"recipe": {"name": "grpo"}, "model": {"name": "data/tiny"}, "seed": steps})
    )
    (folder / "status.json").write_text('{"state": "running", "step": 1}')
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


def add_step(folder: Path, step: int) -> None:
    one = renderer()
    groups = [group(one), group(one, f"games.jsonl:{step}")]
    data = rollouts.datums(groups[:1], [[1.5, -0.5, -1.0]])
    outputs = [{"logprobs": TensorData(row.loss_fn_inputs["sampling_logprobs"].array + 0.01)} for row in data]
    store = RolloutStore(folder, 1.0, one, pairs=False)
    store.sampled(groups)
    store.trained(data, done(ForwardBackwardOutput(outputs)))
    store.write(step)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "reward/mean": {step / 10}, "loss": {1 / step}}}\n')
