"""What the server does and holds, counted: for Prometheus, and for the line on the terminal."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cookbook.server.futures import Answer
    from cookbook.server.results import Result
    from cookbook.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = list[tuple[tuple[tuple[str, str], ...], float]]
_KIB = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in


class Metrics:
    """Counters since the start. What is there at a moment is asked of the service then."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self.answers: Counter[tuple[str, str]] = Counter()  # by kind of work, and done or failed
        self.seconds: defaultdict[str, float] = defaultdict(float)  # from acceptance to result, by kind of work
        self.trained_tokens = 0
        self.sampled_tokens = 0

    def settled(self, answer: Answer, result: Result) -> None:
        self.answers[answer.kind, "failed" if result.is_failure else "done"] += 1
        self.seconds[answer.kind] += time.monotonic() - answer.asked

    def exposition(self, service: Service) -> str:
        """Everything in Prometheus' text format."""
        lines: list[str] = []
        for name, kind, help_text, samples in self._families(service):
            lines += [f"# HELP cookbook_{name} {help_text}", f"# TYPE cookbook_{name} {kind}"]
            for labels, value in samples:
                shown = ",".join(f'{key}="{text}"' for key, text in labels)
                lines.append(f"cookbook_{name}{{{shown}}} {value}" if shown else f"cookbook_{name} {value}")
        return "\n".join(lines) + "\n"

    def _families(self, service: Service) -> Iterator[tuple[str, str, str, Samples]]:
        def one(value: float) -> Samples:
            return [((), value)]

        requests = _labelled(("route", "status"), self.requests)
        answers = _labelled(("kind", "outcome"), self.answers)
        seconds = _labelled(("kind",), {(kind,): total for kind, total in self.seconds.items()})
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        yield "http_requests_total", "counter", "HTTP requests answered.", requests
        yield "calls_total", "counter", "Calls that have their result.", answers
        yield "call_seconds_total", "counter", "Seconds from a call's acceptance to its result.", seconds
        yield "trained_tokens_total", "counter", "Tokens of forward and backward passes.", one(self.trained_tokens)
        yield "sampled_tokens_total", "counter", "Tokens drawn.", one(self.sampled_tokens)
        yield "calls_pending", "gauge", "Calls accepted and not answered yet.", one(service.answers.pending)
        yield "sessions", "gauge", "Clients connected.", one(len(service.sessions))
        yield "training_runs", "gauge", "Training runs in memory.", one(len(service.runs))
        yield "samplers", "gauge", "Sampling sessions in memory.", one(len(service.samplers))
        yield "samplers_let_go_total", "counter", "Sampling sessions that lost their weights.", one(service.samplers.num_let_go)
        yield "sampler_bytes", "gauge", "Weights of sampling sessions.", one(service.samplers.num_bytes)
        yield "answers", "gauge", "Calls that may be asked for again.", one(len(service.answers))
        yield "pending_bytes", "gauge", "Requests that wait for their results.", one(service.answers.pending_bytes)
        yield "log_bytes", "gauge", "Logs on the disk, states aside.", one(service.log_bytes)
        yield "result_bytes", "gauge", "Results kept for clients that ask again.", one(service.answers.kept_bytes)
        yield "graph_bytes", "gauge", "Forward passes kept for a backward pass.", one(service.host.graphs.num_bytes)
        yield "memory_peak_bytes", "gauge", "The most memory the process has held.", one(memory)
        yield "uptime_seconds", "gauge", "Since the start.", one(time.monotonic() - self.started)


def _labelled(names: Sequence[str], counted: Mapping[Any, float]) -> Samples:
    return [(tuple(zip(names, key, strict=True)), value) for key, value in sorted(counted.items())]
