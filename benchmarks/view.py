"""``cookbook view`` of 10,000 rollouts: seconds to write the page, to open it in Chromium, and to search all steps.

    python benchmarks/view.py [--tokens 200] [--steps 80]

The rollouts have two turns of random tokens, and are stored by the code that a run uses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import browser  # noqa: E402

from cookbook.cli.app import run  # noqa: E402
from cookbook.data import RenderedPrompt, Renderer, Row  # noqa: E402
from cookbook.futures import done  # noqa: E402
from cookbook.run.rollout_store import RolloutStore  # noqa: E402
from cookbook.sampling import rollouts  # noqa: E402
from cookbook.sampling.rollouts import RolloutGroup  # noqa: E402
from cookbook.sampling.trajectory import Segment, Trajectory  # noqa: E402
from cookbook.types import ForwardBackwardOutput, TensorData  # noqa: E402
from cookbook.utils.tables import aligned  # noqa: E402

PROMPTS, GROUP = 16, 8


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--steps", type=int, default=80, help=f"steps of {PROMPTS * GROUP} rollouts")
    words.add_argument("--tokens", type=int, default=200, help="tokens of a rollout")
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        lines = [("rollouts", f"{given.steps * PROMPTS * GROUP:,} of {given.tokens} tokens")]
        lines.append(("store, CPU ms per step", f"{1000 * write_run(folder, given.steps, given.tokens):.1f}"))
        started = time.perf_counter()
        assert run(["view", str(folder)]) == 0
        page = folder / "view.html"
        lines.append(("write the page, s", f"{time.perf_counter() - started:.2f}"))
        files = (folder / "rollouts.jsonl.gz", page)
        lines += [(f"{file.name}, MB", f"{file.stat().st_size / 1e6:.1f}") for file in files]
        if browser.program() is None:
            lines.append(("open", "no browser on this machine: apt-get install chromium"))
        else:
            lines += measure(page)
    print("\n".join(aligned(lines)))


def measure(page: Path) -> list[tuple[str, str]]:
    """Open the page three times, and search all of its steps."""
    with browser.page() as tab:
        opened = []
        for _ in range(3):
            tab.open(page.as_uri())
            opened.append(tab.run("Number(document.documentElement.dataset.openedMs)") / 1000)
        lines = [("open until drawn, s", ", ".join(f"{seconds:.2f}" for seconds in opened))]
        tab.run("document.getElementById('everywhere').click()")
        tab.wait("document.documentElement.dataset.complete > 1")
        started = time.perf_counter()
        tab.change("search", "zz")
        lines.append(("search all steps, s", f"{time.perf_counter() - started:.2f}"))
        return [*lines, ("found", tab.texts(".note")[0])]


def write_run(folder: Path, steps: int, num_tokens: int) -> float:
    """Write a run folder. Return the CPU seconds of storing one step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"recipe": {"name": "grpo"}, "model": {"name": "tiny"}}))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, steps + 1)))
    renderer = Renderer(AutoTokenizer.from_pretrained(ROOT / "data/tiny"))
    store = RolloutStore(folder, 10_000, renderer, pairs=False)
    random, seconds = np.random.default_rng(0), 0.0
    for step in range(1, steps + 1):
        groups = [group(renderer, f"prompts.jsonl:{row}", random, num_tokens) for row in range(PROMPTS)]
        advantages = random.normal(size=(PROMPTS, GROUP)).tolist()
        data = rollouts.datums(groups, advantages)
        outputs = [
            {
                "logprobs": TensorData(
                    one.loss_fn_inputs["sampling_logprobs"].array + random.normal(0, 0.01, one.model_input.length)
                )
            }
            for one in data
        ]
        started = time.process_time()
        store.sampled(groups)
        store.trained(data, done(ForwardBackwardOutput(outputs)))
        store.write(step)
        seconds += time.process_time() - started
    return seconds / steps


def group(renderer: Renderer, where: str, random: np.random.Generator, num_tokens: int) -> RolloutGroup:
    """Return a group of two-turn trajectories of random letters."""

    def segment(author: str, count: int) -> Segment:
        tokens = random.integers(64, 90, count).tolist()
        logprobs = (-random.exponential(1.0, count)).tolist() if author == "model" else []
        return Segment(author, tokens, renderer.text(tokens), logprobs, "stop" if author == "model" else "")  # type: ignore[arg-type]

    prompt, turn = segment("prompt", 40), num_tokens // 2
    trajectories = [
        Trajectory(((prompt, segment("model", turn), segment("environment", 20), segment("model", num_tokens - turn)),), "done")
        for _ in range(GROUP)
    ]
    rendered = RenderedPrompt(prompt.tokens, Row(where, {}), prompt.text, prompt.text)
    return RolloutGroup(rendered, trajectories, random.random(GROUP).round(2).tolist())


if __name__ == "__main__":
    main()
