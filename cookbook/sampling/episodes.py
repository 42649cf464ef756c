"""Episodes: attempts at prompts, of one turn, or of several in an environment.

Without an environment an episode is one completion, and all completions of a prompt are one request. With one, all episodes
advance in rounds: the completions of a round are sampled together, then the environment answers each of them.

    round 0   prompt + first observation -> completion -> answer of the environment
    round 1   ... the same tokens + answer -> completion -> answer
    ...       until the environment is done, or max_turns, or the context is full

The rounds make the batches of the sampler a function of the rows and seeds, not of the time, so that runs repeat bit for bit.
With ``env.lockstep=false`` each episode advances as soon as its own completion or answer has arrived, and its next completion
is part of the next batch.

A request that fails is retried, dropped with all episodes of its prompt, or ends the run.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cookbook.data import RenderedPrompt, Renderer
from cookbook.data.render import continues_text
from cookbook.data.turns import reasoning_tag
from cookbook.errors import ConfigError, DataError, RolloutError, SampleRefusedError, SamplerUnavailableError, shortened
from cookbook.futures import Future, LazyFuture, start_all
from cookbook.protocols import Sampler
from cookbook.sampling.environments.conversation import Transcript
from cookbook.sampling.environments.instance import EarnedReward, Reply
from cookbook.sampling.environments.runner import Episode, EpisodeRunner, Failure, Pending
from cookbook.sampling.rewards import PendingScores, RewardRunner, Score
from cookbook.sampling.trajectory import Segment, Trajectory
from cookbook.types import ModelInput, Sample, SampleResponse, SamplingParams

Request = Callable[[], Future[SampleResponse]]
Arrived = Callable[[int, list[Sample]], None]
Ended = Callable[[int, list[Trajectory]], None]

# The same request may succeed later.
TRANSIENT = (SamplerUnavailableError, ConnectionError, TimeoutError)
# The same request fails again; other requests may succeed.
PERMANENT = (SampleRefusedError,)
# Waits before retries, seconds.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0
# Tokens at the end of a prompt that may be a tag which opens the reasoning, and the line break after it.
OPENING_TOKENS = 16


@dataclass(frozen=True)
class FailedRequests:
    """The errors of a batch's dropped requests, by index, and the number of retries of the whole batch."""

    failed: Mapping[int, Exception]
    num_retries: int


class Retrier:
    """Makes sampling requests and retries those whose failure may be transient.

    A request has its own seed, so every attempt gives the same samples. Consecutive failures are counted across batches, in the
    order of the requests of :meth:`sample`: what a run does depends on which requests fail, and not on when they fail. Callers
    of :meth:`count` choose the order.

    Args:
        retries: of one request, before it is dropped.
        max_consecutive_failures: this many failures in a row end the run.
    """

    def __init__(self, retries: int, max_consecutive_failures: int) -> None:
        self._retries = retries
        self._max_consecutive_failures = max_consecutive_failures
        self._in_a_row = 0

    def sample(self, requests: Sequence[Request], arrived: Arrived, *, has_samples: bool = False) -> FailedRequests:
        """Make all ``requests``, then wait; ``arrived`` gets each request's index and samples as soon as they arrive.

        If no request of the batch has succeeded, retries do not count: a batch without samples is of no use. ``has_samples``:
        earlier requests of the same batch have succeeded.

        Raises:
            RolloutError: too many consecutive failures, or the sampler refused every request.
            Exception: an error of another kind than ``TRANSIENT`` and ``PERMANENT``.
        """
        dropped: dict[int, Exception] = {}
        waiting, num_retries = list(range(len(requests))), 0
        for attempt in itertools.count(1):
            failed = self._round({index: requests[index] for index in waiting}, arrived)
            some_succeeded = has_samples or len(failed) + len(dropped) < len(requests)
            waits = {index: self.wait_s(error, attempt, has_samples=some_succeeded) for index, error in failed.items()}
            dropped |= {index: failed[index] for index, wait_s in waits.items() if wait_s is None}
            waiting = [index for index in failed if index not in dropped]
            if not waiting:
                break
            num_retries += len(waiting)
            time.sleep(max(wait_s for wait_s in waits.values() if wait_s is not None))
        if requests and not has_samples and len(dropped) == len(requests):
            raise RolloutError(f"sampling: all {len(requests)} requests were refused; the first: {dropped[min(dropped)]}")
        return FailedRequests(dict(sorted(dropped.items())), num_retries)

    def _round(self, requests: Mapping[int, Request], arrived: Arrived) -> dict[int, Exception]:
        """Make each request once. Return the errors of the failed ones, in the order of the requests."""
        indices = {submitted(request): index for index, request in requests.items()}
        in_order = deque(indices)
        failed = {}
        start_all(indices)
        for future in concurrent.futures.as_completed(indices):
            if future.exception() is None:
                arrived(indices[future], future.result().sequences)
            while in_order and in_order[0].done():
                first = in_order.popleft()
                if (error := self.count(first.exception())) is not None:
                    failed[indices[first]] = error
        return failed

    def wait_s(self, error: Exception, num_failures: int, *, has_samples: bool) -> float | None:
        """Return the seconds until the next attempt of a request that has failed ``num_failures`` times; None: it is dropped.

        ``has_samples``: see :meth:`sample`.
        """
        if isinstance(error, PERMANENT) or (num_failures > self._retries and has_samples):
            return None
        return float(min(FIRST_WAIT_S * 2 ** (num_failures - 1), LONGEST_WAIT_S))

    def count(self, error: BaseException | None) -> Exception | None:
        """Count one finished request; None means success. Return the error.

        Raises:
            BaseException: ``error`` itself, if its kind is neither ``TRANSIENT`` nor ``PERMANENT``.
            RolloutError: too many consecutive failures.
        """
        if error is None:
            self._in_a_row = 0
            return None
        if not isinstance(error, (*TRANSIENT, *PERMANENT)):
            raise error
        self._in_a_row += 1
        if self._in_a_row >= self._max_consecutive_failures:
            raise RolloutError(
                f"sampling: {self._in_a_row} consecutive requests failed, the last with: {error}; fix the deployment and run "
                "the same command to resume, or raise rollout.max_consecutive_failures"
            )
        return error


def submitted(request: Request) -> concurrent.futures.Future[SampleResponse]:
    """Make a request and return its future; a request that raises gives a failed future."""
    try:
        return request()
    except (*TRANSIENT, *PERMANENT) as error:
        future: Future[SampleResponse] = Future()
        future.set_exception(error)
        return future


@dataclass(frozen=True)
class Draw:
    """``num_samples`` attempts at one prompt. ``params`` are those of the first turn; later turns have seeds of their own."""

    prompt: RenderedPrompt
    num_samples: int
    params: SamplingParams


@dataclass(eq=False)
class _Attempt:
    """An episode under way. ``waiting`` is the environment's answer to its last completion; ``ended`` says why it ended.

    ``conversation`` is that of the next turn. In self-play, it is the opponent's in every other turn, and ``own`` is the one
    that is trained. ``num_turns`` counts the turns of both.
    """

    draw: int
    number: int
    params: SamplingParams
    episode: Episode
    waiting: Pending[Reply]
    conversation: Transcript | None = None
    own: Transcript | None = None
    ended: str = ""
    num_own_turns: int = 0
    num_opponent_turns: int = 0
    calls: tuple[int, int, int] = (0, 0, 0)
    reward: Pending[EarnedReward | None] | None = None
    # Without lockstep: the requested completion of the next turn; the time from which it may be requested, None if it was or if
    # the environment has not answered yet; and how often the request has failed.
    requested: concurrent.futures.Future[SampleResponse] | None = None
    due_at: float | None = None
    num_failures: int = 0

    @property
    def num_turns(self) -> int:
        return self.num_own_turns + self.num_opponent_turns

    @property
    def awaited(self) -> concurrent.futures.Future[Any]:
        """The completion, answer or reward that the episode waits for."""
        return self.requested or (self.reward or self.waiting).future

    def add(self, sample: Sample) -> Segment:
        """Add the completion of a turn, and return it."""
        assert self.conversation is not None
        if self.conversation is self.own:
            self.num_own_turns += 1
        else:
            self.num_opponent_turns += 1
        return self.conversation.add(sample)

    def turn_params(self, context: int | None, *, own_seed: bool) -> SamplingParams:
        """Return the parameters of the next turn, with as many tokens as the context has left."""
        assert self.conversation is not None
        params = self.conversation.limited(self.params)
        if own_seed and params.seed is not None:
            state = np.random.SeedSequence((params.seed, self.number, self.num_turns)).generate_state(1, np.uint64)
            params = replace(params, seed=int(state[0]) >> 16)
        if context is not None:
            left = context - len(self.conversation.tokens)
            params = replace(params, max_tokens=left if params.max_tokens is None else min(left, params.max_tokens))
        return params

    def trajectory(self, error_reward: float | None) -> Trajectory:
        """Return the ended episode. One that the environment has ended by an error has ``error_reward``; None: no reward."""
        outcome = self.reward.result() if self.reward is not None else Failure("")
        failed = isinstance(outcome, Failure)
        # Without a completion of the trained side, a reward has nothing to score.
        if isinstance(outcome, Failure) or (outcome is None and not self.num_own_turns):
            outcome = None if error_reward is None else EarnedReward(error_reward)
        branches = self.own.branches if self.own is not None else ()
        ended = "error" if failed and self.ended not in ("error", "timeout") else self.ended
        reward, parts, by_turn = (None, {}, ()) if outcome is None else (outcome.value, outcome.parts, outcome.by_turn)
        return Trajectory(branches, ended, reward, *self.calls, parts=parts, turn_rewards=by_turn)


@dataclass(frozen=True)
class Episodes:
    """Plays and scores episodes. ``runner`` calls the reward; None: the environment gives it."""

    renderer: Renderer
    retrier: Retrier
    runner: RewardRunner | None = None
    environment: EpisodeRunner | None = None

    def play(self, sampler: Sampler, draws: Sequence[Draw], ended: Ended, *, has_samples: bool = False) -> FailedRequests:
        """Play all episodes of ``draws``; ``ended`` gets each draw's index and trajectories as soon as all of its episodes end.

        Returns the errors of the dropped draws. ``has_samples``: earlier draws of the same step have succeeded.

        Raises:
            RolloutError: see :class:`Retrier`; or the environment has failed, with ``env.on_error=fail``.
        """
        if self.environment is not None:
            return _EpisodeLoop(self, self.environment, sampler, draws, ended, has_samples=has_samples).play()

        def arrived(index: int, samples: list[Sample]) -> None:
            prompt = draws[index].prompt
            continues = continues_text(prompt.example)
            texts = [self.renderer.text(sample.tokens, continues=continues) for sample in samples]
            opened = reasoning_tag(self.renderer.printed(prompt.tokens[-OPENING_TOKENS:]))
            pairs = zip(samples, texts, strict=True)
            ended(index, [Trajectory.single(prompt.tokens, prompt.text, sample, text, opened) for sample, text in pairs])

        requests = [_request(sampler, draw.prompt.tokens, draw.num_samples, draw.params) for draw in draws]
        return self.retrier.sample(requests, arrived, has_samples=has_samples)

    @property
    def gamma(self) -> float | None:
        """Discount of the rewards of later turns; None: all turns have the credit of the whole episode."""
        return None if self.environment is None else self.environment.config.gamma

    def valid(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes to learn from and to evaluate: those that the environment has not ended by an error."""
        return list(trajectories) if self.environment is None else self.environment.valid(trajectories)

    def scores(self, prompt: RenderedPrompt, trajectories: Sequence[Trajectory]) -> PendingScores:
        """Start the calls of the reward for the trajectories that the environment gave none.

        Raises:
            ConfigError: there is no reward.
        """
        if self.environment is not None:
            self.environment.check_rewards(trajectories)
        unscored = [trajectory for trajectory in trajectories if trajectory.reward is None]
        if not unscored:
            scores = [_own_score(trajectory) for trajectory in trajectories]
            return lambda: scores
        if self.runner is None:
            raise ConfigError(
                "reward: the environment gives no reward and none is chosen; define get_reward, return (observation, reward) "
                "from every step, or choose one, for example reward=number"
            )
        pending = self.runner.submit_attempts(prompt, unscored)
        if len(unscored) == len(trajectories):
            return pending

        def result() -> list[Score]:
            called = iter(pending())
            return [next(called) if trajectory.reward is None else _own_score(trajectory) for trajectory in trajectories]

        return result


def _own_score(trajectory: Trajectory) -> Score:
    """Return the reward that the environment gave."""
    assert trajectory.reward is not None
    return Score(trajectory.reward, trajectory.parts, tuple(trajectory.turn_rewards))


class _EpisodeLoop:
    """The episodes of one call of :meth:`Episodes.play` with an environment: in rounds, or without lockstep each on its own."""

    def __init__(
        self,
        episodes: Episodes,
        environment: EpisodeRunner,
        sampler: Sampler,
        draws: Sequence[Draw],
        ended: Ended,
        *,
        has_samples: bool,
    ) -> None:
        self._renderer, self._retrier, self._environment = episodes.renderer, episodes.retrier, environment
        self._sampler, self._draws, self._ended = sampler, draws, ended
        self._attempts: list[_Attempt] = []
        # Draw and number of the attempts that have not begun.
        self._queued = deque((index, number) for index, draw in enumerate(draws) for number in range(draw.num_samples))
        self._has_samples = has_samples
        # The first observation of each draw.
        self._openings: dict[int, object] = {}
        self._failed: dict[int, Exception] = {}
        self._num_retries = 0
        self._waited_s = 0.0

    def play(self) -> FailedRequests:
        reported: set[int] = set()
        advance = self._round if self._environment.config.lockstep else self._advance
        while under_way := self._begin(self._under_way()):
            advance(under_way)
            unfinished = {attempt.draw for attempt in self._under_way()} | {index for index, _ in self._queued}
            reported |= self._tell(reported, unfinished - self._failed.keys())
        self._environment.report_wait(self._waited_s)
        if self._draws and not self._has_samples and len(self._failed) == len(self._draws):
            first = self._failed[min(self._failed)]
            raise RolloutError(f"sampling: requests of all {len(self._draws)} prompts were refused; the first: {first}")
        return FailedRequests(dict(sorted(self._failed.items())), self._num_retries)

    def _begin(self, waiting: list[_Attempt]) -> list[_Attempt]:
        """Begin as many attempts as the environment plays at a time. Return them with those that wait for an answer."""
        limit = self._environment.limit
        while self._queued and (limit is None or len(waiting) < limit):
            index, number = self._queued.popleft()
            if index not in self._failed:
                draw = self._draws[index]
                waiting.append(_Attempt(index, number, draw.params, *self._environment.begin(draw.prompt.row)))
                self._attempts.append(waiting[-1])
        return waiting

    def _under_way(self) -> list[_Attempt]:
        """Return the attempts that have not ended. Without lockstep, an attempt ends when its reward has arrived."""
        rewards = not self._environment.config.lockstep
        return [
            attempt
            for attempt in self._attempts
            if attempt.draw not in self._failed
            and (not attempt.ended or (rewards and attempt.reward and not attempt.reward.done()))
        ]

    def _round(self, attempts: Sequence[_Attempt]) -> None:
        """Wait for the answers to all attempts, then sample the next turn of those that continue."""
        started = half = time.monotonic()
        for count, _ in enumerate(concurrent.futures.as_completed([attempt.waiting.future for attempt in attempts]), 1):
            if 2 * count <= len(attempts) + 1:
                half = time.monotonic()
        # Answers at equal intervals count nothing: then every environment is slow, or the machine.
        self._waited_s += max(0.0, time.monotonic() - half - (half - started))
        for attempt in attempts:
            self._read(attempt)
        self._sample([attempt for attempt in attempts if not attempt.ended])

    def _advance(self, attempts: Sequence[_Attempt]) -> None:
        """Request the turns that are due, wait for a completion, answer or reward, and continue the attempts that got one."""
        seconds = self._request_due(attempts)
        awaited = [attempt.awaited for attempt in attempts if attempt.due_at is None]
        if awaited:
            start_all(awaited)
            concurrent.futures.wait(awaited, seconds, return_when=concurrent.futures.FIRST_COMPLETED)
        elif seconds:
            time.sleep(seconds)
        for attempt in attempts:
            if attempt.due_at is not None or not attempt.awaited.done():
                continue
            if attempt.requested is not None:
                self._completed(attempt, attempt.requested)
            # An environment of this process has answered its completion by now.
            is_dropped = attempt.draw in self._failed
            if not (is_dropped or attempt.ended or attempt.due_at is not None) and attempt.waiting.done():
                self._read(attempt)
                attempt.due_at = None if attempt.ended else 0.0

    def _request_due(self, attempts: Sequence[_Attempt]) -> float | None:
        """Request the turns that are due. Return the seconds until the next retry; None: no retry is to be awaited."""
        # The sampler computes requests that are made together as one batch, so the next ones are made after the batch.
        if any(isinstance(attempt.requested, LazyFuture) for attempt in attempts):
            return None
        now = time.monotonic()
        for attempt in attempts:
            if attempt.due_at is not None and attempt.due_at <= now:
                self._num_retries += attempt.num_failures > 0
                attempt.due_at, attempt.requested = None, submitted(self._turn([attempt]))
        return min((attempt.due_at - now for attempt in attempts if attempt.due_at is not None), default=None)

    def _completed(self, attempt: _Attempt, requested: concurrent.futures.Future[SampleResponse]) -> None:
        """Pass a completion to the environment. A request that has failed is due again later."""
        attempt.requested = None
        error = self._retrier.count(requested.exception())
        if error is None:
            attempt.num_failures = 0
            [sample] = requested.result().sequences
            attempt.waiting = self._environment.act(attempt.episode, attempt.add(sample))
            return
        attempt.num_failures += 1
        has_samples = self._has_samples or any(attempt.num_turns for attempt in self._attempts)
        wait_s = self._retrier.wait_s(error, attempt.num_failures, has_samples=has_samples)
        if wait_s is None:
            self._failed[attempt.draw] = error
        else:
            attempt.due_at = time.monotonic() + wait_s

    def _read(self, attempt: _Attempt) -> None:
        """Take the environment's answer: the attempt ends, or its next turn has a prompt."""
        reply = attempt.waiting.result()
        if isinstance(reply, Failure):
            attempt.ended = reply.ended
            self._environment.end(attempt.episode)
            return
        if attempt.conversation is None and self._environment.compares_openings:
            self._compare_openings(attempt, reply)
        calls, malformed, failed = attempt.calls
        attempt.calls = calls + reply.calls, malformed + reply.malformed_calls, failed + reply.failed_calls
        try:
            attempt.ended = self._continued(attempt, reply)
        except DataError as error:
            self._environment.unreadable(attempt.episode, error)
            attempt.ended = "error"
            self._environment.end(attempt.episode)
            return
        if attempt.ended:
            attempt.reward = self._environment.reward(attempt.episode)
            self._environment.end(attempt.episode)

    def _compare_openings(self, attempt: _Attempt, reply: Reply) -> None:
        """Compare the first observation with that of another episode of the row.

        Raises:
            ConfigError: the observations differ, so that the group would have several problems.
        """
        first = self._openings.setdefault(attempt.draw, reply.observation)
        if first != reply.observation:
            where = self._draws[attempt.draw].prompt.row.where
            raise ConfigError(
                f"env: two episodes of {where} begin with different observations, {shortened(repr(first))} and "
                f"{shortened(repr(reply.observation))}, and a group compares answers to one problem; draw in reset from "
                "random.Random(seed), or read the problem from the row"
            )

    def _continued(self, attempt: _Attempt, reply: Reply) -> str:
        """Add the answer to the conversation. Return why the episode ends, or nothing."""
        environment, prompt = self._environment, self._draws[attempt.draw].prompt
        if attempt.conversation is not None and reply.done:
            return "done"
        # An opponent that begins makes one turn more.
        limit = environment.config.max_turns + reply.opponent_moves
        if (attempt.num_opponent_turns if reply.opponent_moves else attempt.num_own_turns) >= limit:
            return "max_turns"
        attempt.conversation = environment.observe(attempt.episode, prompt, self._renderer, reply)
        if not reply.opponent_moves:
            attempt.own = attempt.conversation
        context = self._renderer.max_length
        return "context" if context is not None and len(attempt.conversation.tokens) >= context else ""

    def _sample(self, attempts: Sequence[_Attempt]) -> None:
        """Sample the next turn of the attempts, and pass the completions to the environment in the order of the attempts.

        Attempts of a draw that begin with the same prompt are one request, as without an environment.
        """
        turns: list[list[_Attempt]] = []
        for _, group in itertools.groupby(attempts, lambda attempt: (attempt.draw, attempt.num_turns)):
            same = list(group)
            first = same[0].conversation
            together = (
                same[0].num_turns == 0
                and all(attempt.conversation and first and attempt.conversation.tokens == first.tokens for attempt in same)
                and all(
                    attempt.turn_params(None, own_seed=False) == same[0].turn_params(None, own_seed=False) for attempt in same
                )
            )
            turns += [same] if together else [[attempt] for attempt in same]
        if not turns:
            return
        requests = [self._turn(members) for members in turns]
        completions: dict[_Attempt, Segment] = {}

        def arrived(index: int, samples: list[Sample]) -> None:
            for attempt, sample in zip(turns[index], samples, strict=True):
                completions[attempt] = attempt.add(sample)

        has_samples = self._has_samples or any(attempt.num_turns for attempt in self._attempts)
        result = self._retrier.sample(requests, arrived, has_samples=has_samples)
        self._num_retries += result.num_retries
        self._failed |= {turns[index][0].draw: error for index, error in result.failed.items()}
        for attempt in attempts:
            if attempt.draw in self._failed:
                continue
            attempt.waiting = self._environment.act(attempt.episode, completions[attempt])

    def _turn(self, members: Sequence[_Attempt]) -> Request:
        conversation = members[0].conversation
        assert conversation is not None
        # Requests of one draw need seeds of their own, unless the draw is one request.
        own_seed = len(members) < self._draws[members[0].draw].num_samples or members[0].num_turns > 0
        params = members[0].turn_params(self._renderer.max_length, own_seed=own_seed)
        return _request(self._sampler, conversation.tokens, len(members), params)

    def _tell(self, reported: set[int], open_draws: set[int]) -> set[int]:
        """Hand over the draws whose episodes have all ended, and drop those that failed. Return their indices."""
        over = [index for index in range(len(self._draws)) if index not in reported and index not in open_draws]
        for index in over:
            members = [attempt for attempt in self._attempts if attempt.draw == index]
            if index in self._failed:
                for attempt in members:
                    self._environment.end(attempt.episode)
            else:
                config = self._environment.config
                error_reward = config.error_reward if config.on_error == "end" else None
                self._ended(index, [attempt.trajectory(error_reward) for attempt in members])
        return set(over)


def _request(sampler: Sampler, tokens: Sequence[int], num_samples: int, params: SamplingParams) -> Request:
    return functools.partial(sampler.sample, ModelInput.from_ints(list(tokens)), num_samples, params)
