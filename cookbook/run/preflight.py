"""Checks before a run loads a model, and warnings about values that are allowed but do not suit each other.

``cookbook check config`` makes the same checks, but reads nothing from the Hugging Face hub. A warning is one line with the
key, the reason and a remedy.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cookbook.check.dataset import Survey, survey
from cookbook.checkpoints.snapshots import tokenizer_digests
from cookbook.data import RejectedRows, Renderer, Row
from cookbook.data.datum_table import Batches
from cookbook.data.row_view import answer_text, with_answer
from cookbook.engine.optimizer import Adafactor
from cookbook.engine.shape import Shape, is_adapter, num_parameters, shape_of
from cookbook.errors import BadRowError, ConfigError, CookbookError, RolloutError
from cookbook.jobs.backend import JobBackend
from cookbook.protocols import (
    DeploymentConfig,
    LimitedDeployment,
    OptimizerBackend,
    PlannedBackend,
    RankBackend,
    SizedDeployment,
)
from cookbook.run import second_models
from cookbook.run.data import SPLITS, Split, SplitRows
from cookbook.run.folder import check_steps
from cookbook.run.identity import Identity
from cookbook.run.settings import Settings
from cookbook.sampling.environments import AgentEnvironment, EnvironmentConfig, EnvironmentRunner
from cookbook.sampling.environments import prompts as environment_prompts
from cookbook.sampling.environments.check import play, tiny_renderer, turn_tokens
from cookbook.sampling.rewards import RewardRunner, model_rewards
from cookbook.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("cookbook")

# Rows of a split that `check config` renders. A larger split is sampled: 5,000 long chats take seconds.
RENDERED_ROWS = 5000
# Rows of a split whose tokens are counted: this takes a tenth of a second, and percentiles are within a few per cent.
SAMPLED_ROWS = 500
PERCENTILE = 95
# Rows with the longest texts of a large split, which are rendered to find the longest prompt.
LONGEST_ROWS = 500

# Learning rates of full training that TRL 1.16 uses for models of hundreds of millions of parameters and more. An adapter takes
# ten times as much: Schulman et al. 2025, "LoRA Without Regret".
RATES = {
    "conversations": ("SFT", 2e-5),
    "preferences": ("preference training", 1e-6),
    "labels": ("preference training", 1e-6),
    "rollouts": ("RL", 1e-6),
}
# The rate of the Fireworks cookbook.
DISTILLATION = ("distillation", 1e-5)
OF_ADAPTERS = 10.0
FAR_ABOVE = 10.0
# A narrower model takes a larger rate: the shipped model of 0.6M parameters learns best at 1e-4 to 3e-3. Published recipes for
# models from about 100M parameters up use rates near those above, so smaller models get no warning.
SMALLEST_MODEL = 50_000_000

# A run of at most this many steps is a trial, whose evaluations may take longer than its training.
TRIAL_STEPS = 10
# Cost of a token that is only read, relative to one that is trained or sampled. Training takes a forward and a backward
# pass, three times a forward pass. Sampling makes one token at a time, and uses the hardware about three times worse.
READ = 1 / 3


def examine(typed: Settings, identity: Identity, folder: Path, done: int) -> tuple[SplitRows, Renderer | None, Shape | None]:
    """Make the checks that a run makes after its folder is open and before its first step, without loading weights.

    Return the rows, the renderer and the model's shape; both are None if the model is on a server, or on the hub and not in its
    cache here.

    Args:
        folder: of the run.
        done: finished steps of the checkpoint to resume from.

    Raises:
        CookbookError: the first problem, as the run would report it.
    """
    kind = typed.data_kind
    rows = SplitRows(typed, identity, hub=False)
    refusals = rows.refusals
    shape, renderer = None, None
    # A server may have models and tokenizers that are not on this machine.
    if isinstance(typed.backend, PlannedBackend):
        shape = shape_of(typed.model, recompute=bool(typed.backend.recomputes))
    if shape is not None:
        for subject, digest in tokenizer_digests(shape.tokenizer).items():
            identity.measured(subject, digest)
        renderer = Renderer(shape.tokenizer, shape.max_length, shape.vocabulary_size)
        if (teacher := second_models.shapes(typed).get("recipe.teacher")) is not None:
            compare_vocabularies(typed, shape.tokenizer, teacher.tokenizer)
    # An environment decides how its rows are used, and whether the reward is.
    check_signature(typed, rows.first)
    check_environment(typed, rows.first)
    if typed.env is not None:
        kind = None
    elif typed.reward is not None:
        _check_reward(typed, rows)
    if kind is not None and renderer is not None:
        # The shipped recipes read the splits in this order.
        held_out = rows.sample("eval", RENDERED_ROWS)
        survey(kind, held_out, renderer, typed.data, typed.eval.max_tokens, refusals, "eval.max_tokens")
        survey(kind, rows.sample("train", RENDERED_ROWS), renderer, typed.data, typed.rollout.max_tokens, refusals)
    refusals.warn(sum(rows.counts.values()) + len(refusals.found))
    typed.deployment = sized_deployment(typed, rows, renderer, shape, loaded=False)
    if (steps := planned_steps(typed, rows.counts.get("train"))) is not None:
        check_steps(folder, done, steps)
    return rows, renderer, shape


def sized_deployment(
    typed: Settings, rows: SplitRows, renderer: Renderer | None, shape: Shape | None, *, loaded: bool
) -> DeploymentConfig:
    """Return the deployment, with its size if it has servers whose size follows from the model and the data.

    Starting a server takes half a minute or more, so a size that is impossible is rejected before.

    Args:
        loaded: whether the trainer's weights are in memory already.

    Raises:
        ConfigError: a sequence is longer than ``deployment.max_length``, or the servers do not fit into the memory.
    """
    check_deployment(typed, rows, renderer)
    deployment, backend = typed.deployment, typed.backend
    if not isinstance(deployment, SizedDeployment):
        return deployment
    job = backend if isinstance(backend, JobBackend) else None
    gpus = backend.gpu_numbers() if isinstance(backend, RankBackend) else job.gpus if job is not None else ()
    longest = None if renderer is None else _longest_sample(typed, rows, renderer)
    # The memory of a trainer on another machine is not taken here.
    share = 0.0 if job is not None and not job.is_here else _device_share(typed)
    return deployment.sized(typed.model, shape, longest, gpus, loaded=loaded, trainer_share=share)


def _device_share(typed: Settings) -> float:
    """Return the weights, gradients and moments of the ranks on one device, relative to those of the whole model."""
    backend = typed.backend
    if not isinstance(backend, RankBackend | JobBackend) or backend.num_ranks == 1:
        return 1.0
    shards = 1 if backend.shard_of(typed.model) == "none" else backend.num_ranks
    has_gpus = bool(backend.gpu_numbers() if isinstance(backend, RankBackend) else backend.gpus)
    # All ranks of a machine without GPUs use the same memory.
    return (1 if has_gpus else backend.num_ranks) / shards


def _longest_sample(typed: Settings, rows: SplitRows, renderer: Renderer) -> int | None:
    """Return the tokens of the longest sequence that the run samples, prompt and completion; None if only the model limits it.

    The data limit no sequence of a stream, of which only the first rows are known, and none of a program or of an environment:
    a few episodes with made-up answers do not show its longest observation.
    """
    if typed.data_kind is None or rows.is_stream("train") or typed.env is not None:
        return None
    sums = [
        _longest_prompt(typed, rows, which, renderer) + completion
        for which, (_, completion) in _completion_keys(typed, rows).items()
    ]
    return max(sums, default=1)


def episode_lengths(typed: Settings, env: EnvironmentConfig, rows: Sequence[Row], renderer: Renderer) -> list[int]:
    """Return the tokens of the longest episode of each row: every turn has the longest completion and observation.

    Raises:
        ConfigError: the episodes are those of a program.
    """
    if isinstance(env, AgentEnvironment):
        raise ConfigError(
            "env: plan cannot know the calls of a program; train with recipe.steps=1 and read time/step_s and rollout/tokens"
        )
    openings = environment_prompts(env, rows, renderer, typed.data)
    opening, later = turn_tokens(env, openings, renderer)
    turns = opening + env.max_turns * typed.rollout.max_tokens + (env.max_turns - 1) * later
    lengths = [len(opening.tokens) + turns for opening in openings]
    return [length if renderer.max_length is None else min(length, renderer.max_length) for length in lengths]


def _completion_keys(typed: Settings, rows: SplitRows) -> dict[Split, tuple[str, int]]:
    """Return the key and the value of the longest completion, for each split whose prompts are sampled."""
    kind = typed.data_kind
    keys: dict[Split, tuple[str, int]] = {}
    if kind == "rollouts":
        keys["train"] = "rollout.max_tokens", typed.rollout.max_tokens
    if typed.env is None and rows.counts.get("eval") and (kind == "rollouts" or typed.eval.answers):
        keys["eval"] = "eval.max_tokens", typed.eval.max_tokens
    return keys


def check_deployment(typed: Settings, rows: SplitRows, renderer: Renderer | None) -> None:
    """Check that the deployment takes the longest prompt with its completion.

    Without ``renderer``, and for an environment, only the lengths of completions are compared.

    Raises:
        ConfigError: a sequence is longer than ``deployment.max_length``.
    """
    limit = typed.deployment.max_length if isinstance(typed.deployment, LimitedDeployment) else None
    kind = typed.data_kind
    if limit is None or kind is None:
        return
    for which, (key, completion) in _completion_keys(typed, rows).items():
        prompt = 1 if renderer is None or typed.env is not None else _longest_prompt(typed, rows, which, renderer)
        context = None if renderer is None else renderer.max_length
        # An evaluation samples shorter completions if the context is almost full.
        if which == "eval" and context is not None:
            completion = min(completion, context - prompt)
        if prompt + completion > limit:
            least = "" if prompt == 1 else f" and the longest prompt has {prompt:,}"
            raise ConfigError(
                f"deployment.max_length: completions may have {completion:,} tokens ({key}){least}, got {limit:,} for both; "
                f"raise deployment.max_length to {prompt + completion:,} or more, or lower {key}"
            )


def _longest_prompt(typed: Settings, rows: SplitRows, which: Split, renderer: Renderer) -> int:
    """Return the largest number of tokens before a completion; at least 1.

    Of a large split, a sample of the rows and the rows with the longest texts are rendered.
    """
    kind = typed.data_kind
    assert kind is not None
    chosen = [*rows.sample(which, RENDERED_ROWS), *rows.longest(which, RENDERED_ROWS, LONGEST_ROWS)]
    sample = survey(kind, chosen, renderer, typed.data, 0, RejectedRows(typed.data, collect=True))
    # Conversations and pairs have weights at the tokens of the answer.
    lengths = [
        int(np.argmax(sequence.weights != 0)) if sequence.num_trained else len(sequence.tokens) for sequence in sample.sequences
    ]
    return max(lengths, default=1)


def compare_vocabularies(typed: Settings, own: PreTrainedTokenizerBase, others: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the teacher's tokenizer has the same tokens."""
    if own.get_vocab() != others.get_vocab():
        raise ConfigError(
            f"recipe.teacher: {typed.recipe.teacher} has another tokenizer, so it cannot grade the model's tokens; choose a "
            "teacher with the tokenizer of model.name"
        )


def planned_steps(typed: Settings, num_rows: int | None) -> int | None:
    """Return the number of optimizer steps by the keys of the shipped recipes; None if the recipe has other keys.

    Raises:
        ConfigError: a batch size or a number of epochs below 1.
    """
    recipe = asdict(typed.recipe)
    size, epochs, steps = batch_size(recipe), recipe.get("epochs", 1), recipe.get("steps")
    if num_rows and size is not None and epochs is not None:
        key = "recipe.batch_size" if "batch_size" in recipe else "recipe.prompts_per_step"
        batches = Batches(range(num_rows), size, epochs, typed.seed, key=key)
        return len(batches) if steps is None and "epochs" in recipe else steps
    return steps


def batch_size(recipe: JsonObject) -> int | None:
    """Return the number of rows of a step by the keys of the shipped recipes; None if the recipe has other keys."""
    size: int | None = recipe.get("batch_size", recipe.get("prompts_per_step"))
    return size


def check_signature(typed: Settings, first: Mapping[Split, Sequence[Row]]) -> None:
    """Check the parameters of the reward's function against the columns of the first row, before anything is sampled.

    Raises:
        ConfigError: a parameter is unknown, or needs an environment.
    """
    rows = first.get("train") or first.get("eval")
    if typed.reward is None or not rows:
        return
    for judge in model_rewards(typed.reward).values():
        for row in (first.get("eval") or ())[:1]:
            judge.check_held_out(with_answer(row, typed.data).values)
    with contextlib.closing(RewardRunner(typed.reward)) as runner:
        runner.check(with_answer(rows[0], typed.data).values, has_environment=typed.env is not None)


def check_environment(typed: Settings, first: Mapping[Split, Sequence[Row]]) -> None:
    """Check that an environment without ``get_reward`` gives rewards, if no reward is chosen and the recipe needs one.

    Tools give none. A class with ``step`` plays one episode with made-up answers.

    Raises:
        ConfigError: there is no reward.
    """
    config, rows = typed.env, first.get("train") or first.get("eval")
    is_known = isinstance(config, AgentEnvironment) or (config is not None and config.contract.reward_arguments is not None)
    if config is None or is_known or typed.reward is not None or typed.has_teacher:
        return
    if not config.contract.tools:
        if not rows:
            return
        with contextlib.closing(EnvironmentRunner(replace(config, on_error="end"))) as runner:
            runner.warns = False
            episode = play(runner, tiny_renderer(), rows[0])
        # A failure has its own report, and a game that another player has ended may have no reward.
        if episode.failure or episode.reward is not None or not episode.num_turns:
            return
    raise ConfigError(
        "reward: the environment gives no reward and none is chosen; define get_reward, return (observation, reward) "
        "from every step, or choose one, for example reward=number"
    )


def _check_reward(typed: Settings, rows: SplitRows) -> None:
    """Reject a reward that cannot be constructed, or that rejects the first row with any completion.

    A reward with worker processes is not called: it may be slow, or call a model.
    """
    assert typed.reward is not None
    first = rows.first.get("eval") or rows.first.get("train")
    with contextlib.closing(RewardRunner(typed.reward)) as runner:
        if not first or typed.data.on_bad_row == "skip":
            return
        for part in runner.immediate():
            try:
                part.submit("", with_answer(first[0], typed.data))()
            except BadRowError:
                raise
            # The reward may reject an empty completion, which the run need not sample.
            except RolloutError:
                continue


@dataclass(frozen=True)
class Counted:
    """Token counts of a sample of one split. ``answers`` are the lengths of the rows' answers, with the end of the turn."""

    num_rows: int
    survey: Survey
    answers: Sequence[int]

    @property
    def mean_tokens(self) -> float:
        """Mean length of a sequence or prompt, in tokens."""
        return float(np.mean([len(sequence.tokens) for sequence in self.survey.sequences] or [0]))


def warn(typed: Settings, rows: SplitRows, renderer: Renderer | None) -> None:
    """Log a warning for each value that does not suit the others. Without ``renderer``, no tokens are counted."""
    kind = typed.data_kind
    if kind is None:
        return
    counted: dict[Split, Counted] = {}
    for which in SPLITS:
        # If columns or rows cannot be read, the run stops there next, or reports the rows that it leaves out.
        with contextlib.suppress(CookbookError):
            if renderer is not None and typed.env is None and (rows.counts.get(which) or rows.is_stream(which)):
                counted[which] = _counted(typed, kind, rows, which, renderer)
    lines = [*_batch(typed, rows), *_learning_rate(typed, kind), *_completions(typed, kind, counted)]
    for line in [*lines, *_evaluation(typed, kind, counted)]:
        log.warning("%s", line)


def _counted(typed: Settings, kind: str, rows: SplitRows, which: Split, renderer: Renderer) -> Counted:
    sample = rows.sample(which, SAMPLED_ROWS)
    counts = survey(kind, sample, renderer, typed.data, 0, RejectedRows(typed.data, collect=True))
    texts = [text for row in sample if (text := answer_text(row, typed.data)) is not None]
    tokens = renderer.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return Counted(rows.counts.get(which, len(sample)), counts, [len(prompt) + 1 for prompt in tokens])


def _batch(typed: Settings, rows: SplitRows) -> Iterator[str]:
    recipe, count = asdict(typed.recipe), rows.counts.get("train")
    size = batch_size(recipe)
    if count and size and count < size:
        key = "batch_size" if "batch_size" in recipe else "prompts_per_step"
        noun = "row" if count == 1 else "rows"
        yield (
            f"recipe.{key}={size}: the data have {count:,} {noun} to train on, so no step gets more than {count:,}; add rows, "
            f"or lower recipe.{key}"
        )


def _learning_rate(typed: Settings, kind: str) -> Iterator[str]:
    training, rate = DISTILLATION if typed.has_teacher else RATES[kind]
    adapter = is_adapter(typed.model)
    rate *= OF_ADAPTERS if adapter else 1.0
    lr, usual = typed.optim.lr, f"{rate:g}".replace("e-0", "e-")
    if isinstance(typed.backend, OptimizerBackend) and typed.backend.optimizer == Adafactor.name:
        # Adafactor's rate is relative to the size of the weights. The rate that the shipped recipes set for AdamW is a mistake.
        if math.isclose(lr, rate):
            yield (
                f"optim.lr={lr:g}: the recipe's rate for AdamW, and Adafactor's rate is the largest relative change of the "
                "weights per step, so the model would hardly learn; set optim.lr=1e-3, as conf/optim/adafactor.yaml recommends"
            )
        return
    # Random weights take far larger rates.
    if typed.model.random or lr <= rate * FAR_ABOVE * (1 + 1e-9):
        return
    size = num_parameters(typed.model)
    if size is None or size >= SMALLEST_MODEL:
        what = "an adapter" if adapter else "all parameters"
        yield (
            f"optim.lr={lr:g}: {lr / rate:,.0f} times the {usual} that is usual for {training} of {what}, so the model may "
            f"lose what it knows; set optim.lr={usual}, and raise it only as far as the evaluation improves"
        )


def _completions(typed: Settings, kind: str, counted: dict[Split, Counted]) -> Iterator[str]:
    """Yield a warning for each limit of a completion that is below the length of the data's answers."""
    lost = "earn no reward" if typed.reward is not None else "are left out of eval/accuracy"
    cases: list[tuple[Split, str, int, str]] = []
    if "eval" in counted and _judges(typed, kind, counted["eval"]):
        cases.append(("eval", "eval.max_tokens", typed.eval.max_tokens, lost))
    if kind == "rollouts":
        cases.insert(0, ("train", "rollout.max_tokens", typed.rollout.max_tokens, "earn no reward"))
    for which, key, limit, effect in cases:
        split = counted.get(which)
        if split is None or not split.answers:
            continue
        needed = int(np.percentile(split.answers, PERCENTILE, method="higher"))
        if needed > limit:
            sampled = split.survey.num_rows
            basis = f" (in a sample of {sampled:,} of {split.num_rows:,} rows)" if sampled < split.num_rows else ""
            yield (
                f"{key}={limit}: {PERCENTILE}% of the data's own answers have up to {needed:,} tokens{basis}, and longer "
                f"ones {effect}; set {key}={needed} or more"
            )


def _evaluation(typed: Settings, kind: str, counted: dict[Split, Counted]) -> Iterator[str]:
    """Yield a warning if all evaluations take longer than the training, estimated by tokens."""
    train, held_out = counted.get("train"), counted.get("eval")
    if train is None or held_out is None:
        return
    recipe, every = asdict(typed.recipe), typed.eval.every
    steps, size = planned_steps(typed, train.num_rows), batch_size(recipe)
    if steps is None or size is None or steps <= TRIAL_STEPS:
        return
    times = 1 + (-(-steps // every) if every else 1)
    training = steps * min(size, train.num_rows) * _step_work(typed, kind, train, recipe.get("group_size") or 1)
    ratio = times * _evaluation_work(typed, kind, held_out) / max(training, 1.0)
    if ratio > 1:
        yield (
            f"eval.every={'null' if every is None else every}: {times} evaluations of {held_out.num_rows:,} rows take about "
            f"{ratio:.1f} times as long as the training itself (an estimate by tokens); raise eval.every, or lower eval.limit "
            "or eval.max_tokens"
        )


def _step_work(typed: Settings, kind: str, train: Counted, group_size: int) -> float:
    """Return the work of training on one row, in trained tokens."""
    if kind != "rollouts":
        return train.mean_tokens * (2 if kind in ("preferences", "labels") else 1)
    completion = typed.rollout.max_tokens
    sampling = READ * train.mean_tokens + completion
    return group_size * (sampling + train.mean_tokens + completion)


def _judges(typed: Settings, kind: str, held_out: Counted) -> bool:
    """Whether an evaluation samples completions."""
    if kind == "rollouts":
        return True
    return bool(typed.eval.answers) if typed.reward is not None else typed.eval.compares(held_out.answers)


def _evaluation_work(typed: Settings, kind: str, held_out: Counted) -> float:
    """Return the work of one evaluation, in trained tokens: reading the rows for their loss, and sampling completions."""
    limit, mean = typed.eval.max_tokens, held_out.mean_tokens
    completions = 1 + typed.eval.num_drawn
    if kind == "rollouts":
        return held_out.num_rows * completions * (READ * mean + limit)
    answers = [length for length in held_out.answers if typed.reward is not None or length <= limit]
    share = _judges(typed, kind, held_out) * len(answers) / max(held_out.survey.num_rows, 1)
    sampled = min(float(np.mean(answers)), limit) if answers else 0.0
    sides = 2 if kind in ("preferences", "labels") else 1
    return held_out.num_rows * (sides * READ * mean + share * completions * (READ * mean + sampled))
