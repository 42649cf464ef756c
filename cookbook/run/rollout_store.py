"""``rollouts.jsonl.gz``: the rollouts or rows of the run's steps with their tokens, for ``cookbook view``.

A file has one compressed text per step (:mod:`cookbook.run.stored_steps`). A text is JSON lines. The first has the step,
``pieces`` (the text of every token id that occurs) and ``special`` (the ids that are no part of a text). Every other line is a
group: a prompt with its trajectories, a row, or a pair of answers. A group has ``row``, ``question``, ``prompt`` (token ids)
and ``trajectories``; a trajectory has ``branches`` of segments. A segment has ``author``, ``tokens`` (those of the prompt if
they are left out), and ``text`` if it is not that of its tokens.

Tokens of the model and of the data have lists of numbers, with 4 decimals; a list of one number holds for all tokens:

- ``logprobs``: log-probabilities of the sampler, or of the trainer for tokens of the data;
- ``shift``: the trainer's log-probability minus the sampler's, of datums that were trained;
- ``advantage``, of datums that were trained.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import struct
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cookbook.data import Renderer, RowDatum
from cookbook.futures import Future
from cookbook.run.hooks import writing_to
from cookbook.run.stored_steps import FIELDS, HEADER, ROLLOUTS, START, StoredSteps, blocks
from cookbook.sampling.rollouts import RolloutGroup
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.types import Array, Datum, ForwardBackwardOutput, TensorData
from cookbook.utils import files

log = logging.getLogger("cookbook")

# Decimals of log-probabilities, their differences and advantages.
DECIMALS = 4
# Of zlib. Level 6 needs twice the time and saves 4% of the bytes.
LEVEL = 4
# Encoder of a line of the file.
LINES = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Counts of a trajectory that are stored unless they are 0.
COUNTS = ("calls", "malformed_calls", "failed_calls")

Line: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class TrainedDatum:
    """A datum of the step, and the trainer's log-probabilities of its targets; None if the trainer did not return them."""

    datum: Datum
    logprobs: Array | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.datum.model_input.tokens, int(self.datum.loss_fn_inputs["target_tokens"].array[-1]))

    def values(self, key: str) -> Array | None:
        """Return an input of the loss that has one number per token."""
        tensor = self.datum.loss_fn_inputs.get(key)
        return tensor.array if tensor is not None and tensor.array.ndim == 1 else None


class RolloutStore:
    """Collects what a step samples and trains on, and writes it when the step is finished.

    Args:
        max_mb: megabytes of the file, see :class:`StepFile`; None stores no step.
        pairs: whether two consecutive datums are the chosen and the rejected answer of one row.
    """

    def __init__(self, out: Path, max_mb: float | None, renderer: Renderer, *, pairs: bool) -> None:
        self._file = StepFile(out / ROLLOUTS, int((max_mb or 0) * 1e6))
        self._pieces = TokenPieces(renderer)
        self._pairs = pairs
        self._groups: list[RolloutGroup] = []
        self._passes: list[tuple[Sequence[Datum], Future[ForwardBackwardOutput]]] = []
        self._numbers = RoundedNumbers()

    def clear(self) -> None:
        """Forget the groups and datums since the last finished step, which the recipe has not updated with."""
        self._groups, self._passes, self._numbers = [], [], RoundedNumbers()

    def sampled(self, groups: Sequence[RolloutGroup]) -> None:
        self._groups += groups

    def trained(self, data: Sequence[Datum], output: Future[ForwardBackwardOutput]) -> None:
        self._passes.append((data, output))

    def write(self, step: int) -> None:
        """Write the finished step. Raise ConfigError if the disk refuses."""
        if self._file.max_bytes:
            lines = self._lines()
            self._numbers.round()
            head = {"step": step, **self._pieces.head(lines)}
            text = "\n".join([*map(LINES.encode, (head, *lines)), ""])
            with writing_to(self._file.path, "free disk space and run the same command to resume"):
                self._file.append(step, text.encode())
        self.clear()

    def keep_until(self, step: int) -> None:
        """Drop later steps, which the resumed run repeats."""
        with writing_to(self._file.path):
            self._file.keep_until(step)

    def _lines(self) -> list[Line]:
        trained = [datum for data, output in self._passes for datum in _trained_datums(data, output)]
        if not self._groups:
            return self._rows(trained)
        waiting: dict[tuple[int, ...], deque[TrainedDatum]] = defaultdict(deque)
        for datum in trained:
            waiting[datum.tokens].append(datum)
        lines = [self._group(group, waiting) for group in self._groups]
        # Datums that the recipe has made of other data.
        return lines + self._rows(list(itertools.chain.from_iterable(waiting.values())))

    def _group(self, group: RolloutGroup, waiting: Mapping[tuple[int, ...], deque[TrainedDatum]]) -> Line:
        trajectories: list[Line] = []
        for index, trajectory in enumerate(group.trajectories):
            values: Line = {}
            if group.rewards:
                values["reward"] = _json_number(group.rewards[index])
            values["ended"] = trajectory.ended
            if group.parts and group.parts[index]:
                parts = group.parts[index]
                values["parts"] = {name: None if part is None else _json_number(part) for name, part in parts.items()}
            for name in COUNTS:
                if count := getattr(trajectory, name):
                    values[name] = count
            values["branches"] = self._branches(trajectory, group.prompt.tokens, waiting)
            trajectories.append(values)
        prompt = group.prompt
        line: Line = {"row": prompt.row.where, "question": prompt.question, "prompt": prompt.tokens}
        # The text of most prompts follows from the texts of its tokens, which the step stores once.
        if not self._pieces.spell(prompt.tokens, prompt.text):
            line["prompt_text"] = prompt.text
        line["trajectories"] = trajectories
        return line

    def _branches(
        self, trajectory: Trajectory, prompt: Sequence[int], waiting: Mapping[tuple[int, ...], deque[TrainedDatum]]
    ) -> list[list[Line]]:
        branches = []
        for branch in trajectory.branches:
            tokens = tuple(itertools.chain.from_iterable([segment.tokens for segment in branch]))
            queue = waiting.get(tokens)
            trained = queue.popleft() if queue else None
            lines = []
            start = 0
            for segment in branch:
                lines.append(self._segment(segment, prompt, trained, start))
                start += len(segment.tokens)
            branches.append(lines)
        return branches

    def _segment(self, segment: Segment, prompt: Sequence[int], trained: TrainedDatum | None, start: int) -> Line:
        """Return the line of a segment whose first token has the index ``start`` in its branch."""
        if segment.author == "prompt" and segment.tokens == prompt:
            return {"author": "prompt"}
        line: Line = {"author": segment.author, "tokens": segment.tokens}
        if not self._pieces.spell(segment.tokens, segment.text):
            line["text"] = segment.text
        if segment.author == "model":
            line |= {"stop": segment.stop_reason, "step": segment.step, "logprobs": self._numbers.add(segment.logprobs)}
            if trained is not None:
                # Position t of a datum predicts token t + 1.
                span = slice(start - 1, start - 1 + len(segment.tokens))
                line |= self._trained(trained, span, segment.logprobs)
        return line

    def _trained(self, trained: TrainedDatum, span: slice, sampled: Sequence[float]) -> Line:
        """Return the entries of sampled tokens that were trained on; ``span`` is their place in the datum."""
        line: Line = {}
        if (advantages := trained.values("advantages")) is not None:
            line["advantage"] = self._numbers.add(advantages[span].tolist())
        if trained.logprobs is not None and trained.logprobs.ndim == 1:
            # The sampler's numbers are float64.
            line["shift"] = self._numbers.add((trained.logprobs[span].astype(np.float64) - sampled).tolist())
        return line

    def _rows(self, trained: Sequence[TrainedDatum]) -> list[Line]:
        """Return the lines of datums that were not sampled: one per row, or per pair of answers."""
        names = ("chosen", "rejected") if self._pairs else ("",)
        lines: list[Line] = []
        for index in range(0, len(trained), len(names)):
            first = trained[index].datum
            where, question = (first.where, first.question) if isinstance(first, RowDatum) else ("", "")
            trajectories = []
            for datum, name in zip(trained[index : index + len(names)], names, strict=False):
                side: Line = {"side": name} if name else {}
                trajectories.append(side | {"branches": [self._row(datum)]})
            lines.append({"row": where, "question": question, "prompt": [], "trajectories": trajectories})
        return lines

    def _row(self, trained: TrainedDatum) -> list[Line]:
        """Return the segments of a datum: tokens with a weight, and tokens without."""
        tokens, weights = trained.tokens, trained.values("weights")
        has_weight = [True] * (len(tokens) - 1) if weights is None else (weights != 0).tolist()
        # Nothing predicts the first token.
        has_weight = [False, *has_weight]
        segments: list[Line] = []
        for is_data, indices in itertools.groupby(range(len(tokens)), has_weight.__getitem__):
            start, *following = indices
            own = tokens[start : start + 1 + len(following)]
            segment: Line = {"author": "data" if is_data else "context", "tokens": own}
            text = self._pieces.decode(own)
            if not self._pieces.spell(own, text):
                segment["text"] = text
            if is_data and trained.logprobs is not None and trained.logprobs.ndim == 1:
                segment["logprobs"] = self._numbers.add(trained.logprobs[start - 1 : start - 1 + len(own)].tolist())
            segments.append(segment)
        return segments


class TokenPieces:
    """Texts of single tokens. A token is decoded after another: alone, some tokenizers drop the space that it begins with."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._special = set(self._tokenizer.all_special_ids)
        # With and without the texts of special tokens.
        self._texts: dict[int, str] = {}
        self._visible: dict[int, str] = {}
        self._anchor: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"][:1]
        self._before = len(self.decode(self._anchor))

    def head(self, lines: Iterable[Line]) -> Line:
        """Return the entries of a step's first line: the text of every token in ``lines``, and which tokens are special."""
        used = sorted(_token_ids(lines))
        pieces = {str(token): self.text(token) for token in used}
        return {"pieces": pieces, "special": [token for token in used if token in self._special]}

    def text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.decode([*self._anchor, token])[self._before :]
            self._visible[token] = "" if token in self._special else self._texts[token]
        return self._texts[token]

    def spell(self, tokens: Sequence[int], text: str) -> bool:
        """Whether the texts of the tokens, with or without special tokens, add up to ``text``.

        They do not if several tokens spell a character, or if the tokenizer normalizes.
        """
        for token in set(tokens).difference(self._texts):
            self.text(token)
        visible = "".join([self._visible[token] for token in tokens])
        return text == visible or text == "".join([self._texts[token] for token in tokens])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


def _token_ids(lines: Iterable[Line]) -> set[int]:
    tokens: set[int] = set()
    for line in lines:
        tokens.update(line["prompt"])
        for trajectory in line["trajectories"]:
            for segment in itertools.chain.from_iterable(trajectory["branches"]):
                tokens.update(segment.get("tokens", ()))
    return tokens


def _trained_datums(data: Sequence[Datum], output: Future[ForwardBackwardOutput]) -> list[TrainedDatum]:
    """Return the datums of a pass with their results, if it has any. Never waits for the trainer."""
    is_finished = output.done() and output.failure() is None
    rows: Sequence[Mapping[str, TensorData]] = output.result().loss_fn_outputs if is_finished else []
    if len(rows) != len(data):
        return [TrainedDatum(datum, None) for datum in data]
    logprobs = [row.get("logprobs") for row in rows]
    return [TrainedDatum(datum, None if own is None else own.array) for datum, own in zip(data, logprobs, strict=True)]


def _json_number(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return float(value) if math.isfinite(value) else None


class RoundedNumbers:
    """Lists of numbers that are rounded together: one call of numpy costs less than one call for each number or list."""

    def __init__(self) -> None:
        self._lists: list[list[float]] = []

    def add(self, values: Sequence[float]) -> list[float]:
        """Return a copy of the values, which :meth:`round` will round."""
        self._lists.append(list(values))
        return self._lists[-1]

    def round(self) -> None:
        """Round all lists. Equal numbers become one."""
        exact = np.fromiter(itertools.chain.from_iterable(self._lists), dtype=np.float64)
        # Adding 0 turns -0.0, which needs more space, into 0.0.
        rounded: list[Any] = (np.round(exact, DECIMALS) + 0.0).tolist()
        for index in np.flatnonzero(~np.isfinite(exact)).tolist():
            # JSON has neither NaN nor infinity.
            rounded[index] = None
        start = 0
        for values in self._lists:
            end = start + len(values)
            own = rounded[start:end]
            values[:] = own[:1] if len(set(own)) == 1 else own
            start = end


class StepFile:
    """Compressed texts by step, at most ``max_bytes`` of them; 0 stores no text.

    If the file is full, the oldest steps are deleted until it is half full. A single step that is larger than the file may
    become is left out.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        # A run reports only the first loss of steps: every later step may lose some.
        self._has_warned = False

    def append(self, step: int, text: bytes) -> None:
        """Add the text of a step, which is later than all stored steps. Raises OSError."""
        member = _member(step, text)
        if len(member) > self.max_bytes:
            self._warn(f"step {step} alone needs {len(member) / 1e6:.1f} MB, so steps of this size are not stored")
            return
        if self._size() + len(member) > self.max_bytes:
            self._warn("full, so the oldest steps are deleted")
            self._delete_oldest(min(self.max_bytes // 2, self.max_bytes - len(member)))
        with self.path.open("ab") as file:
            file.write(member)

    def keep_until(self, step: int) -> None:
        """Remove later steps, and the bytes after the last whole step, which a kill has cut short. Raises OSError."""
        if not self.path.exists():
            return
        stored = blocks(self.path)
        readable = stored[-1].end if stored else 0
        if readable < self._size():
            log.info("%s: removed %d bytes after step %d", self.path, self._size() - readable, stored[-1].step if stored else 0)
        end = max((block.end for block in stored if block.step <= step), default=0)
        if end < self._size():
            os.truncate(self.path, end)

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _delete_oldest(self, max_bytes: int) -> None:
        """Keep the newest steps, at most ``max_bytes`` of them."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with StoredSteps(self.path) as stored, temporary.open("wb") as file:
            end = max((block.end for block in stored.blocks.values()), default=0)
            for step in [block.step for block in stored.blocks.values() if end - block.start <= max_bytes]:
                file.write(stored.member(step) or b"")
        files.sync(temporary)
        temporary.replace(self.path)

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            log.warning("%s: %s; raise rollout.store_mb (now %g)", self.path, problem, self.max_bytes / 1e6)
            self._has_warned = True


def _member(step: int, content: bytes) -> bytes:
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(content) + deflate.flush()
    end = struct.pack("<II", zlib.crc32(content), len(content) & 0xFFFFFFFF)
    return START + FIELDS.pack(step, HEADER + len(body) + len(end)) + body + end
