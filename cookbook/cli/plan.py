"""``cookbook plan``: estimate the memory and arithmetic of a step without loading weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from cookbook.check.dataset import survey
from cookbook.cli.check_config import precision
from cookbook.cli.check_data import context
from cookbook.data import Renderer, load_rows
from cookbook.engine.batch.plan import CPU_PASS_TOKENS, WORTH_SHARING
from cookbook.engine.estimate import Estimate, estimate
from cookbook.engine.memory import free_bytes, shortage_of
from cookbook.engine.model import AUTO, load_tokenizer, with_dtype
from cookbook.engine.precision import DEFAULT
from cookbook.engine.shape import Shape, shape_of
from cookbook.errors import ConfigError, DataError
from cookbook.jobs.backend import JobBackend
from cookbook.losses.base import Scope
from cookbook.protocols import (
    MAX_BATCH_TOKENS,
    PlannedBackend,
    PrecisionBackend,
    RankBackend,
    SeparateDeployment,
    SizedDeployment,
)
from cookbook.run import second_models
from cookbook.run.data import SplitRows
from cookbook.run.folder import plain
from cookbook.run.identity import Identity
from cookbook.run.preflight import RENDERED_ROWS, episode_lengths, sized_deployment
from cookbook.run.settings import Settings, settings
from cookbook.sampling.environments import numbered_rows
from cookbook.utils import tables

if TYPE_CHECKING:
    import torch

# Resident memory besides the weights, with the CPU build of torch and a model of any size: 383 to 399 MB in
# eight cases of benchmarks/plan.py, of which 115 MB are pages of libraries.
PYTHON = 0.39e9
# What a whole run of the command adds (data, evaluation, records), and what PEFT adds with an adapter: measured with SmolLM2.
COMMAND, PEFT = 0.1e9, 0.09e9

HELD = "each holds {} of weights, twice, gradients and optimizer state"
NOT_RECOMPUTED = "no; backend.activation_checkpointing=true saves memory, and costs time"


@dataclass(frozen=True)
class StepShape:
    """Sequences of the step with the longest rows: their number, the tokens of the longest, the tokens of all.

    ``computed``: tokens to compute, less than ``tokens`` if the completions of a prompt share the prompt.
    ``basis``: text for the rows that were looked at, if not all; begins with a space.
    """

    sequences: int
    longest: int
    tokens: int
    computed: int
    basis: str


def run(cfg: DictConfig, overrides: list[str]) -> None:
    """Print the estimate.

    Raises:
        CookbookError: the configuration is wrong, the data cannot be read, or the model is unknown.
    """
    typed = settings(cfg)
    job = typed.backend if isinstance(typed.backend, JobBackend) else None
    backend = typed.backend if job is None else job.engine
    ranks = backend.num_ranks if isinstance(backend, RankBackend) else 1
    if not isinstance(backend, PlannedBackend):
        raise ConfigError("backend: plan estimates the embedded trainer's work; use backend=local")
    shape = _shape(typed, cfg.recipe.name)
    # The memory of another machine is not known here.
    device = backend.torch_device() if job is None or job.is_here else None
    cpu = device.type == "cpu" if device is not None else not (job and job.asks_for_gpus)
    budget = min(backend.micro_batch_tokens, CPU_PASS_TOKENS) if cpu else backend.micro_batch_tokens
    # The ranks divide the sequences of a step.
    step_tokens = -(-shape.computed // ranks)
    pass_tokens = min(max(budget, shape.longest), max(step_tokens, shape.longest))
    rows = max(1, round(pass_tokens / (shape.computed / shape.sequences)))
    interleaved = typed.loss.scope in (Scope.token, Scope.sequence)
    of_step = functools.partial(
        estimate,
        typed.model,
        rows,
        round(pass_tokens / rows),
        step_tokens=max(step_tokens, pass_tokens),
        interleaved=interleaved,
        retain_bytes=int(backend.retain_gb * (1 << 30)),
        reference=typed.loss.needs_reference and not typed.has_teacher,
        cpu=cpu,
        num_copies=_num_copies(typed),
        sampled=_sampled(typed, shape),
        optimizer=backend.optimizer,
        precision=backend.precision if isinstance(backend, PrecisionBackend) else DEFAULT,
    )
    frozen = second_models.shapes(typed).values()
    needs = _with_frozen(of_step(checkpointing=bool(backend.recomputes)), frozen)
    recomputed = "yes: as configured" if backend.recomputes else NOT_RECOMPUTED
    if backend.recomputes is None and needs.recomputable:
        if device is None:
            recomputed = "if memory is short on the trainer's machine; this estimate keeps them"
        elif why := _shortage(needs, pass_tokens, device):
            needs, recomputed = _with_frozen(of_step(checkpointing=True), frozen), f"yes: {why}"
    if device is None:
        place = (
            "machine",
            f"{'a CPU' if cpu else 'a GPU'} of the job; its free memory and its instructions are not known here",
        )
    else:
        place = ("precision", precision(backend, typed.model.dtype))
    offloads = bool(getattr(backend, "optimizer_offload", False)) and not cpu
    estimated = _lines(needs, shape, backend.optimizer, recomputed, process_bytes=_process_bytes(typed), offloads=offloads)
    lines = [*estimated, place, *_ranks(needs, typed), *_deployment(cfg, typed), _disk(needs, typed)]
    tables.facts(lines, table=sys.stdout.isatty())


def _deployment(cfg: DictConfig, typed: Settings) -> list[tuple[str, str]]:
    """Describe the servers that sample, with their memory; nothing if the trainer samples.

    Raises:
        ConfigError: the servers do not fit into the memory that the trainer leaves.
    """
    if not isinstance(typed.deployment, SizedDeployment):
        return []
    identity = Identity(plain(cfg), typed.module.Config, dict, force=True)
    rows = SplitRows(typed, identity, hub=False)
    tokenizer = load_tokenizer(typed.model)
    renderer = Renderer(tokenizer, context(typed.model, tokenizer))
    deployment = sized_deployment(typed, rows, renderer, shape_of(with_dtype(typed.model)), loaded=False)
    assert isinstance(deployment, SizedDeployment)
    return [("deployment", deployment.size_text)]


def _with_frozen(needs: Estimate, frozen: Collection[Shape]) -> Estimate:
    """Return the estimate with the weights of a teacher or of reward models beside those of the reference."""
    return replace(needs, reference=needs.reference + sum(shape.weight_bytes for shape in frozen))


def _shortage(needs: Estimate, pass_tokens: int, device: torch.device) -> str | None:
    """Return why the engine would not keep the activations of a pass of ``pass_tokens``; None if it would keep them.

    The answer depends on the memory that is free now.
    """
    free = max(free_bytes(device) - needs.weights, 0)
    return shortage_of(needs.saved_per_token * pass_tokens, pass_tokens, needs.gradients + needs.moments, free)


def _shape(typed: Settings, name: str) -> StepShape:
    """Return the shape of a step, from the recipe's keys (under the names of the packaged recipes) and the longest rows."""
    kind = typed.data_kind
    recipe = asdict(typed.recipe)
    count = recipe.get("batch_size") or recipe.get("prompts_per_step")
    if kind is None or count is None:
        raise ConfigError(f"recipes/{name}.py: plan needs DATA, and batch_size or prompts_per_step in its Config")
    tokenizer = load_tokenizer(typed.model)
    renderer = Renderer(tokenizer, context(typed.model, tokenizer))
    data, basis = typed.data, ""
    # A stream may have more rows than memory holds.
    if data.streaming:
        data = replace(data, limit=min(data.limit or RENDERED_ROWS, RENDERED_ROWS))
    if typed.env is not None:
        if typed.numbered is None:
            rows = load_rows(data, "train", typed.seed, typed.eval.limit)
        else:
            rows = numbered_rows(typed.env, "train", typed.seed, None)
        lengths = episode_lengths(typed, typed.env, rows, renderer)
    else:
        rows = load_rows(data, "train", typed.seed, typed.eval.limit)
        counts = survey(kind, rows, renderer, typed.data, typed.rollout.max_tokens)
        completion = typed.rollout.max_tokens if kind == "rollouts" else 0
        if not counts.sequences:
            raise DataError(f"data: no row can be used, so there is no step to plan; the first: {counts.refused[0].reason}")
        lengths = [len(sequence.tokens) + completion for sequence in counts.sequences]
        basis = f" of the first {len(rows):,} rows" if data.streaming else ""
    lengths.sort(reverse=True)
    # Pairs have two sides, and every labelled answer also stands after another prompt.
    count *= 2 if kind in ("preferences", "labels") else 1
    group, longest = recipe.get("group_size") or 1, lengths[:count]
    # Only the longest completion is the same for all rows; that of an episode has several parts.
    completion = typed.rollout.max_tokens if kind == "rollouts" and typed.env is None and _shares(typed) else 0
    computed = sum(_computed(length, completion, group) for length in longest)
    return StepShape(group * len(longest), longest[0], group * sum(longest), computed, basis)


def _sampled(typed: Settings, shape: StepShape) -> list[tuple[int, int]]:
    """Return the batches that the embedded sampler decodes, of rollouts and of evaluations: rows, and tokens of a row.

    Nothing if a separate server samples, or no completion is sampled.
    """
    if typed.data_kind != "rollouts" or _has_own_weights(typed):
        return []
    prompt = shape.longest - typed.rollout.max_tokens if typed.env is None else shape.longest
    batches = [(shape.sequences, shape.longest)]
    if typed.eval.every is not None:
        held_out = typed.eval.limit or shape.sequences
        if typed.env is None:
            held_out = min(held_out, len(load_rows(typed.data, "eval", typed.seed, typed.eval.limit)))
        batches.append((held_out, prompt + (typed.eval.max_tokens if typed.env is None else 0)))
    return [(min(rows, max(1, MAX_BATCH_TOKENS // tokens)), tokens) for rows, tokens in batches]


def _num_copies(typed: Settings) -> int:
    """Return the copies of the trained weights that the embedded sampler uses with ``rollout.ahead``, at most at a time.

    The batches that are sampled have a copy each. The recipe keeps the last one until it has received the next.
    """
    return 0 if not typed.rollout.ahead or _has_own_weights(typed) else max(typed.rollout.ahead, 2)


def _has_own_weights(typed: Settings) -> bool:
    """Whether a server with weights of its own samples."""
    return isinstance(typed.deployment, SeparateDeployment) and typed.deployment.has_own_weights


def _process_bytes(typed: Settings) -> float:
    """Return the memory of a process besides tensors: Python, torch and what a run imports."""
    return PYTHON + COMMAND + (PEFT if typed.model.lora_rank else 0)


def _shares(typed: Settings) -> bool:
    """Whether completions of one prompt share the prompt in a pass, as far as the configuration says."""
    backend = typed.backend.engine if isinstance(typed.backend, JobBackend) else typed.backend
    return bool(getattr(backend, "shared_prompts", False)) and getattr(backend, "packing", "") != "padded"


def _computed(length: int, completion: int, group: int) -> int:
    """Return the tokens to compute for ``group`` sequences of ``length`` tokens, of which ``completion`` are their own."""
    once = length + (group - 1) * completion
    return once if completion and group * length >= WORTH_SHARING * once else group * length


def _lines(
    needs: Estimate, shape: StepShape, optimizer: str, recomputed: str, *, process_bytes: float, offloads: bool
) -> list[tuple[str, str]]:
    """``recomputed``: whether activations are recomputed in the backward pass, and why."""
    most = f", at most{shape.basis}"
    lines = [
        ("parameters", f"{needs.parameters:,}, of which {needs.trained:,} are trained"),
        ("step", f"{shape.sequences:,} sequences of up to {shape.longest:,} tokens, {shape.tokens:,} in total{most}"),
        ("largest pass", f"{needs.pass_tokens:,} tokens; backend.micro_batch_tokens lowers it"),
        ("weights", _size(needs.weights)),
        ("gradients", _size(needs.gradients)),
        ("optimizer", f"{_size(needs.moments)}, {optimizer}{', in host memory' if offloads else ''}"),
        ("reference", f"{_size(needs.reference)}, frozen" if needs.reference else ""),
        ("copies", f"{_size(needs.copies)}, weights to sample from (rollout.ahead)" if needs.copies else ""),
        ("activations", f"{_size(needs.temporary)} at the worst moment of the backward pass"),
        ("recomputed", recomputed),
        ("sampling", f"{_size(needs.sampling)} of keys, values and logits" if needs.sampling else ""),
        ("allocator", f"{_size(needs.allocator)} of freed blocks that the C library keeps"),
        (
            "memory",
            f"{_size(needs.peak - needs.moments * offloads)} at the peak, plus {_size(process_bytes)} of Python and torch",
        ),
        (
            "arithmetic",
            f"{needs.flops_per_token * shape.computed:.3g} floating-point operations per step, forward and backward",
        ),
    ]
    return [(subject, sentence) for subject, sentence in lines if sentence]


def _disk(needs: Estimate, typed: Settings) -> tuple[str, str]:
    """Describe the size of the run's checkpoints on the disk."""
    # A checkpoint of an adapter leaves out the base weights.
    share = needs.trained / needs.parameters if typed.model.lora_rank else 1.0
    weights, saving = needs.weights * share, typed.checkpoint
    size = f"{_size(weights + needs.moments)} each on the disk, of which {_size(needs.moments)} are optimizer state"
    number = "all are kept" if saving.keep is None else f"the newest {saving.keep} are kept"
    if saving.final_state:
        return "checkpoints", f"{size}; {number}; checkpoint.final_state=false leaves the state out of the last one"
    return "checkpoints", f"{size}; {number}; the last one holds {_size(weights)} of weights only"


def _ranks(needs: Estimate, typed: Settings) -> list[tuple[str, str]]:
    """Describe what a rank holds besides its activations, which are those of its own passes; nothing for a single process."""
    backend = typed.backend
    if not isinstance(backend, RankBackend | JobBackend) or backend.num_ranks == 1:
        return []
    # The server of the ranks keeps the base weights.
    state = 2 * needs.weights + needs.gradients + needs.moments + needs.reference
    nodes = backend.nodes if isinstance(backend, JobBackend) else 1
    per_node = backend.num_ranks // nodes

    def shards(shard: str) -> str:
        # With `node`, every node has a whole copy.
        where, share = (f", {per_node} on each node", per_node) if shard == "node" and nodes > 1 else ("", backend.num_ranks)
        return f"{backend.num_ranks} shards{where}; {HELD.format(_size(state / share))}, and one layer"

    if (shard := backend.shard_of(typed.model)) != "none":
        return [("ranks", shards(shard))]
    replicas = f"{backend.num_ranks} replicas; {HELD.format(_size(state))}"
    if isinstance(backend, RankBackend):
        # Each rank also keeps the base weights, and the process of the run drives them.
        process = _process_bytes(typed)
        every = backend.num_ranks * (needs.peak + needs.weights + process) + process
        replicas += f"; {_size(every)} in all processes together"
    if isinstance(backend, JobBackend) and backend.asks_for_gpus and backend.backend_node.get("shard", AUTO) == AUTO:
        replicas += f". If a replica fills over half of a GPU: {shards('node')}"
    return [("ranks", replicas)]


def _size(count: float) -> str:
    """Return a readable number of bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
