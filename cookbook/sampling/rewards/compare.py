"""Reward of a preference model: the probability that a completion is better than the others of its group."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cookbook.data import Renderer, comparisons
from cookbook.data.formats import comparison
from cookbook.errors import ConfigError, DataError, RolloutError
from cookbook.futures import Future
from cookbook.protocols import Sampler
from cookbook.sampling.rewards.builtin import Limits
from cookbook.types import JsonObject

ASSISTANT = "assistant"


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to one conversation, of which the model chooses the better one."""

    conversation: Sequence[JsonObject]
    first: str
    second: str

    @property
    def key(self) -> str:
        """Text that is equal for equal questions."""
        return json.dumps([list(self.conversation), self.first, self.second], default=str)


class PreferenceModel:
    """The weights of a preference model, and the questions that wait to be computed together.

    ``chat``: the model has learned from conversations, else from plain text.
    """

    def __init__(self, sampler: Sampler, renderer: Renderer, *, chat: bool) -> None:
        self._sampler, self._renderer, self._chat = sampler, renderer, chat
        # Sampling ahead and an evaluation ask in different threads, and the questions of one must not join those of the other:
        # float sums depend on the other sequences of a pass.
        self._open = threading.local()

    def ask(self, questions: Sequence[AnswerPair]) -> Callable[[], Mapping[str, float]]:
        """Add questions to the batch of this thread, which is computed when a result of it is first read.

        Return a function that waits, and returns the probability of the first answer, ``p(A) / (p(A) + p(B))``, by key.

        Raises:
            RolloutError: a question does not fit into the context; raised by the function.
        """
        batch: _PairBatch = self._open.__dict__.setdefault("batch", _PairBatch())
        batch.questions |= {question.key: question for question in questions}

        def answers() -> Mapping[str, float]:
            if not batch.answers:
                self._open.__dict__.pop("batch", None)
                # In an order that does not depend on which completion has ended first.
                batch.answers |= self._answers([batch.questions[key] for key in sorted(batch.questions)])
            result = {}
            for question in questions:
                answer = batch.answers[question.key]
                if isinstance(answer, RolloutError):
                    raise answer
                result[question.key] = answer
            return result

        return answers

    def _answers(self, questions: Sequence[AnswerPair]) -> dict[str, float | RolloutError]:
        """Return the probability of the first answer to each question, or why it has none."""
        # All requests before the first result: they are computed together.
        pending = {question.key: self._submit(question) for question in questions}
        answers: dict[str, float | RolloutError] = {}
        for key, requests in pending.items():
            if isinstance(requests, RolloutError):
                answers[key] = requests
            else:
                a, b = (request.result()[-1] for request in requests)
                assert a is not None and b is not None
                answers[key] = _logistic(a - b)
        return answers

    def _submit(self, question: AnswerPair) -> Sequence[Future[list[float | None]]] | RolloutError:
        """Start to compute the log-probabilities of both letters."""
        examples = [
            comparison("comparison", question.conversation, (question.first, question.second), better, chat=self._chat)
            for better in range(len(comparisons.LETTERS))
        ]
        first, second = (rendered.tokens for rendered in self._renderer.render(examples))
        # The two sequences differ first in the token of the letter. All tokens before it are equal.
        place = next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        limit = self._renderer.max_length
        if limit is not None and place + 1 > limit:
            return RolloutError(
                f"a comparison has {place + 1:,} tokens, and the context of the reward model has {limit:,}; lower "
                "rollout.max_tokens and eval.max_tokens, or choose another reward.model"
            )
        return [self._sampler.compute_logprobs([*first[:place], tokens[place]]) for tokens in (first, second)]


@dataclass
class _PairBatch:
    """Questions by key, and their answers as soon as they are computed."""

    questions: dict[str, AnswerPair] = field(default_factory=dict)
    answers: dict[str, float | RolloutError] = field(default_factory=dict)


@dataclass(frozen=True)
class Compare(Limits):
    """Win rate of a completion: the mean probability that it is better than another completion of its group.

    The preference model ``model`` gives the probability of the letter A against B, in both orders of the two answers:

        w_ij = (p(A | i, j) + p(B | j, i)) / 2            R_i = mean of w_ij over j != i

    The model is a run of SFT on comparisons, a checkpoint, a model folder or a hub id, or on the server at ``url``. Equal
    answers have w = 0.5. A completion alone in its group, as in an evaluation, is compared with the row's answer in the column
    ``against``.

    Raises:
        ConfigError: an invalid field.
    """

    model: str
    url: str | None = field(default=None, repr=False)
    against: str = "chosen"
    answer_only: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers:
            raise ConfigError(f"reward.workers={self.workers}: the reward model has its own thread; remove the key")
        if not self.model:
            raise ConfigError("reward.model: missing; give a run of recipe=sft data.format=comparisons, or a model")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.url: expected http://host:port or https://..., got {self.url!r}")

    def connect(self, sampler: Sampler, renderer: Renderer, *, chat: bool) -> None:
        """Use the weights of ``sampler``, which the run has loaded, for all later calls."""
        object.__setattr__(self, "_preferences", PreferenceModel(sampler, renderer, chat=chat))

    def check_held_out(self, row: JsonObject) -> None:
        """Raise ConfigError if a held-out row has no answer to compare a completion with."""
        if row.get(self.against) is None:
            raise ConfigError(
                f'reward.against: held-out rows have no column "{self.against}", and an evaluation compares each completion '
                f"with an answer of its row; choose one of {', '.join(row) or 'none'}, or set data.eval_path=null"
            )

    def __call__(
        self, group: Sequence[str], prompt: object, row: JsonObject, trajectory: Sequence[Sequence[JsonObject]]
    ) -> list[float]:
        """Return the win rate of every completion."""
        return self.start(group=group, prompt=prompt, row=row, trajectory=trajectory)()

    def start(
        self, *, group: Sequence[str], prompt: object, row: JsonObject, trajectory: Sequence[Sequence[JsonObject]]
    ) -> Callable[[], list[float]]:
        """Start to compute the win rates of a group. The groups of a step are computed together.

        Raises:
            DataError: a completion is alone in its group, and the row has no answer.
        """
        attempts = list(trajectory)
        if len(group) == 1:
            attempts.append([*attempts[0][: _prompt_length(attempts[0], prompt)], *self._other(row)])
        orders = itertools.permutations(range(len(attempts)), 2)
        questions = {order: _question(*(attempts[place] for place in order)) for order in orders}
        preferences: PreferenceModel = self.__dict__["_preferences"]
        # Equal answers are as good as each other in any order.
        answers = preferences.ask([question for question in questions.values() if question.first != question.second])
        return lambda: [_win_rate(place, len(attempts), questions, answers()) for place in range(len(group))]

    def _other(self, row: JsonObject) -> Sequence[JsonObject]:
        """Return the answer of the row as messages."""
        value = row.get(self.against)
        if value is None:
            raise DataError(f'no column "{self.against}", the row has {", ".join(row) or "none"}; set reward.against')
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            # A whole conversation ends with its answer.
            value = value[-1].get("content", "")
        return [{"role": ASSISTANT, "content": str(value)}]


def _win_rate(
    place: int, count: int, questions: Mapping[tuple[int, int], AnswerPair], first_wins: Mapping[str, float]
) -> float:
    """Return the mean probability that an attempt is better than each of the others."""
    wins = []
    for other in range(count):
        if other != place:
            forth, back = (first_wins.get(questions[order].key, 0.5) for order in ((place, other), (other, place)))
            wins.append((forth + 1 - back) / 2)
    return math.fsum(wins) / len(wins)


def _question(first: Sequence[JsonObject], second: Sequence[JsonObject]) -> AnswerPair:
    """Return both attempts without the messages that they share, from an answer on."""
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    # Both continue with an answer of the model, of at least one message.
    start = min(shared, len(first) - 1, len(second) - 1)
    while start > 0 and not (_role(first[start]) == _role(second[start]) == ASSISTANT):
        start -= 1
    return AnswerPair(first[:start], comparisons.answer_text(first[start:]), comparisons.answer_text(second[start:]))


def _prompt_length(messages: Sequence[JsonObject], prompt: object) -> int:
    """Return the number of messages before the first answer of the model."""
    least = len(prompt) if isinstance(prompt, list) else 0
    return next((at for at in range(least, len(messages)) if _role(messages[at]) == ASSISTANT), len(messages) - 1)


def _role(message: JsonObject) -> object:
    return message.get("role")


def _logistic(value: float) -> float:
    """Return ``1 / (1 + exp(-value))`` without overflow."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
