"""Break the code on purpose, one line at a time, and see that a test notices: ``python tests/mutants.py [WORD ...]``.

Each mutant is a text of a file, its replacement, and the tests that have to fail then. With words, only the mutants whose file
or text contains one of them run. The exit status is 1 if any survives. Run it in a clean checkout: it edits and restores files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POWER, WIRING = "tests/test_power_failure.py", "tests/test_wiring.py"
ENGINE_SEED = "self.options.seed * 1_000_003 + self.step * 10_007 + self.seeds"

# (file below cookbook/, text that occurs once, replacement, tests)
MUTANTS = (
    # What is forced to the disk, and when it is acknowledged.
    ("atomic.py", "        sync(aside)\n", "", POWER),
    ("atomic.py", "        aside.replace(path)\n        sync(path.parent)\n", "        aside.replace(path)\n", POWER),
    (
        "atomic.py",
        "        path.mkdir(exist_ok=True)\n        sync(path.parent)\n",
        "        path.mkdir(exist_ok=True)\n",
        POWER,
    ),
    ("checkpoints/manifest.py", '[*folder.rglob("*"), folder]', "[folder]", POWER),
    ("checkpoints/manifest.py", '[*folder.rglob("*"), folder]', '[*folder.rglob("*")]', POWER),
    ("checkpoints/store.py", "    atomic.sync(folder.parent)\n", "", POWER),
    ("checkpoints/sharded.py", "            atomic.sync(path)", "            pass", POWER),
    ("server/log.py", "            atomic.sync_descriptor(self._file.fileno())", "            pass", POWER),
    ("server/log.py", "lambda: atomic.sync_descriptor(file.fileno())", "lambda: None", POWER),
    ("server/log.py", "                atomic.sync(self.folder)", "                pass", POWER),
    ("server/log.py", "self._safe = max(self._safe, appended)", "self._safe = self._appended", POWER),
    ("server/durability.py", "                    atomic.sync(path)", "                    pass", POWER),
    ("server/durability.py", "                atomic.sync(place.parent)", "                pass", POWER),
    ("server/routes/common.py", "    await answer.log.synced()\n", "", POWER),
    ("server/routes/session.py", "    await session.log.synced()\n", "", POWER),
    ("server/sampling.py", "            await owner.log.synced()\n", "", POWER),
    ("server/states.py", "            await log.synced()\n", "", POWER),
    # Learning rates, seeds and versions of the right step.
    ("run.py", "self.schedule.factor(step.index + 1, step.total)", "self.schedule.factor(step.index, step.total)", WIRING),
    ("run.py", "self.seed * 1_000_003 + step.index", "self.seed * 1_000_003", WIRING),
    ("rollout.py", "seed * 100_003 + place", "seed * 100_003", WIRING),
    ("engine/engine.py", ENGINE_SEED, ENGINE_SEED.replace(" + self.step * 10_007", ""), WIRING),
    ("engine/engine.py", ENGINE_SEED, ENGINE_SEED.replace(" + self.seeds", ""), WIRING),
    ("run.py", "float(step.index - sampler.step)", "float(step.index + 1 - sampler.step)", WIRING),
    ("rollout.py", 'sample.stop_reason == "length"', 'sample.stop_reason != "length"', WIRING),
    # What must not be deleted.
    ("backends/remote/books.py", "self._known - pointed - held", "self._known - pointed", WIRING),
    ("server/states.py", "if request <= number and sampler_id", "if request < 0 and sampler_id", WIRING),
    ("server/states.py", "return {sampler_id: request for sampler_id, (request, _) in found.items()}", "return {}", WIRING),
)


def survives(name: str, old: str, new: str, tests: str) -> bool:
    """Whether ``tests`` pass with ``old`` replaced by ``new``."""
    path = ROOT / "cookbook" / name
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{path}: {old!r} occurs {text.count(old)} times, expected once; correct the mutant in {__file__}")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests.split()]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    finally:
        path.write_text(text, encoding="utf-8")


def main(words: list[str]) -> int:
    chosen = [one for one in MUTANTS if not words or any(word in one[0] or word in one[1] for word in words)]
    found = []
    for mutant in chosen:
        found.append(survives(*mutant))
        print(
            "SURVIVED" if found[-1] else "killed  ", f"{mutant[0]}: {mutant[1].strip()!r} -> {mutant[2].strip()!r}", flush=True
        )
    print(f"{sum(found)} of {len(found)} mutants survived")
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
