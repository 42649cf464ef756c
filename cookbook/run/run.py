"""``Run``: the object that a recipe and its hooks receive, and the loop around a recipe's steps."""

from __future__ import annotations

import functools
import logging
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cookbook import terminal
from cookbook.checkpoints.schedule import Progress
from cookbook.data import RenderedPrompt, Row, datums
from cookbook.data.datum_table import Batches, Pairs
from cookbook.data.stream import RowStream, StreamedBatches, StreamPosition, StreamResume
from cookbook.errors import ConfigError, CookbookError
from cookbook.futures import Future, done
from cookbook.losses.base import Scope
from cookbook.protocols import Reference, Sampler, Trainer
from cookbook.run import ahead, diagnostics, minibatches, passes
from cookbook.run.ahead import AheadSampler, SampledBatch
from cookbook.run.best_step import BestStep
from cookbook.run.data import CachedReference, Split, SplitRows
from cookbook.run.diagnostics import Health, TrackedCall, TrackedCalls
from cookbook.run.folder import check_steps
from cookbook.run.held_out_loss import held_out_loss, meaningful
from cookbook.run.hooks import Hook, HookCalls, Status
from cookbook.run.recorder import Recorder, Saver
from cookbook.run.rollout_store import RolloutStore
from cookbook.sampling import environments, rollouts
from cookbook.sampling.evaluation import FINGERPRINT, Evaluation, answer_lengths
from cookbook.sampling.prompt_queue import PROMPTS_KEY, PromptQueue
from cookbook.sampling.rollouts import Further, PolicySampling, RolloutGroup
from cookbook.types import Datum, ForwardBackwardOutput, JsonObject, OptimStepOutput
from cookbook.utils.signals import Interrupted, InterruptGuard
from cookbook.utils.words import counted

log = logging.getLogger("cookbook")

T = TypeVar("T")
Evaluate = Callable[[int], Evaluation]


@dataclass
class Step:
    """One turn of the loop: ``index`` of ``total`` optimizer steps are finished before it.

    ``updated``: the turn's own optimizer step has been requested.
    """

    index: int
    total: int
    updated: bool = False
    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, float] = field(default_factory=dict)

    def log(self, *results: Future[ForwardBackwardOutput] | Future[OptimStepOutput] | Mapping[str, float]) -> None:
        """Add metrics to the step's row. Futures are waited for, and raise their errors here."""
        for result in results:
            metrics = result if isinstance(result, Mapping) else result.result().metrics
            self.metrics.update({key: value for key, value in metrics.items() if key != "loss:sum"})


@dataclass(frozen=True)
class Origin:
    """State of the run at the checkpoint that it resumes from; the defaults are those of a new run."""

    progress: Progress = field(default_factory=Progress)
    planned_steps: int | None = None
    health: Health = field(default_factory=Health)
    # Positions of streams, in the order in which the recipe makes their batches.
    streams: Sequence[JsonObject] = ()
    # State of the queue of prompts.
    queue: JsonObject | None = None
    # Parts of a batch of rollouts that are not trained yet.
    minibatches: JsonObject | None = None
    # State of the best evaluation.
    best: JsonObject | None = None
    # None for a new run.
    checkpoint: Path | None = None


class Run:
    """A run of a recipe.

    ``cfg`` is the recipe's own ``Config``; ``trainer`` the model in training; ``loss`` its loss; ``out`` the run folder. A
    recipe calls the methods up to :meth:`steps`.
    """

    def __init__(
        self,
        name: str,
        rows: SplitRows,
        trainer: Trainer,
        reference: Reference | None,
        sampling: PolicySampling,
        status: Status,
        origin: Origin,
    ) -> None:
        settings, out = rows.settings, status.folder
        self.cfg = settings.recipe
        self.name, self.seed, self.out = name, settings.seed, out
        self.trainer, self.reference, self.renderer = trainer, reference, sampling.evaluator.renderer
        self.loss, self.reward = settings.loss, settings.reward
        self.data, self.rollout, self.eval = settings.data, settings.rollout, settings.eval
        self.checkpoint, self.optim, self.schedule = settings.checkpoint, settings.optim, settings.schedule
        # Finished steps: when this process began, and now.
        self.first_step = self.done = origin.progress.steps
        store = RolloutStore(out, settings.rollout.store_mb, self.renderer, pairs=self.loss.scope is Scope.pair)
        self.recorder = Recorder(out, settings.trackers, rows.refusals, store)
        self.best = BestStep.restored(settings.checkpoint.best, settings.eval.patience, origin.best)
        self.saver = Saver(settings.checkpoint, trainer, out / "checkpoints", origin.progress, self.best)
        self.hooks: list[Hook] = [status, *settings.hooks]
        self.hook_calls = HookCalls(self.hooks)
        self.health = origin.health
        self._rows, self._sampling, self._origin = rows, sampling, origin
        sampling.on_sync = lambda sampler: self.hook_calls.call("on_weight_sync", self, sampler)
        self._began = time.monotonic()
        # Tokens of the current step, and of this process's earlier steps.
        self._tokens = self._earlier_tokens = 0
        # Checksum of the rows of the current step; None if the step has used no rows of the data.
        self._rows_checksum: int | None = None
        # The held-out prompts, if the recipe itself reads conversations or pairs.
        self._prompts: Sequence[RenderedPrompt] = ()
        self._queue: PromptQueue | None = None
        self._ahead: AheadSampler | None = None
        self._calls = TrackedCalls()
        self._streams: list[StreamedBatches[Any]] = []
        # Seconds of training since the last evaluation, the step of that evaluation, and whether its slowness was reported.
        self._train_s, self._evaluated_step, self._has_warned = 0.0, self.first_step, False
        # Datums since the last optimizer step.
        self._accumulated: list[Datum] = []
        # Parts of the last batch of rollouts that no step has trained yet. A checkpoint stores these parts.
        self.minibatches: list[list[Datum]] = minibatches.restored(origin.minibatches)
        # The share of the weights that is trained, for the first line of the run; "" if another machine holds the weights.
        self.trained_weights = ""
        self._has_introduced = False
        # The step that the recipe is in.
        self._open: tuple[Step, Evaluate | None] | None = None

    @property
    def progress(self) -> Progress:
        """Steps, tokens and minutes of the run, including its earlier processes."""
        before = self._origin.progress
        minutes = before.minutes + (time.monotonic() - self._began) / 60
        return Progress(self.done, before.tokens + self._earlier_tokens, minutes)

    @property
    def has_reward(self) -> bool:
        """Whether completions are scored, by a reward or an environment."""
        return self._sampling.evaluator.has_reward

    @property
    def sampler(self) -> Sampler | None:
        """The sampler of the last weight sync that was due; None before the first."""
        return self._sampling.sampler

    # ---- data ----------------------------------------------------------------------------------------------------

    def conversations(self, which: Split) -> Sequence[Datum]:
        """Return the ``train`` or ``eval`` rows, rendered, with weight on the tokens to learn."""
        return self._made(which, "conversations", datums.conversation_datums)

    def preferences(self, which: Split) -> Sequence[Sequence[Datum]]:
        """Return the ``train`` or ``eval`` rows as ``[chosen, rejected]``, with weight on the answers' tokens."""

        def pairs(rows: Sequence[Row], **options: Any) -> Sequence[Sequence[Datum]]:
            return Pairs(datums.preference_datums(rows, **options))

        return self._made(which, "preferences", pairs)

    def labelled(self, which: Split) -> Sequence[Datum]:
        """Return the ``train`` or ``eval`` rows as answers with ``labels``: 1 for a desirable answer, -1 for another."""
        return self._made(which, "labels", datums.label_datums)

    def mismatched(self, data: Sequence[Datum]) -> list[Datum]:
        """Return the prompts of ``data`` with answers to other prompts, if there are any; their ``labels`` are 0."""
        return datums.mismatched(data, self.data.max_length or self.renderer.max_length)

    def prompts(self, which: Split) -> Sequence[RenderedPrompt]:
        """Return the ``train`` or ``eval`` rows as prompts that leave space for a completion in the context."""
        if (environment := self._rows.settings.env) is not None:
            return environments.prompts(environment, self._rows(which), self.renderer, self.data, self._rows.refusals)
        limit, key = (self.rollout, "rollout.max_tokens") if which == "train" else (self.eval, "eval.max_tokens")
        make = functools.partial(datums.prompts, max_tokens=limit.max_tokens, key=key)
        return self._made(which, "rollouts", make)

    def _made(self, which: Split, kind: str, make: Callable[..., Sequence[T]]) -> Sequence[T]:
        """Return the datums or prompts of a split; of a stream, they are made when they are used."""
        options = {"renderer": self.renderer, "config": self.data, "refusals": self._rows.refusals}
        if self._rows.is_stream(which):
            return self._rows.stream(kind, lambda rows, reader: make(rows, **options, reader=reader), self.renderer)
        return make(self._rows(which), **options)

    def batches(self, rows: Sequence[T], size: int, epochs: int = 1, key: str = "recipe.batch_size") -> Batches[T]:
        """Return ``rows`` in the order of the run's seed, ``size`` at a time. A stream repeats as the steps need it.

        ``key`` is the option that ``size`` comes from, for errors.
        """
        if not isinstance(rows, RowStream):
            return Batches(rows, size, epochs, self.seed, self.data.shuffle, key)
        positions = self._origin.streams[len(self._streams) :][:1]
        resume = StreamResume(StreamPosition(**positions[0]), self._rows.identity.compare_stream) if positions else None
        batches = StreamedBatches(rows, size, self.seed, resume, key)
        self._streams.append(batches)
        return batches

    def prompt_batches(self, prompts: Sequence[RenderedPrompt], size: int) -> Batches[RenderedPrompt]:
        """Return the prompts of the steps: those of :meth:`batches`, or with refill or a curriculum those of a queue.

        The queue continues where the checkpoint left it; :meth:`sample_groups` takes further prompts from the queue.

        Raises:
            ConfigError: a second queue.
        """
        if self._queue is not None or self._ahead is not None:
            raise ConfigError("recipe: run.prompt_batches was called twice, and a checkpoint has one queue; join the prompts")
        # Refuse empty data before the size of a step depends on their number.
        batches = self.batches(prompts, size, key=PROMPTS_KEY)
        if self._needs_queue:
            self._queue = PromptQueue(prompts, size, self.seed, self.data)
            self._queue.restore(self._origin.queue, self.first_step)
            batches = self._queue
        if self.rollout.ahead:
            checkpoint = self._origin.checkpoint
            self._ahead = AheadSampler(batches, self._sampling, self.data, self.out, self.first_step, checkpoint)
            return self._ahead
        ahead.clear(self.out)
        return batches

    @property
    def _needs_queue(self) -> bool:
        return self.rollout.refill > 1 or self.data.curriculum is not None

    # ---- training ------------------------------------------------------------------------------------------------

    def forward_backward(self, data: Sequence[Datum]) -> Future[ForwardBackwardOutput]:
        """Add the gradient of the run's loss on one whole optimizer step's data. Without data the gradient is zero."""
        if not data:
            return done(ForwardBackwardOutput([], {"loss": 0.0, "tokens/trained": 0.0}))
        prepared = self.loss.prepare(self.with_reference(data))
        self._tokens += sum(datum.model_input.length for datum in prepared)
        # Rows of rollouts were noted when they were sampled, together with the prompts that have no gradient.
        if "sampling_logprobs" not in data[0].loss_fn_inputs:
            self._note_rows(datum.where for datum in data if isinstance(datum, datums.RowDatum))
        gradient = passes.backward(self.trainer, self.loss, prepared)
        self._calls.add(TrackedCall(self.done + 1, prepared, gradient))
        self.recorder.rollouts.trained(prepared, gradient)
        self._accumulated += prepared
        return gradient

    def split(self, data: Sequence[Datum], updates: int) -> None:
        """Set :attr:`minibatches` to ``updates`` parts of one batch of rollouts, each for an optimizer step of its own.

        If there are several, and the loss reads ``old_logprobs``, the datums get them: the logprobs of the weights before the
        first of these steps, from which the loss measures the ratio that it clips.
        """
        if updates > 1 and data and "old_logprobs" in self.loss.reads:
            logprobs = passes.target_logprobs(self.trainer, data)
            data = [datum.with_inputs(old_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]
        self.minibatches = minibatches.split(data, updates)

    def optim_step(self, step: Step) -> Future[OptimStepOutput]:
        """Update the weights, with this step's learning rate and the division that the loss declares."""
        step.updated = True
        adam = self.optim.adam(self.schedule.factor(step.index + 1, step.total))
        update = self.trainer.optim_step(adam, self.loss.normalization)
        self._calls.add(TrackedCall(step.index + 1, self._accumulated, update, update=True))
        self._accumulated = []
        return update

    def with_reference(self, data: Sequence[Datum]) -> Sequence[Datum]:
        """Return ``data`` with ``reference_logprobs``, if the run has a reference or a teacher and ``data`` lacks them."""
        if not data or self.reference is None or "reference_logprobs" in data[0].loss_fn_inputs:
            return data
        with terminal.doing("computing reference logprobs"):
            logprobs = self.reference.logprobs(data).result()
        return [datum.with_inputs(reference_logprobs=row) for datum, row in zip(data, logprobs, strict=True)]

    def remember_reference(self, data: Sequence[Datum]) -> None:
        """Cache the reference logprobs of ``data``, which the recipe uses more than once: compute each datum's only once."""
        if self.reference is not None:
            self.reference = CachedReference(self.reference, data)

    # ---- sampling and evaluation ---------------------------------------------------------------------------------

    def sync(self, step: int) -> Sampler:
        """Return a sampler of the trainer's weights after ``step`` optimizer steps, or of the last sync if none is due."""
        if self._ahead is not None:
            self._ahead.wait_for_weights(step)
        return self._sampling.sync(step)

    def sample_groups(
        self, sampler: Sampler, prompts: Sequence[RenderedPrompt], group_size: int, step: Step
    ) -> list[RolloutGroup]:
        """Sample ``group_size`` completions of every prompt, with their rewards.

        A prompt whose completions cannot be sampled is left out; ``rollout/failed`` counts these prompts. With
        ``rollout.refill`` there are further groups, in place of those without spread, which stay in the list.

        With ``rollout.ahead``, the completions are those of earlier weights, which were sampled during earlier steps, and
        ``sampler`` samples the batch of a later step.

        Raises:
            ConfigError: the configuration asks for further prompts, pass rates or sampling ahead, and the recipe has no queue.
        """
        if self._ahead is not None:
            batch = self._ahead.take(sampler, prompts, group_size, step.index, step.total)
        else:
            self._check_queue()
            used = list(prompts)
            further = self._further_into(used) if self.rollout.refill > 1 else None
            sampled = self._sampling.groups(sampler, prompts, group_size, step.index, further)
            batch = SampledBatch(step.index, sampler.step, used, sampled, metrics=self._observed(sampled.groups))
        self._note_rows(prompt.row.where for prompt in batch.prompts)
        for refused in batch.refused:
            self._rows.refusals.add(refused.where, refused.policy, refused.reason)
        step.log(batch.metrics)
        groups = batch.sampled.groups
        for row in rollouts.log_rows(groups, self.rollout.log_samples):
            self.recorder.write_sample(step.index + 1, row)
        self.recorder.rollouts.sampled(groups)
        # Optimizer steps between the weights in training and the weights that sampled.
        step.log(batch.sampled.metrics(), {"sync/version_lag": float(step.index - batch.version)})
        return groups

    def _check_queue(self) -> None:
        """Raise ConfigError if an option needs a queue of prompts that the recipe does not use."""
        if self.rollout.ahead or (self._needs_queue and self._queue is None):
            key = "rollout.ahead" if self.rollout.ahead else "rollout.refill" if self.rollout.refill > 1 else "data.curriculum"
            raise ConfigError(
                f"{key}: the recipe {self.name} has no queue of prompts; call run.prompt_batches(prompts, size) in place of "
                f"run.batches, or remove {key}"
            )

    def _further_into(self, used: list[RenderedPrompt]) -> Further:
        """Return a function that takes further prompts from the queue, and adds them to ``used``."""
        queue = self._queue
        assert queue is not None

        def further(count: int) -> Sequence[RenderedPrompt]:
            prompts = queue.further(count)
            used.extend(prompts)
            return prompts

        return further

    def _observed(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Update the pass rates of the queue's curriculum. Return the metrics of the queue."""
        if self._queue is None:
            return {}
        self._queue.observe(groups)
        return self._queue.metrics()

    def evaluate_loss(self, data: Sequence[Datum]) -> Evaluation:
        """Return the run's loss and its metrics on held-out ``data``, each named ``eval/...``."""
        if not data:
            return Evaluation({})
        return held_out_loss(self.trainer, self.loss, self.with_reference(data))

    def evaluate_answers(self, data: Sequence[Datum], step: int) -> Evaluation:
        """Return how many held-out answers are right: by the reward if one is chosen, else by equality with ``data``.

        The result is empty, and no weights are loaded into a sampler, with ``eval.answers=false``, and without a reward if the
        answers are too long to be compared token by token (``eval.answers=auto``).
        """
        if not self.eval.answers:
            return Evaluation({})
        evaluator = self._sampling.evaluator
        if evaluator.runner is None:
            lengths = answer_lengths(data)
            if self.eval.compares(lengths):
                return evaluator.answers(self._newest(step), data).abridged()
            if lengths and step == 0:
                self._say(
                    f"evaluation: samples no answers; those of the data have {statistics.median(lengths):g} tokens (median), "
                    "too many to compare token by token (eval.answers=true does; reward=... chooses another judge)"
                )
            return Evaluation({})
        self._prompts = self._prompts or self.prompts("eval")
        return self.evaluate_rewards(self._prompts, step)

    def evaluate_rewards(self, prompts: Sequence[RenderedPrompt], step: int) -> Evaluation:
        """Return the rewards of completions of held-out prompts."""
        # Without prompts, no weights need to be loaded.
        if not prompts:
            return Evaluation({})
        newest = self._newest(step)
        self._sampling.evaluator.at_step(step)
        return self._sampling.evaluator.rewards(newest, prompts).abridged()

    def _newest(self, step: int) -> Sampler:
        """Return a sampler of the weights after ``step`` steps, once the environment and the reward are free."""
        if self._ahead is not None:
            self._ahead.settle()
        return self._sampling.newest(step)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def steps(self, total: int, evaluate: Evaluate | None = None) -> Iterator[Step]:
        """Yield the turns of the loop from the first unfinished step to ``total``.

        Each turn is timed, written to ``metrics.jsonl``, and passed to trackers and hooks. ``evaluate`` is called before the
        first step and every ``eval.every`` steps, and checkpoints are saved. Ctrl-C finishes the turn, saves and raises
        :class:`Interrupted`; a second Ctrl-C stops immediately. After a recipe has left the loop early, :meth:`finish`
        completes the step.
        """
        check_steps(self.out, self.done, total)
        # A recipe may have several loops: complete the last step of the previous one.
        self.finish()
        diagnostics.warn_of_other_rates(self.schedule, self.first_step, self._origin.planned_steps or total, total)
        with self.recorder.shown(total, self.done, self.eval.every), InterruptGuard() as guard:
            if self.best.is_exhausted and self.done < total:
                self._say(f"nothing to do: {self.best.early_stop(self.done)}; raise eval.patience to resume")
                return
            if self.done >= total:
                seen = f"{self.done} of {total} steps"
                self.recorder.note(f"nothing to do: {self.out} is finished, with {seen}; raise recipe.steps to resume")
            self._introduce(total)
            self.recorder.bad_rows.note(self.done)
            if self.done == 0 and evaluate:
                self.recorder.write(0, {**self._evaluate(evaluate, 0), **self.recorder.bad_rows.metrics(0)})
            self.hook_calls.check()
            for index in range(self.done, total):
                step = Step(index, total)
                self._tokens, self._rows_checksum, self._sampling.sync_s = 0, None, 0.0
                self._open = step, evaluate
                self.recorder.rollouts.clear()
                with terminal.doing(f"step {index + 1} of {total}", plain_after_s=terminal.LONG_S):
                    yield step
                self._open = None
                self._finish(step, evaluate)
                if self.saver.has_written:
                    self._await_checkpoint()
                # Read once: a signal may arrive at any moment.
                stop = guard.asked and index + 1 < total
                is_exhausted = self.best.is_exhausted and index + 1 < total
                self._checkpoint(total, stop=stop or is_exhausted or self.hook_calls.failure is not None)
                self.hook_calls.check()
                if stop:
                    raise Interrupted(index + 1, guard.number)
                if is_exhausted:
                    self._say(f"stopped early: {self.best.early_stop(self.done)}")
                    return

    def _introduce(self, total: int) -> None:
        """Say once what the run trains, and on how much data."""
        if self._has_introduced or self.done >= total:
            return
        self._has_introduced = True
        counts = self._rows.counts
        held_out = f" ({counts['eval']:,} held out)" if counts.get("eval") else ""
        rows = f", {counted(counts['train'], 'row')}{held_out}" if "train" in counts else ""
        source = self._rows.source
        line = f"{self.name}: {self._rows.model} on {source}{rows}, {counted(total, 'step')}"
        self._say(f"{line}; trains {self.trained_weights}" if self.trained_weights else line)

    def finish(self) -> None:
        """Complete a loop that the recipe left with ``break`` or ``return``: write its last step, evaluate and save.

        The loop cannot do this itself: Python closes an abandoned generator later, and ignores its errors.
        """
        if self._open is None:
            self._await_checkpoint()
            self.hook_calls.check()
            return
        step, evaluate = self._open
        self._open = None
        if step.updated:
            self._finish(step, evaluate, last=True)
        if self.done > self.saver.saved.steps:
            self._checkpoint(step.total, stop=True)
        self._await_checkpoint()
        self.hook_calls.check()
        line = f"the recipe left its loop after step {self.done} of {step.total}; all of it is saved"
        self._say(line)

    def _say(self, line: str) -> None:
        """Print a line above the progress display, and write it to the run's log."""
        log.info(line)
        self.recorder.note(line)

    def close(self) -> None:
        """End the thread that samples ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def root_cause(self, error: CookbookError) -> BaseException:
        """Return the error that caused ``error``; for a non-finite value, with the rows and the path of their batch."""
        return diagnostics.root_cause(error, self._calls, self.out, self.trainer, self.renderer)

    def _finish(self, step: Step, evaluate: Evaluate | None, *, last: bool = False) -> None:
        number = step.index + 1
        seconds = time.monotonic() - step.started
        row = {
            **meaningful(step.metrics, self.loss),
            "time/step_s": seconds,
            # Tokens of prompts and completions that were trained on, over the whole step with sampling and rewards.
            "time/tokens_per_s": self._tokens / seconds,
        }
        # The loss as the update used it: a sum over tokens, divided like its gradient.
        if "loss" in row:
            row["loss"] = step.metrics["loss"] / step.metrics.get("optim/divisor", 1.0)
        # Equal if two runs used the same rows in the same order.
        if self._rows_checksum is not None:
            row[diagnostics.ROWS_CHECKSUM] = self._rows_checksum
        self._train_s += seconds
        if evaluate and (last or number == step.total or (self.eval.every and number % self.eval.every == 0)):
            row.update(self._evaluate(evaluate, number))
            if number < step.total and not last:
                self._warn_of_slow_evaluation(number, row.get("time/eval_s", 0.0))
            self._train_s, self._evaluated_step = 0.0, number
        if self.sampler is not None:
            row["time/sync_s"] = self._sampling.sync_s
        row.update(self.recorder.bad_rows.metrics(number))
        self.recorder.write(number, row)
        self.recorder.rollouts.write(number)
        self.health.observe(number, row)
        self.done = number
        if self._queue is not None and self._ahead is None:
            self._queue.finish_step()
        self._earlier_tokens += self._tokens
        self.hook_calls.call("on_step", self, number, row)

    def _warn_of_slow_evaluation(self, step: int, eval_s: float) -> None:
        """Warn once if an evaluation takes longer than the training since the evaluation before it."""
        if self._has_warned or eval_s <= max(self._train_s, diagnostics.SLOW_EVALUATION_S):
            return
        self._has_warned = True
        trained = f"{counted(step - self._evaluated_step, 'step')} of training before it took {self._train_s:.0f} s"
        log.warning(
            f"eval.every={self.eval.every}: the evaluation after step {step} took {eval_s:.0f} s, and the {trained}; raise "
            "eval.every, or lower eval.limit or eval.max_tokens"
        )

    def _note_rows(self, places: Iterable[str]) -> None:
        """Add rows to the step's checksum, by file name and line. The folder is left out: it differs between machines."""
        for place in places:
            self._rows_checksum = zlib.crc32(place.rpartition("/")[2].encode(), self._rows_checksum or 0)

    def _evaluate(self, evaluate: Evaluate, step: int) -> dict[str, float]:
        started = time.monotonic()
        result = evaluate(step)
        metrics = dict(result.metrics)
        self.best.observe(step, metrics)
        if metrics and self._rows.evaluated:
            metrics[FINGERPRINT] = float(self._sampling.evaluator.fingerprint(self._rows.evaluated))
        if metrics:
            metrics["time/eval_s"] = time.monotonic() - started
        self.recorder.write_examples(step, result.examples)
        self.hook_calls.call("on_eval", self, step, metrics)
        return metrics

    def _checkpoint(self, total: int, *, stop: bool) -> None:
        """Save if a checkpoint is due, and always if the run stops early, so that no step is lost."""
        now = self.progress
        if not (stop or self.saver.due(now, total)):
            return
        self._await_checkpoint()
        if self._ahead is not None:
            self._ahead.before_checkpoint()
        older = self._sampling.older_sampler(now.steps)
        facts = {
            "identity": self._rows.identity.facts,
            "total_steps": total,
            "progress": {"tokens": now.tokens, "minutes": now.minutes},
            "health": self.health.state(),
            "optim": asdict(self.optim),
            "schedule": repr(self.schedule),
            "metrics": self.recorder.metrics.last,
            **({} if self.best.metric is None else {"best": self.best.state()}),
            "trained_on": list(self._sampling.evaluator.renderer.kinds),
            **({} if older is None else {"sampler_step": older.step}),
            **({"streams": [asdict(stream.position) for stream in self._streams]} if self._streams else {}),
            **({} if self._queue is None else {"prompts": self._queue.state()}),
            **({"minibatches": minibatches.state(self.minibatches)} if self.minibatches else {}),
        }
        last = stop or now.steps == total
        self.saver.start(now, facts, older, last=last, complete=now.steps == total)
        if last or not self.checkpoint.asynchronous:
            self._await_checkpoint()

    def _await_checkpoint(self) -> None:
        if (checkpoint := self.saver.wait()) is not None:
            if self._ahead is not None:
                self._ahead.prune(self.done, self.saver.steps)
            self.hook_calls.call("on_checkpoint", self, checkpoint)
