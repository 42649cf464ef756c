"""Asking a sampler for a whole batch where single requests may fail: some are made again, some left out, some end the run."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cookbook.errors import RolloutError, SampleRefusedError, SamplerUnavailableError
from cookbook.futures import Future
from cookbook.types import Sample, SampleResponse

Request = Callable[[], Future[SampleResponse]]
Arrived = Callable[[int, list[Sample]], None]

PASSING = (SamplerUnavailableError, ConnectionError, TimeoutError)  # the same request may be answered when it is made again
ONLY_THIS = (SampleRefusedError,)  # it may not, but others may
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0  # before failed requests are made again


@dataclass(frozen=True)
class Unanswered:
    """What a batch has not got: the errors of the requests that were given up, by place, and how often one was made again."""

    failed: Mapping[int, Exception] = field(default_factory=dict)
    num_retries: int = 0


class Asker:
    """Makes requests, and makes those again that failed for a reason that may pass.

    A request has its own seed, so its answer is the same at whichever attempt it comes. Failures in a row are counted in the
    order of the requests, from one batch to the next: what a run does depends on which requests fail, and not on when.

    Args:
        retries: how often a request is made again before it is given up.
        max_consecutive_failures: so many failures one after the other end the run.
    """

    def __init__(self, retries: int, max_consecutive_failures: int) -> None:
        self._retries = retries
        self._breaker = _Breaker(max_consecutive_failures)

    def ask(self, requests: Sequence[Request], arrived: Arrived) -> Unanswered:
        """Makes all of ``requests`` before it waits for any. ``arrived`` gets the samples of each as soon as they are there.

        While not one is answered, they are made again and again: a batch without any samples is of no use.

        Raises:
            RolloutError: too many failures in a row; every request was refused; or one failed for a reason that neither
                passes nor is its own.
        """
        given_up: dict[int, Exception] = {}
        waiting, num_retries = list(range(len(requests))), 0
        for attempt in itertools.count():
            failed = self._round({place: requests[place] for place in waiting}, arrived)
            given_up |= {place: error for place, error in failed.items() if isinstance(error, ONLY_THIS)}
            waiting = [place for place in failed if place not in given_up]
            unheard = len(waiting) + len(given_up) == len(requests)
            if not waiting or (attempt >= self._retries and not unheard):
                break
            num_retries += len(waiting)
            time.sleep(min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S))
        given_up |= {place: failed[place] for place in waiting}
        if requests and len(given_up) == len(requests):
            raise RolloutError(f"sampling: all {len(requests)} requests were refused; the first: {given_up[min(given_up)]}")
        return Unanswered(dict(sorted(given_up.items())), num_retries)

    def _round(self, requests: Mapping[int, Request], arrived: Arrived) -> dict[int, Exception]:
        """Makes each request once. The errors of those that failed, in the order of the requests."""
        places: dict[concurrent.futures.Future[SampleResponse], int] = {}
        for place, request in requests.items():
            places[_made(request)] = place
        in_order = deque(places)
        failed = {}
        for future in concurrent.futures.as_completed(places):
            if future.exception() is None:
                arrived(places[future], future.result().sequences)
            while in_order and in_order[0].done():
                first = in_order.popleft()
                if (error := self._breaker.told(first.exception())) is not None:
                    failed[places[first]] = error
        return failed


class _Breaker:
    """Ends the run when nothing but failures comes back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def told(self, error: BaseException | None) -> Exception | None:
        """Takes note of a request that was answered (None) or failed, and returns what it is given.

        Raises:
            BaseException: ``error`` itself, when it is not one to live with; or RolloutError after too many of them.
        """
        if error is None:
            self._in_a_row = 0
            return None
        if not isinstance(error, (*PASSING, *ONLY_THIS)):
            raise error
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise RolloutError(
                f"sampling: {self._in_a_row} requests in a row have failed, the last: {error}; mend the deployment and run the "
                "same command again, or raise rollout.max_consecutive_failures"
            )
        return error


def _made(request: Request) -> Future[SampleResponse]:
    """The future of a request, also of one that fails at once."""
    try:
        return request()
    except (*PASSING, *ONLY_THIS) as error:
        future: Future[SampleResponse] = Future()
        future.set_exception(error)
        return future
