"""The endpoint for agents under real packages: verifiers' train client and inspect-ai. ``make test-endpoint``.

    python tools/endpoint_clients.py .venv-inspect/bin/python .venv-verifiers/bin/python

The packages live in environments of their own, in which this file runs again, with the URL of the server. Every answer that
they report is compared with the embedded engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
TINY = ROOT / "data" / "tiny"
QUESTIONS = ("What is 3+4?", "And 5+1?")
SUMS = [(a, b) for a in range(10) for b in range(4)]
SAMPLING = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
# The endpoint samples in batches, and the engine scores one text; float32.
TOLERANCE = 1e-4


# ---- in the environment of the packages ------------------------------------------------------------------------------


async def verifiers_turns(url: str) -> list[dict[str, Any]]:
    """Two turns of the train client, with the field that it adds where its renderer continues the tokens of a turn."""
    import verifiers.v1 as vf
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.trace import AgentInfo, TraceTask
    from verifiers.v1.types import UserMessage

    os.environ["COOKBOOK_KEY"] = "tml-test"
    config = vf.TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="COOKBOOK_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=str(TINY),
    )
    client, sampling = vf.resolve_client(config), vf.SamplingConfig(**SAMPLING, routed_experts_prompt_start=0)
    task = vf.TaskData(idx=0, prompt=QUESTIONS[0])
    trace = vf.Trace(
        task=TraceTask(type="Task", data=task, key="0", hash="0"), agent=AgentInfo(config=vf.AgentConfig(model="tiny"))
    )
    messages, turns = [], []
    for question in QUESTIONS:
        messages.append(UserMessage(content=question))
        turn = prepare_turn(trace, messages, [])
        response = await client.get_response(ChatDialect(), {"model": "tiny"}, sampling, session_id="one", turn=turn)
        turn.commit(response)
        messages.append(response.message)
        tokens = response.tokens
        turns.append(
            {
                "prompt": tokens.prompt_ids,
                "tokens": tokens.completion_ids,
                "logprobs": tokens.completion_logprobs,
            }
        )
    await client.close()
    return turns


def inspect_evaluation(url: str, folder: str) -> dict[str, Any]:
    """An evaluation by inspect-ai's provider for OpenAI-compatible servers, with logprobs and seeds."""
    from inspect_ai import Task
    from inspect_ai import eval as evaluate
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    config = GenerateConfig(max_tokens=8, temperature=0.0, logprobs=True, top_logprobs=2, seed=5)
    model = get_model("openai-api/cookbook/tiny", base_url=f"{url}/v1", api_key="tml-test", config=config)
    task = Task([Sample(f"{a}+{b}=", target=str(a + b)) for a, b in SUMS], solver=generate(), scorer=match())
    [log] = evaluate(task, model=model, log_dir=folder, display="none")
    assert log.status == "success", log.error
    outputs = [sample.output for sample in log.samples]
    return {
        "accuracy": log.results.scores[0].metrics["accuracy"].value,
        "completions": {sample.input: sample.output.completion for sample in log.samples},
        "logprobs": [one.logprob for output in outputs for one in output.choices[0].logprobs.content],
        "tokens": sum(usage.output_tokens for usage in log.stats.model_usage.values()),
    }


def inside(package: str, url: str, folder: str) -> None:
    found = asyncio.run(verifiers_turns(url)) if package == "verifiers" else inspect_evaluation(url, folder)
    Path(folder, f"{package}.json").write_text(json.dumps(found))


# ---- with cookbook ---------------------------------------------------------------------------------------------------


def main(inspect: str, verifiers: str) -> None:
    import numpy as np
    import servertools

    from cookbook.backends.local import LocalConfig, LocalTrainer
    from cookbook.data import Renderer
    from cookbook.data.formats import Chat
    from cookbook.data.messages import parse_messages
    from cookbook.data.render import completed_text
    from cookbook.engine.model import ModelConfig
    from cookbook.types import SamplingParams

    with tempfile.TemporaryDirectory() as folder, servertools.running(TINY, Path(folder) / "out", names=["tiny"]) as server:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        found = {}
        for package, python in (("inspect", inspect), ("verifiers", verifiers)):
            command = [str(Path(python).absolute()), __file__, package, server.url, folder]
            subprocess.run(command, check=True, env=environment, cwd=folder)
            found[package] = json.loads(Path(folder, f"{package}.json").read_text())
    trainer = LocalTrainer(ModelConfig(str(TINY)), LocalConfig(), seed=0)
    renderer, sampler = Renderer(trainer.tokenizer), trainer.live_sampler(0).result()
    assert len(found["verifiers"][1]["prompt"]) > len(found["verifiers"][0]["prompt"])
    for turn in found["verifiers"]:
        drawn = sampler.sample(turn["prompt"], 1, SamplingParams(**SAMPLING)).result()
        assert drawn.sequences[0].tokens == turn["tokens"]
        assert np.abs(np.subtract(drawn.sequences[0].logprobs, turn["logprobs"])).max() < TOLERANCE
    completions, right = {}, 0
    for a, b in SUMS:
        chat = Chat("row", parse_messages([{"role": "user", "content": f"{a}+{b}="}], "row", "messages"), 1, None)
        sample = sampler.sample(renderer.prompts([chat])[0][0], 1, SamplingParams(max_tokens=8, temperature=0.0)).result()
        completions[f"{a}+{b}="] = completed_text(renderer, sample.sequences[0].tokens, ())
        # As inspect-ai's match does: at the end of the text.
        right += completions[f"{a}+{b}="].strip().endswith(str(a + b))
    trainer.close()
    evaluation = found["inspect"]
    assert evaluation["completions"] == completions
    assert abs(evaluation["accuracy"] - right / len(SUMS)) < 1e-9, (evaluation["accuracy"], right)
    assert evaluation["tokens"] >= len(evaluation["logprobs"]) > 0 and max(evaluation["logprobs"]) <= 0
    print(f"verifiers: two turns; inspect-ai: {len(SUMS)} answers, accuracy {evaluation['accuracy']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else inside(*sys.argv[1:])
