"""Seconds of a step with and without ``rollout.ahead``, with an environment that sleeps.

    python benchmarks/ahead.py [--wait 1.0] [--steps 8]

An episode has two turns, and the environment sleeps between them, in this process, one episode after the other. With
``rollout.ahead=0`` a step takes sampling plus training; with 1 it takes the longer of both, and what both compute
in turn on one thread.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLEEPS = """
import time


class Sleeps:
    def reset(self, seed):
        self.turns = 0
        return f"{seed % 50}+{seed % 7}="

    def step(self, text):
        self.turns += 1
        if self.turns == 1:
            time.sleep(SLEEP_S)
        return None if self.turns == 2 else "again", sum(map(ord, text)) % 7 / 7
"""
PROMPTS, GROUP = 8, 4


def measured(ahead: int, steps: int) -> tuple[float, float, float]:
    """Return the medians of a step, of its sampling with rewards, and of its training, in seconds."""
    from cookbook.cli.app import run

    words = ["recipe=grpo", f"recipe.steps={steps}", f"recipe.prompts_per_step={PROMPTS}", f"recipe.group_size={GROUP}"]
    words += ["env=sleeps.py:Sleeps", "env.workers=0", "env.timeout_s=null", "env.max_turns=2", "rollout.max_tokens=8"]
    words += ["eval.every=null", "eval.limit=1", "checkpoint.final=false", f"rollout.ahead={ahead}", f"out=run-{ahead}"]
    words += ["backend.micro_batch_tokens=256", "optim.lr=1e-5", "loss.kl_beta=0.02"]
    assert run(["train", *words]) == 0
    rows = [json.loads(line) for line in Path(f"run-{ahead}/metrics.jsonl").read_text().splitlines()][3:]
    step = statistics.median(row["time/step_s"] for row in rows)
    sampling = statistics.median(
        row["rollout/tokens"] / row["time/sampled_tokens_per_s"] + row["time/reward_s"] for row in rows
    )
    return step, sampling, step - sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that the environments of a step sleep, together")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    os.chdir(tempfile.mkdtemp(prefix="ahead-"))
    Path("sleeps.py").write_text(SLEEPS.replace("SLEEP_S", str(arguments.wait / (PROMPTS * GROUP))))
    in_turn, sampling, training = measured(0, arguments.steps)
    overlapped, _, _ = measured(1, arguments.steps)
    print(f"in turn:  step {in_turn:.2f} s = sampling {sampling:.2f} s + training {training:.2f} s")
    longest = max(sampling, training)
    print(f"ahead=1:  step {overlapped:.2f} s = {overlapped / longest:.2f} x the longer of both ({longest:.2f} s)")


if __name__ == "__main__":
    main()
