"""What a recipe receives: everything it needs, and the housekeeping every loop needs, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

from cookbook import data as rows
from cookbook import evaluation, rollout
from cookbook.backends.local import LocalTrainer
from cookbook.checkpoints import CheckpointConfig, store
from cookbook.config import OptimConfig
from cookbook.data import DataConfig, RenderedPrompt, Renderer
from cookbook.errors import ConfigError
from cookbook.evaluation import EvalConfig, Evaluation
from cookbook.futures import Future, done
from cookbook.hooks import Hook
from cookbook.interrupt import Interrupted, InterruptGuard
from cookbook.losses import LOSSES, Loss
from cookbook.protocols import Reference, Reward, Sampler, Tracker, WeightSyncer
from cookbook.rewards import score
from cookbook.rollout import Group, RolloutConfig
from cookbook.schedules import Schedule
from cookbook.trackers.console import Console
from cookbook.trackers.jsonl import JsonLines
from cookbook.types import Datum, ForwardBackwardOutput, OptimStepOutput, SamplingParams

log = logging.getLogger("cookbook")

T = TypeVar("T")
Split = Literal["train", "eval"]


class Batches(Generic[T]):
    """Rows in a seeded order, ``size`` at a time. ``batches[i]`` is a pure function, so resuming needs no iterator state.

    An epoch's last batch may be smaller; no row is dropped. Indices may run past ``len``: epochs go on, each in its own order.
    """

    def __init__(self, rows: Sequence[T], size: int, epochs: int, seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise ConfigError("data: there is no row to train on; look at data.path, data.limit and data.on_empty")
        if size < 1 or epochs < 1:
            raise ConfigError(f"recipe: batch size and epochs must be at least 1, got {size} and {epochs}")
        self._rows = rows
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self.per_epoch = -(-len(rows) // size)
        self._length = epochs * self.per_epoch
        self._order: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> list[T]:
        epoch, place = divmod(index, self.per_epoch)
        if self._order[0] != epoch:
            draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = (epoch, draw.permutation(len(self._rows)) if self._shuffle else range(len(self._rows)))
        return [self._rows[i] for i in self._order[1][place * self._size : (place + 1) * self._size]]


@dataclass
class Step:
    """One turn of the loop. ``index`` optimizer steps have been finished before it, of ``total``."""

    index: int
    total: int
    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, float] = field(default_factory=dict)

    def log(self, *results: Future[ForwardBackwardOutput] | Future[OptimStepOutput] | Mapping[str, float]) -> None:
        """Adds metrics to the step's row; waits for futures, and so raises their errors."""
        for result in results:
            metrics = result if isinstance(result, Mapping) else result.result().metrics
            self.metrics.update({key: value for key, value in metrics.items() if key != "loss:sum"})


@dataclass
class Run:
    """A run under way.

    ``cfg`` is the recipe's own ``Config``; ``trainer`` the model in training; ``loss`` what it is trained with; ``out`` the run
    folder. The rest is what the methods below are made of.
    """

    cfg: Any
    name: str
    seed: int
    out: Path
    trainer: LocalTrainer
    loss: Loss
    reward: Reward | None
    reference: Reference | None
    renderer: Renderer
    data: DataConfig
    rollout: RolloutConfig
    optim: OptimConfig
    schedule: Schedule
    eval: EvalConfig
    checkpoint: CheckpointConfig
    syncer: WeightSyncer
    sync_every: int
    trackers: list[Tracker]
    hooks: list[Hook]
    first_step: int = 0
    console: Console | None = None
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)
    _sampler: Sampler | None = None
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.metrics_file = JsonLines(self.out / "metrics.jsonl")
        self.samples_file = JsonLines(self.out / "samples.jsonl")

    # ---- data ----------------------------------------------------------------------------------------------------

    def conversations(self, which: Split) -> Sequence[Datum]:
        """The ``train`` or ``eval`` rows, rendered, with weight on the tokens to learn."""
        return rows.conversation_datums(self._rows(which), self.renderer, self.data)

    def preferences(self, which: Split) -> Sequence[Sequence[Datum]]:
        """The ``train`` or ``eval`` rows as ``[chosen, rejected]``, with weight on the answers' tokens."""
        flat = rows.preference_datums(self._rows(which), self.renderer, self.data)
        return [flat[i : i + 2] for i in range(0, len(flat), 2)]

    def prompts(self, which: Split) -> list[RenderedPrompt]:
        """The ``train`` or ``eval`` rows as prompts, with room for a completion."""
        room = self.rollout.max_tokens if which == "train" else self.eval.max_tokens
        return rows.prompts(self._rows(which), self.renderer, self.data, room)

    def _rows(self, which: Split) -> Any:
        return rows.load_rows(self.data, which, self.seed, self.eval.limit)

    def batches(self, rows: Sequence[T], size: int, epochs: int = 1) -> Batches[T]:
        """``rows`` in the run's own order, ``size`` at a time."""
        return Batches(rows, size, epochs, self.seed, self.data.shuffle)

    # ---- training ------------------------------------------------------------------------------------------------

    def forward_backward(self, data: Sequence[Datum]) -> Future[ForwardBackwardOutput]:
        """The gradient of the run's loss on one whole optimizer step's data. No data, no gradient: the loss is an empty sum."""
        if not data:
            return done(ForwardBackwardOutput([], {"loss": 0.0, "tokens/trained": 0.0}))
        prepared = self.loss.prepare(self.with_reference(data))
        self._tokens += sum(datum.model_input.length for datum in prepared)
        if LOSSES.get(self.loss.name) == f"{type(self.loss).__module__}:{type(self.loss).__qualname__}":
            return self.trainer.forward_backward(prepared, self.loss.name, self.loss.options())
        return self.trainer.forward_backward_custom(prepared, self.loss)

    def optim_step(self, step: Step) -> Future[OptimStepOutput]:
        """The update, with this step's learning rate and the division that the loss asks for."""
        adam = self.optim.adam(self.schedule.factor(step.index + 1, step.total))
        return self.trainer.optim_step(adam, self.loss.normalization)

    def with_reference(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """``data`` with ``reference_logprobs``, when the loss reads them and they are not there yet."""
        if not data or self.reference is None or "reference_logprobs" in data[0].loss_fn_inputs:
            return data
        logprobs = self.reference.logprobs(data).result()
        return [datum.with_inputs(reference_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]

    # ---- sampling ------------------------------------------------------------------------------------------------

    def sync(self, step: int) -> Sampler:
        """A sampler of the trainer's weights after ``step`` optimizer steps, or of the last sync when none is due."""
        if self._sampler is None or step % self.sync_every == 0:
            self._sampler = self._fresh(step)
        return self._sampler

    def _fresh(self, step: int) -> Sampler:
        sampler = self.syncer.sync(step)
        for hook in self.hooks:
            hook.on_weight_sync(self, sampler)
        return sampler

    def sample_groups(self, sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, step: Step) -> list[Group]:
        """``group_size`` completions of every prompt, with their rewards."""
        if self.reward is None:
            raise ConfigError("reward: this recipe learns from rewards; choose one, for example reward=number")
        seed = self.seed * 1_000_003 + step.index
        groups = rollout.sample_groups(sampler, prompts, group_size, self.rollout, self.renderer, seed)
        texts = [text for group in groups for text in group.texts]
        rewards = score(self.reward, texts, [group.prompt.row for group in groups for _ in group.texts])
        for place, group in enumerate(groups):
            group.rewards.extend(rewards[place * group_size : (place + 1) * group_size])
        for row in rollout.log_rows(groups, self.rollout.log_samples):
            self.samples_file.write(step.index + 1, row)
        step.log(rollout.metrics(groups))
        return groups

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate_loss(self, data: Sequence[Datum]) -> Evaluation:
        """The run's loss and its metrics on held-out ``data``, each named ``eval/...``."""
        if not data:
            return Evaluation({})
        prepared = self.loss.prepare(self.with_reference(data))
        output = self.trainer.forward(prepared, "cross_entropy").result()
        logprobs = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
        with torch.no_grad():
            value, metrics = self.loss(prepared, logprobs)
        tokens = {key: number for key, number in output.metrics.items() if key.startswith("tokens/")}
        found = {"loss": float(value), **{key: float(number) for key, number in metrics.items()}, **tokens}
        return Evaluation({f"eval/{key}": number for key, number in found.items() if key != "tokens/trained"})

    def evaluate_answers(self, data: Sequence[Datum], step: int) -> Evaluation:
        """How many held-out answers greedy decoding reproduces."""
        asked = [getattr(datum, "question", "") for datum in data]
        context, text = self.renderer.max_length, self.renderer.text
        return evaluation.answers(self._fresh(step), data, asked, self._greedy(), context, text)

    def _greedy(self) -> SamplingParams:
        stop: list[str | int] = [*self.renderer.stop_token_ids, *(self.rollout.stop or [])]
        return SamplingParams(max_tokens=self.eval.max_tokens, temperature=0.0, stop=stop)

    def evaluate_rewards(self, prompts: Sequence[RenderedPrompt], step: int) -> Evaluation:
        """The rewards of greedy completions of held-out prompts."""
        if not prompts or self.reward is None:
            return Evaluation({})
        samples = evaluation.greedy(self._fresh(step), [prompt.tokens for prompt in prompts], self._greedy())
        texts = [self.renderer.text(sample.tokens) for sample in samples]
        rewards = score(self.reward, texts, [prompt.row for prompt in prompts])
        shown = zip(prompts[: evaluation.SHOWN], texts, rewards, strict=False)
        examples = [evaluation.Example(prompt.question, text, reward) for prompt, text, reward in shown]
        return Evaluation(evaluation.rewarded(rewards), examples)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def steps(self, total: int, evaluate: Callable[[int], Evaluation] | None = None) -> Iterator[Step]:
        """The turns of the loop from where the run stands to ``total``.

        Around each turn: timing, the row in ``metrics.jsonl``, trackers, hooks, evaluation before the first step and every
        ``eval.every``, checkpoints. Ctrl-C finishes the turn, saves and raises :class:`Interrupted`; a second stops at once.
        """
        if total < 1:
            raise ConfigError(f"recipe.steps must be at least 1, got {total}")
        self.console = Console(total, self.first_step)
        if self.first_step >= total:
            seen = f"{self.first_step} of {total} steps"
            self.console.note(f"nothing to do: {self.out} has seen {seen}; raise recipe.steps to go on")
        try:
            with InterruptGuard() as guard:
                if self.first_step == 0 and evaluate:
                    self._write(0, self._evaluate(evaluate, 0))
                for index in range(self.first_step, total):
                    step = Step(index, total)
                    self._tokens = 0
                    yield step
                    self._finish(step, evaluate)
                    stop = guard.asked and index + 1 < total  # read once: it may be asked at any moment
                    self._checkpoint(step, stop=stop)
                    if stop:
                        raise Interrupted(index + 1)
        finally:
            self.console.close()

    def _finish(self, step: Step, evaluate: Callable[[int], Evaluation] | None) -> None:
        number = step.index + 1
        seconds = time.monotonic() - step.started
        row = {
            **step.metrics,
            **_per_divisor(step.metrics),
            "time/step_s": seconds,
            "time/tokens_per_s": (self._tokens + step.metrics.get("rollout/tokens", 0.0)) / seconds,
        }
        if evaluate and (number == step.total or (self.eval.every and number % self.eval.every == 0)):
            row.update(self._evaluate(evaluate, number))
        self._write(number, row)
        for hook in self.hooks:
            hook.on_step(self, number, row)

    def _evaluate(self, evaluate: Callable[[int], Evaluation], step: int) -> dict[str, float]:
        found = evaluate(step)
        self.evaluations.append((step, found))
        for example in found.examples:
            values = {"split": "eval", "prompt": example.prompt, "completion": example.completion, "reward": example.reward}
            self.samples_file.write(step, values)
        for hook in self.hooks:
            hook.on_eval(self, step, found.metrics)
        return dict(found.metrics)

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics_file.write(step, row)
        for tracker in self.trackers:
            tracker.log(step, row)
        if self.console:
            self.console.update(step, row)

    def _checkpoint(self, step: Step, *, stop: bool) -> None:
        """Saves when it is time to, and whenever the run stops early: that promises to lose nothing."""
        number = step.index + 1
        due = self.checkpoint.every is not None and number % self.checkpoint.every == 0
        if not (due or stop or (number == step.total and self.checkpoint.final)):
            return
        saved = self.trainer.save_state(store.step_name(number), overwrite=True).result()
        store.prune(self.out / "checkpoints", self.checkpoint.keep, number)
        log.info("saved %s", saved.path)
        for hook in self.hooks:
            hook.on_checkpoint(self, saved)


def _per_divisor(metrics: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as the update saw it: a sum over tokens divided, like its gradient, by the tokens that carry one."""
    if "loss" not in metrics:
        return {}
    return {"loss": metrics["loss"] / metrics.get("optim/divisor", 1.0)}
