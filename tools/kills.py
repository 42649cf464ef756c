"""Kill runs at random moments, resume them, and compare their results with those of the undisturbed run.

    python tools/kills.py --kills 120

A server process imports everything once and forks a child per start, so that a kill costs a fraction of a second; the signals
are real ones, and the child is a process of its own. Every trial kills a fresh run one to three times, each time in another
way, and then lets it finish. Prints a line a trial and, at the end, what the kills met; fails at the first difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

STEPS, EVERY = 8, 2
ROWS = 12  # with the batches below an epoch of SFT, DPO and ORPO has 3 steps: the runs cross two ends of epochs
COMMON = [f"recipe.steps={STEPS}", f"checkpoint.every={EVERY}", "eval.every=3", "eval.limit=2", "eval.max_tokens=3"]
TRAINED = ["recipe.epochs=9", "recipe.batch_size=4"]
# Between them: LoRA, dropout, a schedule, bfloat16 with float32 masters, a reference, sampling, a sampler that lags behind,
# saving while training continues.
RECIPES: Mapping[str, Sequence[str]] = {
    "sft": ["recipe=sft", *TRAINED, "model.lora_rank=2", "model.lora_dropout=0.2", "schedule=cosine", "optim.lr=1e-2"],
    "dpo": ["recipe=dpo", *TRAINED, "model.dtype=bfloat16", "optim.lr=1e-3", "checkpoint.asynchronous=true"],
    "orpo": ["recipe=orpo", *TRAINED, "schedule=linear", "optim.lr=1e-3", "checkpoint.keep=1"],
    "grpo": [
        "recipe=grpo", "recipe.prompts_per_step=4", "recipe.group_size=4", "rollout.max_tokens=4", "weight_sync.every=3",
        "reward=python", "reward.target=dice.py:odd", "optim.lr=1e-3", "checkpoint.asynchronous=true",
    ],
    "refill": [
        "recipe=grpo", "recipe.prompts_per_step=2", "recipe.group_size=2", "rollout.max_tokens=4", "rollout.refill=3",
        "data.curriculum={}", "weight_sync.every=3", "reward=python", "reward.target=dice.py:odd", "optim.lr=1e-3",
    ],
    # The slow reward lets the batch of the next step be under way when the run is killed.
    "ahead": [
        "recipe=grpo", "recipe.prompts_per_step=4", "recipe.group_size=4", "rollout.max_tokens=4", "rollout.ahead=1",
        "reward=python", "reward.target=dice.py:slow", "optim.lr=1e-3",
    ],
    "ahead-refill": [
        "recipe=grpo", "recipe.prompts_per_step=2", "recipe.group_size=2", "rollout.max_tokens=4", "rollout.refill=3",
        "data.curriculum={}", "rollout.ahead=2", "reward=python", "reward.target=dice.py:slow", "optim.lr=1e-3",
        "checkpoint.asynchronous=true",
    ],
}  # fmt: skip
# Streams: a buffer that is smaller than the data, and one that holds all of it.
STREAMED = {"sft": 5, "grpo": 100}
RECIPES = {
    **RECIPES,
    **{
        f"{name}-stream": [*RECIPES[name], "data.streaming=true", f"data.shuffle_buffer={size}"]
        for name, size in STREAMED.items()
    },
}
WAYS = {
    "SIGKILL": [signal.SIGKILL],
    "SIGTERM": [signal.SIGTERM],
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
}
TIMEOUT_S = 120
SECONDS = 1.2  # about what a run takes on a free core


class DifferenceError(Exception):
    """Error of a killed run whose result differs from the undisturbed one."""


@dataclass
class Counts:
    """Counts of the moments at which runs were killed."""

    ways: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    trials: int = 0

    @property
    def kills(self) -> int:
        return self.ways.total()


def prepare(folder: Path) -> None:
    """Makes ``folder`` the current one, with a model, rows and a reward in it, and imports all that a run needs."""
    import tiny

    from cookbook.checkpoints import contents  # noqa: F401

    os.chdir(folder)
    tiny.save(Path("model"))
    rows = [
        {"prompt": f"{i}+{i % 5}=", "completion": str(i + i % 5), "chosen": str(i + i % 5), "rejected": "none"}
        for i in range(ROWS)
    ]
    for name, columns in {"sft": ("completion",), "dpo": ("chosen", "rejected"), "grpo": ()}.items():
        lines = [json.dumps({key: row[key] for key in ("prompt", *columns)}) + "\n" for row in rows]
        Path(f"{name}.jsonl").write_text("".join(lines))
    shutil.copy("dpo.jsonl", "orpo.jsonl")
    for name in ("refill", "ahead", "ahead-refill"):
        shutil.copy("grpo.jsonl", f"{name}.jsonl")
    Path("dice.py").write_text(
        "import time\n\n\ndef odd(completion, row):\n    return sum(map(ord, completion)) % 2\n\n\n"
        "def slow(completion, row):\n    time.sleep(0.01)\n    return odd(completion, row)\n"
    )


def words(recipe: str, out: str) -> list[str]:
    rows = f"{recipe.removesuffix('-stream')}.jsonl"
    data = [f"data.path={rows}", f"data.eval_path={rows}", "data.chat=false"]
    return ["train", *RECIPES[recipe], "model.name=model", "data=jsonl", *data, *COMMON, f"out={out}"]


def start(arguments: Sequence[str], log: Path) -> int:
    """The command in a forked process; its number."""
    # Here, because a signal may interrupt an import of the child.
    from cookbook.cli.app import INTERRUPTED, run

    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os._exit(run(arguments))
    except KeyboardInterrupt:  # before or behind the command's own handling
        os._exit(INTERRUPTED)
    except BaseException:  # noqa: BLE001 - nothing may return into the server
        import traceback

        traceback.print_exc()
        os._exit(1)


def finished(child: int, seconds: float, reached: Callable[[], bool] = lambda: True) -> int | None:
    """The exit code, negative for a signal; None where it still runs ``seconds`` after it has ``reached`` something."""
    deadline = None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if deadline is None and reached():
            deadline = time.monotonic() + seconds
        if deadline is not None and time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def rows_of(out: Path) -> int:
    """Rows of metrics so far: those of the steps from 0 on."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def to_the_end(recipe: str, out: str, log: Path) -> None:
    """Runs the command undisturbed."""
    code = finished(start(words(recipe, out), log), TIMEOUT_S)
    if code != 0:
        raise DifferenceError(f"{recipe}: exit code {code}; see {log}")


@dataclass(frozen=True)
class Plan:
    """When and how to kill: ``after`` seconds behind the ``rows``-th row of metrics, and between two signals ``pause``."""

    way: str
    rows: int
    after: float
    pause: float

    @classmethod
    def drawn(cls, draw: random.Random, seconds: float) -> Plan:
        """Draw a kill for a run of ``seconds``: equally likely at the start and at every step, at any moment of it."""
        rows = draw.randint(0, STEPS)
        after = draw.uniform(0, 1) * seconds / (1 if rows == 0 else STEPS)
        return cls(draw.choice(list(WAYS)), rows, after, draw.uniform(0, 2) * seconds / STEPS)


def kill(recipe: str, out: str, log: Path, plan: Plan, counts: Counts) -> bool:
    """Starts the run and ends it; whether there was anything to end."""
    child = start(words(recipe, out), log)
    if (code := finished(child, plan.after, lambda: rows_of(Path(out)) >= plan.rows)) is not None:
        if code != 0:
            raise DifferenceError(f"{recipe}: exit code {code} although it was not killed; see {log}")
        return False
    for number, one in enumerate(WAYS[plan.way]):
        time.sleep(plan.pause * bool(number))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, one)
    code = finished(child, TIMEOUT_S)
    # 0: it was at its last step; 128 and the signal: the command has handled it.
    allowed = {0, 130, *(128 + one for one in WAYS[plan.way]), *(-one for one in WAYS[plan.way])}
    if code is None:
        os.kill(child, signal.SIGKILL)
    if code not in allowed:
        raise DifferenceError(f"{recipe}: exit code {code} after {plan.way}; see {log}")
    counts.ways[plan.way] += 1
    counts.moments[moment(Path(out))] += 1
    check_status(Path(out), child, code, plan.way)
    return True


def moment(out: Path) -> str:
    """Return the activity of a run at its kill, as derived from its folder."""
    if not (out / "metrics.jsonl").exists():
        return "before the first row"
    if list(out.glob("checkpoints/.*")):
        return "while it saved"
    return "after a checkpoint" if list(out.glob("checkpoints/step-*")) else "before a checkpoint"


def check_status(out: Path, child: int, code: int, way: str) -> None:
    """``status.json`` is whole, and says how the run ended wherever it had time to."""
    from cookbook.run import hooks
    from cookbook.utils import files

    if not (out / hooks.STATUS).exists():
        return
    found = json.loads((out / hooks.STATUS).read_text())
    may_be = {"finished"} if code == 0 else {"finished", "interrupted"}  # the signal may come when all is done
    if found["pid"] == child and code >= 0 and way != "SIGINT twice" and found["state"] not in may_be:
        raise DifferenceError(f"{out}: status {found['state']} after {way} and exit code {code}")
    with files.locked(out):  # raises where the dead process still had it
        pass


def tensors(out: Path) -> dict[str, bytes]:
    """Every tensor file of the last checkpoint."""
    folder = out / "checkpoints" / f"step-{STEPS:06d}"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}
    if "trainer/shard-00000-00000.safetensors" not in found or len(found) < 2:
        raise DifferenceError(f"{folder}: holds {sorted(found)}")
    return found


def metrics(out: Path) -> list[dict[str, Any]]:
    """Return all rows, without the times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def compare(out: Path, straight: Path) -> None:
    """Raises DifferenceError: a row of metrics, a sample, a tensor, or something left behind."""
    if [row["step"] for row in metrics(out)] != list(range(STEPS + 1)):
        raise DifferenceError(f"{out}: has the steps {[row['step'] for row in metrics(out)]}")
    for one, other in zip(metrics(out), metrics(straight), strict=True):
        if one != other:
            keys = sorted(key for key in {**one, **other} if one.get(key) != other.get(key))
            raise DifferenceError(f"{out}: step {one['step']} differs in {', '.join(keys)}")
    if (out / "samples.jsonl").read_bytes() != (straight / "samples.jsonl").read_bytes():
        raise DifferenceError(f"{out}: samples.jsonl differs")
    if tensors(out) != tensors(straight):
        raise DifferenceError(f"{out}: weights or optimizer state differ")
    kept = [sorted(path.name for path in (place / "checkpoints").iterdir()) for place in (out, straight)]
    if len(kept[0]) != len(kept[1]) or not all(name.startswith("step-") for name in kept[0]):
        raise DifferenceError(f"{out}: holds the checkpoints {kept[0]}, undisturbed {kept[1]}")
    if json.loads((out / "status.json").read_text())["state"] != "finished":
        raise DifferenceError(f"{out}: its status is not finished")


def campaign(folder: Path, kills: int, seed: int, recipes: Sequence[str] = tuple(RECIPES), *, loud: bool = False) -> Counts:
    """Kills runs of all ``recipes`` in turn until there were ``kills``, in ``folder``.

    Raises:
        DifferenceError: the result of a run differs from the undisturbed one. Its folder and its log stay.
    """
    prepare(folder)
    draw = random.Random(seed)
    for recipe in recipes:
        to_the_end(recipe, f"{recipe}-straight", folder / f"{recipe}.log")
    counts = Counts()
    while counts.kills < kills or counts.trials < len(recipes):
        recipe = recipes[counts.trials % len(recipes)]
        out, log = f"{recipe}-{counts.trials}", folder / f"{recipe}-{counts.trials}.log"
        done = []
        for _ in range(draw.randint(1, 3)):
            plan = Plan.drawn(draw, SECONDS)
            if kill(recipe, out, log, plan, counts):
                done.append(plan.way)
        to_the_end(recipe, out, log)
        compare(Path(out), Path(f"{recipe}-straight"))
        shutil.rmtree(out)
        counts.trials += 1
        if loud:
            print(f"trial {counts.trials}: {recipe}, killed by {', '.join(done) or 'no signal'}: 0 differences", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    began = time.monotonic()
    counts = campaign(folder, arguments.kills, arguments.seed, arguments.recipes, loud=True)
    print(f"{counts.kills} kills of {counts.trials} runs in {time.monotonic() - began:.0f} s: 0 differences")
    print("ways:", ", ".join(f"{name} {number}" for name, number in counts.ways.most_common()))
    print("moments:", ", ".join(f"{name} {number}" for name, number in counts.moments.most_common()))
    os.chdir(ROOT)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
