"""Evaluation of a run, a checkpoint or a model without training: ``cookbook eval``."""

from __future__ import annotations

import contextlib
import enum
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omegaconf import DictConfig

from cookbook import terminal
from cookbook.checkpoints import manifest, store
from cookbook.data import DataConfig, RejectedRows, Renderer, Row, datums, load_rows
from cookbook.data.row_table import rows_digest
from cookbook.data.source import has_held_out_rows
from cookbook.engine.model import ModelConfig
from cookbook.errors import ConfigError
from cookbook.protocols import Sampler, Trainer
from cookbook.run import folder as run_folder
from cookbook.run.builder import collect_garbage_from_here, connect_reward, environment_runner, reward_runner
from cookbook.run.held_out_loss import held_out_loss
from cookbook.run.hooks import writing_to
from cookbook.run.preflight import check_signature
from cookbook.run.second_models import connect_rewards
from cookbook.run.settings import Settings, preflight, settings
from cookbook.sampling.environments import numbered_rows, prompts
from cookbook.sampling.evaluation import FINGERPRINT, Evaluation, Evaluator, answer_lengths
from cookbook.terminal import warnings_shown
from cookbook.types import Datum, JsonObject
from cookbook.utils import files

if TYPE_CHECKING:
    from cookbook.sampling.lm_eval_tasks import Tasks


@dataclass(frozen=True)
class Target:
    """Weights to evaluate: ``model`` is a folder or hub id; None: the configuration's own.

    ``run`` is the folder of the run that saved the weights after ``step`` optimizer steps; both are None for other weights.
    """

    model: str | None
    run: Path | None = None
    step: int | None = None


def find(name: str) -> Target:
    """Return the newest checkpoint of the run ``name``, or the checkpoint or model ``name``.

    Raises:
        CheckpointError: the run has no checkpoint, or its weights are on a server.
    """
    source = run_folder.sampling_target(name)
    if (Path(name) / run_folder.CONFIG).is_file():
        return Target(source, Path(name), int(manifest.read(Path(source))["step"]))
    # RUN@step-N is a checkpoint of the run.
    name = name if Path(name).exists() else source
    folder = Path(name)
    run = folder.absolute().parent.parent
    if (folder / manifest.NAME).is_file() and (run / run_folder.CONFIG).is_file():
        return Target(name, folder.parent.parent, int(manifest.read(folder)["step"]))
    return Target(source)


class NamedData(enum.Enum):
    """How a command line names the rows to evaluate."""

    # Not at all, or with a key of the group that says which rows are held out.
    no = "no"
    # As an option of the group data, which knows its held-out rows.
    preset = "preset"
    # As a file, folder, hub dataset or mixture.
    rows = "rows"


@warnings_shown()
def evaluate(cfg: DictConfig, target: Target, named: NamedData = NamedData.no) -> tuple[JsonObject, Evaluation, Path | None]:
    """Evaluate ``target`` as a run of ``cfg`` evaluates itself, and write the result to the folder of the run, or to ``out``.

    Data that the command names as rows are evaluated whole, unless they have a split ``data.eval_split``.

    Returns:
        The weights (``model``, and ``step``, None for a model that no run has saved), the rows (their number, a digest, and
        the location of the first), the reward and the options; the evaluation; and the file with all of these, or None.

    Raises:
        CookbookError: an error that the user can fix.
    """
    typed = settings(cfg, trains=False)
    preflight(typed, typed.reward)
    refusals = RejectedRows(typed.data)
    rows: Sequence[Row]
    if typed.numbered is not None:
        rows = numbered_rows(typed.numbered, "eval", typed.seed, typed.eval.limit)
    else:
        data, which = _rows_to_evaluate(typed, named)
        rows = load_rows(data, which, typed.seed, typed.eval.limit, refusals)
    if not rows:
        raise ConfigError(
            "data: there are no held-out rows to evaluate on; name rows with data=FILE, or set data.eval_path=FILE, "
            "data.eval_split or data.eval_fraction"
        )
    check_signature(typed, {"eval": rows})
    digest = rows_digest(rows)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        connect_rewards(typed, folder, stack)
        runner = stack.enter_context(reward_runner(typed.reward))
        sampler, renderer, trainer = stack.enter_context(_deployed(typed, target))
        environment = stack.enter_context(environment_runner(typed.env, renderer))
        connect_reward(runner, environment)
        stop = tuple(typed.rollout.stop or ())
        evaluator = Evaluator(typed.eval, renderer, typed.rollout.retrier(), runner, stop, typed.seed, refusals, environment)
        evaluation = _evaluation(typed, evaluator, sampler, trainer, rows)
        fingerprint = evaluator.fingerprint(digest)
    refusals.warn(len(rows))
    facts = {
        **_weights(typed, target),
        "rows": {"digest": digest, "count": len(rows), "first": rows[0].where},
        "reward": None if typed.reward is None else repr(typed.reward),
        "env": None if typed.env is None else repr(typed.env),
        "eval": {key: value for key, value in asdict(typed.eval).items() if key != "every"},
        "stop": typed.rollout.stop,
        "seed": typed.seed,
    }
    evaluation = replace(evaluation, metrics={**evaluation.metrics, FINGERPRINT: float(fingerprint)})
    return facts, evaluation, _written(typed.out, target, facts, evaluation)


@warnings_shown()
def evaluate_tasks(cfg: DictConfig, target: Target, tasks: Tasks) -> tuple[JsonObject, Evaluation, Path | None]:
    """Evaluate ``target`` with tasks of lm-eval, ``eval.limit`` documents of each.

    The result has the shape of :func:`evaluate`'s.

    Raises:
        CookbookError: an error that the user can fix.
    """
    from cookbook.sampling import lm_eval_tasks

    typed = settings(cfg, trains=False)
    with _deployed(typed, target) as (sampler, renderer, _):
        scores = lm_eval_tasks.run(tasks, sampler, renderer, typed.eval.limit, typed.seed)
    options = {"tasks": asdict(tasks), "versions": scores.versions, "limit": typed.eval.limit, "seed": typed.seed}
    digest = f"{zlib.crc32(json.dumps(options).encode()):08x}"
    facts = {
        **_weights(typed, target),
        "rows": {"digest": digest, "count": scores.num_documents, "first": ", ".join(tasks.names)},
        "reward": "lm-eval",
        "env": None,
        **options,
    }
    evaluation = Evaluation({**scores.metrics, FINGERPRINT: float(int(digest, 16))})
    return facts, evaluation, _written(typed.out, target, facts, evaluation)


def _rows_to_evaluate(typed: Settings, named: NamedData) -> tuple[DataConfig, Literal["train", "eval"]]:
    """Return the data with the split of :func:`load_rows` to evaluate."""
    data = typed.data
    if named is NamedData.no or (named is NamedData.preset and has_held_out_rows(data)):
        return data, "eval"
    # What the run held out of its own data says nothing about other data.
    data = replace(data, eval_path=None, eval_name=None, eval_fraction=0.0)
    if has_held_out_rows(data):
        return data, "eval"
    return replace(data, eval_split=None, limit=typed.eval.limit, streaming=False), "train"


def _weights(typed: Settings, target: Target) -> JsonObject:
    return {"model": target.model or typed.model.name, "step": target.step}


@contextlib.contextmanager
def _deployed(typed: Settings, target: Target) -> Iterator[tuple[Sampler, Renderer, Trainer]]:
    """A sampler of the target's weights, the renderer of its tokenizer, and the trainer that holds the weights."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = typed.backend.make_trainer(_model(typed, target), seed=typed.seed, folder=folder)
        stack.callback(trainer.close)
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        collect_garbage_from_here()
        with terminal.doing("starting the deployment"):
            deployment = typed.deployment.deploy(trainer, live=True)
        stack.callback(deployment.close)
        yield deployment.load(0).result(), renderer, trainer


def _model(typed: Settings, target: Target) -> ModelConfig:
    # The checkpoint of an adapter has the adapter's rank.
    model = replace(typed.model, lora_rank=0)
    if target.model is not None:
        model = replace(model, name=target.model, random=False)
    return model if target.run is None else replace(model, revision=None)


def _evaluation(typed: Settings, evaluator: Evaluator, sampler: Sampler, trainer: Trainer, rows: Sequence[Row]) -> Evaluation:
    renderer, refusals = evaluator.renderer, evaluator.refusals
    if typed.env is not None:
        return evaluator.rewards(sampler, prompts(typed.env, rows, renderer, typed.data, refusals))
    # Without a reward, this refuses rollouts.
    if evaluator.runner is not None or typed.has_teacher:
        limit = typed.eval.max_tokens
        return evaluator.rewards(sampler, datums.prompts(rows, renderer, typed.data, limit, refusals, key="eval.max_tokens"))
    if typed.data_kind == "preferences":
        data = datums.preference_datums(rows, renderer, typed.data, refusals)[::2]
    elif typed.data_kind == "labels":
        labelled = datums.label_datums(rows, renderer, typed.data, refusals)
        data = [datum for datum in labelled if datum.loss_fn_inputs["labels"].array[0] > 0]
    else:
        data = datums.conversation_datums(rows, renderer, typed.data, refusals)
    lengths = answer_lengths(data)
    # Rows without any answer are refused below.
    if lengths and not typed.eval.compares(lengths):
        return _loss_only(typed, trainer, data, lengths)
    evaluation = evaluator.answers(sampler, data)
    if not evaluation.metrics:
        raise ConfigError(
            f"eval: no row has a question and an answer of up to eval.max_tokens={typed.eval.max_tokens} tokens; raise "
            "eval.max_tokens, or choose a reward, for example reward=number"
        )
    has_loss = typed.data_kind == "conversations" and not typed.loss.needs_reference
    return held_out_loss(trainer, typed.loss, data) | evaluation if has_loss else evaluation


def _loss_only(typed: Settings, trainer: Trainer, data: Sequence[Datum], lengths: Sequence[int]) -> Evaluation:
    """Return the loss on ``data``, whose answers are not compared token by token.

    Raises:
        ConfigError: the loss needs pairs, or a reference.
    """
    if typed.data_kind == "conversations" and not typed.loss.needs_reference:
        return held_out_loss(trainer, typed.loss, data)
    why = "eval.answers=false" if not typed.eval.answers else f"the answers have {statistics.median(lengths):g} tokens (median)"
    raise ConfigError(
        f"eval: nothing to measure: {why}, so they are not compared token by token, and the loss of this recipe is not "
        "evaluated without its run; choose a reward, for example reward=judge, or set eval.answers=true"
    )


def _written(out: str | None, target: Target, facts: JsonObject, evaluation: Evaluation) -> Path | None:
    """Write the result to ``out``, or to a file in the run's folder. Return the file; None if there is neither."""
    if out is not None:
        file = Path(out)
    elif target.run is not None and target.step is not None:
        checksum = zlib.crc32(json.dumps({**facts, "model": None, "rows": facts["rows"]["digest"]}).encode())
        file = target.run / run_folder.EVALS / f"{store.step_name(target.step)}-{checksum:08x}.json"
    else:
        return None
    content = {
        "evaluated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
        "metrics": evaluation.metrics,
        "completions": [asdict(example) for example in evaluation.examples],
    }
    with writing_to(file, "give a file, for example out=result.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return file
