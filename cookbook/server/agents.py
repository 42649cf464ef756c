"""Agents: programs that call the policy by OpenAI's API. Each call is a turn of an episode.

The endpoint listens on the loopback interface. The base URL of a program contains a random key, which names its episode.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cookbook.data import RenderedPrompt, Renderer, Row
from cookbook.data.messages import parse_messages
from cookbook.data.render import completed_text
from cookbook.engine.decoding.requests import TokenChunk
from cookbook.errors import DataError
from cookbook.futures import done
from cookbook.sampling.environments.agent import AgentEnvironment
from cookbook.sampling.environments.capture import AgentCall, Capture
from cookbook.sampling.environments.instance import EarnedReward, Reply
from cookbook.sampling.environments.programs import Keeper, Program
from cookbook.sampling.environments.runner import Episode, EpisodeRunner, Failure, Pending, seed_of
from cookbook.sampling.trajectory import Segment
from cookbook.server.wire import openai, openai_results
from cookbook.server.wire.bodies import Refused
from cookbook.server.wire.encode import JSON
from cookbook.server.wire.openai import ChatBody, CompletionBody, InvalidField
from cookbook.server.wire.openai_results import Answer, ChatParts, CompletionParts, Head
from cookbook.types import JsonObject, Sample

log = logging.getLogger("cookbook")

LOOPBACK = "127.0.0.1"
EVENT_STREAM_TYPE = "text/event-stream"
MAX_BODY_BYTES = 64 << 20
# Seconds between two looks at the processes.
POLL_S = 0.01
# Fields of requests that the run decides.
RUN_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed")
ENDED_MESSAGE = "the rollout has ended: env.max_turns calls were answered, or the context is full"
EXPIRED_MESSAGE = "the rollout of this URL has ended"


@dataclass(frozen=True)
class Response:
    status: int
    body: str
    media_type: str = JSON


@dataclass(eq=False)
class Exchange:
    """One call of a program, and the response to it."""

    call: AgentCall
    fields: ChatBody | CompletionBody
    response: Future[Response] = field(default_factory=Future)

    def refuse(self, status: int, message: str) -> None:
        self.response.set_result(Response(status, json.dumps({"error": openai.error_object(message, status)})))

    def answer(self, renderer: Renderer, turn: Segment, prompt: list[int]) -> JsonObject:
        """Respond with a completion of ``prompt``. Return the message of the response."""
        fields, sample = self.fields, Sample(turn.tokens, turn.logprobs, turn.stop_reason or "stop")
        continues = not isinstance(fields, ChatBody) or fields.continues_answer
        text = completed_text(renderer, sample.tokens, fields.stop_strings, continues=continues)
        begun = openai_results.opening(renderer, fields, prompt)
        tools = fields.callable_tools if isinstance(fields, ChatBody) else ()
        said = openai_results.message(begun + text, tools, channels=renderer.has_channels)
        answer = Answer(prompt, [sample])
        if fields.stream:
            self.response.set_result(Response(200, _stream(renderer, fields, answer, turn.step), EVENT_STREAM_TYPE))
            return said
        if isinstance(fields, ChatBody):
            body = openai_results.chat(renderer, fields, _head(fields, turn.step), answer)
        else:
            body = openai_results.completions(renderer, fields, _head(fields, turn.step), [answer])
        self.response.set_result(Response(200, json.dumps(body)))
        return said


def _head(fields: ChatBody | CompletionBody, step: int) -> Head:
    if isinstance(fields, ChatBody):
        return Head("chatcmpl", f"chat.completion{'.chunk' * fields.stream}", fields.model, f"step-{step}")
    return Head("cmpl", "text_completion", fields.model, f"step-{step}")


def _stream(renderer: Renderer, fields: ChatBody | CompletionBody, answer: Answer, step: int) -> str:
    """Return the events of a stream, which has the whole completion in one part."""
    head, [sample] = _head(fields, step), answer.sequences
    chunk = TokenChunk(0, sample.tokens, sample.logprobs, sample.stop_reason)
    parts = ChatParts(renderer, fields, answer.prompt) if isinstance(fields, ChatBody) else CompletionParts(renderer, fields, 1)
    choices = [*parts.opening(), *filter(None, [parts.next(0, chunk)])]
    events = [head.response([choice]) for choice in choices]
    if fields.stream_options is not None and fields.stream_options.include_usage:
        events.append(head.response([], openai_results.usage([answer])))
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@dataclass(eq=False)
class ProgramSession:
    """The calls of one program. All fields but ``episode``, ``capture`` and ``call`` belong to the lock of the runner.

    Attributes:
        waiting: gets the next call, or how the program has ended.
        current: the call that is being answered; None if its program has ended.
        call: the newest call that the episode knows.
        deadline: time at which the program has to call or end; None while a call waits for the model.
        is_over: further calls are refused.
        ended: how the program has ended; None while it runs.
    """

    episode: Episode
    capture: Capture
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    program: Program | None = None
    calls: deque[Exchange] = field(default_factory=deque)
    waiting: Future[JsonObject] = field(default_factory=Future)
    current: Exchange | None = None
    call: AgentCall | None = None
    deadline: float | None = None
    is_over: bool = False
    ended: JsonObject | None = None
    num_calls: int = 0

    def offer(self) -> None:
        """Pass the next call, or the end, to the caller that waits for it."""
        if self.waiting.done():
            return
        if self.calls and self.ended is None and not self.is_over:
            self.deadline = None
            self.current = self.calls.popleft()
            self.waiting.set_result({"call": self.current.call})
        elif self.ended is not None:
            self.waiting.set_result(self.ended)

    def refuse_all(self, status: int, message: str) -> None:
        for exchange in (*([] if self.current is None else [self.current]), *self.calls):
            exchange.refuse(status, message)
        self.current = None
        self.calls.clear()


class AgentRunner(EpisodeRunner):
    """Plays episodes of programs. ``renderer`` belongs to the thread that plays."""

    compares_openings = False

    def __init__(self, config: AgentEnvironment, renderer: Renderer) -> None:
        super().__init__(config)
        self._config = config
        self._renderer = renderer
        self.limit = config.workers
        self._changed = threading.Condition()
        # By the key of the URL, those whose program runs.
        self._running: dict[str, ProgramSession] = {}
        self._sessions: dict[int, ProgramSession] = {}
        self._is_closed = False
        self._keeper = Keeper()
        self._http = _Server(self)
        self._threads = [
            threading.Thread(target=target, daemon=True, name="agents") for target in (self._watch, self._http.serve_forever)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, row: Row) -> tuple[Episode, Pending[Reply]]:
        """Start the program of an episode, as soon as fewer than ``env.workers`` run."""
        episode = Episode(next(self._numbers), row)
        session = self._sessions[episode.number] = ProgramSession(episode, Capture(self._renderer))
        try:
            words = self._config.words_for(row.values)
        except (TypeError, ValueError) as error:
            problem = {"failure": f"the row cannot be passed to the program ({error}); change the row", "fatal": True}
            return episode, Pending(done(problem), lambda answer: self._reply(session, answer))
        with self._changed:
            self._changed.wait_for(lambda: len(self._running) < self._config.workers)
            try:
                session.program = Program(words, self._variables(session), self._keeper)
            except OSError as error:
                session.ended = {"failure": f"the program cannot be started ({error}); fix env.command"}
            else:
                self._running[session.key] = session
                self._expect(session)
            session.offer()
        return episode, self._pending(session)

    def observe(self, episode: Episode, prompt: RenderedPrompt, renderer: Renderer, reply: Reply) -> Capture:
        """Add the current call to the tokens of the episode, and return them."""
        session = self._sessions[episode.number]
        assert session.call is not None
        session.capture.observe(session.call)
        return session.capture

    def act(self, episode: Episode, turn: Segment) -> Pending[Reply]:
        """Answer the current call with a completion. Return the next call, or the end of the program."""
        session = self._sessions[episode.number]
        with self._changed:
            exchange, session.current = session.current, None
        if exchange is not None:
            tokens = session.capture.tokens
            prompt = list(tokens[: max(0, len(tokens) - len(turn.tokens))])
            session.capture.answered(exchange.answer(self._renderer, turn, prompt))
        with self._changed:
            session.waiting = Future()
            if session.ended is None:
                self._expect(session)
            session.offer()
        return self._pending(session)

    def reward(self, episode: Episode) -> Pending[EarnedReward | None]:
        """Return the reward that the program prints at its end. A program that still runs has no more calls."""
        session = self._sessions[episode.number]
        with self._changed:
            was_running = session.ended is None
            if was_running:
                session.is_over = True
                session.refuse_all(400, ENDED_MESSAGE)
                session.waiting = Future()
                self._expect(session)
                session.offer()

        def read(answer: JsonObject) -> EarnedReward | Failure | None:
            if not self._config.prints_reward:
                return None
            if "failure" in answer and was_running:
                # The refusal is the reason of the end, even if the program has reported another one.
                return EarnedReward(self._config.error_reward)
            return self._failure(episode, answer) if "failure" in answer else _reward_of(answer["printed"])

        return Pending(session.waiting, read)

    def end(self, episode: Episode) -> None:
        """Stop the program, unless its reward is awaited."""
        session = self._sessions.pop(episode.number, None)
        if session is not None and not session.is_over:
            self._stop(session, {"failure": EXPIRED_MESSAGE})

    def close(self) -> None:
        self._is_closed = True
        for session in list(self._running.values()):
            self._stop(session, {"failure": EXPIRED_MESSAGE})
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
        self._keeper.close()

    # ---- calls of other threads -------------------------------------------------------------------------------------

    def submit(self, key: str, exchange: Exchange) -> Response:
        """Wait for the response to a call. Raises Refused: its rollout has ended."""
        with self._changed:
            session = self.session(key)
            if session.is_over:
                raise Refused(400, ENDED_MESSAGE)
            session.num_calls += 1
            session.calls.append(exchange)
            session.offer()
        self._note_decided(exchange.fields)
        return exchange.response.result()

    def session(self, key: str) -> ProgramSession:
        """Return the session of a URL. Raises Refused (404): none has this key."""
        session = self._running.get(key)
        if session is None:
            raise Refused(404, EXPIRED_MESSAGE)
        return session

    def _watch(self) -> None:
        """Notice programs that have ended, and stop those that exceed their time."""
        while not self._is_closed:
            for session in list(self._running.values()):
                with self._changed:
                    # Another thread may have stopped it, and closed the files that an outcome is read from.
                    if session.key in self._running:
                        self._end_if_over(session)
            time.sleep(POLL_S)

    def _end_if_over(self, session: ProgramSession) -> None:
        assert session.program is not None
        code = session.program.exit_code()
        if code is not None:
            self._stop(session, self._outcome(session, session.program, code))
        elif session.deadline is not None and time.monotonic() > session.deadline:
            limit = f"{self._config.timeout_s:g} s"
            message = f"the program has neither called the model nor ended in {limit}; fix it, or raise env.timeout_s"
            self._stop(session, {"failure": message, "ended": "timeout"})

    def _outcome(self, session: ProgramSession, program: Program, code: int) -> JsonObject:
        """Return the end of a program that has ended by itself."""
        if code:
            said = program.last_error()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return {"failure": f"the program has ended with {how}" + (f": {said}" if said else "")}
        if not session.num_calls:
            return {"failure": "the program has ended without a call of the model; it has to use OPENAI_BASE_URL"}
        printed = program.last_line()
        if self._config.prints_reward and _reward_of(printed) is None:
            expected = 'its last line has to be a number or {"reward": number}; or set env.prints_reward=false and reward=...'
            return {"failure": f"the program has printed no reward, but {printed[:100]!r}; {expected}"}
        return {"printed": printed}

    def _stop(self, session: ProgramSession, ended: JsonObject) -> None:
        """End a session. Of several ends, the first counts."""
        with self._changed:
            if self._running.pop(session.key, None) is None:
                return
            assert session.program is not None
            session.program.close()
            session.ended = ended
            session.refuse_all(404, EXPIRED_MESSAGE)
            session.offer()
            self._changed.notify_all()

    # ---- details ----------------------------------------------------------------------------------------------------

    def _expect(self, session: ProgramSession) -> None:
        limit = self._config.timeout_s
        session.deadline = None if limit is None else time.monotonic() + limit

    def _pending(self, session: ProgramSession) -> Pending[Reply]:
        return Pending(session.waiting, lambda answer: self._reply(session, answer))

    def _reply(self, session: ProgramSession, answer: JsonObject) -> Reply | Failure:
        if "failure" in answer:
            return self._failure(session.episode, answer)
        session.call = answer.get("call")
        return Reply(None if session.call is None else session.call.prompt, done=session.call is None)

    def _variables(self, session: ProgramSession) -> Mapping[str, str]:
        """Return the variables of the environment of a program."""
        row = session.episode.row
        direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK]))
        return {
            "OPENAI_BASE_URL": f"http://{LOOPBACK}:{self._http.server_port}/{session.key}/v1",
            "OPENAI_API_KEY": session.key,
            "COOKBOOK_SEED": str(row.values.get("seed", seed_of(row))),
            # The order of sets of text would differ between runs.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            "NO_PROXY": direct,
            "no_proxy": direct,
        }

    def _note_decided(self, fields: ChatBody | CompletionBody) -> None:
        """Log once which fields of requests have no effect."""
        for name in sorted(fields.model_fields_set.intersection(RUN_FIELDS)):
            if name not in self._said:
                self._said.add(name)
                where = "the run's seed" if name == "seed" else f"rollout.{name}"
                log.warning("env: the program sends %s=%s, which has no effect; %s decides", name, getattr(fields, name), where)


def _reward_of(line: str) -> EarnedReward | None:
    """Return the reward that a program has printed; None if the line has none."""
    try:
        printed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    values = printed if isinstance(printed, dict) else {"reward": printed}
    numbers = {
        name: float(value) for name, value in values.items() if isinstance(value, int | float) and abs(value) < float("inf")
    }
    if "reward" not in numbers or len(numbers) < len(values):
        return None
    value = numbers.pop("reward")
    return EarnedReward(value, numbers)


# ---- HTTP --------------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, agents: AgentRunner) -> None:
        self.agents = agents
        super().__init__((LOOPBACK, 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that break: the end of the program says more."""
        log.debug("env: a connection of a program broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def do_GET(self) -> None:
        self._respond(self._models)

    def do_POST(self) -> None:
        self._respond(self._complete)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the calls are recorded."""

    def _respond(self, response_to: Callable[[str, str], Response]) -> None:
        _, key, path = [*self.path.partition("?")[0].split("/", 2), "", ""][:3]
        try:
            response = response_to(key, f"/{path}")
        except Refused as error:
            parameter, code = (error.field, error.code) if isinstance(error, InvalidField) else (None, None)
            body = {"error": openai.error_object(str(error), error.status, parameter, code)}
            response = Response(error.status, json.dumps(body))
        content = response.body.encode()
        self.send_response(response.status)
        self.send_header("Content-Type", response.media_type)
        self.send_header("Content-Length", str(len(content)))
        # The client shall not repeat a request: it would be another turn.
        self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(content)

    def _models(self, key: str, path: str) -> Response:
        self.server.agents.session(key)
        entry = {"id": path.removeprefix("/v1/models/"), "object": "model", "created": 0, "owned_by": "cookbook"}
        if path == "/v1/models":
            return Response(200, json.dumps({"object": "list", "data": [{**entry, "id": "policy"}]}))
        if path.startswith("/v1/models/"):
            return Response(200, json.dumps(entry))
        raise Refused(404, f"unknown path {path}")

    def _complete(self, key: str, path: str) -> Response:
        body = self._body()
        self.server.agents.session(key)
        if path == "/v1/chat/completions":
            return self.server.agents.submit(key, _chat(body))
        if path == "/v1/completions":
            return self.server.agents.submit(key, _completion(body))
        raise Refused(404, f"unknown path {path}; env=agent answers /v1/chat/completions, /v1/completions and /v1/models")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise Refused(413, f"expected a Content-Length of at most {MAX_BODY_BYTES} bytes, got {length or 'none'}")
        return self.rfile.read(int(length))


def _chat(body: bytes) -> Exchange:
    fields = openai.parse(ChatBody, body)
    _check_recorded(fields, "top_logprobs", fields.top_logprobs)
    # The role developer replaces system in newer versions of OpenAI's API.
    messages = [{**message, "role": "system"} if message.get("role") == "developer" else message for message in fields.messages]
    try:
        parse_messages(messages, "request", "messages")
    except DataError as error:
        raise InvalidField("messages", str(error)) from None
    tools = tuple(fields.tools) if fields.may_call else ()
    max_tokens = fields.max_completion_tokens or fields.max_tokens
    return Exchange(AgentCall(messages, tools, max_tokens, fields.stop_strings, fields.template_options), fields)


def _completion(body: bytes) -> Exchange:
    fields = openai.parse(CompletionBody, body)
    if not isinstance(fields.prompt, str):
        raise InvalidField("prompt", "a training rollout records one text per call; send one text, not a list")
    _check_recorded(fields, "echo", fields.echo)
    _check_recorded(fields, "logprobs", fields.logprobs)
    if not fields.max_tokens:
        raise InvalidField("max_tokens", "expected at least 1, got 0")
    return Exchange(AgentCall(fields.prompt, max_tokens=fields.max_tokens, stop=fields.stop_strings), fields)


def _check_recorded(fields: ChatBody | CompletionBody, name: str, value: object) -> None:
    """Raise InvalidField: the fields ask for something that a training rollout does not give."""
    if value:
        raise InvalidField(name, f"has no support in a training rollout, got {json.dumps(value)}; leave it out")
    if fields.n > 1:
        raise InvalidField("n", f"a training rollout records one completion per call, got {fields.n}; make several calls")
