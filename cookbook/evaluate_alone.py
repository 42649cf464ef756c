"""Evaluating a run, one of its checkpoints, or any model, by itself: ``cookbook eval``."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cookbook import atomic, runfolder, terminal
from cookbook.checkpoints import manifest, store
from cookbook.data import Refusals, Renderer, Row, datums, load_rows
from cookbook.errors import ConfigError
from cookbook.evaluation import FINGERPRINT, Evaluation, Evaluator
from cookbook.identity import rows_digest
from cookbook.protocols import TrainingClient
from cookbook.session import Settings, judging, sampling_target, settings

FOLDER = "evals"  # of a run, where its results go


@dataclass(frozen=True)
class Target:
    """What is evaluated. ``model`` is what to load, None for the configuration's own.

    ``run`` is the folder of the run that made it, after ``step`` optimizer steps; both None for a model of nobody's.
    """

    model: str | None
    run: Path | None = None
    step: int | None = None


@dataclass(frozen=True)
class Result:
    """``facts`` are what was asked, and how it was judged; ``found`` what came out. ``file`` is where both are written."""

    facts: Mapping[str, Any]
    found: Evaluation
    file: Path | None


def find(name: str) -> Target:
    """The newest checkpoint of a run's folder, a checkpoint, or a model.

    Raises:
        CheckpointError: the run has no checkpoint, or its weights are elsewhere.
    """
    folder = Path(name)
    if (folder / runfolder.CONFIG).is_file():
        checkpoint = Path(sampling_target(name))
        return Target(str(checkpoint), folder, int(manifest.read(checkpoint)["step"]))
    run = folder.absolute().parent.parent
    if (folder / manifest.NAME).is_file() and (run / runfolder.CONFIG).is_file():
        return Target(name, folder.parent.parent, int(manifest.read(folder)["step"]))
    return Target(sampling_target(name))


@runfolder.warnings_shown()
def evaluate(cfg: DictConfig, target: Target) -> Result:
    """Evaluates as a run of ``cfg`` evaluates itself, and writes the result into the folder of the run, or to ``out``.

    Raises:
        CookbookError: anything the user can mend.
    """
    typed = settings(cfg)
    refusals = Refusals(typed.data)
    rows = load_rows(typed.data, "eval", typed.seed, typed.eval.limit, refusals)
    if not rows:
        raise ConfigError(
            "data: holds no rows out to evaluate on; name them: data.eval_path=<file>, data.eval_split or data.eval_fraction"
        )
    with _evaluator(typed, target, refusals) as (evaluator, trainer):
        with terminal.doing("starting the deployment"):
            deployment = typed.deployment.deploy(trainer, live=True)
        with contextlib.closing(deployment):
            found = _evaluation(typed, evaluator, deployment.load(0).result(), rows)
        digest = rows_digest(rows)
        fingerprint = evaluator.fingerprint(digest)
    refusals.warn(len(rows))
    facts = {
        "model": target.model or typed.model.name,
        "step": target.step,
        "rows": {"digest": digest, "count": len(rows), "first": rows[0].where},
        "reward": None if typed.reward is None else repr(typed.reward),
        "eval": {key: value for key, value in asdict(typed.eval).items() if key != "every"},
        "stop": typed.rollout.stop,
        "seed": typed.seed,
    }
    found = replace(found, metrics={**found.metrics, FINGERPRINT: float(fingerprint)})
    return Result(facts, found, _written(typed.out, target, facts, found))


@contextlib.contextmanager
def _evaluator(typed: Settings, target: Target, refusals: Refusals) -> Iterator[tuple[Evaluator, TrainingClient]]:
    """What asks and judges, and the model."""
    model = replace(typed.model, lora_rank=0)  # a checkpoint of an adapter says itself that it is one
    if target.model is not None:
        model = replace(model, name=target.model, random=False)
    if target.run is not None:
        model = replace(model, revision=None)
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(judging(typed.reward))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = stack.enter_context(contextlib.closing(typed.backend.make_trainer(model, seed=typed.seed, folder=folder)))
        renderer = Renderer(trainer.tokenizer, trainer.max_length)
        stop = tuple(typed.rollout.stop or ())
        yield Evaluator(typed.eval, renderer, typed.rollout.asker(), judge, stop, typed.seed, refusals), trainer


def _evaluation(typed: Settings, evaluator: Evaluator, sampler: Any, rows: list[Row]) -> Evaluation:
    renderer, refusals = evaluator.renderer, evaluator.refusals
    if evaluator.judge is not None:
        return evaluator.rewards(sampler, datums.prompts(rows, renderer, typed.data, typed.eval.max_tokens, refusals))
    if getattr(typed.module, "DATA", None) == "preferences":
        data = datums.preference_datums(rows, renderer, typed.data, refusals)[::2]
    else:
        data = datums.conversation_datums(rows, renderer, typed.data, refusals)
    found = evaluator.answers(sampler, data)
    if not found.metrics:
        raise ConfigError(
            f"eval: no row has a question and an answer of up to eval.max_tokens={typed.eval.max_tokens} tokens; raise that, "
            "or choose a reward to judge by, for example reward=number"
        )
    return found


def _written(out: str | None, target: Target, facts: Mapping[str, Any], found: Evaluation) -> Path | None:
    """The file it is in: ``out``, or one of the run's folder; None where there is neither."""
    if out is not None:
        file = Path(out)
    elif target.run is not None and target.step is not None:
        asked = zlib.crc32(json.dumps({**facts, "model": None, "rows": facts["rows"]["digest"]}).encode())
        file = target.run / FOLDER / f"{store.step_name(target.step)}-{asked:08x}.json"
    else:
        return None
    completions = [asdict(example) for example in found.examples]
    told = {"evaluated": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts, "metrics": found.metrics, "completions": completions}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"out: cannot write {file}: {error.strerror}; give a file, for example out=result.json") from None
    return file
