"""Whether a run of thousands of steps stays as it was after the first hundred: memory, objects, threads, file handles.

    python benchmarks/long_run.py --steps 5000

GRPO on a tiny random model, every housekeeping part on. Prints a row per tenth of the run, and fails where the resident size
of the last one is more than 2% above that of the first, or where anything that is counted has grown.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from cookbook.run.hooks import Hook  # noqa: E402 - the checkout comes before an installed cookbook

MAX_GROWTH = 0.02
PROMPTS = "".join(f'{{"prompt": "{i}+{i % 7}=", "answer": "{i + i % 7}"}}\n' for i in range(40))
REWARD = "def odd(completion, row):\n    return sum(map(ord, completion)) % 2\n"


@dataclass(frozen=True)
class Size:
    """Memory and objects of a process. ``resident`` is in bytes."""

    resident: int
    objects: int
    tensors: int
    threads: int
    files: int


def size() -> Size:
    """Of this process, now, after a full collection."""
    import torch

    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    objects = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    return Size(resident, len(objects), tensors, threading.active_count(), len(list(Path("/proc/self/fd").iterdir())))


@dataclass
class Watch(Hook):
    """Notes the process's size after every ``every`` steps."""

    every: int

    def __post_init__(self) -> None:
        SEEN.clear()

    def on_step(self, run: object, step: int, metrics: Mapping[str, float]) -> None:
        if step % self.every == 0:
            SEEN.append((step, time.process_time(), size()))


SEEN: list[tuple[int, float, Size]] = []  # steps, CPU seconds so far, size


def words(model: Path, steps: int, every: int, out: Path) -> list[str]:
    """The command's arguments, in a folder that holds ``dice.py`` and ``rows.jsonl``."""
    return [
        "train", "recipe=grpo", f"model.name={model}", "data=jsonl", "data.path=rows.jsonl", "data.eval_path=rows.jsonl",
        "recipe.prompts_per_step=2", "recipe.group_size=4", f"recipe.steps={steps}", "rollout.max_tokens=3",
        "reward=python", "reward.target=dice.py:odd", "eval.every=10", "eval.limit=2", "eval.max_tokens=3",
        "checkpoint.every=20", "checkpoint.keep=2", "optim.lr=1e-6", f"out={out}",
        "+hook.watch._target_=long_run.Watch", f"+hook.watch.every={every}",
    ]  # fmt: skip


def watched(folder: Path, steps: int, every: int) -> list[tuple[int, float, Size]]:
    """Run ``steps`` in ``folder``, the current one, in this process. Return the sizes noted every ``every`` steps."""
    import long_run  # as the hook's _target_ names it: this file may be __main__
    import tiny

    from cookbook.cli.app import run

    (folder / "dice.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text(PROMPTS)
    if code := run(words(tiny.save(folder / "model"), steps, every, Path("run"))):
        sys.exit(code)
    return list(long_run.SEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        seen = watched(Path(folder), steps, max(steps // 10, 1))
        os.chdir(ROOT)
    print(f"{'step':>6} {'CPU s':>8} {'MB':>8} {'objects':>9} {'tensors':>8} {'threads':>8} {'files':>6}")
    for step, seconds, one in seen:
        print(
            f"{step:6} {seconds:8.1f} {one.resident / 1e6:8.1f} {one.objects:9} {one.tensors:8} {one.threads:8} {one.files:6}"
        )
    first, last = seen[0][2], seen[-1][2]
    growth = last.resident / first.resident - 1
    print(f"growth after the first {seen[0][0]} steps: {growth:.2%} of resident size")
    same = (first.tensors, first.threads, first.files) == (last.tensors, last.threads, last.files)
    sys.exit(0 if growth < MAX_GROWTH and same else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
