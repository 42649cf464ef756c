"""Every loss with every kind of model and option, on 2 and 4 ranks, against one process.

    python tools/rank_matrix.py                                  # all 504 cases
    python tools/rank_matrix.py --ranks 4 --shard node --dtype float32

The table has, for each cell, the largest relative difference of a metric or of the weights after 4 steps of AdamW, and the
shares of the tokens that the ranks computed. The command fails if a case differs by more than 1e-12 in float64 or 1e-5 in
float32, or if a rank computes less than 0.6 or more than 1.4 times its equal share (30% to 70% on two ranks).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import ranktools
from rankcases import LORA, LOSSES, MOE, UNTIED, case, differs, save_models

OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": UNTIED,
    "LoRA": LORA,
    "checkpointing": {"options": {"activation_checkpointing": True}},
    "retain_gb=0": {"options": {"retain_bytes": 0}},
    "padded": {"options": {"packing": "padded"}},
    "mixture": MOE,
}
SHARDS = ("none", "node", "all")
DTYPES = ("float64", "float32")
GROUPS = list(itertools.product((2, 4), SHARDS))


def cases(shard: str, dtype: str) -> list[dict[str, Any]]:
    """Return every loss with every option."""
    found = []
    for loss, (name, fields) in itertools.product(LOSSES, OPTIONS.items()):
        options = {**fields.get("options", {}), "dtype": dtype}
        found.append({**case(shard, loss, **{**fields, "options": options}), "name": f"{loss} {name}"})
    return found


def results(count: int, chosen: list[dict[str, Any]], models: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cases on ``count`` ranks, half of them on each of two nodes."""
    folder.mkdir(parents=True)
    given = [{**one, "model": models[one["model"]]} for one in chosen]
    return ranktools.results_of(count, folder, given, LOCAL_WORLD_SIZE=str(count // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--shard", nargs="*", choices=SHARDS, default=SHARDS)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    arguments = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = save_models(folder / "models")
        for dtype, count, shard in itertools.product(arguments.dtype, arguments.ranks, arguments.shard):
            start = time.monotonic()
            chosen = cases(shard, dtype)
            found = results(count, chosen, models, folder / f"{dtype}-{count}-{shard}")
            where = f"{dtype}, {count} ranks, {shard}"
            wrong += [f"{where}: {one['name']}" for one in chosen if differs(one, found[one["name"]], count)]
            shares = [share for one in found.values() for share in one["shares"]]
            print(f"\n{count} ranks, shard={shard}, {dtype}; shares {min(shares):.0%} to {max(shares):.0%}")
            print(f"{'':8}" + "".join(f"{option:>15}" for option in OPTIONS))
            for loss in LOSSES:
                worst = [found[f"{loss} {option}"] for option in OPTIONS]
                print(f"{loss:8}" + "".join(f"{max(one['metrics'], one['weights']):>15.1e}" for one in worst), flush=True)
            print(f"{time.monotonic() - start:.0f} s")
    print(f"\n{len(wrong)} cases differ", *wrong, sep="\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
