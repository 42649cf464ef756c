"""What a recipe receives: everything it needs, and the housekeeping every loop needs, once."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from cookbook import failed_batch, rollout, terminal
from cookbook.bad_rows import BadRows
from cookbook.checkpoints import CheckpointConfig, store
from cookbook.checkpoints.cadence import Progress
from cookbook.config import OptimConfig
from cookbook.data import DataConfig, Refusals, RenderedPrompt, Renderer, Row, datums
from cookbook.data.batches import Batches
from cookbook.errors import ConfigError, CookbookError
from cookbook.evaluation import FINGERPRINT, SHOWN, EvalConfig, Evaluation, Evaluator, Example
from cookbook.futures import Future, done
from cookbook.health import Health, warn_of_other_rates
from cookbook.hooks import Hook, HookCalls
from cookbook.identity import rows_digest
from cookbook.interrupt import Interrupted, InterruptGuard
from cookbook.losses import LOSSES, Loss
from cookbook.losses.base import Scope
from cookbook.protocols import Reference, Reward, Sampler, Tracker, TrainingClient, WeightSyncer
from cookbook.reference import Remembered
from cookbook.rewards import Judge
from cookbook.rollout import Group, RolloutConfig
from cookbook.schedules import Schedule
from cookbook.trackers import Trackers
from cookbook.trackers.console import Console
from cookbook.trackers.jsonl import JsonLines
from cookbook.types import Checkpoint, Datum, ForwardBackwardOutput, OptimStepOutput

log = logging.getLogger("cookbook")

METRICS = "metrics.jsonl"
T = TypeVar("T")
Split = Literal["train", "eval"]
Evaluate = Callable[[int], Evaluation]


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
    folder. ``refusals`` takes the rows that cannot be used. ``identity`` is what may not change while the run goes on, and goes
    into every checkpoint; ``before`` how far it had come when the checkpoint was saved that it goes on from, ``planned_steps``
    how many steps it was to have then, and ``sampler`` what it was sampling from, where that was not the checkpoint's own
    weights. ``judge`` calls ``reward``; ``health`` counts the steps that teach nothing. The rest is what the methods below are
    made of.
    """

    cfg: Any
    name: str
    seed: int
    out: Path
    trainer: TrainingClient
    loss: Loss
    reward: Reward | None
    judge: Judge | None
    reference: Reference | None
    renderer: Renderer
    data: DataConfig
    rows: Callable[[Split], list[Row]]
    refusals: Refusals
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
    before: Progress = field(default_factory=Progress)
    planned_steps: int | None = None
    sampler: Sampler | None = None
    health: Health = field(default_factory=Health)
    console: Console | None = None
    examples: list[Example] = field(default_factory=list)  # of the last evaluation
    _prompts: list[RenderedPrompt] = field(default_factory=list)  # of the held-out rows, where they are not the recipe's own
    _tokens: int = 0  # of this step so far
    _earlier_tokens: int = 0  # of the steps before it in this sitting
    _sync_s: float = 0.0  # spent on weight syncs in this step so far, seconds
    _rows: int | None = None  # a checksum of the rows of this step so far
    _saving: tuple[int, Future[Checkpoint]] | None = None  # of which step, under way while training goes on
    _open: tuple[Step, Evaluate | None] | None = None  # the step that the recipe is in

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._done = self.first_step  # finished steps
        self._saved = self.before  # how far the newest checkpoint is
        self.metrics_file = JsonLines(self.out / METRICS)
        self.samples_file = JsonLines(self.out / "samples.jsonl")
        self.bad_rows = BadRows(self.out, self.refusals)
        self.tracking = Trackers(self.trackers)
        self.hook_calls = HookCalls(self.hooks)
        self._asker = self.rollout.asker()
        stop = tuple(self.rollout.stop or ())
        self._evaluator = Evaluator(self.eval, self.renderer, self._asker, self.judge, stop, self.seed, self.refusals)
        self._evaluated_rows = ""  # the digest of the held-out rows
        self._calls = failed_batch.Calls()
        self._accumulated: list[Datum] = []  # what the next update is of

    @property
    def first_step(self) -> int:
        """Finished steps when this sitting began."""
        return self.before.steps

    @property
    def done(self) -> int:
        """Finished steps, those before a resume included."""
        return self._done

    @property
    def progress(self) -> Progress:
        """How far the run has come, its earlier sittings included."""
        minutes = self.before.minutes + (time.monotonic() - self._began) / 60
        return Progress(self._done, self.before.tokens + self._earlier_tokens, minutes)

    # ---- data ----------------------------------------------------------------------------------------------------

    def conversations(self, which: Split) -> Sequence[Datum]:
        """The ``train`` or ``eval`` rows, rendered, with weight on the tokens to learn."""
        return datums.conversation_datums(self._read(which), self.renderer, self.data, self.refusals)

    def preferences(self, which: Split) -> Sequence[Sequence[Datum]]:
        """The ``train`` or ``eval`` rows as ``[chosen, rejected]``, with weight on the answers' tokens."""
        flat = datums.preference_datums(self._read(which), self.renderer, self.data, self.refusals)
        return [flat[i : i + 2] for i in range(0, len(flat), 2)]

    def prompts(self, which: Split) -> list[RenderedPrompt]:
        """The ``train`` or ``eval`` rows as prompts, with room for a completion."""
        room = self.rollout.max_tokens if which == "train" else self.eval.max_tokens
        return datums.prompts(self._read(which), self.renderer, self.data, room, self.refusals)

    def _read(self, which: Split) -> list[Row]:
        rows = self.rows(which)
        if which == "eval":
            self._evaluated_rows = rows_digest(rows)
        return rows

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
        # Those of rollouts have been noted when they were sampled, with the prompts that teach nothing.
        sampled = "sampling_logprobs" in data[0].loss_fn_inputs
        self._note_rows(datum.where for datum in data if isinstance(datum, datums.RowDatum) and not sampled)
        if LOSSES.get(self.loss.name) == f"{type(self.loss).__module__}:{type(self.loss).__qualname__}":
            gradient = self.trainer.forward_backward(prepared, self.loss.name, self.loss.call_options())
        else:
            gradient = self.trainer.forward_backward_custom(prepared, self.loss)
        self._calls.add(failed_batch.Call(self._done + 1, prepared, gradient))
        self._accumulated += prepared
        return gradient

    def optim_step(self, step: Step) -> Future[OptimStepOutput]:
        """The update, with this step's learning rate and the division that the loss asks for."""
        step.updated = True
        adam = self.optim.adam(self.schedule.factor(step.index + 1, step.total))
        update = self.trainer.optim_step(adam, self.loss.normalization)
        self._calls.add(failed_batch.Call(step.index + 1, self._accumulated, update, update=True))
        self._accumulated = []
        return update

    def explained(self, error: CookbookError) -> BaseException:
        """``error``, or what it comes of; with the rows that are to blame and where their batch is, if numbers are at fault."""
        return failed_batch.explained(error, self._calls, self.out, self.trainer, self.renderer)

    def with_reference(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """``data`` with ``reference_logprobs``, when the loss reads them and they are not there yet."""
        if not data or self.reference is None or "reference_logprobs" in data[0].loss_fn_inputs:
            return data
        with terminal.doing("computing reference logprobs"):
            logprobs = self.reference.logprobs(data).result()
        return [datum.with_inputs(reference_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]

    def remember_reference(self, data: Sequence[Datum]) -> None:
        """From now on the reference logprobs of ``data``, which come again, are computed once each."""
        if self.reference is not None:
            self.reference = Remembered(self.reference, data)

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
        self.hook_calls.call("on_weight_sync", self, sampler)
        return sampler

    def sample_groups(self, sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, step: Step) -> list[Group]:
        """``group_size`` completions of every prompt, with their rewards.

        A prompt whose completions cannot be sampled is left out; ``rollout/failed`` counts them.
        """
        if self.judge is None:
            raise ConfigError("reward: this recipe learns from rewards; choose one, for example reward=number")
        seed = self.seed * 1_000_003 + step.index
        self._note_rows(prompt.row.where for prompt in prompts)
        found = rollout.sample_groups(
            sampler, prompts, group_size, self.rollout, self.renderer, seed, self._asker, self.judge, self.refusals
        )
        for row in rollout.log_rows(found.groups, self.rollout.log_samples):
            self._write_sample(step.index + 1, row)
        lag = {"sync/version_lag": float(step.index - sampler.step)}  # optimizer steps that the samples' weights are behind
        step.log(found.metrics(), lag)
        return found.groups

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate_loss(self, data: Sequence[Datum]) -> Evaluation:
        """The run's loss and its metrics on held-out ``data``, each named ``eval/...``."""
        if not data:
            return Evaluation({})
        prepared = self.loss.prepare(self.with_reference(data))
        with terminal.doing("evaluating", detail=f"{len(data):,} datums"):
            output = self.trainer.forward(prepared, "cross_entropy").result()
        logprobs = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
        with torch.no_grad():
            value, metrics = self.loss(prepared, logprobs)
        tokens = {key: number for key, number in output.metrics.items() if key.startswith("tokens/")}
        found = {"loss": float(value), **{key: float(number) for key, number in metrics.items()}, **tokens}
        found.pop("tokens/trained", None)
        return Evaluation({f"eval/{key}": number for key, number in self._meant(found).items()})

    def evaluate_answers(self, data: Sequence[Datum], step: int) -> Evaluation:
        """How many held-out answers are right: as the reward says, if one is chosen, else where they are ``data``'s own."""
        if self.judge is not None:
            self._prompts = self._prompts or self.prompts("eval")
            return self.evaluate_rewards(self._prompts, step)
        return self._evaluator.answers(self._newest(step), data).abridged()

    def evaluate_rewards(self, prompts: Sequence[RenderedPrompt], step: int) -> Evaluation:
        """The rewards of completions of held-out prompts."""
        return self._evaluator.rewards(self._newest(step), prompts).abridged() if prompts else Evaluation({})

    # ---- the loop ------------------------------------------------------------------------------------------------

    def steps(self, total: int, evaluate: Evaluate | None = None) -> Iterator[Step]:
        """The turns of the loop from where the run stands to ``total``.

        Around each turn: timing, the row in ``metrics.jsonl``, trackers, hooks, evaluation before the first step and every
        ``eval.every``, checkpoints. Ctrl-C finishes the turn, saves and raises :class:`Interrupted`; a second stops at once.
        A recipe may leave the loop early: :meth:`finish` then does what is left of its step.
        """
        check_steps(self.out, self._done, total)
        self.finish()  # of a loop before this one
        warn_of_other_rates(self.schedule, self.first_step, self.planned_steps or total, total)
        self.console = Console(total, self._done)
        if self._done >= total:
            seen = f"{self._done} of {total} steps"
            self.console.note(f"nothing to do: {self.out} is finished, with {seen}; raise recipe.steps to go on")
        self.bad_rows.note(self._done)
        try:
            with InterruptGuard() as guard:
                if self._done == 0 and evaluate:
                    self._write(0, {**self._evaluate(evaluate, 0), **self.bad_rows.metrics(0)})
                self.hook_calls.check()
                for index in range(self._done, total):
                    step = Step(index, total)
                    self._tokens, self._rows, self._sync_s = 0, None, 0.0
                    self._open = step, evaluate
                    with terminal.doing(f"step {index + 1} of {total}", plain_after_s=terminal.LONG_S):
                        yield step
                    self._open = None
                    self._finish(step, evaluate)
                    if self._saving is not None and self._saving[1].done():
                        self._settle()
                    stop = guard.asked and index + 1 < total  # read once: it may be asked at any moment
                    self._checkpoint(index + 1, total, stop=stop or self.hook_calls.failure is not None)
                    self.hook_calls.check()
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
            self.hook_calls.check()
            return
        step, evaluate = self._open
        self._open = None
        if step.updated:
            self._finish(step, evaluate, last=True)
        if self._done > self._saved.steps:
            self._checkpoint(self._done, step.total, stop=True)
        self._settle()
        self.hook_calls.check()
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
        row.update(self.bad_rows.metrics(number))
        self._write(number, row)
        self.health.observe(number, row)
        self._done = number
        self._earlier_tokens += self._tokens
        self.hook_calls.call("on_step", self, number, row)

    def _meant(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without what misleads: over pairs, accuracy would count the tokens that the loss makes less likely as hits."""
        misleading = "tokens/accuracy" if self.loss.scope is Scope.pair else None
        return {key: value for key, value in metrics.items() if key != misleading}

    def _evaluate(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        found = evaluate(step)
        metrics = dict(found.metrics)
        if metrics and self._evaluated_rows:
            metrics[FINGERPRINT] = float(self._evaluator.fingerprint(self._evaluated_rows))
        self.examples = found.examples[:SHOWN]
        for example in found.examples:
            values = {"split": "eval", "prompt": example.prompt, "completion": example.completion, "reward": example.reward}
            self._write_sample(step, values)
        self.hook_calls.call("on_eval", self, step, metrics)
        return metrics

    def _write_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self.samples_file.write(step, sample)
        self.tracking.log_sample(step, sample)

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics_file.write(step, row)
        self.tracking.log(step, row)
        if self.console:
            self.console.update(step, row)

    def _checkpoint(self, number: int, total: int, *, stop: bool) -> None:
        """Saves when it is time to, and whenever the run stops early: that promises to lose nothing.

        Between two weight syncs the checkpoint holds the sampler's older weights too. To put off saving until the next sync
        would be less to store, but Ctrl-C must not wait for it, and no step may be the wrong one to stop after.
        """
        now = self.progress
        due = self.checkpoint.saving.due(self._saved, now)
        if not (due or stop or (number == total and self.checkpoint.final)):
            return
        self._settle()
        progress = {"tokens": now.tokens, "minutes": now.minutes}
        facts: dict[str, Any] = {"identity": self.identity, "total_steps": total, "progress": progress}
        facts["health"] = self.health.state()
        facts |= {"optim": asdict(self.optim), "schedule": repr(self.schedule), "metrics": self.metrics_file.last}
        behind = self.sampler if number % self.sync_every else None
        facts |= {} if behind is None else {"sampler_step": behind.step}
        last = stop or number == total
        saving = self.trainer.save_state(
            store.step_name(number),
            overwrite=True,
            facts={"run": facts},
            sampler=behind,
            asynchronous=self.checkpoint.asynchronous and not last,
        )
        self._saving, self._saved = (number, saving), now
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
        with terminal.doing(f"saving step {number}", plain_after_s=10):
            saved = saving.result()
        if saved.step != number:
            raise ConfigError(
                f"recipe: after {number} turns of run.steps the model has seen {saved.step} optimizer steps; "
                "call run.optim_step(step) once a turn"
            )
        store.prune(self.out / "checkpoints", self.checkpoint.keep, number, self.checkpoint.staying)
        log.info("saved %s", saved.path)
        self.hook_calls.call("on_checkpoint", self, saved)


def check_steps(out: Path, done: int, total: int) -> None:
    """Raises ConfigError: there is no step to train; or a branch would be a copy of the checkpoint that it starts from."""
    if total < 1:
        raise ConfigError(f"recipe.steps must be at least 1, got {total}")
    if done >= total and not (out / METRICS).exists():
        seen = f"{done} of {total} steps"
        raise ConfigError(f"recipe.steps: {out} starts after {seen}, so it would train none; raise recipe.steps")


def _per_divisor(metrics: Mapping[str, float]) -> dict[str, float]:
    """``loss`` as the update saw it: a sum over tokens divided, like its gradient, by the tokens that carry one."""
    if "loss" not in metrics:
        return {}
    return {"loss": metrics["loss"] / metrics.get("optim/divisor", 1.0)}
