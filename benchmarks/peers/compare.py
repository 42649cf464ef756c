"""Cookbook beside TRL: CPU seconds of a step and peak memory, each in processes of its own, in turn.

    python benchmarks/peers/compare.py FOLDER --trl .venv-trl/bin/python [--rounds 3] [--only NAME ...] [--tune] [--json FILE]

`prepare.py` makes FOLDER. Both sides do the same work, which is checked: the tokens of every step, and the loss of the
first. Seconds are those from the first finished step to the last; memory is the peak beyond what imports take, so weights,
gradients and moments are in it. Exit 1 when the work differs; a target that is missed is only marked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from startup import cpu_until
from workloads import COMPLETION_TOKENS, GROUP, LR, WORKLOADS, Folder, Setting, Workload

HERE = Path(__file__).parent
SAME_LOSS = 1e-4  # relative: float32 rounding is 1e-7, a token more or less in the mean 1e-3
SAME_SAMPLES = 0.1  # relative: where untrained models happen to end their samples
STARTUP_REACH = 2.0
STARTUP_ROWS = 8  # TRL's default; all that either side reads
OURS = "cookbook"
Results = dict[str, list[dict[str, Any]]]  # by side, one a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", type=Path, required=True, help="the Python of TRL's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help=f"of startup, {', '.join(work.name for work in WORKLOADS)}")
    parser.add_argument("--tune", action="store_true", help="TRL alone, under every setting that might be its best")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    folder, trl = Folder(arguments.folder.resolve()), arguments.trl.absolute()
    shutil.rmtree(folder.root / "results", ignore_errors=True)
    (folder.root / "results").mkdir()
    load = os.getloadavg()[0]
    rows = []
    for workload in WORKLOADS:
        if not arguments.only or workload.name in arguments.only:
            results = measure(workload, folder, trl, arguments.rounds, tune=arguments.tune)
            rows += rows_of(workload, results, tune=arguments.tune)
    if not arguments.tune and (not arguments.only or "startup" in arguments.only):
        rows.append(startup_row(folder, trl, arguments.rounds))
    show(rows, (folder.root / "source.txt").read_text(encoding="utf-8").strip(), load)
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": load, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else 0


# ---- steps -----------------------------------------------------------------------------------------------------------


def measure(workload: Workload, folder: Folder, trl: Path, rounds: int, *, tune: bool) -> Results:
    """Measure every side once per round, in turn, so that other load on the machine affects all sides."""
    settings = workload.candidates if tune else workload.settings
    results: Results = {name: [] for name in [*([] if tune else [OURS]), *(one.name for one in settings)]}
    for number in range(rounds):
        for side, found in results.items():
            setting = next((one for one in settings if one.name == side), None)
            name = f"{workload.name}-{side.replace(' ', '-')}-{number}"
            command = _ours(workload, folder, name) if setting is None else _theirs(workload, setting, folder, trl, name)
            _run(command, folder, name)
            found.append(folder.read(name))
            print(f"{name}: {found[-1]['seconds_a_step']:.3f} CPU s a step", file=sys.stderr, flush=True)
    return results


def _ours(workload: Workload, folder: Folder, name: str) -> list[str]:
    """The command a user would type, with the meter as a hook."""
    out = folder.root / "results" / f"run-{name}"
    settings: dict[str, Any] = {
        "recipe": workload.method,
        "recipe.steps": workload.steps,
        "data.path": folder.rows(workload),
        "optim.lr": LR,
        "out": out,
        **_plain(folder.model(workload.model)),
    }
    if workload.method == "grpo":
        settings |= {"recipe.prompts_per_step": workload.rows, "recipe.group_size": GROUP}
        settings |= {"rollout.max_tokens": COMPLETION_TOKENS, "data.format": "prompt", "loss.kl_beta": 0}
        settings |= {"reward": "python", "reward.target": f"{HERE / 'workloads.py'}:letters"}
    else:
        settings["recipe.batch_size"] = workload.rows
    hook = f"+hook.meter={{_target_:cookbook_hook.MeterHook,path:{folder.result(name)}}}"
    return [sys.executable, "-m", "cookbook", "train", *(f"{key}={value}" for key, value in settings.items()), hook]


def _plain(model: Path) -> dict[str, Any]:
    """Settings that both sides share: the rows in their order, TRL's AdamW, nothing evaluated and nothing saved."""
    return {
        "model.name": model,
        "data": "jsonl",
        "data.shuffle": "false",
        "schedule": "constant",
        "schedule.warmup_ratio": "null",
        "optim.beta2": 0.999,
        "backend.device": "cpu",
        "eval.every": "null",
        "checkpoint.every": "null",
        "checkpoint.final": "false",
    }


def _theirs(workload: Workload, setting: Setting, folder: Folder, trl: Path, name: str) -> list[str]:
    script, result = HERE / "trl_side.py", folder.result(name)
    return [str(trl), str(script), str(folder.root), workload.name, setting.name, str(result)]


def _run(command: Sequence[str], folder: Folder, name: str) -> None:
    log = folder.root / "results" / f"{name}.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(command), check=False)
    if done.returncode:
        raise SystemExit(f"compare: {name} ended with {done.returncode}; see {log}")


def _environment(command: Sequence[str]) -> dict[str, str]:
    """One thread, no network. TRL's Python sees nothing of cookbook."""
    ours = command[0] == sys.executable
    path = os.pathsep.join([str(HERE), *(found for found in (os.environ.get("PYTHONPATH"),) if found)])
    single = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CI": "1"}
    return {**os.environ, **single, "PYTHONPATH": path if ours else ""}


# ---- what was found --------------------------------------------------------------------------------------------------


def rows_of(workload: Workload, results: Results, *, tune: bool) -> list[dict[str, Any]]:
    """A row a setting of TRL; when tuning, each against the first."""
    first = next(iter(results))
    rows = []
    for setting in workload.candidates if tune else workload.settings:
        ours, theirs = results[first], results[setting.name]
        times = statistics.median(b["seconds_a_step"] / a["seconds_a_step"] for a, b in zip(ours, theirs, strict=True))
        memory = _median(ours, "peak_mb") / _median(theirs, "peak_mb")
        rows.append(
            {
                "what": workload.name,
                "against": setting.name,
                "unit": f"{workload.unit}/s",
                "cookbook": _units(workload, ours),
                "trl": _units(workload, theirs),
                "times": times,
                "reach": setting.reach,
                "cookbook_mb": _median(ours, "peak_mb"),
                "trl_mb": _median(theirs, "peak_mb"),
                "memory": memory,
                "reach_memory": workload.memory,
                "wrong": "" if tune else difference(workload, ours[0]["steps"], theirs[0]["steps"]),
            }
        )
    return rows


def _median(found: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(one[key] for one in found))


def _units(workload: Workload, found: Sequence[dict[str, Any]]) -> float:
    """Per CPU second."""
    inputs = [step["inputs"] for step in found[0]["steps"][1:]]
    per_step = {"tokens": float(sum(inputs)) / len(inputs), "pairs": float(workload.rows), "steps": 1.0}[workload.unit]
    return per_step / _median(found, "seconds_a_step")


def difference(workload: Workload, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> str:
    """Why the two did not do the same work; empty when they did."""
    if workload.method == "grpo":  # each samples its own completions
        a, b = (sum(step[key] for step in side) for side, key in ((ours, "sampled"), (theirs, "trained")))
        return "" if abs(a - b) <= SAME_SAMPLES * b else f"{a:.0f} tokens sampled, and {b:.0f} by TRL"
    sequences = workload.rows * (2 if workload.method == "dpo" else 1)  # a sequence's last token is no model input
    for number, (a_step, b_step) in enumerate(zip(ours, theirs, strict=True), 1):
        for key, added in (("inputs", sequences), ("trained", 0)):
            if a_step[key] + added != b_step[key]:
                return f"step {number}: {a_step[key] + added:.0f} tokens {key}, and {b_step[key]:.0f} by TRL"
    a, b = ours[0]["loss"], theirs[0]["loss"]
    return "" if abs(a - b) <= SAME_LOSS * abs(b) else f"loss of the first step {a:.7f}, and {b:.7f} by TRL"


# ---- the start -------------------------------------------------------------------------------------------------------


def startup_row(folder: Folder, trl: Path, rounds: int) -> dict[str, Any]:
    """``cookbook train recipe=sft`` and ``trl sft`` on the shipped model, eight rows, to the first finished step."""
    data = folder.root / "startup"
    data.mkdir(exist_ok=True)
    repository = HERE.parent.parent
    lines = (repository / "data/arithmetic/chat_train.jsonl").read_text(encoding="utf-8").splitlines()[:STARTUP_ROWS]
    (data / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    seconds: dict[str, list[float]] = {"cookbook": [], "trl": []}
    for number in range(rounds):
        out = folder.root / "results" / f"run-startup-{number}"
        for side, command, marker in (
            ("cookbook", _ours_from_start(repository / "data/tiny", data, out), "step 1/1"),
            ("trl", _theirs_from_start(repository / "data/tiny", data, out, trl), "{'loss'"),
        ):
            log = folder.root / "results" / f"startup-{side}-{number}.log"
            seconds[side].append(cpu_until(command, marker, _environment(command), log))
            print(f"startup-{side}-{number}: {seconds[side][-1]:.2f} CPU s", file=sys.stderr, flush=True)
    times = statistics.median(b / a for a, b in zip(seconds["cookbook"], seconds["trl"], strict=True))
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    row = {"what": "start to first step", "against": "trl sft", "unit": "CPU s", **medians, "times": times}
    return {**row, "reach": STARTUP_REACH, "wrong": ""}


def _ours_from_start(model: Path, data: Path, out: Path) -> list[str]:
    settings = {"data.path": data / "train.jsonl", "recipe.batch_size": STARTUP_ROWS, "recipe.steps": 1, "out": out}
    overrides = [f"{key}={value}" for key, value in {**_plain(model), **settings}.items()]
    return [sys.executable, "-m", "cookbook", "train", "recipe=sft", *overrides]


def _theirs_from_start(model: Path, data: Path, out: Path, trl: Path) -> list[str]:
    options: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": data,
        "output_dir": f"{out}-trl",
        "max_steps": 1,
        "per_device_train_batch_size": STARTUP_ROWS,
        "assistant_only_loss": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return [str(trl), str(trl.parent / "trl"), "sft", *words]


# ---- the table -------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]], source: str, load: float) -> None:
    print(f"Rows: {source}. One thread a process, CPU seconds; load of the machine at the start {load:.1f}.\n")
    heads = ["", "TRL's setting", "unit", "cookbook", "TRL", "times", "reach", "MB", "TRL MB", "share", ""]
    print(_line(heads))
    for row in rows:
        memory = [f"{row['cookbook_mb']:.0f}", f"{row['trl_mb']:.0f}", f"{row['memory']:.2f}"] if "memory" in row else [""] * 3
        numbers = [f"{row['cookbook']:.3g}", f"{row['trl']:.3g}", f"{row['times']:.2f}", f"{row['reach']:g}"]
        print(_line([row["what"], row["against"], row["unit"], *numbers, *memory, _verdict(row)]))


def _line(cells: Sequence[str]) -> str:
    widths = (20, 24, 9, 9, 9, 6, 6, 6, 7, 6, 0)
    return "".join(cell.ljust(w) if i < 3 else f"{cell:>{w}}  " for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))


def _verdict(row: dict[str, Any]) -> str:
    if row["wrong"]:
        return f"NOT THE SAME WORK: {row['wrong']}"
    share = row.get("reach_memory")
    missed = [f"{row['reach']:g}x"] if row["times"] < row["reach"] else []
    missed += [f"{share:g} of the memory"] if share is not None and row["memory"] > share else []
    return f"short of {' and '.join(missed)}" if missed else "reached"


if __name__ == "__main__":
    sys.exit(main())
