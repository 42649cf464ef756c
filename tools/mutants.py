"""Break the code on purpose, one line at a time, and see that a test notices: ``python tools/mutants.py [WORD ...]``.

Each mutant is a text of a file, its replacement, and the tests that have to fail then. With words, only the mutants
whose file, texts or tests contain one of them run. The exit status is 1 if any survives. Run it in a clean checkout: it edits
and restores files.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POWER, WIRING, GOLDEN = (
    "tests/unit/checkpoints/test_power_failure.py",
    "tests/system/test_wiring.py",
    "tests/unit/losses/test_losses_golden.py",
)
SYNC, TENANTS, CACHE = (
    "tests/unit/deployments/test_weight_sync.py",
    "tests/unit/server/test_server_tenants.py",
    "tests/unit/data/test_data_cache.py",
)
JUDGE, ENVIRONMENTS = "tests/unit/sampling/test_judge.py", "tests/unit/sampling/test_environments.py"
ENGINE_SEED = "self.options.seed * 1_000_003 + self.step * 10_007 + self.seeds"

# (file below cookbook/, text that occurs once, replacement, tests)
MUTANTS = (
    # What is forced to the disk, and when it is acknowledged.
    # :func:`unsynced` removes each sync; here are those that come too late.
    (
        "utils/files.py",
        "        sync(temporary)\n        temporary.replace(path)\n",
        "        temporary.replace(path)\n        sync(path)\n",
        POWER,
    ),
    ("checkpoints/manifest.py", '[*folder.rglob("*"), folder]', "[folder]", POWER),
    ("checkpoints/manifest.py", '[*folder.rglob("*"), folder]', '[*folder.rglob("*")]', POWER),
    (
        "checkpoints/store.py",
        "    files.sync(folder.parent)\n    shutil.rmtree(old, ignore_errors=True)\n",
        "    shutil.rmtree(old, ignore_errors=True)\n    files.sync(folder.parent)\n",
        POWER,
    ),
    (
        "server/journal/log.py",
        "self._synced_bytes = max(self._synced_bytes, appended)",
        "self._synced_bytes = self._appended_bytes",
        POWER,
    ),
    (
        "server/journal/durability.py",
        '                for path in [*temporary.rglob("*"), temporary]:\n                    files.sync(path)\n'
        '            temporary.rename(folder)\n            if self.level == "synced":\n',
        '                temporary.rename(folder)\n                for path in [*folder.rglob("*"), folder]:\n'
        "                    files.sync(path)\n            else:\n                temporary.rename(folder)\n"
        '            if self.level == "synced":\n',
        POWER,
    ),
    # Learning rates, seeds and versions of the right step.
    ("run/run.py", "self.schedule.factor(step.index + 1, step.total)", "self.schedule.factor(step.index, step.total)", WIRING),
    ("sampling/rollouts.py", "evaluator.seed * 1_000_003 + index", "evaluator.seed * 1_000_003", WIRING),
    ("sampling/rollouts.py", "seed=seed + index", "seed=seed", WIRING),
    ("engine/engine.py", ENGINE_SEED, ENGINE_SEED.replace(" + self.step * 10_007", ""), WIRING),
    ("engine/engine.py", ENGINE_SEED, ENGINE_SEED.replace(" + self.seeds", ""), WIRING),
    ("run/run.py", "float(step.index - batch.version)", "float(step.index + 1 - batch.version)", WIRING),
    ("sampling/trajectory.py", 'turn.stop_reason == "length"', 'turn.stop_reason != "length"', WIRING),
    # What must not be deleted.
    ("backends/remote/pointers.py", "self._known - pointed - in_use", "self._known - pointed", WIRING),
    ("server/state/snapshots.py", "if request <= number and sampler_id", "if request < 0 and sampler_id", WIRING),
    (
        "server/state/snapshots.py",
        "return {sampler_id: request for sampler_id, (request, _) in published.items()}",
        "return {}",
        WIRING,
    ),
    # Metrics, rows, rewards, weights and signs.
    (
        "losses/pairs.py",
        "margin.new_tensor(0.5)",
        "margin.new_tensor(0.0)",
        WIRING,
    ),
    ("run/run.py", "self._earlier_tokens += self._tokens", "self._earlier_tokens = self._tokens", WIRING),
    (
        "run/run.py",
        "evaluator.answers(self._newest(step), data)",
        "evaluator.answers(self.sync(step), data)",
        WIRING,
    ),
    (
        "run/run.py",
        "newest = self._newest(step)",
        "newest = self.sync(step)",
        WIRING,
    ),
    ("run/run.py", "row.update(self._evaluate(evaluate, number))", "row.update(self._evaluate(evaluate, step.index))", WIRING),
    ("run/run.py", "number % self.eval.every == 0", "number % self.eval.every == 1", "tests/system/test_runs.py"),
    ("sampling/evaluation.py", "(self.seed, EVALUATION_SEED, index)", "(self.seed, EVALUATION_SEED, 0)", WIRING),
    (
        "sampling/evaluation.py",
        "score.value >= CORRECT_REWARD for score in greedy.values()",
        "score.value > CORRECT_REWARD for score in greedy.values()",
        WIRING,
    ),
    ("sampling/trajectory.py", "weights[start:end] = 1.0\n", "weights[:] = 1.0\n", WIRING),
    ("sampling/trajectory.py", '"advantages": credit[1:]', '"advantages": -credit[1:]', WIRING),
    ("sampling/rollouts.py", "np.std(group.rewards, ddof=1)", "np.std(group.rewards, ddof=0)", WIRING),
    ("sampling/rollouts.py", "float(lengths.max())", "float(lengths.min())", WIRING),
    (
        "sampling/rollouts.py",
        "scores = pending[index]()\n",
        "scores = pending[index]()[::-1]\n",
        WIRING,
    ),
    ("run/run.py", "self.recorder.write_sample(step.index + 1, row)", "self.recorder.write_sample(step.index, row)", WIRING),
    (
        "sampling/advantages.py",
        "scaled.std(axis=-1, ddof=1, keepdims=True)",
        "scaled.std(axis=-1, ddof=0, keepdims=True)",
        "tests/unit/sampling/test_advantages.py",
    ),
    (
        "sampling/advantages.py",
        "centered = scaled - scaled.mean(axis=-1, keepdims=True)",
        "centered = scaled - scaled.mean()",
        "tests/unit/sampling/test_advantages.py",
    ),
    ("run/run.py", "self.trainer.optim_step(adam, self.loss.normalization)", "self.trainer.optim_step(adam, None)", WIRING),
    ("run/run.py", 'step.metrics["loss"] / step.metrics.get("optim/divisor", 1.0)', 'step.metrics["loss"]', WIRING),
    (
        "engine/engine.py",
        "norm = self.gradients.norm() / divisor",
        "norm = self.gradients.norm()",
        "tests/unit/engine/test_engine_step.py",
    ),
    (
        "engine/engine.py",
        "self.optimizer.step(adam, clip / divisor)",
        "self.optimizer.step(adam, clip)",
        "tests/unit/engine/test_engine_step.py",
    ),
    ("engine/engine.py", "float(clip < 1.0)", "float(clip > 1.0)", "tests/unit/engine/test_engine_step.py"),
    ("data/datum_table.py", "[self._seed, epoch]", "[0, epoch]", WIRING),
    ("data/source.py", ' if (index in held_out) == (which == "eval")]', "]", "tests/unit/data/test_data_source.py"),
    (
        "run/recorder.py",
        '        self.metrics.write(step, row)\n        self.trackers.call("log", step, row)\n',
        '        self.trackers.call("log", step, row)\n        self.metrics.write(step, row)\n',
        WIRING,
    ),
    (
        "run/run.py",
        "        self.done = number\n",
        "        self.done = number - 1\n",
        WIRING,
    ),
    (
        "run/run.py",
        "        self.recorder.write(number, row)\n",
        "        self.hook_calls.call('on_step', self, number, row)\n        self.recorder.write(number, row)\n",
        WIRING,
    ),
    (
        "sampling/rollouts.py",
        '"rollout/failed": float(len(self.requests.failed))',
        '"rollout/failed": float(self.requests.num_retries)',
        "tests/unit/sampling/test_resilience.py",
    ),
    (
        "sampling/evaluation.py",
        "math.comb(num_samples - num_correct, k) /",
        "math.comb(num_correct, k) /",
        "tests/unit/sampling/test_evaluation.py",
    ),
    (
        "sampling/trajectory.py",
        "    if temperature != 1.0:\n",
        "    if temperature < 0:\n",
        "tests/unit/engine/test_temperature_entropy.py",
    ),
    ("losses/grpo.py", "1 - self.clip_low, 1 + self.clip_high", "1 - self.clip_high, 1 + self.clip_low", GOLDEN),
    (
        "losses/grpo.py",
        'kept(batch.read("reference_logprobs"), tokens.weights) - tokens.logprobs',
        'tokens.logprobs - kept(batch.read("reference_logprobs"), tokens.weights)',
        GOLDEN,
    ),
    ("losses/grpo.py", "terms + self.kl_beta * penalty", "terms - self.kl_beta * penalty", GOLDEN),
    (
        "losses/grpo.py",
        "terms - self.entropy_coef *",
        "terms + self.entropy_coef *",
        "tests/unit/engine/test_temperature_entropy.py",
    ),
    (
        "losses/grpo.py",
        "old - tokens.sampling_logprobs, tokens.weights",
        "tokens.sampling_logprobs - old, tokens.weights",
        GOLDEN,
    ),
    ("losses/policy.py", "(below & (advantages < 0))", "(below & (advantages > 0))", GOLDEN),
    (
        "losses/policy.py",
        '"kl/sampler_trainer_k1": -weighted_mean',
        '"kl/sampler_trainer_k1": weighted_mean',
        "tests/unit/losses/test_losses.py",
    ),
    ("losses/dpo.py", "self.pair_losses(chosen - rejected)", "self.pair_losses(rejected - chosen)", GOLDEN),
    (
        "losses/grpo.py",
        '"kl/old_policy"] = weighted_mean(k3(tokens.logprobs.detach() - old)',
        '"kl/old_policy"] = weighted_mean(k3(old - tokens.logprobs.detach())',
        GOLDEN,
    ),
    # Weights of replicas: the files of a chain in use, and what is served while other weights are loaded.
    ("deployments/weight_sync.py", "used.intersection(chain)", "False", SYNC),
    (
        "deployments/vllm/weight_store.py",
        "        self._serving = None\n        self._adapters",
        "        self._adapters",
        SYNC,
    ),
    # Quotas count everything, and let a request alone through.
    ("server/handlers/quotas.py", "not pending or pending", "pending", TENANTS),
    ("server/handlers/quotas.py", '    pending += service.endpoint.callers[owner or ""].pending_tokens\n', "", TENANTS),
    ("server/handlers/quotas.py", "_num_bytes([*runs, *sessions])", "_num_bytes(runs)", TENANTS),
    ("server/handlers/quotas.py", "service.runs.keys() | service.loading_runs", "service.runs.keys()", TENANTS),
    # The cache of data: what an entry belongs to, and how long it stays.
    ("data/cache.py", 'parent.glob("*.py")', 'parent.glob("cache*.py")', CACHE),
    ("data/cached_rows.py", " or _stats(files) != stats", "", CACHE),
    ("data/cache.py", "            os.utime(folder / FACTS)\n", "            pass\n", CACHE),
    ("data/cache.py", "UNUSED_S = 30 * 24 * 3600.0", "UNUSED_S = 30 * 24 * 3.6", CACHE),
    # The judge.
    ("sampling/rewards/judge.py", "json.dumps(body, sort_keys=True)", 'json.dumps(body["messages"])', JUDGE),
    ("sampling/rewards/judge.py", "float(pause) if pause.isdecimal() else 0.0", "0.0", JUDGE),
    ("sampling/rewards/judge.py", "before = trajectory[:place]", "before = trajectory[place - 1 : place]", JUDGE),
    # Precision.
    ("engine/precision/attention.py", "first + size > 1", "first + size > 2", "tests/unit/engine/test_precision.py"),
    (
        "engine/precision/choice.py",
        'self.autocast is not None and dtype != "float32"',
        'self.autocast is not None and dtype == "bfloat16"',
        "tests/unit/engine/test_precision.py",
    ),
    # Episodes.
    ("sampling/environments/runner.py", 'row.where.rpartition("/")[2].encode()', "row.where.encode()", ENVIRONMENTS),
    (
        "sampling/environments/runner.py",
        "not trajectory.has_failed and trajectory.turns",
        "not trajectory.has_failed",
        ENVIRONMENTS,
    ),
    ("sampling/episodes.py", "config.max_turns + reply.opponent_moves", "config.max_turns", ENVIRONMENTS),
    ("sampling/rollouts.py", "skips_bad_rows or len(self.groups) == 1:", "skips_bad_rows:", "tests/unit/data/test_bad_rows.py"),
    (
        "sampling/environments/capture.py",
        "len(further) < len(match[1])",
        "len(further) > len(match[1])",
        "tests/unit/sampling/test_agents.py",
    ),
)


# Where data are forced to the disk, and what forces them.
STORES = ("utils/files.py", "server", "checkpoints")
SYNCS = ("sync", "sync_descriptor", "fsync", "synced")


def unsynced() -> Iterator[tuple[str, str, str, str]]:
    """Yield mutants in which one sync is missing, and those in which the acknowledgement does not wait for one."""
    for path in sorted(path for store in STORES for path in _modules(ROOT / "cookbook" / store)):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            awaited = node.value if isinstance(node, ast.Await) else node
            if not isinstance(awaited, ast.Call) or _called(awaited) not in SYNCS:
                continue
            # An awaited call is found twice: here by its await.
            if (_called(awaited) == "synced") != isinstance(node, ast.Await):
                continue
            code = ast.get_source_segment(text, node) or ""
            # Lines above make the text occur once.
            first = node.lineno - 1
            while text.count(old := "".join(lines[first : node.lineno])) != 1:
                first -= 1
            news = ["None"]
            if isinstance(node, ast.Await):
                news.append(f"__import__('asyncio').ensure_future({code.removeprefix('await ')})")
            for new in news:
                before, _, after = old.rpartition(code)
                yield str(path.relative_to(ROOT / "cookbook")), old, before + new + after, POWER


def _modules(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def survives(name: str, old: str, new: str, tests: str) -> bool:
    """Whether ``tests`` pass with ``old`` replaced by ``new``."""
    path = ROOT / "cookbook" / name
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{path}: {old!r} occurs {text.count(old)} times, expected once; correct the mutant in {__file__}")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        # The fast tests first: they notice nearly every mutant.
        return all(_pass(tests.split(), marked) for marked in ("not slow and not nightly", "slow or nightly"))
    finally:
        path.write_text(text, encoding="utf-8")


def _pass(tests: list[str], marked: str) -> bool:
    """Whether the tests with a mark pass, or no test has the mark."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", marked, *tests]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode in (
        0,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )


def main(words: list[str]) -> int:
    mutants = (*unsynced(), *MUTANTS)
    chosen = [one for one in mutants if not words or any(word in part for word in words for part in one)]
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
