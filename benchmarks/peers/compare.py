"""Cookbook beside TRL: CPU seconds of a step and peak memory, each in processes of its own, in turn.

    python benchmarks/peers/compare.py FOLDER --trl .venv-trl/bin/python [--rounds 3] [--only NAME ...] [--json FILE]

`prepare.py` makes FOLDER. The first round runs TRL in every setting that might be its best, at every precision. Later rounds
run the fastest setting of each precision, TRL's defaults, and cookbook at each precision, in turn. Both sides do the same work,
which is checked: the tokens of every step, and the loss of the first. Seconds are those from the first finished step to the
last; memory is the peak beyond what imports take, so weights, gradients and moments are in it. Exit 1 when the work differs; a
target that is missed is only marked.
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

import torch
from startup import cpu_until
from workloads import COMPLETION_TOKENS, DEFAULTS, GROUP, PRECISIONS, WORKLOADS, Folder, Setting, Workload

HERE = Path(__file__).parent
SAME_LOSS = 1e-4  # relative: float32 rounding is 1e-7, a token more or less in the mean 1e-3
SAME_ROUNDED_LOSS = 1e-2  # relative: with products or activations in bfloat16
SAME_SAMPLES = 0.1  # relative: where untrained models happen to end their samples
STARTUP_REACH = 2.0
STARTUP_ROWS = 8  # TRL's default; all that either side reads
OURS = {"float32": {}, "medium": {"backend.matmul_precision": "medium"}, "autocast": {"backend.autocast": "bfloat16"}}
FLAGS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")  # instructions that products use, as torch names them
Results = dict[str, list[dict[str, Any]]]  # by candidate, one a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trl", type=Path, required=True, help="the Python of TRL's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help=f"of startup, real, {', '.join(work.name for work in WORKLOADS)}")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    folder, trl = Folder(arguments.folder.resolve()), arguments.trl.absolute()
    shutil.rmtree(folder.root / "results", ignore_errors=True)
    (folder.root / "results").mkdir()
    facts = _facts(folder)
    rows = []
    for workload in WORKLOADS:
        names = {workload.name, *(["real"] if workload.model.source else [])}
        if workload.model.source and not folder.model(workload.model).is_dir():
            print(f"{workload.name}: left out, because {workload.model.source} is missing; run make real-model", flush=True)
        elif not arguments.only or names & set(arguments.only):
            rows.append(row_of(workload, measure(workload, folder, trl, arguments.rounds)))
            show(rows[-1])
    if not arguments.only or "startup" in arguments.only:
        rows.append(startup_row(folder, trl, arguments.rounds))
    print("\n" + facts)
    table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else 0


def _facts(folder: Folder) -> str:
    """Return the facts that the figures depend on: commit, CPU and its flags, torch, rows, load."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), "unknown CPU")
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    changed = subprocess.run([*asked[:3], "status", "--porcelain", "--untracked-files=no"], capture_output=True, check=False)
    commit += " with changes" if changed.stdout else ""
    flags = " ".join(name for name in FLAGS if torch.cpu.get_capabilities().get(name)) or "no vector instructions"
    source = (folder.root / "source.txt").read_text(encoding="utf-8").strip()
    return (
        f"Commit {commit}; {name} ({flags}), {os.cpu_count()} cores, load at the start {os.getloadavg()[0]:.1f}; torch "
        f"{torch.__version__}; one thread a process, CPU seconds; rows: {source}."
    )


# ---- steps -----------------------------------------------------------------------------------------------------------


def measure(workload: Workload, folder: Folder, trl: Path, rounds: int) -> Results:
    """Measure every candidate once per round, in turn, so that other load on the machine affects all sides."""
    settings = {setting.name: setting for setting in workload.settings}
    results: Results = {name: [] for name in (*(f"cookbook, {precision}" for precision in workload.precisions), *settings)}
    chosen = list(results)
    for number in range(rounds):
        for candidate in chosen:
            name = f"{workload.name}-{candidate.replace(', ', '-').replace(' ', '-')}-{number}"
            if setting := settings.get(candidate):
                command = _theirs(workload, setting, folder, trl, name)
            else:
                command = _ours(workload, candidate.partition(", ")[2], folder, name)
            _run(command, folder, name)
            results[candidate].append(folder.read(name))
            print(f"{name}: {results[candidate][-1]['seconds_a_step']:.3f} CPU s a step", file=sys.stderr, flush=True)
        chosen = [*list(results)[: len(workload.precisions)], *_fastest(workload, results)]
    return results


def _fastest(workload: Workload, results: Results) -> list[str]:
    """TRL's defaults, and its fastest setting of each precision in the first round."""
    found = [DEFAULTS]
    for precision in workload.precisions:
        names = [setting.name for setting in workload.settings if setting.precision == precision and setting.name != DEFAULTS]
        found.append(min(names, key=lambda name: float(results[name][0]["seconds_a_step"])))
    return found


def _ours(workload: Workload, precision: str, folder: Folder, name: str) -> list[str]:
    """The command a user would type, with the meter as a hook."""
    out = folder.root / "results" / f"run-{name}"
    settings: dict[str, Any] = {
        "recipe": workload.method,
        "recipe.steps": workload.steps,
        "data.path": folder.rows(workload),
        "optim.lr": workload.lr,
        "out": out,
        **_plain(folder.model(workload.model)),
        **OURS[precision],
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


def row_of(workload: Workload, results: Results) -> dict[str, Any]:
    """Figures of every candidate, and ratios of the two sides at their best precision, at float32, and at their defaults."""
    figures = {
        name: {
            **_rates(workload, found),
            "mb": _median(found, "peak_mb"),
            "training": training(found[0]["steps"]),
            "wrong": _wrong(workload, name, results),
        }
        for name, found in results.items()
    }
    ours = list(figures)[: len(workload.precisions)]
    theirs = _fastest(workload, results)
    exact, best = theirs[1], max(theirs, key=lambda name: figures[name]["median"])
    pairs = {"best": (max(ours, key=lambda name: figures[name]["median"]), best), "float32": (ours[0], exact)}
    pairs["defaults"] = (ours[0], DEFAULTS)
    return {
        "what": workload.name,
        "unit": f"{workload.unit}/s",
        "figures": figures,
        "pairs": {name: [*pair, _times(results, *pair)] for name, pair in pairs.items()},
        "reach": workload.reach,
        "memory": figures[ours[0]]["mb"] / figures[exact]["mb"],
        "reach_memory": workload.memory,
        "wrong": "; ".join(f"{name}: {one['wrong']}" for name, one in figures.items() if one["wrong"]),
    }


def _times(results: Results, ours: str, theirs: str) -> float:
    """Median over the rounds that have both. Two candidates that were each run once are compared as well."""
    rounds = zip(results[ours], results[theirs], strict=False)
    return statistics.median(b["seconds_a_step"] / a["seconds_a_step"] for a, b in rounds)


def _median(found: Sequence[dict[str, Any]], key: str) -> float:
    return float(statistics.median(one[key] for one in found))


def _rates(workload: Workload, found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Per CPU second: median, least and most."""
    inputs = [step["inputs"] for step in found[0]["steps"][1:]]
    per_step = float(sum(inputs)) / len(inputs) if workload.unit == "tokens" else 1.0
    per_step = float(workload.rows) if workload.unit == "pairs" else per_step
    rates = [per_step / one["seconds_a_step"] for one in found]
    return {"median": statistics.median(rates), "least": min(rates), "most": max(rates)}


def training(steps: Sequence[dict[str, float]]) -> str:
    """Whether the measured setting trains: loss or reward of the first and the last step, and the sampler's difference."""
    measured = "reward" if "reward" in steps[0] else "loss"
    text = f"{measured} {steps[0][measured]:.4g} to {steps[-1][measured]:.4g}" if measured in steps[0] else ""
    if "k3" in steps[0]:
        text += f", k3 up to {max(step['k3'] for step in steps):.2g}"
        text += f", {max(step['clipped'] for step in steps):.1%} clipped"
    return text


def _wrong(workload: Workload, name: str, results: Results) -> str:
    """Why a setting of TRL did other work than cookbook at the same precision; empty if it did not."""
    if name.startswith("cookbook"):
        return ""
    precision = next(setting.precision for setting in workload.settings if setting.name == name)
    ours = results[f"cookbook, {precision}"][0]["steps"]
    return difference(workload, ours, results[name][0]["steps"], exact=precision == PRECISIONS[0])


def difference(workload: Workload, ours: list[dict[str, float]], theirs: list[dict[str, float]], *, exact: bool = True) -> str:
    """Why the two did not do the same work; empty when they did."""
    if workload.method == "grpo":  # each samples its own completions
        a, b = (sum(step[key] for step in side) for side, key in ((ours, "sampled"), (theirs, "trained")))
        return "" if abs(a - b) <= SAME_SAMPLES * b else f"{a:.0f} tokens sampled, and {b:.0f} by TRL"
    sequences = workload.rows * (2 if workload.unit == "pairs" else 1)  # a sequence's last token is no model input
    for number, (a_step, b_step) in enumerate(zip(ours, theirs, strict=True), 1):
        for key, added in (("inputs", sequences), ("trained", workload.rows * workload.trl_trains)):
            if a_step[key] + added != b_step[key]:
                return f"step {number}: {a_step[key] + added:.0f} tokens {key}, and {b_step[key]:.0f} by TRL"
    if (
        workload.method == "orpo" or workload.trl_trains
    ):  # ORPO's loss by TRL is also one of the prompt: docs/evidence/parity.md
        return ""
    a, b = ours[0]["loss"], theirs[0]["loss"]
    same = SAME_LOSS if exact else SAME_ROUNDED_LOSS
    return "" if abs(a - b) <= same * abs(b) else f"loss of the first step {a:.7f}, and {b:.7f} by TRL"


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
    return {
        "what": "start to first step",
        "unit": "CPU s",
        "figures": {
            name: {"median": statistics.median(one), "least": min(one), "most": max(one)} for name, one in seconds.items()
        },
        "pairs": {"defaults": ["cookbook", "trl", times]},
        "reach": STARTUP_REACH,
        "wrong": "",
    }


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


def show(row: dict[str, Any]) -> None:
    """Every candidate of a workload."""
    print(f"\n{row['what']}, {row['unit']}: median, least to most, peak memory")
    for name, one in row["figures"].items():
        spread = f"{one['least']:.4g} to {one['most']:.4g}"
        notes = "; ".join(note for note in (one["training"], one["wrong"]) if note)
        print(f"  {name:32}{one['median']:>9.4g}   {spread:20}{one['mb']:>7.0f} MB  {notes}".rstrip(), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> None:
    """The ratios, one line a workload, as a table of Markdown."""
    print("\n| workload | times as fast as TRL, each at its best | both in float32 | defaults of both | memory | goal |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [_cell(row["pairs"].get(name)) for name in ("best", "float32", "defaults")]
        memory = f"{row['memory']:.2f}" if "memory" in row else ""
        print(f"| {' | '.join([row['what'], *cells, memory, _verdict(row)])} |")


def _cell(pair: list[Any] | None) -> str:
    if pair is None:
        return ""
    ours, theirs, times = pair
    return f"{times:.2f} ({ours.removeprefix('cookbook, ')}; {theirs})"


def _verdict(row: dict[str, Any]) -> str:
    if row["wrong"]:
        return f"NOT THE SAME WORK: {row['wrong']}"
    times = row["pairs"].get("best", row["pairs"]["defaults"])[2]
    share = row.get("reach_memory")
    missed = [f"{row['reach']:g}x"] if times < row["reach"] else []
    missed += [f"{share:g} of the memory"] if share is not None and row["memory"] > share else []
    return f"short of {' and '.join(missed)}" if missed else f"{row['reach']:g}x: reached"


if __name__ == "__main__":
    sys.exit(main())
