"""Break the code on purpose, one line at a time, and see that a test notices: ``python tests/mutants.py [WORD ...]``.

Each mutant is a text of a file, its replacement, and the tests that have to fail then. With words, only the mutants whose file
or text contains one of them run. The exit status is 1 if any survives. Run it in a clean checkout: it edits and restores files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POWER, WIRING, GOLDEN = "tests/test_power_failure.py", "tests/test_wiring.py", "tests/test_losses_golden.py"
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
    # Metrics, rows, rewards, weights and signs.
    (
        "losses/pairs.py",
        '"rewards/accuracy": float((chosen > rejected)',
        '"rewards/accuracy": float((chosen >= rejected)',
        WIRING,
    ),
    ("run.py", "self._earlier_tokens += self._tokens", "self._earlier_tokens = self._tokens", WIRING),
    ("run.py", "self._evaluator.answers(self._newest(step), data)", "self._evaluator.answers(self.sync(step), data)", WIRING),
    (
        "run.py",
        "self._evaluator.rewards(self._newest(step), prompts)",
        "self._evaluator.rewards(self.sync(step), prompts)",
        WIRING,
    ),
    ("run.py", "row.update(self._evaluate(evaluate, number))", "row.update(self._evaluate(evaluate, step.index))", WIRING),
    ("run.py", "number % self.eval.every == 0", "number % self.eval.every == 1", "tests/test_runs.py"),
    ("evaluation.py", "(self.seed, EVALUATION, place)", "(self.seed, EVALUATION, 0)", WIRING),
    (
        "evaluation.py",
        "reward >= CORRECT for reward in greedy.values()",
        "reward > CORRECT for reward in greedy.values()",
        WIRING,
    ),
    ("rollout.py", "    weights[start:] = 1.0\n", "    weights[:] = 1.0\n", WIRING),
    ("rollout.py", "weights * np.float64(advantage)", "-weights * np.float64(advantage)", WIRING),
    ("rollout.py", "std(axis=1, ddof=1)", "std(axis=1, ddof=0)", WIRING),
    ("rollout.py", "float(lengths.max())", "float(lengths.min())", WIRING),
    (
        "rollout.py",
        "rewards.extend(reward() for reward in pending[place])",
        "rewards.extend(reward() for reward in pending[place][::-1])",
        WIRING,
    ),
    ("run.py", "self._write_sample(step.index + 1, row)", "self._write_sample(step.index, row)", WIRING),
    (
        "advantages.py",
        "array.std(axis=-1, ddof=1, keepdims=True)",
        "array.std(axis=-1, ddof=0, keepdims=True)",
        "tests/test_advantages.py",
    ),
    ("advantages.py", "array.mean(axis=-1, keepdims=True)", "array.mean()", "tests/test_advantages.py"),
    ("run.py", "self.trainer.optim_step(adam, self.loss.normalization)", "self.trainer.optim_step(adam, None)", WIRING),
    ("run.py", 'metrics["loss"] / metrics.get("optim/divisor", 1.0)', 'metrics["loss"]', WIRING),
    ("engine/engine.py", "norm = self.gradients.norm() / divisor", "norm = self.gradients.norm()", "tests/test_engine_step.py"),
    (
        "engine/engine.py",
        "self.optimizer.step(adam, clip / divisor)",
        "self.optimizer.step(adam, clip)",
        "tests/test_engine_step.py",
    ),
    ("engine/engine.py", "float(clip < 1.0)", "float(clip > 1.0)", "tests/test_engine_step.py"),
    ("data/batches.py", "[self._seed, epoch]", "[0, epoch]", WIRING),
    ("data/source.py", "if index not in held]", "]", "tests/test_data_source.py"),
    (
        "run.py",
        "        self.metrics_file.write(step, row)\n        self.tracking.log(step, row)\n",
        "        self.tracking.log(step, row)\n        self.metrics_file.write(step, row)\n",
        WIRING,
    ),
    (
        "run.py",
        "        self._done = number\n        self._earlier_tokens += self._tokens\n",
        "        self._earlier_tokens += self._tokens\n        self._done = number - 1\n",
        WIRING,
    ),
    (
        "run.py",
        "        self._write(number, row)\n        self.health",
        "        self.hook_calls.call('on_step', self, number, row)\n        self._write(number, row)\n        self.health",
        WIRING,
    ),
    (
        "rollout.py",
        '"rollout/failed": float(len(self.unanswered.failed))',
        '"rollout/failed": float(self.unanswered.num_retries)',
        "tests/test_resilience.py",
    ),
    ("evaluation.py", "math.comb(num_samples - num_correct, k) /", "math.comb(num_correct, k) /", "tests/test_evaluation.py"),
    ("rollout.py", "    if temperature != 1.0:\n", "    if temperature < 0:\n", "tests/test_temperature_entropy.py"),
    ("losses/grpo.py", "1 - self.clip_low, 1 + self.clip_high", "1 - self.clip_high, 1 + self.clip_low", GOLDEN),
    (
        "losses/grpo.py",
        'kept(batch.read("reference_logprobs"), tokens.weights) - tokens.logprobs',
        'tokens.logprobs - kept(batch.read("reference_logprobs"), tokens.weights)',
        GOLDEN,
    ),
    ("losses/grpo.py", "terms + self.kl_beta * penalty", "terms - self.kl_beta * penalty", GOLDEN),
    ("losses/grpo.py", "terms - self.entropy_coef *", "terms + self.entropy_coef *", "tests/test_temperature_entropy.py"),
    (
        "losses/grpo.py",
        "old - tokens.sampling_logprobs, tokens.weights",
        "tokens.sampling_logprobs - old, tokens.weights",
        GOLDEN,
    ),
    ("losses/policy.py", "(below & (advantages < 0))", "(below & (advantages > 0))", GOLDEN),
    ("losses/policy.py", '"kl/sampler_trainer_k1": -weighted_mean', '"kl/sampler_trainer_k1": weighted_mean', GOLDEN),
    ("losses/dpo.py", "self.pair_losses(chosen - rejected)", "self.pair_losses(rejected - chosen)", GOLDEN),
    (
        "losses/grpo.py",
        '"kl/old_policy"] = weighted_mean(k3(tokens.logprobs.detach() - old)',
        '"kl/old_policy"] = weighted_mean(k3(old - tokens.logprobs.detach())',
        GOLDEN,
    ),
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
