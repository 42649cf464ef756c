"""What a recipe receives: everything it needs, and the housekeeping every loop needs, once."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

from cookbook import evaluation, rollout
from cookbook.checkpoints import CheckpointConfig, store
from cookbook.config import OptimConfig
from cookbook.data import DataConfig, RenderedPrompt, Renderer, Row, datums
from cookbook.errors import ConfigError
from cookbook.evaluation import SHOWN, EvalConfig, Evaluation, Example
from cookbook.futures import Future, done
from cookbook.hooks import Hook
from cookbook.interrupt import Interrupted, InterruptGuard
from cookbook.losses import LOSSES, Loss
from cookbook.losses.base import Scope
from cookbook.protocols import Reference, Reward, Sampler, Tracker, TrainingClient, WeightSyncer
from cookbook.rewards import score
from cookbook.rollout import Group, RolloutConfig
from cookbook.schedules import Schedule
from cookbook.trackers.console import Console
from cookbook.trackers.jsonl import JsonLines
from cookbook.types import Checkpoint, Datum, ForwardBackwardOutput, OptimStepOutput, SamplingParams

log = logging.getLogger("cookbook")

T = TypeVar("T")
Split = Literal["train", "eval"]
Evaluate = Callable[[int], Evaluation]


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
    """One turn of the loop. ``index`` optimizer steps have been finished before it, of ``total``.

    ``updated``: its own has been asked for.
    """

    index: int
    total: int
    updated: bool = False
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
    folder. ``identity`` is what may not change while the run goes on, and goes into every checkpoint; ``planned_steps`` how
    many steps it was to have when the checkpoint was saved that it goes on from; ``sampler`` what it was sampling from then,
    where that was not the checkpoint's own weights. The rest is what the methods below are made of.
    """

    cfg: Any
    name: str
    seed: int
    out: Path
    trainer: TrainingClient
    loss: Loss
    reward: Reward | None
    reference: Reference | None
    renderer: Renderer
    data: DataConfig
    rows: Callable[[Split], list[Row]]
    rollout: RolloutConfig
    optim: OptimConfig
    schedule: Schedule
    eval: EvalConfig
    checkpoint: CheckpointConfig
    syncer: WeightSyncer
    sync_every: int
    trackers: list[Tracker]
    hooks: list[Hook]
    identity: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 0
    planned_steps: int | None = None
    sampler: Sampler | None = None
    console: Console | None = None
    examples: list[Example] = field(default_factory=list)  # of the last evaluation
    _tokens: int = 0  # of this step so far
    _sync_s: float = 0.0  # spent on weight syncs in this step so far, seconds
    _rows: int | None = None  # a checksum of the rows of this step so far
    _saving: tuple[int, Future[Checkpoint]] | None = None  # of which step, under way while training goes on
    _open: tuple[Step, Evaluate | None] | None = None  # the step that the recipe is in

    def __post_init__(self) -> None:
        self._done = self._saved = self.first_step  # finished steps, and those that the newest checkpoint has
        self.metrics_file = JsonLines(self.out / "metrics.jsonl")
        self.samples_file = JsonLines(self.out / "samples.jsonl")

    @property
    def done(self) -> int:
        """Finished steps, those before a resume included."""
        return self._done

    # ---- data ----------------------------------------------------------------------------------------------------

    def conversations(self, which: Split) -> Sequence[Datum]:
        """The ``train`` or ``eval`` rows, rendered, with weight on the tokens to learn."""
        return datums.conversation_datums(self.rows(which), self.renderer, self.data)

    def preferences(self, which: Split) -> Sequence[Sequence[Datum]]:
        """The ``train`` or ``eval`` rows as ``[chosen, rejected]``, with weight on the answers' tokens."""
        flat = datums.preference_datums(self.rows(which), self.renderer, self.data)
        return [flat[i : i + 2] for i in range(0, len(flat), 2)]

    def prompts(self, which: Split) -> list[RenderedPrompt]:
        """The ``train`` or ``eval`` rows as prompts, with room for a completion."""
        room = self.rollout.max_tokens if which == "train" else self.eval.max_tokens
        return datums.prompts(self.rows(which), self.renderer, self.data, room)

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
        self._note_rows(datum.where for datum in data if isinstance(datum, datums.RowDatum))
        if LOSSES.get(self.loss.name) == f"{type(self.loss).__module__}:{type(self.loss).__qualname__}":
            return self.trainer.forward_backward(prepared, self.loss.name, self.loss.options())
        return self.trainer.forward_backward_custom(prepared, self.loss)

    def optim_step(self, step: Step) -> Future[OptimStepOutput]:
        """The update, with this step's learning rate and the division that the loss asks for."""
        step.updated = True
        adam = self.optim.adam(self.schedule.factor(step.index + 1, step.total))
        return self.trainer.optim_step(adam, self.loss.normalization)

    def with_reference(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """``data`` with ``reference_logprobs``, when the loss reads them and they are not there yet."""
        if not data or self.reference is None or "reference_logprobs" in data[0].loss_fn_inputs:
            return data
        logprobs = self.reference.logprobs(data).result()
        return [datum.with_inputs(reference_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]

    def _note_rows(self, places: Iterable[str]) -> None:
        """Takes the rows' files and lines, without the folders: those differ between machines."""
        for place in places:
            self._rows = zlib.crc32(place.rpartition("/")[2].encode(), self._rows or 0)

    # ---- sampling ------------------------------------------------------------------------------------------------

    def sync(self, step: int) -> Sampler:
        """A sampler of the trainer's weights after ``step`` optimizer steps, or of the last sync when none is due."""
        due = step % self.sync_every == 0
        if self.sampler is None or (due and self.sampler.step != step):
            self.sampler = self._fresh(step)
        return self.sampler

    def _newest(self, step: int) -> Sampler:
        """A sampler of exactly the weights after ``step`` steps, for evaluation. Between two syncs the loop keeps its own."""
        if step % self.sync_every == 0:
            return self.sync(step)
        return self.sampler if self.sampler is not None and self.sampler.step == step else self._fresh(step)

    def _fresh(self, step: int) -> Sampler:
        started = time.monotonic()
        sampler = self.syncer.sync(step)
        self._sync_s += time.monotonic() - started
        for hook in self.hooks:
            hook.on_weight_sync(self, sampler)
        return sampler

    def sample_groups(self, sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, step: Step) -> list[Group]:
        """``group_size`` completions of every prompt, with their rewards."""
        if self.reward is None:
            raise ConfigError("reward: this recipe learns from rewards; choose one, for example reward=number")
        seed = self.seed * 1_000_003 + step.index
        self._note_rows(prompt.row.where for prompt in prompts)
        started = time.monotonic()
        groups = rollout.sample_groups(sampler, prompts, group_size, self.rollout, self.renderer, seed)
        sampling_s = time.monotonic() - started
        texts = [text for group in groups for text in group.texts]
        rewards = score(self.reward, texts, [group.prompt.row for group in groups for _ in group.texts])
        for place, group in enumerate(groups):
            group.rewards.extend(rewards[place * group_size : (place + 1) * group_size])
        for row in rollout.log_rows(groups, self.rollout.log_samples):
            self.samples_file.write(step.index + 1, row)
        found = rollout.metrics(groups)
        lag = {"sync/version_lag": float(step.index - sampler.step)}  # optimizer steps that the samples' weights are behind
        step.log(found, lag, {"time/sampled_tokens_per_s": found["rollout/tokens"] / sampling_s})
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
        found.pop("tokens/trained", None)
        return Evaluation({f"eval/{key}": number for key, number in self._meant(found).items()})

    def evaluate_answers(self, data: Sequence[Datum], step: int) -> Evaluation:
        """How many held-out answers greedy decoding reproduces."""
        asked = [getattr(datum, "question", "") for datum in data]
        context, text = self.renderer.max_length, self.renderer.text
        return evaluation.answers(self._newest(step), data, asked, self._greedy(), context, text)

    def _greedy(self) -> SamplingParams:
        stop: list[str | int] = [*self.renderer.stop_token_ids, *(self.rollout.stop or [])]
        return SamplingParams(max_tokens=self.eval.max_tokens, temperature=0.0, stop=stop)

    def evaluate_rewards(self, prompts: Sequence[RenderedPrompt], step: int) -> Evaluation:
        """The rewards of greedy completions of held-out prompts."""
        if not prompts or self.reward is None:
            return Evaluation({})
        samples = evaluation.greedy(self._newest(step), [prompt.tokens for prompt in prompts], self._greedy())
        texts = [self.renderer.text(sample.tokens) for sample in samples]
        rewards = score(self.reward, texts, [prompt.row for prompt in prompts])
        shown = zip(prompts[: evaluation.SHOWN], texts, rewards, strict=False)
        examples = [evaluation.Example(prompt.question, text, reward) for prompt, text, reward in shown]
        return Evaluation(evaluation.rewarded(rewards), examples)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def steps(self, total: int, evaluate: Evaluate | None = None) -> Iterator[Step]:
        """The turns of the loop from where the run stands to ``total``.

        Around each turn: timing, the row in ``metrics.jsonl``, trackers, hooks, evaluation before the first step and every
        ``eval.every``, checkpoints. Ctrl-C finishes the turn, saves and raises :class:`Interrupted`; a second stops at once.
        A recipe may leave the loop early: :meth:`finish` then does what is left of its step.
        """
        if total < 1:
            raise ConfigError(f"recipe.steps must be at least 1, got {total}")
        self.finish()  # of a loop before this one
        self._warn_of_other_rates(total)
        self.console = Console(total, self._done)
        if self._done >= total:
            seen = f"{self._done} of {total} steps"
            self.console.note(f"nothing to do: {self.out} has seen {seen}; raise recipe.steps to go on")
        try:
            with InterruptGuard() as guard:
                if self._done == 0 and evaluate:
                    self._write(0, self._evaluate(evaluate, 0))
                for index in range(self._done, total):
                    step = Step(index, total)
                    self._tokens, self._rows, self._sync_s = 0, None, 0.0
                    self._open = step, evaluate
                    yield step
                    self._open = None
                    self._finish(step, evaluate)
                    if self._saving is not None and self._saving[1].done():
                        self._settle()
                    stop = guard.asked and index + 1 < total  # read once: it may be asked at any moment
                    self._checkpoint(index + 1, total, stop=stop)
                    if stop:
                        raise Interrupted(index + 1)
        finally:
            self.console.close()

    def finish(self) -> None:
        """Ends a loop that the recipe left with ``break`` or ``return``: writes its last step down, evaluates and saves.

        Not done where the loop is left: Python takes a generator down out of sight, and swallows what goes wrong there.
        """
        if self._open is None:
            self._settle()
            return
        step, evaluate = self._open
        self._open = None
        if step.updated:
            self._finish(step, evaluate, last=True)
        if self._done > self._saved:
            self._checkpoint(self._done, step.total, stop=True)
        self._settle()
        line = f"the recipe left its loop after step {self._done} of {step.total}; all of it is saved"
        log.info(line)
        if self.console:
            self.console.note(line)

    def _finish(self, step: Step, evaluate: Evaluate | None, *, last: bool = False) -> None:
        number = step.index + 1
        seconds = time.monotonic() - step.started
        row = {
            **self._meant(step.metrics),
            **_per_divisor(step.metrics),
            "time/step_s": seconds,
            # Prompts and completions that went through forward_backward, over the whole step, sampling and rewards included.
            "time/tokens_per_s": self._tokens / seconds,
        }
        if self._rows is not None:  # equal where two runs took the same rows in the same order
            row["data/rows_crc32"] = self._rows
        if evaluate and (last or number == step.total or (self.eval.every and number % self.eval.every == 0)):
            row.update(self._evaluate(evaluate, number))
        if self.sampler is not None:
            row["time/sync_s"] = self._sync_s
        self._write(number, row)
        self._done = number
        for hook in self.hooks:
            hook.on_step(self, number, row)

    def _meant(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without what misleads: over pairs, accuracy would count the tokens that the loss makes less likely as hits."""
        misleading = "tokens/accuracy" if self.loss.scope is Scope.pair else None
        return {key: value for key, value in metrics.items() if key != misleading}

    def _evaluate(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        found = evaluate(step)
        self.examples = found.examples[:SHOWN]
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

    def _checkpoint(self, number: int, total: int, *, stop: bool) -> None:
        """Saves when it is time to, and whenever the run stops early: that promises to lose nothing.

        Between two weight syncs the checkpoint holds the sampler's older weights too. To put off saving until the next sync
        would be less to store, but Ctrl-C must not wait for it, and no step may be the wrong one to stop after.
        """
        due = self.checkpoint.every is not None and number % self.checkpoint.every == 0
        if not (due or stop or (number == total and self.checkpoint.final)):
            return
        self._settle()
        facts: dict[str, Any] = {"identity": self.identity, "total_steps": total}
        behind = self.sampler if number % self.sync_every else None
        if behind is not None:
            facts["sampler_step"] = behind.step
        last = stop or number == total
        saving = self.trainer.save_state(
            store.step_name(number),
            overwrite=True,
            facts={"run": facts},
            sampler=behind,
            asynchronous=self.checkpoint.asynchronous and not last,
        )
        self._saving, self._saved = (number, saving), number
        if last or not self.checkpoint.asynchronous:
            self._settle()

    def _settle(self) -> None:
        """Waits for the checkpoint under way, and tells of it.

        Raises:
            CheckpointError: it could not be saved.
            ConfigError: the recipe's turns are not one optimizer step each, so that it cannot be gone on from.
        """
        if self._saving is None:
            return
        (number, saving), self._saving = self._saving, None
        saved = saving.result()
        if saved.step != number:
            raise ConfigError(
                f"recipe: after {number} turns of run.steps the model has seen {saved.step} optimizer steps; "
                "call run.optim_step(step) once a turn"
            )
        store.prune(self.out / "checkpoints", self.checkpoint.keep, number)
        log.info("saved %s", saved.path)
        for hook in self.hooks:
            hook.on_checkpoint(self, saved)

    def _warn_of_other_rates(self, total: int) -> None:
        """A schedule that looks at the total would have given the steps that are done other learning rates."""
        planned = self.planned_steps or total
        done = range(1, min(self.first_step, planned, total) + 1)
        if any(self.schedule.factor(step, planned) != self.schedule.factor(step, total) for step in done):
            log.warning(
                "recipe.steps: %d steps have had the learning rates of a run of %d, and now it is one of %d; "
                "the same steps in one sitting would come out otherwise",
                self.first_step,
                planned,
                total,
            )


def _per_divisor(metrics: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as the update saw it: a sum over tokens divided, like its gradient, by the tokens that carry one."""
    if "loss" not in metrics:
        return {}
    return {"loss": metrics["loss"] / metrics.get("optim/divisor", 1.0)}
